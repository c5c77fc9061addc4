"""Give the frozen prefix's activations: from the store where it can, else by running the layers.

The depth at which a sample's row was found decides what happens, f being the depth wanted:

    found at depth    name                what is run          what is read
    f                 hit                 nothing              row
    0 < d < f         upgrade             layers d..f-1        row, then overwritten in place
    none              miss                layers 0..f-1        dataset, then stored

Layers always run on chunks of one fixed number of samples. So a sample's numbers do not depend on
how many others missed with it. Where the kernels give a sample the same bits at every place of a
chunk, cached equals uncached bit by bit; else to rounding. A chunk costs the same however few
samples it serves, so samples of several depths run together from where they meet:

    misses ── layers 0, 1 ──┬── layers 2, 3 ──┬── layer 4 ──
               found at 2 ──┘    found at 4 ──┘

A row is of use only while the dataset gives the same sample again. So some of the rows that are
read are checked: the dataset is asked for the sample, and its digest is compared with the row's.
One difference condemns the store: no process reads it any more, and the fetch starts over without
rows. Beside a GPU a thread compares, and the next fetch learns the result.

Source: AutoCache, PipeTransformer section 3.4. Ours never asks the dataset for a sample that hits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore
from autocache.prefix_chunks import (
    NO_ROW,
    NOTHING,
    ChunkedLayers,
    FoundSamples,
    LoadedSamples,
    RunLayers,
    SampleRows,
    each_once,
    filling,
    one_each,
    place,
    room_in_chunks,
    select,
)
from autocache.prefix_rows import PrefixRows
from autocache.row_content import DIGEST, HIDDEN, RowContent, check_kept
from autocache.row_reader import reader_of
from autocache.sample_checks import SampleChecks

Load: TypeAlias = Callable[[Tensor], dict[str, Tensor]]


@dataclass
class CacheStats:
    """Count samples and seconds of fetches.

    Attributes:
        hits, upgrades, misses: samples, each counted as one of them.
        ahead: samples computed for fetches to come, which then count them as hits.
        seconds: reading rows and moving them to the device, running layers (on CUDA, launching
            them) and writing rows, but not loading from the dataset.
    """

    hits: int = 0
    upgrades: int = 0
    misses: int = 0
    seconds: float = 0.0
    ahead: int = 0

    def count(self, found: Tensor, depth: int, num: int | None = None) -> None:
        """Count samples by the depths at which their rows were found.

        Args:
            num: how many are of this fetch, the first ones; None is all.
        """
        depths = found[:num].tolist()
        self.ahead += int((found[len(depths) :] < depth).sum())
        hits, misses = depths.count(depth), depths.count(0)
        self.hits += hits
        self.upgrades += len(depths) - hits - misses
        self.misses += misses

    def __add__(self, other: CacheStats) -> CacheStats:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return CacheStats(*(mine + theirs for mine, theirs in pairs))

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class _Usable:
    """Hold the rows of samples that were found; what they hold of others is undefined.

    `digests` are the rows' as well, empty where none was found.
    """

    samples: FoundSamples
    entries: dict[str, Tensor] = field(default_factory=dict)
    digests: Tensor = NOTHING[0]


class PrefixCache:
    """Fetch the frozen prefix's activations of any samples; one per process that feeds a stage 0.

    Args:
        run_layers: called with (batch, first, last) under `no_grad`, on `device`, always with
            `chunk_size` samples: from first = 0 with the dataset's entries, else with "hidden" and
            the kept entries. It puts the layers in eval mode itself.
        chunk_size: samples per call; the last chunk is padded with its last sample.
        store: of the content's layout; None computes every sample. It stays the caller's.
        stamps: of depths 1, 2, ..., as `chain_hash` gives them; read only where there is a store.
            The caller extends this list at a freeze and truncates it at a thaw.
        device: where layers run and results lie.
        known: digests of this run's samples, see `SampleChecks`; it changes as samples are read.
    Raises:
        ValueError: `chunk_size` is below 1.
    """

    def __init__(  # noqa: PLR0913 - what a fetch needs, and nothing of it belongs together
        self,
        run_layers: RunLayers,
        *,
        chunk_size: int,
        store: ActivationStore | None,
        stamps: Sequence[int],
        device: torch.device,
        content: RowContent,
        known: Tensor | None = None,
    ) -> None:
        self._layers = ChunkedLayers(run_layers, chunk_size, device=device)
        self._rows = PrefixRows(store, content, stamps)
        self._reader = None if store is None else reader_of(store, device=device)
        self._checks = SampleChecks(store, content, known)
        self._content, self._stats, self._reads = content, CacheStats(), 0

    def fetch(
        self,
        sample_ids: Tensor,
        load: Load,
        *,
        depth: int,
        row_ids: Tensor | None = None,
        keeps: bool = True,
        later: SampleRows = NOTHING,
    ) -> dict[str, Tensor]:
        """Return the activations after `depth` layers, and the kept entries, of the samples.

        Args:
            sample_ids: (B,) int64 on CPU, B >= 1; dataset indices, duplicates allowed.
            load: reads the dataset for (N,) ids, each once: first those that miss, in the order of
                the samples, then some to check. It returns all entries, (N, ...) each.
            depth: number of layers to have passed, at least 1.
            row_ids: (B,) int64, each sample's row in the store, out of its range for no row; None
                where they are the samples' ids.
            keeps: whether to store these samples; they may never be read again.
            later: samples of the fetches to come, the sooner first. Some may be computed now, and
                stored, so `load` must be able to read them.
        Returns:
            (B, ...) each, without grad: "hidden" on the device, and the kept entries in host
            memory. They are the caller's until the fetch after the next.
        Raises:
            ValueError: no ids, a depth out of range, or a loaded batch that does not fit the ids.
        """
        num = len(sample_ids)
        if depth < 1 or num < 1:
            raise ValueError(
                f"cannot fetch {num} samples at depth {depth}; give depth >= 1 and at "
                "least one id (for an empty micro-batch fetch any one id and slice [:0])"
            )
        own = (sample_ids, sample_ids if row_ids is None else row_ids)
        usable = self._read(self._filled_up(own, later, depth), num, depth)
        usable, loaded = self._load_samples(usable, load)
        entries = self._computed(usable, loaded, num, depth, keeps=keeps)
        self._stats.count(usable.samples.found, depth, num)
        return self._content.head(entries, num)

    def read_hits(
        self, sample_ids: Tensor, row_ids: Tensor, *, depth: int
    ) -> dict[str, Tensor] | None:
        """Read rows as `fetch` does, whose samples are compared by `holds`, later.

        Returns:
            what `fetch` returns, and the rows' digests; None where one of the samples misses.
        """
        num = len(sample_ids)
        samples = self._filled_up((sample_ids, row_ids), NOTHING, depth)
        usable = self._read(samples, num, depth)
        if not bool((usable.samples.found == depth).all()):
            return None
        self._reads += num
        self._stats.count(usable.samples.found, depth)
        entries, _ = self._content.align(usable.samples.found, usable.entries, {})
        return {**entries, DIGEST: usable.digests}

    def holds(self, sample_ids: Tensor, digests: Tensor, load: Load) -> bool:
        """Return whether the dataset gives samples of these (B,) digests; else no row is used.

        Beside a GPU a thread compares, and the next fetch learns the result.
        """
        loaded = self._load(load, each_once(sample_ids)[0])
        return self._checks.are_current(sample_ids, digests, loaded)

    def foresee(
        self, coming: Iterable[tuple[SampleRows, SampleRows]], *, depth: int
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield, for each fetch to come, the ids it will load, and whether it will write rows.

        `coming` holds the samples of each fetch, and those later than it. The answer holds as long
        as no other process writes rows. It may be called within `load`.
        """
        reads, done = self._reads, NOTHING[0]
        known = None if self._checks.known is None else self._checks.known.clone()
        for own, later in coming:
            samples = self._filled_up(own, later, depth, done)
            # Later samples that this fetch computes are found by their own fetch.
            done = torch.cat((done[~torch.isin(done, own[1])], samples.row_ids[len(own[1]) :]))
            writes = (samples.found < depth) & (samples.row_ids < self._rows.num_rows)
            ids, _ = self._checks.loads(samples, reads, known)
            reads += samples.num_found
            if known is not None:
                known[samples.row_ids[samples.row_ids < len(known)]] = 1  # Some digest.
            yield ids, bool(writes.any())

    def hits(self, row_ids: Tensor, *, depth: int) -> Tensor:
        """Return (B,) bool: which rows a fetch reads, unless they prove damaged or changed."""
        return self._rows.find(row_ids, depth) == depth

    def take_stats(self) -> CacheStats:
        """Return the statistics since the last call, and start over."""
        stats, self._stats = self._stats, CacheStats()
        return stats

    def read_ahead(self, row_ids: Tensor, *, depth: int) -> None:
        """Have a thread read the next fetch's rows; dropped if that asks for others."""
        if self._reader is not None:
            self._reader.read_ahead(row_ids, self._rows.stamps_to(depth))

    def close(self) -> None:
        """End the thread that reads ahead, and have all rows written."""
        if self._reader is not None:
            self._reader.close()
        self._rows.settle()

    def _filled_up(
        self, own: SampleRows, later: SampleRows, depth: int, done: Tensor = NOTHING[0]
    ) -> FoundSamples:
        """Add later samples where a fetch's chunks have room; `done` are rows written by then."""
        rows = self._rows
        found = rows.find(own[1], depth, done=done)
        # A row that is not stored now would be computed again by its own fetch.
        if not len(later[1]) or not rows.takes_all():
            return FoundSamples(*own, found)
        room = room_in_chunks(found, chunk_size=self._layers.chunk_size, depth=depth)
        if not room:
            return FoundSamples(*own, found)
        later_found = rows.find(later[1], depth, done=torch.cat((own[1], done)))
        # Counted as found, so never chosen: samples without a row in the store.
        later_found = later_found.masked_fill(later[1] >= rows.num_rows, depth)
        more = filling(room, later_found)
        pairs = zip((*own, found), (*later, later_found), strict=True)
        return FoundSamples(*(torch.cat((mine, others[more])) for mine, others in pairs))

    def _read(self, samples: FoundSamples, num: int, depth: int) -> _Usable:
        """Read the rows that were found; those that prove damaged or changed become misses.

        The first `num` samples are the fetch's own.
        """
        if self._reader is None:
            return _Usable(samples)
        if not samples.found.any():  # As in every step that fills the cache.
            self._reader.forget()
            return _Usable(samples)
        with self._stats.timed():
            # Only rows of its own samples may have been read ahead.
            read = self._reader.read(samples.row_ids[:num], self._rows.stamps_to(depth))
            if len(samples.ids) > num:
                more = self._rows.read(samples.row_ids[num:], depth)
                more.rows[HIDDEN] = self._layers.send(more.rows[HIDDEN])
                read = read.join(more)
            samples = samples.with_depths(self._rows.usable(read.depth, depth))
            rows, content = read.rows, self._content
            digests = rows.pop(DIGEST, NOTHING[0])
            changed = self._checks.of_other_samples(samples, digests)
            if content.changed is not None:
                changed |= content.changed(samples.ids, rows)
            samples = self._forget_rows(samples, changed.nonzero().flatten())
            if not samples.found.any():
                return _Usable(samples)
            rows[HIDDEN] = content.decode(rows[HIDDEN])
            return _Usable(samples, rows, digests)

    def _forget_rows(self, samples: FoundSamples, positions: Tensor) -> FoundSamples:
        """Empty rows whose samples have changed; return all samples, with these as misses."""
        positions = positions[samples.found[positions] > 0]
        if not len(positions):
            return samples
        self._rows.clear(samples.row_ids[positions])
        return samples.with_depths(samples.found.index_fill(0, positions, 0))

    def _load_samples(self, usable: _Usable, load: Load) -> tuple[_Usable, LoadedSamples]:
        """Load the samples that miss, and some to compare; return the rows that are usable still.

        Where the dataset gives other samples than the rows came from, none is.
        """
        samples, digests, checks = usable.samples, usable.digests, self._checks
        loaded = LoadedSamples(NOTHING[0], {})
        ids, checked = checks.loads(samples, self._reads, checks.known)
        if len(ids):
            loaded = self._load(load, ids)
        differing = checks.first_compared(samples, checked, digests, loaded)
        samples = self._forget_rows(samples, differing)
        checked = checked[samples.found[checked] > 0]
        # Counted only now: workers may start within `load`, and foresee this very fetch.
        self._reads += samples.num_found
        if checks.are_current(samples.ids[checked], digests[checked], loaded):
            return _Usable(samples, usable.entries, digests), loaded
        samples = samples.with_depths(torch.zeros_like(samples.found))
        return _Usable(samples), self._load(load, each_once(samples.ids)[0])

    def _load(self, load: Load, ids: Tensor) -> LoadedSamples:
        batch = load(ids)
        # Without a store, results lack the entries that the dataset does not give.
        if self._rows.num_rows:
            check_kept(batch, self._content.keep)
        lengths = {name: len(entry) for name, entry in batch.items()}
        if set(lengths.values()) != {len(ids)}:
            raise ValueError(
                f"load was asked for {len(ids)} samples and gave {lengths}; return one row per id"
            )
        return LoadedSamples(ids, batch)

    def _computed(
        self, usable: _Usable, loaded: LoadedSamples, num: int, depth: int, *, keeps: bool
    ) -> dict[str, Tensor]:
        """Run all samples that are not as deep as wanted; write and return their rows.

        Rows of the fetch's own samples, the first `num`, are written only if it `keeps` them.
        """
        samples, content = usable.samples, self._content
        entries, given = content.align(samples.found, dict(usable.entries), loaded.entries)
        loaded = LoadedSamples(loaded.ids, given)
        row_ids = samples.row_ids
        if not keeps:
            row_ids = row_ids.index_fill(0, torch.arange(num), NO_ROW)
        # From each depth where samples join to the next: they run through these layers together.
        for first, last in pairwise(sorted({*samples.found.tolist(), depth})):
            positions = (samples.found <= first).nonzero().flatten()
            ids, inverse = each_once(samples.ids[positions])
            chosen = one_each(positions, len(ids), inverse)
            if first:
                batch = {name: select(row, chosen) for name, row in entries.items()}
            else:
                batch = loaded.entries_of(ids)
            fresh = self._run(batch, first, last)
            if last == depth:
                hidden = fresh[HIDDEN]
                stored = content.encode(hidden)
                fresh[HIDDEN] = content.decode(stored, hidden.dtype)
                new_digests = self._checks.digests_of(samples, chosen, usable.digests, loaded)
                with self._stats.timed():
                    rows = {**fresh, HIDDEN: stored}
                    self._rows.write(select(row_ids, chosen), rows, depth, new_digests)
            place(entries, positions, fresh, inverse)
        return entries

    def _run(self, batch: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Run layers first..last-1; return hidden states and the kept entries."""
        with self._stats.timed():
            hidden = self._layers.run(batch, first, last)
        kept = {name: batch[name] for name in self._content.keep if name in batch}
        return {HIDDEN: hidden, **kept}

"""Answer for the frozen prefix: from the store where it can, by running the layers where not.

Of a micro-batch, each sample is one of three, told by the depth its row was found at:

    found at depth    wanted depth f      what is run          what is read
    f                 hit                 nothing              row
    0 < d < f         upgrade             layers d..f-1        row, then overwritten in place
    none              miss                layers 0..f-1        dataset, then stored

Layers always run on chunks of one fixed number of samples, so that a sample's numbers do not
depend on how many others missed with it. Where the kernels give a sample the same bits at every
place of a chunk, cached equals uncached bit by bit; else to rounding. As a chunk costs the same
however few it serves, samples of several depths are run together from where they meet:

    misses ── layers 0, 1 ──┬── layers 2, 3 ──┬── layer 4 ──
               found at 2 ──┘    found at 4 ──┘

What is left of a chunk is filled up with samples of later fetches, which will find their rows.

A row is of use only as long as the dataset gives the same sample again. Of the rows that are read
some are checked, for as long as the cache is used: the dataset is asked for the sample, and what
it gives is compared, by its digest, with what the row was made from. One difference condemns the
store: nobody reads it any more, and the fetch that found it starts over without. Beside a GPU a
thread compares, and the next fetch hears of it. What is known of a sample without asking for it,
as its label may be, is compared at every read; a row that differs there is made anew.

The coming step's rows can be read ahead, by a thread, while this one computes. What a thread has
read passes the same checks; rows are written only by the step that computes them, or behind it.

Source: AutoCache, PipeTransformer section 3.4. Ours never asks the dataset for a sample that hits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, FurtherRows
from autocache.prefix_chunks import (
    NOTHING,
    FoundSamples,
    SampleRows,
    each_once,
    filling,
    of_ids,
    one_each,
    place,
    room_in_chunks,
    taken,
)
from autocache.reader import RowReader
from autocache.row_content import DIGEST, HIDDEN, RowContent, check_kept
from autocache.sample_checks import SampleChecks
from autocache.unequal_lengths import own_lengths
from autocache.uploads import Uploader

_LOGGER = logging.getLogger(__name__)
Load: TypeAlias = Callable[[Tensor], dict[str, Tensor]]
RunLayers: TypeAlias = Callable[[dict[str, Tensor], int, int], Tensor]
"""Runs layers first..last-1 of (batch, first, last) and returns the hidden states."""


@dataclass
class CacheStats:
    """Count samples and seconds of fetches.

    Attributes:
        hits, upgrades, misses: samples, each counted as one of them.
        seconds: reading rows and moving them to the device, running layers (on CUDA, launching
            them) and writing rows, but not loading from the dataset.
    """

    hits: int = 0
    upgrades: int = 0
    misses: int = 0
    seconds: float = 0.0


class PrefixCache:
    """Fetch the frozen prefix's activations of any samples; one per process that feeds a stage 0.

    `stamps` stays the caller's, who extends it at a freeze and truncates it at a thaw.
    """

    def __init__(
        self,
        run_layers: RunLayers,
        *,
        chunk_size: int,
        store: ActivationStore | None,
        stamps: Sequence[int],
        device: torch.device,
        content: RowContent,
    ) -> None:
        """Set up.

        Args:
            run_layers: called with (batch, first, last) under `no_grad`, on `device`, always with
                `chunk_size` samples: from first = 0 with the dataset's entries, else with "hidden"
                and the kept entries. It puts the layers in eval mode itself.
            chunk_size: samples per call; the last chunk is padded with its last sample.
            store: of the content's layout; None computes every sample. It stays the caller's.
            stamps: of the first frozen layer, the first two, ..., as `chain_hash` gives them; read
                only where there is a store.
            device: where layers run and results lie.
        Raises:
            ValueError: `chunk_size` is below 1.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; give at least one sample per chunk")
        self._run_layers, self._chunk_size = run_layers, chunk_size
        self._store, self._stamps = store, stamps
        self._device, self._content = device, content
        self._stats = CacheStats()
        self._reads, self._has_warned = 0, False
        self._uploader = Uploader(device)
        self._reader = None if store is None else RowReader(store, device=device)
        self._checks = None
        if store is not None:
            self._checks = SampleChecks(store, content)
        # A row that was rounded before would be rounded twice.
        self._rounds = content.dtype not in (None, content.computed_dtype)

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
            load: reads the dataset for the (N,) ids given, each once: those that miss, in the
                order of the samples, and some to check. All entries, (N, ...) each.
            depth: number of layers to have passed, at least 1.
            row_ids: (B,) int64, each sample's row in the store, out of its range where it has
                none; None where they are the samples' ids.
            keeps: whether to store these samples; they may never be read again.
            later: samples of the fetches to come, the sooner first, which `load` can read, too:
                some may be computed now, and stored.
        Returns:
            (B, ...) each, without grad: "hidden" on the device, and the kept entries in host
            memory, from where they are sent to the stages that need them. They are the caller's
            until the fetch after the next.
        Raises:
            ValueError: no ids, a depth out of range, or a loaded batch that does not fit the ids.
        """
        _refuse_nothing(len(sample_ids), depth)
        num, own = len(sample_ids), (sample_ids, sample_ids if row_ids is None else row_ids)
        samples = self._filled_up(own, later, depth)
        samples.found, rows = self._read(samples, num, depth)
        wanted, due, reads = self._to_load(samples, self._reads)
        loaded = self._load(wanted, load) if len(wanted) else {}
        self._reads = reads  # Within `load` workers may begin, for whom this fetch is to come.
        digests = rows.pop(DIGEST, NOTHING[0])
        checks = self._checks
        if checks and not checks.are_current(samples.ids[due], digests[due], wanted, loaded):
            samples.found, rows = torch.zeros_like(samples.found), {}
            wanted, _ = each_once(samples.ids)
            loaded = self._load(wanted, load)
        rows, loaded = self._content.brought_together(samples.found, rows, loaded)
        kept_ids = samples.row_ids if keeps else samples.without_rows(num)
        for first, last in pairwise(sorted({*samples.found.tolist(), depth})):
            positions = (samples.found <= first).nonzero().flatten()
            ids, inverse = each_once(samples.ids[positions])
            chosen = one_each(positions, len(ids), inverse)
            if first:
                batch = {name: taken(row, chosen) for name, row in rows.items()}
            else:
                batch = of_ids(loaded, wanted, ids)
            fresh = self._run(batch, first, last)
            if last == depth:
                fresh = self._rounded(fresh)
                also = checks and checks.digests_of(samples, chosen, digests, wanted, loaded)
                self._write(taken(kept_ids, chosen), fresh, depth, also)
            place(rows, positions, fresh, inverse)
        self._count(samples.found[:num], depth)
        return self._content.first(rows, num)

    def foresee(
        self, coming: Iterable[tuple[SampleRows, SampleRows]], *, depth: int
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield the ids that `load` will be asked for, and whether their fetch writes rows.

        It holds as far as nobody else writes any; within `load`, too.

        Args:
            coming: the samples of every fetch to come, and those later than it.
        """
        reads, done = self._reads, NOTHING[0]
        for own, later in coming:
            samples = self._filled_up(own, later, depth, done)
            done = torch.cat((done[~torch.isin(done, own[1])], samples.row_ids[len(own[1]) :]))
            num_rows = 0 if self._store is None else self._store.num_rows
            stored = bool(((samples.found < depth) & (samples.row_ids < num_rows)).any())
            wanted, _, reads = self._to_load(samples, reads)
            yield wanted, stored

    def take_stats(self) -> CacheStats:
        """Return the statistics since the last call, and start over."""
        stats, self._stats = self._stats, CacheStats()
        return stats

    def read_ahead(self, row_ids: Tensor, *, depth: int) -> None:
        """Have a thread read the rows that the next fetch will ask for.

        Args:
            row_ids, depth: as that fetch's; where they are others, what was read is dropped.
        """
        if self._reader is not None:
            self._reader.read_ahead(row_ids, self._up_to(depth))

    def close(self) -> None:
        """End the thread that reads ahead, and have all rows written."""
        if self._reader is not None:
            self._reader.close()
        if self._store is not None:
            self._store.settle()

    def _up_to(self, depth: int) -> tuple[int, ...]:
        """Return the stamps of depths 1..depth."""
        if depth > len(self._stamps):
            raise ValueError(
                f"depth {depth} has no stamp, as {len(self._stamps)} layers are frozen; choose a "
                "depth up to that, or extend the stamps first"
            )
        return tuple(self._stamps[:depth])

    def _filled_up(
        self, own: SampleRows, later: SampleRows, depth: int, done: Tensor = NOTHING[0]
    ) -> FoundSamples:
        """Add later samples to a fetch's own.

        Args:
            done: rows that will be there by then.
        """
        store = self._store
        if store is None or store.is_condemned:
            return FoundSamples(*own, torch.zeros_like(own[1]))
        stamps = self._up_to(depth)
        found = self._usable(store.find(own[1], stamps), depth)
        if len(done):
            found = found.masked_fill(torch.isin(own[1], done), depth)
        room = room_in_chunks(found, chunk_size=self._chunk_size, depth=depth)
        if self._has_warned or not len(later[1]) or not room:
            return FoundSamples(*own, found)
        there = torch.isin(later[1], torch.cat((own[1], done))) | (later[1] >= store.num_rows)
        later_found = self._usable(store.find(later[1], stamps), depth).masked_fill(there, depth)
        more = filling(room, later_found)
        pairs = zip((*own, found), (*later, later_found), strict=True)
        return FoundSamples(*(torch.cat((mine, others[more])) for mine, others in pairs))

    def _read(
        self, samples: FoundSamples, num: int, depth: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the (B,) depths rows were found at, and the rows; the first `num` are its own."""
        if self._reader is None or self._store is None:
            return samples.found, {}
        if not samples.found.any():  # As in every step that fills the cache.
            self._reader.forget()
            return samples.found, {}
        with self._timed():
            read = self._reader.read(samples.row_ids[:num], self._up_to(depth))
            if len(samples.ids) > num:
                more = self._store.read(samples.row_ids[num:], self._up_to(depth))
                more.rows.update(self._uploader.send({HIDDEN: more.rows[HIDDEN]}))
                read = read.joined(more)
            found = self._usable(read.depth, depth)
            if self._content.changed is not None:
                found = found.masked_fill(self._content.changed(samples.ids, read.rows), 0)
            if not found.any():
                return found, {}
            hidden = read.rows[HIDDEN]
            read.rows[HIDDEN] = hidden.to(self._content.computed_dtype or hidden.dtype)
            return found, read.rows

    def _usable(self, found: Tensor, depth: int) -> Tensor:
        """Return the depths at which rows were found, 0 for those that would be rounded again."""
        return found.where(found == depth, 0) if self._rounds else found

    def _to_load(self, samples: FoundSamples, reads: int) -> tuple[Tensor, Tensor, int]:
        """Return which ids to load, the positions of those only to be checked, and how many rows
        have been read by then.
        """
        due = torch.empty(0, dtype=torch.int64)
        if not samples.found.any():
            return each_once(samples.ids)[0], due, reads
        misses = samples.found == 0
        if self._checks is not None:
            hits = samples.found.nonzero().flatten()
            due = hits[self._checks.due(samples.ids[hits], reads)]
            reads += len(hits)
        return each_once(torch.cat((samples.ids[misses], samples.ids[due])))[0], due, reads

    def _load(self, ids: Tensor, load: Load) -> dict[str, Tensor]:
        batch = load(ids)
        if self._store is not None:
            check_kept(batch, self._content.keep)
        lengths = {name: len(entry) for name, entry in batch.items()}
        if set(lengths.values()) != {len(ids)}:
            raise ValueError(
                f"load was asked for {len(ids)} samples and gave {lengths}; "
                "return one row per id in every entry"
            )
        return batch

    def _run(self, batch: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        num = len(next(iter(batch.values())))
        with self._timed(), torch.no_grad():
            chunks = self._chunks(self._uploader.send(batch), num)
            starts = range(0, num, self._chunk_size)
            parts = [
                self._run_layers(chunk, first, last)[: num - start]
                for start, chunk in zip(starts, chunks, strict=True)
            ]
            kept = {name: batch[name] for name in self._content.keep if name in batch}
            return {HIDDEN: torch.cat(parts) if len(parts) > 1 else parts[0], **kept}

    def _chunks(self, batch: dict[str, Tensor], num: int) -> Iterator[dict[str, Tensor]]:
        """Cut a batch into chunks, the last one padded with its last sample."""
        if num == self._chunk_size and self._device.type == "cuda":
            # It was sent into memory of its own, aligned as all is there.
            yield batch
            return
        for start in range(0, num, self._chunk_size):
            # A copy even where a slice would do: kernels may sum in another order when their
            # input is aligned differently.
            index = torch.arange(start, start + self._chunk_size, device=self._device)
            index = index.clamp_(max=num - 1)
            yield {name: entry.index_select(0, index) for name, entry in batch.items()}

    def _rounded(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Round as rows do: a sample is the same where it misses, or nothing is stored, too."""
        hidden = fresh[HIDDEN]
        if self._content.dtype is None or not hidden.is_floating_point():
            return fresh
        return {**fresh, HIDDEN: hidden.to(self._content.dtype).to(hidden.dtype)}

    def _write(
        self,
        row_ids: Tensor,
        fresh: dict[str, Tensor],
        depth: int,
        also: FurtherRows | None,
    ) -> None:
        if self._store is None or bool((row_ids >= self._store.num_rows).all()):
            return
        with self._timed():
            lengths, positions = self._content.lengths(fresh), self._content.positions
            hidden = fresh[HIDDEN]
            rows = {**fresh, HIDDEN: hidden.to(self._content.dtype or hidden.dtype)}
            if positions is not None:
                # What is longer than a row has none.
                fits = own_lengths(fresh[positions.mask]) <= positions.most
                row_ids = row_ids.where(fits, self._store.num_rows)
                rows = positions.bring(rows, positions.most)
            if self._fit(rows):
                self._store.write(row_ids, self._stamps[depth - 1], rows, lengths, also=also)

    def _fit(self, rows: dict[str, Tensor]) -> bool:
        """Tell whether rows are as the store's; those that are not are computed every time."""
        assert self._store is not None
        wanted = {field.name: (field.shape, field.dtype) for field in self._store.layout.fields}
        odd = {n: r for n, r in rows.items() if (tuple(r.shape[1:]), r.dtype) != wanted.get(n)}
        if odd and not self._has_warned:
            self._has_warned = True
            name, row = next(iter(odd.items()))
            _LOGGER.warning(
                "samples are not kept in the cache where %r is %s %s, as it was %s %s in the "
                "sample that the cache was made for: pad samples to one length, or let collate_fn "
                "pad them behind their end",
                name,
                tuple(row.shape[1:]),
                row.dtype,
                *wanted[name],
            )
        return not odd

    def _count(self, found: Tensor, depth: int) -> None:
        depths = found.tolist()
        hits, misses = depths.count(depth), depths.count(0)
        self._stats.hits += hits
        self._stats.upgrades += len(depths) - hits - misses
        self._stats.misses += misses

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stats.seconds += time.perf_counter() - start


def _refuse_nothing(num_samples: int, depth: int) -> None:
    if depth < 1 or num_samples < 1:
        raise ValueError(
            f"cannot fetch {num_samples} samples at depth {depth}; give depth >= 1 and at "
            "least one id (for an empty micro-batch fetch any one id and slice [:0])"
        )

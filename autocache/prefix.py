"""Answer for the frozen prefix: from the store where it can, by running the layers where not.

Of a micro-batch, each sample is one of three, told by the depth its row was found at:

    found at depth    wanted depth f      what is run          what is read
    f                 hit                 nothing              row
    0 < d < f         upgrade             layers d..f-1        row, then overwritten in place
    none              miss                layers 0..f-1        dataset, then stored

Layers always run on chunks of one fixed number of samples, so that a sample's numbers do not
depend on how many others missed with it. Where the kernels give a sample the same bits at every
place of a chunk, cached equals uncached bit by bit; else to rounding.

A row is of use only as long as the dataset gives the same sample again. Of the rows that are read
some are checked, for as long as the cache is used: the dataset is asked for the sample, and what
it gives is compared, by its digest, with what the row was made from. One difference condemns the
store: nobody reads it any more, and the fetch that found it starts over without.

Source: AutoCache, PipeTransformer section 3.4. Ours never asks the dataset for a sample that hits.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from autocache.layout import RowField, RowLayout
from autocache.stamp import PrefixStamps
from autocache.store import RowStore

HIDDEN, DIGEST = "hidden", "digest"
_DENSE_CHECKS, _SPARSE_CHECKS = 4, 32
"""One row in so many is checked: of as many reads as the store has rows, and from then on. If one
sample in 200 changes, 1,000 reads find none with a chance of 0.3."""

_LOGGER = logging.getLogger(__name__)
RunLayers: TypeAlias = Callable[[dict[str, Tensor], int, int], Tensor]
"""Runs layers first..last-1 of (batch, first, last) and returns the hidden states."""


@dataclass(frozen=True)
class CacheStats:
    """Count samples and seconds of fetches.

    Attributes:
        hits, upgrades, misses: samples, each counted as one of them.
        read_s: reading rows and moving them to the device.
        run_s: running layers; loading from the dataset is in none of the times. On CUDA this is
            the time to launch them, and `write_s` or whoever uses the result waits for them.
        write_s: storing rows.
    """

    hits: int = 0
    upgrades: int = 0
    misses: int = 0
    read_s: float = 0.0
    run_s: float = 0.0
    write_s: float = 0.0


def rows_layout(
    batch_of_one: Mapping[str, Tensor],
    hidden_of_one: Tensor,
    keep: tuple[str, ...],
    *,
    checked: bool = True,
) -> RowLayout:
    """Lay out the rows of a store from one sample.

    Args:
        batch_of_one: the dataset's entries of one sample, (1, ...) each.
        hidden_of_one: (1, ...) hidden states, in the dtype the layers compute.
        keep: which entries to store beside them.
        checked: whether to store a digest of the sample, too, and so check the dataset against it.
    Raises:
        ValueError: an entry to keep is not in the batch.
    """
    _check_kept(batch_of_one, keep)
    tensors = {
        HIDDEN: hidden_of_one,
        **{name: batch_of_one[name] for name in keep},
        **({DIGEST: _digests(batch_of_one)} if checked else {}),
    }
    return RowLayout(
        tuple(
            RowField(name, tuple(tensor.shape[1:]), tensor.dtype)
            for name, tensor in tensors.items()
        )
    )


class PrefixCache:
    """Fetch the frozen prefix's activations of any samples; one per process that feeds a stage 0.

    `stamps` stays the caller's, who extends it at a freeze and truncates it at a thaw.
    """

    def __init__(
        self,
        run_layers: RunLayers,
        *,
        chunk_size: int,
        store: RowStore | None,
        stamps: PrefixStamps,
        device: torch.device,
        keep: tuple[str, ...],
    ) -> None:
        """Set up; nothing is read or run.

        Args:
            run_layers: called with (batch, first, last) under `no_grad`, on `device`, always with
                `chunk_size` samples: from first = 0 with the dataset's entries, else with "hidden"
                and the `keep` entries. It puts the layers in eval mode itself.
            chunk_size: samples per call; the last chunk is padded with its last sample.
            store: None computes every sample.
            stamps: of the frozen layers; read only where there is a store.
            device: where layers run and results lie.
            keep: the dataset's entries that later stages need (attention mask, targets).
        Raises:
            ValueError: `chunk_size` is below 1, `keep` names "hidden" or an entry twice, or the
                store's fields are not those of `rows_layout`.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; give at least one sample per chunk")
        _check_keep(keep, store)
        self._run_layers = run_layers
        self._chunk_size = chunk_size
        self._store = store
        self._stamps = stamps
        self._device = device
        self._keep = keep
        self._stats = CacheStats()
        self._is_checked = store is not None and DIGEST in _names_of(store)
        self._reads = 0

    def fetch(
        self, sample_ids: Tensor, load: Callable[[Tensor], dict[str, Tensor]], *, depth: int
    ) -> dict[str, Tensor]:
        """Return the activations after `depth` layers, and the `keep` entries, of the samples.

        Args:
            sample_ids: (B,) int64 on CPU, B >= 1; dataset indices, duplicates allowed.
            load: reads the dataset for the (N,) ids given, ascending and each once: only those
                that miss. All entries, (N, ...) each.
            depth: number of layers to have passed, at least 1.
        Returns:
            (B, ...) each, without grad: "hidden" on the device, and the `keep` entries in host
            memory, from where they are sent to the stages that need them.
        Raises:
            ValueError: no ids, a depth out of range, or a loaded batch that does not fit the ids.
        """
        if depth < 1 or len(sample_ids) < 1:
            raise ValueError(
                f"cannot fetch {len(sample_ids)} samples at depth {depth}; give depth >= 1 and at "
                "least one id (for an empty micro-batch fetch any one id and slice [:0])"
            )
        found, rows = self._read(sample_ids, depth)
        if not self._is_current(sample_ids, found, rows, load):
            found, rows = torch.zeros_like(found), {}
        for first in sorted({*found.tolist()} - {depth}):
            positions = (found == first).nonzero().flatten()
            ids, inverse = sample_ids[positions].unique(return_inverse=True)
            batch = self._load(ids, load) if first == 0 else _take(rows, positions, inverse)
            fresh = self._run(batch, first, depth)
            self._write(ids, fresh, depth)
            _place(rows, positions, fresh, inverse)
        self._count(found, depth)
        rows.pop(DIGEST, None)
        return rows

    def take_stats(self) -> CacheStats:
        """Return the statistics since the last call, and start over."""
        stats, self._stats = self._stats, CacheStats()
        return stats

    def _read(self, sample_ids: Tensor, depth: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the (B,) depth each sample was found at, and the rows if any was found."""
        if self._store is None:
            return torch.zeros_like(sample_ids), {}
        with self._timed("read_s"):
            read = self._store.read(sample_ids, self._stamps.up_to(depth))
            if not read.depth.any():
                return read.depth, {}
            read.rows[HIDDEN] = read.rows[HIDDEN].to(self._device)
            return read.depth, read.rows

    def _is_current(
        self,
        sample_ids: Tensor,
        found: Tensor,
        rows: dict[str, Tensor],
        load: Callable[[Tensor], dict[str, Tensor]],
    ) -> bool:
        """Compare some samples read with the dataset's; condemn the store if one differs."""
        hits = found.nonzero().flatten().tolist() if self._is_checked else []
        due = [position for position in hits if self._check_due()]
        if not due:
            return True
        ids, inverse = sample_ids[due].unique(return_inverse=True)
        given = _digests(self._load(ids, load))[inverse]
        differing = (given != rows[DIGEST][due]).nonzero().flatten().tolist()
        if not differing:
            return True
        assert self._store is not None
        if self._store.condemn():
            _LOGGER.warning(
                "the dataset gives another sample %d than when its activations were cached "
                "(random augmentation, or its data changed): the cache is not used any more, and "
                "the frozen prefix is computed at every step. Make the dataset deterministic, or "
                "set cache=False",
                int(sample_ids[due[differing[0]]]),
            )
        return False

    def _check_due(self) -> bool:
        assert self._store is not None
        self._reads += 1
        dense = self._reads <= self._store.num_rows
        return self._reads % (_DENSE_CHECKS if dense else _SPARSE_CHECKS) == 0

    def _load(self, ids: Tensor, load: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = load(ids)
        _check_kept(batch, self._keep)
        lengths = {name: len(entry) for name, entry in batch.items()}
        if set(lengths.values()) != {len(ids)}:
            raise ValueError(
                f"load was asked for {len(ids)} samples and gave {lengths}; "
                "return one row per id in every entry"
            )
        return batch

    def _run(self, batch: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        num = len(next(iter(batch.values())))
        parts = []
        with self._timed("run_s"), torch.no_grad():
            for start in range(0, num, self._chunk_size):
                # A copy even where a slice would do: kernels may sum in another order when their
                # input is aligned differently.
                index = torch.arange(start, start + self._chunk_size).clamp(max=num - 1)
                chunk = {
                    name: entry.index_select(0, index.to(entry.device)).to(self._device)
                    for name, entry in batch.items()
                    if name != DIGEST
                }
                parts.append(self._run_layers(chunk, first, last)[: num - start])
            kept = {name: batch[name] for name in self._keep}
            if self._is_checked:
                kept[DIGEST] = batch[DIGEST] if DIGEST in batch else _digests(batch)
            return {HIDDEN: torch.cat(parts), **kept}

    def _write(self, ids: Tensor, fresh: dict[str, Tensor], depth: int) -> None:
        if self._store is not None:
            with self._timed("write_s"):
                self._store.write(ids, self._stamps[depth], fresh)

    def _count(self, found: Tensor, depth: int) -> None:
        hits, misses = int((found == depth).sum()), int((found == 0).sum())
        self._stats = replace(
            self._stats,
            hits=self._stats.hits + hits,
            upgrades=self._stats.upgrades + len(found) - hits - misses,
            misses=self._stats.misses + misses,
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = getattr(self._stats, name) + time.perf_counter() - start
            self._stats = replace(self._stats, **{name: spent})


def _digests(batch: Mapping[str, Tensor]) -> Tensor:
    """Return (N,) int64: a digest of all that the dataset gave for each of (N, ...) samples."""
    names = sorted(batch)
    digests = []
    for index in range(len(batch[names[0]])):
        digest = hashlib.blake2b(digest_size=8)
        for name in names:
            values = batch[name][index].cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(values.numpy().data)
        digests.append(int.from_bytes(digest.digest(), "little", signed=True))
    return torch.tensor(digests)


def _take(rows: dict[str, Tensor], positions: Tensor, inverse: Tensor) -> dict[str, Tensor]:
    """Return the rows at the given positions, each id once: `inverse` says which id each is."""
    # Any one position of each id will do.
    chosen = positions.new_empty(int(inverse.max()) + 1).scatter_(0, inverse, positions)
    return {name: row[chosen.to(row.device)] for name, row in rows.items()}


def _place(
    rows: dict[str, Tensor], positions: Tensor, fresh: dict[str, Tensor], inverse: Tensor
) -> None:
    """Put fresh rows, each id once, at all its positions, making the tensors if need be."""
    for name, row in fresh.items():
        if name not in rows:
            # Nothing was read, so these are all the positions there are.
            rows[name] = row.new_empty(len(positions), *row.shape[1:])
        rows[name][positions.to(row.device)] = row[inverse.to(row.device)]


def _check_keep(keep: tuple[str, ...], store: RowStore | None) -> None:
    needed = {HIDDEN, *keep}
    if len(needed) < 1 + len(keep) or DIGEST in keep:
        raise ValueError(
            f'keep is {keep}; name each entry once, and none "{HIDDEN}" or "{DIGEST}"'
        )
    if store is not None and needed != (stored := _names_of(store) - {DIGEST}):
        raise ValueError(
            f"the store has fields {sorted(stored)}, the cache needs {sorted(needed)}; "
            "build the store's layout with rows_layout and the same keep"
        )


def _names_of(store: RowStore) -> set[str]:
    return {field.name for field in store.layout.fields}


def _check_kept(batch: Mapping[str, Tensor], keep: tuple[str, ...]) -> None:
    if missing := [name for name in keep if name not in batch]:
        raise ValueError(
            f"the dataset gives {sorted(batch)}, without {missing} of keep = {keep}; "
            "keep only names the dataset gives"
        )

"""Hold what a user sets of the rows in a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn
from torch.utils.data import DataLoader, default_collate

from pipetransformer.config import TrainConfig, make_config
from pipetransformer.hints import did_you_mean
from pipetransformer.model import is_opaque, named_parts

SETTINGS = (
    "cache_folder", "cache_keep", "cache_fingerprint", "cache_limit_bytes", "cache_dtype",
    "cache_device", "cache_check", "cache_views", "prefix_chunk", "precision", "seed",
    "tied_weights",
)  # fmt: skip
"""Fields of `TrainConfig` that a loop may set."""

_READS, _IGNORES = "reads", "ignores_padding"
CACHE, RELEASE, PARTS, READS_ALL = "cache", "release", "parts", "reads_all"
"""The last two are not set by a user, but by `settings_of_parts`, or by a callback."""
_USUAL_BATCH = 32


@final
@dataclass(frozen=True)
class LoopSettings:
    """Hold settings of `attach` and of the callbacks.

    Args:
        cache: fields of `TrainConfig`.
        reads: names of entries that are read though rows make them needless, as the loop looks at
            them.
        reads_all: whether all entries are read, as nobody knows what the loop looks at.
        ignores_padding: whether the loop reads nothing that the model returns of padding.
        keeps_to_labels: whether the loss reads no position that its label leaves out.
        parts: modules whose answers are rows, by name; where there are none, blocks freeze.
        caches: whether rows are kept; None keeps those of parts where that pays.
        releases_beside: where parts leave their device, the model whose other weights stay.
    """

    cache: Mapping[str, Any]
    reads: tuple[str, ...] = ()
    reads_all: bool = False
    ignores_padding: bool = False
    keeps_to_labels: bool = False
    parts: Mapping[str, nn.Module] = field(default_factory=dict)
    caches: bool | None = None
    releases_beside: nn.Module | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, keeps_to_labels: bool = False) -> LoopSettings:
        """Sort what a user gave; see `check_settings`."""
        cache = {name: value for name, value in settings.items() if name in SETTINGS}
        reads, ignores = tuple(settings.get(_READS, ())), bool(settings.get(_IGNORES))
        parts, caches = settings.get(PARTS, {}), settings.get(CACHE)
        beside = settings.get(RELEASE) or None
        reads_all = bool(settings.get(READS_ALL))
        return cls(cache, reads, reads_all, ignores, keeps_to_labels, parts, caches, beside)

    def config(self, loader: DataLoader[Any]) -> TrainConfig:
        """Return the settings of a run that reads as a loader does."""
        function = loader.collate_fn
        # Of a sampler that does not say it, batches are run in chunks of the most usual size.
        size = getattr(loader.batch_sampler, "batch_size", None) or _USUAL_BATCH
        own = {
            "collate_fn": None if function is default_collate else function,
            "num_workers": loader.num_workers,
            "global_batch_size": size,
            "remove_unused_columns": False,
        }
        if loader.num_workers:
            own["prefetch_factor"] = loader.prefetch_factor
        return make_config({**self.cache, **own})


def check_settings(settings: Mapping[str, Any], *, has_parts: bool) -> None:
    """Raise a ValueError for settings that are unknown or not allowed."""
    known = (*SETTINGS, _READS, _IGNORES, CACHE, RELEASE)
    if unknown := sorted(settings.keys() - set(known)):
        meant = did_you_mean(unknown, known) or f"; known: {', '.join(known)}"
        raise ValueError(f"unknown setting(s) {', '.join(unknown)}{meant}")
    if (cache := settings.get(CACHE)) not in (None, True, False):
        raise ValueError(f"cache={cache!r}: give True, False, or leave it out")
    if (release := settings.get(RELEASE, False)) not in (True, False):
        raise ValueError(f"release={release!r}: give True, False, or leave it out")
    if release and (not has_parts or cache is False):
        raise ValueError(
            "release=True moves parts= off their device while rows take their place: give parts=, "
            "and no cache=False, or leave it out"
        )
    reads = settings.get(_READS, ())
    if isinstance(reads, str) or not all(isinstance(name, str) for name in reads):
        raise ValueError(f"reads={reads!r} names no entries; give a tuple of names")
    make_config({name: value for name, value in settings.items() if name in SETTINGS})


def settings_of_parts(
    model: nn.Module,
    parts: Sequence[str | nn.Module],
    settings: Mapping[str, Any],
    *,
    alone: bool,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module that a loop calls, and the settings with its parts.

    Args:
        alone: whether nothing else freezes.
    Raises:
        TypeError, ValueError: there are no such parts, or nowhere that they could be released to.
    """
    root, named = named_parts(model, parts, alone=alone)
    own: dict[str, Any] = {**settings, PARTS: named}
    if settings.get(RELEASE):
        own[RELEASE] = model
        config = make_config({n: value for n, value in settings.items() if n in SETTINGS})
        weights = [p for part in named.values() for p in part.parameters()]
        if kinds := [type(p).__name__ for p in weights if is_opaque(p)]:
            raise ValueError(
                "release=True moves parts= off their device, and they hold weights of a class of "
                f"their own ({kinds[0]}), which are never moved: leave it out"
            )
        is_on_cpu = all(p.device.type == "cpu" for p in weights)
        if is_on_cpu and str(config.cache_folders[-1]) == TrainConfig.cache_folder:
            raise ValueError(
                "release=True moves parts of a model on the CPU to a file, and "
                f"{config.cache_folders[-1]} is memory itself: give cache_folder=, a folder on a "
                "disk; "
                "or move the model to its device first"
            )
    return root, own

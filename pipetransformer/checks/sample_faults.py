"""Say which sample a model cannot take, and why, once something has failed.

torch says what failed, and not for which sample. So the samples that may have been read are read
once more, one by one, and compared with the model's configuration. Nothing is refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from pipetransformer.feed import Batch, SampleError, SizedDataset, part_of
from pipetransformer.model import EntryNames, LayeredModel, names_of

_IGNORED = -100
_LABELS = ("labels", "label", "label_ids", "y", "target")
_KINDS = (ValueError, IndexError, TypeError, RuntimeError)
_TORCHS = (IndexError, RuntimeError)


@contextmanager
def naming_bad_samples(
    model: nn.Module,
    read: Callable[[int], Batch],
    ids: Iterable[int],
    *,
    where: str = "",
    compute: Callable[[Batch], object] | None = None,
) -> Iterator[None]:
    """Raise a SampleError in the place of an error, if one of the samples is at fault.

    Args:
        read: one sample, (1, ...) by entry.
        ids: samples that the block may have read.
        where: begins the message.
        compute: takes one sample; tried where the configuration tells nothing.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _KINDS as error:
        fault = ""
        with suppress(Exception):  # The block's own error must be told, and not this one.
            batches = {index: read(index) for index in ids}
            faults = ((i, sample_fault(model, batch)) for i, batch in batches.items())
            index, fault = next(filter(itemgetter(1), faults), (0, ""))
            fault = fault and f"sample {index} {fault}"
            # A ValueError is mostly a refusal of ours, and to run the model would count calls.
            if compute is not None and not fault and type(error) in _TORCHS:
                fault = _tried(batches, compute)
        if fault:
            raise SampleError(f"{where}{fault}") from error
        raise


def _tried(batches: Mapping[int, Batch], compute: Callable[[Batch], object]) -> str:
    """Say which sample fails by itself, where others do not, or ""."""
    failed = dict[int, str]()
    for index, batch in batches.items():
        try:
            with torch.no_grad():
                compute(batch)
        except Exception as error:
            failed[index] = str(error)
    if len(failed) == len(batches) or not failed:
        return ""
    first = min(failed)
    return f"the model or its loss cannot take sample {first}: {failed[first]}"


def naming_first_samples(
    model: nn.Module | LayeredModel,
    dataset: SizedDataset,
    read: Callable[[SizedDataset, EntryNames], Batch],
) -> AbstractContextManager[None]:
    """Do so for the samples by which a model is read before it is trained."""
    if isinstance(model, LayeredModel):
        return nullcontext()

    def one(index: int) -> Batch:
        twice = read(Subset(dataset, [index]), names_of(model))  # type: ignore[arg-type]
        return part_of(twice, slice(1))

    return naming_bad_samples(model, one, (0, len(dataset) // 2))


def sample_fault(model: nn.Module, entries: Mapping[str, Tensor]) -> str:
    """Say what of a sample is outside of what a model is configured for, or "".

    Args:
        entries: (1, ...) each.
    """
    tokens = entries.get("input_ids")
    fault = _token_fault(model, tokens) if tokens is not None else ""
    labels = next((entries[name] for name in _LABELS if name in entries), None)
    return fault or (_label_fault(model, labels) if labels is not None else "")


def _token_fault(model: nn.Module, tokens: Tensor) -> str:
    config, length = getattr(model, "config", None), tokens.shape[-1]
    most = getattr(config, "max_position_embeddings", None)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    # Rotary positions have no table, and no end.
    if most in tables and length > most:
        return (
            f"has {length} tokens, but the model has positions for {most}: tokenize with "
            f"truncation=True, max_length={most}"
        )
    size = getattr(config, "vocab_size", None)
    if size in tables and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        return (
            f"has tokens from {int(tokens.min())} to {int(tokens.max())}, but the model knows 0 "
            f"to {size - 1}: take the model's own tokenizer, or call "
            "model.resize_token_embeddings(len(tokenizer))"
        )
    return ""


def _label_fault(model: nn.Module, labels: Tensor) -> str:
    kinds = {type(module).__name__ for module in model.modules()}
    num = getattr(getattr(model, "config", None), "num_labels", 1)
    if num <= 1 or not any(kind.endswith("Classification") for kind in kinds):
        return ""
    if labels.is_floating_point():
        if labels.numel() > 1:  # A number for each class.
            return ""
        return (
            f"has the label {labels.item():g}, a {str(labels.dtype).removeprefix('torch.')}, but "
            f"the model has num_labels={num} classes: give int64, or num_labels=1 for a regression"
        )
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        dtype = str(labels.dtype).removeprefix("torch.")
        return f"has labels in {dtype}, but the model has several for a sample: give float32"
    bad = labels[(labels != _IGNORED) & ((labels < 0) | (labels >= num))]
    if not len(bad):
        return ""
    return (
        f"has the label {int(bad[0])}, but the model has num_labels={num} classes, 0 to "
        f"{num - 1}: correct the label, or load the model with more num_labels"
    )

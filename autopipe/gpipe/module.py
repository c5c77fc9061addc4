"""Wrap a sequential module so that it runs as a pipeline of micro-batches.

A state dict gets the names of the wrapped module; loading takes both kinds:

    module   partitions.0.conv.weight  partitions.1.fc.weight
    state    conv.weight               fc.weight
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopipe.engine import Payload
from autopipe.gpipe.batch_norm import convert_deferred_batch_norm
from autopipe.gpipe.batch_run import PipelineRun, run_forward
from autopipe.gpipe.micro_batch import Batch, as_batch, as_payload, scatter, split_sizes
from autopipe.gpipe.partition_checks import (
    check_balance,
    check_module,
    check_sharing,
    choose_devices,
    placed_partitions,
)
from autopipe.gpipe.partition_work import (
    Ends,
    Partition,
    check_trains,
    needs_gradient,
    trained_tensors,
)
from autopipe.gpipe.step_loss import StepLoss
from autopipe.loss import LossFunction, choose_loss
from autopipe.schedule import SCHEDULES, forward_only
from autopipe.skip import skip_edges, verify_skippables
from autopipe.trace import Trace

CHECKPOINT_MODES = ("always", "except_last", "never")


class GPipe(nn.Module):
    """Run a sequential module as a pipeline of micro-batches over its partitions.

    Layers take and return a Tensor or a tuple of Tensors, (B, ...). The input must be on
    `devices[0]`; the output is on `devices[-1]`. Layers are not copied; a nested Sequential is one
    layer (see `flatten_sequential`). `chunks=1, checkpoint='never'` is plain model parallelism.

    Each partition runs in a thread of its own, forward and backward. Those that work on the CPU at
    the same time share the caller's intra-op threads (`torch.set_num_threads`), at least one each.
    Several partitions may be on one device.

    Checkpointing keeps only a micro-batch's input of a partition, and repeats the forward before
    the backward. torch's random numbers repeat, those of Python's `random` and NumPy do not.
    Outside training mode nothing is checkpointed.

    Args:
        balance: layers of each partition; `autopipe.balance.balance` finds it. Without it and
            `devices`, layers that are on two devices or more already are cut where these change.
        devices: of the partitions; surplus ones stay unused. By default all CUDA devices, or
            without CUDA one CPU slot for each partition.
        chunks: micro-batches of a mini-batch; fewer if it has fewer samples.
        checkpoint: which micro-batches to checkpoint: 'always', 'except_last' or 'never'.
        deferred_batch_norm: whether BatchNorm layers update their running statistics once a
            mini-batch, as without micro-batches; they are converted in place.
        schedule: the order of `step`: 'gpipe' or '1f1b'.
    Attributes:
        balance, devices, chunks, checkpoint: as given, `devices` without surplus ones.
        partitions: a ModuleList of the partitions, each an nn.Sequential.
    Raises:
        TypeError: the module is not an nn.Sequential, or its skips do not pair up.
        ValueError: wrong balance, chunks, checkpoint, schedule or devices; a layer is used twice;
            or a parameter would have to be on two devices.
        IndexError: fewer devices than partitions.
    Source: torchgpipe (Kim et al. 2020), whose documented interface this is. Ours adds `schedule`
    and `step`.
    """

    def __init__(  # noqa: PLR0913 - the documented interface
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[int | str | torch.device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        schedule: str = "gpipe",
    ) -> None:
        super().__init__()
        check_module(module)
        if balance is None and devices is None:
            balance, devices = placed_partitions(module)
        self.balance = check_balance(module, balance)
        if int(chunks) != chunks or chunks < 1:
            raise ValueError(f"number of chunks must be a positive integer, not {chunks}")
        if str(checkpoint) not in CHECKPOINT_MODES:
            raise ValueError(
                "checkpoint is not one of 'always', 'except_last', or 'never': "
                f"{str(checkpoint)!r}"
            )
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        self.schedule = _checked_schedule(schedule)
        self.devices = choose_devices(devices, num_partitions=len(self.balance))
        verify_skippables(module)
        if any(isinstance(layer, GPipe) for layer in module.modules()) and any(
            device.type == "cuda" for device in self.devices
        ):
            # A deadlock: the outer pipeline holds the device's generator while the inner waits.
            raise ValueError("a GPipe inside a GPipe runs on CPU partitions only")
        children = iter(module.named_children())
        parts = [nn.Sequential(OrderedDict(islice(children, n))) for n in self.balance]
        # Before anything is moved or converted, so that a refused module stays as it was.
        check_sharing(parts, self.devices)
        if deferred_batch_norm:
            convert_deferred_batch_norm(module)
        pairs = zip(parts, self.devices, strict=True)
        self.partitions = nn.ModuleList(part.to(device) for part, device in pairs)
        self._skip_edges = skip_edges(parts)
        self._trace: Trace | None = None
        self._num_steps = 0
        self.register_state_dict_post_hook(name_as_wrapped)
        self.register_load_state_dict_pre_hook(name_as_partitioned)

    def forward(self, input: Batch) -> Batch:
        """Run the module on a mini-batch; return what the wrapped module would.

        Raises:
            TypeError: the input, or what a partition returns, is no tensor or tuple of tensors.
            ValueError: the input's tensors have no or unequal first dimensions.
        """
        payload = as_payload(input, what="the input")
        if not self.partitions:  # A Sequential without layers returns its input.
            return input
        partitions, sizes = self._described(), self._sizes(payload)
        if torch.is_grad_enabled() and needs_gradient(partitions, payload):
            run = self._training_run(partitions, payload, sizes, schedule="gpipe")
        else:
            schedule = forward_only((1,) * len(partitions), len(sizes))
            run = PipelineRun(
                partitions, schedule, Ends(scatter(payload, sizes)), trace=self._trace
            )
        return as_batch(run_forward(run, payload.tensors))

    def step(
        self, input: Batch, target: Any, loss_fn: LossFunction, *, schedule: str | None = None
    ) -> Tensor:
        """Run forward, loss and backward of a mini-batch, with the loss inside the pipeline.

        Gradients are added as by `loss.backward()`.

        Args:
            target: on `devices[-1]`: a tensor or a tuple of tensors, split like the input.
            loss_fn: (output, target) -> 0-dim mean over the samples, or (sum, count) for another
                mean. torch's own losses are joined so that ignored targets and class weights count
                as in the whole batch. Another function is probed in the first steps and every
                eighth, to find out whether it depends on the split; a `Loss` with is_exact=True
                is not.
            schedule: 'gpipe' or '1f1b', instead of the module's.
        Returns:
            the mean loss, detached, on `devices[-1]`.
        Raises:
            TypeError, ValueError: as `forward`; or the target does not fit the input; the loss is
                a sum, has parameters of its own, or depends on the split; or nothing needs a
                gradient. Then no `grad` has changed.
        """
        name = self.schedule if schedule is None else _checked_schedule(schedule)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("step trains, and inference mode keeps no graph; call the module")
        payload = as_payload(input, what="the input")
        if not self.partitions:
            raise ValueError("a module without layers has nothing to train")
        sizes = self._sizes(payload)
        loss = StepLoss(
            choose_loss(loss_fn, None, model="GPipe"), target, sizes, number=self._num_steps
        )
        partitions = self._described()
        check_trains(partitions, payload)
        run = self._training_run(partitions, payload, sizes, schedule=name, loss=loss)
        with torch.enable_grad():
            run.step()
        self._num_steps += 1
        # The checks precede the first change of a `grad`.
        loss.check_split()
        loss.check_gradient()
        of_inputs, of_parameters = run.take_gradients()
        owed = [
            (tensor, loss.scaled(gradient))
            for tensor, gradient in (
                *zip(payload.tensors, of_inputs, strict=True),
                *of_parameters.items(),
            )
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]
        # Autograd delivers the gradients, so that hooks fire and inputs' graphs are followed.
        torch.autograd.backward([tensor for tensor, _ in owed], [gradient for _, gradient in owed])
        return loss.mean()

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record what runs when, in the forwards, backwards and steps of the block."""
        self._trace, before = Trace(), self._trace
        try:
            yield self._trace
        finally:
            self._trace = before

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition.children()

    def cuda(self, device: Any = None) -> NoReturn:
        """Refuse: each partition has its device."""
        raise TypeError(_MOVED)

    def cpu(self) -> NoReturn:
        """Refuse: each partition has its device."""
        raise TypeError(_MOVED)

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the parameters' dtype; raise TypeError where a device is named or implied."""
        moves = bool(args) and not isinstance(args[0], (torch.dtype, type(None)))
        if moves or kwargs.get("device") is not None or "tensor" in kwargs:
            raise TypeError(_MOVED)
        return super().to(*args, **kwargs)

    def _sizes(self, payload: Payload) -> tuple[int, ...]:
        """Check an input; return the samples of every micro-batch."""
        devices = {tensor.device for tensor in payload.tensors if tensor is not None}
        if wrong := {str(device) for device in devices if device != self.devices[0]}:
            raise ValueError(
                f"the input is on {', '.join(sorted(wrong))}, the first partition on "
                f"{self.devices[0]}; move the input to devices[0]"
            )
        return split_sizes(payload, self.chunks)

    def _training_run(
        self,
        partitions: Sequence[Partition],
        payload: Payload,
        sizes: Sequence[int],
        *,
        schedule: str,
        loss: StepLoss | None = None,
    ) -> PipelineRun:
        """Prepare the forwards and backwards of a mini-batch."""
        checkpointed = range(len(sizes) - (self.checkpoint == "except_last"))
        if not self.training or self.checkpoint == "never":
            checkpointed = range(0)
        program = SCHEDULES[schedule](len(partitions), len(sizes), recomputed=checkpointed)
        inputs = scatter(payload, sizes)
        for piece in inputs:
            # Gradients arrive at these leaves; `take_gradients` brings them to the caller.
            for leaf, tensor in zip(piece.tensors, payload.tensors, strict=True):
                assert leaf is not None and tensor is not None
                leaf.requires_grad_(tensor.requires_grad)
        return PipelineRun(partitions, program, Ends(inputs, loss=loss), trace=self._trace)

    def _described(self) -> list[Partition]:
        return [
            Partition(
                module,
                self.devices[j],
                trained_tensors(module),
                arriving=tuple(edge for edge in self._skip_edges if edge.target == j),
                leaving=tuple(edge for edge in self._skip_edges if edge.source == j),
            )
            for j, module in enumerate(self.partitions)
        ]


_MOVED = (
    "a GPipe module cannot be moved: each of its partitions has its own device; name other "
    "ones with GPipe(..., devices=...)"
)


def _checked_schedule(name: str) -> str:
    if name not in SCHEDULES:
        raise ValueError(f"schedule is not one of {', '.join(map(repr, SCHEDULES))}: {name!r}")
    return name


def _rename(state: Any, prefix: str, new_name: Callable[[str], str]) -> None:
    """Rename a module's entries in a state dict, in place and in order."""
    entries = [
        (prefix + new_name(key.removeprefix(prefix)) if key.startswith(prefix) else key, value)
        for key, value in state.items()
    ]
    state.clear()
    state.update(entries)


def name_as_wrapped(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    for entries in (state, getattr(state, "_metadata", None) or {}):
        _rename(entries, prefix, lambda key: re.sub(r"^partitions\.\d+\.", "", key))


def name_as_partitioned(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Accept a state dict with the names of the wrapped module or of the partitions."""
    partitions = module.get_submodule("partitions").named_children()
    places = {name: j for j, partition in partitions for name, _ in partition.named_children()}

    def placed(key: str) -> str:
        layer = key.split(".")[0]
        return f"partitions.{places[layer]}.{key}" if layer in places else key

    _rename(state, prefix, placed)

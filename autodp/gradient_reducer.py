"""Sum the replicas' gradients while the last backward still runs.

DistributedDataParallel re-arranges its buckets after the first backward, so a resumed run would
sum in another order. It also needs a forward on every replica, and private calls to learn which
micro-batch is the last. Here buckets are fixed, and armed for one backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp.rank_sums import MessageSums, Sums, Watch, reserved_bytes, sums_of

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as the values of a gradient, by bytes."""


class _Bucket:
    """Hold parameters whose gradients travel as one message, each with a flag.

        | gradient | gradient | ... | in use, each parameter |

    A parameter that no sample used must get no gradient, or the optimizer would decay it. Its
    flag, summed like the gradients, says whether any replica used it.
    """

    def __init__(self, parameters: list[nn.Parameter], sums: Sums) -> None:
        self.parameters = parameters
        sizes, parts = [p.numel() for p in parameters], _parts(parameters)
        self._flat = sums.empty(sum(parts), parameters[0].dtype)
        gradients, self._in_use = self._flat.split(parts)
        # With the parameter's strides, as autograd's own gradients: fused optimizers rely on them.
        self._views = [
            part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
            for part, parameter in zip(gradients.split(sizes), parameters, strict=True)
        ]

    def send(self, sums: Sums) -> None:
        # Filled in place: a copy from the host would stall a GPU's backward.
        self._in_use.fill_(1)
        for i, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                self._in_use[i] = 0
            else:
                view.copy_(parameter.grad)
        sums.begin(self._flat)

    def take_back(self, brought: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Give the parameters what this replica brought."""
        for parameter in self.parameters:
            parameter.grad = brought[parameter]

    def put_back(self) -> dict[nn.Parameter, Tensor | None]:
        """Give the parameters their sums; return what this replica brought."""
        brought = {parameter: parameter.grad for parameter in self.parameters}
        all_here = all(gradient is not None for gradient in brought.values())
        # `tolist` waits for the device, so only if this replica lacks a gradient.
        used = [True] * len(brought) if all_here else (self._in_use > 0).tolist()
        for parameter, view, in_use in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if in_use else None
        return brought


class _Table:
    """Add up only those rows of an embedding's gradient that any replica has touched.

        | rows touched, a count each | in use |        then        | a touched row | ... |

    A batch touches few of a vocabulary's rows; the others are zeros on every replica.
    """

    def __init__(self, parameter: nn.Parameter, sums: Sums) -> None:
        self.parameters = [parameter]
        self._parameter = parameter
        self._counts = sums.empty(len(parameter) + 1, torch.int32)
        self._memory = sums.empty(parameter.numel(), parameter.dtype)
        self._touched = torch.empty(0, dtype=torch.int64)
        self._own = self._rows = parameter.new_empty(0)
        self._has_own = False

    def send(self, sums: Sums) -> None:
        """Begin to add up which rows the backward has touched."""
        gradient = self._parameter.grad
        if gradient is None:
            self._counts.zero_()
        else:
            # By their bits: squares of small values would be 0, and -0.0 must become 0.0 on all
            # replicas.
            bits = gradient.view(_BITS[gradient.itemsize])
            self._counts[:-1].copy_((bits.amax(dim=1) != 0) | (bits.amin(dim=1) != 0))
            self._counts[-1] = 1
        sums.begin(self._counts)

    def send_rest(self, sums: Sums) -> None:
        """Begin to add up the rows that any replica has touched."""
        gradient = self._parameter.grad
        self._touched = self._counts[:-1].nonzero().flatten()
        width = self._parameter.shape[1]
        self._rows = self._memory[: len(self._touched) * width].view(-1, width)
        if gradient is None:
            self._rows.zero_()
        else:
            torch.index_select(gradient, 0, self._touched, out=self._rows)
        self._own, self._has_own = self._rows.clone(), gradient is not None
        if self._rows.numel():
            sums.begin(self._memory, self._rows.numel())

    def take_back(self, brought: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Give the parameter what this replica brought: the rows that were summed are its own."""
        if not self._has_own:
            self._parameter.grad = None
        elif self._parameter.grad is not None:
            self._parameter.grad.index_copy_(0, self._touched, self._own)

    def put_back(self) -> dict[nn.Parameter, Tensor | None]:
        """Give the parameter its sum; return the rows that this replica brought."""
        parameter = self._parameter
        if not self._counts[-1]:
            return {parameter: None}
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.index_copy_(0, self._touched, self._rows)
        return {parameter: self._own}


class GradientReducer:
    """Replace each parameter's gradient by its sum over the replicas of a stage.

    Args:
        parameters: the stage's trainable parameters in forward order; the same on every replica.
        bucket_bytes: gradients are summed in vectors of about this size.
        tables: parameters, (rows, width) on the CPU; the same on every replica. A batch touches
            few of their rows, and only rows that any replica has touched are summed.
        on_one_node: whether the replicas may share memory; the same on all of them.
        watch: over NCCL, is told of each wait of the stream, and limits it.
    Attributes:
        was_early: whether a gradient grew after its bucket was sent; see `finish`.
        own_gradients: this replica's part of the last sums (of a table, the rows that were
            summed), to find where a NaN came from. A second copy of all gradients: clear it soon.
    Source: the bucketing and overlap of Li et al., "PyTorch Distributed" (VLDB 2020), section 3.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = 25 << 20,
        tables: Collection[nn.Parameter] = (),
        on_one_node: bool = True,
        watch: Watch | None = None,
    ) -> None:
        filled = _fill_buckets(parameters, bucket_bytes, frozenset(tables))
        num_bytes = sum(reserved_bytes(sum(_parts(bucket)), bucket[0].dtype) for bucket in filled)
        num_bytes += sum(reserved_bytes(len(table) + 1, torch.int32) for table in tables)
        device = parameters[0].device
        self._sums = (
            sums_of(group, device, num_bytes, watch)
            if on_one_node
            else MessageSums(group, device, watch)
        )
        self._buckets = [
            _Table(bucket[0], self._sums)
            if bucket[0] in frozenset(tables)
            else _Bucket(bucket, self._sums)
            for bucket in filled
        ]
        self._tables = [bucket for bucket in self._buckets if isinstance(bucket, _Table)]
        self._bucket_of = {p: n for n, one in enumerate(self._buckets) for p in one.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]
        self._armed = False
        self._overlaps = True
        self.was_early = False
        self.own_gradients: dict[nn.Parameter, Tensor | None] = {}

    def arm(self) -> None:
        """Start sending each bucket as soon as the coming backward has filled it.

        Raises:
            RuntimeError: a gradient of the last sums grew late, and they were not repeated.
        """
        if self.was_early:
            raise RuntimeError("a gradient grew after it was sent; call repeat() on all replicas")
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._next = 0
        self._armed = True

    def finish(self) -> None:
        """Send what is left, wait, and put the summed gradients in place.

        A replica without samples calls it without arm(): it contributes zeros.

        A backward may report a parameter again after its bucket was sent: a block called several
        times under reentrant checkpointing has a backward for each call. Then `was_early` is set.
        The replicas tell each other, and all `repeat`.

        Raises:
            PeerError: a replica is gone, or has sent nothing within the group's time limit; over
                NCCL it is for the watch to say so.
        """
        if not self._armed:
            self.arm()
        self._armed = False
        for bucket in self._buckets[self._next :]:
            bucket.send(self._sums)
        self._put_sums()

    def repeat(self) -> None:
        """Sum all anew after `finish`; from now on send at the end of a backward.

        All replicas call it if any `was_early`.
        """
        self._overlaps, self.was_early = False, False
        for bucket in self._buckets:
            bucket.take_back(self.own_gradients)
            bucket.send(self._sums)
        self._put_sums()

    def _put_sums(self) -> None:
        self._sums.complete()
        if self._tables:
            # Only now it is known which rows any replica has touched.
            for table in self._tables:
                table.send_rest(self._sums)
            self._sums.complete()
        self.own_gradients = {}
        for bucket in self._buckets:
            self.own_gradients.update(bucket.put_back())

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._buckets.clear()
        self._tables.clear()
        self._bucket_of.clear()
        self.own_gradients.clear()

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed or not self._overlaps:
            return
        number = self._bucket_of[parameter]  # type: ignore[index]
        self.was_early = self.was_early or number < self._next
        self._missing[number].discard(parameter)
        # Replicas must send in the same order, so a full bucket waits for those before it.
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._buckets[self._next].send(self._sums)
            self._next += 1


def _fill_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, tables: Collection[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """Pack parameters from last to first, as a backward finishes them; tables stand alone."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        same = bool(groups) and groups[-1][0].dtype == parameter.dtype
        if not same or parameter.nbytes > room or parameter in tables:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(parameter)
        room = 0 if parameter in tables else room - parameter.nbytes
    return groups


def _parts(parameters: list[nn.Parameter]) -> tuple[int, int]:
    """Return the numbers of values: of a bucket's gradients, and of its flags."""
    return sum(p.numel() for p in parameters), len(parameters)

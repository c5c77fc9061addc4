"""Sum the gradient of a tensor that several stages hold, such as a tied embedding.

    stage              0                1              2
    holds              embedding                       head's matrix: the same tensor
    gradient           g0 ─────────────────────────►   g2
                       g0 + g2  ◄───────────────────   (the owner sums in the order of stages)

Each stage's replicas have equal gradients by then. So each pipeline comes to the same sum, bit by
bit, and each holder's optimizer makes the same update of its own copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp import waiting_for
from pipetransformer.stage.wiring import StageWiring

_TAG = 4
"""Of its messages; other numbers are those of `wiring`."""


@final
class TiedGradients:
    """Exchange gradients of tied parameters between the stages of a pipeline.

    Args:
        parameters: those that this rank's stage trains, by name.
    Raises:
        ValueError: stages have several workers, or no flushes, so that there is no such moment.
    """

    def __init__(self, wiring: StageWiring, parameters: Mapping[str, nn.Parameter]) -> None:
        self._wiring, config = wiring, wiring.task.config
        self._stages_of = {} if wiring.is_spare else _held_by_several(wiring, parameters)
        self._parameters = {name: parameters[name] for name in self._stages_of}
        alone = config.weight_versions is None and config.stage_workers is None
        if self._stages_of and not alone:
            raise ValueError(
                f"{next(iter(self._stages_of))!r} is tied and would be on several stages, whose "
                "gradients are summed at a flush: leave weight_versions= and stage_workers= out, "
                "or untie it"
            )

    @property
    def has_any(self) -> bool:
        """Return whether this rank's stage holds such a tensor."""
        return bool(self._stages_of)

    def sum(self) -> dict[nn.Parameter, Tensor | None]:
        """Give all holders the sum; a parameter that no stage used keeps no gradient.

        Returns:
            the holders' gradients before.
        """
        held = [self._parameters[name] for name in self._stages_of]
        before = {parameter: parameter.grad for parameter in held}
        for name, stages in self._stages_of.items():
            parameter = self._parameters[name]
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            used = torch.tensor([float(parameter.grad is not None)])
            owner, *others = stages
            if self._wiring.index != owner:
                self._send(owner, [own, used])
                total, used = self._receive(owner, [own, used])
            else:
                total = own
                for stage in others:
                    part, was_used = self._receive(stage, [own, used])
                    total, used = total + part, used + was_used
                for stage in others:
                    self._send(stage, [total, used])
            parameter.grad = total if float(used) else None
        return before

    def _send(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to this pipeline's rank of another stage."""
        wiring = self._wiring
        (rank,), group = wiring.ranks_of(stage), wiring.groups.forward
        with waiting_for("to take a tied gradient", group, source=rank):
            for tensor in tensors:
                message = tensor.contiguous().to(wiring.world.link_device)
                self._wait(dist.isend(message, rank, group, _TAG))

    def _receive(self, stage: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Receive tensors as these from this pipeline's rank of another stage."""
        wiring, received = self._wiring, []
        (rank,), group = wiring.ranks_of(stage), wiring.groups.forward
        with waiting_for("a tied gradient", group, source=rank):
            for pattern in like:
                message = torch.empty_like(
                    pattern,
                    device=wiring.world.link_device,
                    memory_format=torch.contiguous_format,
                )
                self._wait(dist.irecv(message, rank, group, _TAG))
                received.append(message.to(pattern.device))
        return received

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait(timedelta(seconds=self._wiring.timeout_s))


def _held_by_several(
    wiring: StageWiring, parameters: Mapping[str, nn.Parameter]
) -> dict[str, list[int]]:
    """Return the stages that hold each parameter which more than one trains, in order."""
    plan = wiring.plan
    stages_of: dict[str, list[int]] = {}
    for stage in range(plan.length):
        names = {
            name
            for index in range(*plan.boundaries[stage : stage + 2])
            for name in wiring.task.model.tensors(index)
        }
        for name in names:
            stages_of.setdefault(name, []).append(stage)
    return {
        name: stages_of[name]
        for name, parameter in parameters.items()
        if parameter.requires_grad and len(stages_of[name]) > 1
    }

"""End a step on GPUs without waiting for them: decide there, and tell a step late.

    host    launch t | read t - 1 | launch t + 1  | read t       | ...
    GPU     ... t - 1 | t: forward, backward, end | t + 1 ...

Whether a step is skipped, and the factor on its gradients, follow from numbers that a GPU has.
Ranks add theirs up on the GPUs, so all decide by the same sums. A flag in GPU memory tells the
optimizer to leave its weights and moments alone. Who reads a step's numbers does so when the next
one is launched. What must end the run is raised then, by all ranks; all updates since, and the
step's own, were held back.

Over NCCL a wait that lasts too long ends by an abort, and the stream goes on with whatever is in
memory. So each rank adds the step's number to the sum. Where that does not come to all ranks'
numbers, the update is held back. The sums and the aborts of NCCL itself have not been run.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import final

import torch
from torch import Tensor

from autodp import MessageSums
from pipetransformer.errors import NonFiniteError, PeerError
from pipetransformer.feed import ComingStep
from pipetransformer.stage.refusals import Finding, Refusals
from pipetransformer.stage.step_end import StepEnd, step_factors
from pipetransformer.stage.step_result import LateNumbers, StepNumbers, StepSums
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import MicroBatches, TrainWork

_REFUSED = slice(3, 6)
"""Of `StepSums`, what ends a run: split, early, wrong."""


@final
class DeviceEnd(StepEnd):
    """Scale and clip the gradients of a step, update or skip, on the device.

    Args:
        part: must fit, see `fits`.
    """

    def __init__(self, wiring: StageWiring, part: TrainedPart, refusals: Refusals) -> None:
        super().__init__(wiring, part, refusals)
        config, device = wiring.task.config, wiring.device
        self._sums: MessageSums | None = None  # As it is where a process is alone.
        if (everyone := wiring.groups.everyone) is not None:
            text = "their part of the loss"
            self._sums = MessageSums(everyone, device, wiring.watch, what=text)
        self._limit, self._keeps_bad = config.max_grad_norm, config.on_nonfinite == "raise"
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        # Whether all updates are held back; in place, as a graph's kernels write it, too.
        self._holds = torch.zeros((), dtype=torch.bool, device=device)
        self._newest: tuple[LateNumbers, list[torch.cuda.Event]] | None = None
        self._ended: Exception | None = None

    @staticmethod
    def fits(part: TrainedPart) -> bool:
        """Return whether the update can be left out by a flag on the device.

        torch's fused Adam and AdamW do so; its fused SGD would leave a first momentum unset.
        Signals that sum gradients take finite ones alone, which the host must know. Sums of tied
        gradients wait for their messages.
        """
        heeds_flag = part.optimizer is None or (
            type(part.optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and getattr(part.optimizer, "_step_supports_amp_scaling", False)
        )
        return heeds_flag and not part.signals.needs_finite and not part.ties.has_any

    def begin(self) -> None:
        if self._ended is not None:  # All updates are held back from then on.
            raise self._ended

    def finish(
        self, coming: ComingStep, work: TrainWork, *, wrong: str, stops: bool
    ) -> LateNumbers:
        start, part, reducer = time.perf_counter(), self._part, self._part.reducer
        marks: list[torch.cuda.Event] = []
        self._mark(marks)
        was_early = False
        if reducer is not None:
            reducer.finish()
            # They cannot be summed anew: nobody else has heard of it yet.
            was_early, reducer.was_early = reducer.was_early, False
            reducer.own_gradients.clear()
        own = work.findings(early=was_early, wrong=bool(wrong), stops=stops)
        if self._sums is None:
            self._refusals.check([own], wrong, first_step=coming.step)
        values = work.values
        if values is None:
            values = self.scaled(work, own)
            self._mark(marks)
            part.update(coming)
        judge = partial(self._judge, step=coming.step, batches=work.batches, wrong=wrong)
        alone = own if self._sums is None else None
        numbers = LateNumbers(values, alone, self._wiring.check, judge)
        work.spent_s["compute"] += time.perf_counter() - start
        self._await_newest(work.spent_s)
        self._newest = numbers, marks
        return numbers

    @torch.no_grad()
    def scaled(self, work: TrainWork, own: StepSums | None = None) -> Tensor:
        """Scale and clip the gradients, and have a bad step skipped; return its numbers, (n,).

        Args:
            own: what this rank tells the others, if there are any.
        """
        measured = self._part.signals.measure()
        squares = measured.sums[-1]
        total, count = work.loss.sums()
        own_loss = total if isinstance(total, Tensor) else self._zero
        told, refused = self._zero.new_empty(0), None
        if own is not None and self._sums is not None:
            told = self._told(work, own, squares)
            total, count, squares, *_, number = told.unbind()
            # Anything with NaN differs from 0, too.
            missing = (number - self._all_numbers(work.step)).abs()
            refused = told[_REFUSED].sum() + missing != 0
        assert isinstance(total, Tensor), "a loss with a gradient is a tensor"
        step = step_factors(total, count, squares, divisor=work.loss.divisor, limit=self._limit)
        # inf - inf and anything with NaN is NaN, which differs from 0.
        bad = (step.loss + step.norm) - (step.loss + step.norm) != 0
        self._part.signals.add(measured, scale=step.correction, skips=bad)
        self._scale(step.factor)
        self._heed(bad, refused)
        numbers = torch.stack((step.loss, step.norm, bad.double(), own_loss))
        return torch.cat((numbers, measured.parts, told))

    def _all_numbers(self, step: int) -> int:
        """Return the sum of the numbers by which ranks say that they are in a step."""
        return self._wiring.world.size * (step + 1)

    def _told(self, work: TrainWork, own: StepSums, squares: Tensor) -> Tensor:
        """Return all ranks' sums, and the sum of their steps' numbers, on the device."""
        assert self._sums is not None
        # Ranks of a stage hold equal gradients.
        first = (*work.loss.sums(), squares if self._wiring.speaks_for_stage else 0.0)
        of_host = [0.0 if isinstance(one, Tensor) else one for one in first]
        values = (*of_host, *own.as_list()[len(first) :], work.step + 1)
        numbers = torch.tensor(values, dtype=torch.float64, pin_memory=True)
        numbers = numbers.to(self._wiring.device, non_blocking=True)
        for place, one in enumerate(first):
            if isinstance(one, Tensor):
                numbers[place].copy_(one)
        self._sums.begin(numbers)
        self._sums.complete()
        return numbers

    def _mark(self, marks: list[torch.cuda.Event]) -> None:
        """Mark where the GPU begins and ends to sum over ranks."""
        if self._sums is not None:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

    def _await_newest(self, spent_s: dict[str, float]) -> None:
        """Wait for the step before: the host is one step ahead of the GPU, and no more."""
        if self._newest is None:
            return
        start, (numbers, marks) = time.perf_counter(), self._newest
        numbers.wait()
        waited_s = time.perf_counter() - start
        summed_s = min(marks[0].elapsed_time(marks[1]) / 1e3, waited_s) if marks else 0.0
        spent_s[self._spent_on] += summed_s
        spent_s["compute"] += waited_s - summed_s

    def _judge(
        self,
        values: list[float],
        numbers: StepNumbers,
        *,
        step: int,
        batches: MicroBatches,
        wrong: str,
    ) -> None:
        """Raise, or warn, where a step is refused or its numbers are not finite. Collective."""
        try:
            if self._sums is not None:
                self._refuse(numbers.sums, values[-1], step, wrong)
            if numbers.skipped:
                loss, norm = numbers.loss, numbers.gradient_norm
                what = f"step {step}: the loss is {loss}, the gradient's norm {norm}"
                self._refusals.nonfinite(what, step, batches, self._found(values))
        except (ValueError, NonFiniteError, PeerError) as error:
            self._ended = type(error)(
                f"{error}; the run has ended there; resume from a checkpoint, or start another "
                "Trainer"
            )
            raise

    def _refuse(self, sums: StepSums, number: float, step: int, wrong: str) -> None:
        if number != self._all_numbers(step):
            raise PeerError(f"step {step}: some rank's part of the loss never came")
        self._refusals.check([sums], wrong, first_step=step)
        if sums.early:
            raise ValueError(
                f"step {step}: a gradient grew after it was summed over the replicas, as it did "
                "not in this stage's first step. A block that is called several times under "
                "torch.utils.checkpoint does so: give that use_reentrant=False"
            )

    def _found(self, values: list[float]) -> Finding:
        """Return what of a step's numbers is not finite on this rank."""
        part, (_, _, _, own_loss, *rest) = self._part, values
        sublayers = self._wiring.task.model.sublayers
        named = {sublayers[index].name: index for index in part.indices}
        # After the parts' squares come the sums.
        parts = zip(part.signals.part_names, rest, strict=False)
        bad = [named[name] for name, square in parts if not math.isfinite(square)]
        # What it brought to a sum over replicas is gone by now.
        brought = True if part.reducer is None else None
        return Finding(not math.isfinite(own_loss), max(bad, default=-1), brought)

    def _scale(self, factor: Tensor | None) -> None:
        """Scale the gradients."""
        gradients = self._part.gradients
        if factor is None or not gradients:
            return
        for dtype in {g.dtype for g in gradients}:  # One launch for all of a dtype.
            alike = [g for g in gradients if g.dtype == dtype]
            torch._foreach_mul_(alike, factor.to(dtype))

    def _heed(self, bad: Tensor, refused: Tensor | None) -> None:
        """Have the optimizer leave out the update of a step that is bad, or follows a last one."""
        if self._keeps_bad:
            self._holds.logical_or_(bad)
        if refused is not None:
            self._holds.logical_or_(refused)
        if self._part.optimizer is not None:
            # Where torch's fused optimizers look for it, as GradScaler tells them.
            held = self._holds if self._keeps_bad else self._holds | bad
            self._part.optimizer.found_inf = held.float()  # type: ignore[attr-defined]

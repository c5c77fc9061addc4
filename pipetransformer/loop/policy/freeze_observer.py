"""Watch a training from outside, ask a policy what freezes, and freeze that.

each step      end_update, end_step: rates, and what the first steps cost
now and then   look: the policy is asked ─► blocks freeze
                                         └► in a dry run it is only noted
at the end     publish: what froze, or would have frozen
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import distributed as dist
from torch import nn

from freeze import (
    FreezeChoice,
    FreezeContext,
    FreezeSchedule,
    LayerStats,
    apply,
    checked_decision,
    chosen_policy,
    find_layers,
    frozen_since,
)
from freeze.in_place import freezing_with, frozen_in_place, thawed_by
from freeze.signals import WeightChanges, relative_update
from pipetransformer.loop.policy.adapter_advice import adapter_advice
from pipetransformer.loop.policy.freeze_advice import FreezeAdvice, Look
from pipetransformer.loop.policy.step_times import StepCosts, StepTimes
from pipetransformer.loop.rows import RowService

_SIGNALS = frozenset({"relative_update"})
_LOGGER = logging.getLogger(__name__)


class FreezeObserver:
    """Be what all that watch a training share; each brings the hooks of its trainer or loop.

    It costs a copy of the weights, a comparison at each look, and hooks on the first few steps.

    Args:
        every_steps: optimizer steps between two looks; None looks behind each epoch.
        dry_run: whether the policy's answers are only noted.
        layers: the model's blocks, bottom first; None finds them.
    Attributes:
        keeps_outputs: whether frozen layers' outputs are cached, as predicted steps count.
        watches: whether there is a policy; else nothing is watched.
    Raises:
        ValueError: every_steps is less than 1, there are no layers, or the policy needs another
            signal than relative updates; later, it lets layers rest.
    """

    keeps_outputs = True
    watches = True

    def __init__(
        self,
        freeze: FreezeChoice,
        *,
        every_steps: int | None,
        dry_run: bool,
        layers: Sequence[nn.Module] | None = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps is {every_steps}; give at least 1")
        if layers is not None and not layers:
            raise ValueError("layers is empty; give the model's blocks, or None to find them")
        self._policy = chosen_policy(freeze, _SIGNALS)
        self._every, self.dry_run, self._given = every_steps, dry_run, layers
        self._rows: RowService | None = None
        self._blocks: list[nn.Module] = []
        self._looks: list[Look] = []
        self._since: tuple[int, ...] = ()
        self._costs: StepCosts | None = None
        self._times: StepTimes | None = None
        self._peak = 0.0
        self._metrics: dict[str, float] = {}
        self._evaluated_at: int | None = None
        self._unused = json.dumps(self.state_dict())

    def forget(self) -> None:
        """Forget a training that was watched before; call it before `begin`."""
        self.load_state_dict(json.loads(self._unused))

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        max_steps: int,
        steps_per_epoch: int,
        scaler: Any = None,
    ) -> None:
        """Begin to watch a model; in a resumed training its frozen layers freeze again.

        Args:
            optimizers: or what has their `param_groups`; the first one has the learning rate.
            scaler: a `GradScaler`.
        """
        if not self.watches:
            return
        if self._times is not None:
            self._times.close()  # A training that failed left its hooks.
            self._times = None
        self._model, self._optimizers = model, optimizers
        self._scaler, self._scale = scaler, _scale_of(scaler)
        self._blocks = self._blocks_of(model)
        self._were_frozen = {*frozen_in_place(model).values()} - self._part_weights
        self.expect(max_steps=max_steps, steps_per_epoch=steps_per_epoch)
        # What an earlier run froze stays so until the policy is asked: else it would thaw in vain.
        self._waits = not (self.dry_run or self._looks)
        if not self._looks:
            self._propose_upper_adapters()
            self._tell_of_noise()
        if not self.dry_run and self._looks:
            self._freeze(len(self._since))
        if self._costs is None and (self.dry_run or not self._since):
            self._times = StepTimes(model, self._blocks)
        self._coming_rate: float | None = None
        self._begin_interval()

    def _propose_upper_adapters(self) -> None:
        num_frozen, policy = 0, self._policy
        if isinstance(policy, FreezeSchedule):
            epochs = range(-(-self._max_steps // self._per_epoch))
            num_frozen = max(map(policy.at, epochs), default=0)
        num_frozen = num_frozen or len(self._blocks) // 2
        caches = self.keeps_outputs
        text = adapter_advice(self._model, self._blocks, num_frozen, caches=caches)
        if text and _is_first_rank():
            _LOGGER.warning("%s", text)

    def _tell_of_noise(self) -> None:
        """Say that NEFTune, which a user has asked for, ends where the embedding freezes."""
        modules = self._model.named_modules()
        noisy = [name for name, one in modules if getattr(one, "neftune_noise_alpha", None)]
        if noisy and _is_first_rank():
            _LOGGER.warning(
                "NEFTune adds no noise once %r is frozen, with or without rows: it does so in "
                "training alone, and what is frozen runs in eval mode",
                noisy[0],
            )

    def expect(self, *, max_steps: int, steps_per_epoch: int) -> None:
        """Note how long the training and an epoch are, where that is known better by now."""
        self._max_steps, self._per_epoch = max_steps, steps_per_epoch

    def end_update(self, *, skipped: bool = False) -> None:
        """Note the end of an optimizer's step; if `skipped`, no weight moved.

        A scaler that skips a step lowers its scale. Whether the optimizer's step was called says
        nothing, as fused optimizers skip it themselves.
        """
        if not self.watches:
            return
        before, self._scale = self._scale, _scale_of(self._scaler)
        skipped = skipped or self._scale < before
        if not skipped and not self._num_updates:
            self._has_gradient = [_moves(layer.values()) for layer in self._weights]
        self._num_updates += not skipped
        if self._times is not None:
            self._times.end_update()

    def end_step(self, step: int) -> None:
        """Note that `step` steps are done, once the next one's rate is set; look if it is time."""
        if not self.watches:
            return
        if self._coming_rate is not None:
            self._rates.append(self._coming_rate)
        self._coming_rate = self._learning_rate()
        if self._times is not None:
            self._times.end_step()
            if self._times.is_done:
                self._stop_timing()
        if step % (self._every or self._per_epoch) == 0:
            self.look(step)

    def look(self, step: int, *, epoch: int | None = None) -> int:
        """Ask the policy now, with `step` steps done; return how many layers freeze. Collective.

        Args:
            epoch: of the next step; None takes what the number of steps says.
        """
        if not self.watches:
            return 0
        # Who names an epoch begins it, however many were expected.
        is_over = epoch is None and step >= self._max_steps
        epoch = step // self._per_epoch if epoch is None else epoch
        updates = self._updates()
        decision = checked_decision(self._policy, self._context(step, epoch, updates))
        if decision.resting:
            raise ValueError(
                f"{self._policy.name} lets layers {decision.resting} rest, which is not done in "
                "loops of others; give a policy that freezes the layers below"
            )
        num_frozen = self._agreed(decision.num_frozen)
        if not self.dry_run and (self._waits or num_frozen != len(self._since)):
            self._freeze(num_frozen, is_over=is_over)
        self._since = frozen_since(self._since, num_frozen, step)
        self._begin_interval()
        self._looks.append(Look(step, num_frozen, updates, decision.reason))
        if _is_first_rank():
            _LOGGER.info("step %d: %s", step, self.advice)
        return num_frozen

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note an evaluation's results, for policies."""
        # Joined: evaluations of several data sets have metrics of different names.
        self._metrics |= metrics
        self._evaluated_at = step

    def publish(self, took: str = "") -> None:
        """Watch no more, and log what was seen, if anything; a dry run's as a warning.

        Args:
            took: says what the training took, in the place of what steps were predicted to take.
        """
        self._stop_timing()
        seen = (self.advice.course if took else str(self.advice)) if self._looks else ""
        if (seen or took) and _is_first_rank():
            level = logging.WARNING if self.dry_run else logging.INFO
            _LOGGER.log(level, "%s", "; ".join(filter(None, (seen, took))))

    @property
    def advice(self) -> FreezeAdvice:
        return FreezeAdvice(len(self._blocks), self.dry_run, tuple(self._looks), self._costs)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs, serialisable as JSON."""
        return {
            "policy": self._policy.state_dict(),
            "since": list(self._since),
            "peak": self._peak,
            "costs": self._costs and vars(self._costs),
            "looks": [vars(look) for look in self._looks],
            "metrics": dict(self._metrics),
            "evaluated_at": self._evaluated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; before `begin`."""
        self._policy.load_state_dict(state["policy"])
        self._since, self._peak = tuple(state["since"]), state["peak"]
        self._metrics, self._evaluated_at = dict(state["metrics"]), state["evaluated_at"]
        self._costs = None
        if (costs := state["costs"]) is not None:
            layers = {name: tuple(costs[name]) for name in ("forward_s", "backward_s", "update_s")}
            self._costs = StepCosts(costs["step_s"], **layers)
        looks = [{**look, "updates": tuple(look["updates"])} for look in state["looks"]]
        self._looks = [Look(**look) for look in looks]

    @property
    def _part_weights(self) -> set[nn.Parameter]:
        return set() if self._rows is None else self._rows.part_weights

    def _blocks_of(self, model: nn.Module) -> list[nn.Module]:
        if self._rows is None:
            return list(self._given) if self._given is not None else find_layers(model)
        blocks = list(self._rows.row_blocks)
        if self._given is not None and [*map(id, self._given)] != [*map(id, blocks)]:
            raise ValueError(
                f"layers has {len(self._given)} blocks, but the model runs {len(blocks)} others "
                "one after the other, whose outputs can be cached; leave layers= out, or "
                "cache=False"
            )
        return blocks

    def _freeze(self, num_frozen: int, *, is_over: bool = False) -> None:
        if num_frozen != len(self._since):
            self._stop_timing()
        if not is_over:  # Behind the last step a thaw is in vain anyway.
            self._refuse_vain_thaw(num_frozen)
        if self._rows is None:
            apply(self._model, num_frozen, layers=self._blocks)
        else:
            self._rows.set_depth(num_frozen)
        self._waits = False

    def _refuse_vain_thaw(self, num_frozen: int) -> None:
        """Raise a ValueError if a weight thaws that could not train, as no optimizer has it."""
        if self._rows is None:
            thawed = thawed_by(self._model, num_frozen, layers=self._blocks)
        else:
            thawed = self._rows.thawed_by(num_frozen)
        # What trained by then, but is in no optimizer, does not train with or without a thaw.
        names = [name for name, p in thawed.items() if p in self._were_frozen]
        why = (
            "DistributedDataParallel has not found them to train, so that each rank would train "
            "its own"
        )
        if not _is_replicated():
            # Now: a loop may have added a group since.
            groups = [group for one in self._optimizers for group in one.param_groups]
            known = {p for group in groups for p in group["params"]}
            names = [name for name in names if thawed[name] not in known]
            why = (
                "the optimizer does not have them, as it was built before, so that they would not "
                "train"
            )
        if names:
            self._stop_timing()  # No trainer ends what it could not begin.
            more = f" and {len(names) - 1} other weights" if names[1:] else ""
            raise ValueError(
                f"freezing {num_frozen} blocks thaws {names[0]!r}{more}, frozen before this "
                f"training began: {why}. Call freeze.apply(model, 0), which thaws them, before "
                "you build the optimizer, or the trainer that builds it"
            )

    def _agreed(self, num_frozen: int) -> int:
        """Return what rank 0's policy has said: policies may look at times, which differ."""
        if self._rows is not None:
            return self._rows.agreed(num_frozen)
        said = [num_frozen]
        if _is_replicated():
            dist.broadcast_object_list(said, src=0)
        return said[0]

    def _context(self, step: int, epoch: int, updates: Sequence[float | None]) -> FreezeContext:
        # What an earlier training froze may train in this one.
        thaws = self._were_frozen if self._waits else set()
        return FreezeContext(
            step=step,
            epoch=epoch,
            max_steps=self._max_steps,
            steps_per_epoch=self._per_epoch,
            learning_rate=self._learning_rate(),
            mean_learning_rate=statistics.fmean(self._rates) if self._rates else None,
            peak_learning_rate=self._peak,
            layers=tuple(
                LayerStats(
                    f"layer {index}",
                    index,
                    sum(p.numel() for p in layer.values() if p.requires_grad or p in thaws),
                    relative_update=update,
                )
                for index, (layer, update) in enumerate(zip(self._weights, updates, strict=True))
            ),
            num_frozen=len(self._since),
            frozen_since=self._since,
            metrics=self._metrics,
            evaluated_at=self._evaluated_at,
            predict=self._predicted_s,
        )

    def _learning_rate(self) -> float:
        """Return the largest rate of the groups now, and note the largest of the schedule."""
        groups = self._optimizers[0].param_groups
        now = max(float(group["lr"]) for group in groups)
        # Schedulers leave their first rate in the groups, and OneCycleLR its largest one, too.
        known = [
            group[key] for group in groups for key in ("initial_lr", "max_lr") if key in group
        ]
        self._peak = max([self._peak, now, *map(float, known)])
        return now

    def _predicted_s(self, num_frozen: int) -> float:
        if self._costs is None:
            raise ValueError("no step has been timed yet; look later, with a larger every_steps")
        saved = self._costs.saved_share(num_frozen, cached=self.keeps_outputs)
        return self._costs.step_s * (1 - saved)

    def _begin_interval(self) -> None:
        self._weights = [
            {name: p for name, p in layer.items() if p not in self._part_weights}
            for layer in freezing_with(self._model, self._blocks)
        ]
        self._changes = WeightChanges({str(i): layer for i, layer in enumerate(self._weights)})
        self._changes.begin()
        self._num_updates, self._rates = 0, list[float]()
        self._has_gradient = list[bool]()

    def _updates(self) -> tuple[float | None, ...]:
        """Return each layer's relative change per update; None if not known.

        A layer without a gradient moves by weight decay alone, which does not count.
        """
        squares = self._changes.squares() if self._num_updates else {}
        # If no layer has a gradient, the loop freed them all before it reported the step.
        still = [i for i, has in enumerate(self._has_gradient) if not has]
        for index in still if any(self._has_gradient) else ():
            squares.pop(str(index), None)
        pairs = [squares.get(str(index), (None, None)) for index in range(len(self._blocks))]
        return tuple(relative_update(*pair, num_steps=self._num_updates) for pair in pairs)

    def _stop_timing(self) -> None:
        if self._times is not None:
            self._costs, self._times = self._times.close(), None


def _scale_of(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())


def _moves(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether some gradient is not zero everywhere."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return any(bool(gradient.any()) for gradient in gradients)


def _is_replicated() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_first_rank() -> bool:
    return not _is_replicated() or dist.get_rank() == 0

"""Fine-tune a pretrained ViT: ours against the same freezing by hand, and against none."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from experiments.benchmarks.measuring.timed_loop import RivalTask
from experiments.gpu_check.both_sides import our_trainer, plain_loop, take_steps, two_thirds
from experiments.gpu_check.device_time import seconds_on
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.workloads import Rows, fine_tuned_vit, read_images
from pipetransformer import Trainer

_EPOCHS = 6
_PLAIN, _IDEAL = "plain, frozen alike", "ideal, frozen alike"


def run(findings: Findings, setting: Setting) -> None:
    """Time whole trainings, each from the same weights, and evaluate them."""
    task = fine_tuned_vit(setting)
    test = read_images(setting, "test", task.dataset[0]["x"].shape[-1])
    trainings = _Trainings(findings, task, task.build(), test, setting.device)
    # Imports and kernels are loaded by the first step of a process.
    plain_loop(task, trainings.model, setting.device, keeps=False).step()
    deep = two_thirds(task)
    freezes, never = (0, deep // 2, *[deep] * (_EPOCHS - 2)), (0,) * _EPOCHS
    for name, frozen in (("plain, unfrozen", never), (_PLAIN, freezes), (_IDEAL, freezes)):
        findings.check(name, partial(trainings.by_hand, name, frozen, keeps=name == _IDEAL))
    for name, ideal in (("ours, cached", _IDEAL), ("ours, uncached", _PLAIN)):
        findings.check(name, partial(trainings.ours, name, freezes, ideal))


def _step(trainer: Trainer, spent: Counter[str]) -> None:
    """Take a step, and add up what the host spent it on."""
    spent.update(trainer.step().breakdown)


def _plainly(step: Callable[[], object]) -> None:
    step()


def _print_profile(name: str, step: Callable[[], object]) -> None:
    """Take a step that layers freeze before; print, into the log, what the host spent it on."""
    found = cProfile.Profile()
    found.runcall(step)
    print(f"==== host, the first step with frozen layers: {name}")
    pstats.Stats(found).sort_stats("tottime").print_stats(25)
    pstats.Stats(found).sort_stats("cumtime").print_stats(60)


@dataclass(frozen=True)
class _Trainings:
    """Fine-tune copies of a model, frozen by epoch, and note what each came to.

    Args:
        taken_s: seconds of whole trainings, by their names.
    """

    findings: Findings
    task: RivalTask
    model: nn.Module
    test: Rows
    device: str
    taken_s: dict[str, float] = field(default_factory=dict)

    def by_hand(self, name: str, frozen: tuple[int, ...], *, keeps: bool) -> None:
        """Train by the plain loop, or by the ideal one."""
        loop = plain_loop(self.task, self.model, self.device, keeps=keeps)
        epochs_s = []
        for epoch, num_frozen in enumerate(frozen):
            if num_frozen != frozen[max(0, epoch - 1)]:
                loop.freeze(num_frozen)
            epochs_s.append(self._epoch_s(loop.step))
        self._note(name, epochs_s, accuracy=loop.accuracy(self.test.columns))

    def ours(self, name: str, frozen: tuple[int, ...], ideal: str) -> None:
        """Train by the Trainer; what it measures before the first step is not counted."""
        settings: dict[str, Any] = {"frozen": frozen, "cache": ideal == _IDEAL}
        with our_trainer(self.task, self.model, self.device, **settings) as trainer:
            trainer.begin()
            epochs_s, parts_s = [], []
            for epoch in range(len(frozen)):
                spent: Counter[str] = Counter()
                first = partial(_print_profile, name) if epoch == 1 else _plainly
                epochs_s.append(self._epoch_s(partial(_step, trainer, spent), first=first))
                parts_s.append({name: round(seconds, 3) for name, seconds in spent.items()})
            accuracy = trainer.evaluate(self.test)["accuracy"]
        share = self.taken_s[ideal] / sum(epochs_s) if ideal in self.taken_s else None
        rows_read = trainer.report.cache_hits
        changes_s = [round(float(one["seconds"]), 3) for one in trainer.report.transitions]
        found = {"transitions_s": changes_s, "host_s": parts_s, "rows_read": rows_read}
        self._note(name, epochs_s, of_ideal=share, accuracy=accuracy, **found)

    def _epoch_s(
        self,
        step: Callable[[], object],
        *,
        first: Callable[[Callable[[], object]], object] = _plainly,
    ) -> float:
        """Time an epoch, of which something takes the first step."""
        num_steps = -(-len(self.task.dataset) // self.task.batch_size)

        def train() -> None:
            first(step)
            take_steps(step, num_steps - 1)

        return seconds_on(self.device, train)

    def _note(self, name: str, epochs_s: list[float], **found: Any) -> None:
        """Note a training; its last epoch is the one in which all is warm."""
        self.taken_s[name] = sum(epochs_s)
        times: dict[str, Any] = {
            "last_epoch_s": epochs_s[-1],
            "all_s": sum(epochs_s),
            "epochs_s": epochs_s,
        }
        self.findings.note(name, **found, **times)

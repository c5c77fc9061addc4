"""Fine-tune a pretrained ViT: ours against the same freezing by hand, and against none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from experiments.gpu_check.device_time import seconds_on
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loops import ByTrainer, Ideal, Loop, Plain
from experiments.gpu_check.workloads import fine_tuned_vit, read_images

_EPOCHS = 6
_PLAIN, _IDEAL = "plain, frozen alike", "ideal, frozen alike"


def run(findings: Findings, setting: Setting) -> None:
    """Time whole trainings, each from the same weights, and evaluate them."""
    case, device = fine_tuned_vit(setting), setting.device
    test = read_images(setting, "test", case.rows[0]["x"].shape[-1])
    Plain(case, device).epoch(0)  # Imports and kernels are loaded by the first steps of a process.
    deep = case.num_frozen
    freezes, never = (0, deep // 2, *[deep] * (_EPOCHS - 2)), (0,) * _EPOCHS
    taken_s: dict[str, float] = {}

    def train(name: str, frozen: tuple[int, ...], loop: Loop, ideal: str = "") -> None:
        with loop:
            epochs_s = [seconds_on(device, partial(loop.epoch, one)) for one in frozen]
            taken_s[name] = sum(epochs_s)
            share = taken_s[ideal] / taken_s[name] if ideal in taken_s else None
            # The last epoch is the one in which all is warm.
            findings.note(
                name,
                of_ideal=share,
                accuracy=loop.accuracy(test),
                last_epoch_s=epochs_s[-1],
                all_s=taken_s[name],
                epochs_s=epochs_s,
                **_of_trainer(loop),
            )

    def check(
        name: str,
        frozen: tuple[int, ...],
        make: Callable[..., Loop],
        ideal: str = "",
        **own: object,
    ) -> None:
        findings.check(name, lambda: train(name, frozen, make(case, device, **own), ideal))

    check("plain, unfrozen", never, Plain)
    check(_PLAIN, freezes, Plain)
    check(_IDEAL, freezes, Ideal)
    check("ours, cached", freezes, ByTrainer, _IDEAL, epochs=_EPOCHS)
    check("ours, uncached", freezes, ByTrainer, _PLAIN, epochs=_EPOCHS, cache=False)


def _of_trainer(loop: Loop) -> dict[str, object]:
    if not isinstance(loop, ByTrainer):
        return {}
    changes = loop.trainer.report.transitions
    seconds = [round(float(one["seconds"]), 3) for one in changes]
    return {"transitions_s": seconds, "rows_read": loop.rows_read}

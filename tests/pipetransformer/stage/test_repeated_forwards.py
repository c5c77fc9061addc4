"""Prove which forwards run again in the backward, what memory that saves, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from freeze import FreezeSchedule
from pipetransformer import Trainer, is_checkpointing, is_recomputing
from tests.helpers.inspection import elastic_of, stage_of
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.models import NUM_CLASSES, NUM_FEATURES, tiny_data, tiny_trainer

LAYERS = 4


# Outside of the layers, as a layer that counts its calls is refused.
COUNTS = [Counter[tuple[bool, bool]]() for _ in range(LAYERS + 1)]


class Told(nn.Module):
    """Count forwards by what a layer may ask of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.number = number

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            COUNTS[self.number][is_checkpointing(), is_recomputing()] += 1
        return hidden + self.inner(hidden).tanh()


def counted(trainer: Trainer) -> list[Counter[tuple[bool, bool]]]:
    """Take a step; return what every layer has counted in it."""
    for one in COUNTS:
        one.clear()
    trainer.step()
    return [Counter(one) for one in COUNTS]


def trainer_of(*layers: nn.Module, **settings: object) -> Trainer:
    model = nn.Sequential(
        nn.Linear(NUM_FEATURES, NUM_FEATURES), *layers, nn.Linear(NUM_FEATURES, NUM_CLASSES)
    )
    given = {"activation_checkpointing": True, "global_batch_size": 12, **settings}
    return tiny_trainer(model.double(), **given)


def test_each_trained_layer_but_the_head_runs_again_once_for_every_micro_batch() -> None:
    told = [Told(number) for number in range(LAYERS)]
    head = nn.Sequential(Told(LAYERS), nn.Linear(NUM_FEATURES, NUM_CLASSES))
    model = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), *told, head).double()
    with tiny_trainer(
        model,
        freeze=FreezeSchedule((0, 3)),
        activation_checkpointing=True,
        global_batch_size=13,
        micro_batches=3,
        epochs=2,
    ) as trainer:
        trainer.step()  # Before it, layers are probed and measured.
        *layers, top = counted(trainer)
        assert all(one == {(True, False): 3, (False, True): 3} for one in layers)
        assert top == {(False, False): 3}
        trainer.step()
        *layers, top = counted(trainer)  # Frozen layers run in eval mode.
        assert [one.total() for one in (*layers, top)] == [0, 0, 6, 6, 3]


def test_without_it_and_in_evaluations_each_forward_runs_once() -> None:
    with trainer_of(Told(0), activation_checkpointing=False, micro_batches=2) as trainer:
        trainer.step()
        assert counted(trainer)[0] == {(False, False): 2}
    with trainer_of(Told(0), eval_dataset=tiny_data()) as trainer:
        trainer.step()
        before = Counter(COUNTS[0])
        trainer.evaluate()
        assert COUNTS[0] == before


class Wide(nn.Module):
    """Save far more than the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NUM_FEATURES, 16 * NUM_FEATURES)
        self.down = nn.Linear(16 * NUM_FEATURES, NUM_FEATURES)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))


def test_the_peak_of_live_memory_falls_by_what_the_planner_predicts() -> None:
    peaks, predicted = [], []
    for again in (False, True):
        # So many samples that weights and gradients hardly count.
        with trainer_of(
            *(Wide() for _ in range(6)),
            data=tiny_data(num_samples=520),
            activation_checkpointing=again,
            global_batch_size=260,
            micro_batches=1,
        ) as trainer:
            trainer.step()
            parameters = stage_of(trainer).trained.parameters.values()
            with LiveBytes(list(parameters)) as live:
                trainer.step()
            peaks.append(live.peak)
            decision = elastic_of(trainer).decision
            assert decision is not None and decision.plan.recomputes is again
            predicted.append(decision.plan.peak_bytes[0])
    # What a backward itself needs beside, such as gradients of activations, no model counts.
    assert peaks[0] - peaks[1] == pytest.approx(predicted[0] - predicted[1], rel=0.1)
    assert peaks[1] < 0.5 * peaks[0]


def test_a_layer_that_writes_into_its_input_is_refused_by_its_name() -> None:
    class InPlace(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.add_(1.0)

    with trainer_of(InPlace(), activation_checkpointing=False) as trainer:
        trainer.step()
    with (
        trainer_of(InPlace()) as trainer,
        pytest.raises(ValueError, match="sublayer '1' writes into its input, from which it must"),
    ):
        trainer.step()

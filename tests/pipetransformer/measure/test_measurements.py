"""Prove that measuring leaves the model as it was, and that all ranks get the same figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from autopipe.profile.profile import Profile
from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.feed.samples import Batch
from pipetransformer.measure import measurements as measure_module
from pipetransformer.measure.measurements import measure
from pipetransformer.model import Task
from pipetransformer.processes.world import World, connect
from tests.helpers.inspection import model_of, task_of
from tests.helpers.models import Entries, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.tasks import (
    ALONE,
    DATA,
    assert_untouched,
    disturbed_model,
    make_task,
    read,
    snapshot,
)


def read_single(ids: Tensor) -> Batch:
    """Read in single precision."""
    return {name: t.float() if t.is_floating_point() else t for name, t in read(ids).items()}


def test_measuring_leaves_model_and_random_numbers_as_they_were() -> None:
    model = disturbed_model()
    task, before = make_task(model), snapshot(model)
    measure(task, ALONE, read)
    assert_untouched(model, before)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_bytes_are_those_of_the_precision(precision: str) -> None:
    whole, low = (
        measure(make_task(tiny_model(dtype=torch.float32), precision=one), ALONE, read_single)
        for one in (None, precision)
    )
    for before, now in zip(whole.sublayers[:-1], low.sublayers[:-1], strict=True):
        assert 2 * now.output_bytes == before.output_bytes
        assert now.gradient_bytes == now.parameter_bytes == before.parameter_bytes
        assert now.saved_bytes < before.saved_bytes
    # A block's two matrices.
    assert low.sublayers[1].copy_bytes == 2 * (8 * 16 + 16 * 8)
    assert whole.sublayers[1].copy_bytes == 0


def test_measuring_leaves_no_hook_behind() -> None:
    model = tiny_model()
    measure(make_task(model), ALONE, read)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, (1,)), (2, (1, 2)), (6, (1, 6)), (32, (2, 8, 32)), (4096, (256, 1024, 4096))],
)
def test_sizes_to_measure_are_quarters_of_the_batch(
    batch_size: int, sizes: tuple[int, ...]
) -> None:
    assert measure(make_task(global_batch_size=batch_size), ALONE, read).batch_sizes == sizes


def test_sizes_beyond_the_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(sublayers: object, batch: Batch) -> float:
        return float(len(batch["x"]))

    monkeypatch.setattr(measure_module, "chain_seconds", seconds)
    # However slow the machine is, the sublayers are one span.
    monkeypatch.setattr("pipetransformer.measure.kinds._WHOLE_S", 60.0)
    monkeypatch.setattr(measure_module, "_BUDGET_S", 10.5)
    profile = measure(make_task(global_batch_size=16), ALONE, read)
    assert profile.batch_sizes == (1, 4)  # Two rounds of 1 + 4 + 16 seconds would take 42.


def test_every_sublayer_is_measured_under_its_name_and_layer() -> None:
    task = make_task(global_batch_size=26)
    measured = measure(task, ALONE, read)
    costs, sublayers = measured.sublayers, task.model.sublayers
    assert [(cost.name, cost.layer) for cost in costs] == [(s.name, s.layer) for s in sublayers]
    for index, cost in enumerate(costs):
        assert cost.parameter_bytes == sum(t.nbytes for t in task.model.tensors(index).values())
        assert min(*cost.forward_s, *cost.backward_s, *cost.frozen_s) > 0
    # The head's output is the loss, a float64 for the largest batch of 26 samples.
    assert [cost.output_bytes for cost in costs] == [64.0] * 5 + [8 / 26]
    assert measured.cache_bytes_per_s > 0 and measured.cache_write_bytes_per_s > 0
    assert measured.cache_device_bytes_per_s is None


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_optimizer_state_is_measured_in_parameter_bytes() -> None:
    # AdamW holds two moments, and a step counter of 4 bytes a parameter tensor.
    for cost in measure(make_task(global_batch_size=8), ALONE, read).sublayers:
        assert 2.0 < cost.optimizer_bytes / cost.gradient_bytes < 2.1
    for cost in measure(make_task(global_batch_size=8, optimizer=sgd), ALONE, read).sublayers:
        assert cost.gradient_bytes > 0 == cost.optimizer_bytes


def test_a_model_with_nothing_to_train_needs_no_optimizer() -> None:
    profile = measure(make_task(tiny_model().requires_grad_(False)), ALONE, read)
    assert profile.optimizer_s_per_byte == 0.0
    assert {cost.gradient_bytes + cost.optimizer_bytes for cost in profile.sublayers} == {0}


def measure_here() -> Profile:
    return measure(make_task(), connect("cpu", timeout_s=30.0), read)


def test_all_ranks_get_the_same_figures_with_links_measured(two_ranks: Pool) -> None:
    first, second = two_ranks.run(measure_here)
    assert first == second and isinstance(first, Profile)
    link, (total,) = first.link, first.all_reduce
    assert link.latency_s > 0 and link.bytes_per_s > 0
    assert total.num_replicas == 2 and min(total.seconds) > 0
    assert total.num_bytes[-1] == sum(cost.gradient_bytes for cost in first.sublayers)


def measure_while_training() -> tuple[Profile, list[str]]:
    """Measure anew in the middle of a run whose ranks each hold a half; list what that changed."""
    with tiny_trainer(
        data=DATA, freeze=FreezeSchedule([2]), global_batch_size=8, pipeline_length=2
    ) as trainer:
        trainer.step()
        model = model_of(trainer)
        before = {name: p for name, p in model.named_parameters() if not p.is_meta}
        values = {name: (p.detach().clone(), p.requires_grad) for name, p in before.items()}
        measured = measure(task_of(trainer), trainer.world, read)
        after = dict(model.named_parameters())
        changed = [
            name
            for name, p in before.items()
            if after[name] is not p
            or not torch.equal(p, values[name][0])
            or p.requires_grad != values[name][1]
        ]
        changed += [name for name, p in after.items() if name not in before and not p.is_meta]
        trainer.step()
        return measured, changed


def test_measuring_in_the_middle_of_a_run_changes_nothing_of_it(two_ranks: Pool) -> None:
    (first, changed), (second, also_changed) = two_ranks.run(measure_while_training)
    assert first == second and not changed and not also_changed
    for cost in first.sublayers:
        assert min(*cost.forward_s, *cost.backward_s, *cost.frozen_s) > 0


def test_all_sizes_are_padded_as_the_micro_batches_of_one_step() -> None:
    # Padded to their own longest, few samples seemed to take less each than many: plans for
    # MiniLM's phrases were predicted at 0.6 of what their steps took.
    def read_padded(ids: Tensor) -> Batch:
        return {"x": torch.zeros(len(ids), int(ids.max()) + 1)}

    cut = measure_module._cut_alike(make_task(global_batch_size=8), ALONE, read_padded)
    assert [tuple(cut(size)["x"].shape) for size in (1, 2, 8)] == [(1, 8), (2, 8), (8, 8)]


def test_samples_to_measure_come_from_all_over_the_data_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[float]] = []

    def note(task: Task, world: World, read: Any, **held: int) -> Profile:
        entry = next(iter(read(torch.arange(4)).values()))
        found.append(entry.flatten().tolist())
        return measure(task, world, read, **held)

    monkeypatch.setattr("pipetransformer.elastic.elasticity.measure", note)
    data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None], torch.zeros(40))
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Flatten(0))
    with Trainer(
        model, data, loss_fn=nn.MSELoss(), freeze=None, global_batch_size=4, progress=False
    ) as trainer:
        trainer.begin()
    assert found == [[0.0, 10.0, 20.0, 30.0]]


ROWS, WIDTH, TOKENS, BATCH = 20_000, 32, 6, 16


def texts(num_samples: int = 32) -> Entries:
    """Give every sample tokens of its own, as far as a batch goes."""
    ids = torch.arange(num_samples * TOKENS).view(num_samples, TOKENS)
    return Entries({"x": ids % ROWS, "y": torch.zeros(num_samples, dtype=torch.int64)})


def text_model(rows: int = ROWS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Embedding(rows, WIDTH), nn.Flatten()),
        nn.Linear(TOKENS * WIDTH, 16),
        nn.Linear(16, 3),
    )


def read_ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: entry[ids] for name, entry in texts().tensors.items()}


def measured(rows: int, frozen: bool = False) -> list[tuple[int, float]]:
    model = text_model(rows)
    model[0].requires_grad_(not frozen)
    task = make_task(model, global_batch_size=BATCH)
    profile = measure(task, connect("cpu", timeout_s=30.0), read_ids)
    return [(cost.gradient_bytes, cost.untouched_bytes) for cost in profile.sublayers]


def test_as_many_rows_are_summed_as_a_batch_has_tokens(two_ranks: Pool) -> None:
    for embedding, *others in two_ranks.run(measured, ROWS):
        assert embedding == (4 * WIDTH * ROWS, 4 * WIDTH * (ROWS - BATCH * TOKENS))
        assert {untouched for _, untouched in others} == {0.0}


@pytest.mark.parametrize(("rows", "frozen"), [(1000, False), (ROWS, True)])
def test_a_small_embedding_is_summed_whole_and_a_frozen_one_not_at_all(
    two_ranks: Pool, rows: int, frozen: bool
) -> None:
    for embedding, *_ in two_ranks.run(measured, rows, frozen):
        assert embedding == (0 if frozen else 4 * WIDTH * rows, 0.0)


def test_alone_nothing_is_summed_and_nothing_counted() -> None:
    assert {untouched for _, untouched in measured(ROWS)} == {0.0}


def test_hooks_are_gone_afterwards(two_ranks: Pool) -> None:
    assert two_ranks.run(hooks_left) == [0, 0]


def hooks_left() -> int:
    model: Any = text_model()
    task = make_task(model, global_batch_size=BATCH)
    measure(task, connect("cpu", timeout_s=30.0), read_ids)
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_measuring_compiles_equal_blocks_once_for_all_sizes() -> None:
    task = make_task(compile=True, compile_backend="eager")
    before = int(counters["stats"]["unique_graphs"])
    measure(task, ALONE, read)
    first = int(counters["stats"]["unique_graphs"])
    # Bytes, the share of a backward for its input, and frozen forwards are measured without.
    assert first - before == 1
    measure(task, ALONE, read)
    assert int(counters["stats"]["unique_graphs"]) == first

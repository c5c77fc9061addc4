"""Prove that all ranks find the same checkpoint, or end with the same error."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from autopipe.profile import Profile
from pipetransformer import Trainer, launch
from pipetransformer.checkpoint import run_state
from pipetransformer.checkpoint import saver as saving
from pipetransformer.checkpoint.format import (
    Checkpoint,
    ShardRecord,
    Shards,
    checkpoint_folder,
    open_checkpoint,
    publish,
    write_shards,
)
from pipetransformer.checkpoint.resume import open_latest
from pipetransformer.checkpoint.saver import Snapshot
from pipetransformer.elastic import elasticity as steering
from pipetransformer.errors import CorruptCheckpointError, NonFiniteError
from pipetransformer.processes.agreement import agree
from pipetransformer.processes.world import connect
from tests.helpers.inspection import task_of
from tests.helpers.measured import measuring, never
from tests.helpers.models import NUM_SAMPLES, tiny_data, tiny_model
from tests.helpers.pool import Pool, suit_tests
from tests.helpers.scenario import build_adamw


def save(directory: Path, step: int) -> Path:
    """Publish a checkpoint of four shards."""
    folder = checkpoint_folder(directory, step)
    shards = {
        f"{i}/{kind}": {"w": torch.full((50,), float(step + i))}
        for i in range(2)
        for kind in ("weights", "optimizer")
    }
    publish(folder, write_shards(folder, Snapshot().take(shards)), {}, keep=3)
    return folder


def damage(folder: Path, shard: str) -> None:
    """Flip a bit of a shard's file."""
    file = folder / open_checkpoint(folder).records[shard].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def fail_on(rank: int, kind: type[Exception]) -> str:
    """Let a rank fail; return what each raises."""
    world = connect("cpu", timeout_s=60.0)

    def action() -> int:
        if world.rank == rank:
            raise kind("here is the cause")
        return world.rank

    with pytest.raises((kind, RuntimeError), match="here is the cause") as caught:
        agree(action, group=world.group)
    is_named = str(caught.value).startswith(f"rank {rank}: ")
    assert is_named or (kind is KeyError and world.rank == rank)
    assert agree(lambda: world.rank, group=world.group) == world.rank
    return type(caught.value).__name__


@pytest.mark.parametrize("kind", [CorruptCheckpointError, ValueError, OSError])
def test_one_rank_s_failure_is_every_rank_s(two_ranks: Pool, kind: type[Exception]) -> None:
    for rank in range(2):
        assert two_ranks.run(fail_on, rank, kind) == [kind.__name__] * 2


def test_a_failure_of_any_other_kind_ends_every_rank(two_ranks: Pool) -> None:
    for rank, found in enumerate((["KeyError", "RuntimeError"], ["RuntimeError", "KeyError"])):
        assert two_ranks.run(fail_on, rank, KeyError) == found


@pytest.mark.parametrize("num_parts", [1, 3, 7])
def test_every_file_is_verified_by_just_one_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parts: int
) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 10))
    real, opened = open, list[str]()

    def note_open(path: Path, mode: str) -> Any:
        opened.append(Path(path).name)
        return real(path, mode)

    monkeypatch.setattr("builtins.open", note_open)
    for part in range(num_parts):
        checkpoint.verify(part=part, num_parts=num_parts)
    assert sorted(opened) == sorted(record.file for record in checkpoint.records.values())


def latest_step(directory: Path) -> int | None:
    """Return the step of the checkpoint that this world finds."""
    found = open_latest(directory, group=connect("cpu", timeout_s=60.0).group)
    return found.step if found else None


def test_damage_that_one_rank_sees_makes_all_fall_back(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(latest_step, tmp_path) == [None, None]
    folders = [save(tmp_path, step) for step in (10, 20, 30)]
    assert two_ranks.run(latest_step, tmp_path) == [30, 30]
    for shard in ("0/weights", "0/optimizer", "1/weights", "1/optimizer"):
        damage(folders[2], shard)
        assert two_ranks.run(latest_step, tmp_path) == [20, 20]
        damage(folders[2], shard)
    (folders[2] / "manifest.json").unlink()
    damage(folders[1], "1/optimizer")
    assert two_ranks.run(latest_step, tmp_path) == [10, 10]


def refused(directory: Path) -> str:
    """Return with what error this world finds no checkpoint."""
    with pytest.raises(CorruptCheckpointError) as caught:
        latest_step(directory)
    return str(caught.value)


def test_without_a_usable_checkpoint_every_rank_says_so(two_ranks: Pool, tmp_path: Path) -> None:
    for step in (10, 20):
        damage(save(tmp_path, step), "1/weights")
    for message in two_ranks.run(refused, tmp_path):
        assert "is usable (step-00000020, step-00000010)" in message
    for folder in tmp_path.glob("step-*"):
        (folder / "manifest.json").unlink()
    (tmp_path / "latest").write_bytes(b"")
    for message in two_ranks.run(refused, tmp_path):
        assert message.startswith("rank 0: ") and "latest is not what was written" in message


def make_trainer(folder: Path, **settings: Any) -> Trainer:
    """Build a trainer of the tiny model that saves every second of 10 steps."""
    model = settings.pop("model", None) or tiny_model()
    defaults = {
        "epochs": 2,
        "global_batch_size": 6,
        "progress": False,
        "checkpoint_every_steps": 2,
        "optimizer": build_adamw,
        "evaluate_every_epochs": 0,
    }
    data = settings.pop("data", None) or tiny_data()
    return Trainer(
        model, data, loss_fn=nn.CrossEntropyLoss(), folder=folder, **{**defaults, **settings}
    )


def train(folder: Path, **settings: Any) -> None:
    """Train to the end."""
    with make_trainer(folder, **settings) as trainer:
        trainer.fit()


def train_in_two_stages(folder: Path, **settings: Any) -> None:
    """Train with ranks that read different files."""
    train(folder, pipeline_length=2, **settings)


def resume_with_a_file_that_goes_bad(folder: Path) -> str:
    """Resume; a file that rank 1 needs goes bad after all have verified all."""
    world = connect("cpu", timeout_s=60.0)
    load = Checkpoint.load

    def load_damaged(self: Checkpoint, name: str, tensors: Mapping[str, Tensor]) -> None:
        if world.rank == 1 and name.endswith("/weights"):
            damage(self.folder, name)
        load(self, name, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", load_damaged)
        with pytest.raises(CorruptCheckpointError) as caught:
            train_in_two_stages(folder, resume=True, epochs=3)
    return str(caught.value)


def test_a_file_that_goes_bad_before_it_is_read_ends_all_ranks_alike(
    two_ranks: Pool, tmp_path: Path
) -> None:
    two_ranks.run(train_in_two_stages, tmp_path)
    first, second = two_ranks.run(resume_with_a_file_that_goes_bad, tmp_path)
    assert first == second
    assert first.startswith("rank 1: ") and "has SHA-256" in first


def test_a_resumed_run_loads_weights_in_place(tmp_path: Path) -> None:
    # New tensors would be a second model in memory, beside what the user still holds of the first.
    train(tmp_path)
    model = tiny_model()
    places = {name: one.data_ptr() for name, one in model.named_parameters()}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    with make_trainer(tmp_path, model=model, resume=True) as trainer:
        trainer.begin()
        assert {name: one.data_ptr() for name, one in model.named_parameters()} == places
        resumed = trainer.state_dict()
    with make_trainer(tmp_path, resume=True) as trainer:
        trainer.begin()
        expected = trainer.state_dict()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def resume_wrongly(folder: Path, settings: dict[str, Any]) -> str:
    """Return with what error a run with other settings refuses to resume."""
    if "num_blocks" in settings:
        settings = {"model": tiny_model(num_blocks=settings["num_blocks"])}
    elif "dtype" in settings:
        settings = {
            "model": tiny_model(dtype=settings["dtype"]),
            "data": tiny_data(dtype=settings["dtype"]),
        }
    elif "num_samples" in settings:
        settings = {"data": tiny_data(num_samples=settings["num_samples"])}
    with pytest.raises(ValueError) as caught:
        train(folder, resume="auto", epochs=3, **settings)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved_run(two_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two ranks to the end, and return their folder, which is only to be refused."""
    folder = tmp_path_factory.mktemp("saved")
    two_ranks.run(train, folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"seed": 3},
            "saved with {'seed': 0}, but this run has {'seed': 3}; resume with the same",
        ),
        ({"optimizer": torch.optim.SGD}, "AdamW'.*, but this run has .*SGD'.* the same optimizer"),
        ({"num_samples": 20}, "'num_samples': 26}, .* resume with the same seed and training set"),
        ({"num_blocks": 3}, r"sublayers \['0', '1', '2', '3', '4', '5'\], but this one has"),
        ({"num_blocks": 5}, "resume with the model that was saved"),
        ({"dtype": torch.float32}, r"saved with \[.*float64.*this model has \[.*float32"),
    ],
    ids=str,
)
def test_another_run_s_checkpoint_is_refused_on_every_rank(
    two_ranks: Pool, saved_run: Path, settings: dict[str, Any], message: str
) -> None:
    for text in two_ranks.run(resume_wrongly, saved_run, settings):
        assert re.search(message, text)


class Measured(Exception):
    """Tell that a run is measured anew."""


def test_weights_that_no_longer_train_are_refused_and_further_ones_begin_to(
    tmp_path: Path,
) -> None:
    def train(*resting: str, **settings: Any) -> None:
        model = tiny_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in resting)
        settings = {"folder": tmp_path, "checkpoint_every_epochs": 1, **settings}
        with Trainer(model, tiny_data(), loss_fn=nn.CrossEntropyLoss(), **settings) as trainer:
            trainer.fit()

    first, second = [name for name, _ in tiny_model().named_parameters()][-2:]
    train(first, epochs=1)
    train(epochs=2, resume=True)
    with pytest.raises(ValueError, match=f"the optimizer's '{second}/.*requires_grad to True"):
        train(second, epochs=3, resume=True)


def measures_on_resume(folder: Path, changed_rank: int | None) -> bool:
    """Resume, perhaps with other hardware under a rank; tell whether this world is measured."""

    def measured(*arguments: Any, **options: Any) -> None:
        raise Measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steering, "measure", measured)
        if connect("cpu", timeout_s=60.0).rank == changed_rank:
            patch.setattr(run_state, "_describe_hardware", lambda device: {"device": "another"})
        try:
            train(folder, resume="auto")
        except Measured:
            return True
    return False


def test_what_was_measured_is_kept_for_as_many_equal_ranks(
    two_ranks: Pool, tmp_path: Path
) -> None:
    two_ranks.run(train, tmp_path)
    assert two_ranks.run(measures_on_resume, tmp_path, None) == [False, False]
    assert two_ranks.run(measures_on_resume, tmp_path, 1) == [True, True]
    assert measures_on_resume(tmp_path, None)


def test_costs_of_version_0_2_had_the_rates_of_rows_beside_them(tmp_path: Path) -> None:
    def as_before(self: Profile, to_json: Any = Profile.to_json) -> dict[str, Any]:
        values = to_json(self)
        names = [name for name in values if name.startswith("cache_")]
        rates = {name: values.pop(name) for name in names}
        return {"profile": values, **rates}

    with pytest.MonkeyPatch.context() as patch, measuring(never):
        patch.setattr(Profile, "to_json", as_before)
        train(tmp_path)
    with make_trainer(tmp_path, resume=True) as trainer:
        trainer.begin()
        assert trainer.measurements == never(task_of(trainer))


def train_and_kill(folder: Path, killed_save: int) -> None:
    """Train; in its first life rank 1 kills itself in the thread that writes a checkpoint."""
    life, calls = os.environ["PIPETRANSFORMER_RESTART_COUNT"], []

    def dying(target: Path, shards: Shards) -> dict[str, ShardRecord]:
        calls.append(target)
        if life == "0" and os.environ["RANK"] == "1" and len(calls) == killed_save:
            (folder / "checkpoints" / "notes.txt").touch()
            write_shards(target, dict(list(shards.items())[:1]))
            os.kill(os.getpid(), signal.SIGKILL)
        return write_shards(target, shards)

    saving.write_shards = dying
    suit_tests()
    # Two runs may measure the machine differently; bits depend on the plan.
    with make_trainer(folder, pipeline_length=2, micro_batches=2, schedule="1f1b") as trainer:
        trainer.begin()
        (folder / f"life-{life}").write_text(str(trainer.global_step))
        trainer.fit()
        trainer.save_model(folder / "model.safetensors")


def test_a_rank_killed_while_it_writes_costs_that_checkpoint_and_the_restart_continues(
    tmp_path: Path,
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    launch(train_and_kill, (whole, 0), num_slots=2, start_method="forkserver")
    launch(train_and_kill, (cut, 2), num_slots=2, max_restarts=1, start_method="forkserver")
    assert [(cut / f"life-{life}").read_text() for life in range(2)] == ["0", "2"]
    ours, theirs = (safetensors.torch.load_file(p / "model.safetensors") for p in (cut, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    left = sorted(path.name for path in (cut / "checkpoints").iterdir())
    assert left == ["latest", "notes.txt", "step-00000008", "step-00000010"]


def test_steps_taken_one_by_one_are_evaluated_and_saved_as_those_of_fit(tmp_path: Path) -> None:
    fitted, stepped = tmp_path / "fitted", tmp_path / "stepped"
    settings = {"eval_dataset": tiny_data(), "evaluate_every_epochs": 1, "micro_batches": 1}
    with make_trainer(fitted, **settings) as trainer:
        expected = trainer.fit().metrics
    with make_trainer(stepped, **settings) as trainer:
        for _ in range(10):
            trainer.step()
        assert trainer.report.metrics == expected
    ours, theirs = (open_latest(f / "checkpoints", group=None) for f in (stepped, fitted))
    assert ours is not None and theirs is not None and ours.step == theirs.step == 10
    assert ours.records.keys() == theirs.records.keys()
    for name in ours.records:
        assert ours.records[name].sha256 == theirs.records[name].sha256, name


def test_auto_without_a_checkpoint_starts_with_the_journal_s_decisions(tmp_path: Path) -> None:
    frozen = iter([0, 2])
    with make_trainer(tmp_path, freeze=lambda context: next(frozen)) as trainer:
        trainer.step()
    with make_trainer(tmp_path, freeze=lambda context: 3, resume="auto") as trainer:
        trainer.step()
        assert trainer.decision is not None and trainer.decision.num_frozen == 0


def test_a_resume_says_where_it_continues_and_what_is_set_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, max_steps=6)
    with caplog.at_level(logging.INFO, "pipetransformer"):
        with make_trainer(tmp_path, resume=True, max_steps=6) as trainer:
            trainer.fit()
        train(tmp_path, resume=True, global_batch_size=8, learning_rate_schedule="cosine")
    same, changed = [text for text in caplog.messages if text.startswith("continues")]
    assert same == "continues from step 6 (step-00000006)"
    assert changed == (
        f"{same}; changed since: max_steps 6 -> None, global_batch_size 6 -> 8, "
        "learning_rate_schedule constant -> cosine"
    )


def test_a_checkpoint_that_holds_no_settings_is_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_state.RunState, "_settings", lambda self: {})
        train(tmp_path, max_steps=2)
    with caplog.at_level(logging.INFO, "pipetransformer"):
        train(tmp_path, resume=True, max_steps=4)
    assert "continues from step 2 (step-00000002)" in caplog.messages


def test_fit_says_that_the_run_had_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pipetransformer"):
        with make_trainer(tmp_path, resume="auto", max_steps=2) as trainer:
            trainer.fit()
            assert "had ended" not in caplog.text
            trainer.fit()
            assert caplog.text.count("the run had ended at step 2, so nothing is trained") == 1
        with make_trainer(tmp_path, resume="auto", max_steps=2) as trainer:
            trainer.fit()
        assert caplog.text.count("the run had ended at step 2, so nothing is trained") == 2
        with make_trainer(tmp_path, resume="auto", max_steps=3) as trainer:
            trainer.fit()
        assert caplog.text.count("had ended") == 2


def test_begin_tells_that_the_run_that_is_continued_had_ended(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    with make_trainer(tmp_path, resume=True, max_steps=2) as trainer:
        trainer.begin()
        assert trainer.is_over and trainer.global_step == 2
        while not trainer.is_over:
            trainer.step()
        with pytest.raises(RuntimeError, match="epochs are done, or the run was stopped"):
            trainer.step()
    with make_trainer(tmp_path, resume=True, max_steps=2) as trainer:
        assert not trainer.is_over
        with pytest.raises(RuntimeError, match=r"had ended already, at step 2; .*begin\(\)"):
            trainer.step()
        assert trainer.is_over
    with make_trainer(tmp_path, resume=True, max_steps=3) as trainer:
        trainer.begin()
        trainer.begin()
        assert not trainer.is_over and trainer.global_step == 2
        trainer.fit()
        assert trainer.global_step == 3


def test_an_epoch_goes_on_in_the_order_in_which_it_began(tmp_path: Path) -> None:
    # 11 of 96 samples came twice, and as many never, where an order was given at the resume.
    def backwards(epoch: int) -> torch.Tensor:
        return torch.arange(NUM_SAMPLES).flip(0)

    train(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="12 samples of the epoch were trained on in another"):
        train(tmp_path, resume=True, sample_order=backwards)
    train(tmp_path, resume=True, epochs=1)
    train(tmp_path, resume=True, epochs=2, sample_order=backwards)


def test_late_numbers_that_are_not_finite_cost_no_checkpoint_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(**settings: Any) -> Trainer:
        return Trainer(
            tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), epochs=2, progress=False,
            global_batch_size=NUM_SAMPLES // 2, folder=tmp_path, checkpoint_every_steps=2,
            **settings,
        )  # fmt: skip

    trainer = build()
    for _ in range(3):
        trainer.step()

    def settle() -> None:
        raise NonFiniteError("the last step's loss is nan")

    monkeypatch.setattr(trainer, "_settle", settle)
    with pytest.raises(NonFiniteError, match="nan"):
        trainer.close()
    with build(resume="auto") as again:
        again.begin()
        assert again.global_step == 2

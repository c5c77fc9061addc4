"""Prove what output_dir comes to hold, and what happens where it holds a run already."""

from __future__ import annotations

import gc
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import BertForSequenceClassification
from transformers.trainer_utils import get_last_checkpoint

from pipetransformer.checkpoint import CHECKPOINTS, open_checkpoint
from pipetransformer.errors import CallbackError
from pipetransformer.hf import Trainer
from tests.helpers.hf_runs import SAVES, KilledAt, StopAt, arguments, made, rows
from tests.helpers.inspection import bridge_of
from tests.helpers.pool import Pool
from tests.helpers.texts import pad_to_longest, tiny_bert


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_a_run_that_is_over_is_replaced_as_in_transformers(tmp_path: Path) -> None:
    options = {**SAVES, "eval_strategy": "no"}
    logged = []
    for kind in (transformers.Trainer, Trainer):
        for rate in (1e-3, 1e-2):
            given = {**options, "learning_rate": rate}
            with made(tmp_path / kind.__module__, kind=kind, options=given) as trainer:
                assert trainer.train().global_step == 8
                logged.append(losses(trainer))
    assert logged[2] == pytest.approx(logged[0], abs=1e-4)
    assert logged[3] == pytest.approx(logged[1], abs=1e-4)


def unclosed(folder: Path, **given: Any) -> Any:
    """Make a Trainer as a notebook does, which never closes it."""
    options = {**SAVES, "eval_strategy": "no"}
    model, args = tiny_bert().float(), arguments(folder, **options)
    return Trainer(model, args, pad_to_longest, train_dataset=rows(30), **given)


def test_a_run_that_is_over_is_replaced_where_its_trainer_was_not_closed(tmp_path: Path) -> None:
    """It was refused as 'process N is training', with the user's own N, in every notebook."""
    first = unclosed(tmp_path)
    first.train()
    second = unclosed(tmp_path)
    assert second.train().global_step == 8
    assert first.predict(rows(3)).predictions.shape[0] == 3
    first.close()
    second.close()


def test_an_interrupted_run_is_named_as_this_process_until_its_trainer_is_dropped(
    tmp_path: Path,
) -> None:
    first = unclosed(tmp_path, callbacks=[Fail()])
    with pytest.raises(CallbackError):
        first.train()
    with closing(unclosed(tmp_path)) as second:
        with pytest.raises(ValueError, match=r"that is this process: call close\(\) of"):
            second.train(resume_from_checkpoint=True)
    del first
    gc.collect()
    with closing(unclosed(tmp_path)) as second:
        assert second.train(resume_from_checkpoint=True).global_step == 8


class Fail(transformers.TrainerCallback):  # type: ignore[misc]
    """Raise in the middle of a run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.global_step == 5:
            raise RuntimeError("stopped by hand")


def train_again(folder: Path) -> tuple[int, int]:
    steps = []
    for _ in range(2):
        options = {**SAVES, "per_device_train_batch_size": 4}
        with made(folder, options=options) as trainer:
            steps.append(trainer.train().global_step)
    return steps[0], steps[1]


def test_two_processes_replace_it_together(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(train_again, tmp_path) == [(8, 8), (8, 8)]


def test_what_is_resumed_after_a_replacement_is_the_new_run(tmp_path: Path) -> None:
    with made(tmp_path, options={**SAVES, "learning_rate": 1e-3}) as trainer:
        trainer.train()
    with made(tmp_path, options=SAVES) as trainer:
        trainer.train()
        expected, logged = weights(trainer), losses(trainer)
    with made(tmp_path, options=SAVES) as trainer:
        trainer.train(resume_from_checkpoint=True)
        assert losses(trainer) == logged
        for name, parameter in weights(trainer).items():
            assert torch.equal(parameter, expected[name]), name


def test_what_others_put_into_the_folder_stays(tmp_path: Path) -> None:
    with made(tmp_path, options=SAVES, save_pretrained_checkpoints=True) as trainer:
        trainer.train()
    notes = tmp_path / CHECKPOINTS / "step-00000002" / "notes.txt"
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("mine")
    theirs = tmp_path / "checkpoint-3" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with made(tmp_path, options={**SAVES, "save_steps": 8}) as trainer:
        trainer.train()
    assert notes.read_text() == theirs.read_text() == "mine"
    assert not (tmp_path / "checkpoint-2").exists()


def test_a_run_that_could_go_on_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="killed"):
        with made(tmp_path, options=SAVES, callbacks=[KilledAt(5)]) as trainer:
            trainer.train()
    with made(tmp_path, options=SAVES) as trainer:
        with pytest.raises(ValueError, match=r"already holds a run .*resume_from_checkpoint=True"):
            trainer.train()
    with made(tmp_path, options=SAVES) as trainer:
        assert trainer.train(resume_from_checkpoint=True).global_step == 8


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stop a run at step 5, and give its folder, which nobody may change."""
    folder = tmp_path_factory.mktemp("stopped")
    with made(folder, options=SAVES, callbacks=[StopAt(5)]) as trainer:
        trainer.train()
    return folder


@pytest.mark.parametrize("given", ["true", "checkpoint-5/", ""])
def test_a_run_goes_on_from_what_a_command_line_says(
    tmp_path: Path, stopped_run: Path, given: str
) -> None:
    shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)
    asked = given if given.lower() == "true" else f"{tmp_path}/{given}"
    with made(tmp_path, options=SAVES) as trainer:
        trainer.train(resume_from_checkpoint=asked)
        assert trainer.state.global_step == 8 and bridge_of(trainer).losses.num_steps == 3


def test_false_as_a_word_begins_anew(tmp_path: Path) -> None:
    with made(tmp_path, options=SAVES) as trainer:
        trainer.train(resume_from_checkpoint="False")
        assert bridge_of(trainer).losses.num_steps == 8


def test_checkpoints_are_written_for_from_pretrained_and_found_by_scripts(tmp_path: Path) -> None:
    options = {**SAVES, "save_total_limit": 2, "eval_strategy": "no"}
    given = {"save_pretrained_checkpoints": True}
    with made(tmp_path, options=options, callbacks=[StopAt(6)], **given) as trainer:
        trainer.train()
        expected = weights(trainer)
    found = get_last_checkpoint(str(tmp_path))
    assert found == str(tmp_path / "checkpoint-6")
    assert sorted(one.name for one in tmp_path.glob("*checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    loaded = BertForSequenceClassification.from_pretrained(found)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    # Killed before the last was written: the newest that a script finds stands for the run.
    shutil.rmtree(found)
    with made(tmp_path, options=options, **given) as trainer:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path)))
        assert bridge_of(trainer).losses.num_steps == 2


def test_copies_of_steps_that_a_run_went_back_behind_do_not_outlive_it(tmp_path: Path) -> None:
    """The newest copy was removed as the oldest, and scripts found the abandoned one."""
    options = {**SAVES, "save_total_limit": 2, "eval_strategy": "no"}
    given = {"save_pretrained_checkpoints": True}
    with made(tmp_path, options=options, callbacks=[StopAt(6)], **given) as trainer:
        trainer.train()
    shard = next((tmp_path / CHECKPOINTS / "step-00000006").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    options |= {"save_steps": 5, "save_total_limit": 1}
    with made(tmp_path, options=options, callbacks=[StopAt(5)], **given) as trainer:
        trainer.train(resume_from_checkpoint=True)
        assert bridge_of(trainer).losses.num_steps == 1
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]


def test_a_checkpoint_of_an_earlier_step_holds_the_weights_of_that_step(tmp_path: Path) -> None:
    given = {"options": {**SAVES, "save_steps": 4}, "save_pretrained_checkpoints": True}
    with made(tmp_path / "short", callbacks=[StopAt(4)], **given) as trainer:
        trainer.train()
        expected = weights(trainer)
    with made(tmp_path / "long", **given) as trainer:
        trainer.train()
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "long" / "checkpoint-4")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_damaged_checkpoint_costs_its_copy_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(folder: Path) -> Any:
        found = open_checkpoint(folder)
        path = folder / next(iter(found.records.values())).file
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return found

    name = "pipetransformer.hf.pretrained_checkpoints.open_checkpoint"
    monkeypatch.setattr(name, damaged)
    options = {**SAVES, "save_steps": 8, "eval_strategy": "no"}
    with made(tmp_path, options=options, save_pretrained_checkpoints=True) as trainer:
        assert trainer.train().global_step == 8
    assert "no checkpoint-* of step-00000008" in caplog.text
    assert not list(tmp_path.glob("*checkpoint-*"))


def test_copies_of_checkpoints_that_nobody_saves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_pretrained_checkpoints=True, but save_strategy"):
        with made(tmp_path, save_pretrained_checkpoints=True, train_dataset=rows(8)):
            pass


# Steps that grow, so that the last evaluation is not the best.
BEST: dict[str, Any] = {
    "learning_rate": 10.0,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 12,
    "num_train_epochs": 3,
    "optim": "sgd",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
}


def train_and_look(folder: Path, batch_size: int) -> tuple[str | None, int | None, int]:
    """Train, and return where the best model is said to be, its step and the last step."""
    options = {**BEST, "per_device_train_batch_size": batch_size}
    with made(folder, options=options) as trainer:
        assert trainer.state.best_model_checkpoint is None
        trainer.train()
        state = trainer.state
        if trainer.is_world_process_zero():
            loaded = transformers.BertForSequenceClassification.from_pretrained(
                state.best_model_checkpoint
            )
            own = trainer.model.state_dict()
            for name, tensor in loaded.state_dict().items():
                assert torch.equal(tensor, own[name]), name
        return state.best_model_checkpoint, state.best_global_step, state.global_step


def assert_is_the_best(folder: Path, best_step: int) -> None:
    """Compare the folder's weights with those that were kept at the best evaluation."""
    written = safetensors.torch.load_file(folder / "model.safetensors")
    kept = safetensors.torch.load_file(folder / f"step-{best_step:08d}.safetensors")
    assert written.keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(written[name], tensor), name


def test_every_process_is_told_of_the_folder_that_one_writes(
    two_ranks: Pool, tmp_path: Path
) -> None:
    first, second = two_ranks.run(train_and_look, tmp_path, 4)
    named, best_step, last_step = first
    assert first == second and named == str(tmp_path / "best")
    assert best_step is not None and best_step < last_step
    assert_is_the_best(tmp_path / "best", best_step)


def test_a_run_that_keeps_no_best_model_names_none(tmp_path: Path) -> None:
    options = {**BEST, "load_best_model_at_end": False, "save_strategy": "no"}
    with made(tmp_path, options=options) as trainer:
        trainer.train()
        assert trainer.state.best_model_checkpoint is None
    assert not (tmp_path / "best").exists()

"""Prove that what no step changes is written once, and is there for whoever resumes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipetransformer import CorruptCheckpointError, launch
from pipetransformer.checkpoint import format as files
from pipetransformer.checkpoint import frozen_store, open_checkpoint
from pipetransformer.checkpoint.frozen_store import FrozenStore
from pipetransformer.checkpoint.resume import remove_run
from pipetransformer.checkpoint.saver import Saver, Snapshot
from pipetransformer.processes.world import connect
from tests.helpers.checkpoints import latest, survives
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.peft_models import CAUSAL, MODELS, llama, lora, make_trainer, with_adapter
from tests.helpers.pool import Pool, suit_tests

LORA = "lora of Llama"
FREEZES = (0, 1, 1, 2, 0, 0)
"""Frozen layers by step: the third thaws what the others froze."""


def base(value: float = 0.0) -> dict[str, dict[str, Tensor]]:
    """Make two groups that no step changes, unless the second has another value."""
    return {
        "a/weights/untrained": {"a.base": torch.arange(50.0)},
        "a/optimizer/frozen": {"a.head/exp_avg": torch.full((20,), value)},
    }


def save(
    directory: Path, step: int, store: FrozenStore, *, value: float = 0.0, keep: int = 2
) -> Path:
    """Save one trained tensor and the groups, as a run of one process does."""
    changed = Snapshot().take(store.changed(base(value)))
    folder = files.checkpoint_folder(directory, step)
    frozen = store.write(changed)
    records = files.write_shards(folder, {"a/weights": {"a.new": torch.full((3,), float(step))}})
    files.publish(folder, records, {}, keep=keep, frozen=frozen)
    store.prune()
    return folder


def assert_holds(directory: Path, step: int, *, value: float = 0.0) -> None:
    found, groups = latest(directory), base(value)
    assert (
        found is not None and found.step == step and found.shards == {"a/weights", "a/optimizer"}
    )
    weights = found.read("a/weights")
    assert weights.keys() == {"a.base", "a.new"} and weights["a.new"].tolist() == [step] * 3
    assert torch.equal(weights["a.base"], groups["a/weights/untrained"]["a.base"])
    moments = groups["a/optimizer/frozen"]
    assert torch.equal(found.read("a/optimizer")["a.head/exp_avg"], moments["a.head/exp_avg"])


def named(directory: Path) -> set[str]:
    """Return the frozen files that the checkpoints of a directory name."""
    found = (open_checkpoint(folder) for folder in directory.glob("step-*"))
    return {record.file for checkpoint in found for record in checkpoint.frozen.values()}


def stored(directory: Path) -> set[str]:
    return {path.name for path in (directory.parent / "frozen").iterdir()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_what_stays_is_written_once_and_goes_with_the_last_that_names_it(directory: Path) -> None:
    store = FrozenStore(directory)
    save(directory, 10, store)
    first = stored(directory)
    for path in (directory.parent / "frozen").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    before = {path: os.stat(path).st_mtime_ns for path in (directory.parent / "frozen").iterdir()}
    save(directory, 20, store)
    save(directory, 30, FrozenStore(directory))  # Of a run that was resumed.
    assert {path: os.stat(path).st_mtime_ns for path in before} == before
    save(directory, 40, store, value=1.0)
    assert len(stored(directory)) == 3 and stored(directory) == named(directory)
    save(directory, 50, store, value=1.0)
    assert len(stored(directory)) == 2 and len(stored(directory) & first) == 1
    assert_holds(directory, 50, value=1.0)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16], ids=["bool", "uint8", "bfloat16"]
)
def test_values_that_change_places_in_a_last_word_are_written(
    directory: Path, dtype: torch.dtype
) -> None:
    """The last one to three bytes were once summed as they are, so that a flag among them could
    move, and was not saved."""
    directory.mkdir(parents=True)
    store, values = FrozenStore(directory), torch.zeros(6, dtype=torch.uint8)
    values[4] = 1
    buffer, other = values.view(dtype), values.roll(1).view(dtype)
    assert not torch.equal(buffer, other)
    store.write(store.changed({"a/weights/untrained": {"a.flags": buffer}}))
    assert not store.changed({"a/weights/untrained": {"a.flags": buffer.clone()}})
    assert store.changed({"a/weights/untrained": {"a.flags": other}})


def test_weights_that_never_train_are_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[set[str]]()
    take = Snapshot.take

    def note(self: Snapshot, shards: files.Shards) -> files.Shards:
        copied.append({*shards})
        return take(self, shards)

    monkeypatch.setattr(Snapshot, "take", note)
    # A transposed matrix has gaps in its rows, and two halves share memory.
    halves = torch.arange(8.0).split(4)
    groups = {
        **base(),
        "b/weights/untrained": {"b.base": torch.arange(6.0).view(2, 3).t()},
        "c/weights/untrained": {"c.left": halves[0], "c.right": halves[1]},
    }
    directory = tmp_path / "checkpoints"
    saver = Saver(directory, connect("cpu", timeout_s=60.0), keep=1, timeout_s=60.0)
    try:
        saver.save(1, {"a/weights": {"a.new": torch.ones(2)}}, frozen=groups, scalars={}, own={})
    finally:
        saver.close()
    assert copied == [{"a/weights"}, {*groups} - {"a/weights/untrained"}]
    found = latest(directory)
    assert found is not None
    for group, tensors in groups.items():
        held = found.read(group.rpartition("/")[0])
        assert all(torch.equal(held[name], one) for name, one in tensors.items())


def test_a_group_that_changes_while_it_is_written_is_not_trusted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, groups, write = FrozenStore(directory), base(), frozen_store.write_tensors

    def change(path: Path, tensors: dict[str, Tensor]) -> None:
        write(path, tensors)
        groups["a/weights/untrained"]["a.base"][7] = -1.0

    files.checkpoint_folder(directory, 10)
    with monkeypatch.context() as patch:
        patch.setattr(frozen_store, "write_tensors", change)
        changed = store.changed(groups)
        with pytest.raises(ValueError, match="a/weights/untrained was changed while it"):
            store.write(changed)
    assert store.changed(groups).keys() == groups.keys()


def test_files_of_others_stay_and_unnamed_ones_go(directory: Path) -> None:
    save(directory, 10, FrozenStore(directory))
    folder = directory.parent / "frozen"
    theirs = ["notes.txt", "model.safetensors", f"{'a' * 64}.safetensors.bak"]
    for name in (*theirs, f"{'b' * 64}.safetensors", f"w-{'b' * 16}.safetensors.tmp"):
        (folder / name).write_text("some")
    (folder / f"{'c' * 64}.safetensors").symlink_to(folder / "notes.txt")
    save(directory, 20, FrozenStore(directory))
    left = {*theirs, f"{'c' * 64}.safetensors"}
    assert stored(directory) == named(directory) | left


def test_nothing_is_removed_while_a_manifest_cannot_be_read(directory: Path) -> None:
    # A later step's, to which the run went back, might be mended, and names files.
    store = FrozenStore(directory)
    save(directory, 10, store)
    later = save(directory, 40, store, value=1.0) / "manifest.json"
    kept, data = stored(directory), later.read_bytes()
    (directory / "latest").unlink()
    later.write_bytes(data[:-9] + b"#" + data[-8:])
    save(directory, 20, store, value=2.0, keep=1)
    assert kept < stored(directory)
    later.write_bytes(data)
    save(directory, 30, store, value=2.0, keep=1)
    assert stored(directory) == named(directory) and len(stored(directory)) == 3


@pytest.mark.parametrize("value", [slow(0.0), 1.0])
def test_kill_at_any_change_of_the_disk_leaves_a_checkpoint_with_all_its_files(
    tmp_path: Path, value: float
) -> None:
    steps, done = list[int](), False
    while not done:
        directory = tmp_path / str(len(steps)) / "checkpoints"
        store = FrozenStore(directory)
        save(directory, 10, store)
        save(directory, 20, store)
        again = FrozenStore(directory)

        def act(directory: Path = directory, store: FrozenStore = again) -> None:
            save(directory, 30, store, value=value, keep=1)

        done = survives(act, len(steps))
        found = latest(directory)
        assert found is not None
        steps.append(found.step)
        assert_holds(directory, found.step, value=value if found.step == 30 else 0.0)
        save(directory, 40, FrozenStore(directory), value=value)
        assert_holds(directory, 40, value=value)
        assert stored(directory) == named(directory)
    assert steps == sorted(steps) and steps.count(20) >= 6 and steps.count(30) >= 4


def test_a_file_that_is_gone_is_written_again(directory: Path) -> None:
    store = FrozenStore(directory)
    save(directory, 10, store)
    for path in (directory.parent / "frozen").iterdir():
        path.unlink()
    save(directory, 20, store)
    assert_holds(directory, 20)


def test_a_flipped_bit_of_a_frozen_file_is_refused_by_name(directory: Path) -> None:
    store = FrozenStore(directory)
    newest = [save(directory, step, store) for step in (10, 20)][-1]
    path = directory.parent / "frozen" / open_checkpoint(newest).frozen["a/weights/untrained"].file
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=f"{path} has SHA-256 [0-9a-f]+; expected"):
        open_checkpoint(newest).read("a/weights")
    with pytest.raises(CorruptCheckpointError, match="no checkpoint in .* is usable"):
        latest(directory)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{path} cannot be read: .*No such file"):
        open_checkpoint(newest)


@pytest.mark.parametrize("elsewhere", ["../secret", "/etc/passwd", "latest", ""])
def test_a_manifest_cannot_name_another_file_as_a_frozen_one(
    directory: Path, elsewhere: str
) -> None:
    manifest = save(directory, 10, FrozenStore(directory)) / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    next(iter(content["frozen"].values()))["file"] = elsewhere
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": seal, "content": content}))
    with pytest.raises(ValueError, match="which is no frozen file of its folder"):
        open_checkpoint(manifest.parent)


def save_the_same(directory: Path) -> int:
    """Save on two ranks what both hold, as of tied weights; return the bytes of the second."""
    saver = Saver(directory, connect("cpu", timeout_s=60.0), keep=2, timeout_s=60.0)
    rank, words = saver._world.rank, {"words": torch.arange(300.0)}
    for step in (10, 20):
        shards = {f"{rank}/weights": {f"{rank}": torch.full((3,), float(step))}}
        frozen = {f"{rank}/weights/frozen": words}
        saver.save(step, shards, frozen=frozen, scalars={}, own={})
        saver.wait()
    saver.close()
    saved = saver.take_saved()
    assert saved is not None
    return saved.num_bytes


def test_ranks_that_hold_the_same_share_its_file(two_ranks: Pool, directory: Path) -> None:
    num_bytes, _ = two_ranks.run(save_the_same, directory)
    assert 0 < num_bytes < 1200
    assert len(stored(directory)) == 1 and stored(directory) == named(directory)
    found = latest(directory)
    assert found is not None
    for rank in range(2):
        assert torch.equal(found.read(f"{rank}/weights")["words"], torch.arange(300.0))


def held_in(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder's files."""
    names = list[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    assert len(names) == len(set(names))
    return set(names)


def wide_llama() -> Any:
    return llama(hidden_size=256, intermediate_size=1024)


def test_a_checkpoint_of_an_adapter_is_of_the_adapter_s_size(tmp_path: Path) -> None:
    with measuring(never):
        model = with_adapter(wide_llama, lora(**CAUSAL))
        adapter = {n: p for n, p in model.named_parameters() if p.requires_grad}
        names = set(model.state_dict())
        settings = {"folder": tmp_path, "checkpoint_every_steps": 1}
        with make_trainer(model, (0, 0, 0), **settings) as trainer:
            trainer.fit()
    in_folder = 2 * sum(p.nbytes for p in adapter.values())  # With momentum.
    base_bytes = sum(p.nbytes for p in model.parameters())
    assert base_bytes > 20_000_000
    folders = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(folders) == 2
    for folder in folders:
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1.05 * in_folder + 200_000
        assert held_in(folder) == {*adapter, *(f"{name}/momentum_buffer" for name in adapter)}
    assert held_in(tmp_path / "frozen") >= names - set(adapter)
    frozen_bytes = sum(path.stat().st_size for path in (tmp_path / "frozen").iterdir())
    assert frozen_bytes < 1.05 * base_bytes


def test_a_tied_embedding_lies_once_among_what_no_step_changes(tmp_path: Path) -> None:
    with measuring(never):
        model = with_adapter(partial(llama, tie_word_embeddings=True), lora(**CAUSAL))
        settings = {"folder": tmp_path, "checkpoint_every_steps": 1, "resume": "auto"}
        for num_steps in (2, 3):
            with make_trainer(model, (0, 0, 0), **settings) as trainer:
                while trainer.global_step < num_steps:
                    trainer.step()
                weights = {name: one.clone() for name, one in trainer.state_dict().items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()  # What is resumed is read.
    times = Counter[str]()
    for path in (tmp_path / "frozen").iterdir():
        with safe_open(path, "pt") as file:
            times.update(file.keys())
    assert max(times.values()) == 1
    (tied,) = [name for name in times if "embed_tokens" in name]
    found = latest(tmp_path / "checkpoints")
    assert found is not None and found.step == 3
    holding = [shard for shard in found.shards if tied in found.read(shard)]
    assert sorted(holding) == ["embedding/weights", "head/weights"]
    for shard in holding:
        assert torch.equal(found.read(shard)[tied], weights[tied])


def run(folder: Path, name: str, length: int, steps: int, **settings: Any) -> dict[str, Tensor]:
    """Train, or go on, up to a step, and save each; return rank 0's weights then."""
    options = {"folder": folder, "resume": "auto", "checkpoint_every_steps": 1, **settings}
    with (
        measuring(never),
        make_trainer(MODELS[name](), FREEZES, pipeline_length=length, **options) as trainer,
    ):
        trainer.begin()
        while trainer.global_step < steps:
            trainer.step()
        return {key: one.detach().clone() for key, one in trainer.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("stop", [slow(1), slow(2), slow(3), 4, slow(5)])
@pytest.mark.parametrize("name", [LORA, slow("lora of BERT and biases"), slow("lora of timm")])
def test_layers_with_adapters_that_freeze_and_thaw_resume_bit_by_bit(
    tmp_path: Path, name: str, stop: int
) -> None:
    whole = run(tmp_path / "whole", name, 1, len(FREEZES))
    run(tmp_path / "cut", name, 1, stop)
    assert_equal(run(tmp_path / "cut", name, 1, len(FREEZES)), whole)


def test_what_freezes_is_written_once_and_what_thaws_is_trained_again(tmp_path: Path) -> None:
    run(tmp_path, LORA, 1, len(FREEZES), keep_checkpoints=9)
    found = [open_checkpoint(one) for one in sorted((tmp_path / "checkpoints").glob("step-*"))]
    frozen = [{n: r for n, r in one.frozen.items() if n.endswith("/frozen")} for one in found]
    assert [len(one) for one in frozen] == [0, 2, 2, 4, 0, 0]
    assert frozen[1] == frozen[2] and frozen[2].items() < frozen[3].items()
    kinds = ("optimizer", "weights")
    assert sorted(frozen[3]) == [f"blocks.{i}/{kind}/frozen" for i in (0, 1) for kind in kinds]
    for checkpoint in found:
        rest = {n: r for n, r in checkpoint.frozen.items() if not n.endswith("/frozen")}
        assert rest == {n: r for n, r in found[0].frozen.items() if n in rest}


Edit = Callable[[nn.Parameter], object]


def scaled(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


def scaled_through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(1.5)


def moved_one_value(weight: nn.Parameter) -> None:
    weight.data.view(-1)[7] += 1


@pytest.mark.parametrize("edit", [slow(scaled), slow(scaled_through_data), moved_one_value])
@pytest.mark.parametrize("place", [slow("embed_tokens"), "layers.2.mlp"])
def test_a_frozen_weight_that_a_script_changes_is_saved_as_it_is(
    tmp_path: Path, edit: Edit, place: str
) -> None:
    model = MODELS[LORA]()
    name, weight = next(one for one in model.named_parameters() if place in one[0])
    assert not weight.requires_grad
    settings = {"folder": tmp_path, "checkpoint_every_steps": 1}
    with measuring(never), make_trainer(model, (0, 1, 1), **settings) as trainer:
        trainer.step()
        trainer.step()
        edit(dict(model.named_parameters())[name])
        trainer.step()
        expected = trainer.state_dict()[name].clone()
    first, second = (open_checkpoint(one) for one in sorted((tmp_path / "checkpoints").glob("s*")))
    changed = {n for n, record in second.frozen.items() if first.frozen.get(n) != record}
    assert len(changed) == 1
    (shard,) = {group.rpartition("/")[0] for group in changed}
    assert torch.equal(second.read(shard)[name], expected)
    assert not torch.equal(first.read(shard)[name], expected)


def train_in_a_pipeline(folder: Path, name: str, length: int, steps: int) -> dict[str, Tensor]:
    return run(folder, name, length, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", [LORA, "lora of BERT"])
def test_a_run_of_two_processes_goes_on_alone_and_back(
    two_ranks: Pool, tmp_path: Path, name: str
) -> None:
    whole = run(tmp_path / "whole", name, 1, 5)
    cut = tmp_path / "cut"
    two_ranks.run(train_in_a_pipeline, cut, name, 2, 2)
    before = stored(cut / "checkpoints")
    run(cut, name, 1, 3)
    assert stored(cut / "checkpoints") >= before & named(cut / "checkpoints")
    ours = two_ranks.run(train_in_a_pipeline, cut, name, 2, 5)[0]
    assert ours.keys() == whole.keys()
    for key, tensor in whole.items():  # Other pipelines sum in another order.
        torch.testing.assert_close(ours[key], tensor, rtol=1e-8, atol=1e-10, msg=key)
    assert stored(cut / "checkpoints") == named(cut / "checkpoints")


STAGES = [(FrozenStore, "write"), (FrozenStore, "_write_file"), (FrozenStore, "prune")]


def train_and_die(folder: Path, stage: int | None, after: bool) -> None:
    """Train; in its first life rank 0 kills itself at a stage of the save of step 3."""
    life = os.environ["PIPETRANSFORMER_RESTART_COUNT"]
    if stage is not None and life == "0" and os.environ["RANK"] == "0":
        owner, function = STAGES[stage]
        real = getattr(owner, function)

        def dying(*arguments: Any) -> Any:
            strikes = bool(list((folder / "checkpoints").glob("step-00000003*")))
            if strikes and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*arguments)
            if strikes:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(owner, function, dying)
    suit_tests()
    weights = run(folder, LORA, 2, len(FREEZES), keep_checkpoints=1)
    if weights:
        torch.save(weights, folder / f"weights-{life}")


@pytest.mark.slow
def test_a_process_killed_at_any_stage_of_a_save_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    launch(train_and_die, (whole, None, False), num_slots=2, start_method="forkserver")
    for stage in range(len(STAGES)):
        for after in (False, True):
            cut = tmp_path / f"{stage} {after}"
            launch(
                train_and_die,
                (cut, stage, after),
                num_slots=2,
                max_restarts=1,
                start_method="forkserver",
            )
            assert not (cut / "weights-0").exists(), cut
            ours, theirs = torch.load(cut / "weights-1"), torch.load(whole / "weights-0")
            assert_equal(ours, theirs)
            checkpoints = cut / "checkpoints"
            assert stored(checkpoints) == named(checkpoints)


@pytest.mark.slow
def test_a_checkpoint_of_the_format_before_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", LORA, 1, 5)
    write = files._write_sealed

    def as_before(path: Path, content: dict[str, Any]) -> None:
        assert not content.pop("frozen", None)
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT_VERSION", 6)
        patch.setattr(files, "_write_sealed", as_before)
        patch.setattr(
            "pipetransformer.checkpoint.run_state.split_by_change",
            lambda task, shards: (shards, {}),
        )
        run(tmp_path / "cut", LORA, 1, 3)
    assert not (tmp_path / "cut" / "frozen").exists()
    assert_equal(run(tmp_path / "cut", LORA, 1, 5), whole)
    assert stored(tmp_path / "cut" / "checkpoints")


def test_a_run_that_is_replaced_takes_its_frozen_files_along(directory: Path) -> None:
    save(directory, 10, FrozenStore(directory))
    (directory.parent / "frozen" / "notes.txt").write_text("mine")
    remove_run(directory.parent)
    assert stored(directory) == {"notes.txt"} and latest(directory) is None

"""Prove that checkpoints read back exactly or not at all, and that a kill costs only the save."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from pipetransformer.checkpoint.format import (
    FORMAT_VERSION,
    checkpoint_folder,
    discard,
    holds_checkpoint,
    open_checkpoint,
    publish,
    published,
)
from pipetransformer.errors import CorruptCheckpointError
from tests.helpers.checkpoints import (
    assert_holds_step,
    latest,
    save,
    state_at,
    survives,
    write,
)


def test_any_shard_name_gets_a_safe_file_of_its_own(tmp_path: Path) -> None:
    names = ["", ".", "..", "../up", "/root", "a/b", "a_b", "a.b", "A/b", "ä", "x" * 300]
    names += ["x" * 301, "new\nline", "nul\0", "latest", "manifest.json", "-rf", "a b", "%2F"]
    folder = checkpoint_folder(tmp_path, 0)
    records = write(folder, {n: {"t": torch.tensor(i)} for i, n in enumerate(names)})
    files = {record.file for record in records.values()}
    assert len({file.lower() for file in files}) == len(names)
    assert set(os.listdir(folder)) == files
    assert os.listdir(tmp_path) == [folder.name]
    publish(folder, records, {}, keep=1)
    checkpoint = open_checkpoint(folder)
    assert [checkpoint.read(name)["t"].item() for name in names] == list(range(len(names)))


def test_shard_of_a_rank_that_is_not_its_only_owner_is_refused(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, 0)
    write(folder, {"head/weights": {"w": torch.ones(1)}})
    with pytest.raises(FileExistsError, match="head_weights"):
        write(folder, {"head/weights": {"w": torch.ones(1)}})
    with pytest.raises(FileNotFoundError, match="directory that all nodes share"):
        write(tmp_path / "step-00000001", {})


def test_scalars_read_back_exactly_with_tuples_as_lists(tmp_path: Path) -> None:
    scalars = {
        "floats": [0.1, 1 / 3, 5e-324, -0.0, math.inf, -math.inf, math.nan],
        "plain": [2**200, 'ä"\n', None, True],
        "tuple": (1, (2.5,)),
        "order": {"z": 1, "a": 2},
    }
    folder = checkpoint_folder(tmp_path, 0)
    publish(folder, {}, scalars, keep=1)
    found = open_checkpoint(folder).scalars
    # repr shows every bit of a float, equal NaNs, and the order of keys.
    assert repr(found) == repr({**scalars, "tuple": [1, [2.5]]})


def test_all_is_durable_before_the_pointer_names_it_and_json_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, replaced, fsync, replace = list[Path](), list[Path](), os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        assert source in synced
        if target == tmp_path / "latest":
            folder = target.with_name("step-00000010")
            assert {tmp_path, folder, *folder.glob("*.safetensors")} <= set(synced)
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    folder = save(tmp_path, 10)
    assert replaced == [folder / "manifest.json", tmp_path / "latest"]
    assert synced[-1] == tmp_path


@pytest.mark.parametrize("earlier", [(), (10, 20)])
def test_kill_at_any_change_of_the_disk_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path, earlier: tuple[int, ...]
) -> None:
    done, found_steps = False, list[int]()
    while not done:
        directory = tmp_path / str(len(found_steps))
        for step in earlier:
            save(directory, step)
        done = survives(partial(save, directory, 30), len(found_steps))
        found = latest(directory)
        found_steps.append(found.step if found else 0)
        if found:
            assert_holds_step(found, found.step)
        save(directory, 30)
        assert_holds_step(latest(directory), 30)
        left = sorted(int(folder.name[5:13]) for folder in directory.glob("step-*"))
        assert left == [*earlier[-1:], 30], "the folder of the killed save remains"
    # At least 4 shards, the manifest and its renaming come before the new checkpoint is whole.
    assert found_steps.count(max(earlier, default=0)) >= 6
    assert found_steps == sorted(found_steps) and found_steps[-1] == 30


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_damage_to_any_file_of_the_newest_falls_back_and_names_file_and_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    causes = {
        "delete": "cannot be read: .*No such file",
        "truncate": "has size in bytes [0-9]+; expected|is not what was written",
        "flip": "has SHA-256 [0-9a-f]+; expected|is not what was written",
    }
    for file in sorted(newest.iterdir()):
        data = bytearray(file.read_bytes())
        flipped = bytes([*data[:-9], data[-9] ^ 4, *data[-8:]])
        file.unlink()
        if damage != "delete":
            file.write_bytes(data[:-1] if damage == "truncate" else flipped)
        caplog.clear()
        assert_holds_step(latest(tmp_path), 10)
        warning = f"step-00000020 cannot be used, trying an older: {file} ({causes[damage]})"
        assert re.search(warning, caplog.text)
        file.write_bytes(data)
    assert_holds_step(latest(tmp_path), 20)


@pytest.mark.parametrize("name", ["step-00000020/manifest.json", "latest"])
def test_flipped_bit_in_a_json_file_never_gives_another_state(tmp_path: Path, name: str) -> None:
    written = [open_checkpoint(save(tmp_path, step)) for step in (10, 20)]
    usable = written if name != "latest" else written[1:]
    data = (tmp_path / name).read_bytes()
    for offset in range(len(data)):
        flipped = data[offset] ^ (1 << offset % 8)
        (tmp_path / name).write_bytes(data[:offset] + bytes([flipped]) + data[offset + 1 :])
        assert latest(tmp_path) in usable


@pytest.mark.parametrize("content", [None, b"", b"null", b"\xff", b"step-00000010"])
def test_damaged_pointer_is_reported_and_the_highest_complete_step_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    write(checkpoint_folder(tmp_path, 30), state_at(30)[0])
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    assert_holds_step(latest(tmp_path), 20)
    assert f"{tmp_path / 'latest'} " in caplog.text


def test_other_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipetransformer.checkpoint.format.FORMAT_VERSION", 5)
    monkeypatch.setattr("pipetransformer.checkpoint.format._READABLE", (5,))
    save(tmp_path, 10)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="latest has format 5, and only 6 and 7 can be read here"):
        latest(tmp_path)


def test_only_the_newest_complete_checkpoints_and_foreign_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-notes.txt").write_text("mine")
    for abandoned in (5, 99):
        write(checkpoint_folder(tmp_path, abandoned), state_at(abandoned)[0])
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    steps = ["step-00000020", "step-00000030", "step-00000040"]
    assert names == ["latest", *steps, "step-notes.txt"]


def test_other_programs_folders_named_like_ours_stay(tmp_path: Path) -> None:
    foreign = {
        "step-00000001": "weights.pt",
        "step-00000002": "manifest.json",
        "step-00000003-2": "model.safetensors",
        "step-00000099": "logs/events",
    }
    for name, file in foreign.items():
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text('{"sha256": "theirs"}')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000004").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step-00000005").write_text("a file")
    before = sorted(path.name for path in tmp_path.iterdir())
    for step in (10, 20, 30):
        save(tmp_path, step, keep=1)
    after = sorted(path.name for path in tmp_path.iterdir())
    assert after == sorted([*before, "latest", "step-00000030"])
    assert all((tmp_path / name / file).exists() for name, file in foreign.items())
    assert_holds_step(latest(tmp_path), 30)


def test_a_file_that_others_put_into_an_old_checkpoint_stays_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = save(tmp_path, 10)
    (old / "notes.txt").write_text("mine")
    save(tmp_path, 20, keep=1)
    assert os.listdir(old) == ["notes.txt"]
    assert f"{old} is of no more use, but it, or what others put in it, stays" in caplog.text
    caplog.clear()
    save(tmp_path, 30, keep=1)
    assert os.listdir(old) == ["notes.txt"] and not caplog.text


def test_truncated_checkpoint_does_not_count_as_one_to_keep(tmp_path: Path) -> None:
    save(tmp_path, 10)
    broken = save(tmp_path, 20)
    next(broken.glob("*.safetensors")).unlink()
    newest = save(tmp_path, 30)
    next(newest.glob("*.safetensors")).unlink()
    assert_holds_step(latest(tmp_path), 10)


def test_step_saved_again_replaces_the_earlier_attempt_under_a_fresh_name(tmp_path: Path) -> None:
    first = save(tmp_path, 10)
    abandoned = checkpoint_folder(tmp_path, 10)
    assert abandoned.name == "step-00000010-2"
    assert_holds_step(latest(tmp_path), 10)
    assert save(tmp_path, 10, keep=1).name == "step-00000010-3"
    assert not first.exists() and not abandoned.exists()
    assert_holds_step(latest(tmp_path), 10)


def test_training_that_went_back_never_falls_back_to_what_it_left(tmp_path: Path) -> None:
    save(tmp_path, 10)
    left = save(tmp_path, 30)
    newest = save(tmp_path, 20)
    assert left.exists()
    assert_holds_step(latest(tmp_path), 20)
    (newest / "manifest.json").unlink()
    assert_holds_step(latest(tmp_path), 10)


def test_publishing_what_is_not_a_complete_save_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    folder = checkpoint_folder(tmp_path, 20)
    records = write(folder, state_at(20)[0])
    next(tmp_path.glob("step-00000020/blocks.0_weights*")).unlink()
    with pytest.raises(CorruptCheckpointError, match="blocks.0_weights.* cannot be read"):
        publish(folder, records, {}, keep=1)
    assert_holds_step(latest(tmp_path), 10)


def test_failed_save_is_discarded_but_never_what_the_pointer_names(tmp_path: Path) -> None:
    published = save(tmp_path, 10)
    failed = checkpoint_folder(tmp_path, 20)
    write(failed, state_at(20)[0])
    for folder in (published, failed, tmp_path / "step-00000030"):
        discard(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", published.name]
    assert_holds_step(latest(tmp_path), 10)


def test_folder_holds_a_checkpoint_from_its_first_complete_save_on(tmp_path: Path) -> None:
    assert not holds_checkpoint(tmp_path / "absent")
    write(checkpoint_folder(tmp_path, 10), state_at(10)[0])
    assert not holds_checkpoint(tmp_path)
    save(tmp_path, 20)
    (tmp_path / "latest").unlink()
    assert holds_checkpoint(tmp_path)


@pytest.mark.parametrize("elsewhere", ["../secret", "/etc/passwd", "sub/file", "..", ""])
def test_a_manifest_cannot_name_a_file_outside_its_folder(tmp_path: Path, elsewhere: str) -> None:
    # Whoever could write a manifest chose which files of the machine were read.
    folder = save(tmp_path, 10)
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    next(iter(content["shards"].values()))["file"] = elsewhere
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": seal, "content": content}))
    with pytest.raises(ValueError, match="which is no file of its folder"):
        open_checkpoint(folder)


def test_the_pointer_cannot_name_a_folder_elsewhere(tmp_path: Path) -> None:
    content = {"format": FORMAT_VERSION, "checkpoints": ["../elsewhere"]}
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (tmp_path / "latest").write_text(json.dumps({"sha256": seal, "content": content}))
    with pytest.raises(ValueError, match="'../elsewhere', which is no checkpoint of its folder"):
        published(tmp_path)

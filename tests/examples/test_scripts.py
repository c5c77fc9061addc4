"""Prove that each example trains: its loss falls, and rows are read, on tiny data."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from transformers import (
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.helpers.marks import slow
from tests.helpers.measured import freely, measuring
from tests.helpers.nodes import Cluster, logs, run_nodes, torchrun
from tests.helpers.tiny_scripts import answerer, classifier, sentence, write_squad, write_sst2

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def script(name: str) -> Any:
    """Import an example by its path, as nothing installs it."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have files written in the test's folder, and rows kept whatever was measured."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    with measuring(freely):
        yield


def losses(folder: str) -> list[float]:
    """Return the loss of each step, from a run's records."""
    lines = Path(folder, "records.jsonl").read_text().splitlines()
    return [one["loss"] for one in map(json.loads, lines) if one["kind"] == "step"]


def fall(values: list[float]) -> bool:
    """Return whether the last fifth is below the first one, in the mean."""
    part = max(1, len(values) // 5)
    return sum(values[-part:]) < 0.9 * sum(values[:part])


def words(**options: Any) -> list[str]:
    """Return a script's arguments."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def sst2(folder: Path, num: int) -> list[str]:
    """Write files as those of SST-2; return the option that names them."""
    dev = write_sst2(folder / "dev.tsv", 21)
    return ["--data_files", write_sst2(folder / "train.tsv", num), dev]


def decoder(folder: Path) -> str:
    """Write a tiny GPT-2 whose tokens are words, and no positions beyond 64."""
    classifier(folder)  # for its tokenizer
    size = len(BertTokenizer.from_pretrained(folder))
    sizes: dict[str, Any] = {
        "n_layer": 4,
        "n_head": 2,
        "n_embd": 16,
        "n_positions": 64,
        "initializer_range": 0.3,
    }
    GPT2LMHeadModel(
        GPT2Config(vocab_size=size, bos_token_id=2, eos_token_id=3, **sizes)
    ).save_pretrained(folder)
    return str(folder)


def book(path: Path) -> str:
    """Write a text of some 2,000 words."""
    numbers = random.Random(0)
    path.write_text(" . ".join(sentence(numbers)[0] for _ in range(200)))
    return str(path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_how_it_is_started(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")


def test_the_table_has_each_script_once_with_a_line_of_its_docstring() -> None:
    table = (ROOT / "examples/README.md").read_text()
    rows = re.findall(r"^\| \[[^]]*\]\(([^)]*)\) .*?`([^`]*)`", table, re.MULTILINE)
    assert len(SCRIPTS) == 12
    scripts = [path.name for path in SCRIPTS]
    assert sorted(name for name, _ in rows) == sorted(["freeze_and_cache.ipynb", *scripts])
    for name, line in rows:
        assert name.endswith(".ipynb") or line in (ROOT / "examples" / name).read_text()


def test_glue_trains_on_files_and_reads_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = script("glue").main(
        sst2(tmp_path, 160)
        + words(
            model_name_or_path=classifier(tmp_path / "model"),
            learning_rate=0.01,
            num_train_epochs=8,
            freeze="schedule:0,0,0,1",
            output_dir="run",
        )
    )
    assert fall(losses("run")) and report.metrics["accuracy"] > 0.9
    assert report.frozen == 1 and report.cache_hits == 4 * 160
    assert "frozen layers' outputs  640 samples read" in capsys.readouterr().out
    assert Path("run/model/config.json").exists()


def test_glue_trains_on_a_task_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, glue = [], script("glue")
    rows = {"sentence": ["good", "dull"] * 20, "label": [1, 0] * 20, "idx": list(range(40))}
    data = {name: datasets.Dataset.from_dict(rows) for name in ("train", "validation")}

    def load_dataset(*names: str) -> Any:
        asked.append(names)
        return datasets.DatasetDict(data)

    monkeypatch.setattr(glue, "load_dataset", load_dataset)
    model = classifier(tmp_path / "model")
    report = glue.main(
        words(task_name="sst2", model_name_or_path=model, max_train_samples=32, freeze="linear")
    )
    assert asked == [("nyu-mll/glue", "sst2")] and report.samples == 3 * 32


def test_squad_trains_in_transformers_trainer_and_reads_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = script("squad").main(
        words(
            train_file=write_squad(tmp_path / "train.json", 64),
            validation_file=write_squad(tmp_path / "dev.json", 20),
            model_name_or_path=answerer(tmp_path / "model"),
            max_seq_length=40,
            freeze="schedule:0,1",
            learning_rate=0.01,
            num_train_epochs=5,
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            output_dir="run",
        )
    )
    assert fall([one["loss"] for one in trainer.state.log_history if "loss" in one])
    (callback,) = (c for c in trainer.callback_handler.callbacks if hasattr(c, "stats"))
    assert callback.stats.hits >= 3 * 64
    assert "eval_exact" in capsys.readouterr().out
    assert Path("run/model.safetensors").exists()


def test_squad_finds_the_tokens_of_answers(tmp_path: Path) -> None:
    tokenizer = BertTokenizer.from_pretrained(answerer(tmp_path / "model"))
    path, squad = write_squad(tmp_path / "train.json", 20), script("squad")
    parts = json.loads(Path(path).read_text())["data"][0]["paragraphs"]
    answers = [one["answers"][0]["text"] for part in parts for one in part["qas"]]
    whole = squad.read(path, tokenizer, 40)
    assert [tokenizer.decode(ids_of_answer(row)) for row in whole] == answers
    cut = squad.read(path, tokenizer, 12)
    found = {tokenizer.decode(ids_of_answer(row)) for row in cut}
    assert "[CLS]" in found and found <= {"[CLS]", *answers}


def ids_of_answer(row: dict[str, Any]) -> list[int]:
    ids: list[int] = row["input_ids"]
    return ids[row["start_positions"] : row["end_positions"] + 1]


def photos(folder: Path) -> str:
    """Write images of two classes, dark and bright ones."""
    numbers = random.Random(0)
    for split, num in (("train", 24), ("val", 6)):
        for name, light in (("dark", 40), ("bright", 180)):
            (folder / split / name).mkdir(parents=True)
            for index in range(num):
                shade = tuple(light + numbers.randrange(40) for _ in range(3))
                Image.new("RGB", (48, 48), shade).save(folder / split / name / f"{index}.png")
    return str(folder)


@pytest.mark.parametrize(("views", "hits"), [(None, 3 * 48), slow(2, 2 * 48)])
def test_images_trains_on_folders_and_reads_rows(
    tmp_path: Path, views: int | None, hits: int
) -> None:
    viewed = {} if views is None else {"views": views}
    freeze = {"freeze": "schedule:0,2", "epochs": 5}
    tiny = {"model": "test_vit", "workers": 0, "lr": 3e-3, "batch_size": 8, **freeze, **viewed}
    data = [photos(tmp_path / "photos"), "--no-pretrained", "--output", "run"]
    report = script("images").main([*data, *words(**tiny)])
    assert fall(losses("run")) and report.metrics["accuracy"] > 0.9
    assert report.frozen == 2 and report.cache_hits == hits
    assert Path("run/model.safetensors").exists()


def llama(folder: Path) -> str:
    """Write a tiny Llama whose tokens are words."""
    classifier(folder)  # for its tokenizer
    tokenizer = BertTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    return str(folder)


def test_lora_llama_reads_what_its_lower_two_thirds_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = random.Random(0)
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(sentence(numbers)[0] for _ in range(100)))
    asked = {"train_file": file, "max_length": 32, "learning_rate": 0.03, "output_dir": "run"}
    model = {"model_name_or_path": llama(tmp_path / "model")}
    trainer, rows = script("lora_llama").main(words(**asked, **model))
    assert fall([one["loss"] for one in trainer.state.log_history if "loss" in one])
    num, found = len(trainer.train_dataset), rows.stats
    assert found.hits >= 2 * num > 20 and found.hits + found.misses == 3 * num
    assert f"2 of 3 blocks are frozen; {found.hits} rows were read" in capsys.readouterr().out
    assert Path("run/adapter/adapter_model.safetensors").exists()


@pytest.mark.parametrize("num", [400, slow(1000)])
def test_own_loop_computes_frozen_blocks_for_the_first_learning_rate_alone(
    num: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"train_file": write_sst2(tmp_path / "train.tsv", num), "freeze": 1}
    model = {"model_name_or_path": classifier(tmp_path / "model"), "cache_folder": "rows"}
    rates = ["--learning_rates", "1e-4", "1e-2", "1e-2"]
    script("own_loop").main([*words(**asked, **model), *rates])
    lines = re.findall(r"(.*): (.*)% right, (\d+) rows read", capsys.readouterr().out)
    assert [(rate, int(hits)) for rate, _, hits in lines] == [
        ("0.0001", 0),
        ("0.01", num * 4 // 5),
        ("0.01", num * 4 // 5),
    ]
    low, high, again = (float(right) for _, right, _ in lines)
    assert low < high == again


def test_own_model_is_verified_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    report = script("own_model").main(words(num_samples=320, epochs=6))
    assert report.metrics["accuracy"] > 0.9 and report.frozen > 0 and report.cache_hits > 0
    assert "Verification(" in capsys.readouterr().out


def test_own_policies_freeze_by_a_function_and_by_a_class() -> None:
    function, kind = script("own_policy").main(num_samples=64, epochs=6)
    assert 0 < function.frozen < 5 and 0 < kind.frozen < 5


@pytest.mark.parametrize(
    ("name", "arguments", "num_rows"),
    [
        ("vision_language", ["--num_samples", "16"], 16),
        slow("speech", ["--num_samples", "16"], 3 * 16),
        slow("backbone", [], 320),
        slow("distillation", ["--teacher_width", "8"], 1797),
    ],
)
def test_a_frozen_part_is_read_from_rows_and_nothing_else_changes(
    name: str, arguments: list[str], num_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    script(name).main(arguments)
    said = capsys.readouterr().out
    found = re.search(r"(\d+) .*rows read .*; (?:losses|weights) differ by (.*)", said)
    assert found and int(found[1]) == num_rows
    # Rows are computed with other samples, in another order of sums.
    assert float(found[2]) < 1e-5
    values = [float(value) for value in re.findall(r"epoch \d: loss ([\d.]+)", said)]
    assert values[-1] < values[-4] if values else name in ("speech", "backbone")


@pytest.mark.slow
def test_backbone_reads_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(photos(tmp_path / "photos"))
    (folder / "val").rename(folder / "test")
    script("backbone").main([str(folder)])
    assert "48 images' rows read in epoch 2" in capsys.readouterr().out


def test_a_policy_of_ones_own_goes_on_where_it_was() -> None:
    module = script("own_policy")
    first, second = module.WhereLossStalls(), module.WhereLossStalls()
    first.before = 0.5
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.before == 0.5


def nodes_arguments(folder: Path) -> dict[str, Any]:
    model = {"model_name_or_path": decoder(folder / "model"), "learning_rate": 0.01}
    return {**model, "output_dir": folder / "run", "block_size": 16, "global_batch_size": 8}


def test_several_nodes_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, main = nodes_arguments(tmp_path), script("several_nodes").main
    text = book(tmp_path / "book.txt")
    first = main([text, *words(**asked, num_train_epochs=1)])
    second = main([text, *words(**asked, num_train_epochs=2)])
    said = capsys.readouterr().out
    assert "from step 0 on 1 processes" in said
    assert f"from step {-(-first.samples // 8)} on 1 processes" in said
    assert second.samples == 2 * first.samples
    assert second.training_loss < first.training_loss


@pytest.mark.slow
def test_several_nodes_trains_on_two_nodes_and_goes_on_on_one(tmp_path: Path) -> None:
    path, text = str(ROOT / "examples/several_nodes.py"), book(tmp_path / "book.txt")
    asked = words(**nodes_arguments(tmp_path))

    def run(num_nodes: int, epochs: int) -> str:
        command = [path, text, *asked, "--num_train_epochs", str(epochs)]
        nodes = [torchrun(node, num_nodes, *command, slots=1) for node in range(num_nodes)]
        assert run_nodes(Cluster(nodes, str(tmp_path))) == [0] * num_nodes, logs(tmp_path)
        return logs(tmp_path)

    assert "from step 0 on 2 processes" in run(2, 1)
    assert "on 1 processes" in run(1, 2)
    assert fall(losses(str(tmp_path / "run")))


@pytest.mark.slow
def test_glue_trains_in_two_processes_as_in_one(tmp_path: Path) -> None:
    model = {"model_name_or_path": classifier(tmp_path / "model"), "learning_rate": 0.01}
    asked = [*sst2(tmp_path, 96), *words(**model, freeze="schedule:0,1"), "--output_dir"]
    script("glue").main([*asked, "one"])
    command = [str(ROOT / "examples/glue.py"), *asked, str(tmp_path / "two")]
    cluster = Cluster([torchrun(0, 1, *command)], str(tmp_path))
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    assert run_nodes(cluster, cache) == [0], logs(tmp_path)
    assert losses("two") == pytest.approx(losses("one"), abs=1e-4)
    assert len(losses("two")) == 9

"""Fine-tune a text classifier on a task of GLUE, judged by the task's own metric."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

from experiments.tasks.workload import Workload
from pipetransformer import EvalPrediction

_LOGGER = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]
Metrics = dict[str, float]


def accuracy(given: Array, wanted: Array) -> Metrics:
    """Return the share of right classes, in percent."""
    return {"accuracy": 100 * float((given == wanted).mean())}


def accuracy_and_f1(given: Array, wanted: Array) -> Metrics:
    """Return it beside the F1 of class 1."""
    return {**accuracy(given, wanted), "f1": 100 * float(f1_score(wanted, given))}


def matthews(given: Array, wanted: Array) -> Metrics:
    """Return Matthews' correlation, times 100."""
    return {"matthews": 100 * float(matthews_corrcoef(wanted, given))}


def correlations(given: Array, wanted: Array) -> Metrics:
    """Return Pearson's and Spearman's correlations, times 100."""
    return {
        "pearson": 100 * float(pearsonr(given, wanted).statistic),
        "spearman": 100 * float(spearmanr(given, wanted).statistic),
    }


@dataclass(frozen=True)
class GlueTask:
    """Describe a task as its files have it.

    Args:
        sentences, label: columns of the tsv files.
        classes: names of the classes in the order of their numbers; () where labels are numbers.
        metrics: judges classes, or values of a regression.
        metric: the main one.
        dev: files of its evaluation sets by name, the main one's first.
        header: columns, where the files have no line that names them.
        hub: names of the sentences' columns in the hub's data set.
    """

    sentences: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: Callable[[Array, Array], Metrics]
    metric: str
    dev: Mapping[str, str]
    header: tuple[str, ...] = ()
    hub: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int:
        """Return how many classes there are; 1 for a regression."""
        return len(self.classes) or 1

    @property
    def head(self) -> dict[str, Any]:
        """Return what the configuration of a model for the task says of its classes."""
        if not self.classes:
            return {"num_labels": 1}
        names = dict(enumerate(self.classes))
        return {"id2label": names, "label2id": {name: number for number, name in names.items()}}

    def number_of(self, label: str) -> float:
        """Return a label as the model is given it.

        Raises:
            ValueError: the task has no such label.
        """
        if not self.classes:
            if not math.isfinite(score := float(label)):
                raise ValueError(f"the score {label!r} is no finite number")
            return score
        if label not in self.classes:
            raise ValueError(f"the label {label!r} is none of {', '.join(self.classes)}")
        return self.classes.index(label)


_DEV = {"dev": "dev.tsv"}
_TWO, _PAIR = ("0", "1"), ("sentence1", "sentence2")
_ENTAILS = ("entailment", "not_entailment")
TASKS: Mapping[str, GlueTask] = {
    "cola": GlueTask(
        ("sentence",), "label", _TWO, matthews, "matthews", _DEV,
        header=("source", "label", "star", "sentence"),
    ),
    "sst2": GlueTask(("sentence",), "label", _TWO, accuracy, "accuracy", _DEV),
    "mrpc": GlueTask(
        ("#1 String", "#2 String"), "Quality", _TWO, accuracy_and_f1, "f1", _DEV, hub=_PAIR
    ),
    "stsb": GlueTask(_PAIR, "score", (), correlations, "pearson", _DEV),
    "qqp": GlueTask(
        ("question1", "question2"), "is_duplicate", _TWO, accuracy_and_f1, "f1", _DEV
    ),
    "mnli": GlueTask(
        _PAIR, "gold_label", ("entailment", "neutral", "contradiction"), accuracy, "accuracy",
        {"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
        hub=("premise", "hypothesis"),
    ),
    "qnli": GlueTask(("question", "sentence"), "label", _ENTAILS, accuracy, "accuracy", _DEV),
    "rte": GlueTask(_PAIR, "label", _ENTAILS, accuracy, "accuracy", _DEV),
    "wnli": GlueTask(_PAIR, "label", _TWO, accuracy, "accuracy", _DEV),
}  # fmt: skip


@dataclass(frozen=True)
class TextSource:
    """Say which model and which data.

    Args:
        model: a folder or a name of the hub, with its tokenizer.
        data: a folder with the task's files; None takes the hub's data set.
        max_length: tokens; what is beyond is cut.
        most_train, most_eval: samples; None takes all.
        seed: of the new head.
        held_out: samples of the training file, behind those that train, that are judged, too.
    """

    model: str
    data: str | None
    max_length: int
    most_train: int | None
    most_eval: int | None
    seed: int
    held_out: int = 0


def glue_workload(name: str, source: TextSource) -> Workload:
    """Read a task of GLUE."""
    task, tokenizer = TASKS[name], AutoTokenizer.from_pretrained(source.model)

    def split(which: str, most: int | None, *, first: int = 0) -> list[dict[str, Any]]:
        rows = _rows(task, name, source.data, which)[first:][:most]
        if first and len(rows) < (most or 1):
            raise ValueError(
                f"{first} samples train and {most} are to be held out, but the training file has "
                f"{first + len(rows)}; give fewer"
            )
        texts = ([row[column] for row in rows] for column in range(len(task.sentences)))
        encoded = tokenizer(*texts, truncation=True, max_length=source.max_length)
        return [
            {**{key: values[n] for key, values in encoded.items()}, "label": rows[n][-1]}
            for n in range(len(rows))
        ]

    sets = {which: split(which, source.most_eval) for which in task.dev}
    main = next(iter(sets))
    if source.held_out:
        if source.most_train is None:
            raise ValueError("--held_out_samples needs --max_train_samples, behind which they are")
        sets["held_out"] = split("train", source.held_out, first=source.most_train)

    def judge(prediction: EvalPrediction) -> Metrics:
        given: Any = prediction.predictions
        found = given[:, 0] if task.num_labels == 1 else given.argmax(axis=1)
        return task.metrics(found, np.asarray(prediction.label_ids).reshape(-1))

    def write(prediction: Any, path: Path) -> None:
        given = prediction.predictions
        answers = (
            [f"{value:.3f}" for value in given[:, 0]]
            if task.num_labels == 1
            else [task.classes[number] for number in given.argmax(axis=1)]
        )
        lines = [f"{index}\t{answer}\n" for index, answer in enumerate(answers)]
        path.with_suffix(".tsv").write_text("index\tprediction\n" + "".join(lines))

    return Workload(
        name,
        lambda small: build_text_model(
            AutoModelForSequenceClassification, source, small, **task.head
        ),
        split("train", source.most_train),
        sets[main],
        text_forward,
        judge,
        task.metric,
        write,
        {which: own for which, own in sets.items() if which != main},
        collate_fn=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        length_entry="input_ids",
    )


def build_text_model(kind: Any, source: TextSource, small: bool, **options: Any) -> nn.Module:
    """Load a model, or the lower half of its layers; a new head follows from the seed."""
    torch.manual_seed(source.seed)
    if small:
        config = kind.from_pretrained(source.model, **options).config
        options["num_hidden_layers"] = (config.num_hidden_layers + 1) // 2
        if hasattr(config, "layer_types"):
            options["layer_types"] = config.layer_types[: options["num_hidden_layers"]]
        torch.manual_seed(source.seed)
    model: nn.Module = kind.from_pretrained(source.model, **options)
    return model


def text_forward(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits of a classifier, or those of starts and ends, (N, S, 2)."""
    output = model(**batch)
    if "logits" in output:
        return output["loss"], output["logits"]
    return output["loss"], torch.stack((output["start_logits"], output["end_logits"]), dim=-1)


def _rows(task: GlueTask, name: str, data: str | None, which: str) -> Sequence[tuple[Any, ...]]:
    """Return the sentences and the label of every sample of a split."""
    if data is None:
        from datasets import load_dataset  # Heavy, and not needed for files.

        split = "train" if which == "train" else "validation"
        suffix = f"_{which}" if len(task.dev) > 1 and which != "train" else ""
        columns = task.hub or task.sentences
        rows = load_dataset("nyu-mll/glue", name)[f"{split}{suffix}"]
        return [(*(row[column] for column in columns), row["label"]) for row in rows]
    file = "train.tsv" if which == "train" else task.dev[which]
    path = Path(data) / file
    if not path.exists():
        raise ValueError(f"{path} is missing; give --data_dir, GLUE's folder of {name}")
    # Some of the published files begin with a byte order mark.
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(
            lines, fieldnames=task.header or None, delimiter="\t", quoting=csv.QUOTE_NONE
        )
        return list(_read(task, path, reader))


def _read(task: GlueTask, path: Path, rows: csv.DictReader[str]) -> Iterator[tuple[Any, ...]]:
    """Yield samples; rows that lack a field, as some of the published files have, are left out."""
    columns, left_out = (*task.sentences, task.label), 0
    for row in rows:
        if missing := [column for column in columns if column not in row]:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {list(row)}")
        if any(row[column] is None for column in columns):
            left_out += 1
            continue
        try:
            number = task.number_of(row[task.label])
        except ValueError as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
        yield (*(row[column] for column in task.sentences), number)
    if left_out:
        _LOGGER.warning("%s: %d rows lack a field and are left out", path, left_out)

"""Fine-tune a text classifier on a task of GLUE, judged by the task's own metric."""

from __future__ import annotations

import csv
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from experiments.tasks.text_model import (
    TextSource,
    build_text_model,
    load_tokenizer,
    text_forward,
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

    def found(self, outputs: Array) -> Array:
        """Return the classes, or values, that (N, C) outputs say."""
        return outputs.argmax(axis=1) if self.classes else outputs[:, 0]

    def name_of(self, found: Any) -> str:
        """Return one of them as the task's files have it."""
        return self.classes[found] if self.classes else f"{found:.3f}"


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


class Example(NamedTuple):
    """Hold a row of a task's file: its number among those that are not blank, its sentences and
    its label, None where it is to be found.
    """

    number: int
    sentences: tuple[str, ...]
    label: float | None


def glue_workload(name: str, source: TextSource) -> Workload:
    """Read a task of GLUE.

    Raises:
        ValueError: the model has no tokenizer, or the files are not the task's.
    """
    task, tokenizer = TASKS[name], load_tokenizer(source.model, source.max_length)
    numbers: dict[str, list[int]] = {}

    def split(which: str, most: int | None, *, first: int = 0) -> list[dict[str, Any]]:
        rows = _rows(task, name, source.data, which)[first:][:most]
        if first and len(rows) < (most or 1):
            raise ValueError(
                f"{first} samples train and {most} are to be held out, but the training file has "
                f"{first + len(rows)}; give fewer"
            )
        numbers["held_out" if first else which] = [row.number for row in rows]
        texts = ([row.sentences[column] for row in rows] for column in range(len(task.sentences)))
        encoded = tokenizer(*texts, truncation=True, max_length=source.max_length)
        return [
            {**{key: values[n] for key, values in encoded.items()}, "label": rows[n].label}
            for n in range(len(rows))
        ]

    sets = {which: split(which, source.most_eval) for which in task.dev}
    main = next(iter(sets))
    if source.held_out:
        if source.most_train is None:
            raise ValueError("--held_out_samples needs --max_train_samples, behind which they are")
        sets["held_out"] = split("train", source.held_out, first=source.most_train)
    for which, own in sets.items():
        if not task.classes and len({sample["label"] for sample in own}) < 2:
            raise ValueError(f"{which}: all scores are equal, and correlate with nothing")

    def judge(prediction: EvalPrediction) -> Metrics:
        given: Any = prediction.predictions
        return task.metrics(task.found(given), np.asarray(prediction.label_ids).reshape(-1))

    def write(which: str, prediction: Any, path: Path) -> None:
        pairs = zip(numbers[which or main], task.found(prediction.predictions), strict=True)
        lines = [f"{number}\t{task.name_of(found)}\n" for number, found in pairs]
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


def _rows(task: GlueTask, name: str, data: str | None, which: str) -> list[Example]:
    """Return a split's samples.

    Raises:
        ValueError: there is no such file, or it is not the task's.
    """
    if data is None:
        from datasets import load_dataset  # Heavy, and not needed for files.

        split = "train" if which == "train" else "validation"
        suffix = f"_{which}" if len(task.dev) > 1 and which != "train" else ""
        columns = task.hub or task.sentences
        rows = load_dataset("nyu-mll/glue", name)[f"{split}{suffix}"]
        return [
            Example(number, tuple(row[column] for column in columns), row["label"])
            for number, row in enumerate(rows)
        ]
    path = Path(data) / ("train.tsv" if which == "train" else task.dev[which])
    if not path.exists():
        raise ValueError(f"{path} is missing; give --data_dir, GLUE's folder of {name}")
    return read_tsv(task, path)


def read_tsv(task: GlueTask, path: Path, *, labelled: bool = True) -> list[Example]:
    """Read a task's file; rows that lack a field, as some of the published have, are left out.

    Raises:
        ValueError: it is not the task's, or has no samples.
    """
    csv.field_size_limit(sys.maxsize)
    # Some of the published files begin with a byte order mark.
    with path.open(encoding="utf-8-sig", newline="") as lines:
        # Files without labels name their columns in all tasks.
        names = (task.header or None) if labelled else None
        reader = csv.DictReader(lines, names, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            found = list(_read(task, path, reader, labelled))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is no tsv file in UTF-8: {error}") from error
    if not found:
        raise ValueError(f"{path} has no samples")
    return found


def _read(
    task: GlueTask, path: Path, rows: csv.DictReader[str], labelled: bool
) -> Iterator[Example]:
    columns, left_out = (*task.sentences, *[task.label] * labelled), 0
    for number, row in enumerate(rows):
        if missing := [column for column in columns if column not in row]:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {list(row)}")
        if any(row[column] is None for column in columns):
            left_out += 1
            continue
        try:
            label = task.number_of(row[task.label]) if labelled else None
        except ValueError as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
        yield Example(number, tuple(row[column] for column in task.sentences), label)
    if left_out:
        _LOGGER.warning("%s: %d rows lack a field and are left out", path, left_out)

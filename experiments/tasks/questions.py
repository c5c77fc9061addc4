"""Fine-tune a model that finds answers in texts on SQuAD, judged by exact match and F1.

A text that is too long is read through windows that overlap; the best span of all windows counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding

from experiments.tasks.squad import (
    Answer,
    Question,
    Window,
    answer_tokens,
    best_answers,
    read_questions,
    score,
    text_offsets,
)
from experiments.tasks.text_model import (
    TextSource,
    build_text_model,
    load_tokenizer,
    text_forward,
)
from experiments.tasks.workload import Workload
from pipetransformer import EvalPrediction


def questions_workload(
    source: TextSource,
    *,
    stride: int,
    num_best: int,
    max_answer_tokens: int,
    unanswerable: bool = False,
) -> Workload:
    """Read SQuAD's questions.

    Args:
        source: which model and data; the data's folder holds train*.json and dev*.json.
        stride: tokens that two windows of a text share.
        num_best, max_answer_tokens: see `best_answers`.
        unanswerable: questions may have no answer, as in SQuAD 2.0.
    """
    tokenizer = load_tokenizer(source.model, source.max_length)
    train = read_split(source.data, "train", source.most_train, unanswerable=unanswerable)
    questions = read_split(source.data, "dev", source.most_eval, unanswerable=unanswerable)
    entries, windows = cut(questions, tokenizer, length=source.max_length, stride=stride)

    def answers(prediction: Any) -> dict[str, list[Answer]]:
        logits = prediction.predictions[..., 0], prediction.predictions[..., 1]
        return best_answers(
            questions,
            windows,
            logits,
            num_best=num_best,
            max_answer_tokens=max_answer_tokens,
            unanswerable=unanswerable,
        )

    def judge(prediction: EvalPrediction) -> dict[str, float]:
        best = {name: found[0].text for name, found in answers(prediction).items()}
        return score(best, questions, unanswerable=unanswerable)

    def write(_: str, prediction: Any, path: Path) -> None:
        write_answers(answers(prediction), path.parent)

    return Workload(
        "squad_v2" if unanswerable else "squad",
        lambda small: build_text_model(AutoModelForQuestionAnswering, source, small),
        cut(train, tokenizer, length=source.max_length, stride=stride)[0],
        entries,
        text_forward,
        judge,
        "f1",
        write,
        {},
        # The softmax over positions takes padding in: padded alike, runs are alike on any K and R,
        # and rows of the cache have one length.
        collate_fn=DataCollatorWithPadding(
            tokenizer, padding="max_length", max_length=source.max_length
        ),
        processing_class=tokenizer,
    )


def write_answers(
    answers: Mapping[str, Sequence[Answer]], folder: Path, *, prefix: str = ""
) -> None:
    """Write the best answers, and several of each question, as SQuAD's programs read them.

    Args:
        answers: by the questions' ids, the best first.
        folder: where.
        prefix: of the files' names.
    """
    best = {name: several[0].text for name, several in answers.items()}
    several = {name: _described(those) for name, those in answers.items()}
    for name, content in (("predictions", best), ("nbest_predictions", several)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / f"{prefix}{name}.json").write_text(text, encoding="utf-8")


def _described(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return a question's answers with their share of the probability of all of these."""
    scores = [one.score for one in answers]
    weights = [math.exp(one - max(scores)) for one in scores]
    return [
        {**asdict(one), "score": one.score, "probability": weight / sum(weights)}
        for one, weight in zip(answers, weights, strict=True)
    ]


def read_split(
    data: str | None, split: str, most: int | None, *, unanswerable: bool
) -> list[Question]:
    """Read a split's questions from files, or from the hub.

    Raises:
        ValueError: the folder has not one file of the split.
    """
    if data is None:
        from datasets import load_dataset  # Heavy, and not needed for files.

        name = "train" if split == "train" else "validation"
        hub = "rajpurkar/squad_v2" if unanswerable else "rajpurkar/squad"
        return list(load_dataset(hub, split=name))[:most]
    paths = sorted(Path(data).glob(f"{split}*.json"))
    if len(paths) != 1:
        raise ValueError(
            f"{data} has {len(paths)} files {split}*.json; give a --data_dir with one of each"
        )
    return read_questions(paths[0], unanswerable=unanswerable)[:most]


def cut(
    questions: list[Question], tokenizer: Any, *, length: int, stride: int
) -> tuple[list[dict[str, Any]], list[Window]]:
    """Cut questions with their texts into windows of tokens.

    Args:
        questions: with their texts.
        tokenizer: a fast one, that knows where in the text each token is.
        length: tokens of a window.
        stride: tokens that two windows of a text share.
    Returns:
        windows with the tokens at which their first right answers begin and end, both the first
        one, the class token, where a window does not hold a whole answer; and what
        `best_answers` needs to know of them.
    Raises:
        ValueError: a question leaves a window no room for more of the text than overlaps.
    """
    _refuse_long(questions, tokenizer, length=length, stride=stride)
    encoded = tokenizer(
        [one["question"] for one in questions],
        [one["context"] for one in questions],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    of_question = encoded.pop("overflow_to_sample_mapping")
    entries: list[dict[str, Any]] = []
    windows: list[Window] = []
    for index, offsets in enumerate(encoded.pop("offset_mapping")):
        question = questions[of_question[index]]
        places, gold = text_offsets(offsets, encoded.sequence_ids(index)), question["answers"]
        first, last = 0, 0
        if gold["text"]:
            begin = gold["answer_start"][0]
            first, last = answer_tokens(places, begin, begin + len(gold["text"][0]))
        entry = {name: values[index] for name, values in encoded.items()}
        entries.append({**entry, "start_positions": first, "end_positions": last})
        windows.append({"example_id": question["id"], "offset_mapping": places})
    return entries, windows


def _refuse_long(questions: list[Question], tokenizer: Any, *, length: int, stride: int) -> None:
    """Refuse a question that leaves a window no room for more of the text than overlaps."""
    tokens = tokenizer([one["question"] for one in questions], add_special_tokens=False)
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for question, own in zip(questions, tokens["input_ids"], strict=True):
        room = length - special - len(own)
        if room <= stride:
            raise ValueError(
                f"the question {question['id']} has {len(own)} tokens, and leaves "
                f"{max(0, room)} of a window's {length} for the text, of which {stride} overlap; "
                "raise --max_seq_length, or lower --doc_stride"
            )

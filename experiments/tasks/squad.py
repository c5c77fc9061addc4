"""Read SQuAD's questions, turn logits into answers, and judge these.

file ─► read_questions ─► tokenizer: windows of a text ─► model ─► best_answers ─► score
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

Array = np.ndarray[Any, Any]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TEXT = 1
"""A tokenizer's number for the text; the question, which comes first, is 0."""
_NOT_TEXT = -1
"""Begins the offsets of a token that belongs to the question, or is special."""


class Gold(TypedDict):
    """Hold a question's right answers, and where in the text they begin, in characters."""

    text: list[str]
    answer_start: list[int]


class Question(TypedDict):
    """Hold a question in the form in which the data set is published for `datasets`."""

    id: str
    context: str
    question: str
    answers: Gold


class Window(TypedDict):
    """Hold what is to be known of a window of tokens over a text.

    Args:
        example_id: of the question.
        offset_mapping: of each token, where in the text it begins and ends, in characters; what
            `text_offsets` gives.
    """

    example_id: str
    offset_mapping: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Answer:
    """Hold a candidate.

    Args:
        text: copied out of the context.
        start_logit: of its first token.
        end_logit: of its last token.
    """

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """Return the sum of both logits."""
        return self.start_logit + self.end_logit


def read_questions(path: str | Path, *, unanswerable: bool = False) -> list[Question]:
    """Read a file of SQuAD 1.1, or 2.0 if questions may be unanswerable; one entry per question.

    Raises:
        ValueError: the file is no such file, or one of 1.1 has a question without an answer.
    """
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8-sig"))["data"]
        questions = [one for article in articles for one in _questions(article)]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no SQuAD file ({error!r}); give one such as train-v1.1.json"
        ) from error
    if not questions:
        raise ValueError(f"{path} has no questions")
    for question in questions:
        if not question["answers"]["text"] and not unanswerable:
            raise ValueError(
                f"{path}: the question {question['id']} has no answer; give a file of SQuAD 1.1, "
                "or --task squad_v2"
            )
    odd = [q["id"] for q in questions if not _stands_there(q)]
    if odd:
        raise ValueError(
            f"{path}: of {len(odd)} questions, the first one {odd[0]}, an answer's text does not "
            "stand where answer_start says; give starts in characters of the context"
        )
    if twice := [one for one, num in Counter(q["id"] for q in questions).items() if num > 1]:
        raise ValueError(f"{path}: several questions have the id {twice[0]}; give each its own")
    return questions


def _stands_there(question: Question) -> bool:
    """Return whether all answers are what the context has at their places."""
    answers, context = question["answers"], question["context"]
    return all(
        text != "" and type(begin) is int and begin >= 0 and context.startswith(text, begin)
        for text, begin in zip(answers["text"], answers["answer_start"], strict=True)
    )


def text_offsets(
    offsets: Sequence[Sequence[int]], sequence_ids: Sequence[int | None]
) -> list[list[int]]:
    """Mark the tokens that are outside the text.

    Args:
        offsets: as a tokenizer gives them.
        sequence_ids: which of its inputs each token is of, None for special tokens.
    """
    outside = [_NOT_TEXT, _NOT_TEXT]
    pairs = zip(offsets, sequence_ids, strict=True)
    return [list(offset) if source == _TEXT else outside for offset, source in pairs]


def answer_tokens(places: list[list[int]], begin: int, end: int) -> tuple[int, int]:
    """Return the first and last token of an answer, (0, 0) where not all of it is here.

    Args:
        places: what `text_offsets` gives.
        begin, end: of the answer, in characters.
    """
    inside = [index for index, (left, _) in enumerate(places) if left >= 0]
    if not inside or places[inside[0]][0] > begin or places[inside[-1]][1] < end:
        return 0, 0
    first = max(index for index in inside if places[index][0] <= begin)
    last = min(index for index in inside if places[index][1] >= end)
    return first, last


def best_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    logits: tuple[Array, Array],
    *,
    num_best: int = 20,
    max_answer_tokens: int = 30,
    unanswerable: bool = False,
) -> dict[str, list[Answer]]:
    """Find the best answers to each question, over all windows of its text, the best first.

    Args:
        questions: whose answers are wanted.
        windows: over their texts, in the order of the logits.
        logits: of starts and of ends, (number of windows, tokens) each; what is beyond a window's
            tokens is padding.
        num_best: how many answers, and of each window how many starts and ends to combine.
        max_answer_tokens: longest answer.
        unanswerable: the empty answer is a candidate, too. Its logits are those of the first token
            where their sum is lowest: the window that holds the answer denies it most.
    Returns:
        by the questions' ids; one empty answer where no window has a valid one.
    """
    found: dict[str, list[Answer]] = {one["id"]: [] for one in questions}
    context_of = {one["id"]: one["context"] for one in questions}
    empty: dict[str, Answer] = {}
    for window, starts, ends in zip(windows, *logits, strict=True):
        offsets, name = window["offset_mapping"], window["example_id"]
        none = Answer("", float(starts[0]), float(ends[0]))
        empty[name] = min(empty.get(name, none), none, key=lambda one: one.score)
        for start in _highest(starts[: len(offsets)], num_best):
            for end in _highest(ends[: len(offsets)], num_best):
                is_span = start <= end < start + max_answer_tokens
                if is_span and _NOT_TEXT not in (offsets[start][0], offsets[end][0]):
                    text = context_of[name][offsets[start][0] : offsets[end][1]]
                    found[name].append(Answer(text, float(starts[start]), float(ends[end])))
    if unanswerable:
        for name, answer in empty.items():
            found[name].append(answer)
    best = {
        name: sorted(answers, key=lambda one: one.score, reverse=True)[:num_best]
        for name, answers in found.items()
    }
    return {name: answers or [Answer("", 0.0, 0.0)] for name, answers in best.items()}


def normalised(text: str) -> str:
    """Return an answer as it is compared: no case, ASCII punctuation, articles, double spaces."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(answer: str, gold: str) -> float:
    """Return 1.0 where both are equal when normalised, else 0.0."""
    return float(normalised(answer) == normalised(gold))


def f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of the normalised answer's words.

    Words count as often as they occur. It is 0.0 where either has none, as in SQuAD 1.1.
    """
    given, wanted = Counter(normalised(answer).split()), Counter(normalised(gold).split())
    shared = (given & wanted).total()
    return 2 * shared / (given.total() + wanted.total()) if shared else 0.0


def score(
    answers: Mapping[str, str], questions: Sequence[Question], *, unanswerable: bool = False
) -> dict[str, float]:
    """Return `exact_match` and `f1` in percent, means over the questions.

    Each counts as with the most similar of its right answers; one without an answer counts 0.
    Where questions may be unanswerable, their right answer is the empty one. Both means are then
    also over those with an answer (HasAns_) and without (NoAns_), as far as there are any.
    Source: Rajpurkar et al., SQuAD (2016), section 6.1; versions 1.1 and 2.0 of the data set.
    """
    found: dict[str, list[tuple[float, float]]] = {"": [], "HasAns_": [], "NoAns_": []}
    for one in questions:
        golds, answer = one["answers"]["text"], answers.get(one["id"])
        found["HasAns_" if golds else "NoAns_"].append(
            (0.0, 0.0) if answer is None else _judged(answer, golds, unanswerable)
        )
    found[""] = found["HasAns_"] + found["NoAns_"]
    kinds = found if unanswerable else [""]
    return {
        f"{kind}{name}": 100 * sum(pair[index] for pair in found[kind]) / len(found[kind])
        for kind in kinds
        if found[kind]
        for index, name in enumerate(("exact_match", "f1"))
    }


def _judged(answer: str, golds: Sequence[str], unanswerable: bool) -> tuple[float, float]:
    """Return an answer's exact match and F1."""
    if unanswerable:
        # Version 2.0 leaves out golds without a word; if none is left, to say nothing is right.
        golds = [gold for gold in golds if normalised(gold)]
        if not golds:
            return (exact_match(answer, ""),) * 2
    return max(exact_match(answer, gold) for gold in golds), max(f1(answer, g) for g in golds)


def _questions(article: Any) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        for asked in paragraph["qas"]:
            golds: Gold = {
                "text": [gold["text"] for gold in asked["answers"]],
                "answer_start": [gold["answer_start"] for gold in asked["answers"]],
            }
            named = {name: asked[name] for name in ("id", "question")}
            texts = {**named, "context": paragraph["context"]}
            texts |= {f"answer {n}": gold["text"] for n, gold in enumerate(asked["answers"])}
            for name, text in texts.items():
                if not isinstance(text, str):
                    raise TypeError(f"the {name} of a question is {text!r}, not a text")
            yield {
                "id": asked["id"],
                "context": paragraph["context"],
                "question": asked["question"].strip(),
                "answers": golds,
            }


def _highest(values: Array, num: int) -> list[int]:
    """Return where the highest values are, the highest first; of equal ones the first."""
    order: list[int] = np.argsort(-values, kind="stable")[:num].tolist()
    return order

"""Prove how answers are found and judged, by hand-computed near misses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.tasks.squad import (
    Answer,
    Question,
    Window,
    best_answers,
    exact_match,
    f1,
    normalised,
    read_questions,
    score,
    text_offsets,
)

NBSP, EN_DASH = "\u00a0", "\u2013"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Denver Broncos", "denver broncos"),
        ("an  apple,\ta day", "apple day"),
        ("theatre another Anna", "theatre another anna"),
        ("the-end", "theend"),
        ("a.b. the c", "ab c"),
        ("The", ""),
        ("$1,000.50", "100050"),
        (f"24{EN_DASH}10", f"24{EN_DASH}10"),
        (f"New{NBSP}York", "new york"),
        ("É Ü", "é ü"),
    ],
    ids=[
        "article", "space", "no article", "hyphen", "dots", "nothing", "number", "dash", "nbsp",
        "accents",
    ],
)  # fmt: skip
def test_answers_are_compared_without_case_punctuation_articles_and_spaces(
    text: str, expected: str
) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "is_same", "overlap"),
    [
        ("the Denver Broncos!", "Denver Broncos", 1.0, 1.0),
        ("Broncos", "Denver Broncos", 0.0, 2 / 3),
        ("Denver Broncos of Denver", "Denver Broncos", 0.0, 2 / 3),
        ("Denver Denver", "Denver Broncos", 0.0, 0.5),
        ("Broncos Denver", "Denver Broncos", 0.0, 1.0),
        ("Carolina", "Denver Broncos", 0.0, 0.0),
        ("cafe", "café", 0.0, 0.0),
        ("cafe\u0301", "caf\u00e9", 0.0, 0.0),
        (f"24{EN_DASH}10", "24-10", 0.0, 0.0),
        ("twenty-four", "twenty four", 0.0, 0.0),
        ("", "Denver", 0.0, 0.0),
        ("the", "a", 1.0, 0.0),
    ],
    ids=[
        "equal", "part", "more", "twice", "order", "none", "accent", "composed", "dash", "hyphen",
        "empty", "both empty",
    ],
)  # fmt: skip
def test_near_misses_are_judged_as_by_hand(
    answer: str, gold: str, is_same: float, overlap: float
) -> None:
    assert exact_match(answer, gold) == is_same
    assert f1(answer, gold) == pytest.approx(overlap)
    assert f1(gold, answer) == pytest.approx(overlap)


def question(name: str, *golds: str, context: str = "") -> Question:
    answers: Any = {"text": list(golds), "answer_start": [0] * len(golds)}
    return {"id": name, "context": context, "question": "?", "answers": answers}


def test_the_most_similar_gold_counts_and_what_is_unanswered_counts_zero() -> None:
    questions = [
        question("one", "Santa Clara, California", "Santa Clara", "in Levi's Stadium"),
        question("two", "a red car", "blue"),
        question("three", "unanswered"),
    ]
    answers = {"one": "the Santa Clara", "two": "red", "four": "of nothing"}
    found = score(answers, questions)
    assert found["exact_match"] == pytest.approx(100 / 3)
    assert found["f1"] == pytest.approx(100 * (1 + 2 / 3) / 3)


def test_text_offsets_mark_what_is_not_of_the_text() -> None:
    offsets = [(0, 0), (0, 4), (0, 0), (0, 3), (4, 7), (0, 0)]
    places = text_offsets(offsets, [None, 0, None, 1, 1, None])
    assert places == [[-1, -1]] * 3 + [[0, 3], [4, 7], [-1, -1]]


CONTEXT = "one two three four"
PLACES = [[-1, -1], [0, 3], [4, 7], [8, 13], [14, 18]]


def logits(*high: tuple[int, float], width: int = 5) -> Any:
    row = np.zeros(width, np.float32)
    for index, value in high:
        row[index] = value
    return row


def answers_of(
    starts: list[Any], ends: list[Any], windows: list[Window] | None = None, **options: Any
) -> list[Answer]:
    asked = [question("q", context=CONTEXT)]
    known: list[Window] = [{"example_id": "q", "offset_mapping": PLACES}]
    pair = np.stack(starts), np.stack(ends)
    return best_answers(asked, windows or known, pair, **options)["q"]


def test_the_best_valid_span_is_the_answer() -> None:
    # The highest start is outside the text, the highest end before the best start.
    found = answers_of([logits((0, 9), (2, 5))], [logits((1, 8), (3, 4))], num_best=2)
    assert found == [Answer("two three", 9.0)]
    found = answers_of([logits((0, 9), (2, 5), (1, 1))], [logits((1, 8), (3, 4))], num_best=3)
    assert found[:3] == [
        Answer("two three", 9.0),
        Answer("one", 9.0),
        Answer("one two three", 5.0),
    ]


def test_long_spans_and_padding_are_no_answers() -> None:
    start, end = [logits((1, 5))], [logits((4, 5), (2, 3))]
    assert answers_of(start, end)[0] == Answer("one two three four", 10.0)
    assert answers_of(start, end, max_answer_tokens=4)[0].text == "one two three four"
    assert answers_of(start, end, max_answer_tokens=3)[0] == Answer("one two", 8.0)
    padded = [logits((1, 5), (6, 50), width=7)], [logits((4, 5), (6, 50), width=7)]
    assert answers_of(*padded)[0] == Answer("one two three four", 10.0)


def test_the_best_of_all_windows_is_the_answer() -> None:
    later: Window = {"example_id": "q", "offset_mapping": [[-1, -1], [8, 13], [14, 18]]}
    first: Window = {"example_id": "q", "offset_mapping": PLACES}
    starts, ends = [logits((2, 3)), logits((2, 4))], [logits((2, 3)), logits((2, 4))]
    found = answers_of(starts, ends, [first, later], num_best=2)
    assert [(one.text, one.score) for one in found][0] == ("four", 8.0)
    assert len(found) == 2 and found[1].score == 6.0


def test_without_a_valid_span_the_answer_is_empty() -> None:
    assert answers_of([logits((4, 9))], [logits((1, 9))], num_best=1) == [Answer("", 0.0)]


def test_a_file_becomes_a_question_after_the_other(tmp_path: Path) -> None:
    golds = [{"text": "two", "answer_start": 4}, {"text": "two three", "answer_start": 4}]
    asked = [{"id": "q", "question": "  Which? ", "answers": golds}]
    article = {"title": "t", "paragraphs": [{"context": CONTEXT, "qas": asked}]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    assert read_questions(path) == [
        {
            "id": "q",
            "context": CONTEXT,
            "question": "Which?",
            "answers": {"text": ["two", "two three"], "answer_start": [4, 4]},
        }
    ]
    article["paragraphs"].append({"context": "other", "qas": asked})  # type: ignore[attr-defined]
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    with pytest.raises(ValueError, match="several questions have the id q; give each its own"):
        read_questions(path)
    path.write_text('{"version": "1.1"}')
    with pytest.raises(ValueError, match=r"dev.json is no SQuAD file \(KeyError\('data'\)\)"):
        read_questions(path)

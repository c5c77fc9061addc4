"""Prove how answers are found and judged, by hand-computed near misses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.tasks.questions import write_answers
from experiments.tasks.smoke import make_squad
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
from tests.helpers.tiny_scripts import write_squad

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


def question(name: str, *golds: str, context: str = "") -> Question:
    answers: Any = {"text": list(golds), "answer_start": [0] * len(golds)}
    return {"id": name, "context": context, "question": "?", "answers": answers}


# Words of the answer and of the gold behind the normalisation, and how many of them are shared,
# are counted by hand: 2 * shared / (of the answer + of the gold).
NEAR_MISSES = {
    "equal": ("the Denver Broncos!", ("Denver Broncos",), 1, 2 * 2 / (2 + 2)),
    "part": ("Broncos", ("Denver Broncos",), 0, 2 * 1 / (1 + 2)),
    "more": ("Denver Broncos of Denver", ("Denver Broncos",), 0, 2 * 2 / (4 + 2)),
    "none": ("Carolina", ("Denver Broncos",), 0, 0),
    "case": ("NASA astronauts", ("Nasa Astronaut",), 0, 2 * 1 / (2 + 2)),
    # Articles are left out where they are words.
    "article": ("a theatre", ("theatre",), 1, 2 * 1 / (1 + 1)),
    "articles within": ("an hour and a half", ("the hour and half",), 1, 2 * 3 / (3 + 3)),
    "article that means": ("vitamin A", ("vitamin",), 1, 2 * 1 / (1 + 1)),
    "article behind": ("A Tale of Two Cities", ("Tale of Two Cities, The",), 1, 2 * 4 / (4 + 4)),
    "articles and more": ("at the end of the day", ("end of day",), 0, 2 * 3 / (4 + 3)),
    "articles alone": ("The The", ("The Band",), 0, 0),
    "no article": ("Another day", ("other day",), 0, 2 * 1 / (2 + 2)),
    "article in a word": ("anthem", ("an them",), 0, 0),
    # ASCII punctuation goes, and what it parted grows together.
    "dots": ("U.S.A.", ("USA",), 1, 2 * 1 / (1 + 1)),
    "dots at an article": ("a.m.", ("am",), 1, 2 * 1 / (1 + 1)),
    "money": ("$1,000", ("1000",), 1, 2 * 1 / (1 + 1)),
    "decimal point": ("1.5 million", ("15 million",), 1, 2 * 2 / (2 + 2)),
    "quotes": ("rock 'n' roll", ("rock n roll",), 1, 2 * 3 / (3 + 3)),
    "quotes within": ("rock'n'roll", ("rock n roll",), 0, 0),
    "brackets": ("(1967)", ("1967",), 1, 2 * 1 / (1 + 1)),
    "genitive": ("Levi's Stadium", ("Levi Stadium",), 0, 2 * 1 / (2 + 2)),
    "comma": ("Santa Clara, California", ("Santa Clara",), 0, 2 * 2 / (3 + 2)),
    "ampersand": ("Tom & Jerry", ("Tom and Jerry",), 0, 2 * 2 / (2 + 3)),
    "per cent": ("50%", ("50 percent",), 0, 2 * 1 / (1 + 2)),
    "hyphen": ("twenty-four", ("twenty four",), 0, 0),
    "hyphened article": ("A-team", ("team",), 0, 0),
    "slash": ("yes/no", ("yes no",), 0, 0),
    # Other punctuation stays; letters are compared as they are encoded.
    "nbsp": (f"New{NBSP}York", ("New York",), 1, 2 * 2 / (2 + 2)),
    "capital accent": ("ÉCOLE normale", ("école normale",), 1, 2 * 2 / (2 + 2)),
    "accent": ("cafe", ("café",), 0, 0),
    "composed": ("cafe\u0301", ("caf\u00e9",), 0, 0),
    "dash": (f"24{EN_DASH}10", ("24-10",), 0, 0),
    "dash at an article": (f"a{EN_DASH}b", (f"{EN_DASH}b",), 1, 2 * 1 / (1 + 1)),
    "guillemets": ("«Faust»", ("Faust",), 0, 0),
    "apostrophe": ("Faust\u2019s pact", ("Faust's pact",), 0, 2 * 1 / (2 + 2)),
    "sharp s": ("STRASSE", ("straße",), 0, 0),
    "other script": ("東京 都", ("東京",), 0, 2 * 1 / (2 + 1)),
    "superscript": ("x²", ("x2",), 0, 0),
    # Words count as often as they occur, in any order.
    "twice": ("Denver Denver", ("Denver Broncos",), 0, 2 * 1 / (2 + 2)),
    "three times": ("no no no", ("no no",), 0, 2 * 2 / (3 + 2)),
    "twice in more": ("to be or not to be", ("to be",), 0, 2 * 2 / (6 + 2)),
    "once of two": (
        "the sound of the sea and the wind", ("sound of sea, sound of wind",), 0, 2 * 4 / (5 + 6)
    ),
    "order": ("Broncos Denver", ("Denver Broncos",), 0, 2 * 2 / (2 + 2)),
    "date": ("7 February 2016", ("February 7, 2016",), 0, 2 * 3 / (3 + 3)),
    "order and more": ("1 2 3 4", ("4 3 2",), 0, 2 * 3 / (4 + 3)),
    # Without a word there is no F1, even where both have none.
    "empty": ("", ("Denver",), 0, 0),
    "both empty": ("the", ("a",), 1, 0),
    "punctuation alone": ("...", ("?!",), 1, 0),
    # The best of several golds counts.
    "one of two": ("Santa Clara", ("California", "the Santa Clara"), 1, 2 * 2 / (2 + 2)),
    "nearest of three": (
        "in the stadium", ("Levi's Stadium", "the stadium", "in Santa Clara"), 0, 2 * 1 / (2 + 1)
    ),
    "empty gold": ("a red car", ("the", "blue car", "red"), 0, 2 * 1 / (2 + 1)),
    "empty as one of them": ("the", ("the band", "an"), 1, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "golds", "is_same", "overlap"), NEAR_MISSES.values(), ids=list(NEAR_MISSES)
)
def test_near_misses_are_judged_as_by_hand(
    answer: str, golds: tuple[str, ...], is_same: int, overlap: float
) -> None:
    assert max(exact_match(answer, gold) for gold in golds) == is_same
    assert max(f1(answer, gold) for gold in golds) == pytest.approx(overlap)
    assert max(f1(gold, answer) for gold in golds) == pytest.approx(overlap)
    found = score({"q": answer}, [question("q", *golds)])
    assert found == pytest.approx({"exact_match": 100 * is_same, "f1": 100 * overlap})


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


def test_first_golds_as_predictions_score_100(tmp_path: Path) -> None:
    questions = read_questions(write_squad(tmp_path / "dev.json", 40))
    questions += [question("several", "the Santa Clara", "California"), question("É", "É, Ü")]
    answers = {one["id"]: one["answers"]["text"][0] for one in questions}
    assert len(answers) == 42
    assert score(answers, questions) == {"exact_match": 100.0, "f1": 100.0}


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
    assert found == [Answer("two three", 5.0, 4.0)]
    found = answers_of([logits((0, 9), (2, 5), (1, 1))], [logits((1, 8), (3, 4))], num_best=3)
    assert found[:3] == [
        Answer("two three", 5.0, 4.0),
        Answer("one", 1.0, 8.0),
        Answer("one two three", 1.0, 4.0),
    ]


def test_long_spans_and_padding_are_no_answers() -> None:
    start, end = [logits((1, 5))], [logits((4, 5), (2, 3))]
    assert answers_of(start, end)[0] == Answer("one two three four", 5.0, 5.0)
    assert answers_of(start, end, max_answer_tokens=4)[0].text == "one two three four"
    assert answers_of(start, end, max_answer_tokens=3)[0] == Answer("one two", 5.0, 3.0)
    padded = [logits((1, 5), (6, 50), width=7)], [logits((4, 5), (6, 50), width=7)]
    assert answers_of(*padded)[0] == Answer("one two three four", 5.0, 5.0)


def test_the_best_of_all_windows_is_the_answer() -> None:
    later: Window = {"example_id": "q", "offset_mapping": [[-1, -1], [8, 13], [14, 18]]}
    first: Window = {"example_id": "q", "offset_mapping": PLACES}
    starts, ends = [logits((2, 3)), logits((2, 4))], [logits((2, 3)), logits((2, 4))]
    found = answers_of(starts, ends, [first, later], num_best=2)
    assert [(one.text, one.score) for one in found][0] == ("four", 8.0)
    assert len(found) == 2 and found[1].score == 6.0


def test_without_a_valid_span_the_answer_is_empty() -> None:
    assert answers_of([logits((4, 9))], [logits((1, 9))], num_best=1) == [Answer("", 0.0, 0.0)]


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
    article["paragraphs"].append({"context": CONTEXT, "qas": asked})  # type: ignore[attr-defined]
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    with pytest.raises(ValueError, match="several questions have the id q; give each its own"):
        read_questions(path)
    article["paragraphs"] = [{"context": None, "qas": asked}]
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    with pytest.raises(ValueError, match="the context of a question is None, not a text"):
        read_questions(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="dev.json is no SQuAD file"):
        read_questions(path)
    path.write_text('{"version": "1.1"}')
    with pytest.raises(ValueError, match=r"dev.json is no SQuAD file \(KeyError\('data'\)\)"):
        read_questions(path)


def test_written_answers_say_how_probable_they_are(tmp_path: Path) -> None:
    write_answers({"q": [Answer("two", 2.0, 1.0), Answer("one", 1.0, 1.0)]}, tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"q": "two"}
    best, other = json.loads((tmp_path / "nbest_predictions.json").read_text())["q"]
    logits = (best["start_logit"], best["end_logit"], best["score"])
    assert (best["text"], *logits) == ("two", 2, 1, 3)
    assert best["probability"] == pytest.approx(1 / (1 + math.exp(-1)))
    assert best["probability"] + other["probability"] == pytest.approx(1)


# Of SQuAD 2.0, as its script judges them: with no gold of a word, to say nothing is right.
UNANSWERABLE = {
    "nothing": ("", (), 1, 1),
    "something": ("Denver", (), 0, 0),
    "an article is nothing": ("The", (), 1, 1),
    "punctuation is nothing": ("?!", (), 1, 1),
    "nothing to what has an answer": ("", ("Denver",), 0, 0),
    "an article to what has an answer": ("the", ("Denver",), 0, 0),
    "gold of no word": ("", ("the",), 1, 1),
    "answer beside a gold of no word": ("Denver", ("the",), 0, 0),
    "gold of no word beside another": ("the", ("the", "Denver"), 0, 0),
    "part": ("Broncos", ("Denver Broncos",), 0, 2 / 3),
    "equal": ("the Denver Broncos!", ("Broncos", "Denver Broncos"), 1, 1),
}


@pytest.mark.parametrize(
    ("answer", "golds", "is_same", "overlap"), UNANSWERABLE.values(), ids=list(UNANSWERABLE)
)
def test_unanswerable_questions_are_judged_as_by_hand(
    answer: str, golds: tuple[str, ...], is_same: int, overlap: float
) -> None:
    found = score({"q": answer}, [question("q", *golds)], unanswerable=True)
    expected = {"exact_match": 100 * is_same, "f1": 100 * overlap}
    kind = "HasAns_" if golds else "NoAns_"
    assert found == pytest.approx(
        {**expected, **{f"{kind}{name}": value for name, value in expected.items()}}
    )


def test_questions_with_an_answer_and_without_are_also_judged_apart() -> None:
    questions = [question("a", "red car"), question("b", "blue"), question("c"), question("d")]
    answers = {"a": "car", "b": "blue", "c": "", "d": "green"}
    assert score(answers, questions, unanswerable=True) == pytest.approx(
        {
            "exact_match": 50, "f1": 100 * (2 / 3 + 1 + 1) / 4,
            "HasAns_exact_match": 50, "HasAns_f1": 100 * (2 / 3 + 1) / 2,
            "NoAns_exact_match": 50, "NoAns_f1": 50,
        }
    )  # fmt: skip


def test_nothing_is_said_where_every_window_prefers_it() -> None:
    windows: list[Window] = [{"example_id": "q", "offset_mapping": PLACES}] * 2
    starts, ends = [logits((0, 9), (2, 3)), logits((0, 2), (2, 3))], [logits((2, 3))] * 2
    # The second window doubts by 2 alone, and finds an answer of 6.
    found = answers_of(starts, ends, windows, unanswerable=True)
    assert found[0].text == "two" and Answer("", 2.0, 0.0) in found
    starts[1] = logits((0, 7), (2, 3))
    assert answers_of(starts, ends, windows, unanswerable=True)[0] == Answer("", 7.0, 0.0)
    assert answers_of(starts, ends, windows)[0].text == "two"


def test_a_file_of_version_2_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    path, _ = make_squad(tmp_path, unanswerable=True)
    questions = read_questions(path, unanswerable=True)
    assert [not one["answers"]["text"] for one in questions[:4]] == [True, False, False, True]
    with pytest.raises(ValueError, match="has no answer; .* or --task squad_v2"):
        read_questions(path)
    # Version 2.0 keeps what would have been an answer elsewhere.
    data = json.loads(path.read_text())
    data["data"][0]["paragraphs"][0]["qas"][0]["plausible_answers"] = [{"text": "odd"}]
    path.write_text(json.dumps(data))
    assert read_questions(path, unanswerable=True) == questions

"""State which values a setting may have, once for the check and for the words about it."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Settings = TypeVar("_Settings", bound=type)

PIPEDREAM_PLANS = ("pipedream", "pipedream_paper")
PLANS = ("fastest", "published", *PIPEDREAM_PLANS)
"""Planners by name."""


@dataclass(frozen=True)
class Rule:
    """Hold which values are allowed, and the words that say so."""

    allows: Callable[[Any], bool]
    text: str

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError for a value that is not allowed."""
        if not self.allows(value):
            raise ValueError(f"{name} is {value!r}; choose {self.text}")


def one_of(*choices: Any) -> Rule:
    return Rule(lambda value: value in choices, f"one of {', '.join(map(repr, choices))}")


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _are(rule: Rule, value: Any) -> bool:
    """Return whether a rule allows a value, or each of a list."""
    is_filled = is_list(value) and len(value) > 0
    return all(map(rule.allows, value)) if is_filled else rule.allows(value)


def _is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0. A NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


WHOLE = Rule(is_whole, "a whole number")
COUNT = Rule(lambda value: is_whole(value) and value >= 1, "a whole number, at least 1")
COUNT_FROM_0 = Rule(lambda value: is_whole(value) and value >= 0, "a whole number, 0 or more")
POSITIVE = Rule(_is_positive, "a number above 0")
NUMBER_FROM_0 = Rule(lambda value: value == 0 or _is_positive(value), "a number, 0 or more")
SECONDS = Rule(
    lambda value: _is_positive(value) and value < math.inf, "a finite number of seconds above 0"
)
SHARE = Rule(lambda value: _is_positive(value) and value <= 1, "a number above 0, at most 1")
SHARE_BELOW_1 = Rule(
    lambda value: value == 0 or (_is_positive(value) and value < 1),
    "a number, 0 or more and below 1",
)
FLAG = Rule(lambda value: isinstance(value, bool), "True or False")
FUNCTION = Rule(callable, "a function")
NAME = Rule(lambda value: isinstance(value, str), "a name")
NAME_OR_CALL = Rule(lambda value: NAME.allows(value) or callable(value), "a name or a function")
PATH = Rule(lambda value: isinstance(value, (str, Path)), "a path")
PATHS = Rule(lambda value: _are(PATH, value), "a path, or a list of paths")
COUNTS = Rule(lambda value: _are(COUNT, value), f"{COUNT.text}, or a list of such numbers")
WARMUP = Rule(
    lambda value: (
        (is_whole(value) and value >= 0) or (isinstance(value, float) and 0 <= value < 1)
    ),
    "a whole number of steps, 0 or more, or a share of the run, a float below 1",
)


@cache
def of_fields(kind: type) -> MappingProxyType[str, Rule]:
    """Return by name the rules that a dataclass's annotations state."""
    hints = get_type_hints(kind, include_extras=True)
    rules = {field.name: _rule_of(hints[field.name]) for field in fields(kind)}
    return MappingProxyType({name: rule for name, rule in rules.items() if rule})


def _rule_of(hint: Any) -> Rule | None:
    """Return the rule beside a type, or what a bool or a Literal says by itself."""
    kind, rule = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    is_optional = NoneType in members
    if rule is None and kind is bool:
        rule = FLAG
    if rule is None:
        parts = (get_args(member) for member in members if get_origin(member) is Literal)
        literals = [choice for choices in parts for choice in choices]
        rule = one_of(*[None] * is_optional, *literals) if literals else None
    if rule is None or not is_optional or rule.allows(None):
        return rule
    allows = rule.allows
    return Rule(lambda value: value is None or allows(value), f"None or {rule.text}")


def documented(kind: _Settings) -> _Settings:
    """Add each field's default, rule and sentences to a dataclass's docstring, for `help`."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:  # Sources were not installed. They alone hold what stands below a field.
        return kind
    assert isinstance(tree, ast.ClassDef)
    rules, lines = of_fields(kind), list[str]()
    defaults = {field.name: field.default for field in fields(kind)}
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                default = defaults[name]
                lines.append(f"{name} = {getattr(default, '__name__', repr(default))}")
                lines += [f"    {rules[name].text}"] if name in rules else []
                lines.append(textwrap.indent(inspect.cleandoc(text), "    "))
    kind.__doc__ = inspect.cleandoc(kind.__doc__ or "") + "\n\n" + "\n".join(lines)
    return kind

"""Make a model's configuration small, so that its class can be verified quickly.

    1. fewer blocks, with one of each kind
    2. fewer words
    3. fewer experts
    4. narrower: fewer heads of the same width

Each is done only where the model is still too large behind the one before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

from pipetransformer.cli.configured_model import special_tokens

_NUM_BLOCKS, _NUM_WORDS, _NUM_EXPERTS = 3, 1024, 4
_BLOCKS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_WIDTHS = ("hidden_size", "intermediate_size", *_HEADS)


def smaller(config: Any, count: Callable[[Any], int], *, most: int) -> tuple[Any, tuple[str, ...]]:
    """Return the configuration of a model with few parameters, and what was made smaller in it.

    Args:
        count: counts the parameters of a configuration's model.
        most: of them.
    Raises:
        ValueError: the model stays larger.
    """
    whole = size = count(config)
    found = config
    steps = [_lower_blocks, _lower_words, _lower_experts]
    while size > most:
        found = copy.deepcopy(found)
        if steps:
            steps.pop(0)(found)
        elif not _narrow(found):
            raise ValueError(
                f"a model of {whole / 1e6:.0f} million parameters stays one of "
                f"{size / 1e6:.0f} million with few blocks, words, experts and heads, but at most "
                f"{most / 1e6:.0f} million are verified here; give a smaller configuration of it"
            )
        size = count(found)
    return found, tuple(_differences(config, found))


def _parts(config: Any) -> list[Any]:
    """Return the parts of a configuration that may size blocks."""
    seen = getattr(config, "vision_config", None)
    return [config.get_text_config(), *([] if seen is None else [seen])]


def _number(part: Any, name: str) -> int | None:
    value = getattr(part, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _lower_blocks(config: Any) -> None:
    for part in _parts(config):
        kinds = getattr(part, "layer_types", None) or [None]
        # A row's kinds take turns, so that its start has all of them.
        least = max(kinds.index(kind) + 1 for kind in kinds)
        num, held = max(_NUM_BLOCKS, least), _number(part, "num_hidden_layers")
        for name, value in list(part.to_dict().items()):
            if isinstance(value, list) and len(value) == held and len(value) > num:
                setattr(part, name, value[:num])
        _lower(part, _BLOCKS, num)


def _lower_words(config: Any) -> None:
    for part in _parts(config):
        _lower(part, ("vocab_size",), _NUM_WORDS)
    beyond = sorted({n for n in special_tokens(config).values() if n >= _NUM_WORDS})
    for part in (config, config.get_text_config()):
        for name in special_tokens(config):
            if (number := _number(part, name)) in beyond:
                setattr(part, name, _NUM_WORDS - 1 - beyond.index(number))


def _lower_experts(config: Any) -> None:
    for part in _parts(config):
        _lower(part, _EXPERTS, max(_NUM_EXPERTS, _number(part, "num_experts_per_tok") or 0))


def _lower(part: Any, names: tuple[str, ...], most: int) -> None:
    for name in names:
        if (_number(part, name) or 0) > most:
            setattr(part, name, most)


def _narrow(config: Any) -> bool:
    """Divide heads and widths by their smallest common factor; return whether there is one."""
    is_done = False
    for part in _parts(config):
        numbers = {name: number for name in _WIDTHS if (number := _number(part, name))}
        heads = gcd(*(number for name, number in numbers.items() if name in _HEADS))
        by = next((n for n in range(2, heads + 1) if heads % n == 0), None)
        if by is not None:
            is_done = True
            for name, number in numbers.items():
                setattr(part, name, number // by)
    return is_done


def _differences(config: Any, found: Any) -> Iterator[str]:
    for part, small in zip(_parts(config), _parts(found), strict=True):
        for name in (*_BLOCKS, "vocab_size", *_EXPERTS, *_WIDTHS):
            if (number := _number(small, name)) != _number(part, name):
                yield f"{name} {number} of {_number(part, name)}"

"""List the classes that are tried: from transformers' own mappings, and timm's modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.census.timm_models import MODELS

TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "sequence": "SEQUENCE_CLASSIFICATION",
    "token": "TOKEN_CLASSIFICATION",
    "question": "QUESTION_ANSWERING",
    "image": "IMAGE_CLASSIFICATION",
}
"""By its word here, what transformers calls a task's mapping."""


@dataclass(frozen=True)
class Subject:
    """Name a class to try.

    Args:
        name: of a class of transformers, or of a model of timm.
        task: a word of `TASKS`, or "timm".
        family: transformers' model type, or timm's module.
    """

    name: str
    task: str
    family: str


def of_transformers() -> list[Subject]:
    """Return each class once for each task."""
    return of_mappings(TASKS)


def of_mappings(tasks: Mapping[str, str]) -> list[Subject]:
    """Return each class of transformers' mappings once for each task."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], Subject] = {}
    for task, word in tasks.items():
        mapping = getattr(modeling_auto, f"MODEL_FOR_{word}_MAPPING_NAMES")
        for family, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                subject = Subject(name, task, family)
                # Of several families that share a class, the one that it is named after.
                if _plain(name).startswith(_plain(family)) or (name, task) not in found:
                    found[name, task] = subject
    return list(found.values())


def of_timm() -> list[Subject]:
    """Return a small model of each module of timm that attends."""
    return [Subject(name, "timm", module) for module, (name, _) in MODELS.items()]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")

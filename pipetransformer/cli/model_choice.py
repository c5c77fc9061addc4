"""Say which model is meant, and what it is fed with."""

from __future__ import annotations

from dataclasses import dataclass

from pipetransformer.cli.lora import Lora

TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "image-classification": "IMAGE_CLASSIFICATION",
}
"""Tasks on the command line, and what transformers calls them in the names of its tables."""


@dataclass(frozen=True)
class ModelChoice:
    """Name a model and what it is fed with.

    Args:
        name: "bert-base" or "bert-large"; a folder or file with a configuration of transformers,
            or a model on the hub whose configuration is in its cache; a model of timm; or
            "module:function". The function returns a model (for `adapt`) and a sample batch:
            inputs and targets by name.
        image_size: pixels of a side, for images; None is the model's own.
        seq_length: tokens of a sample, for texts.
        dtype: of parameters and computations; one of WEIGHT_DTYPES.
        task: one of TASKS, for a configuration; None is that of the class which it names.
        lora: adapters, in the place of the weights, to train.
    Raises:
        ValueError: a value is out of range, or does not apply to the model.
    """

    name: str
    image_size: int | None = None
    seq_length: int | None = None
    dtype: str = "float32"
    task: str | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        for option, value in (("image_size", self.image_size), ("seq_length", self.seq_length)):
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}; give at least 1")
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; give one of {', '.join(TASKS)}")
        if self.is_own:
            self.refuse("image_size", "seq_length", "task", "lora")

    @property
    def is_own(self) -> bool:
        """Tell whether the user's function builds the model."""
        return ":" in self.name

    def refuse(self, *options: str) -> None:
        """Raise a ValueError for options that were given, and do not apply to the model."""
        for option in options:
            if getattr(self, option) is not None:
                raise ValueError(f"{option} does not apply to {self.name}; leave it out")

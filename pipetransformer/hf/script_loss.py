"""Call a subclass's `compute_loss` on the last stage of a pipeline.

in transformers                   here, on the last stage alone
inputs: all that the model takes  the targets
model(**inputs): a forward        hands over the logits that the stages have computed
"""

from __future__ import annotations

import inspect
import weakref
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput

from autopipe.loss import Loss, LossValue
from pipetransformer.model import unwrapped


@final
class ScriptLoss:
    """Call a subclass's `compute_loss` on logits and targets.

    Like any unknown loss function, it is probed whether its parts join to the whole.

    Args:
        compute_loss: the bound method.
        model: the whole model; its parameters must not enter the loss.
        own: the model's own loss, returned by `model(**inputs).loss`.
        targets: their names.
    Attributes:
        is_computing: whether `compute_loss` is being called.
    """

    def __init__(
        self,
        compute_loss: Callable[..., Any],
        *,
        model: nn.Module,
        own: Loss,
        targets: tuple[str, ...],
    ) -> None:
        # Weak: checks search a loss for numbers, and must not reach the Trainer's data set.
        self._compute: weakref.ref[Any] = weakref.WeakMethod(compute_loss)
        self._model, self._own, self._targets = weakref.ref(model), own, targets
        # None, as a batch's items are not counted here; parts are joined by their own counts.
        asked = inspect.signature(compute_loss).parameters.get("num_items_in_batch")
        needs = asked is not None and asked.default is asked.empty
        self._more: dict[str, Any] = {"num_items_in_batch": None} if needs else {}
        self.is_computing = False
        self.__qualname__ = f"{type(compute_loss.__self__).__name__}.compute_loss"  # type: ignore[attr-defined]

    def __call__(self, output: Tensor, target: Any) -> LossValue:
        """Return the mean over samples, or (sum, count), as `compute_loss` does.

        Raises:
            ValueError: `compute_loss` needs more than logits and targets.
        """
        compute, model = self._compute(), self._model()
        assert compute is not None and model is not None, "a run does not outlive its Trainer"
        entries = target if isinstance(target, Mapping) else {self._targets[0]: target}
        forward, before = _Forward(model, output, self._own, tuple(entries)), output.grad_fn
        self.is_computing = True
        try:
            value = compute(forward, _Targets(entries, self.__qualname__), **self._more)
        finally:
            self.is_computing = False
        if isinstance(value, tuple) and isinstance(value[1], ModelOutput):
            value = value[0]  # It returned outputs though return_outputs is False.
        if forward.num_calls != 1:
            raise ValueError(
                f"{self.__qualname__} calls the model it is given {forward.num_calls} times, but "
                "there is one forward, of all stages; compute the loss from the logits of one "
                "call, or train with transformers.Trainer"
            )
        if forward.value is not None and value is forward.mean:
            return forward.value  # (sum, count): parts with ignored targets then join exactly.
        self._refuse_parameters(value, model, before)
        loss_value: LossValue = value
        return loss_value

    def _refuse_parameters(self, value: Any, model: nn.Module, below: Any) -> None:
        """Refuse a loss of the parameters themselves, most of which other ranks hold.

        Args:
            below: the graph's node that computed the logits, where the loss's own graph ends.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parts = value if isinstance(value, tuple) else (value,)
        pending = [part.grad_fn for part in parts if isinstance(part, Tensor)]
        seen = {None, below}
        while pending:
            node: Any = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if name := names.get(id(getattr(node, "variable", None))):
                raise ValueError(
                    f"{self.__qualname__} computes with the parameter {name!r}, but the last "
                    "stage holds its own layers only; leave it out: weights are decayed by the "
                    "optimizer"
                )
            pending += [below for below, _ in node.next_functions]


def answers_questions(model: Any) -> bool:
    """Return whether a model returns start and end logits, which are one (..., 2) output here."""
    kinds = type(unwrapped(model)).__mro__
    return any(kind.__name__.endswith("ForQuestionAnswering") for kind in kinds)


class _Targets(UserDict[str, Any]):
    """Hold a batch's inputs that reach the loss; others are refused, not just missing."""

    def __init__(self, entries: Mapping[str, Any], asks: str) -> None:
        self._known, self._asks = tuple(entries), asks
        super().__init__(entries)

    def __contains__(self, name: object) -> bool:
        self._refuse_unknown(name)
        return name in self.data

    def __getitem__(self, name: str) -> Any:
        self._refuse_unknown(name)
        return super().__getitem__(name)

    def _refuse_unknown(self, name: object) -> None:
        if name not in self._known:
            raise ValueError(
                f"{self._asks} reads inputs[{name!r}], but the last stage, where the loss is, has "
                f"{', '.join(self._known)} alone; compute the loss from the logits and these, or "
                "train with transformers.Trainer"
            )


class _Forward:
    """Stand for the model that `compute_loss` calls."""

    def __init__(self, model: Any, output: Tensor, own: Loss, targets: tuple[str, ...]) -> None:
        self.config = getattr(model, "config", None)
        self.num_calls = 0
        self.value: LossValue | None = None
        self.mean: Tensor | None = None
        self._output, self._own, self._targets = output, own, targets
        self._answers = answers_questions(model)

    def __call__(self, **inputs: Any) -> Any:
        self.num_calls += 1
        given = {name: inputs[name] for name in self._targets if name in inputs}
        if len(given) == len(self._targets):  # With all targets a model also returns its loss.
            target = given if len(given) > 1 else given[self._targets[0]]
            value = self.value = self._own(self._output, target)
            self.mean = value[0] / value[1] if isinstance(value, tuple) else value
        if self._answers:
            starts, ends = self._output[..., 0], self._output[..., 1]
            return QuestionAnsweringModelOutput(
                loss=self.mean, start_logits=starts, end_logits=ends
            )
        return SequenceClassifierOutput(loss=self.mean, logits=self._output)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"compute_loss reads model.{name}, but the model it is given stands for all stages, "
            "and has a config and a forward alone"
        )

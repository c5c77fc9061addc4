"""Borrow a user's model while a run changes it, and give it back as it came.

before        in a run                              afterwards
flags         frozen layers need no gradient        as before
modes         trained layers train, frozen do not   as before
gradients     the last step's                       none
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import final
from weakref import WeakKeyDictionary

from torch import nn

from pipetransformer.model.training.task import Task, set_frozen

_LENT: WeakKeyDictionary[nn.Module, weakref.ref[ModelLoan]] = WeakKeyDictionary()
"""Models that runs of this process have borrowed, and who has them."""


@final
class ModelLoan:
    """Remember how a task's model came, and give it back; at the latest when this is collected.

    Raises:
        ValueError: another run has the model, or a part of it.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._give_back: weakref.finalize | None = None
        self._refuse_lent()

    def borrow(self) -> bool:
        """Take the model; return False if the run has it already."""
        if self._give_back is not None:
            return False
        self._refuse_lent()
        model = self._task.model.model
        modes = {module: module.training for module in model.modules()}
        # The callback must not hold `self`, or a run that was left would never be collected.
        self._give_back = weakref.finalize(self, _put_back, self._task, modes)
        self._give_back.atexit = False  # Nobody uses the model after the process.
        _LENT[model] = weakref.ref(self)
        return True

    def give_back(self) -> None:
        """Leave the model as it came, but for its weights."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def _refuse_lent(self) -> None:
        own = set(self._task.model.model.modules())
        for model, owner in list(_LENT.items()):
            if owner() not in (None, self) and not own.isdisjoint(model.modules()):
                raise ValueError(
                    "another Trainer has this model, or a part of it, and has not come to its "
                    "run's end: let its fit() end, or call its close(), before the model is "
                    "trained anew"
                )


def _put_back(task: Task, modes: Mapping[nn.Module, bool]) -> None:
    set_frozen(task, 0)
    for module, training in modes.items():
        module.training = training
    _LENT.pop(task.model.model, None)

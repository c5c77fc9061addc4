"""Hold what a rank trains of the model: weights, optimizer, sums of gradients, signals."""

from __future__ import annotations

from collections import Counter
from typing import final

import torch
from torch import Tensor, nn

from autodp import GradientReducer, mix_seed
from freeze.signals import IntervalSignals
from pipetransformer.feed import ComingStep, seed_torch
from pipetransformer.model import (
    build_optimizer,
    large_embeddings,
    owned_parameters,
    trained_parameters,
)
from pipetransformer.stage.tied_gradients import TiedGradients
from pipetransformer.stage.wiring import StageWiring


@final
class TrainedPart:
    """Hold a stage's parameters, and what updates them.

    Attributes:
        indices: the stage's sublayers.
        parameters: by name, those that may train.
        optimizer: None without parameters.
        signals: of gradients and weights, for policies.
        reducer: sums gradients over the stage's replicas; None for a single one.
        ties: sums gradients of tied weights over stages.
    """

    def __init__(self, wiring: StageWiring) -> None:
        self._wiring, task, device = wiring, wiring.task, wiring.device
        self.indices = wiring.indices
        self.parameters = trained_parameters(task, self.indices)
        self.optimizer = build_optimizer(task, self.parameters)
        self._rates: list[Tensor] | None = None
        self.signals = IntervalSignals(
            {task.model.sublayers[i].name: owned_parameters(task, i) for i in self.indices},
            task.signals,
            device,
        )
        self.ties = TiedGradients(wiring, self.parameters)
        self.reducer: GradientReducer | None = None
        if wiring.groups.stage is not None and self.parameters:
            topology = wiring.topology
            self.reducer = GradientReducer(
                [p for p in self.parameters.values() if p.requires_grad],
                wiring.groups.stage,
                tables=self._tables(),
                on_one_node=topology.is_on_one_node(topology.stage_ranks(wiring.index)),
                watch=wiring.watch,
            )

    def _tables(self) -> list[nn.Parameter]:
        """Return the large embeddings' weights: replicas sum the touched rows alone."""
        model, device = self._wiring.task.model, self._wiring.device
        used = Counter(name for i in self.indices for name in model.tensors(i))
        modules = (model.sublayers[i].module for i in self.indices)
        weights = {table.weight for one in modules for table in large_embeddings(one, device)}
        # A tied table is the head's matrix, too, whose gradient has all rows.
        return [
            parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and parameter in weights and used[name] == 1
        ]

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def drop_gradients(self) -> None:
        """Free all gradients; right before a forward they leave their memory to activations."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def update(self, coming: ComingStep) -> None:
        """Make the optimizer's step at the rates of a coming step."""
        if self.optimizer is None:
            return
        self.set_rates(coming)
        # An optimizer that rounds stochastically must do so alike on all replicas.
        seed = mix_seed(self._wiring.task.config.seed, coming.step, self._wiring.index)
        seed_torch(seed, self._wiring.device)
        self.optimizer.step()

    def keep_rates_on(self, device: torch.device) -> None:
        """Have the optimizer read its learning rates from memory of a device, always the same."""
        assert self.optimizer is not None
        self._rates = [torch.zeros((), device=device) for _ in self.optimizer.param_groups]

    def set_rates(self, coming: ComingStep) -> None:
        """Give the optimizer a step's learning rates."""
        assert self.optimizer is not None
        for place, group in enumerate(self.optimizer.param_groups):
            rate = group["initial_lr"] * coming.learning_rate_factor
            # Never into a tensor that the user gave, as that is the initial rate.
            group["lr"] = rate if self._rates is None else self._rates[place].fill_(rate)

    def end_training(self) -> None:
        """Take the hooks off parameters, for others to train them."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def close(self) -> None:
        """Free all memory of its own."""
        self.end_training()
        self.drop_gradients()
        self.parameters, self.optimizer, self.signals = {}, None, IntervalSignals({})

"""Give the adapters of Transformer models the cut, wrappers and refusals of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from pipetransformer.model.layered_model import Sublayer
from pipetransformer.model.modules import qualified_name, refuse_replaced


@dataclass(frozen=True)
class Family:
    """Name the parts of a family of transformers' models.

    Args:
        package: in transformers.models.
        prefix: of its classes' names.
        encoder: the attribute of a model that holds its encoder.
    """

    package: str
    prefix: str
    encoder: str

    def qualified(self, name: str) -> str:
        """Spell one of its classes as "module.Class"."""
        module = f"transformers.models.{self.package}.modeling_{self.package}"
        return f"{module}.{self.prefix}{name}"

    def encoder_of(self, model: nn.Module) -> Any:
        """Return a model's encoder, of exactly the family's class."""
        encoder = getattr(model, self.encoder)
        require_class(self.qualified("Model"), encoder)
        return encoder


@final
class FirstOf(nn.Module):
    """Return the first of a module's outputs: attention without its weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        output = self.module(hidden)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return first


@final
class FirstToken(nn.Module):
    """Take the first token of each sample: (N, S, D) to (N, D)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


@final
class Residual(nn.Module):
    """Add a chain of the model's modules to the hidden state."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.branch(hidden)


def transformer_sublayers(
    embedding: nn.Module,
    blocks: Sequence[tuple[nn.Module, nn.Module]],
    head: nn.Module,
    *,
    attention_sides: tuple[str, ...] = (),
) -> tuple[Sublayer, ...]:
    """Name the sublayers of a Transformer: an embedding, (attention, MLP) of each block, a head.

    The cut falls between residual sums only, so no skip connection crosses it.
    Source: PipeTransformer, AutoPipe's unit of partition. The embedding freezes with block 0, the
        head never.
    """
    sublayers = [Sublayer("embedding", 0, embedding)]
    for layer, (attention, mlp) in enumerate(blocks):
        sublayers += [
            Sublayer(f"blocks.{layer}.attention", layer, attention, attention_sides),
            Sublayer(f"blocks.{layer}.mlp", layer, mlp),
        ]
    return (*sublayers, Sublayer("head", len(blocks), head))


def require_class(name: str, *modules: nn.Module) -> None:
    """Raise a TypeError for a module that is not exactly of the class "module.Class".

    A subclass, or an object with methods of its own, may have another forward than its wrappers.
    """
    for module in modules:
        if (found := qualified_name(type(module))) != name:
            raise TypeError(
                f"the model holds a {found} where its adapter can take apart a {name} only; build "
                "a LayeredModel for this model yourself"
            )
        refuse_replaced(module)


def refuse_own_loss(model: Any) -> None:
    """Raise a ValueError if a transformers model was given a loss, which would not be called."""
    if hasattr(model, "_loss_function"):
        raise ValueError(
            "model.loss_function was set, and would not be called; give loss_fn= to "
            "pipetransformer.Trainer"
        )

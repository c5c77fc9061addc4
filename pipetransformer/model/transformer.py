"""Give the adapters of Transformer models the cut, wrappers and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any, final

from torch import Tensor, nn

from autopipe.profile import recomputes_itself
from pipetransformer.model.layered_model import Sublayer


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


def qualified_name(kind: type[Any] | FunctionType) -> str:
    """Spell a class as "module.Class": importing timm or transformers to compare takes seconds."""
    return f"{kind.__module__}.{kind.__qualname__}"


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


def refuse_replaced(*modules: nn.Module, but: str = "") -> None:
    """Raise a TypeError for a module whose object overrides a method other than `but`."""
    for module in modules:
        own = (
            name
            for name, value in vars(module).items()
            if callable(value) and name != but and not _gathers(value)
        )
        if name := next(
            (name for name in own if callable(getattr(type(module), name, None))), None
        ):
            raise TypeError(
                f"{name} of a {type(module).__name__} was replaced, but its parts are called one "
                "by one, so that this would have no effect: put the class's own back, or describe "
                "the model by a LayeredModel"
            )


def _gathers(method: Any) -> bool:
    """Return whether a method only gathers weights around the class's own, as FSDP's do."""
    names = getattr(getattr(method, "__func__", None), "__globals__", {})
    return str(names.get("__name__")).startswith("torch.distributed.fsdp.")


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise a ValueError if activations are recomputed: blocks' own forwards are not called."""
    if _is_checkpointing(model):
        raise ValueError(
            f"gradient checkpointing of this {type(model).__name__} is on, but would have no "
            "effect here, as sublayers are called one by one; switch it off, and set "
            "activation_checkpointing=True"
        )


def _is_checkpointing(model: nn.Module) -> bool:
    flags = ("grad_checkpointing", "gradient_checkpointing")
    return any(getattr(module, flag, False) for module in model.modules() for flag in flags)


def refuse_lost_checkpointing(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise a ValueError if a model recomputes activations, and its blocks would not, or wrongly.

    Args:
        blocks: called one by one, as they are.
    """
    if not any(map(recomputes_itself, blocks)):
        refuse_checkpointing(model)
    for module in chain.from_iterable(block.modules() for block in blocks):
        asks = vars(module).get("gradient_checkpointing")
        keywords = getattr(vars(module).get("_gradient_checkpointing_func"), "keywords", {})
        if asks and keywords.get("use_reentrant") is not False:
            raise ValueError(
                f"gradient checkpointing of this {type(model).__name__} is reentrant, and would "
                "give a block above frozen ones no gradient; switch it on with "
                "use_reentrant=False, or off"
            )


def asks_for_gradients(hook: object) -> bool:
    """Return whether a hook has what an embedding returns need a gradient."""
    # By peft's examples and transformers; both have names like that.
    return str(getattr(hook, "__name__", "")).startswith("make_inputs_require_grad")


def has_input_gradients(model: nn.Module) -> bool:
    """Return whether a hook has what blocks are given need a gradient, frozen as it may be."""
    hooks = (module._forward_hooks.values() for module in model.modules())
    return any(map(asks_for_gradients, chain.from_iterable(hooks)))


def refuse_own_loss(model: Any) -> None:
    """Raise a ValueError if a transformers model was given a loss, which would not be called."""
    if hasattr(model, "_loss_function"):
        raise ValueError(
            "model.loss_function was set, and would not be called; give loss_fn= to "
            "pipetransformer.Trainer"
        )

"""Find the parts of a model that a user names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipetransformer.hints import did_you_mean


def named_parts(
    model: nn.Module, parts: Sequence[str | nn.Module], *, alone: bool = True
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return the module that a loop calls, and its parts by name.

    Args:
        alone: whether a part may be no part of the model, but one by itself.
    Raises:
        TypeError: a part is neither a name nor a module.
        ValueError: the model has no such part, or a part is of another model, beside others.
    """
    if isinstance(parts, (str, nn.Module)):
        raise TypeError(f"parts= is a {type(parts).__name__}; give a list of names or modules")
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for one in parts:
        if isinstance(one, str):
            if one not in modules:
                raise ValueError(f"the model has no module {one!r}{did_you_mean([one], modules)}")
            found[one] = modules[one]
        elif isinstance(one, nn.Module):
            if one not in names and (len(parts) > 1 or not alone):
                raise ValueError(
                    f"this {type(one).__name__} is not in the model; attach it by itself, without "
                    "freeze= and other parts: one model for each `attach`"
                )
            found[names.get(one, "")] = one
        else:
            raise TypeError(f"parts= has a {type(one).__name__}; give names or modules")
    inner = [n for n in found for o in found if n != o and found[n] in {*found[o].modules()}]
    if inner:
        raise ValueError(f"the part {inner[0]!r} lies within another one; name the outer alone")
    other = next((part for part in found.values() if part not in names), None)
    return (model, found) if other is None else (other, {type(other).__name__: other})

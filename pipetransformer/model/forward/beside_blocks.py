"""Tell a row of blocks from the modules and tensors around it."""

from __future__ import annotations

from torch import nn

from pipetransformer.model.forward.recording import Row
from pipetransformer.model.modules import named_tensors


def beside_blocks(
    model: nn.Module, row: Row, names: frozenset[str], called: frozenset[nn.Module]
) -> nn.Module:
    """Collect what serves one sublayer outside of blocks: modules, and loose tensors.

    Args:
        names: of tensors, in the model.
        called: modules without tensors count, too, if they are called.
    """
    holder, name_of = nn.Module(), {id(t): name for name, t in named_tensors(model).items()}

    def hold(module: nn.Module, prefix: str) -> None:
        """Register the largest modules that serve this sublayer alone, and loose tensors."""
        own = {name_of[id(t)] for t in named_tensors(module).values()}
        if not holds_block(module, row) and own <= names and (own or module in called):
            holder.add_module(prefix, module)
            return
        for name, tensor in module._parameters.items():
            if tensor is not None and name_of[id(tensor)] in names:
                holder.register_parameter(f"{prefix}{name}", tensor)
        for name, buffer in module._buffers.items():
            if buffer is not None and name_of[id(buffer)] in names:
                holder.register_buffer(f"{prefix}{name}", buffer)
        for name, child in module._modules.items():
            if child is not None and child not in row.blocks:
                hold(child, f"{prefix}{name}__")

    hold(model, "")
    return holder


def holds_block(module: nn.Module, row: Row) -> bool:
    """Return whether a module is no block, and has one within."""
    return module not in row.blocks and any(part in row.blocks for part in module.modules())

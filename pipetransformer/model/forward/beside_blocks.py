"""Tell a row of blocks from the modules and tensors around it."""

from __future__ import annotations

from torch import nn

from pipetransformer.model.forward.recording import Row
from pipetransformer.model.modules import named_tensors


class BesideBlocks:
    """Collect the modules and tensors outside of blocks that serve one sublayer."""

    def __init__(self, model: nn.Module, row: Row) -> None:
        self._model, self._row = model, row
        self._name_of = {id(t): n for n, t in named_tensors(model).items()}

    def of(self, names: frozenset[str], called: frozenset[nn.Module]) -> nn.Module:
        """Return a module that holds the tensors of these names, and the modules called."""
        holder = nn.Module()
        self._hold(holder, self._model, "", names, called)
        return holder

    def _hold(
        self,
        holder: nn.Module,
        module: nn.Module,
        prefix: str,
        names: frozenset[str],
        called: frozenset[nn.Module],
    ) -> None:
        """Register the largest modules that serve this sublayer alone, and loose tensors."""
        own = {self._name_of[id(t)] for t in named_tensors(module).values()}
        if not holds_block(module, self._row) and own <= names and (own or module in called):
            holder.add_module(prefix, module)
            return
        for name, tensor in module._parameters.items():
            if tensor is not None and self._name_of[id(tensor)] in names:
                holder.register_parameter(f"{prefix}{name}", tensor)
        for name, buffer in module._buffers.items():
            if buffer is not None and self._name_of[id(buffer)] in names:
                holder.register_buffer(f"{prefix}{name}", buffer)
        for name, child in module._modules.items():
            if child is not None and child not in self._row.blocks:
                self._hold(holder, child, f"{prefix}{name}__", names, called)


def holds_block(module: nn.Module, row: Row) -> bool:
    """Return whether a module is no block, and has one within."""
    return module not in row.blocks and any(part in row.blocks for part in module.modules())

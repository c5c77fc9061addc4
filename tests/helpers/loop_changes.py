"""List what loops do to their batches, models and data sets, as lines of their code.

A change of a batch has the model's input "x", the labels "y", and of texts by name a "mask". What
takes rows takes them of all; what computes does so of the input. `n` is a number that varies it.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch.nn.utils import parametrizations, prune
from torch.utils.data import default_collate

from tests.helpers import row_stories
from tests.helpers.loop_pairs import Side
from tests.helpers.row_models import WORDS

Batch = dict[str, Any]

MOVES = (
    "x.to('cpu')", "x.to(x.dtype)", "x.cpu()", "x.to('cpu', copy=True)", "x.detach()", "x.clone()",
    "x.to(torch.zeros((), dtype=x.dtype))", "x.to(device='cpu', dtype=x.dtype)", "x.contiguous()",
    "x.to(other=torch.zeros((), dtype=x.dtype))", "x.type(x.dtype)", "x[:]", "x[:, :]",
    "torch.clone(x, memory_format=torch.contiguous_format)", "send_to_device([x], 'cpu')[0]",
)  # fmt: skip
"""Moves of each entry, which must keep its rows."""

ROWS = (
    "x[1:]", "x[:-1]", "x[n % 2 :: 2]", "x[: 1 + n % 3, ...]", "x[(slice(n % 2, None),)]",
    "x[[0, 0, -1]]", "x[mask.tolist()]", "x[order]", "x[-1 - order]", "x[order.to(torch.int32)]",
    "x[mask]", "x.chunk(2)[n % 2]", "torch.split(x, [1, len(x) - 1])[n % 2]", "x.split(2)[0]",
    "torch.cat([x, x])", "torch.index_select(x, 0, order)", "torch.cat((x[1:], x[:1]), 0)",
)  # fmt: skip
"""What takes rows of each entry, and must keep them."""

UNUSUAL_ROWS = (
    "x[...]", "x.requires_grad_(False)", "torch.clone(input=x)", "x.type(x.type())",
    "x[np.int64(0) : np.int64(2)]", "x[[torch.tensor(0), torch.tensor(-1)]]", "x[[slice(0, 2)]]",
    "torch.cat([x[[]], x])", "torch.cat([x[:0], x])", "x[range(1, len(x))]", "x[order.numpy()]",
    "x[mask.numpy()]", "x[order[None]][0]", "x[mask.nonzero(as_tuple=True)]", "x.flip(0)",
    "torch.split(x, 2, dim=-x.dim())[0]", "torch.tensor_split(x, 3)[n % 2]", "x.split(2, -2)[0]",
    "torch.narrow(x, 0, torch.tensor(n % 2), 2)", "x.repeat_interleave(1 + n % 2, dim=0)",
    "torch.repeat_interleave(x, order % 2 + 1, dim=0)", "x.repeat(2, *(1 for _ in x.shape[1:]))",
    "torch.concat([x[:1], x], dim=-x.dim())", "torch.cat([x, torch.zeros_like(x[:1])])",
    "torch.cat(tensors=[x[:1], x], dim=0)", "default_collate([*x])", "x[n % len(x)][None]",
)  # fmt: skip

CUTS = ("x.chunk(2)", "x.split([1, len(x) - 1])", "x.split(1)", "torch.tensor_split(x, 3)",
        "[x[:1], x[1:]]", "[x, x[order]]")  # fmt: skip
"""What makes several batches of one; the loop trains on all of them."""

COMPUTES = (
    "x.data", "copy.deepcopy(x)", "copy.copy(x)", "pickle.loads(pickle.dumps(x))", "x.flip(0)",
    "torch.from_numpy(x.numpy())", "torch.as_tensor(np.asarray(x))", "torch.asarray(x)", "1 * x",
    "torch.tensor(x.tolist(), dtype=x.dtype)", "torch.empty_like(x).copy_(x)", "x.unsqueeze(0)[0]",
    "torch.from_dlpack(x)", "x.expand(x.shape)", "x.as_subclass(Tensor)", "x.share_memory_()",
    "F.pad(x, (0, 0))", "x * 2 % WORDS", "x - x", "x.clamp(0, 3)", "torch.where(x == x, x, 0)",
    "torch.nan_to_num(input=x, nan=1.0)", "x.where(x > 1, 1)", "x.masked_fill(x > 1, 1)",
    "x.sort(dim=-1).values", "x.flip(1)", "x[:, [1, 0]]", "x[:, 0:]", "torch.cat([x, x], dim=1)",
    "x.transpose(0, 1).transpose(0, 1)", "torch.zeros_like(x)", "x.new_ones(x.shape)",
    "x + (torch.rand(x.shape) > 0.5).to(x.dtype)", "nn.Identity()(x)", "x.half().to(x.dtype)",
    "torch.func.vmap(lambda one: one)(x)", "torch._foreach_mul([x], 1)[0]", "x[order]",
    "torch._C.TensorBase.add(x, 0)", "x[[0] * len(x)]", "torch.cat([x, x])[: len(x)]",
    "F.dropout(x.double(), 0.5).to(x.dtype)", "x.int().to(x.dtype)", "x.float().to(x.dtype)",
    "x.type(torch.float16).type(x.dtype)", "x.to(dtype=torch.float32).to(dtype=x.dtype)",
)  # fmt: skip
"""What copies the input, or computes of it."""

VIEWS = (
    "x", "x[1:]", "x.chunk(2)[0]", "x.view(-1)[None]", "x.flatten()[None]", "x[0][None]",
    "next(iter(x))[None]", "x.unbind()[0][None]", "x[:, :1]", "x.transpose(0, 1)", "x.detach()",
    "x.to('cpu')", "x.contiguous()", "torch.as_strided(x, x.shape, x.stride())", "torch.real(x)",
    "x[None].squeeze(0)", "copy.copy(x)", "torch.as_tensor(x)", "x.as_subclass(Tensor)",
)  # fmt: skip
MEMORIES = (
    "x", "x.data", "torch.from_numpy(x.numpy())", "torch.from_numpy(x.numpy(force=True))",
    "torch.from_numpy(np.asarray(x))", "torch.from_dlpack(x)", "x.share_memory_().data",
    "torch.from_numpy(np.from_dlpack(x))", "torch.empty(0, dtype=x.dtype).set_(x)",
    "torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape, x.stride())",
    "nn.Parameter(x, requires_grad=False)", "Tensor._make_subclass(Tensor, x)",
    "torch.ops.aten.alias(x)", "torch.frombuffer(memoryview(x.numpy()), dtype=x.dtype)[None]",
)  # fmt: skip
WRITES = (
    "x.zero_()", "x.__setitem__(0, 1)", "x.__setitem__((slice(None), 0), 1)", "x.clamp_(0, 1)",
    "x.copy_(x.flip(0))", "torch._foreach_zero_([x])", "torch.relu_(x)", "x.apply_(lambda _: 1)",
    "torch.mul(x, 0, out=x)", "nn.init.constant_(x, 1)", "x.__setitem__([0, -1], x[[-1, 0]])",
)  # fmt: skip
"""What writes to a memory of a view of the input."""

LOOKS = (
    "x.unsqueeze_(0).squeeze_(0)", "x.transpose_(0, 1)", "x.resize_(1, *x.shape[1:])", "len(x)",
    "x.set_(torch.ones(x.shape, dtype=x.dtype))", "setattr(x, 'data', x.data * 0 + 1)", "1 in x",
    "torch.utils.swap_tensors(x, torch.ones(x.shape, dtype=x.dtype))", "setattr(x, 'own_name', 1)",
    "x.is_floating_point() and x.requires_grad_()", "x.detach_()", "tuple(x.shape)",
    "x.requires_grad, x.is_leaf, x.grad_fn is None", "x.is_inference()", "bool((x == x).all())",
    "float(x.double().sum())", "torch.equal(x, x)", "len(repr(x)) > 0", "hash(x) == hash(x)",
    "x.data_ptr() == x.data_ptr()", "str(torch.result_type(x, x))", "sum(1 for _ in x)",
)  # fmt: skip
"""What changes the input's shape or data, or looks at it."""


OF_BATCHES = (
    "joined(side, batch, n)", "another(side, batch, n)",
    "{name: e[batch['y'].argsort(stable=True)] for name, e in batch.items()}",
    "{name: e.flip(0) if name == 'mask' else e for name, e in batch.items()}",
    "{**batch, 'y': batch['y'].flip(0)}", "batch['y'].__setitem__(0, n % 3) or batch",
)  # fmt: skip

NAMES: dict[str, Any] = {
    **vars(row_stories), "copy": copy, "default_collate": default_collate, "np": np,
    "parametrizations": parametrizations, "pickle": pickle, "prune": prune, "WORDS": WORDS,
    "send_to_device": send_to_device, "SimpleNamespace": SimpleNamespace,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Apply lines to each entry, the input or the batch; a "look" at the input leaves it."""

    of: Literal["each", "cuts", "input", "look", "batch"]
    lines: tuple[str, ...]
    n: int

    @property
    def must_keep_rows(self) -> bool:
        return self.lines[0] in (*MOVES, *ROWS, *CUTS[:2]) and self.of in ("each", "cuts")

    def value(self, x: Any) -> Any:
        generator = torch.Generator().manual_seed(self.n)
        mask = torch.arange(len(x)) % 3 != self.n % 3
        own = {"n": self.n, "order": torch.randperm(len(x), generator=generator), "mask": mask}
        for line in self.lines:
            x = eval(line, NAMES | own | {"x": x})  # Names, as comprehensions see no locals.
        return x

    def batches(self, side: Side, batch: Batch) -> list[Batch]:
        """Return what the loop goes on with; what it looks at is noted."""
        if self.of == "batch":
            return [eval(self.lines[0], NAMES | {"batch": batch, "side": side, "n": self.n})]
        if self.of == "input":
            return [{**batch, "x": self.value(batch["x"])}]
        if self.of == "look":
            value = self.value(batch["x"])
            side.seen.append(value if isinstance(value, (int, float, str, tuple)) else None)
            return [batch]
        each = {name: self.value(entry) for name, entry in batch.items()}
        if self.of == "each":
            return [each]
        return [dict(zip(each, part, strict=True)) for part in zip(*each.values(), strict=True)]


def joined(side: Side, batch: Batch, n: int) -> Batch:
    """Join a batch and one of the last ones, which may be of another epoch."""
    other = another(side, batch, n)
    return {name: torch.cat([other[name][n % 2 :], batch[name]]) for name in batch}


def another(side: Side, batch: Batch, n: int) -> Batch:
    side.waiting.append(batch)
    return dict(side.waiting[n % len(side.waiting)])


EDITS = (
    "block.factor = v", "block.factors[0] = v", "block.factors = [v]", "block.config.gain = v",
    "block.options['gain'] = v", "block.activation = torch.relu", "block.offset += 0.1",
    "block.config = SimpleNamespace(gain=v)", "block.offset = block.offset + 0.1", "unhook(side)",
    "block.extra = v", "vars(block).pop('extra', 0)", "block.drop.p = 0.1 * v", "model.scale = v",
    "block.norm.eps = 0.5 * v", "block.norm.momentum = 0.5", "weight.mul_(1.1)",
    "weight[0].zero_()", "weight.data = 1.1 * weight.data", "model.embed.weight.mul_(1.1)",
    "block.shift.add_(0.1)", "block.shift = block.shift + 0.1", "replace_block(side, i)",
    "model.load_state_dict({n: 1.05 * t for n, t in model.state_dict().items()})",
    "model.load_state_dict({n: 1.05 * t for n, t in model.state_dict().items()}, assign=True)",
    "getattr(block.norm, 'running_mean', weight).add_(0.1)", "block.linear = nn.Tanh()",
    "replace_linear(side)", "replace_weight(side)", "replace_embedding(side)", "model.double()",
    "blocks[i], blocks[i - 1] = blocks[i - 1], blocks[i]", "hook(side, f'blocks.{i}', larger)",
    "model.head = made(lambda: nn.Linear(WIDTH, 3), 9)", "hook(side, 'embed', larger)",
    "block.linear = nn.Sequential(block.linear, nn.Tanh())", "hook(side, '', larger)",
    "prune.l1_unstructured(block.linear, 'weight', 0.3)", "hook(side, f'blocks.{i}.norm', larger)",
    "parametrizations.weight_norm(block.linear)", "block.forward = scaled(block.forward)",
    "side.hooks.append(block.register_forward_pre_hook(larger_input))", "model.eval()",
    "side.hooks.append(block.linear.register_forward_pre_hook(larger_input))", "model.train()",
    "block.linear.forward = scaled(block.linear.forward)", "model.forward = scaled(model.forward)",
    "block.eval()", "block.train()", "block.norm.train()", "block.drop.train()",
    "block.requires_grad_(v > 1)", "evaluate(side, model)", "evaluate(side, copy.deepcopy(model))",
    "evaluate(side, model, side.batch)", "evaluate(side, model.train(), side.batch)",
    "side.waiting.append(copy.deepcopy(model))", "side.cached.freeze_bottom(i)",
    "side.waiting and evaluate(side, side.waiting[0])", "side.cached.freeze_bottom(i + 1)",
    "block.linear.set_scale('default', v)", "block.linear.scale_layer(v)",
    "block.linear.enable_adapters(False)", "block.linear.merge()", "block.linear.unmerge()",
    "block.linear.lora_A['default'].weight.mul_(1.5)",
)  # fmt: skip
"""Edits of a model; some are of adapters, and raise in both loops without any."""

UNSEEN_EDITS = (
    "weight.data.mul_(1.1)", "np.multiply(weight.numpy(), 1.1, out=weight.numpy())",
    "model.embed.weight.data.mul_(1.1)", "block.shift.data.add_(0.1)",
)  # fmt: skip
"""Edits that leave no trace: they are noticed at the next epoch."""


def edit(line: str, place: int, value: float, side: Side) -> list[Any]:
    """Run a line of Python on a side; return the losses of its evaluations."""
    side.seen.clear()
    block = side.model.blocks[place]
    linear = getattr(block.linear, "base_layer", block.linear)
    own = {"side": side, "model": side.model, "blocks": side.model.blocks, "block": block,
           "i": place, "v": value, "weight": getattr(linear, "weight", None)}  # fmt: skip
    with torch.no_grad():
        exec(line, {**NAMES, **own})
    known = {id(p) for group in side.optimizer.param_groups for p in group["params"]}
    added = [p for p in side.model.parameters() if id(p) not in known and p.requires_grad]
    if added:
        side.optimizer.add_param_group({"params": added})
    return [*side.seen]


def evaluate(side: Side, model: Any, batch: Any = None) -> None:
    """Note the loss of a batch; without one, of samples that no loader gives."""
    x, y = batch or (side.dataset.tensors[0].flip(1), side.dataset.tensors[1])
    was_training = model.training
    model.train(batch is not None and was_training)
    side.seen.append(float(F.cross_entropy(model(x), y)))
    model.train(was_training)


NAMES |= {
    **{one.__name__: one for one in (another, evaluate, joined)},
    "larger": lambda _, __, hidden: 1.1 * hidden,
    "larger_input": lambda _, args: tuple(1.1 * one for one in args),
    "scaled": lambda function: lambda *args, **kwargs: 1.1 * function(*args, **kwargs),
}

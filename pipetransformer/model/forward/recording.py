"""Record one forward of a model: where its row of blocks is, and what each block is given.

    def forward(self, ids, mask):
        hidden = self.embed(ids)                  ╮ below: tensors and modules used up to here
        mask = self.expand(mask)                  ╯
        for block in self.blocks:
            hidden = block(hidden, mask)[0]         a call: `hidden` goes in at 0, comes out at 0
        return self.head(self.norm(hidden))         above

The row is the largest list of modules that run one after the other, each on what the one before it
has returned. Nothing is guessed from names: a model is read by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from autopipe.profile import graph_leaves
from freeze.in_place import children_but_head, frozen_in_place
from pipetransformer.model.modules import opaque_kept, whole_in_mode

if TYPE_CHECKING:
    from pipetransformer.model.forward.packing import Packing, PartAnswer
    from pipetransformer.model.forward.routers import RouterRows

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


_MOST_LEARNED = 8
"""Parameters that blocks' own arguments may be computed from: biases, and not an encoder."""


_LEAST_SHARE = 0.2
"""Of a model's weights without its embeddings: an encoder's half is enough, a head's is not."""


class ForwardFailedError(ValueError):
    """Say that a model cannot be run on what it is given."""


class NoRowError(ValueError):
    """Say why a model's forward cannot be cut at a row of blocks."""


@dataclass(frozen=True)
class BlockCall:
    """Say where the hidden state goes into a block, and where in its answer it comes out.

    Args:
        takes: a position, or a keyword.
        answer: the shape of the answer; its leaf number `returns` is the hidden state.
        leaves: the answer's other leaves; None in the place of tensors.
    """

    takes: int | str
    answer: TreeSpec
    returns: int
    leaves: tuple[Any, ...]

    def hidden_in(self, given: Arguments) -> Tensor:
        """Return the hidden state that a call was given."""
        args, kwargs = given
        hidden: Tensor = args[self.takes] if isinstance(self.takes, int) else kwargs[self.takes]
        return hidden

    def given(self, own: Arguments, hidden: Tensor | None) -> Arguments:
        """Put a hidden state into a call's arguments."""
        args, kwargs = own
        if isinstance(self.takes, str):
            return args, {**kwargs, self.takes: hidden}
        return (*args[: self.takes], hidden, *args[self.takes + 1 :]), kwargs

    def answered(self, hidden: Tensor) -> Any:
        """Return what a block that does nothing would answer."""
        leaves = list(self.leaves)
        leaves[self.returns] = hidden
        return tree_unflatten(leaves, self.answer)

    def hidden_out(self, answer: Any) -> Tensor:
        """Return the hidden state of a block's answer."""
        hidden: Tensor = tree_leaves(answer)[self.returns]
        return hidden


@dataclass(frozen=True)
class Row:
    """Hold a model's row of blocks, and which of its other tensors are used where.

    Args:
        name: of the list of blocks, in the model.
        below: names of tensors outside of blocks that are read before the last block runs.
        above: those that are read behind it; a tied tensor is in both.
        learned: parameters in `below` from which blocks' own arguments are computed, such as a
            learned position bias.
        called_below, called_above: modules outside of blocks that are called there.
        samples_at: the hidden state's dimension of samples: 0, or 1 as in XLNet.
        entrance: the module outside of blocks that returns what the first one is given, if any.
        packing: of parts that are no chain, which freeze together; see `parts`.
        idle: modules that serve the parts alone, with what they answer.
        routers: of blocks, whose logits the model gathers; rows hold them, too.
    """

    name: str
    blocks: tuple[nn.Module, ...]
    calls: tuple[Any, ...]
    below: frozenset[str]
    above: frozenset[str]
    learned: frozenset[str]
    called_below: frozenset[nn.Module]
    called_above: frozenset[nn.Module]
    samples_at: int
    entrance: nn.Module | None
    packing: Packing | None = None
    idle: tuple[tuple[nn.Module, PartAnswer], ...] = ()
    routers: RouterRows | None = None

    def frozen(self, depth: int) -> tuple[nn.Module, ...]:
        """Return what is frozen where rows are of this depth; parts all are."""
        return self.blocks if depth and self.packing is not None else self.blocks[:depth]


@dataclass(frozen=True)
class Recording:
    """Hold what a forward has shown of a model: its rows, the best first, and its answer."""

    rows: list[Row]
    answer: Any


def record(
    model: nn.Module, run: Callable[[], Any], num_samples: int, *, may_differentiate: bool = False
) -> Recording:
    """Find what may be a model's row of blocks, by one forward; by two where blocks repeat.

    Blocks that the user has frozen are taken last.

    Args:
        run: calls the model's forward on a few samples, and returns its answer.
        may_differentiate: see `watched`.
    Raises:
        NoRowError: no list of modules is such a row; the message says of each why not.
    """
    reasons: list[str] = []
    rows: list[Row] = []
    answer: Any = None
    # What an earlier loop froze is its row still: only what a user froze counts as frozen.
    trained = {p for p in model.parameters() if p.requires_grad}
    trained.update(frozen_in_place(model).values())
    with watched(model, may_differentiate=may_differentiate):
        # Those with most parameters first.
        candidates = sorted(block_lists(model), key=lambda one: -sum(map(_size, one[1])))
        while candidates and not rows:
            records = {name: _Record(model, blocks) for name, blocks in candidates}
            with ExitStack() as stack:
                for one in records.values():
                    stack.enter_context(one.listening())
                answer = run()
            loops = []
            for name, one in records.items():
                try:
                    rows.append(one.row(name, num_samples))
                except NoRowError as error:
                    reasons.append(f"{name}: {error}")
                    if one.repeats:
                        loops.append(name.rpartition(".")[0])
            # Blocks that run many times, as ALBERT's, freeze as one, with what loops over them.
            candidates = [(name, (model.get_submodule(name),)) for name in loops if name]
    if not rows:
        raise NoRowError("; ".join(reasons[:3]) or "it holds no list of two blocks or more")
    # What is learned below is computed anew for each block: a decoder's encoder, say.
    rows.sort(key=lambda row: len(row.learned))
    rows.sort(key=lambda row: not any(trained & {*b.parameters()} for b in row.blocks))
    return Recording(rows, tree_map_only(Tensor, Tensor.detach, answer))


def block_lists(
    model: nn.Module, *, without: Iterable[nn.Module] = ()
) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Return by name the lists of modules that may be the row, as they are registered.

    Short lists, such as the layers of a head, are none. A plain `nn.Sequential` of unlike children
    is one, but for its last child, as in the Trainer.

    Args:
        without: modules whose lists do not count, nor their weights.
    """
    apart = {part for module in without for part in module.modules()}
    tables = {part for part in model.modules() if isinstance(part, nn.Embedding)}
    others = {p for part in apart | tables for p in part.parameters()}
    least = _LEAST_SHARE * sum(p.numel() for p in model.parameters() if p not in others)
    lists = [
        (name, tuple(module))
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
        if module not in apart and all(map(_size, module)) and _size(module) >= least
    ]
    children = [child for child in children_but_head(model) if child not in apart]
    if children and not lists and model not in apart:
        lists = [("", tuple(children))]
    elif len({*map(type, children)}) > 1:
        lists = [(name, blocks if name else tuple(children)) for name, blocks in lists]
    parts = {id(part) for _, blocks in lists for one in blocks for part in one.modules()}
    # A list within a block is no row of the model, but of that block.
    return [(n, blocks) for n, blocks in lists if id(model.get_submodule(n)) not in parts]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def watched(model: nn.Module, *, may_differentiate: bool = False) -> Iterator[None]:
    """Have the model in eval mode, all its parameters needing a gradient, and put that back.

    Args:
        may_differentiate: whether gradients may be computed within. Else the graph says what
            depends on what, and keeps no activations.
    """
    # Packed as nothing: a graph of all activations would take many times the weights.
    bare = nullcontext() if may_differentiate else saved_tensors_hooks(_drop, _refuse_backward)
    flags = {p: p.requires_grad for p in model.parameters()}
    try:
        for parameter in flags:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        with (
            torch.enable_grad(),
            bare,
            whole_in_mode(model, training=False),
            opaque_kept([*model.parameters(), *model.buffers()]),
        ):
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def _drop(_: Tensor) -> None:
    return None


def _refuse_backward(_: None) -> Tensor:
    raise RuntimeError("a forward that computes gradients itself is recorded with its graph")


@dataclass
class _Call:
    index: int
    given: Arguments
    answer: Any = None


@dataclass
class Reads(TorchFunctionMode):
    """Note which of the model's tensors functions of torch are called with."""

    note: Callable[[int], None]

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.note(id(leaf))
        return func(*args, **kwargs)


@dataclass
class _Record:
    """Follow one forward, and tell below, within and above the blocks apart."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    calls: list[_Call] = field(default_factory=list)
    depth: int = 0

    def __post_init__(self) -> None:
        inside = {m for block in self.blocks for m in block.modules()}
        self.outside = {m for m in self.model.modules() if m not in inside}
        self.name_of = {id(t): name for name, t in _tensors_outside(self.model, inside).items()}
        # For each stretch between two blocks' ends: what was read and called in it.
        self.read: list[set[str]] = [set()]
        self.called: list[set[nn.Module]] = [set()]
        # By the tensors that modules return below the first block: the outermost returns last.
        self.returned_by: dict[int, nn.Module] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                for handle in self._hooks(index, block):
                    stack.callback(handle.remove)
            stack.callback(register_module_forward_pre_hook(self._note_module).remove)
            stack.callback(register_module_forward_hook(self._note_answer).remove)
            stack.enter_context(Reads(self._note_read))
            yield

    def _hooks(self, index: int, block: nn.Module) -> list[Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.depth += 1
            self.calls.append(_Call(index, (args, dict(kwargs))))

        def leave(_: nn.Module, _args: object, _kwargs: object, answer: Any) -> None:
            self.depth -= 1
            self.calls[-1].answer = answer
            self.read.append(set())
            self.called.append(set())

        return [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave, with_kwargs=True),
        ]

    def _note_module(self, module: nn.Module, _args: object) -> None:
        if module in self.outside:
            self.called[-1].add(module)

    def _note_answer(self, module: nn.Module, _args: object, answer: object) -> None:
        if module in self.outside and not self.calls and isinstance(answer, Tensor):
            self.returned_by[id(answer)] = module

    def _note_read(self, identity: int) -> None:
        # Blocks read tensors of others only where these are handed to them.
        if self.depth == 0 and (name := self.name_of.get(identity)) is not None:
            self.read[-1].add(name)

    @property
    def repeats(self) -> bool:
        """Return whether a module ran more than once."""
        return len({call.index for call in self.calls}) < len(self.calls)

    def row(self, name: str, num_samples: int) -> Row:
        order = [call.index for call in self.calls]
        if order != list(range(len(self.blocks))):
            spelled = ", ".join(map(str, order[:8])) + (", ..." if len(order) > 8 else "")
            raise NoRowError(f"its modules run in the order {spelled or 'of none'}")
        calls = self._chain()
        hidden = calls[0].hidden_in(self.calls[0].given)
        samples_at = next((d for d in range(2) if hidden.shape[d : d + 1] == (num_samples,)), None)
        if samples_at is None:
            raise NoRowError(
                f"its hidden state has shape {tuple(hidden.shape)} for {num_samples} samples"
            )
        learned = self._learned(calls)
        if len(learned) > _MOST_LEARNED:
            raise NoRowError(
                "its blocks take, beside the hidden state, what is computed from "
                f"{len(learned)} parameters, such as {min(learned)!r}: that would be done anew "
                "for every block"
            )
        return Row(
            name,
            tuple(self.blocks),
            calls,
            frozenset().union(*self.read[:-1]),
            frozenset(self.read[-1]),
            learned,
            frozenset().union(*self.called[:-1]),
            frozenset(self.called[-1]),
            samples_at,
            self.returned_by.get(id(hidden)),
        )

    def _chain(self) -> tuple[BlockCall, ...]:
        """Check that each block takes what the one before it has returned."""
        found: list[BlockCall] = []
        previous: Tensor | None = None
        made: set[int] = set()
        for call in self.calls:
            if {id(x) for x in tree_leaves(call.given)} & (made - {id(previous)}):
                raise NoRowError(f"block {call.index} takes what a block before it made")
            takes = _first_hidden(call) if previous is None else _place_of(call, previous)
            leaves, answer = tree_flatten(call.answer)
            returns = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor)), None)
            if returns is None:
                raise NoRowError(f"block {call.index} returns no tensor")
            previous = leaves[returns]
            made |= {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            found.append(BlockCall(takes, answer, returns, others))
        return tuple(found)

    def _learned(self, calls: tuple[BlockCall, ...]) -> frozenset[str]:
        """Name the parameters from which arguments of blocks are computed.

        Raises:
            NoRowError: an argument comes from another block.
        """
        names = {name for read in self.read[:-1] for name in read}
        below = {id(p): n for n, p in self.model.named_parameters() if n in names}
        inside = {id(p) for block in self.blocks for p in block.parameters()}
        learned: set[str] = set()
        for call, how in zip(self.calls, calls, strict=True):
            hidden = how.hidden_in(call.given)
            for leaf in tree_leaves(call.given):
                if isinstance(leaf, Tensor) and leaf is not hidden and leaf.requires_grad:
                    sources = _sources(leaf)
                    if sources & inside:
                        raise NoRowError(f"block {call.index} takes what a block before it made")
                    learned |= {below[one] for one in sources & below.keys()}
        return frozenset(learned)


def _tensors_outside(model: nn.Module, inside: set[nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if module not in inside:
            own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
            start = f"{prefix}." if prefix else ""
            found.update((start + n, t) for n, t in own.items() if t is not None)
    known: dict[int, str] = {}
    return {n: t for n, t in found.items() if known.setdefault(id(t), n) == n}


def _sources(tensor: Tensor) -> set[int]:
    """Return by their ids the parameters that a tensor was computed from; a graph is enough."""
    return {id(one) for one in ([tensor] if tensor.is_leaf else graph_leaves([tensor]))}


def _first_hidden(call: _Call) -> int | str:
    """Say where the first block takes its hidden state: its first floating tensor."""
    args, kwargs = call.given
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor) and value.is_floating_point():
            return place
    raise NoRowError("the first of its modules takes no floating tensor")


def _place_of(call: _Call, hidden: Tensor) -> int | str:
    args, kwargs = call.given
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if value is hidden:
            return place
    raise NoRowError(f"something happens between its modules {call.index - 1} and {call.index}")

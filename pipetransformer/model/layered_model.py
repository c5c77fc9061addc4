"""Present a model as a sequence of sublayers that share its very parameters.

One tensor, the hidden state, goes from each sublayer to the next::

    batch[inputs] -> embedding -> attention -> MLP -> ... -> head -> output
    layer                0            0         0             num_layers

Sublayers are modules of the model or thin wrappers around them, and own no tensor: checkpoints,
optimizers and moves between ranks all use the model's own `state_dict` names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autopipe.loss import LossFunction
from pipetransformer.model.modules import is_opaque, laid_out_as, named_tensors, refuse_hooks

if TYPE_CHECKING:
    from pipetransformer.model.forward import Row
    from pipetransformer.model.losses import WordHead


@dataclass(frozen=True)
class Sublayer:
    """Name the smallest unit that a stage can hold.

    Args:
        name: unique in the model, such as "blocks.3.attention".
        layer: the layer it freezes with. Layers rise by 0 or 1 from sublayer to sublayer; the
            embedding's is 0, the head's (the last sublayer's) is the number of layers.
        module: takes the hidden state (the first one: the model's inputs) and returns one Tensor.
        sides: batch entries its forward also takes, as keywords, if the batch has them.
        compiles: the part of the module that `compile=True` compiles; None is all of it.
    """

    name: str
    layer: int
    module: nn.Module
    sides: tuple[str, ...] = ()
    compiles: nn.Module | None = None

    @property
    def compiled_part(self) -> nn.Module:
        """Return what `compile=True` compiles."""
        return self.module if self.compiles is None else self.compiles


@final
class LayeredModel:
    """Run, empty and refill a model sublayer by sublayer.

    Forward hooks of modules inside a sublayer fire. Those of a module that spans several (a whole
    block, the model) do not, as its own forward is not called. From here on put other tensor
    objects into the model by `replace` only: wrappers may hold the same ones.

    An example is in docs/models.md.

    Args:
        model: keeps working as it is, and keeps its `state_dict` names.
        sublayers: in forward order; together they hold every parameter and buffer of the model.
            Several may hold the same one, as where the head's matrix is the embedding's.
        inputs: batch entries of the first sublayer: the first is required and goes in by
            position, the others by keyword if the batch has them.
        targets: batch entries of the loss.
        loss_fn: the loss to take where the user gives none.
        unused: names of parameters and buffers that no forward reads, such as a pooler's.
        padding_mask: one of the sides, (N, S): 1 on tokens, 0 on padding, the reverse of torch's
            `key_padding_mask`. The loss and the gradients must not depend on the hidden states,
            (N, S, ...), of zeros at a sample's end. Without it samples of unequal lengths are
            not cached.
        optional_masks: sides, (N, S) masks, that sublayers can do without where all is 1. Then
            attention takes faster kernels.
        biases: names of tensors of a low layer that those above it read, such as a learned
            position bias. They freeze with that layer; other shared tensors are tied weights.
        is_recorded: whether the sublayers were found by running the model, not written by hand:
            then a run compares them with the model's own forward before its first step.
    Attributes:
        owners: the first sublayer, by index, of each tensor. Others may share it: tied weights.
        shared: the names of tensors in several sublayers.
        row: of blocks, or of parts, where it was found by running the model.
        reads_by_labels: whether it has a padding mask because the loss reads no padding alone.
        words: its head, where that is known to be a linear layer over many words, which losses
            may go without: then the head's sublayer takes `headless=True`.
        plainly_random: sublayers, by index, that were found to draw from Python's or numpy's
            generators while they train.
    Raises:
        ValueError: a tensor is in no sublayer, or not the model's; a name is used twice; layers
            fall, skip a number, or leave the head no layer of its own.
    """

    reads_by_labels = False
    row: Row | None = None
    words: WordHead | None = None

    def __init__(  # noqa: PLR0913 - the documented interface
        self,
        model: nn.Module,
        sublayers: Sequence[Sublayer],
        *,
        inputs: Sequence[str],
        targets: Sequence[str],
        loss_fn: LossFunction | None = None,
        unused: Sequence[str] = (),
        padding_mask: str | None = None,
        optional_masks: Sequence[str] = (),
        biases: Sequence[str] = (),
        is_recorded: bool = False,
    ) -> None:
        self.model = model
        self.sublayers = tuple(sublayers)
        self.inputs = tuple(inputs)
        self.targets = tuple(targets)
        self.loss_fn = loss_fn
        self.unused = tuple(unused)
        self.padding_mask = padding_mask
        self.optional_masks = tuple(optional_masks)
        self.biases = frozenset(biases)
        self.is_recorded = is_recorded
        _check_order(self.sublayers)
        if not self.inputs:
            raise ValueError("inputs is empty; name the batch entry that the first sublayer takes")
        self._names = _assign_names(model, self.sublayers, self.unused)
        self.owners: dict[str, int] = {}
        for index, own in enumerate(self._names):
            for name in own:
                self.owners.setdefault(name, index)
        counts = Counter(chain(*self._names))
        self.shared = frozenset(name for name, num in counts.items() if num > 1)
        self._slots = _find_slots(model, self.sublayers)
        self._guards: dict[int, list[RemovableHandle]] = {}
        self._flags = _mode_flags(model, self.sublayers)
        self.plainly_random: set[int] = set()

    @property
    def num_layers(self) -> int:
        """Return how many layers can freeze; the head's layer has this number."""
        return self.sublayers[-1].layer

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Return the modules that are frozen wherever they are, if its layer 0 is that."""
        row = self.row
        return () if row is None or row.packing is None else row.blocks

    def flags(self, *, training: bool) -> Mapping[nn.Module, bool]:
        """Say which flag `train()` or `eval()` of the model gives each module."""
        return self._flags[training]

    def first_active(self, num_frozen: int) -> int:
        """Find the first sublayer above frozen layers 0..num_frozen-1; the head at the latest."""
        if not 0 <= num_frozen <= self.num_layers:
            raise ValueError(
                f"num_frozen is {num_frozen}, but the model has {self.num_layers} "
                f"layers that can freeze; give 0 to {self.num_layers}"
            )
        return next(i for i, sub in enumerate(self.sublayers) if sub.layer >= num_frozen)

    def shared_above(self, num_frozen: int) -> frozenset[str]:
        """Name the tensors of layers 0..num_frozen-1 that are tied to a layer above them."""
        above = range(self.first_active(num_frozen), len(self.sublayers))
        shared = {name for index in above for name in self._names[index]} - self.biases
        return frozenset(name for name in shared if self.owners[name] not in above)

    def sides_of(self, first: int, last: int) -> tuple[str, ...]:
        """Name the batch entries that sublayers first..last-1 take beside the hidden state."""
        return tuple(dict.fromkeys(chain(*(sub.sides for sub in self.sublayers[first:last]))))

    def targets_of(self, batch: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Return a batch's targets as a loss takes them: a tensor, or a mapping of several."""
        if len(self.targets) == 1:
            return batch[self.targets[0]]
        return {name: batch[name] for name in self.targets}

    def call(
        self,
        index: int,
        value: Tensor | Mapping[str, Tensor],
        *,
        sides: Mapping[str, Tensor],
        headless: bool = False,
    ) -> Tensor:
        """Run one sublayer.

        Args:
            value: the batch for sublayer 0, else the hidden state its predecessor returned.
            sides: the batch, or at least the entries that the sublayer names.
            headless: whether the head returns what its linear layer would be given; see `words`.
        Raises:
            TypeError: a batch where a hidden state is due or the reverse, or the sublayer returned
                something else than one Tensor.
            ValueError: the batch lacks the model's input.
            RuntimeError: the sublayer was released.
        """
        sublayer = self.sublayers[index]
        keywords = {name: sides[name] for name in sublayer.sides if name in sides}
        if isinstance(value, Tensor) == (index == 0):
            due = "the batch (a mapping)" if index == 0 else "the hidden state (a Tensor)"
            raise TypeError(
                f"sublayer {index} ({sublayer.name!r}) got a {type(value).__name__}; give it {due}"
            )
        if not isinstance(value, Tensor):
            if self.inputs[0] not in value:
                raise ValueError(
                    f"the batch has entries {list(value)}, but the model takes "
                    f"{self.inputs[0]!r}; name the dataset's entry so"
                )
            keywords.update((name, value[name]) for name in self.inputs[1:] if name in value)
            value = value[self.inputs[0]]
        if headless and index == len(self.sublayers) - 1:
            output = sublayer.module(value, **keywords, headless=True)
        else:
            output = sublayer.module(value, **keywords)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"sublayer {sublayer.name!r} returned a {type(output).__name__}; one "
                "Tensor goes from sublayer to sublayer: wrap its module"
            )
        return output

    def run(
        self,
        batch: Mapping[str, Tensor],
        *,
        first: int = 0,
        last: int | None = None,
        hidden: Tensor | None = None,
        headless: bool = False,
    ) -> Tensor:
        """Run sublayers first..last-1, all by default, and return the last one's output.

        Args:
            batch: the model's inputs (read where first is 0) and the sublayers' sides.
            last: exclusive; None is the end.
            hidden: output of sublayer first-1; None exactly if first is 0.
            headless: as in `call`.
        Raises:
            ValueError: an empty or impossible range.
            TypeError: hidden does not fit first.
        """
        last = len(self.sublayers) if last is None else last
        if not 0 <= first < last <= len(self.sublayers):
            raise ValueError(
                f"run of sublayers {first}..{last}, exclusive, of "
                f"{len(self.sublayers)}; give 0 <= first < last"
            )
        value = self.call(first, batch if hidden is None else hidden, sides=batch)
        for index in range(first + 1, last):
            value = self.call(index, value, sides=batch, headless=headless)
        return value

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Collect a sublayer's parameters and buffers, persistent or not, by their model names."""
        return {name: self.tensor(name) for name in self._names[index]}

    def movable(self, index: int) -> dict[str, Tensor]:
        """Collect those of `tensors` that may move and be saved: all but opaque ones."""
        return {name: one for name, one in self.tensors(index).items() if not is_opaque(one)}

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer by its model name, as it is now."""
        module, attribute = self.holder(name)
        # Called for each parameter in each step: nn.Module.__getattr__ alone is slow.
        tensor = module._parameters.get(attribute)
        tensor = getattr(module, attribute) if tensor is None else tensor
        assert isinstance(tensor, Tensor)
        return tensor

    def holder(self, name: str) -> tuple[nn.Module, str]:
        """Return the first module that holds a tensor, and under which attribute."""
        return self._slots[name][0]

    def replace(self, index: int, tensors: Mapping[str, Tensor | None]) -> None:
        """Put other tensors in the place of a sublayer's, wherever the model holds them.

        A parameter stays a parameter and keeps `requires_grad`, but is another object, without a
        gradient: an optimizer or DDP that knew the old one must be built anew. Attributes and
        strides (channels_last, for instance) stay as they were.

        Args:
            tensors: by name; None stands for a meta tensor. Calling a module that holds one is an
                error until it is replaced in turn.

        Raises:
            ValueError: a name is not of this sublayer, shape or dtype differ, or a parameter has
                hooks of its own.
        """
        for name, tensor in tensors.items():  # All are checked before any is put.
            self._check_fit(index, name, tensor)
        for name, tensor in tensors.items():
            # `param.data = ` would keep the object, but torch refuses to set it to a meta tensor.
            old = self.tensor(name)
            fresh = torch.empty_like(old, device="meta")
            if tensor is not None:
                fresh = laid_out_as(fresh, tensor.detach())
            if isinstance(old, nn.Parameter):
                refuse_hooks(name, old)
                fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
            self._put(name, fresh)
        self._guard(index)

    def convert(self, dtype: torch.dtype) -> None:
        """Give all floating tensors a dtype, in host memory; released ones stay released."""
        for tensor in map(self.tensor, self._slots):
            device = "meta" if tensor.is_meta else "cpu"
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            # `.data` keeps the tensor objects, which wrappers and the user hold, too.
            tensor.data = tensor.data.to(device, wanted)

    def release(self, index: int) -> None:
        """Free a sublayer's memory: its tensors become meta tensors, and its forward an error."""
        self.replace(index, dict.fromkeys(self._names[index]))

    def materialize(self, index: int, device: torch.device | str) -> None:
        """Give a sublayer's released tensors memory on a device; uninitialised, so fill it."""
        absent = {name: t for name, t in self.tensors(index).items() if t.is_meta}
        self.replace(index, {n: torch.empty_like(t, device=device) for n, t in absent.items()})

    def _put(self, name: str, fresh: Tensor) -> None:
        # A user's marks on the object, such as that it is not to decay, stay.
        vars(fresh).update(vars(self.tensor(name)))
        for module, attribute in self._slots[name]:
            setattr(module, attribute, fresh)

    def _check_fit(self, index: int, name: str, tensor: Tensor | None) -> None:
        if name not in self._names[index]:
            raise ValueError(
                f"{name!r} is no tensor of sublayer {self.sublayers[index].name!r}, "
                f"which has {list(self._names[index])}"
            )
        old = self.tensor(name)
        if tensor is not None and (tensor.shape != old.shape or tensor.dtype != old.dtype):
            raise ValueError(
                f"{name!r} is {tuple(old.shape)} {old.dtype}, and cannot be replaced "
                f"by {tuple(tensor.shape)} {tensor.dtype}"
            )

    def _guard(self, index: int) -> None:
        """Make calls of modules that hold a released tensor fail.

        With torch 2.15, a convolution or an embedding with meta weights returns garbage instead.
        """
        for handle in self._guards.pop(index, ()):
            handle.remove()
        absent = [name for name, tensor in self.tensors(index).items() if tensor.is_meta]
        holders = {module: name for name in absent for module, _ in self._slots[name]}
        if absent:
            holders.setdefault(self.sublayers[index].module, absent[0])
        self._guards[index] = [
            module.register_forward_pre_hook(partial(_refuse_forward, name, *self.holder(name)))
            for module, name in holders.items()
        ]


Builders: TypeAlias = dict[type[nn.Module] | str, Callable[[Any], LayeredModel]]
"""By class, or "module.Class", what presents its models; Any, as adapters import no library."""


def _mode_flags(
    model: nn.Module, sublayers: Sequence[Sublayer]
) -> dict[bool, dict[nn.Module, bool]]:
    """Return the flags that the model's own `train()` and `eval()` set, and set none."""
    every = chain(model.modules(), *(sub.module.modules() for sub in sublayers))
    before = {module: module.training for module in every}
    wrappers = before.keys() - set(model.modules())
    flags = {}
    for training in (True, False):
        model.train(training)
        for module in wrappers:
            module.training = training
        flags[training] = {module: module.training for module in before}
    for module, flag in before.items():
        module.training = flag
    return flags


def _check_order(sublayers: tuple[Sublayer, ...]) -> None:
    names = [sub.name for sub in sublayers]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"sublayer names {sorted(twice)} are used twice; make them unique")
    layers = [sub.layer for sub in sublayers]
    steps = [after - before for before, after in pairwise(layers)]
    if len(layers) < 2 or layers[0] != 0 or not set(steps) <= {0, 1} or steps[-1] != 1:
        raise ValueError(
            f"layers of the sublayers are {layers}; they begin at 0, rise by 0 or 1 "
            "from one to the next, and the last (the head) is alone in its layer"
        )


def _assign_names(
    model: nn.Module, sublayers: tuple[Sublayer, ...], unused: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """List each sublayer's tensors by their model names; refuse those in none."""
    name_of = {id(tensor): name for name, tensor in named_tensors(model).items()}
    names: list[tuple[str, ...]] = []
    for sub in sublayers:
        for local_name, tensor in named_tensors(sub.module).items():
            if id(tensor) not in name_of:
                raise ValueError(
                    f"{local_name!r} of sublayer {sub.name!r} is not of the model; "
                    "a sublayer must share the model's own tensors"
                )
        names.append(tuple(name_of[id(t)] for t in named_tensors(sub.module).values()))
    free = set(name_of.values()) - set(chain(*names))
    if free != set(unused):
        raise ValueError(
            f"in no sublayer: {sorted(free - set(unused))}, declared unused but not "
            f"so: {sorted(set(unused) - free)}; put each parameter and buffer into "
            "a sublayer, or its name into unused if no forward reads it"
        )
    return names


def _find_slots(
    model: nn.Module, sublayers: tuple[Sublayer, ...]
) -> dict[str, list[tuple[nn.Module, str]]]:
    """Find, for each name, every (module, attribute) that holds the tensor, wrappers included."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    every = chain(model.modules(), *(sub.module.modules() for sub in sublayers))
    for module in dict.fromkeys(every):
        for attribute, tensor in chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            slots.setdefault(id(tensor), []).append((module, attribute))
    return {name: slots[id(tensor)] for name, tensor in named_tensors(model).items()}


def _refuse_forward(
    name: str, holder: nn.Module, attribute: str, module: nn.Module, _args: Any
) -> None:
    if not getattr(holder, attribute).is_meta:
        return  # Another run of the same model has filled it since.
    raise RuntimeError(
        f"{name!r} of this {type(module).__name__} is released: this rank does not "
        "hold it; run the layers it holds, or materialize() and fill it"
    )


def recorded_model(
    model: nn.Module, sublayers: Sequence[Sublayer], row: Row, **settings: Any
) -> LayeredModel:
    """Present a model by sublayers that were found by running it; they hold all that is read.

    Args:
        settings: further ones of `LayeredModel`.
    """
    held = {id(t) for sub in sublayers for t in named_tensors(sub.module).values()}
    unused = [name for name, t in named_tensors(model).items() if id(t) not in held]
    layered = LayeredModel(model, sublayers, unused=unused, is_recorded=True, **settings)
    layered.row = row
    return layered


def row_of(layered: LayeredModel) -> Row:
    """Return the row of blocks, or the parts, of a model that was presented by running it."""
    assert layered.row is not None
    return layered.row

"""Run two samples through the sublayers, and refuse models that cannot be trained in parts.

    pass          samples   mode    what must hold
    training      b a       train   no sublayer writes into its tensors, counts its calls, or
                                    depends on earlier ones; gradients reach the first
    first         a b       eval    no random numbers are drawn, nothing is written
    split         a, b      eval    each sublayer's outputs are those of the first pass

A sublayer that fails the last pass runs with both samples once more. This tells a dependence on
the split from a dependence on earlier calls. At the end the loss of both samples is compared with
the loss of each. The probe of an evaluation is the second pass, with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autocache import fingerprint
from autopipe.loss import refuse_split
from autopipe.profile import left_as_found
from autopipe.random_state import plain_random_state, random_state
from pipetransformer.checks.attribute_memory import AttributeMemory, find_change
from pipetransformer.checks.twins import differ
from pipetransformer.feed import Batch, find_changed, own_random_numbers, part_of, seed_plainly
from pipetransformer.measure import held_on
from pipetransformer.model import Task, modes_of, on_short_first, opaque_kept, set_modes
from pipetransformer.processes import World, agree
from pipetransformer.stage import written_text

_KINDS = (ValueError, IndexError, TypeError, RuntimeError)
"""Errors that keep their class where a sublayer's name is added."""
_MOST_COPIED_BYTES = 1 << 20
"""Of a tensor that is copied to be put back; a larger one is only seen to have changed."""
_Was: TypeAlias = Tensor | int


def probe_sublayers(task: Task, world: World, read: Callable[[Tensor], Batch]) -> SublayerProbe:
    """Run the passes on this rank's device, and leave everything as it was. Collective.

    No layer may be frozen yet, or held elsewhere. Ids that are read may exceed the training set.

    Returns:
        the probe, with what it has found.
    Raises:
        ValueError: on every rank; the message names the first sublayer, and its fault.
    """

    def run(batch: Batch) -> SublayerProbe:
        probe = SublayerProbe(task, world.device, batch)
        probe.run()
        return probe

    model = task.model.model
    return agree(lambda: on_short_first(model, read(torch.arange(2)), run), group=world.group)


def about_cuts(task: Task, world: World, random_part: str) -> str:
    """Say that another run may draw other random numbers, as batches are cut elsewhere, or ""."""
    config = task.config
    fixed = config.pipeline_length is not None and config.micro_batches is not None
    chosen = isinstance(config.plan, str) and not fixed
    cut_varies = world.size > 1 or config.memory_limit_bytes is not None
    if not (random_part and chosen and cut_varies and config.micro_batch_size is None):
        return ""
    return (
        f"{random_part} draws random numbers for each micro-batch while it trains, and where a "
        "batch is cut follows from the pipelines that are chosen: another run may draw others. "
        "micro_batch_size=... fixes the cut"
    )


def probe_evaluation(task: Task, world: World, read: Callable[[Tensor], Batch]) -> None:
    """Evaluate two samples, so that unusable data fails before the first step. Collective.

    Raises:
        ValueError: on every rank: an entry is missing, or a sublayer or the loss fails.
    """

    def run() -> None:
        try:
            probe = SublayerProbe(task, world.device, read(torch.arange(2)))
            task.loss_fn(probe.evaluate()[-1], task.model.targets_of(probe.batch))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"the eval_dataset's first samples cannot be evaluated: {error}"
            ) from error

    agree(run, group=world.group)


class SublayerProbe:
    """Hold two samples or more on a device, and findings.

    Args:
        dtype: the coarsest that is computed in; None is as the run does.
    Attributes:
        is_random: the first module that draws random numbers in training, for a message.
        plainly_random: the sublayers, by index, that draw from Python's or numpy's generator in
            training.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        samples: Batch,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.task, self.device, self._dtype = task, device, dtype or task.computes_in
        self.batch = {name: t.to(device) for name, t in samples.items()}
        self.is_random = ""
        self.plainly_random: set[int] = set()

    def run(self) -> None:
        """Run the passes; the first that fails raises."""
        self._train({name: t.flip(0) for name, t in self.batch.items()})
        first = self.evaluate()
        inputs: Tensor | Batch = self.batch
        for index, expected in enumerate(first):
            # Each gets the first pass's input, so that only the faulty sublayer differs.
            self._compare(index, inputs, expected)
            inputs = expected
        self._try_loss(first[-1], self.task.model.targets_of(self.batch))

    def _try_loss(self, output: Tensor, target: Any) -> None:
        """Refuse a loss that depends on how a batch is split, or counts its calls."""
        loss = self.task.loss_fn
        before = AttributeMemory.of(loss.function, with_buffers=True)
        refuse_split(loss, output, target)
        once = AttributeMemory.of(loss.function, with_buffers=True)
        if once.is_as(before):
            return
        # What is set once, as a size, does no harm: only a second change counts calls.
        copies = once.copy()
        refuse_split(loss, output, target)
        change = find_change(AttributeMemory.of(loss.function, with_buffers=True).copy(), copies)
        if change is not None:
            raise ValueError(
                f"the loss {loss.name!r} changes a {change[1]} that it holds in every call; here "
                f"it is called for every micro-batch, and to be tried, so that such a {change[1]} "
                "counts no steps: change it in a callback's on_step_end instead"
            )

    def _train(self, batch: Batch) -> None:
        model = self.task.model
        hidden: Tensor | Batch = batch
        trains = False
        for index, sublayer in enumerate(model.sublayers):
            if isinstance(hidden, Tensor):
                hidden = hidden.detach().requires_grad_(trains and hidden.is_floating_point())
            with self._lent(index, training=True) as found:
                before, plain = random_state(self.device), plain_random_state()
                had = AttributeMemory.of(sublayer.module)
                output = self._call(index, hidden, batch)
                if not self.is_random and random_state(self.device) != before:
                    self.is_random = _random_part(sublayer.name, sublayer.module)
                if plain_random_state() != plain:
                    self.plainly_random.add(index)
                # Written parameters and buffers are refused by `_lent`, which names them.
                if not self._written(index, found):
                    self._refuse_memory(index, hidden, batch, had)
                if trains and isinstance(hidden, Tensor):
                    if hidden.requires_grad and output.requires_grad:
                        # Not autograd.grad, which reentrant checkpointing does not allow.
                        output.backward(torch.ones_like(output))
                    if hidden.grad is None:
                        raise ValueError(
                            f"sublayer {sublayer.name!r} passes no gradient to those below it, "
                            "some of which train; a plain loop would leave them alone, and a "
                            "pipeline might not: set requires_grad_(False) on what is below it"
                        )
                trains = trains or any(p.requires_grad for p in sublayer.module.parameters())
            hidden = output.detach()

    def _refuse_memory(
        self, index: int, value: Tensor | Batch, batch: Batch, had: AttributeMemory
    ) -> None:
        """Refuse a sublayer whose output depends on earlier inputs, or that counts its calls.

        One that only keeps a result, as attention weights, or sets a number once does no harm.

        Args:
            had: what it kept before its first call.
        """
        sublayer = self.task.model.sublayers[index]
        if AttributeMemory.of(sublayer.module).is_as(had):
            return
        outputs, copies = [], []
        for samples in (slice(None), slice(0, 1), slice(None)):
            # The same random numbers each time, so that dropout alone makes no difference.
            with own_random_numbers(self.device):
                torch.manual_seed(0)
                seed_plainly(0)
                part = part_of(value, samples), part_of(batch, samples)
                outputs.append(self._call(index, *part).detach())
                copies.append(AttributeMemory.of(sublayer.module).copy())
        # Training starts from the model as it was given.
        had.put_numbers_back()
        change = find_change(copies[2], copies[0])
        if self._differ(outputs[2], outputs[0]) and (change is None or change[1] != "number"):
            raise ValueError(
                f"sublayer {sublayer.name!r} gives another output in training once other samples "
                "have run: it keeps something in attributes, which would be others on each "
                "replica, and lost where layers move; let forward depend on its arguments and "
                "parameters alone"
            )
        if change is not None:
            (module, name), kind = change
            raise ValueError(
                f"sublayer {sublayer.name!r} changes the {kind} {name!r} of its "
                f"{type(module).__name__} in every call in training; here it is called for every "
                f"micro-batch, and to measure, so that such a {kind} counts no steps: keep it "
                "outside of the model, in a callback's on_step_end for instance"
            )

    def evaluate(self) -> list[Tensor]:
        """Return each sublayer's output in eval mode; refuse one that draws random numbers."""
        outputs: list[Tensor] = []
        value: Tensor | Batch = self.batch
        for index, sublayer in enumerate(self.task.model.sublayers):
            with self._lent(index, training=False):
                before = random_state(self.device)
                value = self._call(index, value, self.batch)
                if random_state(self.device) != before:
                    raise ValueError(
                        f"sublayer {sublayer.name!r} draws random numbers in eval mode, so that "
                        "its output as a frozen layer depends on who computes it; let it draw "
                        "while self.training only"
                    )
            outputs.append(value)
        return outputs

    def _compare(self, index: int, value: Tensor | Batch, expected: Tensor) -> None:
        """Refuse a sublayer that gives one sample another output than two."""
        name, batch = self.task.model.sublayers[index].name, self.batch
        cuts = (slice(0, 1), slice(1, None))
        with self._lent(index, training=False):
            parts = [self._call(index, part_of(value, cut), part_of(batch, cut)) for cut in cuts]
            if not self._differ(torch.cat(parts), expected):
                return
            again = self._call(index, value, batch)
        if self._differ(again, expected):
            raise ValueError(
                f"sublayer {name!r} gives another output for the same input once other samples "
                "have run: it keeps something in an attribute, or gets something beside the "
                "hidden state; let forward depend on its arguments and tensors alone"
            )
        raise ValueError(
            f"the output of sublayer {name!r} depends on how a batch is split; let it treat each "
            "sample by itself"
        )

    def _call(self, index: int, value: Tensor | Batch, batch: Mapping[str, Tensor]) -> Tensor:
        """Call a sublayer; its errors get its name, and writing into a side input is refused."""
        # A copy, as a layer may work in place.
        copied = tree_map(torch.clone, value)
        sides = batch if isinstance(copied, Tensor) else copied
        model, before = self.task.model, {name: side._version for name, side in sides.items()}
        try:
            output = self.task.call(index, copied, sides=sides)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            raise kind(
                f"sublayer {model.sublayers[index].name!r} fails for the input "
                f"{_described(value)}: {error}"
            ) from error
        for name in model.sides_of(0, len(model.sublayers)):
            if name in sides and sides[name]._version != before[name]:
                raise ValueError(
                    f"sublayer {model.sublayers[index].name!r} writes into {name!r}, which other "
                    "stages and the cache have as it was given: let it write into a copy"
                )
        return output

    def _differ(self, one: Tensor, other: Tensor) -> bool:
        # The last sublayer's output is in float32, also where it was computed in less.
        row = self.task.model.row
        if row is not None and row.packing is not None and one.dtype == torch.uint8:
            pairs = zip(row.packing.tensors(one), row.packing.tensors(other), strict=True)
            return any(differ(a, b, self._dtype) for a, b in pairs)
        return differ(one, other, self._dtype)

    @contextmanager
    def _lent(self, index: int, *, training: bool) -> Iterator[Mapping[str, _Was]]:
        """Put a sublayer on the device, in a mode, and leave it as it was found.

        Yields:
            its tensors as they were, those of more than `_MOST_COPIED_BYTES` as fingerprints.
        Raises:
            ValueError: it has written into one of them.
        """
        model = self.task.model
        with (
            held_on(self.task, self.device, (index,)),
            left_as_found([model.sublayers[index].module], self.device),
            opaque_kept(model.tensors(index).values()),
            torch.set_grad_enabled(training),
        ):
            set_modes(modes_of(model, (index,), training=training))
            before = {name: _as_it_is(t) for name, t in model.movable(index).items()}
            try:
                yield before
            finally:
                written = self._written(index, before)
                if written:
                    self._put_back(index, before)
        if written:
            raise ValueError(written_text(written, model.sublayers[index].name))

    def _written(self, index: int, before: Mapping[str, _Was]) -> str:
        """Name the first of a sublayer's tensors that is not as it was, or ""."""
        now = self.task.model.tensors(index)
        small = {name: one for name, one in before.items() if isinstance(one, Tensor)}
        large = (n for n, one in before.items() if n not in small and _as_it_is(now[n]) != one)
        return find_changed(now, small) or next(large, "")

    def _put_back(self, index: int, before: Mapping[str, _Was]) -> None:
        # Parameters alone: `left_as_found` restores buffers.
        with torch.no_grad():
            for name, tensor in self.task.model.movable(index).items():
                had = before[name]
                if isinstance(tensor, nn.Parameter) and isinstance(had, Tensor):
                    tensor.copy_(had)


def _as_it_is(tensor: Tensor) -> _Was:
    if tensor.nbytes > _MOST_COPIED_BYTES:
        return fingerprint([tensor])
    return tensor.detach().clone()


def _random_part(name: str, sublayer: nn.Module) -> str:
    """Name the dropout within a sublayer that draws random numbers, or else the sublayer."""
    for inner, module in sublayer.named_modules(prefix=name):
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            return f"dropout ({inner!r}, p={module.p:g})"
    return f"sublayer {name!r} ({type(sublayer).__name__})"


def _described(value: Tensor | Batch) -> str:
    """Write a sublayer's input as shapes and dtypes."""
    entries = {"": value} if isinstance(value, Tensor) else value
    texts = (f"{name} {tuple(t.shape)} {t.dtype}".strip() for name, t in entries.items())
    return ", ".join(texts).replace("torch.", "")

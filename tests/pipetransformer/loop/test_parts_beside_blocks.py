"""Parts are rows, and so are bottom blocks beside them, bit by bit as without rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from freeze import FreezeContext
from pipetransformer import FreezeCallback, attach
from tests.helpers.marks import slow
from tests.helpers.part_models import CASES, NUM_SAMPLES, PartCase
from tests.helpers.pool import Pool

_BATCH, _NUMBERS = 4, (0, 1, 1, 0, 0)


@dataclass(frozen=True)
class Mixed:
    """Name a case's blocks, and modules that freeze with the first one; or a parameter."""

    case: str
    blocks: str
    below: tuple[str, ...]
    silent: str = ""
    direct: str = ""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = CASES[self.case].build()
        if self.silent:  # What is in no block goes on training, and would draw below those.
            model.get_submodule(self.silent).dropout = 0.0
        return model

    def frozen(self, model: nn.Module, num: int) -> list[nn.Module]:
        names = [*CASES[self.case].parts, *(self.below if num else ())]
        blocks = [*model.get_submodule(self.blocks).children()][:num]
        return [*map(model.get_submodule, names), *blocks]


_TEXT = "model.language_model.layers"
FAMILIES = {
    "llava": Mixed(
        "llava", _TEXT, ("model.multi_modal_projector", "model.language_model.embed_tokens")
    ),
    "tiles": Mixed(
        "smolvlm, one to three tiles",
        "model.text_model.layers",
        ("model.connector", "model.text_model.embed_tokens"),
    ),
    "patches": Mixed("qwen2-vl, unequal images", _TEXT, ("model.language_model.embed_tokens",)),
    "two towers": Mixed(
        "clip, images",
        "text_model.encoder.layers",
        ("text_model.embeddings",),
        direct="logit_scale",
    ),
    "whisper": Mixed(
        "whisper",
        "model.decoder.layers",
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        "model.decoder",
    ),
    "bart": Mixed(
        "bart",
        "model.decoder.layers",
        (
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            "model.decoder.layernorm_embedding",
        ),
        "model.decoder",
    ),
}


def _loader(case: PartCase, **settings: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(
        case.data(), batch_size=_BATCH, collate_fn=case.collate, **{"shuffle": True, **settings}
    )


def _train(
    model: nn.Module,
    case: PartCase,
    epochs: Iterable[Iterable[Any]],
    *,
    before: Callable[[int], None] = lambda _: None,
) -> list[float]:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number, epoch in enumerate(epochs):
        model.train()
        before(number)
        for batch in epoch:
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _by_hand(
    model: nn.Module, family: Mixed, numbers: Sequence[int] = _NUMBERS, **settings: Any
) -> list[float]:
    case = CASES[family.case]
    loader = _loader(case, **settings)

    def freeze(epoch: int) -> None:
        model.requires_grad_(True)
        for part in family.frozen(model, numbers[epoch]):
            part.requires_grad_(False).eval()
        if family.direct and numbers[epoch]:
            model.get_parameter(family.direct).requires_grad_(False)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None

    return _train(model, case, [loader] * len(numbers), before=freeze)


def _counted(modules: Iterable[nn.Module]) -> list[int]:
    runs = [0]

    def count(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    for module in modules:
        inner = next(
            m for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))
        )
        inner.forward = partial(count, inner.forward)
    return runs


def _assert_alike(model: nn.Module, plain: nn.Module, rounds: float = 0) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rounds, atol=10 * rounds, msg=name)


_LONG = ("tiles", "patches")
"""Families that are computed one by one."""


@pytest.mark.parametrize(
    "name", [slow(name) if name in (*_LONG, "bart", "two towers") else name for name in FAMILIES]
)
def test_blocks_freeze_and_thaw_beside_a_part_and_run_once_a_sample(name: str) -> None:
    family = FAMILIES[name]
    case, model = CASES[family.case], family.build()
    plain, runs, hits = copy.deepcopy(model), list[list[int]](), list[int]()
    expected = _by_hand(plain, family)
    runs = [
        _counted(map(model.get_submodule, case.parts)),
        _counted([model.get_submodule(f"{family.blocks}.0")]),
    ]
    loader, seen = _loader(case), list[list[int]]()
    with attach(
        model, parts=case.parts, freeze=_NUMBERS, cache=True, tied_weights="freeze"
    ) as cached:

        def epochs() -> Iterable[Iterable[Any]]:
            for _ in _NUMBERS:
                for one in runs:
                    one[0] = 0
                yield cached.epoch(loader)
                seen.append([one[0] for one in runs])
                hits.append(cached.stats.hits)

        # Samples with any number of images are computed one by one.
        rounds = 1e-6 if name == "tiles" else 0
        assert _train(model, case, epochs()) == pytest.approx(expected, rel=rounds, abs=0)
    _assert_alike(model, plain, rounds)
    assert hits[2] == hits[4] == NUM_SAMPLES
    assert seen[2] == [0, 0] and seen[4][0] == 0 and seen[4][1] > 0


def test_a_part_has_rows_where_the_blocks_beside_it_have_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A text has as many positions as the longest of its batch, and an image always as many."""
    family = FAMILIES["llava"]
    case = CASES["llava, padded texts"]
    family, model = replace(family, case="llava, padded texts"), family.build()
    plain, runs = copy.deepcopy(model), _counted(map(model.get_submodule, case.parts))
    expected, loader = _by_hand(plain, family, (0, 1, 1)), _loader(case)
    with attach(model, parts=case.parts, freeze=[0, 1], cache=True) as cached:

        def epochs() -> Iterable[Iterable[Any]]:
            for _ in range(3):
                runs[0] = 0
                yield cached.epoch(loader)

        assert _train(model, case, epochs()) == expected
        assert runs == [0] and cached.stats.hits == NUM_SAMPLES
    _assert_alike(model, plain)
    assert f"no cache of 'model.vision_tower', '{family.blocks}.0'" in caplog.text


def _from_the_second_epoch(context: FreezeContext) -> int:
    return int(context.epoch > 0)


def test_a_policy_sees_the_blocks_beside_a_part() -> None:
    family = FAMILIES["llava"]
    case, model = CASES[family.case], family.build()
    plain, seen = copy.deepcopy(model), list[tuple[int, ...]]()
    expected = _by_hand(plain, family, (0, 1, 1))

    def policy(context: FreezeContext) -> int:
        seen.append(tuple(layer.num_parameters for layer in context.layers))
        return _from_the_second_epoch(context)

    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, losses = _loader(case), list[float]()
    torch.manual_seed(2)
    with attach(
        model, parts=case.parts, freeze=policy, optimizer=optimizer, num_epochs=3, cache=True
    ) as cached:
        for _ in range(3):
            model.train()
            for batch in cached.epoch(loader):
                optimizer.zero_grad()
                loss = case.loss(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert losses == expected and cached.stats.hits == NUM_SAMPLES
    below = [model.get_submodule(one) for one in (*family.below, f"{family.blocks}.0")]
    # The tower never trains, so it counts for no block.
    assert seen[0][0] == sum(p.numel() for one in below for p in one.parameters())


def test_an_evaluation_has_rows_of_blocks_and_parts() -> None:
    family = FAMILIES["llava"]
    case, model = CASES[family.case], family.build()
    loader, held_out = _loader(case), _loader(case, shuffle=False)
    with attach(model, parts=case.parts, freeze=1, cache=True) as cached:
        for _ in range(2):
            _train(model, case, [cached.epoch(loader)])
            model.eval()
            with torch.no_grad():
                found = [case.loss(model, batch) for batch in cached.evaluation(held_out)]
        assert cached.stats.hits == NUM_SAMPLES
    with torch.no_grad():
        assert found == [case.loss(model, batch) for batch in held_out]


def test_rows_of_blocks_and_parts_are_kept_for_a_later_run(tmp_path: Path) -> None:
    family, losses = FAMILIES["whisper"], list[list[float]]()
    case, hits = CASES[family.case], list[int]()
    for _ in range(2):
        model, loader = family.build(), _loader(case)
        settings: Any = {"cache_keep": True, "cache_folder": str(tmp_path)}
        with attach(
            model, parts=case.parts, freeze=[0, 1], tied_weights="freeze", **settings
        ) as cached:

            def epochs(cached: Any = cached, loader: Any = loader) -> Iterable[Iterable[Any]]:
                for _ in range(2):
                    yield cached.epoch(loader)
                    hits.append(cached.stats.hits)

            losses.append(_train(model, case, epochs()))
    assert losses[0] == losses[1] and hits[2:] == [NUM_SAMPLES, NUM_SAMPLES] > hits[:2]


def _in_ddp(name: str) -> tuple[list[float], int]:
    family = FAMILIES[name]
    case, model = CASES[family.case], family.build()
    model.requires_grad_(True)
    for part in family.frozen(model, 1):
        part.requires_grad_(False).eval()
    wrapped = DistributedDataParallel(model)
    loader = _loader(case, shuffle=False, sampler=DistributedSampler(case.data(), shuffle=False))
    with attach(wrapped.module, parts=case.parts, freeze=1, cache=True) as cached:
        losses = _train(wrapped, case, (cached.epoch(loader) for _ in range(2)))
        return losses, cached.stats.hits


@pytest.mark.slow
def test_two_processes_share_rows_of_blocks_and_parts(two_ranks: Pool) -> None:
    found = two_ranks.run(_in_ddp, "llava")
    assert [hits for _, hits in found] == [NUM_SAMPLES // 2] * 2


def test_the_callback_freezes_blocks_beside_a_part(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    family = FAMILIES["llava"]
    case, model = CASES[family.case], family.build()
    torch.manual_seed(1)
    data, found = case.data(), []
    for has_rows in (False, True):
        own = copy.deepcopy(model)
        if not has_rows:
            for part in map(own.get_submodule, case.parts):
                part.requires_grad_(False)
            layers = [*own.get_submodule(family.blocks).children()]
        given: Any = (
            {"cache": False, "layers": layers}
            if not has_rows
            else {"cache": True, "parts": case.parts}
        )
        callback = FreezeCallback([0, 1, 1], **given)
        arguments = TrainingArguments(
            str(tmp_path), num_train_epochs=3, per_device_train_batch_size=_BATCH, report_to=[],
            logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(own, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
        found.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    # One batch more, at most, is read where its rows were made ahead.
    assert found[0] == found[1] and callback.stats.hits >= NUM_SAMPLES


def test_what_cannot_freeze_beside_a_part_is_refused_by_name() -> None:
    family = FAMILIES["llava"]
    case = CASES[family.case]
    with attach(family.build(), parts=case.parts, freeze=3) as cached:
        with pytest.raises(ValueError, match="3 blocks, but the model has 2 outside of its parts"):
            next(cached.epoch(_loader(case)))
    for parts, match in (
        (("model.vision_tower", "model.language_model"), "no list of blocks outside of its parts"),
        (("model.vision_tower", f"{_TEXT}.0"), "is a part itself"),
    ):
        with attach(family.build(), parts=parts, freeze=1) as cached:
            with pytest.raises(ValueError, match=match):
                next(cached.epoch(_loader(case)))


class _Ordered(nn.Module):
    """A row of blocks beside a part; what lies below them is registered behind them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tower, self.kind = nn.Linear(4, 4), kind
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.later = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.below, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        if kind == "tied":
            self.head.weight = self.below.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.below(x)
        lists = {"reversed": self.blocks[::-1], "another list": [*self.later, *self.blocks]}
        for block in lists.get(self.kind, self.blocks):
            hidden = torch.tanh(block(hidden))
        answer: Tensor = self.head(hidden + self.tower(x))
        return answer


def _ordered(kind: str, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    model = _Ordered(kind)
    samples: Any = [{"x": torch.randn(4)} for _ in range(NUM_SAMPLES)]
    loader = DataLoader(samples, batch_size=_BATCH)
    with attach(model, parts=["tower"], freeze=1, cache=True, **given) as cached:
        model(next(iter(cached.epoch(loader)))["x"])
    return model


@pytest.mark.parametrize("tied_weights", ["train", "freeze"])
def test_a_weight_that_is_read_above_the_blocks_freezes_only_where_asked(
    tied_weights: str,
) -> None:
    """A head's weight once stopped training, as it was an embedding's that is registered late."""
    model: Any = _ordered("tied", tied_weights=tied_weights)
    assert model.head.weight.requires_grad == (tied_weights == "train")
    assert not model.below.bias.requires_grad and not model.blocks[0].weight.requires_grad


@pytest.mark.parametrize(
    ("kind", "name"), [("reversed", "blocks"), ("another list", "later")], ids=["reversed", "list"]
)
def test_blocks_that_run_below_the_frozen_ones_do_not_freeze_unasked(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"blocks of '{name}' run below block 0"):
        _ordered(kind)

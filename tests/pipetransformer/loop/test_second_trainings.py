"""A model that an earlier training has frozen trains again, or is refused: never in vain.

transformers builds its optimizer of the weights that train, before it calls any callback. So a
callback that then thawed what an earlier training had frozen had 0 of its weights move, and said
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import freeze as freezing
from pipetransformer import FreezeCallback, attach
from tests.helpers.any_models import KINDS, build, data, mean_loss
from tests.helpers.marks import slow
from tests.helpers.pool import Pool
from tests.pipetransformer.loop.test_cached_loop import Samples

KIND = KINDS["gpt2_classifier"]
MISSING = (
    r"thaws 'transformer.* other weights, frozen before this training began: the optimizer does "
    r"not have them.* Call freeze.apply\(model, 0\)"
)


def trainer_of(model: nn.Module, folder: Path, callback: Any, **given: Any) -> Trainer:
    """Return a trainer of two epochs."""
    optimizers, kind = given.pop("optimizers", (None, None)), given.pop("kind", KIND)
    arguments = TrainingArguments(
        str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.05,
        optim="sgd",
        remove_unused_columns=False,
        num_train_epochs=2,
        per_device_train_batch_size=5,
        save_strategy="no",
        **given,
    )
    return Trainer(
        model,
        arguments,
        train_dataset=Samples(dict(data(kind).tensors)),
        callbacks=[callback],
        optimizers=optimizers,
    )


def by_training(model: nn.Module, folder: Path) -> None:
    trainer_of(model, folder, FreezeCallback(2, cache=False)).train()


def by_hand(model: nn.Module, folder: Path) -> None:
    freezing.apply(model, 2)


def callback(freeze: Any, folder: Path, *, caches: bool) -> FreezeCallback:
    kept: dict[str, Any] = {"cache_folder": folder} if caches else {"cache": False}
    return FreezeCallback(freeze, **kept)


def marks(model: nn.Module) -> list[tuple[object, ...]]:
    """Return what freezing changes of each module."""
    return [
        (
            module.training,
            [p.requires_grad for p in module.parameters(recurse=False)],
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            "forward" in vars(module),
        )
        for module in model.modules()
    ]


def assert_all_move(model: nn.Module, act: Callable[[], Any]) -> None:
    """Assert that each weight moves that needs a gradient by the end, and no other one."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    act()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


TO_ZERO = pytest.mark.parametrize(("freeze", "caches"), [(0, True), ([1, 0], False)], ids=str)


@pytest.mark.parametrize(
    ("freeze", "freeze_before", "caches"),
    [
        (0, by_training, True),
        ([1, 0], by_training, False),
        slow(1, by_hand, True),
        slow([2, 1], by_hand, False),
    ],
)
def test_a_thaw_of_weights_that_the_optimizer_lacks_is_refused(
    freeze: Any, freeze_before: Any, caches: bool, tmp_path: Path
) -> None:
    model = build(KIND)
    freeze_before(model, tmp_path)
    trainer = trainer_of(model, tmp_path, callback(freeze, tmp_path, caches=caches))
    before = marks(model.train())
    for _ in range(2):  # The trainer keeps its optimizer, so that the second time is no better.
        with pytest.raises(ValueError, match=MISSING):
            trainer.train()
        if freeze != [2, 1]:  # Which has trained an epoch by then.
            assert marks(model.train()) == before


@pytest.mark.parametrize(
    ("freeze_before", "caches"), [(by_training, False), slow(by_training, True), (by_hand, True)]
)
def test_what_stays_frozen_needs_no_optimizer(
    freeze_before: Any, caches: bool, tmp_path: Path
) -> None:
    model = build(KIND)
    freeze_before(model, tmp_path)
    trainer = trainer_of(model, tmp_path, callback(2, tmp_path, caches=caches))
    assert_all_move(model, trainer.train)
    assert not any(p.requires_grad for p in model.get_submodule(KIND.blocks)[1].parameters())  # type: ignore[index]


@TO_ZERO
def test_weights_that_thaw_before_the_optimizer_is_built_train(
    freeze: Any, caches: bool, tmp_path: Path
) -> None:
    model = build(KIND)
    by_training(model, tmp_path)
    freezing.apply(model, 0)
    trainer = trainer_of(model, tmp_path, callback(freeze, tmp_path, caches=caches))
    assert_all_move(model, trainer.train)


def test_what_thaws_behind_the_last_step_needs_no_optimizer(tmp_path: Path) -> None:
    model = build(KIND)
    by_training(model, tmp_path)
    used = callback([2, 2, 0], tmp_path, caches=False)  # The third epoch does not come.
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer_of(model, tmp_path, used).train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(".h.0." in name or ".h.1." in name for name in moved)


@TO_ZERO
def test_an_optimizer_of_all_weights_trains_what_thaws(
    freeze: Any, caches: bool, tmp_path: Path
) -> None:
    model = build(KIND)
    by_hand(model, tmp_path)
    optimizer = SGD(model.parameters(), lr=0.05)
    used = callback(freeze, tmp_path, caches=caches)
    assert_all_move(model, trainer_of(model, tmp_path, used, optimizers=(optimizer, None)).train)


def test_a_trainer_trains_again_with_the_optimizer_that_it_has(tmp_path: Path) -> None:
    model = build(KIND)
    trainer = trainer_of(model, tmp_path, callback([0, 2], tmp_path, caches=False))
    trainer.train()
    trainer.remove_callback(FreezeCallback)
    trainer.add_callback(callback(0, tmp_path, caches=False))
    assert_all_move(model, trainer.train)


@pytest.mark.parametrize("caches", [False, True], ids=["plain", "cached"])
def test_weights_that_the_user_froze_or_left_out_do_not_count(
    caches: bool, tmp_path: Path
) -> None:
    model: Any = build(KIND)
    blocks = model.get_submodule(KIND.blocks)
    blocks[1].mlp.requires_grad_(False)
    left_out = set(blocks[0].mlp.parameters())
    # It is not the callback that keeps these from training: they freeze and thaw all the same.
    optimizer = SGD([p for p in model.parameters() if p not in left_out], lr=0.05)
    before = [p.detach().clone() for p in (*blocks[0].mlp.parameters(), *model.parameters())]
    used = callback([2, 0], tmp_path, caches=caches)
    trainer_of(model, tmp_path, used, optimizers=(optimizer, None)).train()
    after = (*blocks[0].mlp.parameters(), *model.parameters())
    moved = [not torch.equal(p, own) for p, own in zip(after, before, strict=True)]
    stay = {*left_out, *blocks[1].mlp.parameters()}
    assert moved == [p not in stay for p in after]
    assert not any(p.requires_grad for p in blocks[1].mlp.parameters())


BESIDE = {
    "gpt2": "transformer.wte.weight",  # Tied to the head.
    "deberta": "deberta.encoder.rel_embeddings.weight",
    "mpnet": "mpnet.encoder.relative_attention_bias.weight",
}
"""By model: a weight that frozen blocks read, and that freezes with them where rows are kept."""


@pytest.mark.parametrize("name", ["gpt2", slow("deberta"), slow("mpnet")])
def test_what_frozen_blocks_read_thaws_with_them(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = build(kind)

    def used(freeze: int) -> FreezeCallback:
        return FreezeCallback(freeze, cache_folder=tmp_path, tied_weights="freeze")

    trainer_of(model, tmp_path, used(2), kind=kind).train()
    assert not model.get_parameter(BESIDE[name]).requires_grad
    # It stays frozen, so that no optimizer needs to have it.
    assert_all_move(model, trainer_of(model, tmp_path, used(2), kind=kind).train)
    with pytest.raises(ValueError, match=f"thaws .*{kind.blocks.split('.')[0]}.* other weights"):
        trainer_of(model, tmp_path, used(0), kind=kind).train()
    freezing.apply(model, 0)
    assert all(p.requires_grad for p in model.parameters())
    trainer_of(model, tmp_path, used(0), kind=kind).train()
    assert all(p.requires_grad for p in model.parameters())


class OfWhatTrains:
    """Fit in Lightning, where modules choose the weights of their optimizers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lightning = folder, pytest.importorskip("lightning")

    def module(self, *, takes_all: bool) -> Any:
        """Return a module whose optimizer takes all weights, or those that train."""

        class Module(self.lightning.LightningModule):  # type: ignore[misc, name-defined]
            """Train a tiny model."""

            def __init__(self) -> None:
                super().__init__()
                self.model = build(KIND)

            def training_step(self, batch: Any, index: int) -> Tensor:
                return mean_loss(KIND, self.model, batch)

            def configure_optimizers(self) -> Any:
                chosen = [p for p in self.parameters() if takes_all or p.requires_grad]
                return SGD(chosen, lr=0.05)

        return Module()

    def fit(self, module: Any, freeze: Any, *, caches: bool) -> None:
        from pipetransformer import LightningFreezeCallback

        kept: dict[str, Any] = {"cache_folder": self.folder} if caches else {"cache": False}
        trainer = self.lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[LightningFreezeCallback(freeze, **kept)],
            default_root_dir=self.folder,
        )
        trainer.fit(module, DataLoader(Samples(dict(data(KIND).tensors)), batch_size=5))


@TO_ZERO
def test_lightning_is_refused_a_thaw_of_weights_that_its_optimizer_lacks(
    freeze: Any, caches: bool, tmp_path: Path
) -> None:
    loop = OfWhatTrains(tmp_path)
    module = loop.module(takes_all=False)
    loop.fit(module, 2, caches=False)
    with pytest.raises(ValueError, match=MISSING.replace("transformer", "(model.)?transformer")):
        loop.fit(module, freeze, caches=caches)
    freezing.apply(module.model, 0)
    assert_all_move(module, lambda: loop.fit(module, freeze, caches=caches))


@pytest.mark.parametrize(("takes_all", "freeze", "caches"), [(False, 2, False), (True, 1, True)])
def test_lightning_trains_what_stays_or_is_in_its_optimizer(
    takes_all: bool, freeze: int, caches: bool, tmp_path: Path
) -> None:
    loop = OfWhatTrains(tmp_path)
    module = loop.module(takes_all=takes_all)
    loop.fit(module, 2, caches=False)
    assert_all_move(module, lambda: loop.fit(module, freeze, caches=caches))


def run_loop(model: nn.Module, optimizer: SGD, freeze: Any, folder: Path) -> None:
    """Train two epochs of a loop of one's own, which has said that there will be one."""
    loader: DataLoader[Any] = DataLoader(Samples(dict(data(KIND).tensors)), batch_size=5)
    with attach(
        model, freeze=freeze, optimizer=optimizer, num_epochs=1, cache_folder=folder
    ) as cached:
        for _ in range(2):
            for batch in cached.epoch(loader):
                mean_loss(KIND, model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()


POLICIES: dict[str, Callable[[freezing.FreezeContext], int]] = {
    "nothing": lambda context: 0,
    "fewer": lambda context: 1,
    "fewer_and_fewer": lambda context: 2 - context.epoch,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_a_loop_thaws_no_weight_in_vain(name: str, tmp_path: Path) -> None:
    model = build(KIND)
    by_hand(model, tmp_path)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with pytest.raises(ValueError, match=MISSING):
        run_loop(model, optimizer, POLICIES[name], tmp_path)
    run_loop(model, optimizer, lambda context: 2, tmp_path)
    # The neighbours: weights that the optimizer has.
    optimizer = SGD(model.parameters(), lr=0.05)
    assert_all_move(model, lambda: run_loop(model, optimizer, POLICIES[name], tmp_path))


def replicated(folder: Path, thaws_before: bool) -> tuple[str, dict[str, Tensor]]:
    """Train on every rank, by an optimizer of all weights; return what was refused."""
    model = build(KIND)
    by_hand(model, folder)
    if thaws_before:
        freezing.apply(model, 0)
    used, optimizer = callback(0, folder, caches=False), SGD(model.parameters(), lr=0.05)
    settings = {"optimizers": (optimizer, None), "ddp_find_unused_parameters": True}
    refusal = ""
    try:
        trainer_of(model, folder, used, **settings).train()
    except ValueError as error:
        refusal = str(error)
    return refusal, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("thaws_before", [False, True])
def test_what_thaws_behind_a_wrapper_would_part_the_replicas(
    thaws_before: bool, two_ranks: Pool, tmp_path: Path
) -> None:
    (first, weights), (second, others) = two_ranks.run(replicated, tmp_path, thaws_before)
    for refusal in (first, second):
        expected = "DistributedDataParallel has not found them to train, so that each rank would"
        assert not refusal if thaws_before else expected in refusal
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=0)

"""A callback serves rows in Lightning's Trainer: numbers are those of freezing without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.helpers.any_models import KINDS, Kind, build, data, mean_loss
from tests.helpers.pool import Pool
from tests.pipetransformer.loop.test_cached_loop import Samples
from tests.pipetransformer.loop.test_callbacks import assert_losses_and_weights, by_step

lightning = pytest.importorskip("lightning")

TEXTS, IMAGES = KINDS["gpt2_classifier"], KINDS["beit"]


class Replica(DistributedDataParallel):
    """Stand for a wrapped module, without processes."""

    def __init__(self, *, finds: bool = True, static: bool = False) -> None:
        self.__dict__.update(find_unused_parameters=finds, static_graph=static)


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Train a tiny model as Lightning wants it, and note losses."""

    def __init__(self, kind: Kind, head: bool = False) -> None:
        super().__init__()
        self.kind, self.model, self.losses = kind, build(kind), list[float]()
        if head:
            self.head = nn.Linear(1, 1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = mean_loss(self.kind, self.model, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.losses.append(mean_loss(self.kind, self.model, batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(
    module: Module,
    callback: Any,
    folder: Path,
    *,
    loader: DataLoader[Any] | None = None,
    resume: Any = None,
    **settings: Any,
) -> None:
    every = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=3, save_top_k=-1, filename="{step}"
    )
    trainer = lightning.Trainer(
        **{"max_epochs": 3, **settings},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, every],
        default_root_dir=folder,
    )
    loader = texts(module.kind) if loader is None else loader
    checks = DataLoader(Samples(dict(data(module.kind).tensors)), batch_size=5)
    torch.manual_seed(3)
    trainer.fit(module, loader, checks, ckpt_path=resume)
    module.losses.append(float(torch.rand(())))  # Random numbers go on alike, too.


def texts(kind: Kind, **options: Any) -> DataLoader[Any]:
    samples = Samples(dict(data(kind).tensors))
    return DataLoader(samples, batch_size=2, shuffle=True, **options)


RUN: list[int] = []
"""Samples that a backbone ran on, at each call."""


class Backbone(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        RUN.append(len(x))
        output: Tensor = super().forward(x)
        return output


class HeadOnBackbone(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Hold a frozen backbone and a head side by side, as most modules do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
        self.backbone, self.head = Backbone(*layers), nn.Linear(16, 3)
        self.backbone.requires_grad_(False)
        self.losses, self.num_run = list[float](), list[int]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.backbone.eval()
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.backbone(x)), y)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.num_run.append(sum(RUN))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_a_backbone_beside_a_head_has_rows_by_itself(tmp_path: Path) -> None:
    from pipetransformer import LightningFreezeCallback

    modules = []
    for callbacks in ([], [LightningFreezeCallback(parts=["backbone"], cache=True)]):
        RUN.clear()
        modules.append(module := HeadOnBackbone())
        rows = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.arange(12) % 3)
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks,
            default_root_dir=tmp_path,
        )  # fmt: skip
        torch.manual_seed(3)
        trainer.fit(module, loader)
    plain, ours = modules
    assert plain.losses == ours.losses and len(plain.losses) == 9
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    assert plain.num_run == [12, 24, 36]
    assert ours.num_run[1] == ours.num_run[2]  # Nothing ran in the last epoch.


def callback(folder: Path | None, **settings: Any) -> Any:
    from pipetransformer import LightningFreezeCallback

    kept = {"cache": False} if folder is None else {"cache_folder": folder}
    return LightningFreezeCallback(by_step, every_steps=1, **kept, **settings)


class Pairs:
    """Draw batches, and do not say how many: Lightning takes one ahead."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(10).tolist()
        return iter([order[at : at + 2] for at in range(0, 10, 2)])


LOADERS: dict[str, Callable[[Kind], DataLoader[Any]]] = {
    "shuffled": texts,
    "workers": lambda kind: texts(kind, num_workers=1),
    "persistent_workers": lambda kind: texts(kind, num_workers=1, persistent_workers=True),
    "without_length": lambda kind: DataLoader(
        Samples(dict(data(kind).tensors)),
        batch_sampler=Pairs(),  # type: ignore[arg-type]
    ),
    "generator": lambda kind: texts(kind, generator=torch.Generator().manual_seed(1)),
    "generator_and_workers": lambda kind: texts(
        kind, generator=torch.Generator().manual_seed(1), num_workers=1
    ),
}


def compare(folder: Path, kind: Kind, make: Any = texts, **settings: Any) -> None:
    modules = plain, ours = Module(kind), Module(kind)
    served = callback(folder)
    for module, used in zip(modules, (callback(None), served), strict=True):
        fit(module, used, folder / str(id(module)), loader=make(kind), **settings)
    assert_losses_and_weights(ours, plain)
    assert served.stats.hits + served.stats.upgrades > 0


@pytest.mark.parametrize(
    "name",
    [
        name if name == "generator" else pytest.param(name, marks=pytest.mark.slow)
        for name in LOADERS
    ],
)
def test_rows_change_nothing_whatever_the_loader_draws(name: str, tmp_path: Path) -> None:
    # The policy of steps needs to know how many there are.
    more = {"max_steps": 15, "max_epochs": -1} if name == "without_length" else {}
    compare(tmp_path, TEXTS if name != "without_length" else IMAGES, LOADERS[name], **more)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"val_check_interval": 2}, marks=pytest.mark.slow),
        pytest.param({"limit_train_batches": 3}, marks=pytest.mark.slow),
    ],
    ids=["accumulates", "plain", "validates", "is_limited"],
)
def test_rows_change_nothing_that_lightning_computes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    compare(tmp_path, IMAGES, **settings)


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_lightning_resumes_with_what_was_frozen(step: int, tmp_path: Path) -> None:
    fit(Module(TEXTS), callback(None), tmp_path)
    (saved,) = tmp_path.glob(f"step={step}.ckpt")
    plain, ours = Module(TEXTS), Module(TEXTS)
    served = callback(tmp_path)
    for module, used in ((plain, callback(None)), (ours, served)):
        fit(module, used, tmp_path / str(id(module)), resume=saved)
    assert_losses_and_weights(ours, plain)
    assert served.stats.hits > 0


def test_a_part_that_is_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has the parts \['head', 'model'\] with weights; name"):
        fit(Module(TEXTS, head=True), callback(tmp_path), tmp_path)


def test_several_loaders_are_refused_rows(tmp_path: Path) -> None:
    loader: Any = lightning.pytorch.utilities.CombinedLoader([texts(TEXTS), texts(TEXTS)])
    asking = callback(tmp_path, cache=True)
    with pytest.raises(TypeError, match="a list is no torch DataLoader.* rows: cache=False"):
        fit(Module(TEXTS), asking, tmp_path, loader=loader)


def test_an_exception_gives_the_model_its_own_forward_back(tmp_path: Path) -> None:
    module = Module(TEXTS)
    module.model.register_forward_hook(lambda *_: module.losses[9])
    with pytest.raises(IndexError, match="list index out of range"):
        fit(module, callback(tmp_path), tmp_path)
    assert not any("forward" in vars(one) for one in module.modules())


def replicated(folder: Path, caches: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Train by Lightning on every rank."""
    module, used = Module(TEXTS), callback(folder if caches else None)
    strategy = lightning.pytorch.strategies.DDPStrategy(find_unused_parameters=True)
    fit(module, used, folder / str(caches), strategy=strategy, devices=2, max_epochs=4)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return module.losses, weights, used.stats.hits


@pytest.mark.slow
def test_replicas_share_their_rows_and_end_as_without(two_ranks: Pool, tmp_path: Path) -> None:
    ours = two_ranks.run(replicated, tmp_path, True)
    plain = two_ranks.run(replicated, tmp_path, False)
    for (losses, weights, hits), (expected, others, _) in zip(ours, plain, strict=True):
        assert hits > 0
        assert losses == pytest.approx(expected, rel=1e-9, abs=0)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (SimpleNamespace(model=nn.Linear(1, 1)), "SimpleNamespace may hold parts of each weight"),
        (SimpleNamespace(model=Replica(finds=False)), "waits for the gradients of all weights"),
        (SimpleNamespace(model=Replica(static=True)), "and no static_graph"),
    ],
)
def test_a_wrapper_within_which_nothing_can_freeze_is_refused(strategy: Any, message: str) -> None:
    trainer = SimpleNamespace(world_size=2, strategy=strategy)
    with pytest.raises(ValueError, match=message):
        callback(None).on_train_start(trainer, None)

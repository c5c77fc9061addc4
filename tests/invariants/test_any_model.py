"""Models that no adapter knows train as a loop over their own forward does.

epoch    0    1    2    3
frozen   0    1    2    1     a freeze, another, a thaw
K        a    a    b    b     resumed at another length
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipetransformer import FreezeSchedule, Trainer
from tests.helpers.any_models import BATCH_SIZE, KINDS, build, data, sgd, train_plainly
from tests.helpers.inspection import task_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.pool import Pool

FROZEN = (0, 1, 2, 1)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Pool]:
    pool = Pool(3)
    yield pool
    pool.close()


def trainer_of(name: str, length: int, folder: Path | None, *, epochs: int) -> Trainer:
    kind = KINDS[name]
    return Trainer(
        build(kind),
        data(kind),
        optimizer=sgd,
        freeze=FreezeSchedule(tuple(min(n, most(name)) for n in FROZEN)),
        epochs=epochs,
        global_batch_size=BATCH_SIZE,
        pipeline_length=length,
        micro_batches=2,
        progress=False,
        tied_weights="freeze",
        folder=folder,
        checkpoint_every_epochs=0 if folder is None else 2,
        resume="auto" if folder else False,
    )


def most(name: str) -> int:
    """Return how many blocks can freeze at most."""
    return {"albert": 1}.get(name, 2)


@measuring(never)
def train(name: str, lengths: tuple[int, int], folder: Path | None) -> dict[str, Tensor]:
    """Train in pipelines of the first length, and from epoch 2 on of the second."""
    if folder is not None:
        with trainer_of(name, lengths[0], folder, epochs=len(FROZEN)) as trainer:
            while trainer.epoch < 2:
                trainer.step()
    with trainer_of(name, lengths[1], folder, epochs=len(FROZEN)) as trainer:
        trainer.fit()
        return {name: t.clone() for name, t in trainer.state_dict().items()}


def assert_as_plain(name: str, ours: dict[str, Tensor]) -> None:
    _, theirs = train_plainly(KINDS[name], tuple(min(n, most(name)) for n in FROZEN))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        allowed = KINDS[name].rounding * (1e-2 + float(theirs[key].abs().max()))
        assert float((tensor - theirs[key]).abs().max()) <= allowed, key


@pytest.mark.parametrize("name", [name if name == "gpt2" else slow(name) for name in KINDS])
def test_two_stages_end_as_a_plain_loop(two_ranks: Pool, name: str) -> None:
    assert_as_plain(name, two_ranks.run(train, name, (2, 2), None)[0])


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, lengths) for name in KINDS for lengths in ((1, 3), (3, 1)) if name != "albert"],
)
@pytest.mark.slow
def test_resumed_at_another_length_it_ends_as_a_plain_loop(
    three_ranks: Pool, name: str, lengths: tuple[int, int], tmp_path: Path
) -> None:
    assert_as_plain(name, three_ranks.run(train, name, lengths, tmp_path)[0])


def test_tied_copies_are_equal_on_both_stages_after_every_step(two_ranks: Pool) -> None:
    first, last = two_ranks.run(tied_copies, "gpt2")
    assert len(first) == len(last) == 6
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))
    assert not torch.equal(first[0], first[-1])


def tied_copies(name: str) -> list[Tensor]:
    """Return this rank's copy of the tied embedding after each step."""
    kind, copies = KINDS[name], []
    with Trainer(
        build(kind), data(kind), optimizer=sgd, epochs=2, global_batch_size=BATCH_SIZE,
        pipeline_length=2, micro_batches=2, progress=False,
    ) as trainer:  # fmt: skip
        while not trainer.is_over:
            trainer.step()
            model = task_of(trainer).model.model
            copies.append(model.get_parameter("transformer.wte.weight").detach().clone())
    return copies

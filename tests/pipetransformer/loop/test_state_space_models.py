"""Mamba and Mamba2, whose blocks have a state in attention's place, train from rows as without."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.helpers.any_models import BATCH_SIZE, Kind, build, data, sgd
from tests.helpers.marks import slow
from tests.helpers.measured import freely, measuring
from tests.helpers.models import Entries
from tests.pipetransformer.loop.test_cached_loop import Samples, run
from tests.pipetransformer.loop.test_callbacks import Training, by_step, compare

_BLOCKS = ("backbone.layers", ("backbone.embeddings",))
KINDS = {
    "mamba": Kind(
        "MambaForCausalLM", *_BLOCKS,
        {"state_size": 4, "time_step_rank": 4, "tie_word_embeddings": False},
    ),
    "mamba2": Kind(
        "Mamba2ForCausalLM", *_BLOCKS,
        {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
}  # fmt: skip
PADDED = [("mamba2", "right"), ("mamba2", "left"), ("mamba", "right"), ("mamba", "left")]


def texts(name: str, side: str) -> dict[str, Tensor]:
    """Return texts of unequal lengths, padded at a side."""
    entries = data(KINDS[name]).tensors
    return {n: one if side == "right" else one.flip(1) for n, one in entries.items()}


@pytest.mark.parametrize(("name", "side"), [PADDED[0], *(slow(*one) for one in PADDED[1:])])
def test_a_loop_of_one_s_own(name: str, side: str, tmp_path: Path) -> None:
    kind, dataset = KINDS[name], Samples(texts(name, side))
    plain, ours = (run(kind, folder=f, dataset=dataset) for f in (None, tmp_path))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
    for key, tensor in ours.weights.items():
        assert float((tensor - plain.weights[key]).abs().max()) <= 1e-9, key
    assert ours.hits[0] == 0 and min(ours.hits[1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), PADDED)
def test_transformers_trainer(name: str, side: str, tmp_path: Path) -> None:
    dataset = Samples(texts(name, side))  # `compare` asserts hits.
    compare(tmp_path, lambda folder: Training(folder, KINDS[name], dataset), {}, freeze=by_step)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), PADDED)
def test_the_trainer(name: str, side: str) -> None:
    kind, found = KINDS[name], list[dict[str, Tensor]]()
    for cache in (True, False):
        with (
            measuring(freely),
            Trainer(
                build(kind), Entries(texts(name, side)), optimizer=sgd, progress=False, epochs=5,
                freeze=FreezeSchedule([0, 1, 2, 1, 2]), global_batch_size=BATCH_SIZE, cache=cache,
            ) as trainer,
        ):  # fmt: skip
            trainer.fit()
            assert (trainer.report.cache_hits > 0) == cache
            found.append({n: one.clone() for n, one in trainer.state_dict().items()})
    for key, tensor in found[0].items():
        assert float((tensor - found[1][key]).abs().max()) <= 1e-9, key

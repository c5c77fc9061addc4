"""Show that a refactor changed no bit: the proof that CONTRIBUTING asks for.

    python -m experiments.same_bits --write before.json     # on the commit before
    python -m experiments.same_bits --against before.json   # on the commit after

It trains 20 steps of the demo's ViT in fixed pipelines, and of a small BERT with freezing and the
cache, on 1, 2 and 4 processes. Every loss, gradient norm, decision and weight is compared bit by
bit. Both commits must run on one machine with one version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopipe.plan import PipelinePlan, predict
from experiments.random_models import bert
from pipetransformer import PlanSituation, Trainer, launch
from pipetransformer.demo import build_model, load_digits_split

NUM_STEPS = 20

# The planner below is fixed, too, so that no clock decides what is trained.
FREEZES = {"model": "bert", "freeze": "schedule:0,2,3"}
CASES: dict[str, dict[str, Any]] = {
    "vit, K=1": {"num_slots": 1, "pipeline_length": 1},
    "vit, K=2": {"num_slots": 2, "pipeline_length": 2},
    "vit, K=2 R=2, 1f1b": {
        "num_slots": 4, "pipeline_length": 2, "schedule": "1f1b", "max_grad_norm": 1.0
    },
    "vit, K=2, without flushes": {
        "num_slots": 2, "pipeline_length": 2, "weight_versions": "stashed"
    },
    "bert, K=1, frozen": {"num_slots": 1, "pipeline_length": 1, **FREEZES},
    "bert, K=2 R=1, frozen": {"num_slots": 2, "pipeline_length": 2, **FREEZES},
    "bert, R=2, bf16": {"num_slots": 2, "pipeline_length": 1, "precision": "bf16", **FREEZES},
}  # fmt: skip


def evenly(situation: PlanSituation) -> PipelinePlan:
    """Plan the one length that was asked for, with as many sublayers on each stage."""
    request, profile = situation.request, situation.profile
    length = max(request.length_choices()[0])
    first, num = profile.first_active(request.num_frozen), len(profile.sublayers)
    boundaries = tuple(first + (num - first) * stage // length for stage in range(length + 1))
    sizes = request.sizes_of(length, 1)
    return predict(
        profile,
        request,
        boundaries=boundaries,
        num_micro_batches=len(sizes),
        schedule=request.schedules_of(length)[0],
    )


class _Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens with dropout's worth of padding; sample i is the same in every process."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(5, 400, (16,), generator=generator)
        mask = torch.ones(16, dtype=torch.int64)
        mask[int(torch.randint(8, 17, (), generator=generator)) :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.sum() % 2}


def _build(name: str) -> tuple[torch.nn.Module, Any]:
    if name == "vit":
        return build_model(10, seed=0, num_blocks=12), load_digits_split()[0]
    shape = {"vocab_size": 400, "intermediate_size": 192}
    return bert(96, 6, heads=4, dropout=0.1, **shape), _Sentences()


def train(case: dict[str, Any], path: Path) -> None:
    """Train one case, on every rank, and write what rank 0 saw as JSON."""
    settings = {key: value for key, value in case.items() if key not in ("model", "num_slots")}
    model, dataset = _build(case.get("model", "vit"))
    steps = []
    with Trainer(
        model,
        dataset,
        epochs=4,
        max_steps=NUM_STEPS,
        global_batch_size=32,
        micro_batch_size=8,
        device="cpu",
        progress=False,
        plan=evenly,
        **settings,
    ) as trainer:
        trainer.begin()
        while not trainer.is_over:
            result, decision = trainer.step(), trainer.decision
            assert decision is not None
            steps.append(
                {
                    "loss": result.loss.hex(),
                    "gradient_norm": result.gradient_norm.hex(),
                    "frozen": decision.num_frozen,
                    "boundaries": list(decision.plan.boundaries),
                    "use_cache": decision.use_cache,
                }
            )
        trainer.fit()
        if trainer.is_main_process:
            weights = {
                name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
                for name, tensor in model.state_dict().items()
                if tensor.ndim
            }
            path.write_text(json.dumps({"steps": steps, "weights": weights}))


def run_all() -> dict[str, Any]:
    """Train every case, and return what each has shown by its name."""
    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "seen.json"
            launch(partial(train, case, path), num_slots=case["num_slots"])
            found[name] = json.loads(path.read_text())
        print(f"{name}: last loss {float.fromhex(found[name]['steps'][-1]['loss']):.6f}")
    return found


def first_difference(before: Any, after: Any, where: str = "") -> str | None:
    """Name the first place where two trees of JSON differ; None where they do not."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        pairs = [(key, before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        return None if before == after else f"{where}: {before!r} before, {after!r} after"
    found = (first_difference(old, new, f"{where}/{key}") for key, old, new in pairs)
    return next((text for text in found if text), None)


def main() -> int:
    """Write what this commit does, or compare it with what another one did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--against", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = run_all()
    if options.write:
        options.write.write_text(json.dumps(found, indent=1))
        return 0
    difference = first_difference(json.loads(options.against.read_text()), found)
    print(difference or "not one bit differs")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())

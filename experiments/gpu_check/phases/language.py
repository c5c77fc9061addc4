"""Train language models as people fine-tune them: texts joined, routers, words by the 100,000.

right    small models in float64: losses and weights are those of a plain loop
large    Llama-3.2-1B's shape, random, bfloat16, LoRA in its upper third: memory, then speed
saved    what a checkpoint takes of the loop and of the disk, and a resume
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from experiments.gpu_check.device_time import synchronize
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loop_times import time_loops
from experiments.gpu_check.loops import Attached, ByTrainer, Loop, Plain, make_trainer
from experiments.gpu_check.short_runs import IN_FLOAT64, compared
from experiments.gpu_check.workloads import EPS, LoopCase, own_loss, random_texts
from experiments.random_models import llama, with_lora

_FREEZES = (0, 2, 2, 3, 3)
_IN_FLOAT32 = (1e-5, 1e-4)
"""transformers' own loss is in float32, whatever the weights are."""
_WORDS = 5_000
"""More than from where on the Trainer's loss over words needs no logits of all tokens."""


class _UnequalTexts(Dataset[dict[str, Any]]):
    """Give texts of random tokens without padding."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        length, generator = 6 + index % 7, torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(5, _WORDS, (length,), generator=generator).tolist()}


def run(findings: Findings, setting: Setting) -> None:
    """Compare small models, then measure a large one."""
    device, check = setting.device, findings.check
    for case in (_joined(), _routed()):
        check(f"attach: {case.name}, float64", partial(_exact, case, device))
    check("Trainer: loss over words, float64", partial(_by_trainer, device))
    large = _large(setting)
    kinds: dict[str, Callable[[LoopCase, str], Loop]] = {
        "plain": Plain, "attach": Attached, "Trainer": ByTrainer,
    }  # fmt: skip
    for name, kind in kinds.items():
        check(f"{large.name}, memory, {name}", partial(_peaks, large, device, kind))
    check(f"{large.name}, saved", partial(_saved, large, setting))
    num_warm = 2 if setting.tiny else 3
    check(large.name, partial(time_loops, findings, large, device, num_warm=num_warm))


def _exact(case: LoopCase, device: str) -> dict[str, Any]:
    ours, plain = Attached(case, device).trained(_FREEZES), Plain(case, device).trained(_FREEZES)
    if ours.rows_read != 2 * len(case.rows):
        raise ValueError(f"{ours.rows_read} rows were read, not {2 * len(case.rows)}")
    return {**compared(ours, plain, IN_FLOAT64), "rows_read": ours.rows_read}


def _by_trainer(device: str) -> dict[str, Any]:
    rows = random_texts(32, 16, _WORDS)
    case = _small("llama", partial(llama, 64, 4, heads=2, words=_WORDS), rows)
    ours = ByTrainer(case, device).trained(_FREEZES)
    return compared(ours, Plain(case, device).trained(_FREEZES), _IN_FLOAT32)


def _joined() -> LoopCase:
    from transformers import DataCollatorWithFlattening

    case = _small("joined texts", partial(llama, 64, 4, heads=2, words=_WORDS), _UnequalTexts())
    return LoopCase(**{**vars(case), "collate": DataCollatorWithFlattening(return_tensors="pt")})


def _routed() -> LoopCase:
    return _small("routers", _mixture, random_texts(32, 16, _WORDS))


def _mixture() -> nn.Module:
    """Build a mixture of experts whose loss has its routers' share."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": _WORDS, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5,
        "use_cache": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 1,
        "experts_implementation": "eager",  # The faster ones take no float64.
    }  # fmt: skip
    config = Qwen3MoeConfig(**sizes)
    return Qwen3MoeForCausalLM(config)


def _small(name: str, build: Callable[[], nn.Module], rows: Any) -> LoopCase:
    def made() -> nn.Module:
        return build().double()

    return LoopCase(name, made, "model.layers", rows, own_loss, 8, 2, autocast_to=None, eps=EPS)


def _large(setting: Setting) -> LoopCase:
    """Return Llama-3.2-1B's shape with adapters in its upper third."""
    tiny = setting.tiny
    width, depth, heads, words, length = (
        (64, 6, 4, _WORDS, 32) if tiny else (2048, 16, 32, 128_256, 2048)
    )
    lower, batch, steps = 2 * depth // 3, 4, 3 if tiny else 8
    build = partial(_adapted, (width, depth, heads, words), lower, setting.device)
    blocks, rows = "base_model.model.model.layers", random_texts(batch * steps, length, words)
    name = f"Llama-1B with LoRA, {batch} x {length}"
    return LoopCase(name, build, blocks, rows, own_loss, batch, lower)


def _adapted(shape: tuple[int, int, int, int], lower: int, device: str) -> nn.Module:
    width, depth, heads, words = shape
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            base = llama(
                width, depth, heads=heads, words=words, num_key_value_heads=heads // 4,
                intermediate_size=4 * width, tie_word_embeddings=True,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(0)
    upper = [*range(lower, depth)]
    return with_lora(base, r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=upper)


def _peaks(case: LoopCase, device: str, kind: Callable[[LoopCase, str], Loop]) -> dict[str, Any]:
    """Run an epoch unfrozen and two frozen; return the peak of each, in GB beyond the weights."""
    with kind(case, device) as loop:
        found: dict[str, Any] = {}
        for name, frozen in (
            ("unfrozen", 0),
            ("filling", case.num_frozen),
            ("warm", case.num_frozen),
        ):
            before = _forget_peak(device)
            loop.epoch(frozen)
            if device == "cuda":
                torch.cuda.synchronize()
                found[f"{name}_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                found[f"{name}_before_gb"] = before / 1e9
        return found


def _forget_peak(device: str) -> int:
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _saved(case: LoopCase, setting: Setting) -> Mapping[str, Any]:
    """Save at each second step; then resume, and take the last steps once more."""
    from freeze import FreezeSchedule

    folder = Path(setting.scratch, "run")

    def trainer() -> Any:
        return make_trainer(
            case, setting.device, freeze=FreezeSchedule([case.num_frozen] * 4), epochs=4,
            folder=str(folder), checkpoint_every_steps=2, keep_checkpoints=4, resume="auto",
        )  # fmt: skip

    start = time.perf_counter()
    with trainer() as first:
        first.begin()
        synchronize(setting.device)
        began = time.perf_counter()
        losses, seconds = [], []
        for _ in range(6):
            at = time.perf_counter()
            losses.append(float(first.step().loss))
            seconds.append(time.perf_counter() - at)
    folders = sorted((folder / "checkpoints").iterdir())
    bytes_of = {one.name: _bytes(one) for one in folders}
    start_again = time.perf_counter()
    with trainer() as second:
        second.begin()
        synchronize(setting.device)
        resumed = time.perf_counter()
        at, loss = second.global_step, float(second.step().loss)
    return {
        "start_s": began - start, "resume_s": resumed - start_again, "resumed_at": at,
        "next_loss": loss, "losses": losses, "step_s": seconds,
        "mb_of_checkpoints": {name: size / 1e6 for name, size in bytes_of.items()},
        "mb_of_the_run": _bytes(folder) / 1e6,
    }  # fmt: skip


def _bytes(folder: Path) -> int:
    if folder.is_file():
        return folder.stat().st_size
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

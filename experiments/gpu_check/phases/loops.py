"""Hold `attach` and `FreezeCallback` against plain loops, and time them and the Trainer.

right    small models in float64: losses and weights are those of a plain loop
fast     whole epochs in turn, in bfloat16: filling, then warm, rows on the device and on the host
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loop_times import time_loops, with_rows
from experiments.gpu_check.loops import Attached, Outcome, Plain
from experiments.gpu_check.short_runs import IN_FLOAT64, compared, compared_losses
from experiments.gpu_check.workloads import (
    EPS,
    TINY_VIT,
    LoopCase,
    Rows,
    image_loss,
    own_loss,
    random_images,
    random_sentences,
    random_texts,
    reading_workers,
    sentences,
)
from experiments.random_models import bert, gpt2, llama, vit, with_lora
from pipetransformer import FreezeCallback

_FREEZES = (0, 2, 2, 3, 3)
_WORDS = 5_000
_OF_LORA = "base_model.model.model.layers"


def run(findings: Findings, setting: Setting) -> None:
    """Compare all models, then time them."""
    device, check = setting.device, findings.check
    for case in _small_cases(torch.float64):
        check(f"attach: {case.name}, float64", partial(_exact, case, device))
    bert = _small_cases(torch.float64)[0]
    kept = {"cache_keep": True, "cache_folder": setting.scratch}
    check("attach: rows that are kept", partial(_kept, bert, device, kept))
    for place in ("cuda", "cpu") if device == "cuda" else ("cpu",):
        check(f"attach: rows in {place}", partial(_exact, bert, device, cache_device=place))
    for case in _small_cases(torch.float32):
        rounded = replace(case, autocast_to=torch.bfloat16)
        check(f"attach: {case.name}, bf16", partial(_rounded, rounded, device))
    for case in _small_cases(torch.float32):
        if case.name != "vit":
            check(f"FreezeCallback: {case.name}", partial(_callback, case, setting))
    for build in (vit_b, bert_base, minilm, _gpt2_small, _llama_lora):
        check(build.__name__.strip("_"), partial(_timed, findings, build, setting))


def _exact(case: LoopCase, device: str, **settings: Any) -> dict[str, Any]:
    ours, plain = (
        Attached(case, device, **settings).trained(_FREEZES),
        Plain(case, device).trained(_FREEZES),
    )
    return {**compared(ours, plain, IN_FLOAT64), "rows_read": _that_reads(ours, case)}


def _rounded(case: LoopCase, device: str) -> dict[str, Any]:
    ours, plain = Attached(case, device).trained(_FREEZES), Plain(case, device).trained(_FREEZES)
    return {**compared_losses(ours, plain), "rows_read": _that_reads(ours, case)}


def _kept(case: LoopCase, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    first = Attached(case, device, **settings).trained((2, 2))
    second = Attached(case, device, **settings).trained((2, 2))
    if second.rows_read != 2 * len(case.rows):
        raise ValueError(f"the second run has read {second.rows_read} rows of the first one's")
    plain = Plain(case, device).trained((2, 2))
    compared(first, plain, IN_FLOAT64)
    return {**compared(second, plain, IN_FLOAT64), "rows_read": second.rows_read}


def _that_reads(outcome: Outcome, case: LoopCase) -> int:
    if outcome.rows_read != 2 * len(case.rows):
        raise ValueError(f"{outcome.rows_read} rows were read, not {2 * len(case.rows)}")
    return outcome.rows_read


def _callback(case: LoopCase, setting: Setting) -> dict[str, Any]:
    """Train in transformers' Trainer with rows and without: equal losses, step by step."""
    with_rows, without = (_by_transformers(case, setting, cache=one) for one in (True, False))
    if with_rows.rows_read != len(case.rows):
        raise ValueError(f"{with_rows.rows_read} rows were read, not {len(case.rows)}")
    return {**compared_losses(with_rows, without, relative=1e-5), "rows_read": with_rows.rows_read}


def _by_transformers(case: LoopCase, setting: Setting, *, cache: bool) -> Outcome:
    from transformers import Trainer, TrainingArguments  # Seconds, and most phases need none.

    arguments = TrainingArguments(
        setting.scratch,
        num_train_epochs=3,
        per_device_train_batch_size=case.batch_size,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=setting.device == "cpu",
        seed=0,
    )
    callback = FreezeCallback([0, 2, 2], cache=cache)
    trainer = Trainer(case.build(), arguments, train_dataset=case.rows, callbacks=[callback])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Outcome(losses, {}, callback.stats.hits)


def _timed(findings: Findings, build: Callable[[Setting], LoopCase], setting: Setting) -> None:
    case, device = build(setting), setting.device
    ours = with_rows(case, device)
    time_loops(findings, case, device, ours, num_warm=2 if setting.tiny else 4)


def _small_cases(dtype: torch.dtype) -> list[LoopCase]:
    def case(name: str, build: Callable[[], nn.Module], blocks: str, rows: Rows) -> LoopCase:
        loss_of = image_loss if name == "vit" else own_loss
        made = partial(_in, dtype, build)
        return LoopCase(name, made, blocks, rows, loss_of, 8, 2, autocast_to=None, eps=EPS)

    texts, sizes = random_texts(32, 16, _WORDS), {"heads": 2, "words": _WORDS}
    return [
        case(
            "bert", partial(bert, 64, 4, heads=2), "bert.encoder.layer", random_sentences(32, 16)
        ),
        case(
            "vit", partial(vit, **{**TINY_VIT, "depth": 4}), "blocks", random_images(32, 32, dtype)
        ),
        case("gpt2", partial(gpt2, 64, 4, **sizes), "transformer.h", texts),
        case("llama", partial(llama, 64, 4, **sizes), "model.layers", texts),
        case("llama with LoRA", partial(_lora, 64, 4, 2, range(3, 4)), _OF_LORA, texts),
    ]


def _in(dtype: torch.dtype, build: Callable[[], nn.Module]) -> nn.Module:
    return build().to(dtype)


def _lora(width: int, depth: int, heads: int, blocks: range) -> nn.Module:
    """Build a Llama with adapters in the upper blocks' attention."""
    model = llama(width, depth, heads=heads, words=_WORDS)
    targets = ["q_proj", "v_proj"]
    return with_lora(model, r=8, target_modules=targets, layers_to_transform=[*blocks])


def bert_base(setting: Setting) -> LoopCase:
    width, depth, heads, length = (64, 6, 2, 16) if setting.tiny else (768, 12, 12, 128)
    batch, steps = (8, 3) if setting.tiny else (32, 12)
    rows = random_sentences(batch * steps, length)
    return _text(f"BERT, {batch} x {length}", partial(bert, width, depth, heads=heads),
                 "bert.encoder.layer", rows, batch, depth)  # fmt: skip


def minilm(setting: Setting) -> LoopCase:
    width, batch, steps = (48, 8, 3) if setting.tiny else (384, 32, 12)
    rows = sentences(setting.data, batch * steps, 64)
    return _text(f"MiniLM's shape, {batch} x 64", partial(bert, width, 6, heads=12),
                 "bert.encoder.layer", rows, batch, 6)  # fmt: skip


def _gpt2_small(setting: Setting) -> LoopCase:
    width, depth, heads, length = (64, 6, 2, 16) if setting.tiny else (768, 12, 12, 256)
    batch, steps = (4, 3) if setting.tiny else (8, 12)
    rows = random_texts(batch * steps, length, _WORDS)
    build = partial(gpt2, width, depth, heads=heads, words=_WORDS)
    return _text(f"GPT-2, {batch} x {length}", build, "transformer.h", rows, batch, depth)


def _llama_lora(setting: Setting) -> LoopCase:
    width, depth, heads, length = (64, 6, 2, 16) if setting.tiny else (1024, 16, 16, 512)
    batch, steps = 4, 3 if setting.tiny else 12
    rows = random_texts(batch * steps, length, _WORDS)
    build = partial(_lora, width, depth, heads, range(2 * depth // 3, depth))
    return _text(f"Llama with LoRA, {batch} x {length}", build, _OF_LORA, rows, batch, depth)


def _text(  # noqa: PLR0913 - a case's fields, in their order
    name: str, build: Callable[[], nn.Module], blocks: str, rows: Rows, batch: int, depth: int
) -> LoopCase:
    return LoopCase(name, build, blocks, rows, own_loss, batch, 2 * depth // 3)


def vit_b(setting: Setting) -> LoopCase:
    return vit_case(setting, 3 if setting.tiny else 12)


def vit_case(setting: Setting, steps: int) -> LoopCase:
    """Return the ViT whose steps are timed, with so many an epoch, on random images."""
    shape: dict[str, Any] = TINY_VIT
    if not setting.tiny:
        shape = {"img_size": 224, "patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    batch, depth = 8 if setting.tiny else 64, shape["depth"]
    images = Rows(random_images(256, shape["img_size"]).columns, batch * steps)
    return LoopCase(
        f"ViT, {batch} x {shape['img_size']} px", partial(vit, **shape), "blocks", images,
        image_loss, batch, 2 * depth // 3, num_workers=reading_workers(setting),
    )  # fmt: skip

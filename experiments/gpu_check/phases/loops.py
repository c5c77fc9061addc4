"""Hold `attach` and `FreezeCallback` against plain loops, and time them, epoch by epoch.

right    small models in float64: losses and weights are those of a plain loop
fast     whole epochs in turn, in bfloat16: filling, then warm, rows on the device and on the host
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.gpu_check.device_time import synchronize
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.frozen_loops import Ideal, Loop, LoopCase, Ours, Plain
from experiments.gpu_check.short_runs import IN_FLOAT64, Outcome, compared, compared_losses
from experiments.gpu_check.workloads import (
    build_bert,
    build_vit,
    image_loss,
    random_images,
    random_sentences,
    random_texts,
    reading_workers,
)
from pipetransformer import FreezeCallback

_FREEZES = (0, 2, 2, 3, 3)
_WORDS = 5_000


def run(findings: Findings, setting: Setting) -> None:
    """Compare all models, then time them."""
    device, check = setting.device, findings.check
    for case in (*_small_cases(torch.float64), *_small_lora(torch.float64)):
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
    for build in (_bert_base, _vit_b, _gpt2_small, _llama_lora):
        check(build.__name__.strip("_"), partial(_timed, findings, build, setting))


def _exact(case: LoopCase, device: str, **settings: Any) -> dict[str, Any]:
    ours, plain = _trained(Ours(case, device, **settings)), _trained(Plain(case, device))
    return {**compared(ours, plain, IN_FLOAT64), "rows_read": _that_reads(ours, case)}


def _rounded(case: LoopCase, device: str) -> dict[str, Any]:
    ours, plain = _trained(Ours(case, device)), _trained(Plain(case, device))
    return {**compared_losses(ours, plain), "rows_read": _that_reads(ours, case)}


def _kept(case: LoopCase, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    first = _trained(Ours(case, device, **settings), (2, 2))
    second = _trained(Ours(case, device, **settings), (2, 2))
    if second.rows_read != 2 * len(case.rows):
        raise ValueError(f"the second run has read {second.rows_read} rows of the first one's")
    plain = _trained(Plain(case, device), (2, 2))
    compared(first, plain, IN_FLOAT64)
    return {**compared(second, plain, IN_FLOAT64), "rows_read": second.rows_read}


def _trained(loop: Loop, frozen: tuple[int, ...] = _FREEZES) -> Outcome:
    """Train to the end; what rows were read is known of ours alone."""
    try:
        for num_frozen in frozen:
            loop.epoch(num_frozen)
        losses = [float(loss) for loss in loop.losses]
        weights = {name: tensor.cpu() for name, tensor in loop.model.state_dict().items()}
        return Outcome(losses, weights, sum(loop.hits) if isinstance(loop, Ours) else 0)
    finally:
        loop.close()


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
    """Time whole epochs, their starts included, in turn."""
    case, device = build(setting), setting.device
    num_warm = 2 if setting.tiny else 4
    loops: dict[str, Loop] = {"plain": Plain(case, device), "ideal": Ideal(case, device)}
    for place in ("cuda", "cpu") if device == "cuda" else ("cpu",):
        loops[f"rows in {place}"] = Ours(case, device, cache_device=place)
    with ExitStack() as stack:
        for loop in loops.values():
            stack.callback(loop.close)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
        # The first epoch, with nothing frozen, warms up; then one fills.
        for frozen in (0, 0, *[case.num_frozen] * (1 + num_warm)):
            for name, loop in loops.items():
                found[name].append(_epoch_ms(loop, frozen, device))
        _compare_losses(loops)
    for state, epochs in (("unfrozen", [1]), ("filling", [2]), ("warm", range(3, 3 + num_warm))):
        ms = {name: np.median([found[name][n] for n in epochs], axis=0) for name in loops}
        for name in loops:
            if name in ("plain", "ideal"):
                continue
            findings.note(
                f"{case.name}, {state}, {name}",
                of_ideal=float(ms["ideal"][0] / ms[name][0]),
                plain_over_ours=float(ms["plain"][0] / ms[name][0]),
                ours_ms=float(ms[name][0]),
                plain_ms=float(ms["plain"][0]),
                ideal_ms=float(ms["ideal"][0]),
                main_thread_ms={one: float(values[1]) for one, values in ms.items()},
            )


def _compare_losses(loops: dict[str, Loop]) -> None:
    """Raise a ValueError where loops that are timed do not learn alike."""
    losses = {name: torch.stack(loop.losses).float().mean().item() for name, loop in loops.items()}
    for name, loss in losses.items():
        if not abs(loss - losses["plain"]) <= 0.02 * abs(losses["plain"]):
            raise ValueError(f"{name} has a mean loss of {loss:.5g}; all: {losses}")


def _epoch_ms(loop: Loop, num_frozen: int, device: str) -> tuple[float, float]:
    """Return an epoch's time a step, and the main thread's own, in ms."""
    synchronize(device)
    start, own = time.perf_counter(), time.thread_time()
    loop.epoch(num_frozen)
    own = time.thread_time() - own  # Before the wait, in which this thread may spin.
    synchronize(device)
    steps = loop.case.steps_per_epoch / 1e3
    return (time.perf_counter() - start) / steps, own / steps


def _in(dtype: torch.dtype, build: Callable[[], nn.Module]) -> nn.Module:
    return build().to(dtype)


def _small_cases(dtype: torch.dtype) -> list[LoopCase]:
    def case(name: str, build: Callable[[], nn.Module], blocks: str, rows: Any, loss: Any) -> Any:
        return LoopCase(name, partial(_in, dtype, build), blocks, rows, loss, 8, 2, None)

    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2}
    bert = partial(build_bert, 64, 4, heads=2, dropout=0.0)
    texts = random_texts(32, 16, _WORDS)
    return [
        case("bert", bert, "bert.encoder.layer", random_sentences(32, 16), _own_loss),
        case("vit", partial(build_vit, vit), "blocks", random_images(32, 32, dtype), image_loss),
        case("gpt2", partial(_gpt2, 64, 4), "transformer.h", texts, _own_loss),
        case("llama", partial(_llama, 64, 4), "model.layers", texts, _own_loss),
    ]


def _small_lora(dtype: torch.dtype) -> list[LoopCase]:
    build = partial(_in, dtype, partial(_with_lora, partial(_llama, 64, 4), range(3, 4)))
    texts, blocks = random_texts(32, 16, _WORDS), "base_model.model.model.layers"
    return [LoopCase("llama with LoRA", build, blocks, texts, _own_loss, 8, 2, None)]


def _bert_base(setting: Setting) -> LoopCase:
    width, depth, heads, length = (64, 6, 2, 16) if setting.tiny else (768, 12, 12, 128)
    batch, steps = (8, 3) if setting.tiny else (32, 12)
    build = partial(build_bert, width, depth, heads=heads, dropout=0.0)
    rows = random_sentences(batch * steps, length)
    name = f"BERT, {batch} x {length}"
    return LoopCase(name, build, "bert.encoder.layer", rows, _own_loss, batch, 2 * depth // 3)


def _vit_b(setting: Setting) -> LoopCase:
    shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2}
    if not setting.tiny:
        shape = {"img_size": 224, "patch_size": 16, "embed_dim": 768, "num_heads": 12}
    batch, steps, depth = (8, 3, 6) if setting.tiny else (64, 12, 12)
    images = random_images(batch * steps, shape["img_size"])
    build = partial(build_vit, {**shape, "depth": depth})
    name, workers = f"ViT, {batch} x {shape['img_size']} px", reading_workers(setting)
    frozen = 2 * depth // 3
    return LoopCase(name, build, "blocks", images, image_loss, batch, frozen, num_workers=workers)


def _gpt2_small(setting: Setting) -> LoopCase:
    width, depth, length = (64, 6, 16) if setting.tiny else (768, 12, 256)
    batch, steps = (4, 3) if setting.tiny else (8, 12)
    rows = random_texts(batch * steps, length, _WORDS)
    name, build = f"GPT-2, {batch} x {length}", partial(_gpt2, width, depth)
    return LoopCase(name, build, "transformer.h", rows, _own_loss, batch, 2 * depth // 3)


def _llama_lora(setting: Setting) -> LoopCase:
    width, depth, length = (64, 6, 16) if setting.tiny else (1024, 16, 512)
    batch, steps = (4, 3) if setting.tiny else (4, 12)
    rows, frozen = random_texts(batch * steps, length, _WORDS), 2 * depth // 3
    build = partial(_with_lora, partial(_llama, width, depth), range(frozen, depth))
    name, blocks = f"Llama with LoRA, {batch} x {length}", "base_model.model.model.layers"
    return LoopCase(name, build, blocks, rows, _own_loss, batch, frozen)


def _own_loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


def _gpt2(width: int, depth: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=_WORDS, n_embd=width, n_layer=depth, n_head=max(2, width // 64),
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama(width: int, depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(2, width // 64)
    config = LlamaConfig(
        vocab_size=_WORDS, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        num_key_value_heads=heads // 2, intermediate_size=3 * width, use_cache=False,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _with_lora(build: Callable[[], nn.Module], blocks: range) -> nn.Module:
    """Give the upper blocks' attention adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=[*blocks], lora_dropout=0.0
    )
    model: nn.Module = get_peft_model(build(), config)
    return model

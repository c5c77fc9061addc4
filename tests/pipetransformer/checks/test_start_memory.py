"""What a start takes of memory: little beside the weights, also where texts are long."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pipetransformer.elastic.elasticity as elasticity
from pipetransformer import Trainer
from tests.helpers.live_bytes import LiveBytes

_SCRIPT = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
import pipetransformer.elastic.elasticity as elasticity
from pipetransformer import Trainer

shape = json.loads(sys.argv[1])

def kept(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

def rest():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    return kept("VmRSS")

def adapted(num_blocks, width, words):
    heads = max(2, width // 64)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=num_blocks,
    )).bfloat16()
    upper = [*range(2 * num_blocks // 3, num_blocks)]
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=upper)
    return get_peft_model(model, lora), upper[0]

def begin(model, num_frozen, words, tokens):
    texts = torch.randint(0, words, (4, tokens))
    samples = [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": t} for t in texts]
    trainer = Trainer(
        model, samples, freeze=num_frozen, global_batch_size=2, num_workers=0, progress=False
    )
    trainer.begin()

class Checked(Exception):
    pass

def stop(*_args, **_kwargs):
    raise Checked

torch.set_num_threads(1)
begin(*adapted(3, 64, 5000), 5000, 64)  # Modules that are imported late, and what torch keeps.
elasticity.measure = stop
before = rest()
model, num_frozen = adapted(*shape[:3])
weights = sum(p.nbytes for p in model.parameters())
rest()
try:
    begin(model, num_frozen, shape[2], shape[3])
except Checked:
    print(json.dumps((kept("VmHWM") - before) / weights))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak from /proc")
def test_a_process_takes_little_beside_the_weights_before_it_measures() -> None:
    shape = (16, 1024, 32_000, 512)
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(shape)],
        capture_output=True,
        text=True,
        check=True,
    )
    peak = json.loads(run.stdout.splitlines()[-1])
    assert peak <= 1.15, f"{peak:.2f} of the weights"


class _CheckedError(Exception):
    pass


def test_tensors_take_little_beside_the_weights_before_a_run_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_args: object, **_kwargs: object) -> None:
        raise _CheckedError

    monkeypatch.setattr(elasticity, "measure", stop)
    width, words, num_blocks = 128, 1000, 6
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_hidden_layers=num_blocks,
        )
    )
    for block in model.model.layers[:4]:
        block.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    texts = torch.randint(0, words, (4, 1024))
    samples = [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": t} for t in texts]
    weights = sum(p.nbytes for p in model.parameters())
    with LiveBytes([*model.parameters(), *model.buffers()]) as live, pytest.raises(_CheckedError):
        trainer = Trainer(
            model, samples, freeze=4, global_batch_size=2, num_workers=0, progress=False
        )
        trainer.begin()
    # Two blocks of six have gradients, twice: the model's own, and those of its sublayers.
    most = weights * 1.15 + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert live.peak <= most, f"{live.peak / weights:.2f} of the weights"

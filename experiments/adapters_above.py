"""Train adapters above a frozen decoder whose blocks are cached from the first epoch on.

    lora     LoRA in the upper third of the blocks:     8 of 12 blocks are rows
    above    two narrow blocks above the whole decoder: 12 of 12 blocks are rows

Each is trained by one loop, with and without rows, in a process of its own, in turn. The decoder
has GPT-2's blocks and reads bytes; it is trained a little on one text first. What was stopped goes
on from its folder. docs/adapters-beside.md has a command and its figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipetransformer import attach

ADAPTERS, WAYS = ("lora", "above"), ("plain", "rows")
NUM_BYTES = 256
BOTTLENECK = 8
"""How many times narrower than the decoder the blocks above it are."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the decoder and results")
    parser.add_argument("--first_text", type=Path, required=True, help="SQuAD's json, or a text")
    parser.add_argument("--text", type=Path, required=True, help="GLUE's tsv, or a text")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384, help="768 is GPT-2 small's")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--first_steps", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache_dtype", default=None)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def refuse_others(asked: argparse.Namespace) -> None:
    """Raise a ValueError where the folder holds what was trained with other settings."""
    own = {n: str(value) for n, value in vars(asked).items() if n not in ("run", "repeats")}
    path: Path = asked.folder / "settings.json"
    held = json.loads(path.read_text()) if path.exists() else own
    if others := [f"{name} {held.get(name)}" for name in own if held.get(name) != own[name]]:
        raise ValueError(
            f"{asked.folder} was begun with {', '.join(others)}; ask for that, or give another "
            "--folder"
        )
    path.write_text(json.dumps(own))


def samples_of(path: Path, length: int, num: int) -> list[dict[str, Tensor]]:
    """Cut a text's first bytes into samples, (length,) int64.

    Raises:
        ValueError: the text is too short.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        articles = json.loads(text)["data"]
        text = "\n".join(part["context"] for one in articles for part in one["paragraphs"])
    elif path.suffix == ".tsv":
        text = "\n".join(line.split("\t")[0] for line in text.splitlines()[1:])
    held = text.encode()[: num * length]
    if len(held) < num * length:
        raise ValueError(f"{path} has {len(held)} bytes; {num} samples take {num * length}")
    ids = torch.frombuffer(bytearray(held), dtype=torch.uint8).view(num, length).long()
    return [{"input_ids": one} for one in ids]


def decoder(asked: argparse.Namespace) -> Any:
    """Build a decoder without dropout, the same weights on every call."""
    library: Any = transformers
    config = library.GPT2Config(
        vocab_size=NUM_BYTES, n_positions=asked.length, n_embd=asked.width, n_layer=asked.layers,
        n_head=asked.width // 64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return library.GPT2LMHeadModel(config)


def train_first(asked: argparse.Namespace) -> Path:
    """Train the decoder a little, once; return its weights' file."""
    path: Path = asked.folder / "decoder.pt"
    if path.exists():
        return path
    model, steps = decoder(asked), asked.first_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    samples = samples_of(asked.first_text, asked.length, steps * asked.batch_size)
    for batch in batches_of(samples, asked.batch_size):
        loss = step(model, batch, optimizer)
    print(f"the decoder's loss after {steps} steps is {loss:.3f} nats a byte", flush=True)
    torch.save(model.state_dict(), path)
    return path


class Above(nn.Module):
    """Correct what a frozen decoder returns by narrow blocks of its own kind."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        library: Any = transformers
        width, narrow = body.config.n_embd, body.config.n_embd // BOTTLENECK
        config = library.GPT2Config(
            n_embd=narrow, n_head=2, n_layer=2, n_positions=body.config.n_positions,
            vocab_size=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.body = body.requires_grad_(False)
        self.down, self.up = nn.Linear(width, narrow), nn.Linear(narrow, width)
        self.beside = library.GPT2Model(config)
        self.beside.wte.requires_grad_(False)  # It is given hidden states, and no words.
        # Nothing is corrected at first.
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.body.transformer(input_ids=input_ids, use_cache=False).last_hidden_state
        narrow = self.beside(inputs_embeds=self.down(hidden), use_cache=False).last_hidden_state
        return self.body.lm_head(hidden + self.up(narrow))


def adapted(name: str, model: Any) -> tuple[nn.Module, int]:
    """Return a model whose decoder is frozen, and how many blocks lie below its adapters."""
    torch.manual_seed(1)
    num_layers = model.config.n_layer
    if name == "above":
        return Above(model), num_layers
    import peft  # Takes seconds, and the other adapter needs none.

    depth = num_layers - num_layers // 3
    config = peft.LoraConfig(
        r=8, target_modules=["c_attn"], layers_to_transform=[*range(depth, num_layers)],
        layers_pattern="h", fan_in_fan_out=True,
    )  # fmt: skip
    return peft.get_peft_model(model, config), depth


def batches_of(samples: list[dict[str, Tensor]], batch_size: int) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(0)
    return DataLoader(samples, batch_size, shuffle=True, drop_last=True, generator=order)  # type: ignore[arg-type]


def step(model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Train on a batch; return its loss."""
    answer, ids = model(**batch), batch["input_ids"]
    logits = answer if isinstance(answer, Tensor) else answer.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run(asked: argparse.Namespace, name: str, way: str) -> dict[str, Any]:
    """Train adapters, and return losses, seconds of epochs, and the most memory taken."""
    body = decoder(asked)
    body.load_state_dict(torch.load(asked.folder / "decoder.pt", weights_only=True))
    model, depth = adapted(name, body)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    samples = samples_of(asked.text, asked.length, asked.samples)
    loader = batches_of(samples, asked.batch_size)
    losses: list[float] = []
    seconds, hits = [], []
    with attach(model, freeze=depth, cache_dtype=asked.cache_dtype) as cached:
        for _ in range(asked.epochs):
            start = time.perf_counter()
            batches: Iterator[Any] = cached.epoch(loader) if way == "rows" else iter(loader)
            losses += [step(model, batch, optimizer) for batch in batches]
            seconds.append(time.perf_counter() - start)
            hits.append(cached.stats.hits)
    return {
        "adapter": name, "way": way, "blocks": depth, "seconds": seconds, "losses": losses,
        "hits": hits, "trained": sum(p.numel() for p in trained),
        "most_mib": most_mib(),
    }  # fmt: skip


def most_mib() -> float:
    """Return the most memory that this process has held, its rows in shared memory included."""
    # `getrusage` would tell of the process that started this one, where that held more.
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(status["VmHWM"].split()[0]) / 1024


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each adapter; medians over repeats."""
    for name in ADAPTERS:
        plain, rows = ([r for r in found if (r["adapter"], r["way"]) == (name, w)] for w in WAYS)
        if not plain or not rows:
            continue
        plain_s = statistics.median(s for one in plain for s in one["seconds"])
        fill_s = statistics.median(one["seconds"][0] for one in rows)
        warm_s = statistics.median(s for one in rows for s in one["seconds"][1:])
        most = [statistics.median(one["most_mib"] for one in ones) for ones in (plain, rows)]
        pairs = zip(plain[0]["losses"], rows[0]["losses"], strict=True)
        gap = max(abs(mine - other) for mine, other in pairs)
        yield (
            f"{name}: {rows[0]['blocks']} blocks as rows, {rows[0]['trained']:,} weights trained; "
            f"an epoch takes {plain_s:.1f} s without rows, {fill_s:.1f} s filling, {warm_s:.1f} s "
            f"warm ({plain_s / warm_s:.2f} x); memory {most[0]:.0f} and {most[1]:.0f} MiB; losses "
            f"differ by at most {gap:.1e}, the last is {rows[0]['losses'][-1]:.3f}"
        )


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    torch.set_num_threads(1)
    if asked.run:
        # Of libraries that warn of their own code, and each time anew.
        warnings.simplefilter("ignore", FutureWarning)
        print(json.dumps(run(asked, *asked.run)))
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    refuse_others(asked)
    train_first(asked)
    results = asked.folder / "results.jsonl"
    found = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    again = [sys.executable, "-m", "experiments.adapters_above", *(given or sys.argv[1:])]
    # In turn, so that a busy machine slows all of them.
    plan = [(name, way) for _ in range(asked.repeats) for name in ADAPTERS for way in WAYS]
    for name, way in plan[len(found) :]:
        ended = subprocess.run(
            [*again, "--run", name, way], check=True, stdout=subprocess.PIPE, text=True
        )
        found.append(json.loads(ended.stdout.splitlines()[-1]))
        with results.open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
        print(
            f"{name} {way}: epochs of {[round(s, 1) for s in found[-1]['seconds']]} s", flush=True
        )
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()

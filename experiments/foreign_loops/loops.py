"""Loops that are written out: of courses, tutorials, examples and libraries' benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms.functional import to_tensor
from transformers import DataCollatorWithPadding, default_data_collator

from experiments.foreign_loops import tiny as t
from experiments.foreign_loops.runner import FREEZE, NUM_EPOCHS, NUM_SAMPLES, ForeignLoop, note
from pipetransformer import attach

BERT, VIT, CPU = "BertForSequenceClassification", "ViTForImageClassification", torch.device("cpu")
LLAMA, WHISPER, T5, CLIP = "LlamaForCausalLM", *t.BLOCKS
LossOf = Callable[[Any, Any], Any]


def over(
    model: Any,
    loader: Any,
    loss_of: LossOf,
    part: str = "",
    amp: bool = False,
    pools: bool = False,
) -> nn.Module:
    """Train as most loops do; they differ in how a batch becomes a loss.

    Moving averages of the weights are kept, and evaluated between epochs.

    Args:
        part: of the model, that is attached.
        amp: whether it computes in autocast, with a scaler.
        pools: whether it pools by the mask, and so reads nothing of padding.
    """
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    scaler, precision = torch.amp.GradScaler("cpu", enabled=amp), "bf16" if amp else None
    body = model.get_submodule(part)
    cached = attach(body, freeze=FREEZE, precision=precision, ignores_padding=pools)  # new
    for _ in range(NUM_EPOCHS):
        model.train()
        # was: for batch in loader:
        for batch in cached.epoch(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            model.zero_grad()
            averages.update_parameters(model)
        with torch.no_grad():
            for batch in DataLoader(loader.dataset, batch_size=8, collate_fn=loader.collate_fn):
                note(loss_of(averages.module.eval(), batch))
                note(loss_of(model.eval(), batch))
    return model


def no_trainer(model: Any, data: Any, collate: Any = default_data_collator) -> nn.Module:
    """Train as accelerate's examples, and those of transformers that need no Trainer."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
    loader, checks = t.loader_of(data, collate_fn=collate), DataLoader(data, 8, collate_fn=collate)
    model, optimizer, loader, checks, scheduler = accelerator.prepare(
        model, optimizer, loader, checks, scheduler
    )
    cached = attach(model, freeze=FREEZE)  # new
    for _ in range(NUM_EPOCHS):
        model.train()
        # was: for step, batch in enumerate(loader):
        for step, batch in enumerate(cached.epoch(loader)):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            note(step / len(loader))
        model.eval()
        for batch in checks:
            with torch.no_grad():
                found = model(**batch).logits.argmax(-1)
            found, labels = accelerator.gather_for_metrics((found, batch["labels"]))
            note((found == labels).sum())
    return model


def fabric_loop() -> nn.Module:
    fabric, own = Fabric(accelerator="cpu", devices=1), t.tiny(BERT)
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    loader: Any = fabric.setup_dataloaders(t.loader_of(t.padded()))
    cached = attach(own, freeze=FREEZE)  # new
    for _ in range(NUM_EPOCHS):
        # was: for batch in loader:
        for batch in cached.epoch(loader):
            optimizer.zero_grad()
            fabric.backward(model(**batch).loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
    return own


def evaluation() -> nn.Module:
    model, loader = t.tiny(BERT).eval(), t.loader_of(t.padded())
    cached = attach(model, freeze=FREEZE)  # new
    for _ in range(NUM_EPOCHS):
        # was: for batch in loader:
        for batch in cached.epoch(loader):
            with torch.no_grad():
                note(model(**batch).loss)
    return model


def by_function(model: Any, data: Any, train_epoch: Callable[..., None]) -> nn.Module:
    """Give the loader to a function that trains an epoch."""
    loader, optimizer = t.loader_of(data), torch.optim.SGD(model.parameters(), lr=0.1)
    cached = attach(model, freeze=FREEZE)  # new
    for _ in range(NUM_EPOCHS):
        # was: train_epoch(model, loader, optimizer)
        train_epoch(model, cached.epoch(loader), optimizer)
    return model


def valkov(model: Any, loader: Any, optimizer: Any) -> None:
    for one in loader:
        ids, mask, targets = (one[n] for n in ("input_ids", "attention_mask", "targets"))
        outputs = model(input_ids=ids.to(CPU), attention_mask=mask.to(CPU))
        note((outputs.argmax(dim=1) == targets.to(CPU)).sum())
        F.cross_entropy(outputs, targets.to(CPU)).backward()
        optimizer.step()
        optimizer.zero_grad()


def log_every(batches: Any, every: int) -> Iterator[Any]:
    for done, batch in enumerate(batches):
        yield batch
        if done % every == 0:
            print(f"{done} of {len(batches)}")


def torchvision(model: Any, loader: Any, optimizer: Any) -> None:
    for image, target in log_every(loader, 2):
        output = model(image.to(CPU))
        note((output.argmax(1) == target.to(CPU)).sum() / image.shape[0])
        optimizer.zero_grad()
        F.cross_entropy(output, target.to(CPU), label_smoothing=0.1).backward()
        optimizer.step()


def course(model: Any, batch: Any) -> Any:
    return model(**{name: entry.to(CPU) for name, entry in batch.items()}).loss


def mccormick(model: Any, batch: Any) -> Any:
    ids, mask, labels = batch[0].to(CPU), batch[1].to(CPU), batch[2].to(CPU)
    return model(ids, token_type_ids=None, attention_mask=mask, labels=labels).loss


def of_images(model: Any, batch: Any, scale: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    images, labels = batch[0].to(CPU), batch[1].to(CPU)
    return F.cross_entropy(model(scale(images)), labels)


def mixed(model: Any, batch: Any) -> Tensor:
    share, classes = torch.rand(()), F.one_hot(batch[1], 2).float()
    x, y = (share * one + (1 - share) * one.roll(1, 0) for one in (batch[0], classes))
    return F.cross_entropy(model(x), y)


def squeezed(model: Any, batch: Any) -> Tensor:
    ids, mask = (batch[name].squeeze(1) for name in ("input_ids", "attention_mask"))
    return F.cross_entropy(model(ids, mask).logits, batch["labels"])


def as_long(model: Any, batch: Any) -> Any:
    return model(**{name: entry.long() for name, entry in batch.items()}).loss


def distilled(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        aim = TEACHER(batch[0])
    return F.cross_entropy(model(batch[0]), batch[1]) + F.mse_loss(model(batch[0]), aim)


def of_columns(examples: list[Any], padding: Any) -> tuple[list[Any], Tensor]:
    """Tokenise each column by itself, as sentence-transformers does."""
    *columns, labels = zip(*examples, strict=True)
    features = [t.tokens([*one], padding=padding, return_tensors="pt") for one in columns]
    return features, torch.tensor(labels)


def pairs(padding: str) -> DataLoader[Any]:
    labels = torch.linspace(0, 1, NUM_SAMPLES).tolist()
    data = [*zip(t.sentences(), t.sentences(NUM_SAMPLES), labels, strict=True)]
    return t.loader_of(data, batch_size=8, collate_fn=partial(of_columns, padding=padding))


def cosine(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(torch.cosine_similarity(*map(model, batch[0])), batch[1])


def ranking(model: Any, batch: Any) -> Any:
    """Embed chunks without gradients; then again, with those of the loss of all."""
    chunks = [{n: e[at : at + 4] for n, e in one.items()} for one in batch[0] for at in (0, 4)]
    with torch.no_grad(), torch.random.fork_rng():
        found: Any = torch.cat([*map(model, chunks)])
    with torch.enable_grad():
        one, other = found.requires_grad_().chunk(2)
        F.cross_entropy(one @ other.T, torch.arange(8)).backward()
    return (torch.cat([*map(model, chunks)]) * found.grad).sum()


def compiled() -> tuple[Any, ...]:
    model = t.SmallGPT()
    called = torch.compile(model, backend="aot_eager")
    # Evaluations would be compiled, too, which takes most of the time.
    return of_tensors(model, lambda m, b: (called if m.training else m)(*b)[1], FIRST, NEXT)


def of_tensors(model: Any, loss_of: LossOf, *columns: Tensor) -> tuple[Any, ...]:
    return model, t.loader_of(TensorDataset(*columns)), loss_of


def of_dicts(model: Any, loss_of: LossOf = course, **entries: Any) -> tuple[Any, ...]:
    return model, t.loader_of(t.rows_of(entries)), loss_of


def clip(part: str) -> tuple[Any, ...]:
    model, images = t.tiny(CLIP, **t.TOWERS), {"pixel_values": t.IMAGES}
    own = of_dicts(model, lambda m, b: m(**b, return_loss=True).loss, **t.tokens(**ONE), **images)
    return *own, part


ONE: dict[str, Any] = {"padding": "max_length", "return_tensors": "pt"}
TEACHER = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
FIRST, NEXT = t.TEXT[:, :-1], t.TEXT[:, 1:]
SHIFTED = t.IMAGES, t.IMAGES.roll(2, 0), t.IMAGES.roll(1, 0), t.CLASSES.float()
INDEXED = [*zip(t.IMAGES, t.CLASSES, range(NUM_SAMPLES), strict=True)]
GROUPED = t.rows_of({"input_ids": FIRST, "labels": FIRST})
SPEECH: dict[str, Any] = {
    "input_features": t.IMAGES.flatten(1)[:, :128].view(-1, 8, 16),
    "labels": FIRST,
}
UNSQUEEZED = {name: entry.unsqueeze(1) for name, entry in t.tokens(**ONE).items()}
CHOICES: dict[str, Any] = {"input_ids": FIRST.unsqueeze(1).repeat(1, 3, 1), "labels": t.CLASSES}

LOOPS = (
    ForeignLoop("Hugging Face course", "cached", over,
                lambda: (t.tiny(BERT), t.loader_of(t.padded()), course)),
    ForeignLoop("McCormick's BERT tutorial", "cached", over,
                lambda: of_tensors(t.tiny(BERT), mccormick, *t.tokens(**ONE).values(), t.CLASSES)),
    ForeignLoop("Valkov's sentiments", "cached", by_function, lambda: (
        t.Classifier(), t.padded(review_text=t.sentences(), targets=t.CLASSES), valkov)),
    ForeignLoop("run_glue_no_trainer, complete_nlp_example", "cached", no_trainer,
                lambda: (t.tiny(BERT), t.ragged(), DataCollatorWithPadding(t.tokenizer()))),
    ForeignLoop("run_clm_no_trainer, Llama", "cached", no_trainer,
                lambda: (t.tiny(LLAMA), GROUPED)),
    ForeignLoop("run_clm_no_trainer, GPT-2", "uncached", no_trainer,
                lambda: (t.tiny("GPT2LMHeadModel"), GROUPED)),
    ForeignLoop("run_image_classification_no_trainer", "cached", no_trainer,
                lambda: (t.tiny(VIT), t.pictures(t.FIXED))),
    ForeignLoop("run_image_classification_no_trainer, crops", "uncached", no_trainer,
                lambda: (t.tiny(VIT), t.pictures(t.RANDOM))),
    ForeignLoop("texts squeezed in the loop", "refused", over, lambda: of_dicts(
        t.tiny(BERT), squeezed, **UNSQUEEZED, labels=t.CLASSES)),
    ForeignLoop("texts cast by .long()", "cached", over,
                lambda: (t.tiny(BERT), t.loader_of(t.padded()), as_long)),
    ForeignLoop("model.forward(...) called", "partly", over, lambda: (
        t.tiny(BERT), t.loader_of(t.padded()), lambda m, b: m.forward(**b).loss)),
    ForeignLoop("Lightning Fabric", "cached", fabric_loop),
    ForeignLoop("timm's ViT, a plain loop", "cached", over,
                lambda: of_tensors(t.vit(), of_images, t.IMAGES, t.CLASSES)),
    ForeignLoop("timm's ViT, normalised on the device", "refused", over, lambda: of_tensors(
        t.vit(), partial(of_images, scale=t.FIXED), t.IMAGES, t.CLASSES)),
    ForeignLoop("timm's ViT, MixUp on the device", "refused", over,
                lambda: of_tensors(t.vit(), mixed, t.IMAGES, t.CLASSES)),
    ForeignLoop("timm's ViT, cast to half and back", "refused", over, lambda: of_tensors(
        t.vit(), partial(of_images, scale=lambda x: x.half().float()), t.IMAGES, t.CLASSES)),
    ForeignLoop("timm's ViT, a teacher beside", "refused", over,
                lambda: of_tensors(t.vit(), distilled, t.IMAGES, t.CLASSES)),
    ForeignLoop("torchvision's train_one_epoch", "cached", by_function,
                lambda: (t.vit(), FakeData(16, (3, 8, 8), 2, to_tensor), torchvision)),
    ForeignLoop("(image, label, index), a worker", "cached", over, lambda: (
        t.vit(), t.loader_of(INDEXED, num_workers=1), of_images)),
    ForeignLoop("triplets, three forwards", "cached", over, lambda: of_tensors(
        t.vit(), lambda m, b: F.triplet_margin_loss(*map(m, b)), *SHIFTED[:3])),
    ForeignLoop("siamese, one forward", "refused", over, lambda: of_tensors(
        t.Siamese(), lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]), *SHIFTED[1:])),
    ForeignLoop("STS benchmark, padded by batch", "uncached", over,
                lambda: (t.Encoder(), pairs("longest"), cosine, "bert")),
    ForeignLoop("STS benchmark, padded by batch, ignores_padding", "cached", over,
                lambda: (t.Encoder(), pairs("longest"), cosine, "bert", False, True)),
    ForeignLoop("STS benchmark, one length", "cached", over,
                lambda: (t.Encoder(), pairs("max_length"), cosine, "bert")),
    ForeignLoop("STS benchmark, whole encoder attached", "refused", over,
                lambda: (t.Encoder(), pairs("max_length"), cosine)),
    ForeignLoop("ranking loss with cached gradients", "cached", over,
                lambda: (t.Encoder(), pairs("max_length"), ranking, "bert")),
    ForeignLoop("CLIP, return_loss=True", "refused", over, lambda: clip("")),
    ForeignLoop("CLIP, vision tower attached", "cached", over, lambda: clip("vision_model")),
    ForeignLoop("(logits, loss) of a small GPT", "cached", over,
                lambda: of_tensors(t.SmallGPT(), lambda m, b: m(*b)[1], FIRST, NEXT)),
    ForeignLoop("nanoGPT's batches by hand", "refused", over,
                lambda: (t.SmallGPT(), iter(t.TEXT), lambda m, b: m(b[:, :-1], b[:, 1:])[1])),
    ForeignLoop("Whisper, labels only", "cached", over,
                lambda: of_dicts(t.tiny(WHISPER), **SPEECH)),
    ForeignLoop("T5, labels only", "refused", over,
                lambda: of_dicts(t.tiny(T5), **t.tokens(**ONE), labels=NEXT)),
    ForeignLoop("multiple choice, (B, C, S)", "partly", over,
                lambda: of_dicts(t.tiny("BertForMultipleChoice"), **CHOICES)),
    ForeignLoop("evaluation only", "cached", evaluation),
    ForeignLoop("autocast in bf16, GradScaler", "cached", over,
                lambda: (t.tiny(BERT), t.loader_of(t.padded()), course, "", True)),
    ForeignLoop("torch.compile", "cached", over, compiled),
)  # fmt: skip

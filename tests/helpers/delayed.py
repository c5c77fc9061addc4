"""Train without flushes, and by the delayed gradients of the formulas."""

from __future__ import annotations

from functools import partial
from operator import le
from typing import Any

from torch import Tensor
from torch.func import functional_call

from autodp.sampler import EpochSampler
from autopipe.schedule import micro_batch_sizes
from autopipe.stashing import VERSION_RULES, StagePlace
from pipetransformer.model import take_state
from tests.helpers.plain_scenario import freeze_plainly
from tests.helpers.scenario import Outcome, Scenario, Shape, build_adamw, slow_start


def stream(shape: Shape, versions: str | None, **options: Any) -> Scenario:
    """Describe a run that decides between epochs alone, and clips nothing."""
    settings = {"freeze_interval_steps": None, "max_grad_norm": None, "weight_versions": versions}
    return Scenario({0: shape}, settings={**settings, **options.pop("settings", {})}, **options)


def delayed(scenario: Scenario) -> Outcome:
    """Train by hand: every micro-batch with the versions of the weights that its stages had."""
    layered, data, loss_fn = scenario.problem()
    rule = VERSION_RULES[scenario.settings["weight_versions"]]
    model, shape, size = layered.model, scenario.shapes[0], scenario.options["global_batch_size"]
    named = dict(model.named_parameters())
    optimizer = build_adamw(list(named.items()))
    sampler = EpochSampler(len(data), scenario.order(len(data)))
    per_epoch, losses, step = -(-len(data) // size), [], 0
    workers = scenario.settings.get("stage_workers", ())
    for epoch in range(scenario.options["epochs"]):
        num_frozen = scenario.num_frozen(step, epoch)
        freeze_plainly(layered, named, partial(le, num_frozen))
        stage_of = stages(layered, num_frozen, shape)
        # The last batch is smaller, and a stream of its own.
        for several in (range(per_epoch - 1), range(per_epoch - 1, per_epoch)):
            history: list[dict[str, Tensor]] = []
            number = 0
            for batch in several:
                history.append({name: p.detach().clone() for name, p in named.items()})
                ids = sampler.global_batch(epoch, batch * size, size)
                optimizer.zero_grad(set_to_none=True)
                total = 0.0
                sizes = micro_batch_sizes(len(ids), min(shape.micro_batches, len(ids)))
                for own in ids.split(sizes):
                    used = {}
                    for name, stage in stage_of.items():
                        length = max(stage_of.values()) + 1
                        turns = workers if len(workers) == length else ()
                        place = StagePlace(stage, length, len(sizes), turns)
                        used[name] = history[rule(place, number)][name].clone()
                        used[name].requires_grad_(named[name].requires_grad)
                    x, y = data[own]
                    loss = loss_fn(functional_call(model, used, (x,)), y) * (len(own) / len(ids))
                    loss.backward()
                    for name, leaf in used.items():
                        p = named[name]
                        if leaf.grad is not None:
                            p.grad = leaf.grad if p.grad is None else p.grad + leaf.grad
                    total += loss.item()
                    number += 1
                for group in optimizer.param_groups:
                    base = group.setdefault("initial_lr", group["lr"])
                    group["lr"] = base * slow_start(step, 0)
                optimizer.step()
                losses.append(total)
                step += 1
    return Outcome(losses, dict(model.state_dict()), take_state(optimizer, named))


def stages(layered: Any, num_frozen: int, shape: Shape) -> dict[str, int]:
    """Return each parameter's stage, the layers above the frozen ones shared out evenly."""
    first = layered.first_active(num_frozen)
    active = len(layered.sublayers) - first
    cuts = shape.cuts or [first + active * j // shape.length for j in range(1, shape.length)]
    return {
        name: sum(index >= cut for cut in cuts)
        for index in range(len(layered.sublayers))
        for name in layered.tensors(index)
    }

"""Name the scripts' options, spelled as transformers' where they mean the same."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import HfArgumentParser

from experiments.finetune.baselines import (
    BASELINES,
    FREEZING,
    KEEPS,
    OF_ONE,
    PLAIN,
    split_taken,
    takes,
    without_freeze,
)
from experiments.finetune.freezing import frozen_at, policy_of, refuse_rest
from freeze import POLICY_HELP
from pipetransformer import TrainConfig, named_schedule
from pipetransformer.processes import world_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def option(default: Any, text: str) -> Any:
    """Return a field with a default and a line of help."""
    return field(default=default, metadata={"help": text})


@dataclass
class RunOptions:
    """Hold what is trained how."""

    output_dir: str = field(metadata={"help": "where the results go; a new folder"})
    recipe: str | None = option(None, "a TOML file, or the name of one in experiments/recipes")
    num_train_epochs: int = option(3, "passes over the training set")
    max_steps: int | None = option(None, "of the run, which then may end within an epoch")
    global_batch_size: int = option(32, "samples of an update, over all processes")
    learning_rate: float = option(5e-5, "of AdamW, at its highest")
    lora_learning_rate: float | None = option(None, "of the rival lora; else 10 times it")
    lr_scheduler_type: str = option("linear", "as transformers names them")
    warmup_steps: float = option(0.1, "in which the learning rate rises; below 1 their share")
    weight_decay: float = option(0.01, "of weights, not of biases and norms")
    layer_decay: float | None = option(None, "factor on the learning rate a layer further down")
    max_grad_norm: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    label_smoothing_factor: float = option(0.0, "share of a target spread over all classes")
    seed: int = option(0, "of the new head, the order of samples and dropout")
    precision: Literal["float32", "bf16", "fp16"] = option("float32", "what layers compute in")
    freeze: str = option("none", POLICY_HELP)
    freeze_interval_steps: int | None = option(None, "between decisions; else one each epoch")
    freeze_interval_share: float | None = option(None, "of the run, between decisions")
    signals: list[str] = field(
        default_factory=list, metadata={"help": "measured beside what the policy asks for"}
    )
    replay: str | None = option(None, "a run's folder, whose freeze decisions are repeated")
    group_by_length: bool = option(False, "put texts of about equal lengths into a batch")
    cache: bool = option(True, "whether the frozen layers' activations are kept")
    cache_keep: bool = option(False, "leave them in --cache_folder for later runs")
    cache_folder: str | None = option(
        None, "where they are kept; this machine's memory by default"
    )
    processes: int = option(1, "to start on this machine; torchrun starts them itself")
    memory_limit_bytes: int | None = option(None, "modelled bytes of a device slot")
    pipeline_length: int | None = option(None, "stages; the planner's choice by default")
    max_replicas: int | None = option(None, "most pipelines side by side; others stay idle")
    micro_batches: int | None = option(None, "of a step; the planner's choice by default")
    plan: str = option("fastest", "what chooses pipelines: fastest, published or pipedream")
    schedule: str | None = option(None, "gpipe or 1f1b; the planner's choice by default")
    stage_workers: list[int] = field(
        default_factory=list, metadata={"help": "processes of each stage of one pipeline: 2 1"}
    )
    weight_versions: str | None = option(
        None, "no flushes: stashed, vertical_sync or double_buffered; with --max_grad_norm 0"
    )
    activation_checkpointing: Literal["auto", "true", "false"] = option(
        "auto", "whether the backward computes activations again"
    )
    compile: bool = option(False, "compile blocks with torch.compile")
    cuda_graph: bool = option(False, "launch a step on the only GPU as one CUDA graph")
    scale_batch: bool = option(False, "let the batch grow with the replicas, as published")
    dataloader_num_workers: int = option(0, "processes that read data, for each that trains")
    checkpoint_every_epochs: int = option(0, "0 saves none; a killed run goes on from one")
    baseline: str | None = option(None, f"a rival instead: {', '.join(BASELINES)}")
    budget_s: float | None = option(None, "for short: seconds of training")
    patience: int = option(1, "for early-stop: evaluations without improvement")
    static_layers: int = option(0, "for static: bottom layers that never train")
    plan_only: bool = option(False, "say what would be done, and do not train")
    smoke: bool = option(False, "a tiny model on tiny files of the task's format, made for it")
    evaluate_every_epochs: int = option(1, "and at the end; 0 at the end alone")

    @property
    def warmup(self) -> float:
        """Return a whole number of steps, or a share of the run."""
        return int(self.warmup_steps) if self.warmup_steps % 1 == 0 else self.warmup_steps

    def settings(self) -> dict[str, Any]:
        """Return the Trainer's settings, without those that come from the task."""
        checkpoint_every = 0 if self.plan_only else self.checkpoint_every_epochs
        named = {name: getattr(self, name) for name in _AS_THE_TRAINERS}
        return {
            **named,
            "epochs": self.num_train_epochs,
            "learning_rate_schedule": self.lr_scheduler_type,
            "max_grad_norm": self.max_grad_norm or None,
            "label_smoothing": self.label_smoothing_factor,
            "precision": None if self.precision == "float32" else self.precision,
            "cache_folder": self.cache_folder or TrainConfig.cache_folder,
            "stage_workers": tuple(self.stage_workers) or None,
            "activation_checkpointing": _CHECKPOINTING[self.activation_checkpointing],
            "num_workers": self.dataloader_num_workers,
            "folder": None if self.plan_only else self.output_dir,
            "checkpoint_every_epochs": checkpoint_every,
            "resume": "auto" if checkpoint_every else False,
            "evaluate_every_epochs": self.evaluate_every_epochs or self.num_train_epochs,
            "progress": not self.plan_only,
        }


_AS_THE_TRAINERS = (
    "max_steps", "global_batch_size", "warmup", "layer_decay", "seed", "group_by_length", "cache",
    "cache_keep", "memory_limit_bytes", "pipeline_length", "max_replicas", "micro_batches",
    "scale_batch", "plan", "schedule", "weight_versions", "compile", "cuda_graph",
    "freeze_interval_steps", "freeze_interval_share", "signals",
)  # fmt: skip
"""Options that the Trainer has under the same names."""
_CHECKPOINTING: Mapping[str, Any] = {"auto": "auto", "true": True, "false": False}


def parse(kinds: tuple[type[Any], ...], arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """Return the options, a recipe's where the command line has none of its own.

    Raises:
        ValueError: there is no such option.
        SystemExit: a value is not allowed.
    """
    accepted: Any = kinds
    parser = HfArgumentParser(accepted, allow_abbrev=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe")
    first.add_argument("--baseline")
    first.add_argument("--replay")
    named = first.parse_known_args(given)[0]
    if named.recipe is not None:
        known = {one.name for kind in kinds for one in fields(kind)}
        if unknown := sorted(read_recipe(named.recipe).keys() - known):
            raise ValueError(
                f"the recipe {named.recipe} names {unknown}; known are {sorted(known)}"
            )
        recipe: Sequence[str] = recipe_arguments(named.recipe)
        if named.replay is not None:
            recipe = without_freeze(recipe)
        taken, left = split_taken(recipe, named.baseline)
        if left:
            print(f"{named.baseline or 'ours'}: without the recipe's {' '.join(left)}")
        given = [*taken, *given]  # The last one counts.
    *options, unknown = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
    if unknown:
        raise ValueError(f"there is no {_described(unknown)}; --help names what there is")
    return tuple(options)


_INSTEAD: Mapping[str, str] = {
    "per_device_train_batch_size": "--global_batch_size is over all processes",
    "per_device_eval_batch_size": "evaluations take --global_batch_size",
    "gradient_accumulation_steps": "--global_batch_size is cut as memory wants it",
    "warmup_ratio": "--warmup_steps below 1 is a share",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "do_train": "it trains and evaluates",
    "do_eval": "it trains and evaluates",
    "do_predict": "predictions are written",
    "eval_strategy": "--evaluate_every_epochs",
    "save_strategy": "--checkpoint_every_epochs",
    "resume_from_checkpoint": "with --checkpoint_every_epochs a killed run goes on in its folder",
    "overwrite_output_dir": "give a new --output_dir",
    "train_file": "--data_dir is a folder with all files",
    "validation_file": "--data_dir is a folder with all files",
    "dataset_name": "bert has --task, vit --dataset",
    "train_dir": "--data is a folder with train/ and val/",
    "validation_dir": "--data is a folder with train/ and val/",
}
"""What is here in place of options of transformers' scripts."""


def _described(unknown: Sequence[str]) -> str:
    """Name unknown arguments, each with what is here instead."""
    names = {one: one.lstrip("-").split("=")[0].replace("-", "_") for one in unknown}
    instead = {one: f" ({_INSTEAD[name]})" for one, name in names.items() if name in _INSTEAD}
    return ", ".join(f"{one}{instead.get(one, '')}" for one in unknown)


def recipe_arguments(name: str) -> list[str]:
    """Return a recipe as a command line, whose values argparse checks."""
    recipe = read_recipe(name)
    several = {name: value for name, value in recipe.items() if isinstance(value, list)}
    one = [f"--{name}={value}" for name, value in recipe.items() if name not in several]
    return one + [str(part) for name, value in several.items() for part in (f"--{name}", *value)]


def read_recipe(name: str) -> dict[str, Any]:
    """Return a recipe's options.

    Raises:
        ValueError: there is no such recipe, or it is no TOML.
    """
    folder = Path(__file__).parents[1] / "recipes"
    path = Path(name) if Path(name).suffix else folder / f"{name}.toml"
    if not path.is_file():
        known = sorted(one.stem for one in folder.glob("*.toml"))
        raise ValueError(f"--recipe {name}: there is no {path}; give a file, or one of {known}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error


def check(options: RunOptions) -> None:
    """Raise a ValueError for what does not go together, or names nothing."""
    if options.replay is not None and options.freeze != "none":
        raise ValueError("--freeze and --replay both say what freezes; give one")
    _check_values(options)
    _check_baseline(options)
    if options.baseline not in PLAIN:
        TrainConfig(**options.settings())  # Raises as the Trainer would, before data are read.
    folder = Path(options.output_dir)
    if (folder / "summary.json").exists():
        raise ValueError(f"{folder} holds the results of another run; give a new --output_dir")


def check_least(options: Any, least: float, *names: str) -> None:
    """Raise a ValueError for numbers among options that are below the least, or NaN."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name} is {value}; give at least {least}")


def _check_values(options: RunOptions) -> None:
    """Refuse here what else would be refused behind the data, or not at all."""
    check_least(options, 1, "num_train_epochs", "max_steps", "global_batch_size", "patience")
    check_least(options, 1, "processes")
    check_least(options, 0, "max_grad_norm", "weight_decay", "warmup_steps", "static_layers")
    check_least(options, 0, "evaluate_every_epochs", "checkpoint_every_epochs")
    check_least(options, 0, "dataloader_num_workers")
    for name in ("learning_rate", "lora_learning_rate", "budget_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} is {value}; give a number above 0")
    if world_size() > 1 and options.processes not in (1, world_size()):
        raise ValueError(
            f"--processes is {options.processes}, torchrun started {world_size()}; leave it out"
        )
    if options.plan_only and options.scale_batch:
        raise ValueError("--plan_only plans for one global batch; leave --scale_batch out")
    named_schedule(options.lr_scheduler_type, warmup=options.warmup, learning_rate=1.0)
    policy_of(options.freeze, options.replay)


def _check_baseline(options: RunOptions) -> None:
    """Refuse what is no baseline, or lacks what it needs, or has what another one needs."""
    if options.baseline is not None and options.baseline not in BASELINES:
        raise ValueError(f"--baseline is {options.baseline!r}; choose one of {BASELINES}")
    if options.baseline == "short" and options.budget_s is None:
        raise ValueError("--baseline short needs --budget_s, the seconds that it may train")
    if options.baseline == "static" and not options.static_layers:
        raise ValueError("--baseline static needs --static_layers, of which none trains")
    _check_taken(options)
    freezes = options.freeze != "none" or options.replay is not None
    if options.baseline in FREEZING and not freezes:
        raise ValueError(f"--baseline {options.baseline} needs --freeze, or --replay RUN")
    if options.baseline in PLAIN:
        _check_plain(options, options.baseline)


def _check_taken(options: RunOptions) -> None:
    """Refuse what a rival would ignore."""
    for one in fields(options):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if getattr(options, one.name) != default and not takes(options.baseline, one.name):
            if one.name in OF_ONE:
                baseline = OF_ONE[one.name]
                raise ValueError(
                    f"--{one.name} is for --baseline {baseline}; leave it out, or give both"
                )
            raise ValueError(
                f"--{one.name} means nothing to --baseline {options.baseline}; leave it out"
            )


def _check_plain(options: RunOptions, baseline: str) -> None:
    """Refuse what a plain loop cannot do."""
    if options.label_smoothing_factor:
        raise ValueError("baselines train without label smoothing; leave it out")
    frozen_at(options.freeze, options.replay)
    repeated = options.replay or options.freeze.partition("replay:")[2]
    if repeated:
        refuse_rest(repeated)
    if baseline == KEEPS and max(options.processes, world_size()) > 1:
        raise ValueError(f"--baseline {KEEPS} keeps activations in one process alone")

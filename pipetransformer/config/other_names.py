"""Say what to give in place of the names that other trainers have for it.

docs/from-transformers.md has a table of TrainingArguments; a test holds the two together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

_OPTIMIZER = "optimizer=adamw(3e-5), or another factory; named_optimizer knows torch's and more"
_BATCH = "global_batch_size, the samples of an update over all processes"
_NO_ACCUMULATION = (
    "a larger global_batch_size: it is cut into micro-batches that fit, with no accumulation "
    "beside that"
)
_PRECISION = 'precision="bf16" or "fp16"'
_EVALUATE = "evaluate_every_epochs or evaluate_every_steps"
_SAVE = "checkpoint_every_epochs or checkpoint_every_steps, with folder"
_PADS = "collate_fn, which pads, and save_pretrained(folder, tokenizer)"
_LOGS = "callbacks=[TensorBoard()], or a Callback with on_log; records.jsonl in folder has all"
_HF = "nothing here: pipetransformer.hf.Trainer takes it"
_STARTS = "nothing here: torchrun --nproc-per-node, or launch, starts that many processes"

# An answer begins with the name of what to give, where there is such a thing.
_MEANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("num_train_epochs", "max_epochs", "num_epochs", "n_epochs", "nb_epochs"), "epochs"
    ),
    **dict.fromkeys(("num_steps", "num_training_steps", "total_steps", "steps"), "max_steps"),
    **dict.fromkeys(("batch_size", "train_batch_size", "auto_scale_batch_size"), _BATCH),
    "per_device_train_batch_size": f"{_BATCH}: it, times these",
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _NO_ACCUMULATION),
    "per_device_eval_batch_size": "eval_batch_size, over all processes: it, times these",
    **dict.fromkeys(
        ("learning_rate", "lr", "optim", "optim_args", "optimizers", "optimizer_cls_and_kwargs"),
        _OPTIMIZER,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "betas"), "optimizer=adamw(3e-5, betas=...)"),
    **dict.fromkeys(("adam_epsilon", "eps"), "optimizer=adamw(3e-5, eps=...)"),
    "weight_decay": "optimizer=adamw(3e-5, weight_decay=0.01)",
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule"),
        'learning_rate_schedule, such as "linear" or "cosine"',
    ),
    "lr_scheduler_kwargs": "learning_rate_schedule=named_schedule(NAME, ...)",
    **dict.fromkeys(
        ("warmup_steps", "warmup_ratio", "num_warmup_steps"),
        "warmup, steps or, as a float below 1, their share, with a learning_rate_schedule by name",
    ),
    **dict.fromkeys(
        ("gradient_clip_val", "clip_grad_norm", "grad_clip", "max_norm"), "max_grad_norm"
    ),
    "label_smoothing_factor": "label_smoothing",
    **dict.fromkeys(
        ("bf16", "fp16", "amp", "use_amp", "mixed_precision", "dtype", "torch_dtype"), _PRECISION
    ),
    "data_seed": "seed, or sample_order",
    "train_sampling_strategy": "sample_order or group_by_length",
    **dict.fromkeys(("shuffle", "sampler"), "sample_order, a function of the epoch"),
    "dataloader_num_workers": "num_workers",
    "dataloader_prefetch_factor": "prefetch_factor",
    "dataloader_pin_memory": "pin_memory",
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "eval_steps", "val_check_interval",
         "check_val_every_n_epoch"), _EVALUATE
    ),
    **dict.fromkeys(("save_strategy", "save_steps", "save_every"), _SAVE),
    "save_total_limit": "keep_checkpoints",
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path"), "resume=True or 'auto', with folder"),
    **dict.fromkeys(("output_dir", "default_root_dir", "save_dir", "logging_dir"), "folder"),
    "run_name": "label",
    **dict.fromkeys(("disable_tqdm", "enable_progress_bar"), "progress"),
    **dict.fromkeys(
        ("report_to", "logger", "loggers", "logging_steps", "log_every_n_steps"), _LOGS
    ),
    **dict.fromkeys(("data_collator", "collator"), "collate_fn"),
    **dict.fromkeys(("tokenizer", "processing_class"), _PADS),
    **dict.fromkeys(("use_cpu", "no_cuda", "accelerator"), "device"),
    **dict.fromkeys(("devices", "num_gpus", "num_processes", "num_nodes", "world_size"), _STARTS),
    "ddp_timeout": "setup_timeout_s",
    "early_stopping": "early_stopping_patience",
    **dict.fromkeys(("criterion", "loss", "compute_loss_func"), "loss_fn"),
    **dict.fromkeys(
        ("val_dataset", "valid_dataset", "validation_dataset", "test_dataset"), "eval_dataset"
    ),
    **dict.fromkeys(("args", "training_args", "model_init", "ignore_keys"), _HF),
    **dict.fromkeys(("freeze_policy", "policy"), "freeze"),
    **dict.fromkeys(("chunks", "num_micro_batches"), "micro_batches"),
    **dict.fromkeys(("num_stages", "pipeline_parallel_size"), "pipeline_length"),
}  # fmt: skip


def advice_on(unknown: Iterable[str], known: Sequence[str]) -> str:
    """Say what to give in place of unknown settings, of the known ones or beside them."""
    advice = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=2)
        if meant := _MEANT.get(name) or " or ".join(near):
            advice.append(f"for {name!r} give {meant}")
    return "; ".join([*advice, "help(pipetransformer.TrainConfig) lists all"])

"""Say what to give in place of the names that other trainers have for a setting.

docs/from-transformers.md has a table of TrainingArguments; a test holds the two together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

# Answer -> the names it is given for. An answer begins with a name of ours, if there is one.
_ANSWERS: Mapping[str, str] = {
    "epochs": "num_train_epochs max_epochs num_epochs n_epochs nb_epochs",
    "max_steps": "num_steps num_training_steps total_steps steps",
    "global_batch_size, the samples of an update over all processes":
        "batch_size train_batch_size auto_scale_batch_size",
    "global_batch_size, the samples of an update over all processes: it, times these":
        "per_device_train_batch_size",
    "a larger global_batch_size: it is cut into micro-batches that fit, with no accumulation "
    "beside that": "gradient_accumulation_steps accumulate_grad_batches",
    "eval_batch_size, over all processes: it, times these": "per_device_eval_batch_size",
    "optimizer=adamw(3e-5), or another factory; named_optimizer knows torch's and more":
        "learning_rate lr optim optim_args optimizers optimizer_cls_and_kwargs",
    "optimizer=adamw(3e-5, betas=...)": "adam_beta1 adam_beta2 betas",
    "optimizer=adamw(3e-5, eps=...)": "adam_epsilon eps",
    "optimizer=adamw(3e-5, weight_decay=0.01)": "weight_decay",
    'learning_rate_schedule, such as "linear" or "cosine"':
        "lr_scheduler_type lr_scheduler scheduler lr_schedule",
    "learning_rate_schedule=named_schedule(NAME, ...)": "lr_scheduler_kwargs",
    "warmup, steps or, as a float below 1, their share, with a learning_rate_schedule by name":
        "warmup_steps warmup_ratio num_warmup_steps",
    "activation_checkpointing": "gradient_checkpointing",
    "compile": "torch_compile",
    "compile_backend": "torch_compile_backend",
    "compile_mode": "torch_compile_mode",
    "max_grad_norm": "gradient_clip_val clip_grad_norm grad_clip max_norm",
    "label_smoothing": "label_smoothing_factor",
    'precision="bf16" or "fp16"': "bf16 fp16 amp use_amp mixed_precision dtype torch_dtype",
    "seed, or sample_order": "data_seed",
    "sample_order or group_by_length": "train_sampling_strategy",
    "sample_order, a function of the epoch": "shuffle sampler",
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "evaluate_every_epochs or evaluate_every_steps":
        "eval_strategy evaluation_strategy eval_steps val_check_interval check_val_every_n_epoch",
    "checkpoint_every_epochs or checkpoint_every_steps, with folder":
        "save_strategy save_steps save_every",
    "keep_checkpoints": "save_total_limit",
    "resume=True or 'auto', with folder": "resume_from_checkpoint ckpt_path",
    "folder": "output_dir default_root_dir save_dir logging_dir",
    "label": "run_name",
    "progress": "disable_tqdm enable_progress_bar",
    "folder, for TensorBoard and records.jsonl, or a Callback with on_log":
        "report_to logger loggers logging_steps log_every_n_steps",
    "collate_fn": "data_collator collator",
    "collate_fn, which pads, and save_pretrained(folder, tokenizer)": "tokenizer processing_class",
    "device": "use_cpu no_cuda accelerator",
    "nothing here: torchrun --nproc-per-node, or launch, starts that many processes":
        "devices num_gpus num_processes num_nodes world_size",
    "setup_timeout_s": "ddp_timeout",
    "early_stopping_patience": "early_stopping",
    "loss_fn": "criterion loss compute_loss_func",
    "eval_dataset": "val_dataset valid_dataset validation_dataset test_dataset",
    "nothing here: pipetransformer.hf.Trainer takes it":
        "args training_args model_init ignore_keys",
    "freeze": "freeze_policy policy",
    "micro_batches": "chunks num_micro_batches",
    "pipeline_length": "num_stages pipeline_parallel_size",
}  # fmt: skip

_BESIDE = ("freeze", "loss_fn", "optimizer", "train_dataset", "eval_dataset")
"""Arguments of the Trainer that are no settings."""

_MEANT = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}


def advice_on(unknown: Iterable[str], known: Sequence[str]) -> str:
    """Say what to give in place of unknown settings, from the answers or from similar names."""
    advice = []
    for name in unknown:
        near = difflib.get_close_matches(name, (*known, *_BESIDE), n=2)
        if meant := _MEANT.get(name) or " or ".join(near):
            advice.append(f"for {name!r} give {meant}")
    return "; ".join([*advice, "help(pipetransformer.TrainConfig) lists all"])

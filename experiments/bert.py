"""Fine-tune a BERT on a task of GLUE or on SQuAD: elastically, or as one of its rivals.

    python -m experiments.bert --task sst2 --model_name_or_path bert-base-uncased \\
        --data_dir GLUE/SST-2 --freeze schedule:0,4,8 --output_dir runs/sst2
    torchrun --nproc-per-node=4 -m experiments.bert ...
    python -m experiments.bert --task squad --smoke --output_dir runs/smoke

Without --data_dir the data set is downloaded from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.finetune.options import RunOptions, check_least, option
from experiments.finetune.script import run
from experiments.finetune.usage import start
from experiments.tasks.glue import TASKS, glue_workload
from experiments.tasks.questions import questions_workload
from experiments.tasks.smoke import make_glue, make_squad, make_text_model, smoke_folder
from experiments.tasks.text_model import TextSource
from experiments.tasks.workload import Workload

_SQUADS = ("squad", "squad_v2")


@dataclass
class TextOptions:
    """Hold what is fine-tuned on which texts."""

    task: str = field(
        metadata={
            "help": f"squad, squad_v2, or of GLUE: {', '.join(TASKS)}",
            "aliases": ["--task_name"],
        }
    )
    model_name_or_path: str | None = option(None, "a folder, or a name of the hub")
    data_dir: str | None = option(
        None, "GLUE's folder of the task, or one with train*.json and dev*.json of SQuAD"
    )
    max_seq_length: int = option(128, "tokens; SQuAD's windows usually have 384")
    doc_stride: int = option(64, "for squad: tokens that two windows of a text share")
    n_best_size: int = option(20, "for squad: candidates of a question that are written")
    max_answer_length: int = option(30, "for squad: tokens of the longest answer")
    max_train_samples: int | None = option(None, "sentences, or questions; all by default")
    max_eval_samples: int | None = option(None, "of each evaluation set")
    held_out_samples: int = option(
        0,
        "of GLUE's training file, behind those that train, that are judged at the end, too",
    )

    def check(self, options: RunOptions) -> None:
        """Refuse what is no task, what it would ignore, and numbers that mean nothing."""
        check_least(self, 1, "n_best_size", "max_answer_length")
        check_least(self, 1, "max_train_samples", "max_eval_samples")
        check_least(self, 0, "doc_stride", "held_out_samples")
        check_least(self, 3, "max_seq_length")
        if self.task not in (*TASKS, *_SQUADS):
            known = ", ".join((*_SQUADS, *TASKS))
            raise ValueError(f"--task is {self.task!r}; choose one of {known}")
        if self.model_name_or_path is None and not options.smoke:
            raise ValueError("--model_name_or_path is missing; give a folder or a name of the hub")
        if self.task in _SQUADS:
            if self.held_out_samples:
                raise ValueError("--held_out_samples is for tasks of GLUE; leave it out")
            if self.doc_stride > self.max_seq_length // 2:
                raise ValueError(
                    f"--doc_stride is {self.doc_stride}: windows of {self.max_seq_length} tokens "
                    "would hardly advance; give at most half of --max_seq_length"
                )
            return
        for name in ("doc_stride", "n_best_size", "max_answer_length"):
            if getattr(self, name) != getattr(TextOptions, name):
                raise ValueError(f"--{name} is for --task squad; leave it out")


def workload_of(run_options: RunOptions, options: TextOptions) -> Workload:
    """Read what is fine-tuned.

    Raises:
        ValueError: the model is too short, or the data are not the task's.
    """
    model, data = options.model_name_or_path, options.data_dir
    if run_options.smoke:
        folder = smoke_folder(run_options.output_dir)
        model = str(make_text_model(folder / "model"))
        data = str(folder / "data")
        if options.task in _SQUADS:
            make_squad(Path(data), unanswerable=options.task == "squad_v2")
        else:
            make_glue(options.task, Path(data))
    assert model is not None  # As `check` has seen.
    source = TextSource(
        model,
        data,
        options.max_seq_length,
        options.max_train_samples,
        options.max_eval_samples,
        run_options.seed,
        options.held_out_samples,
    )
    if options.task in _SQUADS:
        return questions_workload(
            source,
            stride=options.doc_stride,
            num_best=options.n_best_size,
            max_answer_tokens=options.max_answer_length,
            unanswerable=options.task == "squad_v2",
        )
    return glue_workload(options.task, source)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune as asked."""
    run(TextOptions, workload_of, arguments)


if __name__ == "__main__":
    start(main)

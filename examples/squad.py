"""Fine-tune BERT to find answers, by transformers' own Trainer: a callback freezes and caches.

python examples/squad.py --train_file train-v1.1.json --validation_file dev-v1.1.json
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForQuestionAnswering as Answerer
from transformers import AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed

from pipetransformer import FreezeCallback


def read(path: str, tokenizer: Any, length: int) -> list[dict[str, Any]]:
    """Read a file of SQuAD 1.1: tokens, and the places of each answer's first and last one."""
    whole = {"max_length": length, "padding": "max_length", "truncation": "only_second"}
    articles, rows = json.loads(Path(path).read_text(encoding="utf-8"))["data"], []
    for text in (text for article in articles for text in article["paragraphs"]):
        for asked in text["qas"]:
            row = tokenizer(asked["question"], text["context"], **whole)
            answer = asked["answers"][0]
            first, last = answer["answer_start"], answer["answer_start"] + len(answer["text"]) - 1
            ends = [row.char_to_token(place, sequence_index=1) for place in (first, last)]
            start, end = (0, 0) if None in ends else ends  # The answer may be cut off.
            rows.append({**row, "start_positions": start, "end_positions": end})
    return rows


def exact(found: Any) -> dict[str, float]:
    """Return the share of questions of which both ends of the answer are right."""
    start, end = (scores.argmax(-1) == right for scores, right in zip(*found, strict=True))
    return {"exact": float((start & end).mean())}


def main(arguments: list[str] | None = None) -> Trainer:
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    parser.add_argument("--model_name_or_path", default="bert-base-uncased")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--max_seq_length", type=int, default=384)
    parser.add_argument("--freeze", default="schedule:0,4", help="blocks by epoch, or a policy")
    training, args = parser.parse_args_into_dataclasses(arguments)
    set_seed(training.seed)  # of the new head
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    trainer = Trainer(
        Answerer.from_pretrained(args.model_name_or_path), training, compute_metrics=exact,
        train_dataset=read(args.train_file, tokenizer, args.max_seq_length),
        eval_dataset=read(args.validation_file, tokenizer, args.max_seq_length),
        callbacks=[FreezeCallback(args.freeze)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())
    return trainer


if __name__ == "__main__":
    main()

"""Train Whisper's decoder in transformers' Trainer; its frozen encoder hears each sound once.

    python examples/speech.py

Model and data are small and made here. Have `build` and `samples` return yours: the rest stays.
"""

import argparse
from typing import Any

import torch
import transformers as hf

from pipetransformer import FreezeCallback


def build() -> Any:
    hf.set_seed(0)  # The same weights, and the same order of samples, in both trainings.
    size = {"d_model": 128, "encoder_layers": 6, "decoder_layers": 1, "max_source_positions": 100}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig.from_dict(size | heads | ids)
    model = hf.WhisperForConditionalGeneration(config)
    model.freeze_encoder()
    return model


def samples(num: int) -> list[dict[str, Any]]:
    """Make sounds of four tones in two seconds, and their names to learn."""
    features, rows = hf.WhisperFeatureExtractor(chunk_length=2), []
    seconds = torch.arange(8000) / 16000
    for tones in torch.randint(8, (num, 4)):
        sound = (6.28 * 300 * (1 + tones[:, None]) * seconds).sin().flatten().numpy()
        heard = features(sound, sampling_rate=16000)["input_features"][0]
        rows.append({"input_features": heard, "labels": (3 + tones).tolist()})
    return rows


def train(model: Any, data: Any, *callbacks: Any) -> dict[str, torch.Tensor]:
    settings = hf.Seq2SeqTrainingArguments(
        "runs/speech", num_train_epochs=4, per_device_train_batch_size=16, learning_rate=1e-3,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Seq2SeqTrainer(model, settings, train_dataset=data, callbacks=[*callbacks])
    print(trainer.train())
    return model.state_dict()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_samples", type=int, default=128)
    data = samples(parser.parse_args(arguments).num_samples)
    plain, rows = train(build(), data), FreezeCallback(parts=["model.encoder"])
    cached = train(build(), data, rows)
    change = max((cached[name] - one).abs().max() for name, one in plain.items())
    print(f"{rows.stats.hits} sounds' rows read in 4 epochs; weights differ by {change:.1e}")


if __name__ == "__main__":
    main()

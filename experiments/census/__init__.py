"""Try every Transformer of transformers and timm, tiny and random, with this Trainer."""

"""Put what the check needs of real data into one folder that travels."""

from __future__ import annotations

from pathlib import Path

MOST_BYTES = 56_000_000
NUM_SENTENCES = 4_000
VIT, IMAGES, SENTENCES, VOCABULARY = "vit_s14.safetensors", "images.npz", "sst2.tsv", "vocab.txt"
SOURCES = {
    VIT: "vit-small-patch14/model.safetensors",
    IMAGES: "cifar10/cifar10_u8_2000_500.npz",
    SENTENCES: "glue/SST-2/train.tsv",
    VOCABULARY: "bert-base-uncased/vocab.txt",
}


def pack(source: Path, folder: Path) -> dict[str, int]:
    """Fill a folder from that of the data sets, with the first of the sentences.

    MiniLM's weights, 90 MB in float32, have no room: random ones of its shape take as long.

    Returns:
        the bytes of each file.
    Raises:
        ValueError: a file is missing, or all together have more than MOST_BYTES.
    """
    if missing := [path for path in SOURCES.values() if not (source / path).is_file()]:
        raise ValueError(f"{source} lacks {missing}; give --source, the folder of the data sets")
    packed = {name: (source / path).read_bytes() for name, path in SOURCES.items()}
    lines = packed[SENTENCES].splitlines(keepends=True)  # A header comes first.
    packed[SENTENCES] = b"".join(lines[: NUM_SENTENCES + 1])
    sizes = {name: len(data) for name, data in packed.items()}
    if sum(sizes.values()) > MOST_BYTES:
        raise ValueError(f"{sizes} bytes are {sum(sizes.values())}; at most {MOST_BYTES} may be")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in packed.items():
        (folder / name).write_bytes(data)
    return sizes

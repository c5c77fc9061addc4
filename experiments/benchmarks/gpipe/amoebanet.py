"""Build AmoebaNet-D as a sequence of cells, each of which takes the outputs of the two before it.

    stem, R, R, N x L/3, R, N x L/3, R, N x L/3, classifier        24 layers for L = 18

N is a normal cell, R a reduction cell (half the resolution, twice the channels). What flows from
cell to cell is a pair: the last cell's output and the output of the cell before it.

A cell numbers its states: 0 is the last cell's output and 1 the one before, both brought to the
cell's channels; each of its five nodes adds two operations on earlier states and becomes the next
state. The output concatenates the states that the cell names.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Genotype:
    """Describe a kind of cell.

    Args:
        nodes: for each node its two (operation, state) pairs; the nodes are states 2, 3, ...
        output: the states that are concatenated.
        reduces: whether operations on states 0 and 1 have stride 2.
    """

    nodes: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    output: tuple[int, ...]
    reduces: bool


NORMAL = Genotype(
    nodes=(
        (("conv_1x1", 1), ("max_pool_3x3", 1)),
        (("identity", 1), ("conv_1x7_7x1", 0)),
        (("conv_1x1", 0), ("conv_1x7_7x1", 0)),
        (("max_pool_3x3", 2), ("identity", 2)),
        (("avg_pool_3x3", 1), ("conv_1x1", 5)),
    ),
    output=(0, 3, 4, 6),
    reduces=False,
)
REDUCTION = Genotype(
    nodes=(
        (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
        (("identity", 2), ("conv_3x3", 1)),
        (("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
        (("identity", 3), ("max_pool_2x2", 1)),
        (("avg_pool_3x3", 2), ("conv_1x1", 3)),
    ),
    output=(4, 5, 6),
    reduces=True,
)


def convolution(
    in_channels: int, out_channels: int, size: tuple[int, int] = (1, 1), *, stride: int = 1
) -> nn.Sequential:
    """Build ReLU, convolution and batch norm; the resolution shrinks by the stride alone."""
    padding = (size[0] // 2, size[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def narrow(channels: int, sizes: list[tuple[int, int]], *, stride: int) -> nn.Sequential:
    """Build convolutions between two of 1x1, on a quarter of the channels; the first strides."""
    inner = channels // 4
    middle = [convolution(inner, inner, size) for size in sizes[1:]]
    return nn.Sequential(
        convolution(channels, inner),
        convolution(inner, inner, sizes[0], stride=stride),
        *middle,
        convolution(inner, channels),
    )


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """Build a genotype's operation on so many channels.

    Raises:
        ValueError: the name is unknown, or an identity shall change the resolution.
    """
    if name == "identity" and stride == 1:
        return nn.Identity()
    if name == "max_pool_2x2":
        return nn.MaxPool2d(2, stride=stride)
    if name == "max_pool_3x3":
        return nn.MaxPool2d(3, stride=stride, padding=1)
    if name == "avg_pool_3x3":
        return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
    if name == "conv_1x1":
        return convolution(channels, channels, stride=stride)
    if name == "conv_3x3":
        return narrow(channels, [(3, 3)], stride=stride)
    if name == "conv_1x7_7x1" and stride == 1:
        return narrow(channels, [(1, 7), (7, 1)], stride=stride)
    raise ValueError(f"a cell cannot have the operation {name!r} with stride {stride}")


class HalveResolution(nn.Module):
    """Halve the resolution by two 1x1 convolutions, the second shifted by one pixel."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.even = nn.Conv2d(in_channels, half, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels - half, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, out_channels, ceil(H / 2), ceil(W / 2))."""
        input = input.relu()
        shifted = nn.functional.pad(input[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat((self.even(input), self.odd(shifted)), dim=1))


class Stem(nn.Module):
    """Convolve the images once; both states of the first cell are the result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, input: Tensor) -> Pair:
        """Return two times (B, channels, H / 2, W / 2) of the (B, 3, H, W) images."""
        output = self.norm(self.convolution(input))
        return output, output


class Cell(nn.Module):
    """Run a genotype's graph.

    Args:
        genotype: which operations and how they connect.
        last: channels of the last cell's output.
        before: channels of the output of the cell before it.
        channels: of every state of this cell.
        shrink_before: whether the older output has twice the resolution of the last.
    """

    def __init__(
        self, genotype: Genotype, last: int, before: int, *, channels: int, shrink_before: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.out_channels = channels * len(genotype.output)
        self.reduce_last = convolution(last, channels)
        shrink = HalveResolution if shrink_before else convolution
        self.reduce_before = shrink(before, channels)
        self.operations = nn.ModuleList(
            operation(name, channels, 2 if genotype.reduces and state < 2 else 1)
            for node in genotype.nodes
            for name, state in node
        )

    def forward(self, input: Pair) -> Pair:
        """Return this cell's output and, unchanged, the last cell's."""
        last, before = input
        states = [self.reduce_last(last), self.reduce_before(before)]
        for index, ((_, left), (_, right)) in enumerate(self.genotype.nodes):
            first, second = self.operations[2 * index], self.operations[2 * index + 1]
            states.append(first(states[left]) + second(states[right]))
        return torch.cat([states[state] for state in self.genotype.output], dim=1), last


class Classifier(nn.Module):
    """Average over the image and classify."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, input: Pair) -> Tensor:
        """Return (B, num_classes) scores."""
        return self.linear(input[0].mean(dim=(2, 3)))


def amoebanet_d(
    num_normal_cells: int, num_filters: int, *, num_classes: int = 1000
) -> nn.Sequential:
    """Build AmoebaNet-D (L, D): L = num_normal_cells, D = num_filters.

    Args:
        num_normal_cells: a multiple of 3; the model has 6 layers more.
        num_filters: a multiple of 8; channels of the first third of the normal cells.
    Returns:
        a model from (B, 3, H, W) to (B, num_classes); H and W multiples of 32.
    Raises:
        ValueError: an argument out of its range.
    Source: Real et al. 2019 (search space, stem and reduction cells) and Huang et al. 2019, table
        1 (L and D). Neither prints D's cells: they are those its authors submitted to DAWNBench
        (github.com/tensorflow/tpu, issue 130, confirms the states that a normal cell's output
        concatenates). The published parameter counts, all of which come out, settle the
        convolutions and their quarter of the channels; pools and identities have none to count.
    """
    if num_normal_cells < 3 or num_normal_cells % 3:
        raise ValueError(f"num_normal_cells is {num_normal_cells}; give a multiple of 3")
    if num_filters < 8 or num_filters % 8:
        raise ValueError(f"num_filters is {num_filters}; give a multiple of 8")
    channels = num_filters // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(channels))
    third = num_normal_cells // 3 * "N"
    last = before = channels
    after_reduction = False
    for index, kind in enumerate(f"RR{third}R{third}R{third}"):
        genotype = REDUCTION if kind == "R" else NORMAL
        channels *= 2 if genotype.reduces else 1
        cell = Cell(genotype, last, before, channels=channels, shrink_before=after_reduction)
        layers[f"cell{index}"] = cell
        last, before = cell.out_channels, last
        after_reduction = genotype.reduces
    layers["classifier"] = Classifier(last, num_classes)
    return nn.Sequential(layers)

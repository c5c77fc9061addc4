"""Write the modules that odd models consist of; `odd_kinds` gives each kind a name.

Between layers goes a hidden state of LENGTH positions and WIDTH features a sample. No parameter
has a gradient that is zero but for rounding (such as a shift of all features, which the norms
above take off again): optimizers that divide by it, or look at its sign, make numbers of noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH, NUM_CLASSES, NUM_TOKENS = 4, 8, 3, 11

Inner = Callable[[nn.Module, Tensor], Tensor]


def mlp() -> nn.Sequential:
    """Build the ordinary part that most kinds vary."""
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)
    )


def plainly(block: nn.Module, hidden: Tensor) -> Tensor:
    """Call a block."""
    return block(hidden)


def kept(block: nn.Module, hidden: Tensor) -> Tensor:
    """Call a block in a checkpoint."""
    return checkpoint(block, hidden, use_reentrant=False)


def kept_by_reentering(block: nn.Module, hidden: Tensor) -> Tensor:
    """Call a block in a checkpoint whose backward runs a backward of its own."""
    return checkpoint(block, hidden, use_reentrant=True)


class Residual(nn.Module):
    """Add what a block makes of the hidden state, so many times with the same weights."""

    def __init__(self, block: nn.Module, *, times: int = 1, call: Inner = plainly) -> None:
        super().__init__()
        self.block, self.times, self.call = block, times, call

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(self.times):
            hidden = hidden + 0.5 * self.call(self.block, hidden)
        return hidden


class ByChannel(nn.Module):
    """Run a block on (N, WIDTH, LENGTH)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden.transpose(1, 2)).transpose(1, 2)


class OnImages(nn.Module):
    """Run a block on (N, WIDTH, 2, 2)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        images = hidden.transpose(1, 2).unflatten(2, (2, 2))
        return self.block(images).flatten(2).transpose(1, 2)


def channels_last() -> nn.Module:
    """Build a convolution whose weights lie in memory as channels_last."""
    convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    block = nn.Sequential(convolution, nn.GELU()).to(memory_format=torch.channels_last)
    return Residual(OnImages(block))


class Constants(nn.Module):
    """Hold buffers that never change: saved, not saved, of whole numbers, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(LENGTH, 1), persistent=False)
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("nothing", None)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.linear(hidden * self.scale + self.shift)
        return hidden + 0.5 * mixed[..., self.order]


class Counting(nn.Module):
    """Count forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return hidden + self.block(hidden)


class Running(nn.Module):
    """Take off the mean of what was seen in training, kept in a buffer that is put anew."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * hidden.detach().mean(dim=(0, 1))
        return hidden + self.block(hidden - self.seen)


class Scaled(nn.Module):
    """Scale by a number that is an attribute, and may fall with every forward."""

    def __init__(self, *, rate: float) -> None:
        super().__init__()
        self.block = mlp()
        self.scale, self.rate = 1.5, rate

    def forward(self, hidden: Tensor) -> Tensor:
        self.scale *= self.rate
        return hidden + self.scale * self.block(hidden)


class Strided(nn.Module):
    """Hold parameters that are not contiguous in memory."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        if dense:
            self.first = nn.Parameter(0.3 * torch.randn(12, WIDTH).t())
            self.second = nn.Parameter(0.3 * torch.randn(2, 4, 6).permute(2, 0, 1))
            # A dimension of one value may have any stride.
            self.gain = nn.Parameter(torch.rand(WIDTH).as_strided((1, WIDTH), (0, 1)))
        else:
            self.first = nn.Parameter(0.3 * torch.randn(WIDTH, 24)[:, ::2])
            self.second = nn.Parameter(0.3 * torch.randn(8, 2, 4)[2:])
            self.gain = nn.Parameter(torch.rand(3 * WIDTH)[1::3][None])

    def forward(self, hidden: Tensor) -> Tensor:
        inner = nn.functional.gelu(hidden @ self.first)
        mixed = torch.einsum("nlij,iab->nlajb", inner.unflatten(2, (6, 2)), self.second)
        return hidden + self.gain * mixed.sum(-2).flatten(2)


class Gain(nn.Module):
    """Scale by a parameter without dimensions; hold others in lists and under names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shifts = nn.ParameterList([torch.randn(WIDTH), torch.randn(LENGTH, WIDTH)])
        self.scales = nn.ParameterDict({"a": torch.rand(WIDTH)})

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.block(hidden * self.scales["a"] + self.shifts[0])
        return hidden + self.gain * inner + self.shifts[1]


class Unused(nn.Module):
    """Hold a parameter that no forward reads, and one that is read without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp()
        self.never = nn.Parameter(torch.randn(WIDTH))
        self.unasked = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.block(hidden) * self.unasked.detach()


class Routed(nn.Module):
    """Send the few samples that begin with a large value through an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = mlp()

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden[:, 0, 0] > 0.8
        if not chosen.any():
            return hidden
        return torch.where(chosen[:, None, None], hidden + self.expert(hidden), hidden)


class TiedWithin(nn.Module):
    """Use one parameter under two names, and one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.there.weight
        self.again = self.there

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.3 * self.back(torch.tanh(self.there(self.again(hidden))))


class TiedAcross(nn.Module):
    """Use a weight of the head, which `tie` puts here."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, NUM_CLASSES, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.3 * torch.tanh(self.linear(hidden)) @ self.linear.weight


class SameMemory(nn.Module):
    """Hold two parameters that lie in one memory, and so are tied where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight.data = self.there.weight.data

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.3 * self.back(torch.tanh(self.there(hidden)))


class SharedTable(nn.Module):
    """Use a constant buffer that the head holds, too; `tie` puts it there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.rand(LENGTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.5 * self.linear(hidden * self.table)


class Spectral(nn.Module):
    """Scale frequencies by complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.complex128))

    def forward(self, hidden: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(hidden, dim=1) * self.scale
        return hidden + 0.3 * torch.fft.irfft(frequencies, n=LENGTH, dim=1)


class Recurrent(nn.Module):
    """Run a GRU, which also keeps its parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gru(hidden)[0]


class Attention(nn.Module):
    """Attend; without biases, as a key's has a gradient of zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]


def spread(hidden: Tensor) -> Tensor:
    """Return the same values with other strides."""
    return hidden.transpose(0, 2).contiguous().transpose(0, 2)


class Patches(nn.Module):
    """Cut images (N, 3, 4, 4) into patches by a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, WIDTH, 2, stride=2).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images).flatten(2).transpose(1, 2)


class Head(nn.Module):
    """Classify the mean over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden).mean(dim=1))

"""A loss that is joined from parts is torch's own on the whole batch; one that is not is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.loss import Loss, known_loss, mean_of
from pipetransformer.stage.loss_probe import SplitProbe

NUM_SAMPLES, NUM_CLASSES = 12, 5
CLASS_WEIGHTS = torch.tensor([0.02, 0.3, 1.7, 0.0, 4.0], dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64)

# Whole, evenly, one by one; and the first two samples, which are ignored, alone or together.
SPLITS = [(12,), (6, 6), (1,) * 12, (1, 1, 10), (2, 10)]


@dataclass(frozen=True)
class Case:
    """Name a loss of torch's and what it is given.

    Args:
        loss_fn: as a user gives it.
        output: makes outputs.
        target: makes targets.
    """

    loss_fn: Callable[..., Tensor]
    output: Callable[[], Tensor]
    target: Callable[[], Tensor]


def real(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(NUM_SAMPLES, *shape, dtype=torch.float64)


def unit(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(NUM_SAMPLES, *shape, dtype=torch.float64)


def signs(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 2, (NUM_SAMPLES, *shape)).double() * 2 - 1


def log_shares(*shape: int) -> Callable[[], Tensor]:
    return lambda: real(*shape)().log_softmax(1)


def shares(*shape: int) -> Callable[[], Tensor]:
    return lambda: real(*shape)().softmax(1)


def classes(*shape: int, ignore: int | None = None) -> Callable[[], Tensor]:
    """Make class indices, those of the first two samples and some more ignored."""

    def make() -> Tensor:
        target = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, *shape))
        if ignore is not None:
            target[torch.rand(target.shape) < 0.3] = ignore
            target[:2] = ignore
        return target

    return make


def label_sets() -> Tensor:
    """Make lists of labels that end with -1."""
    target = torch.full((NUM_SAMPLES, NUM_CLASSES), -1)
    for row in target:
        size = int(torch.randint(0, NUM_CLASSES, ()))
        row[:size] = torch.randperm(NUM_CLASSES)[:size]
    return target


def class_cases() -> Iterator[tuple[str, Case]]:
    """Combine what a loss of classes may be told."""
    for weight in (None, CLASS_WEIGHTS):
        for ignore in (-100, 1):
            for shape in ((), (3,), (2, 3)):
                told = {"weight": weight, "ignore_index": ignore}
                name = f"{weight is not None}-{ignore}-{shape}"
                target = classes(*shape, ignore=ignore)
                for smoothing in (0.0, 0.1):
                    yield (
                        f"cross-entropy-{name}-{smoothing}",
                        Case(
                            nn.CrossEntropyLoss(**told, label_smoothing=smoothing),
                            real(NUM_CLASSES, *shape),
                            target,
                        ),
                    )
                nll = Case(nn.NLLLoss(**told), log_shares(NUM_CLASSES, *shape), target)
                yield f"nll-{name}", nll
        for smoothing in (0.0, 0.1):
            yield (
                f"shares-{weight is not None}-{smoothing}",
                Case(
                    nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing),
                    real(NUM_CLASSES, 3),
                    shares(NUM_CLASSES, 3),
                ),
            )


C = NUM_CLASSES
CASES = dict(class_cases()) | {
    "weighted function": Case(
        partial(partial(F.cross_entropy, weight=CLASS_WEIGHTS), label_smoothing=0.2),
        real(C),
        classes(ignore=-100),
    ),
    "function": Case(F.cross_entropy, real(C), classes(ignore=-100)),
    "nll function": Case(partial(F.nll_loss, ignore_index=0), log_shares(C), classes(ignore=0)),
    "mse": Case(nn.MSELoss(), real(3, 2), real(3, 2)),
    "mse function": Case(F.mse_loss, real(), real()),
    "l1": Case(nn.L1Loss(), real(3), real(3)),
    "smooth l1": Case(nn.SmoothL1Loss(beta=0.3), real(3), real(3)),
    "huber": Case(nn.HuberLoss(delta=0.3), real(3), real(3)),
    "huber function": Case(partial(F.huber_loss, delta=0.3), real(3), real(3)),
    "bce": Case(nn.BCELoss(weight=WEIGHTS), unit(C), unit(C)),
    "bce with logits": Case(
        nn.BCEWithLogitsLoss(weight=WEIGHTS[None], pos_weight=WEIGHTS.flip(0)), real(C), unit(C)
    ),
    "kl": Case(nn.KLDivLoss(reduction="batchmean"), log_shares(C), shares(C)),
    "kl of logs": Case(
        partial(F.kl_div, reduction="batchmean", log_target=True), log_shares(C), log_shares(C)
    ),
    "poisson": Case(nn.PoissonNLLLoss(full=True), real(3), lambda: unit(3)() * 9),
    "poisson of rates": Case(nn.PoissonNLLLoss(log_input=False, eps=0.1), unit(3), unit(3)),
    "soft margin": Case(nn.SoftMarginLoss(), real(3), signs(3)),
    "margins": Case(nn.MultiMarginLoss(p=2, margin=0.7, weight=WEIGHTS), real(C), classes()),
    "label sets": Case(nn.MultiLabelMarginLoss(), real(C), label_sets),
    "labels": Case(nn.MultiLabelSoftMarginLoss(weight=WEIGHTS), real(C), unit(C)),
    "hinge": Case(nn.HingeEmbeddingLoss(margin=0.7), real(3), signs(3)),
}


def random_split() -> tuple[int, ...]:
    """Cut the samples before some of them."""
    is_first = [True, *(torch.rand(NUM_SAMPLES - 1) < 0.3).tolist(), True]
    cuts = [index for index, cut in enumerate(is_first) if cut]
    return tuple(after - before for before, after in pairwise(cuts))


def joined(loss_fn: Loss, output: Tensor, target: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Join the losses of parts, as a step does over its micro-batches and replicas."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for part, of_part in zip(output.split(sizes), target.split(sizes), strict=True):
        value = loss_fn(part, of_part)
        pair = value if isinstance(value, tuple) else (value * len(part), len(part))
        total, count = total + pair[0], count + float(pair[1])
    return total / count


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_of_joined_parts_are_torch_s_own(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(len(name))
    output, target = case.output().requires_grad_(), case.target()
    whole = case.loss_fn(output, target)
    (gradient,) = torch.autograd.grad(whole, output)
    loss_fn = known_loss(case.loss_fn)
    assert loss_fn is not None and loss_fn.is_exact
    for sizes in [*SPLITS, *(random_split() for _ in range(5))]:
        ours = joined(loss_fn, output, target, sizes)
        # A dozen roundings in float64.
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-13)
        (our_gradient,) = torch.autograd.grad(ours, output)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-12, atol=1e-13)


def test_a_sum_of_half_precision_is_kept_where_it_would_overflow() -> None:
    # Targets of 40000 * 2 do not fit into float16, while their mean does.
    output = torch.tensor([[0.0, 20.0]], dtype=torch.float16).expand(4000, 2)
    loss_fn = known_loss(nn.CrossEntropyLoss())
    assert loss_fn is not None
    total, count = loss_fn(output, torch.zeros(4000, dtype=torch.int64))
    assert total.dtype == torch.float32 and mean_of(float(total), float(count)) == 20.0


def test_the_mean_of_nothing_is_0_and_of_what_has_no_weight_nan() -> None:
    assert mean_of(3.0, 0.25) == 12.0
    assert mean_of(0.0, 0.0) == 0.0
    assert mean_of(1.0, 0.0) != mean_of(1.0, 0.0)


def test_a_weight_that_is_changed_during_the_run_counts() -> None:
    module = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss_fn = known_loss(module)
    assert loss_fn is not None
    module.weight.mul_(0.5)
    _, count = loss_fn(torch.zeros(4, 3), torch.tensor([0, 1, 2, -100]))
    assert float(count) == 1.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to move weights to")
def test_weights_follow_the_output_to_its_device() -> None:
    case = CASES["weighted function"]
    loss_fn = known_loss(case.loss_fn)
    assert loss_fn is not None
    output, target = case.output(), case.target()
    ours = joined(loss_fn, output, target, (5, 7))
    theirs = joined(loss_fn, output.cuda(), target.cuda(), (5, 7))
    torch.testing.assert_close(theirs.cpu(), ours)


class Doubled(nn.CrossEntropyLoss):
    """Override a loss of torch's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


def hooked() -> nn.Module:
    module = nn.MSELoss()
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "loss_fn",
    [Doubled(), hooked(), lambda output, target: output.mean(), partial(F.mse_loss, torch.ones(3)),
     partial(F.mse_loss, target=torch.ones(3)), torch.dist],
    ids=["subclass", "hook", "function", "first argument", "keyword", "other"],
)  # fmt: skip
def test_what_may_compute_something_else_is_not_taken_for_torch_s_own(
    loss_fn: Callable[..., Any],
) -> None:
    assert known_loss(loss_fn) is None


REFUSED: list[tuple[Callable[..., Tensor], str]] = [
    (nn.CrossEntropyLoss(reduction="sum"), "CrossEntropyLoss has reduction='sum', .*'mean'"),
    (nn.MSELoss(reduction="none"), "MSELoss has reduction='none'"),
    (partial(F.nll_loss, reduction="sum"), r"F\.nll_loss has reduction='sum', .*learning rate"),
    (partial(F.mse_loss, size_average=False), r"size_average or reduce; give reduction='mean'"),
    (partial(F.mse_loss, weight=torch.ones(4, 3)), "a weight for each element of one batch"),
    (partial(F.huber_loss, weight=torch.ones(4, 3)), r"returns \(sum, count\)"),
]


@pytest.mark.parametrize(("loss_fn", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_loss_whose_parts_do_not_join_is_refused(
    loss_fn: Callable[..., Tensor], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        known_loss(loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "output", "target", "reason"),
    [
        (nn.MSELoss(), (4, 1), (4,), r"every sample with every other, .*\(4, 1\).*\(4,\)"),
        (nn.L1Loss(), (4,), (4, 1), "reshape one to the other's"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(4, 3)), (4, 3), (4, 3), "the weight of BCEWith"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(4)), (4,), (4,), "the pos_weight of BCE"),
        (nn.CrossEntropyLoss(), (4,), (4,), r"return \(samples, classes\)"),
        (nn.MultiLabelMarginLoss(), (4,), (4,), "for one sample's classes"),
    ],
)
def test_shapes_that_mix_samples_are_refused(
    loss_fn: nn.Module, output: tuple[int, ...], target: tuple[int, ...], reason: str
) -> None:
    known = known_loss(loss_fn)
    assert known is not None
    with pytest.raises(ValueError, match=reason):
        known(torch.zeros(output), torch.zeros(target))


# --- the probe ---


def finds(loss_fn: Any, output: Tensor, target: Any, sizes: tuple[int, ...]) -> bool:
    """Probe one step with micro-batches of the given sizes."""
    probe = SplitProbe(loss_fn if isinstance(loss_fn, Loss) else Loss(loss_fn))
    watch_step(probe, output, target, sizes)
    return probe.finds_difference()


def watch_step(probe: SplitProbe, output: Tensor, target: Any, sizes: tuple[int, ...]) -> None:
    probe.begin_step()
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        part = (
            {name: one[rows] for name, one in target.items()}
            if isinstance(target, Mapping)
            else target[rows]
        )
        probe.watch(output[rows], part)
        first += size


def ignoring_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def weighted_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=WEIGHTS.to(output))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.mT, torch.arange(len(output)))


def mean_and_one(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target), 1


def plain_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def focal(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def weighted_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weight = WEIGHTS.to(output)
    return F.cross_entropy(output, target, weight=weight, reduction="sum"), weight[target].sum()


def written_over(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mul_(0.5), target.clamp_(max=3))


PROBED_SPLITS = [(12,), (2,), (6, 6), (1, 1), (5, 3, 4), (1,) * 12, (3,)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", PROBED_SPLITS, ids=str)
def test_a_loss_that_does_not_join_is_found_and_one_that_does_is_not(
    dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(3)
    output = torch.randn(NUM_SAMPLES, NUM_CLASSES).to(dtype)
    target = torch.tensor([4, 1, 3, 2, 0, 1, 4, 4, 2, 3, 1, 0])
    ignored = target.where(torch.arange(NUM_SAMPLES) != 1, -100)
    for right in (focal, weighted_pair, written_over, nn.CrossEntropyLoss()):
        assert not finds(right, output.clone(), target.clone(), sizes), right
    for wrong in (weighted_mean, contrastive, mean_and_one, plain_sum):
        assert finds(wrong, output, target, sizes), wrong
    assert finds(ignoring_mean, output, ignored, sizes)


def test_a_loss_in_half_precision_alone_is_probed_so() -> None:
    weight = WEIGHTS.bfloat16()

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weight)

    output, target = torch.randn(4, NUM_CLASSES).bfloat16(), torch.tensor([0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="BFloat16"):
        weighted(output.float(), target)
    assert finds(weighted, output, target, (2, 2))
    assert not finds(lambda x, y: F.l1_loss(x, x.bfloat16() / 3), output, target, (2, 2))


def test_outputs_that_are_not_finite_are_not_blamed_on_the_loss() -> None:
    output = torch.randn(4, NUM_CLASSES)
    output[2] = float("nan")
    assert not finds(focal, output, torch.zeros(4, dtype=torch.int64), (2, 2))


def test_targets_of_several_names_are_cut_and_joined() -> None:
    torch.manual_seed(4)
    output, y = torch.randn(6, NUM_CLASSES), torch.tensor([0, 1, 2, 3, 4, 1])
    target = {"y": y, "weight": torch.rand(6)}

    def each(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, target["y"], reduction="none") * target["weight"]

    def mean(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        return each(output, target).sum() / target["weight"].sum()

    def pair(output: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return each(output, target).sum(), target["weight"].sum()

    for sizes in ((6,), (1, 2, 3), (1,) * 6):
        assert finds(mean, output, target, sizes)
        assert not finds(pair, output, target, sizes)


def test_samples_of_different_shapes_are_not_joined() -> None:
    calls = []

    def note(output: Tensor, target: Tensor) -> Tensor:
        calls.append(tuple(output.shape))
        return F.mse_loss(output, target)

    probe = SplitProbe(Loss(note))
    probe.begin_step()
    for length in (3, 4, 3):
        probe.watch(torch.zeros(1, length), torch.zeros(1, length))
    assert not probe.finds_difference()
    assert calls == [(2, 3), (1, 3), (1, 3)]


def test_the_first_8_steps_are_probed_and_every_8th() -> None:
    calls: list[int] = []

    def note(output: Tensor, target: Tensor) -> Tensor:
        calls.append(int(target[0, 0]))
        return F.mse_loss(output, target)

    probe, exact = SplitProbe(Loss(note)), SplitProbe(Loss(note, is_exact=True))
    for step in range(100):
        for one in (probe, exact):
            output = torch.zeros(4, 2, requires_grad=True)
            watch_step(one, output, torch.full((4, 2), step), (4,))
            assert not one.finds_difference()
    assert sorted(set(calls)) == [*range(8), *range(8, 100, 8)]
    # The whole and two parts; the exact loss is not called at all.
    assert len(calls) == 3 * 20


def test_what_is_kept_is_bounded_but_two_samples() -> None:
    sizes = []

    def note(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(output))
        return output.mean()

    def watched(num_elements: int) -> list[int]:
        sizes.clear()
        # A view of one number: as large as it says, without the memory.
        output = torch.zeros(()).expand(3, num_elements)
        assert not finds(note, output.repeat(2, 1), torch.zeros(6), (3, 3))
        return list(sizes)

    assert watched(1 << 20) == [4, 3, 1]
    assert watched(3 << 20) == [2, 1, 1]


def test_a_loss_that_draws_is_let_be_with_a_warning_and_random_numbers_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output + torch.randn_like(output), target)

    probe = SplitProbe(Loss(noisy))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="pipetransformer"):
        for _ in range(3):
            watch_step(probe, torch.zeros(4, 2), torch.zeros(4, 2), (2, 2))
            assert not probe.finds_difference()
    assert torch.equal(torch.get_rng_state(), before)
    (record,) = caplog.records
    assert "noisy' draws random numbers" in record.getMessage()


def test_the_refusal_names_the_loss_the_numbers_and_the_way_out() -> None:
    probe = SplitProbe(Loss(plain_sum))
    watch_step(probe, torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), (1, 3))
    assert probe.finds_difference()
    with pytest.raises(
        ValueError,
        match=r"the loss 'plain_sum' depends on .*: it is 2\.77\d* over 4 samples, but 1\.73\d* "
        r"when joined from parts of 1, 3\. .* return \(sum, count\): .*Loss\(function, is_exact",
    ):
        probe.refuse()

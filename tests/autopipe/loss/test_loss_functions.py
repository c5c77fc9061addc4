"""A loss that is joined from parts is torch's own on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.loss import Loss, choose_loss, mean_of, smooth_labels
from autopipe.loss.loss_functions import known_loss

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


@pytest.mark.cuda
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


def test_a_loss_s_class_is_not_taken_for_a_loss() -> None:
    with pytest.raises(TypeError, match=r"the class CrossEntropyLoss; .* CrossEntropyLoss\(\)"):
        choose_loss(nn.CrossEntropyLoss, None, model="Net")


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


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=1),
        partial(F.cross_entropy, ignore_index=1),
    ],
)
def test_a_smoothed_cross_entropy_is_torch_s_in_any_split(loss_fn: Any) -> None:
    output = torch.randn(NUM_SAMPLES, NUM_CLASSES, dtype=torch.float64)
    target = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,))
    smoothed = smooth_labels(choose_loss(loss_fn, None, model="Model"), 0.2)
    options = {
        "weight": getattr(loss_fn, "weight", None),
        "ignore_index": smoothed.ignore_index,
        "label_smoothing": 0.2,
    }
    assert smoothed.is_exact
    for sizes in SPLITS:
        parts = zip(output.split(sizes), target.split(sizes), strict=True)
        values = [smoothed(one, other) for one, other in parts]
        total, count = (sum(float(value[i]) for value in values) for i in (0, 1))  # type: ignore[index]
        expected = F.cross_entropy(output, target, **options)
        assert mean_of(total, count) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (nn.MSELoss(), "MSELoss"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "CrossEntropyLoss"),
        (lambda output, target: output.mean(), "<lambda>"),
        (Loss(F.cross_entropy, is_exact=True), "cross_entropy"),
    ],
)
def test_what_is_not_known_to_be_smoothed_is_refused(loss_fn: Any, name: str) -> None:
    message = rf"0.2, but the loss (\S+\.)?{name} is not known .* such as torch\.nn\.C"
    with pytest.raises(ValueError, match=message):
        smooth_labels(choose_loss(loss_fn, None, model="Model"), 0.2)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1.5, TypeError, "returned a float; return a 0-dim tensor"),
        (None, TypeError, "returned a NoneType; return a 0-dim tensor"),
        ([torch.zeros(()), 1], TypeError, "returned a list; return a 0-dim tensor"),
        ((torch.zeros(()),), TypeError, "returned a tuple; return a 0-dim tensor"),
        ((1.5, 2), TypeError, "returned a float and a int; return a 0-dim tensor"),
        ((torch.zeros(()), {}), TypeError, "returned a Tensor and a dict; return a 0-dim tensor"),
        (torch.zeros(3), ValueError, r"has shape \(3,\); return a 0-dim mean"),
        ((torch.zeros(3), 3), ValueError, r"has shape \(3,\); return a 0-dim mean"),
        ((torch.zeros(()), torch.ones(3)), ValueError, r"has shape \(\), \(3,\); return a 0-dim"),
    ],
    ids=str,
)
def test_what_is_no_loss_is_refused_by_what_it_is(value: Any, error: Any, text: str) -> None:
    """A number failed with "'float' object has no attribute 'requires_grad'"."""
    loss = Loss(lambda output, target: value)
    with pytest.raises(error, match=f"the loss '.*' {text}"):
        loss(torch.zeros(3, 2), torch.zeros(3))

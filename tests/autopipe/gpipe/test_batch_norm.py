"""Prove deferred BatchNorm against a plain one that sees the whole mini-batch at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.engine.current_micro_batch import ForwardPass, running
from autopipe.gpipe.batch_norm import (
    DeferredBatchNorm,
    convert_deferred_batch_norm,
    restore_batch_norm,
    running_statistics_kept,
)

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIZES = [(7,), (5, 2), (2, 2, 2, 5)]
CHANNELS = 3
# Sums of a few hundred float64 values in another order: off by some 1e-15 of values around 1.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def batch(num_samples: int, num_dims: int, *, seed: int = 0, dtype: Any = torch.float64) -> Tensor:
    """Return (B, C, ...) values whose mean and deviation differ by channel and by sample."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, CHANNELS, *(2 + dim for dim in range(num_dims)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    scale = torch.arange(1.0, CHANNELS + 1).view(-1, *(1,) * num_dims)
    drift = torch.arange(num_samples).view(-1, *(1,) * (num_dims + 1)) / num_samples
    return (values * scale + scale + drift).to(dtype)


def run(module: nn.Module, input: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Run a mini-batch's micro-batches, each forward repeated as before a backward."""
    parts = input.split(list(sizes))
    tasks = [ForwardPass(index, len(sizes), checkpointing=True) for index in range(len(sizes))]
    outputs = []
    for task, part in zip(tasks, parts, strict=True):
        with running(task):
            outputs.append(module(part))
    for task, part, output in reversed(list(zip(tasks, parts, outputs, strict=True))):
        with running(ForwardPass(task.micro_batch, len(sizes), recomputing=True)):
            assert torch.equal(module(part), output)
    return outputs


def pair(num_dims: int = 2, **options: Any) -> tuple[Any, Any]:
    """Return a plain BatchNorm and a deferred one of the same, not trivial state."""
    plain = NORMS[num_dims](CHANNELS, dtype=torch.float64, **options)
    if plain.affine:
        nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(1))
    return plain, convert_deferred_batch_norm(copy.deepcopy(plain))


def assert_same_state(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    assert list(found.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, **(tolerance or EXACT), msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("num_dims", NORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_running_statistics_are_those_of_the_whole_mini_batch(
    num_dims: int, sizes: tuple[int, ...], momentum: float | None
) -> None:
    plain, deferred = pair(num_dims, momentum=momentum)
    for seed in range(3):
        whole = batch(sum(sizes), num_dims, seed=seed)
        plain(whole)
        run(deferred, whole, sizes)
        assert_same_state(deferred, plain)
    assert deferred.num_batches_tracked.item() == 3
    assert torch.equal(*(norm.eval()(whole) for norm in (deferred, copy.deepcopy(deferred))))
    torch.testing.assert_close(deferred(whole), plain.eval()(whole), **EXACT)


def test_batch_norm_1d_takes_two_dimensions_too() -> None:
    plain, deferred = pair(1)
    whole = batch(7, 0)
    plain(whole)
    run(deferred, whole, (3, 4))
    assert_same_state(deferred, plain)
    with pytest.raises(ValueError, match="expected 2D or 3D input"), running(ForwardPass(0, 1)):
        deferred(batch(2, 2))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        run(deferred, whole, (6, 1))


def test_each_micro_batch_is_normalised_by_itself_with_the_gradients_of_plain_ones() -> None:
    plain, deferred = pair()
    inputs = [batch(7, 2).requires_grad_() for _ in range(2)]
    outputs = [
        torch.cat([plain(part) for part in inputs[0].split([3, 4])]),
        torch.cat(run(deferred, inputs[1], (3, 4))),
    ]
    # The same kernel on the same values: equal to the bit.
    assert torch.equal(*outputs)
    weights = batch(7, 2, seed=9)
    for output in outputs:
        (output * weights).sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(plain.weight.grad, deferred.weight.grad)
    assert torch.equal(plain.bias.grad, deferred.bias.grad)


def test_a_mini_batch_changes_nothing_before_its_last_micro_batch() -> None:
    plain, deferred = pair()
    for index in range(2):
        with running(ForwardPass(index, 3)):
            deferred(batch(4, 2, seed=index))
        assert_same_state(deferred, plain, rtol=0, atol=0)


@pytest.mark.parametrize("broken_after", [1, 2])
def test_a_mini_batch_that_broke_off_leaves_no_trace(broken_after: int) -> None:
    plain, deferred = pair()
    for index in range(broken_after):
        with running(ForwardPass(index, 3)):
            deferred(batch(4, 2, seed=50 + index))
    whole = batch(7, 2)
    plain(whole)
    run(deferred, whole, (3, 4))
    assert_same_state(deferred, plain)


def test_the_number_of_micro_batches_may_change_from_one_mini_batch_to_the_next() -> None:
    plain, deferred = pair()
    for seed, sizes in enumerate([(2, 2, 2, 2), (2, 3), (4,), (3, 2, 2)]):
        whole = batch(sum(sizes), 2, seed=seed)
        plain(whole)
        run(deferred, whole, sizes)
        assert_same_state(deferred, plain)


def test_statistics_are_tracked_without_gradients_and_in_inference_mode_too() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        plain, deferred = pair()
        whole = batch(7, 2)
        with mode():
            plain(whole)
            run(deferred, whole, (4, 3))
        assert_same_state(deferred, plain)


def test_outside_of_a_pipeline_it_is_a_plain_one() -> None:
    plain, deferred = pair(momentum=None)
    for seed in range(2):
        whole = batch(5, 2, seed=seed)
        assert torch.equal(deferred(whole), plain(whole))
        assert_same_state(deferred, plain, rtol=0, atol=0)


def test_evaluation_uses_the_running_statistics_and_changes_none() -> None:
    plain, deferred = pair()
    run(deferred, batch(7, 2), (4, 3))
    deferred.eval()
    before = copy.deepcopy(deferred.state_dict())
    plain.load_state_dict(before)
    whole = batch(7, 2, seed=3)
    assert torch.equal(torch.cat(run(deferred, whole, (4, 3))), plain.eval()(whole))
    assert all(torch.equal(value, before[name]) for name, value in deferred.state_dict().items())


def test_a_layer_called_twice_in_a_forward_tracks_both_calls_in_order() -> None:
    class Twice(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, input: Tensor) -> Tensor:
            return self.norm(input) + self.norm(input * 3 + 1)

    plain, deferred = pair(momentum=None)
    for seed, sizes in enumerate([(3, 4), (2, 2, 3), (5,)]):
        whole = batch(sum(sizes), 2, seed=seed)
        Twice(plain)(whole)
        run(Twice(deferred), whole, sizes)
        assert_same_state(deferred, plain)
    assert deferred.num_batches_tracked.item() == 6


def test_a_large_mean_does_not_drown_the_variance_in_float32() -> None:
    plain = nn.BatchNorm1d(CHANNELS, momentum=1.0)
    deferred: Any = convert_deferred_batch_norm(copy.deepcopy(plain))
    whole = batch(64, 1, dtype=torch.float32) + 1000
    run(deferred, whole, (20, 30, 14))
    expected = whole.double().var((0, 2))
    # float32 resolves 1000 to 6e-5, so deviations of about 1 to 1e-4; sums of squares minus the
    # squared mean would be off by 1000 ** 2 * 6e-8 = 0.06.
    torch.testing.assert_close(deferred.running_var.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half_parameters", [False, True])
def test_half_inputs_are_gathered_in_float32(dtype: torch.dtype, half_parameters: bool) -> None:
    deferred: Any = convert_deferred_batch_norm(nn.BatchNorm1d(CHANNELS, momentum=1.0))
    deferred.to(dtype if half_parameters else torch.float32)
    whole = batch(300, 1, dtype=dtype)
    run(deferred, whole, (100, 50, 150))
    exact = whole.double()
    # float32 sums of hundreds of values; half buffers are rounded to the nearest, once at the end.
    rounding = 1e-5 + torch.finfo(deferred.running_var.dtype).eps / 2
    for found, expected in (
        (deferred.running_mean, exact.mean((0, 2))),
        (deferred.running_var, exact.var((0, 2))),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
        nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3, affine=False, momentum=None)),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Flatten(),
        nn.BatchNorm1d(18),
    ).double()


def test_conversion_keeps_objects_names_hooks_and_flags_and_restoring_undoes_it() -> None:
    net = network()
    calls: list[str] = []
    net[1].register_forward_hook(lambda module, args, output: calls.append(type(module).__name__))
    net[2].eval()
    children, tensors = list(net.modules()), net.state_dict(keep_vars=True)
    types = [type(child) for child in children]
    assert convert_deferred_batch_norm(net) is net
    assert [isinstance(child, DeferredBatchNorm) for child in net.modules()] == [
        name in (nn.BatchNorm2d, nn.BatchNorm1d) and child is not children[6]
        for name, child in zip(types, children, strict=True)
    ]
    assert all(isinstance(child, kind) for child, kind in zip(children, types, strict=True))
    convert_deferred_batch_norm(net)  # again: nothing more to do
    for converted in (net, restore_batch_norm(net)):
        assert all(map(lambda one, two: one is two, converted.modules(), children))
        found = converted.state_dict(keep_vars=True)
        assert list(found) == list(tensors)
        assert all(found[name] is tensor for name, tensor in tensors.items())
        assert [child.training for child in (net[1], net[2][1])] == [True, False]
    assert [type(child) for child in net.modules()] == types
    net(batch(4, 2))
    assert calls == ["BatchNorm2d"]


def test_each_norm_of_a_network_tracks_what_it_sees_itself() -> None:
    # Beyond the first norm inputs differ from those of an unsplit batch, so each is compared with
    # a plain norm on the inputs it got itself.
    net = convert_deferred_batch_norm(network())
    norms: list[Any] = [child for child in net.modules() if isinstance(child, DeferredBatchNorm)]
    twins = [restore_batch_norm(copy.deepcopy(norm)) for norm in norms]
    seen: list[list[Tensor]] = [[] for _ in norms]
    for norm, inputs in zip(norms, seen, strict=True):
        norm.register_forward_hook(lambda module, args, output, to=inputs: to.append(args[0]))
    run(net, batch(7, 2), (2, 3, 2))
    for norm, twin, inputs in zip(norms, twins, seen, strict=True):
        twin(torch.cat(inputs[:3]))
        assert_same_state(norm, twin)


def test_a_deferred_norm_can_be_copied_and_pickled_at_any_time() -> None:
    plain, deferred = pair()
    whole = batch(7, 2)
    plain(whole)
    with running(ForwardPass(0, 2)):
        deferred(whole[:3])
    twins = [copy.deepcopy(deferred), pickle.loads(pickle.dumps(deferred))]
    for norm in (deferred, *twins):
        with running(ForwardPass(1, 2)):
            norm(whole[3:])
        assert_same_state(norm, plain)


def test_a_restored_norm_forgets_an_unfinished_mini_batch() -> None:
    plain, deferred = pair()
    with running(ForwardPass(0, 2)):
        deferred(batch(4, 2))
    assert restore_batch_norm(deferred) is deferred
    assert type(deferred) is nn.BatchNorm2d and vars(deferred).keys() == vars(plain).keys()


def test_a_lazy_norm_is_refused_before_anything_is_converted() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="1 is a LazyBatchNorm2d that has not seen an input; run"):
        convert_deferred_batch_norm(net)
    assert type(net[0]) is nn.BatchNorm2d
    net.double()(batch(2, 2))
    assert all(isinstance(norm, DeferredBatchNorm) for norm in convert_deferred_batch_norm(net))


def test_norms_that_cannot_be_deferred_are_left_with_a_warning() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    for norm in (Activated(3), nn.SyncBatchNorm(3)):
        kind = type(norm)
        with pytest.warns(RuntimeWarning, match=f"0 is a {kind.__name__}, which cannot be def"):
            convert_deferred_batch_norm(nn.Sequential(norm))
        assert type(norm) is kind


def test_statistics_kept_gives_the_same_output_and_gradients_but_updates_nothing() -> None:
    for momentum in (0.1, None):
        norm = pair(momentum=momentum)[0]
        net = nn.Sequential(norm, nn.BatchNorm2d(3, track_running_stats=False).double())
        inputs = [batch(5, 2).requires_grad_() for _ in range(2)]
        outputs = [net(inputs[0])]
        before = copy.deepcopy(net.state_dict())
        with running_statistics_kept(net):
            outputs.append(net(inputs[1]))
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        assert inputs[0].grad is not None and inputs[1].grad is not None
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert list(net.state_dict()) == list(before)
        assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)
        assert norm.track_running_stats and not net[1].track_running_stats
        net(batch(5, 2))
        assert norm.num_batches_tracked.item() == 2


def test_statistics_kept_leaves_evaluation_alone_and_ends_with_an_error_too() -> None:
    plain, deferred = pair()
    net = nn.Sequential(plain.eval(), deferred, nn.BatchNorm2d(3))
    whole = batch(5, 2)
    expected = plain(whole)
    with pytest.raises(KeyError, match="stop"), running_statistics_kept(net):
        assert torch.equal(plain(whole), expected)
        assert [norm.track_running_stats for norm in net] == [True, True, False]
        raise KeyError("stop")
    assert [norm.track_running_stats for norm in net] == [True, True, True]

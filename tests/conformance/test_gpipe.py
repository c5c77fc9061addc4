"""Hold GPipe's documented interface: arguments, attributes, access, batches, what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from autopipe.gpipe.partition_checks import flatten_sequential
from autopipe.skip.skip_layers import skippable
from tests.helpers.pipes import MODES, Call, assert_transparent, linears, on_cpu, ramp


class Stringlike:
    """Stand for an object that is a mode only by its str()."""

    def __str__(self) -> str:
        return "always"


def test_attributes_hold_what_was_given() -> None:
    model = GPipe(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        balance=(1, 1),
        devices=("cpu", torch.device("cpu")),
        chunks=42.0,  # type: ignore[arg-type]
        checkpoint=Stringlike(),  # type: ignore[arg-type]
    )
    assert model.balance == [1, 1] and type(model.balance) is list
    assert model.devices == [torch.device("cpu")] * 2 and type(model.devices) is list
    assert model.chunks == 42 and type(model.chunks) is int
    assert model.checkpoint == "always" and type(model.checkpoint) is str


def test_defaults_are_one_chunk_and_except_last_without_deferred_norms() -> None:
    norm = nn.BatchNorm1d(3)
    model = GPipe(nn.Sequential(norm), [1], devices=["cpu"])
    assert (model.chunks, model.checkpoint) == (1, "except_last")
    assert type(norm) is nn.BatchNorm1d


def test_without_cuda_each_partition_gets_a_cpu_slot() -> None:
    assert GPipe(linears(2, 2, 2), [1, 1, 2]).devices == [torch.device("cpu")] * 3


def test_surplus_devices_are_left_out() -> None:
    names = iter(["cpu"] * 10)
    assert GPipe(linears(2, 2), [1, 1], devices=names).devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0", torch.device("cpu", 0)])
def test_devices_may_be_named_in_every_form(device: Any) -> None:
    model = GPipe(linears(2, 2), [1, 1], devices=[device, device], chunks=2)
    assert model(ramp(4, 2)).shape == (4, 2)


def test_layers_are_reached_as_in_a_sequential() -> None:
    a, b, c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    model = on_cpu(nn.Sequential(a, b, c), [2, 1])
    assert len(model) == 3
    assert list(model) == [a, b, c] and [*iter(model)] == [a, b, c]
    assert [model[0], model[1], model[2]] == [a, b, c]
    assert [model[-1], model[-2], model[-3]] == [c, b, a]
    for index in (3, -4):
        with pytest.raises(IndexError, match="out of range"):
            model[index]


def test_partitions_hold_consecutive_layers_under_their_own_names() -> None:
    layers = OrderedDict((name, nn.Linear(1, 1)) for name in "abc")
    model = on_cpu(nn.Sequential(layers), [1, 2])
    assert isinstance(model.partitions, nn.ModuleList)
    assert [type(partition) for partition in model.partitions] == [nn.Sequential] * 2
    names = dict(model.named_modules())
    assert names["partitions.0.a"] is layers["a"]
    assert names["partitions.1.b"] is layers["b"] and names["partitions.1.c"] is layers["c"]
    assert [name for name, _ in model.named_parameters()][:2] == [
        "partitions.0.a.weight",
        "partitions.0.a.bias",
    ]


def test_layers_are_no_attributes_of_the_model() -> None:
    model = on_cpu(nn.Sequential(OrderedDict(a=nn.Linear(1, 1))), [1])
    with pytest.raises(AttributeError, match="no attribute 'a'"):
        model.a  # noqa: B018


def test_a_module_that_is_not_sequential_is_refused() -> None:
    with pytest.raises(TypeError, match="module must be nn.Sequential to be partitioned"):
        GPipe(nn.Linear(1, 1), [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module must be nn.Sequential to be partitioned"):
        GPipe(nn.ModuleList([nn.Linear(1, 1)]), [1])  # type: ignore[arg-type]


def test_a_layer_used_twice_is_refused() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        on_cpu(nn.Sequential(layer, layer), [1, 1])


@pytest.mark.parametrize("balance", [None, [], [2], [4], [1, 1], [3, 1]])
def test_a_missing_balance_or_wrong_sum_is_refused_and_automatic_balancing_named(
    balance: Any,
) -> None:
    message = r"(balance is required|different lengths)[\s\S]*autopipe.balance.balance"
    with pytest.raises(ValueError, match=message):
        GPipe(linears(1, 1, 1)[:3], balance, devices=["cpu"] * 3)


def test_layers_on_their_devices_need_no_balance() -> None:
    layers = [nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2).to("meta")]
    model = GPipe(nn.Sequential(*layers, nn.Tanh()), chunks=2)
    assert (model.balance, model.devices) == ([4, 2], [torch.device("cpu"), torch.device("meta")])
    output = model(torch.rand(5, 3))
    assert (output.shape, output.device.type) == ((5, 2), "meta")


def test_a_layer_on_two_devices_is_refused() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(ValueError, match="layer '1' is on cpu and meta; move it to one device"):
        GPipe(nn.Sequential(nn.ReLU(), layer))


def test_layers_on_one_device_need_a_balance() -> None:
    for layers in (linears(1, 1, 1), nn.Sequential(nn.ReLU(), nn.Tanh())):
        with pytest.raises(ValueError, match="balance is required"):
            GPipe(layers, chunks=2)


@pytest.mark.parametrize("balance", [[0, 2], [2, 0], [-1, 3], [0.5, 1.5]])
def test_a_balance_with_numbers_that_are_not_positive_integers_is_refused(balance: Any) -> None:
    with pytest.raises(ValueError, match="all balance numbers must be positive integers"):
        on_cpu(linears(1, 1), balance)


def test_too_few_devices_are_an_index_error() -> None:
    for devices in ([], ["cpu"], ["cpu"] * 3):
        with pytest.raises(IndexError, match="too few devices to hold given partitions"):
            GPipe(linears(1, 1, 1), [1, 1, 1, 1], devices=devices)


@pytest.mark.parametrize("chunks", [0, -1, 1.5])
def test_chunks_must_be_a_positive_integer(chunks: Any) -> None:
    with pytest.raises(ValueError, match="number of chunks must be a positive integer"):
        on_cpu(linears(1, 1), [2], chunks=chunks)


@pytest.mark.parametrize("checkpoint", ["INVALID", "", "Always", None])
def test_an_unknown_checkpoint_mode_is_refused(checkpoint: Any) -> None:
    message = "checkpoint is not one of 'always', 'except_last', or 'never'"
    with pytest.raises(ValueError, match=message):
        on_cpu(linears(1, 1), [2], checkpoint=checkpoint)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cuda(),
        lambda model: model.cuda(0),
        lambda model: model.cpu(),
        lambda model: model.to("cpu"),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.to("cuda:0"),
        lambda model: model.to(0),
        lambda model: model.to(device=0),
        lambda model: model.to(device="cpu"),
        lambda model: model.to("cpu", torch.float32),
        lambda model: model.to(torch.rand(1)),
        lambda model: model.to(tensor=torch.rand(1)),
    ],
)
def test_moving_is_refused(move: Callable[[GPipe], Any]) -> None:
    with pytest.raises(TypeError, match="cannot be moved"):
        move(on_cpu(linears(1, 1), [1, 1]))


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda model: model.half(), torch.float16),
        (lambda model: model.float(), torch.float32),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.to(torch.float32), torch.float32),
        (lambda model: model.to(dtype=torch.float32), torch.float32),
    ],
)
def test_changes_of_dtype_are_allowed(
    change: Callable[[GPipe], GPipe], dtype: torch.dtype
) -> None:
    model = on_cpu(linears(1, 1, 1), [2, 2])
    assert change(model) is model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    if dtype != torch.float16:
        assert model(torch.rand(4, 1, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_samples", "chunks"), [(7, 4), (5, 4), (9, 4), (2, 4), (1, 5)])
def test_indivisible_and_small_batches_are_split_without_a_warning(
    num_samples: int, chunks: int, mode: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_transparent(
            linears(3, 4, 2), [2, 2], ramp(num_samples, 3), chunks=chunks, checkpoint=mode
        )


@pytest.mark.parametrize(("num_samples", "num_parts"), [(16, 4), (7, 4), (5, 4), (3, 3), (1, 1)])
def test_there_are_as_many_micro_batches_as_asked_for_or_as_samples(
    num_samples: int, num_parts: int
) -> None:
    sizes: list[int] = []
    model = on_cpu(nn.Sequential(Call(lambda x: (sizes.append(len(x)), x)[1])), [1], chunks=4)
    model(torch.rand(num_samples, 1))
    assert len(sizes) == num_parts and sum(sizes) == num_samples
    assert max(sizes) - min(sizes) <= 1


def test_pairs_pass_from_layer_to_layer() -> None:
    pair = nn.Sequential(
        Call(lambda pair: (pair[0] * 2, pair[1] + pair[0])),
        nn.Identity(),
        Call(lambda pair: (pair[1], pair[0] * pair[1])),
    )
    input = (ramp(6, 2).requires_grad_(), ramp(6, 3)[:, :2].clone().requires_grad_())
    assert_transparent(pair, [1, 1, 1], input, chunks=3)
    assert_transparent(pair, [2, 1], (input[0], input[1].detach()), chunks=2, checkpoint="always")


def test_a_tuple_of_one_stays_a_tuple() -> None:
    single = nn.Sequential(Call(lambda only: (only[0] * 2,)), Call(lambda only: (only[0].exp(),)))
    assert_transparent(single, [1, 1], (ramp(4, 2).requires_grad_(),), chunks=2)
    output = on_cpu(single, [1, 1], chunks=2)((ramp(4, 2),))
    assert isinstance(output, tuple) and len(output) == 1


def test_more_than_one_argument_is_refused() -> None:
    model = on_cpu(nn.Sequential(nn.Identity()), [1])
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        model(torch.rand(1), torch.rand(1))


def test_a_layer_with_two_arguments_fails_as_in_a_sequential() -> None:
    class Two(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return first + second

    model = on_cpu(nn.Sequential(nn.Identity(), Two()), [1, 1], chunks=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'second'"):
        model((torch.rand(4), torch.rand(4)))


@pytest.mark.parametrize(
    "wrong", ["hello", 1, None, [torch.ones(2)], {"x": torch.ones(2)}, (torch.ones(2), "hello")]
)
def test_what_is_no_tensor_is_refused_as_input_boundary_and_output(wrong: Any) -> None:
    message = "can only carry a Tensor or a tuple of Tensors"
    with pytest.raises(TypeError, match=message):
        on_cpu(nn.Sequential(nn.Identity()), [1])(wrong)
    for balance in ([1, 1], [2]):
        for layers in (
            [Call(lambda _: wrong), nn.Identity()],
            [nn.Identity(), Call(lambda _: wrong)],
        ):
            model = on_cpu(nn.Sequential(*layers), balance)
            with pytest.raises(TypeError, match=message):
                model(torch.rand(2))


def test_tuple_members_with_unlike_batches_are_refused() -> None:
    model = on_cpu(nn.Sequential(nn.Identity()), [1], chunks=2)
    with pytest.raises(ValueError, match=r"have \[4, 5\] samples; they must have equally many"):
        model((torch.rand(4), torch.rand(5)))
    with pytest.raises(ValueError, match="0-dim tensor"):
        model(torch.tensor(1.0))


def test_a_module_without_layers_gives_back_its_input() -> None:
    model = GPipe(nn.Sequential(), [])
    scalar = torch.tensor(42.0)
    assert len(model) == 0 and list(model) == [] and list(model.partitions) == []
    assert model(scalar) is scalar
    assert model((scalar, scalar)) == (scalar, scalar)
    with pytest.raises(TypeError, match="can only carry a Tensor or a tuple of Tensors"):
        model(42)


def test_a_nested_sequential_is_one_layer_until_it_is_flattened() -> None:
    inner, other = linears(2, 2, 2), linears(2, 2)
    nested = nn.Sequential(OrderedDict(left=inner, right=nn.Sequential(other)))
    with pytest.raises(ValueError, match="different lengths"):
        on_cpu(nested, [2, 4])
    assert len(on_cpu(nested, [1, 1])) == 2
    flat = flatten_sequential(nested)
    names = [name for name, _ in flat.named_children()]
    assert names == ["left_0", "left_1", "left_2", "left_3", "right_0_0", "right_0_1"]
    assert list(flat) == [*inner, *other]
    torch.testing.assert_close(on_cpu(flat, [2, 4], chunks=2)(ramp(4, 2)), nested(ramp(4, 2)))


def test_wrapping_uses_the_given_layers_and_changes_no_state() -> None:
    module = linears(2, 3, 2)
    before = copy.deepcopy(module.state_dict())
    layers = list(module)
    model = on_cpu(module, [1, 3], chunks=2)
    assert all(ours is given for ours, given in zip(model, layers, strict=True))
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_skips_that_do_not_pair_up_are_refused_when_wrapping() -> None:
    popper: Any = skippable(pop=["skip"])(nn.Identity)
    with pytest.raises(TypeError, match="some stash and pop do not match"):
        on_cpu(nn.Sequential(nn.Identity(), popper()), [1, 1])

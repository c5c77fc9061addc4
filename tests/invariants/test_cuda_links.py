"""Prove where messages of GPUs live and who waits for them, without a GPU: fake tensors have a
device and no contents.

    NCCL           messages on the GPU, the stream waits, nothing is posted ahead
    gloo, shared   messages in host memory, the host waits as between CPUs
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autodp import PeerError
from autodp.gradient_reducer import GradientReducer
from autodp.groups import Groups
from autodp.moves import Move
from autodp.redistribute import Piece, PieceTensor, Shard, ShardStore, _Journey
from autodp.topology import Topology
from autopipe.engine.executor import StageLinks, StageRun, StageWork
from autopipe.engine.links import (
    Payload,
    Peer,
    ProcessLinkAbove,
    ProcessLinkBelow,
    Receiver,
    Sender,
    TensorSpec,
)
from autopipe.engine.stream_watchdog import Watchdog
from autopipe.schedule import forward_only
from pipetransformer.measure.link_times import _pass
from pipetransformer.processes.world import World
from pipetransformer.stage import wiring as stage_wiring
from pipetransformer.stage.side_inputs import SideSender
from pipetransformer.stage.wiring import StageWiring
from tests.helpers.inspection import model_of, stage_of
from tests.helpers.models import tiny_trainer
from tests.helpers.pool import Pool

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
ROW = TensorSpec((3,), "float32", True)
NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"


class Traffic:
    """Stand for torch.distributed: note every message and every wait."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.messages: list[Tensor] = []

    def start(self, what: str, message: Tensor) -> SimpleNamespace:
        """Note a message; return what is waited on."""
        self.messages.append(message)
        self.events.append(f"{what} {message.device}")
        return SimpleNamespace(wait=self.wait)

    def wait(self, timeout: timedelta | None = None) -> bool:
        how = "stream waits" if timeout is None else f"host waits {timeout.total_seconds():g} s"
        self.events.append(how)
        return True


class ReachedMark:
    """Stand for a place that the device has come to."""

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Replace torch.distributed, and let tensors have a device and no contents."""
    traffic = Traffic()
    for name in ("isend", "irecv", "all_reduce", "send", "recv"):
        monkeypatch.setattr(dist, name, lambda t, *a, n=name, **o: traffic.start(n, t))
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group=None: [0, 1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield traffic


def backend(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return a group that is said to be over a backend."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: name)
    return object()


def watchdog() -> Watchdog:
    return Watchdog(lambda: None, mark=ReachedMark)


def peer(watched_by: Watchdog | None, group: Any = None) -> Peer:
    return Peer(1, group, 1, "activations", 30.0, watched_by)


def receive_all(watched_by: Watchdog | None, num_micro_batches: int) -> list[Tensor]:
    receiver = Receiver(peer(watched_by), GPU)
    receiver.begin(range(num_micro_batches), [2] * num_micro_batches)
    receiver.spec = ROW
    receiver.post()
    return [receiver.receive(i) for i in range(num_micro_batches)]


def test_between_gpus_the_stream_waits_for_a_receive_and_none_is_posted_ahead(
    traffic: Traffic,
) -> None:
    received = receive_all(watchdog(), 3)
    assert traffic.events == ["irecv cuda:0", "stream waits"] * 3
    assert [tensor.device for tensor in received] == [GPU] * 3


def test_over_gloo_a_gpu_receives_as_a_cpu_does_and_brings_it_to_the_device(
    traffic: Traffic,
) -> None:
    received = receive_all(None, 3)
    assert traffic.events == [
        "irecv cpu",
        "irecv cpu",
        "host waits 30 s",
        "irecv cpu",
        "host waits 30 s",
        "host waits 30 s",
    ]
    assert [tensor.device for tensor in received] == [GPU] * 3


def test_between_gpus_nothing_is_waited_for_before_the_flush_and_no_host_waits_at_all(
    traffic: Traffic,
) -> None:
    sender = Sender(peer(watchdog()))
    for _ in range(2):
        sender.send(torch.empty(2, 3, device=GPU))
    assert traffic.events == ["isend cuda:0"] * 2
    sender.flush()
    assert traffic.events[2:] == ["stream waits"] * 2


def test_over_gloo_what_a_gpu_sends_is_in_host_memory(traffic: Traffic) -> None:
    sender = Sender(peer(None))
    sender.send(torch.empty(2, 3, device=GPU).t())
    sender.flush()
    assert traffic.events == ["isend cpu", "host waits 30 s"]
    assert traffic.messages[0].is_contiguous()


def test_a_sender_at_its_bound_lets_the_stream_wait_for_the_oldest(traffic: Traffic) -> None:
    sender = Sender(peer(watchdog()), most_pending=2)
    for _ in range(3):
        sender.send(torch.empty(2, 3, device=GPU))
    assert traffic.events == ["isend cuda:0"] * 2 + ["stream waits", "isend cuda:0"]


def test_between_gpus_the_header_travels_in_host_memory_and_is_limited_by_the_wait(
    traffic: Traffic,
) -> None:
    sender = Sender(peer(watchdog()))
    sender.send_header({"hidden": ROW})
    sender.send(torch.empty(2, 3, device=GPU))
    sender.flush()
    assert traffic.events == ["isend cpu", "isend cuda:0", "host waits 30 s", "stream waits"]


def test_a_sent_tensor_stays_referenced_until_the_stream_is_to_wait_for_it(
    traffic: Traffic,
) -> None:
    sender, tensor = Sender(peer(watchdog())), torch.empty(2, 3, device=GPU)
    storage = weakref.ref(tensor.untyped_storage())
    sender.send(tensor)
    del tensor
    traffic.messages.clear()
    gc.collect()
    assert storage() is not None
    sender.flush()
    gc.collect()
    assert storage() is None


class StuckMark:
    """Stand for a place that the device comes to only by an abort."""

    def is_reached(self) -> bool:
        return False

    def wait(self) -> None:
        pass


def test_after_an_abort_every_call_raises_and_starts_nothing(traffic: Traffic) -> None:
    now_s = [0.0]
    watched = Watchdog(lambda: None, mark=StuckMark, clock=lambda: now_s[0])
    sender, receiver = Sender(peer(watched)), Receiver(peer(watched), GPU)
    receiver.begin([0, 1], [2, 2])
    receiver.spec = ROW
    receiver.receive(0)
    now_s[0] = 30.0
    watched.look()
    events = list(traffic.events)
    said = r"^rank 0 waited for the activations of rank 1 \(limit 30 s\): the links have been"
    for call in (
        lambda: receiver.receive(1),
        lambda: sender.send(torch.empty(1, device=GPU)),
    ):
        with pytest.raises(RuntimeError, match=said):
            call()
    assert traffic.events == events


class Identity(StageWork):
    """Pass on what comes."""

    def first_input(self, micro_batch: int) -> Payload:
        raise NotImplementedError

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        (hidden,) = inputs.tensors
        assert hidden is not None
        return Payload((hidden * 2,))

    def finish(self, micro_batch: int, outputs: Payload) -> None:
        raise NotImplementedError


def test_the_middle_stage_of_a_program_launches_all_and_waits_for_no_gpu(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Receiver, "receive_header", lambda self: {"hidden": ROW})
    watched = watchdog()
    marks = peer(watched)
    links = StageLinks(
        ProcessLinkBelow(Receiver(marks, GPU), Sender(marks)),
        ProcessLinkAbove(Sender(marks), Receiver(marks, GPU)),
    )
    with torch.no_grad():
        StageRun(forward_only((1, 1, 1), 3)[1], Identity(), links, [2] * 3).run()
    header, *rest = traffic.events[2:]
    assert traffic.events[:2] == ["irecv cuda:0", "stream waits"] and header == "isend cpu"
    launched = ["isend cuda:0", *(["irecv cuda:0", "stream waits", "isend cuda:0"] * 2)]
    # In the flush: the header's receiver has taken it long since.
    assert rest == [*launched, "host waits 30 s", *["stream waits"] * 3]


def test_side_inputs_leave_from_host_memory_wherever_they_are(traffic: Traffic) -> None:
    sender = SideSender([Sender(peer(None))], ("mask", "target"))
    sender.send(
        0,
        {
            "mask": torch.empty(2, 5, dtype=torch.bool, device=GPU),
            "target": torch.empty(2, dtype=torch.int64),
        },
    )
    assert [(m.device, tuple(m.shape)) for m in traffic.messages] == [
        (CPU, (1024,)),
        (CPU, (2, 5 + 8)),
    ]


@pytest.mark.parametrize(("name", "on_gpu"), [(NCCL, True), (GLOO, False), ("cuda:nccl", True)])
def test_stages_are_linked_over_the_gpu_where_the_group_is_nccl_s(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch, name: str, on_gpu: bool
) -> None:
    group = backend(monkeypatch, name)
    world = World(1, 3, 3, GPU, group, owned=False)
    assert world.link_device == (GPU if on_gpu else CPU)
    monkeypatch.setattr(stage_wiring, "trained_parameters", lambda task, active: {})
    monkeypatch.setattr(stage_wiring, "Uploader", lambda device: None)
    task = SimpleNamespace(
        config=SimpleNamespace(step_limit_s=lambda step_s: 30.0),
        model=SimpleNamespace(sides_of=lambda first, last: (), targets=(), sublayers=(1, 2, 3)),
    )
    plan = SimpleNamespace(boundaries=(0, 1, 2, 3), predicted_step_s=0.1, recomputes=False)
    links = StageWiring(
        task,
        world,
        plan,
        Topology(3, 3, 3),  # type: ignore[arg-type]
        Groups(group, group, None),
    ).links()
    assert isinstance(links.below, ProcessLinkBelow) and isinstance(links.above, ProcessLinkAbove)
    ends = (
        links.below.activations,
        links.below.gradients,
        links.above.activations,
        links.above.gradients,
    )
    watchdogs = {end._peer.watchdog for end in ends}
    assert len(watchdogs) == 1 and (None not in watchdogs) == on_gpu
    assert {links.below.activations.device, links.above.gradients.device} == {GPU}


class FakeStore(ShardStore):
    """Hold a shard, and note where what is put lives."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def read(self, shard: str) -> Shard:
        return dict(self.shard)

    def put(self, shard: str, tensors: Shard) -> None:
        self.shard |= tensors

    def drop(self, shard: str, names: Any) -> None:
        for name in names:
            del self.shard[name]


def carry(monkeypatch: pytest.MonkeyPatch, traffic: Traffic, *, rank: int) -> FakeStore:
    """Send a GPU's weight, moment and step count from rank 0 to rank 1; return rank's store."""
    shard = {
        "weight": torch.empty(9000, device=GPU),
        "moment": torch.empty(7, device=GPU),
        "step": torch.empty(()),
    }
    piece = Piece("shard", tuple(PieceTensor.of(name, t) for name, t in shard.items()))
    store = FakeStore(shard if rank == 0 else {})
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group=None: [0, 1])
    group = backend(monkeypatch, GLOO)
    journey = _Journey({"piece": piece}, store, group=group, device=GPU)
    journey.run([Move("piece", 0, 1, 0)], [] if rank else ["piece"])
    return store


def test_over_gloo_shards_of_a_gpu_travel_through_host_memory_and_live_where_they_did(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert carry(monkeypatch, traffic, rank=0).shard == {}
    sent = [(m.device, m.nbytes) for m in traffic.messages]
    traffic.messages.clear()
    arrived = carry(monkeypatch, traffic, rank=1).shard
    # Both ends lay out the same messages: the small ones together.
    assert [(m.device, m.nbytes) for m in traffic.messages] == sent == [(CPU, 36000), (CPU, 32)]
    assert {name: t.device for name, t in arrived.items()} == {
        "weight": GPU,
        "moment": GPU,
        "step": CPU,
    }


@pytest.mark.parametrize(("name", "place"), [(NCCL, GPU), (GLOO, CPU)])
def test_a_gpu_s_gradients_are_summed_in_host_memory_over_gloo_and_come_back(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch, name: str, place: torch.device
) -> None:
    parameter = nn.Parameter(torch.empty(4, 3, device=GPU))
    parameter.grad = torch.empty(4, 3, device=GPU)
    watched: list[str] = []
    reducer = GradientReducer([parameter], backend(monkeypatch, name), watch=watched.append)
    reducer.finish()
    assert [message.device for message in traffic.messages] == [place]
    assert parameter.grad.device == GPU
    # A rank that was gone let NCCL end the process, at twice the limit and without its name.
    text = "rank 0 waited for rank 1 (gradients of a stage)"
    assert watched == ([text] if place == GPU else [])
    reducer.close()


class LostSum:
    """Stand for a watchdog that had to abort a sum of gradients."""

    def settle(self) -> None:
        raise PeerError("rank 0 waited for rank 1 (gradients of a stage)")


def step_after_a_lost_sum() -> tuple[str, int, bool]:
    """Make a step with sums that were aborted; return the error, and what it let out."""
    with tiny_trainer(global_batch_size=8, pipeline_length=1) as trainer:
        trainer.step()
        stage, before = stage_of(trainer), [p.detach().clone() for p in weights_of(trainer)]
        told: list[Any] = []
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(stage._wiring, "_watchdog", LostSum())
            patching.setattr(stage._wiring, "sums_of", told.append)
            with pytest.raises(PeerError, match="waited for rank 1") as caught:
                trainer.step()
        same = all(map(torch.equal, before, weights_of(trainer)))
        return str(caught.value), len(told), same


def weights_of(trainer: Any) -> list[Tensor]:
    return list(model_of(trainer).parameters())


def test_no_number_of_an_aborted_sum_leaves_a_rank_or_becomes_a_weight(two_ranks: Pool) -> None:
    text = "rank 0 waited for rank 1 (gradients of a stage)"
    assert two_ranks.run(step_after_a_lost_sum) == [(text, 0, True)] * 2


@pytest.mark.parametrize(("name", "place"), [(NCCL, GPU), (GLOO, CPU)])
@pytest.mark.parametrize("sends", [True, False])
def test_links_are_measured_with_messages_where_training_has_them(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch, name: str, place: torch.device, sends: bool
) -> None:
    world = World(0, 2, 2, GPU, backend(monkeypatch, name), owned=False)
    _pass(world, torch.empty(8, device=GPU), 1, sends=sends)
    assert traffic.events == [f"{'send' if sends else 'recv'} {place}"]

"""The recorder sees every communication of real ranks, whoever posts it, and labels what they compute."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import vizkit as vk
from tests.distributed.readings import kinds, table
from vizkit.record import Call, SpanClosed, SpanOpened, Wait
from vizkit.trace import Role

FLOAT_BYTES = 4


def every_collective() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    one, all_of_them = torch.ones(6), [torch.ones(6) for _ in range(n)]
    dist.all_reduce(one)
    dist.broadcast(one, src=1)
    dist.reduce(one, dst=1)
    dist.all_gather(all_of_them, one)
    dist.all_gather_into_tensor(torch.ones(6 * n), one)
    dist.gather(one, all_of_them if me == 1 else None, dst=1)
    dist.scatter(one, all_of_them if me == 1 else None, src=1)
    dist.reduce_scatter(one, all_of_them)
    dist.reduce_scatter_tensor(torch.ones(6), torch.ones(6 * n))
    dist.all_to_all_single(torch.ones(6), one)
    dist.all_to_all([torch.ones(6) for _ in range(n)], all_of_them)
    dist.barrier()
    dist.monitored_barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_and_its_logical_bytes(world_size: int) -> None:
    """The tensor that is reduced or broadcast; all outputs of a gather; all inputs of a scatter or exchange."""
    run = vk.launch(every_collective, world_size=world_size)
    group, one = list(range(world_size)), 6 * FLOAT_BYTES
    assert table(run) == [
        ("all_reduce", group, one, 1),
        ("broadcast", group, one, 1),
        ("reduce", group, one, 1),
        ("all_gather", group, world_size * one, 2),
        ("gather", group, world_size * one, 1),
        ("scatter", group, world_size * one, 1),
        ("reduce_scatter", group, world_size * one, 2),
        ("all_to_all", group, one, 1),
        ("all_to_all", group, world_size * one, 1),
        ("barrier", group, 0, 2),
    ]
    roots = {call.kind.value: call.peer for call in run.record.ranks[0].calls}
    assert [roots[kind] for kind in ("broadcast", "reduce", "gather", "scatter", "all_reduce")] == [1, 1, 1, 1, -1]
    assert {call.algorithm for call in run.record.ranks[0].calls if call.kind.value == "all_reduce"} == {"ring_down"}


def uneven_exchange() -> list[float]:
    me, n = dist.get_rank(), dist.get_world_size()
    sizes = [me + other + 1 for other in range(n)]
    received = torch.empty(sum(sizes))
    dist.all_to_all_single(received, torch.full((sum(sizes),), float(me)), sizes, sizes)
    return received.tolist()


def test_an_uneven_all_to_all_says_who_got_how_much() -> None:
    """`split_bytes` has what this rank sends to each member."""
    run = vk.launch(uneven_exchange, world_size=2)
    assert run.results == [[0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0]]
    assert [next(rank.calls).split_bytes for rank in run.record.ranks] == [(4, 8), (8, 12)]


def messages() -> int:
    me = dist.get_rank()
    buffer = torch.zeros(5)
    if me == 0:
        dist.send(torch.ones(5), 1, tag=3)
        operations = [dist.P2POp(dist.isend, torch.ones(7), 1), dist.P2POp(dist.irecv, torch.ones(2), 1)]
    else:
        source = dist.recv(buffer, tag=3)  # from anybody
        assert source == 0
        operations = [dist.P2POp(dist.irecv, torch.ones(7), 0), dist.P2POp(dist.isend, torch.ones(2), 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return int(buffer.sum())


def test_messages_have_their_other_end_and_match_across_ranks() -> None:
    """Send and receive share an operation, also where the receiver did not say from whom."""
    run = vk.launch(messages, world_size=2)
    assert run.results == [0, 5]
    assert table(run) == [("send", [0, 1], 20, 1), ("send", [0, 1], 28, 1), ("send", [1, 0], 8, 1)]
    assert {call.peer for call in run.record.ranks[1].calls} == {0}
    trace = run.replay()
    for number in range(3):
        pair = [s for s in trace if s.operation == number and s.kind.role is Role.COMMUNICATION]
        assert sorted(span.kind.value for span in pair) == ["receive", "send"]


def subgroups() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=mesh.get_group("tp"))
    y = torch.tensor(float(dist.get_rank()))
    dist.broadcast(y, src=dist.get_rank() % 2, group=mesh.get_group("dp"))
    odd = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        dist.all_reduce(y, group=odd)
        if dist.get_rank() == 1:
            dist.send(y, 3, group=odd)
        else:
            dist.recv(y, 1, group=odd)
    return [x.item(), y.item()]


def test_groups_and_meshes_are_named_by_global_ranks() -> None:
    """Ranks, roots and peers are global in every group."""
    run = vk.launch(subgroups, world_size=4)
    assert [x for x, _ in run.results] == [1.0, 1.0, 5.0, 5.0]
    assert sorted(map(tuple, run.collectives["group ranks"])) == [(0, 1), (0, 2), (1, 3), (1, 3), (1, 3), (2, 3)]
    by_kind = {call.kind.value: call for call in run.record.ranks[3].calls}
    assert by_kind["broadcast"].peer == 1
    assert by_kind["receive"].peer == 1


def looks_like_gloo() -> tuple[str, str, int]:
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    things = [f"from {dist.get_rank()}"]
    dist.broadcast_object_list(things, src=1)
    return dist.get_backend(), things[0], len(objects)


def test_user_code_still_sees_gloo() -> None:
    """The recording group has the backend's name, and object collectives work on it."""
    run = vk.launch(looks_like_gloo, world_size=2)
    assert run.results == [("gloo", "from 1", 2)] * 2
    assert set(run.collectives["op"]) == {"all_gather", "broadcast"}


def coalesced() -> list[float]:
    tensors = [torch.ones(3), torch.ones(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [tensor.sum().item() for tensor in tensors]


def test_coalesced_forms_count_all_their_tensors() -> None:
    """One call, the bytes of all tensors."""
    run = vk.launch(coalesced, world_size=2)
    assert run.results[0] == [12.0, 20.0]
    assert table(run) == [("all_reduce", [0, 1], 8 * FLOAT_BYTES, 2)]


def fail_in_a_span() -> float:
    with vk.span("forward", kind="F"):
        vk.span("abandoned", kind="data").__enter__()
        return 1 / 0


def spans_and_failures() -> None:
    x = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([x], 0.1)
    with vk.span("step", kind="compute"):
        with pytest.raises(ZeroDivisionError):
            fail_in_a_span()
        with vk.span("mine", kind="I"):
            checkpoint(lambda y: y * y, x, use_reentrant=True).sum().backward()
        torch.autograd.grad((x * x).sum(), x)
        with pytest.raises(RuntimeError):
            x.sum().backward(torch.ones(7))
        optimizer.step()
        with vk.span("update", kind="optimizer"):
            optimizer.step()

    @vk.span("decorated", kind="W")
    def twice(again: bool) -> None:
        if again:
            twice(False)

    twice(True)


def test_spans_close_whatever_happens() -> None:
    """Exceptions, abandoned spans, re-entrant backwards and a label of the user's own leave a well-formed record."""
    run = vk.launch(spans_and_failures, world_size=1)
    depth, seen = 0, []
    for event in run.record.ranks[0].events:
        if isinstance(event, SpanOpened):
            seen.append((depth, event.label.kind.value, event.label.name))
            depth += 1
        depth -= isinstance(event, SpanClosed)
    assert depth == 0
    assert seen == [
        (0, "compute", "step"),
        (1, "F", "forward"),
        (2, "data", "abandoned"),
        (1, "I", "mine"),
        (1, "B", "backward"),
        (1, "B", "backward"),
        (1, "optimizer", "optimizer step"),
        (1, "optimizer", "update"),
        (0, "W", "decorated"),
        (1, "W", "decorated"),
    ]


def from_threads() -> float:
    total = torch.zeros(3)

    def reduce_alone(group: dist.ProcessGroup, value: float) -> None:
        with vk.span("not on this lane", kind="F"):
            tensor = torch.full((3,), value)
            for _ in range(20):
                dist.all_reduce(tensor, group=group, op=dist.ReduceOp.MAX)
            total.add_(tensor)

    groups = [dist.new_group() for _ in range(2)]
    threads = [threading.Thread(target=reduce_alone, args=(group, n + 1.0)) for n, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(2))
    for thread in threads:
        thread.join()
    return total.sum().item()


def test_other_threads_do_not_corrupt_the_record() -> None:
    """Calls from any thread are there, none lost, and spans of other threads stay off this rank's lane."""
    run = vk.launch(from_threads, world_size=2)
    assert run.results == [9.0, 9.0]
    assert sorted(times for *_, times in table(run)) == [20, 40]
    assert kinds(run) == []
    assert int(run.replay().payload_bytes.sum()) == run.record.payload_bytes


def overlapped() -> bool:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    polls = 0
    while not work.is_completed():
        polls += 1
    later = dist.all_reduce(torch.ones(4), async_op=True)
    later.get_future().wait()
    return work.wait()


def test_whoever_learns_of_a_completion_has_waited_for_it() -> None:
    """Polling until an operation is complete counts as a wait for it."""
    run = vk.launch(overlapped, world_size=2)
    events = run.record.ranks[0].events
    first = next(event for event in events if isinstance(event, Call))
    assert sum(isinstance(event, Wait) and first.call in event.calls for event in events) >= 2
    assert all(call.done_wall_ns >= call.start_wall_ns for call in run.record.ranks[0].calls)


def allocate() -> int:
    held = []
    for _ in range(5):
        held.append(torch.ones(2_000_000))
        with vk.span("touch"):
            held[-1].add_(1)
    return len(held)


def test_memory_is_sampled_on_request() -> None:
    """Five tensors of 8 MB show as at least 32 MB more; without the request there are no samples."""
    run = vk.launch(allocate, world_size=1, sample_memory=True)
    (counter,) = run.trace.counters
    assert counter.values.max() - counter.values[0] >= 32_000_000
    assert (counter.times_ns[1:] > counter.times_ns[:-1]).all()
    (virtual,) = run.replay().counters
    assert len(virtual.values) == len(counter.values)
    assert virtual.times_ns.max() <= run.replay().duration_ns
    assert vk.launch(allocate, world_size=1).trace.counters == ()


def test_a_span_costs_nothing_outside_a_rank_and_still_checks_its_kind() -> None:
    """The same cell runs in the notebook's own process; a wrong kind is refused there, too."""
    with vk.span("forward", kind="forward", microbatch=2, stage=1):
        pass
    with pytest.raises(vk.InvalidInputError) as caught:
        vk.span("exchange", kind="all_reduce")
    assert str(caught.value) == (
        "kind='all_reduce': is not a kind of compute; use one of F, B, I, W, optimizer, compute, data"
    )

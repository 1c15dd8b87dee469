"""The bytes that `vizkit.metrics.traffic` states are the bytes that gloo's TCP connections really carry."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

import vizkit as vk
from vizkit.metrics import traffic
from vizkit.trace import Span, SpanKind, Trace

TCP_INFO, BYTES_RECEIVED_OFFSET = 11, 128  # linux/tcp.h: struct tcp_info
SMALL, LARGE = 1_000_003, 4_000_001  # float32 elements; odd, so that nothing divides
ELEMENT_BYTES = 4
WHOLE_RUN = "whole run"
Ports = tuple[int, int]


def received_bytes() -> dict[Ports, int]:
    """Bytes that have come in over each TCP connection of this process, by (its own port, the peer's port)."""
    counts = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue
        with connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                ports = connection.getsockname()[1], connection.getpeername()[1]
                info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
            except OSError:
                continue
            counts[ports] = struct.unpack_from("<Q", info, BYTES_RECEIVED_OFFSET)[0]
    return counts


def kernel_counts_bytes() -> bool:
    """Whether this kernel says how many bytes a TCP connection has received."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            sender.sendall(b"x" * 1000)
            receiver.recv(1000, socket.MSG_WAITALL)
            ports = receiver.getsockname()[1], receiver.getpeername()[1]
            try:
                return received_bytes().get(ports) == 1000
            except (OSError, struct.error):
                return False


def chunks(x: torch.Tensor) -> list[torch.Tensor]:
    n = dist.get_world_size()
    return [part.clone() for part in x[: len(x) // n * n].chunk(n)]


def on(root: int, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return tensors if dist.get_rank() == root else None


def message(x: torch.Tensor) -> None:
    {0: lambda: dist.send(x, 1), 1: lambda: dist.recv(x, 0)}.get(dist.get_rank(), lambda: None)()


def uneven_all_to_all(x: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    sends, receives = uneven_splits(n)[rank], [row[rank] for row in uneven_splits(n)]
    dist.all_to_all_single(torch.empty(sum(receives)), x[: sum(sends)], receives, sends)


def uneven_splits(n: int) -> list[list[int]]:
    """Elements that rank i sends to rank j."""
    return [[10_000 * (1 + 2 * i + j) for j in range(n)] for i in range(n)]


CASES: dict[str, tuple[SpanKind, int, int, Callable[[torch.Tensor], object]]] = {
    "all_reduce": (SpanKind.ALL_REDUCE, SMALL, -1, dist.all_reduce),
    "large all_reduce": (SpanKind.ALL_REDUCE, LARGE, -1, dist.all_reduce),
    "all_gather": (
        SpanKind.ALL_GATHER,
        SMALL,
        -1,
        lambda x: dist.all_gather([torch.empty_like(c) for c in chunks(x)], chunks(x)[0]),
    ),
    "reduce_scatter": (
        SpanKind.REDUCE_SCATTER,
        SMALL,
        -1,
        lambda x: dist.reduce_scatter(torch.empty_like(chunks(x)[0]), chunks(x)),
    ),
    "broadcast from 0": (SpanKind.BROADCAST, SMALL, 0, lambda x: dist.broadcast(x, 0)),
    "broadcast from 1": (SpanKind.BROADCAST, SMALL, 1, lambda x: dist.broadcast(x, 1)),
    "reduce to 0": (SpanKind.REDUCE, SMALL, 0, lambda x: dist.reduce(x, 0)),
    "large reduce to 1": (SpanKind.REDUCE, LARGE, 1, lambda x: dist.reduce(x, 1)),
    "gather to 1": (
        SpanKind.GATHER,
        SMALL,
        1,
        lambda x: dist.gather(chunks(x)[0], on(1, [torch.empty_like(c) for c in chunks(x)]), dst=1),
    ),
    "scatter from 1": (
        SpanKind.SCATTER,
        SMALL,
        1,
        lambda x: dist.scatter(torch.empty_like(chunks(x)[0]), on(1, chunks(x)), src=1),
    ),
    "all_to_all": (
        SpanKind.ALL_TO_ALL,
        SMALL,
        -1,
        lambda x: dist.all_to_all_single(torch.cat(chunks(x)), torch.cat(chunks(x))),
    ),
    "uneven all_to_all": (SpanKind.ALL_TO_ALL, 0, -1, uneven_all_to_all),
    "send from 0 to 1": (SpanKind.SEND, SMALL, 1, message),
}


def measure() -> dict[str, dict[Ports, int]]:
    """Run every case; what each of this rank's connections received during it, and in all."""
    results: dict[str, dict[Ports, int]] = {}
    for name, (_, elements, _, collective) in CASES.items():
        x = torch.ones(max(elements, LARGE))[: elements or None]
        collective(x)  # the first call opens connections
        dist.barrier()
        before = received_bytes()
        dist.barrier()
        collective(x)
        after = received_bytes()
        results[name] = {ports: count - before.get(ports, 0) for ports, count in after.items()}
    dist.barrier()
    return {**results, WHOLE_RUN: received_bytes()}


Measured = tuple[vk.Run, dict[str, np.ndarray]]


@pytest.fixture(scope="module", params=[2, 3, 4])
def measured(request: pytest.FixtureRequest) -> Measured:
    """A run, and case → bytes from rank to rank, as the kernel counted them."""
    if not kernel_counts_bytes():
        pytest.skip("this kernel does not count the bytes of a TCP connection (TCP_INFO), so nothing can be measured")
    n = request.param
    run = vk.launch(measure, world_size=n, device="cpu")
    matrices = {name: np.zeros((n, n), np.int64) for name in (*CASES, WHOLE_RUN)}
    for name, matrix in matrices.items():
        owner = {ports: rank for rank in range(n) for ports in run.results[rank][name]}
        for receiver in range(n):
            for (own, peers), count in run.results[receiver][name].items():
                if (sender := owner.get((peers, own))) is not None:
                    matrix[sender, receiver] += count
    return run, matrices


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_traffic_states_what_each_connection_carries(name: str, measured: Measured) -> None:
    """For every ordered pair of ranks, stated and measured bytes differ by less than 1 % of the payload."""
    kind, elements, peer, _ = CASES[name]
    _, matrices = measured
    n = len(matrices[name])
    splits = uneven_splits(n) if name.startswith("uneven") else None
    payloads = [sum(row) for row in splits] if splits else [elements] * n
    spans = [
        Span(
            rank,
            kind,
            0,
            1,
            payload_bytes=payloads[rank] * ELEMENT_BYTES,
            peer=peer,
            operation=0,
            split_bytes=tuple(count * ELEMENT_BYTES for count in splits[rank]) if splits else (),
        )
        for rank in range(n)
        if kind is not SpanKind.SEND or rank == 0
    ]
    stated = traffic(Trace.from_spans(spans, clock="wall", world_size=n, notes={"backend": "gloo"})).wire_bytes

    assert stated.sum() > 0
    np.testing.assert_allclose(matrices[name], stated, rtol=0, atol=0.01 * max(payloads) * ELEMENT_BYTES)


@pytest.mark.slow
def test_the_trace_of_a_run_states_all_bytes_that_it_moved(measured: Measured) -> None:
    """Recorder, replay and `traffic` together, over all collectives of the run: within 1 %, for every pair of ranks."""
    run, matrices = measured
    for trace in (run.trace, run.replay()):
        np.testing.assert_allclose(matrices[WHOLE_RUN], traffic(trace).wire_bytes, rtol=0.01, atol=100_000)

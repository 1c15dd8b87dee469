"""Programs that look as if they hung, and do not: they are left alone, and their record replays."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import vizkit as vk

PAUSE_S = 2.5  # more than two looks for a hang are apart


def receive_posted_early() -> None:
    """Rank 0 sleeps between posting a receive and sending what the other waits for."""
    if dist.get_rank() == 0:
        pending = dist.irecv(torch.zeros(3), 1)
        time.sleep(PAUSE_S)
        dist.send(torch.ones(3), 1)
        pending.wait()
    else:
        dist.recv(torch.zeros(3), 0)
        dist.send(torch.ones(3), 0)


def another_thread_sends() -> None:
    """Both main threads wait for each other; a second thread of rank 0 sends in the end."""

    def send_later() -> None:
        time.sleep(PAUSE_S)
        dist.send(torch.ones(1), 1, tag=5)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=send_later)
        thread.start()
        dist.recv(torch.zeros(1), 1, tag=6)
        thread.join()
    else:
        dist.recv(torch.zeros(1), 0, tag=5)
        dist.send(torch.ones(1), 0, tag=6)


def equal_and_unequal_splits() -> None:
    """Rank 1 sends and receives equal parts in the all-to-all in which the others do not."""
    rows = [[1, 2, 5], [2, 2, 2], [0, 2, 4]]
    rank = dist.get_rank() % 3
    sent, received = rows[rank], [row[rank] for row in rows]
    dist.all_to_all_single(torch.zeros(sum(received)), torch.ones(sum(sent)), received, sent)


@pytest.mark.parametrize(
    ("function", "world_size"), [(receive_posted_early, 2), (another_thread_sends, 2), (equal_and_unequal_splits, 3)]
)
def test_it_ends_and_replays(function, world_size: int) -> None:
    """The launch returns, and the virtual trace moves what the wall trace moved."""
    run = vk.launch(function, world_size=world_size)
    moved = vk.metrics.traffic(run.trace).wire_bytes
    assert moved.sum() > 0
    assert (vk.metrics.traffic(run.replay()).wire_bytes == moved).all()


def test_a_lost_data_server_is_no_hang() -> None:
    """A rank's own timeout leads the report, though the others wait for it."""

    def fetch() -> None:
        if dist.get_rank() == 1:
            raise TimeoutError("the data server timed out")
        dist.barrier()

    with pytest.raises(vk.RankFailedError, match=r"^rank 1 raised TimeoutError: the data server timed out") as caught:
        vk.launch(fetch, world_size=2)
    assert type(caught.value) is vk.RankFailedError

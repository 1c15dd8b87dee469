"""Which device and backend the ranks of a launch use."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

from vizkit.errors import InvalidInputError

DEVICE_ENV = "VIZKIT_DEVICE"


class DeviceType(enum.StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Placement:
    """Device type and backend of a launch, with the reason for them."""

    device: DeviceType
    backend: str
    reason: str

    def of_rank(self, rank: int, num_gpus: int) -> str:
        """Torch's name of this rank's device."""
        return f"cuda:{rank % num_gpus}" if self.device is DeviceType.CUDA else "cpu"


def place(requested: str, world_size: int, num_gpus: int) -> Placement:
    """Choose device and backend: a GPU for each rank with NCCL where there are enough, else gloo on the CPU.

    Raises `InvalidInputError` for an unknown device and for "cuda" on a machine without GPUs.

    >>> place("auto", 4, 0).backend, place("auto", 4, 8).backend, place("cuda", 4, 1).backend
    ('gloo', 'nccl', 'gloo')
    """
    if requested not in ("auto", *DeviceType):
        raise InvalidInputError.because("device", requested, "is not a device", 'use "auto", "cpu" or "cuda"')
    if requested == DeviceType.CUDA and num_gpus == 0:
        raise InvalidInputError.because(
            "device", requested, "this machine has no GPU that torch can use", 'use device="auto" or device="cpu"'
        )
    if requested == DeviceType.CPU:
        return Placement(DeviceType.CPU, "gloo", "asked for")
    if num_gpus >= world_size:
        return Placement(DeviceType.CUDA, "nccl", "one GPU for each rank")
    if requested == DeviceType.CUDA:
        return Placement(DeviceType.CUDA, "gloo", f"{world_size} ranks share {num_gpus} GPU(s), which NCCL refuses")
    found = f"{num_gpus} GPU(s) for {world_size} ranks" if num_gpus else "no GPU found"
    return Placement(DeviceType.CPU, "gloo", found)


def count_gpus() -> int:
    """GPUs that torch could use; does not start CUDA in this process."""
    import torch

    return torch.cuda.device_count()


def device() -> object:
    """This rank's `torch.device`; outside a rank, the CPU.

    >>> device()
    device(type='cpu')
    """
    import torch

    return torch.device(os.environ.get(DEVICE_ENV, DeviceType.CPU.value))

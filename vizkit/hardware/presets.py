"""Clusters by name; each docstring says whose figures they are, and of when."""

from __future__ import annotations

from collections.abc import Callable

from vizkit.hardware.cluster import Cluster
from vizkit.hardware.device import Device
from vizkit.hardware.link import Link
from vizkit.sizes import whole_number

A100 = Device(
    name="A100-80GB",
    matrix_ceiling=0.75,
    peak_flops_per_s=312e12,
    peak_32bit_flops_per_s=156e12,
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_per_s=2.039e12,
)
H100 = Device(
    name="H100-80GB",
    peak_flops_per_s=989e12,
    peak_32bit_flops_per_s=494e12,
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_per_s=3.35e12,
    matrix_ceiling=0.65,
)
RTX_4090 = Device(
    name="RTX 4090",
    peak_flops_per_s=165e12,
    peak_32bit_flops_per_s=82.6e12,
    memory_bytes=24 * 2**30,
    memory_bandwidth_bytes_per_s=1.008e12,
    matrix_ceiling=0.75,
)
LAPTOP_CPU = Device(
    name="8-core CPU",
    peak_flops_per_s=0.8e12,
    peak_32bit_flops_per_s=0.8e12,
    memory_bytes=16 * 2**30,
    memory_bandwidth_bytes_per_s=60e9,
    matrix_ceiling=0.7,
)


def dgx_a100(num_nodes: int = 1) -> Cluster:
    """Nodes of 8 A100-80GB SXM, as in NVIDIA's Selene.

    NVIDIA's A100 data sheet (2021): 312 TFLOP/s of 16-bit and 156 of TF32 matrix products, dense, 80 GB (GiB) at 2,039
    GB/s, NVLink 600 GB/s in both directions together. Each node has 8 cards of 200 Gb/s HDR InfiniBand (Narayanan et
    al., SC'21, section 5). What programs get:

    - 230 GB/s of NVLink's 300: nccl-tests reports 200 to 235 (its issue 149, 2023);
    - 12.6 GB/s of a card's 25: what all-reduces got in a training run on 3,072 devices (SC'21, section 5.9: 12.9 TB/s
      of bisection bandwidth); nccl-tests reports up to 22.7 on two nodes (its issue 100, 2022);
    - 0.75 of the peak: chosen once, so that the ten rows of SC'21's table 1 together come out right.
    """
    return Cluster(
        device=A100, devices_per_node=8, num_nodes=num_nodes, inside=Link(3e-6, 230e9), between=Link(10e-6, 12.6e9)
    )


def dgx_h100(num_nodes: int = 1) -> Cluster:
    """Nodes of 8 H100-80GB SXM5, each with a card of 400 Gb/s NDR InfiniBand.

    NVIDIA's H100 data sheet (2022/2023): 989 TFLOP/s of 16-bit and 494 of TF32 matrix products, dense, 80 GB at 3.35
    TB/s, NVLink 900 GB/s in both directions together. What programs get are estimates, not held against a published
    training run: 0.65 of the peak, as it lowers its clock under load, 370 GB/s of NVLink's 450, and of a card's 50 GB/s
    half, as on `dgx_a100`.
    """
    return Cluster(
        device=H100, devices_per_node=8, num_nodes=num_nodes, inside=Link(3e-6, 370e9), between=Link(10e-6, 25e9)
    )


def consumer_pc(num_gpus: int = 2) -> Cluster:
    """One computer with GeForce RTX 4090 cards on PCIe 4.0.

    NVIDIA's Ada GPU architecture white paper (2022): 165.2 TFLOP/s of 16-bit matrix products that add up in 32 bits,
    82.6 of 32-bit ones, 24 GB at 1,008 GB/s; no NVLink, and no copies from card to card without the host's memory.
    PCIe 4.0 ×16 moves 32 GB/s each way; through the host a ring gets some 10 of them (an estimate).
    """
    return Cluster(device=RTX_4090, devices_per_node=num_gpus, inside=Link(20e-6, 10e9))


def laptop(num_processes: int = 1) -> Cluster:
    """A laptop without a GPU, 8 cores and 16 GiB in all, divided among `num_processes` ranks.

    Estimates, not a data sheet's: 8 cores of 2022 with AVX2 at 3.1 GHz, two 8-wide multiply-adds a cycle in 32 bits,
    0.8 TFLOP/s together, two channels of LPDDR5 or DDR5 at 60 GB/s; ranks speak through memory. CPUs without bfloat16
    units are no faster in 16 bits.
    """
    whole, num_processes = LAPTOP_CPU, whole_number("num_processes", num_processes)
    share = Device(
        name=f"1/{num_processes} of an 8-core CPU" if num_processes > 1 else whole.name,
        peak_flops_per_s=whole.peak_flops_per_s / num_processes,
        peak_32bit_flops_per_s=whole.peak_flops_per_s / num_processes,
        memory_bytes=whole.memory_bytes / num_processes,
        memory_bandwidth_bytes_per_s=whole.memory_bandwidth_bytes_per_s / num_processes,
        matrix_ceiling=whole.matrix_ceiling,
    )
    return Cluster(device=share, devices_per_node=num_processes, inside=Link(30e-6, 5e9))


PRESETS: dict[str, Callable[[int], Cluster]] = {
    "DGX A100": dgx_a100,
    "DGX H100": dgx_h100,
    "PC with RTX 4090": consumer_pc,
    "Laptop": laptop,
}
"""By name for a menu; the argument is the number of nodes of a DGX, of cards in a PC, of processes on a laptop."""

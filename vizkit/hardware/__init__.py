"""What devices and links can do, and the clusters that are made of them."""

from vizkit.hardware.cluster import Cluster
from vizkit.hardware.device import Device
from vizkit.hardware.link import FREE_LINK, Link
from vizkit.hardware.presets import PRESETS, consumer_pc, dgx_a100, dgx_h100, laptop

__all__ = [
    "FREE_LINK",
    "PRESETS",
    "Cluster",
    "Device",
    "Link",
    "consumer_pc",
    "dgx_a100",
    "dgx_h100",
    "laptop",
]

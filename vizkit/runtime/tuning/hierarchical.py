"""An all-reduce in two levels: most of it inside nodes, and only each rank's part of the sum between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vizkit.collectives.exchanges import Nodes
from vizkit.runtime.device import device


@dataclass(frozen=True, eq=False)
class Levels:
    """This rank's groups on a mesh of nodes: `inside` its node, and `between` nodes, those of its place in each."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


def two_levels(ranks_per_node: int) -> Levels:
    """Makes the groups of both levels; all ranks call it together.

    Raises `InvalidInputError` where `ranks_per_node` does not divide the ranks.
    """
    nodes = Nodes(dist.get_world_size(), ranks_per_node)
    mesh = dist.init_device_mesh(
        torch.device(str(device())).type, (nodes.count, ranks_per_node), mesh_dim_names=("node", "place")
    )
    return Levels(inside=mesh.get_group("place"), between=mesh.get_group("node"))


def hierarchical_all_reduce(tensor: torch.Tensor, levels: Levels) -> None:
    """Puts the sum over all ranks into `tensor`: the same sum as `dist.all_reduce`, added in another order.

    Reduce-scatter inside the node, all-reduce of this rank's part between nodes, all-gather inside the node. Between
    nodes go 2(m−1)/m of 1/g of the bytes from each rank, for m nodes of g ranks
    (`vizkit.collectives.exchanges.hierarchical_all_reduce`). A length that g does not divide is filled up with zeros.
    """
    tensor = tensor.detach()  # shares memory; the sum is no step of autograd, as with `dist.all_reduce`
    size = levels.inside.size()
    part = tensor.new_empty(-(-tensor.numel() // size))
    whole = tensor.new_zeros(size * len(part))
    whole[: tensor.numel()] = tensor.flatten()
    dist.reduce_scatter_single(part, whole, group=levels.inside)
    dist.all_reduce(part, group=levels.between)
    dist.all_gather_single(whole, part, group=levels.inside)
    tensor.copy_(whole[: tensor.numel()].view_as(tensor))

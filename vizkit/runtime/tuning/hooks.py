"""Communication hooks of DDP: torch's own for fp16 and PowerSGD, and those of this kit, each by its exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from vizkit.errors import InvalidInputError
from vizkit.runtime.recorder import span
from vizkit.runtime.tuning.hierarchical import Levels, hierarchical_all_reduce
from vizkit.runtime.tuning.quantised import quantised_all_reduce
from vizkit.runtime.tuning.tunings import Exchange, Tuning

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
POWER_SGD_STARTS_AT = 2
"""Steps with plain all-reduces first, as torch asks for where errors are fed back."""


def register(model: DistributedDataParallel, tuning: Tuning, levels: Levels) -> None:
    """Gives `model` the hook of the tuning's exchange; none for a plain all-reduce."""
    if make := _HOOKS.get(tuning.exchange):
        model.register_comm_hook(*make(model, tuning, levels))


def averaging(reduce: Callable[[torch.Tensor], None]) -> Hook:
    """A hook that averages a bucket by `reduce`, which sums over all ranks in place and is over when it returns.

    It stops the backward while it runs, so buckets do not overlap compute; it divides first, as torch's own hooks do.
    """

    def averaged(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with span("exchange"):
            buffer = bucket.buffer().div_(dist.get_world_size())
            reduce(buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    return lambda state, bucket: averaged(bucket)  # torch refuses annotations that are strings


def _fp16(model: DistributedDataParallel, tuning: Tuning, levels: Levels) -> tuple[Any, Hook]:
    return None, default_hooks.fp16_compress_hook


def _hierarchical(model: DistributedDataParallel, tuning: Tuning, levels: Levels) -> tuple[Any, Hook]:
    return None, averaging(lambda buffer: hierarchical_all_reduce(buffer, levels))


def _int8(model: DistributedDataParallel, tuning: Tuning, levels: Levels) -> tuple[Any, Hook]:
    return None, averaging(lambda buffer: quantised_all_reduce(buffer, block=tuning.block))


def _local(model: DistributedDataParallel, tuning: Tuning, levels: Levels) -> tuple[Any, Hook]:
    """Torch's hook for gradients that stay on the rank, or in the node; whoever trains averages the parameters."""
    in_node = tuning.exchange is Exchange.IN_NODE
    state = post_localSGD_hook.PostLocalSGDState(None, levels.inside, 0, post_local_gradient_allreduce=in_node)
    return state, post_localSGD_hook.post_localSGD_hook


def _power_sgd(model: DistributedDataParallel, tuning: Tuning, levels: Levels) -> tuple[Any, Hook]:
    """Torch's hook in one bucket: with two, gloo's threads would post their all-reduces in no fixed order."""
    for name, p in model.module.named_parameters():
        if p.requires_grad and not (p.dim() and p.numel()):
            raise InvalidInputError.because(
                name, f"parameter of shape {tuple(p.shape)}", "is no matrix to PowerSGD", "give it shape (1,) or more"
            )
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if gradient_bytes > tuning.bucket_mb * 2**20:
        raise InvalidInputError.because(
            "bucket_mb",
            tuning.bucket_mb,
            f"cuts {gradient_bytes:,} bytes into buckets, whose low-rank all-reduces overtake each other on gloo",
            f"use bucket_mb={-(-gradient_bytes // 2**20)}, or more",
        )
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=tuning.rank,
        start_powerSGD_iter=POWER_SGD_STARTS_AT,
        use_error_feedback=tuning.error_feedback,
    )
    return state, lambda state, bucket: _waited_for(powerSGD_hook.powerSGD_hook, state, bucket)


def _waited_for(hook: Hook, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with span("exchange"):
        done = hook(state, bucket)
        done.wait()
    return done


_HOOKS: dict[Exchange, Callable[[DistributedDataParallel, Tuning, Levels], tuple[Any, Hook]]] = {
    Exchange.FP16: _fp16,
    Exchange.HIERARCHICAL: _hierarchical,
    Exchange.INT8: _int8,
    Exchange.NOTHING: _local,
    Exchange.IN_NODE: _local,
    Exchange.POWER_SGD: _power_sgd,
}

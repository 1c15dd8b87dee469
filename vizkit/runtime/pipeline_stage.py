"""One stage of a pipeline on this rank: torch's stage, with a span for each action.

Torch learns shapes by running every stage once more before the first step. Here the first microbatch itself tells them:
the stage that makes it sends what it looks like ahead of it, unrecorded. Nothing runs twice, buffers and random numbers
stay as they are in one process, and receive buffers live only as long as their microbatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import (
    TensorMeta,
    _derive_grad_metas,
    _make_tensor_from_meta,
    extract_tensor_metas,
)
from torch.distributed.pipelining.stage import _RecvInfo
from torch.utils._pytree import tree_map_only

from vizkit.errors import InvalidInputError
from vizkit.runtime.batches import Signature, shapes_text
from vizkit.runtime.pipeline_split import anchored, changeable, make_anchor, merged
from vizkit.runtime.recorder import span, unrecorded
from vizkit.trace import SpanKind

LossFunction = Callable[[Any, Any], torch.Tensor]
Metas = tuple[TensorMeta, ...]


class RecordedStage(PipelineStage):
    """Stage `stage` of `num_stages`, which differentiates `loss_scale` × the loss of each microbatch.

    `targets` is set before each step on the last stage; `losses` and `outputs` then hold what each microbatch gave.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: ProcessGroup | None,
        *,
        num_microbatches: int,
        has_backward: bool,
        splits_backward: bool,
        loss_fn: LossFunction | None,
        loss_scale: float,
        signature: Signature,
    ) -> None:
        super().__init__(module, stage, num_stages, device, group=group)
        self.chunks = num_microbatches
        self.has_backward = has_backward
        self._runtime_validate = False  # it wants gradients' metadata, which torch's first run would have made
        self._splits_backward = splits_backward and stage > 0  # torch does not split the backward of stage 0
        self._loss_fn = loss_fn
        self.loss_scale = loss_scale
        self._signature = signature
        self._is_announced = False
        self.targets: Sequence[Any] | None = None
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.to_differentiate: dict[int, torch.Tensor] = {}

    # ---- compute: a span for each action ---------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        with span("forward", SpanKind.FORWARD, self.stage_index, fwd_chunk_id):
            with _unwrapping():
                output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output=False)
            anchor = self._anchor(fwd_chunk_id) if self._splits_backward else None
            if self.is_last:
                self._finish_forward(fwd_chunk_id, output, anchor)
        self._forget_input(fwd_chunk_id)
        return output

    def _anchor(self, chunk: int) -> torch.Tensor:
        """Has what is differentiated on this stage depend on one input more, which it gives back."""
        outputs, inputs = self.fwd_cache[chunk]
        anchor = make_anchor()
        if not self.is_last:
            outputs = tuple(anchored(output, anchor) for output in outputs)
        self.fwd_cache[chunk] = (outputs, [*inputs, anchor])
        return anchor

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_first:
            self._check_arity(args)
            args = tuple(map(changeable, args))
        try:
            output = super().forward_maybe_with_nosync(*args, **kwargs)
        except Exception as error:
            source = "the batch" if self.is_first else f"stage {self.stage_index - 1}"
            error.add_note(f"in the forward of stage {self.stage_index}, which got {_looks(args)} from {source}")
            raise
        own = {buffer.untyped_storage().data_ptr() for buffer in self.submod.buffers()}
        output = tree_map_only(torch.Tensor, lambda tensor: _kept(tensor, own), output)
        if self.is_last:
            return output
        handed_on = self._handed_on(output, args)
        self._learn_outputs(handed_on)
        return handed_on if isinstance(output, (tuple, list)) else handed_on[0]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        kind = SpanKind.BACKWARD if full_backward else SpanKind.BACKWARD_INPUT
        name = "backward" if full_backward else "backward for inputs"
        with span(name, kind, self.stage_index, bwd_chunk_id):
            with _unwrapping(f"in the {name} of stage {self.stage_index}"):
                super().backward_one_chunk(
                    bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
                )
            # a backend sends nothing that is not contiguous, such as the gradient of a sum
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
            )
        self.grad_recv_info.pop(bwd_chunk_id, None)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        name = "backward for weights"
        with (
            span(name, SpanKind.BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id),
            _unwrapping(f"in the {name} of stage {self.stage_index}"),
        ):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        gradients, param_groups = super().backward_maybe_with_nosync(*args, **kwargs)
        return gradients, param_groups and merged(param_groups)

    def _finish_forward(self, chunk: int, output: Any, anchor: torch.Tensor | None) -> None:
        """On the last stage: the loss, and the output without its graph."""
        self.fwd_cache[chunk] = ((), self.fwd_cache[chunk][1])  # the loss is what is differentiated
        self.outputs[chunk] = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        if self._loss_fn is None or self.targets is None:
            return
        try:
            loss = self._loss_fn(output, self.targets[chunk])
        except Exception as error:
            error.add_note(f"in loss_fn, which got {_looks([output, self.targets[chunk]])} on stage {self.stage_index}")
            raise
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = _looks([loss]) if isinstance(loss, torch.Tensor) else loss
            raise InvalidInputError.because(
                "loss_fn", given, "must return a tensor with one number", 'use a loss with reduction="mean" or "sum"'
            )
        self.losses[chunk] = loss.detach()  # read after the step: reading waits for a GPU
        if self.has_backward:
            scaled = loss * self.loss_scale
            self.to_differentiate[chunk] = scaled if anchor is None else anchored(scaled, anchor)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        for table in (self.losses, self.outputs, self.to_differentiate, self.args_recv_info, self.grad_recv_info):
            table.clear()

    # ---- communication: shapes come with the first microbatch ------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        if not self._is_announced:
            self._is_announced = True
            with unrecorded():
                self._send_meta((self._signature, self._stage_meta.outputs), self.stage_index + 1)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self._stage_meta.inputs is None:
            with unrecorded():
                signature, self._stage_meta.inputs = self._recv_meta(self.stage_index - 1)
            self._check_signature(signature)
        self.args_recv_info[fwd_chunk_id] = self._receives(self._stage_meta.inputs, self.stage_index - 1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self.grad_recv_info[bwd_chunk_id] = self._receives(self._gradients_of_outputs(), self.stage_index + 1)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        tensors = prev_stage_outputs if isinstance(prev_stage_outputs, (tuple, list)) else (prev_stage_outputs,)
        self._stage_meta.inputs = extract_tensor_metas(tuple(tensors))
        self.args_recv_info[mb_index] = self._receives(self._stage_meta.inputs, self.stage_index - 1, local=True)
        super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        metas = self._gradients_of_outputs()
        self.grad_recv_info[mb_index] = self._receives(metas, self.stage_index + 1)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.grad_send_info is None and not self.is_first:
            self.grad_send_info = [self.stage_index - 1] * len(self._stage_meta.inputs or ())
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _receives(
        self, metas: Sequence[TensorMeta | None] | None, source: int, local: bool = False
    ) -> tuple[_RecvInfo, ...]:
        assert metas is not None
        return tuple(
            _RecvInfo(
                f"from stage {source}",
                source,
                None if meta is None or local else _make_tensor_from_meta(meta, self.device),
                meta,
            )
            for meta in metas
        )

    def _gradients_of_outputs(self) -> tuple[TensorMeta | None, ...]:
        assert self._stage_meta.outputs is not None
        return _derive_grad_metas(self._stage_meta.outputs)

    def _forget_input(self, chunk: int) -> None:
        """The forward's graph holds what it needs of the input: no buffer outlives its microbatch."""
        if self._stage_meta.inputs is None:
            self._stage_meta.inputs = ()
        for info in self.args_recv_info.get(chunk, ()):
            info.buffer = None

    # ---- what a stage may take and return --------------------------------------------------------------------------

    def _check_signature(self, other: Signature) -> None:
        if other != self._signature:
            raise InvalidInputError.because(
                "microbatch of x",
                shapes_text(self._signature),
                f"on the rank of stage {self.stage_index - 1} it is {shapes_text(other)}",
                "give every rank the same batch: step(x, target=y) with the whole of x and y",
            )

    def _check_arity(self, inputs: Sequence[torch.Tensor]) -> None:
        try:
            inspect.signature(self.submod.forward).bind(*inputs)
        except TypeError as error:
            here, before = self.stage_index, self.stage_index - 1
            raise InvalidInputError.because(
                f"inputs of stage {here}",
                _looks(inputs),
                f"stage {before} returns {len(inputs)} tensor{'s' * (len(inputs) != 1)}, and the module of stage "
                f"{here} cannot be called with that: {error}",
                f"have stage {before} return what stage {here} takes; a tensor that skips a stage has to be handed "
                "through it, as one more output",
            ) from None

    def _handed_on(self, output: Any, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """What a stage returns, as tensors that can be sent."""
        tensors = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise InvalidInputError.because(
                    f"output of stage {self.stage_index}",
                    type(tensor).__name__,
                    "a stage hands a tensor or a tuple of tensors to the next",
                    "return tensors, and let each stage keep what is not one",
                )
        return tuple(tensor.contiguous() for tensor in tensors)

    def _learn_outputs(self, tensors: tuple[torch.Tensor, ...]) -> None:
        found = extract_tensor_metas(tensors)
        known = self._stage_meta.outputs
        assert found is not None
        if known is not None and _shapes(found) != _shapes(known):
            raise InvalidInputError.because(
                f"output of stage {self.stage_index}",
                _looks(tensors),
                f"the first microbatch gave {_looks(known)}, and all microbatches of a pipeline have one shape",
                "pad, so that each microbatch gives the same shape",
            )
        if known is not None and any(
            new.requires_grad > old.requires_grad for new, old in zip(found, known, strict=True)
        ):
            raise InvalidInputError.because(
                f"output of stage {self.stage_index}",
                _looks(tensors),
                "needs gradients and did not in the first step, when the next stage was told that it sends none back",
                "make a new vk.pipeline on each rank after unfreezing parameters",
            )
        if known is None:
            self._stage_meta.outputs = found
            self.act_send_info = {index: [self.stage_index + 1] for index in range(len(tensors))}


@contextmanager
def _unwrapping(note: str = "") -> Iterator[None]:
    """Torch wraps what a module raises in a `RuntimeError` with a dump of tensors: this raises what the module did."""
    try:
        yield
        return
    except RuntimeError as error:
        found = error.__cause__ or error
    if note:
        found.add_note(note)
    raise found from found.__cause__  # torch's wrapper is no part of the story


def _kept(tensor: torch.Tensor, own: Container[int]) -> torch.Tensor:
    """`tensor`, copied where it lies in a buffer of its module, which the next microbatch may write to."""
    is_in_buffer = tensor.grad_fn is None and tensor.untyped_storage().data_ptr() in own
    return tensor.clone() if is_in_buffer else tensor


def _shapes(metas: Sequence[Any] | None) -> list[tuple[Any, Any]]:
    return [(meta.shape, meta.dtype) for meta in metas or ()]


def _looks(values: Sequence[Any]) -> str:
    """
    >>> _looks([torch.zeros(2, 3), 1])
    'float32[2, 3], int'
    """
    return ", ".join(
        f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" if hasattr(v, "dtype") else type(v).__name__
        for v in values
    )

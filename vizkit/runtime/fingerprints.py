"""`fingerprint`: notes a hash of what this rank holds, for `vk.diagnose` to compare between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from time import monotonic_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vizkit.errors import InvalidInputError
from vizkit.fingerprints import Fingerprint
from vizkit.runtime.recorder import current_recorder

PARAMETERS = "parameters"


def fingerprint(
    held: Any, name: str = PARAMETERS, *, step: int | None = None, same: bool = True, group: Any = None
) -> int | None:
    """Notes a hash of what this rank holds; `vk.diagnose` compares the ranks step by step. Outside a rank: nothing.

    `held` is a module (its parameters), a tensor or array, or numbers, texts, lists and dicts of such. `same` says what
    is right: replicas hold the same parameters (True), ranks read different batches (`same=False`). `step` counts the
    calls with this name from 0 unless given. `group` is the process group whose members are to be compared, by default
    all ranks; each rank is in one. Returns the hash: 64 bits of BLAKE2b over dtype, shape and bytes, as a signed
    number; what differs in one bit has another but for a chance of 2⁻⁶⁴. A sharded tensor counts with its local shard.
    It takes 1 to 1.5 s a GB, plus the copy from a GPU; none of it counts as work on the virtual clock. Raises
    `InvalidInputError` for something that has no bytes.

    >>> fingerprint(torch.zeros(3))
    >>> import vizkit as vk
    >>> def train():
    ...     fingerprint(torch.zeros(2), step=0)
    ...     return fingerprint(torch.arange(2) + dist.get_rank(), "data", same=False)
    >>> len(set(vk.launch(train, world_size=2).results))
    2
    """
    recorder = current_recorder()
    if recorder is None:
        return None
    wall, mark = monotonic_ns(), recorder.read_clock()
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(held, name):
        digest.update(part)
    value = int.from_bytes(digest.digest(), "little", signed=True)
    members = () if group is None else tuple(dist.get_process_group_ranks(group))
    number = recorder.count_fingerprint(name) if step is None else int(step)
    recorder.note_fingerprint(Fingerprint(str(name), number, value, bool(same), members), wall, mark)
    return value


def _parts(held: Any, name: str) -> Iterator[bytes | memoryview]:
    """What determines `held`, as bytes: for each tensor its dtype, shape and content; the keys of what is named."""
    if isinstance(held, nn.Module):
        held = dict(held.named_parameters())
    if isinstance(held, Mapping):
        for key, value in held.items():
            yield repr(key).encode()
            yield from _parts(value, name)
    elif isinstance(held, torch.Tensor) or hasattr(held, "__array__"):
        yield from _tensor_parts(torch.as_tensor(held), name)
    elif held is None or isinstance(held, (str, bytes, Number)):
        yield repr(held).encode()
    elif isinstance(held, Sequence):
        yield str(len(held)).encode()
        for value in held:
            yield from _parts(value, name)
    else:
        raise InvalidInputError.because(
            name, type(held).__name__, "is no tensor, number or text", "give a module, a tensor, or lists of tensors"
        )


def _tensor_parts(tensor: torch.Tensor, name: str) -> Iterator[bytes | memoryview]:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise InvalidInputError.because(name, kind, "has no bytes in a row", "give a dense tensor that holds numbers")
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    array: np.ndarray = flat.view(torch.uint8).numpy()
    yield array.data

"""Functions, arguments and results on their way between the notebook and a rank.

An object becomes one anonymous file in memory: its pickle, then the bytes of every tensor and array beside it,
untouched. The receiver maps the file, so that tensors are not copied and the sender need not live on. Functions and
classes from notebook cells travel by value (cloudpickle).
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from vizkit.errors import TransportError

ALIGNMENT = 64
_FOOTER = struct.Struct("<QQ")  # where the index starts, its length
_MESSAGE = struct.Struct("<QQ")  # what the file is, its length
FILES_ENV = "VIZKIT_NO_MEMFD"


def anonymous_file(name: str) -> int:
    """Descriptor of a new file without a path: in memory where the system has memfd, else in the temporary folder."""
    if hasattr(os, "memfd_create") and not os.environ.get(FILES_ENV):
        return os.memfd_create(f"vizkit-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Pickler(cloudpickle.Pickler):
    """cloudpickle with tensors out of band, and with file names of cells kept for tracebacks."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage = obj._untyped_storage
            # one wrapper for each storage, so that tensors which share memory still share it on arrival
            shared = self._storages.setdefault(storage._cdata, storage)
            return _typed_storage, (shared, obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return _storage_from_buffer, (_storage_bytes(obj.cpu()),)
        if isinstance(obj, types.CodeType):
            _, arguments = cloudpickle.cloudpickle._code_reduce(obj)
            return _code_with_filename, (arguments, obj.co_filename)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and obj.__name__ in sys.modules:
            return importlib.import_module, (obj.__name__,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and vars(obj).get("__slots__") and reduced is not NotImplemented:
            return _with_slots(obj, reduced)
        return reduced


def _with_slots(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """cloudpickle sets a class's `__slots__` only after making it, when they have no effect any more."""
    maker, arguments, *rest = reduced
    if maker is not cloudpickle.cloudpickle._make_skeleton_class:
        return reduced
    metaclass, name, bases, namespace, *more = arguments
    return maker, (metaclass, name, bases, {**namespace, "__slots__": vars(kind)["__slots__"]}, *more), *rest


def _code_with_filename(arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage_bytes(storage: torch.UntypedStorage) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)


def _storage_from_buffer(buffer: Any) -> torch.UntypedStorage:
    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def pack(obj: Any, name: str = "object") -> int:
    """Write `obj` to an anonymous file and return its descriptor, which the caller closes.

    Raises whatever pickling raises, and `TransportError` where memory runs out.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, buffers).dump(obj)
    descriptor = anonymous_file(name)
    try:
        index: list[tuple[int, int]] = []
        offset = 0
        for part in (head.getbuffer(), *(buffer.raw() for buffer in buffers)):
            index.append((offset, part.nbytes))
            _write_all(descriptor, part)
            padding = -part.nbytes % ALIGNMENT
            _write_all(descriptor, memoryview(bytes(padding)))
            offset += part.nbytes + padding
        footer = pickle.dumps(index)
        _write_all(descriptor, memoryview(footer + _FOOTER.pack(offset, len(footer))))
    except OSError as error:
        os.close(descriptor)
        raise TransportError(
            f"{name}: {offset:,} bytes were written when the system refused more ({error.strerror}); "
            "send less, or give the machine more memory"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def unpack(descriptor: int) -> Any:
    """The object in the file behind `descriptor`; its tensors live in a private map of that file."""
    length = os.fstat(descriptor).st_size
    private = mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(private)
    index_at, index_length = _FOOTER.unpack(view[-_FOOTER.size :])
    index: Sequence[tuple[int, int]] = pickle.loads(view[index_at : index_at + index_length])
    head, *buffers = (view[start : start + size] for start, size in index)
    return pickle.loads(head, buffers=buffers)


def unpack_result(rank: int, descriptor: int) -> tuple[Any, Any]:
    """What `pack_result` packed; raises `TransportError` where the result cannot be built again here."""
    try:
        result, record = unpack(descriptor)
    except Exception as error:
        raise TransportError(
            f"the result of rank {rank} has arrived but cannot be built again here: {type(error).__name__}: {error}; "
            "return plain data and tensors, and of a wrapped model its `.module` or `state_dict()`"
        ) from error
    return result, record


def send_file(channel: socket.socket, tag: int, descriptor: int) -> None:
    """Hand the file behind `descriptor` to the other end of `channel`, with a number that says what it is."""
    socket.send_fds(channel, [_MESSAGE.pack(tag, os.fstat(descriptor).st_size)], [descriptor])


def receive_file(channel: socket.socket) -> tuple[int, int] | None:
    """The number and descriptor that `send_file` sent; None where the other end is gone."""
    data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE.size, 1)
    if not data or not descriptors:
        return None
    tag, _ = _MESSAGE.unpack(data)
    return tag, descriptors[0]


def pack_call(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Pack a call; raises `TransportError` that names the part which cannot travel."""
    try:
        return pack((function, tuple(arguments), dict(keywords)), "call")
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(_blame(function, arguments, keywords, error)) from error


def _blame(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], error: Exception) -> str:
    parts = [
        (f"the function {getattr(function, '__name__', function)!r}, or something that it refers to,", function),
        *((f"argument {i + 1} ({type(value).__name__})", value) for i, value in enumerate(arguments)),
        *((f"argument {name!r} ({type(value).__name__})", value) for name, value in keywords.items()),
    ]
    for description, value in parts:
        try:
            os.close(pack(value))
        except Exception as reason:
            return (
                f"{description} cannot travel to a rank: {reason}; "
                "pass plain data and tensors, and open files, locks and connections inside the function"
            )
    return f"the call cannot travel to a rank: {error}; pass plain data and tensors"


def pack_result(rank: int, result: Any, record: Any) -> int:
    """Pack what a rank gives back; raises `TransportError` where the result cannot travel."""
    try:
        return pack((result, record), f"result of rank {rank}")
    except TransportError:
        raise
    except Exception as error:
        what = f"the result of rank {rank} ({type(result).__name__})"
        raise TransportError(f"{what} cannot travel back: {error}; return plain data and tensors") from error

"""Messages between a trial and a worker over a socket: a header and raw blocks of tensor bytes.

A request is pickled, for the trial is trusted. A reply is JSON and bytes, of bounded size, and is rebuilt from a closed
list of kinds: reading it runs no code of the candidate's.

    frame    u32 length of header · header · u32 number of blocks · u64 length of each · blocks
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError

MAX_HEADER: Final = 4 << 20  # bytes; a message with all its names
MAX_BLOCKS: Final = 4096
MAX_BYTES: Final = 2 << 30  # of all blocks of one answer
_PLAIN: Final = (type(None), bool, int, float, str)


class ConnectionLost(RLKernelError):
    """The other side closed the connection, was silent for too long, or broke the protocol; `fault` says which."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault


def send(to: socket.socket, header: bytes, blocks: list[bytes], deadline: float | None = None) -> None:
    """Write one frame.

    Raises:
        ConnectionLost: the other side is gone, or reads nothing until the deadline.
    """
    head = struct.pack("<I", len(header)) + header + struct.pack("<I", len(blocks))
    head += b"".join(struct.pack("<Q", len(b)) for b in blocks)
    for part in (head, *blocks):
        left = memoryview(part)
        while left:
            if deadline is not None and not select.select([], [to], [], max(0.0, deadline - time.monotonic()))[1]:
                raise ConnectionLost("timeout", "it reads no more")
            try:
                left = left[to.send(left, socket.MSG_DONTWAIT if deadline is not None else 0) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost("closed", f"the connection broke: {error}") from error


def receive(source: socket.socket, deadline: float | None = None) -> tuple[bytes, list[bytearray]]:
    """Read one frame; `deadline` is a time of time.monotonic.

    Raises:
        ConnectionLost: it did not come whole in time, or claims a size beyond the limits.
    """
    (length,) = struct.unpack("<I", _exactly(source, 4, deadline))
    if length > MAX_HEADER:
        _reject(f"a header of {length} bytes")
    header = _exactly(source, length, deadline)
    (count,) = struct.unpack("<I", _exactly(source, 4, deadline))
    if count > MAX_BLOCKS:
        _reject(f"{count} tensors")
    sizes = struct.unpack(f"<{count}Q", _exactly(source, 8 * count, deadline))
    if sum(sizes) > MAX_BYTES:
        _reject(f"{sum(sizes)} bytes of tensors")
    return bytes(header), [_exactly(source, size, deadline) for size in sizes]


def _reject(what: str) -> NoReturn:
    raise ConnectionLost("protocol_error", f"it sends {what}, which is no reply")


def _exactly(source: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if deadline is not None and not select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ConnectionLost("timeout", "no answer in time")
        try:
            got = source.recv(min(size - len(data), 1 << 24))
        except OSError as error:
            raise ConnectionLost("closed", f"the connection broke: {error}") from error
        if not got:
            raise ConnectionLost("closed", "the connection ended")
        data += got
    return data


def flat(x: Tensor) -> Tensor:
    """The memory that a strided tensor spans, from its first element on, as one dimension."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((span,), (1,), x.storage_offset())


def to_bytes(x: Tensor) -> bytes:
    """Bytes of a tensor's elements in order."""
    if not x.numel():
        return b""
    # A view as bytes needs strides in order, also where a size of 1 leaves them free.
    dense = x.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    data: bytes = dense.view(torch.uint8).numpy().tobytes()
    return data


def from_bytes(data: bytearray, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Inverse of `to_bytes`, on its own memory."""
    if not data:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).to(device)


class _Pickler(pickle.Pickler):
    """Tensors leave the pickle: block number, dtype, shape, strides, whether a gradient is wanted."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return None
        self.tensors[id(thing)] = thing
        number = list(self.tensors).index(id(thing))
        return number, thing.dtype, tuple(thing.shape), tuple(thing.stride()), thing.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blocks: list[bytearray], device: str) -> None:
        super().__init__(file)
        self.blocks, self.device = blocks, device
        self.tensors: dict[int, Tensor] = {}

    def persistent_load(self, block: Any) -> Tensor:
        number, dtype, shape, strides, wanted = block
        if number not in self.tensors:
            whole = from_bytes(self.blocks[number], dtype, self.device)
            self.tensors[number] = whole.as_strided(shape, strides).requires_grad_(wanted)
        return self.tensors[number]


def encode_request(content: Any) -> tuple[bytes, list[bytes], list[Tensor]]:
    """Header and blocks of a request, and its tensors in the order of the blocks."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    tensors = list(pickler.tensors.values())
    return file.getvalue(), [to_bytes(flat(x)) for x in tensors], tensors


def decode_request(header: bytes, blocks: list[bytearray], device: str) -> tuple[Any, list[Tensor]]:
    """A request as the worker reads it, with its tensors on the device."""
    reader = _Unpickler(io.BytesIO(header), blocks, device)
    content = reader.load()
    return content, [reader.tensors[i] for i in sorted(reader.tensors)]


def encode_result(value: Any, tensors: list[Tensor]) -> Any:
    """A candidate's result as JSON; its tensors are appended to `tensors`. What has no place in it is named."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided:
            return {"odd": f"{type(value).__module__}.{type(value).__name__} of layout {value.layout}"}
        tensors.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": len(tensors) - 1, "dtype": dtype, "shape": list(value.shape), "grad": value.requires_grad}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not _is_of_contract(type(value)):
            return {"odd": f"{type(value).__module__}.{type(value).__name__}"}
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return {"dataclass": kind, "of": {n: encode_result(getattr(value, n), tensors) for n in names}}
    if type(value) in {list, tuple}:
        return {type(value).__name__: [encode_result(v, tensors) for v in value]}
    if type(value) is dict:
        return {"dict": [[encode_result(k, tensors), encode_result(v, tensors)] for k, v in value.items()]}
    return {"odd": f"{type(value).__module__}.{type(value).__name__}"}


def decode_result(encoded: Any, tensors: list[Tensor]) -> Any:
    """What `encode_result` wrote, with these tensors; dataclasses of the contract alone are built.

    Raises:
        ValueError: it names something that is no part of an operator's result.
    """
    if type(encoded) in _PLAIN:
        return encoded
    match encoded:
        case {"tensor": int(number)}:
            return tensors[number]
        case {"torch": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"dataclass": str(kind), "of": dict(fields)}:
            return _contract_class(kind)(**{n: decode_result(v, tensors) for n, v in fields.items()})
        case {"tuple": list(values)}:
            return tuple(decode_result(v, tensors) for v in values)
        case {"list": list(values)}:
            return [decode_result(v, tensors) for v in values]
        case {"dict": list(pairs)}:
            return {decode_result(k, tensors): decode_result(v, tensors) for k, v in pairs}
        case {"odd": str(what)}:
            raise ValueError(f"the result holds a {what}, not plain tensors and numbers")
    raise ValueError(f"{json.dumps(encoded)[:80]} is no result")


def _is_of_contract(cls: type) -> bool:
    """Whether a class is one of the contract itself: a subclass may compute its fields when they are read."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _contract_class(kind: str) -> type:
    module, _, name = kind.partition(":")
    if module.startswith(("rlkernel_core.spec.", "rlkernel_core.quant.")):
        found = getattr(import_module(module), name, None)
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            return found
    raise ValueError(f"the result is a {kind}, which is no class of the contract")


def tensor_nodes(encoded: Any) -> Iterator[dict[str, Any]]:
    """The places in an encoded result that name a tensor."""
    if isinstance(encoded, dict) and "tensor" in encoded:
        yield encoded
    else:
        inner = encoded.values() if isinstance(encoded, dict) else encoded if isinstance(encoded, list) else ()
        for part in inner:
            yield from tensor_nodes(part)


def tensors_of(encoded: Any, blocks: list[bytearray], device: str) -> list[Tensor]:
    """The tensors of an encoded result, in order, from their bytes.

    Raises:
        ValueError: shapes and bytes disagree.
    """
    found: dict[int, Tensor] = {}
    for node in tensor_nodes(encoded):
        dtype = getattr(torch, str(node["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{node['dtype']} is no dtype")  # noqa: TRY004 it is what a result says
        x = from_bytes(blocks[node["tensor"]], dtype, device)
        found[node["tensor"]] = x.reshape([int(n) for n in node["shape"]])
    return [found[i] for i in sorted(found)]

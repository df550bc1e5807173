"""Host memory used by the GPU where it lies, not copied: CPU and GPU of a Jetson have one memory.

Registering host memory pins its pages and gives them an address on the GPU. What to know before using it:

- The GPU does not cache pinned host memory (NVIDIA, CUDA for Tegra, "memory types"). It is right for what is read once:
  dense weights while they are quantized, embeddings that are gathered from. Weights that every step reads belong into
  memory of the GPU.
- Pages stay pinned while a tensor made of them lives.

Imports torch inside functions only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlkernel_core.errors import RLKernelError
from rlkernel_jetson import driver as calls
from rlkernel_jetson.driver import Cuda, Driver

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Smaller tensors share their pages with others, and registering a page twice fails.
LEAST: Final = 1 << 20
Wrap = Callable[[int, int, "torch.device", object], "Tensor"]


class _Held:
    """Registered memory as torch takes it: bytes at an address, and what keeps them."""

    def __init__(self, pointer: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}


def _wrapped(pointer: int, nbytes: int, device: torch.device, keep: object) -> Tensor:
    """Bytes of the GPU as a tensor [nbytes] that keeps an object alive."""
    import torch

    return torch.as_tensor(_Held(pointer, nbytes, keep), device=device)


@dataclass
class Adopter:
    """Takes host memory over for one device: `Adopter()(tensor)`, or as `place` of `rlkernel.nn.load_quantized`."""

    device: str = "cuda:0"
    over_pcie: bool = False  # also where the GPU has memory of its own, and every read crosses a bus: for tests
    copy: bool = True  # where adopting is refused, copy and count it; otherwise raise
    driver: Driver | None = None
    wrap: Wrap = _wrapped
    adopted: int = 0  # bytes
    copied: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # why -> tensors
    pins: weakref.WeakValueDictionary[int, Pin] = field(default_factory=weakref.WeakValueDictionary)  # by address

    def __call__(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU on the device, without a copy where that is possible.

        Raises:
            RLKernelError: it is not possible, and `copy` is false.
        """
        why = self.refuses(tensor)
        if why is None:
            return self._taken(tensor)
        if not self.copy:
            raise RLKernelError(f"a tensor of {tensor.nbytes} bytes is not adopted: {why}")
        self.refusals[why] = self.refusals.get(why, 0) + 1
        self.copied += tensor.nbytes
        return tensor.to(self.device)

    def refuses(self, tensor: Tensor) -> str | None:
        """Why a tensor is not adopted; None where it is."""
        if tensor.device.type != "cpu":
            return f"it is on {tensor.device} already"
        if tensor.requires_grad:
            return "it requires a gradient, whose sum would be on another device"
        if not tensor.is_contiguous():
            return "it is not contiguous"
        if tensor.untyped_storage().nbytes() < LEAST:
            return f"its storage is smaller than {LEAST} bytes"
        if mapped_file(tensor.data_ptr()) is not None:
            return "it is another library's mapping of a file, which pinning would copy: use rlkernel_jetson.mapped"
        return self.unsupported()

    def unsupported(self, *, read_only: bool = False) -> str | None:
        """Why the device takes no host memory; None where it does."""
        ask = self._driver()
        index = int(self.device.partition(":")[2] or 0)
        if not ask.attribute(calls.INTEGRATED, index) and not self.over_pcie:
            return f"{self.device} has memory of its own: every read would cross a bus"
        if not ask.attribute(calls.CAN_MAP_HOST_MEMORY, index) or not ask.attribute(calls.HOST_REGISTER, index):
            return f"{self.device} does not map host memory that was not allocated by CUDA (hostRegisterSupported = 0)"
        if read_only and not ask.attribute(calls.READ_ONLY_HOST_REGISTER, index):
            return f"{self.device} does not map read-only memory (readOnlyHostRegisterSupported = 0)"
        return None

    def registered(self, address: int, nbytes: int, flags: int, keep: object) -> Tensor:  # -> [nbytes] uint8
        """Host memory as bytes on the device; it is given back when the last tensor made of it goes."""
        import torch

        pin = self.pins.get(address)
        if pin is None:
            ask = self._driver()
            ask.register(address, nbytes, flags)
            pin = Pin(ask.device_pointer(address), keep)
            weakref.finalize(pin, _given_back, ask, address, self.device).atexit = False
            self.pins[address] = pin
            self.adopted += nbytes
        return self.wrap(pin.pointer, nbytes, torch.device(self.device), pin)

    def _taken(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        whole = self.registered(storage.data_ptr(), storage.nbytes(), calls.DEVICE_MAP, storage)
        first = tensor.storage_offset() * tensor.element_size()
        return whole[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _driver(self) -> Driver:
        if self.driver is None:
            import torch

            torch.zeros(1, device=self.device)  # makes the context that the driver's calls need
            self.driver = Cuda()
        return self.driver


def mapped_file(address: int, maps: str | None = None) -> str | None:
    """The file whose mapping an address of this process lies in; None for memory that belongs to no file.

    Args:
        address: an address.
        maps: content of /proc/self/maps; read unless given.
    """
    for line in (maps if maps is not None else Path("/proc/self/maps").read_text(encoding="utf-8")).splitlines():
        span, *_, path = f"{line} ".split(" ", 5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return path.strip() if path.strip().startswith("/") else None
    return None


class Pin:
    """What lives as long as memory is registered; holds what the memory belongs to."""

    def __init__(self, pointer: int, keep: object) -> None:
        self.pointer, self.keep = pointer, keep


def _given_back(ask: Driver, address: int, device: str) -> None:
    """Unregister, after what the GPU still reads."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        torch.cuda.synchronize(device)
    ask.unregister(address)

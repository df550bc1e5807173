"""A driver that launches nothing: what the host hands to it is written down, on a machine without a GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch


class StubDriver:
    """libcuda's place. A description for TMA holds its address, sizes and box; a launch is read back as it was passed.

    `launches` has (kernel's name, blocks, words and numbers) of every launch, given the kernel's form in `forms`
    or the size of its structure in `structures`.
    """

    MULTIPROCESSORS = 132

    def __init__(self):
        self.answer = 0  # 0: all is well
        self.described, self.loaded, self.launches, self.streams = [], [], [], []
        # kernel -> descriptions, words of 64 bits and C types of the numbers it takes
        self.forms = {
            "head": (2, 10, [*[ctypes.c_int] * 4, ctypes.c_float, ctypes.c_float, ctypes.c_int]),
            "product": (2, 4, [ctypes.c_int] * 5),
            "w4a16_small_m": (1, 5, [ctypes.c_int] * 3),
            "w4a16_wgmma": (2, 6, [ctypes.c_int] * 4),
        }
        self.structures = {}  # kernel -> bytes of the one structure that it takes in place of all that

    def function(self, paths, options, name, shared, device):
        self.loaded.append((name, options))
        return SimpleNamespace(name=name)

    def cuTensorMapEncodeTiled(self, place, kind, n, address, sizes, *rest):  # noqa: N802 the driver's name
        self.described.append((address.value, tuple(sizes)))
        return 0

    def cuLaunchKernel(self, kernel, blocks, *rest):  # noqa: N802 the driver's name
        self._read(kernel, blocks, rest[6], rest[7])
        return self.answer

    def cuLaunchKernelEx(self, config, kernel, places, extra):  # noqa: N802 the driver's name
        given = config._obj
        self._read(kernel, given.grid[0], given.stream, places)
        return self.answer

    def cuGetErrorString(self, result, text):  # noqa: N802 the driver's name
        text._obj.value = b"no such thing"

    def _read(self, kernel, blocks, stream, places):
        if kernel.name in self.structures:
            at = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))[0]
            self.launches.append((kernel.name, blocks, ctypes.string_at(at, self.structures[kernel.name])))
            return
        maps, words, numbers = self.forms.get(kernel.name, (0, 0, []))
        kinds = [*[ctypes.c_uint64] * words, *numbers]
        held = [ctypes.cast(places[maps + i], ctypes.POINTER(kind))[0] for i, kind in enumerate(kinds)]
        self.streams.append(getattr(stream, "value", stream))
        self.launches.append((kernel.name, blocks, held))


@pytest.fixture
def stub_driver(monkeypatch):
    """The stub in the place of the driver, for tensors on a CPU."""
    from rlkernel_cuda.common import driver

    stub = StubDriver()
    monkeypatch.setattr(driver, "library", lambda: stub)
    monkeypatch.setattr(driver, "function", stub.function)
    monkeypatch.setattr(driver, "index_of", lambda device: 0)
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "current_stream", lambda device: 5)
    properties = SimpleNamespace(multi_processor_count=stub.MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return stub

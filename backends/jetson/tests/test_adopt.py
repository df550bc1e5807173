"""Host memory taken over: what is asked of the driver, what is refused and why, and when it is given back.

The driver is written down; that a GPU reads such memory is tried by test_gpu_memory.py.
"""

import ctypes
import gc

import pytest
import torch
from safetensors.torch import save_file

import rlkernel as rlk
from rlkernel import nn
from rlkernel_core.errors import FileError, RLKernelError
from rlkernel_jetson import driver as calls
from rlkernel_jetson.adopt import LEAST, Adopter, mapped_file
from rlkernel_jetson.mapped import MappedFile

ABLE = {calls.INTEGRATED: 1, calls.CAN_MAP_HOST_MEMORY: 1, calls.HOST_REGISTER: 1, calls.READ_ONLY_HOST_REGISTER: 1}


class Written:
    """A driver that maps host memory at its own address, and refuses to register a page twice, as CUDA's does."""

    def __init__(self, **attributes) -> None:
        self.attributes = ABLE | attributes.pop("but", {})
        self.live = {}
        self.flags = []

    def attribute(self, which, device):
        return self.attributes[which]

    def register(self, address, nbytes, flags):
        if address in self.live:
            raise RLKernelError("cuMemHostRegister_v2 failed: already registered (712)")
        self.live[address] = nbytes
        self.flags.append(flags)

    def device_pointer(self, address):
        assert address in self.live
        return address

    def unregister(self, address):
        del self.live[address]


def wrapped(pointer, nbytes, device, keep):
    """Memory at an address as a tensor, which keeps an object alive, as torch does with what it is given."""
    held = (ctypes.c_uint8 * nbytes).from_address(pointer)
    held.keep = keep
    return torch.frombuffer(held, dtype=torch.uint8)


def adopter(**how):
    return Adopter("cpu", driver=Written(but=how.pop("but", {})), wrap=wrapped, **how)


def large(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)


def test_a_tensor_is_seen_where_it_lies() -> None:
    take, tensor = adopter(), large(1024, 512)
    there = take(tensor)
    assert (there.data_ptr(), there.shape, there.dtype) == (tensor.data_ptr(), tensor.shape, tensor.dtype)
    tensor[3, 4] = -1.0
    assert there[3, 4] == -1.0
    assert (take.adopted, take.copied, take.driver.flags) == (tensor.nbytes, 0, [calls.DEVICE_MAP])


def test_two_parts_of_one_storage_are_registered_once() -> None:
    take, tensor = adopter(), large(2048, 256, dtype=torch.bfloat16)
    first, second = take(tensor[:1024]), take(tensor[1024:])
    assert torch.equal(torch.cat([first, second]), tensor)
    assert len(take.driver.live) == 1


def test_memory_is_given_back_with_the_last_tensor_made_of_it() -> None:
    take = adopter()
    part = take(large(1024, 512))[5]  # the host's own tensor is gone already
    gc.collect()
    assert part[0] == 5 * 512
    assert len(take.driver.live) == 1
    del part
    gc.collect()
    assert take.driver.live == {}


@pytest.mark.parametrize(
    ("tensor", "but", "why"),
    [
        (large(1024, 512).t(), {}, "not contiguous"),
        (large(8, 8), {}, f"smaller than {LEAST} bytes"),
        (large(1024, 512).requires_grad_(), {}, "requires a gradient"),
        (large(1024, 512), {calls.INTEGRATED: 0}, "memory of its own"),
        (large(1024, 512), {calls.HOST_REGISTER: 0}, "hostRegisterSupported = 0"),
        (large(1024, 512), {calls.CAN_MAP_HOST_MEMORY: 0}, "does not map host memory"),
    ],
)
def test_what_is_not_adopted_is_copied_and_counted_or_refused(tensor, but, why) -> None:
    take = adopter(but=but)
    assert torch.equal(take(tensor), tensor)
    assert (take.adopted, take.copied, [why in text for text in take.refusals]) == (0, tensor.nbytes, [True])
    with pytest.raises(RLKernelError, match=why):
        adopter(but=but, copy=False)(tensor)


def test_a_gpu_with_memory_of_its_own_is_taken_where_that_is_asked_for() -> None:
    take = adopter(but={calls.INTEGRATED: 0}, over_pcie=True)
    take(large(1024, 512))
    assert take.copied == 0


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(512, 1024), "down": torch.nn.Linear(1024, 512)})
    save_file(model.state_dict() | {}, tmp_path / "m.safetensors")
    return model, tmp_path / "m.safetensors"


def test_tensors_that_another_library_mapped_are_not_pinned_since_that_would_copy_them(checkpoint) -> None:
    from safetensors import safe_open

    with safe_open(checkpoint[1], framework="pt") as source:
        assert "mapping of a file" in adopter().refuses(source.get_tensor("up.weight"))


def test_the_mapping_of_an_address_is_found_among_the_processs_own() -> None:
    maps = (
        "aaaa0000-aaaa8000 r--p 00000000 b3:01 42                 /data/a model.safetensors\n"
        "aaaa8000-aaab0000 rw-p 00000000 00:00 0 \nffff0000-ffff1000 rw-p 00000000 00:00 0    [stack]\n"
    )
    found = [mapped_file(a, maps) for a in (0xAAAA7FFF, 0xAAAA8000, 0xFFFF0000, 0x1)]
    assert found == ["/data/a model.safetensors", None, None, None]


def test_a_file_is_mapped_and_registered_once_read_only_and_given_back(checkpoint) -> None:
    model, path = checkpoint
    take = adopter()
    file = MappedFile(path, take)
    assert {n: e.shape for n, e in file.entries.items()} == {n: tuple(t.shape) for n, t in model.state_dict().items()}
    assert all(torch.equal(file.load(n), t) for n, t in model.state_dict().items())
    assert take.driver.flags == [calls.DEVICE_MAP | calls.READ_ONLY]
    assert take.adopted == path.stat().st_size
    weight = file.load("up.weight")
    del file
    gc.collect()
    assert len(take.driver.live) == 1
    del weight
    gc.collect()
    assert take.driver.live == {}


def test_a_model_is_quantized_from_the_files_own_pages(checkpoint) -> None:
    model, path = checkpoint
    with torch.device("meta"):
        filled = torch.nn.ModuleDict({"up": torch.nn.Linear(512, 1024), "down": torch.nn.Linear(1024, 512)})
    take = adopter()
    nn.load_quantized(filled, MappedFile(path, take), "int4_g128", place=lambda t: t)
    assert filled["up"].weight.same_bits(rlk.quantize(model["up"].weight.detach(), "int4_g128"))
    assert torch.equal(filled["down"].bias, model["down"].bias)
    assert take.copied == 0


def test_a_tensor_at_an_odd_address_is_copied_alone(tmp_path) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.uint8), "b": large(1024, 300, dtype=torch.bfloat16)}, tmp_path / "odd")
    raw = (tmp_path / "odd").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)  # every tensor moves to an odd address
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    file = MappedFile(tmp_path / "odd", adopter())
    assert file.entries["b"].first % 2 == 1
    assert torch.equal(file.load("b"), large(1024, 300, dtype=torch.bfloat16))


@pytest.mark.parametrize("cut", [4, 60, -1])
def test_a_file_that_is_cut_off_is_refused(checkpoint, tmp_path, cut) -> None:
    (tmp_path / "cut").write_bytes(checkpoint[1].read_bytes()[:cut])
    with pytest.raises(FileError, match=r"cut off|no whole safetensors"):
        MappedFile(tmp_path / "cut", adopter())


def test_a_device_that_maps_no_read_only_memory_gets_no_file(checkpoint) -> None:
    with pytest.raises(RLKernelError, match="readOnlyHostRegisterSupported = 0"):
        MappedFile(checkpoint[1], adopter(but={calls.READ_ONLY_HOST_REGISTER: 0}))


def test_without_a_driver_the_error_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: (_ for _ in ()).throw(OSError("libcuda.so.1: cannot open")))
    with pytest.raises(RLKernelError, match="no CUDA driver: libcuda"):
        calls.Cuda()

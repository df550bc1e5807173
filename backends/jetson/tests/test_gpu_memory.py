"""Host memory taken over by a GPU: the same bytes, given back in time, and what it saves where a model is quantized.

On a card with memory of its own this is done over PCIe, which says nothing of a Jetson's speed and driver. What was
measured on one H200 stands in benchmarks/results/h200/jetson_memory.json.
"""

import gc
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file

from rlkernel import nn
from rlkernel.checkpoints import opened
from rlkernel_core.errors import MemoryBudgetError
from rlkernel_jetson.adopt import Adopter
from rlkernel_jetson.cap import cap, told
from rlkernel_jetson.mapped import MappedFile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda:0"
LAYERS, WIDTH = 8, 4096
MIB = 1 << 20


@pytest.fixture
def take() -> Adopter:
    """Takes memory over, across the bus too, and refuses rather than copies."""
    torch.zeros(1, device=DEVICE)
    return Adopter(DEVICE, over_pcie=True, copy=False)


def test_a_gpu_reads_the_hosts_bytes_and_sees_what_is_written_later(take) -> None:
    x = torch.randn(2048, 1024).to(torch.bfloat16)
    before = torch.cuda.memory_allocated(DEVICE)
    there, part = take(x), take(x[5:7])
    assert torch.cuda.memory_allocated(DEVICE) == before
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), x)
    assert torch.equal(part.cpu(), x[5:7])
    assert torch.equal(there @ there.T, x.to(DEVICE) @ x.to(DEVICE).T)
    x[5, 3] = 42.0
    assert part[0, 3].item() == 42.0


def test_memory_is_given_back_with_its_last_tensor_and_lives_until_then(take) -> None:
    x = torch.randn(2048, 1024)
    there = take(x)
    del there
    gc.collect()
    assert torch.equal(take(x).cpu(), x)  # fails where the first registration still stands
    kept = take(torch.full((1 << 20,), 7.0))  # the host's own tensor is gone at once
    gc.collect()
    assert bool((kept == 7.0).all())


@pytest.mark.skipif(
    torch.cuda.is_available() and bool(torch.cuda.get_device_properties(0).is_integrated), reason="there is no bus"
)
def test_nothing_crosses_the_bus_unasked() -> None:
    take, x = Adopter(DEVICE), torch.randn(1024, 1024)
    assert torch.equal(take(x).cpu(), x)
    assert (take.adopted, take.copied) == (0, x.nbytes)


def test_a_model_is_quantized_from_its_files_pages_without_room_for_a_layer(take, tmp_path) -> None:
    g = torch.Generator().manual_seed(0)
    state = {f"{i}.weight": (torch.randn(WIDTH, WIDTH, generator=g) / 64).to(torch.bfloat16) for i in range(LAYERS)}
    save_file(state, file := tmp_path / "model.safetensors")
    models, over = {}, {}
    for name, source in (("copied", opened(file)), ("pages", nullcontext(MappedFile(file, take)))):
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with source as weights:
            nn.load_quantized(model, weights, "int4_g128", place=lambda t: t.to(DEVICE))
        torch.cuda.synchronize()
        stays = sum(layer.weight.nbytes for layer in model)
        models[name], over[name] = model, torch.cuda.max_memory_allocated() - before - stays
    assert all(a.weight.same_bits(b.weight) for a, b in zip(models["pages"], models["copied"], strict=True))
    # A copied layer takes 32 MiB; the portable backend's quantizer takes none of its own.
    assert over["pages"] <= over["copied"]
    whole = MappedFile(file, take)
    assert all(torch.equal(whole.load(name).cpu(), t) for name, t in state.items())


def test_an_allocation_beyond_the_budget_is_refused_and_told_as_what_it_is(tmp_path) -> None:
    torch.zeros(1, device=DEVICE)
    (tmp_path / "proc").mkdir()
    rows = "MemTotal: 8181760 kB\nMemFree: 300000 kB\nMemAvailable: 6348800 kB\n"  # a board of 8 GB
    (tmp_path / "proc/meminfo").write_text(rows)
    allowed = cap(DEVICE, root=tmp_path)
    try:
        held = torch.empty(allowed // 2, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(MemoryBudgetError, match="ran out of memory"), told("a second half", root=tmp_path):
            torch.empty(allowed // 2 + 64 * MIB, dtype=torch.uint8, device=DEVICE)
        assert held.nbytes == allowed // 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)

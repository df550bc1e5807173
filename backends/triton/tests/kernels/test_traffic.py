"""How much a 4-bit product reads, counted load by load in Triton's interpreter, tiled as on Orin and Thor.

Memory moves sectors of 32 bytes, and what a program asks for again within a few steps comes from its cache: a sector
moves once for every program that reads it.
"""

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.launchers import plain_launcher_for
from rlkernel_triton.quant import tile_config
from rlkernel_triton.quant.epilogue import NO_EPILOGUE
from rlkernel_triton.quant.product import W4Product

SECTOR = 32


@pytest.fixture
def loads(monkeypatch):
    """A list with the sectors that each program of each launch reads, by number."""
    from triton.runtime.interpreter import InterpreterBuilder

    programs = []
    load, enter = InterpreterBuilder.create_masked_load, InterpreterBuilder.set_grid_idx

    def entered(self, *place):
        programs.append(set())
        return enter(self, *place)

    def counted(self, pointers, mask, *rest):
        addresses, there = np.broadcast_arrays(pointers.data, mask.data)
        programs[-1].update(np.unique(addresses[there] // SECTOR).tolist())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", entered)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    return programs


@pytest.mark.skipif(not INTERPRETED, reason="loads are counted in Triton's interpreter")
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64_asym"])
@pytest.mark.parametrize("M", [1, 64])
def test_a_product_reads_within_five_per_cent_of_its_packed_weight(device, loads, M, name) -> None:
    g = torch.Generator().manual_seed(0)
    w = rlk.prepack(rlk.quantize(torch.randn(128, 256, generator=g).to(device), name))
    x = torch.randn(M, 256, generator=g).to(device, torch.float16)
    config = tile_config.w4_config(
        M, *w.shape, group=w.spec.group, pair=False, rounding="any", kind="jetson", multiprocessors=8
    )
    loads.clear()
    W4Product(plain_launcher_for(x.device), x, w, NO_EPILOGUE, config)(x, w, NO_EPILOGUE, x.dtype)
    places = [(p.data_ptr() // SECTOR, (p.data_ptr() + p.nbytes - 1) // SECTOR) for p in w.parts.values()]
    moved = SECTOR * sum(a <= sector <= b for program in loads for sector in program for a, b in places)
    packed = sum(p.nbytes for p in w.parts.values())
    assert packed <= moved <= 1.05 * packed

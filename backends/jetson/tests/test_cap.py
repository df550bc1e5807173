"""The allocator held to the budget, and every spelling of running out understood."""

from types import SimpleNamespace

import pytest
import torch

from rlkernel_core.errors import MemoryBudgetError, RLKernelError
from rlkernel_core.host.memory import memory
from rlkernel_jetson.cap import cap, told
from tests import boards
from tests.boards import plant


def cuda(total, reserved=0):
    set_to = []
    return SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=total),
        memory_reserved=lambda device: reserved,
        set_per_process_memory_fraction=lambda fraction, device: set_to.append((fraction, device)),
        set_to=set_to,
    )


@pytest.mark.parametrize("reserved", [0, 1 << 30])
def test_torch_may_take_the_budget_and_what_it_holds_already(tmp_path, reserved) -> None:
    root = plant(tmp_path, boards.ORIN_NANO)
    accelerator, room = cuda(boards.KIB_8GB << 10, reserved), memory(root)
    assert cap("cuda:0", root=root, accelerator=accelerator) == room.budget + reserved
    assert accelerator.set_to == [((room.budget + reserved) / room.total, "cuda:0")]


def test_a_card_with_less_memory_than_the_system_is_capped_by_its_own(tmp_path) -> None:
    accelerator = cuda(1 << 30)
    assert cap(root=plant(tmp_path, boards.ORIN_NANO), accelerator=accelerator) == 1 << 30


def test_without_numbers_nothing_is_capped(tmp_path) -> None:
    accelerator = cuda(1 << 30)
    with pytest.raises(RLKernelError, match="does not tell what is available"):
        cap(root=tmp_path, accelerator=accelerator)
    assert accelerator.set_to == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1131"),
    ],
)
def test_running_out_is_told_with_numbers_whatever_torch_calls_it(tmp_path, error) -> None:
    with (
        pytest.raises(MemoryBudgetError, match="a training step ran out of memory.*6.05 GiB of 7.80 GiB") as caught,
        told("a training step", root=plant(tmp_path, boards.ORIN_NANO)),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert str(error) in str(caught.value)


def test_other_errors_are_themselves() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), told("a training step"):
        raise RuntimeError("shape mismatch")

"""Two stages: what the files say, and what the GPU says of itself."""

from types import SimpleNamespace

import pytest

from rlkernel_core.errors import RLKernelError
from rlkernel_jetson.detect import detect, inspect
from tests import boards
from tests.boards import plant

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def gpu(name, major, minor, integrated=1):
    return SimpleNamespace(name=name, major=major, minor=minor, is_integrated=integrated)


ORIN, THOR, OLD_THOR = gpu("Orin", 8, 7), gpu("NVIDIA Thor", 11, 0), gpu("NVIDIA Thor", 10, 1)
GH200, GB10 = gpu("NVIDIA GH200 480GB", 9, 0), gpu("NVIDIA GB10", 12, 1)
A6000, CLAIMED = gpu("NVIDIA RTX A6000", 8, 6, 0), gpu("Unknown", 8, 7, 0)


@pytest.mark.parametrize(
    ("files", "properties", "jetson", "codes"),
    [
        (boards.ORIN_NANO, None, True, []),
        (boards.ORIN_NANO, ORIN, True, []),
        (boards.AGX_ORIN, ORIN, True, []),
        (boards.THOR, THOR, True, []),
        (boards.THOR, OLD_THOR, True, []),  # as compilers before CUDA 13 call it
        (boards.CONTAINER, ORIN, True, []),
        ({}, ORIN, True, []),  # a container that hides every file
        ({}, None, False, []),
        (boards.NEAR["GH200"], GH200, False, []),
        (boards.NEAR["GB10"], GB10, False, []),
        (boards.NEAR["GB10"], None, False, []),
        ({}, A6000, False, []),
        (boards.AGX_ORIN, A6000, False, ["another-gpu"]),  # a carrier with a card of its own
        ({}, CLAIMED, False, ["not-integrated"]),
        (boards.THOR, ORIN, True, ["another-board"]),
    ],
)
def test_the_gpu_decides_and_the_files_do_where_it_may_not_be_asked_yet(tmp_path, files, properties, jetson, codes):
    found = detect(plant(tmp_path, files), {}, properties)
    assert (found.jetson, [p.code for p in found.problems]) == (jetson, codes)


def test_allocator_settings_are_told_before_torch_is_imported_and_only_on_a_jetson(tmp_path) -> None:
    root = plant(tmp_path, boards.ORIN_NANO)
    found = detect(root, EXPANDABLE | {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
    assert [p.code for p in found.problems] == ["allocator-risk", "allocator"]
    assert found.problems[1].fix == "unset PYTORCH_CUDA_ALLOC_CONF"
    assert detect(tmp_path / "elsewhere", EXPANDABLE).problems == ()


def seen(properties):
    return SimpleNamespace(is_available=lambda: properties is not None, get_device_properties=lambda _: properties)


def test_a_device_in_order_passes_the_look(tmp_path) -> None:
    assert inspect("cuda:0", seen(ORIN), plant(tmp_path, boards.ORIN_NANO)).arch == "sm87"


@pytest.mark.parametrize(
    ("files", "properties", "environ", "message"),
    [
        (boards.ORIN_NANO, None, {}, "the files name NVIDIA Jetson Orin Nano.*torch sees no GPU"),
        (boards.ORIN_NANO, ORIN, EXPANDABLE, "expandable_segments:True.*unset PYTORCH_CUDA_ALLOC_CONF"),
        (boards.NEAR["GB10"], GB10, EXPANDABLE, "cuda:0 is sm121, no GPU of a Jetson"),
        (boards.AGX_ORIN, A6000, {}, "a GPU beside that of"),
    ],
)
def test_what_cannot_run_is_refused_with_its_remedy(tmp_path, monkeypatch, files, properties, environ, message) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RLKernelError, match=message):
        inspect("cuda:0", seen(properties), plant(tmp_path, files))

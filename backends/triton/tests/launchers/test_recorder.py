"""What would be launched is written down, and compiles for GPUs that are not here."""

import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel_core.errors import ArgumentError, RLKernelError
from rlkernel_triton.common.merge_softmax import merge_softmax
from rlkernel_triton.launchers import Build, Recorder
from rlkernel_triton.launchers.offline import compile_recorded, target_of

N, P = 8, 5


@triton.jit(do_not_specialize=["seed"])
def several(x, n, seed, T, nothing, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Nothing."""


def merge(recorder, device="meta", T=1.0):
    """One launch that host code of logprob makes."""
    column, ids = torch.empty(N, device=device), torch.empty(N, dtype=torch.int64, device=device)
    parts, saved = torch.empty(4, N, P, device=device), torch.empty(6, N, device=device)
    invalid = torch.empty(N, dtype=torch.int8, device=device)
    launch = recorder.bind(
        merge_softmax, num_warps=4, N=N, P=P, whole=32000, HAS_MASK=False, HAS_T=False, SUPPORT=False,
        MOMENT=True, ROWS=32, WIDTH=8,
    )  # fmt: skip
    launch((1,), parts, ids, ids, ids, T, column, column, column, column, invalid, saved)


def test_a_launch_is_recorded_as_triton_would_compile_it():
    recorder = Recorder()
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    launch = recorder.bind(several, num_warps=8, options={"waves_per_eu": 2}, n=32, KIND=tl.float16, SIZE=64)
    launch((3, 2), x, 48, 1.0, None)
    launch((3, 2), x[1:], 2**40, 0.5, None)
    first = Build(
        kernel=f"{__name__}:several",
        types=(("x", "*bf16"), ("n", "i32"), ("seed", "i32"), ("T", "fp32")),
        constants=(("nothing", None), ("KIND", "tl.float16"), ("SIZE", 64)),
        divisible=("x", "n"),
        within_32_bits=("x",),
        num_warps=8,
        num_stages=None,
        options=(("enable_fp_fusion", True), ("waves_per_eu", 2)),
    )
    assert first == recorder.launches[0].build
    assert recorder.launches[0].grid == (3, 2)
    second = recorder.launches[1].build
    assert (second.divisible, dict(second.types)["seed"]) == (("n",), "i64")


def test_a_number_that_is_one_is_a_constant():
    recorder = Recorder()
    launch = recorder.bind(several, n=1, KIND=1, SIZE=64)
    launch((1,), torch.empty(4, device="meta"), 1, 1.0, None)
    build = recorder.launches[0].build
    assert dict(build.constants) == {"n": 1, "nothing": None, "KIND": 1, "SIZE": 64}
    assert dict(build.types)["seed"] == "i32"  # do_not_specialize


def test_each_build_is_listed_once():
    recorder = Recorder()
    for T in (1.0, 0.5, 1):
        merge(recorder, T=T)
    assert (len(recorder.launches), len(recorder.builds)) == (3, 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_devices_without_kernels_record_the_same(device):
    recorder = Recorder()
    merge(recorder, device)
    merge(recorder, "cpu")
    assert len(recorder.builds) == 1


def test_fake_tensors_record_the_same():
    recorder = Recorder()
    with FakeTensorMode():
        merge(recorder, "cuda")
    merge(recorder, "cpu")
    assert len(recorder.builds) == 1


def test_a_build_survives_json():
    recorder = Recorder()
    merge(recorder)
    assert recorder.builds[0] == Build.of(json.loads(json.dumps(recorder.builds[0].document())))


def test_storage_beyond_2_gib_is_recorded():
    recorder = Recorder()
    launch = recorder.bind(several, n=3, KIND=1, SIZE=64)
    launch((1,), torch.empty(2**29, device="meta"), 5, 1.0, None)
    assert recorder.launches[0].build.within_32_bits == ()


def test_what_is_no_plain_constant_is_refused():
    launch = Recorder().bind(several, n=3, KIND=object(), SIZE=64)
    with pytest.raises(TypeError, match="a constant of a recorded launch"):
        launch((1,), torch.empty(4), 5, 1.0, None)


needs_linker = pytest.mark.skipif(
    triton.__version__.startswith("3.4.") and not Path("/opt/rocm/llvm/bin/ld.lld").exists(),
    reason="Triton 3.4 links for AMD with ROCm's linker",
)


@pytest.mark.parametrize("target", ["sm_80", "sm_87", "sm_90", pytest.param("gfx942", marks=needs_linker)])
def test_a_recorded_launch_compiles_for_a_target(target):
    recorder = Recorder()
    merge(recorder)
    needs = compile_recorded(recorder.launches[0], target)
    assert 0 < needs.registers <= 256
    assert needs.spilled == 0
    assert 0 <= needs.shared <= 48 << 10
    text = needs.compiled.asm["ttir"]
    assert text.partition("tt.func public")[2].partition("{\n")[0].count("tt.divisibility") == 10  # every pointer
    assert (target == "gfx942") == ("tt.pointer_range" in text)


def test_an_unknown_target_is_refused():
    with pytest.raises(ArgumentError, match=r"it names no architecture; got sm90a. Say \"sm_90\""):
        target_of("sm90a")


def test_a_kernel_that_has_changed_is_refused():
    recorder = Recorder()
    merge(recorder)
    document = recorder.builds[0].document()
    document["types"] = {n: kind for n, kind in document["types"].items() if n != "parts"}
    with pytest.raises(RLKernelError, match=r"merge_softmax has changed since it was recorded: parts"):
        compile_recorded(Build.of(document), "sm_90")
    with pytest.raises(RLKernelError, match=r"gone is no kernel of Triton's compiler here"):
        compile_recorded(Build.of({**document, "kernel": "rlkernel_triton.common.merge_softmax:gone"}), "sm_90")

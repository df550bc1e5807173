"""Bound launches over Triton's own JIT and compiler, for a GPU whose driver is a stand-in that writes launches down."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from rlkernel_triton.launchers import PlainLauncher
from rlkernel_triton.launchers.jit import Device, JitLauncher

pytestmark = pytest.mark.skipif(
    not hasattr(type(triton.runtime.driver), "active"), reason="before Triton 3.5 the driver cannot be stood in for"
)


@triton.jit(do_not_specialize=["seed"])
def compiled_here(x, N, seed, BLOCK: tl.constexpr, step, out, bias, HAS_BIAS: tl.constexpr):
    """out = x + seed + step (+ bias)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < N) + (seed % 1024) + step
    if HAS_BIAS:
        y += tl.load(bias + at, mask=at < N)
    tl.store(out + at, y, mask=at < N)


class Launched:
    """As CudaLauncher, made for a source; its `launch` has the form of Triton 3.4 to 3.6."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations, kernel_signature = "annotations", "signature"
    log: ClassVar[list] = []

    def __init__(self, src, metadata):
        self.src = src

    def launch(self, x, y, z, stream, *rest):
        args = rest[-1] if isinstance(rest[-1], tuple) else rest[-len(self.src.fn.arg_names) :]
        self.log.append((self.src, (x, y, z), stream, tuple(args)))

    def __call__(self, x, y, z, stream, function, packed, said, enter, leave, *args):
        self.log.append((self.src, (x, y, z), stream, args))


class Driver:
    """A current device of Hopper."""

    launcher_cls = Launched
    utils = SimpleNamespace(
        load_binary=lambda name, code, shared, device: (object(), 7, 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 5

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launches(monkeypatch):
    driver = triton.runtime.driver
    monkeypatch.setattr(type(driver), "active", Driver(), raising=False)
    monkeypatch.setattr(Launched, "log", [])
    compiled_here.device_caches.clear()
    yield Launched.log
    compiled_here.device_caches.clear()


def described(launch):
    """What a launch was compiled for, its grid, and what it was given."""
    src, grid, stream, args = launch
    names = src.fn.arg_names
    divisible = sorted(names[place[0]] for place, found in src.attrs.items() if ["tt.divisibility", 16] in found)
    constants = {names[k[0]]: v for k, v in src.constants.items()}
    return dict(src.signature), divisible, constants, grid, stream, args


CASES = [(3, 5, False), (1, 1, False), (16, 16, True), (2**31, 2**33 + 16, True), (3, 5, False)]


def test_a_bound_launch_is_what_the_jit_would_launch(launches):
    x, out, bias = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    direct = JitLauncher(Device(0, lambda: 0, lambda _: 5, lambda _: nullcontext()), checked=True)
    found = []
    for launcher in (direct, PlainLauncher()):
        launches.clear()
        for has_bias in (False, True):
            bound = launcher.bind(compiled_here, num_warps=2, N=48, BLOCK=32, HAS_BIAS=has_bias)
            for seed, step, biased in CASES:
                if biased == has_bias:
                    bound((2,), x, seed, step, out, bias if has_bias else None)
        found.append([described(launch) for launch in launches])
    assert len(found[0]) == len(CASES)
    assert found[0] == found[1]
    assert {str(d[0]["seed"]) for d in found[0]} == {"i32", "i64"}
    assert found[0][1][2]["step"] == 1


def test_alignment_that_may_differ_is_compiled_apart(launches):
    whole, out = torch.zeros(65), torch.zeros(64)
    direct = JitLauncher(Device(0, lambda: 0, lambda _: 5, lambda _: nullcontext()), checked=True)
    bound = direct.bind(compiled_here, any_alignment=("x",), N=48, BLOCK=32, HAS_BIAS=False)
    for x in (whole, whole[1:], whole):
        bound((2,), x, 3, 5, out, None)
    assert ["x" in described(launch)[1] for launch in launches] == [True, False, True]

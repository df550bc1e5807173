"""Bound launches run kernels as `kernel[grid](…)` does: in the interpreter, and on a GPU where there is one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from rlkernel_triton.launchers import PlainLauncher, launcher_for
from rlkernel_triton.launchers.jit import JitLauncher, gpu

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def scaled(x, out, factor, N, BLOCK: tl.constexpr):
    """out = x * factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N) * factor, mask=at < N)


@triton.jit(do_not_specialize=["seed"])
def mixed(x, N, seed, BLOCK: tl.constexpr, step, out, bias, HAS_BIAS: tl.constexpr):
    """out = x + seed + step (+ bias), of what is small in the two numbers: passed and bound arguments alternate."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, mask=at < N) + (seed % 1024) + (step % 1024)
    if HAS_BIAS:
        y += tl.load(bias + at, mask=at < N)
    tl.store(out + at, y, mask=at < N)


def test_the_launcher_of_a_device_runs_kernels(device):
    launcher = launcher_for(torch.device(device))
    assert (PlainLauncher if device == "cpu" else JitLauncher) is type(launcher)
    x, out = torch.arange(100.0, device=device), torch.zeros(100, device=device)
    launch = launcher.bind(scaled, num_warps=1, N=100, BLOCK=64)
    for factor in (0.5, 2.0):
        launch((2,), x, out, factor)
        assert torch.equal(x * factor, out)


def test_threads_may_launch_at_the_same_time(device):
    def on_thread(rank: int) -> bool:
        x, out = torch.arange(64.0 * (rank + 1), device=device), torch.zeros(64 * (rank + 1), device=device)
        launch = launcher_for(x.device).bind(scaled, num_warps=1, N=x.numel(), BLOCK=16)
        for _ in range(40):
            launch((x.numel() // 16,), x, out.zero_(), 2.0)
            if not torch.equal(2 * x, out):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(on_thread, range(4))) == [True] * 4


def test_passed_and_bound_arguments_may_alternate(device):
    x, bias = torch.arange(20.0, device=device), torch.ones(20, device=device)
    for has_bias in (True, False):
        launch = launcher_for(torch.device(device)).bind(mixed, N=20, BLOCK=32, HAS_BIAS=has_bias)
        for seed, step in ((3, 5), (1, 1), (2**31 + 7, 16), (0, 2**40 + 9), (-5 % 1024, 3)):
            out = torch.zeros(20, device=device)
            launch((1,), x, seed, step, out, bias if has_bias else None)
            assert torch.equal(x + seed % 1024 + step % 1024 + has_bias, out)


def test_a_wrong_number_of_arguments_is_refused(device):
    launch = launcher_for(torch.device(device)).bind(scaled, N=4, BLOCK=64)
    with pytest.raises(TypeError, match="takes 3 arguments at run time"):
        launch((1,), torch.zeros(4, device=device))


@on_gpu
def test_a_launch_is_captured_and_replayed():
    x, out = torch.arange(100.0, device="cuda"), torch.zeros(100, device="cuda")
    launch = launcher_for(x.device).bind(scaled, N=100, BLOCK=64)
    launch((2,), x, out, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((2,), x, out, 3.0)
    x += 1
    graph.replay()
    assert torch.equal(x * 3, out)


@on_gpu
def test_a_launch_runs_on_the_current_stream():
    x, out = torch.zeros(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
    launch = launcher_for(x.device).bind(scaled, N=x.numel(), BLOCK=1024)
    launch((4096,), x, out, 1.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(1.0)
        launch((4096,), x, out, 2.0)  # on the default stream it would read zeros
    side.synchronize()
    assert torch.equal(torch.full_like(x, 2.0), out)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_runs_on_a_device_that_is_not_current():
    x, out = torch.arange(100.0, device="cuda:1"), torch.zeros(100, device="cuda:1")
    launch = launcher_for(x.device).bind(scaled, N=100, BLOCK=64)
    with torch.cuda.device(0):
        for factor in (2.0, 3.0):
            launch((2,), x, out, factor)
            assert torch.cuda.current_device() == 0
    assert torch.equal(x * 3, out)


@on_gpu
def test_hooks_of_a_launch_are_called_with_its_metadata():
    x, out = torch.arange(100.0, device="cuda"), torch.zeros(100, device="cuda")
    launch, seen = launcher_for(x.device).bind(scaled, N=100, BLOCK=64), []
    launch((2,), x, out, 2.0)
    hook = lambda said: seen.append(said.get()["name"])  # noqa: E731 added and removed
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch((2,), x, out, 3.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    launch((2,), x, out, 4.0)
    assert seen == ["scaled"]
    assert torch.equal(x * 4, out)


@on_gpu
def test_checked_launches_run():
    x, out = torch.arange(100.0, device="cuda"), torch.zeros(100, device="cuda")
    launch = JitLauncher(gpu(x.device), checked=True).bind(scaled, N=100, BLOCK=64)
    for factor in (2.0, 3.0):
        launch((2,), x, out, factor)
    assert torch.equal(x * 3, out)

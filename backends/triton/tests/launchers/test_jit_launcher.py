"""Bound launches over a compiled kernel that writes down what it is launched with; no GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from rlkernel_core.errors import RLKernelWarning
from rlkernel_triton.launchers import triton_abi
from rlkernel_triton.launchers.jit import CHECKED, Device, JitLauncher, LaunchError


@triton.jit
def scaled(x, out, factor, N, BLOCK: tl.constexpr):
    """Nothing: compiled kernels here are stand-ins."""


@triton.jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["step"])
def mixed(x, N, seed, BLOCK: tl.constexpr, step, out):
    """What is passed stands between what is bound."""


class Machine:
    """A device, the kernels compiled for it, and all launches."""

    def __init__(self, monkeypatch, index=0, backend="cuda"):
        self.current, self.index, self.compiled, self.launches, self.through_jit = index, index, [], [], []
        self.guarded, self.streams, self.backend = [], {index: 7}, backend
        for kernel in (scaled, mixed):
            monkeypatch.setattr(kernel, "warmup", self.warmup(kernel))
            monkeypatch.setattr(kernel, "run", self.run(kernel))
        monkeypatch.setattr(triton_abi, "entry_of", lambda made: real_entry_of(made, "3.6.0"))

    def device(self):
        @contextmanager
        def guard(index):
            before, self.current = self.current, index
            self.guarded.append(index)
            yield
            self.current = before

        return Device(self.index, lambda: self.current, lambda i: self.streams[i], guard)

    def warmup(self, kernel):
        def compile_(*, grid, **given):
            number = len(self.compiled)
            self.compiled.append((kernel.fn.__name__, given))

            class Run:
                global_scratch_size = profile_scratch_size = 0
                launch_cooperative_grid = launch_pdl = False

                def launch(_self, x, y, z, stream, function, *rest):  # noqa: N805 self is the machine
                    self.launches.append((number, self.current, (x, y, z), stream, rest[8:]))

                def __call__(_self, x, y, z, stream, function, packed, said, enter, leave, *args):  # noqa: N805
                    if enter:
                        enter(said)
                    self.launches.append((number, self.current, (x, y, z), stream, args))
                    if leave:
                        leave(said)

            return SimpleNamespace(
                run=Run(), function=f"function {number}", packed_metadata=(4, 1, 0),
                metadata=SimpleNamespace(target=SimpleNamespace(backend=self.backend)),
                launch_metadata=lambda grid, stream, *args: {"name": kernel.fn.__name__, "grid": grid, "args": args},
            )  # fmt: skip

        return compile_

    def run(self, kernel):
        def run(*, grid, warmup, **given):
            self.through_jit.append((kernel.fn.__name__, grid, given))

        return run


real_entry_of = triton_abi.entry_of


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def launcher(machine):
    return JitLauncher(machine.device(), checked=False)


def test_the_first_run_compiles_and_every_run_launches(machine, launcher):
    launch = launcher.bind(scaled, num_warps=2, N=100, BLOCK=64)
    x, out = torch.zeros(100), torch.zeros(100)
    launch((2,), x, out, 0.5)
    launch((2,), out, x, 0.25)
    assert len(machine.compiled) == 1
    name, given = machine.compiled[0]
    assert name == "scaled"
    assert {"x": x, "out": out, "factor": 0.5, "N": 100, "BLOCK": 64, "num_warps": 2, "enable_fp_fusion": True} == given
    assert [
        (0, 0, (2, 1, 1), 7, (x, out, 0.5, 100, 64)),
        (0, 0, (2, 1, 1), 7, (out, x, 0.25, 100, 64)),
    ] == machine.launches


def test_options_reach_the_compiler(machine, launcher):
    options = {"waves_per_eu": 2, "enable_fp_fusion": False}
    launcher.bind(scaled, num_stages=5, options=options, N=1, BLOCK=64)((1,), torch.zeros(1), torch.zeros(1), 1.0)
    given = machine.compiled[0][1]
    expected = {"num_warps": 4, "num_stages": 5, "waves_per_eu": 2, "enable_fp_fusion": False}
    assert expected == {k: given[k] for k in expected}


@pytest.mark.parametrize("grid,expected", [((3,), (3, 1, 1)), ((3, 4), (3, 4, 1)), ((3, 4, 5), (3, 4, 5))])
def test_a_grid_has_one_to_three_numbers(machine, launcher, grid, expected):
    launcher.bind(scaled, N=1, BLOCK=64)(grid, torch.zeros(1), torch.zeros(1), 1.0)
    assert expected == machine.launches[0][2]


def test_arguments_are_put_in_the_kernels_order(machine, launcher):
    x, out = torch.zeros(8), torch.zeros(8)
    launcher.bind(mixed, N=8, BLOCK=64)((1,), x, 5, 6, out)
    assert (x, 8, 5, 64, 6, out) == machine.launches[0][4]


@pytest.mark.parametrize(
    "first,second,same",
    [
        ((5, 6), (7, 9), True),
        ((5, 6), (1, 6), True),  # seed is not specialized
        ((5, 6), (16, 6), True),
        ((5, 6), (2**31, 6), False),  # but its type is
        ((5, 6), (5, 1), False),
        ((5, 6), (5, 32), True),  # step is not specialized on divisibility
        ((5, 6), (5, 2**40), False),
        ((5, 6), (5, 6.0), False),
        ((5, 6), (True, 6), False),
    ],
)
def test_numbers_that_triton_compiles_apart_are_compiled_apart(machine, launcher, first, second, same):
    launch = launcher.bind(mixed, N=8, BLOCK=64)
    for seed, step in (first, second, first, second):
        launch((1,), torch.zeros(8), seed, step, torch.zeros(8))
    assert (1 if same else 2) == len(machine.compiled)
    assert ([0, 0, 0, 0] if same else [0, 1, 0, 1]) == [number for number, *_ in machine.launches]


@pytest.mark.parametrize("number", [1, 16, 2**31, 3.0])
def test_a_number_specialized_on_its_value_is_compiled_apart(machine, launcher, number):
    launch = launcher.bind(scaled, factor=1.0, BLOCK=64)
    for N in (3, number, 5):
        launch((1,), torch.zeros(8), torch.zeros(8), N)
    assert [compiled for compiled, *_ in machine.launches] == [0, 1, 0]


def test_a_launch_runs_on_its_own_device_and_that_devices_stream(machine, launcher):
    launch = launcher.bind(scaled, N=1, BLOCK=64)
    args = (torch.zeros(1), torch.zeros(1), 1.0)
    launch((1,), *args)
    machine.current, machine.streams = 1, {0: 8, 1: 9}
    launch((1,), *args)
    assert [(device, stream) for _, device, _, stream, _ in machine.launches] == [(0, 7), (0, 8)]
    assert machine.guarded == [0]
    assert machine.current == 1


def test_the_kernel_is_compiled_on_its_own_device(machine, launcher):
    machine.current = 1
    launcher.bind(scaled, N=1, BLOCK=64)((1,), torch.zeros(1), torch.zeros(1), 1.0)
    assert machine.guarded == [0]
    assert [device for _, device, *_ in machine.launches] == [0]


def chained(name, calls):
    """What Triton has in its knobs: a chain since 3.5, a function before."""
    chain = getattr(triton.knobs.runtime, name)
    if chain is None:
        setattr(triton.knobs.runtime, name, calls.append)
        return lambda: setattr(triton.knobs.runtime, name, None)
    chain.add(calls.append)
    return lambda: chain.remove(calls.append)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_are_called_with_the_metadata(machine, launcher, name):
    launch = launcher.bind(scaled, N=1, BLOCK=64)
    x = torch.zeros(1)
    launch((1,), x, x, 1.0)
    calls = []
    undo = chained(name, calls)
    try:
        launch((2, 3), x, x, 2.0)
    finally:
        undo()
    launch((1,), x, x, 1.0)
    assert [{"name": "scaled", "grid": (2, 3, 1), "args": (x, x, 2.0, 1, 64)}] == calls
    assert [grid for _, _, grid, *_ in machine.launches] == [(1, 1, 1), (2, 3, 1), (1, 1, 1)]


def test_a_hook_that_is_a_function_is_called(machine, launcher, monkeypatch):
    calls = []
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", calls.append)
    launcher.bind(scaled, N=1, BLOCK=64)((1,), torch.zeros(1), torch.zeros(1), 1.0)
    assert len(calls) == 1


def test_an_unknown_version_launches_through_the_jit(machine, launcher, monkeypatch):
    triton_abi.warn_once.cache_clear()
    monkeypatch.setattr(triton_abi, "entry_of", lambda made: real_entry_of(made, "9.0.0"))
    launch = launcher.bind(scaled, N=100, BLOCK=64)
    x, out = torch.zeros(100), torch.zeros(100)
    with pytest.warns(RLKernelWarning, match=r"Triton 9\.0\.0"):
        launch((2,), x, out, 0.5)
    launch((2,), x, out, 0.5)
    given = {"x": x, "out": out, "factor": 0.5, "N": 100, "BLOCK": 64, "num_warps": 4, "enable_fp_fusion": True}
    assert [("scaled", (2,), given)] * 2 == machine.through_jit
    assert machine.launches == []
    triton_abi.warn_once.cache_clear()


def test_a_kernel_with_hooks_before_its_runs_launches_through_the_jit(machine, launcher, monkeypatch):
    monkeypatch.setattr(scaled, "pre_run_hooks", [lambda *_, **__: None])
    launcher.bind(scaled, N=1, BLOCK=64)((1,), torch.zeros(1), torch.zeros(1), 1.0)
    assert (machine.launches, len(machine.through_jit)) == ([], 1)


def test_a_wrong_number_of_arguments_is_refused(launcher):
    with pytest.raises(TypeError, match=r"scaled takes 3 arguments at run time \(x, out, factor\), got 2"):
        launcher.bind(scaled, N=1, BLOCK=64)((1,), torch.zeros(1), torch.zeros(1))


def test_an_unknown_name_is_refused_when_a_kernel_is_bound(launcher):
    with pytest.raises(TypeError, match="scaled has no parameter M; it has BLOCK, N, factor, out, x"):
        launcher.bind(scaled, N=1, M=3, BLOCK=64)


def test_a_constant_without_a_value_is_refused_when_a_kernel_is_bound(launcher):
    with pytest.raises(TypeError, match="scaled is bound without its constants BLOCK"):
        launcher.bind(scaled, N=1)


@pytest.mark.parametrize(
    "x,name",
    [
        (torch.zeros(8, dtype=torch.float64), "x"),
        (torch.zeros(9)[1:], "x"),
        (None, "x"),
    ],
)
def test_a_checked_launch_refuses_what_its_kernel_was_not_compiled_for(machine, x, name):
    launch = JitLauncher(machine.device(), checked=True).bind(scaled, N=8, BLOCK=64)
    launch((1,), torch.zeros(8), torch.zeros(8), 1.0)
    with pytest.raises(LaunchError, match=f"scaled was compiled for {name} as .* A launch is bound for one shape"):
        launch((1,), x, torch.zeros(8), 1.0)
    assert len(machine.launches) == 1


def test_a_checked_launch_takes_what_its_kernel_was_compiled_for(machine):
    launch = JitLauncher(machine.device(), checked=True).bind(mixed, N=8, BLOCK=64)
    for seed in (3, 2**31, 5):
        launch((1,), torch.zeros(8), seed, seed, torch.zeros(8))
    assert [number for number, *_ in machine.launches] == [0, 1, 0]


@pytest.mark.parametrize("value,expected", [("1", True), ("", False), (None, False)])
def test_the_environment_says_whether_launches_are_checked(machine, monkeypatch, value, expected):
    monkeypatch.delenv(CHECKED, raising=False)
    if value is not None:
        monkeypatch.setenv(CHECKED, value)
    assert expected == JitLauncher(machine.device()).checked


def test_a_pointer_of_any_alignment_is_compiled_apart_for_each(machine):
    launch = JitLauncher(machine.device(), checked=True).bind(scaled, any_alignment=("x",), N=8, BLOCK=64)
    whole = torch.zeros(9)
    for x in (whole, whole[1:], whole[1:], whole):
        launch((1,), x, torch.zeros(8), 1.0)
    assert [number for number, *_ in machine.launches] == [0, 1, 1, 0]


def test_a_name_that_is_no_pointer_of_the_kernel_is_refused(launcher):
    with pytest.raises(TypeError, match="scaled has no parameter g"):
        launcher.bind(scaled, any_alignment=("g",), N=8, BLOCK=64)

"""What is said about fallbacks: warnings, errors, observers, `explain`, `lock` and `status` speak of the same ones.

Calls are bound on tensors without storage, so that decisions for a GPU are taken where there is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pluggy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rlkernel as rlk
from rlkernel import decide, hooks, lock, record
from rlkernel_core.decision import PLAIN_TORCH
from rlkernel_core.errors import FallbackError, FallbackWarning, PluginWarning
from tests.command_line import answer
from tests.implementations import acme

# A backend that claims operators on GPUs, and runs plain torch's functions for them.
MANIFEST = """
from rlkernel_core import Backend, Impl, Requires
from rlkernel_core.manifest import API_VERSION
from rlkernel_torch import backend as plain

requires = Requires(device="cuda", dtypes={dtypes}, packages={packages})
impls = [
    Impl(op=impl.op, target=impl.target, requires=requires, supports=impl.supports)
    for impl in plain.impls
    if impl.op.partition("@")[0] in {ops}
]
backend = Backend(name="{name}", api=API_VERSION, impls=tuple(impls), self_test={self_test!r})
"""
OPS = ("linear_logprob", "logprob", "sample", "whiten")
INSTALL = "pip install 'rlkernel[cuda]'"  # for the GPU that the calls are on


@pytest.fixture
def here(plug):
    """Install a kernel backend of ours that claims the operators of this file."""

    def here(name: str, *, dtypes=(), packages=(), self_test=None) -> None:
        plug(
            name,
            MANIFEST.format(name=name, ops=OPS, dtypes=dtypes, packages=packages, self_test=self_test),
            dist=f"rlkernel-{name}",
        )

    return here


@pytest.fixture(autouse=True)
def on_a_hopper(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(decide, "arch_of", lambda device: "sm90" if device.startswith("cuda") else "x86_64")
    rlk.refresh()
    with FakeTensorMode():
        yield
    rlk.refresh()


def logprob(*, entropy: bool = False) -> None:
    ids = torch.empty(2, dtype=torch.int64, device="cuda")
    rlk.logprob.bind(torch.empty(2, 5, device="cuda"), ids, entropy=entropy)


def entropy() -> None:
    logprob(entropy=True)


def linear_logprob() -> None:
    hidden, weight = torch.empty(2, 16, device="cuda"), torch.empty(32, 16, device="cuda")
    rlk.linear_logprob.bind(hidden, weight, torch.empty(2, dtype=torch.int64, device="cuda"))


def whiten() -> None:
    rlk.whiten.bind(torch.empty(2, 5, device="cuda"))


def told(*calls: Callable[[], None]) -> list[str]:
    """What FallbackWarnings say of calls made one after the other; each points to the line that called."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in calls:
            call()
    assert {(w.category, w.filename) for w in said} <= {(FallbackWarning, __file__)}
    return [str(w.message) for w in said]


def ran() -> list[tuple[str, str, str | None]]:
    return sorted({(r.op, r.backend, r.decision.fell_back_from) for r in rlk.status()})


def test_without_kernels_a_gpu_is_told_once_which_line_installs_them() -> None:
    (text,) = told(linear_logprob, entropy, whiten, logprob)
    assert "plain torch runs on cuda sm90, because the kernels for it are not installed" in text
    assert f"Fix: {INSTALL}." in text
    assert ran() == [
        ("linear_logprob@1", PLAIN_TORCH, "cuda"),
        ("logprob@1", PLAIN_TORCH, "triton"),
        ("whiten@1", PLAIN_TORCH, "triton"),
    ]


def test_the_line_installs_the_first_backend_that_has_kernels_of_the_operator() -> None:
    (text,) = told(logprob, linear_logprob)
    assert "Fix: pip install 'rlkernel[triton]'." in text


def test_kernels_that_do_not_take_the_call_are_told_once_per_operator(here) -> None:
    here("triton", dtypes=("bfloat16",))
    said = told(logprob, entropy, whiten, logprob, entropy, whiten)
    assert [text.partition(" ")[0] for text in said] == ["logprob@1", "whiten@1"]
    why = (
        "plain torch runs on cuda sm90 instead of triton (dtype/unsupported: it claims bfloat16, "
        "the call has float32). Fix: cast the input"
    )
    assert [why in text for text in said] == [True, True]


def test_another_kernel_of_ours_runs_without_a_word(here) -> None:
    here("cuda", dtypes=("bfloat16",))
    here("triton")
    with rlk.use(fallback="error"):
        linear_logprob()
    assert ran() == [("linear_logprob@1", "triton", None)]


def test_another_kernel_of_ours_is_a_fallback_where_the_order_names_the_first(here) -> None:
    here("cuda", dtypes=("bfloat16",))
    here("triton")
    with rlk.use("cuda", "auto"), pytest.warns(FallbackWarning, match="triton runs instead of cuda .dtype/unsupported"):
        linear_logprob()
    with rlk.use("cuda", "auto", fallback="error"), pytest.raises(FallbackError, match="forbids triton"):
        linear_logprob()


def test_plain_torch_on_the_cpu_is_the_choice() -> None:
    with rlk.use(fallback="error"):
        rlk.logprob.bind(torch.empty(2, 5), torch.empty(2, dtype=torch.int64))
    assert ran() == [("logprob@1", PLAIN_TORCH, None)]


def test_plain_torch_that_is_named_or_without_rivals_is_the_choice(here) -> None:
    here("triton")
    with rlk.use(PLAIN_TORCH, fallback="error"):
        logprob()
    with rlk.use(fallback="error"):
        rlk.rollout_buffer.bind(256, 2, device="cuda")
    assert ran() == [("logprob@1", PLAIN_TORCH, None), ("rollout_buffer@1", PLAIN_TORCH, None)]


def test_plain_torch_in_place_of_kernels_can_be_forbidden(here) -> None:
    with rlk.use(fallback="error"), pytest.raises(FallbackError) as not_installed:
        logprob()
    here("triton", dtypes=("bfloat16",))
    with rlk.use(fallback="error"), pytest.raises(FallbackError) as refused:
        logprob()
    assert str(not_installed.value).startswith(
        'fallback = "error" forbids that plain torch runs on cuda sm90, because the kernels for it are '
        "not installed. Fix: pip install 'rlkernel[triton]'."
    )
    assert "instead of triton (dtype/unsupported" in str(refused.value).splitlines()[0]
    assert refused.value.decision.fell_back_from == "triton"


def test_each_backend_that_the_order_names_is_told_of_once() -> None:
    cpu = (torch.empty(2, 5), torch.empty(2, dtype=torch.int64))

    def calls(name: str) -> None:
        with rlk.use(name, "auto"):
            rlk.logprob.bind(*cpu, entropy=True)
            rlk.logprob.bind(*cpu, top_logprobs=2)

    with rlk.registered(acme()), rlk.registered(acme(name="zeta")):
        said = told(*(partial(calls, name) for name in ("acme", "zeta", "acme")))
    assert [text.partition(": ")[2].partition(" (")[0] for text in said] == [
        "torch runs instead of acme",
        "torch runs instead of zeta",
    ]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"self_test": "tests.implementations:fails"}, "probe/failed"),
        ({"packages": ("no-such-library>=2",)}, "environment/missing-package"),
    ],
)
def test_a_kernel_backend_of_ours_that_cannot_run_is_told_of_although_another_serves(here, broken, said) -> None:
    here("cuda", **broken)
    here("triton")
    with rlk.use(probe="inprocess", fallback="error"):
        with pytest.warns(PluginWarning, match=f"backend 'cuda': {said}"):
            linear_logprob()
        rlk.sample.bind(torch.empty(2, 5, device="cuda"), temperature=0.0, seed=0, step=0)  # warnings are errors here
    assert ran() == [("linear_logprob@1", "triton", None), ("sample@1", "triton", None)]


def test_a_kernel_backend_that_would_not_have_been_the_choice_is_not_told_of(here) -> None:
    here("cuda")
    here("triton", packages=("no-such-library>=2",))
    with rlk.use(fallback="error"), warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_logprob()
    assert ran() == [("linear_logprob@1", "cuda", None)]


def test_observers_hear_of_every_fallback_and_of_nothing_else(here) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.heard: list[tuple[str, str]] = []

        @pluggy.HookimplMarker("rlkernel")
        def rlkernel_fell_back(self, decision) -> None:
            self.heard.append((decision.call.op, decision.fell_back_from))

    here("triton", dtypes=("bfloat16",))
    recorder = Recorder()
    hooks.register(recorder)
    try:
        with pytest.warns(FallbackWarning):
            logprob()
        entropy()
        with rlk.use(PLAIN_TORCH):
            logprob()
        rlk.rollout_buffer.bind(256, 2, device="cuda")
    finally:
        hooks.unregister(recorder)
    assert recorder.heard == [("logprob@1", "triton")] * 2


def test_a_lock_that_pins_plain_torch_does_not_make_it_the_choice_on_a_gpu(here, tmp_path) -> None:
    with rlk.use(PLAIN_TORCH):
        logprob()
    path = tmp_path / "rlkernel.lock"
    lock.write(path, [r.decision for r in rlk.status()])
    here("triton")
    with (
        rlk.use(lock=str(path)),
        pytest.warns(FallbackWarning, match="instead of triton .policy/locked.*rlkernel lock"),
    ):
        logprob()


# --- the command line, for hardware that is not here

ON_HOPPER = ("--device", "cuda", "--arch", "sm90")


def test_a_lock_for_a_gpu_says_that_it_pins_plain_torch_and_what_installs_kernels(cli, tmp_path) -> None:
    result = cli("lock", *ON_HOPPER)
    (said,) = result.stderr.splitlines()
    assert result.exit_code == 0
    assert said.startswith("warning: rlkernel.lock pins a fallback for logprob@1, linear_logprob@1")
    assert said.endswith(
        f": plain torch runs on cuda sm90, because the kernels for it are not installed. Fix: {INSTALL}."
    )
    assert "rollout_buffer@1" not in said
    assert "rollout_buffer@1" in lock.read(str(tmp_path / "here" / "rlkernel.lock"))


def test_the_fallbacks_that_a_lock_pins_are_data_too(cli, here) -> None:
    here("triton", dtypes=("bfloat16",))
    found = answer(cli("lock", *ON_HOPPER, "--dtype", "float32", "--no-grad", "--json"))["fallbacks"]
    assert {f["op"]: f["fell_back_from"] for f in found}["logprob@1"] == "triton"
    (mine,) = [f for f in found if f["op"] == "logprob@1"]
    assert mine == {
        "op": "logprob@1",
        "device": "cuda",
        "arch": "sm90",
        "grad": False,
        "backend": PLAIN_TORCH,
        "fell_back_from": "triton",
        "reason": "dtype/unsupported",
        "text": "it claims bfloat16, the call has float32",
        "fix": "cast the input, or name another backend first",
    }


@pytest.mark.parametrize("where", [("--device", "cpu"), ("--device", "cuda", "--arch", "sm75")])
def test_a_lock_for_hardware_without_kernels_pins_plain_torch_without_a_word(cli, where) -> None:
    result = cli("lock", *where)
    assert (result.exit_code, result.stderr) == (0, "")
    assert answer(cli("lock", *where, "--json"))["fallbacks"] == []


def test_the_list_of_operators_ends_with_what_is_a_fallback_and_why(cli) -> None:
    said = cli("explain", *ON_HOPPER).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("fallback")]
    assert line.endswith(f"because the kernels for it are not installed. Fix: {INSTALL}.")
    assert "fallback: plain torch; not installed: cuda, triton" in said
    assert "fallback" not in cli("explain", "--device", "cpu").stdout


def test_a_forbidden_fallback_is_no_service(cli, monkeypatch) -> None:
    monkeypatch.setenv("RLKERNEL_FALLBACK", "error")
    codes = [cli("explain", op, *ON_HOPPER).exit_code for op in ("logprob", "rollout_buffer")]
    assert codes == [1, 0]
    assert "fallback: plain torch; not installed: triton, and fallback = " in cli("explain", *ON_HOPPER).stdout


def test_the_fallbacks_of_a_run_are_shown_with_its_status(cli, here, tmp_path) -> None:
    here("triton", dtypes=("bfloat16",))
    with pytest.warns(FallbackWarning):
        logprob()
    rlk.rollout_buffer.bind(256, 2, device="cuda")
    record.write(tmp_path / "run")
    lines = cli("status", str(tmp_path / "run")).stdout.splitlines()
    (said,) = [line for line in lines if line.startswith("fallback")]
    assert said.startswith("fallback  logprob@1: plain torch runs on cuda sm90 instead of triton")

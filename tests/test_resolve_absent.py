"""Our own backends that have kernels for a call and are not installed: shown with the line that installs them."""

from __future__ import annotations

import pytest

from rlkernel.discover import FIRST_PARTY, Candidate
from rlkernel.resolve import Facts, resolve
from rlkernel.wording import remedy, without_kernels
from rlkernel_core.decision import PLAIN_TORCH, Call, Decision, OpPolicy
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires

OPS = ("logprob@1", "linear_logprob@1", "rollout_buffer@1")
IMPLS = tuple(Impl(op=op, target="pkg.mod:fn", requires=Requires(device="*")) for op in OPS)
TORCH = Candidate(PLAIN_TORCH, "rlkernel", "1", Backend(name=PLAIN_TORCH, api=API_VERSION, impls=IMPLS))


def decide(device: str, arch: str | None = None, order: tuple[str, ...] = ("auto",), op: str = "logprob") -> Decision:
    return resolve({PLAIN_TORCH: TORCH}, Facts(), Call(f"{op}@1", device, arch=arch), OpPolicy(order, "error"))


@pytest.mark.parametrize(
    ("op", "device", "arch", "absent"),
    [
        ("logprob", "cpu", "x86_64", []),
        ("logprob", "cuda", "sm90", ["triton"]),
        ("linear_logprob", "cuda", "sm90", ["cuda", "triton"]),
        ("logprob", "cuda", "gfx942", ["rocm", "triton"]),
        ("logprob", "cuda", "sm87", ["jetson", "triton"]),
        ("linear_logprob", "cuda", "sm80", ["triton"]),
        ("linear_logprob", "cuda", None, ["cuda", "rocm", "jetson", "triton"]),
        ("logprob", "cuda", "sm75", []),
        ("rollout_buffer", "cuda", "sm90", []),
        ("logprob", "xpu", None, []),
    ],
)
def test_auto_names_the_backends_that_have_kernels_for_the_call(op, device, arch, absent) -> None:
    rejected = decide(device, arch, op=op).rejected
    assert [r.backend for r in rejected] == absent
    assert {(r.reason.slug, r.reason.fix) for r in rejected} == {
        ("load/not-installed", FIRST_PARTY[name].install_on(arch)) for name in absent
    }


@pytest.mark.parametrize(
    ("op", "arch", "expected", "line"),
    [
        ("logprob", "sm90", "triton", "pip install 'rlkernel[triton]'"),  # Hopper's have none of it
        ("linear_logprob", "sm90", "cuda", "pip install 'rlkernel[cuda]'"),
        ("logprob", "sm80", "triton", "pip install 'rlkernel[triton]'"),
        ("logprob", "sm87", "jetson", FIRST_PARTY["jetson"].released),
        ("logprob", "gfx942", "rocm", FIRST_PARTY["rocm"].released),
        ("logprob", None, "triton", "pip install 'rlkernel[triton]'"),  # the one for most hardware
    ],
)
def test_plain_torch_where_kernels_could_be_installed_is_a_fallback(op, arch, expected, line) -> None:
    decision = decide("cuda", arch, op=op)
    assert (decision.backend, decision.fell_back_from) == (PLAIN_TORCH, expected)
    assert (without_kernels(decision), remedy(decision)) == (True, line)


@pytest.mark.parametrize(
    ("op", "device", "arch"),
    [
        ("logprob", "cpu", "x86_64"),
        ("logprob", "meta", None),
        ("logprob", "xpu", None),
        ("logprob", "cuda", "sm75"),
        ("logprob", "cuda", "gfx906"),
        ("rollout_buffer", "cuda", "sm90"),
    ],
)
def test_plain_torch_where_nothing_could_be_installed_is_the_choice(op, device, arch) -> None:
    decision = decide(device, arch, op=op)
    assert (decision.backend, decision.fell_back_from) == (PLAIN_TORCH, None)


def test_what_is_named_and_not_installed_is_a_fallback() -> None:
    assert decide("cuda", "sm90", ("cuda", "auto")).fell_back_from == "cuda"
    assert decide("cpu", "x86_64", ("cuda", "auto")).fell_back_from == "cuda"


@pytest.mark.parametrize("order", [("torch",), ("torch", "auto")])
def test_plain_torch_that_is_named_is_the_choice(order) -> None:
    assert decide("cuda", "sm90", order).fell_back_from is None


def test_plain_torch_that_is_named_after_auto_is_not() -> None:
    assert decide("cuda", "sm90", ("auto", "torch")).fell_back_from == "triton"


def test_without_auto_nobody_is_advertised() -> None:
    assert decide("cuda", "sm90", ("torch",)).rejected == ()


@pytest.mark.parametrize("arch", ["gfx942", "sm87"])
def test_the_portable_kernels_leave_a_vendors_torch_alone(arch) -> None:
    reasons = {r.backend: r.reason.fix for r in decide("cuda", arch).rejected}
    assert reasons["triton"] == "pip install rlkernel-triton"

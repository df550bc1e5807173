"""Our own backends that would serve a device and are not installed: shown with the line that installs them."""

from __future__ import annotations

import pytest

from rlkernel.discover import Candidate
from rlkernel.resolve import Facts, resolve
from rlkernel_core.decision import Call, Decision, OpPolicy
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires

ANYWHERE = Impl(op="logprob@1", target="pkg.mod:fn", requires=Requires(device="*"))
MACHINE = {
    "reference": Candidate("reference", "rlkernel", "1", Backend(name="reference", api=API_VERSION, impls=(ANYWHERE,)))
}


def decide(device: str, arch: str | None = None, order: tuple[str, ...] = ("auto",)) -> Decision:
    return resolve(MACHINE, Facts(), Call("logprob@1", device, arch=arch), OpPolicy(order, "error"))


@pytest.mark.parametrize(
    ("device", "arch", "absent"),
    [
        ("cpu", "x86_64", []),
        ("cuda", "sm90", ["cuda", "triton"]),
        ("cuda", "gfx942", ["rocm", "triton"]),
        ("cuda", "sm87", ["jetson", "triton"]),
        ("cuda", "sm80", ["triton"]),
        ("cuda", None, ["cuda", "rocm", "jetson", "triton"]),
        ("xpu", None, []),
    ],
)
def test_auto_names_the_backends_one_could_install_for_the_device(device, arch, absent) -> None:
    rejected = decide(device, arch).rejected
    assert [r.backend for r in rejected] == absent
    assert {(r.reason.slug, r.reason.fix) for r in rejected} == {
        ("load/not-installed", f"pip install 'rlkernel[{name}]'") for name in absent
    }


def test_what_is_not_installed_is_no_fallback() -> None:
    decision = decide("cuda", "sm90")
    assert (decision.backend, decision.fell_back_from) == ("reference", None)


def test_what_is_named_and_not_installed_is_a_fallback() -> None:
    assert decide("cuda", "sm90", ("cuda", "auto")).fell_back_from == "cuda"


def test_without_auto_nobody_is_advertised() -> None:
    assert decide("cuda", "sm90", ("reference",)).rejected == ()

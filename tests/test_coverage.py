"""What is known of our own kernel backends before they are installed equals what their manifests claim."""

from __future__ import annotations

import importlib

import pytest

from rlkernel.coverage import Coverage, matches
from rlkernel.discover import ACCELERATORS, FIRST_PARTY
from rlkernel_core.decision import PLAIN_TORCH
from rlkernel_core.manifest import Backend, Impl
from rlkernel_core.spec import OPERATORS

KERNELS = [name for name in FIRST_PARTY if name != PLAIN_TORCH]
ARCHS = [
    *(f"sm{number}" for number in (70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)),
    *(f"gfx{name}" for name in ("803", "906", "908", "90a", "942", "950", "1030", "1100", "1151", "1201", "1250")),
]


def manifest(name: str) -> Backend:
    """The manifest of a backend of this repository, whether it is installed or not."""
    return importlib.import_module(FIRST_PARTY[name].dist.replace("-", "_")).backend


def takes(impl: Impl, op: str, arch: str | None) -> bool:
    wanted = impl.requires
    if impl.op != OPERATORS[op].id or wanted.device != "cuda":
        return False
    return arch is None or (matches(wanted.arch, arch) and not matches(wanted.arch_excluded, arch))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", [None, *ARCHS])
def test_the_operators_known_to_have_kernels_are_those_that_the_manifest_claims(name, arch) -> None:
    impls = manifest(name).impls
    claimed = {op for op in OPERATORS if any(takes(impl, op, arch) for impl in impls)}
    assert {op for op in OPERATORS if FIRST_PARTY[name].has_kernels(op, "cuda", arch)} == claimed


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernels_are_known_for_a_device_that_no_manifest_claims(name) -> None:
    assert {impl.requires.device for impl in manifest(name).impls} == ACCELERATORS
    assert [op for op in OPERATORS if FIRST_PARTY[name].has_kernels(op, "cpu", None)] == []


def test_plain_torch_has_no_kernels_anywhere() -> None:
    ours = FIRST_PARTY[PLAIN_TORCH]
    assert [op for op in OPERATORS for device in (*ACCELERATORS, "cpu") if ours.has_kernels(op, device, None)] == []


def test_storage_of_rollouts_has_no_kernels() -> None:
    assert [n for n, ours in FIRST_PARTY.items() if ours.has_kernels("rollout_buffer@1", "cuda", None)] == []


@pytest.mark.parametrize(
    ("arch", "made"),
    [
        ("sm75", []),
        ("sm80", ["triton"]),
        ("sm87", ["jetson", "triton"]),
        ("sm90", ["cuda", "triton"]),
        ("gfx906", []),
        ("gfx942", ["rocm", "triton"]),
        ("gfx1100", ["rocm", "triton"]),
        ("gfx1250", []),
        (None, KERNELS),
    ],
)
def test_a_backend_is_made_for_the_architectures_that_it_has_kernels_for(arch, made) -> None:
    assert [name for name, ours in FIRST_PARTY.items() if ours.made_for("cuda", arch)] == made


@pytest.mark.parametrize(
    ("pattern", "arch", "expected"),
    [
        ("sm90", "sm90", True),
        ("sm90", "sm900", False),
        ("sm80+", "sm80", True),
        ("sm80+", "sm120", True),
        ("sm80+", "sm75", False),
        ("sm80+", "gfx942", False),
        ("gfx9*", "gfx942", True),
        ("gfx9*", "gfx1100", False),
    ],
)
def test_patterns_of_architectures(pattern, arch, expected) -> None:
    assert matches([pattern], arch) is expected


def test_an_architecture_that_is_left_out_has_no_kernels_for_any_operator_or_for_one() -> None:
    known = Coverage(frozenset({"logprob", "capture"}), ("gfx1*",), ("gfx125*",), {"capture": ("gfx11*",)})
    found = {arch: [op for op in ("logprob@1", "capture@1") if known.has(op, arch)] for arch in ("gfx1030", "gfx1100")}
    assert found == {"gfx1030": ["logprob@1", "capture@1"], "gfx1100": ["logprob@1"]}
    assert (known.serves("gfx1250"), known.has("logprob", "gfx1250"), known.has("sample", "gfx1030")) == (False,) * 3

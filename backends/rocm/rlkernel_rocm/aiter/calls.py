"""Every call into AITER, as data: which function, with which arguments, since which version.

Tests bind each of these against the signatures recorded from AITER's sources (signatures.json), so that what is called
here and what was recorded cannot drift apart. Imports neither torch nor AITER.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any, Final, NamedTuple

from packaging.version import Version

from rlkernel_core.errors import RLKernelError

DISTRIBUTION: Final = "amd-aiter"
# Older ones reseed torch's generator in their samplers; PyPI's only wheel, 0.1.7.post2.dev18, is one of them.
OLDEST: Final = "0.1.12"
NEEDED: Final = f"{DISTRIBUTION}>={OLDEST}"
FAKE: Final = "__rlkernel_fake__"  # an attribute of modules that tests put in AITER's place
# AMD's wheels lie beside its releases; this one is for ROCm 7.2 and Python 3.12, other names say what they are for.
INSTALL: Final = (
    "pip install 'amd-aiter==0.1.20.post1+rocm7.2.manylinux.2.28' "
    "--find-links https://github.com/ROCm/aiter/releases/expanded_assets/v0.1.20.post1"
)


class CallSpec(NamedTuple):
    """One call."""

    module: str
    function: str
    arguments: tuple[str, ...]  # given by position, named as AITER names them

    @property
    def name(self) -> str:
        """`aiter.ops.gemm_op_a8w8.gemm_a8w8`."""
        return f"{self.module}.{self.function}"


# XQ [M, K] and WQ [N, K] int8 or fp8, x_scale [M, 1] and w_scale [1, N] fp32 -> [M, N] of `dtype`.
GEMM_A8W8: Final = CallSpec("aiter.ops.gemm_op_a8w8", "gemm_a8w8", ("XQ", "WQ", "x_scale", "w_scale", "bias", "dtype"))
# XQ [M, K] and WQ [N, K] fp8, x_scale [M, K / 128] and w_scale [N / 128, K / 128] fp32 -> [M, N] of `dtype`. Its
# sibling for shuffled weights gave wrong products on gfx950 without an error (SGLang #28685) and is not called.
GEMM_A8W8_BLOCKS: Final = CallSpec(
    "aiter.ops.gemm_op_a8w8", "gemm_a8w8_blockscale", ("XQ", "WQ", "x_scale", "w_scale", "dtype")
)
CALLS: Final = (GEMM_A8W8, GEMM_A8W8_BLOCKS)


def owner() -> str:
    """The installed version of AITER.

    Raises:
        RLKernelError: none, an older one, or the unrelated package of the same import name.
    """
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:
        installed = None
    others = [d for d in packages_distributions().get("aiter", []) if d != DISTRIBUTION]
    if others:
        raise RLKernelError(
            f"the module aiter belongs to {', '.join(others)}, which is not AMD's: pip uninstall {' '.join(others)}"
        )
    if installed is None:
        raise RLKernelError(f"{DISTRIBUTION} is not installed: {INSTALL}")
    if Version(installed) < Version(OLDEST):
        raise RLKernelError(f"{DISTRIBUTION} {installed} is older than {OLDEST}: {INSTALL}")
    return installed


@cache
def load(spec: CallSpec) -> Callable[..., Any]:
    """Import AITER and find a function of it; the first call of a function may build it for minutes.

    Raises:
        RLKernelError: AITER is not installed as `owner` wants it, cannot be imported, or is not AITER.
    """
    installed = owner()
    try:
        module = import_module(spec.module)
    except (ImportError, RuntimeError, KeyError, OSError, SystemExit) as error:  # what its import is known to raise
        raise RLKernelError(
            f"{DISTRIBUTION} {installed} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if getattr(import_module("aiter"), FAKE, False):
        raise RLKernelError("the module aiter is a test's stand-in for AITER; it is never run in earnest")
    found = getattr(module, spec.function, None)
    if not callable(found):
        raise RLKernelError(f"{DISTRIBUTION} {installed} has no {spec.name}; report it with the version")
    function: Callable[..., Any] = found
    return function

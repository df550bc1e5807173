"""Why a kernel has no certificate."""

from __future__ import annotations

from rlkernel_core.errors import RLKernelError


class NoCertificateError(RLKernelError):
    """The order of a sum could not be derived; the message names the instruction."""


class UnknownPtxError(NoCertificateError):
    """An instruction that is not modeled."""


class DataDependentError(NoCertificateError):
    """What runs, or where it reads, depends on a value of the data, and so may the order."""

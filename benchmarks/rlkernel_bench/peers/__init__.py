"""Other people's implementations, one small adapter each: used where installed, else reported with what is missing.

An adapter maps an operator to a function that takes a workload and returns the peer's forward call on the suite's
inputs, with results under the suite's names. It was written from the peer's public source. Until it has been seen
working somewhere (`ran`), every result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from rlkernel.discover import PackageVersions, guarded
from rlkernel_bench.work import Call, Work


@dataclass(frozen=True)
class Peer:
    """One adapter."""

    name: str
    distribution: str  # whose version is reported
    modules: tuple[str, ...]  # what has to be importable
    calls: Mapping[str, Callable[[Work], Call]]  # operator, or a suite's word -> workload -> forward call
    source: str  # what was read to write it
    devices: tuple[str, ...] = ("cuda",)
    ran: str = ""  # where it has been seen working, with the version; "" nowhere yet
    whole: bool = False  # the call makes gradients itself
    install: str = ""  # the line that brings it, where that is not `pip install <distribution>`

    def version(self) -> str | None:
        """Installed version of its distribution."""
        return PackageVersions().get(self.distribution)

    def lacking(self, device: str) -> str:
        """What is missing to use it on a device; empty where nothing is."""
        kind = device.partition(":")[0]
        if kind not in self.devices:
            return f"runs on {', '.join(self.devices)} only"
        missing = [m for m in self.modules if guarded(lambda n=m: find_spec(n))[0] is None]
        line = self.install or f"pip install {self.distribution}"
        return f"not installed: {', '.join(missing)} ({line})" if missing else ""


def without_temperature(work: Work) -> None:
    """Refuse a workload with a temperature.

    Raises:
        NotImplementedError: it has one.
    """
    if work.options.get("temperature", 1.0) != 1.0:
        raise NotImplementedError("takes no temperature")


def plain_rows(work: Work) -> None:
    """Refuse a workload with several ids per row, or with a low-rank addition to the head.

    Raises:
        NotImplementedError: it lists K of each, or has one of rank r.
    """
    if work.options.get("K"):
        raise NotImplementedError("takes one id per row")
    if work.options.get("r"):
        raise NotImplementedError("takes no low-rank addition to the head")


_MODULES: Final = (
    "plain", "compiled", "cublas", "graphs", "liger", "trl", "verl", "cce", "quack", "flashinfer", "quantized",
    "rl_kernel", "rollout", "batch_invariant",
)  # fmt: skip

PEERS: Final[Mapping[str, Peer]] = {
    peer.name: peer for module in _MODULES for peer in import_module(f"{__name__}.{module}").PEERS
}

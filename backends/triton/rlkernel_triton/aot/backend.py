"""The backend named `aot`: operators from a bundle, with no compilation at the first call. It runs where it is named.

    rlkernel aot build --target sm_90          # once, where Triton is installed
    order = ["aot", "auto"]                    # in rlkernel.toml, or RLKERNEL_ORDER=aot,auto

Claims only; importing this loads neither torch nor Triton and looks for no bundle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rlkernel_core.manifest import Backend
from rlkernel_core.reasons import Reason
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.claims import manifest as portable

# What a rollout and an update on one GPU need; every other operator stays with Triton.
OPERATORS: Final = (
    "advantage", "dequantize", "linear_logprob", "logprob", "policy_loss", "prepack", "qmatmul", "quantize", "sample",
)  # fmt: skip
# What an operator cannot be used without: weights are made before they are multiplied, and again when they change.
WITH: Final[Mapping[str, tuple[str, ...]]] = {"qmatmul": ("quantize", "prepack", "dequantize")}


def folder() -> Path:
    """Where bundles of this user lie."""
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "rlkernel" / "bundles"


def claims(name: str, module: str, arch: tuple[str, ...]) -> Backend:
    """A manifest over bundles: `module:logprob` is an implementation, `module:logprob_fits` its check."""
    whole = portable(name, device="cuda", arch=arch)
    impls = [
        impl.model_copy(
            update={"target": f"{module}:{op}", "prepared": False, "gradient": None, "check": f"{module}:{op}_fits"}
        )
        for impl in whole.impls
        if (op := impl.op.partition("@")[0]) in OPERATORS
    ]
    return whole.model_copy(update={"impls": tuple(impls), "self_test": f"{module}:self_test"})


class FromBundles:
    """Implementations over the bundle that has the best code for this machine's GPU, and over others with the same.

    Args:
        host: name under which the host modules are imported.
        folders: where bundles are looked for, in order.
        force: (target, kind of file) to run in place of what serves the GPU best.
        prepare: what is done to host modules before anything runs.
    """

    def __init__(
        self,
        host: str,
        folders: Callable[[], list[Path]],
        force: tuple[str, str] | None = None,
        prepare: Callable[[Any], object] = lambda _: None,
    ) -> None:
        self._name, self._folders, self._force, self._prepare = host, folders, force, prepare

    @cached_property
    def launcher(self) -> Any:
        """What launches.

        Raises:
            BundleError: no bundle has code for this GPU.
        """
        from rlkernel_triton.aot.bundle import Bundle, BundleError
        from rlkernel_triton.aot.driver import Driver
        from rlkernel_triton.aot.launching import FromBundle

        driver, refused, found = Driver(), [], []
        for path in [p for place in self._folders() for p in sorted(place.glob("*.zip"))]:
            try:
                found.append(FromBundle(Bundle(path), driver, force=self._force))
            except BundleError as error:
                refused.append(str(error))
        if found:
            best = min(found, key=lambda launcher: launcher.rank)
            alike = [f for f in found if f is not best and (f.chosen, f.kind) == (best.chosen, best.kind)]
            best.others = tuple(alike)
            best.elsewhere = self.missing
            return best
        major, minor = driver.capability(0)
        looked = ", ".join(map(str, self._folders()))
        raise BundleError(
            f"no bundle in {looked} runs on this GPU. {' '.join(refused)} Make one where Triton is installed: "
            f"rlkernel aot build --target sm_{major}{minor}"
        )

    def missing(self, call: Any) -> Any:
        """A launcher for a launch that no bundle has a build for: none. It is written down if that is asked for."""
        from rlkernel_triton.aot.recording import MISSING, noted

        if os.environ.get(MISSING):
            noted(call, self.launcher.target(), Path(os.environ[MISSING]))

    @cached_property
    def rehearsals(self) -> Any:
        """What the bundles say to a call before it is run."""
        from rlkernel_triton.aot.rehearsal import Rehearsals

        return Rehearsals(f"{self._name}_planned", self.launcher, self._prepare)

    @cached_property
    def host(self) -> Any:
        """The host modules over that launcher."""
        from rlkernel_triton.aot.hosts import Host
        from rlkernel_triton.aot.planning import plan_for
        from rlkernel_triton.aot.standin import triton

        made = Host(self._name, triton(self.launcher))
        plan_for(made, self.launcher.target())
        self._prepare(made)
        return made

    def __call__(self, name: str) -> Callable[..., Any]:
        """`logprob`, `logprob_fits`, `self_test`: what a manifest names in a module.

        Raises:
            AttributeError: bundles have no such operator.
        """
        if name == "self_test":
            return self.self_test
        op = name.removesuffix("_fits")
        if op not in OPERATORS:
            raise AttributeError(name)
        if op != name:
            return self._fits(op)
        from rlkernel_triton.aot.hosts import implementation

        return implementation(self.host, op)

    def _fits(self, op: str) -> Callable[[Any], Reason | None]:
        from rlkernel_triton.aot.hosts import implementation

        own = implementation(self.host, op, check=True) if CLAIMS[op].check else None

        def fits(call: Any) -> Reason | None:
            """What the kernels' own check says to a call, and then the bundles."""
            said: Reason | None = own(call) if own else None
            return said or self.rehearsals.missing(op, call)

        return fits

    def self_test(self, device: str) -> None:
        """Draw-free: log-probabilities on a device, held against their definition; without their kernels one is loaded.

        Raises:
            RLKernelError: no bundle runs there, or the result is wrong.
        """
        import torch

        from rlkernel_core.errors import RLKernelError
        from rlkernel_core.spec.logprob import LogprobCall
        from rlkernel_torch.logprob import logprob as definition
        from rlkernel_triton.aot.bundle import NoBuildError

        g = torch.Generator().manual_seed(0)
        logits, ids = torch.randn(4, 1000, generator=g) * 3, torch.randint(0, 1000, (4,), generator=g)
        with torch.cuda.device(device):
            try:
                got = self("logprob")(LogprobCall(logits.to(device, torch.bfloat16), ids.to(device))).logprob.cpu()
            except NoBuildError:  # a bundle of other operators
                self.launcher.load_one()
                return
        want = definition(LogprobCall(logits.bfloat16().double(), ids)).logprob
        error = (got.double() - want).abs().max().item()
        if not error < 1e-4:
            raise RLKernelError(f"log-probabilities on {device} are off by {error:.3g}; expected below 1e-4")


backend = claims("aot", "rlkernel_triton.aot.backend", arch=("sm80+",))
_found: Final = FromBundles("user", lambda: [folder()])


def __getattr__(name: str) -> Callable[..., Any]:
    return _found(name)

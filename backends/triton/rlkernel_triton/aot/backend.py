"""The backend named `aot`: operators from a bundle, with no compilation at the first call. It runs where it is named.

    rlkernel aot build --target sm_90          # once, where Triton is installed
    order = ["aot", "auto"]                    # in rlkernel.toml, or RLKERNEL_ORDER=aot,auto

Claims only; importing this loads neither torch nor Triton and looks for no bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.environment import path_in
from rlkernel_core.manifest import Backend
from rlkernel_core.reasons import Reason
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.claims import manifest as portable_manifest

if TYPE_CHECKING:
    from rlkernel_triton.aot.bundle_launcher import BundleLauncher, KernelRequest
    from rlkernel_triton.aot.configurations import Argument
    from rlkernel_triton.aot.dry_run import DryRuns
    from rlkernel_triton.launchers import Scope

OPERATORS: Final = tuple(sorted(set(CLAIMS) - {"capture"}))  # whose graphs are torch's and the driver's
# What an operator cannot be used without: weights are made before they are multiplied, and again when they change.
WITH: Final[Mapping[str, tuple[str, ...]]] = {"qmatmul": ("quantize", "prepack", "dequantize")}


def folder() -> Path:
    """Where bundles of this user lie."""
    return (path_in("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "rlkernel" / "bundles"


def manifest(name: str, module: str, arch: tuple[str, ...]) -> Backend:
    """A manifest over bundles: `module:logprob` prepares calls of a shape, `module:logprob_fits` is its check."""
    whole = portable_manifest(name, device="cuda", arch=arch, asked_for=False)
    impls = [
        impl.model_copy(
            update={"target": f"{module}:{op}", "prepared": True, "gradient": None, "check": f"{module}:{op}_fits"}
        )
        for impl in whole.impls
        if (op := impl.op.partition("@")[0]) in OPERATORS
    ]
    return whole.model_copy(update={"impls": tuple(impls), "self_test": f"{module}:self_test"})


class BundleBackend:
    """Implementations over the bundle that has the best code for this machine's GPU, and over others with the same.

    They are those of `rlkernel_triton.claims`, prepared and run with a launcher that has machine code.

    Args:
        folders: where bundles are looked for, in order.
        force: (target, kind of file) to run in place of what serves the GPU best.
        piece: tells how many bytes work in pieces may take at a time, None: as elsewhere; asked once.
    """

    def __init__(
        self,
        folders: Callable[[], list[Path]],
        force: tuple[str, str] | None = None,
        piece: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._folders, self._force, self._piece = folders, force, piece

    @cached_property
    def launcher(self) -> BundleLauncher:
        """What launches.

        Raises:
            BundleError: no bundle has code for this GPU.
        """
        from rlkernel_triton.aot.bundle import Bundle, BundleError
        from rlkernel_triton.aot.bundle_launcher import BundleLauncher
        from rlkernel_triton.aot.driver import Driver

        driver, refused, found = Driver(), [], []
        for path in [p for place in self._folders() for p in sorted(place.glob("*.zip"))]:
            try:
                found.append(BundleLauncher(Bundle(path), driver, force=self._force))
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

    def missing(self, request: KernelRequest, arguments: Mapping[str, Argument]) -> BundleLauncher | None:
        """Called where no bundle holds a launch's configuration: returns None, and logs it if AOT_MISSING is set."""
        from rlkernel_triton.aot.recordings import MISSING, append

        if path := path_in(MISSING):
            append(path, request.op, request.configuration(arguments), self.launcher.chosen)
        return None

    @cached_property
    def scope(self) -> Scope:
        """In which everything runs."""
        from rlkernel_triton.launchers import Scope

        return Scope(self.launcher, self.launcher.target, self._piece())

    @cached_property
    def dry_runs(self) -> DryRuns:
        """What the bundles say to a call before it is run."""
        from rlkernel_triton.aot.bundle_launcher import LookupLauncher
        from rlkernel_triton.aot.dry_run import DryRuns

        return DryRuns(self.scope._replace(launcher=LookupLauncher(self.launcher)))

    def __call__(self, name: str) -> Callable[..., Any]:
        """What a manifest names in a module: `logprob`, which prepares calls of a shape, `logprob_fits`, `self_test`.

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
        return self._prepares(op)

    def _prepares(self, op: str) -> Callable[[Any], Callable[[Any], Any]]:
        def prepare(call: Any) -> Callable[[Any], Any]:
            """Look for the driver and the bundles here, at the first call: what would run elsewhere needs neither."""
            from rlkernel_triton.prepared import prepared

            return prepared(op, self.scope)(call)

        return prepare

    def _fits(self, op: str) -> Callable[[Any], Reason | None]:
        from rlkernel_triton.launchers import within
        from rlkernel_triton.prepared import named

        check = CLAIMS[op].check
        own = named(check) if check else None

        def fits(call: Any) -> Reason | None:
            """What the kernels' own check says to a call, and then the bundles."""
            with within(self.scope):
                said: Reason | None = own(call) if own else None
            return said or self.dry_runs.missing(op, call)

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
        call = LogprobCall(logits.to(device, torch.bfloat16), ids.to(device))
        try:
            got = self("logprob")(call)(call).logprob.cpu()
        except NoBuildError:  # a bundle of other operators
            with torch.cuda.device(device):
                self.launcher.load_one()
            return
        want = definition(LogprobCall(logits.bfloat16().double(), ids)).logprob
        error = (got.double() - want).abs().max().item()
        if not error < 1e-4:
            raise RLKernelError(f"log-probabilities on {device} are off by {error:.3g}; expected below 1e-4")


backend = manifest("aot", "rlkernel_triton.aot.backend", arch=("sm80+",))
_backend: Final = BundleBackend(lambda: [folder()])


def __getattr__(name: str) -> Callable[..., Any]:
    return _backend(name)

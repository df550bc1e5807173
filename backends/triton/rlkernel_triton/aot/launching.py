"""From a launch of host code to machine code on a device: the builds of a bundle, found, loaded and run.

Which code serves a device: its own target's, else a cubin of the same family, else PTX of an earlier target, which the
driver compiles when it is loaded. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, Final

import torch

from rlkernel_triton.aot.builds import Code, fixed
from rlkernel_triton.aot.bundle import Bundle, BundleError, NoBuildError
from rlkernel_triton.aot.driver import DriverError
from rlkernel_triton.aot.standin import Call

# Tegra chips: their cubins do not run on others, nor those of others on them (CUDA C++ Programming Guide, on binary
# compatibility).
_TEGRA: Final = frozenset({"sm_72", "sm_87", "sm_110"})


def served_by(device: str, available: Mapping[str, Iterable[str]]) -> tuple[str, str] | None:
    """(target, kind of file) that runs on a device, of targets with the kinds of files that each has; None: nothing.

    Args:
        device: the device's own target, "sm_86".
        available: target -> "cubin", "ptx".
    """
    if "cubin" in available.get(device, ()):
        return device, "cubin"
    number = int(device[3:])
    below = sorted((int(t[3:]), t) for t in available if t.startswith("sm_") and int(t[3:]) <= number)
    for of, target in reversed(below):
        family = of // 10 == number // 10 and not {device, target} & _TEGRA and of < 90
        if family and "cubin" in available[target]:
            return target, "cubin"
    return next(((t, "ptx") for _, t in reversed(below) if "ptx" in available[t]), None)


class FromBundle:
    """A launcher over one bundle, and others where there are, and one kind of GPU.

    Args:
        bundle: where the code is.
        driver: `rlkernel_triton.aot.driver.Driver`, or what stands for it.
        force: (target, kind of file) to run in place of what serves the device best.

    Raises:
        BundleError: nothing in the bundle runs on the device.
    """

    def __init__(self, bundle: Bundle, driver: Any, device: int = 0, force: tuple[str, str] | None = None) -> None:
        self.bundle, self.driver = bundle, driver
        major, minor = driver.capability(device)
        self.own = own = f"sm_{major}{minor}"
        kinds = {target: there["kinds"] for target, there in bundle.targets.items()}
        found = force or served_by(own, kinds)
        if found is None or found[1] not in kinds.get(found[0], ()):
            there = ", ".join(f"{t} ({'/'.join(sorted(k))})" for t, k in sorted(kinds.items()))
            raise BundleError(
                f"{bundle.path} has no code for {own if force is None else ' '.join(force)}; it has {there}. Build one "
                f"where Triton is installed: rlkernel aot build --target {own} --out {bundle.path.name}"
            )
        self.chosen, self.kind = found
        self.rank = (self.kind == "ptx", self.chosen != own)  # the least is the best
        self._codes: dict[tuple[Any, ...], list[Code]] = {}
        self._of_kernel: dict[str, int] = {}  # kernels whose builds are among them, and how many
        self.others: tuple[FromBundle, ...] = ()  # asked in turn for what this one lacks; of the same target and kind
        # Asked for a build that none has: the launcher of one, or None.
        self.elsewhere: Callable[[Call], FromBundle | None] = lambda _: None
        self._found: dict[tuple[Any, ...], tuple[FromBundle, Code]] = {}
        self._loaded: dict[tuple[int, str, str], Any] = {}
        self._lock = Lock()
        self._on_cpu = getattr(driver, "tensors", "cuda") == "cpu"  # a driver whose memory is the CPU's

    def target(self) -> str:
        """The target whose code runs."""
        return self.chosen

    def device_type(self) -> str | None:
        """Tensors of another device than a GPU, where the driver takes them."""
        return "cpu" if self._on_cpu else None

    def launch(self, call: Call) -> None:
        """Find the build, load it if need be, and launch it on torch's current stream."""
        holder, code = self.served(call)
        device = 0 if self._on_cpu else torch.cuda.current_device()
        stream = 0 if self._on_cpu else torch.cuda.current_stream(device).cuda_stream
        self.driver.enter(device)
        kernel = holder._kernel(code, device)  # noqa: SLF001 the same class
        passed = dict(code.build.types)
        kinds, values = [], []
        for name, value in zip(call.arguments, call.values, strict=True):
            if name in passed:
                kinds.append(passed[name])
                read = 0 if name in code.unread else value
                values.append(read.data_ptr() if isinstance(read, torch.Tensor) else read)
        scratch = code.arguments - len(values)
        if all(call.grid):
            threads = 32 * code.build.num_warps
            self.driver.launch(
                kernel, call.grid, threads, code.shared, stream, kinds + ["*"] * scratch, values + [0] * scratch
            )

    def served(self, call: Call) -> tuple[FromBundle, Code]:
        """The first bundle that has a build for a call, and the build.

        Raises:
            BundleError: none has; the reason is the first one's.
        """
        signature = (call.key, tuple(call.arguments.values()))
        found = self._found.get(signature)
        if found is None:
            with self._lock:  # ranks may be threads
                found = self._found[signature] = self._looked_up(call)
        return found

    def _looked_up(self, call: Call) -> tuple[FromBundle, Code]:
        refused = []
        for holder in (self, *self.others):
            try:
                return holder, holder._find(call)  # noqa: SLF001 the same class
            except BundleError as error:
                refused.append(error)
        more = self.elsewhere(call)
        if more is None:
            raise refused[0]
        return more, more._find(call)  # noqa: SLF001 the same class

    def _find(self, call: Call) -> Code:
        kernel = call.kernel
        if kernel.id not in self._of_kernel:
            codes = self.bundle.of(self.chosen, kernel.id)
            for code in codes:
                if code.source != kernel.source:
                    raise BundleError(
                        f"{self.bundle.path} was built from another {kernel.id} (source {code.source}, here "
                        f"{kernel.source}); build it again from this version, or install the one it was built from: "
                        f"rlkernel aot build --target {self.chosen} --out {self.bundle.path.name}"
                    )
                self._codes.setdefault(fixed(code.build, sorted(kernel.constexprs)), []).append(code)
            self._of_kernel[kernel.id] = len(codes)
            for alike in self._codes.values():
                alike.sort(key=lambda c: -c.build.promises)
        for code in self._codes.get(call.key, ()):
            if code.serves(call.arguments):
                return code
        raise NoBuildError(_missing(call, self))

    def load_one(self) -> None:
        """Load some kernel, so that the driver says whether it takes this code.

        Raises:
            DriverError: it does not; the message names the bundle and the target of this GPU.
        """
        device = 0 if self._on_cpu else torch.cuda.current_device()
        self.driver.enter(device)
        self._kernel(self.bundle.of(self.chosen, min(self.bundle.targets[self.chosen]["kernels"]))[0], device)

    def _kernel(self, code: Code, device: int) -> Any:
        file = code.files[self.kind]
        place = (device, file, code.entry)
        if place not in self._loaded:
            with self._lock:
                try:
                    self._loaded[place] = self.driver.load(self.bundle.read(file), code.entry, code.shared)
                except DriverError as error:
                    raise DriverError(
                        f"{self.kind} for {self.chosen} of {self.bundle.path}: {error}. For this GPU: "
                        f"rlkernel aot build --target {self.own}"
                    ) from error
        return self._loaded[place]


def _missing(call: Call, launcher: FromBundle) -> str:
    """Which configuration a bundle lacks, and how to get it in."""
    kernel = call.kernel.id
    described = ", ".join(f"{n}={v}" for n, v in call.constants.items())
    types = ", ".join(
        f"{n}:{a.type}{'/16' if a.divisible else ''}{'=1' if a.one else ''}" for n, a in call.arguments.items()
    )
    several = launcher._of_kernel.get(kernel, 0)  # noqa: SLF001 the same module
    return (
        f"{launcher.bundle.path} holds {several} builds of {kernel} for {launcher.chosen}, and none for {described}; "
        f"{types}; {call.num_warps} warps, {call.num_stages} stages. Run it with AOT_MISSING=FILE, which writes that "
        "down, and build with --configurations FILE where Triton is installed; or let another backend run it: "
        'order = ["triton"]'
    )

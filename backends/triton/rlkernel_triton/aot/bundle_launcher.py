"""From a launch of host code to machine code on a device: the configurations of a bundle, found, loaded and run.

Which code serves a device: its own target's, else a cubin of the same family, else PTX of an earlier target, which the
driver compiles when it is loaded. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import Lock
from typing import Any, Final

import torch

from rlkernel_core.errors import RLKernelError
from rlkernel_triton.aot.bundle import Bundle, BundleError, NoBuildError
from rlkernel_triton.aot.configurations import Argument, Code, Configuration, Constant, fixed, key
from rlkernel_triton.aot.driver import DriverError
from rlkernel_triton.aot.source_digest import digest
from rlkernel_triton.launchers import Binding, Grid, Launch, Launcher, current
from rlkernel_triton.launchers.recorder import plain_constant
from rlkernel_triton.launchers.specialization import (
    ALIGNMENT,
    POINTER_TYPES,
    is_descriptor,
    specialization_of_number,
)
from rlkernel_triton.launchers.targets import TARGETS

STAGES: Final = 3  # where a launch names none, as Triton on NVIDIA's GPUs
_FUSION: Final = "enable_fp_fusion"


# Tegra chips: their cubins do not run on others, nor those of others on them (CUDA C++ Programming Guide, on binary
# compatibility).
_TEGRA: Final = frozenset({"sm_72", "sm_87", "sm_110"})


def best_code_for(device: str, available: Mapping[str, Iterable[str]]) -> tuple[str, str] | None:
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


class KernelRequest:
    """A bound kernel as bundles know kernels: what a configuration has to equal.

    Args:
        binding: the bound kernel.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding, self.kernel, self.op = binding, binding.name, current().op
        options = {_FUSION: True, **binding.options}
        self.num_warps, self.num_stages = binding.num_warps, binding.num_stages or STAGES
        self.fusion: bool = options.pop(_FUSION)
        self.options: dict[str, int] = options
        names = [p.name for p in binding.parameters if p.constexpr]
        self.constants: dict[str, Constant] = {n: plain_constant(binding.fixed[n]) for n in names}
        self.key = key(
            self.kernel, self.constants, self.num_warps, self.num_stages, fusion=self.fusion, options=self.options
        )
        # What is passed to machine code, in the kernel's order: a value that is bound, or its place at run time.
        places = {p.name: i for i, p in enumerate(binding.passed)}
        self.places = {p.name: places.get(p.name) for p in binding.parameters if not p.constexpr}
        self._bound = {n: argument_of(binding.fixed[n]) for n, at in self.places.items() if at is None}

    @cached_property
    def source(self) -> str:
        """Hash of what it would be compiled from."""
        return source(self.binding.kernel.fn)

    def arguments(self, passed: tuple[Argument, ...]) -> dict[str, Argument]:
        """All that machine code is passed, given what is passed at run time."""
        return {n: self._bound[n] if at is None else passed[at] for n, at in self.places.items()}

    def configuration(self, arguments: Mapping[str, Argument]) -> Configuration:
        """What serves these arguments and every other size and alignment; recorded launches say what to assume."""
        there = {n: a.type for n, a in arguments.items() if a.type != "none"}
        absent = {n: None for n in arguments if n not in there}
        return Configuration(
            self.kernel, tuple(there.items()), tuple({**self.constants, **absent}.items()), (), self.num_warps,
            self.num_stages, enable_fp_fusion=self.fusion, options=tuple(self.options.items()),
        )  # fmt: skip


source = cache(digest)


def argument_of(value: Any) -> Argument:
    """What a compiler would know of a run-time argument.

    Raises:
        NoBuildError: it is a descriptor, which the host encodes anew for each launch.
        RLKernelError: it is a tensor of a type that no kernel takes.
        TypeError: it is no tensor, number or None.
    """
    if isinstance(value, torch.Tensor):
        kind = POINTER_TYPES.get(value.dtype)
        if kind is None:
            known = ", ".join(map(str, POINTER_TYPES))
            raise RLKernelError(f"no kernel takes a tensor of {value.dtype}; known: {known}")
        return _pointer(kind, value.data_ptr() % ALIGNMENT == 0)
    if value is None:
        return Argument("none")
    if is_descriptor(value):
        raise NoBuildError(
            "bundles hold no launch that Hopper's copy engine reads for (sm_90). Run it where Triton is installed, by "
            'another backend: order = ["triton"]'
        )
    found = specialization_of_number(value, specialize=value != 1)
    return Argument(found.type, divisible=found.divisible, one=type(value) is int and value == 1)


@cache
def _pointer(kind: str, divisible: bool) -> Argument:
    return Argument(kind, divisible=divisible)


class BundleLauncher(Launcher):
    """A launcher over one bundle, and others where there are, and one kind of GPU.

    Args:
        bundle: where the code is.
        driver: `rlkernel_triton.aot.driver.Driver`, or what stands for it.
        force: (target, kind of file) to run in place of what serves the device best.

    Raises:
        BundleError: nothing in the bundle runs on the device.
    """

    overlaps = False  # its driver launches one kernel after another

    def __init__(self, bundle: Bundle, driver: Any, device: int = 0, force: tuple[str, str] | None = None) -> None:
        self.bundle, self.driver = bundle, driver
        major, minor = driver.capability(device)
        self.own = own = f"sm_{major}{minor}"
        kinds = {target: there["kinds"] for target, there in bundle.targets.items()}
        found = force or best_code_for(own, kinds)
        if found is None or found[1] not in kinds.get(found[0], ()):
            there = ", ".join(f"{t} ({'/'.join(sorted(k))})" for t, k in sorted(kinds.items()))
            raise BundleError(
                f"{bundle.path} has no code for {own if force is None else ' '.join(force)}; it has {there}. Build one "
                f"where Triton is installed: rlkernel aot build --target {own} --out {bundle.path.name}"
            )
        self.chosen, self.kind = found
        self.target = TARGETS[self.chosen]
        self.rank = (self.kind == "ptx", self.chosen != own)  # the least is the best
        self._codes: dict[tuple[Any, ...], list[Code]] = {}
        self._of_kernel: dict[str, int] = {}  # kernels whose configurations are among them, and how many
        self.others: tuple[
            BundleLauncher, ...
        ] = ()  # asked in turn for what this one lacks; of the same target and kind
        # Asked for a configuration that none has: the launcher of one, or None.
        self.elsewhere: Callable[[KernelRequest, Mapping[str, Argument]], BundleLauncher | None] = lambda *_: None
        self._found: dict[tuple[Any, ...], tuple[BundleLauncher, Code]] = {}
        self._loaded: dict[tuple[int, str, str], Any] = {}
        self._lock = Lock()
        self.on_cpu = getattr(driver, "tensors", "cuda") == "cpu"  # a driver whose memory is the CPU's

    def launch_of(self, binding: Binding) -> BundleLaunch:
        """See `Launcher`."""
        return BundleLaunch(KernelRequest(binding), self)

    def served(self, request: KernelRequest, arguments: Mapping[str, Argument]) -> tuple[BundleLauncher, Code]:
        """The first bundle that has a configuration for a launch, and the configuration.

        Raises:
            BundleError: none has; the reason is the first one's.
        """
        signature = (request.key, tuple(arguments.values()))
        found = self._found.get(signature)
        if found is None:
            with self._lock:  # ranks may be threads
                found = self._found[signature] = self._looked_up(request, arguments)
        return found

    def _looked_up(self, request: KernelRequest, arguments: Mapping[str, Argument]) -> tuple[BundleLauncher, Code]:
        refused = []
        for holder in (self, *self.others):
            try:
                return holder, holder._find(request, arguments)  # noqa: SLF001 the same class
            except BundleError as error:
                refused.append(error)
        more = self.elsewhere(request, arguments)
        if more is None:
            raise refused[0]
        return more, more._find(request, arguments)  # noqa: SLF001 the same class

    def _find(self, request: KernelRequest, arguments: Mapping[str, Argument]) -> Code:
        kernel = request.kernel
        if kernel not in self._of_kernel:
            codes = self.bundle.of(self.chosen, kernel)
            for code in codes:
                if code.source != request.source:
                    raise BundleError(
                        f"{self.bundle.path} was built from another {kernel} (source {code.source}, here "
                        f"{request.source}); build it again from this version, or install the one it was built from: "
                        f"rlkernel aot build --target {self.chosen} --out {self.bundle.path.name}"
                    )
                self._codes.setdefault(fixed(code.configuration, sorted(request.constants)), []).append(code)
            self._of_kernel[kernel] = len(codes)
            for alike in self._codes.values():
                alike.sort(key=lambda c: -c.configuration.specialization)
        for code in self._codes.get(request.key, ()):
            if code.serves(arguments):
                return code
        raise NoBuildError(_missing(request, arguments, self))

    def load_one(self) -> None:
        """Load some kernel, so that the driver says whether it takes this code.

        Raises:
            DriverError: it does not; the message names the bundle and the target of this GPU.
        """
        device = 0 if self.on_cpu else torch.cuda.current_device()
        self.driver.enter(device)
        self.loaded(self.bundle.of(self.chosen, min(self.bundle.targets[self.chosen]["kernels"]))[0], device)

    def loaded(self, code: Code, device: int) -> Any:
        """A configuration as the driver launches it on a device.

        Raises:
            DriverError: the driver does not take its code.
        """
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


@dataclass
class BundleLaunch:
    """A bound kernel, with the code that serves it for each kind of run-time arguments."""

    request: KernelRequest
    launcher: BundleLauncher
    _entries: dict[tuple[Argument, ...], _Entry] = field(default_factory=dict)

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Find the configuration, load it if need be, and launch it on torch's current stream of the tensors' device.

        Raises:
            BundleError: no bundle has it.
            DriverError: the driver refuses it.
        """
        entry, launcher = self.entry(args), self.launcher
        if not all(grid):
            return
        if launcher.on_cpu:
            entry(grid, args, 0, 0)
            return
        index = next(x.device.index for x in args if isinstance(x, torch.Tensor))
        with torch.cuda.device(index):
            entry(grid, args, index, torch.cuda.current_stream(index).cuda_stream)

    def entry(self, args: tuple[Any, ...]) -> _Entry:
        """The code for run-time arguments.

        Raises:
            TypeError: there are more or fewer than the kernel has.
            BundleError: no bundle has it.
        """
        kinds = tuple(map(argument_of, args))
        found = self._entries.get(kinds)
        if found is None:
            self.request.binding.by_name(args)
            holder, code = self.launcher.served(self.request, self.request.arguments(kinds))
            found = self._entries[kinds] = _Entry(self.request, holder, code)
        return found


class _Entry:
    """A configuration, and how its arguments are found."""

    def __init__(self, request: KernelRequest, holder: BundleLauncher, code: Code) -> None:
        self._holder, self._code = holder, code
        passed, bound = dict(code.configuration.types), request.binding.fixed
        names = [n for n in request.places if n in passed]
        scratch = code.arguments - len(names)
        self._kinds = [passed[n] for n in names] + ["*"] * scratch
        self._rest = [0] * scratch
        # A place among the run-time arguments, or a value: bound, or 0 for what the code never reads.
        self._sources = [(None, 0) if n in code.unread else (request.places[n], bound.get(n)) for n in names]

    def __call__(self, grid: Grid, args: tuple[Any, ...], device: int, stream: int) -> None:
        """Launch it."""
        holder, code = self._holder, self._code
        holder.driver.enter(device)
        kernel = holder.loaded(code, device)
        values = [value if at is None else args[at] for at, value in self._sources]
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]
        threads = 32 * code.configuration.num_warps
        holder.driver.launch(kernel, grid, threads, code.shared, stream, self._kinds, values + self._rest)


class LookupLauncher(Launcher):
    """A launcher that finds the configuration of every launch in bundles, and launches nothing."""

    def __init__(self, launcher: BundleLauncher) -> None:
        self._launcher, self.target, self.overlaps = launcher, launcher.target, launcher.overlaps

    def launch_of(self, binding: Binding) -> Launch:
        """See `Launcher`; the launch raises BundleError where there is no configuration."""
        bound = self._launcher.launch_of(binding)

        def find(grid: Grid, *args: Any) -> None:
            bound.entry(args)

        return find


def _missing(request: KernelRequest, arguments: Mapping[str, Argument], launcher: BundleLauncher) -> str:
    """Which configuration a bundle lacks, and how to get it in."""
    described = ", ".join(f"{n}={v}" for n, v in request.constants.items())
    types = ", ".join(
        f"{n}:{a.type}{'/16' if a.divisible else ''}{'=1' if a.one else ''}" for n, a in arguments.items()
    )
    several = launcher._of_kernel.get(request.kernel, 0)  # noqa: SLF001 the same module
    return (
        f"{launcher.bundle.path} holds {several} builds of {request.kernel} for {launcher.chosen}, and none for "
        f"{described}; {types}; {request.num_warps} warps, {request.num_stages} stages. Run it with AOT_MISSING=FILE, "
        "which writes that down, and build with --configurations FILE where Triton is installed; or let another "
        'backend run it: order = ["triton"]'
    )

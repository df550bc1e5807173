"""Configurations into a bundle: Triton compiles them for targets that need not be here.

Imports Triton; needs no GPU, and of torch nothing but what the kernels' modules import.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlkernel_core.errors import ArgumentError, RLKernelError, UnknownNameError
from rlkernel_triton.aot.builds import Build, Code
from rlkernel_triton.aot.sources import digest
from rlkernel_triton.aot.targets import TARGETS
from rlkernel_triton.launchers import Build as Recorded

_NVIDIA: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OWN_FEATURES: Final = 90  # from here on Triton compiles for sm_90a, sm_110a and so on
_AGAIN: Final = "record the run again: AOT_RECORDING=FILE:TARGET (docs/aot.md)"
_PLANNED: Final = ("sm_87", "sm_90")  # whose launches say what is promised


def compiler() -> dict[str, str]:
    """Who compiles, those assemblers among them that TRITON_PTXAS_PATH and its like name: goes into a bundle."""
    found = {"triton": str(triton.__version__)}
    for name, tool in _assemblers().items():
        said = subprocess.run([tool, "--version"], check=False, capture_output=True, text=True).stdout  # noqa: S603
        found[name] = said.strip().rpartition("V")[2].partition("\n")[0] or f"of no known version, {tool}"
    return found


def _assemblers() -> dict[str, str]:
    nvidia = triton.knobs.nvidia
    return {"ptxas": nvidia.ptxas.path, "ptxas-blackwell": nvidia.ptxas_blackwell.path}


def require(target: str) -> None:
    """See to it that this compiler has a target.

    Raises:
        UnknownNameError: there is no such target.
        ArgumentError: this Triton is older than the chip.
    """
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    chip = TARGETS[target]
    name = f"{target}a" if chip.kind == "cuda" and int(chip.arch) >= _OWN_FEATURES else target
    if chip.kind == "cuda" and not _assembled(name):
        made_by = ", ".join(f"{tool} {version}" for tool, version in compiler().items())
        raise ArgumentError(
            "target", target, f"no assembler of this Triton knows {name}: {made_by}",
            "Build it with Triton 3.7 or newer, or name a newer ptxas: TRITON_PTXAS_BLACKWELL_PATH.",
        )  # fmt: skip


@cache
def _assembled(name: str) -> bool:
    commands = ([tool, f"--gpu-name={name}", "--version"] for tool in _assemblers().values())
    return any(subprocess.run(c, check=False, capture_output=True).returncode == 0 for c in commands)  # noqa: S603


def closed(builds: Iterable[Build]) -> list[list[Build]]:
    """Builds with the promises on sizes and alignments that their kernels declare, and without any.

    Together in a list are those that one code may stand for.

    Raises:
        RLKernelError: a kernel is gone.
    """
    alike: dict[Build, dict[Build, None]] = {}
    for build in builds:
        plain = build.unpromised(_constexprs(_kernel(build)))
        kinds = dict(plain.types)
        pointers = {n for n, kind in kinds.items() if kind.startswith("*")}
        for promise in promises().get(build.kernel, ()):
            divisible = (promise.pointers & pointers) | {n for n in promise.numbers if kinds.get(n) in {"i32", "i64"}}
            _put(alike, plain.promised(divisible, [n for n in promise.ones if kinds.get(n) == "i32"]))
        _put(alike, plain)
    return [list(group) for group in alike.values()]


def _put(alike: dict[Build, dict[Build, None]], build: Build) -> None:
    kinds = tuple((n, kind[:1] if kind.startswith("*") else kind) for n, kind in build.types)
    alike.setdefault(replace(build, types=kinds), {})[build] = None


class Promise(NamedTuple):
    """What a kernel's module declares that calls mostly keep."""

    pointers: frozenset[str]  # aligned to 16 bytes
    numbers: frozenset[str]  # multiples of 16
    ones: frozenset[str]


@cache
def promises() -> dict[str, tuple[Promise, ...]]:
    """By kernel: what all launches of the table of workloads keep, those apart in which other numbers are 1.

    Promises that differ in pointers alone are one: memory is aligned wherever a tensor begins.
    """
    from rlkernel_triton.recorded import recorded
    from rlkernel_triton.workloads import WORKLOADS

    found: dict[str, dict[frozenset[str], Promise]] = {}
    for build in [r.build for op in WORKLOADS for target in _PLANNED for r in recorded(op, target)]:
        constants = _constexprs(_kernel(build))
        ones = frozenset(n for n, v in build.constants if n not in constants and v == 1)
        pointers = frozenset(n for n, kind in build.types if n in build.divisible and kind.startswith("*"))
        numbers, own = frozenset(build.divisible) - pointers, found.setdefault(build.kernel, {})
        other = own.get(ones, Promise(pointers, numbers, ones))
        own[ones] = Promise(other.pointers | pointers, other.numbers & numbers, ones)
    return {kernel: tuple(own.values()) for kernel, own in found.items()}


def _constexprs(kernel: Any) -> frozenset[str]:
    return frozenset(p.name for p in kernel.params if p.is_constexpr)


def _kernel(build: Build | Recorded) -> Any:
    module, _, name = build.kernel.partition(":")
    found = getattr(import_module(module), name, None)
    if found is None:
        raise RLKernelError(f"{build.kernel} is no kernel any more; {_AGAIN}")
    return found


def compiled(builds: Iterable[Build], target: str, ptx: int | None = None) -> Iterator[tuple[Code, dict[str, bytes]]]:
    """Each build for a target, with its files by kind.

    Args:
        builds: what is compiled.
        target: a key of `TARGETS`.
        ptx: ISA version of the PTX, 85 for 8.5; None for the target's own.

    Raises:
        UnknownNameError: there is no such target.
        ArgumentError: this Triton is older than the chip.
        RLKernelError: a build does not compile, or does not fit the target.
    """
    require(target)
    with _without_lines():
        for build in builds:
            yield _one(build, target, ptx)


def _one(build: Build, target: str, ptx: int | None) -> tuple[Code, dict[str, bytes]]:
    chip = TARGETS[target]
    kernel = _kernel(build)
    kinds, constants = dict(build.types), {n: _constant(v) for n, v in build.constants}
    names = kernel.arg_names
    if sorted(names) != sorted([*kinds, *constants]):
        differing = sorted({*kinds, *constants} ^ set(names))
        raise RLKernelError(
            f"a configuration of {build.kernel} and the kernel differ in {', '.join(differing)}: it has changed "
            f"since then; {_AGAIN}"
        )
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else kinds[n] for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in build.divisible},
    )
    options: dict[str, Any] = {
        "num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": build.enable_fp_fusion,
        **dict(build.options),
    }  # fmt: skip
    version = ptx or chip.ptx
    if version and chip.kind == "cuda":
        options["ptx_version"] = version
    try:
        made = triton.compile(source, target=GPUTarget(chip.kind, chip.arch, chip.warp), options=options)
    except (triton.TritonError, RuntimeError) as error:
        raise RLKernelError(f"{build.kernel} does not compile for {target}: {error} ({build.text})") from error
    if made.metadata.shared > chip.shared:
        raise RLKernelError(
            f"{build.kernel} needs {made.metadata.shared} bytes of shared memory, {target} has {chip.shared}: "
            f"{build.text}"
        )
    files, arguments, registers, spilled = _nvidia(made) if chip.kind == "cuda" else _amd(made)
    if not chip.ptx:
        files.pop("ptx", None)
    return (
        Code(
            build, target, made.metadata.name, made.metadata.shared, arguments, registers, spilled,
            digest(kernel.fn), _unread(made, [n for n in names if n in kinds]), dict.fromkeys(files, ""),
        ),
        files,
    )  # fmt: skip


def _unread(made: Any, passed: list[str]) -> tuple[str, ...]:
    """Those of the parameters that are passed at run time which the kernel's body does not name."""
    head, _, body = made.asm["ttir"].partition("tt.func public ")[2].partition("\n")
    names = re.findall(r"(%\w+): ", head)
    if len(names) != len(passed):
        raise RLKernelError(
            f"{made.metadata.name} has {len(names)} parameters in Triton's IR, {len(passed)} are passed"
        )
    return tuple(sorted(n for n, own in zip(passed, names, strict=True) if not re.search(rf"{own}\b", body)))


def _constant(value: Any) -> Any:
    return getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value


def _nvidia(made: Any) -> tuple[dict[str, bytes], int, int, int]:
    text, code = made.asm["ptx"], made.asm["cubin"]
    head = text[text.index(".entry") : text.index("{", text.index(".entry"))]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(_NVIDIA / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    files = {"cubin": code, "ptx": text.encode()}
    return files, len(set(re.findall(r"_param_\d+", head))), found["REG"], found["STACK"] + found["LOCAL"]


def _amd(made: Any) -> tuple[dict[str, bytes], int, int, int]:
    text = made.asm["amdgcn"]
    found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text)}
    arguments = [k for k in re.findall(r"\.value_kind:\s*(\w+)", text) if not k.startswith("hidden")]
    return {"hsaco": made.asm["hsaco"]}, len(arguments), found["vgpr_count"], found["private_segment_fixed_size"]


@contextmanager
def _without_lines() -> Iterator[None]:
    """No paths of this machine in the code, which would differ from clone to clone."""
    before = triton.knobs.compilation.disable_line_info
    triton.knobs.compilation.disable_line_info = True
    try:
        yield
    finally:
        triton.knobs.compilation.disable_line_info = before


def limits(codes: Iterable[tuple[Code, Mapping[str, bytes]]]) -> list[str]:
    """Builds that a driver or a chip would refuse: what is wrong with each."""
    wrong = []
    for code, files in codes:
        chip = TARGETS[code.target]
        if code.shared > chip.shared:
            wrong.append(f"{code.build.kernel} on {code.target}: {code.shared} bytes of shared memory of {chip.shared}")
        if chip.kind == "cuda" and code.registers > 255:
            wrong.append(f"{code.build.kernel} on {code.target}: {code.registers} registers of 255")
        version = re.search(rb"\.version (\d+)\.(\d+)", files.get("ptx", b""))
        if version and int(version[1]) * 10 + int(version[2]) > chip.ptx:
            wrong.append(f"{code.build.kernel} on {code.target}: PTX {version[0].decode()}, at most {chip.ptx / 10}")
    return wrong

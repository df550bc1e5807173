"""Configurations into a bundle: Triton compiles them for targets that need not be here.

Imports Triton and torch; needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
import triton

from rlkernel_core.errors import ArgumentError, RLKernelError, UnknownNameError
from rlkernel_triton.aot.configurations import Code, Configuration
from rlkernel_triton.aot.source_digest import digest
from rlkernel_triton.launchers import Build
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.launchers.targets import TARGETS

_OWN_FEATURES: Final = 90  # from here on Triton compiles for sm_90a, sm_110a and so on
_AGAIN: Final = "record the run again: AOT_RECORDING=FILE:TARGET (docs/aot.md)"
_PLANNED: Final = ("sm_87", "sm_90")  # whose launches say what calls keep


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


def with_specializations(configurations: Iterable[Configuration]) -> list[list[Configuration]]:
    """Builds specialized as calls mostly are, in sizes and alignments, and not at all.

    Together in a list are those that one code may stand for.

    Raises:
        RLKernelError: a kernel is gone.
    """
    alike: dict[Configuration, dict[Configuration, None]] = {}
    for configuration in configurations:
        plain = configuration.unspecialized(_constexprs(_kernel(configuration)))
        kinds = dict(plain.types)
        pointers = {n for n, kind in kinds.items() if kind.startswith("*")}
        for keeps in specializations().get(configuration.kernel, ()):
            divisible = (keeps.pointers & pointers) | {n for n in keeps.numbers if kinds.get(n) in {"i32", "i64"}}
            _put(alike, plain.specialized(divisible, [n for n in keeps.ones if kinds.get(n) == "i32"]))
        _put(alike, plain)
    return [list(group) for group in alike.values()]


def _put(alike: dict[Configuration, dict[Configuration, None]], configuration: Configuration) -> None:
    kinds = tuple((n, kind[:1] if kind.startswith("*") else kind) for n, kind in configuration.types)
    alike.setdefault(replace(configuration, types=kinds), {})[configuration] = None


class Specialization(NamedTuple):
    """What calls mostly keep of a kernel's run-time parameters."""

    pointers: frozenset[str]  # aligned to 16 bytes
    numbers: frozenset[str]  # multiples of 16
    ones: frozenset[str]


@cache
def specializations() -> dict[str, tuple[Specialization, ...]]:
    """By kernel: what all launches of the table of workloads keep, those apart in which other numbers are 1.

    Those that differ in pointers alone are one: memory is aligned wherever a tensor begins.
    """
    with torch.inference_mode(False):  # a build may be missed in inference mode, whose tensors have no gradients
        from rlkernel_triton.recorded import recorded
        from rlkernel_triton.workloads import WORKLOADS

        builds = [r.build for op in WORKLOADS for target in _PLANNED for r in recorded(op, target)]
    found: dict[str, dict[frozenset[str], Specialization]] = {}
    for build in builds:
        constants = _constexprs(_kernel(build))
        ones = frozenset(n for n, v in build.constants if n not in constants and v == 1)
        pointers = frozenset(n for n, kind in build.types if n in build.divisible and kind.startswith("*"))
        numbers, own = frozenset(build.divisible) - pointers, found.setdefault(build.kernel, {})
        other = own.get(ones, Specialization(pointers, numbers, ones))
        own[ones] = Specialization(other.pointers | pointers, other.numbers & numbers, ones)
    return {kernel: tuple(own.values()) for kernel, own in found.items()}


def _constexprs(kernel: Any) -> frozenset[str]:
    return frozenset(p.name for p in kernel.params if p.is_constexpr)


def _kernel(configuration: Configuration | Build) -> Any:
    module, _, name = configuration.kernel.partition(":")
    found = getattr(import_module(module), name, None)
    if found is None:
        raise RLKernelError(f"{configuration.kernel} is no kernel any more; {_AGAIN}")
    return found


def compiled(
    configurations: Iterable[Configuration], target: str, ptx: int | None = None
) -> Iterator[tuple[Code, dict[str, bytes]]]:
    """Each configuration for a target, with its files by kind.

    Args:
        configurations: what is compiled.
        target: a key of `TARGETS`.
        ptx: ISA version of the PTX, 85 for 8.5; None for the target's own.

    Raises:
        UnknownNameError: there is no such target.
        ArgumentError: this Triton is older than the chip.
        RLKernelError: a configuration does not compile, or does not fit the target.
    """
    require(target)
    with _without_lines():
        for configuration in configurations:
            yield _one(configuration, target, ptx)


def _build_of(configuration: Configuration) -> Build:
    options = {"enable_fp_fusion": configuration.enable_fp_fusion, **dict(configuration.options)}
    return Build(
        configuration.kernel, configuration.types, configuration.constants, configuration.divisible, (),
        configuration.num_warps, configuration.num_stages, tuple(options.items()),
    )  # fmt: skip


def _one(configuration: Configuration, target: str, ptx: int | None) -> tuple[Code, dict[str, bytes]]:
    chip = TARGETS[target]
    version = (ptx or chip.ptx or None) if chip.nvidia else None
    needs = compile_recorded(_build_of(configuration), target, ptx_version=version)
    made = needs.compiled
    if needs.shared > chip.shared:
        raise RLKernelError(
            f"{configuration.kernel} needs {needs.shared} bytes of shared memory, {target} has {chip.shared}: "
            f"{configuration.text}"
        )
    files: dict[str, bytes]
    if chip.nvidia:
        files, arguments = {"cubin": made.asm["cubin"]}, _ptx_arguments(made.asm["ptx"])
        if chip.ptx:
            files["ptx"] = made.asm["ptx"].encode()
    else:
        files, arguments = {"hsaco": made.asm["hsaco"]}, _amd_arguments(made.asm["amdgcn"])
    kernel, kinds = _kernel(configuration), dict(configuration.types)
    unread = _unread(made, [n for n in kernel.arg_names if n in kinds])
    code = Code(
        configuration, target, made.metadata.name, needs.shared, arguments, needs.registers, needs.spilled,
        digest(kernel.fn), unread, dict.fromkeys(files, ""),
    )  # fmt: skip
    return code, files


def _unread(made: Any, passed: list[str]) -> tuple[str, ...]:
    """Those of the parameters that are passed at run time which the kernel's body does not name."""
    head, _, body = made.asm["ttir"].partition("tt.func public ")[2].partition("\n")
    names = re.findall(r"(%\w+): ", head)
    if len(names) != len(passed):
        raise RLKernelError(
            f"{made.metadata.name} has {len(names)} parameters in Triton's IR, {len(passed)} are passed"
        )
    return tuple(sorted(n for n, own in zip(passed, names, strict=True) if not re.search(rf"{own}\b", body)))


def _ptx_arguments(text: str) -> int:
    """How many arguments the entry takes."""
    head = text[text.index(".entry") : text.index("{", text.index(".entry"))]
    return len(set(re.findall(r"_param_\d+", head)))


def _amd_arguments(text: str) -> int:
    return len([k for k in re.findall(r"\.value_kind:\s*(\w+)", text) if not k.startswith("hidden")])


@contextmanager
def _without_lines() -> Iterator[None]:
    """No paths of this machine in the code, which would differ from clone to clone."""
    before = triton.knobs.compilation.disable_line_info
    triton.knobs.compilation.disable_line_info = True
    try:
        yield
    finally:
        triton.knobs.compilation.disable_line_info = before


def exceeded_limits(codes: Iterable[tuple[Code, Mapping[str, bytes]]]) -> list[str]:
    """Builds that a driver or a chip would refuse: what is wrong with each."""
    wrong = []
    for code, files in codes:
        chip = TARGETS[code.target]
        if code.shared > chip.shared:
            wrong.append(
                f"{code.configuration.kernel} on {code.target}: {code.shared} bytes of shared memory of {chip.shared}"
            )
        if chip.kind == "cuda" and code.registers > 255:
            wrong.append(f"{code.configuration.kernel} on {code.target}: {code.registers} registers of 255")
        version = re.search(rb"\.version (\d+)\.(\d+)", files.get("ptx", b""))
        if version and int(version[1]) * 10 + int(version[2]) > chip.ptx:
            wrong.append(
                f"{code.configuration.kernel} on {code.target}: PTX {version[0].decode()}, at most {chip.ptx / 10}"
            )
    return wrong

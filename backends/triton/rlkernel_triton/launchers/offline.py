"""Recorded launches, compiled for a GPU that need not be here: what they need of registers and shared memory.

Imports Triton, and no operator but the module of the kernel that is compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from rlkernel_core.errors import ArgumentError, RLKernelError
from rlkernel_triton.launchers.recorder import Build, RecordedLaunch

_CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class CompiledBuild(NamedTuple):
    """A build, compiled for one target, and what it takes there."""

    registers: int  # of a thread
    spilled: int  # bytes of local memory of a thread
    shared: int  # bytes of shared memory (LDS) of a program
    compiled: Any  # Triton's compiled kernel, with its code in `asm`


def target_of(name: str) -> GPUTarget:
    """Triton's target by its architecture: "sm_90", "gfx942".

    Raises:
        ArgumentError: it names no architecture.
    """
    if found := re.fullmatch(r"sm_?(\d{2,3})", name):
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx9[0-9a-f]{2}", name):
        return GPUTarget("hip", name, 64)
    if re.fullmatch(r"gfx1[0-9]{3}", name):
        return GPUTarget("hip", name, 32)
    raise ArgumentError("target", name, "it names no architecture", 'Say "sm_90" or "gfx942", for example.')


def compile_recorded(recorded: RecordedLaunch | Build, target: str, *, ptx_version: int | None = None) -> CompiledBuild:
    """Compile a recorded launch for an architecture.

    Args:
        recorded: the launch, or its build.
        target: "sm_90", "gfx942".
        ptx_version: ISA version of the PTX, 85 for 8.5; None for Triton's choice.

    Raises:
        ArgumentError: the target names no architecture.
        RLKernelError: the kernel is gone, has other parameters, is interpreted, or does not compile.
    """
    build = recorded.build if isinstance(recorded, RecordedLaunch) else recorded
    chip = target_of(target)
    module, _, name = build.kernel.partition(":")
    kernel = getattr(import_module(module), name, None)
    if not isinstance(kernel, triton.JITFunction):
        raise RLKernelError(
            f"{build.kernel} is no kernel of Triton's compiler here. If TRITON_INTERPRET is set, unset it; otherwise "
            "record the launch again."
        )
    types, constants = dict(build.types), {n: _constant(v) for n, v in build.constants}
    names = kernel.arg_names
    if set(names) != {*types, *constants}:
        differing = ", ".join(sorted({*types, *constants} ^ set(names)))
        raise RLKernelError(f"{build.kernel} has changed since it was recorded: {differing}. Record the launch again.")
    backend = make_backend(chip)
    hints = {n: ("D" if n in build.divisible else "") for n in types}
    if chip.backend == "hip":  # as Triton's backend for AMD describes pointers within 2 GiB
        hints |= {n: hint + "S" for n, hint in hints.items() if n in build.within_32_bits}
    attributes = {(names.index(n),): backend.parse_attr(hint) for n, hint in hints.items()}
    source = ASTSource(
        kernel, {n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={place: found for place, found in attributes.items() if found},
    )  # fmt: skip
    stages = {} if build.num_stages is None else {"num_stages": build.num_stages}
    ptx = {} if ptx_version is None else {"ptx_version": ptx_version}
    options = {"num_warps": build.num_warps, **stages, **dict(build.options), **ptx}
    try:
        made = triton.compile(source, target=chip, options=options)
    except (triton.TritonError, RuntimeError) as error:
        raise RLKernelError(f"{build.kernel} does not compile for {target}: {error} ({build.document()})") from error
    registers, spilled = _of_cubin(made.asm["cubin"]) if chip.backend == "cuda" else _of_assembly(made.asm["amdgcn"])
    return CompiledBuild(registers, spilled, made.metadata.shared, made)


def _constant(value: Any) -> Any:
    return getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value


def _of_cubin(code: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _of_assembly(text: str) -> tuple[int, int]:
    found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text)}
    return found["vgpr_count"], found["private_segment_fixed_size"]

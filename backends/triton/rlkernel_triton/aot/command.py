"""What `rlkernel aot` does: bundles built on several processes, and described. Imports Triton to build."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

from rlkernel_core.errors import ArgumentError, RLKernelError, UnknownNameError
from rlkernel_core.hardware import architecture
from rlkernel_core.paths import missing
from rlkernel_triton.aot import recordings
from rlkernel_triton.aot.backend import OPERATORS, WITH, folder
from rlkernel_triton.aot.bundle import Bundle, write_bundle
from rlkernel_triton.aot.configurations import Code, Configuration
from rlkernel_triton.launchers.targets import TARGETS

W = TypeVar("W")
R = TypeVar("R")
OLDEST_PTX: Final = 80  # of the driver of CUDA 12.0, which reads nothing newer
_CHUNK: Final = 4  # pieces of work that a process takes at a time


def build(
    targets: Sequence[str],
    ops: Sequence[str] = (),
    out: str | None = None,
    jobs: int = 0,
    ptx: int | None = None,
    configurations: str | None = None,
    *,
    keep_going: bool = False,
) -> dict[str, Any]:
    """Compile a bundle and describe it.

    Args:
        targets: keys of `TARGETS`, in any spelling: sm_90, sm90.
        ops: operators, with those that they cannot be used without; all that bundles have where empty.
        out: the file; by default one named after the targets where the backend `aot` looks.
        jobs: processes; 0 for one a core.
        ptx: ISA version of the PTX for drivers older than the targets' own is for, 80 for 8.0; None for the targets'.
        configurations: a recording in place of what the table of workloads launches.
        keep_going: leave out what does not compile, and list it under "failed".

    Raises:
        UnknownNameError: no such target or operator.
        ArgumentError: this Triton has no such target; a target keeps no such PTX; no file can be written or read there.
        RLKernelError: Triton is not installed, a recording has nothing to compile, or something does not compile.
    """
    if jobs < 0:
        raise ArgumentError("--jobs", jobs, "is no number of processes", "Leave it out for one a core.")
    for op in ops:
        if op not in OPERATORS:
            raise UnknownNameError("operator of bundles", op, OPERATORS)
    by_arch = {architecture(target): target for target in TARGETS}
    for target in targets:
        if architecture(target) not in by_arch:
            raise UnknownNameError("target", target, TARGETS)
    targets = [by_arch[architecture(target)] for target in targets]
    for target in targets:
        _require_ptx(target, ptx)
    path = Path(out) if out else folder() / f"{'-'.join(sorted(set(targets)))}.zip"
    _require_room(path)
    if configurations and not Path(configurations).is_file():
        raise ArgumentError(
            "--configurations", configurations, missing(configurations), "AOT_MISSING=FILE writes one (docs/aot.md)."
        )
    asked = {*ops, *(other for op in ops for other in WITH.get(op, ()))}
    table = recordings.read(Path(configurations)) if configurations else {}
    wanted = {target: recordings.chosen(table, target, asked) for target in sorted(set(targets))}
    if configurations and (empty := [target for target, builds in wanted.items() if not builds]):
        raise RLKernelError(
            f"{configurations} has none for {', '.join(ops or OPERATORS)} on {', '.join(empty)}: leave that target "
            f"out, or record some (AOT_RECORDING=FILE:{empty[0]}, docs/aot.md)"
        )
    try:
        from rlkernel_triton.aot.compiling import compiler, require, with_specializations
    except ImportError as error:
        raise RLKernelError(f"building a bundle needs Triton and torch ({error}): pip install torch triton") from error
    for target in targets:
        require(target)
    processes = jobs or len(os.sched_getaffinity(0))
    if not configurations:
        recorded = _in_processes(launched, [(target, sorted(asked or OPERATORS)) for target in wanted], processes)
        wanted = dict(zip(wanted, recorded, strict=True))
    work = [
        (target, alike, ptx, keep_going) for target, builds in wanted.items() for alike in with_specializations(builds)
    ]
    made = _in_processes(compile_part, work, processes, _CHUNK)
    failed = [text for _, texts in made for text in texts]
    bundle = write_bundle(path, [code for codes, _ in made for code in codes], compiler())
    return {**described(bundle), "failed": failed}


def _require_ptx(target: str, ptx: int | None) -> None:
    """See to it that a target keeps PTX of a version, and that drivers which may have to read it do.

    Raises:
        ArgumentError: it keeps none, or the version is not among those that it may have.
    """
    newest = TARGETS[target].ptx
    if ptx is None or OLDEST_PTX <= ptx <= newest:
        return
    if not newest:
        raise ArgumentError("--ptx", ptx, f"{target} keeps no PTX, which would run nowhere else", "Leave it out.")
    problem = (
        f"PTX for {target} is {OLDEST_PTX} to {newest}: no supported driver needs older, newer not all of them read"
    )
    raise ArgumentError("--ptx", ptx, problem, f"Leave it out for {newest}.")


def _require_room(path: Path) -> None:
    """See to it that a bundle can be written, before half an hour is spent on it.

    Raises:
        ArgumentError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("--out", path, f"its folder cannot be made ({error.strerror})", "Name another.") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentError("--out", path, "is a folder, or in one that cannot be written", "Name a file, bundle.zip.")


_Work = tuple[str, list[Configuration], int | None, bool]  # of builds that one code may stand for
_Made = tuple[list[tuple[Code, Mapping[str, bytes]]], list[str]]  # what was compiled, what was not and why


def _in_processes(function: Callable[[W], R], work: list[W], jobs: int, chunk: int = 1) -> list[R]:
    if jobs == 1 or len(work) == 1:
        return [function(piece) for piece in work]
    # Fresh processes: compilers hold threads and locks that a fork would break.
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=get_context("spawn")) as pool:
        return list(pool.map(function, work, chunksize=chunk))


def launched(of: tuple[str, list[str]]) -> list[Configuration]:
    """What operators launch on a target, as `rlkernel_triton.aot.configuration_recorder.launched` says."""
    from rlkernel_triton.aot.configuration_recorder import launched as launched_in_process

    return launched_in_process(*of)


def compile_part(work: _Work) -> _Made:
    """Compile a piece of a bundle: of builds that one code may stand for, those that it does not."""
    from rlkernel_triton.aot.compiling import compiled

    target, alike, ptx, keep_going = work
    codes: list[tuple[Code, Mapping[str, bytes]]] = []
    failed = []
    for build in alike:
        if any(code.stands_for(build) for code, _ in codes):
            continue
        try:
            codes += compiled([build], target, ptx)
        except RLKernelError as error:
            if not keep_going:
                raise
            failed.append(str(error))
    return codes, failed


def described(bundle: Bundle) -> dict[str, Any]:
    """A bundle in numbers: per target and kernel how many builds, and the most that one of them needs."""
    kernels: dict[tuple[str, str], list[Code]] = {}
    for code in bundle.codes:
        kernels.setdefault((code.target, code.configuration.kernel), []).append(code)
    return {
        "path": str(bundle.path),
        "bytes": bundle.path.stat().st_size,
        "rlkernel": bundle.version,
        "compiler": dict(bundle.compiler),
        "targets": {target: list(there["kinds"]) for target, there in bundle.targets.items()},
        "builds": len(bundle.codes),
        "kernels": [
            {
                "target": target,
                "kernel": kernel,
                "builds": len(codes),
                "registers": max(c.registers for c in codes),
                "spilled": max(c.spilled for c in codes),
                "shared": max(c.shared for c in codes),
                "source": codes[0].source,
            }
            for (target, kernel), codes in sorted(kernels.items())
        ],
    }


def listed(path: str) -> dict[str, Any]:
    """Describe a bundle, every piece of which is read and held against its hash.

    Raises:
        BundleError: it is missing, damaged, or of another format.
    """
    bundle = Bundle(Path(path))
    for place in sorted({place for code in bundle.codes for place in code.files.values()}):
        bundle.read(place)
    return described(bundle)

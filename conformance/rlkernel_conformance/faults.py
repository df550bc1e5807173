"""What went wrong, under one of a closed list of names, from an exception or from how a process ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from rlkernel.discover import brief
from rlkernel_core.errors import ResolutionError

FAULTS: Final[Mapping[str, str]] = {
    "wrong_result": "a clause does not hold",
    "nan": "a result is NaN where the contract has a number",
    "nondeterminism": "the same case held and failed",
    "import_error": "a module could not be imported",
    "syntax_error": "source could not be parsed",
    "unsupported_arch": "there is no code for this architecture",
    "compile_error": "a kernel did not compile",
    "jit_error": "a kernel could not be loaded or launched",
    "shared_memory_exceeded": "a kernel wants more shared memory than there is",
    "out_of_memory": "memory ran out, or its limit was reached",
    "illegal_access": "a kernel touched memory that is not its own",
    "race": "threads of a kernel race for the same memory",
    "uninitialized_read": "a kernel read memory that nobody has written",
    "bad_barrier": "threads of a kernel do not meet at a barrier",
    "illegal_instruction": "the processor met an instruction it does not have",
    "segfault": "the process touched memory that is not its own",
    "abort": "the process ended itself by abort",
    "timeout": "no answer within the limit",
    "leak": "every call leaves memory, a thread, a process or an open file behind",
    "tampering": "a clock or a function of the suite was replaced",
    "protocol_error": "the process ended, or spoke, other than a worker does",
    "killed": "the process was ended from outside",
    "unknown": "an exception that has no better name",
}

# Words of an exception's type or message -> fault; the first that matches names it.
_WORDS: Final = (
    ("no kernel image", "unsupported_arch"),
    ("shared memory", "shared_memory_exceeded"),
    ("OutOfResources", "shared_memory_exceeded"),
    ("OutOfMemory", "out_of_memory"),
    ("out of memory", "out_of_memory"),
    ("MemoryError", "out_of_memory"),
    ("can't allocate memory", "out_of_memory"),
    ("illegal memory access", "illegal_access"),
    ("illegal instruction", "illegal_instruction"),
    ("CompilationError", "compile_error"),
    ("nvcc", "compile_error"),
    ("PTXASError", "compile_error"),
    ("SyntaxError", "syntax_error"),
    ("IndentationError", "syntax_error"),
    ("ImportError", "import_error"),
    ("ModuleNotFoundError", "import_error"),
    ("cannot be imported", "import_error"),
    ("SystemExit", "protocol_error"),
    ("KeyboardInterrupt", "protocol_error"),
    ("Flaky", "nondeterminism"),
    ("CUDA error", "jit_error"),
    ("HIP error", "jit_error"),
)
_SIGNALS: Final[dict[int, str]] = {
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "segfault",
    signal.SIGABRT: "abort",
    signal.SIGILL: "illegal_instruction",
    signal.SIGFPE: "illegal_instruction",
    signal.SIGKILL: "killed",
}
# After these the process may be beyond help, on a GPU its whole context: the next clause gets another one.
_HARMLESS: Final = frozenset({"import_error", "syntax_error", "nondeterminism", "protocol_error"})


def of_error(error: BaseException | None) -> str:
    """The fault that an exception stands for; `unknown` of none."""
    text = f"{type(error).__name__}: {error}"
    return next((fault for word, fault in _WORDS if word in text), "unknown")


def message_of(error: BaseException) -> str:
    """What an exception says: its first line, what it is a group of, and the reasons where nothing could be chosen."""
    decision = error.decision if isinstance(error, ResolutionError) else None
    reasons = [str(r.reason) for r in decision.rejected] if decision is not None else []
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()  # of Hypothesis: how a flaky case failed
    return "; ".join([brief(error), *map(brief, group), *reasons])


def of_exit(status: int) -> str:
    """The fault of a worker that ended without a last word; `status` as subprocess gives it."""
    return _SIGNALS.get(-status, "killed") if status < 0 else "protocol_error"


def needs_new_process(fault: str, device: str) -> bool:
    """Whether a process that met the fault may be unfit for what comes next."""
    return fault == "out_of_memory" or (not device.startswith("cpu") and fault not in _HARMLESS)

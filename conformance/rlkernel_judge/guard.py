"""Keeps an implementation of ours from doing a candidate's work, however it is reached.

Python tells an audit hook of every import, every file that is opened, and every piece of code that is run or made a
function; a hook cannot be taken away. In a candidate's process, before the candidate is loaded, ours refuses

    imports  of backends, definitions, codecs, the suite and the dispatch, by name
    files    in the folders of these packages, so that their text cannot be read and run
    code     with the instructions of one of their functions, wherever its text came from

and notes what was tried. Compiled code that reads files on its own is not seen, and a function that was rewritten is
another function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType
from typing import Any, Final

from rlkernel.discover import GROUP, guarded

# Packages and modules that implement operators or judge them, with all below them.
OURS: Final = (
    "rlkernel_torch", "rlkernel_common", "rlkernel_triton", "rlkernel_cuda", "rlkernel_rocm", "rlkernel_jetson",
    "rlkernel_conformance", "rlkernel_bench", "rlkernel_core.definitions", "rlkernel_core.quant",
    "rlkernel.decide", "rlkernel.dispatch", "rlkernel.plans", "rlkernel.resolve", "rlkernel.torchlib",
    "rlkernel_judge.probes", "rlkernel_judge.reference_check", "rlkernel_judge.timing", "rlkernel_judge.trial",
)  # fmt: skip
# Of those, what a candidate may use: the classes that arguments and results are made of.
TYPES: Final = frozenset(
    {"rlkernel_core.quant", "rlkernel_core.quant.spec", "rlkernel_core.quant.tensor", "rlkernel_core.quant.codec"}
)
# Whose files stay closed and whose functions are known; what a traceback shows lines of is not among them.
_CLOSED: Final = tuple(
    name for name in OURS if not name.startswith(("rlkernel_conformance", "rlkernel.", "rlkernel_judge"))
)
_KNOWN: Final = ("rlkernel_torch", "rlkernel_common", "rlkernel_core.definitions", "rlkernel_core.quant")
_SHORT: Final = 100  # bytes of instructions; shorter functions are alike by chance
_MOST: Final = 100  # attempts that are noted


class Guard:
    """The hook of one process, and what it refused."""

    def __init__(self, functions: Collection[str], plugins: Collection[str] = ()) -> None:
        self.refused: list[str] = []
        self._functions = frozenset(functions)
        self._names = tuple(dict.fromkeys((*OURS, *plugins)))
        folders = [folder for name in (*_CLOSED, *plugins) for folder in folders_of(name)]
        self._folders = tuple(os.path.join(os.path.realpath(f), "") for f in folders)  # noqa: PTH118
        self._open = frozenset(os.path.realpath(p) for name in TYPES for p in files_of(name))

    def arm(self) -> None:
        """From now on, for as long as the process lives."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import":
            name = arguments[0]
            if isinstance(name, str) and name not in TYPES and _within(name, self._names):
                self._refuse(f"import of {name}")
        elif event == "open":
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike) and self._is_closed(os.fsdecode(path)):
                self._refuse(f"file {os.fsdecode(path)}")
        elif event in {"exec", "function.__new__"}:
            code = arguments[0]
            if isinstance(code, CodeType) and (name := self._known(code)):
                self._refuse(f"copy of our function {name}")

    def _is_closed(self, path: str) -> bool:
        found = os.path.realpath(path)
        return found.startswith(self._folders) and found not in self._open

    def _known(self, code: CodeType) -> str:
        return next((c.co_name for c in _codes(code) if print_of(c) in self._functions), "")

    def _refuse(self, what: str) -> None:
        if len(self.refused) < _MOST:
            self.refused.append(what)
        raise ImportError(f"{what}: not for a candidate, which is to do the work itself")


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def print_of(code: CodeType) -> str:
    """What two functions of the same text have in common; nothing for a short one."""
    if len(code.co_code) < _SHORT:
        return ""
    held = repr((code.co_code, code.co_names, code.co_varnames)).encode()
    return hashlib.sha256(held).hexdigest()[:16]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


@cache
def our_functions() -> tuple[str, ...]:
    """Prints of every function of ours that implements or defines an operator on the CPU."""
    found: set[str] = set()
    for package in _KNOWN:
        for folder in folders_of(package):
            for path in sorted(Path(folder).rglob("*.py")):
                code, _ = guarded(partial(compile, path.read_bytes(), str(path), "exec", dont_inherit=True))
                found |= {print_of(c) for c in _codes(code)} if isinstance(code, CodeType) else set()
    return tuple(sorted(found - {""}))


@cache
def plugin_packages() -> tuple[str, ...]:
    """Packages of every backend that is installed, ours and others'."""
    return tuple(sorted({e.module.partition(".")[0] for e in entry_points(group=GROUP)}))


def folders_of(name: str) -> list[str]:
    """Folders of a package; none where it is not installed or no package."""
    spec, _ = guarded(lambda: importlib.util.find_spec(name))
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def files_of(name: str) -> list[str]:
    """The file of a module and that of its compiled form."""
    spec, _ = guarded(lambda: importlib.util.find_spec(name))
    return [p for p in (spec.origin, spec.cached) if p is not None] if spec is not None else []

"""A new plugin as files: a complete third-party backend in its own folder, made from the texts in `files`.

For some operators there is an implementation in plain torch that keeps its claims; for every other one a module with
a function of its record that says it is yet to be written, and no claim. Imports no torch and no backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from string import Template
from typing import Final

from rlkernel.plugin_template import unwritten
from rlkernel.plugin_template.names import check_author, check_device, check_name, distribution_of, package_of
from rlkernel_core import API_VERSION, __version__
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.files import make_folder, whole_folder
from rlkernel_core.spec import OPERATORS

_WIDTH: Final = 100  # of a claim in the manifest, before it is indented
_FLOATS: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Ready:
    """An operator with an implementation to start from, and what that implementation keeps."""

    supports: tuple[str, ...]
    check: str | None = None  # name of its check of sizes
    shares: tuple[str, ...] = ()  # modules it imports besides its own
    tests: tuple[str, ...] = ()  # test modules of its own


READY: Final[Mapping[str, Ready]] = {
    "logprob": Ready(
        ("deterministic", "entropy", "grad", "lse", "mask", "per_row_temperature"),
        check="fits",
        tests=("test_logprob",),
    ),
    "advantage": Ready(
        (
            *("ddof", "deterministic", "eps_mode:threshold", "eps_mode:var_add", "eps_mode:var_clamp", "kind:grpo"),
            *("singleton_zero", "stats"),
        ),
        shares=("scale",),
    ),
    "whiten": Ready(
        ("ddof", "deterministic", "eps_mode:std_add", "eps_mode:threshold", "eps_mode:var_clamp", "mask"),
        shares=("scale",),
    ),
}


@dataclass(frozen=True)
class Plugin:
    """A plugin that is to be written.

    Raises:
        ArgumentError: a name that cannot be one, is ours or is taken; a device with an index; an author of two lines.
        UnknownNameError: no such operator.
    """

    name: str
    ops: tuple[str, ...] = tuple(READY)
    devices: tuple[str, ...] = ("cpu",)
    author: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        for op in self.ops:
            if op not in OPERATORS:
                raise UnknownNameError("operator", op, OPERATORS)
        for device in self.devices:
            check_device(device)
        if self.author:
            check_author(self.author)

    @property
    def dist(self) -> str:
        """Name of the distribution."""
        return distribution_of(self.name)

    @property
    def package(self) -> str:
        """Name of the import package."""
        return package_of(self.name)

    @property
    def ready(self) -> tuple[str, ...]:
        """Operators that are implemented and claimed."""
        return tuple(op for op in self.ops if op in READY)

    @property
    def to_write(self) -> tuple[str, ...]:
        """Operators that are neither yet."""
        return tuple(op for op in self.ops if op not in READY)


def files(plugin: Plugin) -> dict[str, str]:
    """Path in the new folder -> text, all of them."""
    package = plugin.package
    found = {
        "pyproject.toml": _filled("pyproject.toml", plugin),
        "README.md": _filled("README.md", plugin),
        "LICENSE": _text("LICENSE"),
        ".gitignore": _text("gitignore"),
        ".github/workflows/ci.yml": _filled("ci.yml", plugin),
        f"{package}/__init__.py": _filled("manifest.py", plugin),
        f"{package}/py.typed": "",
        "tests/test_choice.py": _filled("test_choice.py", plugin),
    }
    if plugin.devices[0] != "cpu":  # which is there on every machine
        found["tests/conftest.py"] = _filled("conftest.py", plugin)
    if plugin.ready:
        found[f"{package}/self_test.py"] = _filled("self_test.py", plugin)
    for op in plugin.ready:
        found |= {f"{package}/{module}.py": _text(f"ops/{module}.py") for module in (op, *READY[op].shares)}
        found |= {f"tests/{test}.py": _filled(f"{test}.py", plugin) for test in READY[op].tests}
    for op in plugin.to_write:
        found[f"{package}/{op}.py"] = unwritten.source(op, plugin.name, package)
    return found


def write(plugin: Plugin, folder: Path) -> list[Path]:
    """Write a plugin into a new folder; returns the files.

    Raises:
        ArgumentError: the folder holds something already; nothing that exists is overwritten.
        FileError: it cannot be written; nothing of it is there then.
    """
    texts = files(plugin)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError("--into", str(folder), "exists already", "Name a folder that does not exist yet.")
    with whole_folder(folder) as draft:
        for path, text in texts.items():
            make_folder((draft / path).parent)
            (draft / path).write_text(text, encoding="utf-8", newline="\n")
    return [folder / path for path in texts]


def _text(name: str) -> str:
    return (package_files(__name__) / "files" / f"{name}.txt").read_text(encoding="utf-8")


def _filled(name: str, plugin: Plugin) -> str:
    return Template(_text(name)).substitute(_words(plugin))


def _words(plugin: Plugin) -> dict[str, str]:
    """What stands in the texts in place of `$word`."""
    device, ready = plugin.devices[0], plugin.ready
    return {
        "name": plugin.name,
        "dist": plugin.dist,
        "package": plugin.package,
        "version": __version__,
        "api": str(API_VERSION),
        "author": _author(plugin),
        "operators": ", ".join(plugin.ops),
        "first": plugin.ops[0],
        "device": device,
        "devices": ", ".join(f"`{d}`" for d in plugin.devices),
        "runner": "ubuntu-latest" if device == "cpu" else f"self-hosted # a machine with a device of type {device}",
        "modules": ", ".join(sorted(ready)),
        "tuple": ", ".join(sorted(ready)) + ("," if len(ready) == 1 else ""),
        "names": ", Impl, Requires" if ready else "",
        "impls": _impls(plugin),
        "self_test": f'\n    self_test="{plugin.package}.self_test:self_test",' if ready else "",
        "claimed": "\n".join(_told(op, plugin.package) for op in plugin.ops),
        "makes": "\n".join(_make(op, plugin.package) for op in plugin.ops),
    }


def _author(plugin: Plugin) -> str:
    """The author as pyproject.toml takes one; TOML's strings are JSON's."""
    said = plugin.author.strip() or f"The {plugin.dist} authors"
    parts = re.fullmatch(r"(?P<name>[^<>]+?)\s*<(?P<mail>[^<>@\s]+@[^<>@\s]+)>", said)
    known = {"name": parts["name"], "email": parts["mail"]} if parts else {"name": said}
    return "{ " + ", ".join(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in known.items()) + " }"


def _impls(plugin: Plugin) -> str:
    """Claims of what is written; for the rest, the claim to make."""
    lines = [line for op in plugin.ready for line in _impl(op, plugin)]
    for op in plugin.to_write:
        lines += [f"# {plugin.package}/{op}.py is yet to be written. Claim it then, with what it keeps:"]
        lines += [f"# {line}" for line in _impl(op, plugin)]
    return "".join(f"\n        {line}" for line in lines) + ("\n    " if lines else "")


def _impl(op: str, plugin: Plugin) -> list[str]:
    known = READY.get(op, Ready(()))
    devices, dtypes, supports = (
        ", ".join(f'"{word}"' for word in words) for words in (plugin.devices, _FLOATS, known.supports)
    )
    lines = [
        "Impl(",
        f'    op="{OPERATORS[op].id}",',
        f'    target="{plugin.package}.{op}:{op}",',
        f"    requires=Requires(device=({devices}{',' if len(plugin.devices) == 1 else ''}), dtypes=({dtypes})),",
    ]
    if known.supports:
        line = f"    supports={{{supports}}},"
        each = ["    supports={", *(f'        "{word}",' for word in known.supports), "    },"]
        lines += [line] if len(line) <= _WIDTH else each
    lines += [f'    check="{plugin.package}.{op}:{known.check}",'] if known.check else []
    return [*lines, "),"]


def _told(op: str, package: str) -> str:
    """An operator's line in the README: where it is, and what it claims beyond the contract's core."""
    claims = ", ".join(f"`{f}`" for f in READY[op].supports) if op in READY else "nothing: yet to be written"
    return f"- `{OPERATORS[op].id}` in `{package}/{op}.py`; it claims {claims}"


def _make(op: str, package: str) -> str:
    module = f"`{package}/{op}.py`"
    if op in READY:
        return f"- {module} is `{op}` in plain torch. Put your kernel in its place: a function of the same record."
    return f"- {module} is a function of the record of `{op}`, without a body. Write it, then claim it in the manifest."

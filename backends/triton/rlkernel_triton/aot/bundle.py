"""The file that holds compiled kernels: a zip with `bundle.json` and one file per distinct piece of machine code.

Written twice from the same builds it has the same bytes: entries are sorted, dates fixed, compression stated. Read
lazily: opening it reads the description alone. Every piece is held against its SHA-256 when it is read.
Imports neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rlkernel_core import __version__
from rlkernel_core.errors import RLKernelError
from rlkernel_triton.aot.builds import Code

FORMAT: Final = 2
DESCRIPTION: Final = "bundle.json"
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first that a zip can say


class BundleError(RLKernelError):
    """A bundle cannot be read or does not fit; the message says which, why, and the line that makes a new one."""


class NoBuildError(BundleError):
    """A call is outside of what a bundle was compiled for; the message says how to have it compiled."""


def _remade(path: Path, targets: Iterable[str] = ()) -> str:
    said = " ".join(f"--target {t}" for t in targets) or "--target sm_87"
    return f"Make it again where Triton is installed: rlkernel aot build {said} --out {path.name}"


class Bundle:
    """A bundle on disk.

    Raises:
        BundleError: there is none, it is no bundle, it is damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            description = json.loads(self._zip.read(DESCRIPTION))
        except FileNotFoundError as error:
            raise BundleError(f"there is no bundle at {path}. {_remade(path)}") from error
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
            raise BundleError(f"{path} is no bundle of rlkernel, or damaged ({error}). {_remade(path)}") from error
        if description.get("format") != FORMAT:
            raise BundleError(
                f"{path} has format {description.get('format')}, this rlkernel reads {FORMAT}. {_remade(path)}"
            )
        self.compiler: Mapping[str, str] = description["compiler"]
        self.version: str = description["rlkernel"]
        self.targets: tuple[str, ...] = tuple(description["targets"])
        self._sums: Mapping[str, str] = description["files"]
        self._documents: list[dict[str, Any]] = description["codes"]

    @cached_property
    def codes(self) -> tuple[Code, ...]:
        """Everything in it."""
        return tuple(Code.of(d) for d in self._documents)

    def of(self, target: str) -> tuple[Code, ...]:
        """What is there for a target."""
        return tuple(Code.of(d) for d in self._documents if d["target"] == target)

    def read(self, name: str) -> bytes:
        """A piece of machine code.

        Raises:
            BundleError: it is not there, or not what was written.
        """
        try:
            data = self._zip.read(name)
        except (KeyError, zipfile.BadZipFile, EOFError, OSError, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
            raise BundleError(
                f"{name} of {self.path} cannot be read ({error}). {_remade(self.path, self.targets)}"
            ) from error
        if hashlib.sha256(data).hexdigest() != self._sums.get(name):
            raise BundleError(
                f"{name} of {self.path} is damaged: its SHA-256 differs. {_remade(self.path, self.targets)}"
            )
        return data


def written(path: Path, codes: Iterable[tuple[Code, Mapping[str, bytes]]], compiler: Mapping[str, str]) -> Bundle:
    """Write a bundle: compiled configurations with their files by kind, and who compiled them."""
    pieces: dict[str, bytes] = {}
    documents = []
    for code, files in codes:
        names = {}
        for kind, data in sorted(files.items()):
            name = f"{code.target}/{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
            pieces[name] = data
            names[kind] = name
        documents.append({**code.document(), "files": names})
    documents.sort(key=lambda d: json.dumps(d, sort_keys=True))
    description = {
        "format": FORMAT,
        "rlkernel": __version__,
        "compiler": dict(sorted(compiler.items())),
        "targets": sorted({d["target"] for d in documents}),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(pieces.items())},
        "codes": documents,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, data in [(DESCRIPTION, json.dumps(description).encode()), *sorted(pieces.items())]:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, 0o644 << 16, 3
            file.writestr(entry, data, compresslevel=9)
    return Bundle(path)

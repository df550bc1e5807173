"""The file that holds compiled kernels: a zip with `bundle.json`, a list of builds for every kernel, and packs of code.

Builds of a kernel differ in little, so a pack holds machine code of several, one after the other, compressed together:
less than half of what they take one by one. Code that is the same is there once. Read lazily: opening a bundle reads
its description, a kernel's first launch the list of its builds and one pack. Every entry is held against its SHA-256
when it is read. Written twice from the same builds a bundle has the same bytes: entries are sorted, dates fixed,
compression stated. Imports neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rlkernel_core import __version__
from rlkernel_core.errors import RLKernelError
from rlkernel_core.paths import missing
from rlkernel_triton.aot.configurations import Code

FORMAT: Final = 2
DESCRIPTION: Final = "bundle.json"
_PACK: Final = 16  # pieces of code in a pack: of 8 a bundle is a tenth larger, of 32 a first launch takes twice as long
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first that a zip can say
# What reading a damaged zip raises: RuntimeError where bits say that it is encrypted or of another method.
_UNREADABLE: Final = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, OSError, RuntimeError)


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
            form = description.get("format")
        except FileNotFoundError as error:
            raise BundleError(f"there is no bundle at {path}: {missing(path)}. {_remade(path)}") from error
        except (*_UNREADABLE, AttributeError) as error:
            raise BundleError(f"{path} is no bundle of rlkernel, or damaged ({error}). {_remade(path)}") from error
        if form != FORMAT:
            raise BundleError(f"{path} has format {form}, this rlkernel reads {FORMAT}. {_remade(path)}")
        self.compiler: Mapping[str, str] = description["compiler"]
        self.version: str = description["rlkernel"]
        # Target -> kinds of files, and kernel -> the entry that lists its builds.
        self.targets: Mapping[str, Mapping[str, Any]] = description["targets"]
        self._sums: Mapping[str, str] = description["entries"]
        self._last: tuple[str, bytes] = "", b""

    @cached_property
    def codes(self) -> tuple[Code, ...]:
        """Everything in it."""
        return tuple(c for target, there in self.targets.items() for k in there["kernels"] for c in self.of(target, k))

    def of(self, target: str, kernel: str) -> tuple[Code, ...]:
        """Builds of a kernel for a target.

        Raises:
            BundleError: what lists them is damaged.
        """
        entry = self.targets.get(target, {}).get("kernels", {}).get(kernel)
        return () if entry is None else tuple(map(Code.of, json.loads(self._entry(entry))))

    def read(self, place: str) -> bytes:
        """A piece of machine code, by what `Code.files` says of it.

        Raises:
            BundleError: it is not there, or not what was written.
        """
        pack, start, stop = place.split(":")
        last = self._last
        if pack != last[0]:  # builds that are launched together lie together
            last = self._last = pack, lzma.decompress(self._entry(pack))
        return last[1][int(start) : int(stop)]

    def _entry(self, name: str) -> bytes:
        try:
            data = self._zip.read(name)
        except _UNREADABLE as error:
            raise BundleError(
                f"{name} of {self.path} cannot be read ({error}). {_remade(self.path, self.targets)}"
            ) from error
        if hashlib.sha256(data).hexdigest() != self._sums.get(name):
            raise BundleError(
                f"{name} of {self.path} is damaged: its SHA-256 differs. {_remade(self.path, self.targets)}"
            )
        return data


def write_bundle(path: Path, codes: Iterable[tuple[Code, Mapping[str, bytes]]], compiler: Mapping[str, str]) -> Bundle:
    """Write a bundle: compiled configurations with their files by kind, and who compiled them."""
    listed = sorted(codes, key=lambda made: (made[0].target, made[0].configuration.kernel, made[0].configuration.text))
    places, entries = _packed(listed)
    targets: dict[str, dict[str, Any]] = {}
    for (target, kernel), of_kernel in groupby(listed, key=lambda made: (made[0].target, made[0].configuration.kernel)):
        documents = []
        for code, files in of_kernel:
            there = targets.setdefault(target, {"kinds": [], "kernels": {}})
            there["kinds"] = sorted({*there["kinds"], *files})
            held = {kind: places[target, kind, data] for kind, data in sorted(files.items())}
            documents.append({**code.document(), "files": held})
        name = f"{target}/{kernel.replace(':', '.')}.json"
        there["kernels"][kernel] = name
        entries[name] = json.dumps(documents).encode()
    description = {
        "format": FORMAT,
        "rlkernel": __version__,
        "compiler": dict(sorted(compiler.items())),
        "targets": targets,
        "entries": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(entries.items())},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")  # whoever reads the old one keeps it, and nobody reads half of this
    with zipfile.ZipFile(new, "w") as file:
        for name, data in [(DESCRIPTION, json.dumps(description).encode()), *sorted(entries.items())]:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".xz") else zipfile.ZIP_DEFLATED
            entry.external_attr, entry.create_system = 0o644 << 16, 3
            file.writestr(entry, data, compresslevel=9)
    new.replace(path)
    return Bundle(path)


def _packed(
    codes: Iterable[tuple[Code, Mapping[str, bytes]]],
) -> tuple[dict[tuple[str, str, bytes], str], dict[str, bytes]]:
    """Where each distinct piece of code lies, by target, kind and content; and packs by name."""
    distinct: dict[tuple[str, str, str], dict[bytes, None]] = {}
    for code, files in codes:
        for kind, data in files.items():
            distinct.setdefault((code.target, kind, code.configuration.kernel), {})[data] = None
    places: dict[tuple[str, str, bytes], str] = {}
    packs: dict[str, bytes] = {}
    for (target, kind, kernel), pieces in sorted(distinct.items()):
        new = [data for data in pieces if (target, kind, data) not in places]
        for i in range(0, len(new), _PACK):
            name, at = f"{target}/{kernel.replace(':', '.')}.{kind}.{i // _PACK}.xz", 0
            for data in new[i : i + _PACK]:
                places[target, kind, data] = f"{name}:{at}:{at + len(data)}"
                at += len(data)
            packs[name] = b"".join(new[i : i + _PACK])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return places, dict(
            zip(packs, pool.map(lambda pack: lzma.compress(pack, preset=6), packs.values()), strict=True)
        )

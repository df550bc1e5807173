"""The file that holds compiled kernels: a zip with `bundle.json`, a list of builds for every kernel, and packs of code.

Builds of a kernel differ in little, so a pack holds machine code of several, one after the other, compressed together:
less than half of what they take one by one. Code that is the same is there once. Read lazily: opening a bundle reads
its description, a kernel's first launch the list of its builds and one pack. Every entry is held against its SHA-256
when it is read. Written twice from the same builds a bundle has the same bytes: entries are sorted, dates fixed,
compression stated. Sizes are bounded before anything is decompressed. Imports neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rlkernel_core import __version__
from rlkernel_core.documents import formed, json_of, short
from rlkernel_core.errors import FileError, RLKernelError
from rlkernel_core.files import MOST, make_folder, whole
from rlkernel_core.paths import missing
from rlkernel_triton.aot.configurations import CODE, Code

FORMAT: Final = 2
DESCRIPTION: Final = "bundle.json"
_PACK: Final = 16  # pieces of code in a pack: of 8 a bundle is a tenth larger, of 32 a first launch takes twice as long
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first that a zip can say
# What reading a damaged zip raises: RuntimeError where bits say that it is encrypted or of another method.
_UNREADABLE: Final = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, KeyError, ValueError, EOFError, OSError,
                      RuntimeError, NotImplementedError, struct.error)  # fmt: skip
_END: Final = struct.Struct("<4s4H2LH")  # of a zip: signature, disks, entries, bytes and place of the list, comment
_MOST_ENTRIES: Final = 20_000
_MOST_DIRECTORY: Final = 8 << 20  # bytes of the zip's list of entries
_MOST_LISTS: Final = 48 << 20  # bytes of JSON, all together
_MOST_PACK: Final = 64 << 20  # bytes of code, decompressed: packs have one or two
_DECODER: Final = 64 << 20  # bytes that the decompressor may take; of preset 6 it takes 9 MiB
_FORM: Final = {
    "compiler": {str: (str, None)},
    "rlkernel": str,
    "targets": {str: {"kinds": [str], "kernels": {str: str}}},
    "entries": {str: str},
}
_PLACE: Final = re.compile(r"([^:]+):(\d{1,12}):(\d{1,12})", re.ASCII)


class BundleError(RLKernelError):
    """A bundle cannot be read or does not fit; the message says which, why, and the line that makes a new one."""


class NoBuildError(BundleError):
    """A call is outside of what a bundle was compiled for; the message says how to have it compiled."""


def _remade(path: Path, targets: Iterable[str] = ()) -> str:
    said = " ".join(f"--target {t[:40]}" for t in [*targets][:8]) or "--target sm_87"
    return f"Make it again where Triton is installed: rlkernel aot build {said} --out {path.name}"


class Bundle:
    """A bundle on disk.

    Raises:
        BundleError: there is none, it is no bundle, it is damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _check_end(path)
            self._zip = zipfile.ZipFile(path)
            description = json_of(self._text(DESCRIPTION), {"format": object}, path, "")
            if description["format"] == FORMAT:
                formed(description, _FORM, path, "")
        except FileNotFoundError as error:
            raise BundleError(f"there is no bundle at {path}: {missing(path)}. {_remade(path)}") from error
        except _UNREADABLE as error:
            said = str(error.problem if isinstance(error, FileError) else error)[:300]
            raise BundleError(f"{path} is no bundle of rlkernel, or damaged ({said}). {_remade(path)}") from error
        if description["format"] != FORMAT:
            raise BundleError(
                f"{path} has format {short(description['format'])}, this rlkernel reads {FORMAT}. {_remade(path)}"
            )
        self.compiler: Mapping[str, str] = description["compiler"]
        self.version: str = description["rlkernel"]
        # Target -> kinds of files, and kernel -> the entry that lists its builds.
        self.targets: Mapping[str, Mapping[str, Any]] = description["targets"]
        self._sums: Mapping[str, str] = description["entries"]
        self._last: tuple[str, bytes] = "", b""
        lists = [entry for there in self.targets.values() for entry in there["kernels"].values()]
        sizes = {info.filename: info.file_size for info in self._zip.infolist()}
        if len({*lists}) != len(lists) or sum(sizes.get(name, 0) for name in lists) > _MOST_LISTS:
            raise BundleError(f"{path} is damaged: its lists are {len(lists)}, too large. {_remade(path)}")

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
        if entry is None:
            return ()
        try:
            return tuple(map(Code.of, json_of(self._entry(entry).decode(), [CODE], self.path, "", _MOST_LISTS)))
        except ValueError as error:
            raise self._damaged(entry, error) from error

    def read(self, place: str) -> bytes:
        """A piece of machine code, by what `Code.files` says of it.

        Raises:
            BundleError: it is not there, or not what was written.
        """
        found = _PLACE.fullmatch(place)
        if found is None:
            raise self._damaged(place[:80], "it is no place in a pack")
        pack, start, stop = found[1], int(found[2]), int(found[3])
        last = self._last
        if pack != last[0]:  # builds that are launched together lie together
            last = self._last = pack, self._unpacked(pack)
        if not start <= stop <= len(last[1]):
            raise self._damaged(pack, f"it holds {len(last[1])} bytes, not {stop}")
        return last[1][start:stop]

    def _unpacked(self, pack: str) -> bytes:
        """A pack, decompressed; no more is allocated than a pack may have."""
        packed, decoder = self._entry(pack), lzma.LZMADecompressor(lzma.FORMAT_XZ, _DECODER)
        try:
            data = decoder.decompress(packed, _MOST_PACK)
        except lzma.LZMAError as error:
            raise self._damaged(pack, error) from error
        if not decoder.eof:
            raise self._damaged(pack, f"it is cut off, or larger than {_MOST_PACK} bytes")
        return data

    def _entry(self, name: str) -> bytes:
        try:
            data = self._bytes(name, _MOST_PACK)
        except _UNREADABLE as error:
            raise self._damaged(name, error) from error
        if hashlib.sha256(data).hexdigest() != self._sums.get(name):
            raise BundleError(
                f"{name[:100]} of {self.path} is damaged: its SHA-256 differs. {_remade(self.path, self.targets)}"
            )
        return data

    def _bytes(self, name: str, most: int) -> bytes:
        """An entry of the zip; zipfile reads no more than the size that the entry claims."""
        info = self._zip.getinfo(name)
        if info.file_size > most:
            raise ValueError(f"it claims {info.file_size} bytes")
        return self._zip.read(info)

    def _text(self, name: str) -> str:
        return self._bytes(name, MOST).decode()

    def _damaged(self, name: str, why: object) -> BundleError:
        said = f"{name[:100]} of {self.path} cannot be read ({str(why)[:300]})"
        return BundleError(f"{said}. {_remade(self.path, self.targets)}")


def _check_end(path: Path) -> None:
    """See that a zip ends as `write_bundle` has them end: its list of entries is read at once, whatever its size.

    Raises:
        ValueError: it does not, or the list is too large.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END.size - 20))
        end = file.read()
    if len(end) < _END.size:
        raise ValueError("it is cut off")
    signature, _, _, _, entries, directory, _, comment = _END.unpack(end[-_END.size :])
    large = end[: -_END.size].startswith(b"PK\x06\x07")  # sizes of 64 bits, in a record before this one
    if signature != b"PK\x05\x06" or comment or large or entries > _MOST_ENTRIES or directory > _MOST_DIRECTORY:
        raise ValueError("it does not end as a bundle does")


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
    make_folder(path.parent)
    with whole(path) as new, zipfile.ZipFile(new, "w") as file:  # whoever reads the old one keeps it
        for name, data in [(DESCRIPTION, json.dumps(description).encode()), *sorted(entries.items())]:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".xz") else zipfile.ZIP_DEFLATED
            entry.external_attr, entry.create_system = 0o644 << 16, 3
            file.writestr(entry, data, compresslevel=9)
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

"""The certificates that a backend ships as data: `orders/certificates.json` in its package."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rlkernel_core.documents import read_json

FILE: Final = Path("orders") / "certificates.json"
_TEXTS: Final = ("backend", "op", "arch", "level", "dtype", "size")
_ROW: Final = {
    **dict.fromkeys(_TEXTS, str),
    "hash?": str,
    "why?": str,
    "outputs?": {str: str},
    "rows_alike?": (bool, None),
    "fusable?": {str: int},
}
_FORM: Final = {"triton": str, "certificates": [_ROW]}


def read(file: Path) -> dict[str, Any]:
    """A table of certificates, and the version of Triton that it is of.

    Raises:
        FileError: it is damaged.
    """
    found: dict[str, Any] = read_json(file, _FORM, "Install the backend anew.")
    return found


def shipped(targets: Iterable[str], op: str) -> list[dict[str, Any]]:
    """Certificates of an operator in the packages of its implementations; none where they ship none.

    Args:
        targets: "package.module:function" of the implementations.
        op: operator, without its version.

    Raises:
        FileError: a package ships a file that is damaged.
    """
    rows = []
    for package in sorted({target.partition(":")[0].partition(".")[0] for target in targets}):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(folder) / FILE
            if file.exists():
                content = read(file)
                made = {"compiler": f"triton {content['triton']}"}
                rows += [made | row for row in content["certificates"] if row["op"] == op]
    return rows

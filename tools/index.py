"""Write an index of the wheels in a folder, for pip's `--index-url` and `--extra-index-url` (PEP 503).

    python tools/index.py dist

makes `dist/simple/`, whose links carry the sha256 of each wheel. Served by any web server, or read from the disk:
`pip install --extra-index-url file://$PWD/dist/simple 'rlkernel[cuda]'`.
"""

from __future__ import annotations

import hashlib
import sys
from html import escape
from pathlib import Path
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from rlkernel_core.files import write_text


def write(folder: Path) -> Path:
    """Write `simple/` in a folder of wheels.

    Raises:
        SystemExit: there is no wheel.
    """
    names: dict[str, list[Path]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        names.setdefault(parse_wheel_filename(wheel.name)[0], []).append(wheel)
    if not names:
        raise SystemExit(f"no wheel in {folder}: make wheelhouse builds them")
    simple = folder / "simple"
    _page(simple, [f'<a href="{name}/">{name}</a>' for name in sorted(names)])
    for name, wheels in names.items():
        _page(simple / name, [_link(wheel) for wheel in wheels])
    return simple


def _link(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f'<a href="../../{quote(wheel.name)}#sha256={digest}">{escape(wheel.name)}</a>'


def _page(folder: Path, links: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = "<br>\n".join(links)
    write_text(folder / "index.html", f"<!DOCTYPE html>\n<html><body>\n{body}\n</body></html>\n")


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))

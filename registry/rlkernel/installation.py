"""How rlkernel was installed, and so which line installs more of it: folders of a clone, or the extras of a release.

PEP 610: what pip installed from a folder has its URL in direct_url.json, beside the distribution's metadata.
"""

from __future__ import annotations

import shlex
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rlkernel_core.documents import json_of


@cache
def clone() -> Path | None:
    """The folder of the clone that this rlkernel was installed from; None where it came from elsewhere."""
    try:
        said = distribution("rlkernel").read_text("direct_url.json") or "{}"
        told = json_of(said, {"url?": str}, "direct_url.json", "Install rlkernel anew.")
    except (PackageNotFoundError, ValueError):
        return None
    url = urlsplit(str(told.get("url", "")))
    folder = Path(unquote(url.path))
    inside = (
        url.scheme == "file" and "dir_info" in told and (folder / "backends" / "triton" / "pyproject.toml").is_file()
    )
    return folder if inside else None


@cache
def _seen_from_here(folder: Path) -> Path:
    """The clone as it is written in a line to type; asked once, so that what is said does not change."""
    try:
        return Path() if folder.samefile(Path.cwd()) else folder
    except OSError:  # the working folder is gone
        return folder


def extras(*names: str) -> str:
    """The line that installs extras of rlkernel."""
    wanted = f"[{','.join(names)}]"
    folder = clone()
    if folder is None:
        return f"pip install 'rlkernel{wanted}'"
    return f"pip install -e {shlex.quote(f'{_seen_from_here(folder)}{wanted}')}"


def backends(names: tuple[str, ...], released: str) -> str:
    """The line that installs backends of ours.

    Args:
        names: their folders in a clone, in the order in which they need each other.
        released: the line for a released version.
    """
    folder = clone()
    if folder is None or not names:
        return released
    paths = [f"-e {shlex.quote(str(_seen_from_here(folder) / 'backends' / name))}" for name in names]
    return " ".join(["pip install", *paths])

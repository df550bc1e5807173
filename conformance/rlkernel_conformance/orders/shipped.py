"""The certificates that a backend ships as data: `orders/certificates.json` in its package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

FILE: Final = Path("orders") / "certificates.json"


def shipped(targets: Iterable[str], op: str) -> list[dict[str, Any]]:
    """Certificates of an operator in the packages of its implementations; none where they ship none.

    Args:
        targets: "package.module:function" of the implementations.
        op: operator, without its version.
    """
    rows = []
    for package in sorted({target.partition(":")[0].partition(".")[0] for target in targets}):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(folder) / FILE
            if file.exists():
                content = json.loads(file.read_text(encoding="utf-8"))
                made = {"compiler": f"triton {content['triton']}"}
                rows += [made | row for row in content["certificates"] if row["op"] == op]
    return rows

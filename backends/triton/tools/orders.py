"""Derive the orders of the shipped kernels' sums, for several architectures, without a GPU; write them as data.

    python backends/triton/tools/orders.py                # all; minutes
    python backends/triton/tools/orders.py sm90 logprob   # of this architecture and operator

Writes backends/triton/rlkernel_triton/orders/certificates.json: certificates of `rlkernel conformance orders`, and the
version of Triton that compiled the kernels. Those of another version are forgotten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
TABLE: Final = ROOT / "backends" / "triton" / "rlkernel_triton" / "orders" / "certificates.json"
if __name__ == "__main__":
    backends = ("common", "torch", "triton", "rocm", "rocm/simulator")
    sys.path[:0] = [*(str(ROOT / "backends" / b) for b in backends), str(ROOT / "conformance"), str(ROOT)]

import triton

from rlkernel_conformance.orders.certificates import certificate
from rlkernel_core.files import write_text

ARCHS: Final = ("sm80", "sm87", "sm90", "gfx90a", "gfx942", "gfx950")
# operator -> (dtype, sizes)
CALLS: Final = {
    "logprob": ("bfloat16", ("1x2000", "8x2000")),
    "linear_logprob": ("bfloat16", ("1x64x300", "8x64x300")),
    "whiten": ("float32", ("4x300",)),
    "linear": ("bfloat16", ("1x512x300", "8x512x300", "64x512x300", "8192x512x300")),
    "grouped_linear": ("bfloat16", ("1x512x300", "8x512x300", "300x512x300")),
    "rms_norm": ("bfloat16", ("1x2000", "8x2000")),
    "rope": ("bfloat16", ("1x2x128", "8x2x128")),
    "policy_loss": ("float32", ("4x300",)),
}


def asked(archs: Iterable[str] = ARCHS, ops: Iterable[str] = tuple(CALLS)) -> Iterator[dict[str, str]]:
    """Arguments of `certificate` for every row of the table."""
    for op in ops:
        dtype, sizes = CALLS[op]
        for arch in archs:
            yield from ({"op": op, "size": size, "arch": arch, "dtype": dtype} for size in sizes)


def stored() -> list[dict[str, Any]]:
    """The table's certificates; none where another version of Triton compiled the kernels."""
    if not TABLE.exists():
        return []
    content = json.loads(TABLE.read_text())
    return content["certificates"] if content["triton"] == triton.__version__ else []


def store(rows: list[dict[str, Any]]) -> None:
    """Write the table."""
    place = {tuple(sorted(a.items())): i for i, a in enumerate(asked())}
    kept = sorted((r for r in rows if key(r) in place), key=lambda r: place[key(r)])
    lines = ",\n".join(f"  {json.dumps(r)}" for r in kept)
    write_text(TABLE, f'{{\n "triton": "{triton.__version__}",\n "certificates": [\n{lines}\n ]\n}}\n')


def key(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """What was asked of a certificate."""
    return tuple(sorted((name, row[name]) for name in ("op", "size", "arch", "dtype")))


def main(words: list[str]) -> None:
    """Derive and write.

    Args:
        words: architectures and operators, all where none of a kind is named.
    """
    if unknown := set(words) - {*ARCHS, *CALLS}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no operator and no architecture of {[*CALLS, *ARCHS]}")
    archs, ops = ([w for w in words if w in known] or list(known) for known in (ARCHS, CALLS))
    for arguments in asked(archs, ops):
        made = certificate(**arguments).document()
        store([r for r in stored() if key(r) != key(made)] + [made])
        print(made["op"], made["arch"], made["size"], made.get("hash") or made["why"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""How close is close: every tolerance of every spec as one table, with the source of each number.

The numbers stand in `rlkernel_core.spec` and nowhere else. The version of a table is a hash of its rows: a report names
the version it was made with, so that two reports of different tolerances are not taken for equals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final

from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import Tolerance

COLUMNS: Final = ("operator", "output", "dtype", "judgment", "atol", "rtol", "source")
# A product with a quantized weight is judged twice: once for the matmul, once for the format as well.
_TWO_LEVELS: Final = {
    ("qmatmul", "y"): ("against the dequantized weight", "against the full weight, plus sum |x| error_bound(w)")
}
_GRADIENTS: Final = "grad"  # what the names of rows about gradients begin with


def table(ops: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Rows of the operators, of all unless some are named, in the order of their specs.

    Raises:
        UnknownNameError: no such operator.
    """
    return [
        {
            "operator": OPERATORS[op].id,
            "output": row.output,
            "dtype": row.dtype,
            "judgment": judgment,
            "atol": row.atol,
            "rtol": row.rtol,
            "source": row.source,
        }
        for op in (ops or OPERATORS)
        for row in OPERATORS[op].tolerances
        for judgment in _judgments(op, row)
    ]


def version(ops: Iterable[str] = ()) -> str:
    """Twelve hexadecimal digits that change with any number, name or source in the table of the operators."""
    return sha256(json.dumps(table(ops)).encode()).hexdigest()[:12]


def _judgments(op: str, row: Tolerance) -> tuple[str, ...]:
    kind = "gradient against float64" if row.output.startswith(_GRADIENTS) else "value against float64"
    return _TWO_LEVELS.get((op, row.output), (kind,))

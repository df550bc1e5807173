"""What each format loses on weights of a normal law and of a heavy tail: the table of docs/quantization.md.

    python docs/quantization.py            writes docs/quantization.json and prints the table

Weights are 512 x 2048, seed 0: independent normal numbers; Student's t with 4 degrees of freedom; and normal numbers
with one column in 64 twenty times as large, as outlier channels make them. The error is rms(w' - w) / rms(w), in per
cent; `product` is that of x w^T for normal x [64, 2048]. Everything is plain torch on a CPU, so the numbers are the
same on every machine up to the order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.files import write_json
from rlkernel_core.quant import FORMATS, QuantSpec, dequantize, quantize

N, K, M = 512, 2048, 64
WHERE: Final = Path(__file__).with_suffix(".json")
VARIANTS: Final = (
    *(QuantSpec.named(f) for f in FORMATS if not f.endswith("w8a8")),
    QuantSpec.named("int4_g128", act_order=True),
    QuantSpec.named("nf4", double_quant=True),
    *(QuantSpec.named("mxfp4", scale_rule=rule) for rule in ("rceil", "even")),
    QuantSpec.named("mxfp8", scale_rule="rceil"),
)


def _normal(g: torch.Generator) -> Tensor:
    return torch.randn(N, K, generator=g, dtype=torch.float64)


def _student(g: torch.Generator) -> Tensor:
    squares = torch.randn(4, N, K, generator=g, dtype=torch.float64).square().sum(0)
    return _normal(g) / (squares / 4).sqrt()


def _outliers(g: torch.Generator) -> Tensor:
    weight = _normal(g)
    weight[:, ::64] *= 20
    return weight


LAWS: Final[Mapping[str, Callable[[torch.Generator], Tensor]]] = {
    "normal": _normal,
    "student_t4": _student,
    "outlier_columns": _outliers,
}


def measured() -> list[dict[str, object]]:
    """A row per format: bits a weight, errors in per cent by law."""
    rows = []
    weights = {name: law(torch.Generator().manual_seed(0)).float() for name, law in LAWS.items()}
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for spec in VARIANTS:
        row: dict[str, object] = {"format": spec.kind}
        for name, weight in weights.items():
            w = quantize(weight, spec)
            off = dequantize(w).double() - weight.double()
            row["bits"] = round(8 * w.nbytes / weight.numel(), 3)
            row[name] = _percent(off, weight.double())
            if name == "normal":
                row["product"] = _percent(x @ off.t(), x @ weight.double().t())
        rows.append(row)
    return rows


def _percent(off: Tensor, whole: Tensor) -> float:
    return float(f"{100 * (off.square().mean() / whole.square().mean()).sqrt().item():.3g}")


def table(rows: list[dict[str, object]]) -> str:
    """Rows as markdown."""
    lines = ["| format | bits | normal | Student t4 | outlier columns | product |", "|---|---|---|---|---|---|"]
    for r in rows:
        cells = (r["bits"], r["normal"], r["student_t4"], r["outlier_columns"], r["product"])
        lines.append(f"| `{r['format']}` | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = measured()
    if "--print" not in sys.argv:
        write_json(WHERE, {"N": N, "K": K, "M": M, "seed": 0, "rows": found})
    print(table(found))

"""How far rollout and trainer are apart on one GPU, by the kernels of each side. No network, nothing installed.

    PYTHONPATH=.:registry:benchmarks:backends/triton:backends/cuda OUT=/tmp/out python benchmarks/gpu_agree.py
    DEVICE=cpu SIZE=toy OUT=/tmp/out python benchmarks/gpu_agree.py

The built-in decoder in bf16, stock and batch invariant; every pair of orders; what has ended stands in $OUT/agree.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from gpu_all import distributions

OUT = Path(os.environ.get("OUT", "."))
DEVICE = os.environ.get("DEVICE", "cuda")
TOY = os.environ.get("SIZE") == "toy"
BUDGET_S = float(os.environ.get("BUDGET_S", "60"))
ORDERS = {"auto": ("auto",), "triton": ("triton", "reference"), "reference": ("reference",)}
PAIRS = (("auto", "auto"), ("triton", "triton"), ("reference", "reference"), ("triton", "auto"), ("reference", "auto"))
SIZES = {"vocab": 1000, "hidden": 64} if TOY else {"vocab": 32768, "hidden": 512, "layers": 4}


def main() -> None:
    """Every pair, with the sampler's own log-probabilities and with those of the trainer's operator."""
    site = Path(tempfile.mkdtemp())
    distributions(site)
    sys.path.append(str(site))
    import torch

    from rlkernel.agree import builtin, measure

    begun, found = time.monotonic(), []
    OUT.mkdir(parents=True, exist_ok=True)
    for rollout, trainer in [("reference", "reference")] if DEVICE == "cpu" else PAIRS:
        for invariant, score in ((False, "sampler"), (True, "sampler"), (True, "linear_logprob")):
            if time.monotonic() - begun > BUDGET_S:
                return
            row = {"rollout": rollout, "trainer": trainer, "invariant": invariant, "score": score}
            try:
                model = builtin(invariant=invariant, dtype=torch.bfloat16, device=DEVICE, **SIZES)
                got = measure(
                    model, rollout=ORDERS[rollout], trainer=ORDERS[trainer], score=score, sequences=16, tokens=40
                )
                row |= {"drift": got.drift.as_dict(), "kernels": got.kernels.as_dict(), "hidden": got.hidden}
                row["ran"] = [str(d.target) for d in (*got.rollout, *got.trainer)]
                print(rollout, trainer, invariant, score, got.drift.max, got.kernels.max, row["ran"][-1], flush=True)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:1500]
                print(row, flush=True)
            found.append(row)
            (OUT / "agree.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

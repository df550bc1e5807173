"""The picture of README: which kernel ran, how fast, and how far rollout and trainer are apart. From committed results.

    python docs/overview.py            writes docs/overview.png, from benchmarks/results/h200

Every number stands in a file there; this only chooses rows and draws them. Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rlkernel_core.files import whole

H200: Final = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"
WORK: Final = "8192x4096x128256 bfloat16 forward+backward entropy"
# candidate of the benchmark -> how README calls it
TIMED: Final = {
    "cuda:save": "cuda, backward='save'",
    "cuda:recompute": "cuda",
    "trl": "TRL 1.16",
    "triton:save": "triton, backward='save'",
    "triton:recompute": "triton",
    "torch": "torch",
    "verl": "verl 0.9",
}
# model batch invariant, log-probability of the rollout by -> label
DRIFT: Final = {
    (False, "sampler"): "stock model",
    (True, "sampler"): "batch-invariant model",
    (True, "linear_logprob"): "the same, one operator\nscores on both sides",
}


def timed() -> dict[str, tuple[float, float]]:
    """Label -> milliseconds, and GiB beyond inputs and results."""
    content = json.loads((H200 / "linear_logprob" / "results.json").read_text(encoding="utf-8"))
    row: dict[str, Any] = next(r for r in content["results"] if r["work"] == WORK)
    found = {c["name"]: c for c in row["candidates"]}
    return {
        label: (found[name]["eager"]["median"] / 1e3, found[name]["memory"]["extra_bytes"] / 2**30)
        for name, label in TIMED.items()
    }


def drift() -> dict[str, tuple[float, list[str]]]:
    """Label -> mean |difference of log p| in nats, and the backends that ran, rollout first."""
    rows = json.loads((H200 / "agree.json").read_text(encoding="utf-8"))
    found = {(r["invariant"], r["score"]): r for r in rows if r["rollout"] == r["trainer"] == "auto"}
    return {
        label: (
            found[which]["drift"]["mean"],
            [name.partition(".")[0] for name in found[which]["ran"]],
        )
        for which, label in DRIFT.items()
    }


def main() -> None:
    """Draw both panels."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(3, 2), layout="constrained")
    bars = sorted(timed().items(), key=lambda item: -item[1][0])
    colors = ["tab:blue" if name.startswith(("cuda", "triton")) else "0.65" for name, _ in bars]
    left.barh([name for name, _ in bars], [ms for _, (ms, _) in bars], color=colors)
    for at, (_, (ms, gib)) in enumerate(bars):
        left.text(ms + 1, at, f"{ms:.1f} ms, {gib:.1f} GiB", va="center", fontsize=8)
    left.set(xlim=(0, 112), xlabel="ms, forward and backward of 8192 x 4096 x 128256, bf16, with entropy")
    left.set_title("linear_logprob on one H200: saving logits beats recomputing", fontsize=10)

    rows = list(drift().items())[::-1]
    right.barh([name for name, _ in rows], [mean for _, (mean, _) in rows], color="tab:blue")
    for at, (_, (mean, _)) in enumerate(rows):
        right.text(mean + 1e-4, at, f"{mean:.2g} nats" if mean else "0, every bit equal", va="center", fontsize=8)
    rollout, trainer, *_ = rows[0][1][1]
    right.set(xlim=(0, 0.0095), xlabel=f"mean |Δ log p| of 640 tokens\nrollout: {rollout}, trainer: {trainer}")
    right.set_title("Drift comes from the model, not the kernels", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.xaxis.label.set_size(8)
    with whole(Path(__file__).with_suffix(".png")) as draft:
        figure.savefig(draft, dpi=110, metadata={"Software": None}, format="png")


if __name__ == "__main__":
    main()

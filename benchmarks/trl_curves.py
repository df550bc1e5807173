"""Loss and reward of TRL's GRPO step by step, stock and with rlkernel inside, from one seed: one file, one plot.

    python benchmarks/trl_curves.py --steps 60          # needs the extra `hosts`; a CPU will do, in some minutes

Runs examples/trl_grpo/train.py twice and writes curves.json and curves.png into benchmarks/results/trl_cpu. Two runs of
one seed in fp32 part when a draw falls on the other side of a rounding; until then they are the same training.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
KEPT: Final = ("loss", "reward", "entropy", "grad_norm", "step_time")


def main() -> None:
    """Train twice, compare, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "trl_cpu")
    args = parser.parse_args()
    runs = {"stock": trained(args.steps), "rlkernel": trained(args.steps, "--rlkernel")}
    packages = {name: version(name) for name in ("trl", "transformers", "torch", "rlkernel")}
    same = [abs(a - b) for a, b in zip(runs["stock"]["loss"], runs["rlkernel"]["loss"], strict=True)]
    said = {"machine": platform.machine(), "packages": packages, "largest_difference_of_loss": max(same), "runs": runs}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "curves.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    draw(runs, args.out / "curves.png")
    print(f"largest difference of a loss {max(same):.2e}; wrote {args.out}")


def trained(steps: int, *options: str) -> dict[str, list[float]]:
    """What TRL logged under each name, step by step."""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "examples" / "trl_grpo" / "train.py"
        argv = [sys.executable, str(script), "--steps", str(steps), "--out", folder, *options]
        subprocess.run(argv, check=True)  # noqa: S603  a script of this clone
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "log.json").read_text(encoding="utf-8"))
    return {name: [row[name] for row in rows if name in row] for name in KEPT}


def draw(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Loss and reward, one panel each."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for panel, name in zip(panels, ("loss", "reward"), strict=True):
        every = len(runs["stock"]["loss"]) // len(runs["stock"][name])  # a batch that is used twice has one reward
        at = range(1, len(runs["stock"]["loss"]) + 1, every)
        panel.plot(at, runs["stock"][name], label="TRL", linewidth=3, color="0.75")
        panel.plot(at, runs["rlkernel"][name], label="TRL with rlkernel", linewidth=1, color="tab:blue")
        panel.set(xlabel="step", title=name)
        panel.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()

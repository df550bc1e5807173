"""The picture of a run: did it learn, how far apart were rollout and trainer, and which kernel ran where.

python -m rlkernel.demo.picture RUN_FOLDER     # draws the picture of a run that was made without matplotlib
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.documents import formed, read_json, read_lines
from rlkernel_core.errors import FileError
from rlkernel_core.files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE: Final = "curves.png"
GAIN: Final = 0.02  # a smaller difference of rewards is that of two batches
# line of the drift -> its name, its color
DRIFT: Final = {
    "drift_mean": ("mean |difference| of log p", "tab:orange"),
    "drift_kl": ("KL divergence", "tab:purple"),
}
_REMEDY: Final = "Name the folder of a run of `rlkernel demo`."
_STEP: Final = {"step": int, "reward": float, "drift_max": float, **dict.fromkeys(DRIFT, float)}
_SERVED: Final = {"side": frozenset({"rollout", "trainer"}), "op": str, "backend": str, "target": str}
_SUMMARY: Final = {
    **dict.fromkeys(("reward_first", "reward_last", "reward_rise", "drift_mean"), float),
    "steps": int,
    "device": str,
    "served": [_SERVED],
}
SIDES: Final = {"rollout": "Rollout", "trainer": "Trainer"}


def title(summary: Mapping[str, Any]) -> str:
    """What the run found, in a sentence."""
    first, last, rise = (summary[f"reward_{x}"] for x in ("first", "last", "rise"))
    verb = "rose" if rise > GAIN else "fell" if rise < -GAIN else "did not change:"
    return (
        f"Right answers {verb} from {first:.0%} to {last:.0%} in {summary['steps']} updates; "
        f"rollout and trainer differed by {summary['drift_mean']:.2g} nats per token on average"
    )


def figure(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Figure:
    """The picture of the updates `steps` of a run with this summary."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13, 4.6), layout="constrained")
    reward, drift, kernels = drawn.subplots(1, 3, width_ratios=(1, 1, 1.2))
    updates = [s["step"] + 1 for s in steps]
    reward.plot(updates, [100 * s["reward"] for s in steps], color="tab:blue")
    reward.set(title="Reward", xlabel="update", ylabel="right answers, % of the batch", ylim=(0, 102))
    for name, (label, color) in DRIFT.items():
        values = [s[name] for s in steps]
        drift.plot(updates, values, color=color, label=label)
    drift.set(title="Drift between rollout and trainer", xlabel="update", ylabel="nats per token, over the batch")
    drift.set_ylim(bottom=0)
    worst = f"largest |difference| of one token: {max(s['drift_max'] for s in steps):.2g} nats"
    drift.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, title=worst)
    for axes in (reward, drift):
        axes.grid(alpha=0.3)
    _kernels(kernels, summary)
    drawn.suptitle(title(summary), fontweight="bold")
    return drawn


def _kernels(axes: Axes, summary: Mapping[str, Any]) -> None:
    """Which implementation served each operator, by side, as text."""
    axes.set_axis_off()
    axes.set_title(f"What ran on the {summary['device']}", loc="left")
    rows = [(SIDES[r["side"]], r["op"].partition("@")[0], r["backend"], _short(r["target"])) for r in summary["served"]]
    at, size = 0.97, 8 if len(rows) < 16 else 6
    step = min(0.075, 0.95 / (len(rows) + len(SIDES)))
    last = ""
    for side, op, backend, target in rows:
        if side != last:
            axes.text(0, at, side, weight="bold", va="top", transform=axes.transAxes)
            at -= step
        for x, text in ((0.02, op), (0.3, backend), (0.42, target)):
            axes.text(x, at, text, va="top", fontsize=size, transform=axes.transAxes)
        at, last = at - step, side


def _short(target: str) -> str:
    """`rlkernel_triton.sample.launch:sample` without the package that the backend's name says already."""
    package, _, rest = target.partition(".")
    return rest if package.startswith("rlkernel_") else target


def draw(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture."""
    with whole(path) as draft:
        figure(steps, summary).savefig(draft, dpi=120, format="png")


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the updates of a run.

    Raises:
        FileError: it is no folder of a run, or holds no update of one.
    """
    summary = read_json(folder / "summary.json", {"steps": int}, _REMEDY)
    steps = read_lines(folder / "metrics.jsonl", _STEP, _REMEDY)
    if not steps:
        raise FileError(folder, "", "holds no update: the run was interrupted before the first one", _REMEDY)
    return formed(summary, _SUMMARY, folder / "summary.json", _REMEDY), steps


def redraw(folder: Path) -> Path:
    """Draw the picture of a run folder; returns its path.

    Raises:
        FileError: it is no folder of a run, or holds no update of one.
    """
    summary, steps = read(folder)
    draw(steps, summary, folder / FILE)
    return folder / FILE


if __name__ == "__main__":
    print(redraw(Path(sys.argv[1])))  # noqa: T201 a script's answer

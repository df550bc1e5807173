"""The run folder: what a run was, did and ran on, readable at any moment, also after an interruption.

options.json     how it was started
metrics.jsonl    one line per update, written as it happens
decisions.json   which backend served each kind of call, and the hash of all
summary.json     the outcome; "complete": false where it was interrupted
curves.png       reward, drift and throughput
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import rlkernel as rlk
from rlkernel import record as decisions
from rlkernel.demo.train import Step

PANELS: Final = (
    ("reward", {"reward": "mean reward"}),
    ("drift, nats", {"drift_max": "max", "drift_mean": "mean", "drift_kl": "KL"}),
    ("rollout tokens / s", {"tokens_per_second": "tokens / s"}),
)


class RunFolder:
    """Writes a run folder; leaving the block completes it, however the block is left."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.steps: list[Step] = []
        self.summary: dict[str, Any] = {
            "complete": False,
            "reward_first": None,
            "reward_last": None,
            "reward_rise": None,
        }
        path.mkdir(parents=True, exist_ok=False)
        self._write("options.json", options)
        self._metrics = (path / "metrics.jsonl").open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def add(self, step: Step) -> None:
        """Append one update; it is on disk when this returns."""
        self.steps.append(step)
        self._metrics.write(json.dumps(step.as_dict()) + "\n")
        self._metrics.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.close()
        ran = rlk.status()
        decisions.write(self.path)
        served = sorted({(r.op, r.backend, str(r.decision.target), str(r.decision.version)) for r in ran})
        self.summary |= _outcome(self.steps)
        self.summary |= {
            "complete": kind is None,
            "decisions_hash": rlk.decisions_hash(),
            "served": [dict(zip(("op", "backend", "target", "provider"), row, strict=True)) for row in served],
            "folder": str(self.path),
        }
        self._write("summary.json", self.summary)
        if self.steps:
            draw(self.steps, self.path / "curves.png")

    def _write(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _outcome(steps: list[Step]) -> dict[str, Any]:
    """Reward before the first update, and the mean over the last tenth, so that one lucky batch decides nothing."""
    if not steps:
        return {"steps": 0}
    tail = steps[-max(1, len(steps) // 10) :]
    first, last = steps[0].reward, sum(s.reward for s in tail) / len(tail)
    return {
        "steps": len(steps),
        "reward_first": first,
        "reward_last": last,
        "reward_rise": last - first,
        "drift_max": max(s.drift_max for s in steps),
        "drift_mean": sum(s.drift_mean for s in steps) / len(steps),
        "drift_kl": sum(s.drift_kl for s in steps) / len(steps),
        "tokens_per_second": sum(s.tokens_per_second for s in steps) / len(steps),
    }


def draw(steps: list[Step], path: Path) -> None:
    """Reward, drift and throughput over the updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name, label in lines.items():
            axes.plot([s.step for s in steps], [getattr(s, name) for s in steps], label=label)
        axes.set(title=title, xlabel="update")
        if len(lines) > 1:
            axes.set_yscale("log")  # a maximum dwarfs a mean
        else:
            axes.set_ylim(bottom=0, top=1 if title == "reward" else None)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend()
    figure.savefig(path, dpi=120)

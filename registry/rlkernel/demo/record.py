"""The run folder: what a run was, did and ran on, readable at any moment, also after an interruption.

options.json     how it was started
metrics.jsonl    one line per update, written as it happens
decisions.json   which backend served each kind of call, and the hash of all
summary.json     the outcome, and what served each side; "complete": false where it was interrupted
curves.png       the picture of it, where matplotlib is installed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self

import rlkernel as rlk
from rlkernel import record as decisions
from rlkernel.demo.train import Step
from rlkernel_core.decision import Decision
from rlkernel_core.files import make_folder, write_json

SERVED: Final = ("side", "op", "backend", "target", "provider")


class RunFolder:
    """Writes a run folder; leaving the block completes it, however the block is left."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.steps: list[Step] = []
        self.served: dict[str, set[Decision]] = {}
        self.summary: dict[str, Any] = {
            "complete": False,
            "reward_first": None,
            "reward_last": None,
            "reward_rise": None,
        }
        make_folder(path.parent)
        path.mkdir(exist_ok=False)
        self._write("options.json", options)
        self._metrics = (path / "metrics.jsonl").open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def add(self, step: Step) -> None:
        """Append one update; it is on disk when this returns."""
        self.steps.append(step)
        self._metrics.write(json.dumps(step.as_dict()) + "\n")
        self._metrics.flush()

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        """What is called inside serves this side: every decision whose count of calls rises."""
        before = {ran.decision: ran.calls for ran in rlk.status()}
        yield
        rose = {ran.decision for ran in rlk.status() if ran.calls > before.get(ran.decision, 0)}
        self.served.setdefault(side, set()).update(rose)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.close()
        decisions.write(self.path)
        served = {
            (side, d.call.op, str(d.backend), str(d.target), str(d.version))
            for side, found in self.served.items()
            for d in found
        }
        self.summary |= _outcome(self.steps)
        self.summary |= {
            "complete": kind is None,
            "decisions_hash": rlk.decisions_hash(),
            "served": [dict(zip(SERVED, row, strict=True)) for row in sorted(served)],
            "folder": str(self.path),
            "picture": None,
        }
        if self.steps and find_spec("matplotlib") is not None:
            from rlkernel.demo.picture import FILE, draw

            draw([step.as_dict() for step in self.steps], self.summary, self.path / FILE)
            self.summary["picture"] = str(self.path / FILE)
        self._write("summary.json", self.summary)

    def _write(self, name: str, content: Any) -> None:
        write_json(self.path / name, content, indent=2)


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
        "tokens": sum(s.tokens for s in steps),
        "tokens_that_differ": sum(s.differ for s in steps),
        "drift_max": max(s.drift_max for s in steps),
        "drift_mean": sum(s.drift_mean for s in steps) / len(steps),
        "drift_kl": sum(s.drift_kl for s in steps) / len(steps),
        "tokens_per_second": sum(s.tokens_per_second for s in steps) / len(steps),
    }

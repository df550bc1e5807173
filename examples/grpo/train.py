"""The demo from your own program: other dials, and your own look at every update.

python examples/grpo/train.py [STEPS]
"""

from __future__ import annotations

import sys

from rlkernel.demo.run import Options, Progress, run
from rlkernel.demo.train import Recipe


def watch(progress: Progress) -> None:
    """Print the reward and the drift of every update."""
    if progress.step is not None:
        step = progress.step
        print(f"update {step.step + 1:3}/{progress.total}  reward {step.reward:.3f}  drift {step.drift_mean:.4f}")


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    summary = run(Options(recipe=Recipe(steps=steps, group=16, prompts=8)), watch)
    print(f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, see {summary['folder']}")

"""The calls of advantage@1.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.advantage.answers import answer
from rlkernel_conformance.spaces.advantage.calls import TOKENS, arguments
from rlkernel_conformance.spaces.advantage.levels import EDGE, FAMILY, NEEDED, RULES, TENSORS, factors
from rlkernel_conformance.spaces.advantage.tokens import every_argument
from rlkernel_conformance.spaces.space import Given, Point, Space, Want
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.advantage import SPEC
from rlkernel_core.spec.advantage_presets import PRESETS

__all__ = ["SPACE"]


def expected(subject: Subject, point: Point, given: Given, _: Mapping[str, Any]) -> dict[str, Want]:
    """Advantages, targets and statistics."""
    n = every_argument({k: plain(x, k) if isinstance(x, Tensor) else x for k, x in given.items()})
    by_token = point["tokens"][1] == "token"
    tensors = [given[k] for k in TOKENS if k in given and k != "rewards"] + [given["rewards"]] * by_token
    wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in given.values())
    stored = "float64" if wide else "float32"
    shape = tuple(tensors[0].shape) if tensors else None
    found = answer(n, shape, subject.tolerance("advantages", stored), by_token=by_token)
    dtypes = {"advantages": stored, "returns": stored, "stats.invalid": "bool", "stats.constant": "bool"}
    dtypes["stats.group_count"] = "int64"
    return {name: Want(x, allowed, dtypes.get(name)) for name, (x, allowed) in found.items()}


# Changes to the simplest call. Groups above 64, ids above what a kernel compares in pairs, more sequences than blocks
# of one dimension, more time than a chunk of a scan, more than 2^20 tokens.
PLAIN, PACKED, NONE, MASK = ("plain", "token"), ("packed", "token"), ("none", "sequence"), ("mask", "token")
AT_EPS: Final = {"numbers": "edge", "ddof": 0, "eps_mode": "threshold", "eps": EDGE}
AT_LOW: Final = {"numbers": "edge", "ddof": 0, "min_std": EDGE}
REAL: Final[tuple[Mapping[str, Any], ...]] = (
    *({"kind": "gae", "tokens": PLAIN, "B": 2, "T": T, "lam": 0.9, "gamma": 0.97} for T in (1025, 8193, 16385)),
    {"kind": "gae", "tokens": PACKED, "B": 3, "T": 8193, "lam_value": 0.5, "bootstrap": True},
    {"kind": "gae", "tokens": MASK, "B": 2, "T": 8193, "whiten": "global", "dones": "after"},
    {"kind": "gae", "tokens": MASK, "B": 65537, "T": 2, "masked_out": "carry"},
    {"kind": "vtrace", "tokens": PLAIN, "B": 2, "T": 8193, "lam": 0.9, "gamma": 0.97, "clips": "differ"},
    {"kind": "retrace", "tokens": MASK, "B": 161, "T": 2049, "lam": 0.9, "gamma": 0.97, "q_values": True},
    {"kind": "returns", "tokens": PACKED, "B": 4097, "T": 33, "gamma": 0.97},
    {"kind": "reinforce_pp", "tokens": PLAIN, "B": 1030, "T": 1024, "gamma": 0.97, "whiten": "global"},
    {"kind": "otb", "tokens": PLAIN, "B": 1025, "T": 33, "groups": "ids"},
    {"kind": "otb", "tokens": MASK, "B": 2, "T": 4097, "groups": "all"},
    *({"kind": "grpo", "tokens": NONE, "B": n, "groups": "all"} for n in (65, 1025, 4097, 65537)),
    *({"kind": "grpo", "tokens": NONE, "B": n, "groups": "ids"} for n in (2049, 4097)),
    {"kind": "grpo", "tokens": NONE, "B": 65537, "groups": "huge ids"},
    {"kind": "rloo", "tokens": ("mask", "sequence"), "B": 4097, "T": 33, "groups": "huge ids", "output": "token"},
    {"kind": "opo", "tokens": ("lengths", "sequence"), "B": 2049, "T": 40000, "groups": "ids"},
    {"kind": "passk", "tokens": NONE, "B": 2049, "groups": "last short"},
    {"kind": "gigpo", "tokens": NONE, "B": 2049, "groups": "ids", "scale": "group"},
    {"kind": "gdpo", "tokens": NONE, "B": 2049, "groups": "ids", "reward_weights": True, "whiten": "global"},
    # A std exactly at the threshold of its factor, and at what counts as low.
    *({"kind": kind, "tokens": NONE, **AT_EPS} for kind in ("grpo", "gdpo", "passk")),
    *({"kind": kind, "tokens": NONE, **AT_LOW} for kind in ("grpo", "gdpo", "passk")),
    {"kind": "rloo", "tokens": NONE, **AT_LOW, "scale": "batch", "low_std": "center"},
    {"kind": "dr_grpo", "tokens": NONE, "B": (1 << 17) + 1, "groups": "all", "whiten": "global"},
)


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """The sizes, and the estimators of frameworks, as far as they are claimed."""
    levels, found = factors(subject), []
    for size in REAL:
        asked = {name: x for name, x in size.items() if name not in {"B", "T"}}
        if all(x in levels[name] for name, x in asked.items()):
            found.append({**size, **{name: True for name, kinds in NEEDED.items() if size["kind"] in kinds}})
    return found + list(_presets(subject, levels))


def _presets(subject: Subject, levels: Mapping[str, Sequence[Any]]) -> list[Mapping[str, Any]]:
    """Each set of arguments once, with groups of different sizes where an estimator takes groups of one."""
    found: dict[str, Mapping[str, Any]] = {}
    for framework, estimators in PRESETS.items():
        for estimator, preset in estimators.items():
            tokens = ("mask", "sequence" if FAMILY[preset.kind] == "group" else "token")
            needed = SPEC.needs(SPEC.record(None, **preset.kwargs))  # type: ignore[arg-type]  # no tensor is looked at
            if not needed <= subject.claims or tokens not in levels["tokens"]:
                continue
            ids = "alone beside others" in levels["groups"] and preset.args.get("singleton") != "error"
            more = {name: True for name, kinds in NEEDED.items() if preset.kind in kinds}
            found.setdefault(
                str(sorted(preset.kwargs.items())),
                {
                    "preset": (framework, estimator), "kind": preset.kind, "tokens": tokens, "B": 12, "whiten": "auto",
                    "groups": "alone beside others" if ids and FAMILY[preset.kind] != "steps" else "2",
                    "numbers": "grid", **more,
                },
            )  # fmt: skip
    return list(found.values())


SPACE = Space("advantage", factors, arguments, expected, TENSORS, RULES, real, constants=True)

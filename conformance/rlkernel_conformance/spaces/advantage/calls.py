"""Arguments of calls of advantage@1.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.spaces.advantage.levels import EDGE, IDS, OPTIONS, WHOLE
from rlkernel_conformance.spaces.space import Given, Point
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_core.spec.advantage_presets import PRESETS

K = 3
RANGE = (-0.25, 1.0)  # of valid rewards, both met exactly
TOKENS = ("rewards", "mask", "values", "q_values", "ratio", "dones", "turns", "logprob", "sum_pi_squared")


def _rewards(point: Point, shape: tuple[int, ...], salt: int) -> Tensor:
    """float64, of which the dtype holds a rounding; halves of them where a dtype has no fractions."""
    g, dtype = point.generator(salt), point["dtype"]
    small = torch.randint(0, 5, shape, generator=g).double()
    if dtype in WHOLE:
        return {"grid": small % 2 if dtype == "bool" else small, "zeros": 0 * small, "equal": 0 * small + 1}[
            point["numbers"]
        ]
    base, step = {"float32": (2.0**17, 1 / 32), "float64": (2.0**30, 1 / 32), "bfloat16": (4096.0, 32.0)}.get(
        dtype, (4096.0, 4.0)
    )
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5], dtype=torch.float64)
    made = {
        "normal": lambda: normal.abs() if point["kind"] == "maxrl" else normal,
        "grid": lambda: small / 4,
        "equal": lambda: 0 * small + (12.3 if point["tokens"][1] == "sequence" else 0.75),
        "zeros": lambda: torch.where(small % 2 == 0, 0.0, -0.0),
        # Two of a group are 2 EDGE apart: its std is EDGE, exactly, with ddof 0. And both ends of the valid range.
        "edge": lambda: (torch.arange(small.numel()).view(shape) % 2) * 2 * EDGE + (small == 0) * (small.numel() % 2),
        "tiny": lambda: small * 2.0**-20,
        "offset": lambda: base + step * small,
        "not finite": lambda: torch.where(normal.abs() > 1.3, odd[small.long() % 4], small / 4),
        "denormal": lambda: small * 1e-40,
    }
    return made[point["numbers"]]()


def _floats(point: Point, shape: tuple[int, ...], salt: int) -> Tensor:
    """float64 of an argument beside the rewards; some are not finite where rewards may be."""
    x = torch.randn(shape, generator=point.generator(salt), dtype=torch.float64)
    if point["numbers"] == "offset":
        x = x + 1000
    if point["numbers"] == "not finite" and salt % 2:
        return torch.where(x > 2.2, torch.inf, torch.where(x < -2.2, torch.nan, x))
    return x


def _bools(point: Point, shape: tuple[int, ...], salt: int, share: float) -> Tensor:
    return torch.rand(shape, generator=point.generator(salt)) < share


def _lengths(point: Point) -> Tensor:
    """Of each sequence; some are empty, and one is whole."""
    lengths = torch.randint(0, point["T"] + 1, (point["B"],), generator=point.generator(1))
    lengths[:1] = point["T"]
    return lengths


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    kind, B, T, (tokens, per) = (point[x] for x in ("kind", "B", "T", "tokens"))
    shape: tuple[int, ...] = (B, T)
    given: Given = {"kind": kind}
    lengths = _lengths(point)
    if tokens.startswith("packed"):
        given["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]) + 2  # tokens of no sequence before
        shape = (int(lengths.sum()) + 5,)  # and behind
    if "mask" in tokens:
        given["mask"] = _bools(point, shape, 2, 0.7)
    if tokens == "lengths":
        given["lengths"] = lengths
    given["rewards"] = _rewards(point, shape if per == "token" else (B, K) if kind == "gdpo" else (B,), 3)
    if kind == "maxrl" and point["numbers"] == "edge":
        given["rewards"] = given["rewards"].abs()
    given |= {"group": _groups(point)} if "group" in KINDS[kind].uses else {}
    given |= _beside(point, shape)
    given |= _chosen(subject, point, shape)
    typed = {name: _typed(point, name, x) for name, x in given.items()}
    if "preset" in point.levels:
        framework, estimator = point["preset"]
        typed |= PRESETS[framework][estimator].args
    return {name: x.to(subject.device) if isinstance(x, Tensor) else x for name, x in _hidden(point, typed).items()}


def _groups(point: Point) -> int | Tensor:
    groups, B = point["groups"], point["B"]
    if groups in IDS:
        return torch.from_numpy(np.asarray(IDS[groups](np.random.default_rng(point.seed), B), np.int64))
    return max(1, B) if groups == "all" else int(groups)


def _beside(point: Point, shape: tuple[int, ...]) -> Given:
    """Tensors beside the rewards."""
    kind, B = point["kind"], (point["B"],)
    given: Given = {}
    if point["values"]:
        given["values"] = _floats(point, shape, 11)
    if point["q_values"]:
        given["q_values"] = _floats(point, shape, 13)
    if kind in {"vtrace", "retrace"}:  # some exactly at a clip
        near = torch.randint(0, 9, shape, generator=point.generator(14)).double() / 4
        given["ratio"] = torch.where(_floats(point, shape, 16) > 1.5, torch.inf, near) if _bad(point) else near
    if point["baseline"]:
        given["baseline"] = _floats(point, B, 15)
    if point["bootstrap"]:
        given["bootstrap"] = _floats(point, B, 17)
    if point["dones"]:
        given |= {"dones": _bools(point, shape, 18, 0.2), "done_index": point["dones"]}
    if point["turns"]:
        most = {"few": 2, "many": 2**40}[point["turns"]]
        ids = torch.randint(-most, most, shape, generator=point.generator(19))
        given["turns"] = torch.where(_bools(point, shape, 20, 0.5), ids, -1)
    if kind == "otb":
        p = torch.randint(1, 41, shape, generator=point.generator(21)).double() / 64
        p = torch.where(p > 0.5, 1.0, p)  # what is certain has no score at all
        given |= {"logprob": p.log(), "sum_pi_squared": p.square() + (1 - p).square() / 2}
    if kind == "gigpo":
        given["step_rewards"] = _rewards(point, B, 22)
        given["anchor"] = torch.randint(-2, 2, B, generator=point.generator(23)) * 61
    if point["reward_weights"]:
        given["reward_weights"] = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    if point["over sequences"] in {"in_stats", "both"}:
        given["in_stats"] = _bools(point, B, 24, 0.7)
    if point["over sequences"] in {"in_loss", "both"}:
        given["in_loss"] = _bools(point, B, 25, 0.7)
    if point["weights"]:
        given["weights"] = torch.randint(0, 4, B, generator=point.generator(26)).double() / 2
    return given


def _bad(point: Point) -> bool:
    return bool(point["numbers"] == "not finite")


def _chosen(subject: Subject, point: Point, shape: tuple[int, ...]) -> Given:
    """Options that are no tensors, and lambdas."""
    simplest = {name: levels[0] for name, levels in OPTIONS.items()}
    plainly = (
        "gamma", "length_adaptive", "step_weight", "scale", "eps", "eps_mode", "ddof", "min_std", "low_std",
        "singleton", "constant", "invalid", "leave_one_out", "masked_time", "masked_out",
    )  # fmt: skip
    given = {
        name: point[name] for name in plainly if point[name] != simplest[name] and name in KINDS[point["kind"]].uses
    }
    for name, salt in (("lam", 31), ("lam_value", 32)):
        of = {"row": (point["B"],), "token": shape}.get(point[name])
        if of is not None:
            given[name] = torch.randint(0, 9, of, generator=point.generator(salt)).double() / 8
        elif point[name] != simplest[name]:
            given[name] = point[name]
    if point["clips"] != "default":
        clips = {"differ": (0.75, 1.25), "none": (None, None)}[point["clips"]]
        given |= {
            n: c for n, c in zip(("ratio_clip", "trace_clip"), clips, strict=True) if n in KINDS[point["kind"]].uses
        }
    given |= {"valid_range": RANGE} if point["valid_range"] else {}
    whitens = point["whiten"] != "auto" or "whiten" in subject.claims
    given |= {"whiten": point["whiten"] if whitens else "none", "output": point["output"]}
    given |= {n: point[n] for n in ("whiten_level", "whiten_ddof", "whiten_eps", "whiten_eps_mode")}
    ambiguous = len(shape) == 1 and shape[0] in {0, point["B"]}
    if point["reward_level"] == "named" or ambiguous:
        given["reward_level"] = point["tokens"][1]
    return given


def _typed(point: Point, name: str, x: Any) -> Any:
    """Floating arguments in the dtype of the rewards, or those beside them in another."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    dtype, other = point["dtype"], point["other dtype"]
    if name != "rewards" and (other != "same" or dtype in WHOLE):
        dtype = "float32" if other == "same" else other
    return x.to(getattr(torch, dtype))


def _hidden(point: Point, given: Given) -> Given:
    """What does not count holds something that would be seen."""
    mask, how = given.get("mask"), point["masked"]
    if "lengths" in given:
        mask = torch.arange(point["T"]) < given["lengths"][:, None]
    if mask is None or how == "zero":
        return given
    held = {"dones": True, "turns": 2**60, "lam": 0.5, "lam_value": 0.5, "logprob": 0.0}
    other = torch.nan if how == "nan" else 6e4

    def hidden(name: str, x: Any) -> Any:
        by_token = isinstance(x, Tensor) and x.shape == mask.shape and name not in {"mask", "group", "anchor"}
        if not by_token or (x.dim() == 1 and name not in TOKENS):
            return x
        if name == "rewards" and not x.is_floating_point():
            return torch.where(mask, x, 1)
        return torch.where(mask, x, torch.nan if how == "nan" and x.is_floating_point() else held.get(name, other))

    return {name: hidden(name, x) for name, x in given.items()}

"""The calls of shape_rewards@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.sequences import MASKED, PACKED, Sequences
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import rewards as definition
from rlkernel_core.spec.shape_rewards import RunningMoments

WAYS = {"mask": "", "none": "", "lengths": "", "nothing": "", **dict.fromkeys(PACKED, "packed")}
# In sixteenths; -2.5 and 2 are the bounds of `clip`.
VALUES: Mapping[str, tuple[float, ...]] = {
    "drawn": (0.5, -1.25, 3.0, 1.0, -4.0, 0.0625, 2.5),
    "at the bounds": (2.0, -2.5, 2.0, 2.0625, -2.5625, -2.5),
    "constant": (1.5,),
    "far": (4096.0, 4097.0, 4099.0, 4096.5),
    "negative zero": (-0.0, 0.0),
    "not finite": (1.0, np.nan, -2.0, np.inf, 0.5, -np.inf, 4.0),
}
# Differences of log-probabilities that lie at the clamps exactly, in nats.
DIFFERENCES = (0.0, 0.25, -0.25, 1.0, -1.0, 1.25, -1.5, 0.5, -0.0)


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "B": (4, 1, 7, 0),
        "T": (6, 1, 24),
        "tokens": claimed(subject, WAYS),
        "level": ("sequence", "token"),
        "values": tuple(VALUES),
        "dtype": (*subject.dtypes, *(("int64",) if subject.takes_any_dtype else ())),
        "clip": claimed(subject, {False: "", True: "clip"}),
        "normalize": claimed(
            subject,
            {
                "none": "",
                "batch": "normalize:batch",
                "running": "normalize:running",
                "running on": "normalize:running",
            },
        ),
        "center": (True, False),
        "ddof": (1, 0, 2),
        "eps": (1e-8, 0.5),
        "overlong": claimed(subject, {"": "", "capped": "overlong", "on": "overlong", "factor 0": "overlong"}),
        "kl": claimed(subject, {"none": "", **{k: f"kl:{k}" for k in ("k1", "abs", "k2", "k3")}}),
        "input clamp": (None, 1.0),
        "clamp": (None, 0.25),
        "output": ("auto", "token"),
    }


TOKENLESS = ("none", "lengths", "packed", "packed tail")  # that say nothing of the number of tokens
RULES = (
    Rule(("tokens", "level"), lambda tokens, level: level == "sequence" or tokens != "lengths"),
    Rule(("level", "clip"), lambda level, clip: level == "sequence" or not clip),
    Rule(("level", "normalize"), lambda level, normalize: level == "sequence" or normalize == "none"),
    Rule(("level", "overlong"), lambda level, overlong: level == "sequence" or not overlong),
    Rule(("level", "B"), lambda level, B: level == "sequence" or B > 1),
    Rule(("tokens", "overlong"), lambda tokens, overlong: not overlong or tokens != "none"),
    Rule(
        ("tokens", "level", "output", "kl"),
        lambda tokens, level, output, kl: (
            tokens not in TOKENLESS or level == "token" or output == "auto" or kl != "none"
        ),
    ),
    Rule(("normalize", "center"), lambda normalize, center: normalize != "none" or center),
    Rule(("normalize", "ddof"), lambda normalize, ddof: normalize != "none" or ddof == 1),
    Rule(("normalize", "eps"), lambda normalize, eps: normalize != "none" or eps == 1e-8),
    Rule(("kl", "input clamp"), lambda kl, clamp: kl != "none" or clamp is None),
    Rule(("kl", "clamp"), lambda kl, clamp: kl != "none" or clamp is None),
    Rule(("level", "dtype"), lambda level, dtype: level == "sequence" or dtype != "int64"),
)


def sequences_of(point: Point) -> Sequences:
    """Which tokens there are."""
    how = point["tokens"] if point["tokens"] != "none" else "full"
    return Sequences.draw(point["B"], point["T"], how, point.generator(1))


def _cycled(values: Sequence[float], shape: tuple[int, ...], start: int) -> Tensor:
    table = torch.tensor(values, dtype=torch.float64)
    return table[(torch.arange(int(np.prod(shape, dtype=np.int64))) + start) % len(table)].view(shape)


def arguments(subject: Subject, point: Point) -> Given:
    """The call; log-probabilities of what does not count are NaN."""
    s, dtype = sequences_of(point), getattr(torch, point["dtype"])
    floating = dtype if dtype.is_floating_point else torch.float32
    unused = torch.from_numpy(~s.valid).view(s.shape)
    by_token = point["level"] == "token"
    x = _cycled(VALUES[point["values"]], s.shape if by_token else (point["B"],), point.seed)
    x = x.masked_fill(unused, torch.nan) if by_token else x
    given: Given = {"rewards": x.to(dtype) if dtype.is_floating_point else x.nan_to_num(0, 1, -1).to(dtype)}
    given |= {name: t.clone() for name, t in s.given.items()} if point["tokens"] != "none" else {}
    if by_token and "mask" not in given and point["tokens"] == "none":
        given["mask"] = torch.ones(s.shape, dtype=torch.bool)
    given |= {"output": point["output"]} if point["output"] != "auto" else {}
    given |= {"clip": (-2.5, 2.0)} if point["clip"] else {}
    if point["normalize"] != "none":
        given |= {"normalize": point["normalize"].partition(" ")[0]}
        given |= {n: point[n] for n in ("center", "ddof", "eps")}
    if point["normalize"] == "running on":
        given["running"] = RunningMoments(*(torch.tensor(v, dtype=torch.float64) for v in (6.0, 0.75, 4.5)))
    if point["overlong"]:
        given |= {"max_length": 3, "overlong_buffer": 2, "overlong_factor": 0.0 if "0" in point["overlong"] else 0.5}
        given["overlong_cap"] = point["overlong"] == "capped"
    if point["kl"] != "none":
        d = _cycled(DIFFERENCES, s.shape, point.seed)
        reference = -2.0 - _cycled((0.0, 0.25, 1.0, 3.0), s.shape, 0)
        pair = {"logprob": reference + d, "ref_logprob": reference}
        given |= {n: v.masked_fill(unused, torch.nan).to(floating) for n, v in pair.items()}
        given |= {
            "kl": point["kl"],
            "kl_coef": 0.25,
            "kl_input_clamp": point["input clamp"],
            "kl_clamp": point["clamp"],
        }
    return _moved(given, subject.device)


def _moved(given: Given, device: str) -> Given:
    def to(x: Any) -> Any:
        return RunningMoments(*(t.to(device) for t in (x.count, x.mean, x.m2))) if isinstance(x, RunningMoments) else x

    return {n: x.to(device) if isinstance(x, Tensor) else to(x) for n, x in given.items()}


def expected(subject: Subject, point: Point, given: Given, _: Mapping[str, Any]) -> dict[str, Want]:
    """Rewards, the KL, the penalty and the running state."""
    s = sequences_of(point)
    floats = {str(x.dtype).removeprefix("torch.") for x in given.values() if isinstance(x, Tensor)}
    stored = "float64" if "float64" in floats & {"float64"} and _wide(given) else "float32"
    dtype = stored if stored == "float64" else "float32"

    def near(values: Any, scale: Any = 1.0) -> Want:
        return Want.near(subject, "rewards", dtype, values, scale=scale, stored=stored)

    r, valid = plain(given["rewards"], "rewards").astype(np.float64), s.valid
    found: dict[str, Want] = {}
    size: Any = 1.0
    by_token = point["level"] == "token"
    if by_token:
        r = np.where(valid, r.reshape(-1), 0.0)
    else:
        r, size, more = _per_sequence(point, given, r, s)
        found |= {n: near(v, k) for n, (v, k) in more.items()}
    if not by_token and point["kl"] == "none" and point["output"] == "auto":
        return found | {"rewards": near(r, size)}
    if not by_token:
        last = [at[s.valid[at]][-1:] for at in s.rows]
        spread, sizes = np.zeros(s.tokens), np.ones(s.tokens)
        for i, at in enumerate(last):
            spread[at], sizes[at] = r[i], np.broadcast_to(size, r.shape)[i]
        r, size = spread, sizes
    if point["kl"] != "none":
        lp, ref = (np.where(valid, plain(given[n], n).reshape(-1), 0.0) for n in ("logprob", "ref_logprob"))
        estimate = definition.kl(lp - ref, point["kl"], point["input clamp"], point["clamp"])
        estimate = np.where(valid, estimate, 0.0)
        r = r - 0.25 * estimate
        total = np.array([estimate[at].sum() for at in s.rows]).reshape(-1)
        found["kl"] = near(total, np.maximum(1.0, np.array([np.abs(estimate[at]).sum() for at in s.rows]).reshape(-1)))
    size = np.broadcast_to(np.maximum(1.0, size), r.shape)
    return found | {"rewards": near(r.reshape(s.shape), size.reshape(s.shape))}


def _wide(given: Given) -> bool:
    """Whether any of what is added up is float64."""
    names = ("rewards", "logprob", "ref_logprob")
    return any(given[n].dtype == torch.float64 for n in names if n in given)


def _per_sequence(point: Point, given: Given, x: Any, s: Sequences) -> tuple[Any, Any, dict[str, tuple[Any, Any]]]:
    """Clipped, normalized and penalized rewards, what their rounding is relative to, and what else is returned."""
    more: dict[str, tuple[Any, Any]] = {}
    x = np.where(np.isfinite(x), np.clip(x, *given["clip"]), x) if "clip" in given else x
    size = np.maximum(1.0, np.abs(np.where(np.isfinite(x), x, 0.0)))
    if point["normalize"] != "none":
        n, mean, m2 = _moments(x)
        if "running" in given:
            n, mean, m2 = _merged((n, mean, m2), tuple(float(v) for v in vars(given["running"]).values()))
        if point["normalize"] != "batch":
            most = max(1.0, abs(mean))
            more = {"running.count": (n, 1.0), "running.mean": (mean, most), "running.m2": (m2, max(1.0, m2))}
        var = m2 / (n - given["ddof"]) if n > given["ddof"] else 0.0
        rstd = definition.rstd(var, given["eps"])
        with np.errstate(invalid="ignore"):
            x = (x - mean * given["center"]) * rstd
        size = np.maximum(1.0, size.max(initial=0.0) * rstd)
    if point["overlong"]:
        lengths = np.array([s.valid[at].sum() if "mask" in given else len(at) for at in s.rows], float).reshape(-1)
        lengths = plain(given["lengths"], "lengths").astype(float) if "lengths" in given else lengths
        numbers = (given[n] for n in ("max_length", "overlong_buffer", "overlong_factor", "overlong_cap"))
        penalty = definition.overlong(lengths, *numbers)
        more["penalty"] = (penalty, 1.0)
        x = x + penalty
    return x, size, more


def _moments(x: Any) -> tuple[float, float, float]:
    x = x[np.isfinite(x)]
    return (len(x), x.mean(), ((x - x.mean()) ** 2).sum()) if len(x) else (0.0, 0.0, 0.0)


def _merged(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, float, float]:
    """Count, mean and squared deviations of two sets together (Chan, Golub and LeVeque 1979)."""
    n = a[0] + b[0]
    if not n:
        return 0.0, 0.0, 0.0
    d = b[1] - a[1]
    return n, a[1] + d * b[0] / n, a[2] + b[2] + d * d * a[0] * b[0] / n


INTEGERS = ("int64", "int32", "int16")
STATE = Rule(("normalize",), lambda n: n == "running on")
KL = Rule(("kl",), lambda kl: kl != "none")
SPACE = Space(
    "shape_rewards",
    factors,
    arguments,
    expected,
    {
        "rewards": Argument(SAME_VALUES),
        "mask": Argument(SAME_VALUES, given=Rule(("tokens",), lambda t: t in MASKED)),
        "lengths": Argument(SAME_VALUES, INTEGERS, Rule(("tokens",), lambda t: t == "lengths")),
        "cu_seqlens": Argument(SAME_VALUES, INTEGERS, Rule(("tokens",), lambda t: t in PACKED)),
        "logprob": Argument(SAME_VALUES, ("", "float32", "bfloat16"), KL),
        "ref_logprob": Argument(SAME_VALUES, ("", "float32", "bfloat16"), KL),
        "running.count": Argument(("contiguous",), ("float64", "float32", "int64"), STATE),
        "running.mean": Argument(("contiguous",), ("float64", "float32"), STATE),
        "running.m2": Argument(("contiguous",), ("float64", "float32"), STATE),
    },
    RULES,
    lambda subject: [
        {"B": B, "T": T, "tokens": "lengths", "kl": "k1"}
        for B, T in ((4099, 2), (65_537, 1), (2, 16_385))
        if "kl:k1" in subject.claims
    ],
    constants=True,
)

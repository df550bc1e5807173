"""The calls of policy_loss@1, and the arguments that linear_policy_loss@1 shares with it.

Log-probabilities and advantages lie on a grid that every dtype holds, their differences too, and bounds lie between the
grid's points or exactly on them: what is clipped, held or rejected does not depend on rounding.

Legend: B sequences · T padded length · N packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.policy_loss_batches import OPTIONS, kind_levels
from rlkernel_conformance.clauses.policy_loss_batches import claimed as variants
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.policy_loss_answers import expected
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.policy_loss import KINDS, Correction, GammaGate, Rejection

Levels = Mapping[str, Sequence[Any]]
INF: Final = math.inf
CORRECTIONS: Final[Mapping[str, Correction]] = {
    "truncated tokens": Correction("token", "truncate", high=1.2),
    "masked tokens at a bound": Correction("token", "mask", low=1.0, high=1.4),
    "truncated sequences": Correction("sequence", "truncate", low=0.8, high=1.3),
    "masked sequences at a bound": Correction("sequence", "mask", high=1.0),
    "truncated means": Correction("geometric", "truncate", high=1.12),
    "masked means": Correction("geometric", "mask", low=0.9),
    "normalized tokens": Correction("token", "truncate", low=0.3, high=1.2, normalize=True),
    "normalized masked tokens": Correction("token", "mask", low=0.7, high=1.4, normalize=True),
    "normalized sequences": Correction("sequence", "truncate", low=0.2, high=2.0, normalize=True),
}
REJECTIONS: Final[Mapping[str, Rejection]] = {
    "k1 tokens at bounds": Rejection("k1", "token", low=1.0, high=1.3),
    "k1 sequences at a bound": Rejection("k1", "sequence", high=1.0),
    "k1 means": Rejection("k1", "geometric", low=0.91, high=1.12),
    "k1 veto": Rejection("k1", "any", low=0.55),
    "k2 tokens at a bound": Rejection("k2", "token", high=0.125),
    "k2 sequences": Rejection("k2", "sequence", high=0.3),
    "k2 veto at a bound": Rejection("k2", "any", high=0.125),
    "k3 means": Rejection("k3", "geometric", high=0.08),
    "k3 veto": Rejection("k3", "any", high=0.2),
}
# Bounds of the ratio by surrogate, where it has some: "zero" lies on ratio 1, "open" is none on one side.
BOUNDS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "clip": {"other": {"clip": (0.05, 0.3)}, "zero": {"clip": (0.0, 0.0)}, "open": {"clip": (INF, 0.1)}},
    "cispo": {"other": {"clip": (0.1, 0.3)}, "zero": {"clip": (0.0, 0.0)}, "open": {"clip": (0.1, INF)}},
    "gmpo": {"other": {"clip": (0.1, 0.3)}, "zero": {"clip": (0.25, 0.25)}, "open": {"clip": (INF, 0.1)}},
    "dppo_tv": {"other": {"clip": (0.01, 0.1)}, "zero": {"clip": (0.0, 0.0)}, "open": {"clip": (INF, 0.05)}},
    "dppo_kl": {"other": {"clip": (0.1, 0.01)}, "zero": {"clip": (0.0, 0.0)}, "open": {"clip": (0.01, INF)}},
    "sapo": {"other": {"tau": (2.0, 0.5)}},
    "vespo": {"other": {"gamma": GammaGate(1.0, 2.0, 1.5, 0.5)}},
    "dro": {"other": {"dro_beta": 2.0}},
    "reinforce": {},
}
MEANS: Final = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
HORIZON: Final = 7.0
CLAMP: Final = (0.5, 0.15)  # of low_var: log-ratios on the grid meet the first exactly


def surrogate_of(loss: tuple[str, str]) -> str:
    """Of a kind at a level."""
    return KINDS[loss[0]].surrogate


def loss_factors(subject: Subject) -> Levels:
    """Options of the loss, of what is claimed."""
    ways = variants(subject, "aggregate:")
    kinds = kind_levels(subject)
    own = ("own",) if all(KINDS[k].aggregate in ways for k, _ in kinds) else ()
    entropy = dict.fromkeys((0.125, -0.25, "tensor"), "entropy")
    rollout = "rollout" in subject.claims
    return {
        "loss": tuple(kinds),
        "aggregate": (*ways, *own),
        "bounds": ("usual", "other", "zero", "open"),
        "dual clip": claimed(subject, {None: "", 1.125: "dual_clip", 3.0: "dual_clip"}),
        "limit": (None, 0.5, INF),
        "ratio cap": (None, 1.125),
        "denominator": (None, 3.0, "tensor"),
        "horizon": ("given", "T"),
        "empty sequences": claimed(subject, {"left out": "", "counted": "count_empty"}),
        "kl": claimed(subject, {"": "", **{kl: f"kl:{kl}" for kl in variants(subject, "kl:")}}),
        "kl coefficient": (0.25, -0.5, "tensor"),
        "kl clamp": (None, CLAMP),
        "kl importance": claimed(subject, {False: "", True: "kl_importance"}),
        "entropy": claimed(subject, {None: "", **entropy}),
        "entropy aggregate": claimed(subject, {None: "", **dict.fromkeys(ways, "entropy_aggregate")}),
        "entropy denominator": (None, 5.0, "tensor"),
        "old": claimed(subject, {"given": "", "": "on_policy"}),
        "rollout": claimed(subject, {"": "", "given": "rollout", "some missing": "rollout", "missing": "rollout"}),
        "correction": claimed(subject, {"": "", **(dict.fromkeys(CORRECTIONS, "correction") if rollout else {})}),
        "rejection": claimed(subject, {"": "", **(dict.fromkeys(REJECTIONS, "rejection") if rollout else {})}),
        "form": claimed(subject, {"padded": "", "bag": "", "packed": "packed", "packed with a tail": "packed"}),
        "size": ((3, 5), (1, 1), (2, 9), (6, 2), (0, 4), (3, 0)),
        "mask": claimed(subject, {"": "", "some": "mask", "an empty sequence": "mask", "none": "mask"}),
        "values": ("near", "at bounds", "far"),
        "advantages": ("a sequence", "a token", "a column"),
        "advantage": ("odd", "zeros", "large", "equal"),
    }


def aggregate_of(loss: tuple[str, str], aggregate: str) -> str:
    """The aggregation that is meant."""
    return KINDS[loss[0]].aggregate if aggregate == "own" else aggregate


def _takes(loss: tuple[str, str], correction: str) -> bool:
    """Whether a kind has a meaning for a correction."""
    rule = CORRECTIONS.get(correction)
    if rule is None:
        return True
    if loss[0] == "vespo":
        return rule.level == "token" and not rule.normalize
    return loss[0] != "gmpo" or rule.level != "token"


def _fits_a_bag(form: str, loss: tuple[str, str], aggregate: str) -> bool:
    return form != "bag" or (loss[1] == "token" and not aggregate_of(loss, aggregate).startswith("seq_"))


def _norm(aggregate: str) -> bool:
    return aggregate == "seq_mean_token_sum_norm"


# No token at all.
MASKING: Final = {"size": ((0, 4), (3, 0)), "mask": ("none",)}
LOSS_RULES: Final = (
    Rule(("loss", "bounds"), lambda loss, bounds: bounds == "usual" or bounds in BOUNDS[surrogate_of(loss)]),
    Rule(("loss", "dual clip"), lambda loss, c: c is None or surrogate_of(loss) == "clip"),
    Rule(("loss", "limit"), lambda loss, x: x is None or "log_ratio_limit" in KINDS[loss[0]].options),
    Rule(("loss", "ratio cap"), lambda loss, x: x is None or "ratio_cap" in KINDS[loss[0]].options),
    Rule(("loss", "correction"), _takes),
    Rule(("correction", "rollout"), lambda rule, rollout: not rule or bool(rollout)),
    Rule(("rejection", "rollout"), lambda rule, rollout: not rule or bool(rollout)),
    Rule(("loss", "aggregate", "denominator"), lambda k, a, x: x is None or aggregate_of(k, a) != "token_sum"),
    Rule(
        ("loss", "aggregate", "denominator", "empty sequences"),
        lambda k, a, x, empty: empty == "left out" or (x is None and aggregate_of(k, a).startswith("seq_")),
    ),
    Rule(
        ("loss", "aggregate", "entropy aggregate", "form", "horizon"),
        lambda k, a, e, form, h: h == "given" or (form == "padded" and (_norm(aggregate_of(k, a)) or _norm(e))),
    ),
    Rule(("kl", "kl coefficient"), lambda kl, c: bool(kl) or c == 0.25),
    Rule(("kl", "kl clamp"), lambda kl, c: c is None or kl.startswith("low_var")),
    Rule(("kl", "kl importance"), lambda kl, on: bool(kl) or not on),
    Rule(("entropy", "entropy aggregate"), lambda h, way: h is not None or way is None),
    Rule(("entropy aggregate", "entropy denominator"), lambda way, x: x is None or way in MEANS),
    # Tokens of no known sequence.
    Rule(("form", "loss", "aggregate"), _fits_a_bag),
    Rule(("form", "entropy aggregate"), lambda form, way: form != "bag" or not (way or "").startswith("seq_")),
    Rule(("form", "correction"), lambda form, c: form != "bag" or not c or CORRECTIONS[c].level == "token"),
    Rule(("form", "rejection"), lambda form, r: form != "bag" or not r or REJECTIONS[r].level == "token"),
    Rule(("form", "advantages"), lambda form, how: form != "bag" or how == "a token"),
    # Far from the old policy a divergence on a bound of 0 depends on rounding.
    Rule(("loss", "bounds", "values"), lambda k, b, v: (b, v) != ("zero", "far") or not k[0].startswith("dppo")),
)


def loss_options(point: Point, device: str) -> dict[str, Any]:
    """Keyword arguments of the loss that are no tensors of tokens."""
    (kind, level), aggregate, bounds = point["loss"], point["aggregate"], point["bounds"]
    out: dict[str, Any] = {"kind": kind, "level": level}
    out |= OPTIONS.get(kind, {}) if bounds == "usual" else BOUNDS[KINDS[kind].surrogate][bounds]
    out["aggregate"] = None if aggregate == "own" else aggregate
    out["dual_clip"], out["log_ratio_limit"], out["ratio_cap"] = point["dual clip"], point["limit"], point["ratio cap"]
    out["denominator"] = _scalar(point["denominator"], 4.0, device)
    out["entropy_aggregate"] = point["entropy aggregate"]
    out["entropy_denominator"] = _scalar(point["entropy denominator"], 6.0, device)
    ways = (aggregate_of(point["loss"], aggregate), point["entropy aggregate"])
    out["horizon"] = HORIZON if any(map(_norm, ways)) and point["horizon"] == "given" else None
    out["count_empty"] = point["empty sequences"] == "counted"
    if point["kl"]:
        out |= {"kl": point["kl"], "kl_coef": _scalar(point["kl coefficient"], 0.25, device)}
        out |= {"kl_clamp": point["kl clamp"], "kl_importance": point["kl importance"]}
    if point["entropy"] is not None:
        out["entropy_coef"] = _scalar(point["entropy"], 0.125, device)
    out["correction"] = CORRECTIONS.get(point["correction"])
    out["rejection"] = REJECTIONS.get(point["rejection"])
    return {name: value for name, value in out.items() if value is not None}


def _scalar(level: Any, number: float, device: str) -> Any:
    return torch.tensor(number, device=device) if level == "tensor" else level


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch as they stand in arguments, and the numbers of one of their copies."""

    mask: Any  # [B, T] bool: what counts
    length: Any  # [B] tokens of each sequence, where packed
    packed: bool
    tail: int  # tokens of no sequence
    copies: tuple[int, int] = (1, 1)  # of all sequences, and of the tokens in each

    @classmethod
    def of(cls, point: Point, *, padded: bool = False) -> Tokens:
        """Those of a point."""
        g, form = np.random.default_rng(point.seed), point["form"]
        B, T = point["size"]
        mask = g.random((B, T)) < {"": 2.0, "none": 0.0}.get(point["mask"], 0.7)
        if point["mask"] not in {"", "none"}:
            mask[:, :1] = True
        if point["mask"] == "an empty sequence":
            mask[B // 2 : B // 2 + 1] = False
        packed = form != "padded" and not padded
        copies = point.levels.get("copies", (1, 1))
        length = np.full(B, T)
        if form.startswith("packed") and copies == (1, 1):
            length = np.array([T, max(T - 2, 0), 0, T, 1, T][:B], int).clip(max=T)
        return cls(mask, length, packed, 3 if form.endswith("tail") else 0, copies)

    def stored(self, values: Any, fill: float = np.nan) -> Any:
        """Numbers [B, T] as the call has them: all copies, packed end to end."""
        rows, tokens = self.copies
        values = np.tile(values, (rows, tokens))
        if not self.packed:
            return values
        length = np.tile(self.length * tokens, rows)
        inside = np.arange(values.shape[1]) < length[:, None]
        return np.concatenate([values[inside], np.full(self.tail, fill).astype(values.dtype)])

    @property
    def starts(self) -> Any:
        """[B + 1] where sequences begin."""
        return np.cumsum([0, *np.tile(self.length * self.copies[1], self.copies[0])])


def values_of(point: Point, tokens: Tokens) -> dict[str, Any]:
    """logprob, old_logprob, ref_logprob, rollout_logprob and entropy [B, T], advantages [B] or [B, T], on the grid."""
    g, shape, how = np.random.default_rng(point.seed + 1), tokens.mask.shape, point["values"]

    def near(x: Any, spread: float, odd: int) -> Any:
        return (np.clip(np.round(64 * (x + spread * g.standard_normal(shape))), -125, -1) * 2 + odd) / 128

    if how == "near":
        lp = -g.integers(1, 121, shape) / 64
        old, ref, roll = near(lp, 0.4, 0), near(lp, 0.5, 1), near(lp, 0.4, 1)
    else:
        steps = np.array((0, 0.5, -0.5, 0.25, -0.25, 0) if how == "at bounds" else (25, -25, 21, -30, 0, 1))
        lp = -g.integers(2, 6, shape) / 4 if how == "at bounds" else -g.integers(31, 60, shape).astype(float)
        old, ref = lp - g.choice(steps, shape), lp - g.choice(steps, shape)
        if point.seed % 3 == 0:  # a sequence at one distance, so that its mean is a step too
            old = lp - g.choice(steps, (shape[0], 1))
        roll = (lp if not point["old"] else old) - g.choice(steps, shape)
        ref, roll = np.minimum(ref, 0), np.minimum(roll, 0)
        old = np.minimum(old, 0)
    entropy = g.integers(0, 128, shape) / 64
    adv = (g.integers(-32, 32, shape if point["advantages"] == "a token" else shape[:1]) * 2 + 1) / 32
    if point["advantage"] == "zeros":
        adv = np.where(g.random(adv.shape) < 0.5, np.where(g.random(adv.shape) < 0.5, 0.0, -0.0), adv)
    elif point["advantage"] == "equal":
        adv = np.full(adv.shape, (-1.0, 1.0)[point.seed % 2])
    adv = 4096 * adv if point["advantage"] == "large" else adv
    if point["rollout"].endswith("missing"):
        roll = np.where(g.random(shape) < (0.4 if point["rollout"].startswith("some") else 2.0), np.nan, roll)
    found = {"logprob": lp, "old_logprob": old, "ref_logprob": ref, "rollout_logprob": roll, "entropy": entropy}
    return {**found, "advantages": adv}


def loss_tensors(point: Point, tokens: Tokens, dtype: str, device: str) -> Given:
    """The tensors of tokens, what a mask hides filled with anything; old_logprob always."""
    x = values_of(point, tokens)
    expanded = any(x == "expanded" for name, x in point.levels.items() if name.startswith("layout of"))
    if not expanded:  # else the first sequence stands for all, where others hide nothing
        for i, name in enumerate(x):
            poison = (np.nan, np.inf, -np.inf, 30000.0)[(point.seed + i) % 4]
            x[name] = np.where(tokens.mask, x[name], poison) if x[name].ndim == 2 else x[name]
    if x["advantages"].ndim == 1:
        x["advantages"] = np.tile(x["advantages"], tokens.copies[0])
        if tokens.packed or point["advantages"] == "a column":
            x["advantages"] = x["advantages"][:, None]
    else:
        x["advantages"] = tokens.stored(x["advantages"])
    used = {"logprob": True, "ref_logprob": point["kl"], "rollout_logprob": point["rollout"]}
    used |= {"old_logprob": point["old"], "entropy": point["entropy"] is not None, "advantages": True}
    given: Given = {"old_logprob": None}
    for name, values in x.items():
        if used[name]:
            stored = values if name == "advantages" else tokens.stored(values)
            given[name] = torch.tensor(stored, dtype=getattr(torch, dtype)).to(device)
    if point["mask"]:
        given["mask"] = torch.tensor(tokens.stored(tokens.mask, fill=1.0), dtype=torch.bool).to(device)
    if point["form"].startswith("packed"):
        given["cu_seqlens"] = torch.tensor(tokens.starts).to(device)
    return given


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    tensors = loss_tensors(point, Tokens.of(point), point["dtype"], subject.device)
    return {**tensors, **loss_options(point, subject.device)}


FLOATS: Final = ("", "float32", "float64", "bfloat16", "float16")
SCALARS: Final = ("float32", "float64", "bfloat16", "int64", "int32")
IS_TENSOR: Final = "tensor"
LOSS_TENSORS: Final = {
    "old_logprob": Argument(dtypes=FLOATS, given=Rule(("old",), bool)),
    "advantages": Argument(dtypes=FLOATS),
    "mask": Argument(given=Rule(("mask",), bool)),
    "cu_seqlens": Argument(SAME_VALUES, ("int64", "int32"), Rule(("form",), lambda form: form.startswith("packed"))),
    "ref_logprob": Argument(dtypes=FLOATS, given=Rule(("kl",), bool)),
    "rollout_logprob": Argument(dtypes=FLOATS, given=Rule(("rollout",), bool)),
    "denominator": Argument(("contiguous",), SCALARS, Rule(("denominator",), lambda x: x == IS_TENSOR)),
    "entropy_denominator": Argument(("contiguous",), SCALARS, Rule(("entropy denominator",), lambda x: x == IS_TENSOR)),
    "kl_coef": Argument(("contiguous",), SCALARS[:3], Rule(("kl coefficient",), lambda x: x == IS_TENSOR)),
    "entropy_coef": Argument(("contiguous",), SCALARS[:3], Rule(("entropy",), lambda x: x == IS_TENSOR)),
}


def factors(subject: Subject) -> Levels:
    """Those of the loss, and the dtype of log-probabilities."""
    return {**loss_factors(subject), "dtype": subject.dtypes}


def real(subject: Subject) -> Sequence[Mapping[str, Any]]:
    """More than 4096 and than 65536 sequences, more than 8192 and than 2^20 tokens; padded and packed."""
    kinds, ways = kind_levels(subject), variants(subject, "aggregate:")
    sizes = [((7, 3), (601, 1)), ((7, 2), (9371, 1)), ((3, 5), (1, 1733)), ((3, 5), (1, 70001))]
    chosen = [next((k for k in kinds if k[1] == level and k[0] != "vespo"), None) for level in ("token", "sequence")]
    forms = ["padded", *(["packed"] if "packed" in subject.claims else [])]
    more = {"kl": "k3"} if "kl:k3" in subject.claims else {}
    more |= {"upstream": "normal"} if "grad" in subject.claims else {}
    return [
        {"loss": loss, "aggregate": ways[i % len(ways)], "size": size, "copies": copies, "form": form, **more}
        for i, (size, copies) in enumerate(sizes)
        for loss in chosen
        for form in forms
        if loss is not None
    ]


SPACE = Space(
    "policy_loss",
    factors,
    arguments,
    expected,
    {
        "logprob": Argument(),
        **LOSS_TENSORS,
        "entropy": Argument(dtypes=FLOATS, given=Rule(("entropy",), lambda h: h is not None)),
    },
    LOSS_RULES,
    real,
    masking=MASKING,
    smooth=False,
)

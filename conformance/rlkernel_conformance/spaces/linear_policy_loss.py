"""The calls of linear_policy_loss@1: those of policy_loss@1 behind a head.

Log-ratios are taken around the head's own log-probabilities and stay away from every bound, so that what is clipped
or rejected does not depend on the rounding of a log-probability. Values exactly at bounds: policy_loss.

Legend: B sequences · T padded length · N tokens · D hidden · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.linear_policy_loss_steps import WIDE
from rlkernel_conformance.clauses.policy_loss_batches import claimed as variants
from rlkernel_conformance.clauses.policy_loss_batches import kind_levels
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces import heads, logprob
from rlkernel_conformance.spaces import policy_loss as loss
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.policy_loss_answers import Calls, Expected
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.policy_loss import Correction, Rejection

# None of them has a bound at ratio 1, where a log-ratio of 0 would decide by its rounding.
CORRECTIONS: Final[Mapping[str, Correction]] = {
    name: rule for name, rule in loss.CORRECTIONS.items() if "bound" not in name
}
REJECTIONS: Final[Mapping[str, Rejection]] = {
    name: rule for name, rule in loss.REJECTIONS.items() if "bound" not in name
}
PER_ROW: Final = logprob.PER_ROW


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Those of the loss and of the head."""
    found = dict(loss.loss_factors(subject))
    del found["values"]
    found["bounds"] = ("usual", "other")
    found["limit"] = (None, 0.3)
    found["entropy"] = claimed(subject, {None: "", **dict.fromkeys((0.125, "tensor"), "entropy")})
    rollout = "rollout" in subject.claims
    found["correction"] = claimed(subject, {"": "", **(dict.fromkeys(CORRECTIONS, "correction") if rollout else {})})
    found["rejection"] = claimed(subject, {"": "", **(dict.fromkeys(REJECTIONS, "rejection") if rollout else {})})
    head = {**heads.head_factors(subject), "D": (8, 1, 5), "V": (33, 2, 130), "hidden": ("normal",)}
    temperature = claimed(subject, {"1": "", "0.7": "", **dict.fromkeys(("rows", "number"), "per_row_temperature")})
    support = claimed(subject, {"": "", "ragged": "support", "all": "support"})
    return {**found, **head, "temperature": temperature, "support": support}


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    tokens = loss.Tokens.of(point)
    rows = tokens.stored(tokens.mask).shape
    n, g = math.prod(rows), np.random.default_rng(point.seed + 2)
    given = heads.head_of(subject, point, n)
    given["ids"] = logprob.ids_of(Point(point.seed, {"ids": "inside"}), rows, point["V"], heads.forbidden(given, n))
    given["temperature"] = logprob.temperature_of(point, rows, "cpu")
    if point["support"]:
        given["support"] = logprob.support_of(point, n, point["V"], "cpu")
    shape = Point(point.seed, {**point.levels, "values": "near", "layout of hidden": "expanded"})
    others = loss.loss_tensors(shape, tokens, "float32", "cpu")
    lp = _law(point, given).row.logprob.reshape(rows)
    gaps = {"old_logprob": (0, 32), "ref_logprob": (1, 64), "rollout_logprob": (1, 64)}
    before = lp
    for name, (odd, unit) in gaps.items():
        if others.get(name) is None:
            continue
        gap = (g.integers(-10, 11, rows) * (1 + odd) + odd) / unit
        values = before + np.where(before + gap > 0, -gap, gap)
        unknown = others[name].isnan().numpy() if name == "rollout_logprob" else np.zeros(rows, bool)
        wide = torch.float64 if heads.result_dtype(given) == "float64" else torch.float32
        others[name] = torch.from_numpy(np.where(unknown, np.nan, values)).to(wide)
        before = others[name].double().numpy() if name == "old_logprob" else lp if not point["old"] else before
    others.pop("logprob")
    others.pop("entropy", None)
    expanded = any(x == "expanded" for f, x in point.levels.items() if f.startswith("layout of"))
    if not expanded:
        counted = torch.from_numpy(tokens.stored(tokens.mask, fill=1.0).reshape(-1).astype(bool))
        given["hidden"] = heads.poisoned(given["hidden"], counted, point.seed)
    given["hidden"] = heads.rows_of(rows, given["hidden"])
    given |= others | _options(point)
    given |= {"entropy": True} if point["entropy"] is not None else {}
    return _on(subject.device, given)


def _on(device: str, given: Given) -> Given:
    support = given.get("support")
    if support is not None:
        given["support"] = type(support)(support.ids.to(device), support.offsets.to(device))
    return {n: x.to(device) if torch.is_tensor(x) else x for n, x in given.items()}


def _options(point: Point) -> dict[str, Any]:
    found = loss.loss_options(point, "cpu")
    if point["loss"][0] in WIDE:  # no divergence comes near these
        found |= WIDE[point["loss"][0]]
    return found


def _law(point: Point, given: Given, upstream: Mapping[str, Any] = {}) -> logprob.Law:
    """The law of every row [N], masked or not, of the operands as they are stored."""
    ids = given["ids"]
    counted = np.isfinite(plain(given["hidden"], "hidden")).all(-1).reshape(-1)
    x = heads.logits_of(given, counted)
    call = {n: v for n, v in given.items() if n != "mask"}
    return logprob.Law.of(x, call, tuple(ids.shape), upstream)


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """Loss, statistics, log-probabilities and entropies, and the gradients of the operands."""
    law, shape = _law(point, given), tuple(given["ids"].shape)
    dtype = heads.coarsest(given["hidden"], given["weight"])
    made = {"logprob": torch.from_numpy(law.row.logprob.reshape(shape)), "mask": _counted(given)}
    if given.get("entropy"):
        made["entropy"] = torch.from_numpy(law.row.entropy.reshape(shape))
    call = Calls({**given, **made}, (1, 1))
    if not given.get("entropy"):
        call.given.pop("entropy", None)
    want = call.expected(gradients=bool(upstream))
    stored, size = heads.result_dtype(given), _size(call, want)
    atol, rtol = subject.tolerance("loss", dtype)
    found = {"loss": Want(want.loss.value, (atol + rtol) * (1 + 4 * size), stored)}
    for name, value in want.stats.items():
        whole = name in {"tokens", "sequences"}
        most = max(2.0, want.scales.get(name, 0.0)) if name != "policy_loss" else (1 + 4 * size) / 4
        near = Want.near(subject, "stats", dtype, value, scale=4 * most, stored=stored)
        found[f"stats.{name}"] = Want(value, 0.0, "int64") if whole else near
    if len(shape) == 1 and "cu_seqlens" not in given:
        del found["stats.sequences"]
    mask, wide = _counted(given).numpy(), heads.size_of_values(given, law.row.lse).reshape(shape)
    for name in ("logprob", *(["entropy"] if given.get("entropy") else [])):
        values = np.where(mask, made[name].numpy(), 0.0)
        found[name] = Want.near(subject, "logprob", dtype, values, scale=2 * wide, stored=stored)
    if not upstream:
        return found
    g = float(upstream["loss"])
    up = {"logprob": g * call.stored(want.gradients["lp"]).reshape(-1)}
    if given.get("entropy"):
        up["entropy"] = g * call.stored(want.gradients["entropy"]).reshape(-1)
    counted = _counted(given).numpy().reshape(-1)
    dz = np.where(counted[:, None], _law(point, given, up).grad, 0.0)
    weight = plain(given["weight"], "weight")
    coldest = float(torch.as_tensor(given["temperature"]).double().min()) if counted.size else 1.0
    least = 0.02 * abs(g) * size * float(np.linalg.norm(weight)) / len(weight) ** 0.5 / coldest
    return found | heads.head_gradients(subject, given, counted, dz, least)


def _counted(given: Given) -> torch.Tensor:
    """Tokens that the mask and the sequences leave in, shaped as ids."""
    ids = given["ids"]
    mask = torch.ones(ids.shape, dtype=torch.bool) if given.get("mask") is None else given["mask"].cpu()
    if given.get("cu_seqlens") is not None:
        mask = mask & (torch.arange(ids.shape[0]) < given["cu_seqlens"][-1].item())
    return mask


def _size(call: Calls, want: Expected) -> float:
    """The sum of |omega A| and of the terms of the loss: what an error of log p is multiplied by."""
    (_, _, A, _), _ = call.definition()
    most = float(np.abs(A).max(initial=0.0))
    return want.loss.size + sum(abs(t.omega) * max(t.rho, 1.0) * most for t in want.loss.tokens.values())


def real(subject: Subject) -> Sequence[Mapping[str, Any]]:
    """Vocabularies and hidden sizes of models."""
    kinds, ways = kind_levels(subject), variants(subject, "aggregate:")
    losses = [next((k for k in kinds if k[1] == level), None) for level in ("token", "sequence")]
    found = [k for k in losses if k is not None]
    if not found or not ways:
        return []
    return [
        {"loss": found[i % len(found)], "aggregate": ways[i % len(ways)], "size": (2, 2), **sizes}
        for i, sizes in enumerate(heads.real_heads(subject))
    ]


_LOSS_TENSORS: Final = {n: a for n, a in loss.LOSS_TENSORS.items() if not n.endswith("logprob")}
_RULES: Final = tuple(r for r in loss.LOSS_RULES if "values" not in r.factors)
SPACE = Space(
    "linear_policy_loss",
    factors,
    arguments,
    expected,
    {
        **heads.OPERANDS,
        "ids": Argument(dtypes=logprob.INTEGERS),
        "old_logprob": Argument(SAME_VALUES, given=Rule(("old",), bool)),
        "ref_logprob": Argument(SAME_VALUES, given=Rule(("kl",), bool)),
        "rollout_logprob": Argument(SAME_VALUES, given=Rule(("rollout",), bool)),
        **_LOSS_TENSORS,
        "temperature": logprob.TENSORS["temperature"],
        "support.ids": Argument(SAME_VALUES, logprob.INTEGERS, Rule(("support",), bool)),
        "support.offsets": Argument(SAME_VALUES, logprob.INTEGERS, Rule(("support",), bool)),
    },
    _RULES,
    real,
    masking={**loss.MASKING, "support": ("ragged", "all")},  # a support may take another way through the head
    smooth=False,
)

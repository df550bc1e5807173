"""Batches for the attacks on advantage@1: the arguments of a call of any kind, and the definition's answer.

Legend: B sequences · T time · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.compare import close, plain
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.spec.advantage_kinds import EPS_MODES, KINDS

OVER_TIME: Final = ("gae", "returns", "vtrace", "retrace", "reinforce_pp")  # a recursion with gamma
GROUPED: Final = tuple(k for k in KINDS if "group" in KINDS[k].takes)
BY_SEQUENCE: Final = tuple(k for k in GROUPED if k != "otb")
TOKENS: Final = ("rewards", "mask", "values", "ratio", "q_values", "logprob", "sum_pi_squared", "dones", "turns")
UNCLAIMED: Final = "none"  # the kind of a case that no subject claims
K = 3
CLIPS: Final = (0.9, 1.2)  # of the ratio and of the trace: different, so that one cannot stand for the other
STEP_WEIGHT = 0.8
# What a call may ask for besides, and the features that it needs then.
OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(),
    "weights": frozenset({"weights"}),
    "others": frozenset({"leave_one_out", "peer"}),
    "others' mean": frozenset({"leave_one_out"}),
    "length_adaptive": frozenset({"length_adaptive"}),
    "by token": frozenset({"token_output", "mask"}),
    "masked steps": frozenset({"peer"}),
    "carry": frozenset({"peer"}),
    "alone": frozenset({"peer", "group_ids"}),
    "out of range": frozenset({"peer", "sequence_masks", "ddof"}),
    "unclipped": frozenset(),
}


@dataclass(frozen=True)
class Batch:
    """One call."""

    kind: str
    B: int = 6
    T: int = 9
    seed: int = 0
    dtype: str = "float32"
    gamma: float = 0.97
    lam: float = 0.9
    eps: float = 1e-6
    eps_mode: str = "std_add"
    ddof: int = 1
    levels: bool = False  # rewards of groups from 0, 1/4, ... 1, with ties, instead of normal ones
    ends: bool = True  # bootstrap and dones where the kind takes them
    whiten: bool = True  # as the kind says; False: not at all
    option: str = ""  # of OPTIONS

    def takes(self, name: str) -> bool:
        """The kind takes the argument."""
        return name in KINDS[self.kind].uses

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        given = self._over_groups(subject) if self.kind in BY_SEQUENCE else self._over_time(subject)
        if not self.whiten or "whiten" not in subject.claims:
            given |= {"whiten": "none"} if KINDS[self.kind].whiten != "none" else {}
        return {"kind": self.kind, **given, **self._asked(subject, given)}

    def _asked(self, subject: Subject, given: dict[str, Any]) -> dict[str, Any]:
        """What the option changes; the definition's answer to it is read off the arguments."""
        device, option = subject.device, self.option
        if option == "weights":
            return {"weights": (draw.integers((self.B,), 4, self.seed + 40, device) / 2).to(given["rewards"].dtype)}
        if option == "by token":
            mask = draw.integers((self.B, self.T), 10, self.seed + 41, device) < 7
            return {"mask": mask, "output": "token"}
        if option == "alone":
            return {"group": torch.arange(self.B, device=device) // 2, "singleton": "raw"}
        if option == "out of range":
            return {"valid_range": (0.0, 1.0), "invalid": "raw", "ddof": 0, "eps": 1e-8, "min_std": 1e-8}
        options: dict[str, dict[str, Any]] = {
            "others": {"leave_one_out": True, "low_std": "center"},
            "others' mean": {"leave_one_out": True},
            "length_adaptive": {"length_adaptive": 0.4, "lam": 1.0},
            "masked steps": {"masked_time": "step"},
            "carry": {"masked_out": "carry"},
            "unclipped": {name: None for name in ("ratio_clip", "trace_clip") if self.takes(name)},
        }
        return options.get(option, {})

    def noise(self, shape: tuple[int, ...], salt: int, subject: Subject) -> Tensor:
        """Normal values of the case's dtype."""
        return draw.normal(shape, self.seed + 1000 * salt, subject.device, self.dtype)

    def groups(self, subject: Subject) -> int | Tensor:
        """Ids in no order; or a size that divides B, where ids are not claimed."""
        alone = "singleton_zero" in subject.claims  # else every group has two members or more
        if "group_ids" in subject.claims and not alone:
            return 7919 * (torch.arange(self.B, device=subject.device) % max(1, self.B // 2)) - 12345
        if "group_ids" in subject.claims:
            return 7919 * draw.integers((self.B,), max(1, self.B // 3), self.seed + 5, subject.device) - 12345
        return next(n for n in (3, 2, 1 if alone else self.B) if self.B % n == 0)

    def _over_time(self, subject: Subject) -> dict[str, Any]:
        shape, has = (self.B, self.T), subject.claims
        given: dict[str, Any] = {"rewards": self.noise(shape, 1, subject)}
        if "mask" in has:
            given["mask"] = draw.integers(shape, 10, self.seed, subject.device) < 7
        if self.kind in {"gae", "vtrace", "retrace"}:
            given |= {"values": self.noise(shape, 2, subject), "lam": self.lam}
        if self.kind in {"vtrace", "retrace"}:
            given |= {"ratio": self.noise(shape, 3, subject).exp(), "trace_clip": CLIPS[1]}
        if self.kind == "vtrace":
            given["ratio_clip"] = CLIPS[0]
        if self.kind == "retrace":
            given["q_values"] = self.noise(shape, 4, subject)
        if self.kind == "remax":
            given["baseline"] = self.noise((self.B,), 5, subject)
        if self.kind == "otb":
            p = draw.integers(shape, 900, self.seed + 6, subject.device) / 1000 + 0.05
            s = p.square() + (1 - p).square() / 2
            given |= {"logprob": p.log().to(given["rewards"].dtype), "sum_pi_squared": s.to(given["rewards"].dtype)}
            given |= {"group": self.groups(subject), "eps": self.eps}
        if self.takes("gamma"):
            given["gamma"] = self.gamma
        if self.ends and self.takes("bootstrap") and "bootstrap" in has:
            given["bootstrap"] = self.noise((self.B,), 7, subject)
        if self.ends and self.takes("dones") and "dones" in has:
            given["dones"] = draw.integers(shape, 10, self.seed + 8, subject.device) < 1
        return given

    def _over_groups(self, subject: Subject) -> dict[str, Any]:
        shape = (self.B, K) if self.kind == "gdpo" else (self.B,)
        x = self.noise(shape, 1, subject)
        if (self.levels or self.kind in {"maxrl", "gpg"}) and self.kind != "gdpo":
            x = (draw.integers(shape, 5, self.seed, subject.device) / 4).to(x.dtype)
        given: dict[str, Any] = {"rewards": x, "group": self.groups(subject)}
        if self.takes("eps"):
            given["eps"] = self.eps
        if self.takes("eps_mode"):
            given |= {"eps_mode": self.eps_mode, "ddof": self.ddof}
        if "singleton_zero" not in subject.claims:
            given["singleton"] = "any"
        if self.kind == "gdpo":
            given["reward_weights"] = torch.tensor([1.0, 0.5, 2.0], device=subject.device)
        if self.kind == "gigpo":
            given |= {"step_rewards": self.noise(shape, 2, subject), "step_weight": STEP_WEIGHT}
            states = 3 if "singleton_zero" in subject.claims else 1
            given["anchor"] = draw.integers(shape, states, self.seed + 9, subject.device)
        if self.kind in {"opo", "gdpo", "reinforce_pp_baseline"}:
            lengths = 1 + draw.integers((self.B,), self.T, self.seed + 10, subject.device)
            if "lengths" in subject.claims:
                given["lengths"] = lengths
            elif "mask" in subject.claims:
                given["mask"] = torch.arange(self.T, device=lengths.device) < lengths[:, None]
        return given


@dataclass(frozen=True)
class Answer:
    """What the definition gives."""

    advantages: Any
    returns: Any | None  # 0 at masked positions, unless they carry
    scale: Any  # what rounding errors are relative to


def expected(given: dict[str, Any]) -> Answer:
    """The definition's answer for padded arguments."""
    n = {k: plain(x, k) if isinstance(x, Tensor) else x for k, x in given.items()}
    answer = _by_sequence(n) if n["kind"] in BY_SEQUENCE else _by_token(n)
    if "weights" in n:
        weight = n["weights"].reshape(-1, *[1] * (answer.advantages.ndim - 1))
        answer = replace(answer, advantages=answer.advantages * weight, scale=2 * answer.scale)
    if n.get("output") == "token":
        answer = replace(answer, advantages=np.where(n["mask"], answer.advantages[:, None], 0.0))
    whitened = KINDS[n["kind"]].whiten if n.get("whiten", "auto") == "auto" else n["whiten"]
    if whitened != "global":
        return answer
    a = answer.advantages
    member, times = np.isfinite(a), np.ones(a.shape, int)
    if a.ndim == 2:
        member = mask_of(n)
    elif "lengths" in n or "mask" in n:
        times = n["lengths"] if "lengths" in n else n["mask"].sum(1)
    flat = np.repeat(a[member], times[member])
    white = np.zeros(a.shape)
    mean, var = oracle.mean_var(flat, 1)
    rstd = oracle.factor(var, 1e-8, "var_add")
    white[member] = (a[member] - mean) * rstd
    return replace(answer, advantages=white, scale=np.maximum(1.0, answer.scale * min(rstd, 1e3)))


def mask_of(n: dict[str, Any]) -> Any:
    """Which tokens are valid."""
    return n["mask"] if "mask" in n else np.ones(n["rewards"].shape, bool)


def _by_token(n: dict[str, Any]) -> Answer:
    kind, m, r = n["kind"], mask_of(n), n["rewards"]
    B, T = r.shape
    if kind == "otb":
        r, lp, s2 = (np.where(m, n[k], 0.0) for k in ("rewards", "logprob", "sum_pi_squared"))
        ids = n["group"] if isinstance(n["group"], np.ndarray) else np.arange(B) // n["group"]
        a, g = oracle.otb(r, m, lp, s2, ids, n["eps"])
        return Answer(a, np.where(m, g, 0.0), np.maximum(1.0, np.abs(g).max(initial=0.0)) * np.sqrt(max(T, 1)))
    lam, gamma = n.get("lam", 1.0), n.get("gamma", 1.0)
    of_ratio, of_trace = (np.inf if n.get(k) is None else n[k] for k in ("ratio_clip", "trace_clip"))
    rows = []
    for i in range(B):
        end = n["bootstrap"][i] if "bootstrap" in n else 0.0
        done = n["dones"][i] if "dones" in n else None
        one = [n[k][i] for k in ("values", "q_values") if k in n]
        if kind == "gae":
            own = 1 - 1 / max(n["length_adaptive"] * m[i].sum(), 1) if "length_adaptive" in n else lam
            carry = n.get("masked_out") == "carry"
            rows.append(oracle.gae_row(r[i], *one, m[i], gamma, own, end, done, carry))
        elif kind == "vtrace":
            rows.append(oracle.vtrace_row(r[i], *one, m[i], n["ratio"][i], gamma, lam, of_ratio, of_trace, end, done))
        elif kind == "retrace":
            rows.append(oracle.retrace_row(r[i], *one, m[i], n["ratio"][i], gamma, lam, of_trace, end, done))
        else:
            g = oracle.returns_row(r[i], m[i], gamma, end, done, n.get("masked_time", "skip"))
            rows.append((np.where(m[i], g - (n["baseline"][i] if "baseline" in n else 0.0), 0.0), g))
    a, g = (np.array([row[k] for row in rows]).reshape(B, T) for k in (0, 1))
    horizon = min(T, 1 / (1 - gamma * lam)) if gamma * lam < 1 else T
    most = np.maximum(1.0, np.abs(np.stack([a, g, np.where(m, n.get("values", 0.0), 0.0)])).max((0, 2), initial=0.0))
    g = g if n.get("masked_out") == "carry" else np.where(m, g, 0.0)
    return Answer(a, g, most[:, None] * np.sqrt(max(horizon, 1)))


def _by_sequence(n: dict[str, Any]) -> Answer:
    kind, x = n["kind"], n["rewards"]
    ids = n["group"] if isinstance(n["group"], np.ndarray) else np.arange(len(x)) // n["group"]
    more = {"eps": n.get("eps", 1e-6), "mode": n.get("eps_mode", "std_add"), "ddof": n.get("ddof", 1)}
    more["singleton"] = n.get("singleton", "zero")
    if n.get("invalid") == "raw":
        a = oracle.tritonforge(x, ids, *n["valid_range"], eps=n["eps"])
    elif n.get("leave_one_out"):
        a = oracle.group(x, ids, "rloo") if kind == "dr_grpo" else oracle.nemo_grpo(x, ids, n["eps"])
    elif kind == "gdpo":
        a = sum(w * oracle.group(x[:, k], ids, "grpo", **more) for k, w in enumerate(n["reward_weights"]))
    elif kind == "gigpo":
        pairs = np.array([f"{g}/{s}" for g, s in zip(ids, n["anchor"], strict=True)])
        a = oracle.group(x, ids, "dr_grpo") + n["step_weight"] * oracle.group(n["step_rewards"], pairs, "dr_grpo")
    elif kind == "opo":
        lengths = n["lengths"] if "lengths" in n else n["mask"].sum(1)
        a = oracle.group(x, ids, kind, lens=lengths, **more)
    else:
        a = oracle.group(x, ids, "dr_grpo" if kind == "reinforce_pp_baseline" else kind, **more)
    return Answer(a, None, np.maximum(1.0, np.abs(x).max(initial=0.0)))


def agree(subject: Subject, out: Any, want: Answer, dtype: str) -> None:
    """Advantages and returns are within tolerance of the definition."""
    close(subject, "advantages", out.advantages, want.advantages, dtype, scale=want.scale)
    if want.returns is not None:
        close(subject, "returns", out.returns, want.returns, dtype, scale=np.maximum(1.0, np.abs(want.scale)) * 4)


def alike(subject: Subject, found: Tensor, expected: Tensor, dtype: str) -> None:
    """Two answers of the subject agree within tolerance."""
    want = plain(expected, "advantages")
    close(subject, "advantages", found, want, dtype, scale=4 * np.maximum(1.0, np.abs(want).max(initial=0.0)))


def claimed(subject: Subject, among: tuple[str, ...] = tuple(KINDS)) -> list[str]:
    """The kinds that the subject claims."""
    claims = subject.claims
    counted = bool(claims & {"lengths", "mask"})  # opo weighs by the number of tokens
    return [k for k in among if f"kind:{k}" in claims and (k != "opo" or counted)]


def where_claimed(prop: Callable[[Subject, Batch], None]) -> Callable[[Subject, Batch], None]:
    """Carry out the property on cases whose kind, dtype and option the subject claims; examples are for all."""

    @wraps(prop)
    def fitting(subject: Subject, case: Batch) -> None:
        asked = OPTIONS[case.option] <= subject.claims
        if claimed(subject, (case.kind,)) and case.dtype in subject.dtypes and asked:
            prop(subject, case)

    return fitting


def batches(subject: Subject, among: tuple[str, ...] = tuple(KINDS), **fixed: Any) -> st.SearchStrategy[Batch]:
    """Calls of every claimed kind and dtype."""
    kinds = claimed(subject, among) or [UNCLAIMED]
    drawn: dict[str, Any] = {
        "kind": st.sampled_from(kinds),
        "B": st.integers(2, 7),
        "T": st.sampled_from((1, 2, 5, 9, 33)),
        "seed": st.integers(0, 2**20),
        "dtype": st.sampled_from(subject.dtypes),
        "gamma": st.sampled_from((0.97, 1.0, 0.5)),
        "lam": st.sampled_from((0.9, 1.0, 0.3)),
        "eps": st.sampled_from((1e-6, 0.05)),
        "eps_mode": st.sampled_from(subject.choices("eps_mode", EPS_MODES, "std_add")),
        "ddof": st.sampled_from((1, 0) if "ddof" in subject.claims else (1,)),
        "levels": st.booleans(),
        "ends": st.booleans(),
    }
    return st.builds(Batch, **{**drawn, **{k: st.just(v) for k, v in fixed.items()}})


def exact(subject: Subject, among: tuple[str, ...] = tuple(KINDS), **fixed: Any) -> st.SearchStrategy[Batch]:
    """The same in the first claimed dtype, for laws that compare two calls."""
    return batches(subject, among, dtype=subject.dtypes[0], **fixed)


def sliced(given: dict[str, Any], at: Any) -> dict[str, Any]:
    """The call on some of the sequences."""
    whole = {"reward_weights"}
    return {k: x[at] if isinstance(x, Tensor) and k not in whole else x for k, x in given.items()}


def columns(given: dict[str, Any], at: Any) -> dict[str, Any]:
    """The call on some of the token positions."""
    tokens = [k for k in TOKENS if isinstance(given.get(k), Tensor) and given[k].dim() == 2]
    return {**given, **{k: given[k][:, at] for k in tokens}}

"""Attacks on shape_rewards@1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.ranks import on_shares
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import rewards as oracle
from rlkernel_core.spec.shape_rewards import RunningMoments

KL = ("k1", "abs", "k2", "k3")
STEPS = ("clip", "normalize:batch", "normalize:running", "overlong", *(f"kl:{k}" for k in KL))


@dataclass(frozen=True)
class Rewards:
    """Rewards [B] of responses [B, T]."""

    B: int
    T: int
    seed: int
    steps: tuple[str, ...] = ()  # features of the operator; a subject does those that it claims
    dtype: str = "float32"
    center: bool = True
    ddof: int = 1
    cap: bool = True
    clamps: tuple[float | None, float | None] = (None, None)  # of the input and of the estimate of the KL term
    output: str = "auto"

    def does(self, subject: Subject, step: str) -> bool:
        """The step is asked for and claimed."""
        return step in self.steps and step in subject.claims

    def kl(self, subject: Subject) -> str | None:
        """The estimator, if any."""
        return next((k for k in KL if self.does(subject, f"kl:{k}")), None)

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        shape = (self.B, self.T)
        given: dict[str, Any] = {"rewards": 3 * draw.normal((self.B,), self.seed, subject.device, self.dtype)}
        given["mask"] = draw.integers(shape, 10, self.seed, subject.device) < 7
        given["output"] = self.output
        if self.does(subject, "clip"):
            given["clip"] = (-2.5, 2.0)
        if self.does(subject, "normalize:batch") or self.does(subject, "normalize:running"):
            kind = "batch" if self.does(subject, "normalize:batch") else "running"
            given |= {"normalize": kind, "center": self.center, "ddof": self.ddof, "eps": 1e-3}
        if self.does(subject, "overlong"):
            given |= {"max_length": max(1, self.T // 2), "overlong_buffer": max(1, self.T // 4)}
            given |= {"overlong_factor": 0.5, "overlong_cap": self.cap}
        kl = self.kl(subject)
        if kl:
            for i, name in enumerate(("logprob", "ref_logprob")):
                given[name] = -draw.normal(shape, self.seed + 3 + i, subject.device, self.dtype).abs()
            given |= {"kl": kl, "kl_coef": 0.1, "kl_input_clamp": self.clamps[0], "kl_clamp": self.clamps[1]}
        return given

    def by_token(self, subject: Subject) -> bool:
        """The result is per token."""
        return self.output == "token" or self.kl(subject) is not None


def expected(given: dict[str, Any]) -> tuple[Any, Any]:
    """Rewards by the definition, and what their rounding is relative to."""
    x, m = plain(given["rewards"], "rewards"), plain(given["mask"], "mask")
    penalty = 0.0
    if "max_length" in given:
        rest = (given["max_length"], given["overlong_buffer"], given["overlong_factor"], given["overlong_cap"])
        penalty = oracle.overlong(m.sum(1), *rest)
    normalize = "normalize" in given
    more = {n: given[n] for n in ("clip", "center", "ddof", "eps") if n in given}
    done = oracle.per_sequence(x, normalize=normalize, penalty=penalty, **more)
    size = np.maximum(1.0, np.abs(done - penalty))
    if normalize:
        kept = oracle.per_sequence(x, clip=given.get("clip"))
        _, _, var = oracle.moments(kept, np.isfinite(kept), given["ddof"])
        size = np.maximum(size, np.abs(kept[np.isfinite(kept)]).max(initial=0.0) * oracle.rstd(var, given["eps"]))
    if given["output"] == "auto" and "kl" not in given:
        return done, size
    r = oracle.at_last(done, m)
    if "kl" in given:
        lp, ref = (np.where(m, plain(given[n], n), 0.0) for n in ("logprob", "ref_logprob"))
        estimate = oracle.kl(lp - ref, given["kl"], given["kl_input_clamp"], given["kl_clamp"])
        r = r - given["kl_coef"] * np.where(m, estimate, 0.0)
    return r, np.maximum(1.0, size)[:, None]


def holds(subject: Subject, given: dict[str, Any], out: Any, dtype: str) -> None:
    """The result is what the definition gives."""
    want, size = expected(given)
    close(subject, "rewards", out.rewards, want, dtype, scale=size)


def cases(subject: Subject) -> st.SearchStrategy[Rewards]:
    """One step at a time, in every claimed dtype."""
    steps: list[tuple[str, ...]] = [(s,) for s in STEPS if s in subject.claims]
    return st.builds(
        Rewards,
        B=st.integers(1, 6),
        T=st.sampled_from((1, 4, 9, 24)),
        seed=st.integers(0, 2**20),
        steps=st.sampled_from(steps or [()]),
        dtype=st.sampled_from(subject.dtypes),
        center=st.booleans(),
        ddof=st.sampled_from((1, 0)),
        cap=st.booleans(),
        clamps=st.sampled_from(((None, None), (1.0, None), (None, 0.5))),
        output=st.sampled_from(("auto", "token")),
    )


def full_cases(subject: Subject) -> st.SearchStrategy[Rewards]:
    """All steps that go together at once, in the first claimed dtype: the order shows."""
    together = [("clip", n, "overlong", f"kl:{k}") for n in ("normalize:batch", "normalize:running") for k in KL]
    return st.builds(lambda c, steps: replace(c, steps=steps, dtype=subject.dtypes[0], B=c.B + 2, T=max(c.T, 4)),
                     cases(subject), st.sampled_from(together))  # fmt: skip


@attack("SR-01", cases, examples=tuple(Rewards(5, 9, 1, (s,)) for s in STEPS))
def every_step_is_its_formula(subject: Subject, case: Rewards) -> None:
    """One step at a time against float64; sums of the KL term and the penalty are given too."""
    if case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    out = subject(**given)
    holds(subject, given, out, case.dtype)
    m = plain(given["mask"], "mask")
    if "max_length" in given:
        rest = (given["max_length"], given["overlong_buffer"], given["overlong_factor"], given["overlong_cap"])
        close(subject, "rewards", out.penalty, oracle.overlong(m.sum(1), *rest), case.dtype)
    if "kl" in given:
        d = plain(given["logprob"], "logprob") - plain(given["ref_logprob"], "ref_logprob")
        estimate = oracle.kl(d, given["kl"], given["kl_input_clamp"], given["kl_clamp"])
        close(subject, "rewards", out.kl, np.where(m, estimate, 0.0).sum(1), case.dtype, scale=case.T)


@attack("SR-02", full_cases)
def the_steps_have_an_order(subject: Subject, case: Rewards) -> None:
    """Clip, normalize, overlong, KL, all at once."""
    given = case.arguments(subject)
    holds(subject, given, subject(**given), case.dtype)


@attack("SR-03", cases)
def a_reward_stands_on_the_last_valid_token(subject: Subject, case: Rewards) -> None:
    """Behind holes, in rows that end early, in packed sequences, and nowhere in a row without tokens."""
    given = replace(case, steps=(), output="token").arguments(subject)
    m = plain(given["mask"], "mask")
    want = oracle.at_last(plain(given["rewards"], "rewards"), m)
    close(subject, "rewards", subject(**given).rewards, want, case.dtype)
    if "packed" not in subject.claims:
        return
    lengths = draw.integers((case.B,), case.T + 1, case.seed + 1, subject.device)
    keep = torch.arange(case.T, device=lengths.device) < lengths[:, None]
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    packed = subject(**{**given, "mask": given["mask"][keep]}, cu_seqlens=bounds)
    kept = plain(keep, "keep")
    want = oracle.at_last(plain(given["rewards"], "rewards"), m & kept)[kept]
    close(subject, "rewards", packed.rewards, want, case.dtype)


@attack("SR-04", full_cases)
def masked_tokens_may_hold_anything(subject: Subject, case: Rewards) -> None:
    """NaN, infinities and huge log-probabilities under the mask; the result there is 0."""
    given = replace(case, output="token").arguments(subject)
    mask = given["mask"]
    names = [n for n in ("logprob", "ref_logprob") if n in given]
    for poison in (torch.nan, torch.inf, 1e4):
        out = subject(**{**given, **{n: torch.where(mask, given[n], poison) for n in names}})
        holds(subject, given, out, case.dtype)
        require(bool((out.rewards[~mask] == 0).all()), "a masked token has a reward")
    x = torch.where(mask, draw.normal((case.B, case.T), case.seed, subject.device, case.dtype), torch.nan)
    tokens = {"rewards": x, "mask": mask, **{n: given[n] for n in (*names, "kl", "kl_coef") if n in given}}
    out = subject(**tokens)
    require(bool((out.rewards[~mask] == 0).all()), "a masked reward per token is not 0")
    require(bool(out.rewards.isfinite().all()), "a masked reward per token reaches another")


@attack("SR-05", lambda s: st.builds(Rewards, B=st.integers(1, 3), T=st.just(24), seed=st.integers(0, 2**20)))
def k3_keeps_its_precision_near_zero(subject: Subject, case: Rewards) -> None:
    """|d| of 1e-4 to 1e-1: exp(-d) - 1 + d would keep no digit of d^2 / 2, 1 ulp of d is what may be lost."""
    noise = draw.normal((case.B, case.T), case.seed, "cpu")
    d = (noise.sign() * 10 ** (-1 - 3 * noise.abs().clamp(max=1))).float().to(subject.device)
    zero = torch.zeros(case.B, device=subject.device)
    out = subject(zero, kl="k3", kl_coef=1.0, logprob=d, ref_logprob=torch.zeros_like(d)).rewards
    exact = plain(d, "d")
    error = np.abs(-plain(out, "rewards") - oracle.kl(exact, "k3"))
    allowed = 2.0**-22 * np.abs(exact)
    require(bool((error <= allowed).all()), f"k3 near 0 is wrong by {(error / np.abs(exact)).max():.3g} of d")


@attack("SR-06", cases)
def halves_give_what_the_whole_gives(subject: Subject, case: Rewards) -> None:
    """The state of three batches in a row, one of them empty, against one call with all of them."""
    case = replace(case, B=case.B + 3, steps=("normalize:running",), output="auto")
    given = case.arguments(subject)
    x = given.pop("rewards")
    given = {n: given[n] for n in ("normalize", "center", "ddof", "eps")}
    whole = subject(x, **given)
    cut, state, last = 1 + case.seed % (case.B - 1), None, None
    for part in (x[:cut], x[cut:cut], x[cut:]):
        last = subject(part, **given, running=state)
        state = last.running
        require(isinstance(state, RunningMoments), "there is no running state")
    scale = max(1.0, float(plain(whole.running.m2, "m2")))
    for name in ("count", "mean", "m2"):
        want = plain(getattr(whole.running, name), name)
        close(subject, "rewards", getattr(state, name), want, case.dtype, scale=4 * scale)
    size = 4 * max(1.0, float(whole.rewards.double().abs().max()) ** 2)
    close(subject, "rewards", last.rewards, plain(whole.rewards, "rewards")[cut:], case.dtype, scale=size)


@attack("SR-07", cases)
def the_overlong_penalty_has_its_corners(subject: Subject, case: Rewards) -> None:
    """0 up to max_length - buffer, -factor at max_length and, capped, beyond; half way in between."""
    limit, buffer, factor = 200 + case.seed % 50, 2 * (1 + case.seed % 40), 0.25 * (1 + case.seed % 7)
    lengths = torch.tensor([0, limit - buffer - 1, limit - buffer, limit - buffer // 2, limit, limit + buffer])
    given = {"max_length": limit, "overlong_buffer": buffer, "overlong_factor": factor, "overlong_cap": case.cap}
    x = draw.normal((6,), case.seed, subject.device, case.dtype)
    out = subject(x, lengths=lengths.to(subject.device), **given)
    want = -factor * np.array([0.0, 0.0, 0.0, 0.5, 1.0, 1.0 if case.cap else 2.0])
    close(subject, "rewards", out.penalty, want, case.dtype)
    close(subject, "rewards", out.rewards, plain(x, "x") + want, case.dtype, scale=2.0)


@attack("SR-08", full_cases)
def what_is_not_finite_stays_and_harms_no_other(subject: Subject, case: Rewards) -> None:
    """NaN among the rewards: in no moment, still NaN."""
    given = replace(case, steps=tuple(s for s in case.steps if not s.startswith("kl")), output="auto").arguments(
        subject
    )
    bad = draw.integers((case.B,), 10, case.seed + 4, subject.device) < 3
    given["rewards"] = torch.where(bad, torch.nan, given["rewards"])
    out = subject(**given)
    holds(subject, given, out, case.dtype)
    require(bool((out.rewards.isnan() == bad).all()), f"NaN at {bad.tolist()} gives {out.rewards.tolist()}")


@attack("SR-13", full_cases, scale=0.4)
def ranks_agree_with_one(subject: Subject, case: Rewards) -> None:
    """Two and three ranks with shares of any size, one of them empty, against all rewards on one rank."""
    case = replace(case, steps=tuple(s for s in case.steps if s.startswith("normalize")), output="auto")
    given, B = case.arguments(subject), case.B
    for cuts in ((B,), (case.seed % B,), (1, 1)):
        found = on_shares(subject, given, (0, *cuts, B))
        holds(subject, given, replace(found[0], rewards=torch.cat([o.rewards for o in found])), case.dtype)
        counts = [float(o.running.count) for o in found if o.running is not None]
        require(all(n == B for n in counts), f"the running states are of {counts} rewards, there are {B}")


def with_state(subject: Subject, case: Rewards) -> dict[str, Any]:
    """The call with a running state, where it takes one, and with a reward that is NaN."""
    given = case.arguments(subject)
    if given.get("normalize") == "running":
        given["running"] = subject(given["rewards"], normalize="running").running
    given["rewards"][0] = torch.nan
    return given


derive("shape_rewards", with_state, inputs_untouched=full_cases)
derive("shape_rewards", lambda s, c: c.arguments(s), determinism=cases, capture=full_cases)

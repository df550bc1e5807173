"""Attacks on whiten@1."""

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
from rlkernel_conformance.ranks import on_ranks, on_shares
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import rewards as oracle
from rlkernel_core.spec.advantage_kinds import EPS_MODES

LAYOUTS = ("all", "mask", "lengths", "counts")
CONSTANTS = (30.1, 0.1, 12.3, -7e5, 1e-20, 1.0)  # one-pass variance is negative at 30.1, a mean is off at 0.1 and 12.3


@dataclass(frozen=True)
class Values:
    """Values [B, T]."""

    B: int
    T: int
    seed: int
    dtype: str = "float32"
    layout: str = "all"
    eps: float = 1e-8
    eps_mode: str = "var_add"
    ddof: int = 1
    offset: float = 0.0
    shift_mean: bool = True
    carry: bool = False  # masked values are transformed too

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        shape, layout = (self.B, self.T), self.layout if self.layout in subject.claims else "all"
        x = (draw.normal(shape, self.seed, "cpu") + self.offset).to(getattr(torch, self.dtype)).to(subject.device)
        given: dict[str, Any] = {"x": x, "eps": self.eps, "eps_mode": self.eps_mode, "ddof": self.ddof}
        given["shift_mean"] = self.shift_mean
        if self.carry and "carry" in subject.claims:
            given["masked_out"] = "carry"
        if layout == "mask":
            given["mask"] = draw.integers(shape, 10, self.seed, subject.device) < 7
        elif layout == "lengths":
            given["lengths"] = draw.integers((self.B,), self.T + 1, self.seed, subject.device)
        elif layout == "counts":
            given["counts"] = draw.integers(shape, 5, self.seed, subject.device)
        return given


def valid(given: dict[str, Any]) -> Any:
    """Where values are valid."""
    x = given["x"]
    if "mask" in given:
        return plain(given["mask"], "mask")
    if "lengths" in given:
        return np.arange(x.shape[1]) < plain(given["lengths"], "lengths")[:, None]
    return np.ones(tuple(x.shape), bool)


def expected(given: dict[str, Any]) -> tuple[Any, float, float, float]:
    """y, count, mean and variance by the definition."""
    x, m = plain(given["x"], "x"), valid(given)
    times = m * (plain(given["counts"], "counts") if "counts" in given else 1)
    if not times.any():
        return np.zeros(x.shape), 0.0, 0.0, 0.0
    shift = x[times > 0][0]  # so that float64 at 1e5 is as good as at 1
    n, mean, var = oracle.moments(x - shift, times, given["ddof"])
    y = (x - shift - mean) * oracle.rstd(var, given["eps"], given["eps_mode"])
    mean = mean + shift
    y = y + (0.0 if given["shift_mean"] else mean)
    return np.where(m | (given.get("masked_out") == "carry"), y, 0.0), n, mean, var


def cases(subject: Subject) -> st.SearchStrategy[Values]:
    """Every claimed dtype and layout, every place of eps."""
    return st.builds(
        Values,
        B=st.integers(1, 4),
        T=st.sampled_from((1, 2, 7, 33, 200)),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        layout=st.sampled_from(LAYOUTS),
        eps=st.sampled_from((1e-3, 0.1, 1e-8)),
        eps_mode=st.sampled_from(subject.choices("eps_mode", EPS_MODES, "var_add")),
        ddof=st.sampled_from((1, 0) if "ddof" in subject.claims else (1,)),
        shift_mean=st.sampled_from((True, True, False)),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Values]:
    """Enough values in the first claimed dtype: for laws that compare two calls."""
    return cases(subject).map(
        lambda c: replace(c, dtype=subject.dtypes[0], B=c.B + 1, T=min(c.T + 2, 33), eps_mode="var_add")
    )


def results(subject: Subject, out: Any, want: tuple[Any, float, float, float], dtype: str) -> None:
    """Every output is within tolerance."""
    y, n, mean, var = want
    close(subject, "y", out.y, y, dtype, scale=max(1.0, np.abs(y).max(initial=0.0)))
    close(subject, "y", out.mean, mean, dtype, scale=max(1.0, abs(mean)))
    close(subject, "y", out.var, var, dtype, scale=max(1.0, var))
    require(float(out.count) == n, f"{float(out.count)} values are counted, there are {n}")


@attack("WH-01", cases, examples=tuple(Values(3, 33, 5, layout=layout, carry=True) for layout in LAYOUTS[1:]))
def the_definition_in_float64(subject: Subject, case: Values) -> None:
    """Result and moments, in every layout; `rstd` is what was multiplied with."""
    if case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    want, out = expected(given), subject(**given)
    results(subject, out, want, case.dtype)
    rstd = oracle.rstd(want[3], case.eps, case.eps_mode) if want[1] else 0.0
    close(subject, "y", out.rstd, rstd, case.dtype, scale=max(1.0, rstd))


@attack("WH-02", plain_cases)
def the_result_has_mean_0_and_variance_1(subject: Subject, case: Values) -> None:
    """Of the valid results, with eps = 0."""
    given = replace(case, eps=0.0, shift_mean=True, layout=case.layout if case.layout != "counts" else "all").arguments(
        subject
    )
    y = plain(subject(**given).y, "y")[valid(given)]
    if len(y) < 2:
        return
    require(abs(y.mean()) < 1e-5, f"the mean is {y.mean()!r}")
    require(abs(y.var(ddof=case.ddof) - 1) < 1e-4, f"the variance is {y.var(ddof=case.ddof)!r}")


@attack("WH-03", plain_cases, examples=(Values(7, 111, 0), Values(3, 259, 1), Values(1, 777, 2, eps=0.0)))
def a_constant_is_exactly_zero(subject: Subject, case: Values) -> None:
    """Values that have no short binary fraction, in every mode; others beside them that count 0 times."""
    if case.dtype not in subject.dtypes:
        return
    given = replace(case, shift_mean=True).arguments(subject)
    counted = given["counts"] > 0 if "counts" in given else torch.ones_like(given["x"], dtype=torch.bool)
    for value in CONSTANTS:
        constant = torch.full((case.B, case.T), value, dtype=torch.float64).to(given["x"].dtype).to(subject.device)
        x = torch.where(counted, constant, 5.0)  # what counts 0 times is not of the constant
        for mode in subject.choices("eps_mode", EPS_MODES, "var_add"):
            y = subject(**{**given, "x": x, "eps_mode": mode}).y[counted]
            require(not bool(y.any()), f"{value} whitens to {y.abs().max().item()!r} in mode {mode}")


@attack("WH-04", cases)
def offsets_cost_nothing(subject: Subject, case: Values) -> None:
    """Values around +-1e5 (fp16: +-3e4), as the dtype rounds them, against float64."""
    far = 3e4 if case.dtype == "float16" else 1e5
    for offset in (far, -far):
        given = replace(case, offset=offset, shift_mean=True, eps=1e-3).arguments(subject)
        y = expected(given)[0]
        close(subject, "y", subject(**given).y, y, case.dtype, scale=max(1.0, np.abs(y).max()))


@attack("WH-05", plain_cases)
def masked_values_may_hold_anything(subject: Subject, case: Values) -> None:
    """NaN, infinities and huge values under the mask."""
    given = replace(case, layout="mask").arguments(subject)
    want = expected(given)
    for poison in (torch.nan, torch.inf, -1e30):
        out = subject(**{**given, "x": torch.where(given["mask"], given["x"], poison)})
        results(subject, out, want, case.dtype)
        require(bool((out.y[~given["mask"]] == 0).all()), "a masked value is not 0")


@attack("WH-06", plain_cases)
def what_is_not_finite_harms_nothing_else(subject: Subject, case: Values) -> None:
    """NaN and infinities among the valid values."""
    given = replace(case, layout="all").arguments(subject)
    bad = draw.integers((case.B, case.T), 10, case.seed, subject.device) < 2
    n, mean, var = oracle.moments(plain(given["x"], "x"), ~plain(bad, "bad"), case.ddof)
    y = (plain(given["x"], "x") - mean) * oracle.rstd(var, case.eps, case.eps_mode)
    y = np.where(plain(bad, "bad"), 0.0, y + (0.0 if case.shift_mean else mean))
    for poison in (torch.nan, torch.inf, -torch.inf):
        out = subject(**{**given, "x": torch.where(bad, poison, given["x"])})
        results(subject, out, (y, n, mean, var), case.dtype)


@attack("WH-07", plain_cases, scale=0.4)
def ranks_agree_with_one(subject: Subject, case: Values) -> None:
    """Two and three ranks with shares of any size, one of them empty, against all values on one rank."""
    given = replace(case, layout="mask").arguments(subject)
    whole = expected(given)
    B = case.B
    for cuts in ((B,), (case.seed % B,), (1, 1)):
        found = on_shares(subject, given, (0, *cuts, B))
        for out in found:
            results(subject, replace(out, y=torch.cat([o.y for o in found])), whole, case.dtype)

    if case.carry or not case.shift_mean or "mask" not in given:
        return  # no result is 0

    def one_without(rank: int, group: Any) -> Any:
        return subject(**{**given, "mask": given["mask"] & (rank == 0)}, process_group=group)

    first, other = on_ranks(subject, 2, one_without)
    results(subject, first, whole, case.dtype)
    require(not bool(other.y.any()), "a rank whose values are all masked has results")

    def constant(_rank: int, group: Any) -> Any:
        return subject(**{**given, "x": torch.full_like(given["x"], 30.1)}, process_group=group)

    require(not any(bool(out.y.any()) for out in on_ranks(subject, 2, constant)), "a constant over ranks is not 0")


@attack("WH-08", plain_cases)
def counts_are_repetitions(subject: Subject, case: Values) -> None:
    """A value that counts k times against k values."""
    given = replace(case, layout="counts").arguments(subject)
    x, counts = given["x"].reshape(-1), given.pop("counts").reshape(-1)
    out = subject(**{**given, "x": x}, counts=counts)
    long = subject(**{**given, "x": x.repeat_interleave(counts)})
    repeated = out.y.repeat_interleave(counts)
    close(subject, "y", repeated, plain(long.y, "y"), case.dtype, scale=4.0)
    require(float(out.count) == float(long.count), f"{float(out.count)} is counted, there are {float(long.count)}")


@attack("WH-09", plain_cases, scale=0.3)
def nothing_valid_gives_zero(subject: Subject, case: Values) -> None:
    """No values, none valid, none finite, none that counts; one value alone."""
    given = replace(case, layout="all").arguments(subject)
    x = given["x"]
    calls = [{"x": x[:0]}, {"x": x[:, :0]}, {"x": torch.full_like(x, torch.nan)}, {"x": x[:1, 0], "shift_mean": True}]
    if "mask" in subject.claims:
        calls.append({"mask": torch.zeros_like(x, dtype=torch.bool)})
    if "counts" in subject.claims:
        calls.append({"counts": torch.zeros_like(x)})
    for change in calls:
        out = subject(**{**given, **change})
        require(out.y.shape == change.get("x", x).shape, f"y has shape {list(out.y.shape)}")
        require(not bool(out.y.any()), f"y is {out.y.tolist()} where nothing is valid")
        require(bool(out.mean.isfinite() & out.var.isfinite() & out.rstd.isfinite()), "a moment is not finite")


derive(
    "whiten",
    lambda s, c: c.arguments(s),
    inputs_untouched=plain_cases,
    determinism=cases,
    capture=plain_cases,
)

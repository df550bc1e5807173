"""Attacks on logprob@1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses import coded_logits, listed_ids, logprob_ranks, number_masks, ragged_ids
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.linear_logprob_heads import lists
from rlkernel_conformance.compare import Violation, close, plain, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import LogprobResult, Support

# the attacks of these modules are registered together
__all__ = ["coded_logits", "listed_ids", "logprob_ranks", "number_masks", "ragged_ids"]

TEMPERATURES = (1.0, 0.5, 0.7, 1.7)
SIZES = (1, 2, 3, 7, 31, 33, 127, 1000, 4099)


@dataclass(frozen=True)
class Rows:
    """Logits [N, V] and ids [N]."""

    N: int
    V: int
    seed: int
    logits: str = "normal"
    dtype: str = "float32"
    temperature: float = 1.0

    def tensors(self, subject: Subject) -> tuple[Tensor, Tensor]:
        """The logits and ids on the subject's device."""
        x = draw.logits(self.logits, self.N, self.V, self.seed, self.dtype, subject.device)
        ids = draw.integers((self.N,), self.V, self.seed, subject.device)
        possible = x.float().isfinite()
        # An id whose logit is -inf has log p = -inf; half of those are moved to a possible token.
        ids = torch.where(possible.gather(1, ids[:, None])[:, 0] | (ids % 2 == 0), ids, possible.int().argmax(1))
        return x, ids

    def expected(self, subject: Subject, **more: Any) -> oracle.Row:
        """The definition's answer."""
        x, ids = self.tensors(subject)
        return oracle.logprob(plain(x, "logits"), plain(ids, "ids"), **{"temperature": self.temperature, **more})


def cases(subject: Subject) -> st.SearchStrategy[Rows]:
    """Rows of every claimed dtype and every distribution."""
    return st.builds(
        Rows,
        N=st.integers(1, 5),
        V=st.sampled_from(SIZES),
        seed=st.integers(0, 2**20),
        logits=st.sampled_from(sorted(draw.LOGITS)),
        dtype=st.sampled_from(subject.dtypes),
        temperature=st.sampled_from(TEMPERATURES),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Rows]:
    """Rows without extremes, in the first claimed dtype: for laws that compare two calls."""
    return cases(subject).map(lambda c: replace(c, logits="normal", dtype=subject.dtypes[0], V=min(c.V, 127)))


def run(subject: Subject, case: Rows, **more: Any) -> LogprobResult:
    """The subject's answer."""
    x, ids = case.tensors(subject)
    out: LogprobResult = subject(x, ids, **{"temperature": case.temperature, **more})
    return out


def arguments(subject: Subject, case: Rows) -> dict[str, Any]:
    """The arguments of a case: of every second with several ids per row."""
    x, ids = case.tensors(subject)
    ids = listed(subject, case, ids)[-(case.seed % 2)]
    return {"logits": x, "ids": ids, "temperature": case.temperature}


def listed(subject: Subject, case: Rows, ids: Tensor) -> list[Tensor]:
    """Ids [N], and [N, 3] where that is claimed."""
    several = "many_ids" in subject.claims
    return [ids, lists(case.N, case.V, 3, case.seed, subject.device)] if several else [ids]


@attack("LP-01", cases)
def log_probabilities_match_float64(subject: Subject, case: Rows) -> None:
    """Log-probability, and lse where claimed, against the definition."""
    out, want = run(subject, case), case.expected(subject)
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=np.maximum(1, np.abs(want.lse)))
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, case.dtype, scale=np.maximum(1, np.abs(want.lse)))


@attack("LP-02", lambda s: st.builds(Rows, N=st.integers(1, 4), V=st.sampled_from(SIZES[1:]), seed=st.integers(0, 999)))
def confident_rows_keep_relative_precision(subject: Subject, case: Rows) -> None:
    """The chosen id 12 to 40 nats above the rest: z - lse would round to 0."""
    x, ids = case.tensors(subject)
    x = x.float().scatter(1, ids[:, None], x.float().amax(1, keepdim=True) + 12.0 + 28.0 * (case.seed % 11) / 10)
    have = plain(subject(x, ids).logprob, "logprob")
    want = oracle.logprob(plain(x, "logits"), plain(ids, "ids")).logprob
    require(bool((have <= 0).all()), f"log p is positive: {have.max()!r}")
    error = np.abs(have - want) / np.maximum(np.abs(want), 1e-30)
    require(bool((error <= 1e-4).all()), f"log p of confident rows is {have.tolist()}, expected {want.tolist()}")


@attack("LP-03", lambda s: st.builds(Rows, N=st.just(2), V=st.integers(1, 9000), seed=st.integers(0, 999)))
def every_column_counts_once(subject: Subject, case: Rows) -> None:
    """Flat logits of any width: log p is -log V and lse log V, so one column too many or too few shows."""
    x = torch.zeros(case.N, case.V, device=subject.device)
    out = subject(x, draw.integers((case.N,), case.V, case.seed, subject.device))
    lse = plain(out.lse, "lse") if "lse" in subject.claims else -plain(out.logprob, "logprob")
    error = float(np.abs(np.exp(lse - np.log(case.V)) - 1).max()) * case.V
    require(error < 0.5, f"{case.V} columns count as {np.exp(lse).tolist()}")


@attack("LP-04", plain_cases)
def a_constant_on_a_row_changes_nothing(subject: Subject, case: Rows) -> None:
    """Shifts of +-1000, in float32 where they round."""
    case = replace(case, temperature=1.0)
    x, ids = case.tensors(subject)
    for shift in (-1000.0, 1000.0):
        moved = (x.double() + shift).to(x.dtype)
        want = oracle.logprob(plain(moved, "logits"), plain(ids, "ids"))
        out = subject(moved, ids)
        close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=100.0)


@attack("LP-05", plain_cases)
def probabilities_sum_to_one(subject: Subject, case: Rows) -> None:
    """All ids of one row."""
    x = case.tensors(subject)[0][:1].expand(case.V, -1)
    p = np.exp(
        plain(subject(x, torch.arange(case.V, device=x.device), temperature=case.temperature).logprob, "logprob")
    )
    require(abs(float(p.sum()) - 1) < 1e-4, f"the probabilities of a row sum to {float(p.sum())!r}")


@attack("LP-06", plain_cases)
def the_order_of_the_vocabulary_means_nothing(subject: Subject, case: Rows) -> None:
    """The same row under a permutation of the vocabulary."""
    x, ids = case.tensors(subject)
    order = torch.randperm(case.V, generator=torch.Generator().manual_seed(case.seed)).to(x.device)
    out = subject(x[:, order], order.argsort()[ids], temperature=case.temperature)
    close(subject, "logprob", out.logprob, plain(run(subject, case).logprob, "logprob"), case.dtype, scale=4.0)


@attack("LP-07", lambda s: cases(s).map(lambda c: replace(c, logits="holes")))
def impossible_tokens_count_nothing(subject: Subject, case: Rows) -> None:
    """-inf logits in value, entropy and gradient."""
    want = case.expected(subject)
    out = run(subject, case, **({"entropy": True} if "entropy" in subject.claims else {}))
    close(subject, "logprob", out.logprob, want.logprob, case.dtype)
    if out.entropy is not None:
        close(subject, "entropy", out.entropy, want.entropy, case.dtype)


@attack("LP-08", plain_cases)
def temperature_is_applied_once(subject: Subject, case: Rows) -> None:
    """T on logits is T = 1 on logits / T, entropy included."""
    x, ids = case.tensors(subject)
    more = {"entropy": True} if "entropy" in subject.claims else {}
    out = subject(x, ids, temperature=case.temperature, **more)
    want = oracle.logprob(plain(x, "logits") / case.temperature, plain(ids, "ids"))
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=4.0)
    if out.entropy is not None:
        close(subject, "entropy", out.entropy, want.entropy, case.dtype, scale=4.0)


@attack("LP-09", plain_cases)
def rows_have_their_own_temperature(subject: Subject, case: Rows) -> None:
    """A tensor of temperatures against one call per row."""
    x, ids = case.tensors(subject)
    T = torch.tensor([TEMPERATURES[(case.seed + i) % 4] for i in range(case.N)], device=x.device)
    together = subject(x, ids, temperature=T).logprob
    apart = torch.cat([subject(x[i : i + 1], ids[i : i + 1], temperature=float(t)).logprob for i, t in enumerate(T)])
    close(subject, "logprob", together, plain(apart, "logprob"), case.dtype, scale=2.0)


@attack("LP-10", plain_cases)
def the_cap_comes_before_the_temperature(subject: Subject, case: Rows) -> None:
    """C tanh(x / c) / T at a cap that bends."""
    out, want = run(subject, case, softcap=1.5), case.expected(subject, softcap=1.5)
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=2.0)


@attack("LP-11", plain_cases)
def masked_rows_may_hold_anything(subject: Subject, case: Rows) -> None:
    """Masked rows poisoned with NaN and with ids far out of range."""
    x, ids = case.tensors(subject)
    mask = torch.arange(case.N, device=x.device) % 2 == 0
    wanted = "grad" in subject.claims
    poisoned = torch.where(mask[:, None], x, torch.nan).requires_grad_(wanted)
    out = subject(poisoned, torch.where(mask, ids, 2**40), temperature=case.temperature, mask=mask)
    want = np.where(plain(mask, "mask"), case.expected(subject).logprob, 0.0)
    close(subject, "logprob", out.logprob, want, case.dtype, scale=2.0)
    if wanted:
        (grad,) = torch.autograd.grad(out.logprob.sum(), poisoned)
        require(bool((grad[~mask] == 0).all()), "the gradient of a masked row is not 0")
        require(bool(grad[mask].isfinite().all()), "a masked row reaches the gradient of another")


@attack("LP-12", cases)
def entropy_matches_float64(subject: Subject, case: Rows) -> None:
    """Entropy against the definition, within [0, log V]."""
    out, want = run(subject, case, entropy=True), case.expected(subject)
    require(out.entropy is not None, "entropy was asked for and is None")
    close(subject, "entropy", out.entropy, want.entropy, case.dtype, scale=np.maximum(1, np.abs(want.lse) / 4))
    have = plain(out.entropy, "entropy")
    require(bool((have >= -1e-5).all() and (have <= np.log(case.V) + 1e-3).all()), f"entropy {have} of {case.V} tokens")


@attack("LP-13", lambda s: cases(s).map(lambda c: replace(c, V=min(c.V, 127))))
def gradients_match_float64(subject: Subject, case: Rows) -> None:
    """Gradients of log-probability, and of claimed lse and entropy, at once, with their own upstream gradients."""
    x, ids = case.tensors(subject)
    ids = torch.where(x.float().isfinite().gather(1, ids[:, None])[:, 0], ids, x.float().isfinite().int().argmax(1))
    names = ("logprob", *(n for n in ("lse", "entropy") if n in subject.claims))
    up = {n: draw.normal((case.N,), case.seed + i, subject.device, "float32") for i, n in enumerate(names)}
    leaf = x.clone().requires_grad_()
    out = subject(leaf, ids, temperature=case.temperature, **({"entropy": True} if "entropy" in names else {}))
    total = sum((up[n].to(getattr(out, n).dtype) * getattr(out, n)).sum() for n in names)
    (grad,) = torch.autograd.grad(total, leaf)
    g = {n: plain(u, n) for n, u in up.items()}
    want = oracle.logprob(plain(x, "logits"), plain(ids, "ids"), temperature=case.temperature, g=g).grad
    most = sum(np.abs(v) for v in g.values())[:, None] / case.temperature
    lse = np.abs(case.expected(subject).lse)[:, None]  # its rounding enters every probability
    close(subject, "grad_logits", grad, want, case.dtype, scale=most * np.maximum(4, lse))


@attack("LP-14", plain_cases)
def the_gradient_of_a_row_sums_to_zero(subject: Subject, case: Rows) -> None:
    """D log p / d logits over the vocabulary."""
    x, ids = case.tensors(subject)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(subject(leaf, ids, temperature=case.temperature).logprob.sum(), leaf)
    total = float(grad.double().sum(1).abs().max())
    require(total < 1e-5 / min(TEMPERATURES), f"the gradient of a row sums to {total!r}")


@attack("LP-15", lambda s: cases(s).map(lambda c: replace(c, logits=("tied", "normal")[c.seed % 2], V=min(c.V, 127))))
def the_best_come_first_and_ties_go_to_the_lowest_id(subject: Subject, case: Rows) -> None:
    """top_logprobs against a stable sort."""
    x, _ = case.tensors(subject)
    n = min(5, case.V)
    out = run(subject, case, top_logprobs=n)
    order = np.argsort(-plain(x, "logits"), axis=1, kind="stable")[:, :n]
    require(out.top_ids is not None and out.top_logprobs is not None, "top_logprobs was asked for and is None")
    found = plain(out.top_ids, "top_ids")  # type: ignore[arg-type]
    require(bool((found == order).all()), f"top ids {found.tolist()}, expected {order.tolist()}")
    every = [
        oracle.logprob(plain(x, "x")[[i] * n], order[i], temperature=case.temperature).logprob for i in range(case.N)
    ]
    close(subject, "logprob", out.top_logprobs, np.stack(every), case.dtype, scale=2.0)  # type: ignore[arg-type]


@attack("LP-16", plain_cases)
def the_truncated_law_is_renormalized_over_the_kept(subject: Subject, case: Rows) -> None:
    """Ragged kept ids; log p + log_kept_mass is the tempered log p."""
    x, _ = case.tensors(subject)
    rng = np.random.default_rng(case.seed)
    kept = [sorted(rng.choice(case.V, size=rng.integers(1, case.V + 1), replace=False)) for _ in range(case.N)]
    offsets = torch.tensor([0, *np.cumsum([len(k) for k in kept])], device=x.device)
    support = Support(torch.tensor(np.concatenate(kept), device=x.device), offsets)
    out = run(subject, case, support=support)
    want = case.expected(subject, kept=kept)
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=4.0)
    require(out.log_kept_mass is not None, "support was given and log_kept_mass is None")
    close(subject, "logprob", out.log_kept_mass, want.log_kept_mass, case.dtype, scale=4.0)
    tempered = plain(run(subject, case).logprob, "logprob")
    close(subject, "logprob", out.logprob + out.log_kept_mass, tempered, case.dtype, scale=8.0)


@attack("LP-17", plain_cases)
def an_id_out_of_range_is_flagged_and_never_zero(subject: Subject, case: Rows) -> None:
    """Below, above and far above; other rows keep their bits; validate=True raises there, and nowhere else."""
    x, ids = case.tensors(subject)
    if "validate" in subject.claims:
        same_bits("logprob", run(subject, case, validate=True).logprob, run(subject, case).logprob, "validated")
    for bad in (-1, case.V, 2**40):
        wrong = ids.clone()
        wrong[0] = bad
        out = subject(x, wrong, temperature=case.temperature)
        require(bool(out.logprob[0].isnan()), f"id {bad} gives {out.logprob[0].item()!r}, not NaN")
        require(
            out.invalid is not None and out.invalid.tolist() == [True] + [False] * (case.N - 1),
            f"id {bad} is not flagged",
        )
        same_bits("logprob", out.logprob[1:], run(subject, case).logprob[1:], "beside a row with a bad id")
        if "validate" in subject.claims:
            try:
                subject(x, wrong, validate=True)
            except ArgumentError:
                continue
            raise Violation(f"validate=True accepts id {bad}")


@attack("LP-18", cases)
def layout_changes_no_bit(subject: Subject, case: Rows) -> None:
    """Padded rows and transposed storage against contiguous input."""
    x, ids = case.tensors(subject)
    want = subject(x.contiguous(), ids, temperature=case.temperature)
    for view in (draw.strided(x), x.t().contiguous().t()):
        same_bits(
            "logprob", subject(view, ids, temperature=case.temperature).logprob, want.logprob, "on a strided view"
        )


@attack("LP-19", plain_cases, scale=0.2)
def no_rows_give_empty_results(subject: Subject, case: Rows) -> None:
    """N = 0."""
    x, ids = case.tensors(subject)
    leaf = x[:0].clone().requires_grad_("grad" in subject.claims)
    out = subject(leaf, ids[:0], temperature=case.temperature)
    require(tuple(out.logprob.shape) == (0,), f"no rows give {tuple(out.logprob.shape)}")
    if leaf.requires_grad:
        (grad,) = torch.autograd.grad(out.logprob.sum(), leaf)
        require(tuple(grad.shape) == (0, case.V), f"no rows have a gradient of {tuple(grad.shape)}")


@attack("LP-21", cases)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Rows) -> None:
    """Alone, reversed, repeated: the bits of a row do not move."""
    x, one = case.tensors(subject)
    for ids in listed(subject, case, one):
        want = subject(x, ids, temperature=case.temperature).logprob
        back = subject(x.flip(0), ids.flip(0), temperature=case.temperature).logprob.flip(0)
        same_bits("logprob", back, want, "in a reversed batch")
        alone = torch.cat(
            [subject(x[i : i + 1], ids[i : i + 1], temperature=case.temperature).logprob for i in range(case.N)]
        )
        same_bits("logprob", alone, want, "one row at a time")
        many = subject(x.repeat(40, 1), ids.repeat(40, *[1] * (ids.dim() - 1)), temperature=case.temperature).logprob
        same_bits("logprob", many[-case.N :], want, "at the end of a large batch")


@attack("LP-25", plain_cases)
def a_row_without_a_law_harms_no_other(subject: Subject, case: Rows) -> None:
    """NaN, +inf and all -inf rows give NaN; the others keep their bits."""
    x, one = case.tensors(subject)
    for ids in listed(subject, case, one):
        want = subject(x, ids, temperature=case.temperature).logprob
        for poison in (torch.nan, torch.inf, -torch.inf):
            bad = x.clone()
            bad[0] = poison
            out = subject(bad, ids, temperature=case.temperature).logprob
            require(bool(out[0].isnan().all()), f"a row of {poison} gives {out[0].tolist()!r}, not NaN")
            same_bits("logprob", out[1:], want[1:], f"beside a row of {poison}")


@attack("LP-26", cases)
def gradients_on_and_off_agree(subject: Subject, case: Rows) -> None:
    """The same bits with and without a gradient wanted."""
    x, ids = case.tensors(subject)
    on = subject(x.clone().requires_grad_(), ids, temperature=case.temperature).logprob
    with torch.no_grad():
        off = subject(x, ids, temperature=case.temperature).logprob
    same_bits("logprob", on, off, "with gradients on")


@attack("LP-27", plain_cases)
def masked_rows_ignore_the_upstream_gradient(subject: Subject, case: Rows) -> None:
    """An upstream gradient of NaN on a masked row."""
    if "mask" not in subject.claims:
        return
    x, ids = case.tensors(subject)
    mask = torch.arange(case.N, device=x.device) % 2 == 1
    leaf = x.clone().requires_grad_()
    out = subject(leaf, ids, temperature=case.temperature, mask=mask).logprob
    (grad,) = torch.autograd.grad(out, leaf, torch.where(mask, 1.0, torch.nan).to(out.dtype))
    require(bool((grad[~mask] == 0).all()), "a masked row takes the upstream gradient")
    require(bool(grad.isfinite().all()), "the upstream gradient of a masked row reaches another")


derive("logprob", arguments, inputs_untouched=plain_cases, determinism=cases)

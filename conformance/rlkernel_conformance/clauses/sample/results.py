"""Attacks on what sample@1 says about its draw: log-probabilities, masses, degenerate rows, optional results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.clauses.number_masks import Masked, masked_rows
from rlkernel_conformance.clauses.sample.cases import (
    SCALE,
    Draws,
    alive,
    call,
    definitions,
    described,
    draws,
    everything,
    held,
    plain_draws,
)
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.sampling_batches import Batch, ragged_bias, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import Row
from rlkernel_core.spec.sampling import Penalties, SampleResult, Status


def drawn_rows(subject: Subject, batch: Batch, out: SampleResult) -> tuple[list[int], list[Any], list[int]]:
    """Rows whose kept set is beyond rounding and holds the token: places, definitions, tokens."""
    token = plain(out.token, "token")
    rows = [(i, row) for i, row in alive(subject, batch) if int(token[i]) in row.kept]
    return [i for i, _ in rows], [row for _, row in rows], [int(token[i]) for i, _ in rows]


@attack("SA-05", draws, scale=SCALE)
def log_probabilities_match_float64(subject: Subject, case: Draws) -> None:
    """Of the token that was drawn, under the law it was drawn from."""
    batch = case.batch(subject)
    out = call(subject, batch)
    at, rows, tokens = drawn_rows(subject, batch, out)
    want = [row.log_p[t] for row, t in zip(rows, tokens, strict=True)]
    close(subject, "logprob", out.logprob[at], held(want, case.dtype), case.dtype)
    for i, row in enumerate(definitions(batch)):
        if row.log_p is None:
            require(float(out.logprob[i]) == -math.inf, f"row {i} has no law and log p {float(out.logprob[i])}")


@attack("SA-06", draws, scale=SCALE)
def kept_mass_closes_the_sum(subject: Subject, case: Draws) -> None:
    """The kept mass against the definition; with log p it is the tempered log-probability; 0 where nothing dropped."""
    batch = case.batch(subject)
    out = call(subject, batch)
    at, rows, tokens = drawn_rows(subject, batch, out)
    close(
        subject,
        "log_kept_mass",
        out.log_kept_mass[at],
        held([row.log_kept_mass for row in rows], case.dtype),
        case.dtype,
    )
    hot = [j for j, i in enumerate(at) if batch.rows[i].temperature > 0]
    total = (out.logprob.double() + out.log_kept_mass.double())[[at[j] for j in hot]]
    want = held([rows[j].log_tempered[tokens[j]] for j in hot], case.dtype)
    close(subject, "logprob", total, want, case.dtype, scale=2.0)
    for i, row in zip(at, rows, strict=True):
        if len(row.kept) == (row.x > -np.inf).sum():
            require(float(out.log_kept_mass[i]) == 0, f"row {i} drops nothing; its mass is {out.log_kept_mass[i]}")


@attack("SA-23", lambda s: draws(s, kinds="any", V=33), scale=SCALE)
def degenerate_rows_have_their_stated_answers(subject: Subject, case: Draws) -> None:
    """NaN, infinities, 3e38, denormals: status, token, values; poison in one row changes no bit of another."""
    batch = case.batch(subject)
    asked = everything(subject, case.V)
    out = call(subject, batch, invalid_token=-5, **asked)
    token, status = plain(out.token, "token"), plain(out.status, "status")
    mask = Status.EMPTY | Status.NAN | Status.POSINF | Status.PARAM
    for i, row in enumerate(definitions(batch)):
        require(int(status[i]) & mask == row.status, f"row {i} has status {status[i]}, expected {row.status}")
        if row.log_p is None:
            require(int(token[i]) == -5, f"row {i} without a law draws {token[i]}")
            require(float(out.logprob[i]) == float(out.log_kept_mass[i]) == -math.inf, f"row {i} has a log p")
        else:
            require(0 <= token[i] < case.V, f"row {i} draws {token[i]} of {case.V}")
            require(bool(np.isfinite(plain(out.logprob, "logprob")[i])), f"row {i} has log p {float(out.logprob[i])}")
    x, before = batch.logits.clone(), leaves(out)
    x[0] = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    after = leaves(call(subject, Batch(x, batch.rows), invalid_token=-5, **asked))
    for name, want in before.items():
        same_bits(name, after[name][1:], want[1:], "beside a degenerate row")


@attack("SA-24", lambda s: plain_draws(s, N=4), scale=SCALE)
def parameters_without_meaning_spoil_their_row_alone(subject: Subject, case: Draws) -> None:
    """Temperatures, penalties and biases that mean nothing, in tensors."""
    batch = case.batch(subject, temperature=0.7)
    x, arguments = batch.logits.to(subject.device), batch.arguments(subject.claims, subject.device)
    want = subject(x, **arguments, invalid_token=-5)
    wrong: list[tuple[str, dict[str, Any]]] = []
    if "per_row_parameters" in subject.claims:
        wrong = [(f"T = {T}", {"temperature": torch.tensor([0.7, T, 0.7, 0.7])}) for T in (-1.0, math.nan, math.inf)]
    if "penalties" in subject.claims:
        for name, bad, good in (("repetition", 0.0, 1.0), ("frequency", math.nan, 0.0), ("presence", math.inf, 0.0)):
            wrong.append((f"{name} = {bad}", {"penalties": Penalties(**{name: torch.tensor([good, bad, good, good])})}))
    if "bias" in subject.claims:
        wrong.append(("bias = nan", {"bias": ragged_bias([{}, {0: math.nan}, {}, {}])}))
    others = [0, 2, 3]
    for what, change in wrong:
        if "bias" in change and not float(x[1, 0]) > -math.inf:
            continue  # -inf stays whatever is added
        out = subject(x, **arguments | to(subject.device, change), invalid_token=-5)
        require(bool(int(out.status[1]) & Status.PARAM), f"{what}: status {int(out.status[1])}")
        require(int(out.token[1]) == -5, f"{what}: draws {int(out.token[1])}")
        require(float(out.logprob[1]) == -math.inf, f"{what}: log p {float(out.logprob[1])}")
        found = out.token[others].tolist()
        require(found == want.token[others].tolist(), f"{what} in row 1 changes the tokens of others")
        require(not bool((out.status[others] & Status.PARAM).any()), f"{what} in row 1 is blamed on others")


@attack("SA-25", draws, scale=SCALE)
def the_raw_law_knows_logits_and_token_alone(subject: Subject, case: Draws) -> None:
    """No edit, filter or temperature reaches it."""
    batch = case.batch(subject)
    out = call(subject, batch, raw_logprob=True)
    at, rows, tokens = drawn_rows(subject, batch, out)
    want = [row.log_raw[t] for row, t in zip(rows, tokens, strict=True)]
    close(subject, "raw_logprob", out.raw_logprob[at], held(want, case.dtype), case.dtype)  # type: ignore[index]


@attack("SA-41", masked_rows, examples=(Masked(193, 0), Masked(1283, 8, temperature=0.5)), scale=0.3)
def a_number_masks_as_minus_infinity_does(subject: Subject, case: Masked) -> None:
    """With every filter and without; greedy rows too."""
    if case.dtype not in subject.dtypes:
        return
    x, _ = case.tensors("cpu")
    filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 5}, {"top_p": 0.75}, {"min_p": 0.0625})
    for asked in ({}, *filters[1 + case.seed % 3 :][:1]):
        T = [0.0 if asked and i % 5 == 0 else case.temperature for i in range(len(x))]
        fp32 = np.float64 if case.dtype == "float64" else np.float32
        rows = [Row(temperature=float(fp32(t)), seed=case.seed, step=i, **asked) for i, t in enumerate(T)]
        batch = Batch(x, rows).fit(subject.claims)
        raw = "raw_logprob" in subject.claims
        out = call(subject, batch, **({"raw_logprob": True} if raw else {}))
        token, nearest = plain(out.token, "token"), subject.tolerance("score", "float32")[0]
        for i, row in alive(subject, batch):
            require(int(token[i]) in row.kept, f"row {i} draws {token[i]}, kept are {row.kept.tolist()}")
            right = int(token[i]) == row.token or row.gap <= nearest or not subject.exact_noise
            require(right, f"row {i} draws {token[i]}, expected {row.token}")
        at, laws, tokens = drawn_rows(subject, batch, out)
        want = {"logprob": [row.log_p[t] for row, t in zip(laws, tokens, strict=True)]}
        want["log_kept_mass"] = [row.log_kept_mass for row in laws]
        if raw:
            want["raw_logprob"] = [row.log_raw[t] for row, t in zip(laws, tokens, strict=True)]
        for name, values in want.items():
            close(subject, name, getattr(out, name)[at], held(values, case.dtype), case.dtype)


def best_of(subject: Subject, case: Draws, source: str) -> None:
    """top_ids, top_logprobs and rank under one law."""
    batch = case.batch(subject)
    n = min(5, case.V)
    out = call(subject, batch, top_n=n, top_n_from=source, rank=True)
    at, rows, tokens = drawn_rows(subject, batch, out)
    ids, rank = plain(out.top_ids, "top_ids"), plain(out.rank, "rank")
    for i, row, token in zip(at, rows, tokens, strict=True):
        log_p = row.log_raw if source == "raw" else row.log_p
        x = batch.logits[i].double().numpy() if source == "raw" else row.x
        x = np.where(np.isnan(x), -np.inf, x)
        order = np.lexsort((np.arange(case.V), -x))
        order = order[(log_p > -np.inf)[order]]
        want = [*order[:n].tolist(), *[-1] * (n - len(order))]
        require(ids[i].tolist() == want, f"row {i}: best {n} are {ids[i].tolist()}, expected {want}")
        p = held(np.append(log_p, -np.inf)[want], case.dtype)
        close(subject, "raw_logprob", out.top_logprobs[i], p, case.dtype, scale=2.0)  # type: ignore[index]
        place = int((x > x[token]).sum() + (x[:token] == x[token]).sum())
        require(int(rank[i]) == place, f"row {i}: token {token} has rank {rank[i]}, not {place}")


@attack("SA-40", lambda s: plain_draws(s, V=2500, N=24, kinds="normal"), scale=SCALE)
def a_draw_states_what_the_trainer_computes(subject: Subject, case: Draws) -> None:
    """Under every law, a tensor or number of temperatures: the bits of logprob, of the same backend and logits."""
    batch = case.batch(subject)
    out = call(subject, batch, **({"raw_logprob": True} if "raw_logprob" in subject.claims else {}))
    hot = torch.tensor([row.temperature > 0 for row in batch.rows]) & (out.status.cpu() & ~Status.FALLBACK == 0)
    at, logits = hot.nonzero()[:, 0].to(subject.device), batch.logits.to(subject.device)
    logits, token = logits[at].contiguous(), out.token[at]
    kind = torch.float64 if case.dtype == "float64" else torch.float32
    T = torch.tensor([row.temperature for row in batch.rows], dtype=kind, device=subject.device)[at]
    trainer = Subject(subject.backend, "logprob", subject.device)
    want = trainer(logits, token, temperature=T).logprob
    same_bits("logprob + log_kept_mass", out.logprob[at] + out.log_kept_mass[at], want, "beside logprob's number")
    below = (out.logprob[at] <= 0) & (out.log_kept_mass[at] <= 0)
    require(bool(below.all()), "a log-probability or the log of a kept mass is above 0")
    if out.raw_logprob is not None:
        same_bits("raw_logprob", out.raw_logprob[at], trainer(logits, token).logprob, "beside logprob's at T = 1")


@attack("SA-26", draws, scale=SCALE)
def the_best_under_the_raw_law_come_first(subject: Subject, case: Draws) -> None:
    """By logit descending and id ascending, before any edit."""
    best_of(subject, case, "raw")


@attack("SA-27", draws, scale=SCALE)
def the_best_under_the_processed_law_come_first(subject: Subject, case: Draws) -> None:
    """The same among the kept, -1 behind the last."""
    best_of(subject, case, "processed")


@attack("SA-28", draws, scale=SCALE)
def entropy_is_that_of_the_processed_law(subject: Subject, case: Draws) -> None:
    """Against the definition, within [0, log kept_count]."""
    batch = case.batch(subject)
    out = call(subject, batch, entropy=True)
    at, rows, _ = drawn_rows(subject, batch, out)
    found = out.entropy[at]  # type: ignore[index]
    close(subject, "entropy", found, [row.entropy for row in rows], case.dtype)
    most = np.log([len(row.kept) for row in rows])
    have = plain(found, "entropy")
    require(bool(((have >= -1e-6) & (have <= most + 2e-5)).all()), f"entropies {have.tolist()} above {most.tolist()}")


@attack("SA-29", draws, scale=SCALE)
def the_kept_ids_are_complete_up_to_the_capacity(subject: Subject, case: Draws) -> None:
    """Best first; the capacity changes no bit; overflow is flagged; the threshold describes the same set."""
    batch = case.batch(subject)
    free = call(subject, batch)
    for capacity in (1, 3, case.V, case.V + 5):
        out = call(subject, batch, kept_capacity=capacity)
        alike = torch.ones_like(out.token, dtype=torch.bool) if subject.exact_noise else out.token == free.token
        same_bits("logprob", out.logprob[alike], free.logprob[alike], f"with kept_capacity = {capacity}")
        ids, count = plain(out.kept_ids, "kept_ids"), plain(out.kept_count, "kept_count")
        require(ids.shape == (case.N, capacity), f"kept_ids has shape {ids.shape}, capacity {capacity}")
        flagged = (plain(out.status, "status") & Status.KEPT_OVERFLOW) != 0
        require(bool((flagged == (count > capacity)).all()), f"overflow {flagged.tolist()}, kept {count.tolist()}")
        for i, row in alive(subject, batch):
            want = [*row.kept[:capacity].tolist(), *[-1] * (capacity - len(row.kept))]
            require(ids[i].tolist() == want, f"row {i}: kept ids {ids[i].tolist()}, expected {want}")
            found = described(out, i, row.x)
            require(found == sorted(row.kept.tolist()), f"row {i}: threshold and threshold_id describe {found}")

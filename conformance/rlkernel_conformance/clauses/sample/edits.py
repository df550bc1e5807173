"""Attacks on what changes the logits of sample@1 before its filters: penalties, bias, masks, bans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.sample.cases import SCALE, Draws, call, definitions, plain_draws
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.sampling_batches import Batch, pack, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.extreme_words import LARGE_NOISE, SEED, SMALL_NOISE
from rlkernel_core.spec.sampling import LogitBias, Penalties, Status, TokenLists

NUMBERS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def edited_bits(subject: Subject, batch: Batch) -> None:
    """The edited logits of the first row: log-probabilities, and the threshold of every k, which shows their bits."""
    V, row = batch.logits.shape[1], batch.rows[0]
    exact = {"top_k", "per_row_parameters"} <= subject.claims
    rows = [replace(row, **NUMBERS | {"top_k": k * exact, "seed": k}) for k in range(V)]
    every = Batch(batch.logits[:1].expand(V, V), rows)
    out = call(subject, every)
    want = definitions(every)
    drawn = [i for i, w in enumerate(want) if w.log_p is not None]
    token, threshold = plain(out.token, "token"), plain(out.threshold, "threshold")
    require(bool(((token >= 0) & (token < V)).all()), f"tokens {token.tolist()} of {V}")
    p = [want[i].log_p[int(token[i])] for i in drawn]
    close(subject, "logprob", out.logprob[drawn], p, str(batch.logits.dtype).removeprefix("torch."))
    for k in drawn if exact else ():
        x = np.sort(want[k].x)
        if 0 < k < (x > -np.inf).sum():
            require(threshold[k] == x[-k], f"edited logit {k} of {V} from above is {threshold[k]!r}, not {x[-k]!r}")


@attack("SA-17", lambda s: plain_draws(s, N=1, kinds="normal"), scale=SCALE)
def penalties_follow_their_formulas(subject: Subject, case: Draws) -> None:
    """Repetition, frequency and presence on prompt and output; foreign ids and repeated ones in the history."""
    V, rng = case.V, np.random.default_rng(case.seed)
    batch = case.batch(subject)
    single = np.float64 if case.dtype == "float64" else np.float32
    batch.rows[0].in_prompt, batch.rows[0].out_count = rng.random(V) < 0.4, rng.integers(0, 4, V)
    for r, f, p in ((1.3, 0.0, 0.0), (0.7, 0.4, 0.0), (1.3, -0.3, 0.7)):
        row = replace(batch.rows[0], repetition=float(single(r)), frequency=float(single(f)), presence=float(single(p)))
        edited_bits(subject, Batch(batch.logits, [row]))
    x = batch.logits.to(subject.device)
    ids = torch.tensor([[0, V, -1, 0, V - 1, 2**40]], device=subject.device)
    counted = torch.tensor([[2, 9, 9, 0, 1, 9]], device=subject.device)
    noise = {"seed": case.seed, "step": 3}
    repeated = subject(x, penalties=Penalties(1.5, 0.5, 0.25, None, ids), **noise)
    same = subject(x, penalties=Penalties(1.5, 0.5, 0.25, None, ids, counted if V > 1 else counted + 1), **noise)
    equal = int(repeated.token) == int(same.token) and bool(repeated.logprob == same.logprob)
    text = "an id twice in output_ids is not the same as a count of 2"
    require(equal or V == 1 or not subject.exact_noise, text)


@attack("SA-18", lambda s: plain_draws(s, N=1, kinds="plain"), scale=SCALE)
def a_bias_is_added_and_revives_nothing(subject: Subject, case: Draws) -> None:
    """Values on possible and impossible tokens, -inf among them; repeated and foreign ids, entries behind the last."""
    V, rng = case.V, np.random.default_rng(case.seed)
    batch = case.batch(subject)
    values = (-3.0, 0.0, 2.5, -np.inf, 40.0)
    bias = {int(t): float(rng.choice(values)) for t in rng.choice(V, min(V, 5), replace=False)}
    edited_bits(subject, Batch(batch.logits, [replace(batch.rows[0], bias=bias)]))
    x = batch.logits.to(subject.device)
    noise = {"seed": case.seed, "step": 3}
    twice = lists(subject, "bias", [[(0, 1.0), (V, 9.0), (0, 1.5), (-1, 9.0), (2**40, 9.0)]], spare=0)
    once = lists(subject, "bias", [[(0, 2.5)]], spare=0)
    a, b = subject(x, bias=twice, **noise), subject(x, bias=once, **noise)
    if int(a.token) == int(b.token):
        close(subject, "logprob", a.logprob, plain(b.logprob, "logprob"), case.dtype)
    else:
        require(not subject.exact_noise, "repeated ids do not add up, or a foreign one counts")


def lists(subject: Subject, kind: str, rows: list[list[Any]], spare: int) -> Any:
    """Ragged lists of ids, or of (id, value), with entries of id `spare` behind the last offset."""
    flat = [entry for row in rows for entry in row]
    offsets = torch.tensor(np.cumsum([0, *map(len, rows)]))
    if kind == "banned":
        return to(subject.device, TokenLists(torch.tensor([*flat, spare], dtype=torch.int64), offsets))
    ids = torch.tensor([*(t for t, _ in flat), spare], dtype=torch.int64)
    values = torch.tensor([*(v for _, v in flat), 77.0], dtype=torch.float32)
    return to(subject.device, LogitBias(ids, values, offsets))


def never_drawn(subject: Subject, mask: Any) -> None:
    """At every extreme word: a forbidden token is not drawn, however large its noise; the rest is drawn as it was."""
    table = LARGE_NOISE + SMALL_NOISE
    step = torch.tensor([t for t, _, _ in table], device=subject.device)
    x = torch.zeros(len(table), 7, device=subject.device)
    out = subject(x, seed=SEED, step=step, **mask([token for _, token, _ in table], 7))
    for (at, token, word), found, p in zip(table, out.token.tolist(), out.logprob.tolist(), strict=True):
        require(0 <= found < 7 and found != token, f"step {at}: {found} is drawn; {token} is forbidden, word {word}")
        require(abs(p + np.log(6)) < 1e-5, f"step {at}: log p is {p} among 6 equal tokens")


def only_these(subject: Subject, case: Draws, mask: Any) -> None:
    """One or two allowed tokens at the edges of words, in rows that differ; a row that allows nothing is empty."""
    V, device = case.V, subject.device
    some = sorted({0, V - 1, min(31, V - 1), min(32, V - 1), min(63, V - 1)})
    rows = [[some[i % len(some)], some[(3 * i + 1) % len(some)]] for i in range(12)]
    x = torch.zeros(13, V, device=device)
    allowed = np.zeros((13, V), bool)
    for i, ids in enumerate(rows):
        allowed[i, ids] = True
    step = torch.arange(13, device=device)
    out = subject(x, seed=case.seed, step=step, invalid_token=-5, **mask(allowed))
    for i, ids in enumerate(rows):
        require(int(out.token[i]) in ids, f"row {i} draws {int(out.token[i])}, only {ids} of {V} are allowed")
        require(int(out.kept_count[i]) == len(set(ids)), f"row {i} keeps {int(out.kept_count[i])} of {ids}")
    require(int(out.token[12]) == -5, f"a row that allows nothing draws {int(out.token[12])}")
    require(int(out.status[12]) == Status.EMPTY, f"a row that allows nothing has status {int(out.status[12])}")


@attack(
    "SA-19",
    lambda s: st.builds(Draws, seed=st.integers(0, 63), V=st.sampled_from((33, 64, 100, 1, 7, 31, 32))),
    scale=SCALE,
)
def a_token_whose_bit_is_0_is_never_drawn(subject: Subject, case: Draws) -> None:
    """Also at words 0 and 2^32 - 1; sign bits and last words are read."""

    def bits(allowed: Any) -> dict[str, Any]:
        return {"allowed": pack(allowed).to(subject.device)}

    def all_but(tokens: list[int], V: int) -> dict[str, Any]:
        return bits(np.arange(V)[None] != np.asarray(tokens)[:, None])

    never_drawn(subject, all_but)
    only_these(subject, case, bits)


@attack(
    "SA-20",
    lambda s: st.builds(Draws, seed=st.integers(0, 63), V=st.sampled_from((33, 7, 1, 100))),
    scale=SCALE,
)
def a_banned_token_is_never_drawn(subject: Subject, case: Draws) -> None:
    """Also at words 0 and 2^32 - 1; foreign ids and entries behind the last offset are ignored."""

    def ban(tokens: list[int], V: int) -> dict[str, Any]:
        return {"banned": lists(subject, "banned", [[t, V, -1, 2**40] for t in tokens], spare=0)}

    def rest(allowed: Any) -> dict[str, Any]:
        return {"banned": lists(subject, "banned", [np.flatnonzero(~row).tolist() for row in allowed], spare=0)}

    never_drawn(subject, ban)
    only_these(subject, case, rest)

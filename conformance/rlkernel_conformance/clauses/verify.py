"""Attacks on verify@1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.verify_rounds import (
    COUNTS,
    SCALE,
    Chains,
    Round,
    Rounds,
    as_defined,
    call,
    chain_law,
    chains,
    form_of,
    rounds,
)
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.goodness_of_fit import follows
from rlkernel_conformance.sampling_batches import pack, ragged_bias, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import sample_row, uniform, words
from rlkernel_core.definitions.verify import ACCEPT
from rlkernel_core.spec.sampling import Status, TokenLists


@attack("VF-01", chains, scale=SCALE)
def emitted_tokens_follow_the_targets_law(subject: Subject, case: Chains) -> None:
    """Drafts of any origin: mostly the likeliest token, their law not told."""
    chain_law(subject, case, "strict")


@attack("VF-02", rounds, scale=SCALE)
def strict_tokens_are_those_drawn_one_by_one(subject: Subject, case: Rounds) -> None:
    """Each row draws at step + j with stream 0; a draft is accepted iff it is that token."""
    as_defined(subject, case.round(subject))


@attack("VF-03", chains, scale=SCALE)
def the_law_is_kept_for_any_draft_law(subject: Subject, case: Chains) -> None:
    """Draft laws as probabilities: frequencies, the share of accepted drafts, and the definition's very outcomes."""
    chain_law(subject, case, "probs")
    as_defined(subject, Rounds(case.seed, COUNTS[0], filters=case.filters).round(subject, "probs"))


@attack("VF-04", lambda s: rounds(s, counts=(2,) * 16), scale=SCALE)
def draft_logits_mean_their_softmax(subject: Subject, case: Rounds) -> None:
    """The definition's outcomes at softmax(draft_logits); a constant on them changes nothing."""
    if not subject.exact_noise:
        chain_law(subject, Chains(case.seed, case.filters), "logits")
        return
    made = case.round(subject, "logits")
    out = as_defined(subject, made)
    given = made.arguments(subject)
    given["draft_logits"] += 3.0
    shifted = subject(**given)
    for i in range(len(made.rows)):
        if made.outcome(i).sure:
            mine = made.slices(i)[0]
            same_bits("token", shifted.token[mine], out.token[mine], "with 3 added to draft_logits")


@attack("VF-05", lambda s: rounds(s, counts=(4,) * 8), scale=SCALE)
def equal_laws_accept_every_draft(subject: Subject, case: Rounds) -> None:
    """Drafts of the target's processed law; only acceptance noise within rounding of 1 may reject."""
    made = case.round(subject, "logits")
    rng, laws = np.random.default_rng(case.seed), []
    for i, row in enumerate(made.rows):
        logits = made.target[made.slices(i)[0]]
        x = logits.numpy() if logits.dtype == torch.float64 else logits.float().numpy()
        with np.errstate(all="ignore"):
            laws += [np.exp(sample_row(x[j], row, x.dtype.type).log_p) for j in range(4)]
    made.q = np.stack(laws)
    made.drafts = [int(rng.choice(case.V, p=p)) for p in made.q]
    with np.errstate(divide="ignore"):
        accepted = plain(call(subject, made).accepted, "accepted")
    for i, row in enumerate(made.rows):
        mine = made.drafts[made.slices(i)[1]]
        with np.errstate(all="ignore"):
            sure = made.outcome(i).laws[0].sure(2e-6, 8e-6)
        u = [uniform(words(row.seed, row.step + j, case.V, ACCEPT))[d] for j, d in enumerate(mine)]
        if (max(u) < 1 - 1e-5 or not subject.exact_noise) and sure:
            require(int(accepted[i]) == 4, f"request {i}: {accepted[i]} of 4 drafts of the target's own law accepted")


@attack("VF-06", lambda s: rounds(s, counts=(1,) * 40, filters=False), scale=SCALE)
def a_draft_without_mass_is_never_accepted(subject: Subject, case: Rounds) -> None:
    """Ids of logit -inf, drafted with certainty; the replacement is possible."""
    made = case.round(subject, "probs")
    half = max(1, case.V // 2)
    made.target[:, :half] = -math.inf
    made.drafts = [i % half for i in range(40)]
    made.q = np.eye(case.V)[made.drafts]
    out = call(subject, made)
    require(not bool(out.accepted.any()), f"drafts without mass: {out.accepted.tolist()} accepted")
    require(bool((out.token[::2] >= half).all()), f"impossible replacements: {out.token[::2].tolist()}")


@attack("VF-07", rounds, scale=SCALE)
def log_probabilities_are_the_targets(subject: Subject, case: Rounds) -> None:
    """Of every emitted token: processed law, kept mass, raw law, kept count."""
    made = case.round(subject, form_of(subject))
    raw = {"raw_logprob": True} if "raw_logprob" in subject.claims else {}
    out = call(subject, made, **raw)
    token, count = plain(out.token, "token"), plain(out.kept_count, "kept_count")
    for i in range(len(made.rows)):
        want, first = made.outcome(i), made.slices(i)[0].start
        if not want.sure:
            continue
        shown = len(want.tokens) if subject.exact_noise else int(out.accepted[i]) + 1
        at = range(first, first + min(shown, len(want.laws)))
        p = [law.log_p[int(token[r])] for law, r in zip(want.laws, at, strict=False)]
        close(subject, "logprob", out.logprob[list(at)], p, case.dtype)
        mass = [law.log_kept_mass for law in want.laws[: len(at)]]
        close(subject, "log_kept_mass", out.log_kept_mass[list(at)], mass, case.dtype)
        kept = [len(law.kept) for law in want.laws[: len(at)]]
        require(count[list(at)].tolist() == kept, f"request {i} keeps {count[list(at)].tolist()}, expected {kept}")
        if raw:
            p = [law.log_raw[int(token[r])] for law, r in zip(want.laws, at, strict=False)]
            close(subject, "raw_logprob", out.raw_logprob[list(at)], p, case.dtype)  # type: ignore[index]


@attack("VF-08", lambda s: rounds(s, counts=(1,) * 64, V=3, filters=False), scale=SCALE)
def without_a_residual_the_targets_law_is_drawn(subject: Subject, case: Rounds) -> None:
    """Foreign drafts under laws of ones: rejected, and p - q has no mass anywhere."""
    made = case.round(subject, "probs")
    made.target = made.target[:1].expand(128, -1).clone()
    made.drafts, made.q = [case.V] * 64, np.ones((64, case.V))
    out = as_defined(subject, made)
    require(not bool(out.accepted.any()), "a foreign draft is accepted")
    x = made.target[0].double().numpy()
    follows("replacements without a residual", plain(out.token, "token")[::2], np.exp(x) / np.exp(x).sum())


@attack("VF-09", rounds, scale=SCALE)
def penalties_count_the_drafts_before_a_row(subject: Subject, case: Rounds) -> None:
    """Repetition, frequency and presence, with and without draft laws."""
    for form in {"strict", form_of(subject)}:
        made = case.round(subject, form, edits=True)
        for row in made.rows:
            row.frequency, row.presence, row.repetition = 0.5, 1.5, 1.25
        if form == "strict":  # drafts that are right under the penalties, so that later rows are reached
            for i in range(len(made.rows)):
                mine = made.slices(i)[1]
                for j in range(mine.start, mine.stop):
                    made.drafts[j] = made.outcome(i).tokens[j - mine.start]
        out = as_defined(subject, made)
        for i in range(len(made.rows)):
            want, first = made.outcome(i), made.slices(i)[0].start
            if want.sure and want.tokens and subject.exact_noise:
                last = first + len(want.tokens) - 1
                p = want.laws[len(want.tokens) - 1].log_p[want.tokens[-1]]
                close(subject, "logprob", out.logprob[last : last + 1], [p], case.dtype, scale=2.0)


@attack("VF-10", rounds, scale=SCALE)
def rows_behind_the_last_token_hold_nothing(subject: Subject, case: Rounds) -> None:
    """Invalid token and 0, whatever logits stand there."""
    made = case.round(subject, form_of(subject))
    out = call(subject, made, invalid_token=-7)
    poisoned = Round(made.target.clone(), made.drafts, made.cu, made.rows, made.q, made.form)
    for i in range(len(made.rows)):
        mine = made.slices(i)[0]
        behind = slice(mine.start + int(out.accepted[i]) + 1, mine.stop)
        require(bool((out.token[behind] == -7).all()), f"tokens behind the last one: {out.token[behind].tolist()}")
        for name in ("logprob", "log_kept_mass", "kept_count", "status"):
            value = getattr(out, name)[behind]
            require(bool((value == 0).all()), f"{name} behind the last token: {value.tolist()}")
        poisoned.target[behind] = (math.nan, math.inf)[case.seed % 2]
    again = leaves(call(subject, poisoned, invalid_token=-7))
    for name, value in leaves(out).items():
        same_bits(name, again[name], value, "with poison behind the last token")


@attack("VF-11", lambda s: rounds(s, counts=(2, 1, 2, 1, 2)), scale=SCALE)
def degenerate_rows_reject_in_their_request(subject: Subject, case: Rounds) -> None:
    """Rows of -inf and NaN emit nothing; foreign ids are rejected; other requests keep their bits."""
    made = case.round(subject, form_of(subject))
    want = leaves(call(subject, made))
    bad = Round(made.target.clone(), list(made.drafts), made.cu, made.rows, made.q, made.form)
    spoilt = bad.slices(1)[0]
    bad.target[spoilt] = (-math.inf, math.nan)[case.seed % 2]
    bad.drafts[bad.slices(2)[1].start] = (-1, case.V, 2**40)[case.seed % 3]
    out = call(subject, bad)
    require(out.accepted[[1, 2]].tolist() == [0, 0], f"rows without a law accept: {out.accepted.tolist()}")
    require(int(out.token[spoilt.start]) == -1, f"a row without a law emits {int(out.token[spoilt.start])}")
    status = int(out.status[spoilt.start])
    expected = Status.EMPTY | (Status.NAN if case.seed % 2 else 0)
    require(status == expected, f"a row without a law has status {status}, not {int(expected)}")
    require(float(out.logprob[spoilt.start]) == -math.inf, "a row without a law has a log p")
    emitted = int(out.token[bad.slices(2)[0].start])
    require(0 <= emitted < case.V, f"a foreign draft is replaced by {emitted}")
    as_defined(subject, bad)
    for i in (0, 3, 4):
        for name, value in leaves(out).items():
            mine = slice(i, i + 1) if name == "accepted" else made.slices(i)[0]
            same_bits(name, value[mine], want[name][mine], "beside a request without a law")


@attack("VF-12", rounds, scale=SCALE)
def a_request_has_the_same_outcome_in_any_batch(subject: Subject, case: Rounds) -> None:
    """Every request alone."""
    made = case.round(subject, form_of(subject))
    want = call(subject, made)
    for i, row in enumerate(made.rows):
        mine, drafts = made.slices(i)
        q = None if made.q is None else made.q[drafts]
        alone = Round(made.target[mine], made.drafts[drafts], [0, case.counts[i]], [row], q, made.form)
        out = call(subject, alone)
        require(int(out.accepted) == int(want.accepted[i]), f"request {i} alone: {int(out.accepted)} accepted")
        require(out.token.tolist() == want.token[mine].tolist(), f"request {i} alone: {out.token.tolist()}")
        close(subject, "logprob", out.logprob, plain(want.logprob[mine], "logprob"), case.dtype, scale=2.0)


@attack("VF-21", rounds, scale=SCALE)
def the_same_round_has_again_its_outcome(subject: Subject, case: Rounds) -> None:
    """The same call, after another one and with the global generator elsewhere."""
    made = case.round(subject, form_of(subject))
    want = call(subject, made)
    state = torch.get_rng_state()
    call(subject, replace(case, seed=case.seed + 1).round(subject, form_of(subject)))
    torch.manual_seed(case.seed)
    try:
        out = call(subject, made)
    finally:
        torch.set_rng_state(state)
    for name in ("accepted", "token"):
        same_bits(name, getattr(out, name), getattr(want, name), "when called again")


@attack("VF-13", lambda s: rounds(s, counts=(0,) * 6), scale=SCALE)
def without_drafts_it_is_sample(subject: Subject, case: Rounds) -> None:
    """No drafts: each request draws one token; no requests give empty results."""
    made = case.round(subject)
    out = as_defined(subject, made)
    require(out.token.shape == (6,), f"6 requests without drafts give {tuple(out.token.shape)} tokens")
    given = made.arguments(subject)
    none = {n: v[:0] if isinstance(v, Tensor) else v for n, v in given.items()}
    empty = subject(**none | {"cu_draft": given["cu_draft"][:1]})
    for name, x in leaves(empty).items():
        require(x.shape[0] == 0, f"no requests give {name} of shape {tuple(x.shape)}")


@attack("VF-17", rounds, scale=SCALE)
def edits_belong_to_rows_of_the_target(subject: Subject, case: Rounds) -> None:
    """Masks, lists of banned ids and biases of every row, against the definition on logits that hold them."""
    made = case.round(subject, form_of(subject))
    rng, shape = np.random.default_rng(case.seed + 1), made.target.shape
    hole, ban = (rng.random(shape) < 0.3 for _ in range(2))
    shift = np.where(rng.random(shape) < 0.3, rng.choice([-3.0, 2.5], shape), 0.0)
    bans = [np.flatnonzero(row) for row in ban]
    lists = TokenLists(torch.from_numpy(np.concatenate(bans)), torch.tensor([0, *np.cumsum([len(b) for b in bans])]))
    bias = ragged_bias([{int(t): float(row[t]) for t in np.flatnonzero(row)} for row in shift])
    work = made.target.dtype if made.target.dtype == torch.float64 else torch.float32
    ways: dict[str, tuple[Any, Tensor, Any]] = {
        "allowed": (pack(~hole), torch.from_numpy(hole), 0.0),
        "banned": (lists, torch.from_numpy(ban), 0.0),
        "bias": (bias, torch.zeros(shape, dtype=torch.bool), torch.from_numpy(shift)),
    }
    for name, (value, gone, added) in ways.items():
        if name in subject.claims:
            edited = (made.target.to(work) + added).to(work).masked_fill(gone, -math.inf)
            asked = to(subject.device, {name: value, "target_logits": made.target})
            as_defined(subject, replace(made, target=edited), **asked)


@attack("VF-18", rounds, scale=SCALE)
def a_request_has_the_same_bits_in_any_batch(subject: Subject, case: Rounds) -> None:
    """Alone, and at the end of forty copies of the batch."""
    made = case.round(subject, form_of(subject))
    want = leaves(call(subject, made))
    B, M, n = len(made.rows), made.cu[-1] + len(made.rows), 40
    many = Round(
        made.target.repeat(n, 1),
        made.drafts * n,
        [0, *(made.cu[-1] * k + c for k in range(n) for c in made.cu[1:])],
        made.rows * n,
        None if made.q is None else np.tile(made.q, (n, 1)),
        made.form,
    )
    for name, value in leaves(call(subject, many)).items():
        same_bits(name, value[-B if name == "accepted" else -M :], want[name], "at the end of a large batch")
    for i, row in enumerate(made.rows):
        mine, drafts = made.slices(i)
        q = None if made.q is None else made.q[drafts]
        alone = Round(made.target[mine], made.drafts[drafts], [0, case.counts[i]], [row], q, made.form)
        for name, value in leaves(call(subject, alone)).items():
            place = slice(i, i + 1) if name == "accepted" else mine
            same_bits(name, value, want[name][place], "alone")


@attack("VF-20", rounds, scale=SCALE)
def padding_columns_change_nothing(subject: Subject, case: Rounds) -> None:
    """NaN, +inf and large values beyond the vocabulary; the first of them against the definition."""
    made = case.round(subject, form_of(subject))
    results = []
    for poison in (math.nan, math.inf, 100.0):
        rest = torch.full((made.target.shape[0], 9), poison, dtype=made.target.dtype)
        wide = torch.cat((made.target, rest), 1).to(subject.device)
        results.append(as_defined(subject, made, target_logits=wide, vocab_size=case.V))
        same_results(results[-1], results[0], f"with {poison} in padding columns")


def given_of(subject: Subject, case: Rounds) -> dict[str, Any]:
    """The call of a round with draft laws, where these are claimed, and with edits."""
    return case.round(subject, form_of(subject), edits=True).arguments(subject)


derive("verify", given_of, inputs_untouched=rounds, determinism=rounds, scale=SCALE)

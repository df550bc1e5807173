"""Attacks on what must not matter to sample@1: where a row stands, how it is stored, that it was drawn before."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.sample.cases import (
    OF_THE_LAW,
    SCALE,
    Draws,
    call,
    draws,
    everything,
    plain_draws,
    same_draws,
)
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.sampling_batches import Batch
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.sampling import SampleResult, Status


def part(batch: Batch, rows: list[int]) -> Batch:
    """Some rows of a batch."""
    return Batch(batch.logits[rows], [batch.rows[i] for i in rows])


def same_tokens(found: SampleResult, want: Tensor, when: str) -> None:
    """The tokens are the same."""
    require(torch.equal(found.token, want), f"draws {found.token.tolist()} {when}, else {want.tolist()}")


@attack("SA-21", plain_draws, scale=SCALE)
def padding_columns_change_nothing(subject: Subject, case: Draws) -> None:
    """NaN, +inf and large values beyond the vocabulary."""
    batch = case.batch(subject)
    asked = everything(subject, case.V) | {"vocab_size": case.V}
    given = batch.arguments(subject.claims, subject.device)
    wide = torch.zeros(case.N, case.V + 9, dtype=batch.logits.dtype)
    wide[:, : case.V] = batch.logits
    clean = subject(wide.to(subject.device), **given, **asked)
    if subject.exact_noise:
        same_tokens(clean, call(subject, batch).token, "with padding columns")
    for poison in (math.nan, math.inf, 100.0):
        wide[:, case.V :] = poison
        again = subject(wide.to(subject.device), **given, **asked)
        same_draws(subject, again, clean, f"with {poison} in padding columns")


@attack("SA-22", lambda s: plain_draws(s, N=5), scale=SCALE)
def slots_gather_parameters(subject: Subject, case: Draws) -> None:
    """Against the call with parameters gathered; padding rows hold 0; a slot out of range is flagged."""
    batch = case.batch(subject)
    slot = [4, 0, -1, 4, 2]
    given = batch.arguments(subject.claims, subject.device)
    asked = everything(subject, case.V) | {"invalid_token": -5}
    x = batch.logits[[4, 0, 1, 4, 2]].to(subject.device)
    x[2] = math.nan
    where = torch.tensor(slot, device=subject.device)
    out = leaves(subject(x, **given, slot=where, **asked))
    want = leaves(call(subject, part(batch, [4, 0, 2]), **asked))
    compared = {n: x for n, x in want.items() if subject.exact_noise or n in OF_THE_LAW}
    for name, value in compared.items():
        for i, j in ((0, 0), (3, 0), (1, 1), (4, 2)):
            if value.is_floating_point():
                expected = plain(value[j], name)
                close(subject, "entropy", out[name][i], expected, "float32")
            else:
                same_bits(name, out[name][i], value[j], f"in row {i} of a call with slots {slot}")
    stated = {"token": -5, "kept_ids": -1, "top_ids": -1, "rank": -1, "threshold_id": -1, "top_logprobs": -math.inf}
    for name, value in out.items():
        found = value[2].double()
        require(bool((found == stated.get(name, 0)).all()), f"a padding row has {name} = {found.tolist()}")
    wrong = subject(x[:2], **given, slot=torch.tensor([2, 5], device=subject.device))
    require(bool(int(wrong.status[1]) & Status.PARAM), "slot 5 of 5 is not flagged")
    require(not int(wrong.status[0]) & Status.PARAM, "slot 2 of 5 is flagged")


@attack("SA-31", lambda s: plain_draws(s, N=5), scale=SCALE)
def a_request_draws_the_same_wherever_it_stands(subject: Subject, case: Draws) -> None:
    """Alone, reversed, among 300 rows, in strided rows, in a wider dtype."""
    batch = case.batch(subject)
    want = call(subject, batch).token
    given = batch.arguments(subject.claims, subject.device)
    x = batch.logits.to(subject.device)
    back = list(range(case.N))[::-1]
    if "per_row_parameters" in subject.claims:
        same_tokens(call(subject, part(batch, back)), want[back], "in a reversed batch")
        same_tokens(call(subject, part(batch, back * 60)), want[back].repeat(60), "among 300 rows")
    for i in range(case.N):
        one = {n: v[i : i + 1] if isinstance(v, Tensor) else v for n, v in given.items()}
        same_tokens(subject(x[i : i + 1], **one), want[i : i + 1], "alone")
    for view in (draw.strided(x), x.t().contiguous().t()):
        found = subject.unless_refused(view, **given)
        if found is not None:
            same_tokens(found, want, "on a strided view")
    if case.dtype in {"bfloat16", "float16"} and "float32" in subject.dtypes:
        same_tokens(subject(x.float(), **given), want, f"in float32, not {case.dtype}")


@attack(
    "SA-32",
    lambda s: draws(s, N=5, edits=False),
    examples=(Draws(232, N=5, kinds="any"),),  # a row of infinite logits beside others
    scale=SCALE,
)
def a_row_has_the_same_bits_in_any_batch(subject: Subject, case: Draws) -> None:
    """Alone, reversed, among 300 rows; also where no filter is given, which may be another way through the code."""
    batch = case.batch(subject)
    back = list(range(case.N))[::-1]
    batches = [[i] for i in range(case.N)] if "per_row_parameters" in subject.claims else [[0]]
    for filters, said in (({}, ""), (dict.fromkeys(("top_k", "top_p", "min_p")), " without filters")):
        asked = everything(subject, case.V) | filters
        want = leaves(call(subject, batch, **asked))
        for rows in [*batches, back, back * 60] if len(batches) > 1 else batches:
            for name, value in leaves(call(subject, part(batch, rows), **asked)).items():
                same_bits(name, value, want[name][rows], f"in a batch of {len(rows)}{said}")


@attack("SA-39", lambda s: plain_draws(s, N=5), scale=SCALE)
def the_same_request_draws_again_what_it_drew(subject: Subject, case: Draws) -> None:
    """The same call, after other draws and with the global generator elsewhere; other steps draw other tokens."""
    batch = case.batch(subject)
    want = call(subject, batch).token
    state = torch.get_rng_state()
    call(subject, case.batch(subject, seed=case.seed + 1))
    torch.manual_seed(case.seed)
    try:
        same_tokens(call(subject, batch), want, "when called again")
    finally:
        torch.set_rng_state(state)
    # 32 draws of 4096 equal tokens are all the same once in 10^111 tries.
    x, step = torch.zeros(32, 4096, device=subject.device), torch.arange(32, device=subject.device)
    for counted in ({"seed": case.seed, "step": step}, {"seed": step, "step": case.seed}):
        tokens = subject(x, **counted).token
        require(len(set(tokens.tolist())) > 1, f"32 draws of 4096 equal tokens are all {int(tokens[0])}")


@attack("SA-37", plain_draws, scale=SCALE)
def no_rows_give_empty_results(subject: Subject, case: Draws) -> None:
    """N = 0 with every result asked for."""
    batch = case.batch(subject)
    given = batch.arguments(subject.claims, subject.device)
    none = {n: v[:0] if isinstance(v, Tensor) else v for n, v in given.items()}
    out = subject(batch.logits[:0].to(subject.device), **none, **everything(subject, case.V))
    for name, x in leaves(out).items():
        require(x.shape[0] == 0, f"{name} has shape {tuple(x.shape)} without rows")


def given_of(subject: Subject, case: Draws) -> dict[str, Any]:
    """The call of a batch."""
    batch = case.batch(subject)
    return {"logits": batch.logits.to(subject.device)} | batch.arguments(subject.claims, subject.device)


def with_everything(subject: Subject, case: Draws) -> dict[str, Any]:
    """The call of a batch that asks for every claimed result."""
    return given_of(subject, case) | everything(subject, case.V)


derive("sample", given_of, inputs_untouched=lambda s: draws(s, edits=True), scale=SCALE)
derive("sample", with_everything, determinism=draws, scale=SCALE)
derive("sample", given_of, capture=lambda s: plain_draws(s, N=3, V=33), scale=5 * SCALE)

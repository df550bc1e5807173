"""Attacks on the law of sample@1: which token is drawn, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.sample.cases import (
    SCALE,
    Draws,
    alive,
    call,
    definitions,
    draws,
    plain_draws,
)
from rlkernel_conformance.compare import plain, require
from rlkernel_conformance.goodness_of_fit import follows, independent, share
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.extreme_words import LARGE_NOISE, SEED, SMALL_NOISE
from rlkernel_core.definitions.sampling import Row, sample_row

# A bug shows once n KL(bug || law) exceeds limit(k) by a few standard deviations. With 24 tokens limit = 72, and 4096
# draws of these rows have n KL = 108 to 300 for a temperature wrong by 40 % (1 for 0.7), 98 in the median for 25 %, 215
# in the median for one token of middling mass lost; a filter ignored draws what has no mass, which refutes at once.
# Finer errors of a law are those of single tokens, which SA-02 sees.
# Pairs have 16 classes, limit = 58: equal neighbors (KL = log 4) show in 100 pairs, 20 % of them equal in 2048.
DRAWS = 4096


@dataclass(frozen=True)
class Frequencies:
    """One row of logits, drawn again and again."""

    seed: int
    V: int
    filters: str  # "none" or the names of filters
    over: str  # what counts up from draw to draw

    def row(self, subject: Subject) -> Row:
        """The request."""
        values: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05}
        asked = [n for n in values if n in self.filters.split() and (n == "temperature" or n in subject.claims)]
        return Row(**{n: float(np.float32(values[n])) if n != "top_k" else 7 for n in asked})


def frequencies(subject: Subject) -> st.SearchStrategy[Frequencies]:
    """Few tokens, so that all are frequent."""
    return st.builds(
        Frequencies,
        seed=st.integers(0, 63),
        V=st.sampled_from((24, 5, 2)),
        filters=st.sampled_from(("top_p", "none", "temperature", "temperature top_k top_p min_p")),
        over=st.sampled_from(("step", "seed", "far step", "far seed")),
    )


def noise_of(case: Frequencies, n: int, device: str) -> dict[str, Any]:
    """Seed and step of n draws: one counts up, by 1 or by 2^32."""
    count = torch.arange(n, device=device)
    counted, far = case.over.split()[-1], case.over.startswith("far")
    return {"seed": case.seed, "step": case.seed} | {counted: (count << 32) + 5 if far else count}


@attack("SA-01", draws, scale=SCALE)
def the_token_is_one_that_is_kept(subject: Subject, case: Draws) -> None:
    """Edits, filters and degenerate rows; a row without a law holds the invalid token."""
    batch = case.batch(subject)
    token = plain(call(subject, batch, invalid_token=-9).token, "token")
    for i, row in enumerate(definitions(batch)):
        if row.log_p is None:
            require(int(token[i]) == -9, f"row {i} has no law and draws {token[i]}")
    for i, row in alive(subject, batch):
        require(int(token[i]) in row.kept, f"row {i} draws {token[i]}, kept are {row.kept.tolist()}")


@attack("SA-02", draws, scale=SCALE)
def the_token_is_the_argmax_of_the_noised_scores(subject: Subject, case: Draws) -> None:
    """The very token of the definition, unless two scores are closer than rounding."""
    batch = case.batch(subject)
    token = plain(call(subject, batch).token, "token")
    nearest = subject.tolerance("score", "float32")[0]
    for i, row in alive(subject, batch):
        if row.gap > nearest:
            require(int(token[i]) == row.token, f"row {i} draws {token[i]}, expected {row.token}")


@attack(
    "SA-03",
    frequencies,
    examples=(Frequencies(0, 24, "none", "far step"), Frequencies(1, 5, "temperature", "far seed")),
    scale=SCALE,
)
def tokens_follow_the_law_and_draws_are_independent(subject: Subject, case: Frequencies) -> None:
    """Over 4096 steps or seeds, in one batch; and each draw against the next one."""
    row = case.row(subject)
    x = (np.random.default_rng(case.seed).normal(size=case.V) * 1.5).astype(np.float32)
    want = sample_row(x, row).log_p
    given = {n: getattr(row, n) for n in case.filters.split() if n == "temperature" or n in subject.claims}
    given = {n: v for n, v in given.items() if n != "none"}
    logits = torch.from_numpy(x).to(subject.device).expand(DRAWS, case.V)
    token = plain(subject(logits, **given, **noise_of(case, DRAWS, subject.device)).token, "token")
    follows(f"draws over {case.over}s", token, np.exp(want))
    independent(f"draws over {case.over}s", token[0::2], token[1::2], np.exp(want))


@dataclass(frozen=True)
class Tail:
    """A head and tokens `gap` nats below it."""

    gap: int
    seed: int = 0


@attack(
    "SA-04",
    lambda s: st.builds(Tail, gap=st.sampled_from((6, 14, 16, 18, 20)), seed=st.integers(0, 15)),
    examples=(Tail(14), Tail(18), Tail(30)),
    scale=SCALE / 2,
)
def rare_tokens_keep_their_frequency(subject: Subject, case: Tail) -> None:
    """At steps whose words are known to be extreme, and by counting where that is affordable.

    Counting needs 10^5 draws of 2.6e5 tokens to see that 24-bit noise loses 44 % of the mass 18 nats down. But noise
    is a function of (seed, step, id), so it suffices to look at the steps at which such a token wins: 12 of the words
    below win at 18 nats, none of them with 24 bits; each lost win refutes.
    """
    if subject.exact_noise:
        extreme_words_win_where_they_should(subject, case)
    if case.gap == 6:
        # 128 tokens hold 24 % of the mass: 2048 draws see a loss of a third of it.
        n, V = 2048, 129
        row = torch.full((V,), -float(case.gap), device=subject.device)
        row[100] = 0.0
        step = torch.arange(n, device=subject.device)
        tokens = plain(subject(row.expand(n, V), seed=case.seed, step=step).token, "token")
        mass = (V - 1) * np.exp(-float(case.gap))
        share("tokens 6 nats below the best", int((tokens != 100).sum()), n, float(mass / (1 + mass)))


def extreme_words_win_where_they_should(subject: Subject, case: Tail) -> None:
    """At each step of the table against the definition."""
    table = LARGE_NOISE + SMALL_NOISE
    x = np.full((len(table), 8), -40.0, np.float32)
    x[:, 4] = 0.0
    for i, (_, token, word) in enumerate(table):
        x[i, token] = -case.gap if word < 2**31 else min(case.gap, 8)
    step = torch.tensor([t for t, _, _ in table], device=subject.device)
    found = plain(subject(torch.from_numpy(x).to(subject.device), seed=SEED, step=step).token, "token")
    nearest = subject.tolerance("score", "float32")[0]
    for i, (at, token, word) in enumerate(table):
        want = sample_row(x[i], Row(seed=SEED, step=at))
        if want.gap > nearest:
            text = f"step {at}: token {token} at {x[i, token]} with word {word}"
            require(int(found[i]) == want.token, f"{text}: drew {found[i]}, not {want.token}")


@attack("SA-07", lambda s: plain_draws(s, kinds="tied"), scale=SCALE)
def temperature_zero_is_the_argmax(subject: Subject, case: Draws) -> None:
    """Ties to the lowest id, log-probability exactly 0, one token kept; the token of top_k = 1."""
    batch = case.batch(subject, temperature=0.0)
    out = call(subject, batch)
    best = plain(batch.logits, "logits").argmax(1)
    require(bool((plain(out.token, "token") == best).all()), f"greedy draws {out.token.tolist()}, not {best.tolist()}")
    require(bool((out.logprob == 0).all()), f"greedy log-probabilities are {out.logprob.tolist()}")
    require(bool((out.log_kept_mass == 0).all()), f"greedy kept masses are {out.log_kept_mass.tolist()}")
    require(bool((out.kept_count == 1).all()), f"greedy keeps {out.kept_count.tolist()}")
    if "top_k" in subject.claims:
        one = call(subject, case.batch(subject, temperature=0.7, top_k=1))
        require(bool((plain(one.token, "token") == best).all()), f"top_k = 1 draws {one.token.tolist()}")
        require(bool((one.logprob == 0).all()), f"top_k = 1 has log-probabilities {one.logprob.tolist()}")


@attack("SA-30", lambda s: st.builds(Draws, seed=st.integers(0, 255), V=st.sampled_from((5, 33, 1))), scale=SCALE)
def streams_use_their_own_noise(subject: Subject, case: Draws) -> None:
    """Streams 1, 3 and the last one against the definition; draws of two streams are independent."""
    for stream in (1, 3, 2**32 - 1) if subject.exact_noise else ():
        batch = case.batch(subject, stream=stream)
        token = plain(call(subject, batch).token, "token")
        for i, row in alive(subject, batch):
            if row.gap > subject.tolerance("score", "float32")[0]:
                require(int(token[i]) == row.token, f"stream {stream}, row {i}: {token[i]}, expected {row.token}")
    if case.V == 5:  # 512 pairs: equal streams have KL = log 4, 700 nats
        step = torch.arange(512, device=subject.device)
        x = torch.zeros(512, 4, device=subject.device)
        pair = [plain(subject(x, seed=case.seed, step=step, stream=s).token, "token") for s in (0, 1)]
        independent("streams 0 and 1", *pair, np.full(4, 0.25))


@attack("SA-35", lambda s: plain_draws(s, V=33), scale=SCALE)
def the_unfiltered_winner_wins_every_draw_that_keeps_it(subject: Subject, case: Draws) -> None:
    """Noise belongs to tokens, so a filter that keeps the winner changes nothing."""
    free = case.batch(subject, temperature=0.7)
    given = free.arguments(subject.claims - {"top_k", "top_p", "min_p"}, subject.device)
    winner = plain(subject(free.logits.to(subject.device), **given).token, "token")
    every: tuple[tuple[str, float], ...] = (("top_k", 5), ("top_p", 0.8), ("min_p", 0.1))
    for name, value in ((n, v) for n, v in every if n in subject.claims):
        batch = case.batch(subject, **{"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, name: value})
        token = plain(call(subject, batch).token, "token")
        for i, row in alive(subject, batch):
            if winner[i] in row.kept:
                text = f"row {i} draws {token[i]} under {name} = {value}"
                require(token[i] == winner[i], f"{text}, though {winner[i]} wins without a filter and is kept")

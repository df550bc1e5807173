"""Attacks on lm_head_sample@1: the draws of sample@1 from logits that are made on the way."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.clauses import lm_head_batches, lm_head_one_law, quantized_heads
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.lm_heads import SCALE, Heads, Largest, Operands, as_defined, heads
from rlkernel_conformance.clauses.sample.cases import same_draws
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.goodness_of_fit import follows
from rlkernel_conformance.sampling_batches import Batch, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import SampleResult, Status, TokenLists

__all__ = ["lm_head_batches", "lm_head_one_law", "quantized_heads"]  # whose attacks are registered with these


@attack("LH-01", heads, scale=SCALE, examples=(Heads(0),))
def draws_are_those_of_sample(subject: Subject, case: Heads) -> None:
    """Token and kept set of sample on the logits, wherever the rounding of a matmul leaves no doubt."""
    as_defined(subject, case.operands(subject))


@attack("LH-02", heads, scale=SCALE, examples=(Heads(0, V=1100),))
def log_probabilities_match_float64(subject: Subject, case: Heads) -> None:
    """Of the drawn token, whichever it is; under the raw law too."""
    made = case.operands(subject)
    raw = {"raw_logprob": True} if "raw_logprob" in subject.claims else {}
    out: SampleResult = subject(**made.arguments(subject, **raw))
    token = plain(out.token, "token")
    dtype = "float64" if case.dtype == "float64" else "float32"
    for i, law in made.definitions():
        off = float(made.error[i].max()) / (made.batch.rows[i].temperature or 1.0)
        scale = 1 + 2 * off / subject.tolerance("logprob", dtype)[0]
        close(subject, "logprob", out.logprob[i : i + 1], [law.log_p[token[i]]], dtype, scale=scale)
        close(subject, "log_kept_mass", out.log_kept_mass[i : i + 1], [law.log_kept_mass], dtype, scale=scale)
        if raw:
            want = [law.log_raw[token[i]]]
            close(subject, "raw_logprob", out.raw_logprob[i : i + 1], want, dtype, scale=scale * 2)  # type: ignore[index]


@attack("LH-03", lambda s: st.builds(Heads, seed=st.integers(0, 15), V=st.just(8192), N=st.just(64)), scale=SCALE / 2)
def without_filters_no_logits_are_stored(subject: Subject, case: Heads) -> None:
    """The largest tensor on a CPU, the peak of memory on a CUDA device, against N x V."""
    on_gpu = subject.device.startswith("cuda")
    # Tiles have a price of their own, some dozen times their size; on a CUDA device N x V dwarfs that.
    N, V = (256, 2**18) if on_gpu else (case.N, case.V)
    g = torch.Generator().manual_seed(case.seed)
    hidden = torch.randn(N, case.D, generator=g).to(subject.device)
    weight = torch.randn(V, case.D, generator=g).to(subject.device)
    given = {"seed": torch.arange(N, device=subject.device), "step": case.seed}
    subject(hidden, weight, **given)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        subject(hidden, weight, **given)
        torch.cuda.synchronize()
        most = (torch.cuda.max_memory_allocated() - before) / 4
    else:
        with Largest() as seen:
            subject(hidden, weight, **given)
        most = seen.elements
    require(most < N * V / 4, f"memory of {most:.0f} elements for logits of {N * V}")


# 2048 draws over 16 tokens: limit(16) = 58 nats, so KL = 0.05 shows: a tile counted twice or lost, a wrong temperature.
@attack("LH-04", lambda s: st.builds(Heads, seed=st.integers(0, 63), V=st.just(16), N=st.just(2048)), scale=SCALE)
def tokens_follow_the_law(subject: Subject, case: Heads) -> None:
    """One hidden state over 2048 steps; with the last tile of a long head far below the rest."""
    rng = np.random.default_rng(case.seed)
    hidden = torch.from_numpy(rng.normal(size=(1, 4)).astype(np.float32))
    for V in (16, 1040):
        weight = torch.from_numpy(rng.normal(size=(V, 4)).astype(np.float32))
        bias = torch.zeros(V)
        live = [*range(8), *range(V - 8, V)]  # on both sides of an edge between tiles
        if V > 16:
            if "bias" not in subject.claims:
                return
            bias[8 : V - 8] = -40.0
        x = (hidden.double() @ weight.double().T)[0] + bias.double()
        p = torch.softmax(x / 0.7, 0).numpy()
        n = case.N if V == 16 else 256
        step = torch.arange(n, device=subject.device)
        head = {"bias": bias.to(subject.device)} if V > 16 else {}
        given = to(subject.device, {"hidden": hidden.expand(n, 4), "weight": weight})
        token = plain(subject(**given, **head, temperature=0.7, seed=case.seed, step=step).token, "token")
        place = {t: k for k, t in enumerate(live)}
        require(set(token.tolist()) <= place.keys(), "tokens 40 nats down are drawn")
        follows(f"draws of a head of {V}", [place[t] for t in token.tolist()], p[live] / p[live].sum())


@attack(
    "LH-05", lambda s: st.sampled_from((1100, 2100)).flatmap(lambda V: heads(s, N=8, V=V, filters=False)), scale=SCALE
)
def degenerate_rows_are_those_of_sample(subject: Subject, case: Heads) -> None:
    """NaN and infinities of single logits in any tile, through one-hot hidden states; other rows keep their bits."""
    made = case.operands(subject)
    work = made.batch.logits.dtype
    kind = made.weight.dtype
    eye = torch.eye(8, dtype=kind)
    weight = torch.round(made.weight * 4) / 4
    places = [case.seed % case.V, 1023, 1024, case.V - 1]
    x = weight.clone().double()
    clean = subject(**made.arguments(subject) | to(subject.device, {"hidden": eye, "weight": weight}))
    # A NaN or infinity in the head reaches every row (0 * inf), so the poison is in hidden states, by the row.
    hidden = eye.clone()
    hidden[1], hidden[2] = torch.nan, torch.inf
    hidden[5] = 0.0
    given = made.arguments(subject, invalid_token=-5) | to(subject.device, {"hidden": hidden, "weight": weight})
    out = subject(**given)
    status = plain(out.status, "status")
    require(bool(status[1] & Status.NAN and status[1] & Status.EMPTY), f"a row of NaN has status {status[1]}")
    require(int(out.token[1]) == -5, f"a row of NaN draws {int(out.token[1])}")
    require(float(out.logprob[1]) == -math.inf, f"a row of NaN has log p {float(out.logprob[1])}")
    infinite = (hidden[2].double() * x).sum(1)
    drawn, plus = int(out.token[2]), torch.isposinf(infinite).sum()
    if plus:
        require(bool(status[2] & Status.POSINF), f"a row with +inf has status {status[2]}")
        require(bool(torch.isposinf(infinite)[drawn]), f"a row with +inf draws {drawn}, which is not")
    for name, value in leaves(out).items():
        for i in (0, 3, 4, 6, 7):
            same_bits(name, value[i], leaves(clean)[name][i], "beside degenerate rows")
    if {"logit_bias", "bias"} <= subject.claims:
        # Single tokens: a bias of the head forbids all but a few, at the edges of tiles.
        few = torch.full((case.V,), -torch.inf, dtype=work)
        few[places] = 0.0
        only = subject(**given | to(subject.device, {"bias": few, "hidden": eye}))
        require(bool(torch.isin(only.token.cpu(), torch.tensor(places)).all()), f"forbidden: {only.token.tolist()}")
        none = subject(**given | to(subject.device, {"bias": torch.full_like(few, -torch.inf), "hidden": eye}))
        require(bool((none.token == -5).all()), f"an empty law draws {none.token.tolist()}")
        require(bool((none.status == Status.EMPTY).all()), f"an empty law has status {none.status.tolist()}")
        alone = torch.full_like(few, -torch.inf)
        alone[places[0]] = 0.0
        temperature = torch.tensor([0.0, 0.7], dtype=torch.float32).repeat(4)
        lone = subject(**given | to(subject.device, {"bias": alone, "hidden": eye, "temperature": temperature}))
        require(bool((lone.token == places[0]).all()), f"one id is allowed, drawn are {lone.token.tolist()}")
        require(bool((lone.threshold == -torch.inf).all()), f"nothing is cut, thresholds are {lone.threshold.tolist()}")
        require(bool((lone.threshold_id == -1).all()), f"nothing is cut at an id, got {lone.threshold_id.tolist()}")


@attack("LH-06", lambda s: heads(s, edits=True), scale=SCALE, examples=(Heads(0, V=1100, edits=True),))
def edits_act_on_tiles_as_on_rows(subject: Subject, case: Heads) -> None:
    """Masks and penalties at every tile; the masks as lists of banned ids too."""
    made = case.operands(subject)
    as_defined(subject, made)
    if "banned" in subject.claims:
        bans = [np.flatnonzero(~row.allowed) for row in made.batch.rows]
        lists = TokenLists(
            torch.from_numpy(np.concatenate(bans)), torch.tensor([0, *np.cumsum([len(b) for b in bans])])
        )
        as_defined(subject, made, allowed=None, banned=lists)


@attack("LH-07", heads, scale=SCALE)
def the_bias_of_the_head_comes_first(subject: Subject, case: Heads) -> None:
    """Before scale and cap, where those are claimed; -inf forbids an id."""
    bias = torch.randn(case.V, generator=torch.Generator().manual_seed(case.seed + 9)).to(getattr(torch, case.dtype))
    if case.V > 1:
        bias[case.seed % case.V] = -torch.inf
    as_defined(subject, case.operands(subject, bias=bias))
    more = {n: v for n, v in {"logit_scale": 0.5, "softcap": 3.0}.items() if n in subject.claims}
    as_defined(subject, case.operands(subject, bias=bias, **more))


@attack("LH-08", heads, scale=SCALE)
def the_bias_of_a_row_comes_after_the_cap(subject: Subject, case: Heads) -> None:
    """Values and bans on some tokens of each row."""
    rng = np.random.default_rng(case.seed)
    made = case.operands(subject, **({"softcap": 2.0} if "softcap" in subject.claims else {}))
    for row in made.batch.rows:
        values = (-3.0, 2.5, 6.0, -math.inf)
        row.bias = {int(t): float(rng.choice(values)) for t in rng.choice(case.V, min(case.V, 40), replace=False)}
    as_defined(subject, made)


@attack("LH-09", heads, scale=SCALE)
def the_scale_multiplies_the_logits(subject: Subject, case: Heads) -> None:
    """Against the definition; a power of two is exactly that of the hidden states."""
    as_defined(subject, case.operands(subject, logit_scale=0.3))
    made = case.operands(subject, logit_scale=0.5)
    given = made.arguments(subject)
    half = given | {"hidden": given["hidden"] * 0.5, "logit_scale": 1.0}
    if subject.exact_noise:
        same_bits("token", subject(**given).token, subject(**half).token, "with hidden * 0.5 for logit_scale 0.5")


@attack("LH-10", heads, scale=SCALE)
def the_cap_bends_the_logits_first(subject: Subject, case: Heads) -> None:
    """Before temperature; part of the raw law."""
    made = case.operands(subject, softcap=2.0)
    raw = {"raw_logprob": True} if "raw_logprob" in subject.claims else {}
    out = as_defined(subject, made, **raw)
    for i, law in made.definitions() if raw else ():
        scale = 4 + 4 * float(made.error[i].max()) / subject.tolerance("raw_logprob", "float32")[0]
        found = out.raw_logprob[i : i + 1]  # type: ignore[index]
        close(subject, "raw_logprob", found, [law.log_raw[int(out.token[i])]], "float32", scale=scale)


@attack("LH-11", heads, scale=SCALE)
def rows_of_the_head_beyond_the_vocabulary_change_nothing(subject: Subject, case: Heads) -> None:
    """NaN, infinities and large values there."""
    made = case.operands(subject)
    given = made.arguments(subject)
    results = []
    for poison in (0.0, math.nan, math.inf, 1e4):
        rest = torch.full((60, case.D), poison, dtype=made.weight.dtype, device=subject.device)
        padded = given | {"weight": torch.cat((given["weight"], rest)), "vocab_size": case.V}
        results.append(subject(**padded))
        same_draws(subject, results[-1], results[0], f"with {poison} beyond the vocabulary")
    made.head["vocab_size"] = case.V
    as_defined(subject, made)


@attack("LH-12", lambda s: heads(s, dtype="bfloat16"), scale=SCALE)
def operands_of_two_dtypes_are_exact(subject: Subject, case: Heads) -> None:
    """Fp32 hidden states that bf16 holds, on a bf16 head, give what bf16 ones give; and others against float64."""
    if "mixed_dtypes" not in subject.claims or "float32" not in subject.dtypes:
        return
    made = case.operands(subject)
    made.hidden = made.hidden.float()
    as_defined(subject, made)
    fine = replace(case, dtype="float32").operands(subject)
    x = fine.hidden.double() @ made.weight.double().T
    size = fine.hidden.double().abs() @ made.weight.double().abs().T
    batch = Batch(x.float(), fine.batch.rows)
    atol, _ = subject.tolerance("logits", "float32")
    as_defined(subject, Operands(fine.hidden, made.weight, batch, (size * atol).numpy(), {}))


@attack("LH-15", heads, scale=SCALE)
def no_rows_give_empty_results(subject: Subject, case: Heads) -> None:
    """N = 0, with and without filters."""
    given = case.operands(subject).arguments(subject)
    none = {n: v[:0] if isinstance(v, Tensor) and n != "weight" else v for n, v in given.items()}
    for name, x in leaves(subject(**none)).items():
        require(x.shape[0] == 0, f"{name} has shape {tuple(x.shape)} without rows")


# Of few sizes, since kernels for rows differ by it: less than a tile, and several with a ragged end.
@attack("LH-18", lambda s: st.sampled_from((2100, 33, 7, 1)).flatmap(lambda V: heads(s, V=V)), scale=SCALE)
def results_of_whole_rows_match_float64(subject: Subject, case: Heads) -> None:
    """Entropy, kept ids, the best tokens and the rank, as far as no allowed error of the logits changes them."""
    made = case.operands(subject)
    asked: dict[str, dict[str, Any]] = {"entropy": {"entropy": True}, "kept_ids": {"kept_capacity": case.V}}
    more: dict[str, Any] = {n: v for f, given in asked.items() if f in subject.claims for n, v in given.items()}
    n = min(3, case.V)
    # Each set of results that is asked for may be kernels of its own, which take seconds to compile: most cases ask for
    # all in one call, with one set for either law; one in eight asks for ranks and for the rest apart.
    apart = case.seed % 8 == 7
    if not apart and "raw_logprob" in subject.claims:
        more["raw_logprob"] = True
    out = None
    for source in [s for s in ("raw", "processed") if f"top_n:{s}" in subject.claims]:
        ranking = {"top_n": n, "top_n_from": source, "rank": True}
        out = subject(**made.arguments(subject, **ranking, **({} if apart else more)))
        for i, law in made.definitions():
            best_in_doubt(subject, made, out, i, law.log_raw if source == "raw" else law.log_p)
    if apart or out is None:
        out = subject(**made.arguments(subject, **more))
    dtype = "float64" if case.dtype == "float64" else "float32"
    for i, law in made.definitions():
        slack = 2 * float(made.error[i].max())
        if out.entropy is not None:
            off = slack / (made.batch.rows[i].temperature or 1.0) * (2 + law.entropy)
            scale = 1 + off / subject.tolerance("entropy", dtype)[0]
            close(subject, "entropy", out.entropy[i : i + 1], [law.entropy], dtype, scale=scale)
        if out.kept_ids is not None:
            ids = plain(out.kept_ids[i], "kept_ids")
            kept = ids[: len(law.kept)]
            require(sorted(kept) == sorted(law.kept), f"row {i} keeps {kept.tolist()}, expected {law.kept.tolist()}")
            require(bool((ids[len(law.kept) :] == -1).all()), f"row {i}: ids behind the kept ones")
            rise = np.diff(law.x[kept]).max(initial=-math.inf)
            require(rise <= slack, f"row {i}: kept ids are not best first")


def best_in_doubt(subject: Subject, made: Operands, out: SampleResult, i: int, log_p: Any) -> None:
    """Best tokens and rank of a row under a law; tokens within the error of the logits may change places."""
    slack = 2 * float(made.error[i].max()) / min(made.batch.rows[i].temperature or 1.0, 1.0) + 1e-9
    ids, token = plain(out.top_ids, "top_ids")[i], int(out.token[i])
    best = np.sort(log_p[log_p > -np.inf])[::-1][: len(ids)]
    require(bool((ids[len(best) :] == -1).all()), f"row {i}: best ids {ids.tolist()} of {len(best)} tokens")
    ids = ids[: len(best)]
    require(len(set(ids.tolist())) == len(best) and bool((ids >= 0).all()), f"row {i}: best ids {ids.tolist()}")
    require(
        bool((np.abs(log_p[ids] - best) <= slack).all()), f"row {i}: best ids {ids.tolist()}, log p {best.tolist()}"
    )
    dtype = "float64" if made.batch.logits.dtype == torch.float64 else "float32"
    scale = 2 * (1 + slack / subject.tolerance("raw_logprob", dtype)[0])
    found = out.top_logprobs[i][: len(best)]  # type: ignore[index]
    close(subject, "raw_logprob", found, log_p[ids], dtype, scale=scale)
    low, high = int((log_p > log_p[token] + slack).sum()), int((log_p >= log_p[token] - slack).sum()) - 1
    rank = int(plain(out.rank, "rank")[i])
    require(low <= rank <= high, f"row {i}: token {token} has rank {rank}, not within {low} and {high}")


@attack("LH-22", lambda s: heads(s, N=5), scale=SCALE)
def the_same_request_draws_again_what_it_drew(subject: Subject, case: Heads) -> None:
    """The same call, after another one and with the global generator elsewhere."""
    given = case.operands(subject).arguments(subject)
    want = subject(**given).token
    state = torch.get_rng_state()
    subject(**replace(case, seed=case.seed + 1).operands(subject).arguments(subject))
    torch.manual_seed(case.seed)
    try:
        same_bits("token", subject(**given).token, want, "when called again")
    finally:
        torch.set_rng_state(state)


@attack("LH-23", heads, scale=SCALE)
def lora_adds_its_product(subject: Subject, case: Heads) -> None:
    """Before scale and cap, where those are claimed; of two ranks, and in fp32 beside any head; written in place."""
    g, r = torch.Generator().manual_seed(case.seed + 10), (2, 18)[case.seed % 2]
    kind = torch.float32 if case.seed % 3 else getattr(torch, case.dtype)
    lora = LoRA(*(torch.randn(*shape, generator=g).to(kind) for shape in ((r, case.D), (case.V, r))), scale=-0.3)
    more = {n: v for n, v in {"logit_scale": 0.5, "softcap": 3.0}.items() if n in subject.claims}
    as_defined(subject, case.operands(subject, lora=lora, **more))
    lora.B.mul_(-1)
    as_defined(subject, case.operands(subject, lora=lora))


@attack("LH-21", lambda s: heads(s, N=5), scale=SCALE)
def slots_gather_parameters(subject: Subject, case: Heads) -> None:
    """Against the definition of the gathered rows; a padding row of NaN draws nothing."""
    made = case.operands(subject)
    slot = [4, 0, -1, 4, 2]
    hidden = made.hidden[slot].clone()
    hidden[2] = math.nan
    where = torch.tensor(slot, device=subject.device)
    out = subject(**made.arguments(subject, hidden=hidden, slot=where, invalid_token=-5))
    laws = dict(made.definitions())
    for i, j in enumerate(slot):
        if j in laws:
            drawn, want = int(out.token[i]), laws[j]
            right = drawn == want.token if subject.exact_noise else drawn in want.kept
            require(right, f"row {i} draws {drawn}, slot {j} {want.token}")
    require(int(out.token[2]) == -5, f"a padding row draws {int(out.token[2])}")
    for name in ("logprob", "log_kept_mass", "kept_count", "status"):
        require(float(getattr(out, name)[2]) == 0, f"a padding row has {name} = {float(getattr(out, name)[2])}")


def with_bias(subject: Subject, case: Heads) -> dict[str, Any]:
    """The call with a bias of the head, where that is claimed."""
    bias = {"bias": torch.zeros(case.V, dtype=getattr(torch, case.dtype))} if "bias" in subject.claims else {}
    return case.operands(subject, **bias).arguments(subject)


derive(
    "lm_head_sample",
    with_bias,
    inputs_untouched=lambda s: heads(s, edits=True),
    determinism=heads,
    scale=SCALE,
)

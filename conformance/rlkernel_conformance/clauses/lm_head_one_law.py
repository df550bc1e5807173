"""The attack on the feature trainer_bits of lm_head_sample@1: a draw states what linear_logprob@1 computes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.lm_heads import SCALE, Heads, as_defined, heads
from rlkernel_conformance.clauses.quantized_heads import stored
from rlkernel_conformance.compare import require, same_bits
from rlkernel_conformance.sampling_batches import to
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.lm_head_sample import TRAINER_BITS
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import SampleResult, Status

SIZES = (2500, 9000, 65)  # several pieces of a tile each, pieces of several tiles, and less than a tile


def kinds(subject: Subject) -> st.SearchStrategy[Heads]:
    """Every claimed dtype, with and without filters, of few sizes."""
    return st.sampled_from(SIZES).flatmap(lambda V: heads(subject, V=V, N=12))


def head_of(case: Heads, common: frozenset[str]) -> dict[str, Any]:
    """What else makes the logits, of what is claimed of both operators; each in some of the cases."""
    g, kind = torch.Generator().manual_seed(case.seed + 11), getattr(torch, case.dtype)
    made: dict[str, Any] = {"bias": torch.randn(case.V, generator=g).to(kind), "softcap": 3.0, "logit_scale": 0.5}
    made["lora"] = LoRA(*(torch.randn(*s, generator=g).to(kind) for s in ((3, case.D), (case.V, 3))), scale=-0.3)
    chosen = {n: v for i, (n, v) in enumerate(made.items()) if n in common and case.seed >> i & 1}
    if "quantized" in common and case.seed % 5 == 4:
        weight, _ = stored(torch.randn(case.V, case.D, generator=g), case.seed)
        chosen["weight"] = weight
    return chosen


@attack("LH-25", kinds, scale=SCALE, examples=(Heads(4, V=2500), Heads(0, V=9000, filters=True)))
def a_draw_states_what_the_trainer_computes(subject: Subject, case: Heads) -> None:
    """Under every law, temperatures in a tensor or a number: the bits of linear_logprob, of the same backend.

    Where a backend has an implementation of its own for this feature, its draws are those of the definition.
    """
    trainer, asked = replace(subject, op="linear_logprob", check=None), replace(subject, need=(TRAINER_BITS.name,))
    if case.dtype not in trainer.dtypes:
        return
    head = to(subject.device, head_of(case, asked.claims & trainer.claims))
    made = case.operands(subject)
    given = {**made.arguments(subject), **head}
    if case.seed % 3 == 2:
        given["temperature"] = 0.7
    raw = {"raw_logprob": True} if "raw_logprob" in asked.claims else {}
    with asked.chosen():
        out: SampleResult = asked(**given, **raw)
        if asked.impls != subject.impls:
            as_defined(asked, made)
    T = torch.as_tensor(given["temperature"], device=subject.device).expand(len(out.token))
    at = ((T > 0) & (out.status & ~Status.FALLBACK == 0)).nonzero()[:, 0]
    of_head = {"hidden": given["hidden"][at].contiguous(), "weight": given["weight"], "ids": out.token[at]} | head
    hot = given["temperature"] if case.seed % 3 == 2 else T[at].contiguous()
    want = trainer(**of_head, temperature=hot).logprob
    same_bits(
        "logprob + log_kept_mass", out.logprob[at] + out.log_kept_mass[at], want, "beside linear_logprob's number"
    )
    below = (out.logprob[at] <= 0) & (out.log_kept_mass[at] <= 0)
    require(bool(below.all()), "a log-probability or the log of a kept mass is above 0")
    if out.raw_logprob is not None:
        same_bits("raw_logprob", out.raw_logprob[at], trainer(**of_head).logprob, "beside linear_logprob's at T = 1")

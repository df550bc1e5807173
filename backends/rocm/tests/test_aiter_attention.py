"""Why the backend `aiter` supplies no attention: the arithmetic of AITER's kernels, judged by attention's clauses.

Read in AITER 0.1.20.post1 (`mha_batch_prefill`) and in Composable Kernel, whose kernels it builds (the places are in
docs/ops/attention.md); run on no AMD GPU. Keys come in tiles of 128 by position, queries in blocks of 128. With
c = scale log2(e) a weight is exp2(c s - c m), and what came before is multiplied by exp2(c m' - c m). HIP's compiler
fuses c s with the difference, which then is not 0 where s = m. gfx942 cuts weights and out to bf16, gfx950 rounds them.

Legend: m queries of a block · n keys of a sequence · H heads of queries, of a width D.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec.attention import AttentionResult, scale_of

TILE = 128  # queries of a block, and keys of a tile
LOG2E = np.float32(1.4426950408889634)


def rounded(x):
    """fp32 to the nearest bf16."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def cut(x):
    """fp32 without its last 16 bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def exp2_of_difference(x, m, c, fused):
    """exp2(c x - (c m)) in fp32; the product c m is rounded, and c x too unless it is fused."""
    product = x.astype(np.float64) * c
    difference = (product if fused else product.astype(np.float32)) - (c * m).astype(np.float64)
    return np.exp2(difference.astype(np.float32), dtype=np.float64).astype(np.float32)


def block(q, k, v, at, c, store, fused, causal):
    """out [H, m, D] and lse [H, m], fp32, of queries [H, m, D] at positions `at`, each of which sees a key."""
    m, total = np.full(q.shape[:2], -np.inf, np.float32), np.zeros(q.shape[:2], np.float32)
    out, n = np.zeros_like(q), k.shape[1]
    for start in range(0, min(n, at[-1] + 1) if causal else n, TILE):
        keys = np.arange(start, min(start + TILE, n))
        s = (q.astype(np.float64) @ k[:, keys].astype(np.float64).transpose(0, 2, 1)).astype(np.float32)
        if causal:
            s[:, keys[None] > at[:, None]] = -np.inf
        before, m = m, np.maximum(m, s.max(-1))
        p = exp2_of_difference(s, m[..., None], c, fused)
        less = exp2_of_difference(before, m, c, fused)
        total = less * total + p.sum(-1, dtype=np.float64).astype(np.float32)
        out = (out * less[..., None] + store(p).astype(np.float64) @ v[:, keys].astype(np.float64)).astype(np.float32)
    return store(out / total[..., None]), (m * c / LOG2E + np.log(total)).astype(np.float32)


def attention(call, store, fused):
    """Packed rows of bf16; queries without keys as the contract has them."""
    wide = [x.detach().float().numpy().transpose(1, 0, 2) for x in (call.q, call.k, call.v)]
    q, k, v = wide[0], *(np.repeat(x, wide[0].shape[0] // x.shape[0], 0) for x in wide[1:])
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, np.float32)
    cu_k = call.cu_q if call.cu_k is None else call.cu_k
    c = np.float32(scale_of(call)) * LOG2E
    for (first, last), (begin, end) in zip(pairwise(call.cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        blind = max(last - first - (end - begin), 0) if call.causal or begin == end else 0
        for start in range(first + blind, last, TILE):
            rows = slice(start, min(start + TILE, last))
            at = np.arange(rows.start, rows.stop) - last + end - begin
            seen = k[:, begin:end], v[:, begin:end]
            out[:, rows], lse[:, rows] = block(q[:, rows], *seen, at, c, store, fused, call.causal)
    return AttentionResult(
        torch.from_numpy(out).transpose(0, 1).bfloat16().contiguous(), torch.from_numpy(lse).T.contiguous()
    )


ON_GFX942 = partial(attention, store=cut, fused=True)
ON_GFX950 = partial(attention, store=rounded, fused=True)
CUT_UNFUSED = partial(attention, store=cut, fused=False)
UNFUSED = partial(attention, store=rounded, fused=False)


def judge(how, clause):
    """How a clause fares."""
    impl = Impl(
        op="attention@1",
        target=f"{__name__}:{how}",
        requires=Requires(device="cpu", dtypes=("bfloat16",)),
        supports=frozenset({"deterministic", "batch_invariant", "bidirectional"}),
    )
    with rlk.registered(Backend(name="read", api=API_VERSION, impls=(impl,))):
        subject = Subject("read", "attention")
        (attack,) = (a for a in clauses_of(subject)[0] if a.clause.id == clause)
        with subject.chosen():
            return carry_out(subject, attack, Profile("few", examples=10, limit_s=60), shrink=False).status


@pytest.mark.parametrize(
    ("how", "clause", "status"),
    [
        ("ON_GFX942", "AT-01", "violated"),
        ("ON_GFX942", "AT-02", "violated"),
        ("CUT_UNFUSED", "AT-01", "violated"),
        ("ON_GFX950", "AT-01", "held"),
        ("ON_GFX950", "AT-02", "held"),
        ("ON_GFX950", "AT-16", "violated"),
        ("UNFUSED", "AT-02", "held"),
        ("UNFUSED", "AT-16", "held"),
    ],
)
def test_what_clauses_say_of_the_arithmetic(how, clause, status) -> None:
    assert judge(how, clause) == status

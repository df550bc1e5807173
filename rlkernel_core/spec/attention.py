"""attention@1: softmax attention of packed sequences, keys in rows or in pages; a query's bits are its own.

    s_j = scale q . k_j                  or with softcap c: c tanh(scale q . k_j / c)       (Gemma 2, arXiv:2408.00118)
    p_j = exp(s_j - lse),   lse = log(sum_j exp(s_j) + exp(sink))                the sink of a head, where given
    out = round(sum_j p_j v_j)           over the keys j that the query sees                (arXiv:1706.03762)

Sequence b has queries and keys of its own. Its queries are the last of its positions, as in FlashAttention's varlen
calls: of n keys and m queries, query i stands at position n - m + i. It sees keys 0 to its own position; with
`window=w` the last w of these, itself among them (Mistral's, arXiv:2310.06825); with `causal=False` all n. So a whole
prompt, a part of it behind what is known already, and one token more are the same call. Query head h reads the keys of
head h // (Hq / Hk) (GQA, arXiv:2305.13245). A sink is a logit without a value (arXiv:2309.17453, as gpt-oss trains it).

The arithmetic is fp32 (float64 where q is) with one rounding of out, but that p may be rounded to the dtype of v before
it is multiplied, as every fused kernel does. The order of sums is an implementation's own, and a manifest may name it
(`sums`). It must go by positions alone: a query has the same bits in a prompt, behind a cache, alone, and in any pages.

Legend: T queries · S keys, of all sequences · B sequences · Hq, Hk heads of queries and of keys · D width of a head ·
N pages · G keys of a page · P pages of a sequence at most. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    GRAD,
    Clause,
    Feature,
    OpCall,
    OpSpec,
    Tolerance,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttentionResult:
    """What attention returns."""

    out: Tensor  # [T, Hq, D] of the dtype of q
    lse: Tensor  # [T, Hq] fp32, or float64: log of the sum of exp(s), the sink's among them; natural logarithm


@dataclass(slots=True, eq=False)
class AttentionCall(OpCall[AttentionResult]):
    """Softmax attention of packed sequences.

    A query that sees no key has out = 0 and lse = -inf, or its sink, and gradient 0. Rows of q from cu_q[-1] on belong
    to no sequence and see no key: a graph may be captured for more rows than a step has. A page that is not one of the
    N gives NaN to the queries that see its keys.

    Values are multiplied with 0 where a query does not see their key, in tiles that hold keys it does see: a NaN or an
    infinity among the keys or values of a sequence may reach all of its queries. Numbers reach no other sequence, nor
    do those that pages hold beyond a sequence's keys. Nor do NaN and infinities, where an implementation claims
    `isolated`.

    Args:
        q: [T, Hq, D] floating, the sequences' queries one after another.
        k: [S, Hk, D] of the dtype of q, Hq a multiple of Hk; with page_table [N, G, Hk, D], N and G >= 1.
        v: as k.
        cu_q: [B + 1] int32 or int64, ascending from 0 to at most T: queries of b are rows cu_q[b] to cu_q[b + 1].
        cu_k: [B + 1] likewise, the rows of k and v; None: cu_q. None with page_table.
        page_table: [B, P] int32 or int64, P >= 1: key j of b is row j % G of page page_table[b, j // G]. Entries
            beyond the keys of b are not read. Keys in pages have no gradient: k and v that require one are refused.
        seqused_k: [B] int32 or int64, how many keys b has, at most P G. Given with page_table, and only there.
        max_k: no sequence has more keys, >= 1; the queries of one that has give NaN. None: as many as k or the table
            hold. With it less is visited and kept, since no kernel's launch can wait for what a sequence has.
        causal: a query sees no key beyond its own position.
        window: how many keys a query sees at most, >= 1; with causal alone. None: all.
        softcap: c above, > 0. None: none.
        sinks: [Hq] of the dtype of q, or fp32. None: none.
        scale: of the products, > 0; None: 1 / sqrt(D).

    Raises:
        ArgumentError: sizes, dtypes or devices that do not match; cu_k beside page_table, or one of page_table and
            seqused_k without the other; a window that is not causal; a number out of its range.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    _: KW_ONLY
    cu_q: Tensor
    cu_k: Tensor | None = None
    page_table: Tensor | None = None
    seqused_k: Tensor | None = None
    max_k: int | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None


def scale_of(call: AttentionCall) -> float:
    """What products are multiplied with."""
    return call.q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)


def most_keys(call: AttentionCall) -> int:
    """How many keys a sequence of a call can have, or is said to have at most."""
    held = call.k.shape[0] if call.page_table is None else call.page_table.shape[1] * call.k.shape[1]
    return held if call.max_k is None else min(held, call.max_k)


def check(call: AttentionCall) -> None:
    """Metadata checks shared by all implementations."""
    q = checks.tensor("q", call.q, ndim=3, kind="floating")
    if q.shape[1] < 1 or q.shape[2] < 1:
        raise ArgumentError("q", checks.describe(q), "needs heads Hq >= 1 of a width D >= 1", "Pass [T, Hq, D].")
    _check_keys(call)
    _check_places(call)
    if call.max_k is not None:
        checks.integer("max_k", call.max_k, at_least=1)
    checks.flags(causal=call.causal)
    if call.window is not None:
        checks.integer("window", call.window, at_least=1)
        if not call.causal:
            raise ArgumentError("window", call.window, "ends at a query's own position", "Leave causal=True.")
    for name, x in (("softcap", call.softcap), ("scale", call.scale)):
        if x is not None:
            checks.number(name, x, above=0.0)
    sinks = call.sinks
    checks.aligned("sinks", sinks, (q.shape[1],), "the heads of q", kind="floating", beside=q, where="q")
    if sinks is not None and sinks.dtype != q.dtype and str(sinks.dtype) != "torch.float32":
        why = f"must be {_name(q)} as q, or float32"
        raise ArgumentTypeError("sinks", checks.describe(sinks), why, "Pass sinks.to(q.dtype) or sinks.float().")


def _check_keys(call: AttentionCall) -> None:
    q, paged = call.q, call.page_table is not None
    if paged:
        checks.tensor("page_table", call.page_table, ndim=2, kind="integer")
    Hq, D = q.shape[1:]
    for name, x in (("k", call.k), ("v", call.v)):
        checks.tensor(name, x, kind="floating")
        if x.dim() != (4 if paged else 3):
            fix = "Pass [N, G, Hk, D]." if paged else "Pass [S, Hk, D], or pages with page_table."
            raise ArgumentError(name, checks.describe(x), f"must have {4 if paged else 3} dimensions", fix)
        checks.same_device(name, x, q, "q")
        if x.dtype != q.dtype:
            raise ArgumentTypeError(name, checks.describe(x), f"must be {_name(q)} as q", f"Pass {name}.to(q.dtype).")
    k = call.k
    Hk = k.shape[-2]
    if k.shape[-1] != D or Hk < 1 or Hq % Hk:
        why = f"needs heads of a width of {D} as q, and of these one, or a divisor of {Hq}"
        raise ArgumentError("k", checks.describe(k), why, "Pass [..., Hk, D].")
    checks.shape("v", call.v, k.shape, "k")
    if paged and (k.shape[0] < 1 or k.shape[1] < 1):
        raise ArgumentError("k", checks.describe(k), "needs pages N >= 1 of keys G >= 1", "Pass [N, G, Hk, D].")
    for name, x in (("k", k), ("v", call.v)):
        if paged and x.requires_grad:
            raise ArgumentError(name, checks.describe(x), "has no gradient in pages", f"Pass {name}.detach().")


def _check_places(call: AttentionCall) -> None:
    q, cu_q = call.q, checks.tensor("cu_q", call.cu_q, ndim=1, kind="integer")
    checks.same_device("cu_q", cu_q, q, "q")
    if cu_q.shape[0] < 1:
        raise ArgumentError("cu_q", checks.describe(cu_q), "needs an entry more than sequences", "Pass [B + 1].")
    B, table, used = cu_q.shape[0] - 1, call.page_table, call.seqused_k
    if (table is None) != (used is None):
        name, other = ("page_table", "seqused_k") if table is None else ("seqused_k", "page_table")
        raise ArgumentError(name, None, f"is needed beside {other}", f"Pass both, or leave out {other}.")
    checks.exclusive(cu_k=call.cu_k, page_table=table)
    checks.aligned("cu_k", call.cu_k, cu_q.shape, "cu_q", kind="integer", beside=q, where="q")
    checks.aligned("seqused_k", used, (B,), "the sequences", kind="integer", beside=q, where="q")
    if table is not None:
        checks.same_device("page_table", table, q, "q")
        if table.shape[0] != B or table.shape[1] < 1:
            raise ArgumentError("page_table", checks.describe(table), f"needs {B} rows of pages P >= 1", "Pass [B, P].")
    for name, x in (("cu_q", cu_q), ("cu_k", call.cu_k), ("page_table", table), ("seqused_k", used)):
        if x is not None and _name(x) not in {"int32", "int64"}:
            raise ArgumentTypeError(name, checks.describe(x), "must be int32 or int64", f"Pass {name}.int().")
    if call.cu_k is None and table is None and call.k.shape[0] != q.shape[0]:
        why = f"must have {q.shape[0]} rows as q, where cu_k does not say whose they are"
        raise ArgumentError("k", checks.describe(call.k), why, "Pass cu_k.")


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


SPEC = OpSpec(
    name="attention",
    record=AttentionCall,
    summary="softmax attention of packed sequences, keys in rows or in pages; a query's bits are its own",
    primary="q",
    differentiable=("q", "k", "v", "sinks"),
    carrying=("out", "lse"),
    check=check,
    sizes=lambda call: {"rows": call.q.shape[0]},
    needed=lambda call: {"paged": call.page_table is not None, "bidirectional": not call.causal},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("isolated", "a NaN of another sequence, or beyond the keys in a page, reaches no query"),
        Feature("paged", "keys and values in pages, found by a table"),
        Feature("bidirectional", "causal=False: every query sees all keys of its sequence"),
        Feature("window", "a query sees the last keys alone"),
        Feature("softcap", "products are capped smoothly"),
        Feature("sinks", "a logit without a value for each head"),
    ),
    clauses=(
        Clause("AT-01", "matches float64", "out and lse are within the bound of rounded operands", "accuracy"),
        Clause("AT-02", "one key", "gives the bits of its value, and lse = s", "law"),
        Clause("AT-03", "no key", "gives out = 0 and lse = -inf, or the sink; rows of no sequence alike", "law"),
        Clause(
            "AT-04",
            "sequences are apart",
            "keys and values of another sequence, or in pages beyond a sequence's keys, change no bit, however large",
            "law",
        ),
        Clause("AT-05", "later keys", "change no bit of a query before them, however large", "law"),
        Clause("AT-06", "pages", "of any size and order give what the same keys in rows give", "law", "paged"),
        Clause("AT-07", "a page that is none", "gives NaN to the queries that see it and to no other", "law", "paged"),
        Clause(
            "AT-08", "the window", "as long as a sequence changes no bit; of 1 gives the own value", "law", "window"
        ),
        Clause(
            "AT-09", "the softcap", "bounds lse by c + log of the keys; a huge one changes little", "law", "softcap"
        ),
        Clause("AT-10", "the sink", "of -inf changes no bit; a huge one leaves out = 0", "law", "sinks"),
        Clause("AT-11", "gradient", "of q, k, v and sinks, from out and from lse, matches float64", "gradient", "grad"),
        Clause("AT-12", "no queries", "give empty results; keys that none sees have gradient 0", "accuracy"),
        Clause("AT-13", "bad arguments", "wrong sizes, dtypes and numbers raise ArgumentError", "refusal"),
        Clause("AT-14", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("AT-15", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause(
            "AT-16",
            "batch invariance",
            "a query has the same bits in a prompt, behind a cache, alone, in any batch; gradients of a sequence too",
            "invariance",
            "batch_invariant",
        ),
        Clause("AT-17", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause("AT-18", "the bound", "on keys changes no bit where it holds; a sequence beyond it gives NaN", "law"),
        Clause("AT-19", "isolated", "NaN and infinities in the places of AT-04 reach no query", "law", "isolated"),
    ),
    tolerances=tuple(
        Tolerance(output, dtype, atol, rtol, source)
        for output in ("out", "grad")
        for dtype, atol, rtol, source in (
            ("float32", 2e-6, 4e-6, "times the sum of the sizes of its terms; products and sums in fp32"),
            ("bfloat16", 4e-3, 4e-3, "likewise: p is rounded to bf16, and out too, 2^-8"),
            ("float16", 5e-4, 5e-4, "likewise: p is rounded to fp16, and out too, 2^-11"),
            ("float64", 1e-14, 1e-14, "float64 throughout"),
        )
    ),
)

"""rope@1: queries and keys rotated by their positions (Su et al., 2021), each head normalized before where asked.

    x = q, or (q r) (offset + q_weight) with r = 1 / sqrt(mean(q^2) + eps) over the head     k likewise
    (c_j, s_j) = table[position, j], table[position, R / 2 + j]                              j < R / 2
    (a, b) = (x_j, x_{j + R/2}), or with interleaved (x_{2j}, x_{2j+1})
    (a, b) -> round(a c_j - b s_j), round(b c_j + a s_j)        arXiv:2104.09864, equation 34
    x_j -> round(x_j)                                           R <= j < D: a rotary width R below that of the head

Halves are GPT-NeoX's pairs, as in transformers' `rotate_half` (Llama, Qwen, Gemma); neighbors are the paper's, as in
GPT-J. The norm is that of rms_norm@1: Qwen3's q_norm and k_norm with offset = 0, Gemma 3's with offset = 1.

The table is data: cosines in its first half and sines in its second, a row a position, as vLLM's `cos_sin_cache`.
Bases, frequencies that are scaled (linear, dynamic, YaRN, Llama 3) and YaRN's attention factor are in its numbers. It
is fp32: cosines that are rounded to bf16 are wrong by up to 2^-9, at every position alike.

The arithmetic is fp32 (float64 where q is), every product is rounded before it is added, and each `round` is the one
rounding to the dtype of q. What the norm gives is not rounded before it is rotated: one rounding is nearer to the
formula than two, saves a pass over memory, and is what vLLM's fused kernel does (csrc/fused_qknorm_rope_kernel.cu).
transformers 4.57 rounds Qwen3's q r, its product with the weight, cos and sin, both products and their sum: six times.

A position outside of the table gives NaN, and no gradient: the values of positions are on the device, and to raise for
one would wait for it, which no graph may.

Legend: H heads · D width of a head · P positions · R rotary width. Imports no torch.
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
class RopeResult:
    """What rope returns, of the dtype of q."""

    q: Tensor  # [..., Hq, D]
    k: Tensor  # [..., Hk, D]


@dataclass(slots=True, eq=False)
class RopeCall(OpCall[RopeResult]):
    """Rotate queries and keys by their positions; with weights, normalize each head before.

    A position that the table has no row for (negative, or P and beyond) gives NaN in all of its heads with gradient 0,
    and adds nothing to the weights' gradients. With weights, a head of zeros and eps = 0 gives NaN.

    Args:
        q: [..., Hq, D] floating, Hq and D >= 1.
        k: [..., Hk, D] of the dtype of q; the same tokens.
        positions: [...] integer, the row of the table of each token.
        table: [P, R] fp32, P >= 1, R even, 2 <= R <= D: R / 2 cosines, then R / 2 sines. It has no gradient: one that
            requires it is refused.
        q_weight: [D] of the dtype of q, or fp32: heads of q are divided by their root mean square and multiplied with
            `offset + q_weight` before.
        k_weight: [D], likewise for k.
        eps: added to the mean squares; at least 0. Given where a weight is, and only there.
        interleaved: columns 2j and 2j + 1 are a pair, in place of j and j + R / 2.
        offset: added to the weights: 0 for Qwen3, 1 for Gemma 3.

    Raises:
        ArgumentError: wrong sizes, dtypes or devices, an R that is odd or beyond D, a table that requires a gradient;
            weights without eps, eps or offset without weights, eps < 0, or a number that is not finite.
    """

    q: Tensor
    k: Tensor
    positions: Tensor
    table: Tensor
    _: KW_ONLY
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float | None = None
    interleaved: bool = False
    offset: float = 0.0


def check(call: RopeCall) -> None:
    """Metadata checks shared by all implementations."""
    q, k = checks.tensor("q", call.q, kind="floating"), checks.tensor("k", call.k, kind="floating")
    for name, x in (("q", q), ("k", k)):
        if x.dim() < 2 or x.shape[-2] < 1 or x.shape[-1] < 1:
            raise ArgumentError(name, checks.describe(x), "needs heads H >= 1 of a width D >= 1", "Pass [..., H, D].")
    tokens, D = q.shape[:-2], q.shape[-1]
    checks.shape("k", k, (*tokens, k.shape[-2], D), "q but for the heads")
    checks.same_device("k", k, q, "q")
    if k.dtype != q.dtype:
        raise ArgumentTypeError("k", checks.describe(k), f"must be {_name(q)} as q", "Pass k.to(q.dtype).")
    checks.tensor("positions", call.positions, kind="integer")
    checks.aligned("positions", call.positions, tokens, "q without heads", kind="integer", beside=q, where="q")
    _check_table(call.table, q)
    weights = {"q_weight": call.q_weight, "k_weight": call.k_weight}
    for name, weight in weights.items():
        checks.aligned(name, weight, (D,), "a head", kind="floating", beside=q, where="q")
        if weight is not None and weight.dtype != q.dtype and str(weight.dtype) != "torch.float32":
            fix = f"Pass {name}.to(q.dtype) or {name}.float()."
            raise ArgumentTypeError(name, checks.describe(weight), f"must be {_name(q)} as q, or float32", fix)
    normalized = any(w is not None for w in weights.values())
    if call.eps is not None:
        checks.number("eps", call.eps, at_least=0.0)
    if normalized != (call.eps is not None):
        fix = "Pass the model's rms_norm_eps." if normalized else "Leave it out, or pass q_weight and k_weight."
        raise ArgumentError("eps", call.eps, f"is {'needed' if normalized else 'of no use'} here", fix)
    checks.flags(interleaved=call.interleaved)
    if checks.number("offset", call.offset) != 0.0 and not normalized:
        raise ArgumentError("offset", call.offset, "is added to weights, and there are none", "Leave it out.")


def _check_table(table: Any, q: Tensor) -> None:
    checks.tensor("table", table, ndim=2, kind="floating")
    checks.same_device("table", table, q, "q")
    if str(table.dtype) != "torch.float32":
        raise ArgumentTypeError("table", checks.describe(table), "must be float32", "Compute it in fp32 or better.")
    D, (P, R) = q.shape[-1], table.shape
    if P < 1 or R < 2 or R % 2 or R > D:
        why = f"needs rows of R / 2 cosines and R / 2 sines, R at most the width of a head, {D}"
        raise ArgumentError("table", checks.describe(table), why, "Pass torch.cat([cos, sin], -1).")
    if table.requires_grad:
        raise ArgumentError("table", checks.describe(table), "has no gradient", "Pass table.detach().")


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


SPEC = OpSpec(
    name="rope",
    record=RopeCall,
    summary="queries and keys rotated by their positions, each head normalized before where weights are given",
    primary="q",
    differentiable=("q", "k", "q_weight", "k_weight"),
    carrying=("q", "k"),
    check=check,
    sizes=lambda call: {"rows": call.q.numel() // call.q.shape[-1]},
    needed=lambda call: {"norm": call.q_weight is not None or call.k_weight is not None},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("norm", "weights of an RMS norm over each head before the rotation"),
        Feature("interleaved", "pairs of neighboring columns, as GPT-J has them"),
    ),
    clauses=(
        Clause("RO-01", "matches float64", "q and k are within tolerance of float64", "accuracy"),
        Clause(
            "RO-02",
            "one rounding",
            "q and k lie between the roundings of both ends of the interval that fp32 arithmetic may leave",
            "accuracy",
        ),
        Clause("RO-03", "queries and keys alike", "q for k, with their weights, gives k for q, bit for bit", "law"),
        Clause(
            "RO-04",
            "the rest of a head",
            "columns beyond the table's width have the bits of those at an angle of 0, without weights those of q",
            "law",
        ),
        Clause(
            "RO-05", "interleaved pairs", "have the bits of halves of columns in another order", "law", "interleaved"
        ),
        Clause("RO-06", "the offset", "offset and weight give the bits of their fp32 sum as the weight", "law", "norm"),
        Clause(
            "RO-07",
            "positions beyond the table",
            "give NaN in all of their heads, gradient 0 and nothing to those of weights, and disturb no other token",
            "law",
        ),
        Clause("RO-08", "heads are apart", "NaN and infinities in one head reach no other", "law"),
        Clause("RO-09", "gradient", "of q, k and both weights, matches float64", "gradient", "grad"),
        Clause("RO-10", "no tokens", "give empty results, and gradients of 0 for the weights", "accuracy"),
        Clause("RO-11", "bad arguments", "wrong sizes, dtypes and numbers raise ArgumentError", "refusal"),
        Clause("RO-12", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("RO-13", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("RO-14", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("RO-15", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance("y", "float32", 2e-6, 1e-7, "times |a c| + |b s|, which may cancel; the norm's error is 2e-6"),
        Tolerance("y", "bfloat16", 2e-6, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("y", "float16", 4e-6, 5e-4, "as fp32, rounded once to fp16: 2^-11, or its least step of 2^-24"),
        Tolerance("y", "float64", 1e-14, 1e-14, "float64 throughout"),
        Tolerance("grad", "float32", 4e-6, 2e-6, "times the sum of the sizes of its terms, which may cancel"),
        Tolerance("grad", "bfloat16", 4e-6, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("grad", "float16", 4e-6, 5e-4, "as fp32, rounded once to fp16: 2^-11"),
        Tolerance("grad", "float64", 1e-13, 1e-13, "float64 throughout"),
    ),
)

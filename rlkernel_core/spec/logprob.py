"""logprob@1: the log-probability of chosen tokens under softmax(cap(logits) / temperature).

    z = cap(logits) / T,  cap(x) = c * tanh(x / c) where softcap c is given
    log p = z_id - logsumexp(z)
    H = logsumexp(z) - sum_j p_j z_j           (entropy, nats; -inf logits contribute 0)

Stable form: with m and s the largest z_j and the sum of exp(z_j - m) over j != id, x = (m - z_id) + log s and
log p = -softplus(x): `z_id - lse` would round to exactly 0 on confident rows.

Three laws, never confused:
    raw        softmax(cap(logits)), temperature 1: what vLLM returns by default
    tempered   softmax(cap(logits) / T): what a trainer computes without knowing the filters
    processed  the tempered law renormalized over the kept ids of `support`: what a filtered sampler drew from;
               log p_processed + log_kept_mass = log p_tempered

Rows that have no law: NaN logits, +inf logits (lse is +inf), all logits -inf (lse is -inf) and a temperature that is
not positive and finite give NaN, with NaN gradients, in that row and in no other.
A -inf logit is a forbidden id: it stays -inf under the softcap.

Several ids of a row share its logsumexp: d (sum_k g_k log p_k) / d z_j = sum_k g_k 1[j = id_k] - p_j sum_k g_k.

With a `group` the vocabulary is split over ranks. A rank's statistics (m, s and the first moment of its ids but `id`,
and z_id where it has that id) are joined in rank order; the gradient of its logits then needs no other rank.

Legend: N tokens (any leading shape) · V vocabulary · K listed ids of a row.
Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    GRAD,
    Feature,
    OpCall,
    OpSpec,
    Tolerance,
)
from rlkernel_core.spec.listed_ids import MANY_IDS, RAGGED_IDS, check_ids, check_one_id, many_ids
from rlkernel_core.spec.logprob_clauses import CLAUSES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlkernel_core.spec.sampling import TokenLists


@dataclass(frozen=True)
class Support:
    """The kept token ids of each row, ragged, as the sampler returns them: row i keeps ids[offsets[i]:offsets[i+1]]."""

    ids: Tensor  # [nnz] int64 (int32 accepted)
    offsets: Tensor  # [N + 1] int64, offsets[0] == 0, non-decreasing


@dataclass(frozen=True)
class LogprobResult:
    """What logprob and linear_logprob return; every tensor is fp32 (float64 for float64 inputs)."""

    logprob: Tensor  # as `ids`, [...], [..., K] or [M]: log p of the chosen id, or of each listed; masked, padding 0
    lse: Tensor | None = None  # [...] logsumexp of z over all of the vocabulary; masked rows 0; None if not claimed
    entropy: Tensor | None = None  # [...] nats, of softmax(z); masked rows 0
    top_ids: Tensor | None = None  # [..., n] int64, by (logit descending, id ascending); masked rows -1
    top_logprobs: Tensor | None = None  # [..., n] of softmax(z), without gradient; masked rows 0
    log_kept_mass: Tensor | None = None  # [...] with `support`: log of the mass of the kept ids under softmax(z)
    invalid: Tensor | None = None  # bool, as `ids`, [...] or [M]: id or kept id out of range in an unmasked row


@dataclass(slots=True, eq=False)
class LogprobCall(OpCall[LogprobResult]):
    """Log-probability of `ids` under softmax(cap(logits) / temperature), and what comes with it in the same read.

    Args:
        logits: [..., V] bf16, fp16 or fp32 (float64 on backends that claim it); any strides; never written to. With
            `group` this rank's ids of the vocabulary alone.
        ids: [...] integer; in a masked row it may hold anything. One out of range in a row that counts gives NaN
            with gradient 0 for log-probability and kept mass, and sets `invalid`; lse, entropy and top of that row
            do not depend on the id and stay as they are. Or [..., K], several ids of each row, by one pass over the
            vocabulary: each has its log-probability, and gradients of an id that a row lists twice add up. -1 is then
            padding, which gives 0 and gradient 0; any other id out of range gives NaN and its own flag. Or
            TokenLists(ids [M], offsets [N + 1]), a list of any length of each row, empty ones too, by offsets from 0
            on that do not decrease: results that belong to ids are [M], and 0 beyond the last offset.
        temperature: float > 0, or a tensor broadcastable to [...]; applied once, to log-probability and entropy alike.
            It has no gradient: a tensor that requires one is refused.
        softcap: c > 0 for c * tanh(logits / c) before the temperature.
        mask: [...] bool, True where the row counts; False rows give 0 and gradient 0 whatever they hold.
        entropy: also return the entropy of softmax(z), differentiable.
        top_logprobs: also return the n most likely ids and their log-probabilities, for reporting: they have no
            gradient.
        support: kept ids per row (the processed law): log p is then renormalized over the kept ids and
            `log_kept_mass` is returned; `logprob + log_kept_mass` is the tempered log-probability. The chosen id
            counts as kept; an id kept twice counts once; ids beyond the last offset are ignored. Entropy, lse and
            top stay those of softmax(z). For one id per row alone.
        validate: check ids, their offsets, temperatures and support on the host (synchronizes) and raise.
        logits_scale: what logits of 8 bits (float8_e4m3fn, float8_e5m2) are multiplied by, so that the law is that of
            `logits.float() * logits_scale`: a number > 0, or a tensor broadcastable to [...], whose entries that are
            not positive and finite spoil their rows. Such logits need one and have no gradient; others take none. With
            `group` it is that of this rank's logits.
        group: process group over which the vocabulary is split, shards in rank order, of equal size or not, as a
            tensor-parallel output head leaves its logits. ids, mask, temperature, support and upstream gradients are
            the same on all ranks, and so are the results, bit by bit; they may differ in their last bits from those of
            another number of ranks. ids and support count in the whole vocabulary. Two collectives forward, three with
            several ids per row: three integers, a few numbers per row, and the listed logits; none backward. Where
            logits require a gradient on one rank they do so on all.

    Returns:
        logprob, lse, entropy and log_kept_mass are differentiable with respect to logits, once.

    Raises:
        ArgumentError: wrong rank, sizes, device, dtype, temperature <= 0, a support beside several ids per row,
            top_logprobs with a group, logits of 8 bits without a scale or with a gradient, a scale of other logits, or
            (validate=True) ids out of range.
    """

    logits: Tensor
    ids: Tensor | TokenLists
    _: KW_ONLY
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    mask: Tensor | None = None
    entropy: bool = False
    top_logprobs: int = 0
    support: Support | None = None
    validate: bool = False
    logits_scale: float | Tensor | None = None
    group: ProcessGroup | None = None


def check(call: LogprobCall) -> None:
    """Metadata checks shared by all implementations of logprob@1; reads no value off the device."""
    logits, ids, mask = call.logits, call.ids, call.mask
    eight_bits = checks.is_tensor(logits) and str(logits.dtype).removeprefix("torch.") in FLOAT8_LOGITS
    checks.tensor("logits", logits, kind=None if eight_bits else "floating")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ArgumentError("logits", checks.describe(logits), "needs a last dimension V >= 1", "Pass [..., V].")
    rows = logits.shape[:-1]
    check_logits_scale(call.logits_scale, rows, logits, eight_bits=eight_bits)
    check_ids(ids, rows, logits, "logits")
    check_temperature(call.temperature, rows, logits)
    if call.softcap is not None:
        checks.number("softcap", call.softcap, above=0.0)
    checks.aligned("mask", mask, rows, "ids", kind="bool", beside=logits, where="logits")
    checks.integer("top_logprobs", call.top_logprobs, at_least=0, at_most=logits.shape[-1])
    checks.flags(entropy=call.entropy, validate=call.validate)
    if call.support is not None:
        check_support(call.support, rows, logits)
        check_one_id(ids, logits)
    checks.process_group("group", call.group)
    if call.group is not None and call.top_logprobs:
        problem = "is not there where the vocabulary is split over a group"
        raise ArgumentError("top_logprobs", call.top_logprobs, problem, "Pass 0, or gather the logits.")


def check_support(support: Any, rows: Any, beside: Tensor) -> None:
    """A support is a `Support` with one more offset than rows, on the device of the tensor beside it."""
    if not isinstance(support, Support):
        raise ArgumentTypeError("support", checks.describe(support), "must be a Support", "Pass Support(ids, offsets).")
    for name, x in (("support.ids", support.ids), ("support.offsets", support.offsets)):
        checks.tensor(name, x, ndim=1, kind="integer")
        checks.same_device(name, x, beside, "the rows")
    checks.shape("support.offsets", support.offsets, (math.prod(rows) + 1,), "the rows, plus one")


def check_temperature(temperature: float | Tensor, rows: Any, beside: Tensor) -> None:
    """A temperature is a positive number, or a tensor without gradient that broadcasts to the rows."""
    if not checks.is_tensor(temperature):
        checks.number(
            "temperature",
            temperature,
            above=0.0,
            remedy="Greedy decoding has log-probability 0 by definition; pass T > 0.",
        )
        return
    _check_per_row("temperature", temperature, rows, beside)


def check_logits_scale(scale: float | Tensor | None, rows: Any, logits: Tensor, *, eight_bits: bool) -> None:
    """Logits of 8 bits have a scale and no gradient; other logits have none."""
    described = checks.describe(logits)
    if not eight_bits:
        if scale is not None:
            problem = f"goes with logits of {' or '.join(FLOAT8_LOGITS)}, not {described}"
            raise ArgumentError("logits_scale", checks.describe(scale), problem, "Pass None, and the logits scaled.")
        return
    if scale is None:
        raise ArgumentError("logits", described, "need a scale in 8 bits", "Pass logits_scale, or logits.bfloat16().")
    if logits.requires_grad:
        remedy = "Pass logits.detach(), or logits of 16 bits."
        raise ArgumentError("logits", described, "have no gradient in 8 bits, but require one", remedy)
    if checks.is_tensor(scale):
        _check_per_row("logits_scale", scale, rows, logits)
    else:
        checks.number("logits_scale", scale, above=0.0)


def _check_per_row(name: str, value: Any, rows: Any, beside: Tensor) -> None:
    """A tensor without gradient that broadcasts to the rows."""
    x = checks.tensor(name, value, kind="floating")
    checks.same_device(name, x, beside, "the rows")
    if x.requires_grad:
        raise ArgumentError(name, checks.describe(x), "has no gradient, but requires one", f"Pass {name}.detach().")
    shape = tuple(x.shape)
    if len(shape) > len(rows) or any(t not in (1, n) for t, n in zip(reversed(shape), reversed(rows), strict=False)):
        raise ArgumentError(name, checks.describe(x), f"must broadcast to the rows {list(rows)}", "Pass one per row.")


FLOAT8_LOGITS: Final = ("float8_e4m3fn", "float8_e5m2")
LSE: Final = Feature("lse", "logsumexp of every row is returned, with its gradient")


def _sizes(call: LogprobCall) -> dict[str, int]:
    return {"rows": math.prod(call.logits.shape[:-1]), "vocab": call.logits.shape[-1]}


def _needed(call: LogprobCall) -> dict[str, object]:
    return {"per_row_temperature": checks.is_tensor(call.temperature), **many_ids(call.ids, call.logits)}


SPEC = OpSpec(
    name="logprob",
    record=LogprobCall,
    summary="log-probability of chosen tokens from logits, with entropy, lse and top-n",
    primary="logits",
    differentiable=("logits",),
    carrying=("logprob", "lse", "entropy", "log_kept_mass"),
    optional=("lse",),
    needed=_needed,
    check=check,
    sizes=_sizes,
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("per_row_temperature", "temperature as a tensor, one per row"),
        LSE,
        MANY_IDS,
        RAGGED_IDS,
        Feature("softcap", "logit soft-capping"),
        Feature("mask", "masked rows give 0 and gradient 0, whatever they hold"),
        Feature("entropy", "entropy of the tempered law, with its gradient"),
        Feature("top_logprobs", "the n most likely ids, ties to the lowest id"),
        Feature("support", "log-probability under the truncated law, with the kept mass"),
        Feature("validate", "ids checked on the host"),
        Feature("logits_scale", "logits of 8-bit floats with a scale, without a gradient"),
        Feature("group", "the vocabulary is split over a process group"),
    ),
    clauses=CLAUSES,
    tolerances=(
        Tolerance("logprob", "float32", 1e-5, 1e-6, "fp32 ulp of an lse near 32 is 3.8e-6; two roundings and a sum"),
        Tolerance("logprob", "bfloat16", 1e-5, 1e-6, "inputs are exact in fp32; the arithmetic is the fp32 one"),
        Tolerance("logprob", "float16", 1e-5, 1e-6, "inputs are exact in fp32; the arithmetic is the fp32 one"),
        Tolerance("logprob", "float64", 1e-12, 1e-12, "float64 throughout"),
        Tolerance("lse", "float32", 1e-5, 1e-6, "as logprob"),
        Tolerance("lse", "bfloat16", 1e-5, 1e-6, "as logprob"),
        Tolerance("lse", "float16", 1e-5, 1e-6, "as logprob"),
        Tolerance("lse", "float64", 1e-12, 1e-12, "as logprob"),
        Tolerance("entropy", "float32", 2e-5, 1e-6, "one more weighted sum than logprob"),
        Tolerance("entropy", "bfloat16", 2e-5, 1e-6, "one more weighted sum than logprob"),
        Tolerance("entropy", "float16", 2e-5, 1e-6, "one more weighted sum than logprob"),
        Tolerance("entropy", "float64", 1e-12, 1e-12, "float64 throughout"),
        Tolerance("grad_logits", "float32", 1e-6, 1e-5, "relative to the largest upstream gradient of the row"),
        Tolerance("grad_logits", "bfloat16", 1e-6, 2**-8, "one rounding to a 7-bit mantissa"),
        Tolerance("grad_logits", "float16", 1e-6, 2**-11, "one rounding to a 10-bit mantissa"),
        Tolerance("grad_logits", "float64", 1e-12, 1e-12, "float64 throughout"),
    ),
)

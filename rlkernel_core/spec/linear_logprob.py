"""linear_logprob@1: log-probabilities straight from hidden states and the output head; the logits are never stored.

    x = (hidden @ weight.T + s (hidden @ A.T) @ B.T + bias) * logit_scale
    z = cap(x) / T,  cap(x) = c * tanh(x / c) where softcap c is given
    log p, lse, H and the law over a support from z, exactly as logprob@1 defines them

Logits keep their fp32 accumulators on the way to the logsumexp: rounding them to bf16 costs 3e-2 in log p, to fp16
2e-3, against 3e-6. dX and dW accumulate in fp32 over all tiles and are rounded once.

    dz_j = g (1[j = id] - q_j) + g_mass (q_j - p_j) + g_lse p_j - g_H p_j (z_j - sum_k p_k z_k)
    dx_j = dz_j / T * (1 - tanh(x_j / c)^2) * logit_scale
    dX = dx @ weight + s (dx @ B) @ A,  dW = dx.T @ X,  dbias = the sum of dx over rows
    dA = s (dx @ B).T @ X,  dB = s dx.T @ (X @ A.T)

The second term of x is there where `lora` is given: a low-rank addition to the head that is not merged into it.

Legend: N tokens (any leading shape) · D hidden · V vocabulary · r rank of the low-rank addition.
Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    GRAD,
    Feature,
    OpCall,
    OpSpec,
)
from rlkernel_core.spec.linear_logprob_clauses import CLAUSES, TOLERANCES
from rlkernel_core.spec.listed_ids import MANY_IDS, RAGGED_IDS, check_ids, check_one_id, listed_shape, many_ids
from rlkernel_core.spec.logprob import LSE, LogprobResult, Support, check_support, check_temperature
from rlkernel_core.spec.qmatmul import LoRA, check_lora

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlkernel_core.spec.sampling import TokenLists

BACKWARD: Final = ("auto", "recompute", "save")
PIECES: Final = 8  # of a vocabulary, whose sums are added in one order on 1, 2, 4 and 8 ranks
LEAST_PIECE: Final = 1024  # ids of one


@dataclass(slots=True, eq=False)
class LinearLogprobCall(OpCall[LogprobResult]):
    """Log-probability of `ids` under the law of `hidden @ weight.T`, without a tensor of [N, V].

    Args:
        hidden: [..., D] bf16, fp16 or fp32 (float64 on backends that claim it); any strides; never written to.
        weight: [V, D], the output head. Another dtype than that of hidden where `mixed_dtypes` is claimed. Where
            `quantized` is, a QuantTensor, for one id per row alone: frozen, and the law is that of
            `dequantize(weight, dtype=torch.float32)`, of which no more than tiles exist.
        ids: [...] integer, as in logprob: anything in masked rows; out of range gives NaN and `invalid`. Or [..., K],
            several ids of each row, of which -1 is padding: one pass over the vocabulary, and K rows of the head more.
            Or TokenLists(ids [M], offsets [N + 1]), as in logprob: M rows of the head more.
        bias: [V], added before everything else. A bias of -inf forbids an id, e.g. one that pads the vocabulary.
        lora: LoRA(A [r, D], B [V, r], scale), an adapter of the head that is not merged. Any floating dtypes.
        temperature: float > 0, or a tensor broadcastable to [...] that requires no gradient.
        softcap: c > 0 for c * tanh(x / c), after the scale and before the temperature.
        logit_scale: > 0, multiplies the logits; for heads that divide, pass the inverse.
        mask: [...] bool, True where the row counts; rows that do not give 0 and gradient 0 whatever they hold, and
            their matmuls are skipped where that takes neither a host synchronization nor a shape that depends on data.
        entropy: also return the entropy of softmax(z), differentiable.
        support: kept ids per row, as in logprob, for one id per row alone.
        backward: "recompute" computes logits again in the backward pass: extra memory that depends neither on N nor on
            gradients. "save" keeps them: fewer matmuls, N x V numbers. "auto" saves where that fits in
            max_workspace_bytes and recomputes otherwise, and without a budget. All give the same log p.
        max_workspace_bytes: most extra memory: whatever the call allocates in forward and backward beyond its
            results and gradients. Each implementation states its need.
        group: process group over which the vocabulary is split, shards in rank order, of equal size or not. `weight`,
            `bias` and `lora.B` are this rank's shard; hidden, lora.A, ids, mask and upstream gradients are the same on
            all ranks, and so are the results, dX and dA. ids and support count in the whole vocabulary. On all ranks
            the same operands require gradients. Where `rank_invariant` is claimed, results do not depend on the number
            of ranks, with equal shards of a V that is a multiple of 8 and at least 8192.
        partial_grad: with a group, leave the gradient of hidden this rank's part, that of its columns of the
            vocabulary, rounded to the dtype of hidden: the sum over the ranks is the gradient. For hidden states that
            were gathered under sequence parallelism, such as by `rlkernel.sequence_parallel.gather_rows`, whose
            backward pass adds the parts and keeps the rows of this rank.

    Returns:
        LogprobResult without top. logprob, lse, entropy and log_kept_mass are differentiable, once, with respect to
        hidden, weight, bias, lora.A and lora.B, each with its own upstream gradient per token; no work is done for a
        frozen operand.

    Raises:
        ArgumentError: wrong rank, sizes, device, dtype, temperature <= 0, a temperature that requires a gradient, a
            support or a quantized weight beside several ids per row, a format that quantizes hidden states, or a
            workspace below the minimum, which the message names.
    """

    hidden: Tensor
    weight: Tensor | QuantTensor
    ids: Tensor | TokenLists
    _: KW_ONLY
    bias: Tensor | None = None
    lora: LoRA | None = None
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    mask: Tensor | None = None
    entropy: bool = False
    support: Support | None = None
    backward: str = "auto"
    max_workspace_bytes: int | None = None
    group: ProcessGroup | None = None
    partial_grad: bool = False


def check(call: LinearLogprobCall) -> None:
    """Metadata checks shared by all implementations of linear_logprob@1; reads no value off the device."""
    hidden, weight, ids, bias, mask = call.hidden, call.weight, call.ids, call.bias, call.mask
    checks.tensor("hidden", hidden, kind="floating")
    if hidden.dim() < 1 or hidden.shape[-1] < 1:
        raise ArgumentError("hidden", checks.describe(hidden), "needs a last dimension D >= 1", "Pass [..., D].")
    rows = hidden.shape[:-1]
    check_head(weight, hidden)
    beside: Any = {"beside": hidden, "where": "hidden"}
    check_ids(ids, rows, hidden, "hidden")
    if isinstance(weight, QuantTensor) and listed_shape(ids, hidden) is not None:
        text = "goes with one id per row alone"
        raise ArgumentError("weight", checks.describe(weight), text, "Pass dequantize(weight), or ids of [...].")
    checks.aligned("bias", bias, weight.shape[:1], "weight without its last dimension", kind="floating", **beside)
    if call.lora is not None:
        check_lora(call.lora, weight.shape, hidden, "hidden")
    check_temperature(call.temperature, rows, hidden)
    if call.softcap is not None:
        checks.number("softcap", call.softcap, above=0.0)
    checks.number("logit_scale", call.logit_scale, above=0.0)
    checks.aligned("mask", mask, rows, "ids", kind="bool", **beside)
    if call.support is not None:
        check_support(call.support, rows, hidden)
        check_one_id(ids, hidden)
    checks.flags(entropy=call.entropy)
    checks.choice("backward", call.backward, BACKWARD)
    if call.max_workspace_bytes is not None:
        checks.integer("max_workspace_bytes", call.max_workspace_bytes, at_least=1)
    checks.process_group("group", call.group)
    check_partial_grad(call)


def check_partial_grad(call: Any) -> None:
    """A part of a gradient is one of several: there is a group."""
    checks.flags(partial_grad=call.partial_grad)
    if call.partial_grad and call.group is None:
        raise ArgumentError("partial_grad", True, "is there with a group alone", "Pass False, or group=...")


def check_head(weight: Any, hidden: Tensor) -> None:
    """Checks of an output head [V, D], stored or quantized, beside hidden [..., D]."""
    D = hidden.shape[-1]
    if isinstance(weight, QuantTensor):
        if weight.spec.act != "none":
            text = "quantizes hidden states too, which no head does"
            raise ArgumentError("weight", str(weight.spec), text, "Quantize it to a format without act.")
    else:
        checks.tensor("weight", weight, ndim=2, kind="floating")
    if weight.shape[1] != D or weight.shape[0] < 1:
        raise ArgumentError(
            "weight", checks.describe(weight), f"must be [V, {D}], V >= 1, for this hidden", "Pass lm_head.weight."
        )
    checks.same_device("weight", weight, hidden, "hidden")


def stored_head(call: Any) -> Tensor:
    """The head of a call to an implementation that does not claim `quantized`.

    Raises:
        ArgumentError: it is quantized.
    """
    weight: Tensor | QuantTensor = call.weight
    if isinstance(weight, QuantTensor):
        text = "is quantized, which this implementation does not claim"
        raise ArgumentError("weight", checks.describe(weight), text, "Pass dequantize(weight).")
    return weight


def needed(call: Any) -> dict[str, object]:
    """Feature -> whether operators on a head and with a temperature need it, where no argument's name says so."""
    return {"per_row_temperature": checks.is_tensor(call.temperature), **mixed_dtypes(call)}


def mixed_dtypes(call: Any) -> dict[str, object]:
    """Whether the head is stored in another dtype than the hidden states."""
    if isinstance(call.weight, QuantTensor):
        return {"mixed_dtypes": False}
    return {"mixed_dtypes": getattr(call.weight, "dtype", None) != getattr(call.hidden, "dtype", None)}


def quantized(call: Any) -> dict[str, object]:
    """Whether the head is quantized."""
    return {"quantized": isinstance(call.weight, QuantTensor)}


def _sizes(call: LinearLogprobCall) -> dict[str, int]:
    return {"rows": math.prod(call.hidden.shape[:-1]), "vocab": call.weight.shape[0]}


SPEC = OpSpec(
    name="linear_logprob",
    record=LinearLogprobCall,
    summary="log-probability of chosen tokens from hidden states and the output head; logits are never stored",
    primary="hidden",
    differentiable=("hidden", "weight", "bias", "lora"),
    carrying=("logprob", "lse", "entropy", "log_kept_mass"),
    optional=("lse",),
    check=check,
    sizes=_sizes,
    needed=lambda call: {**needed(call), **quantized(call), **many_ids(call.ids, call.hidden)},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        LSE,
        MANY_IDS,
        RAGGED_IDS,
        Feature("per_row_temperature", "temperature as a tensor, one per row"),
        Feature("mixed_dtypes", "weight of another dtype than hidden"),
        Feature("quantized", "a quantized head, of which no more than tiles are dequantized"),
        Feature("bias", "a bias per vocabulary entry, with its gradient"),
        Feature("lora", "a low-rank addition to the head that is not merged, with its gradients"),
        Feature("softcap", "logit soft-capping"),
        Feature("logit_scale", "a factor on the logits"),
        Feature("mask", "masked rows give 0 and gradient 0, whatever they hold"),
        Feature("entropy", "entropy of the tempered law, with its gradient"),
        Feature("support", "log-probability under the truncated law, with the kept mass"),
        Feature("backward:save", "logits kept for the backward pass: fewer matmuls, N x V numbers"),
        Feature("backward:recompute", "logits computed again in the backward pass: extra memory constant in N"),
        Feature(
            "max_workspace_bytes", "extra memory stays below the caller's limit, or a typed error names the minimum"
        ),
        Feature("group", "the vocabulary is split over a process group"),
        Feature("partial_grad", "the gradient of hidden is left as this rank's part, for a reduce-scatter"),
        Feature(
            "rank_invariant",
            f"results have the same bits on 1, 2, 4 and 8 ranks with equal shards, and without a group, where V is a "
            f"multiple of {PIECES} and at least {PIECES * LEAST_PIECE}",
        ),
    ),
    clauses=CLAUSES,
    tolerances=TOLERANCES,
)

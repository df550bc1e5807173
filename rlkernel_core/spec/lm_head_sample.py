"""lm_head_sample@1: draw tokens straight from hidden states and the output head; calls without filters store no logits.

    logits = cap((hidden @ weight.T + s (hidden @ A.T) @ B.T + bias) * logit_scale)
    cap(x) = c * tanh(x / c) where softcap c is given
    and then sample@1 on these fp32 logits: edits, order, filters, noise, results

Without a filter the draw is one argmax of noised logits and one running sum of exponentials, so the vocabulary can pass
in tiles. Noise belongs to token ids, so the token is that of sample on the stored logits, unless two scores are closer
than the rounding of the matmul. The term with A and B is there where `lora` is given.

Legend: N rows · D hidden · V vocabulary · W rows of the head, W >= V · r rank of the low-rank addition.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from rlkernel_core import checks
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    Clause,
    Feature,
    OpCall,
    OpSpec,
    Tolerance,
)
from rlkernel_core.spec.linear_logprob import check_head, mixed_dtypes, quantized
from rlkernel_core.spec.qmatmul import LoRA, check_lora
from rlkernel_core.spec.sample import check_request, needed
from rlkernel_core.spec.sample_clauses import FEATURES, PHILOX, REPEATS, TOLERANCES
from rlkernel_core.spec.sampling import LogitBias, RequestParams, SampleResult, check_no_gradient

if TYPE_CHECKING:
    from torch import Tensor


TRAINER_BITS: Final = Feature(
    "trainer_bits",
    "without edits logprob + log_kept_mass has the bits of this backend's linear_logprob@1 of the same hidden states, "
    "head, token and temperature, and raw_logprob those at temperature 1, wherever these are finite",
)


@dataclass(slots=True, eq=False)
class LmHeadSampleCall(RequestParams, OpCall[SampleResult]):
    """Draw one token per row of `hidden`.

    Where top_k, top_p and min_p are None and neither top_n, rank, entropy nor kept_capacity asks for the whole row, no
    tensor of [N, V] exists. Otherwise the logits are stored. What is not listed is as in sample.

    Args:
        hidden: [N, D] bf16, fp16 or fp32 (float64 on backends that claim it); any strides; never written to.
        weight: [W, D], the output head. Another dtype than that of hidden where `mixed_dtypes` is claimed, and where
            `quantized` is a QuantTensor, as in linear_logprob.
        bias: [W], added before everything else.
        lora: LoRA(A [r, D], B [W, r], scale), an adapter of the head that is not merged. Any floating dtypes.
        logit_scale: > 0, multiplies the logits; for heads that divide, pass the inverse.
        softcap: c > 0 for c * tanh(x / c), after the scale; part of the raw law.
        logit_bias: what sample calls `bias`: values added to some logits, per row.
        vocab_size: V where the head is padded, W > V.

    Returns:
        SampleResult; fp32, or float64 for float64 hidden.

    Raises:
        ArgumentError: as sample, and for sizes of the head that do not match.
    """

    hidden: Tensor
    weight: Tensor | QuantTensor
    _: KW_ONLY
    bias: Tensor | None = None
    lora: LoRA | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    logit_bias: LogitBias | None = None


def check(call: LmHeadSampleCall) -> None:
    """Metadata checks shared by all implementations of lm_head_sample@1; reads no value off the device."""
    hidden, weight, bias = call.hidden, call.weight, call.bias
    checks.tensor("hidden", hidden, ndim=2, kind="floating")
    check_head(weight, hidden)
    of = "weight without its last dimension"
    checks.aligned("bias", bias, weight.shape[:1], of, kind="floating", beside=hidden, where="hidden")
    checks.number("logit_scale", call.logit_scale, above=0.0)
    if call.softcap is not None:
        checks.number("softcap", call.softcap, above=0.0)
    if call.lora is not None:
        check_lora(call.lora, weight.shape, hidden, "hidden")
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias), ("lora", call.lora)):
        if x is not None and not isinstance(x, QuantTensor):
            check_no_gradient(name, x)
    check_request(call, hidden, weight.shape[0], bias=call.logit_bias, bias_name="logit_bias")


def _sizes(call: LmHeadSampleCall) -> dict[str, int]:
    return {"rows": call.hidden.shape[0], "vocab": call.weight.shape[0]}


SPEC = OpSpec(
    name="lm_head_sample",
    record=LmHeadSampleCall,
    summary="draw tokens from hidden states and the output head; no stored logits without filters",
    primary="hidden",
    varying=("seed", "step"),
    check=check,
    sizes=_sizes,
    needed=lambda call: {**mixed_dtypes(call), **quantized(call), **needed(call)},
    features=(
        *FEATURES,
        Feature("mixed_dtypes", "weight of another dtype than hidden"),
        Feature("quantized", "a quantized head, of which no more than tiles are dequantized"),
        Feature("bias", "a bias per vocabulary entry"),
        Feature("lora", "a low-rank addition to the head that is not merged"),
        Feature("logit_bias", "values added to some logits of a row"),
        Feature("logit_scale", "a factor on the logits"),
        Feature("softcap", "logit soft-capping"),
        TRAINER_BITS,
    ),
    clauses=(
        Clause(
            "LH-01",
            "equals sample",
            "kept set, and token if the noise is the contract's, are those of sample(fp32 logits)",
            "law",
        ),
        Clause("LH-02", "log-probability", "logprob, log_kept_mass and raw_logprob match float64", "accuracy"),
        Clause("LH-03", "no stored logits", "peak memory of a call without filters is far below N x V", "side_effect"),
        Clause("LH-04", "law", "over steps, tokens follow the processed law", "law"),
        Clause("LH-05", "degenerate rows", "NaN, +inf and empty rows as in sample, whatever tile they fall in", "law"),
        Clause("LH-06", "edits", "penalties, masks and bans act on tiles as on rows", "law", "allowed"),
        Clause("LH-07", "head bias", "added before scale and cap; -inf forbids an id", "law", "bias"),
        Clause("LH-08", "logit bias", "added to the capped logits, as in sample", "law", "logit_bias"),
        Clause("LH-09", "scale", "logit_scale s equals hidden * s", "law", "logit_scale"),
        Clause("LH-10", "softcap", "cap before edits and temperature; part of the raw law", "law", "softcap"),
        Clause(
            "LH-11", "padded head", "rows of the head from vocab_size on change nothing", "invariance", "vocab_size"
        ),
        Clause("LH-12", "mixed dtypes", "operands are exact in fp32; the products are summed there", "accuracy"),
        Clause("LH-13", "place independence", "a request draws the same token in any batch", "invariance", PHILOX.name),
        Clause("LH-14", "inputs untouched", "no argument, global generator or default is written to", "side_effect"),
        Clause("LH-15", "no rows", "N = 0 gives empty results", "accuracy"),
        Clause("LH-16", "bad arguments", "wrong sizes, dtypes and numbers: ArgumentError naming it", "refusal"),
        Clause("LH-17", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause("LH-18", "whole rows", "entropy, kept ids, top n and rank are those of sample(logits)", "accuracy"),
        Clause("LH-19", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("LH-20", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("LH-21", "slots", "as parameters gathered; padding rows draw nothing and give 0", "law", "slot"),
        Clause("LH-22", *REPEATS),
        Clause(
            "LH-23",
            "LoRA",
            "logits have s (h A^T) B^T beside h W^T, before bias, scale and cap; A and B written in place are seen by "
            "the next call",
            "law",
            "lora",
        ),
        Clause("LH-24", "quantized head", "draws are those of dequantize(weight) in fp32", "law", "quantized"),
        Clause(
            "LH-25",
            "one law",
            "logprob + log_kept_mass is bit for bit what this backend's linear_logprob@1 says of the token at the "
            "temperature, raw_logprob what it says at temperature 1; both shares are <= 0",
            "invariance",
            TRAINER_BITS.name,
        ),
    ),
    tolerances=(
        *TOLERANCES,
        Tolerance("logits", "bfloat16", 2e-5, 0.0, "relative to sum |h w|: fp32 sum of D products"),
        Tolerance("logits", "float16", 2e-5, 0.0, "relative to sum |h w|: fp32 sum of D products"),
        Tolerance("logits", "float32", 2e-5, 0.0, "relative to sum |h w|: fp32 sum of D products"),
    ),
)

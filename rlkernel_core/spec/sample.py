"""sample@1: draw one token per row, and return the log-probability of that token under the law it was drawn from.

    raw law        softmax(logits)
    tempered law   softmax(x / T)            x: logits after masks, bias and penalties
    processed law  softmax(x / T) over the tokens that min-p, top-k and top-p keep

    logprob       = log processed(token)
    log_kept_mass = log of the sum of tempered(j) over the kept j
    logprob + log_kept_mass = log tempered(token): what a trainer computes that knows nothing of the filters

The steps, the total order (x descending, id ascending) and the noise are written down in `rlkernel_core.spec.sampling`.

Legend: N rows · V vocabulary · W stored columns, W >= V · R state slots.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import Feature, OpCall, OpSpec
from rlkernel_core.spec.sample_clauses import CLAUSES, FEATURES, TOLERANCES, TRAINER_BITS
from rlkernel_core.spec.sampling import (
    LAWS,
    LogitBias,
    RequestParams,
    SampleResult,
    SamplingParams,
    check_edits,
    check_no_gradient,
    check_sampling_params,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class SampleCall(RequestParams, OpCall[SampleResult]):
    """Draw one token per row of `logits`.

    A parameter is a number, or a tensor with one entry per row, so that requests of one batch differ; a tensor's
    values are read on the device, and a value that has no meaning sets Status.PARAM in that row only.

    Args:
        logits: [N, W] bf16, fp16 or fp32 (float64 on backends that claim it); any strides; never written to.
        temperature: T; 0 is greedy: the argmax, ties to the lowest id, with logprob 0.
        top_k: keep the k best; <= 0 is off, and so is None.
        top_p: keep the shortest prefix of the order with at least this mass, the crossing token included;
            >= 1 is off, so is NaN in a tensor; <= 0 keeps the first token.
        min_p: keep tokens with at least min_p times the probability of the best; <= 0 is off, so is NaN in a tensor.
        seed: unsigned 64-bit key of the request's noise; tensors hold its bits as int64.
        step: unsigned 64-bit count of the tokens the request has drawn. The same (seed, step) draws the same noise
            wherever the row stands, so with N > 1 at least one of the two must be given per row.
        penalties: on tokens of the prompt and of the output so far.
        bias: values added to some logits, per row.
        allowed: [N, >= ceil(V / 32)] int32, bit id % 32 of word id // 32 set where the id may be drawn (xgrammar).
        banned: ids per row that may not be drawn.
        filter_order: "topk_topp": top-k, then top-p on the renormalized survivors; "topp_topk": top-p, then top-k;
            "joint": both on the tempered law, intersected. min-p comes first; under "joint" it too only intersects.
        tie: "lowest_id" cuts ties by id, so exactly k are kept; "keep_all" keeps everything tied with the last token
            of each filter, as masks that compare values do.
        vocab_size: V where the rows are padded, W > V; columns from V on are ignored, whatever they hold. None: W.
        slot: [N] integer, row -> state slot. Parameters, seed, step and penalties then hold one entry per slot, [R];
            `bias`, `allowed` and `banned` stay per row. A row with slot -1 is padding: token = invalid_token, every
            other result 0 (threshold_id, kept_ids, top_ids and rank -1, top_logprobs -inf).
        raw_logprob: also return the log-probability under the raw law.
        top_n: also return the n best ids and their log-probabilities under the law `top_n_from`.
        top_n_from: "raw" or "processed"; `rank` is the token's place in the same law.
        rank: also return that place.
        entropy: also return the entropy of the processed law.
        kept_capacity: also return up to this many kept ids per row.
        invalid_token: what `token` holds where none could be drawn.
        stream: number of the noise stream, below 2^32; a drafting model draws from stream 1.

    Returns:
        SampleResult. Nothing in it carries a gradient: differentiate `logprob` of the tokens.

    Raises:
        ArgumentError: wrong rank, sizes or dtype, a number without meaning, noise shared by several rows, or logits
            that ask for a gradient while gradients are enabled.
    """

    logits: Tensor
    _: KW_ONLY
    bias: LogitBias | None = None


_PER_ROW: Final = ("temperature", "top_k", "top_p", "min_p")  # may differ by row, as a feature


def check(call: SampleCall) -> None:
    """Metadata checks shared by all implementations of sample@1; reads no value off the device."""
    logits = call.logits
    checks.tensor("logits", logits, ndim=2, kind="floating")
    if logits.shape[1] < 1:
        raise ArgumentError("logits", checks.describe(logits), "needs a last dimension V >= 1", "Pass [N, V].")
    check_no_gradient("logits", logits)
    check_request(call, logits, logits.shape[1], bias=call.bias)


def check_request(call: RequestParams, like: Tensor, width: int, *, bias: Any, bias_name: str = "bias") -> None:
    """Everything that sample and lm_head_sample are told about the draw, for one row of logits per row of `like`."""
    rows, slot = like.shape[0], call.slot
    if slot is not None:
        checks.tensor("slot", slot, ndim=1, kind="integer")
        checks.shape("slot", slot, (rows,), "rows")
        checks.same_device("slot", slot, like, "the other tensors")
    check_sampling_params(call, like, rows, width, slots=slot is not None)
    vocab = call.vocab_size or width
    check_edits(call, like, rows, vocab, bias=bias, bias_name=bias_name, slots=slot is not None)
    checks.integer("top_n", call.top_n, at_least=0, at_most=vocab)
    checks.choice("top_n_from", call.top_n_from, LAWS)
    checks.flags(raw_logprob=call.raw_logprob, rank=call.rank, entropy=call.entropy)
    checks.integer("kept_capacity", call.kept_capacity, at_least=0)
    checks.integer("invalid_token", call.invalid_token)
    checks.integer("stream", call.stream, at_least=0, at_most=2**32 - 1)


def needed(call: Any) -> dict[str, object]:
    """Feature -> whether a sampling operator needs it, where the name of an argument does not say so."""
    ranked = call.top_n > 0 or call.rank
    return {
        **needed_of_rows(call),
        "top_n:raw": ranked and call.top_n_from == "raw",
        "top_n:processed": ranked and call.top_n_from == "processed",
        "kept_ids": call.kept_capacity > 0,
    }


def needed_of_rows(call: SamplingParams) -> dict[str, object]:
    """The same of the parameters that may differ by row."""
    return {"per_row_parameters": any(checks.is_tensor(getattr(call, name)) for name in _PER_ROW)}


def _sizes(call: SampleCall) -> dict[str, int]:
    return {"rows": call.logits.shape[0], "vocab": call.vocab_size or call.logits.shape[1]}


SPEC = OpSpec(
    name="sample",
    record=SampleCall,
    summary="draw tokens with temperature, top-k, top-p, min-p, penalties and masks; returns their log-probability",
    primary="logits",
    varying=("seed", "step"),
    check=check,
    sizes=_sizes,
    needed=needed,
    features=(*FEATURES, Feature("bias", "values added to some logits"), TRAINER_BITS),
    clauses=CLAUSES,
    tolerances=TOLERANCES,
)

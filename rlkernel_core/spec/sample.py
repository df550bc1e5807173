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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import Feature, OpSpec, owed, spec_only
from rlkernel_core.spec.sample_clauses import CLAUSES, FEATURES, TOLERANCES
from rlkernel_core.spec.sampling import (
    LAWS,
    LogitBias,
    Penalties,
    SampleResult,
    TokenLists,
    check_edits,
    check_law,
    check_no_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    step: int | Tensor,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    allowed: Tensor | None = None,
    banned: TokenLists | None = None,
    filter_order: str = "topk_topp",
    tie: str = "lowest_id",
    vocab_size: int | None = None,
    slot: Tensor | None = None,
    raw_logprob: bool = False,
    top_n: int = 0,
    top_n_from: str = "raw",
    rank: bool = False,
    entropy: bool = False,
    kept_capacity: int = 0,
    invalid_token: int = 0,
    stream: int = 0,
) -> SampleResult:
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
        filter_order: "topk_topp": top-k, then top-p on the renormalised survivors; "topp_topk": top-p, then top-k;
            "joint": both on the tempered law, intersected. min-p comes first; under "joint" it too only intersects.
        tie: "lowest_id" cuts ties by id, so exactly k are kept; "keep_all" keeps everything tied with the last token
            of each filter, as masks that compare values do.
        vocab_size: V where the rows are padded, W > V; columns from V on are ignored, whatever they hold. None: W.
        slot: [N] integer, row -> state slot. Parameters, seed, step and penalties then hold one entry per slot, [R];
            `bias`, `allowed` and `banned` stay per row. A row with slot -1 is padding: token = invalid_token, every
            other result 0 (kept_ids, top_ids and rank -1, top_logprobs -inf).
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
    spec_only("sample")


# Arguments of the processed law and of its noise, and those of them that may differ by row as a feature.
LAW: Final = ("temperature", "top_k", "top_p", "min_p", "seed", "step", "filter_order", "tie", "vocab_size")
_PER_ROW: Final = LAW[:4]


def check(logits: Any, **args: Any) -> None:
    """Metadata checks shared by all implementations of sample@1; reads no value off the device."""
    checks.tensor("logits", logits, ndim=2, kind="floating")
    if logits.shape[1] < 1:
        raise ArgumentError("logits", checks.describe(logits), "needs a last dimension V >= 1", "Pass [N, V].")
    check_no_gradient("logits", logits)
    check_request(logits, logits.shape[1], **args)


def check_request(like: Tensor, width: int, *, bias_name: str = "bias", **args: Any) -> None:
    """Everything that sample and lm_head_sample are told about the draw, for one row of logits per row of `like`."""
    rows, slot = like.shape[0], args["slot"]
    if slot is not None:
        checks.tensor("slot", slot, ndim=1, kind="integer")
        checks.shape("slot", slot, (rows,), "rows")
        checks.same_device("slot", slot, like, "the other tensors")
    law = {name: args[name] for name in LAW}
    check_law(like, rows, width, slots=slot is not None, **law)
    vocab = args["vocab_size"] or width
    edits = {name: args[name] for name in ("penalties", "allowed", "banned")}
    bias = args[bias_name]
    check_edits(like, rows, vocab, **edits, bias=bias, bias_name=bias_name, slots=slot is not None)
    checks.integer("top_n", args["top_n"], at_least=0, at_most=vocab)
    checks.choice("top_n_from", args["top_n_from"], LAWS)
    checks.flags(raw_logprob=args["raw_logprob"], rank=args["rank"], entropy=args["entropy"])
    checks.integer("kept_capacity", args["kept_capacity"], at_least=0)
    checks.integer("invalid_token", args["invalid_token"])
    checks.integer("stream", args["stream"], at_least=0, at_most=2**32 - 1)


def law_needs(args: Mapping[str, Any]) -> frozenset[str]:
    """Features that the law of a draw needs, in all sampling operators."""
    given = {
        "per_row_parameters": any(checks.is_tensor(args[name]) for name in _PER_ROW),
        "filter_order:joint": args["filter_order"] == "joint",
        "filter_order:topp_topk": args["filter_order"] == "topp_topk",
        "tie:keep_all": args["tie"] == "keep_all",
        "raw_logprob": bool(args["raw_logprob"]),
        **{
            name: args[name] is not None
            for name in ("top_k", "top_p", "min_p", "penalties", "allowed", "banned", "vocab_size")
        },
    }
    return frozenset(name for name, needed in given.items() if needed)


def request_needs(args: Mapping[str, Any]) -> frozenset[str]:
    """Features that the arguments shared by sample and lm_head_sample need."""
    ranked = args["top_n"] > 0 or args["rank"]
    given = {
        "slot": args["slot"] is not None,
        "top_n:raw": ranked and args["top_n_from"] == "raw",
        "top_n:processed": ranked and args["top_n_from"] == "processed",
        "entropy": bool(args["entropy"]),
        "kept_ids": args["kept_capacity"] > 0,
        "stream": args["stream"] > 0,
    }
    return law_needs(args) | frozenset(name for name, needed in given.items() if needed)


def _needs(args: Mapping[str, Any]) -> frozenset[str]:
    return request_needs(args) | (frozenset({"bias"}) if args["bias"] is not None else frozenset())


SPEC = OpSpec(
    signature=sample,
    summary="draw tokens with temperature, top-k, top-p, min-p, penalties and masks; returns their log-probability",
    primary="logits",
    check=check,
    needs=_needs,
    features=(*FEATURES, Feature("bias", "values added to some logits")),
    clauses=(*CLAUSES, *owed("SA")),
    tolerances=TOLERANCES,
)

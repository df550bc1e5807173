"""verify@1: check drafted tokens against the target model so that what comes out follows the target's law exactly.

Request i drafted k_i tokens; the target was run on all of them at once and gave k_i + 1 rows of logits. Row j holds the
law p_j of sample@1 (processed) after j accepted drafts. With q_j the law draft d_j was drawn from:

    accept d_j while  u_j q_j(d_j) < p_j(d_j)              u: noise stream 2 at token d_j
    at the first rejection draw from max(p_j - q_j, 0), renormalized (p_j where that is 0)       noise stream 3
    after k_i acceptances draw from p_{k_i}                                                      noise stream 0

Then every emitted token has law p_j given the ones before it (Leviathan et al., arXiv 2211.17192). Noise is that of the
request at step + j, so the outcome depends neither on the batch nor on how many tokens other requests drafted.

Without draft laws (`draft_probs` and `draft_logits` None) drafts are one-hot and the test is strict: row j draws its
own token t_j from p_j with stream 0, and d_j is accepted iff it is t_j. The tokens are those that sample would have
drawn one by one, bit for bit. That is exact for drafts of any origin; knowing their law accepts more of them.

Legend: B requests · K drafts of all requests · M = K + B rows · V vocabulary · W stored columns.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    Clause,
    Feature,
    OpCall,
    OpSpec,
)
from rlkernel_core.spec.sample import needed_of_rows
from rlkernel_core.spec.sample_clauses import FEATURES, PHILOX, REPEATS, TOLERANCES
from rlkernel_core.spec.sampling import LogitBias, SamplingParams, check_edits, check_no_gradient, check_sampling_params

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VerifyResult:
    """What came out of a round of drafts, aligned with the rows of the target's logits.

    Request i owns rows cu_draft[i] + i to cu_draft[i + 1] + i, both included. Its first `accepted[i]` rows hold the
    accepted drafts, the next one the token drawn in place of the first rejected draft or after the last one. Rows
    behind it hold `invalid_token` and 0.
    """

    accepted: Tensor  # [B] int32, drafts accepted; accepted + 1 tokens were emitted where status allows
    token: Tensor  # [M] int64
    logprob: Tensor  # [M] of the token under the target's processed law; fp32 (float64 for float64 logits)
    log_kept_mass: Tensor  # [M] of the target's law
    kept_count: Tensor  # [M] int32
    status: Tensor  # [M] int32, bits of Status
    raw_logprob: Tensor | None = None  # [M]


@dataclass(slots=True, eq=False)
class VerifyCall(SamplingParams, OpCall[VerifyResult]):
    """Accept the longest prefix of each request's drafts that the target's law allows, and draw one more token.

    What is not listed is as in sample.

    Args:
        target_logits: [M, W] with M = K + B, the rows of a request together, as in VerifyResult; never written to.
        draft_ids: [K] drafted tokens, requests one after the other. An id outside [0, V) is rejected.
        cu_draft: [B + 1] integer, request i drafted draft_ids[cu_draft[i]:cu_draft[i + 1]]; any k_i may be 0.
        draft_probs: [K, >= V] the laws the drafts were drawn from: after the drafter's temperature and filters.
        draft_logits: [K, >= V] the same as logits, with -inf at what its filters dropped: q = softmax(draft_logits).
        temperature: as in sample, one entry per request; so are top_k, top_p, min_p, seed and step.
        step: count of the tokens the request had drawn before this round; row j draws at step + j.
        penalties: one row per request, on what was there before this round; drafts count in the rows after them.
        bias: values added to some logits, per row of target_logits.
        allowed: [M, >= ceil(V / 32)] int32 bitmask, per row.
        banned: ids that may not be drawn, per row.
        invalid_token: what `token` holds behind the last emitted one, and where none could be drawn.

    Returns:
        VerifyResult. A row whose law is empty or whose parameters have no meaning rejects its draft and emits no token.

    Raises:
        ArgumentError: wrong rank, sizes or dtype, both draft laws, or logits that ask for a gradient.
    """

    target_logits: Tensor
    draft_ids: Tensor
    _: KW_ONLY
    cu_draft: Tensor
    draft_probs: Tensor | None = None
    draft_logits: Tensor | None = None
    bias: LogitBias | None = None
    invalid_token: int = -1


def check(call: VerifyCall) -> None:
    """Metadata checks shared by all implementations of verify@1; reads no value off the device."""
    target_logits, draft_ids, cu_draft = call.target_logits, call.draft_ids, call.cu_draft
    draft_probs, draft_logits = call.draft_probs, call.draft_logits
    checks.tensor("target_logits", target_logits, ndim=2, kind="floating")
    checks.tensor("draft_ids", draft_ids, ndim=1, kind="integer")
    checks.tensor("cu_draft", cu_draft, ndim=1, kind="integer")
    checks.same_device("draft_ids", draft_ids, target_logits, "target_logits")
    checks.same_device("cu_draft", cu_draft, target_logits, "target_logits")
    check_no_gradient("target_logits", target_logits)
    (M, W), K, B = target_logits.shape, draft_ids.shape[0], cu_draft.shape[0] - 1
    if B < 0 or M != K + B or W < 1:
        raise ArgumentError(
            "target_logits",
            checks.describe(target_logits),
            f"must have a row per entry of draft_ids and one more per request of cu_draft: [{K} + {max(B, 0)}, V]",
            "Run the target on the last token and all drafts of each request.",
        )
    checks.exclusive(draft_probs=draft_probs, draft_logits=draft_logits)
    check_sampling_params(call, target_logits, B, W, of="requests")
    checks.flags(raw_logprob=call.raw_logprob)
    vocab = call.vocab_size or W
    for name, x in (("draft_probs", draft_probs), ("draft_logits", draft_logits)):
        if x is None:
            continue
        checks.tensor(name, x, ndim=2, kind="floating")
        checks.same_device(name, x, target_logits, "target_logits")
        check_no_gradient(name, x)
        if x.shape[0] != K or x.shape[1] < vocab:
            raise ArgumentError(name, checks.describe(x), f"must have shape [{K}, >= {vocab}]", "One law per draft.")
    check_edits(call, target_logits, M, vocab, bias=call.bias, history_rows=B)
    checks.integer("invalid_token", call.invalid_token)


_OWN = ("slot", "stream", "entropy", "kept_ids", "top_n:raw", "top_n:processed")


def _sizes(call: VerifyCall) -> dict[str, int]:
    return {"rows": call.target_logits.shape[0], "vocab": call.vocab_size or call.target_logits.shape[1]}


SPEC = OpSpec(
    name="verify",
    record=VerifyCall,
    summary="speculative decoding: accept drafts and draw replacements so that the target's law is kept",
    primary="target_logits",
    varying=("seed", "step"),
    check=check,
    sizes=_sizes,
    needed=needed_of_rows,
    features=(
        *(f for f in FEATURES if f.name not in _OWN),
        Feature("bias", "values added to some logits"),
        Feature("draft_probs", "the laws of the drafts as probabilities"),
        Feature("draft_logits", "the laws of the drafts as logits"),
    ),
    clauses=(
        Clause("VF-01", "law", "emitted tokens follow the target's processed law, given those before", "law"),
        Clause(
            "VF-02",
            "strict drafts",
            "without draft laws the tokens are those that sample draws one by one, bit for bit",
            "law",
            PHILOX.name,
        ),
        Clause("VF-03", "law with probabilities", "VF-01 for any draft law", "law", "draft_probs"),
        Clause("VF-04", "law with logits", "equals draft_probs = softmax(draft_logits)", "law", "draft_logits"),
        Clause("VF-05", "equal laws", "a draft law equal to the target's is always accepted", "law", "draft_logits"),
        Clause("VF-06", "disjoint laws", "a draft the target gives no mass is never accepted", "law", "draft_probs"),
        Clause("VF-07", "log-probability", "logprob, log_kept_mass, raw_logprob are the target's", "accuracy"),
        Clause("VF-08", "no residual", "a residual without mass falls back to the target's law", "law", "draft_probs"),
        Clause("VF-09", "penalties", "row j counts the drafts before it", "law", "penalties"),
        Clause("VF-10", "rows behind", "rows behind the last emitted token hold invalid_token and 0", "law"),
        Clause("VF-11", "degenerate rows", "empty laws, NaN and foreign draft ids reject, in their request", "law"),
        Clause(
            "VF-12", "place independence", "a request's outcome is the same in any batch", "invariance", PHILOX.name
        ),
        Clause("VF-13", "no drafts", "k_i = 0 is sample; B = 0 gives empty results", "accuracy"),
        Clause("VF-14", "inputs untouched", "no argument, global generator or default is written to", "side_effect"),
        Clause("VF-15", "bad arguments", "wrong sizes, dtypes, both draft laws: ArgumentError naming it", "refusal"),
        Clause("VF-16", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause("VF-17", "edits", "allowed, banned and bias act on the row of the target they are given for", "law"),
        Clause("VF-18", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("VF-19", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("VF-20", "padding columns", "columns from vocab_size on change nothing", "invariance", "vocab_size"),
        Clause("VF-21", *REPEATS),
    ),
    tolerances=TOLERANCES,
)

"""FlashInfer: sampling, speculative sampling (tokens alone, no log-probability and no kept mass), and attention."""

from __future__ import annotations

from typing import Any

import torch

from rlkernel_bench.peers import Peer
from rlkernel_bench.work import Call, Inputs, Outputs, Work


def sample(work: Work) -> Call:
    """Top-k and top-p as rejection over the probabilities ("joint"), or Gumbel where there is no filter.

    top_k is passed as a tensor: as an int it takes another module, which takes half an hour to compile.
    """
    from flashinfer import sampling as fi

    k, p = work.options.get("top_k"), work.options.get("top_p")

    def run(given: Inputs) -> Outputs:
        logits = given["logits"].float()
        noise = {"seed": given["seed"], "offset": torch.zeros_like(given["seed"])}
        if k is None and p is None:
            return {"token": fi.sampling_from_logits(logits, **noise)}
        if k is None:
            return {"token": fi.top_p_sampling_from_probs(fi.softmax(logits), p, **noise)}
        most = torch.full((len(logits),), k, dtype=torch.int32, device=logits.device)
        return {"token": fi.top_k_top_p_sampling_from_logits(logits, most, p or 1.0, **noise)}

    return run


def verify(work: Work) -> Call:
    """Chain speculative sampling; filters would take passes of their own before it."""
    from flashinfer.sampling import chain_speculative_sampling

    if work.options:
        raise NotImplementedError("takes laws, not filters")
    b, k, v = (work.sizes[s] for s in "BKV")

    def run(given: Inputs) -> Outputs:
        law = torch.softmax(given["target_logits"], -1).view(b, k + 1, v)
        ids = given["draft_ids"].int().view(b, k)
        found = chain_speculative_sampling(given["draft_probs"].view(b, k, v), ids, law)
        return {"accepted": found[2]}

    return run


def attention(work: Work) -> Call:
    """Its wrappers for a cache in pages and for packed rows, planned once for a set of inputs; forward alone.

    With pages its tensor cores are asked for, which are the quicker of two ways where several heads read one.
    """
    import flashinfer as fi

    if work.backward:
        raise NotImplementedError("has no backward pass")
    B, M, S, Hq, Hk, D = (work.sizes[s] for s in ("B", "M", "S", "Hq", "Hk", "D"))
    page = int(work.options.get("page", 0))
    planned: dict[int, Any] = {}  # by address of q: a plan keeps its inputs, so no other can have that

    def plan(given: Inputs) -> Any:
        q, cu_q = given["q"], given["cu_q"]
        space = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        dtype = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        if not page:
            rows = fi.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
            rows.plan(cu_q, given["cu_k"], Hq, Hk, D, causal=True, **dtype)
            return lambda: rows.run(q, given["k"], given["v"])
        each = S // page
        first = torch.arange(B + 1, dtype=torch.int32, device=q.device) * each
        pages, last = given["page_table"].flatten(), torch.full((B,), page, dtype=torch.int32, device=q.device)
        keys = given["k_pages"], given["v_pages"]
        if M == 1:
            one = fi.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            one.plan(first, pages, last, Hq, Hk, D, page, **dtype)
            return lambda: one.run(q, keys)
        many = fi.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        many.plan(cu_q, first, pages, last, Hq, Hk, D, page, causal=True, **dtype)
        return lambda: many.run(q, keys)

    def run(given: Inputs) -> Outputs:
        at = given["q"].data_ptr()
        if at not in planned:
            planned[at] = plan(given)
        return {"out": planned[at]()}

    return run


PEERS = (
    Peer(
        "flashinfer",
        "flashinfer-python",
        ("flashinfer",),
        {"sample": sample, "verify": verify, "attention": attention},
        "flashinfer-python 0.7.2.post1, sampling.py; 0.6.4, decode.py, prefill.py",
        ran="sample: H200, flashinfer-python 0.7.2.post1, torch 2.11",
    ),
)

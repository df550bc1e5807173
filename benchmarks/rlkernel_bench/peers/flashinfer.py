"""FlashInfer: sampling and speculative sampling. It returns tokens alone, no log-probability and no kept mass."""

from __future__ import annotations

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


PEERS = (
    Peer(
        "flashinfer",
        "flashinfer-python",
        ("flashinfer",),
        {"sample": sample, "verify": verify},
        "flashinfer-python 0.7.2.post1, sampling.py",
        ran="sample: H200, flashinfer-python 0.7.2.post1, torch 2.11",
    ),
)

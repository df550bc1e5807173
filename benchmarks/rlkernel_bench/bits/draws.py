"""Calls of the operators that draw tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.bits.inputs import Given, Size, Table, changed, draw, head, ids, larger


def bits(s: Size, rows: int, *allowed: int) -> Tensor:
    """A mask of tokens as grammars keep it, the same for all rows."""
    words = [sum(1 << (i % 32) for i in allowed if i // 32 == w) for w in range(-(-s.V // 32))]
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in words]] * rows, dtype=torch.int32)


def requests(s: Size, bias: str = "bias", owners: int | None = None) -> dict[str, Callable[[], Given]]:
    """What the three sampling operators share; `owners` of parameters, one a row unless given."""
    N, V = s.B, s.V
    owners = N if owners is None else owners
    every = 4 * torch.arange(N + 1)
    filters = {"top_k": 5, "top_p": 0.4, "raw_logprob": True}
    return {
        "temperature": lambda: {"temperature": 0.3},
        "greedy": lambda: {"temperature": 0.0},
        "temperature per row": lambda: {"temperature": 0.3 * torch.arange(float(owners))},
        "top k": lambda: {"top_k": 2},
        "top p": lambda: {"top_p": 0.3},
        "min p": lambda: {"min_p": 0.7},
        "parameters per row": lambda: {
            "temperature": torch.linspace(0.5, 1.5, owners),
            "top_k": torch.arange(owners),
            "top_p": torch.linspace(0.3, 1.0, owners),
            "min_p": torch.linspace(0.0, 0.1, owners),
        },
        "penalties": lambda: {
            "penalties": rlk.Penalties(repetition=1.2, frequency=0.5, presence=0.1, output_ids=ids(owners, 3, below=V))
        },
        "bias": lambda: {bias: rlk.LogitBias(ids(4 * N, below=V, seed=1), torch.full((4 * N,), 5.0), every)},
        "allowed": lambda: {"allowed": bits(s, N, 1, 40, 63)},
        "nothing allowed": lambda: {"allowed": bits(s, N), "invalid_token": 5},
        "banned": lambda: {"banned": rlk.TokenLists(ids(4 * N, below=V, seed=2), every)},
        "top p, then top k": lambda: {**filters, "filter_order": "topp_topk"},
        "filters at once": lambda: {**filters, "filter_order": "joint"},
        "padded vocabulary": lambda: {"vocab_size": 40},
        "raw log-probability": lambda: {"raw_logprob": True},
    }


def draws(s: Size, bias: str = "bias") -> dict[str, Callable[[], Given]]:
    """What sample and lm_head_sample share."""
    return requests(s, bias) | {
        "slot": lambda: {
            "temperature": 0.2 + torch.arange(6),
            "seed": torch.arange(6),
            "slot": torch.tensor([3, 2, 5, 1, 0, -1]),
        },
        "top 3": lambda: {"top_n": 3},
        "top 3 of the processed law": lambda: {"top_n": 3, "temperature": 0.5, "top_n_from": "processed"},
        "rank": lambda: {"rank": True},
        "entropy": lambda: {"entropy": True, "top_p": 0.8},
        "kept ids": lambda: {"top_k": 3, "kept_capacity": 4},
        "another stream": lambda: {"stream": 1},
    }


def drawn(n: int) -> Given:
    """Noise of one request a row."""
    return {"seed": torch.arange(n), "step": 1}


def sample(s: Size) -> Table:
    """Every option, then vocabularies of models with what engines ask for."""
    found = changed(
        lambda: {"logits": draw(s.B, s.V), **drawn(s.B)},
        {
            **draws(s),
            "ties kept": lambda: {"logits": draw(s.B, s.V).round(), "top_k": 3, "tie": "keep_all"},
            "bfloat16": lambda: {"logits": draw(s.B, s.V, dtype=torch.bfloat16), "top_k": 5, "top_p": 0.9},
            "NaN and infinity": lambda: {"logits": draw(s.B, s.V).masked_fill(ids(s.B, s.V, below=64) == 0, math.nan)},
        },
    )
    asked = {
        "all": {},
        "top k and p": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
        "top p": {"top_p": 0.9, "raw_logprob": True},
        "min p and greedy": {"min_p": 0.05},
    }
    for n, v, dtype in (
        (1, 32000, torch.bfloat16),
        (8, 128256, torch.bfloat16),
        (64, 32000, torch.float32),
        (200, 4099, torch.float16),
    ):
        for name, law in asked.items():
            found |= larger(
                s,
                f"{n} x {v} {str(dtype).removeprefix('torch.')}, {name}",
                lambda n=n, v=v, d=dtype, law=law: {"logits": draw(n, v, dtype=d, std=3), **drawn(n), **law},
            )
    return found


def lm_head_sample(s: Size) -> Table:
    """Options of the head; of the draw those that a head's kernel has to treat itself."""
    some = {
        *("temperature", "greedy", "temperature per row", "top k", "top p", "parameters per row", "penalties", "bias"),
        *("allowed", "raw log-probability", "top 3", "kept ids", "slot", "padded vocabulary", "another stream"),
    }
    shared = {name: change for name, change in draws(s, "logit_bias").items() if name in some or s.small}
    own = {f"head: {name}": change for name, change in head(s).items()}
    found = changed(
        lambda: {"hidden": draw(s.B, s.D, std=0.2), "weight": draw(s.V, s.D, seed=1), **drawn(s.B)}, shared | own
    )
    for name, law in (("all", {}), ("top k and p", {"top_k": 50, "top_p": 0.95})):
        found |= larger(
            s,
            f"8 x 32000 of 512 bfloat16, {name}",
            lambda law=law: {
                "hidden": draw(8, 512, dtype=torch.bfloat16),
                "weight": draw(32000, 512, seed=1, std=0.1, dtype=torch.bfloat16),
                **drawn(8),
                **law,
            },
        )
    return found


def verify(s: Size) -> Table:
    """Options, no draft law, its probabilities, its logits."""
    found = changed(
        lambda: {
            "target_logits": draw(s.B, s.V),
            "draft_ids": ids(4, below=s.V),
            "cu_draft": torch.tensor([0, 1, 4]),
            "seed": torch.arange(2),
            "step": 1,
        },
        {
            **requests(s, owners=2),
            "draft probabilities": lambda: {"draft_probs": draw(4, s.V, seed=3).softmax(-1)},
            "draft logits": lambda: {"draft_logits": draw(4, s.V, seed=3)},
            "other bounds": lambda: {"cu_draft": torch.tensor([0, 2, 4])},
            "bfloat16": lambda: {"target_logits": draw(s.B, s.V, dtype=torch.bfloat16), "top_p": 0.9},
        },
    )

    def serving(law: Given) -> Given:
        return {
            "target_logits": draw(20, 32000, dtype=torch.bfloat16, std=3),
            "draft_ids": ids(16, below=32000),
            "cu_draft": 4 * torch.arange(5),
            "draft_logits": draw(16, 32000, seed=3, std=3),
            "seed": torch.arange(4),
            "step": 1,
            **law,
        }

    found |= larger(s, "20 x 32000 bfloat16", lambda: serving({}))
    return found | larger(s, "20 x 32000 bfloat16, top k and p", lambda: serving({"top_k": 50, "top_p": 0.95}))

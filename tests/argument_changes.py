"""For every optional argument of every operator: a call in which another value of it shows, beside its example call.

The same calls are where a bad value of the argument is refused for itself, and not for lack of what goes with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import B, D, N, T, V, draw, ids, logprobs, tokens
from tests import reward_changes as rewards
from tests.changes import Change, Changes, packed, starts
from tests.observed import COUNTER, NOISE, WEIGHT


def support(rows: int = N) -> Any:
    return rlk.Support(torch.arange(3 * rows) % V, 3 * torch.arange(rows + 1))


def law(rows: tuple[int, ...] = (N,)) -> Changes:
    """What logprob and the operators on a head share."""
    return {
        "temperature": Change(0.5),
        "softcap": Change(2.0),
        "mask": Change(ids(*rows, below=2, seed=7).bool()),
        "entropy": Change(True),
        "support": Change(support(math.prod(rows))),
    }


def logprob() -> Changes:
    return law() | {
        "top_logprobs": Change(3),
        "validate": Change(True, {"ids": ids(N) + V}),
        "logits_scale": Change(2.0, {"logits": draw(N, V).to(torch.float8_e4m3fn), "logits_scale": 1.0}),
        "group": Change(None),
    }


LORA: Changes = {"lora": Change(rlk.LoRA(draw(2, D), draw(V, 2)))}


def on_a_head() -> Changes:
    return LORA | {"bias": Change(draw(V, seed=9)), "logit_scale": Change(0.5), "softcap": Change(2.0)}


SPLIT: Changes = {"group": Change(None), "partial_grad": Change(True)}


def linear_logprob() -> Changes:
    return law() | on_a_head() | {"backward": Change("save"), "max_workspace_bytes": Change(1)} | SPLIT


def loss_options(tensor: str, entropy: Any) -> Changes:
    """What policy_loss and linear_policy_loss share; `tensor` [B, T] or [B, T, D] is where the tokens are counted."""
    reference = {"ref_logprob": logprobs(B, T, seed=6), "kl_coef": 0.1}
    bonus = {"entropy": entropy, "entropy_coef": 0.1}
    rollout = {"rollout_logprob": logprobs(B, T, seed=7)}
    empty_row = tokens() & (torch.arange(B) != 1)[:, None]
    per_sequence = {"aggregate": "seq_mean_token_sum_norm"}
    return {
        "mask": Change(tokens()),
        "kind": Change("reinforce"),
        "level": Change("sequence"),
        "clip": Change((0.01, 0.01)),
        "dual_clip": Change(1.01),
        "log_ratio_limit": Change(0.1),
        "tau": Change((0.5, 2.0), {"kind": "sapo"}),
        "gamma": Change(rlk.GammaGate(k_pos=1.0), {"kind": "vespo"}),
        "ratio_cap": Change(1.01, {"kind": "dppo_tv", "clip": (0.9, 0.9)}),
        "dro_beta": Change(0.5, {"kind": "dro", "dro_beta": 0.1}),
        "aggregate": Change("token_sum"),
        "denominator": Change(7.0),
        "horizon": Change(11.0, per_sequence),
        "count_empty": Change(True, {"mask": empty_row, "aggregate": "seq_mean_token_sum"}),
        "ref_logprob": Change(reference["ref_logprob"]),
        "kl": Change("k1", reference),
        "kl_coef": Change(0.5, reference),
        "kl_clamp": Change((0.1, 0.1), {**reference, "kl": "low_var"}),
        "kl_importance": Change(True, reference),
        "entropy": Change(entropy),
        "entropy_coef": Change(0.5, bonus),
        "entropy_aggregate": Change("token_sum", bonus),
        "entropy_denominator": Change(3.0, {**bonus, "entropy_aggregate": "token_mean"}),
        "rollout_logprob": Change(rollout["rollout_logprob"]),
        "correction": Change(rlk.Correction(high=1.1), rollout),
        "rejection": Change(rlk.Rejection(high=1.1), rollout),
        "process_group": Change(None),
    }


def policy_loss() -> Changes:
    flat = packed({"logprob": logprobs(B, T, seed=1), "old_logprob": logprobs(B, T, seed=2), "advantages": draw(B, T)})
    return loss_options("logprob", draw(B, T, seed=5).abs()) | {"cu_seqlens": Change(starts(*[T] * B), flat)}


def linear_policy_loss() -> Changes:
    flat = packed(
        {
            "hidden": draw(B, T, D, seed=4),
            "ids": ids(B, T),
            "old_logprob": logprobs(B, T, seed=2),
            "advantages": draw(B, T),
        }
    )
    head = {name: c for name, c in law((B, T)).items() if name in {"temperature", "support"}} | on_a_head()
    hints = {"max_workspace_bytes": Change(1), **SPLIT}
    return loss_options("hidden", True) | head | hints | {"cu_seqlens": Change(starts(*[T] * B), flat)}


def bits(*allowed: int) -> torch.Tensor:
    """A mask of tokens as xgrammar keeps it, the same for all rows."""
    words = [sum(1 << (i % 32) for i in allowed if i // 32 == w) for w in range(-(-V // 32))]
    signed = [w - (1 << 32) if w >> 31 else w for w in words]
    return torch.tensor([signed] * N, dtype=torch.int32)


def sampling(bias: str = "bias", rows: int = N) -> Changes:
    """What the three sampling operators share."""
    every = 4 * torch.arange(N + 1)
    filters = {"top_k": 5, "top_p": 0.4, "raw_logprob": True}
    return {
        "temperature": Change(0.3),
        "top_k": Change(2),
        "top_p": Change(0.3),
        "min_p": Change(0.7),
        "seed": Change(torch.arange(rows) + 10),
        "step": Change(2),
        "penalties": Change(rlk.Penalties(frequency=0.5, output_ids=ids(rows, 3))),
        bias: Change(rlk.LogitBias(ids(4 * N, seed=1), torch.full((4 * N,), 5.0), every)),
        "allowed": Change(bits(1, 40, 63)),
        "banned": Change(rlk.TokenLists(ids(4 * N, seed=2), every)),
        "filter_order": Change("topp_topk", filters),
        "tie": Change("keep_all", {"top_k": 3}),
        "vocab_size": Change(40),
        "raw_logprob": Change(True),
        "invalid_token": Change(5, {"allowed": bits()}),
    }


def sample(bias: str = "bias") -> Changes:
    by_slot = {"temperature": 0.2 + torch.arange(N), "seed": torch.arange(N)}
    return sampling(bias) | {
        "slot": Change(torch.tensor([3, 2, 5, 1, 0, -1]), by_slot),
        "top_n": Change(3),
        "top_n_from": Change("processed", {"top_n": 3, "temperature": 0.5}),
        "rank": Change(True),
        "entropy": Change(True),
        "kept_capacity": Change(4, {"top_k": 3}),
        "stream": Change(1),
    }


def tied(name: str, x: torch.Tensor) -> dict[str, Any]:
    return {name: x.round(), "top_k": 3}


def plain_sample() -> Changes:
    return sample() | {"tie": Change("keep_all", tied("logits", draw(N, V)))}


def lm_head_sample() -> Changes:
    return sample("logit_bias") | on_a_head() | {"tie": Change("keep_all", {"weight": torch.ones(V, D), "top_k": 3})}


def verify() -> Changes:
    laws = draw(4, V, seed=3)
    return sampling(rows=2) | {
        "tie": Change("keep_all", tied("target_logits", draw(N, V))),
        "draft_probs": Change(laws.softmax(-1)),
        "draft_logits": Change(laws),
        "cu_draft": Change(torch.tensor([0, 2, 4])),
    }


def quantize() -> Changes:
    return {
        "format": Change("nf4"),
        "dtype": Change(torch.bfloat16),
        "out": Change(rlk.quantize(draw(V, D, seed=1), "int4_g32")),
    }


def qmatmul() -> Changes:
    return {
        "bias": Change(draw(V)),
        **LORA,
        "activation": Change("silu"),
        "residual": Change(draw(N, V)),
        "weight_rounding": Change("dtype", {"x": draw(N, D).bfloat16()}),
        "ends": Change(torch.tensor([1, 3, 3, 5], dtype=torch.int32)),
        "lora_ends": Change(
            torch.tensor([1, 3], dtype=torch.int32),
            {"lora": rlk.LoRA(draw(2, 2, D), draw(2, V, 2)), "lora_ends": torch.tensor([3, 3], dtype=torch.int32)},
        ),
    }


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def counted(x: torch.Tensor) -> torch.Tensor:
    COUNTER.add_(1)
    return x * COUNTER


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape)


def from_own_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=NOISE)


def unlawful(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def summed_over_ranks(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    torch.distributed.all_reduce(y)
    return y


def shared_with_padding(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def capture() -> Changes:
    bucket, all_rows = rlk.Bucket({"x": 0}, (2, 4, 8)), rlk.Bucket({"x": 0}, (4, 8), out=None)
    static = {"fn": scaled, "static": (WEIGHT,)}
    return {
        "buckets": Change((bucket,)),
        "pad": Change({"x": 9.0}, {"fn": shared_with_padding, "buckets": (all_rows,)}),
        "static": Change((WEIGHT,), {"fn": scaled}),
        "mutates": Change((COUNTER,), {"fn": counted, "static": (COUNTER,)}),
        "outputs": Change("view"),
        "rng": Change("forbid", {"fn": noisy}),
        "generators": Change((NOISE,), {"fn": from_own_noise}),
        "verify": Change("always"),
        "guard": Change("call", static),
        "on_guard_fail": Change("raise", static),
        "on_capture_error": Change("eager", {"fn": unlawful}),
        "warmup": Change(1),
        "max_graphs": Change(1),
        "group": Change(rlk.CaptureGroup()),
        "collectives": Change(True, {"fn": summed_over_ranks}),
        "autograd": Change(True, {"example": (draw(4, 3).requires_grad_(),)}),
    }


def rollout_buffer() -> Changes:
    return {
        "fields": Change({"token": rlk.Field("int32")}),
        "rewards": Change(2),
        "group_size": Change(2),
        "max_groups": Change(1),
        "max_seq_tokens": Change(4),
        "max_batch_tokens": Change(3),
        "page_tokens": Change(16),
        "on_full": Change("drop_oldest"),
        "device": Change("meta"),
    }


def linear() -> Changes:
    """A split shows in the order of sums."""
    wide = {"x": draw(N, 256), "weight": draw(V, 256)}
    split = {"split": Change("row", wide), "group": Change(None, {**wide, "split": "row"})}
    return {"bias": Change(draw(V, seed=4)), "residual": Change(draw(N, V, seed=5))} | split


def rope() -> Changes:
    norm = {"q_weight": draw(D, seed=8), "eps": 1e-6}
    return {
        "q_weight": Change(draw(D, seed=9), norm),
        "k_weight": Change(draw(D, seed=9), norm),
        "eps": Change(0.5, norm),
        "interleaved": Change(True),
        "offset": Change(1.0, norm),
    }


def attention() -> Changes:
    """Two sequences of three rows each."""
    pages = {
        "k": draw(3, 4, 2, D), "v": draw(3, 4, 2, D),
        "page_table": torch.tensor([[2], [0]]), "seqused_k": torch.tensor([4, 3]),
    }  # fmt: skip
    return {
        "cu_k": Change(torch.tensor([0, 1, N], dtype=torch.int32)),
        "page_table": Change(torch.tensor([[1], [0]]), pages),
        "seqused_k": Change(torch.tensor([3, 3]), pages),
        "max_k": Change(2),
        "causal": Change(False),
        "window": Change(1),
        "softcap": Change(0.5),
        "sinks": Change(draw(4, seed=9)),
        "scale": Change(0.05),
    }


def divergences() -> Changes:
    """Log-probabilities of all ids are logits too: their order then shows."""
    jsd, whole = {"kind": "jsd"}, {"teacher": draw(N, V).log_softmax(-1)}
    return {
        "kind": Change("tv"),
        "beta": Change(0.3, jsd),
        "temperature": Change(0.5),
        "teacher_temperature": Change(0.5),
        "teacher_ids": Change(torch.arange(V).flip(0).repeat(N, 1), whole),
        "mask": Change(ids(N, below=2, seed=7).bool()),
    }


CHANGES: Mapping[str, Callable[[], Changes]] = {
    "logprob": logprob,
    "linear_logprob": linear_logprob,
    "policy_loss": policy_loss,
    "linear_policy_loss": linear_policy_loss,
    "sample": plain_sample,
    "lm_head_sample": lm_head_sample,
    "verify": verify,
    "quantize": quantize,
    "fake_quantize": lambda: {
        "format": Change("nf4"),
        "dtype": Change(torch.bfloat16),
        "clipped": Change(True),
    },
    "dequantize": lambda: {"dtype": Change(torch.bfloat16)},
    "prepack": lambda: {"layout": Change("canonical")},
    "qmatmul": qmatmul,
    "advantage": rewards.advantage,
    "affine_suffix_scan": rewards.affine_suffix_scan,
    "whiten": rewards.whiten,
    "group_filter": rewards.group_filter,
    "shape_rewards": rewards.shape_rewards,
    "linear": linear,
    "grouped_linear": lambda: {"bias": Change(draw(3, V, seed=4))},
    "divergence": divergences,
    "linear_divergence": lambda: (
        divergences() | {"teacher_weight": Change(draw(V, V, seed=3)), "backward": Change("save")}
    ),
    "route": lambda: {
        "top_k": Change(2),
        "replay": Change(torch.arange(3 * N).view(N, 3)),
        "renormalize": Change(True),
    },
    "rms_norm": lambda: {"residual": Change(draw(N, D, seed=5)), "offset": Change(1.0)},
    "rope": rope,
    "attention": attention,
    "glu": lambda: {"activation": Change("gelu")},
    "capture": capture,
    "rollout_buffer": rollout_buffer,
}

"""The calls whose bits are compared: for every public operator, one or more for each option, and larger ones.

Copied from nowhere at run time: a change of the project's own tables of calls must not change what is compared. Inputs
are drawn on the CPU from seeds, so that they are equal on every device; `Size` says how large the calls of the features
are. A call is added at will; one that stands here keeps its name and its inputs, as files of results hold both.

Legend: N rows, B sequences, T time, V vocabulary, D hidden, K drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk

Given = dict[str, Any]
Table = dict[str, Callable[[], Given]]  # name of a call -> its arguments, made anew on the CPU

POLICY_KINDS: Final = {
    **{key: {} for key in ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "luspo", "cispo", "sapo", "gmpo")},
    **{key: {} for key in ("vespo", "reinforce")},
    **{key: {"clip": (0.2, 0.2)} for key in ("dppo_tv", "dppo_kl")},
    "dro": {"dro_beta": 0.1},
}  # kind -> what it cannot do without
KLS: Final = ("k1", "abs", "k2", "k3", "low_var", "k1+", "abs+", "k3+", "low_var+")
GROUP_KINDS: Final = ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "passk", "gpg", "reinforce_pp_baseline")
FORMATS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {  # format -> option -> the values it has by no default
    **{
        key: {"scale_dtype": ("float32",), "scale_rule": ("absmax/7",), "act_order": (True,)}
        for key in ("int4_g128", "int4_g32")
    },
    **{key: {"scale_dtype": ("float16",)} for key in ("int4_g64", "int4_channel", "int4_channel_asym")},
    **{key: {"act_order": (True,)} for key in ("int4_g128_asym", "int4_g64_asym", "int4_g32_asym")},
    **{key: {"double_quant": (True,)} for key in ("nf4", "nf4_g128", "fp4", "fp4_g128")},
    **{key: {"scale_dtype": ("float32",)} for key in ("hqq4", "hqq4_g32", "hqq4_g128")},
    "mxfp4": {"scale_rule": ("rceil", "even"), "rounding": ("away",)},
    "mxfp8": {"scale_rule": ("rceil", "even"), "element": ("e5m2",)},
    "nvfp4": {"rounding": ("away",)},
    **{key: {} for key in ("q4l", "gguf_q4_0", "gguf_q8_0", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k")},
    **{key: {"scale_dtype": ("bfloat16",)} for key in ("int8_channel", "int8_w8a8")},
    "fp8_tensor": {"element": ("e5m2", "e4m3fnuz"), "act": ("token_fp8",)},
    "fp8_channel": {"element": ("e5m2",), "scale_rule": ("absmax/max_pow2",), "act": ("token_fp8",)},
    "fp8_block128": {"element": ("e5m2",), "act": ("block128_fp8",)},
}
ACTIVATIONS: Final = ("relu", "silu", "gelu", "gelu_tanh", "swiglu", "geglu_tanh")


# Inputs: drawn on the CPU, so that they are equal on every device.


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal values."""
    return (std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ids(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Integers in [0, below)."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def logprobs(*shape: int, seed: int) -> Tensor:
    """Values that log-probabilities have."""
    return -0.1 - draw(*shape, seed=seed).abs()


def starts(*lengths: int) -> Tensor:
    """Bounds of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0)


@dataclass(frozen=True)
class Size:
    """Sizes of the calls that go through features; no two are equal, so that nothing fits by chance."""

    T: int
    V: int
    D: int
    small: bool  # an interpreter runs it: features alone, few formats
    B: int = 6  # sequences, and rows; two groups of three

    def tokens(self) -> Tensor:
        """A mask [B, T] with a hole and rows of several lengths."""
        lengths = (torch.tensor([5, 3, 1, 5, 4, 2]) * self.T) // 5
        mask = torch.arange(self.T)[None] < lengths[:, None]
        return mask & (torch.arange(self.B * self.T).view(self.B, self.T) != 2)

    def lengths(self) -> Tensor:
        """Lengths [B]."""
        return (torch.tensor([5, 3, 1, 5, 4, 2]) * self.T) // 5

    def support(self, rows: int) -> rlk.Support:
        """Three ids for each row."""
        return rlk.Support(torch.arange(3 * rows) * 7 % self.V, 3 * torch.arange(rows + 1))


SMALL: Final = Size(T=5, V=64, D=32, small=True)
WHOLE: Final = Size(T=70, V=1111, D=256, small=False)


def changed(base: Callable[[], Given], changes: Mapping[str, Callable[[], Given]]) -> Table:
    """The base call, and the base call with some arguments replaced."""
    return {"plain": base} | {name: lambda c=change: {**base(), **c()} for name, change in changes.items()}


# The table, operator by operator.


def logprob(s: Size) -> Table:
    """Every option, then vocabularies of models at three dtypes."""
    B, V = s.B, s.V
    mask = {"mask": ids(B, below=2, seed=7).bool()}
    found = changed(
        lambda: {"logits": draw(B, V), "ids": ids(B, below=V)},
        {
            "temperature": lambda: {"temperature": 0.5},
            "temperature per row": lambda: {"temperature": torch.linspace(0.5, 2.0, B), "entropy": True},
            "softcap": lambda: {"softcap": 2.0},
            "mask": lambda: mask,
            "entropy": lambda: {"entropy": True},
            "top 3": lambda: {"top_logprobs": 3},
            "support": lambda: {"support": s.support(B)},
            "support, entropy, mask": lambda: {"support": s.support(B), "entropy": True, **mask},
            "validate": lambda: {"validate": True},
            "refused: ids out of range": lambda: {"validate": True, "ids": ids(B, below=V) + V},
            "ids out of range": lambda: {"ids": ids(B, below=V) + V},
            "bfloat16": lambda: {"logits": draw(B, V, dtype=torch.bfloat16), "entropy": True},
            "every second column": lambda: {"logits": draw(B, 2 * V)[:, ::2]},
            "two dimensions of rows": lambda: {"logits": draw(2, 3, V), "ids": ids(2, 3, below=V)},
            "no rows": lambda: {"logits": draw(0, V), "ids": ids(0, below=V)},
            "infinities": lambda: {"logits": draw(B, V).masked_fill(ids(B, V, below=3) == 0, -math.inf)},
        },
    )
    for name, n, v, dtype, more in (
        ("1 x 32000 bfloat16", 1, 32000, torch.bfloat16, {}),
        ("64 x 32000 bfloat16", 64, 32000, torch.bfloat16, {"entropy": True, "temperature": 0.7}),
        ("64 x 32000 float16", 64, 32000, torch.float16, {}),
        ("3 x 128256 bfloat16", 3, 128256, torch.bfloat16, {"entropy": True}),
        ("32 x 128256 float32", 32, 128256, torch.float32, {"entropy": True}),
        ("17 x 50257 float32, top 5", 17, 50257, torch.float32, {"top_logprobs": 5}),
        ("300 x 4099 bfloat16", 300, 4099, torch.bfloat16, {"entropy": True}),
    ):
        found |= larger(
            s,
            name,
            lambda n=n, v=v, d=dtype, m=more: {"logits": draw(n, v, dtype=d, std=4), "ids": ids(n, below=v), **m},
        )
    return found


def larger(s: Size, name: str, given: Callable[[], Given]) -> Table:
    """A call that only a whole table has."""
    return {} if s.small else {name: given}


def head(s: Size) -> dict[str, Callable[[], Given]]:
    """What the operators on a head share."""
    return {
        "bias": lambda: {"bias": draw(s.V, seed=9)},
        "scale and cap": lambda: {"logit_scale": 0.5, "softcap": 2.0},
        "bfloat16": lambda: {
            "hidden": draw(s.B, s.D, std=0.2, dtype=torch.bfloat16),
            "weight": draw(s.V, s.D, seed=1, dtype=torch.bfloat16),
        },
    }


def linear_logprob(s: Size) -> Table:
    """Options of the head and of the law, both ways backward."""
    B = s.B
    found = changed(
        lambda: {"hidden": draw(B, s.D, std=0.2), "weight": draw(s.V, s.D, seed=1), "ids": ids(B, below=s.V)},
        {
            **head(s),
            "temperature": lambda: {"temperature": 0.5, "entropy": True},
            "temperature per row": lambda: {"temperature": torch.linspace(0.5, 2.0, B)},
            "mask": lambda: {"mask": ids(B, below=2, seed=7).bool(), "entropy": True},
            "support": lambda: {"support": s.support(B)},
            "save": lambda: {"backward": "save"},
            "recompute": lambda: {"backward": "recompute", "entropy": True},
            "workspace": lambda: {"max_workspace_bytes": 2**30},
            "refused: workspace": lambda: {"max_workspace_bytes": 1},
            "mixed dtypes": lambda: {"weight": draw(s.V, s.D, seed=1, dtype=torch.bfloat16)},
        },
    )
    for name, n, v, d in (
        ("64 x 32000 of 512 bfloat16", 64, 32000, 512),
        ("5 x 128256 of 256 bfloat16", 5, 128256, 256),
    ):
        found |= larger(
            s,
            name,
            lambda n=n, v=v, d=d: {
                "hidden": draw(n, d, dtype=torch.bfloat16),
                "weight": draw(v, d, seed=1, std=0.1, dtype=torch.bfloat16),
                "ids": ids(n, below=v),
                "entropy": True,
            },
        )
    return found


def losses(s: Size, entropy: Callable[[], Any]) -> dict[str, Callable[[], Given]]:
    """What policy_loss and linear_policy_loss share."""
    B, T = s.B, s.T

    def reference() -> Given:
        return {"ref_logprob": logprobs(B, T, seed=6), "kl_coef": 0.1}

    def rollout() -> Given:
        return {"rollout_logprob": logprobs(B, T, seed=7)}

    kinds = POLICY_KINDS if not s.small else {k: POLICY_KINDS[k] for k in ("grpo", "gspo", "cispo", "dro")}
    estimators = KLS if not s.small else ("k3", "low_var+")
    return {
        **{f"kind {kind}": lambda k=kind, n=needs: {"kind": k, **n} for kind, needs in kinds.items()},
        **{f"kl {kl}": lambda kl=kl: {**reference(), "kl": kl} for kl in estimators},
        "on policy": lambda: {"old_logprob": None},
        "mask": lambda: {"mask": s.tokens()},
        "sequence level": lambda: {"level": "sequence", "mask": s.tokens()},
        "clip": lambda: {"clip": (0.01, 0.01)},
        "dual clip": lambda: {"dual_clip": 1.01},
        "log ratio limit": lambda: {"log_ratio_limit": 0.1},
        "sapo tau": lambda: {"kind": "sapo", "tau": (0.5, 2.0)},
        "vespo gamma": lambda: {"kind": "vespo", "gamma": rlk.GammaGate(k_pos=1.0)},
        "ratio cap": lambda: {"kind": "dppo_tv", "clip": (0.9, 0.9), "ratio_cap": 1.01},
        "token sum": lambda: {"aggregate": "token_sum"},
        "denominator": lambda: {"denominator": 7.0},
        "horizon": lambda: {"aggregate": "seq_mean_token_sum_norm", "horizon": 11.0},
        "count empty": lambda: {
            "mask": s.tokens() & (torch.arange(B) != 1)[:, None],
            "aggregate": "seq_mean_token_sum",
            "count_empty": True,
        },
        "kl clamp": lambda: {**reference(), "kl": "low_var", "kl_clamp": (0.1, 0.1)},
        "kl importance": lambda: {**reference(), "kl_importance": True},
        "entropy bonus": lambda: {"entropy": entropy(), "entropy_coef": 0.1},
        "entropy summed": lambda: {"entropy": entropy(), "entropy_coef": 0.1, "entropy_aggregate": "token_sum"},
        "correction": lambda: {**rollout(), "correction": rlk.Correction(high=1.1)},
        "rejection": lambda: {**rollout(), "rejection": rlk.Rejection(high=1.1)},
        "refused: an option of another kind": lambda: {"dro_beta": 0.1},
    }


def policy_loss(s: Size) -> Table:
    """Every kind and option, packed batches, long sequences."""
    B, T = s.B, s.T

    def base(b: int = B, t: int = T) -> Given:
        return {
            "logprob": logprobs(b, t, seed=1),
            "old_logprob": logprobs(b, t, seed=2),
            "advantages": draw(b, t, seed=3),
            "kind": "ppo",
        }

    def packed() -> Given:
        return {k: x.flatten() if isinstance(x, Tensor) else x for k, x in base().items()}

    found = changed(base, losses(s, lambda: draw(B, T, seed=5).abs())) | {
        "packed": lambda: {**packed(), "cu_seqlens": starts(*[T] * B), "kind": "grpo"},
        "packed, sequence level": lambda: {**packed(), "cu_seqlens": starts(*[T] * B), "kind": "gspo"},
        "a bag of tokens": packed,
        "an advantage per sequence": lambda: {**base(), "advantages": draw(B, seed=3)},
        "bfloat16": lambda: {k: x.bfloat16() if isinstance(x, Tensor) else x for k, x in base().items()},
    }
    for kind in ("grpo", "gspo", "dapo"):
        found |= larger(s, f"8 x 128 {kind}", lambda k=kind: {**base(8, 128), "kind": k})
        found |= larger(
            s, f"16 x 4096 {kind}", lambda k=kind: {**base(16, 4096), "kind": k, "mask": ids(16, 4096, below=4) > 0}
        )
    return found


def linear_policy_loss(s: Size) -> Table:
    """The loss's options on a head; few kinds, as what follows the log-probability is policy_loss's."""
    B, T = s.B, s.T
    some = {
        *("kind grpo", "kind gspo", "kind dro", "kl k3", "kl low_var+", "on policy", "mask", "entropy bonus"),
        *("correction", "rejection", "sequence level", "horizon"),
    }

    def base() -> Given:
        return {
            "hidden": draw(B, T, s.D, seed=4, std=0.05),
            "weight": draw(s.V, s.D, seed=1),
            "ids": ids(B, T, below=s.V),
            "old_logprob": logprobs(B, T, seed=2) - math.log(s.V),
            "advantages": draw(B, T, seed=3),
            "kind": "ppo",
        }

    def packed() -> Given:
        return {k: x.flatten(0, 1) if k not in {"weight", "kind"} else x for k, x in base().items()}

    shared = {name: change for name, change in losses(s, lambda: True).items() if name in some}
    shared |= {
        "bias": lambda: {"bias": draw(s.V, seed=9)},
        "scale, cap and temperature": lambda: {"logit_scale": 0.5, "softcap": 2.0, "temperature": 0.7},
        "temperature per token": lambda: {"temperature": torch.linspace(0.5, 2.0, B)[:, None].expand(B, T)},
        "support": lambda: {"support": s.support(B * T)},
        "bfloat16": lambda: {
            "hidden": draw(B, T, s.D, seed=4, std=0.05, dtype=torch.bfloat16),
            "weight": draw(s.V, s.D, seed=1, dtype=torch.bfloat16),
        },
    }
    return changed(base, shared) | {"packed": lambda: {**packed(), "cu_seqlens": starts(*[T] * B)}}


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


def specs(s: Size) -> Iterator[tuple[str, rlk.QuantSpec]]:
    """Every format, and every option at a value that is not its default, with a name for each."""
    for name in FORMATS if not s.small else ("int4_g32", "nf4", "mxfp4"):
        yield name, rlk.QuantSpec.named(name)
        for option, values in FORMATS[name].items():
            yield from ((f"{name} {option}={v}", rlk.QuantSpec.named(name, **{option: v})) for v in values)


def stored(weight: Tensor, spec: Any) -> rlk.QuantTensor:
    """A weight quantized by the definition on the CPU, so that products do not depend on who quantizes."""
    with rlk.use("reference"):
        return rlk.quantize(weight, spec)


def quantize(s: Size) -> Table:
    """Every format of one weight, then a layer's."""

    def weight(dtype: torch.dtype = torch.float32) -> Tensor:
        return draw(s.V, s.D, dtype=dtype)

    found: Table = {name: lambda f=spec: {"weight": weight(), "format": f} for name, spec in specs(s)}
    found["bfloat16"] = lambda: {"weight": weight(torch.bfloat16), "format": "int4_g32"}
    found["to bfloat16"] = lambda: {"weight": weight(), "format": "nf4", "dtype": torch.bfloat16}
    for name in ("int4_g128", "nf4", "mxfp4", "fp8_block128", "int8_channel"):
        found |= larger(
            s,
            f"2048 x 2048 bfloat16 {name}",
            lambda f=name: {"weight": draw(2048, 2048, dtype=torch.bfloat16), "format": f},
        )
    return found


def dequantize(s: Size) -> Table:
    """Every format."""
    found: Table = {name: lambda f=spec: {"w": stored(draw(s.V, s.D), f)} for name, spec in specs(s)}
    return found | {"bfloat16": lambda: {"w": stored(draw(s.V, s.D), "int4_g32"), "dtype": torch.bfloat16}}


def prepack(s: Size) -> Table:
    """Formats that backends rearrange."""
    names = (
        ("int4_g32", "nf4")
        if s.small
        else ("int4_g128", "int4_g32_asym", "nf4", "mxfp4", "int8_channel", "fp8_channel")
    )
    return {name: lambda f=name: {"w": stored(draw(s.V, s.D), f)} for name in names}


def qmatmul(s: Size) -> Table:
    """Every format, every end of a product, rows of a decode step and of a prefill."""
    B, V, D = s.B, s.V - s.V % 2, s.D

    def product(spec: Any, dtype: torch.dtype = torch.bfloat16, rows: int = B) -> Given:
        return {"x": draw(rows, D, dtype=dtype), "w": stored(draw(V, D, seed=1), spec)}

    dtype = torch.float32 if s.small else torch.bfloat16
    found: Table = {name: lambda f=spec: product(f, dtype) for name, spec in specs(s)}
    found |= {
        "float32": lambda: product("int4_g32", torch.float32),
        "float16": lambda: product("int4_g32", torch.float16),
        "bias": lambda: {**product("int4_g32", dtype), "bias": draw(V)},
        "lora": lambda: {**product("int4_g32", dtype), "lora": rlk.LoRA(draw(2, D), draw(V, 2))},
        "residual": lambda: {**product("int4_g32", dtype), "residual": draw(B, V, dtype=dtype)},
        "weights of the dtype": lambda: {**product("int4_g32"), "weight_rounding": "dtype"},
        "weights of fp32": lambda: {**product("int4_g32", dtype), "weight_rounding": "none"},
        "experts": lambda: {**product("int4_g32", dtype), "ends": torch.tensor([3, 5], dtype=torch.int32)},
        **{a: lambda a=a: {**product("int4_g32", dtype), "activation": a} for a in ACTIVATIONS},
    }
    for rows in (1, 17, 64, 300):
        for name in ("int4_g128", "nf4", "fp8_channel"):
            found |= larger(s, f"{rows} rows, {name}", lambda r=rows, f=name: product(f, rows=r))
    return found


def advantage(s: Size) -> Table:
    """Every kind and option: groups of sequences, and steps over tokens."""
    B, T = s.B, s.T
    mask, done = s.tokens(), torch.arange(T).expand(B, T) == 1
    rewards = torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])
    some = torch.tensor([True, True, False, True, True, True])
    constant = torch.tensor([0.9, 0.9, 0.9, 1.0, 0.0, 2.0])

    def group(**more: Any) -> Callable[[], Given]:
        return lambda: {"rewards": rewards, "kind": "grpo", "group": 3, **more}

    def steps(**more: Any) -> Callable[[], Given]:
        values = draw(B, T, seed=1)
        return lambda: {"rewards": draw(B, T), "kind": "gae", "values": values, "gamma": 0.9, "lam": 0.8, **more}

    def returns(**more: Any) -> Callable[[], Given]:
        return lambda: {"rewards": draw(B, T), "kind": "returns", "gamma": 0.9, **more}

    def ratio(kind: str, **more: Any) -> Callable[[], Given]:
        return steps(kind=kind, ratio=draw(B, T, seed=2).exp(), **more)

    gigpo = {"kind": "gigpo", "step_rewards": draw(B), "anchor": torch.tensor([0, 1, 0, 1, 1, 1])}
    otb = {"kind": "otb", "logprob": draw(B, T, seed=1), "sum_pi_squared": draw(B, T, seed=4).abs()}
    found: Table = {
        **{f"kind {k}": group(kind=k, **({"lengths": s.lengths()} if k == "opo" else {})) for k in GROUP_KINDS},
        "kind gdpo": group(kind="gdpo", rewards=draw(B, 2), reward_weights=torch.tensor([1.0, 5.0])),
        "kind gigpo": group(**gigpo),
        "gigpo, weight of steps": group(**gigpo, step_weight=2.0),
        "kind otb": group(**otb, rewards=draw(B, T)),
        "ids of groups": group(group=torch.tensor([7, 7, 3, 3, 3, 7])),
        "group of two": group(group=2),
        "left out": group(leave_one_out=True),
        "scale of the batch": group(scale="batch"),
        "no scale": group(scale="none"),
        "ddof 0": group(ddof=0),
        "eps": group(eps=0.5),
        "eps on the variance": group(eps=0.1, eps_mode="var_add"),
        "least deviation": group(min_std=10.0),
        "least deviation, centred": group(min_std=10.0, low_std="center"),
        "a group of one": group(group=torch.tensor([0, 0, 1, 1, 1, 2]), singleton="raw"),
        "refused: a group of one": group(group=torch.tensor([0, 0, 1, 1, 1, 2]), singleton="error"),
        "constant groups": group(rewards=constant, constant="peer"),
        "range": group(valid_range=(0.1, 2.0)),
        "range, raw": group(valid_range=(0.1, 2.0), rewards=rewards + 0.05, invalid="raw"),
        "not in statistics": group(in_stats=some),
        "not in the loss": group(in_loss=some),
        "weights": group(weights=torch.arange(float(B))),
        "whitened": group(whiten="global"),
        "whitened by sequence": group(mask=mask, whiten="global", whiten_level="sequence"),
        "by token": group(mask=mask, output="token"),
        "kind gae": steps(),
        "gae, mask": steps(mask=mask),
        "gae, lambda of values": steps(lam_value=0.5),
        "gae, lambda by length": steps(lam=1.0, length_adaptive=0.5),
        "gae, lambda per row": steps(lam=torch.linspace(0, 1, B)),
        "kind returns": returns(),
        "returns, bootstrap": returns(bootstrap=draw(B, seed=9)),
        "returns, lengths": returns(lengths=s.lengths()),
        "returns, packed": returns(rewards=draw(B, T).flatten(), cu_seqlens=starts(*[T] * B)),
        "returns, dones": returns(dones=done),
        "returns, dones before": returns(dones=done, done_index="before"),
        "returns, turns": returns(turns=(torch.arange(T) * 3 // T).expand(B, T)),
        "returns, masked time": returns(mask=mask, masked_time="step"),
        "returns, carried": returns(mask=mask, masked_out="carry"),
        "returns, whitened": returns(mask=mask, whiten="global"),
        "returns, whitened, options": returns(
            mask=mask, whiten="global", whiten_ddof=0, whiten_eps=0.5, whiten_eps_mode="std_add"
        ),
        "kind reinforce_pp": returns(kind="reinforce_pp", mask=mask),
        "kind remax": lambda: {"rewards": draw(B, T), "kind": "remax", "baseline": draw(B)},
        "kind vtrace": ratio("vtrace"),
        "vtrace, clips": ratio("vtrace", ratio_clip=0.3, trace_clip=0.3),
        "kind retrace": ratio("retrace"),
        "retrace, q": ratio("retrace", q_values=draw(B, T, seed=6)),
        **{f"preset {f} {e}": group(**rlk.advantage_preset(f, e)) for f, e in (("trl", "grpo"), ("verl", "grpo"))},
    }
    b, t = 64, 2048
    lengths = 1 + ids(b, below=t, seed=3)
    found |= larger(
        s,
        "64 x 2048 gae",
        lambda: {
            "kind": "gae",
            "rewards": draw(b, t, std=0.1),
            "values": draw(b, t, seed=1),
            "gamma": 0.99,
            "lam": 0.95,
            "mask": torch.arange(t)[None] < lengths[:, None],
        },
    )
    for kind in ("grpo", "rloo", "dr_grpo"):
        found |= larger(
            s, f"4096 {kind}", lambda k=kind: {"kind": k, "rewards": draw(4096).abs().round(decimals=1), "group": 8}
        )
    return found


def affine_suffix_scan(s: Size) -> Table:
    """Every option, short and long rows."""
    B, T = s.B, s.T
    found = changed(
        lambda: {"b": draw(B, T), "a": draw(B, T, seed=1)},
        {
            "mask": lambda: {"mask": s.tokens()},
            "lengths": lambda: {"lengths": s.lengths()},
            "packed": lambda: {"b": draw(B * T), "a": draw(B * T, seed=1), "cu_seqlens": starts(*[T] * B)},
            "init": lambda: {"init": draw(B)},
            "exclusive": lambda: {"exclusive": True},
            "carried": lambda: {"mask": s.tokens(), "masked_out": "carry"},
        },
    )
    for b, t in ((64, 2048), (2, 65536)):
        found |= larger(s, f"{b} x {t}", lambda b=b, t=t: {"b": draw(b, t), "a": draw(b, t, seed=1).tanh()})
    return found


def whiten(s: Size) -> Table:
    """Every option."""
    B, T = s.B, s.T
    found = changed(
        lambda: {"x": draw(B, T)},
        {
            "mask": lambda: {"mask": s.tokens()},
            "lengths": lambda: {"lengths": s.lengths()},
            "counts": lambda: {"counts": ids(B, T, below=4)},
            "ddof 0": lambda: {"ddof": 0},
            "eps": lambda: {"eps": 0.5},
            "eps as threshold": lambda: {"eps": 0.5, "eps_mode": "threshold"},
            "no shift": lambda: {"shift_mean": False},
            "carried": lambda: {"mask": s.tokens(), "masked_out": "carry"},
            "moments alone": lambda: {"apply": False},
        },
    )
    return found | larger(s, "64 x 2048", lambda: {"x": draw(64, 2048), "mask": ids(64, 2048, below=3) > 0})


def group_filter(s: Size) -> Table:
    """Every rule."""
    rewards = torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])
    found = changed(
        lambda: {"rewards": rewards, "group": 3},
        {
            "ids of groups": lambda: {"group": torch.tensor([7, 7, 3, 3, 3, 7])},
            "distinct": lambda: {"rule": "distinct"},
            "mean": lambda: {"rule": "mean", "low": 0.59, "high": 0.9},
            "threshold": lambda: {"threshold": 0.45, "ddof": 0},
            "valid": lambda: {"valid": torch.tensor([True, True, False, True, True, True])},
            "members": lambda: {"min_members": 4},
            "two rewards": lambda: {"rewards": torch.stack([rewards, torch.ones(6)], 1), "combine": "all"},
        },
    )
    return found | larger(s, "4096", lambda: {"rewards": draw(4096).round(), "group": 8})


def shape_rewards(s: Size) -> Table:
    """Every option."""
    B, T = s.B, s.T
    kl = {"kl": "k3", "kl_coef": 0.1, "logprob": logprobs(B, T, seed=1), "ref_logprob": logprobs(B, T, seed=2)}
    length = {"lengths": s.lengths(), "max_length": 4, "overlong_buffer": 2}
    flat = {k: kl[k].flatten() for k in ("logprob", "ref_logprob")}
    state = rlk.RunningMoments(torch.tensor(3.0), torch.tensor(0.5), torch.tensor(1.0))
    return changed(
        lambda: {"rewards": torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])},
        {
            "clip": lambda: {"clip": (0.2, 0.6)},
            "batch": lambda: {"normalise": "batch"},
            "batch, options": lambda: {"normalise": "batch", "center": False, "ddof": 0, "eps": 0.5},
            "running": lambda: {"normalise": "running", "running": state},
            "overlong": lambda: length,
            "overlong, options": lambda: {**length, "overlong_factor": 2.0, "overlong_cap": False},
            **{f"kl {k}": lambda k=k: {**kl, "kl": k} for k in ("k1", "abs", "k2", "k3")},
            "kl, mask": lambda: {**kl, "mask": s.tokens()},
            "kl, packed": lambda: {**kl, **flat, "cu_seqlens": starts(*[T] * B)},
            "kl, clamps": lambda: {**kl, "kl_input_clamp": 0.1, "kl_clamp": 0.1},
            "by token": lambda: {"mask": s.tokens(), "output": "token"},
        },
    )


def capture(_: Size) -> Table:
    """Functions of torch alone: what a replay gives, with buckets, noise and gradients."""
    base = {"fn": lambda x: x * 2 + 1, "example": (draw(4, 3),)}
    return changed(
        lambda: dict(base),
        {
            "bucket": lambda: {"fn": step, "buckets": (rlk.Bucket({"x": 0}, (2, 4, 8)),)},
            "view": lambda: {"outputs": "view"},
            "noise": lambda: {"fn": lambda x: x + torch.rand(x.shape, device=x.device)},
            "refused: noise": lambda: {"fn": lambda x: x + torch.rand(x.shape, device=x.device), "rng": "forbid"},
            "verified": lambda: {"verify": "always"},
            "guarded": lambda: {"guard": "call"},
            "log-probability": lambda: {
                "fn": lambda x: rlk.logprob(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)).logprob
            },
            "gradient": lambda: {"autograd": True, "example": (draw(4, 3).requires_grad_(),)},
        },
    )


def step(x: Tensor) -> Tensor:
    """A function whose argument has a name that a bucket can speak of."""
    return x * 2 + 1


def rollout_buffer(_: Size) -> Table:
    """Pages, groups, rewards."""
    return changed(
        lambda: {"max_tokens": 64, "max_seqs": 8, "page_tokens": 4},
        {
            "group size": lambda: {"group_size": 1},
            "two rewards": lambda: {"rewards": 2},
            "fields": lambda: {"fields": {"token": rlk.Field("int32"), "logprob": rlk.Field("bfloat16")}},
            "larger pages": lambda: {"page_tokens": 16},
            "drop oldest": lambda: {"on_full": "drop_oldest"},
            "batch": lambda: {"max_batch_tokens": 32},
        },
    )


TABLES: Final[Mapping[str, Callable[[Size], Table]]] = {
    f.__name__: f
    for f in (
        *(logprob, linear_logprob, policy_loss, linear_policy_loss, sample, lm_head_sample, verify, quantize),
        *(dequantize, prepack, qmatmul, advantage, affine_suffix_scan, whiten, group_filter, shape_rewards),
        *(capture, rollout_buffer),
    )
}

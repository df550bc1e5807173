"""The table of workloads: one call for each way in which host code launches a kernel, as data.

What the compile gate compiles (`tools/compile_gate.py`) and what a bundle's kernels are promised (`aot.compiling`) are
the launches of these calls, recorded by `recorded`. Tensors have shapes and types and no memory. Sizes are those of a
run of post-training, but a count of rows is no multiple of 16: what is recorded as such is taken to be kept by calls.

Legend: B sequences or rows · T tokens · N packed tokens, or rows of a weight · V vocabulary · D hidden · K rewards of a
sequence, or columns of a weight · M tokens of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.policy_kinds import Correction
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import LogitBias, TokenLists
from rlkernel_triton.launchers import Recorder, using
from rlkernel_triton.quant import layouts


@dataclass(frozen=True)
class Workload:
    """One call, and at which of its results gradients arrive."""

    arguments: Mapping[str, Any]  # of the operator
    upstream: tuple[str, ...] = ()  # fields of the result, "": itself; none: forward alone
    asked_for: bool = False  # of the implementation in `claims.ASKED_FOR`


def _real(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)


def _whole(*shape: int) -> Tensor:
    return _real(*shape, dtype=torch.int64)


def _flags(*shape: int) -> Tensor:
    return _real(*shape, dtype=torch.bool)


def _lists(B: int) -> TokenLists:
    return TokenLists(_whole(9 * B), _whole(B + 1))


FP32, BF16 = torch.float32, torch.bfloat16


def _rows(B: int, V: int, dtype: torch.dtype) -> dict[str, Any]:
    """Log-probabilities with everything that costs registers."""
    return {
        "logits": _real(B, V, dtype=dtype, grad=True), "ids": _whole(B), "entropy": True, "softcap": 30.0,
        "temperature": _real(B), "mask": _flags(B), "support": Support(ids=_whole(50 * B), offsets=_whole(B + 1)),
    }  # fmt: skip


_V: Final = 151936
_EVERY: Final = ("logprob", "lse", "entropy", "log_kept_mass")
_LOGPROB: Final = {
    **{
        f"{name}, entropy": Workload(
            {"logits": _real(260, _V, dtype=dtype, grad=True), "ids": _whole(260), "entropy": True},
            ("logprob", "entropy"),
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    "bf16, everything": Workload(_rows(260, _V, BF16), _EVERY),
    "fp32, everything": Workload(_rows(260, _V, FP32), _EVERY),
    # As many parts of a row as the tiles of a head make; no vocabulary has as many columns.
    "bf16, everything, 1024 parts": Workload(_rows(8, 1024 << 15, BF16)),
    "bf16, top 20": Workload(
        {"logits": _real(8, _V, dtype=BF16), "ids": _whole(8), "top_logprobs": 20, "softcap": 30.0,
         "temperature": _real(8), "mask": _flags(8)},
    ),
    "e4m3fn, entropy, top 20": Workload(
        {"logits": _real(8, _V, dtype=torch.float8_e4m3fn), "ids": _whole(8), "logits_scale": _real(8),
         "entropy": True, "top_logprobs": 20},
    ),
    "e5m2, 64 ids a row": Workload(
        {"logits": _real(260, _V, dtype=torch.float8_e5m2), "ids": _whole(260, 64), "logits_scale": _real(260)},
    ),
    **{
        f"{name}, 64 ids a row": Workload(
            {"logits": _real(260, _V, dtype=dtype, grad=True), "ids": _whole(260, 64), "entropy": True},
            ("logprob", "lse", "entropy"),
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    "bf16, 5 ids a row, everything": Workload(
        {"logits": _real(260, _V, dtype=BF16, grad=True), "ids": _whole(260, 5), "softcap": 30.0,
         "temperature": _real(260), "mask": _flags(260)},
        ("logprob",),
    ),
    **{
        f"{name}, lists": Workload(
            {"logits": _real(260, _V, dtype=dtype, grad=True), "ids": _lists(260), "mask": _flags(260)}, ("logprob",)
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
}  # fmt: skip

_B: Final = 8
_T: Final = 1024
_N: Final = 4096
_SHAPE: Final = (_B, _T)
_SCAN: Final = {
    "rows": Workload({"b": _real(*_SHAPE), "a": _real(*_SHAPE), "init": _real(_B)}),
    "mask, number": Workload({"b": _real(*_SHAPE), "a": 0.95, "mask": _flags(*_SHAPE)}),
}


def _gae(*shape: int, **more: Any) -> dict[str, Any]:
    return {"rewards": _real(*shape), "values": _real(*shape), "kind": "gae", "gamma": 0.99, "lam": 0.95, **more}


def _masked(*shape: int) -> Workload:
    return Workload(_gae(*shape, mask=_flags(*shape), bootstrap=_real(shape[0])))


_S: Final = 248  # sequences of a batch in groups
_MANY: Final = 4100  # sequences whose ids are searched in a table


def _group(kind: str, B: int = _S, **more: Any) -> Workload:
    return Workload({"rewards": _real(B), "kind": kind, "group": 8, **more})


def _table(kind: str, **more: Any) -> Workload:
    return _group(kind, _MANY, **{"group": _whole(_MANY), **more})


def _table_of_tokens(**more: Any) -> Workload:
    columns = {name: _real(_S, _T) for name in ("rewards", "logprob", "sum_pi_squared")}
    return _group("otb", **{**columns, **more})


_ADVANTAGE: Final = {
    "gae, mask": _masked(*_SHAPE),
    "gae, mask, many chunks": _masked(200, 8192),
    "gae, mask, by chunks": _masked(_B, 32768),
    "gae, outcome, mask": Workload(_gae(*_SHAPE, mask=_flags(*_SHAPE)) | {"rewards": _real(_B)}),
    "gae, outcome, packed": Workload(_gae(_N, cu_seqlens=_whole(_B + 1)) | {"rewards": _real(_B)}),
    "gae, lengths, decoupled, dones": Workload(
        _gae(*_SHAPE, lengths=_whole(_B), lam=_real(_B), lam_value=0.9, dones=_flags(*_SHAPE))
    ),
    "returns, mask": Workload({"rewards": _real(*_SHAPE), "kind": "returns", "gamma": 0.9, "mask": _flags(*_SHAPE)}),
    "retrace, mask": Workload(
        _gae(*_SHAPE, mask=_flags(*_SHAPE), q_values=_real(*_SHAPE), ratio=_real(*_SHAPE)) | {"kind": "retrace"}
    ),
    "vtrace, mask": Workload(
        _gae(*_SHAPE, mask=_flags(*_SHAPE), ratio=_real(*_SHAPE), bootstrap=_real(_B)) | {"kind": "vtrace"}
    ),
    "reinforce_pp, mask, weights": Workload(
        {"rewards": _real(*_SHAPE), "kind": "reinforce_pp", "mask": _flags(*_SHAPE), "weights": _real(_B)}
    ),
    "grpo, groups of 8": _group("grpo"),
    "grpo, masks": _group("grpo", in_stats=_flags(_S), in_loss=_flags(_S)),
    "grpo, groups of 500": _group("grpo", 1500, group=500),
    "grpo, ids": _group("grpo", group=_whole(_S)),
    "grpo, ids, table": _table("grpo"),
    "grpo, others": _group("grpo", leave_one_out=True),
    "grpo, scale of the batch": _group("grpo", scale="batch"),
    "grpo, tokens, mask": _group("grpo", rewards=_real(_S, _T), mask=_flags(_S, _T), output="token"),
    "grpo, tokens, packed": _group("grpo", rewards=_real(_N), cu_seqlens=_whole(_S + 1), output="token"),
    "dr_grpo": _group("dr_grpo"),
    "opo, lengths": _group("opo", lengths=_whole(_S)),
    "passk": _group("passk"),
    "gdpo, whitened over tokens": _group(
        "gdpo", rewards=_real(_S, 4), lengths=_whole(_S), reward_weights=_real(4)
    ),
    "reinforce_pp_baseline": _group("reinforce_pp_baseline"),
    "otb": _table_of_tokens(),
    "otb, ids, masks": _table_of_tokens(group=_whole(_S), mask=_flags(_S, _T), in_stats=_flags(_S)),
    "gigpo": _group("gigpo", step_rewards=_real(_S), anchor=_whole(_S)),
    "gigpo, ids, table": _table("gigpo", step_rewards=_real(_MANY), anchor=_whole(_MANY)),
}  # fmt: skip

_WHITEN: Final = {
    "mask": Workload({"x": _real(*_SHAPE), "mask": _flags(*_SHAPE)}),
    "lengths, counts": Workload({"x": _real(*_SHAPE), "lengths": _whole(_B), "counts": _real(*_SHAPE)}),
}

_TOKENS: Final = (260, 8192)


def _loss(kind: str, *shape: int, dtype: torch.dtype = FP32, **more: Any) -> Workload:
    given = {
        "logprob": _real(*shape, dtype=dtype, grad=True), "old_logprob": _real(*shape),
        "advantages": _real(shape[0]), "mask": _flags(*shape), "kind": kind,
    }  # fmt: skip
    return Workload(given | more, ("loss",))


def _packed(kind: str, **more: Any) -> Workload:
    N = _TOKENS[0] * _TOKENS[1]
    places = {"advantages": _real(_TOKENS[0], 1), "mask": None, "cu_seqlens": _whole(_TOKENS[0] + 1)}
    return _loss(kind, N, **{**places, **more})


_LOSS: Final = {
    "grpo, mask": _loss("grpo", *_TOKENS),
    "grpo, mask, short rows": _loss("grpo", 60, 100, dtype=BF16),
    "grpo, all options": _loss(
        "grpo", *_TOKENS, dual_clip=3.0, ref_logprob=_real(*_TOKENS), kl="k3", kl_coef=0.01, kl_importance=True,
        entropy=_real(*_TOKENS, grad=True), entropy_coef=0.01, rollout_logprob=_real(*_TOKENS),
        correction=Correction("token", high=2.0),
    ),
    "dapo, packed, token advantages": _packed("dapo", advantages=_real(_TOKENS[0] * _TOKENS[1])),
    "gspo, mask": _loss("gspo", *_TOKENS),
    "gspo_token, packed, mask": _packed("gspo_token", mask=_flags(_TOKENS[0] * _TOKENS[1])),
    **{kind: _loss(kind, *_TOKENS) for kind in ("cispo", "sapo", "gmpo", "vespo", "reinforce")},
    **{kind: _loss(kind, *_TOKENS, clip=(0.2, 0.2)) for kind in ("dppo_tv", "dppo_kl")},
    "dro": _loss("dro", *_TOKENS, dro_beta=0.1),
}  # fmt: skip


_LISTED: Final[dict[str, Any]] = {"teacher": _real(260, 64), "teacher_ids": _whole(260, 64)}


def _compared(kind: str, dtype: torch.dtype, *, B: int = 260, **more: Any) -> Workload:
    logits, teacher = _real(B, _V, dtype=dtype, grad=True), _real(B, _V, dtype=dtype)
    return Workload({"logits": logits, "teacher": teacher, "kind": kind, **more}, ("",))


_DIVERGENCE: Final = {
    **{f"bf16, {kind}": _compared(kind, BF16) for kind in ("forward_kl", "reverse_kl", "jsd", "tv")},
    **{f"bf16, {kind}, list": _compared(kind, BF16, **_LISTED) for kind in ("forward_kl", "reverse_kl", "jsd", "tv")},
    "fp32, forward_kl": _compared("forward_kl", FP32),
    "bf16, reverse_kl, few rows": _compared("reverse_kl", BF16, B=4),
    "bf16, reverse_kl, temperatures, mask": _compared(
        "reverse_kl", BF16, temperature=_real(260), teacher_temperature=_real(260), mask=_flags(260)
    ),
    "bf16, reverse_kl, list, temperature, mask": _compared(
        "reverse_kl", BF16, temperature=_real(260), mask=_flags(260), **_LISTED
    ),
}


def _draw(B: int, *filters: str, dtype: torch.dtype = FP32, **more: Any) -> Workload:
    """Every row a request with parameters of its own."""
    drawn = {
        "temperature": _real(B), "top_k": _whole(B), "top_p": _real(B), "min_p": _real(B), "seed": _whole(B),
        "step": _whole(B),
    }  # fmt: skip
    asked = {n: x for n, x in drawn.items() if n in {"temperature", "seed", "step", *filters}}
    return Workload({"logits": _real(B, _DRAWN, dtype=dtype), **asked, **more})


_DRAWN: Final = 128256
_WORDS: Final = _DRAWN // 32
_SAMPLE: Final = {
    "fp32, no filter": _draw(4),
    "fp32, no filter, many rows": _draw(250),
    "fp32, top-k, top-p": _draw(4, "top_k", "top_p"),
    "fp32, top-k, top-p, many rows": _draw(250, "top_k", "top_p"),
    "bf16, top-k, top-p, many rows": _draw(250, "top_k", "top_p", dtype=BF16),
    "fp32, top-k, top-p, min-p, allowed, slots, entropy, raw": _draw(
        4, "top_k", "top_p", "min_p", entropy=True, raw_logprob=True, slot=_whole(4),
        allowed=_real(4, _WORDS, dtype=torch.int32),
    ),
}  # fmt: skip

_D: Final = 4096


def _head(B: int, V: int = _V, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    """Hidden states and an output head that are both trained."""
    given = {"hidden": _real(B, _D, dtype=dtype, grad=True), "weight": _real(V, _D, dtype=dtype, grad=True)}
    return {**given, "ids": _whole(B), "entropy": True, **more}


def _lora(V: int, dtype: torch.dtype, *, grad: bool = False) -> LoRA:
    """An adapter of the head."""
    return LoRA(_real(16, _D, dtype=dtype, grad=grad), _real(V, 16, dtype=dtype, grad=grad), 2.0)


def _heads(name: str, dtype: torch.dtype) -> dict[str, Workload]:
    B, once = 260, dict[str, Any](backward="recompute")
    every = {n: x for n, x in _rows(B, _V, dtype).items() if n != "logits"}
    return {
        f"{name}, entropy": Workload(_head(B, dtype=dtype, **once), ("logprob", "entropy")),
        f"{name}, saving": Workload(_head(B, dtype=dtype, backward="save"), ("logprob", "entropy")),
        f"{name}, everything": Workload(
            _head(B, dtype=dtype, **once, **every, bias=_real(_V, dtype=dtype, grad=True)), _EVERY
        ),
    }


def _weight(format: str, N: int = 4096, K: int = 4096, *, tiles: bool = False, **options: Any) -> QuantTensor:  # noqa: A002
    """A quantized weight, canonical or as products read it fastest."""
    spec, shape = QuantSpec.named(format, **options), (N, K)
    rooms = codec_of(spec).storage(spec, shape)
    w = QuantTensor(spec, shape, BF16, {name: _real(*size, dtype=kind) for name, (size, kind) in rooms.items()})
    with using(Recorder()):
        return layouts.packed(w, layouts.preferred(w)) if tiles else w


def _quantized(dtype: torch.dtype, format: str, B: int = 260, **more: Any) -> dict[str, Any]:  # noqa: A002
    """Hidden states that are trained and a quantized head."""
    return {**_head(B, dtype=dtype), "weight": _weight(format, _V, _D), **more}


_LINEAR: Final = {
    **_heads("bf16", BF16),
    **_heads("fp32", FP32),
    "bf16, blocks of rows": Workload(_head(20000, 32000, backward="recompute"), ("logprob",)),
    **{
        f"{name}, 64 ids a row": Workload(
            _head(260, dtype=dtype, ids=_whole(260, 64), backward="recompute"), ("logprob", "entropy")
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    **{
        f"bf16, LoRA in {name}": Workload(_head(260, lora=_lora(_V, dtype, grad=True)), ("logprob", "entropy"))
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    "bf16, int4_g32 head": Workload(_quantized(BF16, "int4_g32", backward="recompute"), ("logprob", "entropy")),
    "fp16, nf4 head, bias": Workload(
        _quantized(torch.float16, "nf4", bias=_real(_V, dtype=torch.float16, grad=True)), ("logprob",)
    ),
    "fp32, fp8_channel head, saving": Workload(_quantized(FP32, "fp8_channel", backward="save"), ("logprob",)),
    "bf16, int4_g32 head, blocks of rows": Workload(_quantized(BF16, "int4_g32", 20000), ("logprob",)),
    "fp32, LoRA, 5 ids a row, mask": Workload(
        _head(260, dtype=FP32, ids=_whole(260, 5), mask=_flags(260), lora=_lora(_V, FP32, grad=True)), ("logprob",)
    ),
    "bf16, 5 ids a row, everything": Workload(
        _head(
            260,
            ids=_whole(260, 5),
            softcap=30.0,
            temperature=_real(260),
            mask=_flags(260),
            backward="save",
            bias=_real(_V, dtype=BF16, grad=True),
        ),
        ("logprob",),
    ),
    **{
        f"{name}, lists, mask": Workload(
            _head(260, dtype=dtype, ids=_lists(260), mask=_flags(260), lora=_lora(_V, dtype, grad=True)), ("logprob",)
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
}


def _head_loss(kind: str, **more: Any) -> Workload:
    B = 260
    given = {"old_logprob": _real(B), "advantages": _real(B), "mask": _flags(B), "kind": kind}
    return Workload({**_head(B), "cu_seqlens": _whole(9), **given, **more}, ("loss",))


def _distilled(dtype: torch.dtype, B: int = 260, **more: Any) -> Workload:
    given = {n: x for n, x in _head(B, dtype=dtype).items() if n in {"hidden", "weight"}}
    return Workload({**given, "kind": "reverse_kl", **more}, ("",))


_LINEAR_DIVERGENCE: Final = {
    **{
        f"{name}, head": _distilled(
            dtype, teacher=_real(260, 2048, dtype=dtype), teacher_weight=_real(_V, 2048, dtype=dtype)
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    "bf16, list": _distilled(BF16, **_LISTED),
    "bf16, logits": _distilled(BF16, teacher=_real(260, _V, dtype=BF16)),
}

_LINEAR_LOSS: Final = {"grpo, packed": _head_loss("grpo"), "gspo, packed, blocks": _head_loss("gspo", entropy=False)}


def _drawn(B: int, dtype: torch.dtype = BF16, *, asked_for: bool = False, **more: Any) -> Workload:
    drawn = {"temperature": _real(B), "seed": _whole(B), "step": _whole(B)}
    given = {"hidden": _real(B, _D, dtype=dtype), "weight": _real(_DRAWN, _D, dtype=dtype)}
    return Workload({**given, **drawn, **more}, asked_for=asked_for)


def _allowed(B: int) -> Tensor:
    return _real(B, _WORDS, dtype=torch.int32)


_FEW, _MANY_ROWS = 4, 250
_HEAD_SAMPLE: Final = {
    "bf16, few rows": _drawn(_FEW),
    "bf16, some rows": _drawn(50),
    "bf16, many rows": _drawn(_MANY_ROWS),
    "fp32, many rows": _drawn(_MANY_ROWS, FP32),
    **{
        f"{name}, everything": _drawn(
            _MANY_ROWS, dtype, bias=_real(_DRAWN, dtype=dtype), softcap=30.0, allowed=_allowed(_MANY_ROWS),
            slot=_whole(_MANY_ROWS), raw_logprob=True,
        )
        for name, dtype in (("bf16", BF16), ("fp32", FP32))
    },
    "bf16, edited": _drawn(
        _FEW, raw_logprob=True, slot=_whole(_FEW), logit_bias=LogitBias(_whole(20), _real(20), _whole(_FEW + 1))
    ),
    "bf16, top-p, cap": _drawn(_MANY_ROWS, top_p=_real(_MANY_ROWS), softcap=30.0),
    "bf16, LoRA, few rows": _drawn(_FEW, lora=_lora(_DRAWN, BF16)),
    "bf16, LoRA in fp32, many rows": _drawn(_MANY_ROWS, lora=_lora(_DRAWN, FP32)),
    **{
        f"bf16, {name} head": _drawn(_FEW, weight=_weight(name, _DRAWN, _D))
        for name in ("int4_g128", "int4_g32_asym", "nf4", "fp8_channel", "mxfp8", "gguf_q6_k")
    },
    **{
        f"bf16, {name} head in tiles": _drawn(_FEW, weight=_weight(name, _DRAWN, _D, tiles=True))
        for name in ("int4_g128", "mxfp4", "nvfp4")
    },
    "fp16, int4_g128 head, LoRA, cap, top-p": _drawn(
        _MANY_ROWS, torch.float16, weight=_weight("int4_g128", _DRAWN, _D), lora=_lora(_DRAWN, BF16), softcap=30.0,
        top_p=_real(_MANY_ROWS),
    ),
    "bf16, nf4 head, double_quant, blocks across rows": _drawn(
        _FEW, hidden=_real(_FEW, 4112, dtype=BF16), weight=_weight("nf4", _DRAWN, 4112, double_quant=True)
    ),
    "fp32, int4_g128 head": _drawn(_FEW, FP32, weight=_weight("int4_g128", _DRAWN, _D)),
    "bf16, trainer bits": _drawn(_MANY_ROWS, asked_for=True),
    "bf16, trainer bits, everything": _drawn(
        _MANY_ROWS, bias=_real(_DRAWN, dtype=BF16), softcap=30.0, lora=_lora(_DRAWN, BF16), slot=_whole(_MANY_ROWS),
        raw_logprob=True, asked_for=True,
    ),
    "bf16, trainer bits, masked": _drawn(
        _MANY_ROWS, allowed=_allowed(_MANY_ROWS), raw_logprob=True, asked_for=True
    ),
    "fp32, trainer bits": _drawn(_MANY_ROWS, FP32, raw_logprob=True, asked_for=True),
}  # fmt: skip


def _verified(**more: Any) -> Workload:
    B, M = 8, 40  # requests, and rows of their drafts and of what follows them
    drawn = {"temperature": _real(B), "seed": _whole(B), "step": _whole(B), "top_p": _real(B)}
    given = {
        "target_logits": _real(M, _DRAWN, dtype=BF16), "draft_ids": _whole(M - B), "cu_draft": _whole(B + 1), **drawn,
    }  # fmt: skip
    return Workload({**given, **more})


_VERIFY: Final = {
    "bf16, greedy drafts": _verified(),
    "bf16, draft logits": _verified(draft_logits=_real(32, _DRAWN, dtype=BF16)),
    "bf16, draft probabilities, allowed, raw": _verified(
        draft_probs=_real(32, _DRAWN), allowed=_allowed(40), raw_logprob=True
    ),
}

_TALL: Final = 28672  # rows of a weight that fill a large GPU with tiles of 128


_BLOCKS: Final = ("mxfp4", "mxfp8", "nvfp4", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k")
_CODED: Final = ("int4_g128_asym", "hqq4", "gguf_q8_0", "fp4", "int8_channel", "fp8_tensor", "fp8_block128", *_BLOCKS)
_TILED: Final = ("int4_g128", "gguf_q4_0", "nf4", "mxfp4", "nvfp4")
_QUANTIZE: Final = {
    **{name: Workload({"weight": _real(4096, 4096, dtype=BF16), "format": name}) for name in _CODED},
    **{
        f"{name}, tiles": Workload(
            {"weight": _real(4096, 4096, dtype=BF16), "format": name, "out": _weight(name, tiles=True)}
        )
        for name in _TILED
    },
}
_FAKED: Final = {
    **{
        name: Workload({"weight": _real(4096, 4096, dtype=BF16, grad=True), "format": name, "clipped": True}, ("",))
        for name in ("int4_g128", *_CODED, "gguf_q4_0", "nf4")
    },
    "nf4, ragged": Workload({"weight": _real(4100, 4100, dtype=BF16), "format": "nf4"}),
    "fp8_block128, ragged": Workload({"weight": _real(4100, 4100, dtype=BF16), "format": "fp8_block128"}),
    "nf4, double_quant": Workload(
        {"weight": _real(4096, 4096, dtype=BF16), "format": QuantSpec.named("nf4", double_quant=True)}
    ),
}
_DEQUANTIZE: Final = {
    **{name: Workload({"w": _weight(name)}) for name in ("int4_g128", "fp8_channel", *_BLOCKS)},
    **{f"{name}, tiles": Workload({"w": _weight(name, tiles=True)}) for name in ("int4_g128", "mxfp4", "nvfp4")},
    "nf4, double_quant, tiles": Workload({"w": _weight("nf4", tiles=True, double_quant=True)}),
    "nf4, blocks across rows": Workload({"w": _weight("nf4", K=4112)}),
}
_PREPACK: Final = {name: Workload({"w": _weight(name)}) for name in ("int4_g128", "nf4", "mxfp4")}


def _product(M: int, w: QuantTensor, *, experts: int = 0, upstream: tuple[str, ...] = (), **more: Any) -> Workload:
    given = {"x": _real(M, w.shape[1], dtype=BF16, grad=bool(upstream)), "w": w, **more}
    return Workload(given | ({"ends": _real(experts, dtype=torch.int32)} if experts else {}), upstream)


def _epilogue(M: int, N: int, K: int = 4096) -> dict[str, Any]:
    """Everything that follows a product: its last two see half of its rows."""
    lora = LoRA(_real(16, K, dtype=BF16), _real(N, 16, dtype=BF16), 2.0)
    more = {"bias": _real(N, dtype=BF16), "residual": _real(M, N // 2, dtype=BF16), "activation": "swiglu"}
    return {"lora": lora, **more}


def _stacked(G: int, N: int, K: int, *, grad: bool = False) -> LoRA:
    return LoRA(_real(G, 16, K, dtype=BF16, grad=grad), _real(G, N, 16, dtype=BF16, grad=grad), 2.0)


def _adapters(N: int, K: int = 4096, *, grad: bool = False) -> dict[str, Any]:
    """Of 8 groups of rows."""
    return {"lora": _stacked(8, N, K, grad=grad), "lora_ends": _real(8, dtype=torch.int32)}


_INT4, _TALL_INT4 = (_weight("int4_g128", N, tiles=True) for N in (4096, _TALL))
_MXFP4, _TALL_MXFP4 = (_weight("mxfp4", N, tiles=True) for N in (4096, _TALL))
_E: Final = 32
_EXPERTS, _INT4_EXPERTS = (_weight(name, 512 * _E, tiles=True) for name in ("mxfp4", "int4_g128"))
_QMATMUL: Final = {
    **{f"int4_g128, {M} tokens": _product(M, _INT4) for M in (4, 20, 50, 100, 200)},
    **{f"int4_g128, {M} tokens, tall": _product(M, _TALL_INT4) for M in (4, 20, 50, 100, 200, 400, 900)},
    "int4_g128_asym, 4 tokens": _product(4, _weight("int4_g128_asym", tiles=True)),
    "int4_g128, 4 tokens, swiglu, LoRA, bias, residual": _product(4, _INT4, **_epilogue(4, 4096)),
    "nf4, 4 tokens": _product(4, _weight("nf4", tiles=True)),
    "nf4, double_quant, 4 tokens": _product(4, _weight("nf4", tiles=True, double_quant=True)),
    "int4_g128, any shape": _product(4, _weight("int4_g128", 4000, 4112)),
    "int8_w8a8, 40 tokens": _product(40, _weight("int8_w8a8")),
    "fp8_channel, 4 tokens": _product(4, _weight("fp8_channel")),
    "int4_g128, 2000 tokens, swiglu, LoRA, bias, residual": _product(2000, _INT4, **_epilogue(2000, 4096)),
    **{f"mxfp4, {M} tokens": _product(M, _MXFP4) for M in (4, 20, 50, 200)},
    **{f"mxfp4, {M} tokens, tall": _product(M, _TALL_MXFP4) for M in (4, 20, 50, 200)},
    "nvfp4, 4 tokens": _product(4, _weight("nvfp4", tiles=True)),
    **{f"{name}, 4 tokens, canonical": _product(4, _weight(name)) for name in _BLOCKS},
    **{
        f"mxfp4, 32 experts, {M} tokens of each": _product(M * _E + 2, _EXPERTS, experts=_E)
        for M in (3, 11, 51, 101)
    },
    "mxfp4, 32 experts, 20 tokens of each, swiglu, bias": _product(
        20 * _E + 2, _EXPERTS, experts=_E, activation="swiglu", bias=_real(512 * _E, dtype=BF16)
    ),
    "int4_g128, 32 experts, 11 tokens of each": _product(11 * _E + 2, _INT4_EXPERTS, experts=_E),
    "fp8_channel, 32 experts, 40 tokens of each": _product(40 * _E + 2, _weight("fp8_channel", 512 * _E), experts=_E),
    **{
        f"int4_g128, {M} tokens of 8 adapters": _product(M, _INT4, **_adapters(4096)) for M in (4, 200, 1000, 2000)
    },
    "int4_g128, 200 tokens of 8 adapters, swiglu, bias, residual, gradients": _product(
        200, _INT4, **{**_epilogue(200, 4096), **_adapters(4096, grad=True)}, upstream=("",)
    ),
    "mxfp4, 32 experts, 11 tokens of each, LoRA": _product(
        11 * _E + 2, _EXPERTS, experts=_E, lora=_stacked(_E, 512, 4096)
    ),
    "mxfp4, 4 tokens in MXFP8": _product(4, _weight("mxfp4", tiles=True, act="mxfp8")),
    "nvfp4, 4 tokens in NVFP4": _product(4, _weight("nvfp4", tiles=True, act="nvfp4")),
}  # fmt: skip


def _rows_times(M: int, K: int, N: int, dtype: torch.dtype = BF16, *, grad: bool = False, **more: Any) -> Workload:
    x, weight = _real(M, K, dtype=dtype, grad=grad), _real(N, K, dtype=dtype, grad=grad)
    bias, residual = (_real(*shape, dtype=dtype, grad=grad) for shape in ((N,), (M, N)))
    every = {"bias": bias, "residual": residual}
    given = {"x": x, "weight": weight, **{n: t for n, t in every.items() if n in more}}
    return Workload(given, ("",) if grad else ())


# Few outputs, so that few rows are split over programs on every target; a head's outputs, so that they are on none.
_PRODUCT: Final = {
    "bf16, 1 row": _rows_times(1, 4096, 1024),
    "bf16, 4 rows": _rows_times(4, 4096, 1024),
    "bf16, 4 rows, bias, residual": _rows_times(4, 4096, 1024, bias=True, residual=True),
    "bf16, 4 rows, ragged chunks": _rows_times(4, 896, 1152),
    "bf16, 4 rows, many outputs": _rows_times(4, 4096, 151936),
    "bf16, many rows": _rows_times(8200, 4096, 6144, grad=True),
    "bf16, many rows, bias, residual": _rows_times(8200, 4096, 6144, bias=True, residual=True),
    "bf16, many rows, ragged chunks": _rows_times(8200, 896, 1152),
    "fp32, 4 rows": _rows_times(4, 4096, 512, FP32),
    "fp32, many rows": _rows_times(8200, 4096, 6144, FP32, grad=True),
}


def _by_expert(T: int, E: int, K: int, N: int, dtype: torch.dtype = BF16, *, grad: bool = False) -> Workload:
    given = {n: _real(*shape, dtype=dtype, grad=grad) for n, shape in (("x", (T, K)), ("weight", (E, N, K)))}
    given |= {"ends": _real(E, dtype=torch.int32), "bias": _real(E, N, dtype=dtype, grad=grad)}
    return Workload(given, ("",) if grad else ())


_GROUPED: Final = {
    "bf16, 32 experts, 10 rows of each": _by_expert(330, 32, 2048, 1536),
    "bf16, 32 experts, 10 rows of each, ragged chunks": _by_expert(330, 32, 896, 1152),
    "bf16, 32 experts, 200 rows of each": _by_expert(6410, 32, 2048, 1536, grad=True),
    "fp32, 32 experts, 200 rows of each": _by_expert(6410, 32, 2048, 1536, FP32, grad=True),
}


def _norm(*rows: int, D: int = 4096, dtype: torch.dtype = BF16, grad: bool = False, **more: Any) -> dict[str, Any]:
    x, weight = _real(*rows, D, dtype=dtype, grad=grad), _real(D, dtype=dtype, grad=grad)
    return {"x": x, "weight": weight, "eps": 1e-6, **more}


_NORM: Final = {
    "bf16": Workload(_norm(8200, grad=True), ("y",)),
    "bf16, residual, offset": Workload(
        _norm(8200, grad=True, residual=_real(8200, 4096, dtype=BF16, grad=True), offset=1.0), ("y", "residual")
    ),
    "bf16, heads": Workload(_norm(260, 8, D=128, grad=True), ("y",)),
    "fp32, residual": Workload(_norm(260, dtype=FP32, grad=True, residual=_real(260, 4096, grad=True)), ("y",)),
}


def _rotary(
    *tokens: int, D: int = 128, R: int = 128, dtype: torch.dtype = BF16, norm: bool = False, **more: Any
) -> Any:
    q, k = (_real(*tokens, heads, D, dtype=dtype, grad=True) for heads in (32, 8))
    given = {"q": q, "k": k, "positions": _whole(*tokens), "table": _real(40960, R), **more}
    weights = {f"{n}_weight": _real(D, dtype=dtype, grad=True) for n in "qk"} if norm else {}
    return given | weights | ({"eps": 1e-6} if norm else {})


_ROPE: Final = {
    "bf16": Workload(_rotary(8200), ("q", "k")),
    "bf16, norm": Workload(_rotary(8200, norm=True), ("q", "k")),
    "bf16, half of a head, interleaved": Workload(_rotary(8200, R=64, interleaved=True), ("q", "k")),
    "bf16, heads of 256, norm, offset": Workload(_rotary(8200, D=256, R=256, norm=True, offset=1.0), ("q", "k")),
    "fp32, norm": Workload(_rotary(260, dtype=FP32, norm=True), ("q", "k")),
}


def _attended(
    T: int, B: int, *, heads: tuple[int, int] = (32, 8), D: int = 128, dtype: torch.dtype = BF16, grad: bool = True,
    pages: int = 0, sinks: bool = False, **more: Any,
) -> Workload:  # fmt: skip
    """With `pages` keys lie in so many of 16 keys a sequence; they have no gradient."""
    q = _real(T, heads[0], D, dtype=dtype, grad=grad)
    k, v = (_real(*((20000, 16) if pages else (T,)), heads[1], D, dtype=dtype, grad=grad and not pages) for _ in "kv")
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_q": _real(B + 1, dtype=torch.int32), **more}
    if pages:
        given |= {"page_table": _real(B, pages, dtype=torch.int32), "seqused_k": _real(B, dtype=torch.int32)}
    if sinks:
        given["sinks"] = _real(heads[0], dtype=dtype, grad=grad)
    return Workload(given, ("out", "lse") if grad else ())


_ATTENTION: Final = {
    "bf16": _attended(8200, 9),
    "bf16, bidirectional": _attended(8200, 9, causal=False),
    "bf16, heads of 64, window, sinks": _attended(8200, 9, heads=(64, 8), D=64, window=128, sinks=True),
    "bf16, heads of 256, window, softcap": _attended(8200, 9, heads=(16, 8), D=256, window=4096, softcap=50.0),
    "bf16, pages": _attended(8200, 9, pages=200),
    "bf16, few queries, pages": _attended(9, 9, pages=200, grad=False),
    "bf16, few queries, heads of 256, pages": _attended(9, 9, heads=(16, 8), D=256, pages=200, grad=False),
    "bf16, few queries, pages, window, sinks": _attended(
        9, 9, heads=(64, 8), D=64, pages=200, window=128, sinks=True, grad=False
    ),
    "fp32": _attended(8200, 9, dtype=FP32),
    "fp32, heads of 256": _attended(8200, 9, heads=(16, 8), D=256, dtype=FP32),
}

_GLU: Final = {
    **{
        f"bf16, {name}": Workload({"x": _real(8200, 28672, dtype=BF16, grad=True), "activation": name}, ("",))
        for name in ("silu", "gelu", "gelu_tanh")
    },
    "fp32, silu": Workload({"x": _real(260, 28672, grad=True), "activation": "silu"}, ("",)),
}

WORKLOADS: Final[Mapping[str, Mapping[str, Workload]]] = {
    "logprob": _LOGPROB,
    "linear_logprob": _LINEAR,
    "divergence": _DIVERGENCE,
    "linear_divergence": _LINEAR_DIVERGENCE,
    "sample": _SAMPLE,
    "lm_head_sample": _HEAD_SAMPLE,
    "verify": _VERIFY,
    "affine_suffix_scan": _SCAN,
    "advantage": _ADVANTAGE,
    "whiten": _WHITEN,
    "linear": _PRODUCT,
    "grouped_linear": _GROUPED,
    "rms_norm": _NORM,
    "rope": _ROPE,
    "attention": _ATTENTION,
    "glu": _GLU,
    "policy_loss": _LOSS,
    "linear_policy_loss": _LINEAR_LOSS,
    "quantize": _QUANTIZE,
    "fake_quantize": _FAKED,
    "dequantize": _DEQUANTIZE,
    "prepack": _PREPACK,
    "qmatmul": _QMATMUL,
}

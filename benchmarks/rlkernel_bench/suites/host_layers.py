"""The calls of the suite `host` that a model's layers make.

Legend: M rows of K times N of these, N rows of D, or T tokens of H query heads of D and fewer of keys.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from rlkernel_bench.suites.host_case import Case
from rlkernel_bench.work import Inputs, Outputs


def _rotated(given: Inputs) -> Outputs:
    cos, sin = given["table"][given["positions"]].to(given["q"].dtype)[:, None].chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return {"q": turned(given["q"]), "k": turned(given["k"])}


def _attended(given: Inputs) -> Outputs:
    q, k, v = (given[n].transpose(0, 1)[None] for n in ("q", "k", "v"))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return {"out": out[0].transpose(0, 1)}


def _there_and_back(given: Inputs) -> Outputs:
    """Bytes with a scale per row, by torch's own fake quantization of fp32."""
    weight = given["weight"]
    scale = weight.detach().abs().amax(1) / 127
    none = torch.zeros(len(scale), dtype=torch.int32, device=weight.device)
    return {"y": torch.fake_quantize_per_channel_affine(weight, scale, none, 0, -127, 127)}


def _forward_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    log_s, log_t = (torch.log_softmax(x, -1) for x in (logits, teacher))
    return functional.kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)


LAYERS: Final = (
    Case(
        "linear",
        {"M": 8, "K": 256, "N": 256},
        lambda draw: {"x": draw.normal(8, 256, dtype="bfloat16"), "weight": draw.normal(256, 256, dtype="bfloat16")},
        lambda op, g: op(g["x"], g["weight"]),
        lambda r: {"y": r},
        lambda g: {"y": functional.linear(g["x"], g["weight"])},
        "linear",
        wanted=("x", "weight"),
        dtype="bfloat16",
    ),
    Case(
        "grouped_linear",
        {"T": 8, "E": 4, "K": 256, "N": 256},
        lambda draw: {
            "x": draw.normal(8, 256, dtype="bfloat16"),
            "weight": draw.normal(4, 256, 256, dtype="bfloat16"),
            "ends": draw.ids(1, 4).int() + 8,
        },
        lambda op, g: op(g["x"], g["weight"], g["ends"]),
        lambda r: {"y": r},
        lambda g: {"y": functional.linear(g["x"], g["weight"][0])},
        "linear",
        wanted=("x", "weight"),
        dtype="bfloat16",
    ),
    Case(
        "fake_quantize",
        {"N": 64, "K": 256},
        lambda draw: {"weight": draw.normal(64, 256)},
        lambda op, g: op(g["weight"], "int8_channel"),
        lambda r: {"y": r},
        _there_and_back,
        "abs, amax, divide, zeros, fake_quantize_per_channel_affine",
        wanted=("weight",),
        options={"format": "int8_channel"},
    ),
    Case(
        "route",
        {"T": 8, "E": 64},
        lambda draw: {"logits": draw.normal(8, 64)},
        lambda op, g: op(g["logits"], top_k=8),
        lambda r: {"gates": r.gates},
        lambda g: {"gates": g["logits"].softmax(1).topk(8).values},
        "softmax, topk",
        wanted=("logits",),
    ),
    Case(
        "divergence",
        {"N": 8, "V": 512},
        lambda draw: {"logits": draw.normal(8, 512), "teacher": draw.normal(8, 512)},
        lambda op, g: op(g["logits"], g["teacher"]),
        lambda r: {"divergence": r},
        lambda g: {"divergence": _forward_kl(g["logits"], g["teacher"])},
        "log_softmax, kl_div",
        wanted=("logits",),
    ),
    Case(
        "linear_divergence",
        {"N": 8, "D": 64, "V": 512},
        lambda draw: {
            "hidden": draw.normal(8, 64),
            "weight": draw.normal(512, 64),
            "teacher": draw.normal(8, 64),
            "of_teacher": draw.normal(512, 64),
        },
        lambda op, g: op(g["hidden"], g["weight"], g["teacher"], teacher_weight=g["of_teacher"]),
        lambda r: {"divergence": r},
        lambda g: {"divergence": _forward_kl(g["hidden"] @ g["weight"].T, g["teacher"] @ g["of_teacher"].T)},
        "linear, log_softmax, kl_div",
        wanted=("hidden", "weight"),
    ),
    Case(
        "rms_norm",
        {"N": 8, "D": 256},
        lambda draw: {"x": draw.normal(8, 256, dtype="bfloat16"), "weight": draw.normal(256, dtype="bfloat16")},
        lambda op, g: op(g["x"], g["weight"], eps=1e-6),
        lambda r: {"y": r.y},
        lambda g: {"y": functional.rms_norm(g["x"], (256,), g["weight"], 1e-6)},
        "rms_norm",
        wanted=("x", "weight"),
        dtype="bfloat16",
    ),
    Case(
        "rope",
        {"T": 8, "H": 4, "D": 64},
        lambda draw: {
            "q": draw.normal(8, 4, 64, dtype="bfloat16"),
            "k": draw.normal(8, 1, 64, dtype="bfloat16"),
            "positions": draw.ids(40, 8),
            "table": draw.normal(40, 64),
        },
        lambda op, g: op(g["q"], g["k"], g["positions"], g["table"]),
        lambda r: {"q": r.q, "k": r.k},
        _rotated,
        "index, slices, multiply, add, concatenate, twice",
        wanted=("q",),
        dtype="bfloat16",
    ),
    Case(
        "attention",
        {"T": 16, "H": 4, "D": 64},
        lambda draw: {
            **{n: draw.normal(16, heads, 64, dtype="bfloat16") for n, heads in (("q", 4), ("k", 2), ("v", 2))},
            "cu_q": torch.tensor([0, 16], dtype=torch.int32, device=draw.device),
        },
        lambda op, g: op(g["q"], g["k"], g["v"], cu_q=g["cu_q"]),
        lambda r: {"out": r.out},
        _attended,
        "three transposes, scaled_dot_product_attention, a transpose",
        wanted=("q", "k", "v"),
        dtype="bfloat16",
    ),
    Case(
        "glu",
        {"N": 8, "D": 256},
        lambda draw: {"x": draw.normal(8, 512, dtype="bfloat16")},
        lambda op, g: op(g["x"], activation="silu"),
        lambda r: {"y": r},
        lambda g: {"y": functional.silu(g["x"][:, :256]) * g["x"][:, 256:]},
        "two slices, silu, multiply",
        wanted=("x",),
        dtype="bfloat16",
        options={"activation": "silu"},
    ),
)

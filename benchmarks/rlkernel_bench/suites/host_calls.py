"""The calls of the suite `host`: each operator once or more. `host_case` says what a call is.

Legend: N rows, V vocabulary, D hidden, B sequences of T tokens, G group, K drafts.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.suites.host_advantage import ADVANTAGES
from rlkernel_bench.suites.host_case import Case, Operator, suffix, whitened
from rlkernel_bench.suites.host_layers import LAYERS
from rlkernel_bench.work import Inputs, Outputs


def loss_of(given: Inputs, logprob: Tensor) -> Tensor:
    """GRPO: clipped surrogate, mean over the tokens of a sequence, then over sequences."""
    ratio = (logprob - given["old_logprob"]).exp()
    gain = given["advantages"][:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    mask = given["mask"]
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def _rows(draw: Draw, n: int, v: int) -> Inputs:
    return {"logits": draw.normal(n, v, std=2.0, dtype="bfloat16"), "ids": draw.ids(v, n)}


def _head(draw: Draw, n: int, d: int, v: int) -> Inputs:
    hidden, weight = draw.normal(n, d, dtype="bfloat16"), draw.normal(v, d, std=0.05, dtype="bfloat16")
    return {"hidden": hidden, "weight": weight, "ids": draw.ids(v, n)}


def _tokens(draw: Draw, b: int, t: int) -> Inputs:
    old = -draw.normal(b, t).abs() - 0.1
    mask = torch.arange(t, device=draw.device)[None] < 1 + draw.ids(t, b)[:, None]
    return {
        "logprob": old + 0.1 * draw.normal(b, t),
        "old_logprob": old,
        "advantages": draw.normal(b),
        "mask": mask,
    }


def _seeds(draw: Draw, n: int) -> Inputs:
    return {"seed": torch.arange(n, device=draw.device)}


def _drawn(given: Inputs, law: Tensor) -> Outputs:
    return {"token": torch.multinomial(law, 1).squeeze(-1)}


def _quantized(draw: Draw, n: int, k: int, form: str) -> Inputs:
    weight = draw.normal(n, k, dtype="bfloat16")
    with rlk.use("reference"):
        w = rlk.quantize(weight, form)
        dense = rlk.dequantize(w, dtype=torch.bfloat16)
    return {"weight": weight, "w": w, "dense": dense}


def _int8(draw: Draw) -> Inputs:
    weight = draw.normal(256, 256, dtype="bfloat16")
    scale = weight.float().abs().amax(-1, keepdim=True) / 127
    codes = (weight.float() / scale).round().to(torch.int8)
    with rlk.use("reference"):
        return {"weight": weight, "w": rlk.quantize(weight, "int8_channel"), "codes": codes, "scale": scale}


def _rounded(given: Inputs) -> Outputs:
    weight = given["weight"].float()
    scale = weight.abs().amax(-1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": lambda: codes * scale}


def _verified(given: Inputs) -> Outputs:
    """Accept while u < p / q, then one token of what is left, or of the target's last row."""
    p = given["target"].softmax(-1).view(2, 4, -1)
    q, ids = given["draft_probs"].view(2, 3, -1), given["draft_ids"].view(2, 3, 1)
    ratio = (p[:, :3].gather(-1, ids) / q.gather(-1, ids)).squeeze(-1)
    kept = (torch.rand_like(ratio) < ratio).cumprod(-1)
    accepted = kept.sum(-1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    law = (p.gather(1, at) - functional.pad(q, (0, 0, 0, 1)).gather(1, at)).clamp(min=0).squeeze(1)
    return {"accepted": accepted, "token": torch.multinomial(law, 1)}


def _drafts(draw: Draw) -> Inputs:
    return {
        "target": draw.normal(8, 1024),
        "draft_ids": draw.ids(1024, 6),
        "draft_probs": draw.normal(6, 1024).softmax(-1),
        "cu_draft": 3 * torch.arange(3, device=draw.device),
        **_seeds(draw, 2),
    }


def _buffer(draw: Draw) -> Inputs:
    """64 open sequences of at most 4096 tokens: what rows append to, in our buffer and in two plain tensors."""
    buffer = rlk.rollout_buffer(64 * 4096, 64, device=draw.device)
    tokens = torch.arange(64, device=draw.device, dtype=torch.int32)
    return {
        "buffer": buffer,
        "slots": buffer.reserve(4096, list(range(64))),
        "values": {"token": tokens, "logprob": -tokens.float()},
        "token": torch.zeros(64, 4096, dtype=torch.int32, device=draw.device),
        "logprob": torch.zeros(64, 4096, device=draw.device),
        "at": torch.zeros(64, 1, dtype=torch.int64, device=draw.device),
    }


def _appended(given: Inputs) -> Outputs:
    given["token"].scatter_(1, given["at"], given["values"]["token"][:, None])
    given["logprob"].scatter_(1, given["at"], given["values"]["logprob"][:, None])
    given["at"].add_(1).clamp_(max=4095)
    return {"whole": lambda: (given["at"] > 0).all().float()}


def _append(_: Operator, given: Inputs) -> Any:
    given["buffer"].append(given["slots"], given["values"])
    return given["buffer"]


def _whole(buffer: Any) -> Tensor:
    """1 where every row has as many tokens as the others."""
    appended = buffer.stats.appended
    return torch.tensor(float(appended > 0 and appended % 64 == 0))


CASES: Final[tuple[Case, ...]] = (
    Case(
        "logprob",
        {"N": 64, "V": 1024},
        lambda draw: _rows(draw, 64, 1024),
        lambda op, g: op(g["logits"], g["ids"]),
        lambda r: {"logprob": r.logprob},
        lambda g: {
            "logprob": g["logits"].log_softmax(-1, dtype=torch.float32).gather(-1, g["ids"][:, None]).squeeze(-1)
        },
        "log_softmax in fp32, gather",
        1.5,
        ("logits",),
        "bfloat16",
        graphs=("logits", "ids"),
    ),
    Case(
        "linear_logprob",
        {"N": 64, "D": 256, "V": 1024},
        lambda draw: _head(draw, 64, 256, 1024),
        lambda op, g: op(g["hidden"], g["weight"], g["ids"]),
        lambda r: {"logprob": r.logprob},
        lambda g: {
            "logprob": functional.linear(g["hidden"], g["weight"])
            .log_softmax(-1, dtype=torch.float32)
            .gather(-1, g["ids"][:, None])
            .squeeze(-1)
        },
        "linear, log_softmax in fp32, gather",
        2.0,
        ("hidden", "weight"),
        "bfloat16",
        graphs=("hidden", "ids"),
    ),
    Case(
        "policy_loss",
        {"B": 8, "T": 128},
        lambda draw: _tokens(draw, 8, 128),
        lambda op, g: op(g["logprob"], g["old_logprob"], g["advantages"], mask=g["mask"], kind="grpo"),
        lambda r: {"loss": r.loss},
        lambda g: {"loss": loss_of(g, g["logprob"])},
        "ratio, clamp, minimum, means over tokens and sequences",
        1.5,
        ("logprob",),
        options={"kind": "grpo"},
        batch=20,
        graphs=("logprob", "old_logprob", "advantages", "mask"),
    ),
    Case(
        "linear_policy_loss",
        {"B": 8, "T": 16, "D": 256, "V": 1024},
        lambda draw: (
            _tokens(draw, 8, 16)
            | {"hidden": draw.normal(8, 16, 256, dtype="bfloat16"), "ids": draw.ids(1024, 8, 16)}
            | {
                "weight": draw.normal(1024, 256, std=0.05, dtype="bfloat16"),
                "old_logprob": draw.normal(8, 16, std=0.1) - 7,
            }
        ),
        lambda op, g: op(
            g["hidden"], g["weight"], g["ids"], g["old_logprob"], g["advantages"], mask=g["mask"], kind="grpo"
        ),
        lambda r: {"loss": r.loss},
        lambda g: {
            "loss": loss_of(
                g,
                functional.linear(g["hidden"], g["weight"])
                .log_softmax(-1, dtype=torch.float32)
                .gather(-1, g["ids"][..., None])
                .squeeze(-1),
            )
        },
        "linear, log_softmax in fp32, gather, and the loss of policy_loss",
        None,
        ("hidden", "weight"),
        "bfloat16",
        {"kind": "grpo"},
        batch=20,
    ),
    Case(
        "sample",
        {"N": 8, "V": 1024},
        lambda draw: _rows(draw, 8, 1024) | _seeds(draw, 8),
        lambda op, g: op(g["logits"], seed=g["seed"], step=0),
        lambda r: {"token": r.token},
        lambda g: _drawn(g, g["logits"].softmax(-1, dtype=torch.float32)),
        "softmax in fp32, multinomial",
        1.5,
        dtype="bfloat16",
        graphs=("logits", "seed"),
    ),
    Case(
        "lm_head_sample",
        {"N": 8, "D": 256, "V": 1024},
        lambda draw: _head(draw, 8, 256, 1024) | _seeds(draw, 8),
        lambda op, g: op(g["hidden"], g["weight"], seed=g["seed"], step=0),
        lambda r: {"token": r.token},
        lambda g: _drawn(g, functional.linear(g["hidden"], g["weight"]).softmax(-1, dtype=torch.float32)),
        "linear, softmax in fp32, multinomial",
        dtype="bfloat16",
    ),
    Case(
        "verify",
        {"B": 2, "K": 3, "V": 1024},
        _drafts,
        lambda op, g: op(
            g["target"], g["draft_ids"], cu_draft=g["cu_draft"], draft_probs=g["draft_probs"], seed=g["seed"], step=0
        ),
        lambda r: {"accepted": r.accepted, "token": r.token.clamp(min=0)},
        _verified,
        "softmax, ratio to the draft's law, cumprod, multinomial of what is left",
        batch=20,
    ),
    Case(
        "qmatmul",
        {"M": 1, "K": 256, "Nout": 256},
        lambda draw: _quantized(draw, 256, 256, "int4_g128") | {"x": draw.normal(1, 256, dtype="bfloat16")},
        lambda op, g: op(g["x"], g["w"]),
        lambda r: {"y": r},
        lambda g: {"y": functional.linear(g["x"], g["dense"])},
        "linear on the weight in bf16",
        1.5,
        ("x",),
        "bfloat16",
        {"format": "int4_g128"},
        graphs=("x",),
    ),
    Case(
        "quantize",
        {"Nout": 256, "K": 256},
        _int8,
        lambda op, g: op(g["weight"], "int8_channel"),
        lambda r: {"weight": lambda: _dense(r)},
        _rounded,
        "absolute maximum of each row, divide, round, to int8",
        dtype="bfloat16",
        options={"format": "int8_channel"},
    ),
    Case(
        "dequantize",
        {"Nout": 256, "K": 256},
        _int8,
        lambda op, g: op(g["w"], dtype=torch.bfloat16),
        lambda r: {"weight": r},
        lambda g: {"weight": (g["codes"] * g["scale"]).to(torch.bfloat16)},
        "codes times scale, to bf16",
        dtype="bfloat16",
        options={"format": "int8_channel"},
    ),
    Case(
        "prepack",
        {"Nout": 256, "K": 256},
        _int8,
        lambda op, g: op(g["w"]),
        lambda r: {"weight": lambda: _held(r)},
        lambda g: {"weight": g["codes"].clone()},
        "nothing does the same: a copy of the codes",
        dtype="bfloat16",
        options={"format": "int8_channel"},
    ),
    *ADVANTAGES,
    Case(
        "affine_suffix_scan",
        {"B": 8, "T": 128},
        lambda draw: {"b": draw.normal(8, 128), "a": 1 - 0.02 * draw.uniform(8, 128)},
        lambda op, g: op(g["b"], g["a"]),
        lambda r: {"y": r.y},
        lambda g: {"y": suffix(g["b"], g["a"])},
        "cumprod, multiply, flip, cumsum, flip, divide, in place of the loop over time",
        wanted=("b", "a"),
        batch=25,
    ),
    Case(
        "whiten",
        {"B": 8, "T": 128},
        lambda draw: {"x": draw.normal(8, 128)},
        lambda op, g: op(g["x"]),
        lambda r: {"y": r.y},
        lambda g: {"y": whitened(g["x"])},
        "mean, var, subtract, rsqrt, multiply",
    ),
    *LAYERS,
    Case(
        "group_filter",
        {"B": 64, "G": 8},
        lambda draw: {"rewards": draw.uniform(64).round()},
        lambda op, g: op(g["rewards"], group=8),
        lambda r: {"keep": r.keep.float()},
        lambda g: {"keep": (g["rewards"].view(-1, 8).std(-1) > 0).repeat_interleave(8).float()},
        "view, std, compare, repeat_interleave",
    ),
    Case(
        "shape_rewards",
        {"B": 64},
        lambda draw: {"rewards": draw.uniform(64)},
        lambda op, g: op(g["rewards"], clip=(0.2, 0.8), normalize="batch"),
        lambda r: {"rewards": r.rewards},
        lambda g: {"rewards": _normalized(g["rewards"].clamp(0.2, 0.8))},
        "clamp, mean, std, subtract, divide",
        options={"normalize": "batch"},
    ),
    Case(
        "rollout_buffer",
        {"B": 64},
        _buffer,
        _append,
        lambda r: {"whole": lambda: _whole(r)},
        _appended,
        "two scatter_ into [B, T] tensors, add_ and clamp_ of the lengths",
        options={"method": "append"},
    ),
)


def _normalized(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-8)


def _held(w: Any) -> Tensor:
    """What a packed weight stands for, as codes: 127 at the largest of each row."""
    dense = _dense(w)
    return (dense * 127 / dense.abs().amax(-1, keepdim=True)).round()


def _dense(w: Any) -> Tensor:
    with rlk.use("reference"):
        return rlk.dequantize(w, dtype=torch.float32)

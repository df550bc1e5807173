"""rollout: a decode chain of a language model's shape under one graph, in tokens a second.

One step takes the tokens [B] that the last one drew, and gives the next:

    h = embedding[token]
    of every layer:  q, k, v = qkv(rms_norm(h));  h += out(v of each query head's group)
                     gate, up = gate_up(rms_norm(h));  h += down(silu(gate) * up)
    token, logprob, log_kept_mass = sample(head(rms_norm(h)), temperature, top_k, top_p, seed, step)

So every product of the model is there at its size, four a layer, with the norms, the head and the draw. What is not:
attention over a context (each position sees itself alone, so that its softmax is 1 and its result is v), rotary
positions, norms of q and k, a KV cache, prefill, tokenisation, scheduling. A call draws T tokens a row, each from the
one before, and nothing of it waits for the host. Weights are random, so that the laws are those of no text.

Legend: B rows · T steps · L layers · D hidden · Q width of the query heads · K width of the key heads · F width of the
feed-forward layer · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

import rlkernel as rlk
from rlkernel import policy
from rlkernel_bench.suites import common
from rlkernel_bench.suites.common import BITS, Draw, some
from rlkernel_bench.work import Inputs, Judgment, Outputs, Problem, Work
from rlkernel_core.quant import QuantTensor, dequantize

Sampler = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]  # logits [B, V], seed, step [B] -> token first
Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # token, step [B] -> token, step + 1, what else is known

LAW: Final = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
HEAD: Final = 3.0  # standard deviation of the logits
_UNIT: Final = {"bfloat16": 2.0**-8, "float32": 2.0**-20}  # of a rounding; products of fp32 may run in TF32 nowhere

# Published shapes: (L, D, Q, K, F, V).
_SMALL: Final = (28, 1024, 2048, 1024, 3072, 151936)  # Qwen3-0.6B
_LARGE: Final = (36, 4096, 4096, 1024, 12288, 151936)  # Qwen3-8B
_PRODUCTS: Final = "L*(D*(Q + 2*K) + Q*D + 3*D*F)"  # weights in the layers


def _work(B: int, T: int, shape: tuple[int, ...], form: str, why: str, dtype: str = "bfloat16") -> Work:
    item = 4 if dtype == "float32" else 2
    sizes = {"B": B, "T": T, **dict(zip("LDQKFV", shape, strict=True))}
    return Work(
        "rollout",
        "sample,capture" if form == dtype else "qmatmul,sample,capture",
        sizes,
        dtype,
        "decode",
        {"chain": "rollout", "weights": form},
        f"T*({_PRODUCTS}*{BITS.get(form, 8 * item)}/8 + {item}*V*D)",
        f"2*B*T*({_PRODUCTS} + V*D)",
        why=why,
        tokens="B*T",
    )


_TINY: Final = (2, 128, 128, 64, 128, 300)

WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        _work(4, 3, _TINY, "float32", "two layers", "float32"),
        _work(4, 3, _TINY, "int4_g64", "two layers", "float32"),
    ),
    "full": (
        _work(64, 32, _SMALL, "bfloat16", "Qwen3-0.6B's shape"),
        _work(64, 32, _SMALL, "int4_g128", "Qwen3-0.6B's shape"),
        _work(64, 16, _LARGE, "bfloat16", "Qwen3-8B's shape"),
        _work(64, 16, _LARGE, "int4_g128", "Qwen3-8B's shape"),
        _work(256, 32, _SMALL, "bfloat16", "RL.cu: 6963 tokens a second with attention, RTX PRO 6000"),
        _work(4, 32, _SMALL, "int4_g64", "Triebwerk: 300 tokens a second with attention, RTX 4060; 83 on Orin"),
    ),
}


def make(work: Work, device: str, seed: int) -> Inputs:
    """Weights, the first tokens, and a seed for every row."""
    L, D, Q, K, F, V = (work.sizes[k] for k in "LDQKFV")
    draw = Draw(device, seed)

    def weight(rows: int, columns: int) -> Any:
        w = draw.normal(rows, columns, std=columns**-0.5, dtype=work.dtype)
        if work.options["weights"] == work.dtype:
            return w
        with rlk.use("reference"):
            return rlk.quantize(w, work.options["weights"])

    shapes = {"qkv": (Q + 2 * K, D), "out": (D, Q), "gate_up": (2 * F, D), "down": (D, F)}
    return {
        "token": draw.ids(V, work.sizes["B"]),
        "seed": torch.arange(work.sizes["B"], device=device) + 1000 * seed,
        "embedding": draw.normal(V, D, dtype=work.dtype),
        "layers": [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(L)],
        "head": draw.normal(V, D, std=HEAD * D**-0.5, dtype=work.dtype),
    }


def product(x: Tensor, w: Tensor | QuantTensor, residual: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """`x w^T`, gated, with a residual added; one kernel where the weight is quantized."""
    if isinstance(w, QuantTensor):
        found: Tensor = rlk.qmatmul(x, w, residual=residual, activation="swiglu" if gated else None)
        return found
    y = x @ w.t()
    if gated:
        gate, up = y.chunk(2, -1)
        y = silu(gate) * up
    return y if residual is None else y + residual


def logits(given: Inputs, token: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """[B, V] of the next token, in the dtype of the weights."""
    D, Q, K = (sizes[k] for k in "DQK")
    h = given["embedding"][token]
    for layer in given["layers"]:
        qkv = product(rms_norm(h, (D,)), layer["qkv"])
        v = qkv[:, Q + K :].view(len(h), 1, K).expand(-1, Q // K, -1).reshape(len(h), Q)
        h = product(v, layer["out"], h)
        h = product(product(rms_norm(h, (D,)), layer["gate_up"], gated=True), layer["down"], h)
    x: Tensor = rms_norm(h, (D,)) @ given["head"].t()
    return x


def step_of(given: Inputs, sizes: Mapping[str, int], sampler: Sampler) -> Step:
    """One step of the chain as a function of what changes from step to step."""

    def step(token: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        drawn, *known = sampler(logits(given, token, sizes), given["seed"], at)
        return drawn, at + 1, *known

    return step


def ours(x: Tensor, seed: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """The draw with what a trainer needs of it."""
    out = rlk.sample(x, seed=seed, step=at, **LAW)  # type: ignore[arg-type]
    return out.token, out.logprob, out.log_kept_mass


def generate(step: Step, given: Inputs, steps: int) -> Outputs:
    """T tokens a row, each drawn after the one before; [T, B]."""
    token, at = given["token"], torch.zeros_like(given["token"])
    rows = []
    for _ in range(steps):
        token, at, *known = step(token, at)
        rows.append([x.clone() for x in (token, *known)])  # of a graph, which overwrites them
    names = ("token", "logprob", "log_kept_mass")
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=False)}


def packed(given: Inputs) -> Inputs:
    """Weights as the chosen backend reads them fastest."""
    return {**given, "layers": [{name: common.packed(w) for name, w in layer.items()} for layer in given["layers"]]}


def graphed(step: Step, given: Inputs) -> Step:
    """The step captured once, replayed from then on."""
    replay: Step = rlk.capture(step, (given["token"], torch.zeros_like(given["token"])), outputs="view")
    return replay


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    held: dict[tuple[str, str, int], Step] = {}

    def call(way: str, given: Inputs) -> Outputs:
        key = way, str(policy.current().policy.default.order), id(given["layers"])
        if key not in held:
            step = step_of(given, work.sizes, ours)
            if way != "eager":
                with rlk.use(sample="cuda") if "cuda" in way else nullcontext():
                    step = graphed(step, given)
            held[key] = step
        return generate(held[key], given, work.sizes["T"])

    ways = ["graph", "eager", *(["graph, cuda's draw"] if _hopper(device) else [])]
    return Problem(
        work,
        partial(make, work, device),
        {way: partial(call, way) for way in ways},
        lambda _: None,
        partial(judge, work),
        prepare=packed,
    )


def _hopper(device: str) -> bool:
    here = policy.installed()
    usable = "cuda" in here and here["cuda"].reason is None
    return usable and device.startswith("cuda") and torch.cuda.get_device_capability(device)[0] == 9


def judge(work: Work, given: Inputs, _want: None, found: Outputs) -> dict[str, Judgment]:
    """Each drawn token against the law, in fp32, of the token before it that was really drawn.

    Layers round their stream to the dtype twice each; four standard deviations of that are allowed in a logit, and
    twice as much between two of them. Who says no log-probability must at least stay in the set that the filters keep.
    """
    before = torch.cat((given["token"][None], found["token"][:-1].long())).reshape(-1)
    rows = some(len(before), 128).to(before.device)
    token = found["token"].reshape(-1)[rows].long()
    x = logits(_whole(given), before[rows], work.sizes)
    with rlk.use("reference"):
        cut = rlk.sample(x, seed=rows, step=0, **LAW).threshold  # type: ignore[arg-type]
    own = x.gather(1, token[:, None])[:, 0]
    allowed = 4 * HEAD * _UNIT[work.dtype] * math.sqrt(2 * work.sizes["L"])
    outside = float((cut - own).clamp(min=0).max())
    judged = {"token": Judgment(outside, outside / (2 * allowed), outside / (2 * allowed))}
    if "logprob" in found:
        said = (found["logprob"] + found["log_kept_mass"]).reshape(-1)[rows]
        error = float((said - torch.log_softmax(x, 1).gather(1, token[:, None])[:, 0]).abs().max())
        judged["logprob"] = Judgment(error, error / (2 * allowed), error / (2 * allowed))
    return judged


class _Layers:
    """The layers in fp32, one at a time: all of them together would be as large as the model twice over."""

    def __init__(self, layers: list[dict[str, Any]]) -> None:
        self._layers = layers

    def __iter__(self) -> Any:
        for layer in self._layers:
            yield {name: _float(w) for name, w in layer.items()}


def _float(w: Any) -> Tensor:
    return dequantize(w, dtype=torch.float32) if isinstance(w, QuantTensor) else w.float()


def _whole(given: Inputs) -> Inputs:
    return {
        "embedding": given["embedding"].float(),
        "layers": _Layers(given["layers"]),
        "head": given["head"].float(),
    }

"""What a candidate is timed on: one call per operator and kind of device, as data, and its arguments from a seed.

The same seed gives the same arguments in every process on one kind of device, so that a worker makes its own and the
trial checks what came out against its own.

Legend: N rows · V vocabulary · D hidden · B sequences · T time · K columns of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Generator, Tensor

from rlkernel_core.spec import OPERATORS
from rlkernel_core.tree import flatten


@dataclass(frozen=True)
class Workload:
    """One call: sizes by name, the dtype of its main tensor, and how many sets of arguments are rotated.

    The sets of a GPU workload together exceed its caches, as inputs of a training step do.
    """

    op: str
    dtype: str
    sets: int
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={n}" for name, n in self.sizes)
        return f"{self.op} {self.dtype} {sizes}"


# operator -> its sizes on a CPU, which does each call in milliseconds, in float32 with 8 sets of arguments; then the
# dtype, the sets and the sizes on a GPU, which are those of training and serving
_SIZES: Final[Mapping[str, tuple[dict[str, int], str, int, dict[str, int]]]] = {
    "logprob": ({"N": 64, "V": 2048}, "bfloat16", 4, {"N": 4096, "V": 128256}),
    "linear_logprob": ({"N": 64, "D": 128, "V": 4096}, "bfloat16", 2, {"N": 4096, "D": 4096, "V": 128256}),
    "sample": ({"N": 32, "V": 2048}, "float32", 8, {"N": 256, "V": 128256}),
    "lm_head_sample": ({"N": 16, "D": 128, "V": 4096}, "bfloat16", 2, {"N": 64, "D": 4096, "V": 128256}),
    "verify": ({"B": 8, "K": 3, "V": 4096}, "float32", 4, {"B": 64, "K": 4, "V": 128256}),
    "policy_loss": ({"B": 32, "T": 2048}, "float32", 8, {"B": 512, "T": 8192}),
    "linear_policy_loss": (
        {"B": 4, "T": 16, "D": 128, "V": 4096}, "bfloat16", 2, {"B": 8, "T": 512, "D": 4096, "V": 128256},
    ),
    "quantize": ({"N": 512, "K": 1024}, "bfloat16", 4, {"N": 28672, "K": 4096}),
    "fake_quantize": ({"N": 512, "K": 1024}, "bfloat16", 4, {"N": 28672, "K": 4096}),
    "dequantize": ({"N": 512, "K": 1024}, "bfloat16", 8, {"N": 28672, "K": 4096}),
    "prepack": ({"N": 512, "K": 1024}, "bfloat16", 8, {"N": 28672, "K": 4096}),
    "qmatmul": ({"N": 16, "D": 512, "K": 1024}, "bfloat16", 8, {"N": 16, "D": 28672, "K": 4096}),
    "advantage": ({"B": 8192}, "float32", 8, {"B": 1 << 22}),
    "affine_suffix_scan": ({"B": 32, "T": 2048}, "float32", 8, {"B": 4096, "T": 8192}),
    "whiten": ({"B": 32, "T": 2048}, "float32", 8, {"B": 4096, "T": 8192}),
    "group_filter": ({"B": 8192}, "float32", 8, {"B": 1 << 22}),
    "shape_rewards": ({"B": 8192}, "float32", 8, {"B": 1 << 22}),
    "linear": ({"M": 8, "K": 512, "N": 256}, "bfloat16", 4, {"M": 1024, "K": 4096, "N": 6144}),
    "grouped_linear": (
        {"T": 32, "E": 4, "K": 256, "N": 128}, "bfloat16", 4, {"T": 16384, "E": 32, "K": 2048, "N": 1536},
    ),
    "route": ({"T": 512, "E": 64}, "float32", 8, {"T": 65536, "E": 128}),
    "divergence": ({"N": 64, "V": 2048}, "bfloat16", 4, {"N": 4096, "V": 128256}),
    "linear_divergence": (
        {"N": 64, "D": 128, "V": 4096}, "bfloat16", 2, {"N": 4096, "D": 4096, "V": 128256},
    ),
    "rms_norm": ({"N": 64, "D": 1024}, "bfloat16", 8, {"N": 8192, "D": 4096}),
    "rope": ({"N": 64, "D": 128}, "bfloat16", 8, {"N": 8192, "D": 128}),
    "attention": ({"B": 4, "T": 64, "D": 64}, "bfloat16", 8, {"B": 8, "T": 1024, "D": 128}),
    "glu": ({"N": 64, "D": 1024}, "bfloat16", 8, {"N": 8192, "D": 14336}),
}  # fmt: skip
ON_CPU: Final = {op: Workload(op, "float32", 8, tuple(cpu.items())) for op, (cpu, *_) in _SIZES.items()}
ON_GPU: Final = {op: Workload(op, dtype, sets, tuple(gpu.items())) for op, (_, dtype, sets, gpu) in _SIZES.items()}
GROUP: Final = 8  # members of a group
POSITIONS: Final = 4096  # of a table of angles
MAY_ALIAS: Final = frozenset({"quantize", "prepack"})  # operators whose result may be memory of an argument


def workload(op: str, device: str) -> Workload:
    """The workload of an operator on a kind of device."""
    return (ON_CPU if device.partition(":")[0] == "cpu" else ON_GPU)[op]


def draw(work: Workload, seed: int, device: str) -> dict[str, Any]:
    """Arguments by name."""
    g = torch.Generator(device).manual_seed(seed)
    return _DRAWN[work.op](dict(work.sizes), _Draw(g, getattr(torch, work.dtype), device))


def small(op: str, dtype: str) -> Workload:
    """A call that takes no time, for checks of conduct."""
    shrunk = {"N": 24, "M": 24, "V": 320, "D": 64, "B": 16, "T": 48, "K": 128, "E": 8}
    sizes = tuple((name, 3 if (op, name) == ("verify", "K") else shrunk[name]) for name, _ in ON_CPU[op].sizes)
    return Workload(op, dtype, 2, sizes)


def needs(op: str) -> frozenset[str]:
    """Features that the workload's call needs: what a candidate claims without saying so."""
    spec = OPERATORS[op]
    return spec.needs(spec.call(**draw(small(op, "float32"), 0, "cpu"))) & spec.feature_names


def defaults(op: str) -> dict[str, Any]:
    """Optional arguments of an operator with their defaults."""
    return {n: p.default for n, p in OPERATORS[op].parameters.items() if p.default is not p.empty}


def leaves(value: Any) -> list[Tensor]:
    """The tensors of nested arguments or results, in order."""
    return [x for x in flatten(value)[0] if isinstance(x, Tensor)]


def named_leaves(value: Any) -> dict[str, Any]:
    """Leaves by path, tensors or not."""
    found, structure = flatten(value)
    return dict(zip(structure.names(), found, strict=True))


def nbytes(value: Any) -> int:
    """Bytes of all tensors of a value."""
    return sum(x.numel() * x.element_size() for x in leaves(value))


# Operators whose work is a product of matrices: the sizes that its operations are twice the product of.
_PRODUCTS: Final = {
    "linear_logprob": ("N", "D", "V"),
    "linear_divergence": ("N", "D", "V"),
    "lm_head_sample": ("N", "D", "V"),
    "linear_policy_loss": ("B", "T", "D", "V"),
    "qmatmul": ("N", "D", "K"),
    "linear": ("M", "K", "N"),
    "grouped_linear": ("T", "K", "N"),
}


def flops(work: Workload) -> int:
    """Operations of a call's products of matrices; 0 where it has none."""
    sizes = dict(work.sizes)
    return 2 * math.prod(sizes[name] for name in _PRODUCTS[work.op]) if work.op in _PRODUCTS else 0


@dataclass(frozen=True)
class _Draw:
    """Tensors from one generator."""

    generator: Generator
    dtype: torch.dtype
    device: str

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype or self.dtype)
        return x if scale == 1.0 else x.mul_(scale)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def weight(self, rows: int, columns: int) -> Any:
        from rlkernel_core.quant import quantize

        return quantize(self.normal(rows, columns), "int4_g32")


def _draws(d: _Draw, rows: int) -> dict[str, Any]:
    return {"seed": d.below(1 << 31, rows), "step": 1}


def _loss(n: Mapping[str, int], d: _Draw, *, logprob: bool) -> dict[str, Any]:
    old = -1 - d.normal(n["B"], n["T"], dtype=torch.float32).abs_()
    given = {"old_logprob": old, "advantages": d.normal(n["B"], n["T"], dtype=torch.float32), "kind": "ppo"}
    new = old + d.normal(n["B"], n["T"], scale=0.1, dtype=torch.float32)
    return {"logprob": new.clamp_(max=-1e-3), **given} if logprob else given


_DRAWN: Final[Mapping[str, Callable[[Mapping[str, int], _Draw], dict[str, Any]]]] = {
    "logprob": lambda n, d: {"logits": d.normal(n["N"], n["V"], scale=2.0), "ids": d.below(n["V"], n["N"])},
    "linear_logprob": lambda n, d: {
        "hidden": d.normal(n["N"], n["D"]),
        "weight": d.normal(n["V"], n["D"], scale=0.05),
        "ids": d.below(n["V"], n["N"]),
    },
    "sample": lambda n, d: {"logits": d.normal(n["N"], n["V"], scale=2.0), **_draws(d, n["N"])},
    "lm_head_sample": lambda n, d: {
        "hidden": d.normal(n["N"], n["D"]),
        "weight": d.normal(n["V"], n["D"], scale=0.05),
        **_draws(d, n["N"]),
    },
    "verify": lambda n, d: {
        "target_logits": d.normal(n["B"] * (n["K"] + 1), n["V"], scale=2.0),
        "draft_ids": d.below(n["V"], n["B"] * n["K"]),
        "cu_draft": torch.arange(0, n["B"] * n["K"] + 1, n["K"], device=d.device),
        **_draws(d, n["B"]),
    },
    "policy_loss": lambda n, d: _loss(n, d, logprob=True),
    "linear_policy_loss": lambda n, d: {
        "hidden": d.normal(n["B"], n["T"], n["D"]),
        "weight": d.normal(n["V"], n["D"], scale=0.05),
        "ids": d.below(n["V"], n["B"], n["T"]),
        **_loss(n, d, logprob=False),
    },
    "quantize": lambda n, d: {"weight": d.normal(n["N"], n["K"]), "format": "int4_g32"},
    "fake_quantize": lambda n, d: {"weight": d.normal(n["N"], n["K"]), "format": "int4_g32"},
    "dequantize": lambda n, d: {"w": d.weight(n["N"], n["K"])},
    "prepack": lambda n, d: {"w": d.weight(n["N"], n["K"])},
    "qmatmul": lambda n, d: {"x": d.normal(n["N"], n["K"]), "w": d.weight(n["D"], n["K"])},
    "advantage": lambda n, d: {"rewards": d.normal(n["B"]), "kind": "grpo", "group": GROUP},
    "affine_suffix_scan": lambda n, d: {"b": d.normal(n["B"], n["T"]), "a": 0.95},
    "whiten": lambda n, d: {"x": d.normal(n["B"], n["T"])},
    "group_filter": lambda n, d: {"rewards": d.below(2, n["B"]).to(d.dtype), "group": GROUP},
    "shape_rewards": lambda n, d: {"rewards": d.normal(n["B"])},
    "linear": lambda n, d: {"x": d.normal(n["M"], n["K"]), "weight": d.normal(n["N"], n["K"])},
    "grouped_linear": lambda n, d: {
        "x": d.normal(n["T"], n["K"]),
        "weight": d.normal(n["E"], n["N"], n["K"]),
        "ends": d.below(n["T"] + 1, n["E"]).sort().values.int(),
    },
    "route": lambda n, d: {"logits": d.normal(n["T"], n["E"]), "top_k": 8},
    "divergence": lambda n, d: {n_: d.normal(n["N"], n["V"]) for n_ in ("logits", "teacher")},
    "linear_divergence": lambda n, d: {
        "hidden": d.normal(n["N"], n["D"]),
        "weight": d.normal(n["V"], n["D"]) / n["D"] ** 0.5,
        "teacher": d.normal(n["N"], n["D"]),
        "teacher_weight": d.normal(n["V"], n["D"]) / n["D"] ** 0.5,
    },
    "rms_norm": lambda n, d: {"x": d.normal(n["N"], n["D"]), "weight": d.normal(n["D"]), "eps": 1e-6},
    "rope": lambda n, d: {
        "q": d.normal(n["N"], 32, n["D"]),
        "k": d.normal(n["N"], 8, n["D"]),
        "positions": d.below(POSITIONS, n["N"]),
        "table": d.normal(POSITIONS, n["D"], dtype=torch.float32),
        "q_weight": d.normal(n["D"]),
        "k_weight": d.normal(n["D"]),
        "eps": 1e-6,
    },
    "attention": lambda n, d: {
        "q": d.normal(n["B"] * n["T"], 8, n["D"]),
        "k": d.normal(n["B"] * n["T"], 2, n["D"]),
        "v": d.normal(n["B"] * n["T"], 2, n["D"]),
        "cu_q": torch.arange(0, n["B"] * n["T"] + 1, n["T"], dtype=torch.int32, device=d.device),
    },
    "glu": lambda n, d: {"x": d.normal(n["N"], 2 * n["D"]), "activation": "silu"},
}

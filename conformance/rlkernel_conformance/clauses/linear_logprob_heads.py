"""Small heads for the attacks on linear_logprob@1 and linear_policy_loss@1, and their float64 definition.

Legend: N rows · D hidden · V vocabulary · K listed ids of a row · r rank of a low-rank addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.compare import plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.spec.qmatmul import LoRA

TEMPERATURES: Final = (1.0, 0.5, 0.7, 1.7)
SIZES: Final = (1, 2, 3, 7, 33, 127, 1000, 1031)
OPERANDS: Final = ("hidden", "weight", "bias")
MATRICES: Final = ("lora.A", "lora.B")


@dataclass(frozen=True)
class Head:
    """Hidden states [N, D] and a head [V, D] whose logits have a standard deviation of about 3."""

    N: int
    D: int
    V: int
    seed: int
    dtype: str = "float32"
    temperature: float = 1.0
    bias: bool = False
    softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0
    rank: int = 0  # of a low-rank addition to the head; 0: none

    def given(self, subject: Subject, **change: Any) -> dict[str, Any]:
        """Arguments of the operator."""
        hidden = draw.normal((self.N, self.D), self.seed, subject.device, self.dtype)
        weight = 3 / self.D**0.5 * draw.normal((self.V, self.D), self.seed + 7, subject.device)
        out: dict[str, Any] = {
            "hidden": hidden,
            "weight": weight.to(hidden.dtype),
            "ids": draw.integers((self.N,), self.V, self.seed, subject.device),
            "temperature": self.temperature,
            "logit_scale": self.logit_scale,
        }
        if self.bias:
            out["bias"] = draw.normal((self.V,), self.seed + 8, subject.device, self.dtype)
        if self.softcap:
            out["softcap"] = self.softcap
        if self.rank:
            out["lora"] = self.lora(subject)
        return {**out, **change}

    def lora(self, subject: Subject, dtype: str = "", scale: float = 0.5) -> LoRA:
        """An addition whose logits have a standard deviation of about 2 scale; dtype: "" for that of hidden."""
        A = draw.normal((self.rank, self.D), self.seed + 9, subject.device)
        B = 2 * draw.normal((self.V, self.rank), self.seed + 10, subject.device)
        kind = getattr(torch, dtype or self.dtype)
        return LoRA((A / self.D**0.5).to(kind), (B / self.rank**0.5).to(kind), scale)


def lists(N: int, V: int, K: int, seed: int, device: str) -> Tensor:
    """[N, K] ids, the last of a row its first once more."""
    ids = draw.integers((N, K), V, seed, device)
    ids[:, -1] = ids[:, 0]
    return ids


def of_shard(given: Mapping[str, Any], part: slice) -> dict[str, Any]:
    """The call of a rank that has these columns of the vocabulary."""
    mine = {k: x[part] if k in {"weight", "bias"} else x for k, x in given.items()}
    lora = given.get("lora")
    return mine if lora is None else {**mine, "lora": LoRA(lora.A, lora.B[part], lora.scale)}


def matrices(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Scale times A and B of the low-rank addition in float64: [r, D] and [V, r]."""
    lora = given["lora"]
    return lora.scale * plain(lora.A, "lora.A").astype(np.float64), plain(lora.B, "lora.B").astype(np.float64)


def logits(given: Mapping[str, Any]) -> Any:
    """(hidden @ weight.T + the low-rank addition + bias) * logit_scale in float64, [N, V]."""
    hidden = plain(given["hidden"], "hidden")
    x = hidden @ plain(given["weight"], "weight").T
    if given.get("lora") is not None:
        A, B = matrices(given)
        x = x + (hidden @ A.T) @ B.T
    if given.get("bias") is not None:
        x = x + plain(given["bias"], "bias")
    return x * given["logit_scale"]


def definition(given: Mapping[str, Any], g: Mapping[str, Any] | None = None, kept: Any = None) -> oracle.Row:
    """What the definition gives for a call."""
    T = given["temperature"]
    T = plain(T, "temperature") if isinstance(T, Tensor) else T
    ids = plain(given["ids"], "ids")
    return oracle.logprob(logits(given), ids, temperature=T, softcap=given.get("softcap"), kept=kept, g=g)


def operand_gradients(given: Mapping[str, Any], dz: Any) -> dict[str, Any]:
    """Gradients of the operands from that of the scaled logits, [N, V]."""
    dz, hidden = dz * given["logit_scale"], plain(given["hidden"], "hidden")
    out = {"hidden": dz @ plain(given["weight"], "weight"), "weight": dz.T @ hidden}
    if given.get("bias") is not None:
        out["bias"] = dz.sum(0)
    if given.get("lora") is not None:
        A, B = matrices(given)
        out["hidden"] = out["hidden"] + (dz @ B) @ A
        out |= {"lora.A": given["lora"].scale * (dz @ B).T @ hidden, "lora.B": dz.T @ (hidden @ A.T)}
    return out


def sizes(given: Mapping[str, Any], dz: Any, least: float) -> dict[str, float]:
    """Norms of the terms that the operands' gradients add up, and at least `least`.

    A gradient whose terms cancel errs by the rounding of its terms, not of what is left of them.
    """
    squared = {**given, "logit_scale": given["logit_scale"] ** 2}
    squared |= {n: given[n].double().square() for n in ("hidden", "weight")}
    if given.get("lora") is not None:
        lora = given["lora"]
        squared["lora"] = LoRA(lora.A.double().square(), lora.B.double().square(), lora.scale**2)
    return {n: max(least, float(x.sum()) ** 0.5) for n, x in operand_gradients(squared, np.square(dz)).items()}


def with_leaves(given: Mapping[str, Any], frozen: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The call with operands that require gradients, and these operands; those of LoRA are named lora.A and lora.B."""
    operands, lora = {n: given[n] for n in OPERANDS if given.get(n) is not None}, given.get("lora")
    if lora is not None:
        operands |= {"lora.A": lora.A, "lora.B": lora.B}
    leaves = {n: x.clone().requires_grad_() for n, x in operands.items() if n not in frozen}
    call = {**given, **{n: x for n, x in leaves.items() if n in OPERANDS}}
    if lora is not None:
        call["lora"] = LoRA(leaves.get("lora.A", lora.A), leaves.get("lora.B", lora.B), lora.scale)
    return call, leaves


def check_gradients(
    subject: Subject, found: Mapping[str, Any], want: Mapping[str, Any], dtype: str, size: float | Mapping[str, float]
) -> None:
    """Relative Frobenius errors within the tolerance; `size`: the norm (of each name) below which it is rounding."""
    for name, expected in want.items():
        if name not in found:
            continue
        row = "grad_hidden" if name == "hidden" else "grad_weight"
        atol, rtol = subject.tolerance("grad" if subject.op == "linear_logprob" else row, dtype)
        have = plain(found[name], f"d_{name}").astype(np.float64)
        require(have.shape == expected.shape, f"d_{name} has shape {have.shape}, not {expected.shape}")
        error = float(np.linalg.norm(have - expected))
        # The tolerance is that of many roundings together; where few elements hold the norm, they may err more. Two
        # roundings to bf16 of normal values, 1 to 50 of them, came to 0.92 of it at most, in millions of draws a size.
        squares = np.square(expected)
        few = 1 + 3 * float(np.linalg.norm(squares) / squares.sum()) if squares.any() else 4.0
        least = size if isinstance(size, float) else size[name]
        bound = atol + rtol * few * max(float(np.linalg.norm(expected)), least)
        ratio = error / bound if bound else float(error > 0)
        subject.measures[f"d_{name}"] = max(ratio, subject.measures.get(f"d_{name}", 0.0))
        require(ratio <= 1, f"d_{name} is off by {error:.3g}, {ratio:.3g} times the tolerance")


def heads(subject: Subject, *, plainly: bool = False, **fixed: Any) -> st.SearchStrategy[Head]:
    """Heads with every option that is claimed; plainly: with temperature alone, in the first claimed dtype."""

    def some(feature: str, values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
        return st.sampled_from(values if feature in subject.claims and not plainly else values[:1])

    fields: dict[str, Any] = {
        "N": st.integers(1, 5),
        "D": st.integers(1, 16),
        "V": st.sampled_from(SIZES),
        "seed": st.integers(0, 2**20),
        "dtype": st.just(subject.dtypes[0]) if plainly else st.sampled_from(subject.dtypes),
        "temperature": st.sampled_from(TEMPERATURES),
        "bias": some("bias", (False, True)),
        "softcap": some("softcap", (0.0, 5.0)),
        "logit_scale": some("logit_scale", (1.0, 0.5, 2.0)),
        "rank": some("lora", (0, 0, 3)),
    }
    return st.builds(Head, **{**fields, **{k: st.just(v) for k, v in fixed.items()}})


def small(case: Head, most: int = 127) -> Head:
    """The same with a vocabulary that is cheap."""
    return replace(case, V=min(case.V, most))


def gradients(out: Mapping[str, Tensor], g: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the leaves for upstream gradients by name of the result."""
    names = [n for n in g if n in out]
    found = torch.autograd.grad(
        [out[n] for n in names], list(leaves.values()), [g[n].to(out[n].dtype) for n in names], allow_unused=True
    )
    for name, x in zip(leaves, found, strict=True):
        require(x is not None, f"{name} has no gradient")
    return dict(zip(leaves, found, strict=True))  # type: ignore[arg-type]

"""Calls of qmatmul for attacks: cases, tensors, and judging a result against float64.

Legend: M tokens · K inputs · N outputs · R = N, or N / 2 for a pair · r LoRA rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.compare import require, within
from rlkernel_conformance.quantized_weights import MULTIPLIED, SPECS, WEIGHTS, Weight, claims, kinds
from rlkernel_conformance.subject import Subject, arranged
from rlkernel_core.definitions import qmatmul as oracle
from rlkernel_core.manifest import Impl
from rlkernel_core.quant import QuantSpec, QuantTensor, quantize
from rlkernel_core.spec.qmatmul import ACTIVATIONS, PAIRS, LoRA

INPUTS: Final = ("normal", "positive", "spread", "sparse")


@dataclass(frozen=True)
class Product:
    """x [M, K] and a quantized weight [N, K]; LoRA, bias and residual as the attack wants them."""

    kind: str  # of quantized.SPECS
    M: int
    N: int
    K: int
    seed: int
    x: str = "normal"
    weight: str = "normal"
    dtype: str = "float32"

    @property
    def spec(self) -> QuantSpec:
        """The format."""
        return SPECS[self.kind]

    def full(self, subject: Subject) -> Tensor:
        """The weight before it is quantized."""
        return Weight(self.kind, self.N, self.K, self.seed, self.weight).full(subject)

    def w(self, subject: Subject) -> QuantTensor:
        """The quantized weight."""
        return Weight(self.kind, self.N, self.K, self.seed, self.weight).stored(subject)

    def input(self, subject: Subject) -> Tensor:
        """X."""
        x = draw.normal((self.M, self.K), self.seed, subject.device)
        if self.x == "positive":
            x = x.abs() + 0.1
        elif self.x == "spread":
            x = x * torch.exp2(torch.arange(self.K, device=x.device).remainder(9) - 4.0)
        elif self.x == "sparse":
            x = torch.where(x.abs() < 1, 0, x)
        return x.to(getattr(torch, self.dtype))

    def normal(self, subject: Subject, *shape: int, salt: int) -> Tensor:
        """Another argument of the dtype of x."""
        return draw.normal(shape, self.seed + 7 * salt, subject.device, self.dtype)

    def lora(self, subject: Subject, r: int = 4, scale: float = 0.5) -> LoRA:
        """A LoRA of some rank."""
        a, b = self.normal(subject, r, self.K, salt=1), self.normal(subject, self.N, r, salt=2)
        return LoRA(a, b, scale)

    def bias(self, subject: Subject) -> Tensor:
        """A bias."""
        return 3 * self.normal(subject, self.N, salt=3)

    def residual(self, subject: Subject, activation: str | None = None) -> Tensor:
        """A residual for an activation."""
        return 3 * self.normal(subject, self.M, self.N // (2 if activation in PAIRS else 1), salt=4)


# Rows and columns of a weight that kernels ask for multiples of, and the tokens from which they take it.
GRIDS: Final = ((1, 1, 1), (16, 256, 1), (128, 256, 1), (128, 256, 65), (128, 512, 1))


def grid(subject: Subject, spec: QuantSpec, dtype: str) -> tuple[int, int, int] | None:
    """The finest of GRIDS that the subject takes weights of a format on, for an x of a dtype; None: none of them."""
    return _grid(subject, subject.impls, spec, dtype)


@lru_cache(512)
def _grid(subject: Subject, impls: tuple[Impl, ...], spec: QuantSpec, dtype: str) -> tuple[int, int, int] | None:
    for rows, columns, tokens in GRIDS if any(i.check for i in impls) else GRIDS[:1]:
        w = quantize(torch.ones(rows, columns, device=subject.device), spec)
        x = torch.ones(tokens, columns, dtype=getattr(torch, dtype), device=subject.device)
        if subject.admits(x, w) or subject.admits(x, arranged(w)):
            return rows, columns, tokens
    return None


def fitted(subject: Subject, case: Product) -> Product:
    """The case on a grid, and in a dtype, that the subject takes."""
    for dtype in (case.dtype, *subject.dtypes):
        found = grid(subject, case.spec, dtype)
        if found is not None:
            rows, columns, tokens = found
            wide, deep = -(-case.N // rows) * rows, -(-case.K // columns) * columns
            return replace(case, dtype=dtype, M=case.M + tokens - 1, N=wide, K=deep)
    return case


def cases(
    subject: Subject, *, rows: int = 6, outputs: int = 40, inputs: int = 300, x_as_it_is: bool = False
) -> st.SearchStrategy[Product]:
    """Products of every claimed format and dtype.

    Args:
        subject: whose claims shape the cases.
        rows: most tokens.
        outputs: most outputs; even.
        inputs: most inputs.
        x_as_it_is: only formats that do not quantize x.
    """
    return st.builds(
        Product,
        kind=kinds(subject, MULTIPLIED, lambda s: not x_as_it_is or s.act == "none"),
        M=st.integers(1, rows),
        N=st.integers(1, outputs // 2).map(lambda n: 2 * n),
        K=st.integers(1, inputs),
        seed=st.integers(0, 2**20),
        x=st.sampled_from(INPUTS),
        weight=st.sampled_from([name for name in WEIGHTS if name != "small"]),
        dtype=st.sampled_from(subject.dtypes),
    ).map(partial(fitted, subject))


def small(subject: Subject, **limits: Any) -> st.SearchStrategy[Product]:
    """Products of plain values: for laws and epilogues."""
    limits = {"rows": 4, "outputs": 20, "inputs": 100, **limits}
    return cases(subject, **limits).map(lambda c: replace(c, x="normal", weight="graded"))


# One of every format, for the accuracy clauses to try before they draw.
EVERY: Final = tuple(Product(kind, 3, 20, 300, 5, weight="graded") for kind in SPECS)

FEW: Final = tuple(c for c in EVERY if c.kind in {"int4_g32", "int4_g128_asym", "nf4", "fp8_channel[element=e4m3fnuz]"})


def tried(subject: Subject, case: Product, *, x_as_it_is: bool = False) -> Product:
    """A case given as an example, in a dtype and on a grid that the subject takes; none where it claims none such."""
    if not claims(subject, case.spec, MULTIPLIED) or (x_as_it_is and case.spec.act != "none"):
        raise UnsatisfiedAssumption(f"{subject.backend} does not claim such a product of {case.kind}")
    found = case if case.dtype in subject.dtypes else fitted(subject, case)
    if found.dtype not in subject.dtypes:
        raise UnsatisfiedAssumption(f"{subject.backend}'s check admits no product of {case.kind}")
    return found


def pinned(subject: Subject) -> dict[str, str]:
    """The tightest bound that a call of the subject can be held to."""
    return {"weight_rounding": "none"} if "weight_rounding:none" in subject.claims else {}


def expected(case: Product, x: Tensor, w: QuantTensor, **given: Any) -> oracle.Exact:
    """The call in float64."""
    lora, rounding = given.pop("lora", None), given.pop("weight_rounding", "any")
    matrices = None if lora is None else (lora.A.detach().cpu(), lora.B.detach().cpu(), lora.scale)
    tensors = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in given.items()}
    return oracle.exact(x.detach().cpu(), w, rounding=rounding, lora=matrices, **tensors)


def judged(subject: Subject, case: Product, x: Tensor, w: QuantTensor, **given: Any) -> Tensor:
    """The subject's answer, held to the first level of tolerance."""
    want = expected(case, x, w, **given)
    y: Tensor = subject(x, w, **given)
    require(y.dtype == x.dtype, f"y is {y.dtype}, x is {x.dtype}")
    within(subject, "y", y, want.y.numpy(), want.bound().numpy())
    return y


def activations(subject: Subject, *, pairs: bool) -> list[str]:
    """Claimed activations."""
    return [name for name in ACTIVATIONS if (name in PAIRS) == pairs and f"activation:{name}" in subject.claims]

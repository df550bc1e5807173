"""What the attacks on lm_head_sample@1 draw: hidden states and heads, and the definition's answer to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.sampling_batches import Batch, random_batch, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import Drawn, sample_row
from rlkernel_core.spec.sampling import SampleResult

SCALE: Final = 0.25
# Tiles of a streamed head are a power of two of columns: sizes at their edges and of several of them. The first is what
# a failing case shrinks to.
SIZES: Final = (33, 2100, 1, 7, 1024, 1025)


@dataclass
class Operands:
    """A call of lm_head_sample, and what its logits may be off by."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    batch: Batch  # logits in the type of the results
    error: np.ndarray[Any, Any]  # [N, V] what a logit may be off by
    head: dict[str, Any]

    def arguments(self, subject: Subject, **more: Any) -> dict[str, Any]:
        """As lm_head_sample takes them."""
        given = self.batch.arguments(subject.claims)
        if "bias" in given:
            given["logit_bias"] = given.pop("bias")
        asked = [n for n in ("top_k", "top_p", "min_p") if n in given and self.off(n)]
        given = {n: v for n, v in given.items() if n not in asked}
        return to(subject.device, {"hidden": self.hidden, "weight": self.weight} | self.head | given | more)

    def off(self, name: str) -> bool:
        """No row filters by this, so the call has no such argument and may stream."""
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
        return all(getattr(row, name) == neutral for row in self.batch.rows)

    def definitions(self) -> list[tuple[int, Drawn]]:
        """Rows whose kept set and token no allowed error of the logits changes, by the definition."""
        numbers = np.float64 if self.batch.logits.dtype == torch.float64 else np.float32
        found = []
        with np.errstate(all="ignore"):
            for i, row in enumerate(self.batch.rows):
                law = sample_row(self.batch.logits[i].numpy(), row, numbers)
                T = row.temperature or 1.0
                slack = 2 * float(np.nan_to_num(self.error[i]).max()) / T
                gap = law.gap
                if law.x is not None and row.temperature == 0:
                    best = np.sort(law.x)[::-1]
                    gap = (best[0] - best[1]) if best.size > 1 else math.inf
                if law.log_p is None or (gap > slack + 4e-6 and self._set_is_sure(law, row, slack)):
                    found.append((i, law))
        return found

    def _set_is_sure(self, law: Drawn, row: Any, slack: float) -> bool:
        last = len(law.kept)
        x = np.sort(law.x[law.x > -np.inf])[::-1]
        cut = last < x.size and (row.top_k > 0 or row.tie == "keep_all")
        return law.sure(2e-6 + slack, 8e-6 + slack) and (
            not cut or x[last - 1] - x[last] > slack * (row.temperature or 1)
        )


@dataclass(frozen=True)
class Heads:
    """Hidden states and a head, from a seed."""

    seed: int
    V: int = 2100
    D: int = 8
    N: int = 6
    dtype: str = "float32"
    filters: bool = False
    edits: bool = False

    def ways(self, subject: Subject, *, plainly: bool) -> tuple[str, str, int]:
        """Order of filters, ties and stream, of those that are claimed; ties are kept where a head is plain."""
        orders = ["topk_topp", *(o for o in ("topp_topk", "joint") if f"filter_order:{o}" in subject.claims)]
        ties = ["lowest_id", *(["keep_all"] if plainly and "tie:keep_all" in subject.claims else [])]
        streams = [0, *([1, 2**32 - 1] if "stream" in subject.claims else [])]
        filtered = self.seed if self.filters else 0
        return orders[filtered % len(orders)], ties[filtered // 3 % len(ties)], streams[self.seed % len(streams)]

    def operands(self, subject: Subject, **head: Any) -> Operands:
        """The call, with `head` among its arguments: bias [V], lora, logit_scale, softcap, weight [V, D]."""
        g = torch.Generator().manual_seed(self.seed)
        kind = getattr(torch, self.dtype)
        hidden = (torch.randn(self.N, self.D, generator=g, dtype=torch.float64) * 1.5).to(kind)
        weight = torch.randn(self.V, self.D, generator=g, dtype=torch.float64).to(kind)
        weight = head.get("weight", weight)
        order, tie, stream = self.ways(subject, plainly=not head)
        if tie == "keep_all":  # products and sums that no order of summation rounds, many of them equal
            hidden, weight = (torch.round(4 * t) / 4 for t in (hidden, weight))
        bias, lora = head.get("bias"), head.get("lora")
        x = hidden.double() @ weight.double().T
        size = hidden.double().abs() @ weight.double().abs().T
        if lora is not None:
            x = x + lora.scale * (hidden.double() @ lora.A.double().T) @ lora.B.double().T
            of_factor = hidden.double().abs() @ lora.A.double().abs().T
            size = size + abs(lora.scale) * of_factor @ lora.B.double().abs().T
        if bias is not None:
            x, size = x + bias.double(), size + bias.double().abs().nan_to_num(posinf=0.0)
        x, size = x * head.get("logit_scale", 1.0), size * head.get("logit_scale", 1.0)
        if head.get("softcap") is not None:
            x = torch.where(x == -torch.inf, x, head["softcap"] * torch.tanh(x / head["softcap"]))
        work = torch.float64 if kind == torch.float64 else torch.float32
        made = random_batch(self.seed, self.V, self.N, work, ("normal",), self.edits)
        rows = [replace(row, temperature=(1.0, 0.7, 1.3, 0.0)[i % 4]) for i, row in enumerate(made.rows)]
        rows = [replace(row, filter_order=order, tie=tie, stream=stream) for row in rows]
        if not self.filters:
            rows = [replace(row, top_k=0, top_p=1.0, min_p=0.0) for row in rows]
        if self.edits:
            rows = [replace(row, bias={}) for row in rows]
        atol, _ = subject.tolerance("logits", self.dtype)
        error = (size * atol).numpy() if self.dtype != "float64" else (size * 1e-13).numpy()
        batch = Batch(x.to(work), rows).fit(subject.claims)
        return Operands(hidden, weight, batch, error, head)


def heads(subject: Subject, **fixed: Any) -> st.SearchStrategy[Heads]:
    """Every claimed dtype, with and without filters."""
    drawn: dict[str, Any] = {
        "seed": st.integers(0, 255),
        "V": st.sampled_from(SIZES),
        "dtype": st.sampled_from(subject.dtypes),
        "filters": st.booleans(),
    }
    return st.builds(Heads, **drawn | {n: st.just(v) for n, v in fixed.items()})


def as_defined(subject: Subject, made: Operands, **more: Any) -> SampleResult:
    """Tokens, kept sets and log-probabilities of the rows that no allowed error of the logits changes."""
    out: SampleResult = subject(**made.arguments(subject, **more))
    token, count = plain(out.token, "token"), plain(out.kept_count, "kept_count")
    for i, law in made.definitions():
        if law.log_p is None:
            require(int(token[i]) == 0 and int(count[i]) == 0, f"row {i} has no law and draws {token[i]}")
            continue
        if subject.exact_noise:
            require(int(token[i]) == law.token, f"row {i} draws {token[i]}, expected {law.token}")
        require(int(token[i]) in law.kept, f"row {i} draws {token[i]}, kept are {law.kept.tolist()}")
        require(int(count[i]) == len(law.kept), f"row {i} keeps {count[i]} tokens, expected {len(law.kept)}")
        T = made.batch.rows[i].temperature or 1.0
        off = 1e5 * 2 * float(np.nan_to_num(made.error[i]).max()) / T  # in units of close's 2e-6, generously
        dtype = "float64" if made.batch.logits.dtype == torch.float64 else "float32"
        scale = max(1.0, off) if dtype == "float32" else 100.0
        close(subject, "logprob", out.logprob[i : i + 1], [law.log_p[int(token[i])]], dtype, scale=scale)
        close(subject, "log_kept_mass", out.log_kept_mass[i : i + 1], [law.log_kept_mass], dtype, scale=scale)
    return out


class Largest(TorchDispatchMode):
    """The size of the largest tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it made."""
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in made)])
        return out

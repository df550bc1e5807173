"""Attacks on logits of 8-bit floats with a scale, of logprob@1.

Legend: N rows · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.spec.logprob import FLOAT8_LOGITS

CODES = 256


@dataclass(frozen=True)
class CodedRows:
    """Logits [N, V] of one of the 8-bit types.

    The first row has every finite code that fits. With a scale per row the second has subnormal codes alone.
    """

    N: int
    V: int
    seed: int
    kind: str
    per_row: bool

    def logits(self, device: Any) -> Tensor:
        """Logits, on a device."""
        kind = getattr(torch, self.kind)
        x = (16 * draw.normal((self.N, self.V), self.seed, "cpu")).to(kind)
        every = torch.arange(CODES, dtype=torch.uint8)
        every = every[every.view(kind).float().isfinite()][: self.V]
        x.view(torch.uint8)[0, : len(every)] = every
        if self.per_row and self.N > 1:
            code = draw.integers((self.V,), 2 * self.subnormal, self.seed, "cpu")
            x.view(torch.uint8)[1] = (code + (code >= self.subnormal) * (CODES // 2 - self.subnormal)).to(torch.uint8)
        return x.to(device)

    @property
    def subnormal(self) -> int:
        """Codes of one sign without an exponent, 0 included."""
        return 8 if self.kind == "float8_e4m3fn" else 4

    def scale(self, device: Any) -> Any:
        """A number that brings the largest codes to some tens, or one per row that does so with its codes."""
        bounds = torch.finfo(getattr(torch, self.kind))
        if not self.per_row:
            return 40.0 / bounds.max
        return torch.tensor([40.0 / bounds.max, 20.0 / bounds.tiny, 0.3, 0.7][: self.N], device=device)


def cases(subject: Subject) -> st.SearchStrategy[CodedRows]:
    """Rows of both types, with one scale and with one per row."""
    del subject
    return st.builds(
        CodedRows,
        N=st.integers(1, 4),
        V=st.sampled_from((1, 7, 300, 1000, 4099)),
        seed=st.integers(0, 2**20),
        kind=st.sampled_from(FLOAT8_LOGITS),
        per_row=st.booleans(),
    )


@attack("LP-35", cases)
def logits_of_8_bits_are_their_values_times_the_scale(subject: Subject, case: CodedRows) -> None:
    """Log-probability, and what is claimed beside it, against the definition; and scales that are none."""
    x, scale = case.logits(subject.device), case.scale(subject.device)
    times = np.broadcast_to(plain(scale, "scale") if isinstance(scale, Tensor) else scale, (case.N,))[:, None]
    ids = draw.integers((case.N,), case.V, case.seed, subject.device)
    more = {n: v for n, v in (("entropy", True), ("softcap", 20.0)) if n in subject.claims}
    out = subject(x, ids, logits_scale=scale, **more)
    values = plain(x.float(), "logits") * times
    want = oracle.logprob(values, plain(ids, "ids"), softcap=more.get("softcap"))
    size = np.maximum(1, np.abs(want.lse))
    close(subject, "logprob", out.logprob, want.logprob, "float32", scale=size)
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, "float32", scale=size)
    if "entropy" in more:
        close(subject, "entropy", out.entropy, want.entropy, "float32", scale=size)
    if "top_logprobs" in subject.claims:
        best = subject(x, ids, logits_scale=scale, top_logprobs=1).top_ids[:, 0]
        require(np.array_equal(plain(best, "top_ids"), values.argmax(1)), "top_ids are not those of the values")
    if case.per_row:
        a_scale_without_meaning_spoils_its_row_alone(subject, case)


def a_scale_without_meaning_spoils_its_row_alone(subject: Subject, case: CodedRows) -> None:
    """NaN, infinite, zero and negative scales."""
    x, ids = case.logits(subject.device), draw.integers((case.N,), case.V, case.seed, subject.device)
    scale = torch.full((case.N,), 0.05, device=subject.device)
    want = plain(subject(x, ids, logits_scale=scale).logprob, "logprob")
    bad = case.seed % case.N
    scale[bad] = (float("nan"), float("inf"), 0.0, -1.0)[case.seed % 4]
    found = plain(subject(x, ids, logits_scale=scale).logprob, "logprob")
    require(np.isnan(found[bad]), f"logprob of a row with the scale {float(scale[bad])} is {found[bad]}, not NaN")
    others = np.arange(case.N) != bad
    require(np.array_equal(found[others], want[others]), "logprob of a row changed with the scale of another")

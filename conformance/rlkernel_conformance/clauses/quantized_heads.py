"""Attacks on quantized heads: of linear_logprob@1, and of lm_head_sample@1.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    definition,
    gradients,
    heads,
    operand_gradients,
    sizes,
    small,
    with_leaves,
)
from rlkernel_conformance.clauses.lm_heads import SCALE, Heads, as_defined
from rlkernel_conformance.clauses.lm_heads import heads as drawn_heads
from rlkernel_conformance.compare import close, plain
from rlkernel_conformance.subject import Subject
from rlkernel_core.quant import dequantize, quantize

FORMATS: Final = ("int4_g32", "fp8_channel", "nf4", "mxfp8", "gguf_q8_0")


def stored(weight: Any, seed: int) -> Any:
    """A weight in a format that the seed tells, and its exact values."""
    w = quantize(weight.float(), FORMATS[seed % len(FORMATS)])
    return w, dequantize(w, dtype=torch.float32)


@attack("LL-39", lambda s: heads(s).map(small), scale=0.5)
def a_quantized_head_is_its_exact_values(subject: Subject, case: Head) -> None:
    """Log-probabilities, and gradients of hidden states and of LoRA where that is claimed."""
    given = case.given(subject)
    w, exact = stored(given["weight"], case.seed)
    merged = {**given, "weight": exact}
    want = definition(merged)
    size = np.maximum(1, np.abs(want.lse) / 10)
    close(subject, "logprob", subject(**{**given, "weight": w}).logprob, want.logprob, case.dtype, scale=size)
    if "grad" not in subject.claims:
        return
    call, leaves = with_leaves(merged, ("weight",))
    g = draw.normal((case.N,), case.seed + 20, subject.device)
    found = gradients({"logprob": subject(**{**call, "weight": w}).logprob}, {"logprob": g}, leaves)
    dz = definition(merged, {"logprob": plain(g, "g")}).grad
    least = 0.05 * float(g.double().norm()) / given["temperature"]
    check_gradients(subject, found, operand_gradients(merged, dz), case.dtype, sizes(merged, dz, least))


@attack("LH-24", drawn_heads, scale=SCALE)
def draws_of_a_quantized_head_are_those_of_its_exact_values(subject: Subject, case: Heads) -> None:
    """With and without filters."""
    w, exact = stored(case.operands(subject).weight, case.seed)
    as_defined(subject, case.operands(subject, weight=exact), weight=w.to(subject.device))

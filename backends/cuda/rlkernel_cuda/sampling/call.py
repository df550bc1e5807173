"""sample@1 on Hopper: checks, one launch, results. What it does not claim falls to the portable kernel.

Legend: N rows · V vocabulary · W stored columns.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.reasons import Reason
from rlkernel_core.spec.sample import check
from rlkernel_core.spec.sampling import LogitBias, Penalties, SampleResult, TokenLists
from rlkernel_cuda.sampling.launch import TILE, TILES, Params, Shape, given, kernel, launch

# (most rows, shape), measured at V = 128256: with a filter, and without one.
FILTERED: Final = (
    (8, Shape(512, 8, 1)),
    (48, Shape(256, 8, 3)),
    (128, Shape(256, 4, 3)),
    (512, Shape(256, 2, 3)),
    (2**31, Shape(256, 1, 3)),
)
PLAIN: Final = ((8, Shape(512, 8, 1)), (128, Shape(256, 4, 2)), (2**31, Shape(256, 1, 2)))


def fits(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    step: int | Tensor,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    allowed: Tensor | None = None,
    banned: TokenLists | None = None,
    filter_order: str = "topk_topp",
    tie: str = "lowest_id",
    vocab_size: int | None = None,
    slot: Tensor | None = None,
    raw_logprob: bool = False,
    top_n: int = 0,
    top_n_from: str = "raw",
    rank: bool = False,
    entropy: bool = False,
    kept_capacity: int = 0,
    invalid_token: int = 0,
    stream: int = 0,
) -> Reason | None:
    """Refuses logits whose columns are not next to each other, and vocabularies beyond the statistics of a row."""
    V = vocab_size or logits.shape[1]
    if logits.stride(1) != 1 and V > 1:
        return Reason(
            "shape",
            "unsupported",
            f"logits with strides {list(logits.stride())} have columns that are not next to each other",
            "pass logits.contiguous()",
        )
    if V > TILE * TILES or logits.shape[0] >= 2**27:
        return Reason("shape", "unsupported", f"{logits.shape[0]} rows by {V} ids; at most 2**27 by {TILE * TILES}")
    return None


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    step: int | Tensor,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    allowed: Tensor | None = None,
    banned: TokenLists | None = None,
    filter_order: str = "topk_topp",
    tie: str = "lowest_id",
    vocab_size: int | None = None,
    slot: Tensor | None = None,
    raw_logprob: bool = False,
    top_n: int = 0,
    top_n_from: str = "raw",
    rank: bool = False,
    entropy: bool = False,
    kept_capacity: int = 0,
    invalid_token: int = 0,
    stream: int = 0,
) -> SampleResult:
    """Draw one token per row: rlkernel_core.spec.sample.sample is the contract."""
    check(**locals())
    N, V = logits.shape[0], vocab_size or logits.shape[1]
    plain = top_k is top_p is min_p is None
    device = logits.device
    with torch.cuda.device_of(logits):
        ids = torch.empty((2, N), dtype=torch.int64, device=device)
        reals = torch.empty((4, N), dtype=torch.float32, device=device)
        counts = torch.empty((2, N), dtype=torch.int32, device=device)
        token, threshold_id = ids.unbind()
        logprob, log_kept_mass, threshold, raw = reals.unbind()
        kept_count, status = counts.unbind()
        if N:
            laws = {
                "temperature": given(temperature, 1.0, torch.float32),
                "top_k": given(top_k, 0, None),
                "top_p": given(top_p, 1.0, torch.float32),
                "min_p": given(min_p, 0.0, torch.float32),
                "seed": given(seed, 0, None),
                "step": given(step, 0, None),
            }
            entries = [t.numel() for _, t in laws.values() if t is not None and t.numel() != 1]
            slots = None if slot is None else slot.contiguous()
            if slots is not None and slots.dtype not in {torch.int64, torch.int32}:
                slots = slots.to(torch.int64)
            size = logits.element_size()
            quads = logits.data_ptr() % (4 * size) == 0 and (N == 1 or logits.stride(0) % 4 == 0)
            place, row = ids.data_ptr(), 4 * N
            real, count = reals.data_ptr(), counts.data_ptr()
            params = Params(
                logits.data_ptr(), logits.stride(0), N, V, -(-V // TILE), quads + 2 * (quads and V % 4 == 0),
                *(g for g, _ in laws.values()),
                None if slots is None else slots.data_ptr(), int(slots is not None and slots.dtype == torch.int64),
                min(entries, default=2**31 - 1) - 1 if entries else 2**31 - 1,
                stream, int(raw_logprob), invalid_token,
                place, place + 2 * row, real, real + row, real + 2 * row, real + 3 * row, count, count + row,
            )  # fmt: skip
            shape = next(shape for most, shape in (PLAIN if plain else FILTERED) if most >= N)
            launch(kernel(shape, logits.dtype, plain, device.index), shape, params)
    return SampleResult(
        token=token,
        logprob=logprob,
        log_kept_mass=log_kept_mass,
        kept_count=kept_count,
        status=status,
        threshold=threshold,
        threshold_id=threshold_id,
        raw_logprob=raw if raw_logprob else None,
    )

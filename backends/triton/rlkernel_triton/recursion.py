"""Launches of the suffix scan: where the sequences are, which schedule serves the shape, which pointers are there.

Imports torch and Triton. Legend as in scan_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
import triton
from torch import Tensor

from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.scan_kernels import CHAIN, COLUMNS, chain_kernel, ends_kernel, gaps_kernel, scan_kernel

# Rows of a tile. The bits of a scan depend on it, so it is one number; the interpreter runs a scan step by step.
TILE: Final = 16 if INTERPRETED else 128
CHUNK: Final = COLUMNS * TILE
# (fewest chunks of a sequence, chunks in flight at a time): on an H200 three take 48 us instead of 67 at 256 x 32768,
# 23 instead of 26 at 512 x 8192, 558 instead of 573 at 16384 x 8192; with one chunk to fetch they cost 24.6 for 22.5.
STAGES: Final = ((4, 3), (0, 1))
# (most sequences, fewest chunks each): there a program per chunk is faster than one per sequence, which leaves
# multiprocessors idle. The two give the same bits. Above MOST programs the empty ones of packed batches would cost.
CHUNKED: Final = ((64, 8), (160, 16))
MOST: Final = 1 << 17
_SEARCH: Final = 1024


@dataclass(frozen=True)
class Rows:
    """The sequences of a batch, as the kernels see them."""

    shape: tuple[int, ...]  # (B, T) or (N,)
    sequences: int
    mask: Tensor | None = None  # token-level uint8
    ends: Tensor | None = None  # [B]: tokens from here on do not count
    bounds: Tensor | None = None  # [B + 1]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], sequences: int, mask: Tensor | None, lengths: Tensor | None, bounds: Tensor | None
    ) -> Self:
        """The layout that the arguments of a call describe."""
        bits = None if mask is None else mask.contiguous().view(torch.uint8)
        ends = None if lengths is None else lengths.contiguous()
        return cls(tuple(shape), sequences, bits, ends, None if bounds is None else bounds.contiguous())

    @property
    def width(self) -> int:
        """T, or N where packed."""
        return self.shape[-1]

    def located(self) -> Self:
        """The same with `ends` one past the last token that counts."""
        if self.mask is None or not self.sequences:
            return self
        ends = torch.empty(self.sequences, dtype=torch.int64, device=self.mask.device)
        with on_device_of(self.mask):
            ends_kernel[(self.sequences,)](
                self.mask,
                _or(self.bounds, self.mask),
                ends,
                self.width,
                self.sequences,
                PACKED=self.bounds is not None,
                BLOCK=_SEARCH,
                **FUSED,
            )
        return replace(self, ends=ends)


@dataclass(frozen=True)
class Scanned:
    """What a launch wrote."""

    out: Tensor  # y or advantages, token-level fp32
    targets: Tensor | None = None  # token-level fp32
    first: Tensor | None = None  # [B] y of the first token: rule scan
    invalid: Tensor | None = None  # [B] bool: the other rules


def schedule(sequences: int, chunks: int, rule: str) -> str:
    """One of "rows" and "chunks"; V-trace runs one scan upon another, which a single pass over compositions cannot."""
    few = any(sequences <= most and chunks >= fewest for most, fewest in CHUNKED)
    return "chunks" if few and rule != "vtrace" and sequences * chunks <= MOST else "rows"


def run(
    rule: str,
    rows: Rows,
    *,
    b: Tensor | None = None,
    a: float | Tensor = 1.0,
    values: Tensor | None = None,
    q_values: Tensor | None = None,
    ratio: Tensor | None = None,
    ratio_clip: float | None = None,
    trace_clip: float | None = None,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    lam_value: float | Tensor | None = None,
    stop: Tensor | None = None,
    init: Tensor | None = None,
    outcome: Tensor | None = None,
    baseline: Tensor | None = None,
    masked: str = "skip",
    exclusive: bool = False,
    carry: bool = False,
    by: str | None = None,
) -> Scanned:
    """One recursion over all sequences; `rule` and the rest as `scan_kernel`, `by` a schedule in place of the table's.

    Token-level tensors have the shape of `rows`; `lam` and `lam_value` may be numbers, [B] or token-level; `stop` is 1
    where an episode ends; `outcome` [B] stands on the last token of `rows.ends`.
    """
    tensors = [x for x in (b, outcome, values) if x is not None]
    device, B = tensors[0].device, rows.sequences
    out = torch.empty(rows.shape, dtype=torch.float32, device=device)
    scan = rule == "scan"
    targets = None if scan else torch.empty_like(out)
    first = torch.empty(B, dtype=torch.float32, device=device) if scan else None
    invalid = None if scan else torch.empty(B, dtype=torch.uint8, device=device)
    result = Scanned(out, targets, first, None if invalid is None else invalid.view(torch.bool))
    if not B:
        out.zero_()
        if targets is not None:
            targets.zero_()
        return result
    C = triton.cdiv(rows.width, CHUNK)
    by = by or schedule(B, C, rule)
    decay, blend = _decays(rule, gamma, lam)
    decay2, blend2 = _decays(rule, gamma, 1.0 if lam_value is None else lam_value)
    pointer = out  # in place of what is not there
    parts = chain = flags = pointer
    if by == "chunks":
        two = 2 if lam_value is not None else 1
        parts = torch.empty(2 * two * B * C, dtype=torch.float32, device=device)
        chain = torch.empty(two * B * C, dtype=torch.float32, device=device)
        flags = torch.empty(B * C, dtype=torch.uint8, device=device)
    packed = rows.bounds is not None
    given: dict[str, Any] = {
        "b": _or(b, pointer), "a": a if isinstance(a, Tensor) else pointer, "v": _or(values, pointer),
        "q": _or(q_values, pointer), "ratio": _or(ratio, pointer), "lam": _tensor(lam, pointer),
        "lam2": _tensor(lam_value, pointer), "mask": _or(rows.mask, pointer), "stop": _or(stop, pointer),
        "init": _or(init, pointer), "outcome": _or(outcome, pointer), "baseline": _or(baseline, pointer),
        "ends": _or(rows.ends, pointer), "bounds": _or(rows.bounds, pointer), "adv": out,
        "ret": _or(targets, pointer), "first": _or(first, pointer), "invalid": _or(invalid, pointer),
        "parts": parts, "chain": chain, "flags": flags, "T": rows.width, "C": C, "sequences": B,
        "a_number": 0.0 if isinstance(a, Tensor) else float(a), "gamma": float(gamma), "decay": decay, "blend": blend,
        "decay2": decay2, "blend2": blend2, "ratio_clip": _bound(ratio_clip), "trace_clip": _bound(trace_clip),
    }  # fmt: skip
    given = {n: x.contiguous() if isinstance(x, Tensor) else x for n, x in given.items()}
    flags_of: dict[str, Any] = {
        "RULE": rule, "J": TILE, "A": isinstance(a, Tensor), "VALUES": values is not None, "Q": q_values is not None,
        "LAM": _level(lam, rows), "LAM2": "none" if lam_value is None else _level(lam_value, rows),
        "MASK": rows.mask is not None, "STOP": stop is not None, "INIT": init is not None,
        "OUTCOME": outcome is not None, "BASELINE": baseline is not None, "ENDS": rows.ends is not None,
        "PACKED": packed, "MASKED": masked, "EXCLUSIVE": exclusive, "CARRY": carry,
        "num_warps": warps(device), **FUSED,
    }  # fmt: skip
    with on_device_of(out):
        if packed:
            gaps_kernel[(triton.cdiv(rows.width, _SEARCH),)](
                out, given["ret"], given["bounds"], rows.width, B, RETURNS=not scan, BLOCK=_SEARCH, **FUSED
            ) if rows.width else None
        if by == "rows" or not C:
            each = triton.cdiv(C, B) if packed else C
            stages = next(k for fewest, k in STAGES if each >= fewest)
            scan_kernel[(B,)](**given, **flags_of, STAGE="rows", STAGES=stages)
            return result
        scan_kernel[(B * C,)](**given, **flags_of, STAGE="part", STAGES=1)
        scale = gamma if rule in {"gae", "retrace"} else 1.0
        chain_kernel[(B,)](
            parts, chain, flags, given["init"], given["first"], given["invalid"], C, B, float(scale),
            INIT=init is not None, TWO=lam_value is not None, SCAN=scan, U=CHAIN, num_warps=1, **FUSED,
        )  # fmt: skip
        scan_kernel[(B * C,)](**given, **flags_of, STAGE="apply", STAGES=1)
    return result


def warps(device: torch.device) -> int:
    """Warps of a program: a thread for every row of a tile, whatever the width of a warp."""
    if device.type != "cuda":
        return 4
    return max(1, TILE // torch.cuda.get_device_properties(device).warp_size)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x


def _tensor(x: Any, other: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else other


def _bound(x: float | None) -> float:
    return float("inf") if x is None else float(x)


def _level(lam: float | Tensor, rows: Rows) -> str:
    """Whether lambda is a number, one a token, or one a sequence."""
    if not isinstance(lam, Tensor):
        return "number"
    return "token" if tuple(lam.shape) == rows.shape else "row"


def _decays(rule: str, gamma: float, lam: float | Tensor) -> tuple[float, float]:
    """Discounts gamma lambda and gamma (1 - lambda), made in float64; lambda itself for the rules that clip traces."""
    number = 1.0 if isinstance(lam, Tensor) else float(lam)
    return (number, 0.0) if rule in {"vtrace", "retrace"} else (gamma * number, gamma * (1.0 - number))

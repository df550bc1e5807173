"""Launches of the suffix scan: where the sequences are, which schedule serves the shape, which pointers are there.

Imports torch and Triton. Legend as in kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from rlkernel_triton.affine_suffix_scan.kernels import (
    CHAIN,
    COLUMNS,
    chain_kernel,
    last_token_kernel,
    scan_kernel,
    zero_gaps_kernel,
)
from rlkernel_triton.common.host import INTERPRETED, blank
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, planned, planned_target

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
class SequenceLayout:
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

    def located(self, plan: Plan | None = None) -> Self:
        """The same with `ends` one past the last token that counts."""
        if self.mask is None or not self.sequences:
            return self
        ends = torch.empty(self.sequences, dtype=torch.int64, device=self.mask.device)

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                last_token_kernel, T=self.width, sequences=self.sequences, PACKED=self.bounds is not None, BLOCK=_SEARCH
            )

        launch = planned(plan, "ends", ends.device, bound)
        launch((self.sequences,), self.mask, self.mask if self.bounds is None else self.bounds, ends)
        return replace(self, ends=ends)


class ScanOutput(NamedTuple):
    """What a launch wrote."""

    out: Tensor  # y or advantages, token-level fp32
    targets: Tensor | None = None  # token-level fp32
    first: Tensor | None = None  # [B] y of the first token: rule scan
    invalid: Tensor | None = None  # [B] bool: the other rules


def schedule(sequences: int, chunks: int, rule: str) -> str:
    """One of "rows" and "chunks"; V-trace runs one scan upon another, which a single pass over compositions cannot."""
    few = any(sequences <= most and chunks >= fewest for most, fewest in CHUNKED)
    return "chunks" if few and rule != "vtrace" and sequences * chunks <= MOST else "rows"


class Recursion(NamedTuple):
    """One recursion over all sequences: what `scan_kernel` computes, and from which tensors.

    Token-level tensors have the shape of `rows`.
    """

    rule: str  # "scan", or one that makes advantages and targets: "returns", "gae", "vtrace", "retrace"
    rows: SequenceLayout
    b: Tensor | None = None  # token-level: b of the scan, else rewards
    a: float | Tensor = 1.0  # of the scan; a tensor is token-level
    values: Tensor | None = None  # token-level
    q_values: Tensor | None = None  # token-level
    ratio: Tensor | None = None  # token-level
    lam: float | Tensor = 1.0  # a number, [B] or token-level
    lam_value: float | Tensor | None = None  # as lam; that of the targets, where it is another
    stop: Tensor | None = None  # token-level; 1 where an episode ends
    init: Tensor | None = None  # [B]
    outcome: Tensor | None = None  # [B]: rewards that stand on the last token of `rows.ends`
    baseline: Tensor | None = None  # [B]
    ratio_clip: float | None = None
    trace_clip: float | None = None
    gamma: float = 1.0
    masked: str = "skip"  # a masked token is skipped, a "step" without reward, or a "reset"
    exclusive: bool = False  # y without the token's own b
    carry: bool = False  # a masked token keeps y; else it gets 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the kernel is passed, in its order."""
        rows = self.rows
        return (
            self.b, _tensor(self.a), self.values, self.q_values, self.ratio, _tensor(self.lam),
            _tensor(self.lam_value), rows.mask, self.stop, self.init, self.outcome, self.baseline, rows.ends,
            rows.bounds,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(x.device for x in (self.b, self.outcome, self.values) if x is not None)


def _tensor(x: float | Tensor | None) -> Tensor | None:
    return x if isinstance(x, Tensor) else None


def run(recursion: Recursion, plan: Plan | None = None, place: str = "", *, by: str | None = None) -> ScanOutput:
    """Run one recursion.

    Args:
        recursion: what is computed.
        plan: what keeps the launches of the first call at this place; everything but the values on the device must
            be the same then.
        place: in the plan.
        by: a schedule, "rows" or "chunks", in place of the table's.
    """
    launches = planned(plan, place, recursion.device, lambda launcher: BoundRecursion(launcher, recursion, by))
    return launches(recursion.tensors)


class BoundRecursion:
    """The launches of one recursion, bound for a shape."""

    def __init__(self, launcher: Launcher, recursion: Recursion, by: str | None = None) -> None:
        rule, rows, gamma, device = recursion.rule, recursion.rows, recursion.gamma, recursion.device
        B, C = rows.sequences, triton.cdiv(rows.width, CHUNK)
        tensors = recursion.tensors
        self._shape, self._B, self._C, self._device, self._scan = rows.shape, B, C, device, rule == "scan"
        self._two, packed = recursion.lam_value is not None, rows.bounds is not None
        self._there = tuple(i for i, x in enumerate(tensors) if x is not None)
        alike = [i for i in self._there if tensors[i].shape == rows.shape and tensors[i].dtype == torch.float32]  # type: ignore[union-attr]
        self._like = next(iter(alike), None)
        self._nothing = [blank(torch.float32, device)] * len(tensors)
        self._rows = (by or schedule(B, C, rule)) == "rows" or not C
        decay, blend = _decays(rule, gamma, recursion.lam)
        decay2, blend2 = _decays(rule, gamma, 1.0 if recursion.lam_value is None else recursion.lam_value)
        fixed: dict[str, Any] = {
            "T": rows.width, "C": C, "sequences": B, "gamma": float(gamma),
            "a_number": 0.0 if isinstance(recursion.a, Tensor) else float(recursion.a), "decay": decay, "blend": blend,
            "decay2": decay2, "blend2": blend2, "ratio_clip": _bound(recursion.ratio_clip),
            "trace_clip": _bound(recursion.trace_clip), "RULE": rule, "J": TILE, "A": isinstance(recursion.a, Tensor),
            "VALUES": recursion.values is not None, "Q": recursion.q_values is not None,
            "LAM": _level(recursion.lam, rows),
            "LAM2": "none" if recursion.lam_value is None else _level(recursion.lam_value, rows),
            "MASK": rows.mask is not None, "STOP": recursion.stop is not None, "INIT": recursion.init is not None,
            "OUTCOME": recursion.outcome is not None, "BASELINE": recursion.baseline is not None,
            "ENDS": rows.ends is not None, "PACKED": packed, "MASKED": recursion.masked,
            "EXCLUSIVE": recursion.exclusive, "CARRY": recursion.carry, "num_warps": warps(device),
        }  # fmt: skip
        self._gaps: Launch | None = None
        if packed and rows.width:
            self._gaps = launcher.bind(
                zero_gaps_kernel, T=rows.width, sequences=B, RETURNS=not self._scan, BLOCK=_SEARCH
            )
        if self._rows:
            each = triton.cdiv(C, B) if packed and B else C
            stages = next(k for fewest, k in STAGES if each >= fewest)
            self._launches: tuple[Launch, ...] = (launcher.bind(scan_kernel, **fixed, STAGE="rows", STAGES=stages),)
            return
        scale = gamma if rule in {"gae", "retrace"} else 1.0
        self._launches = (
            launcher.bind(scan_kernel, **fixed, STAGE="part", STAGES=1),
            launcher.bind(
                chain_kernel, num_warps=1, C=C, sequences=B, scale=float(scale), INIT=recursion.init is not None,
                TWO=self._two, SCAN=self._scan, U=CHAIN,
            ),
            launcher.bind(scan_kernel, **fixed, STAGE="apply", STAGES=1),
        )  # fmt: skip

    def __call__(self, tensors: Sequence[Tensor | None]) -> ScanOutput:
        """Run it on tensors of which those are there that were at binding; as `Recursion.tensors` has them."""
        B, C, device = self._B, self._C, self._device
        given = self._nothing.copy()
        for i in self._there:
            given[i] = tensors[i].contiguous()  # type: ignore[union-attr]  # it is there
        # Next to a tensor of its kind nothing has to be said of it, which is half of what an allocation takes.
        out = (
            torch.empty(self._shape, dtype=torch.float32, device=device)
            if self._like is None
            else (torch.empty_like(given[self._like]))
        )
        targets = first = invalid = None
        if self._scan:
            first = torch.empty(B, dtype=torch.float32, device=device)
        else:
            targets = torch.empty_like(out)
            invalid = torch.empty(B, dtype=torch.bool, device=device)
        result = ScanOutput(out, targets, first, invalid)
        if not B:
            out.zero_()
            if targets is not None:
                targets.zero_()
            return result
        ret, first_, invalid_ = (out if x is None else x for x in (targets, first, invalid))
        if self._gaps is not None:
            self._gaps((triton.cdiv(self._shape[-1], _SEARCH),), out, ret, given[13])
        if self._rows:
            self._launches[0]((B,), *given, out, ret, first_, invalid_, out, out, out)
            return result
        two = 2 if self._two else 1
        parts = torch.empty(2 * two * B * C, dtype=torch.float32, device=device)
        chain = torch.empty(two * B * C, dtype=torch.float32, device=device)
        flags = torch.empty(B * C, dtype=torch.uint8, device=device)
        part, join, apply = self._launches
        part((B * C,), *given, out, ret, first_, invalid_, parts, chain, flags)
        join((B,), parts, chain, flags, given[9], first_, invalid_)
        apply((B * C,), *given, out, ret, first_, invalid_, parts, chain, flags)
        return result


def warps(device: torch.device) -> int:
    """Warps of a program: a thread for every row of a tile, whatever the width of a warp."""
    target = planned_target()
    if target is not None:
        return max(1, TILE // target.warp)
    if device.type != "cuda":
        return 4
    return max(1, TILE // torch.cuda.get_device_properties(device).warp_size)


def _bound(x: float | None) -> float:
    return float("inf") if x is None else float(x)


def _level(lam: float | Tensor, rows: SequenceLayout) -> str:
    """Whether lambda is a number, one a token, or one a sequence."""
    if not isinstance(lam, Tensor):
        return "number"
    return "token" if tuple(lam.shape) == rows.shape else "row"


def _decays(rule: str, gamma: float, lam: float | Tensor) -> tuple[float, float]:
    """Discounts gamma lambda and gamma (1 - lambda), made in float64; lambda itself for the rules that clip traces."""
    number = 1.0 if isinstance(lam, Tensor) else float(lam)
    return (number, 0.0) if rule in {"vtrace", "retrace"} else (gamma * number, gamma * (1.0 - number))

"""A draw prepared: for calls of one kind and size, what is launched, with which constants and on how much memory.

A call of a shape that was seen before costs the host its allocations and launches; nothing is decided again.
Legend: N rows · V vocabulary · S tiles a row. Imports torch and Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.spec.sampling import FILTER_ORDERS, SampleResult
from rlkernel_triton.common.device import has_pdl, lanes_per_warp, on_nvidia
from rlkernel_triton.common.group_sums import GROUP
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.sampling_arguments import as_int64, each_of, flat
from rlkernel_triton.launchers import launcher_for
from rlkernel_triton.sample.exact_sample_kernel import exact_sample
from rlkernel_triton.sample.select_and_sample import select_and_sample
from rlkernel_triton.sample.tile_stats import tile_stats

FEW_ROWS: Final = 8  # from which on a row's tiles go two to a program, and no kernel begins early
MANY_ROWS: Final = 128  # up to which each row's last kernel has a processor of a large GPU to itself
LEAST_GROUPS: Final = 512  # so that vocabularies up to 32768 share the builds of the kernels of a row
ROWS_A_LAYER: Final = 1 << 15  # the second axis of a grid has less than 2^16 programs
WITH_PDL: Final = {"launch_pdl": True}  # how a kernel is launched that waits for the one ahead of it by itself
_EACH: Final = ("T_EACH", "K_EACH", "P_EACH", "M_EACH", "SEED_EACH", "STEP_EACH")  # in the order of the arguments


@dataclass(frozen=True)
class Shape:
    """How the work is cut. TILE, GROUP, K, C, GATHERED and BLOCK decide bits and never depend on the batch."""

    TILE: int = 1024  # tokens of a tile
    GROUP: int = GROUP.value  # tokens whose maximum is kept, and whose sum is one of `logprob`'s too
    K: int = 64  # groups that are read again, and the largest top-k that candidates answer
    C: int = 128  # candidates that are compared
    GATHERED: int = 1024  # tokens that the exact search compares without the row
    BLOCK: int = 2048  # tokens a step of the exact search; with 4096 it spills on CDNA, whatever the warps
    stats_warps: int = 4
    select_warps: int = 0  # 0: by the batch, as registers
    select_registers: int = 0  # of a thread of `select_and_sample`, on NVIDIA's
    search_warps: int = 8
    pdl_rows: int = FEW_ROWS - 1  # up to which kernels begin before the one ahead has ended: more crowd processors
    tiles_per_program: int = 0  # of `tile_stats`; 0: by the batch

    def tiles_of_a_program(self, N: int, *, free: bool) -> int:
        """One tile each until the rows alone fill a large GPU; then fewer, longer programs. free: without a filter."""
        return self.tiles_per_program or (1 if N < FEW_ROWS else 4 if free and N > MANY_ROWS else 2)

    def select_warps_and_registers(self, N: int, lanes: int = 32) -> tuple[int, int]:
        """Of `select_and_sample`: few rows are to end soon, one on a processor; many to be little work.

        By 4 warps of 64 lanes it spills on CDNA.
        """
        warps, registers = (4, 80) if N > MANY_ROWS and lanes == 32 else (8, 96)
        return self.select_warps or warps, self.select_registers or registers


SHAPE: Final = Shape()


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of a draw, as the operator takes them."""

    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    seed: int | Tensor
    step: int | Tensor
    filter_order: str
    tie: str
    slot: Tensor | None
    stream: int

    def arguments(self) -> tuple[Any, ...]:
        """What kernels take, numbers or contiguous tensors: temperature, top_k, top_p, min_p, seed, step; slot."""
        k = max(-1, min(self.top_k, 2**31 - 1)) if isinstance(self.top_k, int) else self.top_k
        T, p, m = (float(v) if isinstance(v, int) else v for v in (self.temperature, self.top_p, self.min_p))
        if not k is p is m is None:  # a top-k and a top-p that are off share the builds of those that are on
            k, p = -1 if k is None else k, 1.0 if p is None else p
        given = (T, k, p, m, as_int64(self.seed), as_int64(self.step), self.slot)
        return tuple(flat(value) if isinstance(value, Tensor) else value for value in given)

    def needs_search(self, K: int) -> bool:
        """Whether the top-K candidates of a row may be too few, so that the exact search must run."""
        if self.top_k is self.top_p is self.min_p is None:
            return False
        few = isinstance(self.top_k, int) and 0 < self.top_k <= K
        by_order = self.filter_order == "topp_topk" and self.min_p is not None
        return not few or by_order or self.tie == "keep_all"


def padded_groups(V: int, shape: Shape) -> int:
    """Groups of a row, padded to a power of two: decides bits, and depends on V alone."""
    groups = triton.next_power_of_2(triton.cdiv(V, shape.TILE)) * shape.TILE // shape.GROUP
    return max(int(groups), LEAST_GROUPS)


class Drawn(NamedTuple):
    """A draw, and the memory that its results are rows of, for kernels that write to several of them."""

    result: SampleResult
    row_stats: Tensor | None  # [N, 5]: best logit, T, log of the kept weights; best raw logit, log of its weights
    longs: Tensor  # [2, N] int64: token, threshold_id
    ints: Tensor  # [3, N] int32: kept_count, status, scratch
    floats: Tensor  # [3 to 5, N] fp32: logprob, log_kept_mass, threshold, raw_logprob where asked for, entropy


class SamplePlan:
    """What is launched for one kind of call."""

    def __init__(
        self,
        x: Tensor,  # [N, V]
        raw: Tensor | None,  # [N, V]
        params: SamplingParams,
        arguments: tuple[Any, ...],  # of `params`
        *,
        allowed: Tensor | None,
        spoiled: Tensor | None,
        entropy: bool,
        row_stats: bool,
        shape: Shape,
    ) -> None:
        N, V = x.shape
        S, G = triton.cdiv(V, shape.TILE), shape.TILE // shape.GROUP
        filters = not params.top_k is params.top_p is params.min_p is None
        self.search = params.needs_search(shape.K)
        self.N = N
        room = max(shape.K + 4 * shape.C, shape.GATHERED if self.search else 0)
        self.words = (S * (3 * G + 1) + max(room if filters else 0, S * G) + 3) // 2 * 2
        self.works = 1 if raw is None else 2
        self.entropy, self.row_stats, self.raw = entropy, row_stats, raw is not None
        self.floats = 5 if entropy else 4 if self.raw else 3
        per = shape.tiles_of_a_program(N, free=not filters)
        self.grid = (triton.cdiv(S, per), min(N, ROWS_A_LAYER), triton.cdiv(N, ROWS_A_LAYER))
        cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        self.search_grid = (min(N, cores), 1, 1)
        counts = [p.shape[0] for p in arguments[:6] if isinstance(p, Tensor) and p.shape[0] != 1]
        select_warps, registers = shape.select_warps_and_registers(N, lanes_per_warp(x.device))
        each = tuple(map(each_of, arguments[:6]))
        if N == 1 and params.slot is None:  # where one entry stands for all, it is also the first of each
            each = tuple(e or 1 for e in each)
        pdl = N <= shape.pdl_rows and has_pdl(x)
        behind = WITH_PDL if pdl else {}
        maxnreg = {"maxnreg": registers} if on_nvidia(x) else {}
        allowed_stride = 0 if allowed is None else allowed.stride(0)

        def strides(x: Tensor) -> dict[str, int]:
            return dict(zip(("row_stride", "column_stride"), x.stride(), strict=True))

        # What every kernel takes; what those that write results take; what those that know the filters take.
        every: dict[str, Any] = {
            **dict(zip(_EACH, each, strict=True)), "V": V, "S": S, "N": N, "words": self.words,
            "last_slot": min(counts, default=2**31) - 1, "WHOLE": V % 16 == 0, "TILE": shape.TILE,
            "GROUP": shape.GROUP, "USE_PDL": pdl,
        }  # fmt: skip
        of_x: dict[str, Any] = {
            **every, **strides(x), "allowed_stride": allowed_stride, "HAS_ALLOWED": allowed is not None,
            "HAS_SLOT": params.slot is not None, "UNIT": x.stride(1) == 1,
        }  # fmt: skip
        raw_strides = (0, 0) if raw is None else raw.stride()
        results: dict[str, Any] = {
            **of_x, **dict(zip(("raw_row_stride", "raw_column_stride"), raw_strides, strict=True)),
            "tiles_per_program": per, "HAS_SPOILED": spoiled is not None,
            "ORDER": FILTER_ORDERS.index(params.filter_order), "KEEP_ALL": params.tie == "keep_all",
            "RAW": self.raw, "ENTROPY": entropy, "ROW_STATS": row_stats, "GP": padded_groups(V, shape),
        }  # fmt: skip
        launcher = launcher_for(x.device)
        self.tile_stats = launcher.bind(
            tile_stats, num_warps=shape.stats_warps, **of_x, RAW=False, ENTROPY=entropy, TILES_PER_PROGRAM=per
        )
        if raw is not None:
            of_raw: dict[str, Any] = {
                **every, **strides(raw), "allowed_stride": 0, "HAS_ALLOWED": False, "HAS_SLOT": False,
                "UNIT": raw.stride(1) == 1,
            }  # fmt: skip
            self.raw_tile_stats = launcher.bind(
                tile_stats, num_warps=shape.stats_warps, **of_raw, RAW=True, ENTROPY=False, TILES_PER_PROGRAM=per
            )
        self.select = launcher.bind(
            select_and_sample, num_warps=select_warps, options={**behind, **maxnreg}, **results, SEARCH=self.search,
            K=shape.K, C=shape.C,
        )  # fmt: skip
        if self.search:
            self.exact = launcher.bind(
                exact_sample, num_warps=shape.search_warps, options=behind, **results, BLOCK=shape.BLOCK,
                GATHERED=shape.GATHERED,
            )  # fmt: skip

    def __call__(
        self,
        x: Tensor,  # [N, V]
        raw: Tensor | None,  # [N, V]
        arguments: Sequence[Any],  # of `SamplingParams`
        stream: int,
        allowed: Tensor | None,  # [N, words] int32
        spoiled: Tensor | None,  # [N] int32
        invalid_token: int,
    ) -> Drawn:
        """Launch the draw."""
        N, device = self.N, x.device
        longs = torch.empty((2, N), dtype=torch.int64, device=device)
        ints = torch.empty((3, N), dtype=torch.int32, device=device)
        floats = torch.empty((self.floats, N), dtype=torch.float32, device=device)
        row_stats = torch.empty((N, 5), dtype=torch.float32, device=device) if self.row_stats else None
        token, threshold_id = longs.unbind()
        kept, status, _ = ints.unbind()
        of_floats = floats.unbind()
        result = SampleResult(
            token,
            of_floats[0],
            of_floats[1],
            kept,
            status,
            of_floats[2],
            threshold_id,
            of_floats[3] if self.raw else None,
            of_floats[4] if self.entropy else None,
        )
        drawn = Drawn(result, row_stats, longs, ints, floats)
        if N == 0:
            return drawn
        work = torch.empty((self.works, N * self.words), dtype=torch.float32, device=device)
        *others, slot = arguments
        asked = (slot, *others, stream)
        self.tile_stats(self.grid, x, allowed, *asked, work)
        if raw is not None:
            self.raw_tile_stats(self.grid, raw, None, *asked, work[1])
        given = (x, allowed, *asked, work, spoiled, raw, invalid_token, longs, ints, floats, row_stats)
        self.select((N, 1, 1), *given)
        if self.search:
            self.exact(self.search_grid, *given)
        return drawn


def draw(
    x: Tensor,  # [N, V]
    raw: Tensor | None,  # [N, V]
    params: SamplingParams,
    *,
    allowed: Tensor | None = None,
    spoiled: Tensor | None = None,
    entropy: bool = False,
    invalid_token: int = 0,
    row_stats: bool = False,
    shape: Shape = SHAPE,
) -> tuple[SampleResult, Tensor | None]:
    """One draw without a plan of its own, cut in any way, and its row statistics as in `Drawn`."""
    arguments = params.arguments()
    if allowed is not None:
        allowed = allowed.contiguous()
    plan = SamplePlan(
        x, raw, params, arguments, allowed=allowed, spoiled=spoiled, entropy=entropy, row_stats=row_stats, shape=shape
    )
    drawn = plan(x, raw, arguments, params.stream, allowed, spoiled, invalid_token)
    return drawn.result, drawn.row_stats

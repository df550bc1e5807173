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
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, launcher_for, planned_target
from rlkernel_triton.launchers.specialization import parameters as parameters_of
from rlkernel_triton.sample.exact_sample_kernel import searched
from rlkernel_triton.sample.select_and_sample import finish
from rlkernel_triton.sample.tile_stats import tiles

FEW_ROWS: Final = 8  # from which on a row's tiles go two to a program, and no kernel begins early
MANY_ROWS: Final = 128  # up to which each row's finish has a processor of a large GPU to itself
LEAST_GROUPS: Final = 512  # so that vocabularies up to 32768 share a build of the finish and of the search
ROWS_A_LAYER: Final = 1 << 15  # the second axis of a grid has less than 2^16 programs


OVERLAPPING: Final = {"launch_pdl": True}  # how a kernel is launched whose EDGE is on


@dataclass(frozen=True)
class Shape:
    """How the work is cut. TILE, GROUP, K, C, FEW and BLOCK decide bits and never depend on the batch."""

    TILE: int = 1024  # tokens of a tile
    GROUP: int = 64  # tokens whose maximum is kept
    K: int = 64  # groups that are read again, and the largest top-k of the quick way
    C: int = 128  # candidates that are told apart
    FEW: int = 1024  # tokens that the exact search tells apart without the row
    BLOCK: int = 2048  # tokens a step of the exact search; with 4096 it spills on CDNA, whatever the warps
    stream_warps: int = 4  # decides the order of a sum too
    finish_warps: int = 0  # 0: by the batch, as registers
    finish_registers: int = 0  # of a thread of the finish, on NVIDIA's
    search_warps: int = 8
    edges: int = FEW_ROWS - 1  # rows up to which kernels begin before the one ahead has ended: more crowd processors
    per: int = 0  # tiles a program of the stream; 0: by the batch

    def tiles_a_program(self, N: int, *, free: bool) -> int:
        """One tile each until the rows alone fill a large GPU; then fewer, longer programs. free: without a filter."""
        return self.per or (1 if N < FEW_ROWS else 4 if free and N > MANY_ROWS else 2)

    def end(self, N: int, lanes: int = 32) -> tuple[int, int]:
        """(warps, registers) of the finish: few rows are to end soon, one on a processor; many to be little work.

        By 4 warps of 64 lanes it spills on CDNA.
        """
        warps, registers = (4, 80) if N > MANY_ROWS and lanes == 32 else (8, 96)
        return self.finish_warps or warps, self.finish_registers or registers


SHAPE: Final = Shape()


@dataclass(frozen=True)
class Law:
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

    def searches(self, K: int) -> bool:
        """Whether the candidates of a row, at least its K best tokens, may not tell what it keeps."""
        if self.top_k is self.top_p is self.min_p is None:
            return False
        few = isinstance(self.top_k, int) and 0 < self.top_k <= K
        by_order = self.filter_order == "topp_topk" and self.min_p is not None
        return not few or by_order or self.tie == "keep_all"


def flat(x: Tensor) -> Tensor:
    """[n] contiguous."""
    return x if x.dim() == 1 and x.is_contiguous() else x.reshape(-1).contiguous()


def as_int64(number: int | Tensor) -> int | Tensor:
    """The bits of an unsigned 64-bit number as a signed one; a tensor holds them so already."""
    return number - 2**64 if isinstance(number, int) and number >= 2**63 else number


def padded(V: int, shape: Shape) -> dict[str, int]:
    """Sizes of the finish for a vocabulary, powers of two: they decide bits, and depend on V alone."""
    groups = triton.next_power_of_2(triton.cdiv(V, shape.TILE)) * shape.TILE // shape.GROUP
    return {"GP": max(groups, LEAST_GROUPS), "K": shape.K, "C": shape.C}


def lanes(device: torch.device) -> int:
    """Of a warp; of that of the target, where one is planned for."""
    target = planned_target()
    if target is not None:
        return target.warp
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def on_nvidia(x: Tensor) -> bool:
    """Whether kernels on x are compiled for a GPU of NVIDIA's."""
    target = planned_target()
    if target is not None:
        return target.nvidia
    return x.is_cuda and torch.version.hip is None


def overlaps(x: Tensor) -> bool:
    """Whether a kernel on x may begin before the one ahead of it has ended, and wait for that end itself.

    Programmatic dependent launch of NVIDIA's, from compute capability 9.0 on.
    """
    target = planned_target()
    if not launcher_for(x.device).overlaps:
        return False
    if target is not None:
        return target.nvidia and int(target.arch) >= 90
    return on_nvidia(x) and torch.cuda.get_device_capability(x.device) >= (9, 0)


def each_of(x: Any) -> int:
    """The `EACH` of a parameter."""
    if isinstance(x, Tensor):
        return int(x.shape[0] != 1)
    return -2 if x is None else -1


class Drawn(NamedTuple):
    """A draw, and the memory that its results are rows of, for kernels that write to several of them."""

    result: SampleResult
    laws: Tensor | None  # [N, 5]: best logit, T, log of the kept weights; best raw logit, log of its weights
    longs: Tensor  # [2, N] int64: token, threshold_id
    ints: Tensor  # [3, N] int32: kept_count, status, scratch
    floats: Tensor  # [3 to 5, N] fp32: logprob, log_kept_mass, threshold, raw_logprob where asked for, entropy


class Plan:
    """What is launched for one kind of call."""

    def __init__(
        self,
        x: Tensor,  # [N, V]
        raw: Tensor | None,  # [N, V]
        law: Law,
        parameters: tuple[Any, ...],
        *,
        allowed: Tensor | None,
        spoiled: Tensor | None,
        entropy: bool,
        laws: bool,
        shape: Shape,
    ) -> None:
        N, V = x.shape
        S, G = triton.cdiv(V, shape.TILE), shape.TILE // shape.GROUP
        filters = not law.top_k is law.top_p is law.min_p is None
        self.search = law.searches(shape.K)
        self.N, self.S, self.V = N, S, V
        room = max(shape.K + 4 * shape.C, shape.FEW if self.search else 0)
        self.words = (S * (3 * G + 1) + max(room if filters else 0, S * G) + 3) // 2 * 2
        self.works = 1 if raw is None else 2
        self.entropy, self.laws, self.raw = entropy, laws, raw is not None
        self.floats = 5 if entropy else 4 if self.raw else 3
        self.per = shape.tiles_a_program(N, free=not filters)
        self.grid = (triton.cdiv(S, self.per), min(N, ROWS_A_LAYER), triton.cdiv(N, ROWS_A_LAYER))
        cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        self.searchers = (min(N, cores), 1, 1)
        counts = [p.shape[0] for p in parameters[:6] if isinstance(p, Tensor) and p.shape[0] != 1]
        self.last_slot = min(counts, default=2**31) - 1
        finish_warps, registers = shape.end(N, lanes(x.device))
        sizes = padded(V, shape)
        there = (allowed is not None, law.slot is not None, x.stride(1) == 1, V % 16 == 0)
        each = tuple(map(each_of, parameters[:6]))
        if N == 1 and law.slot is None:  # where one entry stands for all, it is also the first of each
            each = tuple(e or 1 for e in each)
        way = (FILTER_ORDERS.index(law.filter_order), law.tie == "keep_all")
        cut = (shape.TILE, shape.GROUP)
        edge = N <= shape.edges and overlaps(x)
        behind = OVERLAPPING if edge else {}
        few = {"maxnreg": registers} if on_nvidia(x) else {}
        places = dict(zip(("row_stride", "column_stride"), x.stride(), strict=True))
        wide = 0 if allowed is None else allowed.stride(0)
        of_work = {"last_slot": self.last_slot, "words": self.words, "S": S, "N": N}
        launcher = launcher_for(x.device)

        def bind(kernel: Any, constants: tuple[Any, ...], num_warps: int, options: Any, **fixed: Any) -> Launch:
            names = [p.name for p in parameters_of(kernel) if p.constexpr]
            named = dict(zip(names, constants, strict=True))
            return launcher.bind(kernel, num_warps=num_warps, options=options, **fixed, **named, V=V, **of_work)

        self.tiles = bind(
            tiles, (*there, *each, False, entropy, *cut, self.per, edge), shape.stream_warps, {}, **places,
            allowed_stride=wide,
        )  # fmt: skip
        raw_places = {"raw_row_stride": 0, "raw_column_stride": 0}
        if raw is not None:
            row_stride, column_stride = raw.stride()
            raw_places = {"raw_row_stride": row_stride, "raw_column_stride": column_stride}
            self.raw_tiles = bind(
                tiles, (False, False, column_stride == 1, V % 16 == 0, *each, True, False, *cut, self.per, edge),
                shape.stream_warps, {}, row_stride=row_stride, column_stride=column_stride, allowed_stride=0,
            )  # fmt: skip
        on_request = (self.raw, entropy, laws)
        ends = {**places, **raw_places, "allowed_stride": wide, "per": self.per}
        self.finish = bind(
            finish,
            (*there, spoiled is not None, *each, *way, self.search, *on_request, *cut, *sizes.values(), edge),
            finish_warps, {**behind, **few}, **ends,
        )  # fmt: skip
        if self.search:
            tail = (*cut, sizes["GP"], shape.BLOCK, shape.FEW, edge)
            self.searched = bind(
                searched, (*there, spoiled is not None, *each, *way, *on_request, *tail), shape.search_warps, behind,
                **ends,
            )  # fmt: skip

    def __call__(
        self,
        x: Tensor,  # [N, V]
        raw: Tensor | None,  # [N, V]
        parameters: Sequence[Any],
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
        laws = torch.empty((N, 5), dtype=torch.float32, device=device) if self.laws else None
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
        drawn = Drawn(result, laws, longs, ints, floats)
        if N == 0:
            return drawn
        work = torch.empty((self.works, N * self.words), dtype=torch.float32, device=device)
        *others, slot = parameters
        asked = (slot, *others, stream)
        self.tiles(self.grid, x, allowed, *asked, work)
        if raw is not None:
            self.raw_tiles(self.grid, raw, None, *asked, work[1])
        given = (x, allowed, *asked, work, spoiled, raw, invalid_token, longs, ints, floats, laws)
        self.finish((N, 1, 1), *given)
        if self.search:
            self.searched(self.searchers, *given)
        return drawn


def draw(
    x: Tensor,  # [N, V]
    raw: Tensor | None,  # [N, V]
    law: Law,
    *,
    allowed: Tensor | None = None,
    spoiled: Tensor | None = None,
    entropy: bool = False,
    invalid_token: int = 0,
    with_laws: bool = False,
    shape: Shape = SHAPE,
) -> tuple[SampleResult, Tensor | None]:
    """One draw without a plan of its own, cut in any way, and its laws as in `Drawn`."""
    parameters = law.arguments()
    if allowed is not None:
        allowed = allowed.contiguous()
    plan = Plan(x, raw, law, parameters, allowed=allowed, spoiled=spoiled, entropy=entropy, laws=with_laws, shape=shape)
    drawn = plan(x, raw, parameters, law.stream, allowed, spoiled, invalid_token)
    return drawn.result, drawn.laws

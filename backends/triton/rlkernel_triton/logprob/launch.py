"""logprob@1 on Triton: one read of the logits forward, one read and one write back.

Two launches forward, one back. What depends on a call's shape and flags alone is done by `prepare`, once a shape; a
call then allocates, launches and builds its result. Where no gradient is wanted there is no autograd node.

Legend: N rows · V vocabulary · P parts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.row_selection import check_values
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_triton.common import merge_softmax as law_kernel
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.row_layout import Places, Rows, places_of, rows_of
from rlkernel_triton.common.support_bitmask import Kept, kept_bits, kept_like
from rlkernel_triton.launchers import Launch, Launcher, launcher_for, plain_launcher_for
from rlkernel_triton.logprob import kernels as logprob_kernels
from rlkernel_triton.logprob.top_ids import best_ids, log_probabilities

_ALIGNED: Final = 4  # numbers of 4 bytes in 16


class Law(NamedTuple):
    """What the rows say, each of the shape of the ids, and what the gradient needs of it."""

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    log_kept_mass: Tensor | None
    invalid: Tensor  # bool
    saved: Tensor  # 6 N numbers


class Kind(NamedTuple):
    """What of a call the kernels are compiled and launched for, beside its layout."""

    N: int
    V: int
    T: float | None  # None: one a row, in a tensor
    softcap: float | None
    masked: bool
    kept_row_bytes: int | None  # None: no support


def logprob(call: LogprobCall) -> LogprobResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LogprobCall) -> Callable[[LogprobCall], LogprobResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.logprob.LogprobCall`.

    Memory beyond results and gradient: 16 bytes (32 with a support) per row and 32768 columns, 24 per row; a bit per
    logit with a support; with top_logprobs some blocks of 64 MiB.
    """
    if gradient_wanted("logprob", call):
        return LogprobPair(call)
    host = _Host(call, keep=False)
    return lambda call: host.forward(call)[0]


class LogprobPair(Pair[LogprobCall, LogprobResult]):
    """Results of [..., V] logits, with their analytic gradient."""

    op = "logprob"

    def __init__(self, call: LogprobCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call, keep=True)

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Saved]:
        """Two launches."""
        result, saved, kept = self._host.forward(call)
        T = call.temperature if isinstance(call.temperature, Tensor) else None
        return result, (call.logits, call.ids, T, call.mask, result.invalid, saved, *(kept or (None, None)))

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One launch."""
        logits, ids, T, mask, invalid, of_rows, *bits = saved
        return (self._host.backward(logits, ids, T, mask, invalid, of_rows, bits, grads),)  # type: ignore[arg-type]

    @classmethod
    def saved_like(cls, call: LogprobCall, result: LogprobResult, wanted: tuple[bool, ...]) -> Saved:
        """Arguments, the rows that are invalid, 6 N numbers, and with a support the bits of the kept ids."""
        del wanted
        (B, *rest), T = call.ids.shape or (1,), call.temperature
        of_rows = call.logits.new_empty((law_kernel.SAVED * B, *rest), dtype=torch.float32)
        kept = (None, None) if call.support is None else kept_like(call.support, call.logits.shape[-1])
        return call.logits, call.ids, T if isinstance(T, Tensor) else None, call.mask, result.invalid, of_rows, *kept


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: LogprobCall, *, keep: bool) -> None:
        V, supported = call.logits.shape[-1], call.support is not None
        T = None if isinstance(call.temperature, Tensor) else float(call.temperature)
        self._kind = Kind(
            call.ids.numel(), V, T, call.softcap, call.mask is not None, -(-V // 32) * 4 if supported else None
        )
        self._shape, self._n, self._validate = call.ids.shape, call.top_logprobs, call.validate
        self._plan = _Plan(
            launcher_for(call.logits.device), self._kind, call.logits, self._shape, keep=keep, moment=call.entropy
        )
        self._ids_as_they_are = call.ids.is_contiguous()
        self._mask_as_it_is = call.mask is None or call.mask.is_contiguous()
        self._T_as_it_is = T is not None or is_per_row(call.temperature, self._shape)

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Tensor, Kept | None]:
        """The result, and what the gradient needs of the rows and of the kept ids."""
        if self._validate:
            check_values(call.ids, call.mask, self._kind.V, call.temperature, call.support)
        T = call.temperature if self._kind.T is None else None
        ids, T, mask = self._read(call.ids, T, call.mask)  # type: ignore[arg-type]  # a tensor where there is no number
        kept = None if call.support is None else kept_bits(call.support, self._kind.V)
        row = self._plan.forward(call.logits, ids, T, mask, kept)
        best, of_best, n = None, None, self._n
        if n:
            best, of_best = _best(call.logits.detach(), n, ids, self._kind, T, mask)
            best, of_best = best.view(*self._shape, n), of_best.view(*self._shape, n)
        return LogprobResult(row[0], row[1], row[2], best, of_best, row[3], row[4]), row.saved, kept

    def backward(
        self, logits: Tensor, ids: Tensor, T: Tensor | None, mask: Tensor | None, invalid: Tensor, saved: Tensor,
        bits: list[Tensor | None], grads: Saved,
    ) -> Tensor:  # fmt: skip
        """The gradient of the logits."""
        ids, T, mask = self._read(ids, T, mask)
        kept = None if self._kind.kept_row_bytes is None else Kept(*bits)  # type: ignore[arg-type]  # all are there
        return self._plan.backward(logits, ids, T, mask, kept, invalid, saved, grads)

    def _read(self, ids: Tensor, T: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids, temperatures and mask as kernels read them."""
        if not self._ids_as_they_are:
            ids = ids.contiguous()
        if not self._mask_as_it_is:
            mask = mask.contiguous()  # type: ignore[union-attr]  # it is there
        if not self._T_as_it_is:
            T = per_row(T, self._shape)  # type: ignore[arg-type,assignment]  # a tensor, as it was
        return ids, T, mask


def per_row(temperature: float | Tensor, rows: torch.Size) -> float | Tensor:
    """A number for all rows, or [N]."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    return temperature.to(torch.float32).expand(rows).reshape(-1).contiguous()


def is_per_row(temperature: float | Tensor, rows: torch.Size) -> bool:
    """Whether a tensor of temperatures is one number a row already, as kernels read it."""
    T = temperature
    return isinstance(T, Tensor) and T.dtype == torch.float32 and T.shape == rows and T.is_contiguous()


class _Plan:
    """The launches of one shape."""

    def __init__(
        self, launcher: Launcher, kind: Kind, logits: Tensor, shape: torch.Size, *, keep: bool, moment: bool
    ) -> None:
        places, self._copied = places_of(logits)
        self._sweep = Sweep(launcher, kind, places, moment=moment)
        self._join = Join(launcher, kind, kind.V, self._sweep.P, shape, logits.device, keep=keep, moment=moment)
        self._gradient = Gradient(launcher, kind, places)
        self._keep, self._device = keep, logits.device
        self._room = (self._sweep.numbers, law_kernel.SAVED * kind.N)

    def forward(self, logits: Tensor, ids: Tensor, T: Tensor | None, mask: Tensor | None, kept: Kept | None) -> Law:
        """What the rows say."""
        if self._copied:
            logits = logits.clone(memory_format=torch.contiguous_format)
        if self._keep:
            parts, saved = torch.empty(self._room[0], dtype=torch.float32, device=self._device), None
        else:
            room = torch.empty(sum(self._room), dtype=torch.float32, device=self._device)
            parts, saved = room.unsafe_split_with_sizes(self._room)
        self._sweep(logits, ids, T, mask, kept, parts)
        return self._join(parts, ids, T, mask, None if kept is None else kept.bad, saved)

    def backward(
        self, logits: Tensor, ids: Tensor, T: Tensor | None, mask: Tensor | None, kept: Kept | None, invalid: Tensor,
        saved: Tensor, upstream: tuple[Tensor | None, ...],
    ) -> Tensor:  # fmt: skip
        """The gradient of the logits."""
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if self._copied:
            logits = logits.clone(memory_format=torch.contiguous_format)
        self._gradient(logits, ids, T, mask, kept, invalid, saved, upstream, out)
        return out


class Sweep:
    """The launch that reads logits: statistics of each part of each row."""

    def __init__(self, launcher: Launcher, kind: Kind, places: Places, *, moment: bool) -> None:
        self.P = triton.cdiv(kind.V, logprob_kernels.PART)
        self.planes = logprob_kernels.PLANES[kind.kept_row_bytes is not None]
        self.numbers = self.planes * kind.N * self.P  # of what it writes
        self._grid = (kind.N, self.P, 1)
        inner, outer_stride, inner_stride, stride = places
        fixed: dict[str, Any] = {} if kind.T is None else {"T": kind.T}
        self._T_passed = kind.T is None
        self._launch = launcher.bind(
            logprob_kernels.sweep, num_warps=logprob_kernels.SWEEP_WARPS, **fixed, softcap=kind.softcap or 0.0,
            N=kind.N, V=kind.V, inner=inner, outer_stride=outer_stride, inner_stride=inner_stride, stride=stride,
            kept_stride=kind.kept_row_bytes or 0, HAS_MASK=kind.masked, HAS_T=kind.T is None,
            HAS_CAP=kind.softcap is not None, SUPPORT=kind.kept_row_bytes is not None, MOMENT=moment,
            PART=logprob_kernels.PART, TILE=logprob_kernels.TILE, LOG_LANES=logprob_kernels.LOG_LANES,
            INTERPRETED=INTERPRETED,
        )  # fmt: skip

    def __call__(
        self, logits: Tensor, ids: Tensor, T: Tensor | None, mask: Tensor | None, kept: Kept | None, parts: Tensor
    ) -> None:
        """Write [planes, N, P] statistics."""
        if not self._grid[0]:
            return
        bits = ids if kept is None else kept.bytes
        if self._T_passed:
            self._launch(self._grid, logits, ids, ids if mask is None else mask, T, bits, parts)
        else:
            self._launch(self._grid, logits, ids, ids if mask is None else mask, bits, parts)


class Join:
    """The launch that joins the parts of each row, in their order, and says what they mean.

    Args:
        launcher: what binds it.
        kind: of the call.
        whole: size of the whole vocabulary.
        P: parts of a row.
        shape: of the results.
        device: of the results.
        keep: what the gradient needs lies with the results; else the caller gives a place for it.
        moment: whether the entropy is wanted.
    """

    def __init__(
        self, launcher: Launcher, kind: Kind, whole: int, P: int, shape: torch.Size, device: torch.device, *,
        keep: bool, moment: bool,
    ) -> None:  # fmt: skip
        width = triton.next_power_of_2(P)
        block = law_kernel.rows_of_a_program(width)
        self._shape, self._device, self._moment = shape, device, moment
        self._mass, self._keep, self._T_passed = kind.kept_row_bytes is not None, keep, kind.T is None
        self._planes = planes((1, 1, *[1] * moment, *[1] * self._mass, *[law_kernel.SAVED] * keep), shape, device)
        self._grid = (triton.cdiv(kind.N, block), 1, 1)
        fixed: dict[str, Any] = {} if kind.T is None else {"T": kind.T}
        self._launch = launcher.bind(
            law_kernel.law, num_warps=law_kernel.WARPS, **fixed, N=kind.N, P=P, whole=whole, HAS_MASK=kind.masked,
            HAS_T=kind.T is None, SUPPORT=self._mass, MOMENT=moment, ROWS=block, WIDTH=width,
            LOG=width.bit_length() - 1, INTERPRETED=INTERPRETED,
        )  # fmt: skip

    def __call__(
        self, parts: Tensor, ids: Tensor, T: Tensor | None, mask: Tensor | None, bad_kept: Tensor | None,
        saved: Tensor | None,
    ) -> Law:  # fmt: skip
        """What [planes, N, P] statistics mean."""
        value, lse, *rest = self._planes()
        if self._keep:
            saved = rest.pop()
        mass = rest.pop() if self._mass else None
        H = rest.pop() if self._moment else None
        invalid = torch.empty(self._shape, dtype=torch.bool, device=self._device)
        if self._grid[0]:
            rows_T = (T,) if self._T_passed else ()
            self._launch(
                self._grid, parts, ids, ids if mask is None else mask, ids if bad_kept is None else bad_kept, *rows_T,
                value, lse, value if H is None else H, value if mass is None else mass, invalid.view(torch.int8), saved,
            )  # fmt: skip
        return Law(value, lse, H, mass, invalid, saved)  # type: ignore[arg-type]  # given where it is not kept


class Gradient:
    """The launch that writes the gradient of the logits, bound for each set of results that gradients arrive at."""

    def __init__(self, launcher: Launcher, kind: Kind, places: Places) -> None:
        self._launcher, self._kind, self._places = launcher, kind, places
        self._launches: dict[tuple[bool, ...], Launch] = {}
        self._repeats = next(k for fewest, k in reversed(logprob_kernels.REPEATS) if fewest <= kind.N)
        self._grid = (kind.N, triton.cdiv(kind.V, self._repeats * logprob_kernels.COLUMNS), 1)

    def __call__(
        self, logits: Tensor, ids: Tensor, T: Tensor | None, mask: Tensor | None, kept: Kept | None, invalid: Tensor,
        saved: Tensor, upstream: tuple[Tensor | None, ...], out: Tensor,
    ) -> None:  # fmt: skip
        """Write the gradient of logits whose results have these gradients; None: none."""
        if not self._grid[0]:
            return
        wanted = tuple([g is not None for g in upstream])
        launch = self._launches.get(wanted)
        if launch is None:
            launch = self._launches[wanted] = self._bound(wanted)
        rows_T = () if self._kind.T is not None else (T,)
        launch(
            self._grid, logits, ids, ids if mask is None else mask, invalid.view(torch.int8), *rows_T,
            ids if kept is None else kept.bytes, saved, *[saved if g is None else g.contiguous() for g in upstream],
            out,
        )  # fmt: skip

    def _bound(self, wanted: tuple[bool, ...]) -> Launch:
        kind, (inner, outer_stride, inner_stride, stride) = self._kind, self._places
        fixed: dict[str, Any] = {} if kind.T is None else {"T": kind.T}
        return self._launcher.bind(
            logprob_kernels.gradient, num_warps=logprob_kernels.GRADIENT_WARPS,
            any_alignment=("g", "g_lse", "g_entropy", "g_mass"), **fixed, softcap=kind.softcap or 0.0, N=kind.N,
            V=kind.V, inner=inner, outer_stride=outer_stride, inner_stride=inner_stride, stride=stride,
            kept_stride=kind.kept_row_bytes or 0, HAS_MASK=kind.masked, HAS_T=kind.T is None,
            HAS_CAP=kind.softcap is not None, SUPPORT=kind.kept_row_bytes is not None, G=wanted[0], G_LSE=wanted[1],
            G_ENTROPY=wanted[2], G_MASS=wanted[3], COLUMNS=logprob_kernels.COLUMNS, REPEATS=self._repeats,
            INTERPRETED=INTERPRETED,
        )  # fmt: skip


def planes(counts: tuple[int, ...], shape: torch.Size, device: torch.device) -> Callable[[], list[Tensor]]:
    """What allocates fp32 tensors of [count * B, ...] for results of [B, ...], each aligned to 16 bytes.

    One allocation and one split that autograd takes for no views, where the sizes allow it.
    """
    B, *rest = shape or (1,)
    if shape and prod(shape) % _ALIGNED == 0:
        sizes = [count * B for count in counts]
        whole = (sum(sizes), *rest)
        return lambda: list(torch.empty(whole, dtype=torch.float32, device=device).unsafe_split_with_sizes(sizes))
    each = [(count * B, *rest) if shape or count > 1 else shape for count in counts]
    return lambda: [torch.empty(size, dtype=torch.float32, device=device) for size in each]


def statistics(
    rows: Rows,
    V: int,
    ids: Tensor,
    T: float | Tensor,
    mask: Tensor | None,
    kept: Kept | None,
    softcap: float | None,
    *,
    moment: bool,
) -> Law:
    """Partial softmax statistics over V, merged; the launches are bound for this call alone."""
    each, number = (T, None) if isinstance(T, Tensor) else (None, T)
    kind = Kind(ids.shape[0], V, number, softcap, mask is not None, None if kept is None else kept.row_bytes)
    sweep = Sweep(plain_launcher_for(ids.device), kind, rows.places, moment=moment)
    parts = torch.empty(sweep.planes, kind.N, sweep.P, dtype=torch.float32, device=ids.device)
    sweep(rows.data, ids, each, mask, kept, parts)
    return law(parts, ids, T, mask, None if kept is None else kept.bad, V, moment=moment)


def law(
    parts: Tensor,  # [planes, N, P]
    ids: Tensor,  # [N]
    T: float | Tensor,
    mask: Tensor | None,
    bad_kept: Tensor | None,
    whole: int,
    *,
    moment: bool,
) -> Law:
    """Merge the parts of every row, in their order; the launches are bound for this call alone."""
    _, N, P = parts.shape
    each, number = (T, None) if isinstance(T, Tensor) else (None, T)
    kind = Kind(N, whole, number, None, mask is not None, None if bad_kept is None else 0)
    join = Join(
        plain_launcher_for(ids.device), kind, whole, P, ids.shape, ids.device, keep=True, moment=moment
    )  # fmt: skip
    row = join(parts, ids, each, mask, bad_kept, None)
    return row._replace(saved=row.saved.view(law_kernel.SAVED, N))


def _best(
    logits: Tensor, n: int, ids: Tensor, kind: Kind, rows_T: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[N, n] most likely ids and their log-probabilities, by one more read with the best id as the chosen one.

    So the best one keeps its precision; the others have p <= 1/2.
    """
    rows, counted = rows_of(logits), None if mask is None else mask.view(-1)
    T = rows_T.view(-1) if kind.T is None and rows_T is not None else kind.T or 1.0
    best = best_ids(rows, kind.V, ids.numel(), n)
    row = statistics(rows, kind.V, best[:, 0].contiguous(), T, counted, None, kind.softcap, moment=False)
    values = log_probabilities(rows, best, T, counted, kind.softcap, row.logprob, row.saved)
    return best if counted is None else torch.where(counted[:, None], best, -1), values

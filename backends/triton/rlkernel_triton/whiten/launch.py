"""whiten@1 in Triton: three launches, of moments, of their summary, of what is made of them; nothing leaves the device.

Moments of several ranks are merged by plain torch on 0-dim tensors.

Legend: B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.moments import Moments, across_ranks
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.advantage_kinds import EPS_MODES
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult
from rlkernel_triton.affine_suffix_scan.launch import refused_float64
from rlkernel_triton.affine_suffix_scan.recursion import SequenceLayout
from rlkernel_triton.common.host import INTERPRETED, untracked
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.moments import BLOCK, MERGED, moments_kernel, summary_kernel, whiten_kernel
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for

_SIZE: Final = 64 if INTERPRETED else BLOCK
_WARPS: Final = 8
_MERGED: Final = 8 if INTERPRETED else MERGED
_SUMMARY: Final = 8  # numbers of a summary, the last of which is nothing


class Whitening:
    """The launches of a whitening, bound at the first call of a shape.

    Which sequences count is said by `chosen` [B] bool and `which`: "all", "these" of `chosen`, or the "others".
    """

    def __init__(self, plan: Plan, ddof: int, eps: float, eps_mode: str) -> None:
        self._plan, self._ddof, self._eps, self._eps_mode = plan, ddof, float(eps), eps_mode

    def summary(
        self, x: Tensor, rows: SequenceLayout, chosen: Tensor | None = None, which: str = "all",
        times: Tensor | None = None, process_group: Any = None,
    ) -> Tensor:  # -> [8] fp32  # fmt: skip
        """Count, shift, moved mean, m2, mean, variance and factor of the tokens of `x` that count.

        `times` says how often each; of all ranks where there is a group.
        """
        programs, chunks = _grid(rows)
        if not programs:
            return self._of_all_ranks(torch.zeros(_SUMMARY, dtype=torch.float32, device=x.device), process_group)

        def bound(launcher: Launcher) -> tuple[Launch, Launch]:
            layout = _layout(rows, which)
            return (
                launcher.bind(moments_kernel, num_warps=_WARPS, **layout, C=chunks, TIMES=times is not None),
                launcher.bind(
                    summary_kernel, P=programs, ddof=self._ddof, eps=self._eps,
                    eps_mode=EPS_MODES.index(self._eps_mode), SIZE=_MERGED,
                ),
            )  # fmt: skip

        each, merge = self._plan.get("moments", bound)
        room = torch.empty(_SUMMARY + programs * 4, dtype=torch.float32, device=x.device)
        out, partial = room.split((_SUMMARY, programs * 4))
        mask, member, ends, bounds = _tokens(rows, chosen, x)
        each((programs, 1, 1), x, mask, member, x if times is None else times, ends, bounds, partial)
        merge((1, 1, 1), partial, out)
        return self._of_all_ranks(out, process_group)

    def _of_all_ranks(self, local: Tensor, process_group: Any) -> Tensor:
        if process_group is None:
            return local
        whole = across_ranks(Moments(*local[:4].unbind()), process_group)
        rstd = whole.rstd(self._ddof, self._eps, self._eps_mode)
        return torch.stack((*whole, whole.mean, whole.variance(self._ddof), rstd, whole.n))

    def apply(
        self, x: Tensor, into: Tensor, rows: SequenceLayout, summary: Tensor | None, chosen: Tensor | None = None,
        which: str = "all", *, weights: Tensor | None = None, back: bool = False, carry: bool = False,
    ) -> None:  # fmt: skip
        """`into` = weights (x - mean) factor, 0 where nothing counts; `summary` None: without whitening."""
        programs, chunks = _grid(rows)
        if not programs:
            return

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                whiten_kernel, num_warps=_WARPS, **_layout(rows, which), C=chunks, WEIGHTS=weights is not None,
                WHITEN=summary is not None, BACK=back, CARRY=carry,
            )  # fmt: skip

        mask, member, ends, bounds = _tokens(rows, chosen, x)
        self._plan.get("whitened", bound)(
            (programs, 1, 1), x, into, mask, member, x if weights is None else weights.contiguous(),
            x if summary is None else summary, ends, bounds,
        )  # fmt: skip


def _grid(rows: SequenceLayout) -> tuple[int, int]:
    """Programs, and chunks of a row: packed sequences, whose lengths the host does not know, take one program each."""
    chunks = 1 if rows.bounds is not None else triton.cdiv(rows.width, _SIZE)
    return rows.sequences * chunks, chunks


def _tokens(rows: SequenceLayout, chosen: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask, chosen sequences, ends and bounds as both kernels read them; `other` stands for what is not there."""
    return (
        other if rows.mask is None else rows.mask,
        other if chosen is None else chosen,
        other if rows.ends is None else rows.ends,
        other if rows.bounds is None else rows.bounds,
    )


def _layout(rows: SequenceLayout, which: str) -> dict[str, Any]:
    """The constants of both kernels that say which tokens there are."""
    return {
        "T": rows.width,
        "sequences": rows.sequences,
        "MASK": rows.mask is not None,
        "CHOSEN": which,
        "ENDS": rows.ends is not None,
        "PACKED": rows.bounds is not None,
        "SIZE": _SIZE,
    }


def whiten(call: WhitenCall) -> WhitenResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: WhitenCall) -> Callable[[WhitenCall], WhitenResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.whiten.WhitenCall`."""
    whitening = Whitening(Plan(launcher_for(call.x.device)), call.ddof, call.eps, call.eps_mode)
    shape = tuple(call.x.shape) if call.lengths is not None else (1, call.x.numel())
    carry, back, apply = call.masked_out == "carry", call.apply and not call.shift_mean, call.apply
    bare = SequenceLayout(shape, shape[0]) if call.mask is call.lengths is None else None

    def run(call: WhitenCall) -> WhitenResult:
        x = call.x.to(torch.float32).contiguous()
        rows = bare or SequenceLayout.of(shape, shape[0], call.mask, call.lengths, None)
        times = None if call.counts is None else call.counts.contiguous()
        summary = whitening.summary(x, rows, times=times, process_group=call.process_group)
        y = torch.empty_like(x)
        whitening.apply(x, y, rows, summary if apply else None, back=back, carry=carry)
        n, _, _, _, mean, var, rstd, _ = summary.unbind()
        return WhitenResult(y, n, mean, var, rstd)

    return untracked(run, call)


def fits(call: WhitenCall) -> Reason | None:
    """The state is fp32: a float64 x is for another implementation."""
    return refused_float64({"x": call.x})

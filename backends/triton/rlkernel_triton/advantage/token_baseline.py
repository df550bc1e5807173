"""Host code of the optimal token baseline (`otb`): two launches, and one more that looks for the last tokens.

Legend: B sequences of T tokens. Imports torch and Triton.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.spec.advantage import AdvantageCall
from rlkernel_core.spec.advantage_checks import Extent
from rlkernel_triton.advantage.token_baseline_kernels import sequence_scans_kernel, token_baseline_kernel
from rlkernel_triton.affine_suffix_scan.recursion import SequenceLayout
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan

SIZE: Final = 16 if INTERPRETED else 1024  # columns of a program, and tokens of a chunk: bits depend on it
MOST: Final = 1024  # sequences whose ids are compared in pairs, in every chunk of columns


def serves(call: AdvantageCall, extent: Extent) -> bool:
    """Whether this call is one for these kernels: groups by ids of large batches are not."""
    return call.kind == "otb" and not (isinstance(call.group, Tensor) and extent.sequences > MOST)


class TokenBaseline:
    """Sums of a shape, bound at its first call."""

    def __init__(self, extent: Extent, plan: Plan) -> None:
        self._extent, self._plan = extent, plan

    def __call__(self, call: AdvantageCall, rows: SequenceLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Advantages [B, T], rewards to go [B, T], which are invalid [B], members of the group [B].

        With rewards per sequence `rows` ends with the last tokens that count.
        """
        (B, T), device, each = rows.shape, call.rewards.device, self._extent.token_rewards
        out, togo, norm = (torch.empty((B, T), dtype=torch.float32, device=device) for _ in range(3))
        invalid = torch.empty(B, dtype=torch.bool, device=device)
        members = torch.empty(B, dtype=torch.int64, device=device)
        if not B:
            return out, togo, invalid, members
        rewards = _readable(call.rewards)
        ids = call.group.contiguous() if isinstance(call.group, Tensor) else None
        in_stats = None if call.in_stats is None else call.in_stats.contiguous()

        def bound(launcher: Launcher) -> tuple[Launch, Launch, tuple[int, int, int]]:
            size = 1 if call.group is None or isinstance(call.group, Tensor) else call.group
            shared: dict[str, Any] = {"T": T, "MASK": rows.mask is not None, "ENDS": rows.ends is not None}
            shared["SIZE"] = SIZE
            return (
                launcher.bind(sequence_scans_kernel, **shared, sequences=B, OUTCOME=not each),
                launcher.bind(
                    token_baseline_kernel, **shared, B=B, G=size, eps=float(call.eps), IDS=ids is not None,
                    IN_STATS=in_stats is not None,
                ),
                (B // size, max(triton.cdiv(T, SIZE), 1), 1),
            )  # fmt: skip

        walk, columns, grid = self._plan.get("columns", bound)
        mask, ends = (out if x is None else x for x in (rows.mask, rows.ends))
        walk(
            (B, 1, 1),
            rewards,
            rewards,
            _readable(call.logprob),
            _readable(call.sum_pi_squared),
            mask,
            ends,
            togo,
            norm,
            invalid,
        )
        columns(
            grid, togo, norm, invalid, out if in_stats is None else in_stats, out if ids is None else ids, mask, ends,
            out, members,
        )  # fmt: skip
        return out, togo, invalid, members


def _readable(x: Tensor | None) -> Tensor:
    """As a kernel can read it."""
    if x is None:
        raise RuntimeError("otb was let through without a tensor that it needs")
    return (x.float() if x.dtype == torch.bool else x).contiguous()

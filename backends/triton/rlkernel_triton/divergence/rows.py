"""The launches that compare rows of a student's logits with a teacher, forward and back, bound for one shape.

Used by `divergence` on the logits of a call, and by `linear_divergence` on those of a block of rows.

Legend: N rows · V vocabulary · K listed ids.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.divergences import beta_of, listed
from rlkernel_core.spec.logprob import Support
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.row_layout import RowLayout
from rlkernel_triton.common.support_bitmask import support_bitmask
from rlkernel_triton.divergence import kernels
from rlkernel_triton.launchers import Launch, Launcher, Plan


class Options(NamedTuple):
    """What a call says beside its tensors."""

    kind: str
    beta: float | None
    T: float | None  # of the student; None: one a row, in a tensor
    T_t: float | None  # of the teacher's logits, the same
    masked: bool


class List(NamedTuple):
    """A teacher's list as kernels read it."""

    ids: Tensor  # [N, K] int64, -1 where nothing is
    log_t: Tensor  # [N, K] fp32, NaN in a row whose list is wrong
    log_tail: Tensor | None  # [N] fp32; None on the way back, where it is not read

    @classmethod
    def of(cls, ids: Tensor, log_t: Tensor, V: int) -> List:
        """Of ids and log-probabilities [N, K] as they are given."""
        found = listed(ids, log_t, V, torch.float32)
        return cls(torch.where(found.there, found.ids, -1).contiguous(), found.log_t.contiguous(), found.log_tail)


class RowTensors(NamedTuple):
    """What of a call belongs to its rows; where a tensor is not there a kernel gets another and does not read it."""

    mask: Tensor | None  # [N]
    T: Tensor | None  # [N] fp32; not read where the options have a number
    T_t: Tensor | None


class CompareRows:
    """Rows of one shape.

    Args:
        plan: keeps the launches.
        N: rows.
        V: size of the vocabulary.
        options: of the call.
        student: where rows of the student's logits stand.
        teacher: where those of the teacher's stand; None: it gives lists.
        K: ids of a list.
    """

    def __init__(
        self, plan: Plan, N: int, V: int, options: Options, student: RowLayout, teacher: RowLayout | None, K: int
    ) -> None:
        self._plan, self.N, self._V, self._options, self._K = plan, N, V, options, K
        self._repeats = next(k for fewest, k in reversed(kernels.REPEATS) if fewest <= N)
        self._columns = triton.cdiv(V, self._repeats * kernels.COLUMNS)
        number = {} if options.T is None else {"T": options.T}
        self._student: dict[str, Any] = {
            **student._asdict(), **number, "N": N, "V": V, "HAS_MASK": options.masked, "HAS_T": options.T is None,
        }  # fmt: skip
        beta = beta_of(options.beta)
        self._kind: dict[str, Any] = {
            "beta": beta, "log_beta": math.log2(beta), "log_rest": math.log2(1 - beta), "KIND": options.kind,
        }  # fmt: skip
        self._both: dict[str, Any] = {}
        if teacher is not None:
            number = {} if options.T_t is None else {"T_t": options.T_t}
            strides = {f"t_{name}": x for name, x in teacher._asdict().items()}
            self._both = {**self._student, **self._kind, **number, **strides, "HAS_T_T": options.T_t is None}

    def values(self, logits: Tensor, teacher: Tensor | List, of: RowTensors, values: Tensor, saved: Tensor) -> None:
        """Write N divergences, and SAVED * N numbers for the gradient."""
        if not self.N:
            return
        grid, mask = (self.N, 1, 1), logits if of.mask is None else of.mask
        T = (of.T,) if self._options.T is None else ()
        if isinstance(teacher, Tensor):
            T_t = (of.T_t,) if self._options.T_t is None else ()
            self._plan.get("rows", self._bound_rows)(grid, logits, teacher, mask, *T, *T_t, values, saved)
            return
        offsets = torch.arange(0, self.N * self._K + 1, self._K, device=logits.device)
        bits = support_bitmask(Support(teacher.ids.view(-1), offsets), self._V).bytes
        launch = self._plan.get("lists", self._bound_lists)
        launch(grid, logits, *teacher, bits, mask, *T, values, saved)

    def gradient(
        self, logits: Tensor, teacher: Tensor | List, of: RowTensors, saved: Tensor, g: Tensor, out: Tensor
    ) -> None:
        """Write the gradient [N, V] of the logits for upstream gradients g, N contiguous numbers of fp32."""
        if not self.N:
            return
        grid, mask = (self.N, self._columns, 1), logits if of.mask is None else of.mask
        T = (of.T,) if self._options.T is None else ()
        if isinstance(teacher, Tensor):
            T_t = (of.T_t,) if self._options.T_t is None else ()
            self._plan.get("rows back", self._bound_rows_back)(grid, logits, teacher, mask, *T, *T_t, saved, g, out)
            return
        self._plan.get("tail back", self._bound_tail_back)(grid, logits, mask, *T, saved, g, out)
        launch = self._plan.get("list back", self._bound_list_back)
        launch((self.N, 1, 1), logits, teacher.ids, teacher.log_t, mask, *T, saved, g, out)

    def _bound_rows(self, launcher: Launcher) -> Launch:
        return launcher.bind(kernels.compare_rows, num_warps=kernels.ROW_WARPS, **self._both, TILE=kernels.TILE)

    def _bound_rows_back(self, launcher: Launcher) -> Launch:
        return launcher.bind(
            kernels.compare_rows_backward, num_warps=kernels.GRADIENT_WARPS, any_alignment=("g",), **self._both,
            COLUMNS=kernels.COLUMNS, REPEATS=self._repeats,
        )  # fmt: skip

    def _bound_lists(self, launcher: Launcher) -> Launch:
        return launcher.bind(
            kernels.compare_lists, num_warps=kernels.ROW_WARPS, **self._student, **self._kind, K=self._K,
            row_bytes=-(-self._V // 32) * 4, TILE=kernels.TILE, ENTRIES=kernels.ENTRIES,
        )  # fmt: skip

    def _bound_tail_back(self, launcher: Launcher) -> Launch:
        return launcher.bind(
            kernels.tail_backward, num_warps=kernels.GRADIENT_WARPS, any_alignment=("g",), **self._student,
            COLUMNS=kernels.COLUMNS, REPEATS=self._repeats,
        )  # fmt: skip

    def _bound_list_back(self, launcher: Launcher) -> Launch:
        return launcher.bind(
            kernels.list_backward, num_warps=kernels.GRADIENT_WARPS, any_alignment=("g",), **self._student,
            **self._kind, K=self._K, ENTRIES=kernels.ENTRIES,
        )  # fmt: skip

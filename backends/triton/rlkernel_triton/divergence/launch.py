"""divergence@1 on Triton: one launch forward and one back; with lists one more each way, and small sorts of ids.

Legend: N rows · V vocabulary · K listed ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.divergence import DivergenceCall
from rlkernel_triton.common.row_layout import layout_of, per_row
from rlkernel_triton.divergence.kernels import SAVED
from rlkernel_triton.divergence.rows import CompareRows, List, Options, RowTensors
from rlkernel_triton.launchers import Plan, launcher_for


def divergence(call: DivergenceCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: DivergenceCall) -> Callable[[DivergenceCall], Tensor]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.divergence.DivergenceCall`.

    Memory beyond results and gradient: 24 bytes per row; with a list some numbers per entry, and a bit per logit.
    """
    if gradient_wanted("divergence", call):
        return DivergencePair(call)
    host = _Host(call)
    return lambda call: host.forward(call)[0]


class DivergencePair(Pair[DivergenceCall, Tensor]):
    """Divergences, and the gradient of the student's logits."""

    op = "divergence"

    def __init__(self, call: DivergenceCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call)

    def forward(self, call: DivergenceCall) -> tuple[Tensor, Saved]:
        """One launch, and with a list what makes it safe."""
        values, saved, teacher = self._host.forward(call)
        lists = (None, None) if isinstance(teacher, Tensor) else (teacher.ids, teacher.log_t)
        given = None if call.teacher_ids is not None else call.teacher
        T, T_t = (x if isinstance(x, Tensor) else None for x in (call.temperature, call.teacher_temperature))
        return values, (call.logits, given, *lists, call.mask, T, T_t, saved)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One launch, and with a list one more."""
        (logits, teacher, ids, log_t, mask, T, T_t, of_rows), (g,) = saved, grads
        if logits is None or of_rows is None or g is None:
            raise RLKernelError("divergence: its backward pass got less than its forward pass saved")
        given = teacher if ids is None or log_t is None else List(ids, log_t, None)
        return (self._host.backward(logits, given, mask, T, T_t, of_rows, g),)  # type: ignore[arg-type]  # one is there

    @classmethod
    def saved_like(cls, call: DivergenceCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments, 6 N numbers, and with a list its entries made safe."""
        del result, wanted
        x, N, ids = call.logits, call.logits.shape[:-1].numel(), call.teacher_ids
        T, T_t = (x if isinstance(x, Tensor) else None for x in (call.temperature, call.teacher_temperature))
        lists: Saved = (None, None)
        if ids is not None:
            shape = (N, ids.shape[-1])
            lists = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)
        saved = x.new_empty((SAVED, N), dtype=torch.float32)
        return x, call.teacher if ids is None else None, *lists, call.mask, T, T_t, saved


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: DivergenceCall) -> None:
        logits, ids, device = call.logits, call.teacher_ids, call.logits.device
        self._rows, self._V = logits.shape[:-1], logits.shape[-1]
        self._N, T, T_t = self._rows.numel(), call.temperature, call.teacher_temperature
        T_t = T if T_t is None else T_t
        student, self._copied = layout_of(logits)
        teacher, self._teacher_copied = (None, False) if ids is not None else layout_of(call.teacher)
        options = Options(call.kind, call.beta, _number(T), _number(T_t), call.mask is not None)
        K = 0 if ids is None else ids.shape[-1]
        self._compare = CompareRows(Plan(launcher_for(device)), self._N, self._V, options, student, teacher, K)

    def forward(self, call: DivergenceCall) -> tuple[Tensor, Tensor, Tensor | List]:
        """The result, what the gradient needs of the rows, and the teacher as kernels read it."""
        device = call.logits.device
        values = torch.empty(self._rows, dtype=torch.float32, device=device)
        saved = torch.empty((SAVED, self._N), dtype=torch.float32, device=device)
        of = self._of(call.mask, call.temperature, call.teacher_temperature)
        teacher: Tensor | List = call.teacher
        if call.teacher_ids is not None:
            K = call.teacher_ids.shape[-1]
            ids, log_t = (x.detach().reshape(self._N, K) for x in (call.teacher_ids, call.teacher))
            teacher = List.of(ids, log_t, self._V)
        self._compare.values(_lying(call.logits, self._copied), self._teacher(teacher), of, values, saved)
        return values, saved, teacher

    def backward(
        self, logits: Tensor, teacher: Tensor | List, mask: Tensor | None, T: Tensor | None, T_t: Tensor | None,
        saved: Tensor, g: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of the logits."""
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        of = self._of(mask, T, T_t)
        x = _lying(logits, self._copied)
        self._compare.gradient(x, self._teacher(teacher), of, saved, g.contiguous(), out)
        return out

    def _teacher(self, teacher: Tensor | List) -> Tensor | List:
        return _lying(teacher, self._teacher_copied) if isinstance(teacher, Tensor) else teacher

    def _of(self, mask: Tensor | None, T: object, T_t: object) -> RowTensors:
        """Mask and temperatures, one a row; the teacher's are the student's unless it has its own."""
        each = [per_row(x, self._rows) if isinstance(x, Tensor) else None for x in (T, T if T_t is None else T_t)]
        return RowTensors(None if mask is None else mask.contiguous(), *each)  # type: ignore[arg-type]  # tensors stay such


def _number(T: float | Tensor) -> float | None:
    return None if isinstance(T, Tensor) else float(T)


def _lying(x: Tensor, copied: bool) -> Tensor:
    """Rows as the kernels' layout has them."""
    return x.clone(memory_format=torch.contiguous_format) if copied else x

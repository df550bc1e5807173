"""linear_divergence@1 on Hopper: the KL of a student from a teacher, both by hidden states and head.

`compare.cu` computes both products of a tile, one after the other, and compares them in fp32: no tensor of logits is
made. With gradients it writes two numbers of 16 bits per logit of a block of rows, from which one pass makes the
gradient of the logits; "save" keeps that. The products of d_hidden and d_weight are torch's, as on Triton.

Legend: N rows · n rows of a block · D, E hidden sizes of student and teacher · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Saved, gradient_wanted
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_cuda.linear_divergence.compare import SCRATCH, Compare, Form, Side
from rlkernel_cuda.linear_logprob.head import readable
from rlkernel_cuda.linear_logprob.launch import too_large_to_copy
from rlkernel_cuda.linear_logprob.logits import LOG2E, multiprocessors
from rlkernel_cuda.linear_logprob.plan import round_up
from rlkernel_triton.common.row_layout import per_row
from rlkernel_triton.launchers import launcher_for
from rlkernel_triton.linear_divergence import launch as portable
from rlkernel_triton.linear_divergence.gradients import Block

KEPT: Final = 5 << 27  # logits of a block: two numbers of 16 bits are kept of each, 1.25 GiB and 1.25 GiB
MOST_ROWS: Final = 8192  # of a block
LARGEST: Final = float(torch.finfo(torch.float32).max)  # of temperatures: beyond it, both sides are uniform in fp32
MULTIPLE: Final = 1024  # of rows of a block: tiles fill the multiprocessors, slices of numbers are aligned


def fits(call: LinearDivergenceCall) -> Reason | None:
    """Refuses a teacher without a head, one that is not bf16, and large heads that would have to be copied."""
    head = call.teacher_weight
    if head is None:
        what = "a teacher by its logits or a list: both sides' logits are made from hidden states here"
        return Reason("shape", "unsupported", what, "pass teacher_weight and the teacher's hidden states")
    if call.teacher.dtype != torch.bfloat16:
        what = f"teacher is {call.teacher.dtype}; wgmma multiplies bf16 here"
        return Reason("shape", "unsupported", what, "cast teacher and teacher_weight to bfloat16")
    return too_large_to_copy("weight", call.weight) or too_large_to_copy("teacher_weight", head)


def linear_divergence(call: LinearDivergenceCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearDivergenceCall) -> Callable[[LinearDivergenceCall], Tensor]:
    """What runs calls of this shape; see `rlkernel_core.spec.linear_divergence.LinearDivergenceCall`.

    Memory beyond results and gradients: 128 KB a multiprocessor, and 28 bytes for each row and tile of 256 ids of a
    block; with gradients three numbers of 16 bits for each logit of a block, and with several blocks d_weight in fp32.
    "save" keeps the gradient of all rows' logits, and its backward pass makes a copy of hidden or d_hidden in fp32.
    """
    if gradient_wanted("linear_divergence", call):
        return LinearDivergencePair(call)
    host = _Host(call)

    def run(call: LinearDivergenceCall) -> Tensor:
        with torch.no_grad():
            return host.forward(call)[0]

    return run


class LinearDivergencePair(portable.LinearDivergencePair):
    """Divergences, and the gradients of the student's operands."""

    @classmethod
    def host(cls, call: LinearDivergenceCall) -> portable.Host:
        """What runs calls of this shape."""
        return _Host(call)

    @classmethod
    def saved_like(cls, call: LinearDivergenceCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments, or those that are left to multiply with and the gradient of the logits."""
        del result, wanted
        hidden, N = call.hidden, call.hidden.shape[:-1].numel()
        if call.backward == "save":
            return hidden, call.weight, call.mask, hidden.new_empty((N, round_up(call.weight.shape[0], 8)))
        return *portable.arguments(call), hidden.new_empty(0, dtype=torch.float32)


class _Host(portable.Host):
    """What the host does for calls of one shape."""

    def __init__(self, call: LinearDivergenceCall) -> None:
        self._shape, self._V, self._device = call.hidden.shape[:-1], call.weight.shape[0], call.hidden.device
        self._N = self._shape.numel()
        T, T_t = call.temperature, call.teacher_temperature
        self._T, self._T_t = (None if x is None or isinstance(x, Tensor) else min(float(x), LARGEST) for x in (T, T_t))
        self._one_temperature = T_t is None
        self._form = Form(call.kind, 0, self._V, call.hidden.shape[-1], call.teacher.shape[-1], call.mask is not None)
        self._pitch = self._form.pitch
        block = min(MOST_ROWS, max(MULTIPLE, KEPT // self._pitch // MULTIPLE * MULTIPLE))
        self._blocks = [slice(first, min(first + block, self._N)) for first in range(0, self._N, block)]
        self._most, self.several = min(block, self._N), len(self._blocks) != 1
        self._launcher, self._compares = launcher_for(self._device), dict[Form, Compare]()

    def forward(self, call: LinearDivergenceCall, *, save: bool = False) -> tuple[Tensor, Tensor]:
        """The result, and with `save` the gradient of the logits [N, pitch], where upstream is 1."""
        values = self._numbers(self._N)
        dz = call.hidden.new_empty((self._N, self._pitch)) if save else None
        up = self._numbers(self._N).fill_(1.0) if save else None
        for _ in self._compared(portable.arguments(call), values, dz, up):
            pass
        result: Tensor = torch.ops.aten._unsafe_view(values, self._shape)  # noqa: SLF001  # no view: it may be changed
        return result, self._numbers(0) if dz is None else dz

    def gradients(self, given: Saved, saved: Tensor, g: Tensor) -> Iterator[Block]:
        """The gradients of the logits of each block: both products again."""
        del saved
        hidden, mask = given[0], given[5]
        if hidden is None:
            raise RLKernelError("linear_divergence: its backward pass got less than its forward pass saved")
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        counted = None if mask is None else mask.contiguous().view(-1, 1)
        for rows, dz in self._compared(given, self._numbers(self._N), flat.new_empty((self._most, self._pitch)), g):
            x = flat[rows]
            if counted is not None:  # products must not meet what rows hold that do not count
                x = torch.where(counted[rows], x, 0.0)
            yield Block(rows, x, dz[:, : self._V])

    def _compared(
        self, given: Saved, values: Tensor, dz: Tensor | None, g: Tensor | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Write all divergences, block by block; with dz the gradient of a block's logits, which is yielded.

        Args:
            given: the tensors of a call.
            values: [N] fp32.
            dz: room for the gradients of all logits, or of those of a block, one after another.
            g: [N] upstream gradients.
        """
        hidden, weight, teacher, head, _, mask, T, T_t = [None if x is None else x.detach() for x in given]
        flat: list[Any] = [x.reshape(-1, x.shape[-1]) for x in (hidden, weight, teacher, head) if x is not None]
        x, w, t, v = [readable(some) for some in flat]
        counted = None if mask is None else mask.contiguous().view(-1)
        scale = self._scale(self._T, T)
        t_scale = scale if self._one_temperature else self._scale(self._T_t, T_t)
        scratch = self._numbers(multiprocessors(self._device) * SCRATCH)
        room = (2, 0 if dz is None else self._most, self._form.kept_pitch)
        logits = torch.empty(room, dtype=torch.float16, device=self._device)
        for rows in self._blocks:
            n = rows.stop - rows.start
            compare = self._compare(n, save=dz is not None)
            some, kept = None if counted is None else counted[rows], compare.room(logits)
            student, of_teacher = Side(x[rows], w, scale[rows]), Side(t[rows], v, t_scale[rows])
            compare.values(student, of_teacher, some, scratch, values[rows], kept)
            if dz is not None and g is not None:
                here = dz[rows] if len(dz) == self._N else dz[:n]
                compare.gradient(some, g[rows], kept, here)
                yield rows, here
            del kept  # before the next block takes as much

    def _numbers(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.float32, device=self._device)

    def _scale(self, number: float | None, T: Tensor | None) -> Tensor:
        """[N] log2(e) / T; NaN where a temperature has no meaning."""
        t: Any = self._numbers(self._N).fill_(number) if number is not None else per_row(T, self._shape)  # type: ignore[arg-type]
        return torch.where((t > 0) & (t < float("inf")), LOG2E / t, float("nan"))

    def _compare(self, n: int, *, save: bool) -> Compare:
        """The launches for n rows."""
        form = self._form._replace(n=n, save=save)
        found = self._compares.get(form)
        if found is None:
            found = self._compares[form] = Compare(self._launcher, form, self._device)
        return found

"""The logits of a head beside the sums of linear_logprob@1, and its log-probabilities of what was drawn from them.

The head is read once, in the tiles of linear_logprob; a tile from which an id was drawn is read again. What is kept of
the tiles is 12 bytes a row and tile for each law, the drawn one and the raw one.

Legend: N rows · D hidden · V vocabulary · P tiles of V, in the pieces of linear_logprob.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.matmul_tiles import options_of
from rlkernel_triton.common.merge_softmax import SAVED_PLANES, WARPS, merge_tiles, rows_per_program
from rlkernel_triton.common.sampling_arguments import flat
from rlkernel_triton.common.softmax_rows import MergeSoftmax, RowShape, RowTensors
from rlkernel_triton.launchers import Launcher
from rlkernel_triton.linear_logprob.head import head_tile, stats_kind, tiles_of
from rlkernel_triton.lm_head_sample import trainer_kernels as kernels
from rlkernel_triton.lm_head_sample.head import Head, Operands

SUMS: Final = 3  # numbers of a tile: the drawn id's logit, the largest of the others, their sum
STATED: Final = 128  # rows of a program that changes what a draw states


class TrainerHead(Head):
    """The logits of calls of one shape, and what linear_logprob computes of the tokens that are drawn from them.

    Args:
        launcher: what binds the kernels.
        call: a call of the shape, with rows and a stored head.
        V: size of the vocabulary.
        law: the law that is drawn from is that of linear_logprob; else the raw one alone is its.
    """

    spare_tiles = 2  # of a slab: one that its end cuts, and one that ends with a piece

    def __init__(self, launcher: Launcher, call: LmHeadSampleCall, V: int, *, law: bool) -> None:
        super().__init__(launcher, call, V)
        hidden, weight, T = call.hidden, call.weight, call.temperature
        self._tma, self.left_to_cap = False, None
        self.tile = tile = head_tile(hidden, weight, stats_kind(call.softcap, support=False))
        self._law, self._raw = law, call.raw_logprob
        self.pieces, self.piece = vocab_parallel.pieces(V, 1)
        per = triton.cdiv(self.piece, tile.BN)
        self.P = tiles_of(V, self.piece, tile.BN)
        number = {} if isinstance(T, Tensor) else {"T": float(T)}
        fixed: dict[str, Any] = {
            **number, **self._fixed, **self._strides, "n": self.N, "V": V, "piece": self.piece, "raw_T": 1.0,
            "HAS_T": not number, "HAS_CAP": call.softcap is not None, "LAW": law, "RAW": self._raw, "BM": tile.BM,
            "BN": tile.BN, "BK": tile.BK,
        }  # fmt: skip
        compiled: dict[str, Any] = {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "options": options_of(hidden),
        }
        self._slab = launcher.bind(kernels.head_logits_and_sums, **compiled, **fixed, GROUP=tile.GROUP)
        self._drawn = launcher.bind(kernels.drawn_tile_sums, **compiled, **fixed)
        width = triton.next_power_of_2(min(per, self.P))
        self._some = rows_per_program(width)
        self._merge = launcher.bind(
            merge_tiles, num_warps=WARPS, first=0, n=self.N, N=self.N, P=self.P, per=per, pieces=self.pieces,
            HAS_INDEX=False, SUPPORT=False, MOMENT=False, ROWS=self._some, WIDTH=width,
        )  # fmt: skip
        self._softmax = {
            T: MergeSoftmax(
                launcher, RowShape(self.N, V, T, call.softcap, False, None), V, self.pieces, torch.Size((self.N,)),
                hidden.device, keep=False, moment=False,
            )
            for T in {number.get("T"), 1.0}
        }  # fmt: skip
        self._T = number.get("T")
        self._state = launcher.bind(kernels.state_trainer_bits, N=self.N, LAW=law, RAW=self._raw, BLOCK=STATED)

    def of(self, call: LmHeadSampleCall) -> Operands:
        """The operands of a call as the kernels read them, with room for sums."""
        T, N = call.temperature, self.N
        each = None
        if isinstance(T, Tensor) and self._law:
            each = flat(T).to(torch.float32)
            if call.slot is not None and each.shape[0] > 1:
                each = each[flat(call.slot).to(torch.int64).clamp(0, each.shape[0] - 1)]
            each = each.expand(N).contiguous()
        sums = torch.empty((self._law + self._raw, SUMS, N, self.P), dtype=torch.float32, device=self.device)
        return super().of(call)._replace(T=each, sums=sums)

    def logits(self, of: Operands, first: int, width: int, out: Tensor | None = None, *, cap: bool = True) -> Tensor:
        """[N, width] fp32 under the softcap, whatever `cap` says; sums of their tiles are kept."""
        del cap
        if out is None:
            out = torch.empty(self.N, width, dtype=torch.float32, device=self.device)
        BM, BN = self.tile.BM, self.tile.BN
        per = triton.cdiv(self.piece, BN)
        begin, last = (v // self.piece * per + v % self.piece // BN for v in (first, first + width - 1))
        grid = (triton.cdiv(self.N, BM) * (last - begin + 1), 1, 1)
        self._slab(
            grid, of.hidden, of.weight, of.bias, of.inner, of.factor, *self._temperatures(of), out, *self._sums(of),
            first, width,
        )  # fmt: skip
        return out

    def stated(self, of: Operands, result: SampleResult) -> SampleResult:
        """A draw from these logits, which states what linear_logprob computes of its tokens."""
        token, counts = result.token, result.kept_count
        self.sum_drawn_tiles(of, token, counts)
        law_sums, raw_sums = self._sums(of)
        law = self.logprob(law_sums, token, self._T, of.T) if self._law else None
        raw = self.logprob(raw_sums, token, 1.0, None) if self._raw else None
        self._state(
            (triton.cdiv(self.N, STATED), 1, 1), law, raw, counts, result.logprob, result.log_kept_mass,
            result.raw_logprob,
        )  # fmt: skip
        return result

    def sum_drawn_tiles(self, of: Operands, token: Tensor, counts: Tensor) -> None:
        """Take the tokens [N] of rows whose counts are not 0 out of the sums of their tiles."""
        self._drawn(
            (self.N, 1, 1), of.hidden, of.weight, of.bias, of.inner, of.factor, token, counts, *self._temperatures(of),
            *self._sums(of),
        )  # fmt: skip

    def logprob(self, sums: Tensor, token: Tensor, number: float | None, T: Tensor | None) -> Tensor:
        """[N] of drawn tokens, as linear_logprob merges sums [3, N, P]: at temperature `number`, or where None at T."""
        size = (SUMS + 1) * self.N * self.pieces  # a plane more, for a moment that nobody asks for
        merged = torch.empty(size + SAVED_PLANES * self.N, dtype=torch.float32, device=self.device)
        self._merge((triton.cdiv(self.N, self._some), self.pieces, 1), sums, token, token, merged)
        return self._softmax[number](merged, RowTensors(token, T), merged[size:]).logprob

    def _temperatures(self, of: Operands) -> tuple[Tensor | None, ...]:
        return () if self._T is not None else (of.T,)

    def _sums(self, of: Operands) -> tuple[Tensor, Tensor]:
        """Sums of the law and of the raw law; one of them in place of the other where there is one."""
        return of.sums[0], of.sums[-1]  # type: ignore[index]  # `of` made them

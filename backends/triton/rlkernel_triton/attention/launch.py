"""attention@1 on Triton: one launch forward, or two where few queries may have many keys; backward up to three.

Sizes alone decide whether keys are split, so that a captured graph launches what the same call would.

Legend: T queries · S rows of keys, or the most keys that a sequence in pages has · B sequences · Hq, Hk heads, E = Hq /
Hk · D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from math import e, log2
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.fixed_sums import lanes_of, row_sum
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.attention import AttentionCall, AttentionResult, most_keys, scale_of
from rlkernel_triton.attention import gradient_kernels, kernels
from rlkernel_triton.attention.tiles import CHUNK, NARROWEST, WIDEST, Tile, tile_for
from rlkernel_triton.common.device import arch_of, has_pdl
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, options_of
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for
from rlkernel_triton.quant.tile_config import machine

STEEP: Final = 1 << 24  # a stride of which 64 do not fit 31 bits, by far
FAR: Final = 1 << 30  # a window beyond all positions
PRODUCTS: Final = 1024  # that a program of `own_sums` adds
# Products are rounded before they are added: what adds, a program of a block or one that merges, decides no bit.
_ROUNDED: Final = {"enable_fp_fusion": False}


def fits(call: AttentionCall) -> Reason | None:
    """A head lies in registers whole."""
    D = call.q.shape[-1]
    if D <= WIDEST:
        return None
    return Reason("shape", "unsupported", f"heads of a width of {D}; the widest are {WIDEST}")


def attention(call: AttentionCall) -> AttentionResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: AttentionCall) -> Callable[[AttentionCall], AttentionResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.attention.AttentionCall`."""
    if gradient_wanted("attention", call):
        return AttentionPair(call)
    return _Host(call).forward


class AttentionPair(Pair[AttentionCall, AttentionResult]):
    """The weighted values, and the gradients from probabilities that are computed again."""

    op = "attention"

    def __init__(self, call: AttentionCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call)

    def forward(self, call: AttentionCall) -> tuple[AttentionResult, Saved]:
        """The result; the arguments and both results are saved."""
        result = self._host.forward(call)
        return result, self.saved_like(call, result, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A launch for what queries own, one for queries, one for keys and values; torch's sums for the sinks."""
        q, k, v, cu_q, cu_k, table, used, sinks, out, lse = saved
        if q is None or k is None or v is None or cu_q is None or out is None or lse is None:
            raise RLKernelError("attention: its backward pass got less than its forward pass saved")
        host, (of_q, of_k, of_v, of_sinks) = self._host, self.wanted
        g, g_lse = grads
        g = torch.zeros_like(out) if g is None else g.contiguous()
        own = host.own(g, out, None if g_lse is None else g_lse.contiguous())
        rows = host.lying(q, k, v), (g, lse, own), host.places(cu_q, cu_k, table, used)
        d_q = host.of_queries(*rows) if of_q else None
        d_k, d_v = host.of_keys(*rows) if of_k or of_v else (None, None)
        d_sinks = None
        if of_sinks and sinks is not None:
            share = torch.where(lse.isneginf(), 0.0, torch.exp(sinks.float() - lse))
            d_sinks = -row_sum(share * own).to(sinks.dtype)
        return d_q, d_k if of_k else None, d_v if of_v else None, d_sinks

    @classmethod
    def saved_like(cls, call: AttentionCall, result: AttentionResult, wanted: tuple[bool, ...]) -> Saved:
        """The call's tensors and the results, as they are."""
        del wanted
        places = call.cu_q, call.cu_k, call.page_table, call.seqused_k
        return call.q, call.k, call.v, *places, call.sinks, result.out, result.lse


class _Layout:
    """The strides of tensors like x, which are copied where a head's numbers do not lie side by side, or keys far."""

    def __init__(self, x: Tensor) -> None:
        self._copied = (x.shape[-1] > 1 and x.stride(-1) != 1) or x.stride(-3) >= STEEP
        self.strides = torch.empty(x.shape, device="meta").stride()[:-1] if self._copied else x.stride()[:-1]

    def lying(self, x: Tensor) -> Tensor:
        """The tensor as the strides have it."""
        return x.clone(memory_format=torch.contiguous_format) if self._copied else x


_Tensors = tuple[Tensor, ...]


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: AttentionCall) -> None:
        q, k, table = call.q, call.k, call.page_table
        self._T, self._Hq, self._D = q.shape
        self._like, self._keys = q.new_empty(0, device="meta"), k.shape
        self._device, self._dtype, self._paged = q.device, q.dtype, table is not None
        self._E = self._Hq // k.shape[-2]
        self._B = B = call.cu_q.shape[0] - 1
        self._W = max(NARROWEST, triton.next_power_of_2(self._D))
        self._layouts = tuple(_Layout(x) for x in (q, k, call.v))
        (q_token, q_head), *of_keys = (x.strides for x in self._layouts)
        strides = {"q_token": q_token, "q_head": q_head}
        for name, found in zip("kv", of_keys, strict=True):
            strides |= dict(zip((f"{name}_token", f"{name}_head"), found[-2:], strict=True))
        G, N, P = 1, 0, 0
        self._S = k.shape[0]
        self._pages = {"k_page": 0, "v_page": 0}
        if table is not None:
            (N, G), P = k.shape[:2], table.shape[1]
            self._S = P * G
            self._pages = {f"{name}_page": found[0] for name, found in zip("kv", of_keys, strict=True)}
        scale, cap = scale_of(call), call.softcap
        self._numbers: dict[str, Any] = {
            **strides, "T": self._T, "B": B, "S": self._S, "Hq": self._Hq, "E": self._E, "D": self._D, "W": self._W,
            "OPERAND": OPERAND_TYPES[torch.float32 if INTERPRETED else q.dtype],
            "CAUSAL": call.causal, "WINDOW": call.window is not None, "HAS_CAP": cap is not None,
            "scale": scale if cap is not None else scale * log2(e), "softcap": 1.0 if cap is None else float(cap),
            "window": 0 if call.window is None else min(call.window, FAR),
        }  # fmt: skip
        self._paging: dict[str, Any] = {"PAGED": self._paged, "G": G, "P": P, "N": N, **self._pages}
        self._factor = {"factor": scale}
        self._sinks = call.sinks is not None
        self._plan = Plan(launcher_for(q.device))
        self._arch, self._options = arch_of(q), {**options_of(q), **_ROUNDED}
        tile = self._tile("forward")
        programs = self._blocks(tile)
        self._most = most_keys(call)
        self._chunks = triton.cdiv(self._most, CHUNK)
        # Few programs would leave multiprocessors idle while others walk all keys.
        self._split = self._chunks > 1 and programs < 2 * machine(q.device).multiprocessors
        self._grid = (programs * (self._chunks if self._split else 1), 1, 1)
        self._pdl = self._split and has_pdl(q)

    def forward(self, call: AttentionCall) -> AttentionResult:
        """The result."""
        out = torch.empty((self._T, self._Hq, self._D), dtype=self._dtype, device=self._device)
        lse = torch.empty((self._T, self._Hq), dtype=torch.float32, device=self._device)
        if not self._T:
            return AttentionResult(out, lse)
        sinks = out if call.sinks is None else call.sinks.contiguous()
        given = (
            *self.lying(call.q, call.k, call.v),
            *self.places(call.cu_q, call.cu_k, call.page_table, call.seqused_k),
            sinks,
        )
        attend = self._plan.get("forward", self._bound_forward)
        if not self._split:
            attend(self._grid, *given, out, lse, lse)
            return AttentionResult(out, lse)
        parts = torch.empty((self._chunks, *out.shape), dtype=torch.float32, device=self._device)
        tops = torch.empty((self._chunks, *lse.shape, 2), dtype=torch.float32, device=self._device)
        spans = torch.empty((self._T, 2), dtype=torch.int32, device=self._device)
        attend(self._grid, *given, parts, tops, spans)
        merge = self._plan.get("merge", self._bound_merge)
        merge((self._T * self._Hq, 1, 1), parts, tops, spans, sinks, out, lse)
        return AttentionResult(out, lse)

    def own(self, g: Tensor, out: Tensor, g_lse: Tensor | None) -> Tensor:
        """What a query owns of its keys' gradients: sum(g out) - g_lse, [T, Hq]."""
        own = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        W = lanes_of(self._D)
        ROWS = PRODUCTS // W

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                gradient_kernels.own_sums, options=_ROUNDED, any_alignment=("g", "g_lse"), M=own.numel(), D=self._D,
                W=W, ROWS=ROWS, HAS_LSE=g_lse is not None,
            )  # fmt: skip

        if own.numel():
            sums = self._plan.get(f"own of {'out' if g_lse is None else 'both'}", bound)
            sums((triton.cdiv(own.numel(), ROWS), 1, 1), g, out, own if g_lse is None else g_lse, own)
        return own

    def of_queries(self, lying: _Tensors, rows: _Tensors, places: _Tensors) -> Tensor:
        """The gradient of q."""
        d_q = torch.empty((self._T, self._Hq, self._D), dtype=self._dtype, device=self._device)
        tile = self._tile("queries")

        def bound(launcher: Launcher) -> Launch:
            return self._bound(
                launcher, gradient_kernels.query_gradients, tile, any_alignment=("g",), **self._paging, **self._factor
            )

        if self._T:
            self._plan.get("queries", bound)((self._blocks(tile), 1, 1), *lying, *rows, *places, d_q)
        return d_q

    def of_keys(self, lying: _Tensors, rows: _Tensors, places: _Tensors) -> tuple[Tensor, Tensor]:
        """The gradients of k and v, which are not in pages."""
        d_k, d_v = (torch.empty(self._keys, dtype=self._dtype, device=self._device) for _ in "kv")
        tile = self._tile("keys")

        def bound(launcher: Launcher) -> Launch:
            return self._bound(launcher, gradient_kernels.key_gradients, tile, any_alignment=("g",), **self._factor)

        if d_k.numel():
            grid = ((self._S // tile.KEYS + self._B + 1) * self._keys[1], 1, 1)
            self._plan.get("keys", bound)(grid, *lying, *rows, *places[:2], d_k, d_v)
        return d_k, d_v

    def lying(self, *given: Tensor) -> _Tensors:
        """q, k and v as their strides have them."""
        return tuple([layout.lying(x) for layout, x in zip(self._layouts, given, strict=True)])

    def places(self, cu_q: Tensor, cu_k: Tensor | None, table: Tensor | None, used: Tensor | None) -> _Tensors:
        """Offsets of queries, those of keys or how many there are, and the pages: cu_q for what is not given."""
        of_keys = used if cu_k is None else cu_k
        cu_q = cu_q.contiguous()
        return cu_q, cu_q if of_keys is None else of_keys.contiguous(), cu_q if table is None else table.contiguous()

    def _tile(self, kernel: str) -> Tile:
        return tile_for(kernel, self._arch, self._dtype.itemsize, self._W)

    def _blocks(self, tile: Tile) -> int:
        """Programs that own a block of queries each."""
        each = min(self._E, tile.ROWS)
        blocks: int = self._T // (tile.ROWS // each) + self._B + 1
        return blocks * (self._Hq // self._E) * -(-self._E // each)

    def _bound_forward(self, launcher: Launcher) -> Launch:
        return self._bound(
            launcher, kernels.attend, self._tile("forward"), **self._paging, HAS_SINKS=self._sinks, SPLIT=self._split,
            most=self._most,
            chunks=self._chunks, CHUNK=CHUNK, USE_PDL=self._pdl,
        )  # fmt: skip

    def _bound_merge(self, launcher: Launcher) -> Launch:
        return launcher.bind(
            kernels.merge_chunks, num_warps=1, options={**_ROUNDED, **({"launch_pdl": True} if self._pdl else {})},
            T=self._T, Hq=self._Hq, HAS_SINKS=self._sinks, D=self._D, W=self._W, USE_PDL=self._pdl,
        )  # fmt: skip

    def _bound(self, launcher: Launcher, kernel: Any, tile: Tile, **more: Any) -> Launch:
        return launcher.bind(
            kernel, num_warps=tile.num_warps, num_stages=tile.num_stages, options=self._options, **self._numbers,
            ROWS=tile.ROWS, KEYS=tile.KEYS, SLICE=tile.SLICE, EACH=min(self._E, tile.ROWS), **more,
        )  # fmt: skip

"""attention@1 by FlashAttention 3 on Hopper, forward, without a split of the keys.

FlashAttention takes keys in tiles by their positions and, with num_splits=1, adds them in one program. Two of its
choices go by max_seqlen_q, the queries of the longest sequence, and change bits: where that is 1 it drops the causal
mask, and takes wider tiles; and it reads pages by TMA only where it is more than a tile has rows. So the
backend passes MANY, or T where that is more, and the library chooses alike for every batch.

It writes no row beyond the last sequence, reads zeros for a page that is none, and has lse by heads: `finish_kernel`.
It multiplies values beyond a sequence's keys, up to the end of a tile, with 0, so a NaN there reaches the sequence:
`isolated` is not claimed. Nor is the softcap, for which it takes the approximate tanh of the hardware (2^-11).

Legend: T queries · S rows of keys · B sequences · N pages of G keys, P of a sequence at most · Hq, Hk heads of width D.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.attention import AttentionCall, AttentionResult, most_keys, scale_of
from rlkernel_cuda.fa3 import NEEDED, finish_kernel
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for, on_device_of

# Widest head -> keys of a tile, causal and not, of bf16 without a window: those of the kernels within the library.
TILES: Final = {64: (128, 192), 96: (144, 144), 128: (128, 176), 192: (112, 112), 256: (80, 80)}
MANY: Final = 256  # more queries than a tile has rows, which are 192 at most
MULTIPLE: Final = 8  # of D and of strides: TMA reads rows of 16 bytes
_BYTES: Final = 16
_ROWS: Final = 16  # of a program of `finish`
_MODULE: Final = "fa3_fwd._C"  # registers torch.ops.fa3_fwd


class Library(NamedTuple):
    """FlashAttention's forward operator, or why there is none."""

    forward: Any = None
    said: str = ""
    fix: str = ""


@cache
def library() -> Library:
    """Loads FlashAttention."""
    again = f"pip install {NEEDED}"
    try:
        import_module(_MODULE)
        forward = torch.ops.fa3_fwd.fwd.default
    except AttributeError as error:
        return Library(said=f"FlashAttention is not as it was in {NEEDED}: {error}", fix=again)
    except (ImportError, OSError, RuntimeError) as error:  # a library of another CUDA or torch among them
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Library(said=f"FlashAttention cannot be loaded here: {text}", fix="leave it out of the order")
    return Library(forward)


def fits(call: AttentionCall) -> Reason | None:
    """Refuses widths that TMA does not read, pages that are no whole tiles, and a library that cannot be loaded."""
    k, D = call.k, call.q.shape[-1]
    said, fix = "", ""
    if D % MULTIPLE or max(TILES) < D:
        said, fix = f"heads of a width of {D}", f"a multiple of {MULTIPLE}, at most {max(TILES)}"
    elif call.page_table is not None and k.shape[1] % (tile := _tile(D, call.causal)):
        said, fix = f"pages of {k.shape[1]} keys", f"a multiple of {tile} for heads of {D}"
    elif call.page_table is not None and not (_readable(k) and _readable(call.v)):
        said, fix = "pages whose rows TMA does not read", "Pass contiguous pages."
    else:
        _, said, fix = library()
    return Reason("shape", "unsupported", said, fix) if said else None


def prepare(call: AttentionCall) -> Callable[[AttentionCall], AttentionResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.attention.AttentionCall`.

    Raises:
        RLKernelError: FlashAttention is not as `fits` wants it.
    """
    return _Host(call).forward


def attention(call: AttentionCall) -> AttentionResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: AttentionCall) -> None:
        found = library()
        if found.forward is None:
            raise RLKernelError(f"{found.said}: {found.fix}.")
        self._attend, q, k, table = found.forward, call.q, call.k, call.page_table
        self._T, self._Hq, self._D = q.shape
        self._B, self._paged = call.cu_q.shape[0] - 1, table is not None
        self._most = min(most_keys(call), 2**31 - 1)
        self._options = {
            "max_seqlen_q": max(self._T, MANY),
            "max_seqlen_k": None if self._paged else k.shape[0],
            "softmax_scale": scale_of(call),
            "is_causal": call.causal,
            "num_splits": 1,
        }
        self._causal = call.causal
        (self._N, self._G), self._P = (k.shape[:2], table.shape[1]) if table is not None else ((0, 1), 0)
        self._plan = Plan(launcher_for(q.device))

    def forward(self, call: AttentionCall) -> AttentionResult:
        """The result."""
        q = call.q
        lse = torch.empty((self._T, self._Hq), dtype=torch.float32, device=q.device)
        if not self._T:
            return AttentionResult(torch.empty(q.shape, dtype=q.dtype, device=q.device), lse)
        cu_q, cu_k, table = self._places(call)
        with on_device_of(q):
            if self._B and call.k.numel():
                of_keys = {"seqused_k": cu_k, "page_table": table} if self._paged else {"cu_seqlens_k": cu_k}
                given = (_lying(x.detach()) for x in (q, call.k, call.v))
                out, by_head, *_ = self._attend(*given, cu_seqlens_q=cu_q, **of_keys, **self._options)
            else:  # no key at all
                out, by_head = torch.empty(q.shape, dtype=q.dtype, device=q.device), lse
            grid = (triton.cdiv(self._T, _ROWS), 1, 1)
            self._plan.get("finish", self._bound)(grid, out, by_head, cu_q, cu_k, table, lse)
        return AttentionResult(out, lse)

    def _places(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets of queries, those of keys or how many there are, and the pages, int32; cu_q for what is not given."""
        cu_q, table = _int32(call.cu_q), call.page_table
        of_keys = call.seqused_k if self._paged else call.cu_k
        if table is not None and table.dtype == torch.int64:
            table = table.clamp(-1, self._N)  # what is no page stays none
        return cu_q, cu_q if of_keys is None else _int32(of_keys), cu_q if table is None else _int32(table)

    def _bound(self, launcher: Launcher) -> Launch:
        return launcher.bind(
            finish_kernel.finish, num_warps=4, T=self._T, B=self._B, P=self._P, N=self._N, most=self._most,
            CAUSAL=self._causal, PAGED=self._paged, G=self._G, Hq=self._Hq, D=self._D,
            HEADS=triton.next_power_of_2(self._Hq), STEPS=self._B.bit_length(), ROWS=_ROWS,
        )  # fmt: skip


def self_test(device: str) -> None:
    """Values of 1 have the mean 1, whatever the weights.

    Raises:
        RLKernelError: FlashAttention is not as `fits` wants it, or the result is wrong.
    """
    q, ones = (torch.ones(3, heads, 64, dtype=torch.bfloat16, device=device) for heads in (2, 1))
    cu_q = torch.tensor([0, 3], dtype=torch.int32, device=device)
    out = attention(AttentionCall(q, ones, ones, cu_q=cu_q)).out
    error = (out.float() - 1).abs().max().item()
    if not error < 2**-7:
        raise RLKernelError(f"FlashAttention's means of ones are off by {error:.3g}")


def _tile(D: int, causal: bool) -> int:
    """Keys of a tile for heads of a width."""
    return TILES[min(width for width in TILES if width >= D)][0 if causal else 1]


def _readable(x: Tensor) -> bool:
    """Whether TMA reads a tensor as it lies, but for where it begins."""
    return x.stride(-1) == 1 and all(s and s % MULTIPLE == 0 for s in x.stride()[:-1])


def _lying(x: Tensor) -> Tensor:
    """A tensor that TMA reads: a copy where it does not read this one."""
    readable = _readable(x) and x.data_ptr() % _BYTES == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()

"""The cuda backend's host code and row kernels on CPU tensors, with its Gluon kernel replaced by the same in torch.

Runs in a process with TRITON_INTERPRET=1, which test_emulated.py starts. It proves how a call is cut and what is done
with the logits kernel's results; of that kernel itself it proves nothing, which needs a GPU (test_gpu_*.py).
"""

import os

import pytest
import torch

from tests.interpreted import language_replaced_once_a_launch

__all__ = ["language_replaced_once_a_launch"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FAR = -1e30


def pytest_ignore_collect(collection_path, config):
    return None if INTERPRETED else collection_path.suffix == ".py"


def bind_logits(launcher, kind, form):
    """A bound launch of the logits kernel; the rows and ids that it is run with are as many as it was bound for."""

    def launch(of, rows, ids, into):
        assert (form.n, form.width) == (rows.stop - rows.start, ids.stop - ids.start)
        assert (kind.biased, kind.masked) == (of.bias is not None, of.counted is not None)
        logits_kernel(kind, form, of, rows, ids, into)

    return launch


def logits_kernel(kind, form, of, rows, ids, into):
    """What `rlkernel_cuda.linear_logprob.logits` makes of the accumulators, in fp32 torch."""
    mode, tile, stride, out = form.mode, form.tile, form.stride, into.out
    x, w = of.x[rows].float(), of.w[ids].float()
    width = min(x.shape[1], w.shape[1])
    worked = x.shape[0]
    if of.counted is not None:
        block = tile.consumers * tile.rows
        worked = min(worked, -(-max(int(of.counted[0]) - rows.start, 0) // block) * block)
    y = x[:worked, :width] @ w[:, :width].T
    s2 = of.row_scale[rows][:worked, None]
    if of.bias is not None:
        y = y + of.bias[ids]
        y = torch.where(y == -torch.inf, FAR, y)
    bend = 1.0
    if kind.softcap is not None:
        capped = kind.softcap * torch.tanh(y * kind.logit_scale / kind.softcap)
        bend = torch.where(y <= FAR, 0.0, 1 - (capped / kind.softcap) ** 2)
        y = torch.where(y <= FAR, FAR, capped)
    if mode == 2:
        c = into.coef
        base = c.as_strided((3, worked), (stride, 1), c.storage_offset())
        lse2, ca, cb = (v[:, None] for v in base)
        out[:worked] = (torch.exp2(y * s2 - lse2) * (ca + cb * y) * bend).to(out.dtype)
        return
    target = of.target[: kind.N][rows][:worked].long()
    has = target >= 0
    row = torch.arange(worked)
    into.chosen[:worked] = torch.where(has, y[row, target.clamp_min(0)], into.chosen[:worked])
    y[row[has], target[has]] = FAR
    tiles = -(-y.shape[1] // tile.cols)
    y = torch.nn.functional.pad(y, (0, tiles * tile.cols - y.shape[1]), value=FAR).view(worked, tiles, tile.cols)
    m = y.nan_to_num(nan=FAR, posinf=torch.inf, neginf=-torch.inf).amax(2)
    y = y - m[..., None]
    d = y * s2[..., None]
    e = torch.exp2(d)
    tops = into.tops
    tops.as_strided((tiles, worked), (stride, 1), tops.storage_offset()).copy_(m.T)
    sums = into.sums.as_strided((tiles, 2, worked), (2 * x.shape[0], x.shape[0], 1))
    sums[:, 0] = e.sum(2).T
    sums[:, 1] = torch.where(e > 0, e * d, e * 0).sum(2).T
    if mode == 1:
        V = w.shape[0]
        out[:worked] = y.flatten(1)[:, :V].to(out.dtype)


def matmul(a, b, out_dtype=None, out=None):
    made = a.float() @ b.float()
    return made if out is None else out.copy_(made)


def bind_product(tile, a, b, out, earlier, count, *, transposed):
    """A bound launch of what product.cu makes: rows beyond the count are neither summed nor written."""
    sizes, adds, counted = (a.shape, b.shape, out.shape, out.stride()), earlier is not None, count is not None

    def launch(a, b, out, earlier, count, first):
        assert sizes == (a.shape, b.shape, out.shape, out.stride())
        assert (adds, counted) == (earlier is not None, count is not None)
        live = None if count is None else max(int(count[0]) - first, 0)
        if transposed:
            made = a[:live].float().t() @ b[:live].float()
        else:
            block = 2 * tile.consumers * tile.rows
            made = a[: None if live is None else -(-live // block) * block].float() @ b.float()
        rows = made.shape[0]
        out[:rows] = made + (0 if earlier is None else earlier[:rows])

    return launch


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    from rlkernel_cuda.linear_logprob import head, logits, products

    class Torch:
        """torch, with cuBLAS's fp32 results of bf16 operands."""

        mm = staticmethod(matmul)

        @staticmethod
        def addmm(c, a, b, out_dtype, out):
            return out.copy_(c + a.float() @ b.float())

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(logits, "bind", bind_logits)
    monkeypatch.setattr(head, "SAVED", (4, 1))  # the interpreter goes through what is masked off, too
    monkeypatch.setattr(products, "torch", Torch())
    monkeypatch.setattr(products, "by_pairs", bind_product)

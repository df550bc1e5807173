"""qmatmul on a CPU: a block of the weight at a time, so that memory does not grow with the weight."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.quant import dequantize, quantize
from rlkernel_torch.direct import qmatmul
from tests.test_linear_logprob_memory import peak

K = 1024
BLOCK = 4 << 20  # bytes of a block of the weight in fp32
KINDS = ("int4_g128", "nf4", "mxfp4", "gguf_q4_k")


def extra(N: int, kind: str, *, grad: bool) -> int:
    """Bytes at the peak of a product beyond its result and gradient; the dense weight would be 4 N K."""
    w = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), kind)
    x = torch.randn(2, K, requires_grad=grad)

    def run() -> torch.Tensor:
        y = qmatmul(x, w)
        if grad:
            y.sum().backward()
        return y.detach()

    most, y = peak(run)
    return int(most - y.nbytes - (x.grad.nbytes if x.grad is not None else 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_takes_a_few_blocks_of_the_weight(kind) -> None:
    small, large = extra(4096, kind, grad=False), extra(8192, kind, grad=False)
    assert large < 7 * BLOCK < 4 * 8192 * K
    assert large - small < BLOCK / 4
    assert extra(8192, kind, grad=True) < 7 * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_and_dequantising_take_a_few_blocks_beside_their_result(kind) -> None:
    full = torch.randn(8192, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    most, w = peak(lambda: quantize(full, kind))
    assert most - w.nbytes < full.nbytes + 7 * BLOCK
    most, out = peak(lambda: dequantize(w))
    assert most - out.nbytes < 7 * BLOCK

"""Tokens coded in blocks have the bits of the definition, NaN, inf, zeros and large numbers among them."""

import pytest
import torch

from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_cuda.common.quantize_tokens import coded

SPEC = QuantSpec.named("fp8_block128", act="block128_fp8")


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # numpy, in place of a GPU
@pytest.mark.parametrize(("M", "K", "multiple"), [(1, 128, 1), (7, 384, 4), (33, 256, 4)])
def test_codes_and_scales_are_those_of_the_definition(M, K, multiple) -> None:
    g = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=g) * 10.0 ** torch.randint(-30, 38, (M, 1), generator=g)
    x[0, :128] = -0.0
    if M > 1:
        x[3, 200], x[4, 10] = float("nan"), float("inf")
    x = x.bfloat16()
    codes, scale = coded(x, multiple)
    want = quantize_activation(x.float(), SPEC)
    assert torch.equal(codes[:M].view(torch.uint8), want.codes.view(torch.uint8))
    assert not codes[M:].view(torch.uint8).any()
    assert not scale[:, M:].any()
    assert scale.shape == (K // 128, -(-M // multiple) * multiple)
    assert torch.equal(scale[:, :M].t().nan_to_num(7.0), want.scale.nan_to_num(7.0))

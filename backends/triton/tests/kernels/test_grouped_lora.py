"""Low-rank additions of several groups of rows on Triton: against the definition in float64, and bits that stay."""

from dataclasses import replace

import pytest
import torch

import rlkernel as rlk
from rlkernel_core import quant as reference
from rlkernel_core.spec.qmatmul import LoRA, QmatmulCall
from rlkernel_torch.direct import qmatmul as definition
from rlkernel_triton.quant import dequantized
from rlkernel_triton.quant.epilogue import Epilogue
from rlkernel_triton.quant.grouped_lora import add_low_rank

ENDS = torch.tensor([5, 5, 20, 23], dtype=torch.int32)  # an empty group; rows from 23 on have none
M, K = 26, 320


def new(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def stacked(N, r, *, k=K, G=4):
    return LoRA(new(G, r, k, seed=1) / k**0.5, new(G, N, r, seed=2), -0.5)


def to(lora, *where):
    return LoRA(lora.A.to(*where), lora.B.to(*where), lora.scale)


def expected(x, lora, ends):
    """[M, N] in float64."""
    want, first = torch.zeros(x.shape[0], lora.B.shape[1], dtype=torch.float64), 0
    for a, b, last in zip(lora.A.double(), lora.B.double(), ends.tolist(), strict=True):
        want[first:last] = lora.scale * (x[first:last].double() @ a.t()) @ b.t()
        first = last
    return want


@pytest.mark.parametrize("r", [0, 1, 17, 80])  # 80: two tiles of ranks
def test_rows_get_the_addition_of_their_group(device, r) -> None:
    """K is split over programs; N is no multiple of a tile."""
    x, lora = new(M, K), stacked(65, r)
    out = torch.full((M, 65), torch.nan, device=device)
    add_low_rank(x.to(device), to(lora, device), ENDS.to(device), out)
    torch.testing.assert_close(out.cpu().double(), expected(x, lora, ENDS), rtol=1e-5, atol=1e-5)


def test_the_addition_alone_is_rounded_once(device) -> None:
    x, lora = new(M, K).half(), to(stacked(65, 17), torch.float16)
    out = torch.full((M, 65), torch.nan, dtype=torch.float16, device=device)
    add_low_rank(x.to(device), to(lora, device), ENDS.to(device), out)
    want = expected(x, lora, ENDS)
    assert bool(((out.cpu().double() - want).abs() <= 2.0**-11 * want.abs() + 2.0**-17).all())


CASES = {
    "canonical": ("int8_channel", torch.float32, {}),
    "tiles": ("int4_g128", torch.float16, {"activation": "silu"}),
    "blocks": ("mxfp8", torch.float32, {"activation": "swiglu"}),
    "experts in tiles": ("mxfp4", torch.float16, {"ends": ENDS}),
    "experts of integers": ("int8_channel", torch.float32, {"ends": ENDS, "activation": "swiglu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_product_takes_them_and_has_their_gradients(device, case) -> None:
    kind, dtype, given = CASES[case]
    N, groups = (32, {}) if "ends" in given else (128, {"lora_ends": ENDS})
    R = N // 2 if given.get("activation") == "swiglu" else N
    w = reference.quantize(new(128, K) / 16, kind, dtype=dtype)
    lora, dy = stacked(N, 8), new(M, R, seed=3).to(dtype)
    results = []
    both = (rlk.qmatmul, rlk.prepack(w.to(device)), device, dtype), (definition, w, "cpu", torch.float64)
    for f, v, at, of in both:
        given_to = new(M, K, seed=4), lora.A, lora.B, new(128, seed=5)
        leaves = [t.to(dtype).to(at, of).requires_grad_() for t in given_to]
        more = {n: t.to(at) if isinstance(t, torch.Tensor) else t for n, t in {**given, **groups}.items()}
        y = f(leaves[0], v, lora=LoRA(leaves[1], leaves[2], lora.scale), bias=leaves[3], **more)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(at, of))])
    for mine, theirs in zip(*results, strict=True):
        assert float((mine.cpu().double() - theirs).norm() / theirs.norm()) < (1e-5 if dtype == torch.float32 else 2e-3)


def test_rows_of_none_have_the_bits_of_the_product_alone(device) -> None:
    """Of one that is dequantized, too."""
    w = rlk.prepack(reference.quantize(new(64, 256).to(device), "int4_g128"))
    x, lora = new(60, 256).to(device, torch.float16), to(stacked(64, 4, k=256, G=2), device, torch.float16)
    ends = torch.tensor([3, 20], dtype=torch.int32, device=device)
    found = rlk.qmatmul(x, w, lora=lora, lora_ends=ends)
    plain, given = rlk.qmatmul(x, w), QmatmulCall(x, w, lora=lora, lora_ends=ends)
    pieces = [torch.empty(60, 64, dtype=torch.float16, device=device) for _ in range(2)]
    for y, epilogue in zip(pieces, (Epilogue(), Epilogue(lora=given.lora, groups=ends)), strict=True):
        dequantized.dequantized_product(x, w, epilogue, y)
    assert [torch.equal(a[20:], b[20:]) for a, b in ((found, plain), pieces)] == [True, True]
    assert [torch.equal(a[:20], b[:20]) for a, b in ((found, plain), pieces)] == [False, False]


def test_a_product_that_vanishes_keeps_its_sign(device) -> None:
    w = reference.quantize(torch.full((2, 1), 1e-30), "int8_channel").to(device)
    x, ends = torch.full((2, 1), -1e-30, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    y = rlk.qmatmul(x, w, lora=replace(to(stacked(2, 3, k=1, G=1), device), scale=0.5), lora_ends=ends)
    assert [bool(t.signbit().all()) for t in (rlk.qmatmul(x, w), y)] == [True, True]


@pytest.mark.parametrize("experts", [False, True], ids=["adapters", "experts"])
def test_no_rows_have_gradients_of_zero(device, experts) -> None:
    w = reference.quantize(new(8, 64), "int4_g32").to(device)
    lora, ends = (
        to(stacked(4 if experts else 8, 3, k=64, G=2), device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
    leaves = [t.requires_grad_() for t in (torch.empty(0, 64, device=device), lora.A, lora.B)]
    given = {"ends" if experts else "lora_ends": ends}
    y = rlk.qmatmul(leaves[0], w, lora=replace(lora, A=leaves[1], B=leaves[2]), **given)
    grads = torch.autograd.grad(y, leaves, torch.zeros_like(y))
    assert [(t.shape, bool(t.any())) for t in grads] == [(t.shape, False) for t in leaves]

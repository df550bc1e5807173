"""The affine suffix scan on Triton against the reference in float64, and the bits that its schedules share."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_torch.direct import affine_suffix_scan as definition
from rlkernel_triton.affine_suffix_scan.recursion import CHUNK, Recursion, SequenceLayout, run, schedule

B = 3


def batch(layout, device, T=CHUNK + 37, seed=0):
    """b, a, init and the arguments of a layout; several chunks, the last one not full."""
    g = torch.Generator().manual_seed(seed)
    b, a, init = torch.randn(B, T, generator=g), 1.1 * torch.rand(B, T, generator=g), torch.randn(B, generator=g)
    mask = torch.rand(B, T, generator=g) > 0.4
    more = {}
    if layout == "mask":
        more = {"mask": mask}
    elif layout == "lengths":
        more = {"lengths": torch.tensor([0, 7, T])}
    elif layout != "plain":
        b, a = b.reshape(-1), a.reshape(-1)
        more = {"cu_seqlens": torch.tensor([5, 90, 90, B * T - 11])}
        more |= {"mask": mask.reshape(-1)} if layout == "packed, mask" else {}
    return [x.to(device) for x in (b, a, init)], {n: x.to(device) for n, x in more.items()}


LAYOUTS = ("plain", "mask", "lengths", "packed", "packed, mask")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("exclusive", "masked_out"), [(False, "zero"), (True, "carry")])
def test_values_and_gradients_in_every_layout(device, layout, exclusive, masked_out) -> None:
    given, more = batch(layout, device)
    more |= {"exclusive": exclusive, "masked_out": masked_out}
    g = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(device)
    if "cu_seqlens" in more:
        g[:5], g[-11:] = 0, 0  # what is carried outside of all sequences is nobody's
    results = []
    for f, dtype in ((rlk.affine_suffix_scan, torch.float32), (definition, torch.float64)):
        b, a, init = (x.detach().to(dtype).requires_grad_() for x in given)
        out = f(b, a, init=init, **more)
        ((out.y * g).sum() + 3 * out.carry.sum()).backward()
        inside = (g != 0) | ("cu_seqlens" not in more)
        found = [out.y.detach() * inside, out.carry.detach(), *(x.grad for x in (b, a, init))]
        results.append([x.double() for x in found])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6 * float(theirs.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_a_chunk_gives_the_bits_of_a_program_a_row(device, layout) -> None:
    (b, a, init), more = batch(layout, device)
    rows = SequenceLayout.of(b.shape, B, more.get("mask"), more.get("lengths"), more.get("cu_seqlens"))
    by_row, by_chunk = (run(Recursion("scan", rows, b, a, init=init), by=by) for by in ("rows", "chunks"))
    assert torch.equal(by_row.out, by_chunk.out)
    assert torch.equal(by_row.first, by_chunk.first)


def test_few_long_rows_are_cut_into_chunks_and_many_are_not() -> None:
    found = [schedule(B, C, rule) for B, C, rule in ((16, 128, "gae"), (16, 128, "vtrace"), (4096, 4, "gae"))]
    assert found == ["chunks", "rows", "rows"]


def test_a_width_that_no_vector_divides_gives_the_bits_of_one_that_does(device) -> None:
    (b, a, init), _ = batch("plain", device, T=CHUNK + 32)
    want = rlk.affine_suffix_scan(b[:, :40].contiguous(), a[:, :40].contiguous(), init=init).y
    moved = [torch.cat([x[:, :1], x[:, :40]], 1)[:, 1:] for x in (b, a)]
    cut = [x[:, :47].contiguous() for x in (b, a)]
    got = rlk.affine_suffix_scan(*cut, init=init, lengths=torch.full((B,), 40, device=device)).y[:, :40]
    assert torch.equal(got, want)
    assert torch.equal(rlk.affine_suffix_scan(*moved, init=init).y, want)


def test_float64_is_refused_and_not_rounded(device) -> None:
    b = torch.randn(2, 9, dtype=torch.float64, device=device)
    with pytest.raises(rlk.ResolutionError, match="float64"):
        rlk.affine_suffix_scan(b, 0.5)
    with pytest.raises(rlk.ResolutionError, match="a is float64"):
        rlk.affine_suffix_scan(b.float(), b)

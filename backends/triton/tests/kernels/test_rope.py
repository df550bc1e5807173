"""rope against plain torch: the order of sums has one name in both manifests, and so the bits are the same."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.call_checks import same_results
from rlkernel_torch import backend as plain
from rlkernel_triton.claims import manifest

# Tokens, heads of q and of k, widths of a head and of the table. 1100 columns are two steps of a tile; 70 tokens of 2
# heads are three blocks of 64.
SHAPES = ((2, 2, 1, 1100, 1030), (70, 2, 1, 20, 14), (5, 3, 2, 128, 128))
# Names of weights, and whether pairs are neighbors.
OPTIONS = {"no weights": ((), False), "both weights": (("q", "k"), False), "of k, interleaved": (("k",), True)}


def results(shape, dtype, device, weights, interleaved):
    """Results and gradients of a call that is drawn anew; the last token is beyond the table."""
    T, HQ, HK, D, R = shape
    g = torch.Generator().manual_seed(sum(shape))

    def drawn(*shape):
        return torch.randn(*shape, generator=g).to(device, dtype)

    table = torch.randn(30, R, generator=g).to(device)
    positions = torch.randint(30, (T,), generator=g)
    positions[-1] = 30
    given = {"q": drawn(T, HQ, D), "k": drawn(T, HK, D), **{f"{n}_weight": drawn(D) for n in weights}}
    given = {name: x.requires_grad_() for name, x in given.items()}
    norm = {"eps": 1e-5, "offset": 0.3} if weights else {}
    out = rlk.rope(**given, positions=positions.to(device), table=table, interleaved=interleaved, **norm)
    grads = torch.autograd.grad([out.q, out.k], list(given.values()), [drawn(T, HQ, D), drawn(T, HK, D)])
    known = {n: x[:-1] for n, x in (("q", out.q), ("k", out.k))}  # NaN has many bits
    assert bool(out.q[-1].isnan().all() and out.k[-1].isnan().all())
    return known | {f"d_{n}": d for n, d in zip(given, grads, strict=True)}


def test_the_order_of_sums_has_the_name_that_plain_torch_gives_it() -> None:
    names = {i.sums for b in (plain, manifest("triton", "cuda")) for i in b.impls if i.op == "rope@1"}
    assert names == {"lanes1024/tree64/f32"}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_have_the_bits_of_plain_torch(shape, dtype, options, device) -> None:
    found = results(shape, dtype, device, *options)
    with rlk.use("torch"):
        same_results(found, results(shape, dtype, device, *options), "beside plain torch")


def test_heads_of_a_transposed_projection_are_read_where_they_lie(device) -> None:
    """[B, H, T, D] moved to [B, T, H, D], and a slice of q, k and v side by side."""
    g = torch.Generator().manual_seed(3)
    table, positions = torch.randn(9, 8, generator=g).to(device), torch.randint(9, (2, 5), generator=g).to(device)
    q = torch.randn(2, 3, 5, 8, generator=g).to(device).transpose(1, 2)
    k = torch.randn(2, 5, 40, generator=g).to(device)[..., 24:32].unflatten(-1, (1, 8))
    out, dense = rlk.rope(q, k, positions, table), rlk.rope(q.contiguous(), k.contiguous(), positions, table)
    same_results(out, dense, "in other memory")

"""linear_logprob on Triton over several blocks and tiles, against plain torch in float64; the rest: test_clauses.py."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_torch.direct import linear_logprob as definition
from rlkernel_triton.linear_logprob import workspace as head_workspace

RESULTS = ("logprob", "lse", "entropy", "log_kept_mass")
# fp16 operands are rounded once more, to the bf16 of the gradient of the logits: 2 * 2^-9, and what the result rounds.
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-4, 3.5e-3), torch.float16: (1e-4, 4.2e-3)}


def head(N, D, V, device, dtype=torch.float32, *, bias=False, seed=0):
    """Operands whose logits have a standard deviation of 3, and ids."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, D, generator=g), 3 / D**0.5 * torch.randn(V, D, generator=g)
    b = torch.randn(V, generator=g) if bias else None
    ids = torch.randint(0, V, (N,), generator=g).to(device)
    return [None if x is None else x.to(device, dtype) for x in (hidden, weight, b)], ids


def weights(x):
    return torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)


def called(run, operands, ids, frozen=(), **options):
    """Result and gradients, for upstream gradients that differ by row and result."""
    leaves = [None if x is None else x.detach().clone() for x in operands]
    for i, leaf in enumerate(leaves):
        if leaf is not None and i not in frozen:
            leaf.requires_grad_()
    out = run(leaves[0], leaves[1], ids, bias=leaves[2], **options)
    found = [getattr(out, n) for n in RESULTS if getattr(out, n) is not None]
    sum((x.nan_to_num() * weights(x) * (i + 1)).sum() for i, x in enumerate(found)).backward()
    return out, [None if x is None else x.grad for x in leaves]


def agree(operands, ids, **options):
    """Everything against the reference in float64; returns what was found."""
    out, mine = called(rlk.linear_logprob, operands, ids, **options)
    rest = {k: v for k, v in options.items() if k != "max_workspace_bytes"}
    wide = [None if x is None else x.double() for x in operands]
    want, theirs = called(definition, wide, ids, **rest)
    close, relative = TOLERANCE[operands[0].dtype]
    for name in RESULTS:
        if getattr(want, name) is not None:
            found = getattr(out, name).double()
            torch.testing.assert_close(found, getattr(want, name), atol=close, rtol=close, equal_nan=True)
    assert out.invalid.tolist() == want.invalid.tolist()
    for a, b in zip(mine, theirs, strict=True):
        if b is not None:
            assert float((a.double() - b).norm()) <= relative * float(b.norm())
    return out, mine


@pytest.mark.parametrize(("N", "D", "V"), [(3, 16, 2049), (70, 33, 1300)])
def test_sizes_at_the_borders_of_tiles_and_blocks(device, N, D, V) -> None:
    agree(*head(N, D, V, device, bias=True), entropy=True)


@pytest.mark.parametrize(
    ("dtype", "backward"),
    [(torch.bfloat16, "save"), (torch.float16, "recompute")],
)
def test_every_dtype_with_every_option(device, dtype, backward) -> None:
    operands, ids = head(12, 24, 1300, device, dtype, bias=True)
    operands[2][7] = -torch.inf
    mask = torch.arange(12, device=device) % 4 != 1
    operands[0][1], ids[1], ids[2] = torch.nan, 2**40, 1300
    support = rlk.Support(torch.arange(120, device=device) * 10, torch.arange(13, device=device) * 10)
    T = torch.linspace(0.5, 2, 12, device=device)
    options = {"entropy": True, "softcap": 9.0, "logit_scale": 0.5, "temperature": T}
    _, (d_hidden, _, _) = agree(operands, ids, mask=mask, support=support, backward=backward, **options)
    assert not d_hidden[~mask].any()


def test_blocks_move_no_bit_of_results_and_dx(device, monkeypatch) -> None:
    """Rows, saved logits and gradients cut into blocks, with a mask and without."""
    operands, ids = head(34, 12, 300, device)
    mask = torch.arange(34, device=device) % 3 != 1
    for options in ({"entropy": True}, {"entropy": True, "mask": mask}, {"backward": "save"}):
        monkeypatch.setattr(head_workspace, "BLOCKS", ((16384, 4096),))
        want, (dx, dw, _) = called(rlk.linear_logprob, operands, ids, **options)
        monkeypatch.setattr(head_workspace, "BLOCKS", ((16, 128),))
        out, (dx_cut, dw_cut, _) = called(rlk.linear_logprob, operands, ids, **options)
        assert torch.equal(out.logprob, want.logprob)
        if device == "cuda":  # where numpy multiplies for the interpreter, the place in a block moves the last bit
            assert torch.equal(dx_cut, dx)
        torch.testing.assert_close(dx_cut, dx, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(dw_cut, dw, atol=1e-5, rtol=1e-5)


def test_a_backward_pass_may_run_twice(device) -> None:
    operands, ids = head(6, 8, 700, device)
    leaf = operands[0].clone().requires_grad_()
    out = rlk.linear_logprob(leaf, operands[1], ids, backward="save").logprob.sum()
    (first,) = torch.autograd.grad(out, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(out, leaf)
    assert torch.equal(first, second)


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_as_many_rows_and_logits_as_there_are(device, backward) -> None:
    """65536 rows and 2.6e9 logits: the last rows, which alone have an upstream gradient, are what they are alone."""
    if device == "cpu":
        pytest.skip("5 GB of logits are for a GPU")
    (hidden, weight, _), ids = head(65536, 64, 40000, device, torch.bfloat16)
    found = []
    for rows in (slice(0, 65536), slice(65533, 65536)):
        h, w = hidden[rows].clone().requires_grad_(), weight.clone().requires_grad_()
        out = rlk.linear_logprob(h, w, ids[rows], backward=backward)
        out.logprob[-3:].sum().backward()
        found.append((out.logprob.detach()[-3:], h.grad[-3:], w.grad))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(*(f[1:] for f in found), strict=True):
        assert float((a.double() - b.double()).norm()) <= 3.5e-3 * float(b.double().norm())


@pytest.mark.parametrize(
    ("K", "backward", "blocks"),
    [(3, "save", (16384, 4096)), (65, "recompute", (16384, 4096)), (2, "recompute", (16, 128))],
)
def test_several_ids_of_a_row_are_those_of_plain_torch(device, monkeypatch, K, backward, blocks) -> None:
    """Repeated and absent ids, ids out of range and masked rows; in several blocks of rows and columns too."""
    monkeypatch.setattr(head_workspace, "BLOCKS", (blocks,))
    operands, _ = head(22, 24, 700, device, bias=True)
    ids = torch.randint(0, 700, (22, K), generator=torch.Generator().manual_seed(1)).to(device)
    ids[1, K // 2], ids[2, -1], ids[3] = -1, 700, ids[3, :1]
    options = {
        "temperature": 0.7,
        "softcap": 15.0,
        "logit_scale": 0.5,
        "mask": torch.arange(22, device=device) % 4 != 0,
    }
    out, _ = agree(operands, ids, entropy=True, backward=backward, **options)
    assert (out.logprob.shape, out.lse.shape) == ((22, K), (22,))


def test_one_id_in_a_list_has_the_bits_of_that_id_alone(device) -> None:
    (hidden, weight, _), ids = head(5, 16, 1300, device)
    assert torch.equal(
        rlk.linear_logprob(hidden, weight, ids[:, None]).logprob[:, 0], rlk.linear_logprob(hidden, weight, ids).logprob
    )


def test_lists_of_batches_that_lie_anyhow(device) -> None:
    (hidden, weight, _), _ = head(12, 16, 300, device)
    ids = torch.randint(0, 300, (4, 3, 7), generator=torch.Generator().manual_seed(2)).to(device)
    agree([hidden.view(3, 4, 16).transpose(0, 1)[:, :2], weight, None], ids[:, :2, ::2].int())
    agree([hidden[0], weight, None], ids[0, 0])


def test_lists_of_any_length_are_read_whatever_their_strides(device) -> None:
    (hidden, weight, _), _ = head(4, 16, 300, device)
    ids, offsets = 7 * torch.arange(10, device=device), torch.tensor([0, 3, 3, 8, 10], device=device)
    apart = [t.repeat_interleave(2)[::2] for t in (ids, offsets)]
    first, second = (hidden.detach().clone().requires_grad_() for _ in range(2))
    found = rlk.linear_logprob(first, weight, rlk.TokenLists(*apart))
    want = rlk.linear_logprob(second, weight, rlk.TokenLists(ids, offsets))
    assert torch.equal(found.logprob, want.logprob)
    found.logprob.square().sum().backward()
    want.logprob.square().sum().backward()
    assert torch.equal(first.grad, second.grad)

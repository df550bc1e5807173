"""linear_logprob of the cuda backend against float64, every option and every kind of plan, kernels emulated."""

import pytest
import torch

from rlkernel_common.vocab_parallel import Shard
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_cuda.linear_logprob import head, plan
from rlkernel_cuda.linear_logprob import launch as module
from rlkernel_torch.direct import linear_logprob as reference

# The interpreter computes both branches of a select with numpy, which warns of log(0) in the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

linear_logprob = OPERATORS["linear_logprob"].taking_arguments(module.linear_logprob)

OPTIONS = {
    "plain": {},
    "scale and temperature": {"logit_scale": 0.5, "temperature": 0.7},
    "temperature per row": {"temperature": "rows"},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0},
    "all": {"bias": True, "softcap": 4.0, "logit_scale": 2.0, "temperature": "rows", "mask": True},
    "mask": {"mask": True},
}


def case(N=21, D=16, V=521, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g).bfloat16()
    weight = (torch.randn(V, D, generator=g) * 3 / D**0.5).bfloat16()
    given = {"hidden": hidden, "weight": weight, "ids": torch.randint(0, V, (N,), generator=g), **options}
    if options.get("temperature") == "rows":
        given["temperature"] = 0.5 + torch.rand(N, generator=g)
    if options.get("bias"):
        given["bias"] = torch.randn(V, generator=g)
        given["bias"][3] = -torch.inf
        given["ids"] = given["ids"].clamp_min(4)
    if options.get("mask"):
        given["mask"] = torch.rand(N, generator=g) > 0.5
        given["hidden"] = torch.where(given["mask"][:, None], hidden, torch.nan)
        given["ids"] = torch.where(given["mask"], given["ids"], 2**40)
    return given


def run(operator, given, **more):
    leaves = {n: given[n].clone().requires_grad_() for n in ("hidden", "weight", "bias") if n in given}
    out = operator(**{**given, **leaves}, entropy=True, **more)
    g = torch.Generator().manual_seed(5)
    upstream = [torch.randn(out.logprob.shape, generator=g) for _ in range(3)]
    found = torch.autograd.grad((out.logprob, out.lse, out.entropy), list(leaves.values()), upstream)
    return out, dict(zip(leaves, found, strict=True))


def wide(given):
    return {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in given.items()}


def agree(found, want):
    (out, grads), (right, exact) = found, want
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(out, name).double(), getattr(right, name), atol=2e-5, rtol=1e-5)
    for name, grad in grads.items():
        error = (grad.double() - exact[name]).norm() / exact[name].norm()
        assert error < 1e-2, (name, error)  # twice what bf16 costs: the interpreter cuts off instead of rounding


@pytest.mark.parametrize(
    "name, mode", [(name, "recompute") for name in OPTIONS] + [("plain", "save"), ("all", "save"), ("bias", "save")]
)
def test_values_and_gradients_match_float64(name, mode) -> None:
    given = case(**OPTIONS[name])
    agree(run(linear_logprob, given, backward=mode), run(reference, wide(given)))


@pytest.mark.parametrize("mode", ["recompute", "save"])
@pytest.mark.parametrize("number", [-1e9, -1e20, -1e30, -2e38, torch.finfo(torch.float32).min])
def test_ids_that_a_bias_masks_by_a_number_weigh_nothing_and_have_that_log_probability(number, mode) -> None:
    given = case(V=521, bias=True)
    given["bias"][4:516] = number  # a whole tile, and parts of its neighbors
    given["ids"][::2] = 5
    given["ids"][1::2] = 518
    agree(run(linear_logprob, given, backward=mode), run(reference, wide(given)))


def test_an_id_that_the_head_forbids_has_no_mass_whatever_its_bias() -> None:
    given = case(N=3, V=40, bias=True)
    given["hidden"][:, -1] = 1.0
    given["weight"][7, -1] = -torch.inf
    given["ids"][:] = torch.tensor([7, 8, 7])
    out, want = linear_logprob(**given), reference(**wide(given))
    assert [-torch.inf, -torch.inf] == out.logprob[::2].tolist()
    torch.testing.assert_close(out.logprob.double(), want.logprob, atol=2e-5, rtol=1e-5)


def test_an_id_that_is_all_that_a_bias_leaves_is_certain_whatever_the_bias() -> None:
    given = case(N=2, V=40, bias=True)
    given["bias"][:] = -torch.inf
    given["bias"][7], given["ids"][:] = -2e38, 7
    out = linear_logprob(**given, entropy=True)
    assert out.logprob.tolist() == [0.0, 0.0]
    assert out.entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_a_tile_in_which_no_id_is_left_changes_nothing(scale) -> None:
    given = case(V=513, bias=True, logit_scale=scale)  # the last tile has the chosen id alone
    given["bias"][10:300] = -torch.inf  # and the first ones some and none
    given["ids"] = torch.where(torch.arange(21) % 2 == 0, 512, given["ids"] % 6 + 4)
    given["bias"][256:512] = -torch.inf
    agree(run(linear_logprob, given), run(reference, wide(given)))


def test_every_kind_of_plan_gives_the_same(monkeypatch) -> None:
    for name, value in (("FORWARD_ROWS", 256), ("BLOCK_ROWS", 256), ("SLICE_BYTES", 2 * 256 * 256)):
        monkeypatch.setattr(plan, name, value)  # so that a small batch is cut at all
    given = case(N=270, V=300, bias=True, mask=True)
    want = run(reference, wide(given))
    size = plan.Size(270, 300, 16, masked=True, copied=16 * 300)
    kinds = {(p.save, p.apart): p
             for m in ("save", "recompute") for p in plan.plans(size, mode=m, backward=True)}  # fmt: skip
    assert {(p.save, p.apart) for p in kinds.values()} == {(True, False), (False, False), (False, True)}
    for p in kinds.values():
        monkeypatch.setattr(plan, "choose", lambda *_, p=p, **__: p)
        agree(run(linear_logprob, given), want)


@pytest.mark.parametrize("of", [{}, {"mask": True, "N": 270, "softcap": 5.0, "bias": True}], ids=["plain", "masked"])
def test_a_second_backward_pass_after_saving_gives_the_same_bits(of) -> None:
    given = case(**of)
    hidden = given["hidden"].clone().requires_grad_()
    out = linear_logprob(**{**given, "hidden": hidden}, backward="save")
    first, second = (torch.autograd.grad(out.logprob.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_an_operand_that_wants_nothing_gets_nothing_and_changes_nothing() -> None:
    given = case(bias=True)
    _, every = run(linear_logprob, given)
    for name in every:
        leaf = given[name].clone().requires_grad_()
        out = linear_logprob(**{**given, name: leaf}, entropy=True)
        g = torch.Generator().manual_seed(5)
        upstream = [torch.randn(21, generator=g) for _ in range(3)]
        [found] = torch.autograd.grad((out.logprob, out.lse, out.entropy), leaf, upstream)
        torch.testing.assert_close(found, every[name])


def test_no_rows_and_all_rows_masked_give_zeros() -> None:
    given = case()
    for some in ({"hidden": given["hidden"][:0], "ids": given["ids"][:0]}, {"mask": torch.zeros(21, dtype=torch.bool)}):
        out, grads = run(linear_logprob, {**given, **some})
        assert out.logprob.tolist() == [0.0] * out.logprob.numel()
        assert all(bool((g == 0).all()) for g in grads.values())


def test_ids_out_of_range_give_nan_a_flag_and_no_gradient() -> None:
    given = case()
    given["ids"][0], given["ids"][1] = -1, 521
    hidden = given["hidden"].clone().requires_grad_()
    out = linear_logprob(**{**given, "hidden": hidden})
    assert out.logprob[:2].isnan().all()
    assert out.invalid.tolist() == [True, True] + [False] * 19
    [grad] = torch.autograd.grad(out.logprob.sum(), hidden)
    assert bool((grad[:2] == 0).all())
    assert bool(grad.isfinite().all())


def test_a_confident_row_keeps_relative_precision_and_its_gradient() -> None:
    V = 64
    hidden = torch.zeros(1, V)
    hidden[0, 5] = 24.0
    given = {"hidden": hidden.bfloat16(), "weight": torch.eye(V).bfloat16(), "ids": torch.tensor([5])}
    out, _ = run(linear_logprob, given)
    right, _ = run(reference, wide(given))
    assert float(out.logprob.detach()) < 0
    torch.testing.assert_close(out.logprob.double().detach(), right.logprob.detach(), rtol=1e-4, atol=0)


def test_unaligned_operands_are_read_through_copies() -> None:
    given = case(D=13)
    want = run(reference, wide(given))
    agree(run(linear_logprob, given), want)
    turned = {**given, "hidden": given["hidden"].t().contiguous().t()}
    agree(run(linear_logprob, turned), want)


def test_a_limit_below_the_least_names_it_and_the_least_is_accepted() -> None:
    given = case()
    with pytest.raises(ArgumentError) as refusal:
        linear_logprob(**given, max_workspace_bytes=1)
    least = int(str(refusal.value).split("at least ")[1].split(",")[0].rstrip("."))
    assert linear_logprob(**given, max_workspace_bytes=least).logprob.shape == (21,)
    _, grads = run(linear_logprob, given, max_workspace_bytes=least)  # the same limit serves the gradients
    assert all(bool(g.isfinite().all()) for g in grads.values())


class Shards:
    """The ranks of a group one after the other: what each says is stored on the first turn and heard on the second."""

    def __init__(self, monkeypatch, sizes):
        self.sizes, self.said, self.heard, self.now, self.gradients = sizes, {}, False, 0, []
        monkeypatch.setattr(module, "locate", lambda group, *_: Shard(group, sum(sizes[: self.now]), sum(sizes)))
        monkeypatch.setattr(head, "gathered", self.gathered)
        monkeypatch.setattr(module, "add", lambda dx, group: self.gradients.append(dx.double()))

    def size(self):
        return len(self.sizes)

    def rank(self):
        return self.now

    def gathered(self, x, group):
        self.said[self.now] = x
        return torch.stack([self.said[r] for r in range(len(self.sizes))] if self.heard else [x])

    def turn(self, given, **more):
        """Every rank's call on its shard."""
        found, self.gradients = [], []
        for rank, size in enumerate(self.sizes):
            self.now, first = rank, sum(self.sizes[:rank])
            shard = {n: x[first : first + size] for n, x in given.items() if n in {"weight", "bias"}}
            found.append(run(linear_logprob, {**given, **shard}, group=self, **more))
        self.heard = True
        return found


@pytest.mark.parametrize("mode", ["save", "recompute"])
@pytest.mark.parametrize("sizes", [(521,), (300, 221), (1, 500, 20)])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_shards_of_a_vocabulary_are_what_the_whole_is(monkeypatch, options, sizes, mode) -> None:
    given = case(**options)
    whole = run(linear_logprob, given, backward=mode)
    shards = Shards(monkeypatch, sizes)
    shards.turn(given, backward=mode)
    found = shards.turn(given, backward=mode)
    (first, _), others = found[0], found[1:]
    for name in ("logprob", "lse", "entropy", "invalid"):
        assert [
            r for r, (out, _) in enumerate(others) if not torch.equal(getattr(out, name), getattr(first, name))
        ] == []
        if len(sizes) == 1:
            assert torch.equal(getattr(first, name), getattr(whole[0], name))
    grads = {n: torch.cat([g[n] for _, g in found]) for n in whole[1] if n != "hidden"}
    agree((first, {**grads, "hidden": sum(shards.gradients)}), run(reference, wide(given)))

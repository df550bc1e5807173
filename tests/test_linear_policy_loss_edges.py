"""linear_policy_loss at its edges: masks, no rows, layouts, workspaces, 16 bits, bad arguments."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec import policy_loss as plain_spec
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.policy_loss import Correction
from rlkernel_torch.direct import capture, linear_policy_loss, policy_loss
from rlkernel_torch.fused_loss import workspace
from tests.linear_loss_cases import HEAD, B, Case, D, T, V
from tests.policy_batches import same


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_a_mask_hides_changes_no_bit(level):
    clean, dirty = Case(7), Case(7)
    hidden_mask = ~dirty.mask
    with torch.no_grad():
        dirty.hidden[hidden_mask] = math.nan
        dirty.ids[hidden_mask] = V + 10**6
        for x in (dirty.old, dirty.roll):
            x[hidden_mask] = math.inf
    options = {"level": level, "roll": True, "correction": Correction("token", high=1.1)}
    want, got = clean.fused(**options), dirty.fused(**options)
    assert (got.loss, got.stats) == (want.loss, want.stats)
    for one, two in zip(dirty.gradients(got.loss), clean.gradients(want.loss), strict=True):
        assert torch.equal(one, two)


def test_where_a_mask_cannot_be_read_its_rows_are_left_out_all_the_same(monkeypatch):
    # On a device the mask is not looked at: masked rows go through the matmuls and are selected away.
    case = Case(7)
    temperature = torch.full((B, T), 0.7, dtype=torch.float64)
    want = case.fused(head={"temperature": temperature})
    of_want = case.gradients(want.loss)
    with torch.no_grad():
        case.hidden[~case.mask] = math.nan
        temperature[~case.mask] = -1.0
    monkeypatch.setattr("rlkernel_torch.linear_policy_loss.readable", lambda _: False)
    got = case.fused(head={"temperature": temperature})
    same(got.loss, want.loss)
    for one, two in zip(case.gradients(got.loss), of_want, strict=True):
        same(one, two)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_graph_does_not_look_at_the_mask(level):
    # The rows that a mask leaves out are another number in every replay.
    case, other = Case(7), Case(8)

    def loss(hidden, ids, old, mask):
        return linear_policy_loss(hidden, case.weight.detach(), ids, old, case.adv, mask=mask, level=level).loss

    first, second = ((x.hidden.detach(), x.ids, x.old, x.mask) for x in (case, other))
    graph = capture(loss, first, verify="always")
    assert torch.equal(graph(*second), loss(*second))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_all_masked_gives_a_connected_zero(level):
    case = Case(8)
    case.mask[:] = False
    result = case.fused(level=level)
    assert result.loss.item() == 0
    assert not any(g.any() for g in case.gradients(result.loss))


def test_no_rows():
    hidden, weight = torch.zeros(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    ids, none = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    result = linear_policy_loss(hidden, weight, ids, none, none, kind="ppo")
    result.loss.backward()
    assert (result.loss.item(), hidden.grad.shape, weight.grad.any().item()) == (0.0, (0, D), False)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_packed_is_padded_and_its_tail_does_not_count(kind):
    case = Case(9)
    padded = case.fused(kind=kind)
    starts = torch.arange(0, B * T + 1, T)
    tail = 70

    def flat(x, fill):
        return torch.cat([x.detach().flatten(0, 1), torch.full((tail, *x.shape[2:]), fill, dtype=x.dtype)])

    hidden = flat(case.hidden, math.nan).requires_grad_()
    packed = linear_policy_loss(
        hidden,
        case.weight,
        flat(case.ids, -7),
        flat(case.old, math.nan),
        case.adv[:, None],
        bias=case.bias,
        mask=flat(case.mask, True),
        cu_seqlens=starts,
        kind=kind,
        **HEAD,
    )
    same(packed.loss, padded.loss)
    (of_packed,) = torch.autograd.grad(packed.loss, hidden)
    same(of_packed[:-tail].view(B, T, D), case.gradients(padded.loss)[0])
    assert not of_packed[-tail:].any()


def test_a_bag_of_tokens_and_a_temperature_per_token():
    case = Case(10)
    each = 0.5 + torch.rand(B, T, dtype=torch.float64)
    want = policy_loss(
        torch.log_softmax((case.hidden @ case.weight.T + case.bias) / each[..., None], -1)
        .gather(-1, case.ids[..., None])
        .flatten(),
        case.old.flatten(),
        case.old.flatten().sin(),
        kind="ppo",
    )
    got = linear_policy_loss(
        case.hidden.flatten(0, 1),
        case.weight,
        case.ids.flatten(),
        case.old.flatten(),
        case.old.flatten().sin(),
        bias=case.bias,
        temperature=each.flatten(),
        kind="ppo",
    )
    same(got.loss, want.loss, rtol=1e-10)
    for one, two in zip(case.gradients(got.loss), case.gradients(want.loss), strict=True):
        same(one, two, rtol=1e-9, atol=1e-12)


def test_support_gives_the_loss_of_the_truncated_law():
    case = Case(11, bias=False)
    kept = torch.stack([case.ids.flatten(), (case.ids.flatten() + 3) % V, (case.ids.flatten() + 500) % V], 1)
    support = Support(kept.flatten(), torch.arange(0, 3 * B * T + 1, 3))
    z = (case.hidden @ case.weight.T).flatten(0, 1).gather(1, kept)
    want = policy_loss(torch.log_softmax(z, -1)[:, 0].view(B, T), case.old, case.adv, mask=case.mask)
    got = case.fused(head={"support": support})
    same(got.loss, want.loss, rtol=1e-10)
    for one, two in zip(case.gradients(got.loss), case.gradients(want.loss), strict=True):
        same(one, two, rtol=1e-9, atol=1e-12)


def test_the_workspace_chooses_the_way_and_not_the_result():
    case = Case(12, dtype=torch.float32)
    enough = workspace(B * T, D, V, 4)
    wide = case.fused(limit=enough)
    narrow = case.fused(limit=enough - 1)

    def behind(loss):
        return {node.name() for node, _ in loss.grad_fn.next_functions if node is not None}

    assert behind(wide.loss) == {"torch::autograd::AccumulateGrad"} != behind(narrow.loss)
    same(narrow.loss, wide.loss, rtol=1e-6, atol=1e-7)
    for one, two in zip(case.gradients(narrow.loss), case.gradients(wide.loss), strict=True):
        same(one, two, rtol=1e-4, atol=1e-6)
    with pytest.raises(ArgumentError, match="max_workspace_bytes"):
        case.fused(limit=1000)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_one_pass_makes_no_tensor_that_grows_with_rows_times_vocabulary():
    hidden, weight = torch.randn(500, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    ids, old = torch.zeros(500, dtype=torch.int64), torch.zeros(500)
    with Largest() as largest:
        linear_policy_loss(hidden, weight, ids, old, old.cos(), kind="ppo").loss.backward()
    assert largest.numel <= 2 * 64 * V


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_no_argument_is_written_to(kind):
    case = Case(17)
    tensors = [x for x in vars(case).values() if isinstance(x, torch.Tensor)]
    before, generator = [x.detach().clone() for x in tensors], torch.get_rng_state()
    result = case.fused(kind=kind, ref=True, roll=True, correction=Correction("token", high=1.1), entropy=True)
    result.loss.backward()
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_gradients_of_16_bit_operands_are_rounded_once():
    case = Case(13, dtype=torch.bfloat16)
    exact = Case(13)
    with torch.no_grad():
        for name in ("hidden", "weight", "bias"):
            getattr(exact, name).copy_(getattr(case, name))
        for name in ("old", "adv"):
            getattr(exact, name).copy_(getattr(case, name))
    got, want = case.fused(head={}), exact.fused(head={})
    assert got.loss.dtype == torch.float32
    same(got.loss.double(), want.loss, rtol=1e-4, atol=1e-5)
    for one, two in zip(case.gradients(got.loss), exact.gradients(want.loss), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - two).norm() <= 2.5e-3 * two.norm()


def test_an_id_out_of_range_makes_the_loss_nan_and_not_a_number():
    case = Case(14)
    case.mask[0, 0] = True
    case.ids[0, 0] = V
    assert math.isnan(case.fused().loss.item())


def test_backward_twice_gives_the_same_gradient():
    case = Case(15)
    loss = case.fused().loss
    first = torch.autograd.grad(loss, case.hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, case.hidden)[0], first)


def test_arguments_of_both_parents_are_checked():
    case = Case(16)
    for options, name in (
        ({"kind": "grpp"}, "kind"),
        ({"head": {"temperature": 0.0}}, "temperature"),
        ({"entropy_coef": 0.1}, "entropy_coef"),
        ({"head": {"softcap": -1.0}}, "softcap"),
        ({"roll": False, "correction": Correction()}, "correction"),
    ):
        with pytest.raises(ArgumentError) as refusal:
            case.fused(**options)
        assert refusal.value.argument == name


def test_signature_and_features():
    ours, plain = spec.SPEC.parameters, plain_spec.SPEC.parameters
    assert plain.keys() - ours.keys() == {"logprob"}
    changed = {n for n in plain.keys() & ours.keys() if plain[n] != ours[n]}
    assert changed == {"entropy"}
    call = spec.SPEC.call(*torch.zeros(5, 1, 1), entropy=True, softcap=3.0)
    assert spec.SPEC.needs(call) == {
        "kind:grpo",
        "aggregate:seq_mean_token_mean",
        "entropy",
        "softcap",
    }
    assert spec.SPEC.needs(call) <= spec.SPEC.feature_names


def test_fake_tensors_go_through():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        hidden, weight = torch.zeros(2, 3, 4, requires_grad=True), torch.zeros(9, 4, requires_grad=True)
        ids, old = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
        for kind in ("grpo", "gspo"):
            result = linear_policy_loss(hidden, weight, ids, old, torch.zeros(2), kind=kind, mask=old > -1)
            assert (result.loss.shape, result.logprob.shape) == ((), (2, 3))

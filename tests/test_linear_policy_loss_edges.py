"""linear_policy_loss by the plain-torch backend: masks that cannot be read, packed tails, bags of tokens."""

import math

import pytest
import torch

from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec import policy_loss as plain_spec
from rlkernel_torch.direct import linear_policy_loss, policy_loss
from tests.linear_loss_cases import HEAD, B, Case, D, T
from tests.policy_batches import same


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


def test_backward_twice_gives_the_same_gradient():
    case = Case(15)
    loss = case.fused().loss
    first = torch.autograd.grad(loss, case.hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, case.hidden)[0], first)


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


def test_without_a_gradient_wanted_the_loss_is_the_same():
    case = Case(6)
    with torch.no_grad():
        silent = case.fused(entropy=True, entropy_coef=0.1)
    loud = case.fused(entropy=True, entropy_coef=0.1)
    assert (silent.loss, silent.stats) == (loud.loss.detach(), loud.stats)
    assert not silent.loss.requires_grad

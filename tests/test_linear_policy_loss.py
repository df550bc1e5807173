"""linear_policy_loss by the plain-torch backend: masks that cannot be read, packed tails, bags of tokens."""

import math

import pytest
import torch

from rlkernel_torch.direct import linear_policy_loss, policy_loss
from tests.policy_batches import same

B, T, D, V = 5, 17, 6, 1031  # 85 rows: more than one block; two tiles of the vocabulary
HEAD = {"temperature": 0.7, "softcap": 9.0, "logit_scale": 1.3}


class Case:
    """One batch of a small head in float64, with a sequence that has no token."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.operands = [x.requires_grad_() for x in (normal(B, T, D), normal(V, D), normal(V))]
        self.hidden, self.weight, self.bias = self.operands
        self.ids, self.mask = torch.randint(V, (B, T), generator=g), torch.rand(B, T, generator=g) < 0.8
        self.mask[2] = False
        self.old, self.adv = -math.log(V) + 0.3 * normal(B, T), normal(B)

    def fused(self, head=HEAD, **options):
        """The loss and the gradients of the operands."""
        batch = {"bias": self.bias, "mask": self.mask, **head, **options}
        out = linear_policy_loss(self.hidden, self.weight, self.ids, self.old, self.adv, **batch)
        return out, torch.autograd.grad(out.loss, self.operands) if torch.is_grad_enabled() else ()


def test_where_a_mask_cannot_be_read_its_rows_are_left_out_all_the_same(monkeypatch):
    # On a device the mask is not looked at: masked rows go through the matmuls and are selected away.
    case = Case(7)
    temperature = torch.full((B, T), 0.7, dtype=torch.float64)
    want, of_want = case.fused({**HEAD, "temperature": temperature})
    with torch.no_grad():
        case.hidden[~case.mask] = math.nan
        temperature[~case.mask] = -1.0
    monkeypatch.setattr("rlkernel_torch.linear_policy_loss.readable", lambda _: False)
    got, of_got = case.fused({**HEAD, "temperature": temperature})
    same(got.loss, want.loss)
    for one, two in zip(of_got, of_want, strict=True):
        same(one, two)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_packed_is_padded_and_its_tail_does_not_count(kind):
    case, tail = Case(9), 70
    padded, (of_padded, *_) = case.fused(kind=kind)

    def flat(x, fill):
        return torch.cat([x.detach().flatten(0, 1), torch.full((tail, *x.shape[2:]), fill, dtype=x.dtype)])

    hidden = flat(case.hidden, math.nan).requires_grad_()
    tokens = {"ids": flat(case.ids, -7), "old_logprob": flat(case.old, math.nan), "mask": flat(case.mask, True)}
    starts = torch.arange(0, B * T + 1, T)
    packed = linear_policy_loss(
        hidden,
        case.weight,
        advantages=case.adv[:, None],
        bias=case.bias,
        cu_seqlens=starts,
        kind=kind,
        **tokens,
        **HEAD,
    )
    same(packed.loss, padded.loss)
    (of_packed,) = torch.autograd.grad(packed.loss, hidden)
    same(of_packed[:-tail].view(B, T, D), of_padded)
    assert not of_packed[-tail:].any()


def test_a_bag_of_tokens_and_a_temperature_per_token():
    case = Case(10)
    each = 0.5 + torch.rand(B, T, dtype=torch.float64)
    logits = (case.hidden @ case.weight.T + case.bias) / each[..., None]
    lp = torch.log_softmax(logits, -1).gather(-1, case.ids[..., None])
    rest = (case.old.flatten(), case.old.flatten().sin())
    want = policy_loss(lp.flatten(), *rest, kind="ppo")
    got = linear_policy_loss(
        case.hidden.flatten(0, 1), case.weight, case.ids.flatten(), *rest,
        bias=case.bias, temperature=each.flatten(), kind="ppo",
    )  # fmt: skip
    same(got.loss, want.loss, rtol=1e-10)
    pair = (torch.autograd.grad(x.loss, case.operands) for x in (got, want))
    for one, two in zip(*pair, strict=True):
        same(one, two, rtol=1e-9, atol=1e-12)


def test_without_a_gradient_wanted_the_loss_is_the_same():
    case = Case(6)
    with torch.no_grad():
        silent, _ = case.fused(entropy=True, entropy_coef=0.1)
    loud, _ = case.fused(entropy=True, entropy_coef=0.1)
    assert (silent.loss, silent.stats) == (loud.loss.detach(), loud.stats)
    assert not silent.loss.requires_grad


def test_autocast_does_not_round_the_gradient_that_is_made_with_the_loss():
    g = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(6, 5, generator=g), torch.randn(33, 5, generator=g)
    ids, old, advantages = torch.arange(6), torch.full((6,), -3.5), torch.ones(6)
    found = []
    for autocast in (False, True):
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = linear_policy_loss(leaf, weight, ids, old, advantages, kind="ppo").loss
        found += torch.autograd.grad(loss, leaf)
    assert torch.equal(*found)

"""What an integration looks at before it touches its host, with a module of the test's own as the host."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
from packaging.specifiers import SpecifierSet

import rlkernel as rlk
from rlkernel.integrations import Host, Symbol, active, hosts
from rlkernel.integrations.host import KEPT, replaced
from rlkernel.integrations.trl_head import LinearHead, Wanted

SCORE = Symbol("acme_host", "score", "x, y")


@pytest.fixture
def acme(monkeypatch):
    module = ModuleType("acme_host")
    module.score = lambda x, y: x + y
    monkeypatch.setitem(sys.modules, "acme_host", module)
    return module


def host(versions: str = ">=1", distribution: str = "pytest", **options) -> Host:
    return Host("acme", distribution, versions, "1.0", "scores", options.pop("symbols", (SCORE,)))


def test_a_global_is_replaced_for_the_block_and_the_calls_are_counted(acme) -> None:
    original = acme.score

    def make(was, calls):
        return lambda x, y: (calls.update(["score"]), 10 * was(x, y))[1]

    with replaced(host(), SCORE, make) as entry:
        assert acme.score(1, 2) == 30
        assert str(entry) == f"acme {pytest.__version__}: acme_host.score (score x1)"
        assert entry in active()
    assert acme.score is original
    assert "acme" not in {a.host for a in active()}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (host(distribution="no-such-thing"), "acme is not installed; pip install 'no-such-thing>=1'"),
        (host("<1"), r"acme \d.* is installed, and this integration was made for <1; pip install .*force=True"),
        (host(symbols=(Symbol("acme_host", "gone"),)), "acme_host.gone is gone .*Nothing was changed"),
        (host(symbols=(Symbol("acme_absent", "x"),)), "acme_absent.x is gone"),
        (host(symbols=(Symbol("acme_host", "score", "x, z"),)), r"score takes \(x, y\), not \(x, z\)"),
    ],
)
def test_a_host_that_is_not_what_it_was_is_refused_before_anything_is_touched(acme, wanted, said) -> None:
    original = acme.score
    with (
        pytest.raises(rlk.HostError, match=said),
        replaced(wanted, SCORE, lambda *_: pytest.fail("was replaced")),
    ):
        pass
    assert acme.score is original


def ours(was, calls):
    return lambda x, y: (calls.update(["score"]), 10 * was(x, y))[1]


def test_a_block_that_nothing_went_through_is_an_error_that_says_why(acme) -> None:
    original = acme.score
    with (
        pytest.raises(rlk.HostError, match="acme: nothing went through acme_host.score inside the block: it slept"),
        replaced(host(), SCORE, ours, idle=lambda: "it slept"),
    ):
        pass
    assert acme.score is original
    assert "acme" not in {a.host for a in active()}


def test_calls_of_an_earlier_block_do_not_count_for_a_later_one(acme) -> None:
    with replaced(host(), SCORE, ours):
        acme.score(1, 2)
    with pytest.raises(rlk.HostError, match="call it inside the block"), replaced(host(), SCORE, ours):
        pass


def test_an_error_inside_a_block_is_told_and_not_that_nothing_ran(acme) -> None:
    with pytest.raises(KeyError), replaced(host(), SCORE, ours):
        raise KeyError


def test_a_block_that_a_worker_keeps_lasts_until_its_process_ends(acme) -> None:
    original = acme.score
    KEPT.enter_context(replaced(host(), SCORE, ours))
    assert acme.score(1, 2) == 30
    KEPT.close()
    assert acme.score is original


def test_force_takes_another_version_and_no_other_symbol(acme) -> None:
    assert host("<1").require(force=True) == pytest.__version__
    with pytest.raises(rlk.HostError, match="gone"):
        host("<1", symbols=(Symbol("acme_host", "gone"),)).require(force=True)


def test_every_integration_says_what_it_was_made_for() -> None:
    for known in hosts():
        assert known.tested in SpecifierSet(known.versions)
        assert known.symbols
        assert known.does


@pytest.mark.parametrize("tokens_have_advantages", [False, True])
def test_the_fused_loss_is_the_same_whether_trl_picks_the_tokens_or_takes_all(tokens_have_advantages) -> None:
    torch.manual_seed(0)
    B, P, T, D, V = 3, 2, 5, 8, 31
    counted = torch.arange(T) < torch.tensor([[5], [2], [4]])
    mask = counted & (torch.rand(B, T) > 0.3)
    adv = torch.randn(B, T) if tokens_have_advantages else torch.randn(B)
    per_token = {"old_logprob": -torch.rand(B, T) * 4, "ref_logprob": -torch.rand(B, T) * 4, "advantages": adv}
    options = rlk.policy_loss_preset("trl_grpo", "trl_kl") | {"kl_coef": 0.1}
    states, ids = torch.randn(B, P + T - 1, D), torch.randint(0, V, (B, P + T - 1))
    scored = torch.nn.functional.pad(counted, (P - 1, 0))
    found = []
    for packed in (False, True):
        hidden, weight = states.clone().requires_grad_(), torch.randn(V, D, generator=_seeded()).requires_grad_()
        head = LinearHead(Counter())
        rows = (hidden[scored], ids[scored]) if packed else (hidden.flatten(0, 1), ids.flatten())
        with head.fusing(wanted := Wanted(counted, mask, per_token, dict(options), packed)):
            logprob, entropy, *_ = head.apply(rows[0], weight, None, rows[1], 0.7, 8)
        wanted.result.loss.backward()
        at = torch.nn.functional.pad(mask, (P - 1, 0))[scored] if packed else torch.nn.functional.pad(mask, (P - 1, 0))
        found.append(
            (wanted.result.loss.detach(), logprob[at.flatten()], entropy[at.flatten()], hidden.grad, weight.grad)
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    plain = rlk.linear_logprob(states, weight, ids, temperature=0.7).logprob[:, P - 1 :]
    whole = rlk.policy_loss(
        plain, per_token.pop("old_logprob"), per_token.pop("advantages"), mask=mask, **per_token, **options
    )
    torch.testing.assert_close(found[0][0], whole.loss.detach(), rtol=1e-5, atol=1e-6)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)

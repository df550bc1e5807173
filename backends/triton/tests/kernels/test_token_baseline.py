"""The optimal token baseline against its definition in float64."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.spec.advantage import AdvantageCall
from rlkernel_torch.direct import advantage as definition
from rlkernel_triton.advantage import token_baseline

B, T = 8, 37  # several chunks in the interpreter, the last of them ragged


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(**more):
    """A call: groups of four by size, rewards of tokens."""
    return {
        "rewards": random(B, T, seed=1), "kind": "otb", "group": 4, "logprob": -0.1 - random(B, T, seed=2).abs(),
        "sum_pi_squared": random(B, T, seed=3).sigmoid(), **more,
    }  # fmt: skip


def broken(name):
    """A batch in which a sequence is not finite, in a token that counts."""
    given = batch(mask=MASK)
    given[name] = torch.where(torch.arange(B * T).view(B, T) == T + 1, torch.nan, given[name])
    return given


MASK = random(B, T, seed=4) > -0.5
MASK[1, 1] = True
IDS = torch.arange(B) % 3 * 2**40 - 7
STATS = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0]).bool()
CALLS = {
    "by size": batch(),
    "by ids": batch(group=IDS),
    "a group of one": batch(group=1),
    "mask": batch(mask=MASK),
    "lengths": batch(lengths=torch.tensor([T, 0, 3, 16, 17, 40, 1, 32])),
    "outcome": batch(rewards=random(B, seed=5), mask=MASK),
    "outcome, lengths": batch(rewards=random(B, seed=5), lengths=torch.arange(B) * 5),
    "an outcome that is not finite": batch(rewards=torch.tensor([1.0, 2, 3, torch.inf, 5, 6, 7, 8])),
    "masks over sequences": batch(in_stats=STATS, in_loss=~STATS, weights=random(B, seed=6).abs()),
    "masks over sequences, by ids": batch(group=IDS, in_stats=STATS, mask=MASK),
    "whitened": batch(whiten="global", mask=MASK, in_stats=STATS),
    "deferred": batch(whiten="defer", whiten_ddof=0),
    "integers": batch(rewards=(3 * random(B, T, seed=1)).round().to(torch.int64)),
    **{f"{name} that is not finite": broken(name) for name in ("rewards", "logprob", "sum_pi_squared")},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_token_baseline_is_that_of_the_definition(device, name):
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in CALLS[name].items()}
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    want, found = definition(**wide), rlk.advantage(**given)
    pairs = [(found.advantages, want.advantages), (found.returns, want.returns)]
    pairs += [(getattr(found.stats, n), getattr(want.stats, n)) for n in ("invalid", "group_count", "mean", "rstd")]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine.double(), theirs.double(), atol=2e-5, rtol=2e-5)


def test_a_group_has_the_same_bits_by_size_and_by_ids(device):
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in CALLS["mask"].items()}
    ids = (torch.arange(B) // 4 - 5).to(device)
    want, found = rlk.advantage(**given).advantages, rlk.advantage(**{**given, "group": ids}).advantages
    assert torch.equal(want, found)


def test_nothing_to_do_gives_empty_results(device):
    none = torch.empty(0, 5, device=device)
    assert rlk.advantage(none, kind="otb", group=4, logprob=none, sum_pi_squared=none).advantages.shape == (0, 5)
    none = torch.empty(4, 0, device=device)
    found = rlk.advantage(none, kind="otb", group=4, logprob=none, sum_pi_squared=none)
    assert (found.advantages.shape, found.stats.group_count.tolist()) == ((4, 0), [4] * 4)


def test_large_batches_by_ids_are_for_plain_torch(monkeypatch):
    extent = type("Extent", (), {"sequences": B})()
    served = [token_baseline.serves(AdvantageCall(**CALLS[name]), extent) for name in ("by size", "by ids")]
    monkeypatch.setattr(token_baseline, "MOST", B - 1)
    assert [served, token_baseline.serves(AdvantageCall(**CALLS["by ids"]), extent)] == [[True, True], False]

"""rlkernel.exact(group=): ranks that share the layers of a decoder have the bits of one rank, also after updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.errors import HostError
from tests.process_groups import in_ranks

transformers = pytest.importorskip("transformers", exc_type=ImportError)

SIZES = {
    "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = torch.randint(250, (2, 5), generator=torch.Generator().manual_seed(1))
NEW = 4


def decoder(kind: str = "Qwen3Config", **more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**{**SIZES, **more})
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def drawn(model: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Whole sequences [B, S], and log-probabilities of what one rank drew."""
    with rlk.exact(model, split=True) as exact:
        made = exact.generate(PROMPTS, max_new_tokens=NEW, seed=seed, temperature=0.7, top_p=0.95, stop_ids=())
    return torch.cat([PROMPTS, made.ids], 1), made.logprob


def scored(model: Any, ids: Tensor, group: Any) -> Tensor:
    """Log-probabilities of the drawn tokens, by ranks that share the layers and the vocabulary."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, PROMPTS.shape[1] - 1 : -1]
    of = ids[:, PROMPTS.shape[1] :]
    return rlk.linear_logprob(hidden, model.lm_head.weight, of, temperature=0.7, group=group).logprob


def train(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    group = dist.group.WORLD if ranks > 1 else None
    model, rollout = decoder(), decoder()
    exact = rlk.exact(model, group=group, split=True)
    found: dict[str, Any] = {"shares": tuple(model.lm_head.weight.shape), "differ": []}
    with torch.no_grad():
        found["logits"] = model(input_ids=PROMPTS, use_cache=False).logits
    for step in range(3):
        ids, said = drawn(rollout, step)
        logprob = scored(model, ids, group)
        found["differ"].append(int((logprob != said).sum()))
        (-logprob * torch.linspace(-1, 1, NEW)).sum().backward()
        if step == 0:
            found["gradients"] = {n: p.grad.norm() for n, p in model.named_parameters() if "norm" in n or "embed" in n}
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.5)
                p.grad = None
            for (_, whole), mine in zip(exact.whole_parameters(), rollout.parameters(), strict=True):
                mine.copy_(whole)
    exact.undo()
    found["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    found["kept"] = all(torch.equal(a, b) for a, b in zip(model.parameters(), rollout.parameters(), strict=True))
    torch.save(found, f"{folder}/{ranks}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2):
        in_ranks(ranks, train, ranks, str(folder))
    return {(ranks, rank): torch.load(Path(folder) / f"{ranks}-{rank}.pt") for ranks in (1, 2) for rank in range(ranks)}


def test_ranks_score_the_bits_that_one_rank_drew_after_every_update(trained) -> None:
    assert {of: found["differ"] for of, found in trained.items()} == {of: [0, 0, 0] for of in trained}


def test_a_rank_holds_its_share_of_the_head(trained) -> None:
    assert [trained[of]["shares"] for of in ((1, 0), (2, 0), (2, 1))] == [(8192, 64), (4096, 64), (4096, 64)]


def test_logits_of_all_ranks_have_the_bits_of_one_rank(trained) -> None:
    assert all(torch.equal(found["logits"], trained[1, 0]["logits"]) for found in trained.values())


def test_gradients_of_what_ranks_hold_alike_are_those_of_one_rank(trained) -> None:
    one, first, second = (trained[of]["gradients"] for of in ((1, 0), (2, 0), (2, 1)))
    assert any("q_norm" in name for name in one)
    torch.testing.assert_close(first, one, rtol=0.02, atol=1e-4)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_undo_gives_every_rank_the_whole_trained_weights(trained) -> None:
    assert all(found["kept"] for found in trained.values())
    torch.testing.assert_close(trained[2, 1]["weights"], trained[2, 0]["weights"], rtol=0, atol=0)


class Ranks:
    """A group whose collectives are never reached."""

    def __init__(self, ranks: int) -> None:
        self.size, self.rank = lambda: ranks, lambda: 0


@pytest.mark.parametrize(
    ("made", "ranks", "said"),
    [
        ({}, 8, "4 heads of keys cannot be shared by 8 ranks"),
        ({"vocab_size": 4096}, 2, "4096 ids"),
        ({"tie_word_embeddings": True}, 2, "tied to the embedding"),
        ({"kind": "Qwen3MoeConfig", "num_experts": 4, "moe_intermediate_size": 32}, 2, "has no exact form"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_as_it_is(made, ranks, said) -> None:
    model = decoder(**made)
    before = dict(model.named_modules())
    with pytest.raises(HostError, match=said):
        rlk.exact(model, group=Ranks(ranks))
    assert dict(model.named_modules()) == before


def test_generate_on_several_ranks_names_the_other_way() -> None:
    exact = rlk.exact(decoder(), split=True)
    exact.group = Ranks(2)
    with pytest.raises(HostError, match=r"exact\(model, split=True\)"):
        exact.generate(PROMPTS, max_new_tokens=1, seed=0)

"""The processed law as a whole: the definition of `sample` row by row, and `verify` and `sample` against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.sampling_batches import KINDS, random_batch
from rlkernel_core.definitions.sampling import sample_row


@pytest.mark.parametrize("order", ["topk_topp", "topp_topk", "joint"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_law_of_the_definition_with_every_edit_and_filter(seed, order) -> None:
    batch = random_batch(seed, 61, 12, kinds=KINDS, filter_order=order, tie=("lowest_id", "keep_all")[seed % 2])
    given = batch.arguments()
    law = rlk.processed_law(batch.logits, **{n: x for n, x in given.items() if n not in {"seed", "step", "stream"}})
    for i, row in enumerate(batch.rows):
        with np.errstate(all="ignore"):
            log_p = sample_row(batch.logits[i].numpy(), row).log_p
            expected = np.full(61, -np.inf) if log_p is None else log_p.astype(np.float32)
        np.testing.assert_allclose(law[i].numpy(), expected, rtol=1e-5, atol=2e-6, err_msg=f"row {i}: {row}")


def test_its_probabilities_add_up_to_one_over_the_kept_tokens() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    law = rlk.processed_law(logits, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01)
    draw = rlk.sample(logits, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, seed=torch.arange(5), step=3)
    assert law.dtype == torch.float32
    assert (law > -math.inf).sum(1).tolist() == draw.kept_count.tolist()
    torch.testing.assert_close(law.exp().sum(1), torch.ones(5), rtol=1e-5, atol=0)
    torch.testing.assert_close(law.gather(1, draw.token[:, None])[:, 0], draw.logprob, rtol=1e-6, atol=1e-6)


def test_verify_accepts_every_draft_of_the_law_itself() -> None:
    logits = 2 * torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    options = {"temperature": 0.8, "top_p": 0.9}
    law = rlk.processed_law(logits[:4], **options)
    drafts = rlk.sample(logits[:4], seed=torch.full((4,), 7), step=torch.arange(4), stream=1, **options).token
    found = rlk.verify(
        logits, drafts, cu_draft=torch.tensor([0, 4]), draft_logits=law, seed=torch.tensor([7]), step=0, **options
    )
    assert found.accepted.tolist() == [4]


def test_padding_columns_are_none_of_it_and_the_global_generator_is_not_used() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 5:] = 9.0
    before = torch.get_rng_state()
    law = rlk.processed_law(logits, vocab_size=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(law, torch.full((2, 5), -math.log(5)), rtol=1e-6, atol=0)


def test_banned_ids_have_no_probability_and_ties_stay_where_asked() -> None:
    banned = rlk.TokenLists(torch.tensor([1]), torch.tensor([0, 1]))
    law = rlk.processed_law(torch.zeros(1, 4), banned=banned, top_k=2)
    torch.testing.assert_close(law.exp(), torch.tensor([[0.5, 0.0, 0.5, 0.0]]), rtol=1e-6, atol=0)
    law = rlk.processed_law(torch.zeros(1, 4), banned=banned, top_k=2, tie="keep_all")
    torch.testing.assert_close(law.exp(), torch.tensor([[1.0, 0.0, 1.0, 1.0]]) / 3, rtol=1e-6, atol=0)


def test_a_greedy_law_is_its_best_token_and_no_rows_are_no_law() -> None:
    law = rlk.processed_law(torch.tensor([[1.0, 3.0, 3.0]]), temperature=0)
    assert law.tolist() == [[-math.inf, 0.0, -math.inf]]
    assert rlk.processed_law(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("logits", {"logits": torch.zeros(3)}),
        ("logits", {"logits": torch.zeros(1, 3, requires_grad=True)}),
        ("vocab_size", {"logits": torch.zeros(1, 3), "vocab_size": 4}),
        ("temperature", {"logits": torch.zeros(1, 3), "temperature": -1.0}),
        ("top_p", {"logits": torch.zeros(2, 3), "top_p": torch.ones(3)}),
        ("filter_order", {"logits": torch.zeros(1, 3), "filter_order": "topp"}),
    ],
)
def test_arguments_without_meaning_are_refused_by_name(argument, given) -> None:
    with pytest.raises(rlk.ArgumentError) as found:
        rlk.processed_law(**given)
    assert found.value.argument == argument

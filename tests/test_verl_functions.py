"""verl's functions of logits that are split over ranks, with `logprob` behind them."""

from __future__ import annotations

import sys
from inspect import Parameter, signature
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlkernel.integrations import verl_functions
from rlkernel.integrations.verl_functions import (
    FUNCTIONS,
    vocab_parallel_entropy,
    vocab_parallel_log_probs_from_logits,
)
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import HostError
from tests.logprob_inputs import rows
from tests.process_groups import alone

__all__ = ["alone"]
CUTS = (0, 20, 40, 60)  # Megatron's shards are of one size


def test_values_and_gradients_are_those_of_log_softmax_on_the_whole() -> None:
    x, labels = rows(6, CUTS[-1])
    x, labels = x.view(2, 3, -1), labels.view(2, 3)
    whole = x.clone().requires_grad_()
    log_p = whole.log_softmax(-1)
    want = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    (want[0].sum() + 2 * want[1].sum()).backward()

    def on_rank(rank, group):
        mine = x[..., CUTS[rank] : CUTS[rank + 1]].clone().requires_grad_()
        value = vocab_parallel_log_probs_from_logits(mine, labels, group=group)
        entropy = vocab_parallel_entropy(mine, group=group)
        (value.sum() + 2 * entropy.sum()).backward()
        return value.detach(), entropy.detach(), mine.grad

    ranks = on_ranks(Subject("torch", "logprob"), 3, on_rank)
    torch.testing.assert_close(ranks[1][:2], tuple(y.detach() for y in want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([r[2] for r in ranks], -1), whole.grad, atol=1e-5, rtol=1e-5)


def test_the_group_is_megatrons_where_none_is_given(alone, monkeypatch) -> None:
    asked = []
    state = SimpleNamespace(get_tensor_model_parallel_group=lambda: asked.append("tensor parallel") or alone)
    for name, module in (("megatron", ModuleType("megatron")), ("megatron.core", ModuleType("megatron.core"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    x, labels = rows(4, 30)
    found = vocab_parallel_log_probs_from_logits(x, labels)
    torch.testing.assert_close(found, x.log_softmax(-1).gather(1, labels[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    assert asked == ["tensor parallel"]


def test_without_megatron_a_group_is_asked_for(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)
    with pytest.raises(HostError, match=r"pass group=, or pip install megatron-core"):
        vocab_parallel_entropy(torch.zeros(2, 3))


@pytest.mark.parametrize("symbol", FUNCTIONS.symbols, ids=lambda s: s.name)
def test_parameters_are_those_of_verl_and_a_group(symbol) -> None:
    mine = signature(getattr(verl_functions, symbol.name)).parameters
    assert ", ".join(mine) == f"{symbol.takes}, group"
    assert mine["group"].kind == Parameter.KEYWORD_ONLY

"""TRL's functions of logits with `logprob` behind them."""

from __future__ import annotations

from importlib.util import find_spec
from inspect import signature

import pytest
import torch

import rlkernel as rlk
from rlkernel.integrations import trl
from rlkernel.integrations.trl_functions import FUNCTIONS

N, V = 6, 40


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(N, V, generator=g)).requires_grad_()
    return logits, torch.randint(0, V, (N,), generator=g), torch.tensor([1, 0, 1, 1, 0, 1])


def stock(logits, index, temperature, row_mask):
    log_p = (logits / temperature).log_softmax(-1)
    found = log_p.gather(-1, index[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return tuple(x.masked_fill(row_mask == 0, 0.0) for x in found)


def test_values_and_gradients_are_those_of_log_softmax() -> None:
    logits, index, mask = given()
    found = trl.selective_log_softmax_and_entropy(logits, index, temperature=0.7, row_mask=mask)
    want = stock(logits, index, 0.7, mask)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(a.sum() + 2 * b.sum(), logits)[0] for a, b in (found, want)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_several_ids_of_a_row_have_masks_of_their_own() -> None:
    logits, _, _ = given()
    index = torch.tensor([[0, 5, 5], [39, 1, 2], [3, 4, 6], [7, 8, 9], [1, 1, 1], [2, 0, 3]])
    mask = torch.tensor([1, 0, 1]).expand(N, 3)
    found = trl.selective_log_softmax(logits, index, 0.7, mask)
    want = (logits / 0.7).log_softmax(-1).gather(-1, index).masked_fill(mask == 0, 0.0)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, want)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_an_entropy_that_is_to_have_no_gradient_has_none() -> None:
    logits, index, _ = given()
    log_p, entropy = trl.selective_log_softmax_and_entropy(logits, index, False)
    assert (log_p.requires_grad, entropy.requires_grad) == (True, False)


def test_a_call_shows_in_status() -> None:
    logits, index, _ = given()
    before = sum(ran.calls for ran in rlk.status() if ran.op == "logprob@1")
    trl.selective_log_softmax(logits, index)
    assert sum(ran.calls for ran in rlk.status() if ran.op == "logprob@1") == before + 1


@pytest.mark.parametrize("symbol", FUNCTIONS.symbols, ids=lambda s: s.name)
def test_parameters_are_those_of_trl(symbol) -> None:
    assert ", ".join(signature(getattr(trl, symbol.name)).parameters) == symbol.takes


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_trls_own_function_gives_the_same() -> None:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits, index, mask = given()
    how = {"temperature": 0.7, "row_mask": mask}
    want = selective_log_softmax_and_entropy(logits, index, **how)
    torch.testing.assert_close(trl.selective_log_softmax_and_entropy(logits, index, **how), want, atol=1e-5, rtol=1e-5)

"""vime's own dispatch with rlkernel as its provider: values, gradients, modes."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import rlkernel as rlk
from rlkernel.integrations import vime

MODES = ("auto", "strict")


def never(*_, **__):
    raise AssertionError("vime's own function was called")


@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("divided", [False, True], ids=["temperature", "divided"])
@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("mode", MODES)
def test_vime_takes_what_the_provider_returns(mode, rows, divided, kept) -> None:
    if vime.HOST.installed is None:
        pytest.skip("vime is not installed")
    host = import_module("vime.backends.megatron_utils.linear_logp_provider")
    made = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(rows, 31, generator=made), torch.randint(31, (rows,), generator=made)
    keep = torch.rand(rows, 31, generator=made) < 0.3 if kept else None
    heat = torch.linspace(0.5, 1.5, rows)
    leaf = logits.clone().requires_grad_()
    request = host.LinearLogpRequest(
        logits=leaf, target_ids=ids, tensor_parallel_group=None,
        token_layout=host.TokenLayout(world_size=2, rank=1, layout="zigzag"),
        with_entropy=True, with_entropy_grad=True, chunk_size=64, log_prob_keep_mask=keep,
        temperature=heat, metadata={"logits_are_temperature_scaled": True} if divided else {},
    )  # fmt: skip
    args = SimpleNamespace(linear_logp_provider="rlkernel.integrations.vime.provider", linear_logp_provider_mode=mode)
    logp, entropy = host.compute_linear_logp(args=args, request=request, native=never)
    (logp.cos().sum() + entropy.sin().sum()).backward()
    mine = logits.double().requires_grad_()
    law = mine if divided else mine / heat[:, None]
    given = law if keep is None else law.masked_fill(~keep.scatter(1, ids[:, None], True), -torch.inf)
    want = given.log_softmax(-1).gather(-1, ids[:, None])
    spread = -(law.log_softmax(-1).exp() * law.log_softmax(-1)).sum(-1)
    (want.cos().sum() + spread.sin().sum()).backward()
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), spread, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), mine.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_fails_is_an_error_in_either_mode(mode) -> None:
    if vime.HOST.installed is None:
        pytest.skip("vime is not installed")
    host = import_module("vime.backends.megatron_utils.linear_logp_provider")
    request = host.LinearLogpRequest(
        torch.zeros(1, 4), torch.tensor([1]), None, host.TokenLayout(1, 0, "single"), False, False, 64,
        metadata={"top_p_sparse_token_ids": torch.tensor([[1, -1]])},
    )  # fmt: skip
    args = SimpleNamespace(linear_logp_provider="rlkernel.integrations.vime.provider", linear_logp_provider_mode=mode)
    with pytest.raises(rlk.HostError, match="top_p_sparse_token_ids"):
        host.compute_linear_logp(args=args, request=request, native=never)

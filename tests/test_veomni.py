"""VeOmni's log-probabilities with rlkernel inside against its own: values and gradients from hidden states."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from rlkernel.integrations import veomni

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.mark.parametrize("wrapper", ["ForCausalLMLoss", "_chunk_loss_dispatch"])
@pytest.mark.parametrize("labels", ["labels", "shift_labels", "of a context"])
def test_a_models_loss_function_returns_what_veomnis_returns(wrapper, labels, monkeypatch) -> None:
    if veomni.HOST.installed is None:
        pytest.skip("VeOmni is not installed")
    pytest.importorskip("transformers", exc_type=ImportError)
    host = import_module(veomni.SCORE.module)
    if labels == "of a context":
        split = SimpleNamespace(sp_enabled=True)
        monkeypatch.setattr("veomni.distributed.parallel_state.get_parallel_state", lambda: split)
        monkeypatch.setattr(f"{host.__name__}.chunk_logprobs.get_parallel_state", lambda: split)
    made = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 7, 16, generator=made), torch.randn(31, 16, generator=made)
    ids = torch.randint(31, (2, 7), generator=made)
    ids[0, 3:5] = -100
    given = {"shift_labels": ids.roll(2)} if labels == "shift_labels" else {}
    found = []
    for patched in (False, True):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with veomni.enabled() if patched else nullcontext():
            loss, logits, aux = getattr(host, wrapper)(
                labels=ids, hidden_states=leaves[0], weights=leaves[1], return_log_probs=True, temperature=0.7,
                chunk_size=4, **given,
            )  # fmt: skip
        assert loss is logits is None
        (aux.log_probs.cos() + 0.1 * aux.entropy.sin()).sum().backward()
        found.append([aux.log_probs.detach(), aux.entropy.detach(), *(leaf.grad for leaf in leaves)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=1e-5)

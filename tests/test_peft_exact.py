"""PEFT's LoRA in an exact model: rollout and trainer share every bit while adapters come, learn, merge and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rlkernel as rlk

peft = pytest.importorskip("peft", exc_type=ImportError)

from tests.test_transformers_exact import IDS, by_token, decoder, whole  # noqa: E402 they need transformers, as PEFT does
from tests.test_transformers_exact_generate import DRAW, PROMPTS, trained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers


def adapted(dtype: torch.dtype = torch.float32, *names: str, **more: Any) -> Any:
    """Qwen3 with LoRA whose B is not 0: PEFT's model."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(names or ("q_proj", "down_proj")), **more)
    model = peft.get_peft_model(decoder("qwen3", dtype), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_by_token_has_the_bits_of_the_whole_sequence(dtype) -> None:
    model = adapted(dtype).get_base_model()
    stock = whole(model)
    with rlk.exact(model):
        found = whole(model)
        assert torch.equal(by_token(model), found)
    apart = float((found.double() - stock.double()).norm() / stock.double().norm())
    assert apart < {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]


def test_log_probabilities_have_the_bits_of_the_trainers_while_adapters_learn_merge_and_go() -> None:
    """The recorded step is that of the adapters of now: another scale, merged weights, and none."""
    wrapped = adapted()
    model = wrapped.get_base_model()
    with rlk.exact(model) as exact:

        def share_every_bit() -> None:
            drawn = exact.generate(PROMPTS, **DRAW)
            assert torch.equal(drawn.logprob, trained(model, PROMPTS, drawn))

        share_every_bit()
        layer = model.model.layers[0].mlp.down_proj
        with torch.no_grad():
            layer.lora_B["default"].weight.mul_(0.5)
        share_every_bit()
        layer.set_scale("default", 3.0)
        share_every_bit()
        wrapped.merge_adapter()
        with torch.no_grad():
            drawn = exact.generate(PROMPTS, **DRAW)
        model.model.embed_tokens.weight.requires_grad_()  # merged, nothing else of the model wants a gradient
        assert torch.equal(drawn.logprob, trained(model, PROMPTS, drawn))
        wrapped.unmerge_adapter()
        with wrapped.disable_adapter():
            share_every_bit()


def test_adapters_have_gradients_and_the_weights_beside_them_none() -> None:
    model = adapted().get_base_model()
    layer = model.model.layers[0].self_attn.q_proj
    with rlk.exact(model):
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    grads = layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad
    assert ([bool(g.abs().sum() > 0) for g in grads], layer.base_layer.weight.grad) == ([True, True], None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "has PEFT's DoraLinearVariant, which has no exact form"),
        ({"lora_dropout": 0.1}, r"LoraConfig\(lora_dropout=0\)"),
    ],
)
def test_what_depends_on_more_than_single_elements_is_refused(more, said) -> None:
    model = adapted(**more).get_base_model()
    with pytest.raises(rlk.HostError, match=said):
        rlk.exact(model)


def test_lora_on_the_head_is_refused_where_its_weight_is_read() -> None:
    model = adapted(torch.float32, "lm_head").get_base_model()
    with rlk.exact(model) as exact, pytest.raises(rlk.HostError, match="the head has LoRA"):
        exact.generate(PROMPTS, **DRAW)


def test_pefts_own_wrapper_is_refused_with_what_to_pass() -> None:
    with pytest.raises(rlk.ArgumentError, match="get_base_model"):
        rlk.exact(adapted())

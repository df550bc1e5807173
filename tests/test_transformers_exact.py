"""rlkernel.exact on decoders of transformers: token by token the bits of the whole sequence, and nothing silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.agree.first import first_difference
from rlkernel.agree.pretrained import Pretrained
from rlkernel.integrations.transformers_pages import cache_argument

transformers = pytest.importorskip("transformers", exc_type=ImportError)

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 96,
}  # fmt: skip
HEADS = {"head_dim": 12}
CLASSES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", {**HEADS, "sliding_window": 6, "query_pre_attn_scalar": 12}),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEADS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, "sliding_window": 6, "query_pre_attn_scalar": 12}),
}
B, P, T = 3, 5, 14
IDS = torch.randint(90, (B, T), generator=torch.Generator().manual_seed(1))


def decoder(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, more = CLASSES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**SIZES, **more)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def with_lora(model: Any, dtype: torch.dtype) -> Any:
    """int4 weights, with LoRA beside those of the first layer's MLP."""
    rlk.nn.quantize_model(model, rlk.nn.QuantPolicy("int4_g32"))
    for name in ("gate_proj", "down_proj"):
        layer = getattr(model.model.layers[0].mlp, name)
        layer.add_lora(2, 4.0, dtype)
        torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(2))
    return model


@torch.no_grad()
def whole(model: Any, ids: Tensor = IDS, **more: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **more).logits


@torch.no_grad()
def by_token(model: Any, ids: Tensor = IDS) -> Tensor:
    """A prompt, and then one token a step."""
    cache = {cache_argument(): transformers.DynamicCache()}
    steps = [ids[:, :P], *ids[:, P:].split(1, 1)]
    return torch.cat([model(input_ids=x, use_cache=True, **cache).logits for x in steps], 1)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_by_token_has_the_bits_of_the_whole_sequence(name, dtype) -> None:
    model = decoder(name, dtype)
    with rlk.exact(model):
        assert torch.equal(by_token(model), whole(model))


def test_a_sequence_has_the_same_bits_alone_and_padded_on_either_side() -> None:
    model, mask = decoder("qwen3"), torch.ones(B, T, dtype=torch.int64)
    places = torch.arange(T).expand(B, T)
    with rlk.exact(model):
        want = whole(model)
        assert torch.equal(whole(model, IDS[1:2]), want[1:2])
        for left, right in ((4, 0), (0, 3)):
            padded = {
                n: torch.nn.functional.pad(x, (left, right), value=value)
                for n, x, value in (("ids", IDS, 96), ("attention_mask", mask, 0), ("position_ids", places, 1))
            }
            assert torch.equal(whole(model, **padded)[:, left : left + T], want)


def test_packed_sequences_have_the_bits_of_each_alone() -> None:
    model, cu = decoder("qwen3"), torch.tensor([0, T, 2 * T], dtype=torch.int32)
    packed = {
        "ids": IDS[:2].reshape(1, -1), "position_ids": torch.arange(T).repeat(2)[None],
        "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": T, "max_length_k": T,
    }  # fmt: skip
    with rlk.exact(model):
        assert torch.equal(whole(model, **packed).view(2, T, -1), whole(model, IDS[:2]))
        with pytest.raises(rlk.HostError, match="pass cu_seq_lens_q"):
            whole(model, packed["ids"], position_ids=packed["position_ids"])


def test_int4_weights_are_exact_too_and_keep_their_names() -> None:
    model = decoder("qwen3")
    rlk.nn.quantize_model(model, rlk.nn.QuantPolicy("int4_g32"))
    names = list(model.state_dict())
    with rlk.exact(model):
        assert list(model.state_dict()) == names
        assert torch.equal(by_token(model), whole(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora_beside_int4_weights_is_exact_and_near_that_of_qmatmul(dtype) -> None:
    model = with_lora(decoder("qwen3"), dtype)
    stock = whole(model)
    with rlk.exact(model):
        found = whole(model)
        assert torch.equal(by_token(model), found)
    torch.testing.assert_close(found, stock, rtol=1e-3, atol=1e-3)


def test_lora_beside_int4_weights_has_gradients() -> None:
    model = with_lora(decoder("qwen3"), torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    with rlk.exact(model):
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    assert (layer.lora_A.grad.abs().sum() > 0, layer.lora_B.grad.abs().sum() > 0) == (True, True)


def test_a_model_that_is_exact_already_is_refused() -> None:
    model = decoder("llama")
    with rlk.exact(model), pytest.raises(rlk.HostError, match="exact already"):
        rlk.exact(model)


def test_every_parameter_has_a_gradient_and_keeps_its_name() -> None:
    model = decoder("qwen3")
    names = list(model.state_dict())
    with rlk.exact(model):
        assert list(model.state_dict()) == names
        model(input_ids=IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_undone_the_model_is_what_it_was() -> None:
    model = decoder("llama")
    modules, want = dict(model.named_modules()), whole(model)
    exact = rlk.exact(model)
    assert exact.ran["attention"] == "rlkernel_torch.attention:attention"
    exact.undo()
    assert dict(model.named_modules()) == modules
    assert torch.equal(whole(model), want)


def test_a_module_without_an_exact_form_is_named_and_nothing_is_changed() -> None:
    model = decoder("llama")
    model.model.layers[1].mlp.down_proj = torch.nn.LayerNorm(96)
    modules = dict(model.named_modules())
    with pytest.raises(rlk.HostError, match=r"model\.layers\.1\.mlp\.down_proj is a LayerNorm"):
        rlk.exact(model)
    assert dict(model.named_modules()) == modules


def test_a_model_that_computes_something_else_is_refused_and_put_back() -> None:
    model = decoder("llama")
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: layer.down_proj(torch.sin(layer.gate_proj(x)) * layer.up_proj(x)) * 50
    modules = dict(model.named_modules())
    with pytest.raises(rlk.HostError, match="apart from what they were"):
        rlk.exact(model)
    assert dict(model.named_modules()) == modules


def test_a_cache_that_drops_keys_is_refused() -> None:
    model = decoder("mistral")
    with rlk.exact(model), pytest.raises(rlk.HostError, match=f"pass {cache_argument()}=DynamicCache"):
        model.generate(IDS, max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(IDS))


class OfMany(torch.nn.Module):
    """A layer whose result depends on how many rows there are."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.layer = layer.weight, (layer,)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer[0](x) + 1e-3 * (x.shape[1] > 1)


def test_the_first_module_that_differs_is_named() -> None:
    model = decoder("llama")
    with rlk.exact(model):
        assert first_difference(Pretrained("", model), IDS) is None
        mlp = model.model.layers[1].mlp
        mlp.up_proj = OfMany(mlp.up_proj)
        found = first_difference(Pretrained("", model), IDS)
        assert (found.module, found.kind, found.token) == ("model.layers.1.mlp.up_proj", "OfMany", 0)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise of the configuration to 0"),
        ("mixtral", {"hidden_act": "relu"}, "glu computes"),
    ],
)
def test_a_mixture_of_experts_that_has_more_is_refused(name, change, said, monkeypatch) -> None:
    kind, more = CLASSES[name]
    monkeypatch.setitem(CLASSES, name, (kind, more | change))
    with pytest.raises(rlk.HostError, match=said):
        rlk.exact(decoder(name))


def test_logits_of_routers_are_recorded_as_ever() -> None:
    """For the loss that balances experts."""
    model = decoder("qwen3_moe")
    stock = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
    with rlk.exact(model):
        found = model(input_ids=IDS, use_cache=False, output_router_logits=True).router_logits
    torch.testing.assert_close(found, stock)


def test_the_operators_of_experts_are_among_those_that_ran() -> None:
    with rlk.exact(decoder("qwen3_moe")) as exact:
        assert {"route", "grouped_linear"} < exact.ran.keys()


def test_rows_of_one_token_are_summed_in_the_order_of_its_experts() -> None:
    """The gradient of a token has the bits of the token alone, whatever others are routed."""
    model = decoder("qwen3_moe")
    with rlk.exact(model):
        moe = model.model.layers[0].mlp
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
        up = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))

        def gradient(rows: slice) -> Tensor:
            leaf = x[rows].clone().requires_grad_()
            return torch.autograd.grad(moe(leaf[None])[0], leaf, up[rows])[0]

        assert torch.equal(gradient(slice(4, 5)), gradient(slice(None))[4:5])

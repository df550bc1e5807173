"""Quantized modules: which layers, saved and loaded, moved and cast, renewed in place."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel import nn
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.quant import QuantSpec


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64, bias=False)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 64)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.lm_head = torch.nn.Linear(64, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


IDS = torch.arange(6).view(2, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def addresses(model):
    return [p.data_ptr() for m in model.modules() if isinstance(m, nn.QuantLinear) for p in m.weight.parts.values()]


def test_the_policy_says_which_layers_and_how(model) -> None:
    policy = nn.QuantPolicy("int4_g32", formats={"*.down": "nf4"}, skip=("lm_head", "blocks.1.up"))
    assert nn.quantize_model(model, policy) == {
        "blocks.0.up": "int4_g32",
        "blocks.0.down": "nf4",
        "blocks.1.down": "nf4",
    }
    assert type(model.lm_head) is torch.nn.Linear
    assert "64, 96, int4_g32, bias=True" in str(model.blocks[0].up)


def test_a_quantized_model_computes_with_the_dequantized_weights(model) -> None:
    plain = Model()
    plain.load_state_dict(model.state_dict())
    nn.quantize_model(model, nn.QuantPolicy("int8_channel", prepack=True))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.QuantLinear):
            plain.get_submodule(name).weight.data.copy_(rlk.dequantize(layer.weight))
    assert torch.allclose(plain(IDS), model(IDS), atol=1e-5)


def test_a_head_that_shares_its_weight_stays(model) -> None:
    model.lm_head.weight = model.embed.weight
    assert "lm_head" not in nn.quantize_model(model, nn.QuantPolicy("nf4", skip=()))


def test_lora_is_all_that_is_trained_and_starts_as_nothing(model) -> None:
    quantized = Model()
    quantized.load_state_dict(model.state_dict())
    nn.quantize_model(quantized, "int4_g32")
    nn.quantize_model(model, nn.QuantPolicy("int4_g32", lora_rank=4, lora_dtype=torch.float32))
    assert torch.equal(quantized(IDS), model(IDS))
    model(IDS).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {f"blocks.{i}.{n}.lora_{x}" for i in (0, 1) for n in ("up", "down") for x in "AB"}


def test_a_state_dict_comes_back_and_is_what_quant_convert_writes(model, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    from rlkernel import checkpoints

    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    nn.quantize_model(model, nn.QuantPolicy("int4_g32", lora_rank=2))
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    other = Model()
    nn.quantize_model(other, nn.QuantPolicy("int4_g32", lora_rank=2))
    before = addresses(other)
    other.load_state_dict(load_file(tmp_path / "own.safetensors"))
    assert torch.equal(model(IDS), other(IDS))
    assert before == addresses(other)
    checkpoints.convert(tmp_path / "dense.safetensors", tmp_path / "q.safetensors", format="int4_g32")
    converted = load_file(tmp_path / "q.safetensors")
    assert {k: v.tolist() for k, v in model.state_dict().items() if k in converted} == {
        k: v.tolist() for k, v in converted.items()
    }


def test_a_state_of_another_format_or_without_the_weight_is_refused(model) -> None:
    nn.quantize_model(model, "int4_g32")
    other = Model()
    nn.quantize_model(other, "nf4")
    with pytest.raises(RuntimeError, match="nf4"):
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight"):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if ".up.weight" not in k}, strict=True)


def test_a_cast_leaves_codes_and_scales_as_they_are(model) -> None:
    nn.quantize_model(model, "hqq4")
    before = {n: p.dtype for n, p in model.blocks[0].up.weight.parts.items()}
    model.bfloat16()
    assert before == {n: p.dtype for n, p in model.blocks[0].up.weight.parts.items()}
    assert model.blocks[0].up.bias.dtype == torch.bfloat16
    assert model(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize("prepack", [False, True])
def test_weights_are_renewed_in_place(model, prepack) -> None:
    trainer = Model()
    nn.quantize_model(model, nn.QuantPolicy("int4_g32", prepack=prepack))
    before = addresses(model)
    report = nn.requantize_(model, trainer.state_dict())
    assert (report.quantized, before) == (4, addresses(model))
    assert report.gb_per_s > 0
    assert report.bytes_read == sum(p.numel() * 4 for p in trainer.parameters())
    nn.quantize_model(trainer, nn.QuantPolicy("int4_g32", prepack=prepack))
    assert torch.equal(trainer(IDS), model(IDS))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"blocks.0.upp.weight": torch.zeros(96, 64)}, UnknownNameError, r"did you mean 'blocks\.0\.up\.weight'"),
        ({"blocks.0.up.weight": torch.zeros(96, 65)}, ArgumentError, r"must be \[96, 64\]"),
        ({"norm": None}, ArgumentError, r"lacks blocks\.0\.norm\.bias"),
    ],
)
def test_a_wrong_weight_is_told_before_anything_is_written(model, change, error, message) -> None:
    weights = {k: v for k, v in Model().state_dict().items() if "norm" not in k or "norm" not in change}
    weights |= {k: v for k, v in change.items() if v is not None}
    nn.quantize_model(model, "int4_g32")
    before = model(IDS)
    with pytest.raises(error, match=message):
        nn.requantize_(model, weights)
    assert torch.equal(before, model(IDS))


def test_a_policy_that_takes_nothing_is_an_error(model) -> None:
    with pytest.raises(ArgumentError, match="has no layer"):
        nn.quantize_model(model, nn.QuantPolicy(skip=("*",)))
    with pytest.raises(UnknownNameError, match="did you mean 'int4_g128'"):
        nn.quantize_model(model, "int4_g12")
    with pytest.raises(ArgumentError, match="rank"):
        nn.QuantLinear.from_linear(model.lm_head, QuantSpec.named("nf4")).add_lora(0, 1.0)

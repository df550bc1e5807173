"""transformers with rlkernel inside: models on quantized weights, and the loss of a model."""

from __future__ import annotations

import json

import pytest
import torch

import rlkernel as rlk
from rlkernel import checkpoints, nn

hf = pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

from rlkernel.integrations import active, transformers, transformers_quant  # noqa: E402
from tests.trl_runs import model  # noqa: E402

IDS = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2 of random weights, saved in `model`."""
    made = tmp_path_factory.mktemp("tiny")
    model(made)
    return made


def dense(folder, **options):
    return hf.AutoModelForCausalLM.from_pretrained(folder / "model", **options)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"prepack": True}])
@pytest.mark.parametrize("kind", ["int4_g32", {"format": "nf4", "double_quant": True}, "mxfp4"])
def test_a_model_is_quantized_as_it_is_read_and_comes_back_as_it_was_saved(folder, tmp_path, kind, options) -> None:
    own = {k: v for k, v in options.items() if k == "dtype"}
    prepack = options.get("prepack", False)
    ours = dense(folder, **own)
    spec = rlk.QuantSpec.named(kind) if isinstance(kind, str) else rlk.QuantSpec.named(**kind)
    nn.quantize_model(ours, nn.QuantPolicy(spec, formats={"*.o_proj": "int8_channel"}, prepack=prepack))
    want = ours(IDS).logits
    asked = transformers_quant.config(kind, formats={"*.o_proj": "int8_channel"}, prepack=prepack)
    read = dense(folder, quantization_config=asked, **own)
    assert torch.equal(read(IDS).logits, want)
    assert "transformers quantizer" in {a.host for a in active()}
    assert type(read.lm_head) is torch.nn.Linear
    read.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, **own)
    assert torch.equal(again(IDS).logits, want)
    assert again.config.quantization_config.format == kind
    assert {n: str(m.weight) for n, m in again.named_modules() if isinstance(m, nn.QuantLinear)} == {
        n: str(m.weight) for n, m in ours.named_modules() if isinstance(m, nn.QuantLinear)
    }


def test_what_quant_convert_writes_is_read(folder, tmp_path) -> None:
    source = folder / "model"
    checkpoints.convert(source / "model.safetensors", tmp_path / "model.safetensors", format="nf4")
    named = {"quantization_config": {"quant_method": "rlkernel", "format": "nf4"}}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | named))
    transformers_quant.register()
    ours = dense(folder)
    nn.quantize_model(ours, "nf4")
    assert torch.equal(hf.AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, ours(IDS).logits)


def test_a_checkpoint_of_another_format_is_refused(folder, tmp_path) -> None:
    dense(folder, quantization_config=transformers_quant.config("int4_g32")).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"]["format"] = "nf4"
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises((rlk.HostError, RuntimeError), match=r"not saved with this quantization_config|mismatch"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_unknown_format_and_a_policy_that_takes_nothing_are_refused(folder) -> None:
    with pytest.raises(rlk.UnknownNameError, match="did you mean 'int4_g32'"):
        transformers_quant.config("int4_g33")
    with pytest.raises(rlk.HostError, match="quantizes no layer of Qwen2ForCausalLM"):
        dense(folder, quantization_config=transformers_quant.config("nf4", skip=["*"]))


def test_a_tied_head_stays_dense(folder, tmp_path) -> None:
    made = hf.AutoConfig.from_pretrained(folder / "model")
    made.tie_word_embeddings = True
    torch.manual_seed(0)
    hf.Qwen2ForCausalLM(made).save_pretrained(tmp_path)
    asked = transformers_quant.config("int4_g32", skip=[])
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
    assert read.lm_head.weight is read.model.embed_tokens.weight


def test_lora_is_trained_through_the_quantized_product_and_dequantizing_gives_linear_layers(folder) -> None:
    read = dense(folder, quantization_config=transformers_quant.config("int4_g32"))
    read.requires_grad_(requires_grad=False)
    for layer in read.modules():
        if isinstance(layer, nn.QuantLinear):
            layer.add_lora(2, 4.0, torch.float32)
    read(IDS, labels=IDS).loss.backward()
    moved = [n for n, p in read.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert len(moved) == 14  # B of seven layers in two blocks; A's gradient is zero while B is
    assert read.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 8)
    want = read(IDS).logits
    torch.testing.assert_close(read.dequantize()(IDS).logits, want, rtol=1e-5, atol=1e-5)
    assert [m for m in read.modules() if isinstance(m, nn.QuantLinear)] == []


@pytest.mark.parametrize("items", [None, 7, torch.tensor(5)])
def test_the_loss_of_a_model_is_transformers_own(folder, items) -> None:
    found = []
    labels = IDS.clone()
    labels[0, :3] = -100
    given = {} if items is None else {"num_items_in_batch": items}
    for ours in (False, True):
        tiny = dense(folder)
        if ours:
            tiny.loss_function = transformers.causal_lm_loss()
        out = tiny(IDS, labels=labels, **given)
        out.loss.backward()
        found.append((out.loss.detach(), torch.cat([p.grad.flatten() for p in tiny.parameters()])))
    torch.testing.assert_close(*[f[0] for f in found], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(*[f[1] for f in found], rtol=1e-4, atol=1e-7)

"""Checkpoints in several files: read as one whichever file holds what, written shard by shard, whole or not at all."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlkernel import checkpoints, nn
from rlkernel.checkpoints import footprint
from rlkernel.checkpoints.schemes import SCHEMES
from rlkernel_core.errors import ArgumentError, FileError
from rlkernel_core.quant import quantize

N, K = 64, 256
RNG = torch.Generator().manual_seed(0)
NAMES = ("embed.weight", "layers.0.up.weight", "layers.0.norm.weight", "layers.1.up.weight", "lm_head.weight")


@pytest.fixture
def folder(tmp_path):
    """Two shards, their index, a config and a tokenizer."""
    weights = {name: torch.randn(N, K, generator=RNG) for name in NAMES}
    weights["layers.0.norm.weight"] = torch.ones(K)
    path = tmp_path / "model"
    path.mkdir()
    told = {}
    for i, names in enumerate((NAMES[:2], NAMES[2:])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, path / file)
        told |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": told}))
    (path / "config.json").write_text(json.dumps({"hidden_size": K, "quantization_config": {"quant_method": "old"}}))
    (path / "tokenizer.json").write_text("{}")
    return path, weights


def tensors(path):
    """All tensors of a folder."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("named", ["", "model.safetensors.index.json"])
def test_a_folder_and_its_index_are_one_checkpoint(folder, named) -> None:
    path, weights = folder
    with checkpoints.opened(path / named) as source:
        held = {item.name: item.read(source) for item in checkpoints.items(source)}
    assert list(held) == list(NAMES)
    assert all(torch.equal(held[name], weights[name]) for name in NAMES)


def test_a_weight_whose_parts_lie_in_several_shards_is_read(folder, tmp_path) -> None:
    parts = SCHEMES["gptq"].write("a", quantize(folder[1]["lm_head.weight"], "int4_g64_asym"))
    split, found = tmp_path / "split", []
    split.mkdir()
    save_file({f"a{ending}": t.contiguous() for ending, t in parts.items()}, tmp_path / "whole.safetensors")
    for ending, tensor in parts.items():
        save_file({f"a{ending}": tensor.contiguous()}, split / f"{ending}.safetensors")
    for path in (tmp_path / "whole.safetensors", split):
        with checkpoints.opened(path) as source:
            (item,) = checkpoints.items(source)
            found += item.read(source)
    assert found[0].same_bits(found[1])


def test_a_conversion_from_folder_to_folder_takes_all_with_it_and_says_what_the_weights_are(folder, tmp_path) -> None:
    path, weights = folder
    out = tmp_path / "out"
    size = 2 * N * K * 4 // 3
    done = checkpoints.convert(path, out, format="int4_g64", shard_bytes=size)
    assert (done.quantized, done.dense, done.note) == (2, 3, "")
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    told = json.loads((out / "model.safetensors.index.json").read_text())
    assert {name: told["weight_map"][name] for name in tensors(out)} == told["weight_map"]
    assert told["metadata"]["total_size"] == done.bytes == sum(t.nbytes for t in tensors(out).values())
    assert all(sum(t.nbytes for t in load_file(out / name).values()) <= max(size, N * K * 4) for name in shards)
    config = json.loads((out / "config.json").read_text())
    expected = {"quant_method": "rlkernel", "format": "int4_g64", "skip": ["embed", "lm_head"]}
    assert config == {"hidden_size": K, "quantization_config": expected}
    assert (out / "tokenizer.json").read_text() == "{}"
    with checkpoints.opened(out) as source:
        found = {item.name: item.read(source) for item in checkpoints.items(source)}
    assert found["layers.1.up.weight"][0].same_bits(quantize(weights["layers.1.up.weight"], "int4_g64"))


def test_a_folder_in_one_shard_has_no_index(folder, tmp_path) -> None:
    checkpoints.convert(folder[0], tmp_path / "out", scheme="dense")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"hidden_size": K}
    assert all(torch.equal(t, folder[1][name]) for name, t in tensors(tmp_path / "out").items())


@pytest.mark.parametrize(
    ("scheme", "format_", "expected"),
    [
        ("gptq", "int4_g64", {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}),
        ("gptq_v2", "int4_g64_asym", {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False}),
        ("awq", "int4_g64_asym", {"quant_method": "awq", "version": "gemm", "group_size": 64, "zero_point": True}),
        ("bitsandbytes", "nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("compressed-tensors", "int4_g64", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        ("scaled", "fp8_channel", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ("deepseek", "fp8_block128", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
)
def test_the_config_of_a_folder_names_the_method_as_its_readers_spell_it(
    folder, tmp_path, scheme, format_, expected
) -> None:
    checkpoints.convert(folder[0], tmp_path / "out", scheme=scheme, format=format_)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {key: said[key] for key in expected} == expected
    assert said.get("modules_to_not_convert", said.get("ignore", ["embed", "lm_head"])) == ["embed", "lm_head"]


@pytest.mark.parametrize(
    ("scheme", "format_"),
    [("gptq", "int4_g64"), ("awq", "int4_g64_asym"), ("bitsandbytes", "nf4"), ("deepseek", "fp8_block128")],
)
def test_transformers_takes_the_config_of_a_folder(folder, tmp_path, scheme, format_) -> None:
    auto = pytest.importorskip("transformers.quantizers.auto")
    checkpoints.convert(folder[0], tmp_path / "out", scheme=scheme, format=format_)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    taken = auto.AutoQuantizationConfig.from_dict(said).to_dict()
    assert {key: taken[key] for key in said if key in taken} == {key: v for key, v in said.items() if key in taken}


def test_a_converted_folder_loads_with_from_pretrained(tmp_path) -> None:
    hf = pytest.importorskip("transformers")
    from rlkernel.integrations import transformers_quant

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = hf.Qwen2ForCausalLM(
        hf.Qwen2Config(vocab_size=512, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    )
    model.save_pretrained(tmp_path / "model", max_shard_size="300KB")
    checkpoints.convert(tmp_path / "model", tmp_path / "out", format="int4_g64", shard_bytes=200_000)
    transformers_quant.register()
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    nn.quantize_model(model, nn.QuantPolicy("int4_g64"))
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_formats_that_differ_are_named_where_the_method_is_ours_and_noted_where_it_has_no_word(
    folder, tmp_path
) -> None:
    first, mixed, gptq = (tmp_path / name for name in ("first", "mixed", "gptq"))
    checkpoints.convert(folder[0], first, format="int4_g64", skip=("embed*", "lm_head*", "*norm*", "layers.1*"))
    checkpoints.convert(first, mixed, format="int4_g32", skip=("embed*", "lm_head*", "*norm*", "layers.0*"))
    said = json.loads((mixed / "config.json").read_text())["quantization_config"]
    assert (said["format"], said["formats"]) == ("int4_g64", {"layers.1.up": "int4_g32"})
    done = checkpoints.convert(mixed, gptq, scheme="gptq_v2")
    assert "differ" in done.note
    said = json.loads((gptq / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: (p / "model-00002-of-00002.safetensors").unlink(),
            r"00002-of-00002\.safetensors: does not exist",
        ),
        (
            lambda p: save_file({"x": torch.ones(1)}, p / "model-00002-of-00002.safetensors"),
            "says that .* holds .*which it does not",
        ),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "has no 'weight_map'"),
        (lambda p: (p / "other.safetensors.index.json").write_text("{}"), "several checkpoints"),
        (lambda p: [f.unlink() for f in p.glob("model*")], r"holds no \.safetensors"),
        (
            lambda p: [
                (p / "model.safetensors.index.json").unlink(),
                save_file({"embed.weight": torch.ones(1)}, p / "x.safetensors"),
            ],
            r"embed\.weight.*is in model-00001-of-00002.safetensors and in x.safetensors",
        ),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_is_written(folder, tmp_path, damage, message) -> None:
    damage(folder[0])
    with pytest.raises((ArgumentError, FileError), match=message):
        checkpoints.convert(folder[0], tmp_path / "out", format="int4_g64")
    assert {file.name for file in tmp_path.iterdir()} == {"model"}


def test_a_folder_that_is_there_is_not_touched(folder, tmp_path) -> None:
    with pytest.raises(ArgumentError, match="is the source"):
        checkpoints.convert(folder[0], folder[0])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="is there already"):
        checkpoints.convert(folder[0], tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"must end in \.gguf"):
        checkpoints.convert(folder[0], tmp_path / "new", scheme="gguf", format="gguf_q8_0")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]
    assert {file.name for file in tmp_path.iterdir()} == {"model", "out"}


def test_a_conversion_that_fails_midway_leaves_no_folder(folder, tmp_path) -> None:
    with pytest.raises(ArgumentError, match="AWQ"):
        checkpoints.convert(folder[0], tmp_path / "out", format="nf4", scheme="awq", shard_bytes=1)
    assert {file.name for file in tmp_path.iterdir()} == {"model"}


def test_the_commands_take_a_folder(cli, folder, tmp_path) -> None:
    out = str(tmp_path / "out")
    assert "Quantized 2 weights" in cli("quant", "convert", str(folder[0]), out, "--format", "int4_g64").stdout
    assert "3 dense, 2 rlkernel" in cli("quant", "inspect", out).stdout
    assert footprint.footprint(out).total == sum(t.nbytes for t in tensors(tmp_path / "out").values())

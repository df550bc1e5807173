"""Packed weights under vLLM's linear layers: vLLM's names and signatures by stand-ins, the weights real."""

from __future__ import annotations

import pickle

import pytest
import torch

import rlkernel as rlk
from rlkernel.integrations import active, host, vllm_quant
from rlkernel.nn.sharded import ShardedWeight, Share
from rlkernel_core.quant import QuantSpec, dequantize, quantize, stack
from tests import vllm_stand_in as vllm

PIECES = {"q": 256, "k": 128, "v": 128}
SHARDS = {"q": "q", "k": "k", "v": "v", "all": None}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense() -> dict[str, torch.Tensor]:
    return {name: normal(rows, 256, seed=rows) for name, rows in PIECES.items()}


def packed(kind: str) -> dict[str, rlk.QuantTensor]:
    return {name: quantize(weight, kind) for name, weight in dense().items()}


def held(layer) -> dict[str, torch.Tensor]:
    """The tensors of its weight."""
    return {name: x for name, x in vars(layer.weight).items() if isinstance(x, torch.Tensor)}


@pytest.fixture
def config(monkeypatch):
    methods = vllm.installed(monkeypatch)
    vllm_quant.classes.cache_clear()
    vllm_quant.register()
    assert "vllm quantization" in {entry.host for entry in active()}
    yield methods["rlkernel"].from_config
    vllm_quant.classes.cache_clear()
    for table in (host._ACTIVE, host._SEEN):
        table.pop("vllm quantization", None)


@pytest.mark.parametrize("kind", ["int4_g128", "nf4", "mxfp4"])
def test_a_layer_is_filled_by_its_pieces_and_multiplies_by_what_they_stand_for(config, kind) -> None:
    layer, weights = vllm.attention(config({"format": kind, "quant_method": "rlkernel"})), packed(kind)
    with pytest.raises(rlk.ArgumentError, match=r"is not whole; got pieces \[\] of 3"):
        layer.quant_method.process_weights_after_loading(layer)
    names = set(layer.load_weights(vllm.stream(weights, SHARDS)))
    layer.quant_method.process_weights_after_loading(layer)
    assert names <= {f"weight.{name}" for name in held(layer)}
    x = normal(3, 256)
    want = x @ torch.cat([dequantize(w) for w in weights.values()]).T
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.quant_method.dequantize_weight(layer), dequantize(stack(list(weights.values()))))
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((512, 256), torch.float32, "cpu")


def test_dense_weights_are_quantized_while_they_are_read_to_the_same_bits(config) -> None:
    layer = vllm.attention(config({"prepack": False}))
    list(layer.load_weights(vllm.stream(dense(), SHARDS)))
    assert layer.weight.tensor.same_bits(stack(list(packed("int4_g128").values())))


@pytest.mark.parametrize("prepack", [False, True])
def test_weights_that_are_loaded_again_keep_their_addresses(config, prepack) -> None:
    layer = vllm.attention(config({"prepack": prepack}))
    list(layer.load_weights(vllm.stream(dense(), SHARDS)))
    before = {name: tensor.data_ptr() for name, tensor in held(layer).items()}
    twice = {name: 2 * w for name, w in dense().items()}
    again = {name: quantize(w, "int4_g128") for name, w in twice.items()}
    for update in (again, twice):
        list(layer.load_weights(vllm.stream(update, SHARDS)))
        assert {name: tensor.data_ptr() for name, tensor in held(layer).items()} == before
        assert torch.equal(dequantize(layer.weight.tensor), dequantize(stack(list(again.values()))))


def test_an_update_that_is_not_whole_is_not_multiplied_by(config) -> None:
    layer = vllm.attention(config({}))
    list(layer.load_weights(vllm.stream(dense(), SHARDS)))
    list(layer.load_weights(vllm.stream({"q": dense()["q"]}, SHARDS)))
    with pytest.raises(rlk.ArgumentError, match=r"is not whole; got pieces \[0\] of 3"):
        layer(normal(3, 256))
    list(layer.load_weights(vllm.stream({name: w for name, w in dense().items() if name != "q"}, SHARDS)))
    assert layer(normal(3, 256)).shape == (3, 512)


def test_ranks_have_their_rows_and_kv_heads_that_are_fewer_than_ranks_go_to_neighbors() -> None:
    q, k = packed("int4_g128")["q"], packed("int4_g128")["k"]
    for rank in range(4):
        held = ShardedWeight(q.spec, Share((64, 64), 256, rank, 4), dtype=torch.float32, device=torch.device("cpu"))
        for piece, weight in ((1, k), (0, q)):
            for name, tensor in weight.state_dict().items():
                held.weight_loader(None, tensor, piece, name)
        heads = dequantize(q)[64 * rank : 64 * rank + 64], dequantize(k)[64 * (rank // 2) : 64 * (rank // 2) + 64]
        assert torch.equal(dequantize(held.tensor), torch.cat(heads))


@pytest.mark.parametrize("way", ["packed", "dense"])
def test_pieces_that_lie_below_each_other_in_the_file_are_cut_apart(way) -> None:
    whole = torch.cat(list(dense().values()))
    for rank in range(2):
        held = ShardedWeight(
            QuantSpec.named("int8_channel"),
            Share((128, 64, 64), 256, rank, 2),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        state = quantize(whole, "int8_channel").state_dict() if way == "packed" else {"": whole}
        assert list(held.load_weights(state.items())) == list(state)
        want = torch.cat([w[len(w) // 2 * rank :][: len(w) // 2] for w in dense().values()])
        assert torch.equal(dequantize(held.tensor), dequantize(quantize(want, "int8_channel")))


@pytest.mark.parametrize("kind", ["int4_g64", "int8_channel", "mxfp4", "fp8_block128", "fp8_tensor"])
def test_dense_columns_of_a_rank_have_the_bits_of_the_whole(kind) -> None:
    weight = normal(128, 512)
    held = ShardedWeight(
        QuantSpec.named(kind), Share((128,), 256, 1, 2), dtype=torch.float32, device=torch.device("cpu")
    )
    held.weight_loader(None, weight)
    assert torch.equal(dequantize(held.tensor), dequantize(quantize(weight, kind))[:, 256:])


@pytest.mark.parametrize("kind", ["int4_g64", "fp8_tensor"])
def test_dense_rows_of_a_rank_have_the_bits_of_the_whole(kind) -> None:
    weight = normal(256, 128)
    held = ShardedWeight(
        QuantSpec.named(kind), Share((128,), 128, 1, 2), dtype=torch.float32, device=torch.device("cpu")
    )
    held.weight_loader(None, weight)
    assert torch.equal(dequantize(held.tensor), dequantize(quantize(weight, kind))[128:])


def test_ranks_of_a_layer_that_splits_its_inputs_add_up() -> None:
    w, x = quantize(normal(64, 512), "int4_g128"), normal(3, 512)
    found = torch.zeros(3, 64)
    for rank in range(2):
        held = ShardedWeight(w.spec, Share((64,), 256, rank, 2), dtype=torch.float32, device=torch.device("cpu"))
        list(held.load_weights(w.state_dict().items()))
        found += rlk.qmatmul(x[:, 256 * rank : 256 * rank + 256], held.tensor)
    torch.testing.assert_close(found, rlk.qmatmul(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "share", "weight", "message"),
    [
        ("int4_g128", Share((64,), 256), quantize(normal(64, 256), "nf4"), "was to be int4_g128"),
        ("int4_g128", Share((64,), 128, 0, 4), normal(64, 256), "rank 0 of 4 wants"),
        ("int4_g128", Share((48,), 256, 0, 2), normal(64, 256), "is not shared so"),
        ("nf4", Share((64,), 128, 0, 2), quantize(normal(64, 256), "nf4"), "no runs of columns"),
        ("nf4", Share((64,), 128, 0, 2), normal(64, 256), "no runs of columns"),
        ("int4_g128", Share((64,), 64, 1, 4), normal(64, 256), "no multiple of 128"),
    ],
)
def test_a_weight_that_a_rank_cannot_take_is_refused(spec, share, weight, message) -> None:
    held = ShardedWeight(QuantSpec.named(spec), share, dtype=torch.float32, device=torch.device("cpu"))
    state = {"": weight} if isinstance(weight, torch.Tensor) else weight.state_dict()
    with pytest.raises(rlk.ArgumentError, match=message):
        list(held.load_weights(state.items()))


def test_packed_and_dense_pieces_are_no_weight() -> None:
    held = ShardedWeight(
        QuantSpec.named("int4_g128"), Share((64, 64), 256), dtype=torch.float32, device=torch.device("cpu")
    )
    held.weight_loader(None, normal(64, 256), 0)
    with pytest.raises(rlk.ArgumentError, match="Quantize all of them, or none"):
        for name, tensor in quantize(normal(64, 256), "int4_g128").state_dict().items():
            held.weight_loader(None, tensor, 1, name)


def test_which_layers_are_quantized_is_the_policy_of_the_checkpoint(config) -> None:
    said = config({"format": "nf4", "skip": ["*o_proj", "*head"], "formats": {"*.k_proj": "int4_g128"}})
    with pytest.raises(rlk.HostError, match=r"model.q_proj nf4, model.k_proj int4_g128.*give them one format"):
        vllm.attention(said)
    plain = object.__new__(vllm.LinearBase)
    assert type(said.get_quant_method(plain, "model.o_proj")).__name__ == "UnquantizedLinearMethod"
    assert said.get_quant_method(plain, "model.k_proj").spec.kind == "int4_g128"
    assert said.get_quant_method(vllm.NOT_A_LAYER, "model.embed") is None
    assert said.get_quant_method(object.__new__(vllm.ParallelLMHead), "lm_head") is None
    with pytest.raises(rlk.HostError, match="is a head"):
        config({"skip": []}).get_quant_method(object.__new__(vllm.ParallelLMHead), "lm_head")
    with pytest.raises(rlk.UnknownNameError, match="int4_g128"):
        config({"format": "int4_g129"})


def test_what_vllm_asks_of_a_configuration(config) -> None:
    said = config({})
    assert (said.get_name(), said.get_min_capability(), said.get_config_filenames()) == ("rlkernel", 0, [])
    assert torch.bfloat16 in said.get_supported_act_dtypes()
    assert isinstance(said.get_checkpoint_weight_mapper(), vllm.WeightsMapper)  # drops no g_idx, as vLLM's own does
    assert "int4_g128" in repr(said)


def test_a_configuration_reaches_an_engine_in_a_process_of_its_own(config) -> None:
    sent = config({"format": "int4_g32", "skip": ["lm_head"], "formats": {"down_proj": "int8_channel"}})
    sent.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # vLLM tells it before it sends it
    got = pickle.loads(pickle.dumps(sent))
    assert (type(got), vars(got)) == (type(sent), vars(sent))


def test_a_refusal_is_a_warning_where_vllm_starts_plugins(monkeypatch) -> None:
    vllm.installed(monkeypatch, version="0.99.0")
    with pytest.warns(rlk.PluginWarning, match=r"not registered with vLLM: .*0\.99\.0 is installed.*pip install"):
        vllm_quant.plugin()

"""Packed weights in vLLM's own linear layers, filled by vLLM's own loader; `make hosts` installs vLLM."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.quant import dequantize, quantize, stack
from tests import vllm_layers
from tests.vllm_layers import HIDDEN, NAMES

pytest.importorskip("vllm.model_executor.models.qwen2", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

PARTS = {"qkv_proj": NAMES[:3], "o_proj": NAMES[3:4], "gate_up_proj": NAMES[4:6], "down_proj": NAMES[6:]}


@pytest.fixture(scope="module", autouse=True)
def alone():
    from rlkernel.integrations import vllm_quant

    vllm_quant.register()
    with vllm_layers.engine():
        yield


def config(**said):
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("rlkernel").from_config({"quant_method": "rlkernel", **said})


def stored(kind: str, scale: float = 1.0) -> dict[str, rlk.QuantTensor]:
    return {name: quantize(scale * weight, kind) for name, weight in vllm_layers.weights().items()}


def stream(weights):
    states = {n: w.state_dict("weight.") if hasattr(w, "state_dict") else {"weight": w} for n, w in weights.items()}
    return [(f"block.{name}.{part}", tensor) for name, state in states.items() for part, tensor in state.items()]


def filled(kind: str, weights, **said) -> torch.nn.Module:
    model = vllm_layers.block(config(format=kind, **said))
    read = model.load_weights(stream(weights))
    vllm_layers.finish(model)
    known = {f"block.{layer}.weight" for layer in PARTS}
    for layer in PARTS:
        known |= {f"block.{layer}.weight.{name}" for name in vars(getattr(model.block, layer).weight)}
    assert read <= known
    return model


def stock(weights) -> torch.nn.Module:
    """The same layers as vLLM has them, on dense weights."""
    model = vllm_layers.block(None)
    model.load_weights(stream({name: dequantize(w) for name, w in weights.items()}))
    vllm_layers.finish(model)
    return model


@pytest.mark.parametrize("kind", ["int4_g128", "int4_g128_asym", "nf4", "int8_channel", "mxfp4", "gguf_q4_k"])
def test_vllms_loader_fills_vllms_layers_with_a_packed_checkpoint(kind) -> None:
    weights = stored(kind)
    model = filled(kind, weights)
    for layer, pieces in PARTS.items():
        held = getattr(model.block, layer).weight.tensor
        assert torch.equal(rlk.dequantize(held), dequantize(stack([weights[p] for p in pieces])))
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.block(x), stock(weights).block(x), rtol=1e-4, atol=1e-4)


def test_columns_in_an_order_of_their_own_keep_it() -> None:
    asked = {"format": "int4_g128", "act_order": True}
    spec = rlk.integrations.transformers_quantizer.spec_of(asked)
    weights = {name: quantize(w, spec) for name, w in vllm_layers.weights().items() if name in {"o_proj", "down_proj"}}
    model = vllm_layers.block(config(format=asked, skip=["*q_proj", "*k_proj", "*v_proj", "*gate_proj", "*up_proj"]))
    model.load_weights(stream(weights))
    for name, w in weights.items():
        assert torch.equal(rlk.dequantize(getattr(model.block, name).weight.tensor), dequantize(w))


def test_dense_weights_are_quantized_by_vllms_loader_and_again_in_place() -> None:
    model = filled("int4_g128", vllm_layers.weights())
    layers = {layer: getattr(model.block, layer).weight for layer in PARTS}
    before = {layer: w.codes.data_ptr() for layer, w in layers.items()}
    for update in ({n: 2 * w for n, w in vllm_layers.weights().items()}, stored("int4_g128", 2.0)):
        model.load_weights(stream(update))
        want = stored("int4_g128", 2.0)
        for layer, pieces in PARTS.items():
            assert layers[layer].codes.data_ptr() == before[layer]
            assert torch.equal(rlk.dequantize(layers[layer].tensor), dequantize(stack([want[p] for p in pieces])))


def test_a_checkpoint_of_another_format_or_with_a_tensor_missing_is_refused() -> None:
    with pytest.raises(rlk.ArgumentError, match="was to be int4_g128"):
        filled("int4_g128", stored("int4_g64"))
    with pytest.raises(rlk.ArgumentError, match="is not whole"):
        filled("int4_g128", {name: w for name, w in stored("int4_g128").items() if name != "k_proj"})


def test_the_layers_compile_as_vllm_compiles_them() -> None:
    model = filled("int4_g128", stored("int4_g128")).block
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        compiled = torch.compile(model.down_proj, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x.repeat(1, 2))[0], model.down_proj(x.repeat(1, 2))[0])


def on_rank(rank: int, path: str, found) -> None:
    """One of two ranks: its part of the last layer's output, summed by vLLM, and its rows of q, k and v."""
    from rlkernel.integrations import vllm_quant

    vllm_quant.register()
    with vllm_layers.engine(rank, 2, path):
        model = filled("int4_g128", stored("int4_g128"))
        x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
        found.put((rank, model.block(x).detach().numpy(), model.block.qkv_proj.weight.shape))
        torch.distributed.barrier()


def test_two_ranks_share_the_weights_and_agree(tmp_path) -> None:
    ways = multiprocessing.get_context("spawn")
    found = ways.Queue()
    ranks = [ways.Process(target=on_rank, args=(rank, tmp_path / "store", found)) for rank in range(2)]
    for process in ranks:
        process.start()
    outputs = {rank: (torch.from_numpy(y), shape) for rank, y, shape in (found.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert outputs[0][1] == (256, 256)  # of q, k and v, which have 512 rows
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][0], stock(stored("int4_g128")).block(x).detach(), rtol=1e-4, atol=1e-4)

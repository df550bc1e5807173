"""A few classes with the names and signatures of vLLM's, enough to run where vLLM is not; test_vllm has theirs.

What they do with a layer is what vLLM does: make its weights while it is built, hand tensors of a checkpoint to
whatever has the name, tell it that all are read, and multiply.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers"


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    def get_quant_method(self, layer, prefix): ...

    @classmethod
    def from_config(cls, config): ...

    @staticmethod
    def get_checkpoint_weight_mapper(): ...


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer): ...

    def dequantize_weight(self, layer): ...


class LinearMethodBase(QuantizeMethodBase):
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ): ...

    def apply(self, layer, x, bias=None): ...


class UnquantizedLinearMethod(LinearMethodBase):
    """Dense."""


class LinearBase(torch.nn.Module):
    """A linear layer of some pieces on one of some ranks."""

    def __init__(self, inputs: int, outputs: list[int], config, prefix: str, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, world
        self.quant_method = config.get_quant_method(self, prefix)
        split = [n // world for n in outputs]
        self.quant_method.create_weights(
            self, inputs, split, inputs, sum(outputs), torch.float32, weight_loader=self.weight_loader
        )

    def weight_loader(self, param, loaded_weight, loaded_shard_id=None): ...

    def load_weights(self, weights):
        for name, loaded in weights:
            owner, _, leaf = name.rpartition(".")
            param = getattr(self.get_submodule(owner), leaf) if owner else getattr(self, leaf)
            param.weight_loader(param, loaded, getattr(loaded, "shard_id", None))
            yield name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, None)


class ParallelLMHead(torch.nn.Module):
    """A head."""


class AutoWeightsLoader:
    def load_weights(self, weights, *, mapper=None): ...


class WeightsMapper:
    """Renames nothing."""


def installed(monkeypatch, version: str = "0.33.0") -> dict[str, Any]:
    """Put them in vLLM's place; the table of methods that `register_quantization_config` fills."""
    methods: dict[str, Any] = {}

    def register_quantization_config(quantization):
        return lambda cls: methods.setdefault(quantization, cls)

    modules = {
        f"{_LAYERS}.quantization": {"register_quantization_config": register_quantization_config},
        f"{_LAYERS}.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": QuantizeMethodBase,
        },
        f"{_LAYERS}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
            "QKVParallelLinear": LinearBase,
            "MergedColumnParallelLinear": LinearBase,
        },
        f"{_LAYERS}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        "vllm.model_executor.models.utils": {"AutoWeightsLoader": AutoWeightsLoader, "WeightsMapper": WeightsMapper},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rlkernel.integrations.host.version", lambda _: version)
    return methods


def stream(weights: dict[str, Any], shards: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint as vLLM's mapper hands them to a layer: its own names, and the piece as an attribute."""
    found = []
    for piece, weight in weights.items():
        state = weight.state_dict("weight.") if hasattr(weight, "state_dict") else {"weight": weight}
        for name, tensor in state.items():
            alias = tensor.detach()
            alias.shard_id = shards[piece]
            found.append((name, alias))
    return found


def attention(config, **ranks: int) -> LinearBase:
    """q, k and v as one layer."""
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return LinearBase(256, [256, 128, 128], config, "model.qkv_proj", **ranks)


NOT_A_LAYER = SimpleNamespace()

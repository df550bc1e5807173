"""vLLM: models on our packed weights, as a quantization method of the name `rlkernel`, by its general plugins.

    vllm serve quantized                                   # a folder of save_pretrained or of rlkernel quant convert
    vllm serve Qwen/Qwen2.5-0.5B --quantization rlkernel   # dense weights, quantized while they are read

vLLM imports `plugin` by its entry-point group `vllm.general_plugins`, which adds a name to its table of methods and
replaces nothing. Its linear layers keep what a rank has of their weights in `rlkernel.nn.sharded`, and their product is
`rlkernel.qmatmul`; weights that are loaded again, after an update of the policy, keep their addresses.

Its `reload_weights` takes parameters of layers away and fills them anew, for which these weights are none: they are
filled in place then, too. An update that lacks a tensor raises an error at the next product.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations import vllm
from rlkernel.integrations.host import Active, Symbol, registered
from rlkernel.integrations.transformers_quantizer import METHOD, policy_of
from rlkernel_core.errors import HostError, PluginWarning
from rlkernel_core.quant import QuantSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlkernel.nn import QuantPolicy

_QUANT: Final = "vllm.model_executor.layers.quantization"
_BASE: Final = f"{_QUANT}.base_config"
_LINEAR: Final = "vllm.model_executor.layers.linear"
_HEAD: Final = "vllm.model_executor.layers.vocab_parallel_embedding"
_LOADER: Final = "self, param, loaded_weight, loaded_shard_id"
HOST: Final = replace(
    vllm.HOST,
    name="vllm quantization",
    does="models on our formats, qmatmul under linear layers",
    symbols=(
        Symbol(_QUANT, "register_quantization_config", "quantization"),
        Symbol(_BASE, "QuantizationConfig.get_quant_method", "self, layer, prefix"),
        Symbol(_BASE, "QuantizationConfig.from_config"),
        Symbol(_BASE, "QuantizationConfig.get_checkpoint_weight_mapper", ""),
        Symbol(_BASE, "QuantizeMethodBase.process_weights_after_loading", "self, layer"),
        Symbol(_BASE, "QuantizeMethodBase.dequantize_weight", "self, layer"),
        Symbol(
            _LINEAR,
            "LinearMethodBase.create_weights",
            "self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, "
            "params_dtype, extra_weight_attrs",
        ),
        Symbol(_LINEAR, "LinearMethodBase.apply", "self, layer, x, bias"),
        Symbol(_LINEAR, "LinearBase"),
        Symbol(_LINEAR, "UnquantizedLinearMethod"),
        Symbol(_LINEAR, "QKVParallelLinear.weight_loader", _LOADER),
        Symbol(_LINEAR, "QKVParallelLinear.load_weights", "self, weights"),
        Symbol(_LINEAR, "MergedColumnParallelLinear.weight_loader", _LOADER),
        Symbol(_LINEAR, "MergedColumnParallelLinear.load_weights", "self, weights"),
        Symbol(_HEAD, "ParallelLMHead"),
        Symbol("vllm.model_executor.models.utils", "AutoWeightsLoader.load_weights", "self, weights, mapper"),
        Symbol("vllm.model_executor.models.utils", "WeightsMapper"),
    ),
)


def register(*, force: bool = False) -> Active:
    """Make the method known to vLLM in this process; again does nothing.

    Raises:
        HostError: vLLM is absent, of a version that this was not made for, or has changed.
    """
    found = HOST.require(force=force)
    classes()
    return registered(HOST, found, f"quantization method {METHOD!r}")


def plugin() -> None:
    """What vLLM calls in each of its processes. It does not expect an error here, so that a refusal is a warning."""
    try:
        register()
    except HostError as refusal:
        warnings.warn(f"quantization {METHOD!r} is not registered with vLLM: {refusal}", PluginWarning, stacklevel=2)


@cache
def classes() -> tuple[type, type]:
    """The configuration, registered with vLLM under `METHOD`, and the method of its linear layers."""
    method = _method()
    configuration = _configuration(method)
    import_module(_QUANT).register_quantization_config(METHOD)(configuration)
    return configuration, method


def restored(state: Mapping[str, Any]) -> Any:
    """A configuration that another process has pickled."""
    configuration, _ = classes()
    made = configuration()
    vars(made).update(state)
    return made


def format_of(policy: QuantPolicy, prefix: str, packed: Mapping[str, list[str]]) -> QuantSpec | None:
    """The format of a layer of vLLM, which may be several of the checkpoint; None where it stays dense.

    Args:
        policy: over names as the checkpoint has them.
        prefix: vLLM's name of the layer.
        packed: last part of vLLM's name -> of the checkpoint's, as models tell it.

    Raises:
        HostError: layers that vLLM keeps as one have different formats.
    """
    owner, _, leaf = prefix.rpartition(".")
    names = [f"{owner}.{piece}" if owner else piece for piece in packed.get(leaf, [leaf])]
    formats = {name: policy.format_of(name) for name in names}
    if len(set(formats.values())) > 1:
        said = ", ".join(f"{name} {spec or 'dense'}" for name, spec in formats.items())
        raise HostError(f"vllm: {prefix} is one weight there, and the configuration has {said}; give them one format")
    return next(iter(formats.values()))


def _method() -> type:
    parent = import_module(_LINEAR).LinearMethodBase

    class RLKernelLinearMethod(parent):  # type: ignore[misc, valid-type]
        """A linear layer of vLLM on a quantized weight."""

        def __init__(self, spec: QuantSpec, *, prepack: bool) -> None:
            super().__init__()
            self.spec, self.prepack = spec, prepack

        def create_weights(
            self,
            layer: Any,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,  # noqa: ARG002  theirs
            output_size: int,  # noqa: ARG002
            params_dtype: torch.dtype,
            **extra_weight_attrs: Any,  # noqa: ARG002  among them vLLM's loader, which narrows dense weights
        ) -> None:
            import torch

            from rlkernel.nn.sharded import ShardedWeight, Share

            share = Share(tuple(output_partition_sizes), input_size_per_partition, layer.tp_rank, layer.tp_size)
            device = torch.empty(0).device  # vLLM builds models under the device that they are for
            layer.weight = ShardedWeight(self.spec, share, dtype=params_dtype, device=device, prepack=self.prepack)

        def process_weights_after_loading(self, layer: Any) -> None:
            if not layer.weight.filled:
                layer.weight.tensor  # noqa: B018  tells what was not read; an update may still be under way

        def apply(
            self,
            layer: Any,
            x: Tensor,  # [..., K]
            bias: Tensor | None = None,  # [Nout]
        ) -> Tensor:
            import rlkernel as rlk

            result: Tensor = rlk.qmatmul(x, layer.weight.tensor, bias=bias)
            return result

        def dequantize_weight(self, layer: Any) -> Tensor:
            import rlkernel as rlk

            result: Tensor = rlk.dequantize(layer.weight.tensor)
            return result

    return RLKernelLinearMethod


def _configuration(method: type) -> type:  # noqa: C901  the methods that vLLM names, a line each
    parent = import_module(_BASE).QuantizationConfig

    class RLKernelConfig(parent):  # type: ignore[misc, valid-type]
        """`quantization_config` of config.json, as `transformers_quant.config` makes it; without one int4_g128."""

        def __init__(self, said: Mapping[str, Any] | None = None) -> None:
            from rlkernel.nn.model import SKIP

            super().__init__()
            said = said or {}
            self.format = said.get("format", "int4_g128")
            self.skip = tuple(said.get("skip", SKIP))
            self.formats = dict(said.get("formats", {}))
            self.prepack = bool(said.get("prepack", True))  # nothing here is saved again
            self.policy = policy_of(self)  # an unknown format is told here

        def __repr__(self) -> str:
            return f"RLKernelConfig({self.policy})"

        def __reduce__(self) -> tuple[Any, ...]:
            return restored, (vars(self),)  # vLLM's engine may run in a process of its own, which knows no local class

        def get_name(self) -> str:
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            import torch

            return [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0  # the choice of an implementation is made per call, and the reference runs anywhere

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> RLKernelConfig:
            return cls(config)

        @staticmethod
        def get_checkpoint_weight_mapper() -> Any:
            # vLLM's own drops g_idx, which our formats with act_order need.
            return import_module("vllm.model_executor.models.utils").WeightsMapper()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            linear = import_module(_LINEAR)
            if isinstance(layer, import_module(_HEAD).ParallelLMHead) and self.policy.format_of(prefix) is not None:
                raise HostError(f"vllm: {prefix} is a head, which is not read quantized; add it to skip=")
            if not isinstance(layer, linear.LinearBase):
                return None
            spec = format_of(self.policy, prefix, self.packed_modules_mapping)
            return linear.UnquantizedLinearMethod() if spec is None else method(spec, prepack=self.prepack)

    return RLKernelConfig

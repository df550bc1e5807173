"""The classes that transformers wants of a quantization method: its configuration, and an `HfQuantizer`.

Derived from transformers' own when asked for, since this module may not import transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import rlkernel as rlk
from rlkernel_core.errors import HostError
from rlkernel_core.quant import CANONICAL, QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel.nn import QuantLinear, QuantPolicy

METHOD: Final = "rlkernel"  # quant_method of config.json


def spec_of(format: str | Mapping[str, Any]) -> QuantSpec:  # noqa: A002  the field's noun
    """The spec of a format as JSON has it: a name, or a table of a name and options."""
    return QuantSpec.named(format) if isinstance(format, str) else QuantSpec.named(**format)


def policy_of(config: Any) -> QuantPolicy:
    """Which layers a configuration quantizes, and how."""
    from rlkernel.nn import QuantPolicy

    formats = {pattern: spec_of(said) for pattern, said in config.formats.items()}
    return QuantPolicy(spec_of(config.format), skip=tuple(config.skip), formats=formats)


def layers_of(model: Any) -> dict[str, QuantLinear]:
    """The quantized layers of a model."""
    from rlkernel.nn import QuantLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@cache
def classes() -> tuple[type, type]:
    """The configuration and the quantizer, registered with transformers under `METHOD`."""
    auto = import_module("transformers.quantizers.auto")
    configuration, quantizer = _configuration(), _quantizer()
    auto.register_quantization_config(METHOD)(configuration)
    auto.register_quantizer(METHOD)(quantizer)
    return configuration, quantizer


def _configuration() -> type:
    parent = import_module("transformers.utils.quantization_config").QuantizationConfigMixin

    class RLKernelConfig(parent):  # type: ignore[misc, valid-type]
        """`quantization_config` of config.json: plain values, which `QuantPolicy` explains."""

        def __init__(
            self,
            format: str | Mapping[str, Any] = "int4_g128",  # noqa: A002  the field's noun
            skip: Sequence[str] | None = None,
            formats: Mapping[str, str | Mapping[str, Any]] | None = None,
            *,
            prepack: bool = False,
            quant_method: str = METHOD,
        ) -> None:
            from rlkernel.nn.model import SKIP

            self.quant_method = quant_method
            self.format = format if isinstance(format, str) else dict(format)
            self.skip = list(SKIP if skip is None else skip)  # written out, so that a file means what it meant
            self.formats = dict(formats or {})
            self.prepack = prepack
            policy_of(self)  # an unknown format is told here

    return RLKernelConfig


def _operation() -> type:
    parent = import_module("transformers.core_model_loading").ConversionOps

    class Quantize(parent):  # type: ignore[misc, valid-type]
        """A weight as it was read, into a QuantLinear in the place of the linear layer."""

        def __init__(self, quantizer: Any) -> None:
            self.quantizer = quantizer

        def convert(
            self,
            input_dict: Mapping[str, list[Tensor]],
            *,
            model: Any,
            full_layer_name: str,
            missing_keys: set[str],
            **_: Any,
        ) -> dict[str, Tensor]:
            from rlkernel.nn import QuantLinear

            ((weight,),) = input_dict.values()
            name = full_layer_name.removesuffix(".weight")
            linear = model.get_submodule(name)
            layer = QuantLinear(rlk.quantize(weight, self.quantizer.chosen[name]))
            layer.bias = linear.bias  # the one that transformers has read, or will read into the layer
            model.set_submodule(name, layer)
            missing_keys.discard(full_layer_name)
            return {}

    return Quantize


def _quantizer() -> type:  # noqa: C901  the methods that transformers names, a line each
    parent = import_module("transformers.quantizers.base").HfQuantizer
    operation = _operation()

    class RLKernelQuantizer(parent):  # type: ignore[misc, valid-type]
        """Linear layers on our formats: quantized while they are read, or read as they were saved."""

        chosen: Mapping[str, QuantSpec]  # module -> format

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            self.chosen = prepared(model, policy_of(self.quantization_config), stored=self.pre_quantized)

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:  # noqa: ARG002  theirs
            # Of a saved model: those whose size transformers is not to hold against ours. The notes beside a weight
            # name its dtype, and are as long as that name.
            module, name = param_name.rsplit(".", 1)
            return name == "quant_meta" if self.pre_quantized else name == "weight" and module in self.chosen

        def get_quantize_ops(self) -> Any:
            return operation(self)

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            finish(model)
            if self.quantization_config.prepack:
                for layer in layers_of(model).values():
                    layer.weight = rlk.prepack(layer.weight)
            return model

        def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            return canonical_state(model), {}

        def _dequantize(self, model: Any, dtype: Any = None) -> Any:
            return dense(model, dtype)

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True  # what is dense, and LoRA: the product has gradients, quantized weights have none

        @property
        def is_qat_trainable(self) -> bool:
            return True  # Trainer asks this of a model that has no peft adapter

    return RLKernelQuantizer


def prepared(model: Any, policy: QuantPolicy, *, stored: bool) -> dict[str, QuantSpec]:
    """Module -> format of what will be quantized; with `stored`, those modules wait for quantized weights."""
    from rlkernel.nn.model import selected
    from rlkernel.nn.stored import Stored

    tied = {key for pair in model.all_tied_weights_keys.items() for key in pair}
    found = {n: choice for n, choice in selected(model, policy).items() if f"{n}.weight" not in tied}
    if not found:
        raise HostError(f"transformers: the configuration quantizes no layer of {type(model).__name__}; change skip=")
    if stored:
        for name, (linear, spec) in found.items():
            model.set_submodule(name, Stored(linear, spec))
    return {name: spec for name, (_, spec) in found.items()}


def finish(model: Any) -> None:
    """Layers in the place of those whose weights were read as they were saved."""
    from rlkernel.nn.stored import Stored

    for name, module in list(model.named_modules()):
        if not isinstance(module, Stored):
            continue
        # What transformers did not find in the checkpoint, or not in this size, it has made up.
        parts = dict(module.weight.named_buffers())
        if absent := [f"{name}.weight.{n}" for n, t in parts.items() if not getattr(t, "_is_hf_initialized", False)]:
            raise HostError(
                f"transformers: the checkpoint has no {', '.join(absent)}, or of another size: it was not saved with "
                "this quantization_config"
            )
        model.set_submodule(name, module.layer())


def canonical_state(model: Any) -> dict[str, Tensor]:
    """The state dict of a model with every weight in the canonical layout, which any machine reads."""
    state: dict[str, Tensor] = model.state_dict()
    for name, layer in layers_of(model).items():
        if layer.weight.layout != CANONICAL:
            prefix = f"{name}.weight."
            state = {key: t for key, t in state.items() if not key.startswith(prefix)}
            state |= rlk.prepack(layer.weight, layout=CANONICAL).state_dict(prefix)
    return state


def dense(model: Any, dtype: Any) -> Any:
    """The model with linear layers on dequantized weights."""
    import torch

    for name, layer in layers_of(model).items():
        outputs, inputs = layer.weight.shape
        linear = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(rlk.dequantize(layer.weight, dtype=dtype))
        linear.register_parameter("bias", layer.bias)
        model.set_submodule(name, linear)
    return model

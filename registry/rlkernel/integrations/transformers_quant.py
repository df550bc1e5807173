"""transformers: models on quantized weights by `from_pretrained`, as a quantization method of the name `rlkernel`.

    from rlkernel.integrations import transformers_quant

    AutoModelForCausalLM.from_pretrained(path, quantization_config=transformers_quant.config("int4_g128"))

Weights are quantized one by one as they are read; `save_pretrained` writes what `rlkernel quant convert` writes, and
after `register()` that loads again, bit for bit. Linear layers become `rlkernel.nn.QuantLinear`; which ones is the
policy of `rlkernel.nn`. transformers registers quantizers by name, so that nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rlkernel.integrations import transformers
from rlkernel.integrations.host import Active, Symbol, registered
from rlkernel.integrations.transformers_quantizer import METHOD, classes

_BASE: Final = "transformers.quantizers.base"
_AUTO: Final = "transformers.quantizers.auto"
HOST: Final = replace(
    transformers.HOST,
    name="transformers quantizer",
    does="from_pretrained on our formats, qmatmul under linear layers",
    symbols=(
        Symbol(_AUTO, "register_quantizer", "name"),
        Symbol(_AUTO, "register_quantization_config", "method"),
        Symbol(_AUTO, "AUTO_QUANTIZER_MAPPING"),
        Symbol(_BASE, "HfQuantizer.param_needs_quantization", "self, model, param_name, kwargs"),
        Symbol(_BASE, "HfQuantizer.get_quantize_ops", "self"),
        Symbol(_BASE, "HfQuantizer.get_state_dict_and_metadata", "self, model"),
        Symbol(_BASE, "HfQuantizer._process_model_before_weight_loading", "self, model, kwargs"),
        Symbol(_BASE, "HfQuantizer._process_model_after_weight_loading", "self, model, kwargs"),
        Symbol("transformers.core_model_loading", "ConversionOps"),
        Symbol("transformers.utils.quantization_config", "QuantizationConfigMixin"),
    ),
)


def register(*, force: bool = False) -> Active:
    """Make the method known to `from_pretrained` in this process; again does nothing.

    Raises:
        HostError: transformers is absent, of a version that this was not made for, or has changed.
    """
    found = HOST.require(force=force)
    classes()
    return registered(HOST, found, f"quantization method {METHOD!r}")


def config(
    format: str | Mapping[str, Any] = "int4_g128",  # noqa: A002  as in QuantPolicy
    *,
    skip: Sequence[str] | None = None,
    formats: Mapping[str, str | Mapping[str, Any]] | None = None,
    prepack: bool = False,
    force: bool = False,
) -> Any:
    """What `from_pretrained(quantization_config=...)` takes.

    Args:
        format: the name of a format, or a name with options: `{"format": "nf4", "double_quant": True}`.
        skip: shell patterns over names of modules that stay as they are; None for those of `QuantPolicy`.
        formats: pattern -> another format; the first that matches counts.
        prepack: arrange weights for the implementation that will read them; files have the canonical layout always.
        force: take a version of transformers outside the window, too, if its symbols are what they were.

    Raises:
        HostError: as `register`.
        UnknownNameError: no such format or option.
    """
    register(force=force)
    made, _ = classes()
    return made(format=format, skip=skip, formats=formats, prepack=prepack)

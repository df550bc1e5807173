"""PEFT's LoRA in a model that `rlkernel.exact` takes: the layer stays PEFT's, and its products are rlkernel's.

What the layer does besides its products are casts, additions and multiplications of single elements, which depend on no
batch. Give `exact` the model that PEFT changed, `peft_model.get_base_model()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel.integrations.host import Host, Symbol
from rlkernel_core.errors import HostError

_LAYER: Final = "peft.tuners.lora.layer"
HOST: Final = Host(
    name="peft",
    distribution="peft",
    versions=">=0.21,<0.22",
    tested="0.21.2",
    does="LoRA beside the products of an exact model",
    symbols=(
        Symbol(_LAYER, "Linear.forward", "self, x, args, kwargs"),
        Symbol(_LAYER, "LoraLayer"),
    ),
)


def is_layer(module: Any) -> bool:
    """Whether a module is PEFT's LoRA of a linear layer; PEFT is not imported for that."""
    kind = type(module)
    return kind.__module__ == _LAYER and kind.__name__ == "Linear"


def check(path: str, layer: Any, *, force: bool = False) -> None:
    """Refuse a layer whose result would depend on more than single elements and its products.

    Raises:
        HostError: PEFT is of another version or has changed; or the layer has a variant of LoRA, such as DoRA, or
            dropout.
    """
    HOST.require(force=force)
    if layer.lora_variant:
        kind = type(next(iter(layer.lora_variant.values()))).__name__
        raise HostError(f"{path} has PEFT's {kind}, which has no exact form: plain LoRA has. Nothing was changed")
    if any(getattr(dropout, "p", 0.0) > 0 for dropout in layer.lora_dropout.values()):
        raise HostError(
            f"{path} has dropout on LoRA, by which a trainer's bits are not the rollout's: LoraConfig(lora_dropout=0). "
            "Nothing was changed"
        )


def baked(model: Any) -> Iterator[Any]:
    """What a graph of a model's step bakes in of PEFT's layers beside tensors."""
    for path, module in model.named_modules():
        if is_layer(module):
            yield path, tuple(module.active_adapters), tuple(sorted(module.scaling.items()))
            yield tuple(module.merged_adapters), bool(module.disable_adapters)

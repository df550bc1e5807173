"""torchao: `quantize_` that makes layers on our packed weights, by a configuration registered as torchao's own are.

    from torchao.quantization import quantize_
    from rlkernel.integrations import torchao

    quantize_(model, torchao.config("int4_g128"), filter_fn=torchao.layers(model))

A linear layer becomes `rlkernel.nn.QuantLinear`, whose product is `rlkernel.qmatmul`; the walk over the model, its
device argument and `FqnToConfig` stay torchao's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Host, Symbol, registered
from rlkernel_core.errors import HostError
from rlkernel_core.quant import QuantSpec
from rlkernel_core.quant.spec import spec_of

if TYPE_CHECKING:
    import torch

    from rlkernel.nn import QuantLinear, QuantPolicy

_HANDLERS: Final = "torchao.quantization.transform_module"
HOST: Final = Host(
    name="torchao",
    distribution="torchao",
    versions=">=0.18.0,<0.19",
    tested="0.18.0",
    does="quantize_ that makes our packed weights, qmatmul under linear layers",
    symbols=(
        Symbol(_HANDLERS, "register_quantize_module_handler", "config_type"),
        Symbol("torchao.core.config", "AOBaseConfig"),
        Symbol("torchao.quantization.quant_api", "quantize_", "model, config, filter_fn, device"),
    ),
)


def config(
    format: str | QuantSpec = "int4_g128",  # noqa: A002  as in rlkernel.quantize
    *,
    prepack: bool = False,
    force: bool = False,
) -> Any:
    """What `quantize_(model, config)` takes.

    Args:
        format: as in `rlkernel.quantize`.
        prepack: arrange the weight for the implementation that will read it.
        force: take a version of torchao outside the window, too, if its symbols are what they were.

    Raises:
        HostError: torchao is absent, of a version that this was not made for, or has changed.
        UnknownNameError: no such format.
    """
    registered(HOST, HOST.require(force=force), "quantize_(model, config())")
    return _configuration()(spec_of(format), prepack)


def layers(model: torch.nn.Module, policy: QuantPolicy | None = None) -> Callable[[torch.nn.Module, str], bool]:
    """What `quantize_(filter_fn=...)` takes: the layers that `rlkernel.nn.quantize_model` would change.

    torchao's own filter takes every linear layer: heads, routers and tied weights too.
    """
    from rlkernel.nn import QuantPolicy, selected

    chosen = set(selected(model, QuantPolicy() if policy is None else policy))
    return lambda _, name: name in chosen


@cache
def _configuration() -> type:
    parent = import_module("torchao.core.config").AOBaseConfig
    fields = [("format", QuantSpec), ("prepack", bool)]
    made = make_dataclass("RLKernelWeight", fields, bases=(parent,), frozen=True)
    import_module(_HANDLERS).register_quantize_module_handler(made)(_transform)
    return made


def _transform(module: torch.nn.Module, wanted: Any) -> QuantLinear:
    """What torchao calls for a layer that its filter takes."""
    import torch

    import rlkernel as rlk
    from rlkernel.nn import QuantLinear

    if type(module) is not torch.nn.Linear:
        raise HostError(
            f"torchao: {type(module).__name__} is no torch.nn.Linear; pass filter_fn=torchao.layers(model) of rlkernel"
        )
    layer = QuantLinear.from_linear(module, wanted.format)
    if layer.bias is not None and module.bias is not None:
        layer.bias.requires_grad_(module.bias.requires_grad)
    if wanted.prepack:
        layer.weight = rlk.prepack(layer.weight)
    return layer.train(module.training)

"""PEFT's LoRA: its adapters as the `LoRA` that operators take, and its layers in a model that `rlkernel.exact` takes.

`lora_of` and `loras_of` read a layer's adapters; gradients reach PEFT's own parameters.

In an exact model the layer stays PEFT's, and its products are rlkernel's. What it does besides are casts, additions and
multiplications of single elements, which depend on no batch. Give `exact` the model that PEFT changed,
`peft_model.get_base_model()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Host, Symbol
from rlkernel_core.errors import ArgumentError, HostError

if TYPE_CHECKING:
    from rlkernel import LoRA

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
        Symbol(_LAYER, "ParamWrapper.get_delta_weight", "self, adapter_name, args, kwargs"),
    ),
)


def is_layer(module: Any) -> bool:
    """Whether a module is PEFT's LoRA of a linear layer; PEFT is not imported for that."""
    kind = type(module)
    return kind.__module__ == _LAYER and kind.__name__ == "Linear"


def lora_of(layer: Any, adapter: str = "default") -> LoRA:
    """An adapter of a layer of PEFT, for `qmatmul`, `linear_logprob` and the other operators that take one.

    Of a linear layer A [r, K] and B [Nout, r] are PEFT's parameters. Of fused experts (`target_parameters`) PEFT keeps
    one A of E r rows, an expert after the other, and one B [Nout, r E] whose columns have the expert last; what comes
    back are views, A [E, r, K] and B [E, Nout, r], for `qmatmul(ends=)` on weights [E, Nout, K].

    Raises:
        ArgumentError: the layer has no such adapter.
        HostError: PEFT is of another version or has changed; or the layer is none of PEFT's two, has a variant of LoRA
            such as DoRA, a bias of LoRA, or the adapter merged into its weight.
    """
    from rlkernel import LoRA

    HOST.require()
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if kind not in {f"{_LAYER}.Linear", f"{_LAYER}.ParamWrapper"}:
        raise HostError(f"peft: {kind} is not read: PEFT's LoRA of a linear layer or of fused experts is")
    if adapter not in layer.lora_A:
        raise ArgumentError("adapter", adapter, "is not of this layer", f"It has {', '.join(layer.lora_A) or 'none'}.")
    if layer.lora_variant:
        raise HostError(f"peft: a variant of LoRA, {', '.join(layer.lora_variant)}, is more than A and B")
    if adapter in layer.merged_adapters:
        raise HostError(f"peft: {adapter} is merged into the weight, and would count twice; call unmerge() first")
    first, second = layer.lora_A[adapter], layer.lora_B[adapter]
    if second.bias is not None:
        raise HostError(f"peft: LoRA of {adapter} has a bias of its own; train with LoraConfig(lora_bias=False)")
    A, B = first.weight, second.weight
    experts = getattr(layer, "num_experts", 1)
    if experts > 1:
        A = A.reshape(experts, -1, A.shape[-1])
        B = B.reshape(B.shape[0], -1, experts).permute(2, 0, 1)
    return LoRA(A, B, float(layer.scaling[adapter]))


def loras_of(layer: Any, adapters: Sequence[str]) -> LoRA:
    """Several adapters of a linear layer of PEFT, stacked for `qmatmul(lora_ends=)`: A [G, r, K], B [G, Nout, r].

    r is the largest rank; smaller ones are padded with zeros, and each scale is multiplied into its B. The stack is a
    copy, through which gradients reach PEFT's parameters: make it anew after these have changed.

    Raises:
        ArgumentError: no adapter, or one that the layer does not have.
        HostError: as `lora_of`; or the layer is of fused experts, whose `lora_ends` would be of two kinds.
    """
    from torch import stack
    from torch.nn.functional import pad

    from rlkernel import LoRA

    if not adapters:
        raise ArgumentError("adapters", adapters, "must name at least one", "Leave lora= out where none is used.")
    several = [lora_of(layer, name) for name in adapters]
    if several[0].A.ndim != 2:
        raise HostError("peft: adapters of fused experts are not stacked: use one, by lora_of")
    rank = max(each.A.shape[0] for each in several)
    A = stack([pad(each.A, (0, 0, 0, rank - each.A.shape[0])) for each in several])
    B = stack([pad(each.B * each.scale, (0, rank - each.B.shape[1])) for each in several])
    return LoRA(A, B, 1.0)


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

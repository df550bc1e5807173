"""Which layers of a model are quantized, and to what: a policy, and the model changed by it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

import rlkernel as rlk
from rlkernel.nn.linear import QuantLinear
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec
from rlkernel_core.quant.spec import spec_of

# The head and the embeddings carry the law that is trained, routers decide by small differences.
SKIP: Final = ("*lm_head*", "*embed*", "*router*", "*.gate")


@dataclass(frozen=True)
class QuantPolicy:
    """Patterns are those of the shell, over names of modules."""

    format: str | QuantSpec = "int4_g128"  # of every linear layer that no pattern names
    skip: tuple[str, ...] = SKIP  # stay as they are
    formats: Mapping[str, str | QuantSpec] = field(default_factory=dict)  # pattern -> another format; the first counts
    lora_rank: int = 0  # 0: none
    lora_alpha: float = 16.0  # the addition is scaled by alpha / rank
    lora_dtype: torch.dtype = torch.bfloat16  # of A and B
    prepack: bool = False  # into the layout that the chosen implementation reads fastest

    def format_of(self, name: str) -> QuantSpec | None:
        """The format of the layer `name`; None where it stays."""
        if any(fnmatch.fnmatch(name, pattern) for pattern in self.skip):
            return None
        return spec_of(next((f for p, f in self.formats.items() if fnmatch.fnmatch(name, p)), self.format))


FOUR_BIT: Final = QuantPolicy()  # where none is named


def quantize_model(model: torch.nn.Module, policy: QuantPolicy | str | QuantSpec = FOUR_BIT) -> dict[str, str]:
    """Replace linear layers by QuantLinear, in place and one at a time; name -> format of what was replaced.

    `policy` may be a format.
    With `lora_rank` every replaced layer gets a LoRA, and all other parameters stop requiring gradients: QLoRA.
    A weight that two modules share is quantized where its owner is no Linear of its own: tied heads stay dense.

    Raises:
        ArgumentError: nothing matches, or a layer is a Linear of another kind; the model is as it was.
        UnknownNameError: no such format.
    """
    policy = policy if isinstance(policy, QuantPolicy) else QuantPolicy(policy)
    chosen = selected(model, policy)
    if not chosen or "" in chosen:
        got = (
            f"{type(model).__name__} with {sum(isinstance(m, torch.nn.Linear) for m in model.modules())} linear layers"
        )
        raise ArgumentError("model", got, "has no layer inside it that the policy takes", "Change skip=.")
    if policy.lora_rank:
        model.requires_grad_(requires_grad=False)
    for name, (linear, spec) in chosen.items():
        layer = QuantLinear.from_linear(linear, spec)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        if policy.prepack:
            layer.weight = rlk.prepack(layer.weight)
        if policy.lora_rank:
            layer.add_lora(policy.lora_rank, policy.lora_alpha, policy.lora_dtype)
        layer.train(linear.training)
        model.set_submodule(name, layer)
    return {name: spec.kind for name, (_, spec) in chosen.items()}


def selected(model: torch.nn.Module, policy: QuantPolicy) -> dict[str, tuple[torch.nn.Linear, QuantSpec]]:
    """Name -> layer and format of what a policy takes of a model. Weights on the meta device share no address."""
    tied = _shared(model)
    return {
        name: (module, spec)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and module.weight.data_ptr() not in tied
        and (spec := policy.format_of(name)) is not None
    }


def _shared(model: torch.nn.Module) -> set[int]:
    """Addresses of weights that more than one module holds."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            seen[parameter.data_ptr()] = seen.get(parameter.data_ptr(), 0) + 1
    return {address for address, count in seen.items() if count > 1 and address}

"""PEFT's adapters read as LoRA of rlkernel, against what PEFT itself adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError, HostError
from rlkernel_core.quant import stack

peft = pytest.importorskip("peft", exc_type=ImportError)

from rlkernel.integrations.peft_lora import lora_of, loras_of  # noqa: E402

E, K, NOUT = 3, 8, 6


class Experts(torch.nn.Module):
    """Fused experts, [E, Nout, K] or, where `is_transposed`, [E, K, Nout], each for its rows of x."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape = (E, K, NOUT) if is_transposed else (E, NOUT, K)
        self.proj = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        weight = self.proj if self.is_transposed else self.proj.transpose(1, 2)
        starts = [0, *ends.tolist()]
        return torch.cat([x[a:b] @ weight[e] for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=False))])


class Model(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inner(*args)


def filled(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, generator=generator)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_an_adapter_of_fused_experts_adds_what_peft_adds(is_transposed) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=[], target_parameters=["inner.proj"])
    model = peft.get_peft_model(Model(Experts(is_transposed=is_transposed)), config)
    filled(model)
    layer = model.base_model.model.inner
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(3))
    weights = [w.T if is_transposed else w for w in layer.get_base_layer().proj.detach()]
    stacked = stack([rlk.quantize(w.contiguous(), "int8_channel") for w in weights])
    lora = lora_of(layer)
    found = rlk.qmatmul(x, stacked, lora=lora, ends=ends) - rlk.qmatmul(x, stacked, ends=ends)
    with model.disable_adapter():
        base = model(x, ends)
    torch.testing.assert_close(found, model(x, ends) - base, rtol=1e-5, atol=1e-4)


def test_gradients_reach_the_parameters_of_peft() -> None:
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=[], target_parameters=["inner.proj"])
    model = peft.get_peft_model(Model(Experts(is_transposed=False)), config)
    filled(model)
    layer = model.base_model.model.inner
    (lora_of(layer).A.sum() + lora_of(layer).B.sum()).backward()
    assert torch.equal(layer.lora_A["default"].weight.grad, torch.ones(E * 2, K))
    assert torch.equal(layer.lora_B["default"].weight.grad, torch.ones(NOUT, E * 2))


def adapters() -> Any:
    """A linear layer of PEFT with adapters of two ranks and scales."""
    model = peft.get_peft_model(
        Model(torch.nn.Linear(K, NOUT, bias=False)), peft.LoraConfig(r=2, lora_alpha=6, target_modules=["inner"])
    )
    model.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=3, target_modules=["inner"]))
    filled(model)
    return model.base_model.model.inner


def test_several_adapters_of_a_layer_are_one_call() -> None:
    layer = adapters()
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(3))
    w = rlk.quantize(layer.get_base_layer().weight.detach(), "int8_channel")
    ends = torch.tensor([2, 4], dtype=torch.int32)
    base = rlk.qmatmul(x, w)
    found = rlk.qmatmul(x, w, lora=loras_of(layer, ["other", "default"]), lora_ends=ends) - base
    expected = torch.cat(
        [x[:2] @ layer.get_delta_weight("other").T, x[2:4] @ layer.get_delta_weight("default").T, torch.zeros(1, NOUT)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_merged_adapter_is_not_added_twice() -> None:
    layer = adapters()
    layer.merge(adapter_names=["default"])
    with pytest.raises(HostError, match="unmerge"):
        lora_of(layer)


def test_an_adapter_that_the_layer_does_not_have_is_named() -> None:
    with pytest.raises(ArgumentError, match="It has default, other"):
        lora_of(adapters(), "third")


def test_a_variant_of_lora_is_refused() -> None:
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["inner"])
    layer = peft.get_peft_model(Model(torch.nn.Linear(K, NOUT)), config).base_model.model.inner
    with pytest.raises(HostError, match="variant"):
        lora_of(layer)

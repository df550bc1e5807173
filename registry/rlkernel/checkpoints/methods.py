"""What config.json has to say of quantized weights so that others read them: `quantization_config`, a row per scheme.

Keys are those that transformers, vLLM and SGLang read. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.quant import QuantSpec, QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

Said = dict[str, Any]
_GPTQ: Final = ("gptq", "gptq_v2")


def _gptq(version: str) -> Callable[[QuantSpec, list[str]], Said]:
    def said(spec: QuantSpec, _: list[str]) -> Said:
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": spec.group or -1,
            "sym": spec.symmetric,
            "desc_act": spec.act_order,
            "checkpoint_format": version,
        }

    return said


def _awq(spec: QuantSpec, dense: list[str]) -> Said:
    said: Said = {"quant_method": "awq", "bits": 4, "group_size": spec.group or -1, "zero_point": True}
    return said | {"version": "gemm", "modules_to_not_convert": dense}


def _bitsandbytes(spec: QuantSpec, dense: list[str]) -> Said:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": spec.element,
        "bnb_4bit_use_double_quant": spec.double_quant,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": dense,
    }


def _compressed(spec: QuantSpec, dense: list[str]) -> Said:
    weights: Said = {"num_bits": 4, "type": "int", "symmetric": spec.symmetric, "dynamic": False}
    weights |= {"strategy": "group", "group_size": spec.group} if spec.group else {"strategy": "channel"}
    weights |= {"actorder": "group"} if spec.act_order else {}
    return _compressed_tensors("pack-quantized", weights, None, dense)


def _scaled(spec: QuantSpec, dense: list[str]) -> Said:
    kind = "int" if spec.element == "int8" else "float"
    each: Said = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = each | {"strategy": "channel" if spec.rows == 1 else "tensor", "dynamic": False}
    inputs = None if spec.act == "none" else each | {"strategy": "token", "dynamic": True}
    return _compressed_tensors(f"{kind}-quantized", weights, inputs, dense)


def _compressed_tensors(format: str, weights: Said, inputs: Said | None, dense: list[str]) -> Said:  # noqa: A002
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    said: Said = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return said | {"config_groups": {"group_0": group}, "ignore": dense}


def _deepseek(spec: QuantSpec, dense: list[str]) -> Said:
    said: Said = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return said | {"weight_block_size": [spec.rows, spec.group], "modules_to_not_convert": dense}


def _gpt_oss(_: QuantSpec, dense: list[str]) -> Said:
    return {"quant_method": "mxfp4", "modules_to_not_convert": dense}


# Scheme -> what is said where one format serves all weights.
_ONE_FORMAT: Final[Mapping[str, Callable[[QuantSpec, list[str]], Said]]] = {
    "gptq": _gptq("gptq"),
    "gptq_v2": _gptq("gptq_v2"),
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "scaled": _scaled,
    "deepseek": _deepseek,
    "gpt-oss": _gpt_oss,
}


class Told:
    """What the weights of a checkpoint are, gathered while it is written."""

    def __init__(self, scheme: str) -> None:
        """For weights that are spelt so; "rlkernel" is the method of `rlkernel.integrations.transformers_quant`."""
        self.scheme = scheme
        self._specs: dict[str, QuantSpec] = {}
        self._dense: list[str] = []  # modules

    def see(self, module: str, weights: Mapping[str, QuantTensor | Tensor]) -> None:
        """What one item of the source became, by name."""
        for name, weight in weights.items():
            if isinstance(weight, QuantTensor):
                self._specs[name.removesuffix(".weight")] = weight.spec
            elif len(weight.shape) == 2 and name != module:
                self._dense.append(module)

    @property
    def config(self) -> Said | None:
        """`quantization_config`.

        None where there is nothing to say, or where the scheme's readers have no word for it: formats that differ from
        layer to layer, or a scheme that is known by the names of its tensors.
        """
        if not self._specs or self.scheme == "dense":
            return None
        counts = Counter(self._specs.values())
        usual = counts.most_common(1)[0][0]
        if self.scheme == "rlkernel":
            others = {name: _table(spec) for name, spec in self._specs.items() if spec != usual}
            said: Said = {"quant_method": "rlkernel", "format": _table(usual), "skip": self._dense}
            return said | ({"formats": others} if others else {})
        if self.scheme in _ONE_FORMAT and len(counts) == 1:
            return _ONE_FORMAT[self.scheme](usual, self._dense)
        # Which of the two it is must be said, whatever the groups.
        return {"quant_method": "gptq", "checkpoint_format": self.scheme} if self.scheme in _GPTQ else None

    @property
    def note(self) -> str:
        """What `config` leaves unsaid."""
        if not self._specs or self.scheme in {"dense", "rlkernel"}:
            return ""
        if len(set(self._specs.values())) > 1:
            return f"{self.scheme} has no word for formats that differ: quantization_config in config.json is not whole"
        return "" if self.config else f"config.json says nothing of {self.scheme}: its readers need to be told"


def _table(spec: QuantSpec) -> str | Said:
    """A format as JSON has it: a name, or a table of a name and options."""
    return {"format": spec.format, **spec.changed} if spec.changed else spec.format

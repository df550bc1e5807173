"""The catalog of operators: one file each, found by name through `OPERATORS`.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec.form import Clause, Feature, OpSpec, Tolerance

__all__ = ["OPERATORS", "Clause", "Feature", "OpSpec", "Tolerance"]

# operator -> "module:attribute"
_WHERE: Final[dict[str, str]] = {
    "logprob": "logprob:SPEC",
    "linear_logprob": "linear_logprob:SPEC",
    "policy_loss": "policy_loss:SPEC",
    "linear_policy_loss": "linear_policy_loss:SPEC",
    "sample": "sample:SPEC",
    "lm_head_sample": "lm_head_sample:SPEC",
    "verify": "verify:SPEC",
    "quantize": "quantize:QUANTIZE",
    "dequantize": "quantize:DEQUANTIZE",
    "prepack": "quantize:PREPACK",
    "fake_quantize": "fake_quantize:SPEC",
    "qmatmul": "qmatmul:SPEC",
    "capture": "capture:SPEC",
    "advantage": "advantage:SPEC",
    "affine_suffix_scan": "affine_suffix_scan:SPEC",
    "whiten": "whiten:SPEC",
    "group_filter": "group_filter:SPEC",
    "shape_rewards": "shape_rewards:SPEC",
    "rollout_buffer": "rollout_buffer:SPEC",
    "linear": "linear:SPEC",
    "grouped_linear": "grouped_linear:SPEC",
    "route": "route:SPEC",
    "divergence": "divergence:SPEC",
    "linear_divergence": "linear_divergence:SPEC",
    "rms_norm": "rms_norm:SPEC",
    "rope": "rope:SPEC",
    "glu": "glu:SPEC",
    "attention": "attention:SPEC",
}


class _Catalog(Mapping[str, OpSpec[Any, Any]]):
    """Operator name -> spec, imported on first use."""

    def __contains__(self, name: object) -> bool:
        return name in _WHERE

    def __getitem__(self, name: str) -> OpSpec[Any, Any]:
        if name not in _WHERE:
            raise UnknownNameError("operator", name, _WHERE)
        module, _, attribute = _WHERE[name].partition(":")
        spec: OpSpec[Any, Any] = getattr(import_module(f"rlkernel_core.spec.{module}"), attribute)
        return spec

    def __iter__(self) -> Iterator[str]:
        return iter(_WHERE)

    def __len__(self) -> int:
        return len(_WHERE)


OPERATORS: Final = _Catalog()  # operator name -> its spec, imported on first use

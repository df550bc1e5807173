"""The decode chain of `suites.rollout`, the same code for every peer: products, norms and head do not differ."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkernel_bench.suites import rollout
from rlkernel_bench.work import Call, Inputs, Outputs, Work
from rlkernel_core.quant import QuantTensor, dequantize


def chain(work: Work, sampler: rollout.Sampler, wrap: Any, pack: Any = rollout.packed) -> Call:
    """Tokens by a sampler, each step as `wrap` has it; made at the first call, for those weights."""
    held: dict[int, tuple[Inputs, rollout.Step]] = {}

    def run(given: Inputs) -> Outputs:
        if id(given) not in held:
            ready = pack(given)
            held[id(given)] = given, wrap(rollout.step_of(ready, work.sizes, sampler), ready)
        return rollout.generate(held[id(given)][1], given, work.sizes["T"])

    return run


def dense(given: Inputs) -> Inputs:
    """Weights in the dtype of the model."""
    dtype = given["head"].dtype

    def whole(w: Any) -> Tensor:
        return dequantize(w, dtype=dtype) if isinstance(w, QuantTensor) else w

    return {**given, "layers": [{name: whole(w) for name, w in layer.items()} for layer in given["layers"]]}

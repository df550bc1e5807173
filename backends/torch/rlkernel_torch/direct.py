"""Operators of plain torch as functions of their arguments, which are checked: without front door, policy or plan.

For tests and benchmarks that compare an implementation with this one. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlkernel_core.spec import OPERATORS
from rlkernel_torch import TARGETS


def _direct(op: str) -> Callable[..., Any]:
    module, _, name = TARGETS[op][0].partition(":")
    return OPERATORS[op].taking_arguments(getattr(import_module(module), name))


advantage = _direct("advantage")
affine_suffix_scan = _direct("affine_suffix_scan")
capture = _direct("capture")
dequantize = _direct("dequantize")
group_filter = _direct("group_filter")
linear_logprob = _direct("linear_logprob")
linear_policy_loss = _direct("linear_policy_loss")
lm_head_sample = _direct("lm_head_sample")
logprob = _direct("logprob")
policy_loss = _direct("policy_loss")
prepack = _direct("prepack")
qmatmul = _direct("qmatmul")
quantize = _direct("quantize")
rollout_buffer = _direct("rollout_buffer")
sample = _direct("sample")
shape_rewards = _direct("shape_rewards")
verify = _direct("verify")
whiten = _direct("whiten")

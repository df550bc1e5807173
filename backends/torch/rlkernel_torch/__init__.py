"""Every operator in plain torch, on any device, with gradients: the backend named `torch`, or `reference` in an order.

It comes through the same door as every other backend (entry point, manifest, conformance) and takes no shortcut.
This module holds claims only; importing it loads no torch.
"""

from __future__ import annotations

from typing import Any

from rlkernel_core.decision import PLAIN_TORCH
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

_ANY = Requires(device="*")
_FLOATS = Requires(device="*", dtypes=("bfloat16", "float16", "float32", "float64"))
_LOGITS = Requires(device="*", dtypes=(*_FLOATS.dtypes, "float8_e4m3fn", "float8_e5m2"))

# operator -> (target, requires, features of the spec it does not claim)
TARGETS: dict[str, tuple[str, Requires, frozenset[str]]] = {
    "linear_logprob": ("rlkernel_torch.linear_logprob:linear_logprob", _FLOATS, frozenset()),
    "linear_policy_loss": (
        "rlkernel_torch.linear_policy_loss:linear_policy_loss",
        _FLOATS,
        frozenset(),
    ),
    "capture": ("rlkernel_torch.capture:capture", _ANY, frozenset()),
    "logprob": ("rlkernel_torch.logprob:logprob", _LOGITS, frozenset()),
    "dequantize": ("rlkernel_torch.quantize:dequantize", _ANY, frozenset()),
    "policy_loss": ("rlkernel_torch.policy_loss:policy_loss", _FLOATS, frozenset()),
    "prepack": ("rlkernel_torch.quantize:prepack", _ANY, frozenset()),
    # The order of summation inside a BLAS product depends on the number of rows.
    "qmatmul": ("rlkernel_torch.qmatmul:qmatmul", _FLOATS, frozenset({"batch_invariant"})),
    "quantize": ("rlkernel_torch.quantize:quantize", _FLOATS, frozenset()),
    "fake_quantize": ("rlkernel_torch.fake_quantize:fake_quantize", _FLOATS, frozenset()),
    "rollout_buffer": ("rlkernel_torch.rollout_buffer:rollout_buffer", _ANY, frozenset()),
    "sample": ("rlkernel_torch.sample:sample", _FLOATS, frozenset()),
    "lm_head_sample": ("rlkernel_torch.lm_head_sample:lm_head_sample", _FLOATS, frozenset()),
    "verify": ("rlkernel_torch.verify:verify", _FLOATS, frozenset()),
    "advantage": ("rlkernel_torch.advantage.estimate:advantage", _ANY, frozenset()),
    "affine_suffix_scan": ("rlkernel_torch.advantage.scan:affine_suffix_scan", _ANY, frozenset()),
    "whiten": ("rlkernel_torch.advantage.whitening:whiten", _ANY, frozenset()),
    "group_filter": ("rlkernel_torch.advantage.filtering:group_filter", _ANY, frozenset()),
    "shape_rewards": ("rlkernel_torch.advantage.shaping:shape_rewards", _ANY, frozenset()),
    "linear": ("rlkernel_torch.linear:linear", _FLOATS, frozenset()),
    "grouped_linear": ("rlkernel_torch.grouped_linear:grouped_linear", _FLOATS, frozenset()),
    "route": ("rlkernel_torch.route:route", _FLOATS, frozenset()),
    "divergence": ("rlkernel_torch.divergence:divergence", _FLOATS, frozenset()),
    "linear_divergence": ("rlkernel_torch.linear_divergence:linear_divergence", _FLOATS, frozenset()),
    "rms_norm": ("rlkernel_torch.rms_norm:rms_norm", _FLOATS, frozenset()),
    "rope": ("rlkernel_torch.rope:rope", _FLOATS, frozenset()),
    "glu": ("rlkernel_torch.glu:glu", _FLOATS, frozenset()),
    "attention": ("rlkernel_torch.attention:attention", _FLOATS, frozenset()),
}

# differentiable operator -> its forward and backward
PAIRS: dict[str, str] = {
    "affine_suffix_scan": "rlkernel_torch.advantage.scan:AffineSuffixScanPair",
    "linear_logprob": "rlkernel_torch.linear_logprob:LinearLogprobPair",
    "linear_policy_loss": "rlkernel_torch.linear_policy_loss:LinearPolicyLossPair",
    "logprob": "rlkernel_torch.logprob:LogprobPair",
    "policy_loss": "rlkernel_torch.policy_loss:PolicyLossPair",
    "qmatmul": "rlkernel_torch.qmatmul:QmatmulPair",
    "fake_quantize": "rlkernel_torch.fake_quantize:FakeQuantizePair",
    "linear": "rlkernel_torch.linear:LinearPair",
    "grouped_linear": "rlkernel_torch.grouped_linear:GroupedLinearPair",
    "route": "rlkernel_torch.route:RoutePair",
    "divergence": "rlkernel_torch.divergence:DivergencePair",
    "linear_divergence": "rlkernel_torch.linear_divergence:LinearDivergencePair",
    "rms_norm": "rlkernel_torch.rms_norm:RmsNormPair",
    "rope": "rlkernel_torch.rope:RopePair",
    "glu": "rlkernel_torch.glu:GluPair",
    "attention": "rlkernel_torch.attention:AttentionPair",
}

# operator -> the order in which it adds: rlkernel_common.fixed_sums.ORDER, exact_functions.ARITHMETIC
SUMS: dict[str, str] = {
    "rms_norm": "lanes1024/tree64/f32",
    "rope": "lanes1024/tree64/f32",
    "glu": "exp7/f32",
}


def _impl(op: str) -> Impl:
    spec: Any = OPERATORS[op]
    target, requires, without = TARGETS[op]
    supports = spec.feature_names - without
    return Impl(
        op=spec.id, target=target, requires=requires, supports=supports, gradient=PAIRS.get(op), sums=SUMS.get(op)
    )


backend = Backend(name=PLAIN_TORCH, api=API_VERSION, impls=tuple(_impl(op) for op in TARGETS))

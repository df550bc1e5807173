"""The calls whose bits are compared: for every public operator, one or more for each option, and larger ones.

A call is added at will; one that stands here keeps its name and its inputs, as files of results hold both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rlkernel_bench.bits import draws, scores, steps, weights
from rlkernel_bench.bits.inputs import Size, Table

TABLES: Final[Mapping[str, Callable[[Size], Table]]] = {
    f.__name__: f
    for f in (
        *(scores.logprob, scores.linear_logprob, scores.policy_loss, scores.linear_policy_loss),
        *(draws.sample, draws.lm_head_sample, draws.verify),
        *(weights.quantize, weights.dequantize, weights.prepack, weights.qmatmul),
        *(steps.advantage, steps.affine_suffix_scan, steps.whiten, steps.group_filter, steps.shape_rewards),
        *(steps.capture, steps.rollout_buffer),
    )
}

"""For tests of vLLM on a CPU: its model runner V2 wants a Triton that has a CPU backend, which no index offers.

Under TRITON_INTERPRET=1 no backend compiles anything, so that one which is only named is enough. vLLM's kernel of top-k
and top-p is not for the interpreter: vLLM's own torch code filters in its place.
"""

from __future__ import annotations


def plain_filters() -> None:
    """What vLLM calls in each of its processes, by its group of plugins."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False

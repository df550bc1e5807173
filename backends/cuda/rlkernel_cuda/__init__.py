"""Kernels for NVIDIA GPUs, one chip at a time: the backend named `cuda`.

Claims only; importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from typing import Any, Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Limits, Requires
from rlkernel_core.spec import OPERATORS

# wgmma, TMA, clusters: compute capability 9.0 and no other.
HOPPER: Final = Requires(device="cuda", dtypes=("bfloat16",), arch=("sm90",), packages=("triton>=3.6",))
SAMPLER: Final = Requires(device="cuda", dtypes=("bfloat16", "float16", "float32"), arch=("sm90",))

# operator -> features that are not claimed. batch_invariant: log p and entropy are, dX by cuBLAS is not.
# rank_invariant: tiles begin anew with a shard, and are joined by rank.
WITHOUT: Final = {
    "linear_logprob": frozenset(
        {
            "batch_invariant", "lora", "many_ids", "mixed_dtypes", "partial_grad", "quantized", "ragged_ids",
            "rank_invariant", "support",
        }
    ),
    "linear_policy_loss": frozenset({"lora", "mixed_dtypes", "partial_grad", "support"}),
}  # fmt: skip
PAIRS: Final = {"linear_logprob": "LinearLogprobPair", "linear_policy_loss": "LinearPolicyLossPair"}
# What the one launch of `sample` does: no edits, no ranks, one order of filters.
CLAIMED: Final = frozenset(
    {
        "deterministic", "batch_invariant", "capturable", "per_row_parameters", "top_k", "top_p", "min_p", "vocab_size",
        "slot", "raw_logprob", "stream", "noise:philox4x32-10",
    }
)  # fmt: skip

# Products with quantized weights and a bias: int4 in tiles; 8 bits with few tokens.
QUANTIZED: Final = frozenset(
    {
        "deterministic", "capturable", "bias", "scale_dtype:float16", "format:int8_channel", "format:fp8_tensor",
        "format:fp8_channel", "format:fp8_block128",
        *(f"format:int4_{group}{zero}" for group in ("g128", "g64", "g32", "channel") for zero in ("", "_asym")),
    }
)  # fmt: skip

# Coordinates of a tile are 32-bit numbers, of both signs.
COORDINATES: Final = Limits(max_rows=2**30 - 1, max_vocab=2**30 - 1)
# 256 tiles of 1024 logits, whose statistics are kept for a row.
SAMPLED: Final = Limits(max_rows=2**27 - 1, max_vocab=256 * 1024, layouts=("contiguous_last_dim",))


def _impl(op: str) -> Impl:
    spec: Any = OPERATORS[op]
    return Impl(
        op=spec.id,
        target=f"rlkernel_cuda.{op}.launch:prepare",
        requires=HOPPER,
        supports=spec.feature_names - WITHOUT[op],
        limits=COORDINATES,
        workspace=f"rlkernel_cuda.{op}.launch:workspace",
        check=f"rlkernel_cuda.{op}.launch:fits",
        prepared=True,
        gradient=f"rlkernel_cuda.{op}.launch:{PAIRS[op]}",
    )


# KL between two heads: its chain rule merges tiles, and JSD and TV have none. batch_invariant: values are, d_hidden by
# cuBLAS is not.
DIVERGENCE: Final = Impl(
    op=OPERATORS["linear_divergence"].id,
    target="rlkernel_cuda.linear_divergence.launch:prepare",
    requires=HOPPER,
    supports=OPERATORS["linear_divergence"].feature_names - {"batch_invariant", "kind:jsd", "kind:tv", "teacher_ids"},
    limits=COORDINATES,
    check="rlkernel_cuda.linear_divergence.launch:fits",
    prepared=True,
    gradient="rlkernel_cuda.linear_divergence.launch:LinearDivergencePair",
)

SAMPLE: Final = Impl(
    op=OPERATORS["sample"].id,
    target="rlkernel_cuda.sample.launch:prepare",
    requires=SAMPLER,
    supports=CLAIMED,
    prepared=True,
    limits=SAMPLED,
    check="rlkernel_cuda.sample.launch:fits",
)

QMATMUL: Final = Impl(
    op=OPERATORS["qmatmul"].id,
    target="rlkernel_cuda.qmatmul.launch:prepare",
    requires=Requires(device="cuda", dtypes=("bfloat16", "float16"), arch=("sm90",), packages=("triton>=3.6",)),
    supports=QUANTIZED,
    prepared=True,
    check="rlkernel_cuda.qmatmul.launch:fits",
)

backend = Backend(name="cuda", api=API_VERSION, impls=(*(_impl(op) for op in WITHOUT), DIVERGENCE, SAMPLE, QMATMUL))

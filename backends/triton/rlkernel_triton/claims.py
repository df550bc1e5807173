"""What the kernels of each operator claim: one row an operator, from which both manifests are made.

Imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

FLOATS: Final = ("bfloat16", "float16", "float32")
LOGITS: Final = (*FLOATS, "float8_e4m3fn", "float8_e5m2")
REALS: Final = (*FLOATS, "bool", "int16", "int32", "int64", "int8", "uint8")


@dataclass(frozen=True)
class Claim:
    """One implementation of one operator."""

    target: str  # "package.module:function"
    dtypes: tuple[str, ...] = FLOATS  # of the primary tensor; empty for any
    without: frozenset[str] = frozenset()  # features of the spec that are not claimed
    only: frozenset[str] | None = None  # features that are claimed; None for all
    workspace: str | None = None  # tells the memory of a call, see rlkernel_core.manifest.Impl
    check: str | None = None  # asked at every call, see rlkernel_core.manifest.Impl
    arch_excluded: tuple[str, ...] = ()  # besides those of the backend
    prepared: bool = False  # the target takes the first call of a shape and returns what runs calls of that shape
    sums: str | None = None  # the order in which it adds, see rlkernel_core.manifest.Impl
    gradient: str | None = None  # "package.module:Class", the pair of forward and backward for calls with gradients
    kernels: bool = True  # False: torch's work on a GPU, with no kernel that an interpreter could run


_GROUPS: Final = ("g128", "g64", "g32", "channel")
# Formats of weights and their options; others may be added to the core that no kernel here reads.
FORMATS: Final = frozenset({
    *(f"format:int4_{group}{kind}" for group in _GROUPS for kind in ("", "_asym")),
    *(f"format:{name}{size}" for name in ("nf4", "fp4") for size in ("", "_g128")),
    *("format:q4l", "format:hqq4", "format:hqq4_g32", "format:hqq4_g128"),
    *("format:mxfp4", "format:mxfp8", "format:nvfp4"),
    *(f"format:gguf_{name}" for name in ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k")),
    *("double_quant", "format:int8_channel", "format:int8_w8a8"),
    *("format:fp8_tensor", "format:fp8_channel", "format:fp8_block128"),
    *("element:e5m2", "element:e4m3fnuz", "element:e5m2fnuz"),
    *("scale_dtype:bfloat16", "scale_dtype:float16", "scale_dtype:float32"),
})  # fmt: skip
_RULES: Final = ("absmax/7", "absmax/max_pow2", "rceil", "even")
_QUANTIZED_TO: Final = FORMATS | {*(f"scale_rule:{rule}" for rule in _RULES), "rounding:away", "out"}
_ALWAYS: Final = frozenset({"deterministic", "capturable"})
_EPILOGUE: Final = frozenset({
    *("grad", "bias", "lora", "residual", "grouped", "grouped_lora", "weight_rounding:none", "weight_rounding:dtype"),
    *("act:token_fp8", "act:block128_fp8", "act:mxfp8", "act:nvfp4"),
    *(f"activation:{name}" for name in ("relu", "silu", "gelu", "gelu_tanh", "swiglu", "geglu_tanh")),
})  # fmt: skip

CLAIMS: Final[Mapping[str, Claim]] = {
    "logprob": Claim(
        "rlkernel_triton.logprob.launch:prepare",
        LOGITS,
        prepared=True,
        gradient="rlkernel_triton.logprob.launch:LogprobPair",
        sums="g64/s8/tree/f32",
    ),
    "linear_logprob": Claim(
        "rlkernel_triton.linear_logprob.launch:prepare",
        check="rlkernel_triton.linear_logprob.launch:fits",
        workspace="rlkernel_triton.linear_logprob.launch:workspace",
        prepared=True,
        gradient="rlkernel_triton.linear_logprob.launch:LinearLogprobPair",
        sums="mma16/p8/tree/f32",
    ),
    "divergence": Claim(
        "rlkernel_triton.divergence.launch:prepare",
        prepared=True,
        gradient="rlkernel_triton.divergence.launch:DivergencePair",
    ),
    # The order of summation inside a library's product depends on the number of rows.
    "linear_divergence": Claim(
        "rlkernel_triton.linear_divergence.launch:prepare",
        without=frozenset({"batch_invariant"}),
        prepared=True,
        gradient="rlkernel_triton.linear_divergence.launch:LinearDivergencePair",
    ),
    "sample": Claim("rlkernel_triton.sample.launch:prepare", prepared=True, sums="g64/s8/tree/f32"),
    # Sums of 64 tokens, where linear_logprob sums tiles of a product in the order of their registers: ASKED_FOR.
    "lm_head_sample": Claim(
        "rlkernel_triton.lm_head_sample.launch:prepare",
        without=frozenset({"trainer_bits"}),
        check="rlkernel_triton.lm_head_sample.launch:fits",
        prepared=True,
        sums="mma16/g64/s8/tree/f32",
    ),
    "verify": Claim("rlkernel_triton.verify.launch:prepare", prepared=True),
    # Captured Triton kernels have been reported to fault on gfx11 and gfx12.
    "capture": Claim(
        "rlkernel_triton.capture.launch:capture", dtypes=(), arch_excluded=("gfx11*", "gfx12*"), kernels=False
    ),
    "advantage": Claim(
        "rlkernel_triton.advantage.launch:prepare", REALS, check="rlkernel_triton.advantage.launch:fits", prepared=True
    ),
    "affine_suffix_scan": Claim(
        "rlkernel_triton.affine_suffix_scan.launch:prepare",
        check="rlkernel_triton.affine_suffix_scan.launch:fits",
        prepared=True,
        gradient="rlkernel_triton.affine_suffix_scan.launch:AffineSuffixScanPair",
    ),
    "linear_policy_loss": Claim(
        "rlkernel_triton.linear_policy_loss.launch:prepare",
        without=frozenset({"mixed_dtypes", "support"}),
        workspace="rlkernel_triton.linear_policy_loss.launch:workspace_of",
        prepared=True,
        gradient="rlkernel_triton.linear_policy_loss.launch:LinearPolicyLossPair",
    ),
    "policy_loss": Claim(
        "rlkernel_triton.policy_loss.launch:prepare",
        check="rlkernel_triton.policy_loss.launch:fits",
        prepared=True,
        gradient="rlkernel_triton.policy_loss.launch:PolicyLossPair",
    ),
    "quantize": Claim(
        "rlkernel_triton.quant.quantize:prepare", (*FLOATS, "float64"), only=_QUANTIZED_TO | _ALWAYS, prepared=True
    ),
    "fake_quantize": Claim(
        "rlkernel_triton.quant.fake_quantize:prepare",
        (*FLOATS, "float64"),
        only=(_QUANTIZED_TO - {"out"}) | _ALWAYS | {"grad", "clipped"},
        prepared=True,
        gradient="rlkernel_triton.quant.fake_quantize:FakeQuantizePair",
    ),
    "dequantize": Claim("rlkernel_triton.quant.dequantize:prepare", (), only=FORMATS | _ALWAYS, prepared=True),
    "prepack": Claim("rlkernel_triton.quant.layouts:prepack", (), only=FORMATS | _ALWAYS),
    "qmatmul": Claim(
        "rlkernel_triton.quant.qmatmul:prepare",
        only=FORMATS | _EPILOGUE | _ALWAYS,
        prepared=True,
        gradient="rlkernel_triton.quant.qmatmul:QmatmulPair",
    ),
    "whiten": Claim(
        "rlkernel_triton.whiten.launch:prepare", REALS, check="rlkernel_triton.whiten.launch:fits", prepared=True
    ),
    "linear": Claim(
        "rlkernel_triton.linear.launch:prepare",
        prepared=True,
        gradient="rlkernel_triton.linear.launch:LinearPair",
        sums="mma16/c8/f32",
    ),
    "grouped_linear": Claim(
        "rlkernel_triton.grouped_linear.launch:prepare",
        prepared=True,
        gradient="rlkernel_triton.grouped_linear.launch:GroupedLinearPair",
        sums="mma16/c8/f32",
    ),
    "rms_norm": Claim(
        "rlkernel_triton.rms_norm.launch:prepare",
        prepared=True,
        gradient="rlkernel_triton.rms_norm.launch:RmsNormPair",
        sums="lanes1024/tree64/f32",
    ),
    "rope": Claim(
        "rlkernel_triton.rope.launch:prepare",
        prepared=True,
        gradient="rlkernel_triton.rope.launch:RopePair",
        sums="lanes1024/tree64/f32",
    ),
    "attention": Claim(
        "rlkernel_triton.attention.launch:prepare",
        check="rlkernel_triton.attention.launch:fits",
        prepared=True,
        gradient="rlkernel_triton.attention.launch:AttentionPair",
        sums="mma16/k64/c1024/f32",
    ),
    "glu": Claim(
        "rlkernel_triton.glu.launch:prepare",
        prepared=True,
        gradient="rlkernel_triton.glu.launch:GluPair",
        sums="exp7/f32",
    ),
}

# Operators with another implementation, of a lower preference, for calls that need a feature which costs something.
ASKED_FOR: Final[Mapping[str, Claim]] = {
    "lm_head_sample": Claim(
        "rlkernel_triton.lm_head_sample.launch:prepare_trainer_bits",
        without=frozenset({"quantized"}),  # which of its rows would be decoded again, the device alone knows
        prepared=True,
    ),
}


def manifest(
    name: str, device: str, arch: tuple[str, ...] = (), arch_excluded: tuple[str, ...] = (), *, asked_for: bool = True
) -> Backend:
    """A backend that offers every claim on one kind of device; those of `ASKED_FOR`, if wanted, behind the others."""

    def impl(op: str, claim: Claim) -> Impl:
        spec: Any = OPERATORS[op]
        return Impl(
            op=spec.id,
            target=claim.target,
            requires=Requires(
                device=device, dtypes=claim.dtypes, arch=arch, arch_excluded=(*arch_excluded, *claim.arch_excluded)
            ),
            supports=(spec.feature_names if claim.only is None else spec.feature_names & claim.only) - claim.without,
            prepared=claim.prepared,
            workspace=claim.workspace,
            sums=claim.sums,
            gradient=claim.gradient,
            check=claim.check,
        )

    offered = [(op, claim) for op, claim in CLAIMS.items() if claim.kernels or device != "cpu"]
    offered += ASKED_FOR.items() if asked_for else ()
    return Backend(name=name, api=API_VERSION, impls=tuple(impl(op, claim) for op, claim in offered))

"""Dtypes that the reference claims all run, and every other is refused before a kernel sees it."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import base
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import backend
from tests.needy_calls import calls
from tests.observed import observed, tensors

CLAIMED = {impl.op.partition("@")[0]: impl.requires.dtypes for impl in backend.impls}
TENSORS_FIRST = [name for name, spec in OPERATORS.items() if spec.primary is not None]
REAL = ("bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
NEVER = ("complex64", "float8_e4m3fn")
# Whose inputs are any real dtype, or floating ones: no list of dtypes stands in the manifest.
ANY = {"advantage": REAL, "whiten": REAL, "group_filter": REAL, "shape_rewards": REAL, "affine_suffix_scan": REAL[:4]}
# Whose result is of the dtype of its input, rounded.
IN_KIND = {"qmatmul", "quantize", "fake_quantize", "linear", "grouped_linear", "rms_norm", "rope", "glu"}
# Whose results are of both: rounded ones, and statistics.
MIXED = {"attention"}

# Whose tensors are all of one dtype, and those of others that have that of the primary one.
ONE_DTYPE = {"linear"}
BESIDE = {"linear_divergence": ("weight",), "grouped_linear": ("weight",), "rope": ("k",), "attention": ("k", "v")}


def cast(operator: str, dtype: str) -> dict[str, object]:
    given = base(operator)
    names = given if operator in ONE_DTYPE else (OPERATORS[operator].primary, *BESIDE.get(operator, ()))
    scale = {"logits_scale": 1.0} if operator == "logprob" and dtype.startswith("float8") else {}
    return given | scale | {name: given[name].to(getattr(torch, dtype)) for name in names}


def claimed(operator: str) -> tuple[str, ...]:
    return CLAIMED[operator] or ANY[operator]


@pytest.mark.parametrize("operator, dtype", [(name, dtype) for name in TENSORS_FIRST for dtype in claimed(name)])
def test_a_claimed_dtype_runs_in_fp32_or_better(operator, dtype) -> None:
    result = getattr(rlk, operator)(**cast(operator, dtype))
    accumulated = "float64" if dtype == "float64" else "float32"
    found = {str(t.dtype).removeprefix("torch.") for t in tensors(result) if t.is_floating_point()}
    if operator == "fake_quantize" and dtype == "float64":
        assert found == {"float32"}  # as dequantize gives it
    elif operator == "quantize":
        assert str(result.dtype) == f"torch.{'float32' if dtype == 'float64' else dtype}"
    else:
        rounded = {dtype} if operator in IN_KIND | MIXED else set()
        assert found <= rounded | (set() if operator in IN_KIND else {accumulated})


@pytest.mark.parametrize("operator", TENSORS_FIRST)
def test_any_other_dtype_is_refused_by_name(operator) -> None:
    for dtype in sorted({*REAL, *NEVER} - set(claimed(operator))):
        if operator in ANY and dtype == "float8_e4m3fn" and ANY[operator] is REAL:
            continue  # 8-bit floats are real numbers: rewards may be stored so
        with pytest.raises(
            (rlk.ArgumentTypeError, rlk.ResolutionError), match=r"must be|is quantized|dtype/unsupported"
        ):
            getattr(rlk, operator)(**cast(operator, dtype))


@pytest.mark.parametrize("operator", [name for name in TENSORS_FIRST if name not in IN_KIND])
@torch.no_grad()
def test_sixteen_bits_give_the_bits_of_the_same_numbers_in_fp32(operator) -> None:
    primary = OPERATORS[operator].primary
    for i, given in enumerate(calls(operator, None)):
        half = given[primary].to((torch.bfloat16, torch.float16)[i % 2])
        found = observed(operator, given | {primary: half})
        if "Error" not in found.partition(":")[0]:
            assert found == observed(operator, given | {primary: half.float()})

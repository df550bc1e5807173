"""Our rules on what may be assumed of an argument are Triton's."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import BaseBackend
from triton.tools.tensor_descriptor import TensorDescriptor

from rlkernel_triton.launchers.specialization import (
    POINTER_TYPES,
    Specialization,
    aligned,
    parameters,
    specialization_of,
)

native = getattr(triton.runtime.jit, "native_specialize_impl", None)
has_native = pytest.mark.skipif(native is None, reason="this Triton has its rules elsewhere (before 3.6)")

EDGES = [e + d for e in (0, 2**31, -(2**31), 2**63, -(2**63), 2**64 - 2) for d in (-16, -1, 0, 1, 16)]
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.sampled_from([x for x in EDGES if -(2**63) <= x < 2**64]), st.booleans(),
    st.floats(), st.integers(-64, 64).map(lambda x: 16 * x), st.none(),
)  # fmt: skip


def triton_says(value, specialize, align):
    """The same as ours, from Triton."""
    kind, hint = native(BaseBackend, value, False, specialize, align)
    if kind == "constexpr":
        return Specialization("constexpr", constant=hint)
    return Specialization(kind, hint == "D")


@has_native
@settings(deadline=None, derandomize=True)
@given(NUMBERS, st.booleans(), st.booleans())
@example(1, True, True)
@example(1, False, True)
@example(True, True, True)
@example(0, True, True)
def test_numbers_are_specialized_as_triton_does(value, specialize, align):
    assert triton_says(value, specialize, align) == specialization_of(value, specialize=specialize, align=align)


@has_native
@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(POINTER_TYPES, key=str)), st.integers(0, 40), st.booleans(), st.booleans())
def test_tensors_are_specialized_as_triton_does(dtype, offset, specialize, align):
    x = torch.empty(64, dtype=dtype)[offset:]
    assert triton_says(x, specialize, align) == specialization_of(x, specialize=specialize, align=align)


@has_native
@pytest.mark.parametrize(("dtype", "block"), [(torch.bfloat16, [128, 64]), (torch.float16, [64, 64])])
def test_descriptors_are_specialized_as_triton_does(dtype, block):
    descriptor = TensorDescriptor.from_tensor(torch.empty(256, 256, dtype=dtype), block)
    kind, hint = native(BaseBackend, descriptor, False, True, True)
    assert (kind, hint) == (specialization_of(descriptor).type, None)


def test_what_is_no_argument_is_refused():
    with pytest.raises(TypeError, match="tensors, numbers and None; got str"):
        specialization_of("text")


def test_tensors_without_memory_are_aligned_as_their_storage_would_be():
    whole = torch.empty(64, device="meta", dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = torch.empty(64, dtype=torch.bfloat16)
    assert [aligned(whole), aligned(whole[1:]), aligned(whole[8:])] == [True, False, True]
    assert [aligned(fake), aligned(fake[1:]), aligned(fake[8:])] == [True, False, True]


@triton.jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["step"])
def declared(x, seed, step, BLOCK: tl.constexpr):
    """Nothing."""


def test_parameters_say_what_the_kernel_declares():
    assert [tuple(p) for p in parameters(declared)] == [
        ("x", False, True, True),
        ("seed", False, False, True),
        ("step", False, True, False),
        ("BLOCK", True, True, True),
    ]


def test_a_kernel_that_declares_types_is_refused():
    @triton.jit
    def typed(x, N: tl.int64):
        """Nothing."""

    with pytest.raises(TypeError, match="typed declares N"):
        parameters(typed)


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match=r"is no kernel of triton\.jit"):
        parameters(triton.cdiv(3, 2))

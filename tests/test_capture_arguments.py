"""capture@1: what is refused, and by which name; gradients; taking nested arguments apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlkernel_core.errors import ArgumentError, ArgumentTypeError, CaptureError
from rlkernel_core.spec.graphed import Bucket, bucket_sizes
from rlkernel_core.tree import flatten
from rlkernel_torch.direct import capture

ROWS = Bucket({"x": 0}, (1, 2, 4, 8))


def double(x):
    return x * 2


def test_a_bad_call_is_named():
    g = capture(lambda x, y=None: x, (torch.zeros(2, 2),), buckets=(ROWS,))
    with pytest.raises(ArgumentError, match="above the largest size 8"):
        g(torch.zeros(9, 2))
    with pytest.raises(ArgumentTypeError, match="cannot be a key"):
        g(torch.zeros(2, 2), {1, 2})
    with pytest.raises(ArgumentError, match="no dimension 0"):
        g(3.0)
    with pytest.raises(TypeError):
        g(torch.zeros(2, 2), z=1)
    with pytest.raises(ArgumentTypeError, match="callable"):
        capture(3, (torch.zeros(2),))
    with pytest.raises(ArgumentTypeError, match="example"):
        capture(double, 3)


def test_sizes_of_buckets_end_in_a_size():
    with pytest.raises(ArgumentError, match="most: must be >= 1"):
        bucket_sizes(0)


def test_outputs_that_a_bucket_cannot_cut_are_refused():
    g = capture(lambda x: x, (torch.zeros(4, 3),), buckets=(Bucket({"x": 0}, (4,), out=1),))
    with pytest.raises(CaptureError, match="should have the bucketed size 4"):
        g(torch.zeros(2, 3))
    g = capture(lambda x: {"y": x}, (torch.zeros(4, 3),), buckets=(Bucket({"x": 0}, (4,), out={"z": 0}),))
    with pytest.raises(CaptureError, match=r"names \['z'\]"):
        g(torch.zeros(2, 3))


def test_a_weight_that_is_neither_an_input_nor_static_gets_no_gradient_silently():
    lin = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="neither an input nor in static"):
        capture(lambda x: lin(x) * 2, (torch.ones(1, 2),), autograd=True)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.recursive(
        st.integers() | st.none() | st.text(max_size=2),
        lambda s: st.lists(s, max_size=3) | st.tuples(s, s) | st.dictionaries(st.text(max_size=2), s, max_size=3),
        max_leaves=12,
    )
)
def test_a_tree_survives_being_taken_apart(value):
    leaves, structure = flatten(value)
    assert value == structure.build(leaves)
    assert len(leaves) == len(structure.names())


def test_filling_the_buffers_leaves_no_trace_for_autograd():
    """A buffer that kept the history of its copies would keep every call's inputs alive."""
    seen = []

    def fn(x):
        seen.append(x.grad_fn)
        return x * 2

    g = capture(fn, (torch.ones(2, requires_grad=True),), autograd=True)
    g(torch.ones(2, requires_grad=True))
    buffer = next(iter(g._table._graphs.values())).inputs.tensors[0]
    assert (buffer.requires_grad, buffer.grad_fn, set(seen)) == (False, None, {None})

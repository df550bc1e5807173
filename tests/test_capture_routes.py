"""capture@1: a call like an earlier one goes its way, and whatever may have changed since is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_common.graphs.table import ROUTES
from rlkernel_core.errors import FallbackWarning
from rlkernel_core.spec.graphed import Bucket
from rlkernel_core.tree import flatten
from rlkernel_torch.direct import capture
from tests.recorders import ByGeneration, Frozen, graphed


class Pair(NamedTuple):
    a: object
    b: object


@dataclass(frozen=True)
class Named:
    a: torch.Tensor


def test_a_tensor_that_changed_in_place_since_the_last_call_is_read_anew():
    g = capture(lambda x: x * 2, (torch.ones(2, 3),))
    x = torch.ones(2, 3)
    g(x)

    def larger():
        x.resize_(4, 3).fill_(2)

    def transposed():
        x.t_()

    def other_memory():
        x.data = torch.arange(4.0)

    def other_dtype():
        x.data = torch.full((4,), 5, dtype=torch.float64)

    for change in (larger, transposed, other_memory, other_dtype):
        change()
        found = g(x)
        assert (found.dtype, found.tolist()) == (x.dtype, (x * 2).tolist()), change.__name__
    assert g.stats.eager_calls == {}


def test_an_input_that_requires_grad_since_the_last_call_is_refused_or_followed():
    x = torch.ones(2)
    plain = capture(lambda x: x * 2, (x,), on_capture_error="eager")
    followed = capture(lambda x: x * 2, (x,), autograd=True)
    plain(x), followed(x)
    x.requires_grad_()
    with pytest.warns(FallbackWarning, match="autograd=True"):
        assert plain(x).requires_grad
    followed(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert plain.stats.eager_calls == {"capture failed": 1}


@pytest.mark.parametrize("inputs", [1, 8])
def test_inputs_of_several_dtypes_and_values_between_them_are_all_copied(inputs):
    def fn(*given):
        return [x + 1 for x in given if isinstance(x, torch.Tensor)]

    def call(seed):
        draw = torch.Generator().manual_seed(seed)
        floats = [torch.randn(3, generator=draw) for _ in range(inputs)]
        return (*floats, 4, torch.randint(9, (2,), generator=draw), None)

    g = capture(fn, call(0))
    for seed in (1, 2, 3):
        assert all(map(torch.equal, fn(*call(seed)), g(*call(seed))))
    assert (g.stats.replays, g.stats.captures) == (3, 1)
    assert g.stats.copied_bytes == 3 * (inputs * 3 * 4 + 2 * 8)


def test_keyword_arguments_are_told_from_one_another():
    g = capture(lambda x, y: x - y, {"x": torch.zeros(1), "y": torch.zeros(1)})
    one, two = torch.ones(1), torch.full((1,), 2.0)
    for _ in range(2):
        assert (g(x=two, y=one).item(), g(y=two, x=one).item(), g(two, y=one).item(), g(two, one).item()) == (
            1,
            -1,
            1,
            1,
        )


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_under_inference_mode_padding_and_sizes_are_written_anew(outputs):
    def fn(x, *, n):
        seen = x.sum(0), n.clone()
        x.fill_(100)  # into the padding too
        return seen

    bucket = Bucket({"x": 0}, (4, 8), out=None, valid="n")
    with torch.inference_mode():
        g = capture(fn, (torch.ones(8, 2),), buckets=(bucket,), outputs=outputs)
        for rows in (3, 8, 1, 3, 8):
            total, n = g(torch.ones(rows, 2))
            assert (total.tolist(), n.item()) == ([rows, rows], rows)
    total, n = g(torch.ones(2, 2))
    assert (total.tolist(), n.item()) == ([2, 2], 2)
    assert g.stats.captures == 3


def test_a_graph_that_was_evicted_is_captured_again_when_its_call_comes_back():
    for recorder in (ByGeneration(), None):
        g = (
            graphed(lambda x: x + 1, (torch.ones(1),), recorder, max_graphs=2)
            if recorder
            else capture(lambda x: x + 1, (torch.ones(1),), max_graphs=2)
        )
        for n in (1, 2, 1, 3, 2, 1, 3):
            for _ in range(2):
                assert g(torch.full((n,), float(n))).tolist() == [n + 1.0] * n
        assert g.stats.replays == 14


def test_replays_decide_which_graph_is_the_least_recently_used():
    g = capture(lambda x: x + 1, (torch.ones(1),), max_graphs=2)
    for n in (1, 2, 1, 1, 3):
        g(torch.ones(n))
    assert g.explain(torch.ones(1)).startswith("replay")
    assert "evicted" in g.explain(torch.ones(2))


def test_a_call_whose_canary_failed_runs_without_its_graph():
    recorder = Frozen()
    recorder.verify = "never"
    g = graphed(lambda x: x + 1, (torch.ones(1),), recorder, on_capture_error="eager")
    assert [g(torch.zeros(1)).item() for _ in range(2)] == [2, 2]  # the capture's
    with (
        pytest.warns(FallbackWarning, match="After the weight update a replay is wrong"),
        g.weight_update((torch.zeros(1),)),
    ):
        pass
    assert [g(torch.zeros(1)).item() for _ in range(2)] == [1, 1]
    assert g.stats.eager_calls == {"capture failed": 2}


def test_nested_arguments_keep_no_more_than_their_sizes():
    g = capture(lambda given: given["x"] * given["t"], ({"x": torch.ones(2), "t": 2.0},))
    for value in (1.0, 2.0, 3.0):
        assert g({"x": torch.full((2,), value), "t": 2.0}).tolist() == [2 * value] * 2
    assert len(g._table.routes) == 1


def test_routes_are_bounded():
    g = capture(lambda x: x + 1, (torch.ones(1, 1),), buckets=(Bucket({"x": 0}, (4096,)),))
    for n in range(ROUTES + 5):
        g(torch.ones(n, 1))
    assert len(g._table.routes) == 5
    assert g.stats.replays == ROUTES + 5


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.recursive(
        st.integers(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.builds(Pair, inner, inner),
            st.builds(Named, inner),
        ),
        max_leaves=6,
    )
)
def test_what_was_taken_apart_is_built_again_by_its_builder(value):
    leaves, structure = flatten(value)
    assert value == structure.builder()(leaves) == structure.build(leaves)


def test_outputs_of_one_dtype_are_cloned_by_one_launch_and_later_calls_leave_them():
    launched = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            launched.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    g = graphed(lambda x: (x + 1, x.t() * 2, 7, x > 1), (torch.ones(2, 3),), ByGeneration())
    first = g(torch.ones(2, 3))
    with Watching():
        second = g(torch.full((2, 3), 2.0))
    assert [name for name in launched if name in {"_foreach_copy_", "clone"}] == ["_foreach_copy_", "clone"]
    expected = [
        [(x + 1).tolist(), (x.t() * 2).tolist(), (x > 1).tolist()] for x in map(torch.full, [(2, 3)] * 2, (1.0, 2.0))
    ]
    assert [[out.tolist() for out in (*found[:2], found[3])] for found in (first, second)] == expected
    assert (first[2], second[1].stride()) == (7, (1, 3))

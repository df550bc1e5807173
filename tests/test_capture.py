"""capture by the plain-torch backend: buckets, layouts, containers, static arguments, warm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_common.graphs.verify import same_bits
from rlkernel_core.spec.graphed import Bucket, bucket_sizes
from rlkernel_torch.direct import capture

ROWS = Bucket({"x": 0}, (1, 2, 4, 8))


def double(x):
    return x * 2


@dataclass(frozen=True)
class Result:
    y: torch.Tensor
    count: int
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 600))
def test_bucket_sizes_ascend_to_exactly_the_largest_and_waste_little(most):
    sizes = bucket_sizes(most)
    assert most == sizes[-1]
    assert sorted(set(sizes)) == list(sizes)
    for n in range(1, most + 1):
        padded = next(s for s in sizes if s >= n)
        assert padded <= max(2 * n, n + 32)


def test_a_reduction_masks_with_the_true_size():
    def mean(x, *, n):
        rows = torch.arange(x.shape[0]) < n
        return torch.where(rows[:, None], x, 0).sum() / n

    bucket = Bucket({"x": 0}, (4, 8), out=None, valid="n", over="eager")
    g = capture(mean, (torch.zeros(3, 2),), buckets=(bucket,), pad={"x": float("nan")})
    for size in (1, 3, 5, 8, 9):
        x = torch.randn(size, 2)
        torch.testing.assert_close(g(x), x.sum() / size)
    assert g.stats.eager_calls == {"over the largest bucket": 1}


def test_two_buckets_pad_two_dimensions():
    buckets = (
        Bucket({"ids": 0, "scale": 0}, (2, 4)),
        Bucket({"ids": 1}, (8, 16), out=1),
    )
    fn = lambda ids, scale: ids * scale[:, None]  # noqa: E731
    g = capture(fn, {"ids": torch.zeros(1, 3), "scale": torch.ones(1)}, buckets=buckets, pad={"ids": -1, "scale": 9})
    ids, scale = torch.randn(3, 11), torch.randn(3)
    assert same_bits(fn(ids, scale), g(ids=ids, scale=scale))
    assert g.stats.captures == 2
    assert g.stats.pad_rows == (4 - 3) + (16 - 11)


def test_a_dense_permuted_layout_is_kept():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    strides = []

    def fn(x):
        strides.append(x.stride())
        return x + 1

    capture(fn, (x,))
    assert {x.stride()} == set(strides)


def test_view_of_another_key_keeps_its_own_memory_here():
    g = capture(double, (torch.zeros(2),), outputs="view")
    first = g(torch.ones(2))
    g(torch.ones(3))
    assert first.tolist() == [2.0, 2.0]


def test_results_keep_their_containers_and_values_that_are_no_tensors():
    def fn(pair, opts):
        return [Result(pair.a + opts["k"], 7), (pair.b, None, "s")]

    g = capture(fn, (Pair(torch.ones(2), torch.zeros(1)), {"k": torch.tensor(3.0)}))
    result, rest = g(Pair(torch.ones(2), torch.ones(1)), {"k": torch.tensor(4.0)})
    assert result.y.tolist() == [5.0, 5.0]
    assert (result.count, result.extra) == (7, None)
    assert (rest[0].tolist(), *rest[1:]) == ([1.0], None, "s")


def test_a_bucket_names_nested_inputs():
    bucket = Bucket({"pair.a": 0, "pair.b": 0}, (4,))
    g = capture(lambda pair: pair.a + pair.b, (Pair(torch.ones(2), torch.ones(2)),), buckets=(bucket,))
    assert len(g(Pair(torch.ones(3), torch.ones(3)))) == 3


def test_a_static_argument_keeps_its_address():
    cache = torch.zeros(3)
    g = capture(lambda x, cache: cache.add_(x), (torch.ones(3), cache), mutates=(cache,))
    g(torch.ones(3), cache)
    g(torch.ones(3), cache)
    assert cache.tolist() == [2.0, 2.0, 2.0]
    assert g.stats.copied_bytes == 2 * 3 * 4


def test_warm_captures_every_bucket_largest_first():
    sizes = []

    def fn(x):
        sizes.append(x.shape[0])
        return x

    g = capture(fn, (torch.zeros(3, 2),), buckets=(ROWS,), warmup=0)
    assert g.warm() == 3
    assert sizes == [4, 8, 2, 1]
    assert 0 == g.warm() == g.warm([(torch.zeros(5, 2),)])
    assert g.stats.replays == 0

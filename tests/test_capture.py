"""capture@1: replays are plain runs on padded inputs; keys, buckets, outputs, randomness, autograd."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlkernel_common.graphs.verify import same_bits
from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import Bucket, CaptureGroup, bucket_sizes
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


@settings(derandomize=True, deadline=None, max_examples=25)
@given(n=st.integers(0, 8), seed=st.integers(0, 99), mode=st.sampled_from(["clone", "view"]))
def test_replay_is_bitwise_the_plain_run_on_the_padded_input(n, seed, mode):
    w = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))

    def fn(x):
        return {"logits": x @ w, "noise": torch.rand(x.shape[0])}

    g = capture(fn, (torch.zeros(3, 4),), buckets=(ROWS,), pad={"x": 0.5}, static=(w,), outputs=mode)
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    padded = next(s for s in ROWS.sizes if s >= n)
    torch.manual_seed(seed)
    actual = {k: v.clone() for k, v in g(x).items()}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    expected = fn(torch.cat([x, torch.full((padded - n, 4), 0.5)]))
    assert torch.equal(state, torch.get_rng_state())
    for name, value in expected.items():
        assert same_bits(value[:n], actual[name]), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30])
def test_padding_never_reaches_a_valid_row(poison):
    g = capture(lambda x: torch.softmax(x, -1), (torch.zeros(8, 3),), buckets=(ROWS,), pad={"x": poison})
    x = torch.randn(5, 3)
    assert same_bits(torch.softmax(x, -1), g(x))


def test_a_larger_call_leaves_nothing_in_the_padding_of_a_smaller_one():
    g = capture(lambda x: {"sum": x.sum(0)}, (torch.zeros(8, 3),), buckets=(Bucket({"x": 0}, (8,), out=None),))
    g(torch.full((8, 3), 7.0))
    assert g(torch.ones(2, 3))["sum"].tolist() == [2.0, 2.0, 2.0]


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


def test_inputs_are_read_anew_whatever_their_layout():
    g = capture(lambda x: x.cumsum(-1), (torch.zeros(4, 6),))
    base = torch.randn(8, 12)
    inputs = (base[::2, ::2], base[:6, :4].T, torch.randn(6).expand(4, 6), base[:4, :6].contiguous())
    results = [g(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert same_bits(x.cumsum(-1), result)


def test_a_dense_permuted_layout_is_kept():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    strides = []

    def fn(x):
        strides.append(x.stride())
        return x + 1

    capture(fn, (x,))
    assert {x.stride()} == set(strides)


def test_inputs_are_not_written_to():
    g = capture(lambda x: x.mul_(3), (torch.ones(3),))
    x = torch.ones(3)
    assert [3.0, 3.0, 3.0] == g(x).tolist() == g(x).tolist()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_clone_is_stable_and_view_is_overwritten():
    clones = capture(double, (torch.zeros(2),))
    first = clones(torch.tensor([1.0, 2.0]))
    clones(torch.tensor([5.0, 6.0]))
    assert first.tolist() == [2.0, 4.0]
    views = capture(double, (torch.zeros(2),), outputs="view")
    first = views(torch.tensor([1.0, 2.0]))
    second = views(torch.tensor([5.0, 6.0]))
    assert first.tolist() == [10.0, 12.0]
    assert first.data_ptr() == second.data_ptr()


def test_view_of_another_key_keeps_its_own_memory_here():
    g = capture(double, (torch.zeros(2),), outputs="view")
    first = g(torch.ones(2))
    g(torch.ones(3))
    assert first.tolist() == [2.0, 2.0]


def test_an_output_that_is_its_input_is_the_static_buffer():
    g = capture(lambda x: x, (torch.zeros(2),), outputs="view")
    out = g(torch.tensor([1.0, 2.0]))
    g(torch.tensor([3.0, 4.0]))
    assert out.tolist() == [3.0, 4.0]


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


def test_every_value_that_is_no_tensor_is_part_of_the_key():
    g = capture(lambda x, t: (x * t, type(t).__name__), (torch.ones(1), 1))
    for t in (1, 1.0, True, 2, 0.0, -0.0, float("inf")):
        y, name = g(torch.ones(1), t)
        assert (float(t), type(t).__name__) == (y.item(), name)
    nan = g(torch.ones(1), float("nan"))
    captures = g.stats.captures
    g(torch.ones(1), float("nan"))
    assert captures == g.stats.captures
    assert torch.isnan(nan[0]).all()


def test_modes_are_part_of_the_key():
    lin = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(2, 4)
    with torch.no_grad():
        g = capture(lin, (x,))
        lin.eval()
        assert same_bits(lin(x), g(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.bfloat16 == g(x).dtype
        assert torch.float32 == g(x).dtype
        with torch.inference_mode():
            assert same_bits(lin(x), g(x))
        assert same_bits(lin(x), g(x))
    assert g.stats.captures == 4


def test_replays_draw_what_plain_runs_draw():
    own = torch.Generator().manual_seed(5)

    def fn(x):
        return x + torch.randn(3), torch.rand(2, generator=own)

    torch.manual_seed(0)
    g, h = capture(fn, (torch.zeros(3),), generators=(own,)), capture(torch.rand_like, (torch.zeros(2),))
    assert torch.equal(torch.Generator().manual_seed(0).get_state(), torch.get_rng_state())
    drawn = [leaf for _ in range(4) for leaf in (*g(torch.zeros(3)), h(torch.zeros(2)))]
    torch.manual_seed(0)
    own.manual_seed(5)
    plain = [leaf for _ in range(4) for leaf in (*fn(torch.zeros(3)), torch.rand_like(torch.zeros(2)))]
    assert all(map(torch.equal, plain, drawn))
    assert len({tuple(t.tolist()) for t in drawn[::3]}) == 4


def test_a_function_that_draws_is_refused_when_drawing_is_forbidden():
    for policy in ("raise", "eager"):
        with pytest.raises(CaptureError, match="rng='forbid'"):
            capture(torch.rand_like, (torch.zeros(2),), rng="forbid", on_capture_error=policy)
    g = capture(double, (torch.zeros(2),), rng="forbid")
    assert g(torch.ones(2)).tolist() == [2.0, 2.0]


def test_warm_up_leaves_no_trace_in_mutated_tensors():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("position", torch.zeros((), dtype=torch.int64))
            self.register_buffer("keys", torch.zeros(8))

        def forward(self, x):
            self.keys.index_copy_(0, self.position[None], x)
            self.position += 1
            return self.keys.sum()

    cache = Cache()
    g = capture(cache, (torch.zeros(1),), mutates=(cache,), warmup=11, verify="always")
    assert int(cache.position) == 0
    sums = [g(torch.full((1,), float(i))).item() for i in range(1, 9)]
    assert sums == [1, 3, 6, 10, 15, 21, 28, 36]
    assert int(cache.position) == 8


def test_a_static_argument_keeps_its_address():
    cache = torch.zeros(3)
    g = capture(lambda x, cache: cache.add_(x), (torch.ones(3), cache), mutates=(cache,))
    g(torch.ones(3), cache)
    g(torch.ones(3), cache)
    assert cache.tolist() == [2.0, 2.0, 2.0]
    assert g.stats.copied_bytes == 2 * 3 * 4


def test_calls_from_several_threads_each_get_their_own_answer():
    group, wrong = CaptureGroup("threads"), []
    g = capture(double, (torch.zeros(4),), group=group, outputs="clone")
    h = capture(lambda x: x + 1, (torch.zeros(4),), group=group)

    def work(seed):
        for i in range(60):
            x = torch.full((4,), float(seed * 1000 + i))
            if not (torch.equal(g(x), x * 2) and torch.equal(h(x), x + 1)):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert 240 == g.stats.replays == h.stats.replays


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

"""Ranks that capture collectives together do it alike, fail together, and wait for nobody who does not come."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from rlkernel_core.errors import CaptureError, FallbackWarning, RankError
from rlkernel_core.spec.graphed import Bucket, CaptureGroup
from rlkernel_torch.direct import capture
from tests.process_groups import in_ranks

X = torch.arange(4.0)


def summed(x, factor=1.0):
    y = x * factor
    dist.all_reduce(y)
    return y


def alike(rank):
    g = capture(summed, (X,), collectives=True, buckets=(Bucket({"x": 0}, (4, 8)),))
    assert g(torch.full((3,), rank + 1.0)).tolist() == [3.0] * 3
    assert g(torch.full((6,), rank + 1.0)).tolist() == [3.0] * 6
    assert (g.stats.captures, g.stats.replays, g.stats.eager_calls) == (2, 2, {})


def other_sizes(rank):
    with pytest.raises(CaptureError, match=r"input x: rank 0: \[4\] torch.float32; rank 1: \[8\] torch.float32"):
        capture(summed, (X if rank == 0 else torch.zeros(8),), collectives=True)


def other_values(rank):
    g = capture(summed, (X,), collectives=True, on_capture_error="eager")
    with pytest.raises(CaptureError, match=r"input factor: rank 0: float 2.0; rank 1: float 3.0"):
        g(X, 2.0 + rank)
    assert g(X).tolist() == (2 * X).tolist()  # nobody was left waiting


def other_buckets(rank):
    with pytest.raises(CaptureError, match=r"buckets: rank 0: \[\(\(4, 8\), 4\)\]; rank 1: \[\(\(4, 16\), 4\)\]"):
        capture(summed, (X,), collectives=True, buckets=(Bucket({"x": 0}, (4, 16 if rank else 8)),))


def other_statics(rank):
    weight = torch.zeros(4, 4 + rank)
    with pytest.raises(CaptureError, match=r"static.0: rank 0: \[4, 4\].*; rank 1: \[4, 5\]"):
        capture(lambda x: summed(x @ weight), (X,), collectives=True, static=(weight,))


def cannot_record(x):
    y = summed(x)
    if dist.get_rank() == 1:
        y.sum().item()
    return y


def one_cannot_record(rank):
    with pytest.raises(CaptureError, match="_local_scalar_dense" if rank else "rank 1 could not capture it: aten::"):
        capture(cannot_record, (X,), collectives=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        g = capture(cannot_record, (X,), collectives=True, on_capture_error="eager")
    assert g(X).tolist() == (2 * X).tolist()
    assert g.stats.eager_calls == {"capture failed": 1}  # on both ranks


def one_raises(rank):
    def fn(x):
        y = summed(x)
        if rank:
            raise KeyError("mine")
        return y

    error, said = (KeyError, "mine") if rank else (CaptureError, "rank 1 could not capture it: fn raised")
    with pytest.raises(error, match=said):
        capture(fn, (X,), collectives=True, warmup=0)


def one_moves(rank):
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    g = capture(lambda x: summed(layer(x)), (X,), collectives=True, static=(layer,))
    with g.weight_update() as update:
        if rank:
            layer.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    assert update.changed == ("static.0.weight",)
    g(X)
    assert g.stats.recaptures == {"static tensors moved": 1}


def one_stays_away(rank):
    if rank == 0:
        with pytest.raises(RankError, match=r"rank 1 of 2 did not answer within 0.5 s when captures") as caught:
            capture(summed, (X,), collectives=True, group=CaptureGroup(timeout=0.5))
        assert caught.value.ranks == (1,)


def fewer_ranks(rank):
    groups = [dist.new_group([i]) for i in range(2)]
    if rank == 0:  # the other does nothing, and nobody waits for it
        g = capture(summed_in(groups[0]), (X,), collectives=True, group=CaptureGroup(process_group=groups[0]))
        assert g(X).tolist() == X.tolist()


def summed_in(group):
    def fn(x):
        y = x * 1
        dist.all_reduce(y, group=group)
        return y

    return fn


SCENES = (
    alike, other_sizes, other_values, other_buckets, other_statics, one_cannot_record, one_raises, one_moves,
    fewer_ranks, one_stays_away,
)  # fmt: skip


def play(rank, folder):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    for scene in SCENES:
        scene(rank)
    dist.destroy_process_group()


def test_two_ranks_agree_or_fail_together(tmp_path) -> None:
    in_ranks(2, play, str(tmp_path))


def test_without_a_process_group_there_is_nobody_to_ask() -> None:
    assert capture(lambda x: x * 2, (X,), collectives=True)(X).tolist() == (2 * X).tolist()

"""A vocabulary split over two processes: gloo and CPU tensors, so under the interpreter alone."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp

import rlkernel as rlk
from rlkernel_triton.linear_logprob import linear_logprob

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="gloo takes CPU tensors")
SHARDS = (700, 300)  # of unequal size; the first ids lie on one of them
RESULTS = ("logprob", "lse", "entropy", "log_kept_mass")


def run(shard, group):
    """Results and gradients of one call."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(1000, 8, generator=g)
    ids = torch.tensor([0, 1, 999, 998, 700, 699, 1000, 5, 7])
    support = rlk.Support(torch.arange(180) * 5, torch.arange(10) * 20)
    mask = torch.arange(9) != 4
    h, w = hidden.requires_grad_(), weight[shard].clone().requires_grad_()
    options = {"entropy": True, "mask": mask, "support": support, "temperature": 0.7, "softcap": 8.0}
    out = linear_logprob(h, w, ids, group=group, **options)
    weights = torch.linspace(-1, 1, 9)
    sum((getattr(out, n).nan_to_num() * weights * (i + 1)).sum() for i, n in enumerate(RESULTS)).backward()
    found = {n: getattr(out, n).detach().nan_to_num(nan=7e7) for n in RESULTS}
    return {**found, "invalid": out.invalid, "dX": h.grad, "dW": w.grad}


def rank(index, folder):
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=index, world_size=2, timeout=timedelta(seconds=60)
    )
    first = sum(SHARDS[:index])
    alone = [dist.new_group([i]) for i in range(2)][index]
    found = {"shard": run(slice(first, first + SHARDS[index]), dist.group.WORLD), "alone": run(slice(None), alone)}
    torch.save(found, f"{folder}/{index}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank, args=(str(folder),), nprocs=2)
    return [torch.load(f"{folder}/{i}.pt") for i in range(2)]


def test_ranks_agree_bit_by_bit(found) -> None:
    first, second = (f["shard"] for f in found)
    assert [torch.equal(first[n], second[n]) for n in (*RESULTS, "invalid", "dX")] == [True] * 6


def test_shards_equal_the_whole(found) -> None:
    want, got = run(slice(None), None), found[0]["shard"]
    for name in (*RESULTS, "dX"):
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([f["shard"]["dW"] for f in found]), want["dW"], atol=1e-5, rtol=1e-5)


def test_a_group_of_one_gives_the_bits_of_the_plain_call(found) -> None:
    want = run(slice(None), None)
    assert [n for n in want if not torch.equal(found[0]["alone"][n], want[n])] == []

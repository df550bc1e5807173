"""One rank of the vocabulary-parallel tests: python vocab_parallel_ranks.py RANK STORE OUT.

Three ranks meet over gloo and a file, split into groups of one, two and three, and save what they got.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlkernel_core.errors import ArgumentError
from rlkernel_torch.direct import linear_logprob
from tests.logprob_inputs import head, ragged

WORLD = 3
# name -> (ranks, sizes of the shards)
SPLITS = {
    "one": ((0,), (1300,)),
    "two": ((0, 1), (650, 650)),
    "uneven": ((0, 1), (1299, 1)),
    "three": ((0, 1, 2), (3, 1100, 197)),
}


def operands(dtype):
    """The same on every rank. All of the first ids lie on one shard, whichever the split."""
    x = head(70, 12, 1300, dtype=dtype)
    x.ids[:5] = 1299
    x.ids[5:9] = 0
    x.ids[9] = 1300
    return x


def options(dtype):
    return {
        "temperature": torch.linspace(0.5, 1.7, 70),
        "softcap": 20.0,
        "mask": torch.arange(70) % 6 != 2,
        "entropy": True,
        "support": ragged([range(i, 1300, 90) for i in range(70)]),
    }


def run(x, shard, group, dtype, backward, *, plain=False):
    """Results and gradients of one call, as a dict of tensors."""
    h, w, b = (t.clone().requires_grad_() for t in (x.hidden, x.weight[shard], x.bias[shard]))
    chosen = {} if plain else options(dtype)
    out = linear_logprob(h, w, x.ids, bias=b, group=group, backward=backward, **{"entropy": True, **chosen})
    names = [n for n in ("logprob", "lse", "entropy", "log_kept_mass") if getattr(out, n) is not None]
    weights = torch.linspace(-1, 1, 70, dtype=out.logprob.dtype)
    loss = sum((torch.nan_to_num(getattr(out, n)) * weights * (i + 1)).sum() for i, n in enumerate(names))
    loss.backward()
    found = {n: getattr(out, n).detach() for n in names}
    return {**found, "invalid": out.invalid, "hidden": h.grad, "weight": w.grad, "bias": b.grad}


def main(rank, store, out):
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found = {}
    for name, (ranks, sizes) in SPLITS.items():
        group = dist.new_group(list(ranks))
        if rank not in ranks:
            continue
        first = sum(sizes[: ranks.index(rank)])
        shard = slice(first, first + sizes[ranks.index(rank)])
        for dtype in (torch.float64, torch.bfloat16):
            for backward in ("recompute", "save"):
                found[name, dtype, backward] = run(operands(dtype), shard, group, dtype, backward)
        found[name, "plain"] = run(operands(torch.float32), shard, group, torch.float32, "auto", plain=True)
    try:  # ranks that do not hold the same tokens
        linear_logprob(
            torch.zeros(2 + rank, 4), torch.zeros(3, 4), torch.zeros(2 + rank).long(), group=dist.group.WORLD
        )
    except ArgumentError as error:
        found["refused"] = error.argument
    torch.save(found, Path(out) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

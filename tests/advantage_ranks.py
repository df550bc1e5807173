"""One rank of the whitening tests: python advantage_ranks.py RANK STORE OUT. The last rank has no tokens."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlkernel_torch.direct import advantage, shape_rewards, whiten

WORLD = 2


def data(rank):
    """Rank 0 holds everything in the split "empty"; both hold some in the split "uneven"."""
    g = torch.Generator().manual_seed(0)
    r = torch.randn(12, 10, generator=g) + 50
    mask = torch.rand(12, 10, generator=g) < 0.7
    shares = {"uneven": (slice(0, 8), slice(8, 12)), "empty": (slice(0, 12), slice(12, 12))}
    return {name: (r[s[rank]], mask[s[rank]]) for name, s in shares.items()} | {
        "masked": (r, mask if rank == 0 else torch.zeros_like(mask))
    }


def run(r, mask, group):
    """Everything that talks to other ranks."""
    x = r.mean(1)
    return {
        "reinforce_pp": advantage(r, kind="reinforce_pp", mask=mask, process_group=group).advantages,
        "batch": advantage(x, kind="grpo", group=4, scale="batch", process_group=group).advantages,
        "gpg": advantage((x > 50).float(), kind="gpg", group=4, process_group=group).advantages,
        "whiten": whiten(r, mask=mask, process_group=group).y,
        "constant": whiten(torch.full_like(r, 30.1), mask=mask, process_group=group).y,
        "normalised": shape_rewards(x, normalise="batch", process_group=group).rewards,
    }


def main(rank, store, out):
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found = {name: run(r, mask, dist.group.WORLD) for name, (r, mask) in data(rank).items()}
    torch.save(found, Path(out) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

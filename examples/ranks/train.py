"""One update of a head that is split over ranks, by any launcher; the same numbers on one rank as on many.

    python -m torch.distributed.run --standalone --nproc_per_node 2 examples/ranks/train.py
    accelerate launch --multi_gpu --num_processes 2 examples/ranks/train.py
    python examples/ranks/on_ray.py --ranks 2

Prompts are dealt out to the ranks (data parallel: advantages are scaled by the spread over all of them), then every
rank scores all sequences with its part of the vocabulary (vocabulary parallel). Prints a line a rank.
"""

from __future__ import annotations

import torch
from torch import distributed

import rlkernel as rlk
from rlkernel.distributed import assert_same_decisions, assert_same_install

GROUP, PROMPTS, T, D, V = 4, 5, 6, 32, 101  # completions a prompt, prompts, tokens, hidden, vocabulary


def main() -> float:
    """Join the ranks of the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); returns the loss."""
    gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    device = f"cuda:{rank % torch.cuda.device_count()}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    assert_same_install()  # before anything is computed
    print(rank, loss := update(rank, ranks, device), assert_same_decisions(), flush=True)  # after the first step
    distributed.destroy_process_group()
    return loss


def update(rank: int, ranks: int, device: str) -> float:
    """The loss of the batch, the same on every rank; this rank's part of the head has its gradient."""
    made = torch.Generator().manual_seed(0)  # everything is drawn on every rank, and each takes its part
    rewards = torch.rand(PROMPTS * GROUP, generator=made)
    hidden = torch.randn(PROMPTS * GROUP, T, D, generator=made).to(device).requires_grad_()
    ids = torch.randint(0, V, (PROMPTS * GROUP, T), generator=made).to(device)
    head = torch.randn(V, D, generator=made).tensor_split(ranks)[rank].to(device).requires_grad_()

    mine = [GROUP * len(part) for part in torch.arange(PROMPTS).tensor_split(ranks)]  # of each rank; 0 for some
    own = rewards.split(mine)[rank].to(device)
    whole = distributed.group.WORLD
    adv = rlk.advantage(own, kind="grpo", group=GROUP, scale="batch", process_group=whole).advantages
    every = torch.zeros(len(rewards), device=device)
    every.split(mine)[rank].copy_(adv)
    distributed.all_reduce(every)

    old = torch.full(ids.shape, -5.0, device=device)
    loss = rlk.linear_policy_loss(hidden, head, ids, old, every, kind="grpo", group=whole).loss
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()

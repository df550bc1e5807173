"""A whole policy update in one graph: advantages, forward pass, loss and backward pass, at fixed shapes.

    python examples/captured_update/update.py [--device cuda] [--updates 20]

Gradients go into tensors that are made once, so that any optimizer can take them from there.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import rlkernel as rlk


@dataclass(frozen=True)
class Sizes:
    """B sequences in groups, T tokens, D hidden, V vocabulary."""

    B: int = 8
    group: int = 4
    T: int = 16
    D: int = 32
    V: int = 97
    layers: int = 4


class Policy(nn.Module):
    """A small causal model: every layer mixes a token with the one before it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        D = sizes.D
        self.embedding = nn.Embedding(sizes.V, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2 * D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
                                    for _ in range(sizes.layers))  # fmt: skip
        self.head = nn.Linear(D, sizes.V, bias=False)

    def logprob(self, tokens: Tensor) -> Tensor:  # [B, T]
        """[B, T] log-probability of every token given the ones before it."""
        x = pad(self.embedding(tokens)[:, :-1], (0, 0, 1, 0))  # what stands before token t
        for layer in self.layers:
            before = pad(x[:, :-1], (0, 0, 1, 0))
            x = x + layer(torch.cat((x, before), -1))
        out = rlk.linear_logprob(x.flatten(0, 1), self.head.weight, tokens.flatten())
        return out.logprob.view_as(tokens)


@dataclass(frozen=True)
class Batch:
    """What a rollout leaves."""

    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, False behind the end of a sequence
    old_logprob: Tensor  # [B, T]
    reward: Tensor  # [B]


def draw(sizes: Sizes, device: str, seed: int) -> Batch:
    """A batch of made-up rollouts."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, sizes.V, (sizes.B, sizes.T), generator=g)
    length = torch.randint(1, sizes.T + 1, (sizes.B, 1), generator=g)
    mask = torch.arange(sizes.T) < length
    old = -torch.rand(sizes.B, sizes.T, generator=g) * 5
    reward = torch.randint(0, 2, (sizes.B,), generator=g).float()
    return Batch(*(x.to(device) for x in (tokens, mask, old, reward)))


def update_of(policy: Policy, sizes: Sizes) -> Callable[[Batch], dict[str, Tensor]]:
    """The update as a function of a batch; it fills `.grad` of every parameter and asks the device for nothing."""
    parameters = list(policy.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)

    def update(batch: Batch) -> dict[str, Tensor]:
        advantages = rlk.advantage(batch.reward, kind="grpo", group=sizes.group).advantages
        logprob = policy.logprob(batch.tokens)
        result = rlk.policy_loss(logprob, batch.old_logprob, advantages, mask=batch.mask, kind="grpo", clip=(0.2, 0.28))
        gradients = torch.autograd.grad(result.loss, parameters)
        torch._foreach_copy_([p.grad for p in parameters], gradients)
        return {"loss": result.loss.detach(), "clipped": result.stats.clip_high}

    return update


def captured(policy: Policy, sizes: Sizes, device: str) -> rlk.GraphedCallable:
    """The update in a graph. Weights are read in place; gradients are written in place."""
    update = update_of(policy, sizes)
    gradients = [p.grad for p in policy.parameters()]
    return rlk.capture(update, (draw(sizes, device, 0),), static=(policy,), mutates=(gradients,), verify="first")


def train(
    policy: Policy, update: Callable[[Batch], dict[str, Tensor]], sizes: Sizes, device: str, updates: int
) -> list[float]:
    """Losses of some updates; the optimizer stays outside of the graph."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = []
    for i in range(updates):
        losses.append(update(draw(sizes, device, i))["loss"])
        optimizer.step()
    return [float(loss) for loss in losses]


def milliseconds(update: Callable[[Batch], dict[str, Tensor]], batch: Batch, device: str, rounds: int = 20) -> float:
    """Wall time of one update."""
    update(batch)
    start = time.perf_counter()
    for _ in range(rounds):
        update(batch)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds * 1e3


def main() -> None:
    """Train twice from the same weights, with and without a graph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--updates", type=int, default=20)
    asked = parser.parse_args()
    sizes = Sizes()
    torch.manual_seed(0)
    plain = Policy(sizes).to(asked.device)
    graphed = copy.deepcopy(plain)
    step, replay = update_of(plain, sizes), captured(graphed, sizes, asked.device)
    a = train(plain, step, sizes, asked.device, asked.updates)
    b = train(graphed, replay, sizes, asked.device, asked.updates)
    same = all(torch.equal(p, q) for p, q in zip(plain.parameters(), graphed.parameters(), strict=True))
    batch = draw(sizes, asked.device, 0)
    print(f"loss {a[0]:.4f} -> {a[-1]:.4f} plain, {b[0]:.4f} -> {b[-1]:.4f} captured; weights equal: {same}")
    print(f"{milliseconds(step, batch, asked.device):.2f} ms plain, {milliseconds(replay, batch, asked.device):.2f} ms "
          f"captured; {replay.stats.replays} replays of {replay.stats.captures} graph, served by "
          f"{rlk.last_decision('capture').backend}")  # fmt: skip
    if not same:
        raise SystemExit("The captured update is not the plain one.")


if __name__ == "__main__":
    main()

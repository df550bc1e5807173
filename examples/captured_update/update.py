"""A whole policy update in one graph: advantages, forward pass, loss, backward pass and AdamW, at fixed shapes.

    python examples/captured_update/update.py [--device cuda] [--updates 20]

Gradients go into tensors that are made once, from which an optimizer takes them, in the graph or behind it.
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


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Step counts and moments of all parameters."""
    return [x for state in optimizer.state.values() for x in state.values()]


def optimizer_of(policy: Policy, device: str) -> torch.optim.AdamW:
    """AdamW whose state is there from the beginning, as if no step had been made: a graph needs its addresses."""
    parameters = list(policy.parameters())
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    # Fused: no step count is read on the host, on a CPU either.
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=torch.device(device).type != "cpu")
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(parameters, before)
        torch._foreach_zero_(state_of(optimizer))
    return optimizer


def whole_step(policy: Policy, sizes: Sizes, device: str) -> rlk.GraphedCallable:
    """Update and optimizer in one graph, which writes gradients, weights and the optimizer's state in place."""
    optimizer, update = optimizer_of(policy, device), update_of(policy, sizes)

    def step(batch: Batch) -> dict[str, Tensor]:
        found = update(batch)
        optimizer.step()
        return found

    written = (policy, [p.grad for p in policy.parameters()], state_of(optimizer))
    return rlk.capture(step, (draw(sizes, device, 0),), static=(policy,), mutates=written, verify="first")


def train(
    update: Callable[[Batch], dict[str, Tensor]],
    optimizer: torch.optim.Optimizer | None,
    sizes: Sizes,
    device: str,
    updates: int,
) -> list[float]:
    """Losses of some updates; `optimizer` is None where it is a part of the update."""
    losses = []
    for i in range(updates):
        losses.append(update(draw(sizes, device, i))["loss"])
        if optimizer is not None:
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
    """Train three times from the same weights: without a graph, with one, and with the optimizer in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--updates", type=int, default=20)
    asked = parser.parse_args()
    sizes, device = Sizes(), asked.device
    torch.manual_seed(0)
    plain = Policy(sizes).to(device)
    graphed, whole = copy.deepcopy(plain), copy.deepcopy(plain)
    behind = [optimizer_of(policy, device) for policy in (plain, graphed)]
    step, replay, in_one = update_of(plain, sizes), captured(graphed, sizes, device), whole_step(whole, sizes, device)
    a = train(step, behind[0], sizes, device, asked.updates)
    b = train(replay, behind[1], sizes, device, asked.updates)
    c = train(in_one, None, sizes, device, asked.updates)
    weights = [torch.cat([p.detach().flatten() for p in policy.parameters()]) for policy in (plain, graphed, whole)]
    same = all(torch.equal(weights[0], other) for other in weights[1:])
    batch = draw(sizes, device, 0)
    print(f"loss {a[0]:.4f} -> {a[-1]:.4f} plain, {b[-1]:.4f} captured, {c[-1]:.4f} with the optimizer in the graph; "
          f"weights equal: {same}")  # fmt: skip
    print(f"{milliseconds(step, batch, device):.2f} ms plain, {milliseconds(replay, batch, device):.2f} ms captured, "
          f"{milliseconds(in_one, batch, device):.2f} ms with AdamW; {replay.stats.replays} replays of "
          f"{replay.stats.captures} graph, served by {rlk.last_decision('capture').backend}")  # fmt: skip
    if not same:
        raise SystemExit("The captured update is not the plain one.")


if __name__ == "__main__":
    main()

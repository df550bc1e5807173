"""The trainer: fit a model to text, then improve it by GRPO on what it answers itself.

Legend: B sequences · G group · A answer length · D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Generator, Tensor

import rlkernel as rlk
from rlkernel.demo import task
from rlkernel.demo.exact import ExactPolicy
from rlkernel.demo.model import Policy
from rlkernel.demo.rollout import Engine, Rollouts

FIT_BATCH: Final = 256
CLIP: Final = (0.2, 0.28)  # clip-higher, arXiv 2503.14476


@dataclass(frozen=True)
class Recipe:
    """The dials of a run."""

    steps: int = 100  # GRPO updates
    fit_steps: int = 300  # supervised steps before
    fit_rate: float = 2e-3  # their highest rate of learning
    prompts: int = 64  # problems per update
    group: int = 8  # answers per problem
    epochs: int = 2  # passes over a batch of rollouts
    rate: float = 5e-4
    temperature: float = 1.0
    weights: str = "int4_g32"  # format of the rollout's weights
    correction: float = 2.0  # cap of the truncated importance weight
    exact: bool = False  # both sides by operators of exact bits, the trainer on the rollout's weights
    dtype: str = "float32"  # of activations on both sides; parameters and their updates are fp32

    @property
    def activations(self) -> torch.dtype:
        """The same as torch names it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class Step:
    """What one GRPO update did."""

    step: int
    reward: float  # mean over the batch, before the update
    drift_max: float  # |log p trainer - log p rollout| over the answer's tokens
    drift_mean: float
    tokens: int  # drawn, of the answers
    differ: int  # of these, those whose log-probabilities are not equal
    drift_kl: float  # estimate of KL(rollout || trainer), k3, nats per token
    corrected: float  # share of tokens whose importance weight was cut
    clipped: float  # share of tokens outside the clip range in the last epoch
    entropy: float  # nats per token
    loss: float
    tokens_per_second: float  # of the rollout, prompts not counted
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def fit(policy: Policy, recipe: Recipe, generator: Generator) -> Iterator[float]:
    """Fit the model to the careless writer's text; yields the loss of every step."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.fit_rate, betas=(0.9, 0.98))
    device = policy.head.weight.device
    for step in range(recipe.fit_steps):
        for g in optimizer.param_groups:
            g["lr"] = recipe.fit_rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / recipe.fit_steps)
        batch = task.problems(FIT_BATCH, generator, error_rate=task.ERROR_RATE)
        prompts, answers = batch.prompts.to(device), batch.answers.to(device)
        every = torch.ones_like(answers, dtype=torch.bool)
        loss = -_logprob(policy, recipe, prompts, answers, every).logprob.mean()
        _update(policy, optimizer, loss)
        yield loss.item()


def improve(
    policy: Policy,
    recipe: Recipe,
    generator: Generator,
    seed: int,
    on: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
) -> Iterator[Step]:
    """GRPO: answer, judge, compare within the group, update, sync; yields what each update did.

    Args:
        policy: the trainer's model; it is changed.
        recipe: the dials.
        generator: draws the problems; on the CPU.
        seed: keys the noise of every request.
        on: entered around the work of each side, "rollout" or "trainer".
    """
    batch, device = recipe.prompts * recipe.group, policy.head.weight.device
    with on("rollout"):
        engine = Engine(policy, batch, recipe.weights, recipe.temperature, recipe.activations, exact=recipe.exact)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(recipe.steps):
        began = time.perf_counter()
        given = task.problems(recipe.prompts, generator)
        prompts, answers = (x.repeat_interleave(recipe.group, 0).to(device) for x in (given.prompts, given.answers))
        # A request's noise is keyed by its own seed: no other request, and no place in the batch, changes its draw.
        seeds = (seed * recipe.steps + step) * batch + torch.arange(batch, device=device)
        with on("rollout"):
            rollouts = engine.answer(prompts, seeds)
            drawn = rollouts.mask.sum().item()  # waits for the device
        answered = time.perf_counter()
        reward = task.rewards(rollouts.tokens, answers)
        with on("trainer"):
            stats, old = _learn(policy, optimizer, recipe, prompts, rollouts, reward)
        with on("rollout"):
            engine.sync(policy)
        gap = (old - rollouts.logprob)[rollouts.mask]
        yield Step(
            step=step,
            reward=reward.mean().item(),
            drift_max=gap.abs().max().item(),
            drift_mean=gap.abs().mean().item(),
            tokens=int(drawn),
            differ=int(gap.count_nonzero()),
            drift_kl=(gap.exp() - 1 - gap).mean().item(),
            corrected=float(stats.correction_clipped),
            clipped=float(stats.clip_low + stats.clip_high),
            entropy=float(stats.entropy),
            loss=float(stats.policy_loss),
            tokens_per_second=drawn / (answered - began),
            seconds=time.perf_counter() - began,
        )


def _learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    prompts: Tensor,
    rollouts: Rollouts,
    reward: Tensor,
) -> tuple[Any, Tensor]:
    """A few epochs on one batch; returns the last epoch's statistics and the log-probabilities before the first."""
    advantages = rlk.advantage(reward, kind="grpo", group=recipe.group).advantages
    given = (prompts, rollouts.tokens, rollouts.mask, recipe.temperature)
    with torch.no_grad():
        old = _logprob(policy, recipe, *given).logprob
    for _ in range(recipe.epochs):
        out = _logprob(policy, recipe, *given, entropy=True)
        result = rlk.policy_loss(
            out.logprob,
            old,
            advantages,
            mask=rollouts.mask,
            kind="grpo",
            clip=CLIP,
            entropy=out.entropy,
            rollout_logprob=rollouts.logprob,
            correction=rlk.Correction(level="token", mode="truncate", high=recipe.correction),
        )
        _update(policy, optimizer, result.loss)
    return result.stats, old


def _logprob(
    policy: Policy,
    recipe: Recipe,
    prompts: Tensor,
    answers: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
) -> rlk.LogprobResult:
    """Log-probability [B, A] of every answer token, without ever making the logits."""
    ids, dtype = torch.cat([prompts, answers], 1), recipe.activations
    # An exact policy casts its weights itself.
    casting = dtype != policy.head.weight.dtype and not isinstance(policy, ExactPolicy)
    with torch.autocast(ids.device.type, dtype, enabled=casting):
        hidden = policy(ids[:, :-1])[:, task.PROMPT - 1 :]  # [B, A, D]
    out = rlk.linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        policy.head.weight.to(dtype),
        answers.reshape(-1),
        temperature=temperature,
        mask=mask.reshape(-1),
        entropy=entropy,
    )
    shaped = {
        name: x.view(answers.shape) for name in ("logprob", "lse", "entropy") if (x := getattr(out, name)) is not None
    }
    return rlk.LogprobResult(**shaped)


def _update(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

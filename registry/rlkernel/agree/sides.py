"""The two sides: a rollout that draws and says what it drew from, a trainer that scores the same tokens.

Legend: B sequences · P prompt length · T tokens drawn · D hidden · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.agree.decoder import Model
from rlkernel.agree.drift import Drift
from rlkernel_core.decision import Decision
from rlkernel_core.errors import ArgumentError

SCORES: Final = ("sampler", "linear_logprob")  # where the rollout's log-probabilities come from


@dataclass(frozen=True)
class Agreement:
    """What was found."""

    model: str  # its name
    drift: Drift  # the whole path: model and kernels
    kernels: Drift  # both sides from the rollout's hidden states
    hidden: float  # largest difference of hidden states, relative to their largest entry
    rollout: tuple[Decision, ...]  # what the rollout ran
    trainer: tuple[Decision, ...]  # what the trainer ran

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        sides = {name: [d.as_dict() for d in getattr(self, name)] for name in ("rollout", "trainer")}
        drifts = {"drift": self.drift.as_dict(), "kernels": self.kernels.as_dict()}
        return {"model": self.model, **drifts, "hidden": self.hidden, **sides}


def measure(
    model: Model,
    *,
    rollout: tuple[str, ...] = (),
    trainer: tuple[str, ...] = (),
    score: str = "sampler",
    sequences: int = 8,
    prompt: int = 8,
    tokens: int = 24,
    temperature: float = 1.0,
    seed: int = 0,
) -> Agreement:
    """Draw sequences with the rollout's kernels, score them with the trainer's, compare.

    Args:
        model: see `decoder.Model`.
        rollout: order of backends of the rollout; () for the policy in force.
        trainer: order of backends of the trainer.
        score: "sampler": the tempered log-probability as the sampler says it; "linear_logprob": the engine scores what
            it drew by the trainer's operator, which makes equal bits possible.
        sequences: B.
        prompt: P >= 1 random tokens.
        tokens: T >= 1.
        temperature: of the law, on both sides.
        seed: of prompts and draws.

    Raises:
        ArgumentError: an unknown score.
        ResolutionError: nobody in an order takes a call.
    """
    if score not in SCORES:
        raise ArgumentError("score", score, f"must be one of {', '.join(SCORES)}", "Pass 'sampler'.")
    device = model.head.device
    generator = torch.Generator().manual_seed(seed)
    asked = torch.randint(0, model.vocab, (sequences, prompt), generator=generator).to(device)
    with ordered(rollout):
        ids, said, states = _roll(model, asked, tokens, temperature, seed, score)
        ops = ("lm_head_sample", *(["linear_logprob"] if score == "linear_logprob" else []))
        ran = tuple(d for op in ops if (d := rlk.last_decision(op)) is not None)
    with ordered(trainer):
        whole = model.full(ids[:, :-1])[:, prompt - 1 :]  # [B, T, D]
        drawn = ids[:, prompt:]
        trained = train(model.head, model.bias, whole, drawn, temperature)
        same = train(model.head, model.bias, states, drawn, temperature)
        scored = rlk.last_decision("linear_logprob")
    apart = (whole.double() - states.double()).abs().max() / states.double().abs().max()
    drifts = Drift.between(trained, said), Drift.between(same, said)
    return Agreement(model.name, *drifts, float(apart), ran, (scored,) if scored is not None else ())


def ordered(order: tuple[str, ...]) -> Any:
    """The policy with an order of backends; () for the one in force."""
    return rlk.use(*order) if order else rlk.use()


@torch.no_grad()
def _roll(
    model: Model, asked: Tensor, tokens: int, temperature: float, seed: int, score: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, P + T], log-probabilities [B, T] and hidden states [B, T, D], token by token."""
    B, P = asked.shape
    model.start(B, P + tokens)
    seeds = torch.arange(B, device=asked.device) + seed * B
    ids, said, states = list(asked.unbind(1)), [], []
    for at in range(P + tokens - 1):
        hidden = model.step(ids[at], at)
        if at + 1 < P:
            continue
        draw = rlk.lm_head_sample(
            hidden, model.head, bias=model.bias, temperature=temperature, seed=seeds, step=at + 1 - P
        )
        ids.append(draw.token)
        states.append(hidden)
        if score == "sampler":
            said.append(draw.logprob + draw.log_kept_mass)
        else:
            law = rlk.linear_logprob(hidden, model.head, draw.token, bias=model.bias, temperature=temperature)
            said.append(law.logprob)
    return torch.stack(ids, 1), torch.stack(said, 1), torch.stack(states, 1)


def train(head: Tensor, bias: Tensor | None, hidden: Tensor, ids: Tensor, temperature: float, **more: Any) -> Tensor:
    """Log-probabilities of ids [...] behind hidden states [..., D] as a trainer takes them: with gradients."""
    rows = hidden.reshape(-1, hidden.shape[-1]).detach().requires_grad_()
    weight = head.detach().requires_grad_()
    law = {"bias": bias, "temperature": temperature, **more}
    with torch.enable_grad():
        out = rlk.linear_logprob(rows, weight, ids.reshape(-1), entropy=True, **law)
    return out.logprob.detach().view(ids.shape)

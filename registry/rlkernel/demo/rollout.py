"""The rollout engine: a captured decode step that samples, run token by token over a batch of problems.

Legend: B sequences · P prompt length · A answer length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.demo import task
from rlkernel.demo.exact import ExactDecoder
from rlkernel.demo.model import Decoder, Policy


@dataclass(frozen=True)
class Rollouts:
    """What the engine hands to the trainer."""

    tokens: Tensor  # [B, A] int64
    logprob: Tensor  # [B, A] under the tempered law, as the engine saw it
    mask: Tensor  # [B, A] bool: up to and including the end


Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # ids, position, seeds, tokens drawn


def _step(decoder: Decoder, temperature: float) -> Step:
    """One token a sequence, and its log-probability as the sampler says it."""

    def step(ids: Tensor, at: Tensor, seed: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        draw = rlk.sample(decoder.logits(ids, at), temperature=temperature, seed=seed, step=drawn)
        # The tempered log-probability: with filters, `logprob` alone would be that of the truncated law.
        return draw.token, draw.logprob + draw.log_kept_mass

    return step


def _exact_step(decoder: ExactDecoder, temperature: float) -> Step:
    """The same by the trainer's operator, since the sampler adds in another order."""

    def step(ids: Tensor, at: Tensor, seed: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        hidden, head = decoder.hidden(ids, at), decoder.head
        token = rlk.lm_head_sample(hidden, head, temperature=temperature, seed=seed, step=drawn).token
        return token, rlk.linear_logprob(hidden, head, token, temperature=temperature).logprob

    return step


class Engine:
    """Answers problems with quantized weights under one captured graph."""

    def __init__(
        self, policy: Policy, batch: int, fmt: str, temperature: float, dtype: torch.dtype, *, exact: bool = False
    ) -> None:
        if exact:
            self.decoder: Decoder = (exactly := ExactDecoder(policy, batch, fmt, dtype))
            step = _exact_step(exactly, temperature)
        else:
            self.decoder = Decoder(policy, batch, fmt, dtype)
            step = _step(self.decoder, temperature)
        device = policy.head.weight.device
        ids = torch.zeros(batch, dtype=torch.int64, device=device)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        example = (ids, one, torch.zeros_like(ids), torch.zeros_like(ids))
        self.step = rlk.capture(step, example, static=self.decoder.static(), mutates=[self.decoder.cache])

    def sync(self, policy: Policy) -> None:
        """Re-quantize the trainer's weights into the storage that the graph reads."""
        with self.step.weight_update():
            self.decoder.sync(policy)

    @torch.no_grad()
    def answer(self, prompts: Tensor, seeds: Tensor) -> Rollouts:
        """Sample an answer to each prompt [B, P]; request i draws from seeds[i], wherever it stands in the batch."""
        tokens, logprobs = [], []
        ids = prompts[:, 0]
        for at in range(task.PROMPT + task.ANSWER - 1):
            drawn = max(0, at - task.PROMPT + 1)
            position = torch.tensor([at], device=prompts.device)
            token, logprob = self.step(ids, position, seeds, torch.full_like(seeds, drawn))
            if at + 1 < task.PROMPT:
                ids = prompts[:, at + 1]  # still reading the prompt: what was drawn is not used
            else:
                ids = token
                tokens.append(token)
                logprobs.append(logprob)
        answer = torch.stack(tokens, 1)
        return Rollouts(answer, torch.stack(logprobs, 1), task.answer_mask(answer))

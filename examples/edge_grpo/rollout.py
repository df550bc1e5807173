"""The rollout on the trainer's own 4-bit weights: one copy in memory, an adapter that the graph reads where it lies.

Nothing is synchronized after an update: the optimizer writes the adapter in place. Legend: B sequences · V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 the field's name for it

import rlkernel as rlk
from rlkernel import nn
from rlkernel.demo import task
from rlkernel.demo.model import Policy, norm
from rlkernel.demo.rollout import Rollouts


class Engine:
    """Answers problems under one captured decode step."""

    def __init__(self, policy: Policy, batch: int, temperature: float) -> None:
        self.policy, shape = policy, policy.shape
        self.device = policy.head.weight.device
        head = shape.hidden // shape.heads
        self.cache = torch.zeros(shape.layers, 2, batch, shape.heads, shape.context, head, device=self.device)

        def step(ids: Tensor, at: Tensor, seed: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
            draw = rlk.sample(self.logits(ids, at), temperature=temperature, seed=seed, step=drawn)
            return draw.token, draw.logprob + draw.log_kept_mass

        ids = torch.zeros(batch, dtype=torch.int64, device=self.device)
        at = torch.zeros(1, dtype=torch.int64, device=self.device)
        packed = [part for m in policy.modules() if isinstance(m, nn.QuantLinear) for part in m.weight.parts.values()]
        static = [*(p.detach() for p in policy.parameters()), self.cache, *packed]
        with torch.no_grad():
            self.step = rlk.capture(step, (ids, at, ids.clone(), ids.clone()), static=static, mutates=[self.cache])

    def logits(self, ids: Tensor, at: Tensor) -> Tensor:  # [B], [1] -> [B, V]
        """Logits after the tokens ids, which stand at position at of every sequence."""
        policy, B = self.policy, ids.shape[0]
        x = policy.tokens(ids) + policy.positions(at)
        seen = (torch.arange(policy.shape.context, device=ids.device) <= at)[None, None, None]
        for block, (keys, values) in zip(policy.blocks, self.cache, strict=True):
            q, k, v = block.qkv(norm(x)).view(B, 3, block.heads, 1, -1).unbind(1)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + block.out(mixed.reshape(B, -1))
            x = x + block.down(F.gelu(block.up(norm(x))))
        return norm(x) @ policy.head.weight.T

    @torch.no_grad()
    def answer(self, prompts: Tensor, seeds: Tensor) -> Rollouts:
        """Sample an answer to each prompt [B, P]; request i draws from seeds[i]."""
        tokens, logprobs = [], []
        ids = prompts[:, 0]
        for at in range(task.PROMPT + task.ANSWER - 1):
            drawn = torch.full_like(seeds, max(0, at - task.PROMPT + 1))
            token, logprob = self.step(ids, torch.tensor([at], device=self.device), seeds, drawn)
            if at + 1 < task.PROMPT:
                ids = prompts[:, at + 1]
            else:
                ids = token
                tokens.append(token)
                logprobs.append(logprob)
        answer = torch.stack(tokens, 1)
        return Rollouts(answer, torch.stack(logprobs, 1), task.answer_mask(answer))

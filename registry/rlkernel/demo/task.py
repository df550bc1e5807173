"""Arithmetic text: problems with a verifiable answer, and the careless writer a model learns them from first.

A problem is `37+8=`, its answer `045.`; the reward is 1 for exactly that and 0 for anything else. The writer of the
first text is wrong half the time, so the fitted model knows the rule and keeps it half the time: what reinforcement
learning can mend.

Legend: B problems · P prompt length · A answer length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Generator, Tensor

ALPHABET: Final = "0123456789+=."
END: Final = ALPHABET.index(".")
PROMPT: Final = 5  # "37+8="
ANSWER: Final = 4  # "045."
ERROR_RATE: Final = 0.5
ERROR_SIZE: Final = 5  # the careless writer is off by at most this


@dataclass(frozen=True)
class Problems:
    """A batch of problems with their answers."""

    prompts: Tensor  # [B, P] int64
    answers: Tensor  # [B, A] int64


def problems(count: int, generator: Generator, *, error_rate: float = 0.0) -> Problems:
    """Random problems; a share of the answers is wrong by a little."""
    a = torch.randint(100, (count,), generator=generator)
    b = torch.randint(10, (count,), generator=generator)
    slip = torch.randint(-ERROR_SIZE, ERROR_SIZE + 1, (count,), generator=generator)
    wrong = torch.rand(count, generator=generator) < error_rate
    total = (a + b + torch.where(wrong, slip, 0)).clamp(min=0)
    plus, equals = (torch.full_like(a, ALPHABET.index(sign)) for sign in "+=")
    prompts = torch.stack([a // 10, a % 10, plus, b, equals], 1)
    answers = torch.stack([total // 100, total // 10 % 10, total % 10, torch.full_like(a, END)], 1)
    return Problems(prompts, answers)


def rewards(tokens: Tensor, answers: Tensor) -> Tensor:
    """1 where an answer [B, A] is exactly right, else 0; [B] float32."""
    return (tokens == answers).all(1).float()


def answer_mask(tokens: Tensor) -> Tensor:
    """True up to and including the first full stop; [B, A] bool."""
    ended = (tokens == END).cumsum(1) - (tokens == END).int()
    return ended == 0


def text(ids: Tensor) -> str:
    """Characters of a row of ids."""
    return "".join(ALPHABET[i] for i in ids.tolist())

"""A rollout of an exact model: prompts in one forward, then a captured step for all rows, keys and values in pages.

Both run the model's own forward. A row's bits are its own, so the log-probabilities of a rollout are those that the
trainer computes over whole sequences, whatever stands in the batch, and whatever the size of a page is.

Legend: B rows · M new tokens · N tokens of a step, of all rows · G keys of a page · P pages of a row · D hidden ·
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernel.nn.generate_checks import check_draws, check_ran, check_siblings, seeds_of
from rlkernel.nn.page_plan import page_plan
from rlkernel.nn.paged_decoder import Decoder, Draws
from rlkernel_core import checks


@dataclass(frozen=True)
class Generated:
    """What a rollout drew."""

    ids: Tensor  # [B, M] int64: the tokens drawn, a stop id among them; padding behind
    lengths: Tensor  # [B] int64: how many tokens a row has
    logprob: Tensor  # [B, M], nats: of softmax(logits / T), the bits of the trainer's number; 0 behind
    log_kept_mass: Tensor | None  # [B, M], nats: of what top_k, top_p and min_p kept; None without them

    @property
    def mask(self) -> Tensor:
        """[B, M] bool, True where a token was drawn."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


@torch.no_grad()
def rollout(
    exact: Any,
    rows: Sequence[tuple[int, ...]],
    draws: Draws,
    *,
    seed: int | Tensor,
    max_new_tokens: int,
    max_length: int | None,
    page: int,
    check_every: int,
) -> Generated:
    """See `rlkernel.Exact.generate`."""
    model = exact.model
    checks.integer("max_new_tokens", max_new_tokens, at_least=1)
    checks.integer("page", page, at_least=1)
    checks.integer("check_every", check_every, at_least=1)
    longest = max(len(ids) for ids in rows) + max_new_tokens
    if max_length is not None:
        checks.integer("max_length", max_length, at_least=longest, remedy="Pass the longest prompt + max_new_tokens.")
    seeds = seeds_of(seed, len(rows), model.device)
    if isinstance(seed, Tensor) and draws.alike:
        check_siblings("seed", rows, seed.tolist())
    ran = check_draws(model, draws, seeds)
    plan = page_plan(rows, max_new_tokens - 1, page)
    decoder = exact.decoder
    if decoder is None or not decoder.fits(model, draws, ran, plan, page):
        exact.release()
        width = plan.width if max_length is None else -(-max_length // page)
        pages = plan.pages if max_length is None else width * len(rows)
        exact.decoder = decoder = Decoder(model, draws, ran, len(rows), pages, width, page)
    training = model.training
    with ExitStack() as leaving, ExitStack() as failing:
        leaving.callback(model.train, training)
        failing.callback(exact.release)
        model.eval()
        drawn = [[x.clone() for x in decoder.start(rows, plan, draws, seeds)]]
        check_ran(exact)
        step: Any = decoder.captured() if max_new_tokens > 1 else None
        check_ran(exact)
        for n in range(1, max_new_tokens):
            if n % check_every == 0 and not bool(decoder.alive.any()):
                break
            drawn.append(step())
        failing.pop_all()
    lengths = decoder.drawn.clone()
    most = int(lengths.max())
    ids, logprob, *mass = (torch.stack(x, 1)[:, :most] for x in zip(*drawn, strict=True))
    return Generated(ids, lengths, logprob, mass[0] if mass else None)

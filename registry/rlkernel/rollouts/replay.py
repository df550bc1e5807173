"""Drift between a rollout that another process recorded and a trainer that scores its tokens here.

Two comparisons of log-probabilities, since most of a mismatch is often a comparison of two laws:

    drift   the trainer under the law that the rollout states: what numerics and kernels do
    mixed   the trainer under its own law, the tempered one, against the numbers as they are stated

Legend: T tokens of a sequence · n drawn · D hidden · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.agree.decoder import Model
from rlkernel.agree.drift import Drift
from rlkernel.agree.sides import ordered, train
from rlkernel.rollouts.record import Params, Record, Rollout
from rlkernel.rollouts.verify import versions_asked
from rlkernel_core.decision import Decision
from rlkernel_core.errors import ArgumentError

ROWS: Final = 64  # rows whose kept ids are found at once: 80 MB at V = 150,000
WORST: Final = 5  # tokens that are named


class Token(NamedTuple):
    """A drawn token and its log-probability on both sides, under the same law."""

    sequence: int  # its number in the record
    token: int  # number of the drawn token
    id: int  # in the vocabulary
    rollout: float  # nats, as stated
    trainer: float  # nats, as computed here


@dataclass(frozen=True)
class Replay:
    """What was found; every drift is trainer against rollout."""

    model: str  # its name
    law: str  # that the rollout states
    left_out: int  # tokens of other weights, and of greedy requests, whose law has no log-probability to compare
    drift: Drift  # the same law on both sides
    mixed: Drift | None  # the tempered law against the stated numbers; None where these are of the tempered law
    places: tuple[tuple[int, Drift], ...]  # number of a first drawn token, and drift from there to the next
    worst: tuple[Token, ...]  # largest first, under the same law
    trainer: tuple[Decision, ...]  # what the trainer ran

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        mixed = self.mixed.as_dict() if self.mixed else None
        places = [{"from": first, **drift.as_dict()} for first, drift in self.places]
        told = {"model": self.model, "law": self.law, "left_out": self.left_out, "drift": self.drift.as_dict()}
        more = {"mixed": mixed, "places": places, "worst": [token._asdict() for token in self.worst]}
        return {**told, **more, "trainer": [d.as_dict() for d in self.trainer]}


def replay(record: Record, model: Model, *, trainer: tuple[str, ...] = (), weights: str | None = None) -> Replay:
    """Score every token of a record by the trainer's operator and compare with what the rollout states.

    Args:
        record: of the rollout, with log-probabilities.
        model: with the weights that drew; hidden states of whole sequences are taken as a trainer takes them.
        trainer: order of backends of the trainer; () for the policy in force.
        weights: version of the model's weights; tokens of others are left out. None where the record has one.

    Raises:
        ArgumentError: no log-probability stated, no token to compare, ids that the model has not, or weights that drew
            nothing or are several with none named.
        ResolutionError: nobody in the order takes a call.
    """
    versions_asked(record, weights)
    if any(r.ids and r.logprob is None for r in record.rollouts):
        raise ArgumentError("record", "no log-probabilities", "cannot be compared", "Ask the engine for logprobs.")
    said, same, own, keys = [], [], [], []
    with ordered(trainer):
        for i, rollout in enumerate(record.rollouts):
            rows = _compared(rollout, record.law, weights)
            if not rows:
                continue
            like, tempered = _scored(rollout, record.law, model, i)
            said.append(torch.tensor(rollout.logprob)[rows])
            same.append(like[rows])
            own.append(tempered[rows])
            keys += [(i, t) for t in rows]
        ran = rlk.last_decision("linear_logprob")
    if not keys:
        raise ArgumentError("record", f"{record.tokens} tokens", "has none to compare", "Record draws that sample.")
    stated, liked, trained = torch.cat(said), torch.cat(same), torch.cat(own)
    apart = any(_other_law(r.params, record.law) for r in record.rollouts)
    order = (liked - stated).abs().nan_to_num(torch.inf).argsort(descending=True, stable=True)[:WORST]
    named = [(*keys[k], float(stated[k]), float(liked[k])) for k in order.tolist()]
    return Replay(
        model.name,
        record.law,
        record.tokens - len(keys),
        Drift.between(liked, stated),
        Drift.between(trained, stated) if apart else None,
        _places(torch.tensor([t for _, t in keys]), liked, stated),
        tuple(Token(i, t, record.rollouts[i].ids[t], *both) for i, t, *both in named),
        (ran,) if ran is not None else (),
    )


def _compared(rollout: Rollout, law: str, weights: str | None) -> list[int]:
    """Numbers of the drawn tokens that are compared."""
    if rollout.params.temperature == 0 and law != "raw":
        return []
    which = [version for version, n in rollout.weights for _ in range(n)]
    return [t for t in range(len(rollout.ids)) if weights in {None, which[t]}]


def _other_law(params: Params, law: str) -> bool:
    """Whether stated numbers are of another law than the tempered one."""
    tempered = params.temperature in {0.0, 1.0}
    return {"raw": not tempered, "processed": params.filtered, "tempered": False}[law]


def _scored(rollout: Rollout, law: str, model: Model, number: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n] under the stated law and under the tempered one, on the CPU."""
    device, params = model.head.device, rollout.params
    V = params.vocab_size or model.vocab
    if (most := max(*rollout.prompt, *rollout.ids)) >= model.vocab or model.vocab < V:
        said = f"id {most} of {V} in sequence {number}"
        raise ArgumentError("record", said, f"is not of a model with {model.vocab} ids", "Name the model that drew.")
    ids = torch.tensor((*rollout.prompt, *rollout.ids), device=device)
    hidden = model.full(ids[None, :-1])[0, len(rollout.prompt) - 1 :]  # [n, D]
    drawn, head = ids[len(rollout.prompt) :], model.head[:V]
    bias = None if model.bias is None else model.bias[:V]

    def score(temperature: float, **more: Any) -> Tensor:
        return train(head, bias, hidden, drawn, temperature, **more).cpu()

    tempered = score(params.temperature or 1.0)
    if not _other_law(params, law):
        return tempered, tempered
    if law == "raw":
        return score(1.0), tempered
    weight, offset = head.detach().float(), None if bias is None else bias.detach().float()
    blocks = ((at, hidden[at : at + ROWS].float()) for at in range(0, len(drawn), ROWS))
    logits = ((at, torch.nn.functional.linear(block, weight, offset)) for at, block in blocks)
    kept = [_kept(x, params, rollout.seed, rollout.step + at) for at, x in logits]
    counts = torch.cat([count for _, count in kept])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return score(params.temperature, support=rlk.Support(torch.cat([ids for ids, _ in kept]), offsets)), tempered


@torch.no_grad()
def _kept(logits: Tensor, params: Params, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Ids that the filters keep of logits [n, V], row after row, and how many each row has, [n]."""
    names = ("temperature", "top_k", "top_p", "min_p", "filter_order", "tie", "stream")
    law = {name: getattr(params, name) for name in names}
    steps = step + torch.arange(len(logits), device=logits.device)
    draw = rlk.sample(logits, seed=seed, step=steps, kept_capacity=logits.shape[1], **law)
    found = draw.support()
    return found.ids[: int(found.offsets[-1])], found.offsets.diff()


def _places(at: Tensor, trained: Tensor, stated: Tensor) -> tuple[tuple[int, Drift], ...]:
    """Drift by the number of the token in four parts of the longest sequence: does it grow along a sequence?"""
    length = -(-(int(at.max()) + 1) // 4)
    parts = [(first, (at >= first) & (at < first + length)) for first in range(0, int(at.max()) + 1, length)]
    return tuple((first, Drift.between(trained[part], stated[part])) for first, part in parts if part.any())

"""One plain call of every operator, of any number of rows: for clauses that hold whatever an operator computes.

No two sizes are equal, so that an argument of a wrong size cannot fit by chance.
Legend: N rows (sequences, outputs of a weight, requests) · T time · V vocabulary · D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.clauses.rollout_state_machine import fill
from rlkernel_conformance.qmatmul_calls import grid
from rlkernel_conformance.quantized_weights import FAMILIES, MULTIPLIED, STORED, claims
from rlkernel_conformance.subject import Subject, arranged
from rlkernel_core.quant import QuantTensor, quantize
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.spec.advantage_kinds import KINDS as ADVANTAGES
from rlkernel_core.spec.policy_kinds import KINDS as LOSSES

T, V, D = 5, 64, 32


@dataclass(frozen=True)
class Call:
    """A call with values from a seed."""

    seed: int
    N: int = 6

    def normal(self, subject: Subject, *shape: int, salt: int = 0) -> Tensor:
        """Standard normal values in the first claimed dtype."""
        return draw.normal(shape, self.seed + 101 * salt, subject.device, subject.dtypes[0])

    def ids(self, subject: Subject, *shape: int, salt: int = 0) -> Tensor:
        """Token ids."""
        return draw.integers(shape, V, self.seed + 101 * salt, subject.device)

    def given(self, subject: Subject) -> dict[str, Any]:
        """The arguments of the call, made anew."""
        return GIVEN[subject.op](subject, self)

    def run(self, subject: Subject, given: Mapping[str, Any] | None = None) -> Any:
        """Results of the call, or of a short life of what it makes; `given` in place of its arguments."""
        made = subject(**(self.given(subject) if given is None else given))
        return LIVES[subject.op](subject, self, made) if subject.op in LIVES else made


def calls(subject: Subject) -> st.SearchStrategy[Call]:
    """Calls of six rows."""
    return st.builds(Call, seed=st.integers(0, 2**20))


def _first_claimed(subject: Subject, names: Any, prefix: str = "kind") -> str:
    return next(n for n in names if f"{prefix}:{n}" in subject.claims)


def _format(subject: Subject, options: tuple[str, ...]) -> QuantSpec:
    return next(s for family in FAMILIES.values() for s in family if claims(subject, s, options))


def _weight(subject: Subject, case: Call, options: tuple[str, ...]) -> QuantTensor:
    full = draw.normal((2 * case.N, D), case.seed, "cpu", "float32")
    return quantize(full, _format(subject, options)).to(subject.device)


def _logprob(subject: Subject, case: Call) -> dict[str, Any]:
    return {"logits": case.normal(subject, case.N, V), "ids": case.ids(subject, case.N)}


def _head(subject: Subject, case: Call) -> dict[str, Any]:
    return {"hidden": case.normal(subject, case.N, D) / 4, "weight": case.normal(subject, V, D, salt=1)}


def _linear_logprob(subject: Subject, case: Call) -> dict[str, Any]:
    return _head(subject, case) | {"ids": case.ids(subject, case.N)}


def _loss(subject: Subject, case: Call) -> dict[str, Any]:
    def logprobs(salt: int) -> Tensor:
        return -0.1 - case.normal(subject, case.N, T, salt=salt).abs()

    plain = (k for k in ("ppo", "grpo", *LOSSES))
    advantages = case.normal(subject, case.N, T, salt=3)
    return {
        "logprob": logprobs(1),
        "old_logprob": logprobs(2),
        "advantages": advantages,
        "kind": _first_claimed(subject, plain),
    }


def _linear_loss(subject: Subject, case: Call) -> dict[str, Any]:
    given = _loss(subject, case)
    del given["logprob"]
    hidden = case.normal(subject, case.N, T, D, salt=4) / 16
    return given | {
        "hidden": hidden,
        "weight": case.normal(subject, V, D, salt=1),
        "ids": case.ids(subject, case.N, T),
        "old_logprob": given["old_logprob"] - 4,
    }


def _drawn(subject: Subject, case: Call) -> dict[str, Any]:
    return {"seed": torch.arange(case.N, device=subject.device) + case.seed, "step": 1}


def _verify(subject: Subject, case: Call) -> dict[str, Any]:
    drafts = 2
    return {
        "target_logits": case.normal(subject, case.N * (drafts + 1), V),
        "draft_ids": case.ids(subject, case.N * drafts),
        "cu_draft": drafts * torch.arange(case.N + 1, device=subject.device),
        **_drawn(subject, case),
    }


def _advantage(subject: Subject, case: Call) -> dict[str, Any]:
    kinds = (k for k, row in ADVANTAGES.items() if set(row.requires) == {"group"} and k not in {"gdpo", "opo"})
    rewards = case.normal(subject, case.N)
    return {"rewards": rewards, "kind": _first_claimed(subject, kinds), "group": _group(case)}


def _group(case: Call) -> int:
    return 2 if case.N % 2 == 0 else 1 if case.N == 1 else case.N


def _qmatmul(subject: Subject, case: Call) -> dict[str, Any]:
    claimed = [s for family in FAMILIES.values() for s in family if claims(subject, s, MULTIPLIED)]
    grids = ((s, grid(subject, s, subject.dtypes[0])) for s in claimed)
    spec, found = next((pair for pair in grids if pair[1]), (claimed[0], None))  # a check may want tokens quantised too
    rows, columns, _ = found or (1, 1, 1)
    N, K = -(-2 * case.N // rows) * rows, -(-D // columns) * columns
    x, w = case.normal(subject, case.N, K, salt=1), quantize(draw.normal((N, K), case.seed, "cpu", "float32"), spec)
    w = w.to(subject.device)
    return {"x": x, "w": w if subject.admits(x, w) else arranged(w)}


def step(x: Tensor) -> Tensor:
    """A function worth capturing."""
    return x * 2 + 1


GIVEN: Final[Mapping[str, Callable[[Subject, Call], dict[str, Any]]]] = {
    "logprob": _logprob,
    "linear_logprob": _linear_logprob,
    "policy_loss": _loss,
    "linear_policy_loss": _linear_loss,
    "sample": lambda s, c: {"logits": c.normal(s, c.N, V), **_drawn(s, c)},
    "lm_head_sample": lambda s, c: _head(s, c) | _drawn(s, c),
    "verify": _verify,
    "quantize": lambda s, c: {"weight": c.normal(s, 2 * c.N, D), "format": _format(s, ())},
    "dequantize": lambda s, c: {"w": _weight(s, c, STORED)},
    "prepack": lambda s, c: {"w": _weight(s, c, STORED)},
    "qmatmul": _qmatmul,
    "capture": lambda s, c: {"fn": step, "example": (c.normal(s, c.N, 3),)},
    "advantage": _advantage,
    "affine_suffix_scan": lambda s, c: {"b": c.normal(s, c.N, T), "a": c.normal(s, c.N, T, salt=1)},
    "whiten": lambda s, c: {"x": c.normal(s, c.N, T)},
    "group_filter": lambda s, c: {
        "rewards": c.normal(s, c.N),
        "group": _group(c),
        "rule": _first_claimed(s, ("std", "mean", "distinct"), "rule"),
    },
    "shape_rewards": lambda s, c: {"rewards": c.normal(s, c.N)},
    "rollout_buffer": lambda s, c: {"max_tokens": 64 * c.N, "max_seqs": 2 * c.N, "page_tokens": 4, "device": s.device},
}


def _graph(subject: Subject, case: Call, made: Any) -> Any:
    return made(case.normal(subject, case.N, 3, salt=2))


def _buffer(subject: Subject, case: Call, made: Any) -> Any:
    fill(made, subject.device, case.seed % 5, *(1 + i % 3 for i in range(case.N)))
    with made.pop(groups=1) as batch:
        return {n: batch[n] for n in ("token", "logprob", "mask")}  # nothing else uses this buffer


LIVES: Final[Mapping[str, Callable[[Subject, Call, Any], Any]]] = {"capture": _graph, "rollout_buffer": _buffer}

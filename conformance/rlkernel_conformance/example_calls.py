"""One plain call of every operator, of any number of rows: for clauses, tests and comparisons of backends.

No two sizes of a call of six rows are equal but for those that have to be, so that an argument of a wrong size cannot
fit by chance.
Legend: N rows (sequences, requests) · B sequences · T time · V vocabulary · D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.clauses.rollout_state_machine import fill
from rlkernel_conformance.qmatmul_calls import grid
from rlkernel_conformance.quantized_weights import FAMILIES, MULTIPLIED, STORED, claims
from rlkernel_conformance.subject import Subject, arranged
from rlkernel_core.quant import QuantTensor, quantize
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.spec.advantage_kinds import KINDS as ADVANTAGES
from rlkernel_core.spec.brought import BROUGHT
from rlkernel_core.spec.glu import ACTIVATIONS
from rlkernel_core.spec.policy_kinds import KINDS as LOSSES

N = B = 6
T, V, D = 5, 64, 32
REQUIRED: Final[Mapping[str, Any]] = {"clip": (0.2, 0.2), "dro_beta": 0.7}  # of losses without a default for it
Arguments = dict[str, Any]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values in fp32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int = 0, below: int = V) -> Tensor:
    """Token ids, int64."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def logprobs(*shape: int, seed: int) -> Tensor:
    """Log-probabilities, fp32."""
    return -0.1 - draw(*shape, seed=seed).abs()


def tokens() -> Tensor:
    """A token mask [B, T] with a hole and a row of every length but 0."""
    mask = torch.arange(T)[None] < torch.tensor([5, 3, 1, 5, 4, 2])[:, None]
    return mask & (torch.arange(B * T).view(B, T) != 2)


def rewards(count: int = B, seed: int = 0) -> Tensor:
    """Rewards [count] of five values from 0 to 1, never all equal among three neighbors."""
    return torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])[(torch.arange(count) + seed) % 6]


def step(x: Tensor) -> Tensor:
    """A function worth capturing."""
    return x * 2 + 1


@dataclass(frozen=True)
class Example:
    """What an example call is made of: a seed, a number of rows, and the backend whose claims it keeps to.

    Without a backend: fp32 on the CPU, and of kinds and formats the most usual.
    """

    seed: int = 0
    N: int = N
    subject: Subject | None = None

    @property
    def device(self) -> str:
        """Device of every tensor."""
        return self.subject.device if self.subject else "cpu"

    @property
    def outputs(self) -> int:
        """Rows of a quantized weight."""
        return 2 * self.N if self.subject else V

    @property
    def group(self) -> int:
        """A group size: 3 or 2, or all rows where neither divides them."""
        return next((n for n in (3, 2) if self.N % n == 0), self.N)

    def normal(self, *shape: int, salt: int = 0) -> Tensor:
        """Standard normal values in the first claimed dtype."""
        dtype = self.subject.dtypes[0] if self.subject else "float32"
        return draw(*shape, seed=self.seed + 101 * salt).to(self.device, getattr(torch, dtype))

    def ids(self, *shape: int) -> Tensor:
        """Token ids."""
        return ids(*shape, seed=self.seed).to(self.device)

    def rewards(self) -> Tensor:
        """Rewards [N]."""
        return rewards(self.N, self.seed).to(self.normal(1))

    def noise(self, count: int) -> Arguments:
        """Seeds of `count` requests, and a step."""
        return {"seed": torch.arange(count, device=self.device) + self.seed, "step": 1}

    def kind(self, names: Iterable[str], needs: Callable[[str], str], family: str = "kind") -> str:
        """The first of these kinds that is claimed, if possible one whose other needs are claimed too."""
        if self.subject is None:
            return next(iter(names))
        claims = self.subject.claims
        kinds = [name for name in names if f"{family}:{name}" in claims]
        return next((name for name in kinds if not needs(name) or needs(name) in claims), kinds[0])

    def format(self, options: tuple[str, ...] = ()) -> QuantSpec:
        """The first claimed format."""
        if self.subject is None:
            return QuantSpec.named("int4_g32")
        return next(s for family in FAMILIES.values() for s in family if claims(self.subject, s, options))

    def stored(self) -> Arguments:
        """A quantized weight."""
        return {"w": quantize(draw(self.outputs, D, seed=self.seed), self.format(STORED)).to(self.device)}

    def head(self) -> Arguments:
        """Hidden states [N, D] and a head [V, D]."""
        return {"hidden": self.normal(self.N, D) / 4, "weight": self.normal(V, D, salt=1)}

    def loss(self) -> Arguments:
        """What both policy losses take."""
        kind = self.kind(("ppo", "grpo", *LOSSES), lambda k: "" if "token" in LOSSES[k].levels else "level:sequence")
        return {
            "old_logprob": -0.1 - self.normal(self.N, T, salt=2).abs(),
            "advantages": self.normal(self.N, T, salt=3),
            "kind": kind,
            **{name: REQUIRED[name] for name, value in LOSSES[kind].options.items() if value == "required"},
        }


def _linear_policy_loss(e: Example) -> Arguments:
    loss = e.loss()
    loss["old_logprob"] = loss["old_logprob"] - 4  # log V is 4.2
    return {
        **loss,
        "hidden": e.normal(e.N, T, D, salt=4) / 16,
        "weight": e.normal(V, D, salt=1),
        "ids": e.ids(e.N, T),
    }


def _verify(e: Example) -> Arguments:
    """Requests of 1, 1, .. and the rest of the drafts: N rows of logits in all."""
    requests = max(1, e.N // 3)
    starts = torch.tensor([*range(requests), e.N - requests], device=e.device)
    return {
        "target_logits": e.normal(e.N, V),
        "draft_ids": e.ids(e.N - requests),
        "cu_draft": starts,
        **e.noise(requests),
    }


def _whitens(kind: str) -> bool:
    return ADVANTAGES[kind].whiten != "none"


def _advantage(e: Example) -> Arguments:
    kind = e.kind(("grpo", *ADVANTAGES), lambda k: "lengths" if k == "opo" else "whiten" if _whitens(k) else "")
    row = ADVANTAGES[kind]
    given = {
        "group": e.group,
        "values": e.normal(e.N, T, salt=1),
        "ratio": e.normal(e.N, T, salt=2).exp(),
        "baseline": e.normal(e.N, salt=3),
        "step_rewards": e.normal(e.N, salt=4),
        "anchor": e.ids(e.N) % 2,
        "logprob": -0.1 - e.normal(e.N, T, salt=5).abs(),
        "sum_pi_squared": e.normal(e.N, T, salt=6).sigmoid(),
    }
    shapes = {"gdpo": e.normal(e.N, 2), "remax": e.rewards()}
    rewards = shapes.get(kind, e.normal(e.N, T) if row.family == "steps" else e.rewards())
    more: Arguments = {"lengths": torch.arange(e.N, device=e.device) % T + 1} if kind == "opo" else {}
    if "singleton" in row.takes and e.subject is not None and "singleton_zero" not in e.subject.claims:
        more["singleton"] = "any"
    return {"rewards": rewards, "kind": kind, **{name: given[name] for name in row.requires}, **more}


def _qmatmul(e: Example) -> Arguments:
    if e.subject is None:
        return {"x": e.normal(e.N, D), **e.stored()}
    subject, claimed = e.subject, [s for f in FAMILIES.values() for s in f if claims(e.subject, s, MULTIPLIED)]
    grids = ((s, grid(subject, s, subject.dtypes[0])) for s in claimed)
    spec, found = next((pair for pair in grids if pair[1]), (claimed[0], None))  # a check may want tokens quantized too
    rows, columns, _ = found or (1, 1, 1)
    outputs, inputs = -(-e.outputs // rows) * rows, -(-D // columns) * columns
    x = e.normal(outputs, inputs, salt=1)
    w: QuantTensor = quantize(draw(outputs, inputs, seed=e.seed), spec).to(e.device)
    return {"x": x, "w": w if subject.admits(x, w) else arranged(w)}


def _grouped_linear(e: Example) -> Arguments:
    """Three experts, of which one has no rows."""
    ends = torch.tensor([e.N // 2, e.N // 2, e.N], dtype=torch.int32, device=e.device)
    return {"x": e.normal(e.N, D), "weight": e.normal(3, V, D, salt=1), "ends": ends}


def _attention(e: Example) -> Arguments:
    cu_q = torch.tensor([0, e.N // 2, e.N], dtype=torch.int32, device=e.device)
    return {"q": e.normal(e.N, 4, D), "k": e.normal(e.N, 2, D, salt=1), "v": e.normal(e.N, 2, D, salt=2), "cu_q": cu_q}


def _rope(e: Example) -> Arguments:
    table = draw(V, D - 8, seed=e.seed + 303).to(e.device, torch.float32)
    return {"q": e.normal(e.N, 3, D), "k": e.normal(e.N, 1, D, salt=1), "positions": e.ids(e.N), "table": table}


def _rollout_buffer(e: Example) -> Arguments:
    if e.subject is None:
        return {"max_tokens": 64, "max_seqs": 8, "page_tokens": 4}
    return {"max_tokens": 64 * e.N, "max_seqs": 2 * e.N, "page_tokens": 4, "device": e.device}


EXAMPLES: Final[Mapping[str, Callable[[Example], Arguments]]] = {
    "logprob": lambda e: {"logits": e.normal(e.N, V), "ids": e.ids(e.N)},
    "linear_logprob": lambda e: {**e.head(), "ids": e.ids(e.N)},
    "policy_loss": lambda e: {"logprob": -0.1 - e.normal(e.N, T, salt=1).abs(), **e.loss()},
    "linear_policy_loss": _linear_policy_loss,
    "sample": lambda e: {"logits": e.normal(e.N, V), **e.noise(e.N)},
    "lm_head_sample": lambda e: {**e.head(), **e.noise(e.N)},
    "verify": _verify,
    "fake_quantize": lambda e: {"weight": e.normal(e.outputs, D), "format": e.format() if e.subject else "int4_g32"},
    "quantize": lambda e: {"weight": e.normal(e.outputs, D), "format": e.format() if e.subject else "int4_g32"},
    "dequantize": Example.stored,
    "prepack": Example.stored,
    "qmatmul": _qmatmul,
    "capture": lambda e: {"fn": step, "example": (e.normal(e.N, 3),)},
    "advantage": _advantage,
    "affine_suffix_scan": lambda e: {
        "b": e.normal(e.N, T),
        "a": e.normal(e.N, T, salt=1) if e.subject is None or "a_tensor" in e.subject.claims else 0.5,
    },
    "whiten": lambda e: {"x": e.normal(e.N, T)},
    "group_filter": lambda e: {"rewards": e.rewards(), "group": e.group},
    "shape_rewards": lambda e: {"rewards": e.rewards()},
    "rollout_buffer": _rollout_buffer,
    "linear": lambda e: {"x": e.normal(e.N, D), "weight": e.normal(V, D, salt=1)},
    "grouped_linear": _grouped_linear,
    "route": lambda e: {"logits": e.normal(e.N, V), "top_k": 3},
    "divergence": lambda e: {"logits": e.normal(e.N, V), "teacher": e.normal(e.N, V, salt=1)},
    "linear_divergence": lambda e: {
        "hidden": e.normal(e.N, D),
        "weight": e.normal(V, D, salt=1),
        "teacher": e.normal(e.N, V, salt=2),
    },
    "rms_norm": lambda e: {"x": e.normal(e.N, D), "weight": e.normal(D, salt=1), "eps": 1e-6},
    "rope": _rope,
    "attention": _attention,
    "glu": lambda e: {"x": e.normal(e.N, 2 * D), "activation": e.kind(ACTIVATIONS, lambda _: "", "activation")},
}


def base(op: str) -> Arguments:
    """The arguments of a call of six rows, fp32 on the CPU, made anew; a test replaces single ones."""
    return example_of(op)(Example())


def example_of(op: str) -> Callable[[Example], Arguments]:
    """What makes the arguments of an operator's example call; of a plugin's own, `EXAMPLE` of its module of attacks."""
    if op in EXAMPLES:
        return EXAMPLES[op]
    made: Callable[[Example], Arguments] = import_module(str(BROUGHT[op].attacks)).EXAMPLE
    return made


def claimed_choices(subject: Subject, given: Arguments) -> Arguments:
    """The arguments, with the first claimed choice in place of a default that is not claimed: `outputs`, `rule`, ..."""
    spec = subject.spec
    needed = spec.needs(spec.call(**given))
    for name in spec.one_of:
        family = [f for f in spec.family(name) if f in subject.claims]
        if name in spec.parameters and needed.isdisjoint(family) and family:
            given = {**given, name: family[0].partition(":")[2]}
            given |= {"horizon": 7.0} if given[name] == "seq_mean_token_sum_norm" else {}
    return given


@dataclass(frozen=True)
class Call:
    """A call with values from a seed, for the clauses of every operator."""

    seed: int
    N: int = N

    def given(self, subject: Subject) -> Arguments:
        """The arguments of the call, made anew."""
        return claimed_choices(subject, example_of(subject.op)(Example(self.seed, self.N, subject)))

    def run(self, subject: Subject, given: Mapping[str, Any] | None = None) -> Any:
        """Results of the call, or of a short use of what it makes; `given` in place of its arguments."""
        made = subject(**(self.given(subject) if given is None else given))
        return USES[subject.op](subject, self, made) if subject.op in USES else made


def calls(subject: Subject) -> st.SearchStrategy[Call]:
    """Calls of six rows."""
    return st.builds(Call, seed=st.integers(0, 2**20))


def _replay(subject: Subject, case: Call, captured: Any) -> Any:
    return captured(Example(case.seed, case.N, subject).normal(case.N, 3, salt=2))


def _fill_and_pop(subject: Subject, case: Call, buffer: Any) -> Any:
    fill(buffer, subject.device, case.seed % 5, *(1 + i % 3 for i in range(case.N)))
    with buffer.pop(groups=1) as batch:
        return {n: batch[n] for n in ("token", "logprob", "mask")}  # nothing else uses this buffer


# What is done with a result that is no value but an object with methods.
USES: Final[Mapping[str, Callable[[Subject, Call, Any], Any]]] = {"capture": _replay, "rollout_buffer": _fill_and_pop}

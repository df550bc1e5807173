"""One small call of every operator, as a function of tensors alone: what the compiled lane is tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import Penalties

N, T, V, D = 6, 5, 12, 8
random = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


@dataclass(frozen=True)
class Example:
    """A call: `run(*tensors)` under torch.compile; gradients are asked for the tensors at `wanted`."""

    name: str
    run: Callable[..., Any]
    tensors: tuple[Any, ...]
    wanted: tuple[int, ...] = ()
    rows: tuple[int, ...] = (0,)  # tensors whose first dimension is the number of rows


LOGITS, IDS, MASK = draw(N, V), torch.tensor([0, 3, 11, 2, 5, 7]), torch.tensor([True, True, False, True, True, True])
HIDDEN, WEIGHT = draw(N, D), draw(V, D)
OLD, NEW, ADVANTAGES = -draw(N, T).abs(), -draw(N, T).abs(), draw(N, T)
TOKENS = torch.arange(T)[None] < torch.tensor([5, 3, 1, 5, 4, 2])[:, None]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.25])
SUPPORT = Support(torch.arange(3 * N) % V, torch.arange(0, 3 * N + 1, 3))
QUANT = rlk.quantize(WEIGHT, "int4_g32")
LORA = LoRA(draw(2, D), draw(V, 2), 0.5)

EXAMPLES = (
    Example(
        "logprob",
        lambda x, ids, m: rlk.logprob(x, ids, temperature=0.7, mask=m, entropy=True, top_logprobs=3),
        (LOGITS, IDS, MASK),
        (0,),
        (0, 1, 2),
    ),
    Example("logprob", lambda x, ids, s: rlk.logprob(x, ids, support=s), (LOGITS, IDS, SUPPORT), (0,), ()),
    Example(
        "linear_logprob",
        lambda h, w, ids: rlk.linear_logprob(h, w, ids, entropy=True, logit_scale=0.5),
        (HIDDEN, WEIGHT, IDS),
        (0, 1),
        (0, 2),
    ),
    Example(
        "policy_loss",
        lambda new, old, a, m: rlk.policy_loss(new, old, a, mask=m, kind="dapo", clip=(0.2, 0.28)),
        (NEW, OLD, ADVANTAGES, TOKENS),
        (0,),
        (0, 1, 2, 3),
    ),
    Example(
        "linear_policy_loss",
        rlk.linear_policy_loss,
        (draw(N, T, D), WEIGHT, torch.arange(N * T).view(N, T) % V, OLD, ADVANTAGES),
        (0, 1),
        (0, 2, 3, 4),
    ),
    Example(
        "sample",
        lambda x, p, s: rlk.sample(x, temperature=0.8, top_k=5, top_p=p, seed=s, step=1, raw_logprob=True),
        (LOGITS, torch.full((N,), 0.9), torch.arange(N)),
        (),
        (0, 1, 2),
    ),
    Example(
        "sample",
        lambda x, f, i: rlk.sample(x, seed=i, step=1, penalties=Penalties(frequency=f, output_ids=i[:, None])),
        (LOGITS, torch.full((N,), 0.1), IDS),
        (),
        (),
    ),
    Example(
        "lm_head_sample",
        lambda h, w, s: rlk.lm_head_sample(h, w, temperature=0.8, top_p=0.9, seed=s, step=1, entropy=True),
        (HIDDEN, WEIGHT, torch.arange(N)),
        (),
        (0, 2),
    ),
    Example(
        "verify",
        lambda x, ids, cu, s: rlk.verify(x, ids, cu_draft=cu, seed=s, step=1),
        (LOGITS, torch.tensor([0, 3, 11, 2]), torch.tensor([0, 1, 4]), torch.arange(2)),
        (),
        (),
    ),
    Example("quantize", lambda w: rlk.quantize(w, "nf4"), (WEIGHT,), (), ()),
    Example("dequantize", rlk.dequantize, (QUANT,), (), ()),
    Example("prepack", rlk.prepack, (QUANT,), (), ()),
    Example("qmatmul", lambda x, w, a: rlk.qmatmul(x, w, lora=a), (HIDDEN, QUANT, LORA), (0,)),
    Example("advantage", lambda r, m: rlk.advantage(r, kind="grpo", group=3, mask=m), (REWARDS, TOKENS), (), (0, 1)),
    Example(
        "advantage",
        lambda r, v, m: rlk.advantage(r, kind="gae", values=v, mask=m, gamma=0.99, lam=0.95),
        (draw(N, T), draw(N, T), TOKENS),
        (),
        (0, 1, 2),
    ),
    Example("affine_suffix_scan", rlk.affine_suffix_scan, (draw(N, T), draw(N, T)), (0, 1), (0, 1)),
    Example("whiten", lambda x, m: rlk.whiten(x, mask=m), (draw(N, T), TOKENS), (), (0, 1)),
    Example("group_filter", lambda r: rlk.group_filter(r, group=3), (REWARDS,)),
    Example(
        "shape_rewards",
        lambda r, m: rlk.shape_rewards(r, mask=m, clip=(-1.0, 1.0), normalise="running"),
        (REWARDS, TOKENS),
        (),
        (0, 1),
    ),
)


class Graphs:
    """Compiles functions and keeps what was compiled and what its operators were called with."""

    def __init__(self, backend: str) -> None:
        self.modules: list[torch.fx.GraphModule] = []
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self._backend = torch._dynamo.lookup_backend(backend)

    @property
    def count(self) -> int:
        return len(self.modules)

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` under torch.compile, without graph breaks."""
        return torch.compile(run, backend=self._keep, fullgraph=True)

    def operator_nodes(self) -> list[torch.fx.Node]:
        """Nodes of ours."""
        return [n for m in self.modules for n in m.graph.nodes if "rlkernel" in str(n.target)]

    def _keep(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.modules.append(module)
        if self._backend is torch._dynamo.lookup_backend("eager"):
            return Recorder(module, self.calls).run
        return self._backend(module, inputs)


class Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the arguments of our nodes."""

    def __init__(self, module: torch.fx.GraphModule, calls: list[Any]) -> None:
        super().__init__(module)
        self.calls = calls

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the interpreter does."""
        if "rlkernel" in str(target):
            self.calls.append((target, args))
        return super().call_function(target, args, kwargs)


def arguments(example: Example, rows: int | None = None) -> list[Any]:
    """Fresh arguments of an example, cut to a number of rows."""
    cut = [t[:rows] if at in example.rows else t for at, t in enumerate(example.tensors)]
    return [t.detach().clone().requires_grad_() if at in example.wanted else t for at, t in enumerate(cut)]


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a result."""
    from rlkernel.torchlib.call_codec import outline

    return [value] if isinstance(value, Tensor) else outline(value)[1]

"""Example calls as functions of tensors alone: what the compiled lane is tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_conformance.example_calls import B, D, N, T, V, base, draw, ids, tokens
from rlkernel_core.quant import QuantTensor
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import Penalties, TokenLists


@dataclass(frozen=True)
class Example:
    """A call: `run(*tensors)` under torch.compile; gradients are asked for the tensors at `wanted`."""

    name: str
    run: Callable[..., Any]
    tensors: tuple[Any, ...]
    wanted: tuple[int, ...] = ()
    rows: tuple[int, ...] = (0,)  # tensors whose first dimension is the number of rows


def example(op: str, *, cut: bool = True, **change: Any) -> Example:
    """The example call of an operator with some arguments changed; `cut`: it may be called with fewer rows."""
    given = {**base(op), **change}
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor | QuantTensor | Support | LoRA | Penalties)}
    names, spec = tuple(tensors), OPERATORS[op]
    rest = {n: x for n, x in given.items() if n not in tensors}
    call = getattr(rlk, op)

    def run(*values: Any) -> Any:
        return call(**dict(zip(names, values)), **rest)  # noqa: B905  a strict zip is not traced by every torch

    wide = {n for n, x in given.items() if isinstance(x, Tensor) and x.element_size() > 1}  # 8 bits have no gradient
    wanted = tuple(names.index(n) for n in spec.differentiable if spec.carrying and n in wide)
    rows = tuple(i for i, x in enumerate(tensors.values()) if cut and isinstance(x, Tensor) and x.shape[0] == N)
    return Example(op, run, tuple(tensors.values()), wanted, rows)


LOGITS, IDS, MASK = draw(N, V), ids(N), torch.tensor([True, True, False, True, True, True])
HIDDEN, WEIGHT = draw(N, D), draw(V, D, seed=1)
SUPPORT = Support(torch.arange(3 * N) % V, torch.arange(0, 3 * N + 1, 3))
LISTS = TokenLists(ids(9), torch.tensor([0, 2, 2, 5, 6, 8, 8]))
LISTED = {"teacher": draw(N, 3).log_softmax(-1) - 0.5, "teacher_ids": torch.arange(3 * N).view(N, 3)}
EXAMPLES = (
    example("logprob", temperature=0.7, mask=MASK, entropy=True, top_logprobs=3),
    example("logprob", support=SUPPORT, cut=False),
    example("logprob", ids=ids(N, 3), mask=MASK, top_logprobs=3),
    example("logprob", logits=LOGITS.to(torch.float8_e4m3fn), logits_scale=torch.full((N,), 0.5)),
    example("logprob", ids=LISTS, mask=MASK, cut=False),
    example("linear_logprob", entropy=True, logit_scale=0.5),
    example("linear_logprob", ids=ids(N, 3), entropy=True),
    example("linear_logprob", ids=LISTS, entropy=True, cut=False),
    example("linear_logprob", lora=LoRA(draw(2, D), draw(V, 2), 0.5)),
    example("linear_logprob", weight=rlk.quantize(draw(V, D), "nf4")),
    example("policy_loss", mask=tokens(), kind="dapo", clip=(0.2, 0.28)),
    example("linear_policy_loss"),
    example("linear_policy_loss", lora=LoRA(draw(2, D), draw(V, 2), 0.5)),
    example("sample", temperature=0.8, top_k=5, top_p=torch.full((N,), 0.9), raw_logprob=True),
    example("sample", penalties=Penalties(frequency=torch.full((N,), 0.1), output_ids=ids(N, 1)), cut=False),
    example("lm_head_sample", temperature=0.8, top_p=0.9, entropy=True),
    example("lm_head_sample", weight=rlk.quantize(draw(V, D), "nf4")),
    example("verify", cut=False),
    example("quantize", format="nf4", cut=False),
    example("quantize", format=rlk.QuantSpec.named("int4_g32", scale_rule="absmax/7"), cut=False),
    example("fake_quantize", cut=False),
    example("fake_quantize", format="int4_g32_asym", dtype=torch.bfloat16, clipped=True, cut=False),
    example("dequantize", cut=False),
    example("prepack", cut=False),
    example("qmatmul", lora=LoRA(draw(2, D), draw(V, 2), 0.5)),
    example(
        "qmatmul",
        lora=LoRA(draw(2, 2, D), draw(2, V, 2), 0.5),
        lora_ends=torch.tensor([1, N - 1], dtype=torch.int32),
    ),
    example("advantage", mask=tokens()),
    example(
        "advantage",
        rewards=draw(B, T),
        kind="gae",
        group=None,
        values=draw(B, T, seed=1),
        mask=tokens(),
        gamma=0.99,
        lam=0.95,
    ),
    example("affine_suffix_scan"),
    example("whiten", mask=tokens()),
    example("group_filter"),
    example("linear", bias=draw(V, seed=4), residual=draw(N, V, seed=5)),
    example("grouped_linear", bias=draw(3, V, seed=4)),
    example("divergence", kind="jsd", beta=0.3, temperature=0.7, mask=MASK),
    example("divergence", kind="reverse_kl", **LISTED),
    example("linear_divergence", kind="tv"),
    example("linear_divergence", backward="save"),
    example("linear_divergence", teacher=draw(N, 7, seed=2), teacher_weight=draw(V, 7, seed=3), mask=MASK),
    example("route"),
    example("route", replay=torch.arange(3 * N).view(N, 3), renormalize=True),
    example("rms_norm"),
    example("glu"),
    example("rope"),
    example("attention"),
    example("attention", window=2, softcap=30.0, sinks=draw(4, seed=5)),
    example("rope", q_weight=draw(D, seed=8), k_weight=draw(D, seed=9), eps=1e-6, interleaved=True),
    example("rms_norm", residual=draw(N, D, seed=5), offset=1.0),
    example("shape_rewards", mask=tokens(), clip=(-1.0, 1.0), normalize="running"),
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

"""`rlkernel warmup`: compile and load what a policy would use, before training or a capture needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer

import rlkernel
from rlkernel.cli.options import Json, Order, dtype_named, ordered, present
from rlkernel.cli.output import print_json, print_table
from rlkernel.probe import device_here
from rlkernel.survey import named
from rlkernel_core.errors import CaptureError, ConfigError, ResolutionError, UnknownNameError
from rlkernel_core.quant.spec import row_of

EXAMPLES: Final = (
    ("rlkernel warmup --tokens 64 --vocab 1000 --hidden 64 --length 32", "every operator at these sizes"),
    ("rlkernel warmup --op qmatmul --tokens 1 --tokens 64 --hidden 256 --json", "one operator, for two batch sizes"),
)
EXITS: Final = {0: "everything that was asked for ran", 1: "nobody takes some operator at these sizes"}

_DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Sizes:
    """What a run will call its operators with."""

    tokens: int = 4096  # rows of a micro-batch, or of a step of decoding
    vocab: int = 32000
    hidden: int = 4096
    length: int = 1024  # tokens of a sequence
    dtype: str = "bfloat16"  # of logits, hidden states and weights
    format: str = "int4_g128"  # of quantized weights


@dataclass(frozen=True)
class Warmed:
    """One operator at one size."""

    op: str
    tokens: int
    target: str | None  # implementation that ran; None if nobody takes the call
    first_s: float  # the first call: what was compiled and loaded is in it
    again_s: float  # the same call once more
    refused: str = ""  # why nobody takes it


def warm(ops: Iterable[str], sizes: Sizes, device: str) -> list[Warmed]:
    """Call operators at the sizes of a run, and their gradients where they have one, as the policy in force chooses.

    Args:
        ops: names of operators with an example; see `EXAMPLES_OF`.
        sizes: what a run will call them with.
        device: torch device string.

    Raises:
        CaptureError: a graph is being captured; what is compiled or loaded in it would break it.
        ConfigError: an operator without an example.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError("warming up compiles and loads, which a capture does not survive; do it before")
    out = []
    for op in ops:
        if op not in EXAMPLES_OF:
            raise ConfigError(
                f"{named(op).name} compiles nothing of its own; operators to warm: {', '.join(EXAMPLES_OF)}"
            )
        out.append(_warmed(op, sizes, device))
    return out


def _warmed(op: str, sizes: Sizes, device: str) -> Warmed:
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    call = EXAMPLES_OF[op](_Maker(sizes, device))
    seconds: list[float] = []
    for _ in range(2):
        began = time.perf_counter()
        try:
            result = call()
        except ResolutionError as error:
            said = (
                [f"{r.backend}: {r.reason.text}" for r in error.decision.rejected] if error.decision else [str(error)]
            )
            return Warmed(op, sizes.tokens, None, 0.0, 0.0, "; ".join(said))
        if result is not None and result.requires_grad:
            result.sum().backward()
        wait()
        seconds.append(time.perf_counter() - began)
    ran = rlkernel.last_decision(op)
    return Warmed(op, sizes.tokens, None if ran is None else ran.target, seconds[0], seconds[1])


class _Maker:
    """Tensors of a run's shapes, with values that every operator takes."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        import torch

        self.torch, self.sizes, self.device = torch, sizes, device
        self.dtype = getattr(torch, sizes.dtype)
        self.sequences = max(1, sizes.tokens // sizes.length)

    def floats(self, *shape: int, dtype: Any = None, grad: bool = False) -> Any:
        """Small numbers, a leaf that wants its gradient where asked."""
        made = self.torch.full(shape, 0.01, dtype=dtype or self.dtype, device=self.device)
        return made.requires_grad_(grad)

    def scores(self) -> Any:  # [B, T] float32
        """One number a token, of whole sequences."""
        return self.floats(self.sequences, self.sizes.length, dtype=self.torch.float32)

    def ids(self, *shape: int) -> Any:
        """The first token of the vocabulary."""
        return self.torch.zeros(shape, dtype=self.torch.int64, device=self.device)

    def weight(self) -> Any:
        """A quantized square weight."""
        return rlkernel.quantize(self.floats(self.sizes.hidden, self.sizes.hidden), self.sizes.format)


def _logprob(m: _Maker) -> Callable[[], Any]:
    x, ids = m.floats(m.sizes.tokens, m.sizes.vocab, grad=True), m.ids(m.sizes.tokens)
    return lambda: rlkernel.logprob(x, ids, entropy=True).logprob


def _head(m: _Maker) -> tuple[Any, Any]:
    return m.floats(m.sizes.tokens, m.sizes.hidden, grad=True), m.floats(m.sizes.vocab, m.sizes.hidden, grad=True)


def _linear_logprob(m: _Maker) -> Callable[[], Any]:
    hidden, weight = _head(m)
    return lambda: rlkernel.linear_logprob(hidden, weight, m.ids(m.sizes.tokens), entropy=True).logprob


def _divergence(m: _Maker) -> Callable[[], Any]:
    x, teacher = m.floats(m.sizes.tokens, m.sizes.vocab, grad=True), m.floats(m.sizes.tokens, m.sizes.vocab)
    return lambda: rlkernel.divergence(x, teacher)


def _linear_divergence(m: _Maker) -> Callable[[], Any]:
    hidden, weight = _head(m)
    teacher, of_teacher = (x.detach() for x in _head(m))
    return lambda: rlkernel.linear_divergence(hidden, weight, teacher, teacher_weight=of_teacher)


def _policy_loss(m: _Maker) -> Callable[[], Any]:
    new, old = m.scores().requires_grad_(), m.scores()
    return lambda: rlkernel.policy_loss(new, old, m.scores(), kind="grpo").loss


def _linear_policy_loss(m: _Maker) -> Callable[[], Any]:
    hidden, weight = _head(m)
    shape = (1, m.sizes.tokens)
    old = m.floats(*shape, dtype=m.torch.float32)
    return lambda: rlkernel.linear_policy_loss(hidden[None], weight, m.ids(*shape), old, old, kind="grpo").loss


def _sample(m: _Maker) -> Callable[[], Any]:
    x, seed = m.floats(m.sizes.tokens, m.sizes.vocab), m.ids(m.sizes.tokens)
    return lambda: rlkernel.sample(x, top_k=50, top_p=0.95, seed=seed, step=0).logprob


def _lm_head_sample(m: _Maker) -> Callable[[], Any]:
    hidden, weight = (x.detach() for x in _head(m))
    return lambda: rlkernel.lm_head_sample(hidden, weight, seed=m.ids(m.sizes.tokens), step=0).logprob


def _advantage(m: _Maker) -> Callable[[], Any]:
    rewards, values = m.scores(), m.scores()
    return lambda: rlkernel.advantage(rewards, kind="gae", values=values, gamma=0.99, lam=0.95).advantages


def _qmatmul(m: _Maker) -> Callable[[], Any]:
    w, x = m.weight(), m.floats(m.sizes.tokens, m.sizes.hidden)
    packed = rlkernel.prepack(w)
    return lambda: rlkernel.qmatmul(x, packed)


def _dequantize(m: _Maker) -> Callable[[], Any]:
    w = m.weight()
    return lambda: rlkernel.dequantize(w, dtype=m.dtype)


def _quantize(m: _Maker) -> Callable[[], Any]:
    weight = m.floats(m.sizes.hidden, m.sizes.hidden)

    def call() -> None:
        rlkernel.quantize(weight, m.sizes.format)

    return call


def _fake_quantize(m: _Maker) -> Callable[[], Any]:
    weight = m.floats(m.sizes.hidden, m.sizes.hidden, grad=True)
    return lambda: rlkernel.fake_quantize(weight, m.sizes.format)


def _linear(m: _Maker) -> Callable[[], Any]:
    D = m.sizes.hidden
    x, weight = m.floats(m.sizes.tokens, D, grad=True), m.floats(D, D, grad=True)
    residual = m.floats(m.sizes.tokens, D, grad=True)
    return lambda: rlkernel.linear(x, weight, residual=residual)


def _grouped_linear(m: _Maker) -> Callable[[], Any]:
    D, experts = m.sizes.hidden, 8
    x, weight = m.floats(m.sizes.tokens, D, grad=True), m.floats(experts, D, D, grad=True)
    ends = m.torch.arange(1, experts + 1, device=x.device, dtype=m.torch.int32) * (m.sizes.tokens // experts)
    return lambda: rlkernel.grouped_linear(x, weight, ends)


def _rms_norm(m: _Maker) -> Callable[[], Any]:
    x, weight = m.floats(m.sizes.tokens, m.sizes.hidden, grad=True), m.floats(m.sizes.hidden, grad=True)
    return lambda: rlkernel.rms_norm(x, weight, eps=1e-6).y


def _rope(m: _Maker) -> Callable[[], Any]:
    tokens, D = m.sizes.tokens, 128
    q, k = m.floats(tokens, 32, D, grad=True), m.floats(tokens, 8, D, grad=True)
    table, weight = m.floats(m.sizes.length, D, dtype=m.torch.float32), m.floats(D, grad=True)

    def call() -> Any:
        out = rlkernel.rope(q, k, m.ids(tokens), table, q_weight=weight, k_weight=weight, eps=1e-6)
        return out.q.sum() + out.k.sum()

    return call


def _attention(m: _Maker) -> Callable[[], Any]:
    tokens, D = m.sizes.tokens, 128
    q, k, v = (m.floats(tokens, heads, D, grad=True) for heads in (32, 8, 8))
    cu_q = m.torch.tensor([0, tokens], dtype=m.torch.int32, device=q.device)
    return lambda: rlkernel.attention(q, k, v, cu_q=cu_q).out


def _glu(m: _Maker) -> Callable[[], Any]:
    x = m.floats(m.sizes.tokens, 2 * m.sizes.hidden, grad=True)
    return lambda: rlkernel.glu(x, activation="silu")


# operator -> a call of it, at the sizes of a run
EXAMPLES_OF: Final[Mapping[str, Callable[[_Maker], Callable[[], Any]]]] = {
    "logprob": _logprob,
    "linear_logprob": _linear_logprob,
    "divergence": _divergence,
    "linear_divergence": _linear_divergence,
    "policy_loss": _policy_loss,
    "linear_policy_loss": _linear_policy_loss,
    "sample": _sample,
    "lm_head_sample": _lm_head_sample,
    "advantage": _advantage,
    "affine_suffix_scan": lambda m: lambda: rlkernel.affine_suffix_scan(m.scores(), m.scores()).y,
    "whiten": lambda m: lambda: rlkernel.whiten(m.scores()).y,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "attention": _attention,
    "glu": _glu,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "fake_quantize": _fake_quantize,
    "qmatmul": _qmatmul,
}


def command(
    *,
    op: Annotated[
        list[str] | None, typer.Option(help="Operator; may be given several times. All that compile, unless given.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of a batch; may be given several times.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=1, help="Tokens of the vocabulary.")] = Sizes.vocab,
    hidden: Annotated[int, typer.Option(min=1, help="Width of hidden states and of square weights.")] = Sizes.hidden,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = Sizes.length,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Of logits, hidden states and weights.")
    ] = Sizes.dtype,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="Of quantized weights.")] = Sizes.format,  # noqa: A002
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="DEVICE", help="A device that is here; default cuda if torch sees one, else cpu."
        ),
    ] = None,
    order: Order = None,
    json: Json = False,
) -> None:
    """Compile and load what the policy in force would use, for the shapes of a run.

    Each operator is called twice, with its gradient where it has one: the first
    time is what a run's first step would have waited for. What is compiled
    stays in the caches of its compiler for the processes that follow. Libraries
    that build kernels at their first call are refused inside a capture; this is
    the call before it.
    """
    row_of(format)
    with ordered(order):
        if dtype_named(dtype) not in _DTYPES:
            raise UnknownNameError("dtype", dtype, _DTYPES)
        where = device_here() if device is None else present(device)
        found = [
            row
            for rows in tokens or [Sizes.tokens]
            for row in warm(op or EXAMPLES_OF, Sizes(rows, vocab, hidden, length, dtype, format), where)
        ]
    if json:
        print_json({"warmed": [asdict(w) for w in found], "seconds": sum(w.first_s for w in found)})
    else:
        rows = [
            [
                w.op,
                str(w.tokens),
                f"{w.first_s:.2f} s",
                f"{1000 * w.again_s:.1f} ms",
                w.target or f"nobody: {w.refused}",
            ]
            for w in found
        ]
        print_table(["operator", "tokens", "first", "again", "ran"], rows)
    if any(w.target is None for w in found):
        raise typer.Exit(1)

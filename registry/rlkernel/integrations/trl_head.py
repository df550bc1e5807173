"""What stands where TRL's tiled head stood: `linear_logprob`, and the metrics that it does not compute.

Where a trainer has said what the loss will be (`fusing`), it is `linear_policy_loss` instead: loss and gradient are
made together, with a matmul less, and what goes back to TRL are log-probabilities without a gradient.

    log sum_j p_j^2 = lse(2 z) - 2 lse(z):  a second lse at half the temperature
    mean_j z_j = (hidden . mean(weight) + mean(bias)) * scale / T without a softcap: one row instead of V
    is_top1: settled where p > 1/2; the other tokens look for their argmax, in tiles

Legend: N tokens · D hidden · V vocabulary · B sequences · T completion length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, asked_of, replaced
from rlkernel_core import checks
from rlkernel_core.errors import HostError
from rlkernel_core.spec.linear_logprob import BACKWARD
from rlkernel_core.spec.policy_loss import LossResult

if TYPE_CHECKING:
    from torch import Tensor

# The one global of TRL that is replaced: the function that computes log-probabilities from hidden states.
HEAD: Final = Symbol("trl.trainer.utils", "_ChunkedLogProbFunction")

# The versions of TRL and the symbols of it that this integration was made for.
HOST: Final = Host(
    name="trl",
    distribution="trl",
    versions=">=1.16.0,<1.17",
    tested="1.16.0",
    does="linear_logprob under GRPO, RLOO, DPO, KTO and SFT; advantage and policy_loss in grpo_trainer()",
    symbols=(
        HEAD,
        Symbol(
            "trl.trainer.utils",
            "_ChunkedLogProbFunction.forward",
            "ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, "
            "outputs",
        ),
        Symbol("trl.trainer.utils", "add_fused_lm_head", "model, temperature, cast_lm_head_to_fp32, outputs"),
    ),
)
ROWS: Final = 4096  # tokens of a tile, as in TRL
_METRICS: Final = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass
class Wanted:
    """The loss that a trainer wants of the tokens that the head is about to see."""

    counted: Tensor  # [B, T] bool: completion tokens, which TRL scores
    mask: Tensor  # [B, T] bool: those in the loss
    per_token: dict[str, Tensor | None]  # [B, T]: old_logprob, ref_logprob, advantages ([B] too)
    options: dict[str, Any]  # of linear_policy_loss
    packed: bool  # whether TRL picks the counted tokens, as it does on a GPU, or takes all
    result: LossResult | None = None

    def laid_out(self, n: int) -> dict[str, Any]:
        """Arguments in the layout of n rows: packed [N], or padded on the left to [B, n / B]."""
        import torch

        given = {"mask": self.mask, **{name: x for name, x in self.per_token.items() if x is not None}}
        if self.packed:
            lengths = self.counted.sum(-1)
            starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            rows = {name: x[:, None] if x.dim() == 1 else x[self.counted] for name, x in given.items()}
            return {**rows, "cu_seqlens": starts}
        missing = n // len(self.mask) - self.mask.shape[1]
        return {name: x if x.dim() == 1 else torch.nn.functional.pad(x, (missing, 0)) for name, x in given.items()}


class LinearHead:
    """The interface of TRL's autograd function: `apply` with its arguments, and its five results."""

    def __init__(self, calls: Counter[str], backward: str = "auto") -> None:
        self.calls, self.backward = calls, backward
        self.wanted: Wanted | None = None

    @contextmanager
    def fusing(self, wanted: Wanted) -> Iterator[None]:
        """The next call is of a training step with this loss."""
        self.wanted = wanted
        try:
            yield
        finally:
            self.wanted = None

    def apply(
        self,
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _METRICS,
    ) -> tuple[Tensor | None, ...]:
        """Log-probabilities [N] and, where `outputs` names them, entropy and the metrics, which have no gradient.

        Raises:
            HostError: the head is partitioned by DeepSpeed ZeRO-3, which gathers it for the forward pass alone.
        """
        import torch

        import rlkernel as rlk

        if hasattr(weight, "ds_id"):
            raise HostError(
                "trl: DeepSpeed ZeRO-3 takes the head away before the backward pass of linear_logprob; "
                "use ZeRO-2 or FSDP2, or leave rlkernel.integrations.trl.enabled() away"
            )
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        law: dict[str, Any] = {"bias": bias, "softcap": final_logit_softcapping, "logit_scale": logit_scale}
        if self.wanted is not None:
            with torch.autocast(device, enabled=False):
                return self._fused(self.wanted, hidden, weight, targets, temperature, law)
        with torch.autocast(device, enabled=False):
            wanted = "entropy" in outputs
            out = rlk.linear_logprob(
                hidden, weight, targets, temperature=temperature, entropy=wanted, backward=self.backward, **law
            )
            self.calls["linear_logprob"] += 1
            with torch.no_grad():
                squares = means = top = None
                if "log_sum_sq_probs" in outputs:
                    twice = rlk.linear_logprob(hidden, weight, targets, temperature=temperature / 2, **law)
                    self.calls["linear_logprob"] += 1
                    twice_lse, lse = (asked_of("linear_logprob", "lse", x.lse) for x in (twice, out))
                    squares = twice_lse - 2 * lse
                if "mean_logits" in outputs:
                    means = _mean(hidden, weight, bias, chunk_size, final_logit_softcapping, logit_scale) / temperature
                if "is_top1" in outputs:
                    top = _is_top1(hidden, weight, bias, targets, out.logprob, chunk_size)
        return out.logprob, out.entropy, squares, means, top

    def _fused(
        self, wanted: Wanted, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, law: dict[str, Any]
    ) -> tuple[Tensor | None, ...]:
        import rlkernel as rlk

        given = wanted.laid_out(len(targets))
        shape = given["mask"].shape
        wanted.result = rlk.linear_policy_loss(
            hidden.view(*shape, -1),
            weight,
            targets.view(shape),
            given.pop("old_logprob", None),
            given.pop("advantages"),
            temperature=temperature,
            entropy=True,
            **given,
            **law,
            **wanted.options,
        )
        self.calls["linear_policy_loss"] += 1
        logprob, entropy = wanted.result.logprob, wanted.result.entropy
        return None if logprob is None else logprob.view(-1), None if entropy is None else entropy.view(-1), *[None] * 3


@contextmanager
def enabled(*, backward: str = "auto", force: bool = False) -> Iterator[Active]:
    """TRL's trainers score tokens by `rlkernel.linear_logprob` inside the block; which kernel that is, policy says.

    Args:
        backward: of `linear_logprob`: "save" keeps the logits for the backward pass, which is faster and takes 2 bytes
            a token and id of the vocabulary; "recompute" and "auto" compute them again.
        force: take a version of TRL outside the window, too, if its symbols are what they were.

    Raises:
        ArgumentError: no such way backward.
        HostError: TRL is absent, of a version that this was not made for, or has changed; or on leaving, no trainer
            has scored a token inside the block.
    """
    checks.choice("backward", backward, BACKWARD)

    def make(_: Any, calls: Counter[str]) -> Any:
        return LinearHead(calls, backward)

    def idle() -> str:
        return "no trainer scored a token there; it has to train inside, wherever it was made: trainer.train()"

    with replaced(HOST, HEAD, make, idle=idle, force=force) as entry:
        yield entry


def _is_top1(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, logprob: Tensor, chunk: int
) -> Tensor:
    """Whether each target is the most likely id, the first of equals: scale, cap and temperature keep the order."""
    import torch

    top = logprob > -math.log(2)
    for rows in torch.split((~top).nonzero().squeeze(-1), ROWS):
        best = torch.full((len(rows),), -math.inf, device=hidden.device)
        first = torch.zeros_like(rows)
        for start, x in _tiles(hidden[rows], weight, bias, chunk):
            value, at = x.max(-1)
            better = value > best
            best, first = torch.where(better, value, best), torch.where(better, at + start, first)
        top[rows] = first == targets[rows]
    return top


def _mean(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, softcap: float | None, scale: float
) -> Tensor:
    """Mean over the vocabulary of the logits before the temperature, [N]."""
    import torch

    if softcap is None:
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return (mean if bias is None else mean + bias.mean(dtype=torch.float32)) * scale
    sums = torch.zeros(len(hidden), device=hidden.device)
    for rows, total in zip(torch.split(hidden, ROWS), torch.split(sums, ROWS), strict=True):
        for _, x in _tiles(rows, weight, bias, chunk):
            total.add_((softcap * torch.tanh(x * scale / softcap)).sum(-1))
    return sums / weight.shape[0]


def _tiles(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, weight.shape[0], chunk):
        x = hidden @ weight[start : start + chunk].T
        yield start, (x if bias is None else x + bias[start : start + chunk]).float()

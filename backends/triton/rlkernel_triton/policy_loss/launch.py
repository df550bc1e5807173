"""policy_loss@1 in Triton: one launch over the batch and one over its partial sums; backward scales what was written.

A token costs 4 bytes of gradient and what it reads, each tensor once; a ratio per sequence reads its row again, which
by then lies in a cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import policy_loss as spec
from rlkernel_core.spec.policy_loss import LossConfig, LossResult, PolicyLossCall
from rlkernel_triton.affine_suffix_scan.launch import refused_float64
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.policy_loss.batch import LossBatch, scaled


def policy_loss(call: PolicyLossCall) -> LossResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: PolicyLossCall) -> Callable[[PolicyLossCall], LossResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.policy_loss.PolicyLossCall`."""
    if gradient_wanted("policy_loss", call):
        return PolicyLossPair(call)
    host = Host(spec.configure(call), call.logprob.shape, call.logprob.device, (False, False))
    return lambda call: host.forward(call)[0]


class PolicyLossPair(Pair[PolicyLossCall, LossResult]):
    """The loss with its gradient by log-probability and by entropy."""

    op = "policy_loss"

    def __init__(self, call: PolicyLossCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._dtypes = [None if x is None else x.dtype for x in self.inputs(call)]
        self._host = Host(spec.configure(call), call.logprob.shape, call.logprob.device, self.wanted)

    def forward(self, call: PolicyLossCall) -> tuple[LossResult, Saved]:
        """The loss, and what its gradients are multiples of."""
        return self._host.forward(call)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Scale what forward made."""
        (g,) = grads
        found = zip(saved, self._dtypes, strict=True)
        plan = self._host.plan
        return tuple(
            [scaled(x, g, dtype, plan) if x is not None and g is not None and dtype else None for x, dtype in found]
        )

    @classmethod
    def saved_like(cls, call: PolicyLossCall, result: LossResult, wanted: tuple[bool, ...]) -> Saved:
        """One number a token for each gradient that is wanted."""
        of = zip(cls.inputs(call), wanted, strict=True)
        return tuple([result.loss.new_empty(x.shape) if x is not None and wants else None for x, wants in of])


class Host:
    """What the host does for calls of one shape.

    Args:
        config: what they are configured as.
        shape: of their log-probabilities.
        device: of their log-probabilities.
        wanted: whether the gradients by log-probability and by entropy are.
    """

    def __init__(
        self, config: LossConfig, shape: torch.Size, device: torch.device, wanted: tuple[bool, ...]
    ) -> None:  # fmt: skip
        self._config, self._shape, self._device = config, shape, device
        self.plan, self._wanted = Plan(launcher_for(device)), wanted

    def forward(self, call: PolicyLossCall) -> tuple[LossResult, tuple[Tensor | None, ...]]:
        """The result, and d loss / d logprob and d loss / d entropy where they are wanted."""
        logprob, entropy = call.logprob, call.entropy
        with torch.no_grad():
            batch = LossBatch.of(call, self._config, logprob, before=logprob, plan=self.plan)
            partials = batch.partials(self._device)
            # Tokens outside of all sequences are in no program of a ratio per sequence.
            room = torch.zeros if call.cu_seqlens is not None and self._config.level == "sequence" else torch.empty
            dlogprob, dentropy = known = tuple(
                [
                    room(self._shape, dtype=torch.float32, device=self._device) if wants else None
                    for wants in self._wanted
                ]
            )
            current = None if entropy is None else entropy.detach().contiguous()
            batch.run(logprob.detach().contiguous(), current, dlogprob, dentropy, partials)
            value, stats = batch.summary(partials, entropy=entropy is not None)
        return LossResult(value, stats), known


def fits(call: PolicyLossCall) -> Reason | None:
    """The state is fp32: a call with a float64 log-probability or entropy is for another implementation."""
    return refused_float64({"logprob": call.logprob, "entropy": call.entropy})

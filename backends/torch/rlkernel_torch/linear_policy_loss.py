"""linear_policy_loss@1 in plain torch: one pass over the head where that is legal, else the two operators in a row.

One pass (fused_loss.py) makes the gradient with the loss: three matmuls, an fp32 gradient of the weight and the logits
of a block of rows, constant in N. The way through linear_logprob costs five matmuls, or three where it may keep the
logits (max_workspace_bytes). It is taken for sequence-level ratios, for a support, where a rollout is compared with
the current policy itself, and where the workspace is too small for one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_common.kept_ids import readable
from rlkernel_common.known_gradient import scaled
from rlkernel_common.loss_batch import prepare
from rlkernel_common.row_selection import choose
from rlkernel_common.row_statistics import accumulator, temperatures
from rlkernel_common.sequences import layout
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.logprob import LogprobResult, Support
from rlkernel_core.spec.policy_loss import LossConfig, LossResult, PolicyLossCall
from rlkernel_torch.fused_loss import FusedLoss, Gradients, workspace
from rlkernel_torch.head import Head
from rlkernel_torch.linear_logprob import LinearLogprobPair, linear_logprob, matrices
from rlkernel_torch.loss_coefficients import coefficients, summary
from rlkernel_torch.policy_loss import evaluated, full_mask


def linear_policy_loss(call: LinearPolicyLossCall) -> LossResult:
    """The operator's contract is `rlkernel_core.spec.linear_policy_loss.LinearPolicyLossCall`.

    `fused_loss.workspace` and `linear_logprob.workspace` state the extra memory. dW is rounded once; dX once when it
    is made and once more where an upstream gradient that is no power of two scales it.
    """
    if gradient_wanted("linear_policy_loss", call):
        return LinearPolicyLossPair(call)(call)
    law = linear_logprob(_head_of(call))
    return _after(evaluated(_loss_of(call, law))[0], law)


class LinearPolicyLossPair(Pair[LinearPolicyLossCall, LossResult]):
    """The loss with the gradients of its operands, or with what they are made of where one pass cannot make them."""

    op = "linear_policy_loss"

    def __init__(self, call: LinearPolicyLossCall) -> None:
        """Keep the dtypes of calls of this shape, and which way they go."""
        super().__init__(call)
        self._dtypes = [None if x is None else x.dtype for x in self.inputs(call)]
        self._head = None if _in_one_pass(call) else LinearLogprobPair(_head_of(call))

    @classmethod
    def inputs(cls, call: LinearPolicyLossCall) -> Saved:
        """Hidden states, weight, bias, and A and B of LoRA."""
        return call.hidden, call.weight, call.bias, *matrices(call)

    def forward(self, call: LinearPolicyLossCall) -> tuple[LossResult, Saved]:
        """The loss; and its gradients, or what those of the head need and its gradients by the results of the head."""
        if self._head is None:
            return _one_pass(call, self.wanted)
        law, saved = self._head.forward(_head_of(call))
        result, at = evaluated(_loss_of(call, law))
        return _after(result, law), (at.dlogprob, at.dentropy, *saved)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Scale what forward made, and take it through the head where that is left to do."""
        (g,) = grads
        if self._head is None:
            found = zip(saved, self._dtypes, strict=True)
            return tuple(
                [scaled(x, g, kind) if x is not None and g is not None and kind else None for x, kind in found]
            )
        dlogprob, dentropy, *rest = saved
        up = [None if x is None or g is None else scaled(x, g, x.dtype) for x in (dlogprob, dentropy)]
        return self._head.backward(tuple(rest), (up[0], None, up[1], None))

    @classmethod
    def saved_like(cls, call: LinearPolicyLossCall, result: LossResult, wanted: tuple[bool, ...]) -> Saved:
        """Gradients in the precision of the sums; or two numbers a token, and what linear_logprob saves."""
        logprob, entropy = result.logprob, result.entropy
        if logprob is None:
            raise RLKernelError("linear_policy_loss: a result without log-probabilities")
        if _in_one_pass(call):
            hidden, *others = (x if wants else None for x, wants in zip(cls.inputs(call), wanted, strict=True))
            d_hidden = None if hidden is None else torch.empty_like(hidden, memory_format=torch.contiguous_format)
            return d_hidden, *[None if x is None else logprob.new_empty(x.shape) for x in others]
        law = LogprobResult(logprob, logprob, entropy)
        head = LinearLogprobPair.saved_like(_head_of(call), law, wanted)
        return torch.empty_like(logprob), None if entropy is None else torch.empty_like(entropy), *head


def _in_one_pass(call: LinearPolicyLossCall) -> bool:
    """Whether a call that wants gradients makes them together with the loss."""
    (V, D), r = call.weight.shape, 0 if call.lora is None else call.lora.A.shape[0]
    itemsize, limit = accumulator(call.hidden, call.weight, call.bias).itemsize, call.max_workspace_bytes
    fits = limit is None or workspace(call.ids.numel(), D, V, itemsize, r) <= limit
    return fits and _per_token(spec.configure(call), call.support, call.old_logprob, call.rollout_logprob)


def _mask_of(call: LinearPolicyLossCall) -> Tensor | None:
    """[N] or [B, T] tokens that count; None: all."""
    if call.mask is None and call.cu_seqlens is None:
        return None
    shape = tuple(call.ids.shape)
    return full_mask(call.mask, shape, layout(shape, call.cu_seqlens), call.ids.device)


def _head_of(call: LinearPolicyLossCall) -> LinearLogprobCall:
    return LinearLogprobCall.of(call, mask=_mask_of(call))


def _loss_of(call: LinearPolicyLossCall, law: LogprobResult) -> PolicyLossCall:
    return PolicyLossCall.of(call, logprob=law.logprob, entropy=law.entropy, mask=_mask_of(call))


def _after(result: LossResult, law: LogprobResult) -> LossResult:
    return LossResult(result.loss, result.stats, law.logprob, law.entropy)


@torch.no_grad()
def _one_pass(call: LinearPolicyLossCall, wanted: tuple[bool, ...]) -> tuple[LossResult, Saved]:
    """The loss, and the gradients of hidden, weight, bias, A and B that are wanted."""
    hidden, weight, ids, bias = call.hidden, call.weight, call.ids, call.bias
    config, (A, B) = spec.configure(call), matrices(call)
    shape, (V, D) = tuple(ids.shape), weight.shape
    sequences, mask = layout(shape, call.cu_seqlens), _mask_of(call)
    dtype = accumulator(hidden, weight, bias)
    whole = full_mask(call.mask, shape, sequences, ids.device)
    batch = prepare(call, config, sequences, mask=whole, before=call.old_logprob, dtype=dtype)
    shard = vocab_parallel.locate(call.group, V, ids.numel(), D, hidden.device)
    flat_mask = None if mask is None else mask.reshape(-1)
    chosen = choose(ids.reshape(-1), flat_mask, shard.V, None)
    T = temperatures(call.temperature, ids.shape, dtype, hidden.device)
    active = flat_mask.nonzero()[:, 0] if flat_mask is not None and readable(flat_mask) else None
    some = slice(None) if active is None else active  # rows that are worked on
    flat, counted = hidden.reshape(-1, D), chosen.counted if active is None else None
    one_pass = FusedLoss(
        head=Head(flat, weight, bias, call.logit_scale, active, counted, dtype, lora=call.lora),
        ids=chosen.ids[some],
        T=T[some],
        shard=shard,
        softcap=call.softcap,
        entropy=call.entropy,
        batch=batch.at(some),
        config=config,
        partial=call.partial_grad,
    )
    into = Gradients(
        hidden=torch.zeros_like(flat, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight=T.new_zeros(weight.shape) if wanted[1] else None,
        bias=T.new_zeros(V) if wanted[2] else None,
        A=T.new_zeros(A.shape) if A is not None and wanted[3] else None,
        B=T.new_zeros(B.shape) if B is not None and wanted[4] else None,
    )
    values, H = one_pass.run(into)
    values, H = values.view(shape), None if H is None else H.view(shape)
    at = coefficients(values, H, batch, config, sequences)
    value, stats = summary(at, H, batch, config, sequences)
    d_hidden = None if into.hidden is None else into.hidden.view(hidden.shape)
    return LossResult(value, stats, values, H), (d_hidden, into.weight, into.bias, into.A, into.B)


def _per_token(config: LossConfig, support: Support | None, old: Tensor | None, rollout: Tensor | None) -> bool:
    """Whether a token's gradient depends on that token's log-probability alone."""
    return config.level == "token" and support is None and (old is not None or rollout is None)

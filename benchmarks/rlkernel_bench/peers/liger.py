"""Liger-Kernel: Triton cross-entropy over logits, SM90 scaled cross-entropy over hidden states, fused linear GRPO."""

from __future__ import annotations

import torch

from rlkernel_bench.peers import Peer, plain_rows, without_temperature
from rlkernel_bench.work import Call, Inputs, Outputs, Work

_SOURCE = "liger-kernel 0.8.5"


def logprob(work: Work) -> Call:
    """Cross-entropy without a reduction; it writes its gradient over the logits, so gradients are not asked of it."""
    plain_rows(work)
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    without_temperature(work)
    if work.backward:
        raise NotImplementedError("writes the gradient over the logits, which are an input here")

    def run(given: Inputs) -> Outputs:
        loss = LigerCrossEntropyFunction.apply(given["logits"], given["ids"], None, -100, 0.0, 0.0, "none")[0]
        return {"logprob": -loss}

    return run


def linear_logprob(work: Work) -> Call:
    """Per-token negative log-likelihood and entropy; CuTe kernels on Hopper where nvidia-cutlass-dsl is installed."""
    plain_rows(work)
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    entropy = bool(work.options.get("entropy"))

    def run(given: Inputs) -> Outputs:
        made = LigerFusedScaledCrossEntropySM90Function.apply(
            given["hidden"], given["weight"], given["ids"], 1.0, -100, 1, entropy
        )
        return {"logprob": -made[0], "entropy": made[1]} if entropy else {"logprob": -_first(made)}

    return run


def _first(made: object) -> object:
    return made[0] if isinstance(made, tuple) else made


def linear_logprob_fallback(work: Work) -> Call:
    """The same by chunks of 512 tokens in torch, which is what runs without the CuTe kernels."""
    plain_rows(work)
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction

    entropy = bool(work.options.get("entropy"))

    def run(given: Inputs) -> Outputs:
        made = _FusedLinearPPOFallbackFunction.apply(given["hidden"], given["weight"], given["ids"], 1.0, -100, entropy)
        return {"logprob": -made[0], "entropy": made[1]} if entropy else {"logprob": -_first(made)}

    return run


def linear_policy_loss(work: Work) -> Call:
    """GRPO from hidden states, mean over tokens, gradient made in the forward pass."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    made = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=True, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.2, loss_type="bnpo"
    )

    def run(given: Inputs) -> Outputs:
        loss, _ = made(
            given["hidden"],
            given["weight"],
            given["ids"],
            given["mask"],
            given["advantages"],
            old_per_token_logps=given["old_logprob"],
        )
        return {"loss": loss}

    return run


_BETAS = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}


def divergence(work: Work) -> Call:
    """The mean over tokens, from log-probabilities that torch makes; its gradient is made in the forward pass."""
    from liger_kernel.ops.jsd import LigerJSDFunction

    if work.options["K"]:
        raise NotImplementedError("no teacher by a list")
    if not work.backward:
        raise NotImplementedError("a mean of all rows, of which the definition has some: nothing to compare")
    beta = _BETAS[str(work.options["kind"])]

    def run(given: Inputs) -> Outputs:
        log_s, log_t = (torch.log_softmax(given[name].float(), -1) for name in ("logits", "teacher"))
        return {"mean": LigerJSDFunction.apply(log_s, log_t, None, beta)}

    return run


def linear_divergence(work: Work) -> Call:
    """The mean over tokens by chunks; gradients are made in the forward pass."""
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

    beta = _BETAS[str(work.options["kind"])]

    def run(given: Inputs) -> Outputs:
        operands = (given[name] for name in ("hidden", "weight", "teacher", "teacher_weight"))
        return {"mean": LigerFusedLinearJSDFunction.apply(*operands, None, beta)}

    return run


def rms_norm(_work: Work) -> Call:
    """Residual and norm in one kernel, in Llama's casts: s r is rounded before the weight."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    def run(given: Inputs) -> Outputs:
        y, total = LigerFusedAddRMSNormFunction.apply(given["x"], given["residual"], given["weight"], 1e-6)
        return {"y": y, "total": total}

    return run


def glu(_work: Work) -> Call:
    """SwiGLU of halves that are copied first: its kernel writes their gradient over them."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda given: {"y": LigerSiLUMulFunction.apply(*given["x"].chunk(2, -1))}


PEERS = (
    Peer(
        "liger",
        "liger-kernel",
        ("liger_kernel", "triton"),
        {
            "logprob": logprob,
            "linear_logprob": linear_logprob_fallback,
            "linear_policy_loss": linear_policy_loss,
            "divergence": divergence,
            "linear_divergence": linear_divergence,
            "rms_norm": rms_norm,
            "glu": glu,
        },
        f"{_SOURCE}, ops/cross_entropy.py, ops/fused_linear_scaled_cross_entropy.py, chunked_loss/grpo_loss.py, "
        "ops/fused_add_rms_norm.py, ops/swiglu.py, ops/jsd.py, ops/fused_linear_jsd.py",
        ran="liger-kernel 0.8.5: cross-entropy on an H200, the chunked ones on a CPU",
    ),
    Peer(
        "liger sm90",
        "liger-kernel",
        ("liger_kernel", "cutlass"),
        {"linear_logprob": linear_logprob},
        f"{_SOURCE}, ops/cutedsl/ops/fused_scaled_cross_entropy_sm90.py",
        install="pip install 'liger-kernel[cutedsl]'",
    ),
)

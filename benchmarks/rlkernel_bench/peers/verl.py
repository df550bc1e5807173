"""verl: its Triton linear cross-entropy, and its loop of GAE."""

from __future__ import annotations

from types import ModuleType

import torch

from rlkernel_bench.peers import Peer, plain_rows
from rlkernel_bench.peers.files import load
from rlkernel_bench.peers.plain import LONGEST_LOOP
from rlkernel_bench.work import Call, Inputs, Outputs, Work


def linear_logprob(work: Work) -> Call:
    """Log-probability and entropy, fused in Triton; the entropy is always computed."""
    plain_rows(work)
    if work.sizes["D"] % 128:
        raise NotImplementedError("hidden sizes are multiples of 128")
    kernels = _kernels()
    reduction = kernels.get_entropy_reduction_enum_number("none")

    class Fused(torch.autograd.Function):
        """As verl.utils.kernel.linear_cross_entropy calls its kernels."""

        @staticmethod
        def forward(ctx, hidden, weight, labels):  # type: ignore[no-untyped-def, override]  # noqa: ANN001, ANN205
            """Statistics of every row."""
            made = kernels.efficient_entropy_forward(hidden, weight, labels, reduction, 1.0, None)
            ctx.save_for_backward(hidden, weight, labels, *made[2:])
            return made[0], made[1]

        @staticmethod
        def backward(ctx, dlogprob, dentropy):  # type: ignore[no-untyped-def, override]  # noqa: ANN001, ANN205
            """Logits again, then two matmuls a slice."""
            kept = ctx.saved_tensors
            grads = kernels.efficient_entropy_backward(dlogprob, dentropy, *kept, reduction, False, 1.0, None)
            return *grads, None

    def run(given: Inputs) -> Outputs:
        logprob, entropy = Fused.apply(given["hidden"], given["weight"], given["ids"])
        return {"logprob": logprob, "entropy": entropy} if work.options.get("entropy") else {"logprob": logprob}

    return run


def _kernels() -> ModuleType:
    """kernels.py, which needs no more of verl than a few answers about the device."""
    device = {
        "get_device_capability": torch.cuda.get_device_capability,
        "get_device_name": lambda: "cuda",
        "get_torch_device": lambda: torch.cuda,
        "is_cuda_available": torch.cuda.is_available(),
    }
    stubs = {"verl": {"__path__": []}, "verl.utils": {"__path__": []}, "verl.utils.device": device}
    return load("verl", "utils/kernel/kernels.py", stubs=stubs)


def advantage(work: Work) -> Call:
    """compute_gae_advantage_return, returns alone: its advantages come whitened."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    if work.options["kind"] != "gae":
        raise NotImplementedError("its group statistics take one prompt id a row, as strings")
    if work.sizes["T"] > LONGEST_LOOP:
        raise NotImplementedError(f"a Python loop over {work.sizes['T']} steps takes seconds a call")
    gamma, lam = float(work.options["gamma"]), float(work.options["lam"])

    def run(given: Inputs) -> Outputs:
        mask = given["mask"]
        _, returns = compute_gae_advantage_return(given["rewards"], given["values"], mask.float(), gamma, lam)
        return {"returns": torch.where(mask, returns, 0.0)}

    return run


PEERS = (
    Peer(
        "verl",
        "verl",
        ("verl", "triton"),
        {"linear_logprob": linear_logprob, "advantage": advantage},
        "verl 0.9.1, utils/kernel/linear_cross_entropy.py and trainer/ppo/core_algos.py",
    ),
)

"""cuBLAS through torch: the ruler of everything that multiplies matrices."""

from __future__ import annotations

import torch

from rlkernel_bench.peers import Peer
from rlkernel_bench.work import Call, Inputs, Outputs, Work


def logits(work: Work) -> Call:
    """Multiply, `hidden @ weight.T`, in the model's dtype, in one call: what one forward matmul costs here and now."""

    def run(given: Inputs) -> Outputs:
        hidden = given["hidden"].detach()
        return {"logits": hidden.view(-1, hidden.shape[-1]) @ given["weight"].detach().t()}

    return run


def logits_fp32(work: Work) -> Call:
    """The same with the results in fp32, as a fused operator has to see them; a GPU's matmul alone can."""
    if work.backward:
        raise NotImplementedError("one forward product, beside which gradients mean nothing")

    def run(given: Inputs) -> Outputs:
        hidden, weight = given["hidden"].detach(), given["weight"].detach()
        return {"logits": torch.mm(hidden.view(-1, hidden.shape[-1]), weight.t(), out_dtype=torch.float32)}

    return run


def dense(work: Work) -> Call:
    """The product with the weight before it was quantized."""
    return lambda given: {"y_full": given["x"] @ given["weight"].t()}


def linear(work: Work) -> Call:
    """The product alone."""
    del work
    return lambda given: {"y": given["x"] @ given["weight"].t()}


def grouped(work: Work) -> Call:
    """The experts' product with the weights before they were quantized: the device reads where groups end."""
    del work

    def run(given: Inputs) -> Outputs:
        turned = given["weight"].transpose(1, 2)
        return {"y_full": torch.nn.functional.grouped_mm(given["x"], turned, offs=given["ends"])}

    return run


def grouped_linear(work: Work) -> Call:
    """The experts' product alone."""
    del work

    def run(given: Inputs) -> Outputs:
        return {"y": torch.nn.functional.grouped_mm(given["x"], given["weight"].mT, offs=given["ends"])}

    return run


_LINEAR = ("linear_logprob", "linear_policy_loss", "linear_divergence", "lm_head_sample")

PEERS = (
    Peer(
        "cublas",
        "torch",
        ("torch",),
        {**dict.fromkeys(_LINEAR, logits), "qmatmul": dense, "linear": linear},
        "torch.mm",
        ("cpu", "cuda"),
        ran="CPU (torch's own matmul), torch 2.13",
        whole=True,
    ),
    Peer(
        "grouped_mm",
        "torch",
        ("torch",),
        {"experts": grouped, "grouped_linear": grouped_linear},
        "torch.nn.functional.grouped_mm",
        ("cpu", "cuda"),
        ran="CPU, torch 2.13",
    ),
    Peer(
        "cublas fp32",
        "torch",
        ("torch",),
        dict.fromkeys(_LINEAR, logits_fp32),
        "torch.mm(out_dtype=torch.float32)",
        whole=True,
    ),
)

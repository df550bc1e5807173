"""glu against plain torch: their arithmetic has one name in both manifests, and so the bits are the same."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.call_checks import same_results
from rlkernel_core.spec.glu import ACTIVATIONS
from rlkernel_torch import backend as plain
from rlkernel_triton.claims import manifest

SCALES = (1e-3, 1.0, 30.0, 1e4)  # of x: a tile each


def results(activation, dtype, device):
    """The result and the gradient of a call that is drawn anew."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(len(SCALES), 206, generator=g) * torch.tensor(SCALES)[:, None]
    x, up = x.to(device, dtype).requires_grad_(), torch.randn(len(SCALES), 103, generator=g).to(device, dtype)
    y = rlk.glu(x, activation=activation)
    (d_x,) = torch.autograd.grad(y, x, up)
    return {"y": y, "d_x": d_x}


def test_the_arithmetic_has_the_name_that_plain_torch_gives_it() -> None:
    assert {i.sums for b in (plain, manifest("triton", "cuda")) for i in b.impls if i.op == "glu@1"} == {"exp7/f32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients_have_the_bits_of_plain_torch(activation, dtype, device) -> None:
    found = results(activation, dtype, device)
    with rlk.use("torch"):
        same_results(found, results(activation, dtype, device), "beside plain torch")

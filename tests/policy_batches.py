"""Batches for the tests of policy_loss."""

from dataclasses import dataclass

import numpy as np
import torch

from rlkernel_torch.direct import policy_loss


@dataclass
class Batch:
    lp: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    roll: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    adv: np.ndarray


def batch(seed=0, B=4, T=5, spread=0.3, per_token=False, empty=False):
    g = np.random.default_rng(seed)
    lp = -g.uniform(0.05, 2.5, (B, T))
    mask = g.random((B, T)) < 0.75
    mask[:, 0] = True
    if empty:
        mask[1] = False
    return Batch(
        lp=lp,
        old=np.minimum(lp + spread * g.standard_normal((B, T)), -1e-3),
        ref=np.minimum(lp + 0.5 * g.standard_normal((B, T)), -1e-3),
        roll=np.minimum(lp + 0.4 * g.standard_normal((B, T)), -1e-3),
        entropy=g.uniform(0, 3, (B, T)),
        mask=mask,
        adv=g.standard_normal((B, T) if per_token else B),
    )


def tensor(x, dtype=torch.float64, grad=False):
    return None if x is None else torch.tensor(x, dtype=dtype).requires_grad_(grad)


def run(b, *, dtype=torch.float64, ref=False, entropy=False, roll=False, old=True, **options):
    """Loss result and gradients (logprob, entropy) of the operator on a padded batch."""
    lp, h = tensor(b.lp, dtype, grad=True), tensor(b.entropy, dtype, grad=True)
    result = policy_loss(
        lp,
        tensor(b.old, dtype) if old else None,
        tensor(b.adv, dtype),
        mask=torch.tensor(b.mask),
        ref_logprob=tensor(b.ref, dtype) if ref else None,
        entropy=h if entropy else None,
        rollout_logprob=tensor(b.roll, dtype) if roll else None,
        **options,
    )
    result.loss.backward()
    return result, lp.grad, h.grad


def same(a, b, rtol=1e-12, atol=1e-14):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)

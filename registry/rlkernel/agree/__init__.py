"""Do rollout and trainer agree? One model, run token by token by one side and in whole sequences by the other.

    from rlkernel.agree import builtin, measure

    found = measure(builtin(seed=0), rollout=("auto",), trainer=("auto",))
    print(found.drift)

The two sides are different programs on purpose, as a rollout engine and a trainer are: one has a KV cache and a sampler
that says what it drew from, the other sees whole sequences and takes gradients. Drift is how far apart their
log-probabilities of the same tokens under the same weights are, split into what the kernels of the head do (both sides
from the same hidden states) and what the rest of the model adds.

This package may import torch when it is imported; the command line imports it when it is asked for.
"""

from __future__ import annotations

from rlkernel.agree.decoder import builtin
from rlkernel.agree.drift import CLIP, Drift
from rlkernel.agree.sides import Agreement, measure

__all__ = ["CLIP", "Agreement", "Drift", "builtin", "measure"]

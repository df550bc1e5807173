"""Planted bugs where some ids hold one finite number far below the others, as masks do, of four operators."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How

WIDTH: Final = 64  # ids of a tile
LEAST: Final = -1e9  # what a kernel may take for a mask


def overflows(y: Tensor, T: Any) -> Tensor:
    """[...] bool of logits [..., V]: exp2 of a tile is inf, by y log2(e) / T less the tile's largest in fp32.

    The product is exact in a fused multiply-add, and what it is less is rounded: half of its last bit is left.
    """
    rate = torch.as_tensor(T, device=y.device).detach().double()
    rate = math.log2(math.e) / torch.where(rate > 0, rate, 1.0).expand(y.shape[:-1])[..., None]
    wide = torch.nn.functional.pad(y.detach().float(), (0, -y.shape[-1] % WIDTH), value=-torch.inf)
    top = wide.unflatten(-1, (-1, WIDTH)).amax(-1).double() * rate
    return (top - top.float().double() > 128).any(-1)


def quotient_overflows(call: Any) -> Tensor:
    """[...] bool: a finite logit over the temperature is -inf in fp32."""
    x = call.logits.detach().float()
    T = torch.as_tensor(call.temperature, dtype=x.dtype, device=x.device).expand(x.shape[:-1])[..., None]
    return (x.isfinite() & (x / T).isinf()).any(-1)


def spoiled(x: Tensor, bad: Tensor) -> Tensor:
    """Results [...] or [..., K] with NaN in bad rows [...]; lists of any length stay as they are."""
    if x.shape[: bad.dim()] != bad.shape:
        return x
    return torch.where(bad.reshape(*bad.shape, *[1] * (x.dim() - bad.dim())), torch.nan, x)


def bias_overflows(call: Any) -> Tensor:
    """The same of the bias of a head, which its logits are about where it is large."""
    rows = call.hidden.shape[:-1]
    if call.bias is None or call.group is not None:
        return torch.zeros(rows, dtype=torch.bool)
    return overflows((call.bias * call.logit_scale).expand(*rows, -1), call.temperature)


def side_overflows(call: Any) -> Tensor:
    """The same of the logits of a student and its teacher."""
    bad = overflows(call.logits, call.temperature)
    if call.teacher_ids is not None:
        return bad
    return bad | overflows(
        call.teacher, call.temperature if call.teacher_temperature is None else call.teacher_temperature
    )


def spoiled_divergence(right: Any, call: Any) -> Tensor:
    """Rows of which a tile overflows give NaN."""
    return spoiled(right(call), side_overflows(call))


def draws_overflow(call: Any, out: Any) -> Tensor:
    """Log-probabilities of draws, where each row has logits of its own."""
    return out.logprob if call.slot is not None else spoiled(out.logprob, overflows(call.logits, call.temperature))


def without(*names: str) -> How:
    """Numbers far below 0 taken for -inf."""
    return plant.maps(**dict.fromkeys(names, lambda x: torch.where(x < LEAST, -torch.inf, x)))


_ROUNDED: Final = "the largest logit of a tile, rounded, taken from exact products: what is left overflows exp2"
_FORBIDS: Final = "numbers below -1e9 taken for -inf, which their own log-probability is then"

OF_LOGITS: Final = {
    "subtracts_a_rounded_maximum": Bug(
        "LP-39",
        _ROUNDED,
        plant.returns(logprob=lambda c, o: spoiled(o.logprob, overflows(c.logits, c.temperature))),
    ),
    "large_numbers_forbid": Bug("LP-39", _FORBIDS, plant.where(lambda c: c.logits_scale is None, without("logits"))),
    "entropy_of_an_overflow": Bug(
        "LP-39",
        "0 * -inf in the entropy, where a masked logit over the temperature leaves fp32",
        plant.returns(entropy=lambda c, o: spoiled(o.entropy, quotient_overflows(c))),
    ),
    "masked_best_are_minus_infinity": Bug(
        "LP-39",
        "log-probabilities of the most likely ids in base-2 units, which leave fp32 where an id is masked by a number",
        plant.returns(top_logprobs=lambda c, o: torch.where(o.top_logprobs < LEAST, -torch.inf, o.top_logprobs)),
    ),
}
OF_A_HEAD: Final = {
    "subtracts_a_rounded_maximum": Bug(
        "LL-45", _ROUNDED, plant.returns(logprob=lambda c, o: spoiled(o.logprob, bias_overflows(c)))
    ),
    "large_biases_forbid": Bug("LL-45", _FORBIDS, without("bias")),
}
OF_DRAWS: Final = {
    "subtracts_a_rounded_maximum": Bug("SA-41", _ROUNDED, plant.returns(logprob=draws_overflow)),
}
OF_DIVERGENCES: Final = {
    "subtracts_a_rounded_maximum": Bug("DV-25", _ROUNDED, spoiled_divergence),
    "large_numbers_forbid": Bug("DV-25", _FORBIDS, without("logits")),
}

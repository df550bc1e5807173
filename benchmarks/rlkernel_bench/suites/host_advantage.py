"""The calls of `advantage` in the suite `host`: every kind, over groups of rewards and over steps of time.

What trainers write with a loop over time stands here without one: products with a matrix of powers made beforehand, or
sums and products from the end, so that plain torch is held to its best form.

Legend: B sequences of T tokens, G group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from rlkernel_bench.suites.common import Draw
from rlkernel_bench.suites.host_case import Case, suffix, whitened
from rlkernel_bench.work import Inputs, Outputs


def _decay(x: Tensor, factor: float) -> Tensor:  # [T, T], decay[k, t] = factor^(k - t) for k >= t
    t = torch.arange(x.shape[-1], device=x.device)
    return torch.where(t[:, None] >= t, factor ** (t[:, None] - t).clamp(min=0).float(), 0.0)


def _steps(draw: Draw) -> Inputs:
    rewards, values = 0.1 * draw.normal(8, 128), draw.normal(8, 128)
    return {
        "rewards": rewards,
        "values": values,
        "ratio": (0.1 * draw.normal(8, 128)).exp(),
        "baseline": draw.normal(8),
        "logprob": -0.1 - draw.normal(8, 128).abs(),
        "sum_pi_squared": draw.uniform(8, 128),
        "lengths": torch.full((8,), 128, device=draw.device),
        "gae": _decay(rewards, 0.99 * 0.95),
        "returns": _decay(rewards, 0.99),
    }


def _after(values: Tensor) -> Tensor:
    return functional.pad(values[:, 1:], (0, 1))


def _gae(given: Inputs) -> Outputs:
    delta = given["rewards"] + 0.99 * _after(given["values"]) - given["values"]
    return {"advantages": delta @ given["gae"]}


def _vtrace(given: Inputs) -> Outputs:
    values, rho = given["values"], given["ratio"].clamp(max=1.0)
    delta = rho * (given["rewards"] + 0.99 * _after(values) - values)
    targets = values + suffix(delta, 0.99 * rho)
    return {"advantages": rho * (given["rewards"] + 0.99 * _after(targets) - values)}


def _retrace(given: Inputs) -> Outputs:
    values, trace = given["values"], given["ratio"].clamp(max=1.0)
    y = suffix(0.99 * (values + trace * (given["rewards"] - values)), 0.99 * trace)
    return {"advantages": given["rewards"] + _after(y) - values}


def _otb(given: Inputs) -> Outputs:
    togo = given["rewards"].flip(-1).cumsum(-1).flip(-1)
    norm = (1 - 2 * given["logprob"].exp() + given["sum_pi_squared"]).cumsum(-1)
    groups = (togo * norm).view(2, 4, -1).sum(1) / (norm.view(2, 4, -1).sum(1) + 1e-6)
    return {"advantages": togo - groups.repeat_interleave(4, 0)}


def groups(draw: Draw, B: int = 64) -> Inputs:
    """Rewards of groups of 8 side by side, and what some kinds read with them."""
    # Two anchors in each group, so that its steps make groups of four.
    anchor = torch.arange(B, device=draw.device) % 2
    return {
        "rewards": draw.uniform(B),
        "many": draw.uniform(B, 2),
        "lengths": 1 + draw.ids(100, B),
        "step_rewards": draw.uniform(B),
        "anchor": anchor,
        "by_step": (torch.arange(B, device=draw.device) // 8) * 2 + anchor,
        "zeros": torch.zeros(B // 4, device=draw.device),
        "ones": torch.ones(B, device=draw.device),
    }


def _centered(given: Inputs) -> tuple[Tensor, Tensor]:
    x = given["rewards"].view(-1, 8)
    return x, x - x.mean(-1, keepdim=True)


def _grpo(given: Inputs) -> Tensor:
    x, centered = _centered(given)
    return centered / (x.std(-1, keepdim=True) + 1e-6)


def _opo(given: Inputs) -> Tensor:
    x, lengths = given["rewards"].view(-1, 8), given["lengths"].view(-1, 8)
    return x - (x * lengths).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True)


def _maxrl(given: Inputs) -> Tensor:
    x = given["rewards"].view(-1, 8)
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (mean + 1e-6)


def _passk(given: Inputs) -> Tensor:
    x = given["rewards"].view(-1, 8)
    best, at = x.topk(2, -1)
    gain = (best[:, :1] - best[:, 1:]) / (x.std(-1, keepdim=True) + 1e-6)
    return torch.zeros_like(x).scatter_(1, at[:, :1], gain)


def _gpg(given: Inputs) -> Tensor:
    x = given["rewards"]
    return _centered(given)[1] * (len(x) / x.count_nonzero())


def _gdpo(given: Inputs) -> Tensor:
    x = given["many"].view(-1, 8, 2)
    each = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6)
    return whitened(each.sum(-1).flatten())


def _gigpo(given: Inputs) -> Tensor:
    steps, at, zeros = given["step_rewards"], given["by_step"], given["zeros"]
    mean = zeros.index_add(0, at, steps) / zeros.index_add(0, at, given["ones"])
    return _centered(given)[1].flatten() + steps - mean[at]


BY_GROUP: Final[Mapping[str, tuple[Callable[[Inputs], Tensor], str]]] = {  # kind -> plain torch, and in words
    "grpo": (_grpo, "view, mean, std, subtract, divide"),
    "dr_grpo": (lambda g: _centered(g)[1], "view, mean, subtract"),
    "rloo": (lambda g: _centered(g)[1] * (8 / 7), "view, mean, subtract, multiply"),
    "opo": (_opo, "view, two sums, divide, subtract"),
    "maxrl": (_maxrl, "view, mean, subtract, divide"),
    "passk": (_passk, "topk, std, scatter"),
    "gpg": (_gpg, "view, mean, subtract, count_nonzero, multiply"),
    "gdpo": (_gdpo, "GRPO of each of two rewards, their sum, whitened"),
    "reinforce_pp_baseline": (lambda g: whitened(_centered(g)[1]), "view, mean, subtract, whiten"),
    "gigpo": (_gigpo, "mean of the group, mean of the anchor by two index_add, both subtracted"),
}
_MORE: Final[Mapping[str, tuple[str, ...]]] = {"opo": ("lengths",), "gigpo": ("step_rewards", "anchor")}


def by_group(op: Callable[..., Any], given: Inputs, kind: str, group: Any = 8) -> Any:
    """The call of a kind on the inputs of `groups`."""
    rewards = given["many" if kind == "gdpo" else "rewards"]
    return op(rewards, kind=kind, group=group, **{name: given[name] for name in _MORE.get(kind, ())})


def _grouped(kind: str, plain: Callable[[Inputs], Tensor], says: str) -> Case:
    return Case(
        "advantage",
        {"B": 64, "G": 8},
        groups,
        lambda op, g: by_group(op, g, kind),
        lambda r: {"advantages": r.advantages},
        lambda g: {"advantages": plain(g).flatten()},
        says,
        1.5,
        options={"kind": kind},
        graphs=("rewards",) if kind == "grpo" else (),
    )


def _by_step(
    kind: str,
    plain: Callable[[Inputs], Outputs],
    says: str,
    *named: str,
    graphs: tuple[str, ...] = (),
    **numbers: float,
) -> Case:
    return Case(
        "advantage",
        {"B": 8, "T": 128},
        _steps,
        lambda op, g: op(g["rewards"], kind=kind, **{k: g[k] for k in named}, **numbers),
        lambda r: {"advantages": r.advantages},
        plain,
        says,
        1.5,
        options={"kind": kind},
        graphs=graphs,
        batch=25,
    )


ADVANTAGES: Final[tuple[Case, ...]] = (
    *(_grouped(kind, *plain) for kind, plain in BY_GROUP.items()),
    _by_step(
        "gae",
        _gae,
        "shift, subtract, and a product with a matrix of powers made beforehand, in place of the loop over time",
        "values",
        graphs=("rewards", "values"),
        gamma=0.99,
        lam=0.95,
    ),
    _by_step(
        "returns",
        lambda g: {"advantages": g["rewards"] @ g["returns"]},
        "a product with a matrix of powers made beforehand, in place of the loop over time",
        gamma=0.99,
    ),
    _by_step(
        "reinforce_pp",
        lambda g: {"advantages": whitened(g["rewards"] @ g["returns"])},
        "the same product, whitened",
        gamma=0.99,
    ),
    _by_step(
        "remax",
        lambda g: {"advantages": g["rewards"].flip(-1).cumsum(-1).flip(-1) - g["baseline"][:, None]},
        "flip, cumsum, flip, subtract",
        "baseline",
    ),
    _by_step(
        "vtrace",
        _vtrace,
        "products and sums from the end by cumprod and cumsum, in place of the loop over time",
        "values",
        "ratio",
        gamma=0.99,
    ),
    _by_step(
        "retrace",
        _retrace,
        "products and sums from the end by cumprod and cumsum, in place of the loop over time",
        "values",
        "ratio",
        gamma=0.99,
    ),
    _by_step(
        "otb",
        _otb,
        "sums from the end and from the start, sums over the group in every column, divide, subtract",
        "logprob",
        "sum_pi_squared",
        group=4,
    ),
)

"""Ranks that share the layers of an exact decoder: `rlkernel.exact(model, group=...)`.

A model of transformers says itself which layers ranks share (`model.tp_plan`): "colwise" gives a rank rows of the
weight, so columns of the result, "rowwise" columns of the weight. Sums over what is split are added in the order of
`rlkernel.linear(split=...)`, which does not depend on the number of ranks.

What ranks hold alike gets the same gradient on all of them, except the norms within a head, which see only the heads of
their rank: their gradients are summed over the ranks.

Legend: R ranks · N outputs · K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import rlkernel as rlk
from rlkernel.nn.exact import ExactLinear, ExactRMSNorm
from rlkernel_core.errors import HostError
from rlkernel_core.spec.linear_logprob import LEAST_PIECE, PIECES

# What transformers calls it -> the split of `linear`; "" is a norm within a head.
STYLES: Final[dict[str, Literal["row", "column", ""]]] = {
    "colwise": "column", "colwise_gather_output": "column", "rowwise": "row", "replicated_with_grad_allreduce": "",
}  # fmt: skip
LEAST: Final = PIECES * LEAST_PIECE  # ids of a head whose pieces are the same on any number of ranks
GATHERED: Final = "colwise_gather_output"  # whose result every rank has whole


class SplitLinear(torch.nn.Linear):
    """A rank's share of `torch.nn.Linear`, by `rlkernel.linear` in the order of sums of any number of ranks.

    Args:
        linear: the whole layer. Without a group its own parameters stay in use.
        split: "column": [N / R, K] of the weight; "row": [N, K / R].
        group: the ranks; None for one.
        gathers: the result of a column split is made whole.
    """

    def __init__(self, linear: torch.nn.Linear, split: Literal["row", "column"], group: Any, *, gathers: bool) -> None:
        torch.nn.Module.__init__(self)
        self.split, self.group, self.gathers = split, group, gathers
        self.weight, self.bias = linear.weight, linear.bias
        if group is not None:
            self.weight = _share(linear.weight, self.dim, group)
            if linear.bias is not None and split == "column":
                self.bias = _share(linear.bias, 0, group)
        self.out_features, self.in_features = self.weight.shape

    @property
    def dim(self) -> int:
        """The dimension of the weight that is split."""
        return 0 if self.split == "column" else 1

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """`x weight^T + bias`, rounded once."""
        y: Tensor = rlk.linear(x, self.weight, bias=self.bias, group=self.group, split=self.split)
        if self.group is None or not self.gathers:
            return y
        whole: Tensor = _Gathered.apply(y, self.group)  # type: ignore[no-untyped-call]  # torch's
        return whole

    def whole(self, name: str) -> Tensor:
        """`weight` or `bias` of all ranks, a tensor of its own; every rank calls this."""
        mine: Tensor = getattr(self, name).detach()
        if name == "bias" and self.split == "row":
            return mine.clone()
        return _joined(mine, 0 if name == "bias" else self.dim, self.group)

    @staticmethod
    def take(linear: Any) -> None:
        """Free the parameters of the whole layer, whose shares are in use."""
        linear.weight = linear.bias = None

    def give_back(self, linear: Any) -> None:
        """Fill the whole layer with the shares of all ranks; every rank calls this."""
        for name in ("weight", "bias"):
            mine = getattr(self, name)
            if mine is not None:
                setattr(linear, name, torch.nn.Parameter(self.whole(name), requires_grad=mine.requires_grad))

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{super().extra_repr()}, split={self.split}"


class SplitRMSNorm(ExactRMSNorm):
    """A norm within a head: a rank sees its own heads, so the gradient of the weight is summed over the ranks."""

    def __init__(self, norm: ExactRMSNorm, group: Any) -> None:
        super().__init__(norm.weight, norm.eps, norm.offset)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """As `ExactRMSNorm`."""
        weight = _Shared.apply(self.weight, self.group)  # type: ignore[no-untyped-call]  # torch's
        result: Tensor = rlk.rms_norm(x, weight, eps=self.eps, offset=self.offset).y
        return result


def split_layers(model: Any, exact: Mapping[str, torch.nn.Module], group: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Paths and modules that replace exact ones, as the model's plan shares them.

    Args:
        model: of transformers, as it is.
        exact: path -> the module that replaces the one there.
        group: the ranks; None for one, in the same order of sums.

    Raises:
        HostError: the model has no plan, its plan shares what has no exact form, or it cannot be shared by so many.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise HostError(
            f"{type(model).__name__} has no plan of tensor parallelism (tp_plan): pass no group. Nothing was changed"
        )
    if group is not None:
        _check_shares(model, group)
    for path, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatchcase(path, pattern)), None)
        if style is None or isinstance(module, torch.nn.Embedding):
            continue
        split, made = STYLES.get(style), exact.get(path)
        if split and isinstance(made, ExactLinear):
            yield path, SplitLinear(module, split, group, gathers=style == GATHERED)
        elif split == "" and isinstance(made, ExactRMSNorm):
            if group is not None:
                yield path, SplitRMSNorm(made, group)
        else:
            raise HostError(
                f"{path} is a {type(module).__name__} that ranks share as {style!r}, which has no exact form: "
                "exact(group=, split=) takes dense layers. Nothing was changed"
            )


def _check_shares(model: Any, group: Any) -> None:
    config, R = model.config.get_text_config(), group.size()
    heads = config.num_key_value_heads
    if heads % R:
        raise HostError(
            f"{heads} heads of keys cannot be shared by {R} ranks: pass a smaller group. Nothing was changed"
        )
    if config.vocab_size % 8 or config.vocab_size < LEAST:
        raise HostError(
            f"a head of {config.vocab_size} ids has other bits on several ranks: linear_logprob needs a multiple of 8, "
            f"{LEAST} at least. Nothing was changed"
        )
    if config.tie_word_embeddings:
        raise HostError(
            "the head is tied to the embedding, and a share of it cannot be: set tie_word_embeddings=False and give "
            "the head a copy. Nothing was changed"
        )


def _share(whole: Tensor, dim: int, group: Any) -> torch.nn.Parameter:
    mine = whole.detach().chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    return torch.nn.Parameter(mine, requires_grad=whole.requires_grad)


def _parts(x: Tensor, group: Any) -> list[Tensor]:
    """Every rank's x, in rank order."""
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return parts


def _joined(x: Tensor, dim: int, group: Any) -> Tensor:
    return torch.cat(_parts(x, group), dim)


class _Gathered(torch.autograd.Function):
    """The last dimension of all ranks; a rank's gradient is its share of that of the whole, which all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _joined(x, -1, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


class _Shared(torch.autograd.Function):
    """What all ranks hold alike; its gradient is the sum of theirs in rank order, in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(g.dtype, torch.float32)
        total = torch.zeros_like(g, dtype=wide)
        for part in _parts(g.to(wide), ctx.group):
            total += part
        return total.to(g.dtype), None

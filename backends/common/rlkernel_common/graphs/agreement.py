"""Ranks that capture collectives together: the same graph, the same outcome, the same forgetting, or an error on all.

A rank that records another graph than the others, or falls back where they replay, leaves them waiting in a collective.
So before anything of it runs, ranks compare what they are about to capture; afterwards whether each of them could; and
when static tensors are looked at, what moved on any of them. They speak through the store (`rlkernel_core.ranks`): a
rank that does not come is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

from rlkernel_common.graphs.graph import Options
from rlkernel_common.graphs.key import AMBIENT, Reading, StaticKey, TensorKey, ValueKey
from rlkernel_core.errors import CaptureError
from rlkernel_core.ranks import Round, differing, exchange, whole
from rlkernel_core.spec.graphed import CaptureGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Agreement:
    """Of one captured function, with the same one on the other ranks."""

    name: str  # of the function
    ranks: ProcessGroup | None  # None: the default group
    timeout: float

    def before(self, mine: Mapping[str, str]) -> Round:
        """Compare what each rank is about to capture; where the outcome goes.

        Raises:
            CaptureError: not the same on all ranks; the message says what, and on which.
            RankError: a rank did not come.
        """
        if lines := differing(whole(exchange("captures", mine, self.ranks, self.timeout))):
            raise CaptureError(
                f"Ranks are about to capture {self.name} differently, and would wait for each other in its "
                "collectives:\n" + "\n".join(lines) + "\nCall it on every rank with arguments of the same sizes and "
                "values; where fewer ranks take part, say which: group=CaptureGroup(process_group=...)."
            )
        return Round("outcomes of captures", self.ranks, self.timeout)

    def outcome(self, after: Round, failure: str | None) -> str | None:
        """Say how it went here; how it failed on another rank."""
        after.say({"failure": failure or ""})
        others = ((rank, said["failure"]) for rank, said in after.hear().items())
        failed = next(((rank, why) for rank, why in others if why), None)
        return f"rank {failed[0]} could not capture it: {failed[1]}" if failed else None

    def moved(self, mine: Iterable[str]) -> tuple[str, ...]:
        """Static tensors that moved on any rank."""
        said = exchange("static tensors", dict.fromkeys(mine, ""), self.ranks, self.timeout)
        return tuple(sorted({name for there in said.values() for name in there}))


def agreement_of(fn: Any, options: Options, group: CaptureGroup) -> Agreement | None:
    """None where nobody has to agree: no collectives, no process group, or one rank."""
    if not options.collectives or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size(group.process_group) < 2:
        return None
    return Agreement(getattr(fn, "__name__", type(fn).__name__), group.process_group, group.timeout)


def described(reading: Reading, options: Options, static: Mapping[str, Tensor], recorder: object) -> dict[str, str]:
    """Everything that a graph bakes in and that another rank can compare: no address, no value of a tensor."""
    _, leaves, modes, training = reading.key
    about = {
        "implementation": f"{type(recorder).__module__}.{type(recorder).__qualname__}",
        "buckets": str([(bucket.sizes, padded) for bucket, (_, padded) in _buckets(reading, options)]),
        "training flags": str(training),
        "warmup, rng, autograd": f"{options.warmup}, {options.rng}, {options.autograd}",
    }
    about |= {mode: str(value) for mode, value in zip(AMBIENT, modes, strict=True)}
    about |= {f"input {name}": _leaf(key) for name, key in zip(reading.layout.names, leaves, strict=True)}
    return about | {name: f"{list(x.shape)} {x.dtype} {list(x.stride())}" for name, x in static.items()}


def _buckets(reading: Reading, options: Options) -> Iterable[tuple[Any, tuple[int, int]]]:
    return zip(options.buckets, reading.sizes, strict=True)


def _leaf(key: Any) -> str:
    if isinstance(key, TensorKey):
        order = "" if key.order is None else f" in order {list(key.order)}"
        return f"{list(key.shape)} {key.dtype}{order}{' with grad' if key.requires_grad else ''}"
    if isinstance(key, StaticKey):
        return key.name
    return f"{key.cls.__name__} {key}" if isinstance(key, ValueKey) else repr(key)

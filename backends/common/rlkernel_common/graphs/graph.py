"""One graph of one key: its static inputs, its recording, and how a call goes through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from rlkernel_common.graphs.autograd import Latest, replay_with_grad
from rlkernel_common.graphs.buffers import StaticInputs, cut_outputs
from rlkernel_common.graphs.key import Reading
from rlkernel_common.graphs.recorder import Program, Recording
from rlkernel_common.graphs.tally import Tally
from rlkernel_common.graphs.verify import clone_tensors
from rlkernel_core.spec.capture import CaptureCall
from rlkernel_core.spec.graphed import Bucket
from rlkernel_core.tree import LEAF, flatten

Run = Callable[[Sequence[Any]], Any]  # of the leaves of a call, to what the call returns


@dataclass(frozen=True)
class Options:
    """Arguments of capture, with None replaced by empty; see `rlkernel_core.spec.capture`."""

    buckets: Sequence[Bucket]
    pad: Mapping[str, float]
    static: Sequence[Any]
    mutates: Sequence[Any]
    outputs: str
    rng: str
    generators: Sequence[Generator]
    verify: str
    guard: str
    on_guard_fail: str
    on_capture_error: str
    warmup: int
    max_graphs: int
    collectives: bool
    autograd: bool

    @classmethod
    def of(cls, call: CaptureCall) -> Options:
        """Those of a call."""
        given = {f.name: getattr(call, f.name) for f in fields(cls)}
        return cls(**{n: ({} if n == "pad" else ()) if x is None else x for n, x in given.items()})


@dataclass
class Graph:
    """A recording with what it reads."""

    inputs: StaticInputs
    recording: Recording
    program: Program
    used: int  # when last, by `Tally.uses`: the least recently used makes room
    verified: bool = False
    latest: Latest = field(default_factory=Latest)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.inputs.nbytes + self.recording.nbytes

    def replaying(self, reading: Reading, options: Options, tally: Tally) -> Run:
        """What replays calls like this one: fill the inputs, replay, hand out outputs, cut, and cloned if asked for."""
        fill, give = self.inputs.filling(reading), self._giving(reading, options)
        filled, padding = self.inputs.filled_bytes(reading), sum(padded - true for true, padded in reading.sizes)
        replay = self.recording.replay

        def run(leaves: Sequence[Any]) -> Any:
            self.used = tally.uses = tally.uses + 1
            fill(leaves)
            tally.copied_bytes += filled
            replay()
            tally.replays += 1
            tally.pad_rows += padding
            return give()

        def run_with_grad(leaves: Sequence[Any]) -> Any:
            self.used = tally.use()
            fill(leaves)
            tally.copied_bytes += filled
            sources, cut = self._sources(reading, leaves)
            kept, clone = self.recording, options.outputs == "clone"
            outputs = replay_with_grad(kept, self.latest, sources, cut, kept.differentiable, clone)
            tally.replays += 1
            tally.pad_rows += padding
            return cut_outputs(outputs, reading, options.buckets)

        return run_with_grad if self.program.autograd else run

    def _giving(self, reading: Reading, options: Options) -> Callable[[], Any]:
        """What hands out the outputs. They keep their addresses, so that views of them are made once."""
        leaves, structure = flatten(cut_outputs(self.recording.outputs, reading, options.buckets))
        build = structure.builder()
        if options.outputs == "view":
            return lambda: build(leaves)
        if structure == LEAF and isinstance(leaves[0], Tensor):
            clone: Callable[[], Any] = leaves[0].clone
            return clone
        return partial(_build_of_clones, build, leaves, _alike(leaves))

    def plain(self, reading: Reading, options: Options) -> Any:
        """What fn itself returns on clones of the filled inputs."""
        outputs = self.program.call([x.clone() for x in self.inputs.tensors])
        return clone_tensors(cut_outputs(outputs, reading, options.buckets))

    def _sources(
        self, reading: Reading, leaves: Sequence[Any]
    ) -> tuple[list[Tensor], list[Callable[[Tensor], Tensor]]]:
        """Tensors that want gradients, and how a static gradient becomes theirs."""
        copied = zip(self.inputs.copied, self.program.wants_grad, strict=True)
        wanting = [i for i, wanted in copied if wanted]
        sources = [leaves[i] for i in wanting] + list(self.program.parameters)
        cuts: list[Callable[[Tensor], Tensor]] = [partial(self._cut, i, reading, leaves[i].device) for i in wanting]
        return sources, cuts + [lambda g: g] * len(self.program.parameters)

    def _cut(self, i: int, reading: Reading, device: torch.device, gradient: Tensor) -> Tensor:
        return self.inputs.cut_input(i, gradient, reading).to(device)


def _alike(leaves: Sequence[Any]) -> tuple[tuple[list[int], list[Tensor]], ...]:
    """The tensors among the leaves and where they stand, those of one dtype together: one launch clones them."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            places, tensors = found.setdefault(x.dtype, ([], []))
            places.append(i)
            tensors.append(x)
    return tuple(found.values())


def _build_of_clones(
    build: Callable[[Sequence[Any]], Any], leaves: Sequence[Any], alike: tuple[tuple[list[int], list[Tensor]], ...]
) -> Any:
    """The nested outputs with clones in place of the tensors."""
    cloned = list(leaves)
    for places, tensors in alike:
        if len(tensors) == 1:
            cloned[places[0]] = tensors[0].clone()
            continue
        copies = [torch.empty_like(x) for x in tensors]
        torch._foreach_copy_(copies, tensors)
        for i, copy in zip(places, copies, strict=True):
            cloned[i] = copy
    return build(cloned)

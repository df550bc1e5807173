"""One graph of one key: its static inputs, its recording, and how a call goes through them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Generator, Tensor

from rlkernel_core.reference.graphs.autograd import Latest, replay_with_grad
from rlkernel_core.reference.graphs.buffers import PLANS, StaticInputs, cut_outputs
from rlkernel_core.reference.graphs.key import Reading
from rlkernel_core.reference.graphs.recorder import Program, Recording
from rlkernel_core.reference.graphs.verify import clone_tensors
from rlkernel_core.spec.graphed import Bucket
from rlkernel_core.tree import Structure, flatten


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


@dataclass
class Graph:
    """A recording with what it reads."""

    inputs: StaticInputs
    recording: Recording
    program: Program
    verified: bool = False
    latest: Latest = field(default_factory=Latest)
    _cut_at: dict[Hashable, tuple[list[Any], Structure]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.inputs.nbytes + self.recording.nbytes

    def replay(self, reading: Reading, options: Options) -> Any:
        """Replay on the filled inputs; outputs cut, and cloned if asked for."""
        clone = options.outputs == "clone"
        if self.program.autograd:
            sources, cut = self._sources(reading)
            kept = self.recording
            outputs = replay_with_grad(kept, self.latest, sources, cut, kept.differentiable, clone)
            return cut_outputs(outputs, reading, options.buckets)
        self.recording.replay()
        leaves, structure = self._cut_at.get(reading.sizes) or self._ready(reading, options)
        return structure.build([x.clone() if isinstance(x, Tensor) else x for x in leaves] if clone else leaves)

    def _ready(self, reading: Reading, options: Options) -> tuple[list[Any], Structure]:
        """Outputs keep their addresses, so that views of them are made once for each size."""
        if len(self._cut_at) >= PLANS:
            self._cut_at.clear()
        cut = self._cut_at[reading.sizes] = flatten(cut_outputs(self.recording.outputs, reading, options.buckets))
        return cut

    def plain(self, reading: Reading, options: Options) -> Any:
        """What fn itself returns on clones of the filled inputs."""
        outputs = self.program.call([x.clone() for x in self.inputs.tensors])
        return clone_tensors(cut_outputs(outputs, reading, options.buckets))

    def _sources(self, reading: Reading) -> tuple[list[Tensor], list[Callable[[Tensor], Tensor]]]:
        """Tensors that want gradients, and how a static gradient becomes theirs."""
        copied = zip(self.inputs.copied, self.program.wants_grad, strict=True)
        wanting = [i for i, wanted in copied if wanted]
        sources = [reading.leaves[i] for i in wanting] + list(self.program.parameters)
        cuts: list[Callable[[Tensor], Tensor]] = [partial(self._cut, i, reading) for i in wanting]
        return sources, cuts + [lambda g: g] * len(self.program.parameters)

    def _cut(self, i: int, reading: Reading, gradient: Tensor) -> Tensor:
        return self.inputs.cut_input(i, gradient, reading).to(reading.leaves[i].device)

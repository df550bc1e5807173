"""Programs for a captured function: any order of calls, weight updates, mode changes and pauses, beside plain runs.

A program is a tuple of steps of plain values, so that it shrinks and can be run again. All numbers are small integers
times powers of two: every sum is exact, whatever its order, and bits can be compared.

Legend: n rows of a call.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rlkernel_conformance.compare import require
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.graphed import Bucket, GraphedCallable
from rlkernel_core.tree import flatten

SIZES: Final = (2, 4, 8)
PAD: Final = -1.0
LAYOUTS: Final = ("plain", "every other row", "transposed", "expanded", "same storage")

Step = tuple[Any, ...]


class Decode(nn.Module):
    """A step that reads a weight, looks at its mode, counts, and draws where it is told to."""

    def __init__(self, device: str, *, draws: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=device), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.draws, self.counts = draws, counts
        self.own: torch.Generator | None = None  # drawn from beside the default one

    def forward(self, x: Tensor, temperature: float, scale: Tensor, weight: Tensor | None = None) -> dict[str, Any]:
        """`x` [n, 3] -> z [n, 3], the total of all rows [3], noise [n]; by a weight [3], the layer's unless given."""
        weight = self.weight if weight is None else weight
        if self.counts:
            self.steps += 1
        z = x * weight * scale / temperature
        out = {"z": z + 1 if self.training else z, "total": z.sum(0), "training": self.training}
        if self.draws:
            out["u"] = torch.rand(x.shape[0], device=x.device)
        if self.own is not None:
            out["u"] = out["u"] + torch.rand(x.shape[0], device=x.device, generator=self.own)
        return out


@dataclass(frozen=True)
class Program:
    """What happens to a captured step, in order."""

    steps: tuple[Step, ...]
    outputs: str = "clone"
    verify: str = "never"
    max_graphs: int = 32
    over: str = "raise"  # "eager": buckets are small, and calls above the largest have no graph
    moved: str = "recapture"  # what follows a rebound weight; "eager": plain runs until `invalidate`
    passed: bool = False  # whether the weight, which is static, is an argument of calls too


def calls(*, most: int = 8) -> st.SearchStrategy[Step]:
    """Calls of any size, temperature, scale and layout."""
    return st.tuples(
        st.just("call"),
        st.integers(1, most),
        st.sampled_from((1.0, 0.5, 2.0)),
        st.integers(1, 3),
        st.sampled_from(LAYOUTS),
    )


WRITES: Final = st.tuples(st.just("write"), st.integers(-2, 2))
SEEDS: Final = st.tuples(st.just("seed"), st.integers(0, 3))
EVENTS: Final = st.one_of(
    WRITES,
    SEEDS,
    st.tuples(st.just("rebind"), st.integers(-2, 2)),
    st.tuples(st.just("train"), st.booleans()),
    st.tuples(st.just("pause"), st.sampled_from(("keep", "discard"))),
    st.tuples(st.just("update"), st.integers(-2, 2)),
    st.tuples(st.just("warm"), st.integers(0, 4)),
    st.tuples(st.just("invalidate"), st.sampled_from(("invalidated", "other weights"))),
    st.sampled_from((("resume",), ("check",))),
)


def programs(
    subject: Subject, *steps: st.SearchStrategy[Step], longest: int = 12, graphs: tuple[int, ...] = (32,)
) -> st.SearchStrategy[Program]:
    """Programs of these steps, with options that the subject claims."""
    return st.builds(
        Program,
        steps=st.lists(st.one_of(*steps), min_size=2, max_size=longest).map(tuple),
        outputs=st.sampled_from(claimed(subject, "outputs")),
        verify=st.sampled_from(("never", "always") if "verify" in subject.claims else ("never",)),
        max_graphs=st.sampled_from(graphs),
        over=st.sampled_from(("raise", "eager")),
        passed=st.booleans(),
        moved=st.sampled_from(sorted({"recapture", "eager"} & set(claimed(subject, "on_guard_fail"))) or ["recapture"]),
    )


def claimed(subject: Subject, option: str) -> tuple[str, ...]:
    """Choices of an option that the subject claims."""
    found = (f.partition(":")[2] for f in sorted(subject.claims) if f.startswith(f"{option}:"))
    return tuple(found)


def optional(subject: Subject, **options: Any) -> dict[str, Any]:
    """Those options whose feature the subject claims."""
    return {name: value for name, value in options.items() if name in subject.claims}


def rows(layout: str, n: int, salt: int, device: str, held: list[Tensor]) -> Tensor:
    """[n, 3] of small integers in a layout; "same storage" writes new values where an earlier call's were."""
    values = (torch.arange(n * 3, device=device) * 7 + 5 * salt).remainder(11).float().view(n, 3)
    if layout == "every other row":
        wide = values.new_full((2 * n, 3), torch.nan)
        wide[::2] = values
        return wide[::2]
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "expanded":
        return values[:1].expand(n, 3)
    if layout == "same storage":
        room = next((x for x in held if x.shape == (n, 3)), None)
        if room is not None:
            return room.copy_(values)
        held.append(values)
    return values


def generator_state(device: str) -> Tensor:
    """State of the default generator of a device."""
    state: Tensor = torch.cuda.get_rng_state(device) if device.startswith("cuda") else torch.get_rng_state()
    return state


def set_generator_state(state: Tensor, device: str) -> None:
    """Put the default generator of a device where it was."""
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def equal(found: Any, expected: Any) -> bool:
    """Leaves are equal: tensors bit by bit but for NaN, which equals itself; other values in type and value."""
    a, shape = flatten(found)
    b, want = flatten(expected)
    return shape == want and all(map(_same, a, b))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and bool(((a == b) | (a.isnan() & b.isnan())).all())
    return type(a) is type(b) and (a == b or (a != a and b != b))  # noqa: PLR0124  NaN is the same as NaN


class Machine:
    """A captured step and a plain one, running the same program."""

    def __init__(
        self, subject: Subject, program: Program, *, draws: bool = False, own: torch.Generator | None = None
    ) -> None:
        self.subject, self.program, self.device = subject, program, subject.device
        counts = "mutates" in subject.claims
        torch.manual_seed(0)
        self.model = Decode(self.device, draws=draws, counts=counts)
        self.plain = copy.deepcopy(self.model)
        self.own = self.model.own = self.plain.own = own
        self.sizes = SIZES if "buckets" in subject.claims else ()
        self.sizes = self.sizes[:2] if program.over == "eager" else self.sizes
        self.options: dict[str, Any] = {"outputs": program.outputs, "max_graphs": program.max_graphs, "warmup": 1}
        if self.sizes:
            out = {"z": 0, "u": 0} if draws else {"z": 0}
            self.options |= {"buckets": (Bucket({"x": 0}, self.sizes, out=out, over=program.over),), "pad": {"x": PAD}}
        if own is not None:
            self.options["generators"] = (own,)
        if program.moved != "recapture":
            self.options["on_guard_fail"] = program.moved
        if counts:
            self.options["mutates"] = (self.model.steps,)
        if "verify" in subject.claims:
            self.options["verify"] = program.verify
        self.state = self.random()
        self.example = (torch.zeros(2, 3, device=self.device), 1.0, torch.ones((), device=self.device))
        self.captured: GraphedCallable = self.make(subject)
        self.calls, self.paused, self.guarded = 0, False, False
        self.said: Any = None  # by the latest step: what a call was announced as, graphs warmed, what moved
        self.held: list[Tensor] = []  # storage that later calls write to
        self.kept: list[tuple[Any, Any]] = []  # results handed out, and copies of them
        self.wrong: dict[str, str] = {}  # aspect -> the first difference

    def make(self, maker: Any) -> GraphedCallable:
        """The captured step, as `maker` captures it."""
        captured: GraphedCallable = maker(self.model, (*self.example, *self.passed(self.model)), **self.options)
        return captured

    def passed(self, model: Decode) -> tuple[Tensor, ...]:
        """The static argument of calls, where there is one."""
        return (model.weight,) if self.program.passed else ()

    def run(self, *aspects: str) -> None:
        """All steps in order; a Violation if one of these aspects went wrong, every one unless given."""
        for at, (word, *given) in enumerate(self.program.steps):
            getattr(self, word)(*given)
            found = {k: v for k, v in self.wrong.items() if k in aspects or not aspects}
            for aspect, text in found.items():
                require(holds=False, message=f"{aspect} after step {at}, {word}{tuple(given)}: {text}")

    def random(self) -> Tensor:
        """States of the generators, one behind the other."""
        default = generator_state(self.device)
        return default if self.own is None else torch.cat([default.cpu(), self.own.get_state().cpu()])

    def set_random(self, state: Tensor) -> None:
        """Put the generators where they were."""
        size = generator_state(self.device).numel()
        set_generator_state(state[:size].clone(), self.device)
        if self.own is not None:
            self.own.set_state(state[size:].clone())

    def differ(self, aspect: str, found: Any, expected: Any) -> None:
        """Note the first difference of an aspect."""
        if not equal(found, expected):
            self.wrong.setdefault(aspect, f"{found} is not {expected}")

    def call(self, n: int, temperature: float, scale: int, layout: str) -> None:
        """One call, and what a plain run on the padded input gives from the same generator state."""
        if self.paused:
            return
        x = rows(layout, n, self.calls, self.device, self.held)
        before, factor = x.clone(), torch.tensor(float(scale), device=self.device)
        sizes = () if self.guarded else self.sizes
        padded = before.new_full((next((s for s in sizes if s >= n), n), 3), PAD)
        padded[:n] = before
        self.set_random(self.state)
        expected = self.plain(padded, temperature, factor, *self.passed(self.plain))
        expected |= {k: expected[k][:n] for k in ("z", "u") if k in expected}
        after = self.random()
        self.set_random(self.state)
        given = x, temperature, factor, *self.passed(self.model)
        self.said = self.captured.explain(*given).partition(":")[0]
        result = self.captured(*given)
        self.state, self.calls = after, self.calls + 1
        self.differ("noise", result.pop("u", None), expected.pop("u", None))
        self.differ("generator", self.random(), after)
        self.differ("mode", result.pop("training"), expected.pop("training"))
        self.differ("result", result, expected)
        self.differ("input", x, before)
        self.differ("state", self.model.steps, self.plain.steps)
        for now, was in self.kept:
            self.differ("earlier result", now, was)
        if self.program.outputs == "clone":
            self.kept.append((result, {k: v.clone() for k, v in result.items()}))

    def write(self, value: int) -> None:
        """The weight is written in place."""
        for m in (self.model, self.plain):
            m.weight.fill_(value)

    def rebind(self, value: int) -> None:
        """The weight becomes another tensor, within a weight update."""
        if self.paused:
            return
        with self.captured.weight_update() as update:
            for m in (self.model, self.plain):
                m.weight = nn.Parameter(torch.full((3,), float(value), device=self.device), requires_grad=False)
        self.differ("moved", len(update.changed), 1)
        self.guarded = self.program.moved == "eager"

    def update(self, value: int) -> None:
        """The weight is written in place within a weight update, which looks at one call."""
        if self.paused:
            return
        with self.captured.weight_update(canary=(*self.example, *self.passed(self.model))) as update:
            self.write(value)
        self.differ("moved", len(update.changed), int(self.guarded))

    def check(self) -> None:
        """Static tensors are looked at."""
        if not self.paused:
            self.said = self.captured.check_static()

    def train(self, mode: bool) -> None:
        """The mode of the modules changes."""
        self.model.train(mode)
        self.plain.train(mode)

    def seed(self, value: int) -> None:
        """The caller seeds."""
        torch.manual_seed(value)
        if self.own is not None:
            self.own.manual_seed(value + 1)
        self.state = self.random()

    def pause(self, mode: str) -> None:
        """Calls are refused."""
        if "pause" in self.subject.claims:
            self.captured.pause(mode)
            self.paused = True

    def resume(self) -> None:
        """Calls are accepted again."""
        if "pause" in self.subject.claims:
            self.captured.resume()
            self.paused = False

    def invalidate(self, reason: str = "invalidated") -> None:
        """All graphs are forgotten."""
        self.captured.invalidate(reason)
        self.guarded = False

    def warm(self, n: int = 0) -> None:
        """A call of n rows is captured ahead of use; every bucket, unless given."""
        if not self.paused:
            x, temperature, scale = self.example
            examples = [(x.new_zeros(n, 3), temperature, scale, *self.passed(self.model))] if n else None
            self.said = self.captured.warm(examples)

"""What the objects that an operator makes gave while a clause used them: each call and attribute, in order.

`capture` and `rollout_buffer` make objects, whose methods clauses call. A clause that uses one through a
`RecordingObject` leaves a transcript, and two transcripts of one case show whether a mutant gave anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor

from rlkernel.discover import brief, guarded
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError
from rlkernel_core.tree import flatten

Told = list[tuple[str, Any]]  # what gave something, and what it gave
_PLAIN: Final = (Tensor, str, int, float, bool, bytes, type(None))
_TIMES: Final = ("capture_ms", "guard_ns")  # leaves of statistics that differ from run to run
_WORDS: Final = (
    "last_error",
    "explain()",
)  # text for people, of which the first word is compared, "replay" or "refused"
_STORAGE: Final = ".tensors()"  # compared by shapes and dtypes alone: methods that return the values are compared too
_HELD: Final = 400  # results that are looked at again at the end


class Transcript:
    """What was given so far, tensors as they were then; at the end it notes all results once more."""

    def __init__(self) -> None:
        self.told: Told = []
        self._held: list[tuple[str, Any]] = []

    def tell(self, name: str, value: Any) -> None:
        """Note a result, leaf by leaf."""
        leaves, structure = flatten(value)
        for leaf_name, leaf in zip(structure.names(name), leaves, strict=True):
            if leaf_name.rpartition(".")[2] not in _TIMES:
                self.told.append((leaf_name, self._leaf(leaf_name, leaf)))

    def hold(self, name: str, value: Any) -> None:
        """Note a result, now and at the end: what is handed out may change later."""
        self.tell(name, value)
        if len(self._held) < _HELD:
            self._held.append((f"{name} at the end", value))

    def end(self, outcome: str) -> Told:
        """All that was noted, with what results are by now and how the clause ended."""
        for name, value in self._held:
            self.tell(name, value)
        return [*self.told, ("the clause", outcome)]

    def _leaf(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return str((leaf.shape, leaf.dtype)) if _STORAGE in name else leaf.detach().clone()
        if isinstance(leaf, str) and any(word in name for word in _WORDS):
            return leaf.split(maxsplit=1)[0].rstrip(":")
        return leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__


class RecordingObject:
    """Stands in the place of an object, and notes what its methods and attributes give."""

    def __init__(self, inner: Any, name: str, transcript: Transcript) -> None:
        self._inner, self._name, self._transcript = inner, name, transcript

    def __getattr__(self, attribute: str) -> Any:
        """An attribute; of a method what records its result."""
        name = f"{self._name}.{attribute}"
        return self._given(name, lambda: getattr(self._inner, attribute))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call."""
        return self._given(f"{self._name}()", lambda: self._inner(*args, **kwargs))

    def __getitem__(self, key: Any) -> Any:
        """An item."""
        return self._given(f"{self._name}[{key!r}]", lambda: self._inner[key])

    def __enter__(self) -> Any:
        """What the scope gives."""
        made, name = self._inner.__enter__(), f"{self._name}.__enter__()"
        return self if made is self._inner else self._given(name, lambda: made)

    def __exit__(self, *error: object) -> Any:
        """End the scope."""
        return self._given(f"{self._name}.__exit__()", lambda: self._inner.__exit__(*error))

    def _given(self, name: str, make: Callable[[], Any]) -> Any:
        value, error = guarded(make)
        if error is not None:
            self._transcript.tell(name, kind_of(error))
            raise error
        if inspect.ismethod(value):
            return lambda *args, **kwargs: self._given(f"{name}()", partial(value, *args, **kwargs))
        if all(isinstance(leaf, _PLAIN) for leaf in flatten(value)[0]):
            self._transcript.hold(name, value)
            return value
        self._transcript.tell(name, type(value).__name__)
        return RecordingObject(value, name, self._transcript)


@dataclass(frozen=True)
class RecordingSubject(Subject):
    """A subject whose objects leave a transcript."""

    transcript: Any = field(default=None, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make an object."""
        made, error = guarded(lambda: Subject.__call__(self, *args, **kwargs))
        if error is not None:
            self.transcript.tell(self.op, kind_of(error))
            raise error
        return RecordingObject(made, self.op, self.transcript)


def transcript_of(subject: Subject, attack: Attack, case: Any) -> Told | None:
    """What a clause is given in a case, from the same generator state each time; None where the case is none."""
    transcript = Transcript()
    torch.manual_seed(0)
    recording = RecordingSubject(subject.backend, subject.op, subject.device, subject.check, transcript=transcript)
    with subject.chosen():
        _, error = guarded(lambda: attack.prop(recording, case))
    if isinstance(error, UnsatisfiedAssumption):
        return None
    return transcript.end("holds" if error is None else kind_of(error))


def kind_of(error: BaseException) -> str:
    """An error without its words, which may name other numbers; whose argument it is, and what a clause found."""
    if isinstance(error, ArgumentError):
        return f"{type(error).__name__} of {error.argument}"
    return str(error) if isinstance(error, Violation) else brief(error).partition(":")[0]


def first_difference(was: Told, now: Told, unequal: Callable[[str, Any, Any], str]) -> str:
    """Where a transcript differs from another one; empty where it does not."""
    for (name, x), (other, y) in zip(was, now, strict=False):
        if name != other:
            return f"{other} gives {y!r}, where {name} gave {x!r}"[:300]
        if text := unequal(name, x, y):
            return text
    return "" if len(was) == len(now) else f"{len(now)} results, were {len(was)}"

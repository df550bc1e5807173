"""Every error rlkernel raises, in one tree.

    RLKernelError
    ├── ArgumentError (ValueError)         an operator argument is wrong: names argument, value, remedy
    │   └── ArgumentTypeError (TypeError)  … because of its type or dtype
    ├── UnknownNameError (KeyError)        no such operator, keyword, backend, feature, kind or format
    ├── ConfigError (ValueError)           rlkernel.toml, RLKERNEL_* or a policy argument is malformed
    ├── FileError (ValueError)             a file is absent, damaged, too large or cannot be written
    ├── ResolutionError (RuntimeError)     no backend in `order` can take the call; carries the Decision
    │   ├── AmbiguousBackendError          two backends of one tier qualify
    │   ├── FallbackError                  another backend could, but `fallback = "error"`
    │   └── LockError                      rlkernel.lock pins something else
    ├── ApiMismatchError (RuntimeError)    a plugin was built for another plugin API
    ├── LayoutError (ValueError)           a packed QuantTensor met a layout it was not packed for
    ├── CaptureError (RuntimeError)        a graph could not be captured, or a replay would be wrong
    ├── BufferFullError (RuntimeError)     a rollout buffer has no room; nothing was written
    ├── StaleBatchError (RuntimeError)     a released rollout batch was used
    ├── RankError (RuntimeError)           a rank of a process group did not answer in time
    ├── MemoryBudgetError (MemoryError)    an allocation would take more memory than may be taken without swapping
    ├── HostError (RuntimeError)           a host framework is absent, of an untested version, or changed underneath
    └── NotWrittenError (NotImplementedError)  a plugin's function is yet to be written

    RLKernelWarning (UserWarning)
    ├── FallbackWarning                    not what the order names ran, or plain torch where kernels exist
    ├── PluginWarning                      an installed plugin could not be loaded, or cannot run here
    └── AuditWarning                       under `audit`, a call differed from the reference beyond tolerance

`except RLKernelError` catches all of ours and nothing else.
Imports nothing outside the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkernel_core.decision import Decision

_SHOWN = 100  # characters of a name


class RLKernelError(Exception):
    """Base of every error that rlkernel raises on purpose."""


class ArgumentError(RLKernelError, ValueError):
    """An operator argument is wrong.

    `argument`, `got` and `remedy` are kept as attributes, so that a caller can act on them.
    """

    def __init__(self, argument: str, got: object, problem: str, remedy: str) -> None:
        self.argument, self.got, self.problem, self.remedy = argument, got, problem, remedy
        super().__init__(f"{argument}: {problem}; got {got}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, str(self.got), self.problem, self.remedy)


class ArgumentTypeError(ArgumentError, TypeError):
    """An operator argument has the wrong type or dtype."""


class UnknownNameError(RLKernelError, KeyError):
    """A name that nothing answers to; the message suggests the nearest known ones, or what would install it."""

    def __init__(self, what: str, name: object, known: Iterable[str], install: str = "") -> None:
        self.what, self.name, self.known, self.install = what, name, tuple(sorted(known)), install
        shown = repr(name) if len(str(name)) <= _SHOWN else repr(str(name)[:_SHOWN]) + "..."
        nearest = did_you_mean(str(name)[:_SHOWN], self.known)
        super().__init__(
            f"{what} {shown} is not installed: {install}" if install else f"unknown {what} {shown}{nearest}"
        )

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.name, self.known, self.install)


class ConfigError(RLKernelError, ValueError):
    """Configuration is malformed; the message names the file or variable, the key and the remedy."""


class FileError(RLKernelError, ValueError):
    """A file is absent, damaged, too large, of another version, or cannot be written.

    `file`, `place` (a line, a byte or a key; "" for the whole), `problem` and `remedy` are kept as attributes.
    """

    def __init__(self, file: object, place: str, problem: str, remedy: str) -> None:
        self.file, self.place, self.problem, self.remedy = str(file), place, problem, remedy
        super().__init__(f"{self.file[:500]}{place and ', '}{place}: {problem}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.place, self.problem, self.remedy)


class ResolutionError(RLKernelError, RuntimeError):
    """No backend can take the call. `decision` holds a Reason for every candidate."""

    def __init__(self, message: str, decision: Decision | None = None) -> None:
        super().__init__(message)
        self.decision = decision


class AmbiguousBackendError(ResolutionError):
    """Two backends of one tier qualify; the message holds the line that settles it."""


class FallbackError(ResolutionError):
    """What could take the call would be a fallback, and the policy says `fallback = "error"`."""


class LockError(ResolutionError):
    """rlkernel.lock pins an implementation that is not the one that would run."""


class ApiMismatchError(RLKernelError, RuntimeError):
    """A plugin was built for a plugin API outside the window that this version serves."""

    def __init__(self, theirs: tuple[int, int], ours: tuple[int, int]) -> None:
        self.theirs, self.ours = theirs, ours
        super().__init__(
            f"the plugin is for rlkernel plugin API {theirs[0]}.{theirs[1]}, this is {ours[0]}.{ours[1]} "
            f"(served: {ours[0]}.0 to {ours[0]}.{ours[1]})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.theirs, self.ours)


class LayoutError(RLKernelError, ValueError):
    """A packed weight was handed to code that does not know its layout."""


class CaptureError(RLKernelError, RuntimeError):
    """A graph could not be captured, or replaying it would give a wrong answer."""


class BufferFullError(RLKernelError, RuntimeError):
    """A rollout buffer has no room for what was asked; nothing was written."""


class StaleBatchError(RLKernelError, RuntimeError):
    """A rollout batch was used after its release; its storage belongs to newer rollouts."""


class HostError(RLKernelError, RuntimeError):
    """A host framework is not what an integration was made for; the message names versions, symbol and remedy."""


class RankError(RLKernelError, RuntimeError):
    """A rank did not answer in time. `ranks` are those that did not."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class MemoryBudgetError(RLKernelError, MemoryError):
    """An allocation would take more than can be taken without swapping; nothing was allocated. Sizes are bytes.

    `needed` is None where an allocator refused without a number.
    """

    def __init__(self, what: str, needed: int | None, budget: int, because: str, remedy: str) -> None:
        self.what, self.needed, self.budget, self.because, self.remedy = what, needed, budget, because, remedy
        gib = 1024**3
        wants = "ran out of memory" if needed is None else f"needs {needed / gib:.2f} GiB"
        super().__init__(f"{what} {wants}, and {budget / gib:.2f} GiB may be taken ({because}). {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.needed, self.budget, self.because, self.remedy)


class NotWrittenError(RLKernelError, NotImplementedError):
    """A plugin's function is yet to be written; the message names the file, and what claims and proves it then."""


class RLKernelWarning(UserWarning):
    """Base of every warning that rlkernel issues."""


class FallbackWarning(RLKernelWarning):
    """A backend that the order names was passed over, or plain torch ran on an accelerator that has kernels.

    Make it an error with `fallback = "error"`.
    """


class PluginWarning(RLKernelWarning):
    """An installed plugin could not be loaded, or cannot run here. `rlkernel doctor` prints why."""


class AuditWarning(RLKernelWarning):
    """A call under `audit` differed from the reference, or could not be compared; the conformance suite judges it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or the list of choices when nothing is near."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=2, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "; choose from " + ", ".join(choices) if choices else "; none is known"

"""Limits of implementations as data: sizes and layouts that a manifest states, and the memory that a call needs.

A manifest's `limits` are compared with the sizes of the call, and its `workspace` function tells how many bytes the
call needs on its device beyond its results. That is compared with `max_workspace_bytes` of the policy where it is set:
never with what happens to be free, by which ranks of one run would choose differently. All of it is asked when a shape
is planned or explained, never at a call. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlkernel.discover import brief, described, guarded, load_target
from rlkernel_core.decision import Room
from rlkernel_core.errors import ArgumentError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS

if TYPE_CHECKING:
    from rlkernel_core.manifest import Impl, Limits

_SPLIT: Final = "split the call, or name another backend first"


class Question(NamedTuple):
    """What has to be asked about a call before an implementation may take it; equal where the answer is the same."""

    op: str
    limits: Limits | None
    check: str | None
    workspace: str | None


def question(impl: Impl) -> Question | None:
    """What has to be asked at every shape; None where the claims of an implementation say everything."""
    if impl.limits is None and impl.check is None and impl.workspace is None:
        return None
    return Question(impl.op, impl.limits, impl.check, impl.workspace)


def answer(
    asked: Question, call: Any, checked: Callable[[str, Any], Reason | None], budget: int | None
) -> Reason | None:
    """The first reason against a call: limits, then the implementation's own check, then memory.

    Args:
        asked: what is asked.
        call: the record.
        checked: asks the implementation's own check.
        budget: most bytes that a call may need beyond its results; None for any.
    """
    spec = OPERATORS[asked.op.partition("@")[0]]
    said = None
    if asked.limits is not None:
        primary = getattr(call, spec.primary) if spec.primary is not None else None
        said = too_large(asked.limits, spec.sizes(call)) or _layout(asked.limits, str(spec.primary), primary)
    if said is None and asked.check is not None:
        said = checked(asked.check, call)
    if said is None and asked.workspace is not None:
        said = _memory(asked.workspace, call, budget)
    return said


def too_large(limits: Limits, sizes: Mapping[str, int]) -> Reason | None:
    """A reason where a call of these sizes passes a limit."""
    for name, most, what in (("rows", limits.max_rows, "rows"), ("vocab", limits.max_vocab, "ids")):
        have = sizes.get(name)
        if have is not None and most is not None and have > most:
            text = f"it takes at most {most} {what} (max_{name}), the call has {have}"
            return Reason("shape", "too-large", text, _SPLIT)
    return None


def _layout(limits: Limits, name: str, x: Any) -> Reason | None:
    """A reason where the tensor has no layout that the implementation reads."""
    if not limits.layouts or x is None:
        return None
    last = x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1
    have = {"contiguous": x.is_contiguous(), "contiguous_last_dim": last}
    if any(have[layout] for layout in limits.layouts):
        return None
    text = f"it reads {' or '.join(limits.layouts)}, {name} has strides {list(x.stride())}"
    return Reason("shape", "layout", text, f"pass {name}.contiguous()")


def _memory(target: str, call: Any, budget: int | None) -> Reason | None:
    """A reason where the call needs more memory than it may take."""
    if budget is None:
        return None
    needed = workspace(target, call)
    if isinstance(needed, Reason):
        return needed
    if needed <= budget:
        return None
    text = f"the call needs {needed} bytes beyond its results, and {budget} is max_workspace_bytes of the policy"
    fix = "call it on fewer rows, or pass max_workspace_bytes where the operator has it"
    return Reason("memory", "insufficient", text, fix)


def workspace(target: str, call: Any) -> int | Reason:
    """Most bytes that a call needs beyond its results, as the implementation says."""
    needs = load_target(target)
    if isinstance(needs, Reason):
        return needs
    said, error = guarded(lambda: needs(call))
    if isinstance(error, ArgumentError):
        return 0  # the call itself names the argument
    if error is None and type(said) is int and said >= 0:
        return said
    text = brief(error) if error is not None else f"it returned {described(said)}"
    return Reason("memory", "workspace-failed", f"{target}: {text}", "report it to the plugin's author")


def room(impl: Impl, call: Any = None) -> Room | None:
    """What an implementation takes, and what a call needs where there is one; None where it says neither."""
    said = workspace(impl.workspace, call) if impl.workspace is not None and call is not None else None
    needed = None if isinstance(said, Reason) else said
    if impl.limits is None:
        return None if needed is None else Room(workspace=needed)
    return Room(impl.limits.max_rows, impl.limits.max_vocab, impl.limits.layouts, needed)

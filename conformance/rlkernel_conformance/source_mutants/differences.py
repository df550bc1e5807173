"""A mutant beside the original on the same calls: is there one whose result differs?

Compared are results, the gradients of a drawn upstream gradient, errors, what is written to arguments, and whose memory
a result is; of objects, what each method and attribute gives a clause. Numbers count as different beyond the operator's
tolerance, everything else by its bits. How much memory a call takes, and whether it waits for the device, is not
compared.
"""

from __future__ import annotations

import ast
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel.discover import brief, guarded
from rlkernel_conformance.attack import Attack, Table
from rlkernel_conformance.clauses.derived_attacks import has_gradients, storage
from rlkernel_conformance.example_calls import USES, Call
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.search import search
from rlkernel_conformance.source_mutants.drawn_calls import SOURCES, Arguments, varied
from rlkernel_conformance.source_mutants.plugin_copy import PluginCopy
from rlkernel_conformance.source_mutants.processes import Send
from rlkernel_conformance.source_mutants.transcripts import first_difference, transcript_of
from rlkernel_conformance.source_mutants.trials import executed_lines, subject_of
from rlkernel_conformance.spaces import space_of
from rlkernel_conformance.subject import Subject
from rlkernel_core.decision import PLAIN_TORCH
from rlkernel_core.errors import ArgumentError, RLKernelError
from rlkernel_core.tree import flatten

Where = tuple[Path, frozenset[int]]  # a file of the original, and the lines that a change is about
CALLS: Final = 400  # drawn calls a mutant, beside those that clauses make
_VARIANTS: Final = 2  # of each call that a clause makes
# Calls that execute a change, without a difference, after which it is taken for none, and after which no more are made.
ENOUGH: Final = 50
_PLENTY: Final = 2500
_OTHER_DRAWS: Final = 20_261  # seed of cases that no profile has, and the next ones
_ROUNDS: Final = 40  # of the clauses' calls, where few of them execute the change
_LIMIT_S: Final = 30.0  # of this process, for the search in each source of calls
_LONGER: Final = 3  # times that, where few calls execute a change


@dataclass(frozen=True)
class Difference:
    """What a search found: nothing, rounding within the tolerance, or a call whose result differs."""

    calls: int  # that execute the change
    rounding: bool = False  # some bits of numbers differ, within the tolerance
    found: str = ""  # the call, and what differs


def search_differences(send: Send, folder: Path, op: str, where: Where, clauses: tuple[str, ...], calls: int) -> None:
    """Compare a mutant with the original; says a Difference after each source of calls, the last one is the finding.

    Args:
        send: what is found goes there.
        folder: of the mutant.
        op: the operator.
        where: the change is.
        clauses: those whose calls execute the change.
        calls: how many calls to draw; a 25th of it are the cases of each clause.
    """
    with subject_of(PluginCopy(folder), op) as mutant:
        pair = _Pair(Subject(PLAIN_TORCH, op), mutant, where, folder)
        for source, share in SOURCES.items():
            send(source.__name__, None)
            began = time.process_time()
            for seed in range(math.ceil(calls * share)):
                given, error = guarded(lambda: source(mutant, seed))  # noqa: B023  called at once
                if error is None and given is not None:
                    pair.compare(given, f"{source.__name__}(seed={seed})", gradients=bool(seed % 4))
                if pair.found or time.process_time() - began > _LIMIT_S:
                    break
            send("found", pair.difference())
            if pair.found:
                return
        if op in USES:
            pair.calls = 0  # what those calls read of an object is a part of what clauses do
        _calls_of_clauses(send, pair, clauses, math.ceil(calls / 25))


def _calls_of_clauses(send: Send, pair: _Pair, clauses: tuple[str, ...], cases: int) -> None:
    """The calls that clauses make of other draws, each compared whatever the clause looks at; tables first.

    Of objects all is compared that they give a clause in a case. Where few calls execute the change, more are drawn of
    the clauses whose calls do.
    """
    began, attacks = time.process_time(), attacks_with_leak_check(pair.mutant.op)
    due, executing = sorted(clauses, key=lambda c: not isinstance(attacks[c].cases, Table)), Counter[str]()
    for seed in range(_OTHER_DRAWS, _OTHER_DRAWS + _ROUNDS):
        for clause in due:
            before = pair.calls
            send(clause, None)
            compare = _compare_objects if pair.mutant.op in USES else _compare_calls
            guarded(partial(compare, attacks[clause], pair, cases, seed))  # an attack may not expect what it meets
            send("found", pair.difference())
            executing[clause] += pair.calls - before
            late = time.process_time() - began > _LIMIT_S * (1 if pair.calls >= ENOUGH else _LONGER)
            if pair.found or pair.calls > _PLENTY or late:
                return
        if pair.calls >= ENOUGH:
            return
        due = [clause for clause in due if executing[clause]] or due


def _compare_calls(attack: Attack, pair: _Pair, cases: int, seed: int) -> None:
    subject = _Compared(pair.mutant.backend, pair.mutant.op, pair=pair, clause=attack.clause.id)

    def body(case: Any) -> None:
        _, error = guarded(lambda: attack.prop(subject, case))
        if isinstance(error, UnsatisfiedAssumption):
            raise error
        if pair.found:
            raise RLKernelError(pair.found)

    _each_case(body, attack, subject, cases, seed)


def _compare_objects(attack: Attack, pair: _Pair, cases: int, seed: int) -> None:
    def body(case: Any) -> None:
        pair.compare_objects(attack, case)
        if pair.found:
            raise RLKernelError(pair.found)

    _each_case(body, attack, pair.mutant, cases, seed)


def _each_case(body: Callable[[Any], None], attack: Attack, subject: Subject, cases: int, seed: int) -> None:
    if isinstance(attack.cases, Table):
        rows = attack.cases.rows(subject)
        for row in Random(seed).sample(rows, k=min(len(rows), 5 * cases)):
            body(row)
    else:
        for case in attack.examples if seed == _OTHER_DRAWS else ():
            body(case)
        examples = max(1, round(cases * attack.scale))
        search(body, attack.cases(subject), examples=examples, shrink=False, seed=seed)


@dataclass(frozen=True)
class _Compared(Subject):
    """The mutant, whose every call is made of the original too."""

    pair: Any = field(default=None, compare=False)
    clause: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator."""
        given, _ = guarded(lambda: self.spec.call(*args, **kwargs).as_dict())
        if given is not None and not self.pair.found:
            said = f"a call of {self.clause}"
            self.pair.compare(given, said, gradients=True)
            for i in range(0 if _on_ranks(given) else _VARIANTS):
                draw = torch.Generator().manual_seed(_VARIANTS * self.pair.made + i)
                other, _ = guarded(lambda: varied(self, given, draw))  # noqa: B023  called at once
                if other is not None and not self.pair.found:
                    self.pair.compare(other, f"{said}, varied", gradients=True)
        return super().__call__(*args, **kwargs)


def _at_import(path: Path, lines: frozenset[int]) -> bool:
    """Whether lines of a file are outside its functions: they run once, and every call of the file depends on them."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    return not any(n.lineno <= line <= (n.end_lineno or n.lineno) for n in functions for line in lines)


def _on_ranks(given: Arguments) -> bool:
    """Whether other ranks make the call too, which have to agree with this one on what they call."""
    return any(isinstance(x, ProcessGroup) for x in given.values())


class _Pair:
    """The original and the mutant, and what was found so far."""

    def __init__(self, original: Subject, mutant: Subject, where: Where, folder: Path) -> None:
        self.original, self.mutant, self.where, self.mutant_folder = original, mutant, where, folder
        self.made = self.calls = 0  # calls; those that execute the change
        self.rounding, self.found = False, ""
        self._at_import = _at_import(*where)

    def _forget_results(self) -> None:
        """Clear the caches of the changed file and of the mutant: what is computed once shows at every call."""
        changed, folder = str(self.where[0]), str(self.mutant_folder)
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None) or ""
            for value in vars(module).values() if file == changed or file.startswith(folder) else ():
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()

    def difference(self) -> Difference:
        """What was found so far."""
        return Difference(self.calls, self.rounding, self.found)

    def compare(self, given: Arguments, said: str, *, gradients: bool) -> None:
        """Make a call of both."""
        may_want = has_gradients(self.original) or space_of(self.original.op).constants
        wanted = gradients and may_want and torch.is_grad_enabled()
        self._forget_results()
        with executed_lines(self.where[0].parent) as executed:
            a = _Made.of(self.original, given, wanted)
        self.made += 1
        if not self._ran(executed) and not _on_ranks(given):
            return
        self.calls += 1
        b = _Made.of(self.mutant, given, wanted)
        text = self._differs(a, b)
        if text:
            self.found = f"{said}, {_told(given)}: {text}"

    def compare_objects(self, attack: Attack, case: Any) -> None:
        """Use the objects of both as a clause does in a case; what the original gives otherwise twice shows nothing."""
        self._forget_results()
        with executed_lines(self.where[0].parent) as executed:
            was = transcript_of(self.original, attack, case)
        self.made += 1
        if was is None or not self._ran(executed):
            return
        self.calls += 1
        now, rounding = transcript_of(self.mutant, attack, case), self.rounding
        text = first_difference(was, now or [], self._unequal)
        if text and not first_difference(was, transcript_of(self.original, attack, case) or [], self._unequal):
            self.found = f"a case of {attack.clause.id}, {case!r}: {text}"[:600]
        self.rounding = rounding if text and not self.found else self.rounding

    def _ran(self, executed: Mapping[str, set[int]]) -> bool:
        """Whether lines of the change ran; of one outside of functions, whether any of its file did."""
        ran = executed.get(self.where[0].name, set())
        return bool(ran) if self._at_import else not ran.isdisjoint(self.where[1])

    def _differs(self, a: _Made, b: _Made) -> str:
        if a.error != b.error:
            return f"{b.error or 'no error'}, was {a.error or 'no error'}"
        if a.notes != b.notes:
            return f"{b.notes}, was {a.notes}"
        if a.values.keys() != b.values.keys():
            return f"results {sorted(b.values)}, were {sorted(a.values)}"
        for name, x in a.values.items():
            text = self._unequal(name, x, b.values[name])
            if text:
                return text
        return ""

    def _unequal(self, name: str, x: Any, y: Any) -> str:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            same = type(x) is type(y) and (x == y if isinstance(x, str | int | float | bool) else True)
            return "" if same else f"{name} is {y!r}, was {x!r}"
        if (x.dtype, x.shape, x.requires_grad) != (y.dtype, y.shape, y.requires_grad):
            kinds = [f"{t.dtype} {list(t.shape)}{' with gradient' if t.requires_grad else ''}" for t in (y, x)]
            return f"{name} is {kinds[0]}, was {kinds[1]}"
        p, q = x.detach(), y.detach()
        if not p.is_floating_point():
            return "" if torch.equal(p, q) else f"{name} is {_few(q)}, was {_few(p)}"
        p, q = p.double(), q.double()
        strange = ~p.isfinite() | ~q.isfinite()
        if not torch.equal(torch.where(strange, p, 0).nan_to_num(1e3), torch.where(strange, q, 0).nan_to_num(1e3)):
            return f"{name} is {_few(q)}, was {_few(p)}"
        error = torch.where(strange, 0, (p - q).abs())
        worst = float(error.amax()) if error.numel() else 0.0
        largest = float(torch.where(strange, 0, p).abs().amax()) if p.numel() else 0.0
        atol, rtol = self._tolerance(name, x.dtype)
        self.rounding |= worst > 0
        return f"{name} is {_few(q)}, was {_few(p)}: off by {worst:.3g}" if worst > 2 * (atol + rtol * largest) else ""

    def _tolerance(self, name: str, dtype: torch.dtype) -> tuple[float, float]:
        """Of a result, or of the gradient of an argument, by the nearest name that the spec has a row for."""
        kind = str(dtype).removeprefix("torch.")
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        for output in (name, first, last, *(["grad"] if name.startswith("grad_") else [])):
            rows = {t.dtype: (t.atol, t.rtol) for t in self.original.spec.tolerances if t.output == output}
            if kind in rows or "float32" in rows:
                return rows.get(kind) or rows["float32"]
        return 1e-7, 4 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class _Made:
    """What a call gave."""

    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()  # whose memory results are, which arguments were written to
    error: str = ""

    @classmethod
    def of(cls, subject: Subject, given: Arguments, gradients: bool) -> _Made:
        leaves, structure = flatten(given)
        names = structure.names()
        mine = [_copied(x) if isinstance(x, Tensor) else x for x in leaves]
        wanted = {
            name: x.requires_grad_()
            for name, x in zip(names, mine, strict=True)
            if gradients and isinstance(x, Tensor) and x.is_floating_point()
            if name.partition(".")[0] in subject.spec.differentiable or space_of(subject.op).constants
        }

        def call() -> Any:
            with subject.chosen():
                made = subject(**structure.build(mine))
                if subject.op in USES:
                    return USES[subject.op](subject, Call(0), made)
                return made

        out, error = guarded(call)
        if isinstance(error, ArgumentError):
            return cls({}, (), f"{type(error).__name__} of {error.argument}")
        if error is not None:
            return cls({}, (), brief(error).partition(":")[0])
        found, form = flatten(out)
        values = dict(zip(form.names("result"), found, strict=True))
        values |= _gradients(subject, out, wanted)
        pairs = [(n, x, y) for n, x, y in zip(names, leaves, mine, strict=True) if isinstance(x, Tensor)]
        notes = [f"writes to {n}" for n, x, y in pairs if not _same(x, y)]
        owners = {storage(y): n for n, _, y in pairs if y.numel()}
        tensors = [(n, x) for n, x in values.items() if isinstance(x, Tensor) and x.numel()]
        notes += [f"{n} is memory of {owners[storage(x)]}" for n, x in tensors if storage(x) in owners]
        return cls(values, tuple(notes))


def _gradients(subject: Subject, out: Any, wanted: Mapping[str, Tensor]) -> dict[str, Any]:
    results = [getattr(out, name) if name else out for name in subject.spec.carrying] if wanted else []
    results = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if not results:
        return {}
    draw = torch.Generator().manual_seed(7)
    upstream = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in results]
    found, error = guarded(
        lambda: torch.autograd.grad(results, list(wanted.values()), upstream, allow_unused=True, retain_graph=False)
    )
    if found is None:
        return {"backward": brief(error).partition(":")[0]}
    return {f"grad_{name}": g for name, g in zip(wanted, found, strict=True)}


def _copied(x: Tensor) -> Tensor:
    """The same values with the same strides, in memory of its own."""
    if x.layout is not torch.strided or x.is_meta:
        return x
    held = x.detach().untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(held, x.storage_offset(), x.shape, x.stride())


def _same(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all()) if x.numel() else True  # noqa: PLR0124  NaN


def _few(x: Tensor) -> str:
    flat = x.reshape(-1)[:6].tolist()
    return f"{flat}{'' if x.numel() <= 6 else ' ...'}"


def _told(given: Arguments) -> str:
    def one(x: Any) -> str:
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)[:60]

    return ", ".join(f"{name}={one(x)}" for name, x in given.items() if x is not None and x is not False)

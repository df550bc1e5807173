"""`rlkernel judge`: a verdict on files that hold candidate kernels, or a server that gives verdicts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlkernel.cli.options import Json, present
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel_core.errors import ConfigError
from rlkernel_core.files import read_start
from rlkernel_judge.requirements import require

if TYPE_CHECKING:
    from rlkernel_judge.attack_run import Attack
    from rlkernel_judge.verdict import Isolation, Verdict

EXAMPLES: Final = (
    ("rlkernel judge candidate.py --op logprob", "clauses, probes for cheating, speedup over the reference, score"),
    ("rlkernel judge candidate.py --op logprob --no-timing --json", "correctness alone, as JSON for a reward"),
    ("rlkernel judge a.py b.py c.py --op whiten --json", "several candidates of one task: pass@k, fast_p, means"),
    ("rlkernel judge candidate.py --op logprob --clause LP-08", "one clause: the same counterexample again"),
    ("rlkernel judge candidate.py --op qmatmul --device cuda:0 --baseline triton", "on a GPU, against a backend"),
    ("rlkernel judge serve --port 8473 --device cuda:0,cuda:1", "verdicts over HTTP, one at a time on each device"),
    ("rlkernel judge attack --only late_thread", "a hostile candidate of ours, and what stops it; all without --only"),
)
EXITS: Final = {
    0: "every candidate is correct; no attack succeeded; the server was stopped",
    1: "a candidate is wrong, cheats, or did not run; an attack succeeded",
}
SERVE: Final = "serve"
ATTACK: Final = "attack"
_TASK: Final = frozenset(
    {"op", "baseline", "device", "profile", "clause", "timing", "strict", "limit", "sandbox", "memory", "score", "json"}
)
# Options that have an effect, by what is asked for: the first word, or "files".
_USED: Final = {
    "files": _TASK,
    SERVE: frozenset({"device", "sandbox", "host", "port", "token_file", "waiting"}),
    ATTACK: frozenset({"op", "device", "sandbox", "only", "area", "loaded", "jobs", "json"}),
    "attack --honest": frozenset({"op", "device", "honest", "loaded", "json"}),
}


def command(
    context: typer.Context,
    files: Annotated[
        list[str], typer.Argument(help="Files with a function named as the operator, or `serve`, or `attack`.")
    ],
    *,
    op: Annotated[str | None, typer.Option(metavar="NAME", help="Operator that the files implement.")] = None,
    baseline: Annotated[
        str, typer.Option(metavar="NAME", help="reference, compile (the reference compiled), or an installed backend.")
    ] = "torch",
    device: Annotated[str, typer.Option(help="torch device; several with commas for serve.")] = "cpu",
    profile: Annotated[str, typer.Option(help="quick, standard or deep: how many cases a clause.")] = "quick",
    clause: Annotated[list[str] | None, typer.Option(metavar="ID", help="Attack these clauses alone.")] = None,
    timing: Annotated[bool, typer.Option(help="Measure a speedup where the candidate is correct.")] = True,
    strict: Annotated[bool, typer.Option(help="Refuse sources that reach for what a kernel has no use for.")] = True,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="For one candidate, all in all.")] = 300.0,
    sandbox: Annotated[str, typer.Option(help="auto, namespaces, bubblewrap or limits.")] = "auto",
    memory: Annotated[float, typer.Option(metavar="GIB", help="For one candidate, all its processes together.")] = 16.0,
    score: Annotated[str, typer.Option(metavar="NAME", help="Row of the score table.")] = "rlkernel",
    host: Annotated[str, typer.Option(help="serve: address to listen on; others than loopback need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="serve: port; 0 takes a free one.")] = 8473,
    token_file: Annotated[
        Path | None, typer.Option(help="serve: file whose first line requests must carry as a token.")
    ] = None,
    waiting: Annotated[int, typer.Option(min=1, help="serve: requests that may wait for each device.")] = 64,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="attack: these hostile candidates alone.")
    ] = None,
    honest: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="attack: judge the honest body so often instead; none may be accused."),
    ] = 0,
    area: Annotated[
        str | None, typer.Option(metavar="NAME", help="attack: timing, results, borrowing, harm, source or sandbox.")
    ] = None,
    loaded: Annotated[bool, typer.Option("--loaded", help="attack: run busy processes beside.")] = False,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, help="attack: so many at a time, each a load for others.")
    ] = 1,
    json: Json = False,
) -> None:
    """Judge kernels that a person or a model wrote.

    A file holds a function named as the operator, with its parameters:
    Triton, plain torch, or CUDA through torch's inline loader. It runs in a
    sandboxed process that hands back tensors and nothing else; clauses,
    definitions and clocks are elsewhere. What it claims beyond the plain
    call stands in the file as CLAIMS = {"grad", ...} and DTYPES = (...).
    """
    words = "attack --honest" if files == [ATTACK] and honest else files[0] if files in ([SERVE], [ATTACK]) else "files"
    _refuse_idle(context, words)
    if files == [SERVE]:
        from rlkernel_judge.serve import serve

        serve(host, port, tuple(map(present, device.split(","))), token_file, waiting, sandbox)
        return
    require("the judge", "hypothesis", "numpy", "torch")
    if files == [ATTACK] and honest:
        _honest(op or "logprob", honest, present(device), loaded=loaded, json=json)
        return
    if files == [ATTACK]:
        from rlkernel_judge.attack_run import attacks
        from rlkernel_judge.sandbox import choose

        choose(sandbox)
        _attack(attacks(op, tuple(only or ()), area), present(device), sandbox, loaded=loaded, jobs=jobs, json=json)
        return
    if op is None:
        raise ConfigError("--op is missing: name the operator that the file implements, such as --op logprob")
    from pydantic import ValidationError

    from rlkernel_judge.score import summary
    from rlkernel_judge.trial import judge
    from rlkernel_judge.verdict import Task, complaints

    asked: dict[str, Any] = {"op": op, "baseline": baseline, "device": present(device), "profile": profile}
    asked |= {"clauses": tuple(clause or ()), "timing": timing, "strict": strict}
    asked |= {"limit_s": limit, "sandbox": sandbox, "memory_gib": memory, "score": score}
    try:
        task = Task.model_validate(asked)
    except ValidationError as error:
        raise ConfigError(complaints(error)) from error
    verdicts = [judge(_bytes(file), task, file=file) for file in files]
    found = summary(verdicts) if len(verdicts) > 1 else verdicts[0]
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        for verdict in verdicts:
            _show(verdict)
        if len(verdicts) > 1:
            _compared(found)
    if not all(v.correct for v in verdicts):
        raise typer.Exit(1)


def _refuse_idle(context: typer.Context, asked: str) -> None:
    """Refuse an option that was given and has no effect on what is asked for."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    for name in given:
        if name not in _USED[asked] | {"files"}:
            where = "a verdict on files" if asked == "files" else f"rlkernel judge {asked}"
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on {where}; leave it out")


def _attack(chosen: tuple[Attack, ...], device: str, sandbox: str, *, loaded: bool, jobs: int, json: bool) -> None:
    from rlkernel_judge.attack_run import attempts

    found = []
    told = partial(typer.echo, err=True)
    for attempt in attempts(chosen, device, sandbox=sandbox, loaded=loaded, jobs=jobs, progress=told):
        found.append(attempt)
        if not json:
            typer.echo(f"{attempt.name}: {attempt.summary}")
    succeeded = [a.name for a in found if a.succeeded]
    if json:
        print_json({"attacks": len(found), "succeeded": succeeded, "attempts": [a.model_dump() for a in found]})
    else:
        ran = sum(not a.skipped for a in found)
        typer.echo(f"{ran} attacks ran, {len(found) - ran} skipped, {len(succeeded)} succeeded")
    if succeeded:
        raise typer.Exit(1)


def _honest(op: str, times: int, device: str, *, loaded: bool, json: bool) -> None:
    from collections import Counter

    from rlkernel_judge.attack_run import ACCUSATIONS, honest_runs

    faults: Counter[str] = Counter()
    for found in honest_runs(op, times, device, loaded=loaded):
        fault = str(found.get("fault") or found.get("error") or "correct")
        faults[fault] += 1
        if not json:
            typer.echo(f"{fault}, speedup {found.get('speedup')} {found.get('message', '')}".rstrip())
    accused = sum(n for fault, n in faults.items() if fault in ACCUSATIONS)
    if json:
        print_json({"op": op, "runs": times, "accused": accused, "faults": dict(faults)})
    else:
        typer.echo(f"{times} honest runs, {accused} accused: {', '.join(f'{f} {n}' for f, n in faults.items())}")
    if accused:
        raise typer.Exit(1)


def _bytes(file: str) -> bytes:
    from rlkernel_judge.source import MAX_BYTES

    return read_start(file, "Name a file of Python.", MAX_BYTES + 1)


def _show(verdict: Verdict) -> None:
    word = typer.style("correct", fg="green") if verdict.correct else typer.style(verdict.fault or "wrong", fg="red")
    typer.echo(f"{verdict.file}: {word}, {verdict.held} of {verdict.attacked} clauses hold, score {verdict.score:.3f}")
    if verdict.message:
        typer.echo(f"  {verdict.message}")
    if verdict.counterexample is not None:
        typer.echo(f"  case     {verdict.counterexample.case}\n  again    {verdict.counterexample.reproduce}")
    for finding in verdict.findings:
        typer.echo(f"  source   {f'line {finding.line}: ' if finding.line else ''}{finding.message}")
    if verdict.speedup is not None and verdict.speedup_interval is not None and verdict.times is not None:
        low, high = verdict.speedup_interval
        typer.echo(
            f"  speed    {verdict.speedup:.2f}x of {verdict.baseline} ({low:.2f} to {high:.2f}): "
            f"{verdict.times.candidate.median * 1e6:.1f} us a call on {verdict.times.workload}"
        )
    if verdict.isolation is not None:
        typer.echo(f"  sandbox  {in_force(verdict.isolation)}")


# What a sandbox should have taken away, by the fact that says that it did not.
OPEN: Final = {
    "network": "NETWORK",
    "writes_outside": "WRITES OUTSIDE ITS FOLDER",
    "writes_proc": "WRITES IN /proc",
    "capabilities": "CAPABILITIES",
    "root_outside": "ROOT OUTSIDE: start the judge as another user",
}


def in_force(found: Isolation) -> str:
    """The level, and what is open in it, each in capitals."""
    if not found.facts:  # it was refused before it ran
        return found.level
    holes = [text for fact, text in OPEN.items() if found.facts.get(fact, True)]
    filtered = found.facts.get("calls_filtered", False)
    return ", ".join([found.level, *holes, *([] if filtered else ["NO FILTER OF SYSTEM CALLS"])])


def _compared(found: Any) -> None:
    columns = ("measure", *found.pass_at_k)
    print_table(columns, [("pass@k", *(f"{p:.3f}" for p in found.pass_at_k.values()))])
    print_table(("measure", *found.fast_p), [("fast_p", *(f"{p:.3f}" for p in found.fast_p.values()))])
    means = {k: "none" if v is None else f"{v:.3f}" for k, v in found.geometric_mean.items()}
    print_table(("measure", *means), [("geometric mean of speedups", *means.values())])
    typer.echo(plain(f"best: {found.best or 'none'}"))

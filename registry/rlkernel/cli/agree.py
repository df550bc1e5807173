"""`rlkernel agree`: how far the rollout's log-probabilities are from the trainer's, and with which kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlkernel import lock, policy
from rlkernel import record as record_file
from rlkernel.cli.options import Force, Json, backends_named, dtype_named, present, to_write
from rlkernel.cli.output import plain, print_json, print_table
from rlkernel_core.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    import torch

    from rlkernel.agree import Agreement, Drift
    from rlkernel.rollouts import Replay
    from rlkernel_core.decision import Decision

EXAMPLES: Final = (
    ("rlkernel agree", "the built-in decoder with random weights, the kernels that the policy chooses"),
    ("rlkernel agree --invariant --score linear_logprob --limit 0", "batch invariant on both sides: equal to the bit"),
    ("rlkernel agree --trainer torch --output rlkernel.lock", "another order on one side; pin both"),
    ("rlkernel agree runs/checkpoint --dtype bfloat16", "a model of save_pretrained, by transformers"),
    ("rlkernel agree runs/checkpoint --exact", "the same by operators of exact bits: zero, or the first that differs"),
    (
        "rlkernel agree runs/checkpoint --record runs/rollout.safetensors --ran runs/engine --output rlkernel.lock",
        "a rollout that an engine drew, scored by the trainer here; pin what ran on both sides",
    ),
)
EXITS: Final = {0: "measured, and within --limit", 1: "the drift is beyond --limit, or not zero with --exact"}


# What says how to draw, and has no meaning where another process drew.
_DRAWING: Final = ("rollout", "score", "invariant", "sequences", "prompt", "tokens", "temperature", "seed")
_REPLAYING: Final = ("ran", "weights")  # what a recorded rollout alone has


def command(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="Folder of a model, or a config.json for random weights; left out, ours."),
    ] = None,
    *,
    rollout: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Order of backends of the rollout; default the configured one.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Order of backends of the trainer; default the configured one.")
    ] = None,
    score: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The rollout's log-probability: of the sampler, or linear_logprob's, as --exact."
        ),
    ] = "",
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Our decoder computes token by token what it computes at once.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="MODEL by rlkernel.exact; the first module that differs is named.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score a rollout that rlkernel.rollouts.write recorded; nothing is drawn."),
    ] = None,
    ran: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="With --record: decisions.json of the process that drew, for --output."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="VERSION", help="With --record: the version in MODEL; others are left out.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences drawn together.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens drawn a sequence.")] = 24,
    temperature: Annotated[float, typer.Option(min=1e-6, help="Of the law, on both sides.")] = 1.0,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of weights and hidden states.")] = "float32",
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Where; default cuda if torch sees one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and draws.")] = 0,
    limit: Annotated[float | None, typer.Option(min=0.0, help="Exit with 1 where |dlogp| is larger somewhere.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a lock file that pins both sides.")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Draw with the rollout's kernels, score with the trainer's, compare.

    Rollout and trainer compute the same log-probabilities by different
    programs, and the difference is an error in every importance ratio. The
    head's kernels alone are told apart from the rest of the model.

    With --record another process has drawn, such as an engine of vLLM, and
    the trainer's kernels score its tokens: under the law that the engine
    states, and under the trainer's own, which tells a mismatch of laws from
    one of numerics.
    """
    _check_together(context, model, record, exact=exact)
    from rlkernel.agree import measure
    from rlkernel.agree.sides import SCORES
    from rlkernel.probe import device_here

    kind, where = _dtype(dtype), device_here() if device is None else present(device)
    drawn, scored = backends_named(rollout, "--rollout"), backends_named(trainer, "--trainer")
    for order in (drawn, scored):
        policy.use(*order)  # an error before anything is drawn
    score = score or ("linear_logprob" if exact else "sampler")
    if score not in SCORES:
        raise UnknownNameError("score", score, SCORES)
    if output is not None:
        to_write(output, "--output", force=force)
    if record is not None:
        loaded: Any = {"exact": exact, "dtype": kind, "device": where}
        replayed, there = _replayed(model, record, ran=ran, weights=weights, trainer=scored, **loaded)
        _tell(record, replayed, there, output, json=json)
        _within(replayed.drift.max, limit)
        return
    subject = _subject(
        model, exact=exact, invariant=invariant, seed=seed, dtype=kind, device=where, room=prompt + tokens
    )
    found = measure(
        subject,
        rollout=drawn,
        trainer=scored,
        score=score,
        sequences=sequences,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
    )
    parted = _parted(subject, found, prompt + tokens, seed) if exact else None
    if output is not None:
        lock.write(output, (*found.rollout, *found.trainer))
    if json:
        print_json({**found.as_dict(), "lock": str(output) if output else None, "first": parted})
    else:
        _print(found, output)
    if parted is not None:
        typer.echo(f"not exact: {parted}", err=True)
        raise typer.Exit(1)
    _within(found.drift.max, limit)


def _check_together(context: typer.Context, model: Path | None, record: Path | None, *, exact: bool) -> None:
    """Refuse options that have no meaning beside a recorded rollout, or without one."""
    sources = ((name, context.get_parameter_source(name)) for name in (*_DRAWING, *_REPLAYING))
    given = [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]
    for name in given:
        if record is None and name in _REPLAYING:
            raise ConfigError(f"--{name} is of a recorded rollout; name one with --record")
        if record is not None and name in _DRAWING:
            raise ConfigError(f"--{name} is about drawing, and --record has drawn; leave one of them away")
    if record is not None and exact and model is None:
        raise ConfigError("--exact is of a model of transformers; name the one that drew")


def _replayed(
    model: Path | None,
    file: Path,
    *,
    ran: Path | None,
    weights: str | None,
    trainer: tuple[str, ...],
    exact: bool,
    **where: Any,
) -> tuple[Replay, tuple[Decision, ...]]:
    """What came of scoring a recorded rollout, and what ran in the process that drew."""
    from rlkernel import rollouts
    from rlkernel.agree.pretrained import pretrained

    drawn = rollouts.read(file)
    there = _ran(ran, drawn.decisions) if ran is not None else ()
    subject: Any = rollouts.Builtin(**where).model if model is None else pretrained(model, exact=exact, **where)
    return rollouts.replay(drawn, subject, trainer=trainer, weights=weights), there


def _tell(file: Path, found: Replay, there: tuple[Decision, ...], output: Path | None, *, json: bool) -> None:
    if output is not None:
        lock.write(output, (*there, *found.trainer))
    if json:
        sides = {"rollout": [d.as_dict() for d in there], "lock": str(output) if output else None}
        print_json({**found.as_dict(), **sides})
    else:
        _print_replay(file, found, there, output)


def _ran(run: Path, stated: str) -> tuple[Decision, ...]:
    """What ran in the process that drew."""
    found, rans = record_file.read(run)
    if stated and found != stated:
        raise ConfigError(f"--ran {run}: its decisions are {found}, and the rollout was drawn by {stated}")
    return tuple(r.decision for r in rans)


def _within(drift: float, limit: float | None) -> None:
    if limit is not None and not drift <= limit:
        typer.echo(f"the drift is beyond the limit: {drift:.3g} > {limit:.3g}", err=True)
        raise typer.Exit(1)


def _subject(model: Path | None, *, exact: bool, invariant: bool, room: int, **more: Any) -> Any:
    """The model that both sides run; `room` is the length of its longest sequence."""
    from rlkernel.agree import builtin

    if model is None and exact:
        raise ConfigError("--exact is of a model of transformers; name one, or use --invariant for ours")
    if model is None:
        return builtin(invariant=invariant, context=1 << (room - 1).bit_length(), **more)
    if invariant:
        raise ConfigError("--invariant is of the built-in decoder; leave MODEL or --invariant away")
    from rlkernel.agree.pretrained import pretrained

    return pretrained(model, exact=exact, **more)


def _parted(subject: Any, found: Agreement, length: int, seed: int) -> str | None:
    """What is the first to have other bits; None where all log-probabilities are equal."""
    if found.drift.equal == 1.0:
        return None
    import torch

    from rlkernel.agree.first import first_difference

    ids = torch.randint(subject.vocab, (2, length), generator=torch.Generator().manual_seed(seed))
    first = first_difference(subject, ids.to(subject.head.device))
    return "hidden states have the same bits, and the head's products differ" if first is None else str(first)


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, str(dtype_named(name)), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"--dtype {name} is no floating type; use float32, bfloat16 or float16")
    return found


def _print(found: Agreement, output: Path | None) -> None:
    rows = (("whole path", found.drift), ("kernels of the head", found.kernels))
    _print_drifts(rows, f"{found.model}: {found.drift.tokens} tokens")
    typer.echo(f"hidden states differ by {found.hidden:.3g} of their largest entry")
    _print_sides(found.rollout, found.trainer, output)


def _print_replay(file: Path, found: Replay, there: tuple[Decision, ...], output: Path | None) -> None:
    rows = [(f"{found.law} law on both sides", found.drift)]
    if found.mixed is not None:
        rows.append((f"tempered trainer, {found.law} rollout", found.mixed))
    if len(found.places) > 1:
        ends = [f"to {first - 1}" for first, _ in found.places[1:]] + ["on"]
        rows += [(f"  tokens {at} {end}", d) for (at, d), end in zip(found.places, ends, strict=True)]
    _print_drifts(rows, f"{found.model}: {found.drift.tokens} tokens of {file}")
    if found.left_out:
        typer.echo(f"{found.left_out} tokens left out: drawn by other weights, or greedy")
    for one in found.worst:
        place = f"sequence {one.sequence} token {one.token}, id {one.id}"
        typer.echo(f"{place}: {one.rollout:.6g} in the rollout, {one.trainer:.6g} in the trainer")
    if found.mixed is not None:
        typer.echo(
            f"a trainer's ratio against the {found.law} law is off by the second line; docs/laws.md has the remedy"
        )
    _print_sides(there, found.trainer, output)


def _print_drifts(drifts: Iterable[tuple[str, Drift]], title: str) -> None:
    rows = [
        (
            name,
            *(f"{getattr(d, column):.3g}" for column in ("max", "mean", "p99", "kl")),
            f"{d.clip:.2%}",
            f"{d.equal:.1%}",
        )
        for name, d in drifts
    ]
    print_table(("|dlogp|", "max", "mean", "p99", "KL", "clipped", "same bits"), rows, title=title)


def _print_sides(rollout: tuple[Decision, ...], trainer: tuple[Decision, ...], output: Path | None) -> None:
    for side, ran in (("rollout", rollout), ("trainer", trainer)):
        for d in ran:
            typer.echo(plain(f"{side}  {d.call.op} -> {d.backend}: {d.target} [{d.version}]").replace("\\[", "["))
    sides = "both sides" if rollout else "the trainer"
    typer.echo(f"{output} pins {sides}" if output else f"--output rlkernel.lock pins {sides}")

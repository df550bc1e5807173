"""`rlkernel verify-rollout`: whether every token of a recorded rollout was drawn from the logits that it claims."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlkernel.cli.options import Json, dtype_named, present
from rlkernel.cli.output import print_json, say
from rlkernel.installation import extras
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.paths import missing

if TYPE_CHECKING:
    from rlkernel.rollouts import Params, Record, Verification

EXAMPLES: Final = (
    ("rlkernel verify-rollout runs/rollout.safetensors --model runs/checkpoint", "bf16 on a GPU against fp32 here"),
    (
        "rlkernel verify-rollout runs/rollout.safetensors --model runs/checkpoint --asked runs/asked.safetensors",
        "and its prompts, seeds and laws are those that were asked for",
    ),
    (
        "rlkernel verify-rollout runs/rollout.safetensors --model runs/checkpoint --exact --dtype bfloat16",
        "drawn by exact.generate with the same kernels: hidden states have the same bits",
    ),
    (
        "rlkernel verify-rollout runs/rollout.safetensors --model runs/checkpoint --tolerance 0.1 --json",
        "logits within 0.1, every complaint as JSON",
    ),
)
EXITS: Final = {
    0: "every token that was checked is drawn here too, or explained by --tolerance",
    1: "a token, a log-probability, an end or a request is not, or too many tokens differ",
}
# Logits: 36 layers in bf16 were off by at most 0.11 on an H200 (docs/verify-rollouts.md); twice that and a little.
TOLERANCE: Final = 0.25
EXACT: Final = 1e-4  # logits: fp32 sums of the head in another order
_SHOWN: Final = 20  # complaints that are printed


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A record that rlkernel.rollouts.write wrote.")],
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="DIR", help="Folder of save_pretrained, or 'builtin': the decoder of `rlkernel agree`."
        ),
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help=f"Most that a logit may be off by numerics; {TOLERANCE} unless given, {EXACT} with --exact."
        ),
    ] = None,
    asked: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What you asked for: prompts, seeds, steps, laws and ends must be the same."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="VERSION", help="Version that DIR holds; tokens of others are left out."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="DIR by rlkernel.exact, as the rollout was drawn; with its --dtype.")
    ] = False,
    score: Annotated[
        str, typer.Option(metavar="NAME", help="As exact.generate was given it: linear_logprob or logprob.")
    ] = "linear_logprob",
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of weights and hidden states.")] = "float32",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where the model runs.")] = "cpu",
    json: Json = False,
) -> None:
    """Draw every token of a recorded rollout again, and say which were not.

    The record has prompts, seeds, laws and drawn tokens. Logits are computed
    by the model, and each token is drawn by the noise that its seed and step
    give. A token that differs must be one that logits within --tolerance
    would have given; other tokens, and more of those than numerics give, are
    printed, and so are log-probabilities beyond their bounds.

    What nobody can see in a record: whether another seed was tried before.
    Choose the seeds yourself, and pass what you asked for as --asked.
    """
    lacking = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"verify-rollout needs {', '.join(lacking)}: {extras('cpu')}")
    from rlkernel import rollouts

    load = _model(model, exact=exact, score=score, dtype=dtype, device=device)
    wanted = rollouts.read(asked) if asked is not None else None
    record = rollouts.read(file)
    run = load()
    limit = tolerance if tolerance is not None else EXACT if exact else TOLERANCE
    with typer.progressbar(length=max(record.tokens, 1), label=f"{run.name}: tokens", file=sys.stderr) as bar:
        found = rollouts.verify(record, run, tolerance=limit, weights=weights, asked=wanted, progress=bar.update)
    if json:
        print_json({"file": str(file), "model": run.name, **_held(record), **found.as_dict()})
    else:
        _print(file, record, found)
    if not found.ok:
        said = found.complaints()
        more = [f"and {len(said) - _SHOWN} more; --json has them all"] if len(said) > _SHOWN else []
        typer.echo("\n".join((*said[:_SHOWN], *more)), err=True)
        raise typer.Exit(1)


def _model(name: str, *, exact: bool, score: str, dtype: str, device: str) -> Callable[[], Any]:
    """What loads the model; every word is looked at before."""
    import torch

    from rlkernel.rollouts import model

    kind, where = getattr(torch, str(dtype_named(dtype)), None), present(device)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"--dtype {dtype} is no floating type; use float32, bfloat16 or float16")
    if score not in model.SCORES:
        raise UnknownNameError("score", score, model.SCORES)
    if name == model.BUILTIN:
        if exact:
            raise ConfigError("--exact is of a model of transformers; leave it away for the built-in decoder")
        return lambda: model.Builtin(dtype=kind, device=where)
    if not Path(name).exists():
        raise ConfigError(f"--model: {missing(Path(name))}; give a folder of save_pretrained")
    return lambda: model.pretrained(Path(name), dtype=kind, device=where, exact=exact, score=score)


def _held(record: Record) -> dict[str, Any]:
    """What a record holds, JSON-ready."""
    laws = [{"params": _said(p), "sequences": n} for p, n in Counter(r.params for r in record.rollouts).items()]
    return {
        "sequences": len(record.rollouts),
        "weights": list(record.versions),
        "decisions": record.decisions,
        "law": record.law,
        "laws": laws,
    }


def _said(params: Params) -> str:
    """What differs from the defaults."""
    given = {name: value for name, value in vars(params).items() if value != getattr(type(params), name)}
    return " ".join(f"{name}={value}" for name, value in {"temperature": params.temperature, **given}.items())


def _print(file: Path, record: Record, found: Verification) -> None:
    held = _held(record)
    by = f" by weights {', '.join(held['weights'])}" if record.versions else ""
    say(f"{file}: {held['sequences']} sequences, {record.tokens} tokens drawn{by}")
    for law in held["laws"][:_SHOWN]:
        say(f"law        {law['params']}: {law['sequences']} sequences")
    if record.decisions:
        say(f"decisions  {record.decisions}")
    kinds = Counter(c.kind for c in found.wrong)
    say(f"tokens     {found.same} drawn again, {found.explained} others explained, {kinds['token']} not explained")
    if found.unchecked:
        say(f"           {found.unchecked} not checked: drawn by other weights, or beside an id that the model has not")
    say(f"           within {found.tolerance:g} of a logit, which admits another token at {found.open}")
    if found.counted:
        least = f"chance of {found.counted} or more {found.chance:.2g}"
        say(f"           typical errors give {found.expected:.3g} others, {least}")
    if found.drift is not None:
        d = found.drift
        wrong = kinds["logprob"] + kinds["kept mass"]
        say(f"|dlogp|    max {d.max:.3g}, mean {d.mean:.3g}, {record.law} law; {wrong} beyond their bounds")
    if math.isfinite(found.needed):
        say(f"tolerance  {found.needed:.3g} would explain every token and log-probability")
    for kind in ("end", "request"):
        if kinds[kind]:
            say(f"{kind + 's':<11}{kinds[kind]} not as asked for")
    say("every token that was checked was drawn as it claims" if found.ok else "NOT drawn as it claims")

"""The command line `rlkernel`: one command per file, imported when it is asked for.

A command file holds a function `command` (its docstring is the help's first part), `EXAMPLES` (command line, what it
shows; tests run them) and `EXITS` (exit code, what it means). Errors of rlkernel become one message and exit code 2.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from rlkernel_core import __version__
from rlkernel_core.errors import RLKernelError, UnknownNameError

LOOK: Final = "See what runs"
SETTLE: Final = "Settle what runs"
TRY: Final = "Try it"
EXTEND: Final = "Extend it"

# command -> (module, group in the help), in the order of the help
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "doctor": ("rlkernel.cli.doctor", LOOK),
    "backends": ("rlkernel.cli.backends", LOOK),
    "explain": ("rlkernel.cli.explain", LOOK),
    "status": ("rlkernel.cli.status", LOOK),
    "memory": ("rlkernel.cli.memory", LOOK),
    "config": ("rlkernel.cli.config", SETTLE),
    "lock": ("rlkernel.cli.lock", SETTLE),
    "schema": ("rlkernel.cli.schema", SETTLE),
    "demo": ("rlkernel.cli.demo", TRY),
    "agree": ("rlkernel.cli.agree", TRY),
    "conformance": ("rlkernel_conformance.cli", TRY),
    "judge": ("rlkernel_judge.cli", TRY),
    "bench": ("rlkernel_bench.cli", TRY),
    "quant": ("rlkernel.cli.quant", TRY),
    "aot": ("rlkernel.cli.aot", SETTLE),
    "warmup": ("rlkernel.cli.warmup", SETTLE),
    "new-backend": ("rlkernel.cli.new_backend", EXTEND),
}

MALFORMED: Final = 2  # the question or the configuration is at fault: the same for every command

_HELP: Final = """The operator layer of RL post-training: which kernel runs, and why.

Quick start:

  rlkernel doctor                         what is missing here, and its fix
  rlkernel backends                       who is installed
  rlkernel explain logprob --device cuda  who takes a call, why not the others
  rlkernel status                         what serves each operator here
  rlkernel demo                           a small model learns through them

Every command takes --json; its --help shows examples and exit codes."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:] if argv is None else argv
    first = next((a for a in arguments if not a.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        _fail(UnknownNameError("command", first, COMMANDS))
        sys.exit(MALFORMED)
    names = COMMANDS if first is None and arguments != ["--version"] else [first] if first else []
    app(names)(args=arguments, prog_name="rlkernel")


def app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with these commands; the others' modules are not imported."""
    found = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    found.callback()(_root)
    for name in names:
        module, group = COMMANDS[name]
        part = import_module(module)
        found.command(name, help=_help(part), rich_help_panel=group)(_clean(part.command))
    return found


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda v: _version(said=v), help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def _version(*, said: bool) -> None:
    if said:
        typer.echo(f"rlkernel {__version__}")
        raise typer.Exit


def _clean(command: Callable[..., None]) -> Callable[..., None]:
    """A typed error is one message with its remedy, never a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except RLKernelError as error:
            _fail(error)
            raise typer.Exit(MALFORMED) from error

    return run


def _fail(error: RLKernelError) -> None:
    typer.echo(f"{typer.style('error', fg='red', bold=True)}: {error}", err=True)


def _help(part: Any) -> str:
    """A command's docstring, examples and exit codes as one text in rich markup."""
    lines = [*(inspect.getdoc(part.command) or "").splitlines(), "", "Examples:"]
    for example, shows in part.EXAMPLES:
        lines += ["", f"  {example}", f"      {shows}"]
    exits = {**part.EXITS, MALFORMED: "question or configuration is malformed; the message says how"}
    lines += ["", "Exit codes:", "", *(f"  {code}  {meaning}" for code, meaning in sorted(exits.items()))]
    return "\n".join(lines).replace("[", r"\[")

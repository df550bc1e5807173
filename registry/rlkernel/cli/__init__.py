"""The command line `rlkernel`: one command per file, imported when it is asked for.

A command file holds a function `command` (its docstring is the help's first part), `EXAMPLES` (command line, what it
shows; tests run them) and `EXITS` (what the exit codes 0 and 1 of `CODES` mean for it). Errors of rlkernel become one
message and exit code 2.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from rlkernel import child
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
    "verify-rollout": ("rlkernel.cli.verify_rollout", TRY),
    "conformance": ("rlkernel_conformance.cli", TRY),
    "judge": ("rlkernel_judge.cli", TRY),
    "bench": ("rlkernel_bench.cli", TRY),
    "quant": ("rlkernel.cli.quant", TRY),
    "aot": ("rlkernel.cli.aot", SETTLE),
    "warmup": ("rlkernel.cli.warmup", SETTLE),
    "new-backend": ("rlkernel.cli.new_backend", EXTEND),
}

# What every command ends with, whatever it does; its `EXITS` say what yes and no are. docs/explain.md has this table.
CODES: Final[Mapping[int, str]] = {
    0: "yes: it is done, or what was asked holds",
    1: "no: what was asked does not hold",
    2: "no answer: the message says which word, file or setting is wrong",
    70: "a bug: something raised; the traceback is printed",
    130: "interrupted",
    141: "the reader of the output has closed it",
}
MALFORMED, BUG, INTERRUPTED, UNREAD = 2, 70, 130, 141

_USAGE: Final[Any] = typer.BadParameter.__base__  # UsageError, wherever this Typer has it

_HELP: Final = """The operator layer of RL post-training: which kernel runs, and why.

Quick start:

  rlkernel doctor                         what is missing here, and its fix
  rlkernel backends                       who is installed
  rlkernel explain logprob --device cuda  who takes a call, why not the others
  rlkernel status                         what serves each operator here
  rlkernel demo                           a small model learns through them

Every command takes --json; its --help shows examples and exit codes."""
_EPILOG: Final = "Exit codes of every command:\n\n" + "\n\n".join(f"{code}  {text}" for code, text in CODES.items())


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:] if argv is None else argv
    first = next((a for a in arguments if not a.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        _fail(UnknownNameError("command", first, COMMANDS))
        sys.exit(MALFORMED)
    names = COMMANDS if first is None and arguments != ["--version"] else [first] if first else []
    os.environ.update(child.QUIET_PYDANTIC)  # before anything imports it
    from rlkernel.discover import guarded

    _, error = guarded(lambda: app(names)(args=arguments or ["--help"], prog_name="rlkernel"))
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        traceback.print_exception(error)
        sys.exit(BUG)


class _Group(TyperGroup):
    """The commands, each of which ends with one of `CODES`; a malformed command line is one line, as other errors."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; in standalone mode exit with its code."""
        run = functools.partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except _USAGE as error:
            at = error.ctx.command_path if error.ctx is not None else "rlkernel"
            _fail(f"{' '.join(error.format_message().split()).rstrip('.')}; {at} --help shows what there is")
            code = MALFORMED
        except typer.Abort:
            code = INTERRUPTED
        except SystemExit as end:  # of shell completion, or 1 where standard output is closed
            code = UNREAD if end.code == 1 else end.code
        sys.exit(code)


def app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with these commands; the others' modules are not imported."""
    found = typer.Typer(
        cls=_Group,
        help=_HELP,
        epilog=_EPILOG,
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


def _fail(error: RLKernelError | str) -> None:
    typer.echo(f"{typer.style('error', fg='red', bold=True)}: {error}", err=True)


def _help(part: Any) -> str:
    """A command's docstring, examples and exit codes as one text in rich markup."""
    lines = [*(inspect.getdoc(part.command) or "").splitlines(), "", "Examples:"]
    for example, shows in part.EXAMPLES:
        lines += ["", f"  {example}", f"      {shows}"]
    exits = {**CODES, **part.EXITS}
    lines += ["", "Exit codes:", "", *(f"  {code}  {meaning}" for code, meaning in sorted(exits.items()))]
    return "\n".join(lines).replace("[", r"\[")

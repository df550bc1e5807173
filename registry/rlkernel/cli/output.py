"""What commands print: tables and colored verdicts for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from rlkernel_core.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

# Where output is no terminal its width is nobody's screen: lines are left long enough to stay whole.
_PIPE_WIDTH: Final = 200
_COLORS: Final = {"YES": "green", "no": "red", "TIE": "yellow", "fix:": "cyan"}


def print_json(data: Any) -> None:
    """Indented JSON on standard output."""
    typer.echo(json.dumps(data, indent=2))


def console() -> Console:
    """The terminal, or the pipe with lines left whole."""
    from rich.console import Console

    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Rows under headings; a cell may hold rich markup."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_shown(cell) for cell in row))
    out = console()
    with out.capture() as drawn:
        out.print(table)
    if title:
        typer.secho(title, bold=True)
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    typer.echo("\n".join(lines).strip("\n") + "\n")


def say(text: str) -> None:
    """A line on standard output, of text that may come from a plugin or a file."""
    typer.echo(_shown(text))


def _shown(text: str) -> str:
    """Text as it may be printed, its own line breaks kept."""
    return "\n".join(visible(line) for line in text.split("\n"))


def plain(text: str) -> str:
    """Text whose brackets are no rich markup."""
    return text.replace("[", r"\[")


def colored(explanation: str) -> str:
    """An explanation with its verdicts colored; `typer.echo` drops colors where there is no terminal."""
    return "\n".join(_colored(line) for line in explanation.splitlines())


def _colored(line: str) -> str:
    word, _, _ = line.strip().partition(" ")
    if not line.startswith("  ") or word not in _COLORS:
        return line
    return line.replace(word, typer.style(word, fg=_COLORS[word], bold=word == "YES"), 1)

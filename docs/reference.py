"""The pages of the reference, written from what they are about: specs, manifests, docstrings, commands, settings.

Each function here returns a page in Markdown. Docstrings are mkdocstrings' work: a page names what it shows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from public_names import PAGES, public

from rlkernel.cli import COMMANDS, MALFORMED, app
from rlkernel.config import ENVIRONMENT, OpSettings, Settings, merge
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import backend as reference_backend

if TYPE_CHECKING:
    from rlkernel_core import Backend

ROOT = Path(__file__).resolve().parents[1]


def pages() -> dict[str, str]:
    """Path of each page of the reference, and its text."""
    found = {f"reference/operators/{name}.md": operator(spec) for name, spec in OPERATORS.items()}
    found |= {api_page(title): api(title) for title in PAGES}
    found["reference/command-line.md"] = command_line()
    found["reference/configuration.md"] = configuration()
    found["reference/manifests.md"] = manifests()
    return found


def api_page(title: str) -> str:
    """The path of a page of public names."""
    return f"reference/api/{title.replace(' and ', '-').replace('.', '-')}.md"


def api(title: str) -> str:
    """Every public name of some modules; one that stands in several is documented at the first."""
    first: dict[str, tuple[str, str]] = {}
    for module in (module for modules in PAGES.values() for module in modules):
        for entry in public(module):
            first.setdefault(entry.path, (module, entry.name))
    parts = [f"# {title}"]
    for module in PAGES[title]:
        names = public(module)
        told = inspect.getdoc(import_module(module)) or ""
        parts.append(f"## `{module}`")
        parts.append(told.partition("\n")[0])
        if module == "rlkernel":
            listed = ", ".join(f"[`{name}`](../operators/{name}.md)" for name in OPERATORS)
            parts.append(f"The operators have a page each: {listed}.")
        for entry in names:
            if (module, entry.name) == first[entry.path]:
                parts.append(documented(entry.path, f"{module}.{entry.name}"))
            else:
                parts.append(f"`{module}.{entry.name}` is [`{'.'.join(first[entry.path])}`][{entry.path}].")
    return "\n\n".join(parts) + "\n"


def documented(path: str, heading: str = "", **options: object) -> str:
    """What mkdocstrings makes of a name: a directive."""
    options = {"heading": heading, "toc_label": heading.rpartition(".")[2], **options} if heading else options
    lines = [f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items())]
    return "\n".join(lines if options else lines[:1])


def operator(spec: Any) -> str:
    """What a spec says."""
    parts = [f"# {spec.id}", spec.summary.capitalize() + "."]
    guide = ROOT / "docs" / "ops" / f"{spec.name}.md"
    if guide.exists():
        parts.append(f"[The guide](../../ops/{spec.name}.md) has examples, costs and what was measured.")
    lines = "\n".join(f"    {line}," for line in signature(spec.parameters.values()))
    parts.append(f"```python\nrlkernel.{spec.name}(\n{lines}\n) -> {spec.signature.return_annotation}\n```")
    path = f"{spec.record.__module__}.{spec.record.__qualname__}"
    hidden = ("show_root_heading", "show_root_toc_entry", "show_docstring_attributes", "members")
    parts.append(documented(path, **dict.fromkeys((*hidden, "show_bases", "show_signature"), "false")))
    parts += ["## Features", "What an implementation may claim, and what a call may need."]
    parts.append("\n".join(f"- `{f.name}`: {f.text}" for f in spec.features))
    parts += ["## Clauses", "What must hold, sentence by sentence; the conformance suite attacks each."]
    clauses = [
        f"- **{c.id}** {c.title}: {c.text}{f' (where `{c.feature}` is claimed)' if c.feature else ''}"
        for c in spec.clauses
    ]
    parts.append("\n".join(map(escaped, clauses)))
    if spec.tolerances:
        sources = list(dict.fromkeys(t.source for t in spec.tolerances))
        rows = [(t.output, t.dtype, f"{t.atol:g}", f"{t.rtol:g}", sources.index(t.source) + 1) for t in spec.tolerances]
        parts += ["## Tolerances", "How far a result may be from the float64 definition on the same inputs."]
        parts.append(table(("result", "dtype", "absolute", "relative", "source"), rows))
        parts.append("\n".join(f"{n}. {escaped(source)}" for n, source in enumerate(sources, 1)))
    return "\n\n".join(parts) + "\n"


def signature(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Each parameter as it is written in a definition, and the star before those by keyword."""
    lines = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        given = "" if p.default is p.empty else f" = {p.default!r}"
        lines.append(f"{p.name}: {p.annotation}{given}")
    return lines


def backends() -> list[Backend]:
    """Manifests of the reference and of our backends in the clone; they claim, and run nothing."""
    folders = sorted(p.parent for p in ROOT.glob("backends/*/pyproject.toml"))
    before = list(sys.path)
    sys.path[:0] = map(str, folders)  # some share claims with another
    found = [import_module(f"rlkernel_{folder.name}").backend for folder in folders]
    sys.path[:] = before
    return [reference_backend, *found]


def manifests() -> str:
    """What every backend claims."""
    parts = [
        "# Backends",
        "What each backend claims in its manifest. The clauses that each passes: [conformance](../conformance.md).",
    ]
    for backend in backends():
        parts.append(f"## `{backend.name}`")
        for impl in backend.impls:
            needs = impl.requires
            devices = (needs.device,) if isinstance(needs.device, str) else needs.device
            claims = {
                "devices": (*devices, *needs.arch),
                "dtypes": needs.dtypes or ("any",),
                "packages": needs.packages,
                "features": sorted(impl.supports),
                "function": (impl.target,),
            }
            name = impl.op.partition("@")[0]
            lines = [f"- {what}: {', '.join(f'`{value}`' for value in said)}" for what, said in claims.items() if said]
            parts.append(f"[`{impl.op}`](operators/{name}.md)")
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Every command of `rlkernel` with its arguments, options, examples and exit codes."""
    commands: Any = typer.main.get_command(app(COMMANDS))
    parts = [
        "# Command line",
        "`rlkernel COMMAND --help` prints the same. Without torch, commands that need none still work.",
    ]
    for name, command in commands.commands.items():
        module, group = COMMANDS[name]
        part = import_module(module)
        parts += [f"## `rlkernel {name}`", f"*{group}.*", escaped(inspect.getdoc(part.command) or "")]
        parts.append("\n".join(_option(p) for p in command.params if p.name not in {"help", "version"}))
        parts.append("Examples:")
        parts.append("\n".join(f"```text\n{line}\n```\n\n{escaped(shows)}\n" for line, shows in part.EXAMPLES))
        exits = {**part.EXITS, MALFORMED: "question or configuration is malformed; the message says how"}
        parts += ["Exit codes:", "\n".join(f"- `{code}`: {escaped(means)}" for code, means in sorted(exits.items()))]
    return "\n\n".join(parts) + "\n"


def _option(parameter: Any) -> str:
    """An argument or an option, its value, its help and its default."""
    names = [*parameter.opts, *parameter.secondary_opts] if parameter.opts[0].startswith("-") else []
    value = "" if names and getattr(parameter, "is_flag", False) else parameter.metavar or parameter.name.upper()
    written = " ".join(part for part in (", ".join(names), value) if part)
    default = parameter.default
    given = f" Default: `{default}`." if isinstance(default, str | int | float) and default is not False else ""
    return f"- `{written}`: {escaped(parameter.help or '')}{given}{' Required.' if parameter.required else ''}"


def configuration() -> str:
    """Every key of rlkernel.toml: type, default, environment variable, and what it means."""
    default = merge([])
    parts = [
        "# Configuration",
        "The keys of the table `[rlkernel]` in `rlkernel.toml`, which are arguments of `rlkernel.use` too.",
        "[Choose a backend](../choose.md) says which layer wins.",
    ]
    kinds = {**inspect.get_annotations(OpSettings), **inspect.get_annotations(Settings)}
    for name, field in Settings.model_fields.items():
        value = getattr(default, name, getattr(default.default, name, None))
        value = sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value
        variable = f"RLKERNEL_{name.upper()}"
        about = [
            f"- type: `{str(kinds[name]).replace(' | None', '')}`",
            f"- default: {'none' if value in (None, {}) else f'`{value!r}`'}",
            f"- environment: {f'`{variable}`, {ENVIRONMENT[variable]}' if variable in ENVIRONMENT else 'none'}",
        ]
        if name not in OpSettings.model_fields:
            about.append("- for the whole process, not for one operator")
        parts += [f"## `{name}`", f"{escaped(field.description or '')}.".capitalize(), "\n".join(about)]
    parts += [
        "## Environment",
        "\n".join(f"- `{name}`: {means}" for name, means in ENVIRONMENT.items()),
        "`RLKERNEL_NAME_*` belongs to the backend NAME. Any other `RLKERNEL_*` is an error.",
    ]
    return "\n\n".join(parts) + "\n"


def table(columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> str:
    """A table in Markdown."""
    columns = list(columns)
    cells = [" | ".join(str(x or "").replace("|", "\\|") for x in row) for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {c} |" for c in cells)])


def escaped(text: str) -> str:
    """Words of a spec or of a help text as Markdown shows them: only backticks mean something."""
    return "`".join(
        part if n % 2 else part.replace("\\", "\\\\").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
        for n, part in enumerate(text.split("`"))
    )

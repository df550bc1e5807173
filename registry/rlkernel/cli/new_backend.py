"""`rlkernel new-backend`: a plugin of your own to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.cli.output import print_json
from rlkernel.plugin_template import READY, Plugin, write

EXAMPLES: Final = (
    ("rlkernel new-backend acme", "a complete plugin in ./rlkernel-acme, with its tests"),
    ("rlkernel new-backend acme --op logprob --op sample --device cuda", "for these operators, on CUDA devices"),
    ("rlkernel new-backend acme --into plugins/acme --author 'Ann <ann@acme.org>'", "elsewhere, under your name"),
)
EXITS: Final = {0: "written; nothing that existed was touched"}


def command(
    name: Annotated[str, typer.Argument(help="Its name in `order`, such as acme; its package is rlkernel_NAME.")],
    *,
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op", metavar="OP", help=f"Operator; may be given several times. {', '.join(READY)} unless given."
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Device type it claims; may be given several times. cpu unless given."),
    ] = None,
    into: Annotated[Path | None, typer.Option(help="Folder to create; rlkernel-NAME unless given.")] = None,
    author: Annotated[str | None, typer.Option(help="'Name' or 'Name <mail>', for the package's metadata.")] = None,
    json: Json = False,
) -> None:
    """Write a new plugin: package, manifest, implementations, tests, CI.

    It installs as it is, claims what it keeps and passes the conformance
    suite; put your kernels in place of its plain torch. An operator that has
    no implementation to start from gets its signature and no claim.
    """
    plugin = Plugin(name, tuple(dict.fromkeys(op or READY)), tuple(dict.fromkeys(device or ["cpu"])), author or "")
    folder = into or Path(plugin.dist)
    written = write(plugin, folder)
    steps = _steps(plugin, folder)
    if json:
        answer: dict[str, Any] = {"name": plugin.name, "distribution": plugin.dist, "package": plugin.package}
        answer |= {"folder": str(folder), "files": [str(path.relative_to(folder)) for path in written]}
        print_json({**answer, "claimed": plugin.ready, "to_write": plugin.to_write, "next": steps})
        return
    typer.echo(f"{plugin.dist} is in {folder}: {len(written)} files")
    for op_ in plugin.to_write:
        typer.echo(f"  {op_} is not claimed: write {plugin.package}/{op_}.py, then claim it in the manifest")
    typer.echo("Next:")
    for step in steps:
        typer.echo(f"  {step}")


def _steps(plugin: Plugin, folder: Path) -> list[str]:
    """Commands that bring it to life."""
    proof = [f"rlkernel conformance run {plugin.name} --device {plugin.devices[0]}"] if plugin.ready else []
    return [f"cd {folder}", "pip install -e '.[test]'", "rlkernel backends --load", "pytest", *proof]

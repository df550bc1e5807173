"""`rlkernel memory`: what this machine's memory is used for, what may be taken, and whether a checkpoint fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.cli.output import print_json, print_table
from rlkernel_core.errors import ConfigError
from rlkernel_core.host.memory import Memory, gpu_held, memory, size
from rlkernel_core.quant.spec import row_of

EXAMPLES: Final = (
    ("rlkernel memory", "total, available, reserved, and what may be taken without swapping"),
    (
        "rlkernel memory runs/model.safetensors --format int4_g128 --lora-rank 16 --train --extra 1.5",
        "and whether a checkpoint in a format, its adapter and 1.5 GiB more fit",
    ),
)
EXITS: Final = {0: "told; the checkpoint fits", 1: "the checkpoint does not fit: nothing was loaded"}
_GIB: Final = 1024**3


def command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A .safetensors or .gguf file, or a folder, to plan for.")
    ] = None,
    *,
    format: Annotated[  # noqa: A002  the option's name
        str | None, typer.Option(metavar="NAME", help="What its weights are quantized to; by default each stays.")
    ] = None,
    lora_rank: Annotated[int, typer.Option(min=0, help="Rank of an adapter beside every quantized weight.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Count the adapter's gradients and Adam moments.")] = False,
    extra: Annotated[
        float, typer.Option(min=0.0, metavar="GIB", help="KV cache, activations and logits, as you know them.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """What memory is used for here, and what may be taken of it.

    Where CPU and GPU share one memory this is the only budget there is: what
    the kernel calls available, less a reserve of 15 per cent or 1 GiB.
    With FILE, its headers are read and held against the budget; nothing is
    loaded.
    """
    if format is not None:
        row_of(format)
    found = memory()
    if found is None:
        raise ConfigError("/proc/meminfo does not tell what is available: this command works on Linux alone")
    said: dict[str, Any] = {"memory": found.as_dict(), "gpu_held": gpu_held()}
    rows = _rows(found, said["gpu_held"])
    fits = True
    if file is not None:
        from rlkernel.checkpoints.footprint import footprint

        plan = footprint(file, format=format, lora_rank=lora_rank, train=train)
        plan.add("extra", int(extra * _GIB))
        fits = plan.peak <= found.budget
        said |= {"file": str(file), "plan": plan.as_dict(), "fits": fits}
    if json:
        print_json(said)
    else:
        print_table(("memory", "", ""), rows)
        if file is not None:
            parts = [*plan.parts.items(), ("one layer, while loading", plan.passing), ("at most", plan.peak)]
            print_table((str(file), ""), [(what, size(nbytes)) for what, nbytes in parts])
            typer.echo(f"{'fits' if fits else 'does not fit'}: {size(plan.peak)} of {size(found.budget)}")
    if not fits:
        raise typer.Exit(1)


def _rows(found: Memory, held: int | None) -> list[tuple[str, str, str]]:
    """What is told to people."""
    used = found.total - found.available
    rows = [
        ("total", found.total, "what the kernel has; carve-outs of firmware are not in it"),
        ("used", used, "by programs and the kernel; not given back"),
        ("page cache", found.cached, "files that were read; most of it is given back when asked for"),
        ("free", found.free, "used by nobody; what torch.cuda.mem_get_info calls free on a Jetson"),
        ("available", found.available, "what can be taken without swapping, as the kernel estimates"),
        ("reserve", found.reserve, "left to the system: 15 % or 1 GiB"),
        ("budget", found.budget, "what may be taken: available less reserve"),
        ("piece", found.piece, "what calls that work in pieces take at a time on Jetson: an eighth of it"),
        ("swap", found.swap_total, f"of which {size(found.zram)} zram, which is this memory, compressed"),
    ]
    rows += [("container", found.limit, "what its limit still allows")] if found.limit is not None else []
    rows += [("GPU buffers", held, "of all processes (nvmap), part of used")] if held is not None else []
    return [(name, size(nbytes), text) for name, nbytes, text in rows]

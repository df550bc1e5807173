"""`rlkernel quant`: what a quantized checkpoint holds, and the same weights in another spelling or format."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlkernel.checkpoints import conversion, files, folders
from rlkernel.checkpoints.schemes import Item, Source, items
from rlkernel.cli.options import Force, Json, to_write
from rlkernel.cli.output import print_json, print_table
from rlkernel_core.errors import ArgumentError, UnknownNameError

EXAMPLES: Final = (
    ("rlkernel quant inspect runs/model.safetensors", "every weight: its scheme, shape and bytes"),
    ("rlkernel quant inspect runs/model.gguf --check --json", "each weight read too: sizes, groups and scales"),
    (
        "rlkernel quant convert runs/gptq.safetensors runs/model.safetensors",
        "any scheme into QuantTensors, bit for bit",
    ),
    (
        "rlkernel quant convert runs/bf16.safetensors runs/int4.safetensors --format int4_g128 --scheme gptq",
        "quantize what no --skip pattern matches, and spell it as GPTQ does",
    ),
    (
        "rlkernel quant convert runs/model runs/model-int4 --format int4_g128",
        "a sharded checkpoint: from folder to folder, config.json and tokenizer with it",
    ),
)
EXITS: Final = {0: "read, or written whole; nothing is written otherwise"}

_ACTIONS: Final = ("inspect", "convert")


def command(
    action: Annotated[str, typer.Argument(metavar="{inspect|convert}", help="What to do.")],
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors or .gguf file, or a folder of shards.")
    ],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGET", help="convert: a .safetensors or .gguf file to write, or a folder."),
    ] = None,
    *,
    scheme: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="convert: how weights are spelt; by default gguf for *.gguf, else rlkernel."),
    ] = None,
    format: Annotated[  # noqa: A002  the option's name
        str | None,
        typer.Option(metavar="NAME", help="convert: quantize to this format; by default each keeps its own."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="convert: names that stay dense, in place of the usual ones."),
    ] = None,
    gptq_v2: Annotated[
        bool, typer.Option("--gptq-v2", help="Zero-points of a GPTQ source are stored as they are.")
    ] = False,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, metavar="GB", help="convert: the largest shard of a folder.")
    ] = folders.SHARD_BYTES / 1e9,
    check: Annotated[bool, typer.Option("--check", help="inspect: read every weight too.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Read quantized weights of GPTQ, AWQ, compressed-tensors, bitsandbytes, HQQ, gpt-oss, ModelOpt, DeepSeek and GGUF.

    Nothing is downloaded, and no model is built. Weights are read one at a
    time; a target appears when it is whole: one file, or a folder of shards
    with what else stands in the source's. Values do not change unless
    --format says so.
    """
    if action not in _ACTIONS:
        raise UnknownNameError("action", action, _ACTIONS)
    config = {"checkpoint_format": "gptq_v2"} if gptq_v2 else None
    if action == "inspect":
        if target is not None:
            raise ArgumentError("target", str(target), "inspect reads one checkpoint", "Leave it out.")
        _inspect(source, config, check=check, json=json)
        return
    if target is None:
        raise ArgumentError("target", "nothing", "convert writes a file or a folder", "Name it after the source.")
    files.there(source)
    if not target.is_dir():  # a folder is never overwritten
        to_write(target, "TARGET", force=force)
    chosen = scheme or ("gguf" if target.suffix == ".gguf" else conversion.OWN)
    done = conversion.convert(
        source,
        target,
        scheme=chosen,
        format=format,
        skip=tuple(skip) if skip else conversion.SKIPPED,
        config=config,
        shard_bytes=int(shard_gb * 1e9),
        progress=_progress if sys.stderr.isatty() else lambda *_: None,
    )
    if json:
        print_json({"source": str(source), "target": str(target), "scheme": chosen, **vars(done)})
        return
    kept = f", kept {done.kept} as stored" if done.kept else ""
    counts = f"Quantized {done.quantized} weights, left {done.dense} dense{kept}"
    typer.echo(f"{counts}, {done.bytes / 2**20:.1f} MiB written to {target} as {chosen}")
    if done.note:
        typer.echo(done.note, err=True)


def _progress(done: int, count: int, name: str) -> None:
    """One line on a terminal, written over."""
    end = "\n" if done == count else ""
    typer.echo(f"\r\x1b[2K{done}/{count} {name}{end}", err=True, nl=False)


def _inspect(path: Path, config: dict[str, str] | None, *, check: bool, json: bool) -> None:
    with files.opened(path) as source:
        rows = [_row(item, source, config, check=check) for item in items(source)]
    if json:
        print_json({"file": str(path), "weights": rows})
        return
    columns = ("weight", "scheme", "tensors", "bytes", *(("format", "shape") if check else ()))
    shown = [[str(row[c]) for c in columns] for row in rows if row["scheme"] != "dense"]
    if shown:
        print_table(columns, shown, title=str(path))
    counts = Counter(row["scheme"] for row in rows)
    typer.echo(", ".join(f"{count} {scheme}" for scheme, count in counts.most_common()) or "no tensors")


def _row(item: Item, source: Source, config: dict[str, str] | None, *, check: bool) -> dict[str, Any]:
    """What is said of a weight."""
    found: dict[str, Any] = {
        "weight": item.name,
        "scheme": item.scheme,
        "tensors": " ".join(f"{ending}{list(e.shape)}" for ending, e in item.entries.items()),
        "bytes": sum(e.nbytes for e in item.entries.values()),
    }
    if check:
        weights = item.read(source, config)
        if isinstance(weights, list):
            found["format"] = str(weights[0].spec)
            found["shape"] = [len(weights)] * (len(weights) > 1) + list(weights[0].shape)
        else:
            found["format"], found["shape"] = str(weights.dtype).removeprefix("torch."), list(weights.shape)
    return found

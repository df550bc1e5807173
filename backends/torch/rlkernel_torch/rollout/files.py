"""A rollout buffer on disk: the allocator, the cursors, and the pages in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from tempfile import NamedTemporaryFile
from typing import Any, Final

import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_torch.rollout.pages import Pages
from rlkernel_torch.rollout.slot_allocator import SlotAllocator

SCHEMA: Final = 1  # of the file


def write(path: str, shape: Mapping[str, Any], allocator: SlotAllocator, pages: Pages) -> None:
    """Save; only pages in use are written. An earlier file of this name stays until the new one is whole."""
    used = sorted(p for r in allocator.sequences.values() for p in r.pages)
    rows = _rows(used, pages)
    tensors = {name: x.index_select(0, rows) if name.startswith("field.") else x for name, x in pages.tensors().items()}
    content = {
        "schema": SCHEMA,
        "shape": _plain(shape),
        "allocator": allocator.to_dict(),
        "pages": used,
        "tensors": {name: x.cpu() for name, x in tensors.items()},
    }
    try:
        with NamedTemporaryFile(dir=Path(path).resolve().parent, delete=False) as file:
            beside = Path(file.name)
            try:
                torch.save(content, file)
                file.flush()
                beside.replace(path)
            except OSError:
                beside.unlink(missing_ok=True)
                raise
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise ArgumentError("path", path, problem, "Name a file in a folder that exists and has room.") from error


def read(path: str, shape: Mapping[str, Any], allocator: SlotAllocator, pages: Pages) -> None:
    """Load in place. Nothing changes if the file is damaged, or of another schema or shape."""
    saved = _loaded(path)
    if saved.get("schema") != SCHEMA:
        raise ArgumentError("path", path, f"has schema {saved.get('schema')}, not {SCHEMA}", "Save it anew.")
    try:
        was, here = saved["shape"], _plain(shape)
        other = [k for k in here if was.get(k) != here[k]]
        if other:
            raise ArgumentError("path", path, f"was saved with another {', '.join(other)}", "Build the buffer alike.")
        rows = _rows(saved["pages"], pages)
        values = {n: _value(n, saved["tensors"][n], x, rows) for n, x in pages.tensors().items()}
        state = allocator.state_of(saved["allocator"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("path", path, f"is damaged: {error!r}", "Load another file.") from error
    for name, x in pages.tensors().items():
        if name.startswith("field."):
            x.index_copy_(0, rows, values[name])
        else:
            x.copy_(values[name])
    allocator.take(state)


def _loaded(path: str) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise ArgumentError("path", path, problem, "Name a file that a buffer saved.") from error
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ArgumentError("path", path, "is no file of torch", "Name a file that a buffer saved.") from error
    if not isinstance(saved, dict):
        raise ArgumentError("path", path, "is no rollout buffer", "Name a file that a buffer saved.")
    return saved


def _value(name: str, saved: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A saved tensor on the device of the one that it goes to, whose dtype and shape it has."""
    value: torch.Tensor = saved.to(x.device)
    shape = (len(rows), *x.shape[1:]) if name.startswith("field.") else tuple(x.shape)
    if value.dtype != x.dtype or tuple(value.shape) != shape:
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {x.dtype} {list(shape)}")
    return value


def _rows(used: list[int], pages: Pages) -> torch.Tensor:
    if any(not 0 <= page < pages.spare // pages.page_tokens for page in used):
        raise ValueError("a page beyond the storage")
    first = torch.tensor(used, dtype=torch.int64, device=pages.table.device) * pages.page_tokens
    return (first[:, None] + torch.arange(pages.page_tokens, device=first.device)).reshape(-1)


def _plain(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {k: {n: asdict(f) for n, f in v.items()} if k == "fields" else v for k, v in shape.items()}

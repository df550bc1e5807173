"""A rollout buffer on disk: a safetensors file with the pages in use, the cursors, and the allocator as tables.

    pages                    [P] pages in use; `field.NAME` has their tokens, in this order
    table, length, ...       the device's cursors, as `Pages.tensors` names them
    sequences                [N, 9] a row for each sequence (`_COLUMNS`)
    sequence_pages           their pages, one sequence behind the other, as many as `page_counts` [N] says
    rewards                  [N, K], of finished sequences
    group_ids, group_counts  groups in order, and how many of `group_slots` are of each
    free_slots, free_pages   what is free, in the order in which it is given out

The metadata has the shape of the buffer and its counters as JSON. Nothing is unpickled, and nothing is taken over
before all of it has been looked at: a table that named a page beyond the storage would have `append` write there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core import tensor_file
from rlkernel_core.documents import json_of
from rlkernel_core.errors import ArgumentError, FileError
from rlkernel_core.spec.rollouts import STATUS
from rlkernel_core.tensor_file import Stored
from rlkernel_torch.rollout.pages import CLOSED, Pages
from rlkernel_torch.rollout.slot_allocator import SlotAllocator

SCHEMA: Final = 2  # of the file; 1 was torch's own format
_METADATA: Final = "rollout_buffer"
_REMEDY: Final = "Load a file that a buffer of this version saved."
_COLUMNS: Final = ("slot", "stamp", "group", "version", "limit", "length", "status", "open", "valid")
_CODES: Final = ("", *STATUS)  # of an open sequence, and of those that ended
_TABLES: Final = ("pages", "sequences", "sequence_pages", "page_counts", "group_ids", "group_counts", "group_slots",
                  "free_slots", "free_pages")  # fmt: skip
_KEPT: Final = ("high_water", "counts", "counters")  # of the allocator, in the metadata
_FORM: Final = {
    "schema": int,
    "shape": {str: object},
    "high_water": {"tokens": int, "seqs": int, "groups": int},
    "counts": {str: int},
    "counters": {str: {str: int}},
}


def write(path: str, shape: Mapping[str, Any], allocator: SlotAllocator, pages: Pages) -> None:
    """Save; only pages in use are written. An earlier file of this name stays until the new one is whole.

    Raises:
        FileError: it cannot be written.
    """
    state = allocator.to_dict()
    sequences = state["sequences"]
    used = sorted(p for s in sequences for p in s["pages"])
    rows = _rows(used, pages)
    columns = [
        [*(int(s[n]) for n in _COLUMNS[:6]), _CODES.index(s["status"]), s["open"], s["valid"]] for s in sequences
    ]
    finished = [s["rewards"] or (0.0,) * shape["rewards"] for s in sequences]
    tables = {
        "pages": used,
        "sequences": columns,
        "sequence_pages": [p for s in sequences for p in s["pages"]],
        "page_counts": [len(s["pages"]) for s in sequences],
        "group_ids": list(state["groups"]),
        "group_counts": [len(slots) for slots in state["groups"].values()],
        "group_slots": [slot for slots in state["groups"].values() for slot in slots],
        "free_slots": state["free_slots"],
        "free_pages": state["free_pages"],
    }
    tensors = {name: torch.tensor(table, dtype=torch.int64, device="cpu") for name, table in tables.items()}
    tensors["sequences"] = tensors["sequences"].view(len(sequences), len(_COLUMNS))
    rewards = torch.tensor(finished, dtype=torch.float64, device="cpu")
    tensors["rewards"] = rewards.view(len(sequences), shape["rewards"])
    for name, x in pages.tensors().items():
        tensors[name] = (x.index_select(0, rows) if name.startswith("field.") else x).cpu()
    said = {k: state[k] for k in _KEPT}
    metadata = {_METADATA: json.dumps({"schema": SCHEMA, "shape": _plain(shape), **said})}
    tensor_file.write(Path(path), ((name, *_raw(x)) for name, x in tensors.items()), metadata)


def read(path: str, shape: Mapping[str, Any], allocator: SlotAllocator, pages: Pages) -> None:
    """Load in place. Nothing changes if anything of the file is wrong.

    Raises:
        FileError: absent, no rollout buffer, of another schema, or damaged.
        ArgumentError: of a buffer of another shape.
    """
    stored, metadata = tensor_file.read_header(Path(path))
    if _METADATA not in metadata:
        raise FileError(path, "", "is no rollout buffer", _REMEDY)
    said = json_of(metadata[_METADATA], _FORM, path, _REMEDY)
    if said["schema"] != SCHEMA:
        raise FileError(path, "schema", f"is {said['schema']}, not {SCHEMA}", _REMEDY)
    was, here = said["shape"], json.loads(json.dumps(_plain(shape)))
    other = [k for k in here if was.get(k) != here[k]]
    if other:
        raise ArgumentError("path", path, f"was saved with another {', '.join(other)}", "Build the buffer alike.")
    try:
        tables = _tables(path, stored, shape["rewards"])
        used = tables["pages"].tolist()
        rows = _rows(used, pages)
        values = {
            name: _loaded(path, name, stored, x.dtype, (len(used), pages.page_tokens, *x.shape[1:]), x.shape)
            for name, x in pages.tensors().items()
        }
        state = allocator.state_of({**_allocator(tables), **{k: v for k, v in said.items() if k in _KEPT}})
        _check_cursors(values, used, state, pages, allocator)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(path, "", f"is damaged: {error!r}", _REMEDY) from error
    for name, x in pages.tensors().items():
        value = values[name].to(x.device)
        if name.startswith("field."):
            x.index_copy_(0, rows, value)
        else:
            x.copy_(value)
    allocator.take(state)


def _tables(path: str, stored: Mapping[str, Stored], rewards: int) -> dict[str, Tensor]:
    """What the allocator needs, with the sizes that hold together."""
    sizes = {name: stored[name].shape[0] for name in _TABLES if stored[name].shape}
    shapes = {name: (sizes[name],) for name in _TABLES} | {"sequences": (sizes["sequences"], len(_COLUMNS))}
    tables = {name: _exact(path, name, stored, torch.int64, shape) for name, shape in shapes.items()}
    tables["rewards"] = _exact(path, "rewards", stored, torch.float64, (sizes["sequences"], rewards))
    return tables


def _allocator(tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """The allocator's tables as `SlotAllocator.to_dict` gave them."""
    counts, members = tables["page_counts"].tolist(), tables["group_counts"].tolist()
    pages = _cut(tables["sequence_pages"].tolist(), counts)
    sequences = []
    for row, own, rewards in zip(tables["sequences"].tolist(), pages, tables["rewards"].tolist(), strict=True):
        said = dict(zip(_COLUMNS, row, strict=True))
        still = bool(said["open"])
        ended = range(_CODES.index("filler") + 1, len(_CODES))
        if said["status"] not in (range(1) if still else ended) or {said["open"], said["valid"]} - {0, 1}:
            raise ValueError("a status that is none")
        said |= {"status": _CODES[said["status"]], "open": still, "valid": bool(said["valid"]), "pages": own}
        sequences.append({**said, "rewards": () if still else tuple(rewards)})
    ids = tables["group_ids"].tolist()
    groups = dict(zip(ids, _cut(tables["group_slots"].tolist(), members), strict=True))
    if len(groups) != len(ids):
        raise ValueError("a group is there twice")
    free = {name: tables[name].tolist() for name in ("free_slots", "free_pages")}
    return {"sequences": sequences, "groups": groups, **free}


def _cut(items: list[int], counts: Sequence[int]) -> list[list[int]]:
    """A list as lists of these lengths."""
    if min(counts, default=0) < 0 or sum(counts) != len(items):
        raise ValueError("counts that do not add up")
    return [items[a:b] for a, b in pairwise(accumulate(counts, initial=0))]


def _check_cursors(
    values: Mapping[str, Tensor], used: list[int], state: Mapping[str, Any], pages: Pages, allocator: SlotAllocator
) -> None:
    """The device's cursors stay within the storage, and say of each sequence what the allocator says."""
    table, length, limit, stamp = (values[name] for name in ("table", "length", "limit", "stamp"))
    room = table.shape[1] * pages.page_tokens
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < max(1, pages.spare // pages.page_tokens):
        raise ValueError("a page beyond the storage")
    if bool(((length < 0) | (length > limit) | (limit > room)).any()):
        raise ValueError("a sequence beyond its limit")
    if sorted(used) != sorted(p for s in state["sequences"].values() for p in s.pages):
        raise ValueError("pages that no sequence has")
    for slot, s in state["sequences"].items():
        reach = allocator.pages_of(s.limit if s.open else s.length)
        if table[slot, : len(s.pages)].tolist() != s.pages or len(s.pages) < reach or not 0 <= s.length <= s.limit:
            raise ValueError(f"pages of slot {slot}")
        if int(limit[slot]) != s.limit or (not s.open and int(length[slot]) != s.length):
            raise ValueError(f"tokens of slot {slot}")
    writable = {slot: s.stamp for slot, s in state["sequences"].items() if s.open}
    if {slot: mark for slot, mark in enumerate(stamp.tolist()) if mark != CLOSED} != writable:
        raise ValueError("a slot that is open on one side only")


def _loaded(
    path: str, name: str, stored: Mapping[str, Stored], dtype: torch.dtype, of_pages: Sequence[int], shape: torch.Size
) -> Tensor:
    """A tensor of the device's: of a field the tokens of the pages in use, else all of it."""
    if not name.startswith("field."):
        return _exact(path, name, stored, dtype, tuple(shape))
    return _exact(path, name, stored, dtype, (of_pages[0] * of_pages[1], *of_pages[2:]))


def _exact(path: str, name: str, stored: Mapping[str, Stored], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a file, which has a dtype and a shape; nothing is read where it has not."""
    row = stored[name]
    if (tensor_file.DTYPES[row.dtype][0], row.shape) != (str(dtype).removeprefix("torch."), tuple(shape)):
        raise FileError(path, name, f"is {row.dtype}{list(row.shape)}, not {dtype}{list(shape)}", _REMEDY)
    if not row.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with Path(path).open("rb") as file:
        file.seek(row.first)
        data = bytearray(file.read(row.nbytes))
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _raw(x: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Torch's name of the dtype, shape and bytes in order."""
    data: bytes = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return str(x.dtype).removeprefix("torch."), tuple(x.shape), data


def _rows(used: list[int], pages: Pages) -> Tensor:
    if any(not 0 <= page < pages.spare // pages.page_tokens for page in used):
        raise ValueError("a page beyond the storage")
    first = torch.tensor(used, dtype=torch.int64, device=pages.table.device) * pages.page_tokens
    return (first[:, None] + torch.arange(pages.page_tokens, device=first.device)).reshape(-1)


def _plain(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {k: {n: asdict(f) for n, f in v.items()} if k == "fields" else v for k, v in shape.items()}

"""A rollout buffer on disk: the ledger, the cursors, and the pages in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.reference.rollout.ledger import Ledger
from rlkernel_core.reference.rollout.pages import Pages

SCHEMA: Final = 1  # of the file


def write(path: str, shape: Mapping[str, Any], ledger: Ledger, pages: Pages) -> None:
    """Save; only pages in use are written."""
    used = sorted(p for r in ledger.sequences.values() for p in r.pages)
    rows = _rows(used, pages)
    tensors = {name: x.index_select(0, rows) if name.startswith("field.") else x for name, x in pages.tensors().items()}
    torch.save(
        {
            "schema": SCHEMA,
            "shape": _plain(shape),
            "ledger": ledger.to_dict(),
            "pages": used,
            "tensors": {name: x.cpu() for name, x in tensors.items()},
        },
        path,
    )


def read(path: str, shape: Mapping[str, Any], ledger: Ledger, pages: Pages) -> None:
    """Load in place. Nothing changes if the file is of another schema or shape."""
    saved = torch.load(path, weights_only=True)
    if saved.get("schema") != SCHEMA:
        raise ArgumentError("path", path, f"has schema {saved.get('schema')}, not {SCHEMA}", "Save it anew.")
    here = _plain(shape)
    other = [k for k in here if saved["shape"].get(k) != here[k]]
    if other:
        raise ArgumentError("path", path, f"was saved with another {', '.join(other)}", "Build the buffer alike.")
    rows = _rows(saved["pages"], pages)
    for name, x in pages.tensors().items():
        value = saved["tensors"][name].to(x.device)
        if name.startswith("field."):
            x.index_copy_(0, rows, value)
        else:
            x.copy_(value)
    ledger.from_dict(saved["ledger"])


def _rows(used: list[int], pages: Pages) -> torch.Tensor:
    first = torch.tensor(used, dtype=torch.int64, device=pages.table.device) * pages.page_tokens
    return (first[:, None] + torch.arange(pages.page_tokens, device=first.device)).reshape(-1)


def _plain(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {k: {n: asdict(f) for n, f in v.items()} if k == "fields" else v for k, v in shape.items()}

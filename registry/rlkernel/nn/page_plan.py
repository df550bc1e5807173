"""Which pages hold the keys of which row: prompts that are equal share the pages that they fill.

Legend: B rows · G keys of a page · P pages of a row at most. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PagePlan:
    """Where keys go."""

    table: tuple[tuple[int, ...], ...]  # a row's pages, in the order of its keys
    first: tuple[int, ...]  # rows whose prompts are computed, each prompt once
    prompt: tuple[int, ...]  # row -> which of these has its prompt
    copies: tuple[tuple[int, int], ...]  # (page, page): the part of a page that a prompt ends with, for another row
    pages: int  # how many pages there are in all

    @property
    def width(self) -> int:
        """P."""
        return max(map(len, self.table))


def page_plan(prompts: Sequence[tuple[int, ...]], more: int, page: int) -> PagePlan:
    """Pages of `page` keys for rows of these prompts, each with room for `more` keys behind.

    Pages that a prompt fills are never written again, so rows of one prompt share them. A page that it fills in part
    is copied: each row goes on in its own.
    """
    table: list[tuple[int, ...]] = []
    first: list[int] = []
    prompt: list[int] = []
    copies: list[tuple[int, int]] = []
    known: dict[tuple[int, ...], int] = {}
    pages = 0
    for row, ids in enumerate(prompts):
        count, shared = -(-(len(ids) + more) // page), 0
        if ids in known:
            full, shared = table[first[known[ids]]], len(ids) // page
            if len(ids) % page:
                copies.append((full[shared], pages))
        else:
            known[ids] = len(first)
            first.append(row)
        own = tuple(range(pages, pages + count - shared))
        table.append((table[first[known[ids]]][:shared] if shared else ()) + own)
        prompt.append(known[ids])
        pages += len(own)
    return PagePlan(tuple(table), tuple(first), tuple(prompt), tuple(copies), pages)

"""How a call of linear_logprob is cut, and the memory it takes: pure functions of sizes.

    save        the forward pass keeps fp16(y - tile max), N x V; the backward pass is two matmuls over all of it
    recompute   the backward pass makes dz again, a slice of the vocabulary at a time, then dX += dz W and
                dW[slice] = dz' X. dX accumulates in fp32, 4 D bytes a row, where there is more than one slice
    apart       where that is too much: dX of a block of rows over all slices, then dW of a slice over all blocks. Five
                matmuls in place of four, and memory that does not grow with N

Legend: N rows · V vocabulary · D hidden. Sizes in bytes. Imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

ROWS: Final = 128  # of a block of the logits kernel
COLS: Final = 256  # of its tile
MULTIPROCESSORS: Final = 132  # of an H100 SXM and an H200: what the width of a slice is chosen for
FORWARD_ROWS: Final = 16384  # of one launch: the partial sums of a row take 12 bytes per tile
BLOCK_ROWS: Final = 16384  # most rows of a block in the backward pass
SLICE_BYTES: Final = 200 << 20  # of dz, where nobody sets a limit
# Of recompute, beside what a few numbers a row take, where nobody sets a limit. The first holds dX of 8192 rows of 4096
# or 16384 of 2048 in fp32 (128 MiB) and a slice of dz; dX alone may exceed it up to the second; then passes go apart.
PREFERRED: Final = 344 << 20
MOST: Final = 5 << 28
# A product of fewer numbers is made in fp32 and rounded: cuBLAS may split its sums, and would add the parts in bf16.
SPLIT_BELOW: Final = 1 << 22
UNIT: Final = 4 << 20  # numbers of bf16
PER_ROW: Final = 192  # bytes of vectors: ids, scales, results, coefficients, upstream gradients, places
FIXED: Final = 1 << 16  # what the allocator rounds up


@dataclass(frozen=True)
class Size:
    """What the memory of a call depends on."""

    N: int
    V: int
    D: int
    of_hidden: bool = True  # whether a gradient is wanted
    of_weight: bool = True
    masked: bool = False  # rows are gathered
    copied: int = 0  # bytes of operands that must be copied to be read by TMA

    @property
    def pitch(self) -> int:
        """Columns of a saved row: a multiple of 16 bytes."""
        return round_up(self.V, 8)

    @property
    def tiles(self) -> int:
        """Tiles of the vocabulary."""
        return -(-self.V // COLS)


@dataclass(frozen=True)
class Plan:
    """How a call is cut."""

    save: bool
    forward_rows: int  # rows of one launch on the way forward
    block: int  # rows of a block on the way back
    width: int  # ids of a slice on the way back
    apart: bool
    buffer: int  # least numbers in the buffer of dz, or of the saved logits
    standing: int  # bytes held from the forward pass to the end of the backward pass
    working: int  # most bytes beside them

    @property
    def bytes(self) -> int:
        """Most extra memory of the call."""
        return self.standing + self.working


def round_up(x: int, to: int) -> int:
    """The next multiple."""
    return -(-x // to) * to


def count_of(x: int, each: int) -> int:
    """Parts of at most `each` that x falls into."""
    return -(-x // each)


def rounded(rows: int, cols: int) -> int:
    """Bytes of a small product before it is rounded."""
    return 4 * rows * cols if rows * cols < SPLIT_BELOW else 0


def _standing(size: Size) -> int:
    """What every plan holds all the time."""
    gathered = 2 * size.N * round_up(size.D, 8) if size.masked else 0
    return FIXED + PER_ROW * round_up(size.N, ROWS) + size.copied + gathered


def _forward(size: Size, rows: int, *, save: bool) -> tuple[int, int]:
    """Bytes until the backward pass, and bytes beside them within the forward pass."""
    saved = (2 * size.pitch + 4 * size.tiles) * size.N if save else 0
    return saved, (8 if save else 12) * size.tiles * min(rows, round_up(size.N, ROWS))


def _back(size: Size, block: int, width: int, *, apart: bool) -> int:
    """Bytes of the way back where logits are made again."""
    dx, dw = rounded(size.N, size.D) if size.of_hidden else 0, rounded(width, size.D) if size.of_weight else 0
    if size.of_hidden and (apart or size.masked or width < size.V):
        dx = 4 * size.D * (block if apart else size.N)
    if size.of_weight and block < size.N:
        dw = 4 * size.D * width
    return 2 * block * width + (max(dx, dw) if apart else dx + dw)


def _widths(block: int, V: int) -> Iterator[int]:
    """Widths of a slice, widest first: those that leave fewest multiprocessors idle, down to one tile."""
    row_tiles = -(-block // ROWS)

    def used(columns: int) -> float:
        blocks = row_tiles * columns
        return blocks / round_up(blocks, MULTIPROCESSORS)

    top = max(1, min(SLICE_BYTES // (2 * block * COLS), -(-V // COLS)))
    if top * COLS >= V:
        yield top * COLS
    while top:
        lowest = max(1, top * 3 // 4)
        best = max(range(lowest, top + 1), key=lambda n: (round(used(n), 2), n))
        yield best * COLS
        top = lowest - 1


def _launches(N: int) -> list[int]:
    """Rows of a forward launch, most first."""
    return sorted({min(rows, round_up(N, ROWS)) for rows in (FORWARD_ROWS, 4096, 1024, ROWS)}, reverse=True)


def plans(size: Size, *, mode: str, backward: bool) -> Iterator[Plan]:
    """Ways to run a call, best first; `mode` is "save" or "recompute"."""
    standing = _standing(size)
    if not backward:
        for rows in _launches(size.N):
            yield Plan(False, rows, ROWS, COLS, False, 0, standing, _forward(size, rows, save=False)[1])
        return
    if mode == "save":
        for rows in _launches(size.N):
            saved, beside = _forward(size, rows, save=True)
            dx = 2 * size.D * size.N if size.masked and size.of_hidden else 0
            small = max(rounded(size.N, size.D), rounded(size.V, size.D))
            yield Plan(True, rows, size.N, size.V, False, 0, standing + saved, max(beside, dx + small))
        return
    for apart in (False, True):
        for block in sorted(
            {min(rows, round_up(size.N, ROWS)) for rows in (BLOCK_ROWS, 4096, 1024, ROWS)}, reverse=True
        ):
            for width in _widths(block, size.V):
                back = _back(size, block, width, apart=apart)
                for rows in _launches(size.N):
                    yield Plan(
                        False, rows, block, width, apart, 0, standing, max(_forward(size, rows, save=False)[1], back)
                    )


def choose(size: Size, *, mode: str, backward: bool, limit: int | None) -> Plan | None:
    """The best plan within the limit, or None where none fits.

    Args:
        size: of the call; N > 0.
        mode: "auto", "save" or "recompute". "auto" saves only where a limit is given and saving fits in it.
        backward: whether gradients are wanted.
        limit: most extra bytes. Without one, recompute stays below `MOST` beside a few numbers a row, whatever N.
    """
    if limit is not None:
        for one in ("save", "recompute") if mode == "auto" else (mode,):
            found = next((p for p in plans(size, mode=one, backward=backward) if p.bytes <= limit), None)
            if found is not None:
                return found
        return None
    if mode == "save" or not backward:
        found = next(plans(size, mode=mode, backward=backward))
        return _roomy(found, size.N * size.pitch) if backward else found
    for most, apart in ((PREFERRED, False), (MOST, False), (MOST, True)):
        for plan in plans(size, mode="recompute", backward=True):
            if plan.working <= most and plan.apart == apart:
                return _roomy(plan, plan.block * plan.width)
    return least(size, mode="recompute", backward=True)


def _roomy(plan: Plan, numbers: int) -> Plan:
    """With a buffer in whole units of `UNIT`: what a small call needs does not depend on its rows."""
    whole = round_up(numbers, UNIT)
    return replace(plan, buffer=whole, working=plan.working + 2 * (whole - numbers))


def least(size: Size, *, mode: str, backward: bool) -> Plan:
    """The plan that takes the least memory."""
    modes = ("recompute",) if mode == "auto" else (mode,)
    return min((p for m in modes for p in plans(size, mode=m, backward=backward)), key=lambda p: p.bytes)

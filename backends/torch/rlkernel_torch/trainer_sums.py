"""What linear_logprob states of a drawn token, from tiles that have passed before the token was known.

linear_logprob leaves the chosen id out of its sums. So of each tile two sums are kept: that of all its ids, and that
without the one id of the tile that may still be drawn. The second counts in the tile of the drawn token.

Legend: N rows · V vocabulary · n ids of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.row_statistics import Part, join, partial_softmax, side_by_side, softmax_stats, stacked, tile_width
from rlkernel_common.vocab_parallel import pieces


def piece_of(V: int) -> int:
    """Ids after which tiles of linear_logprob begin anew."""
    return pieces(V, 1)[1]


def tempered_in_pieces(x: Tensor, ids: Tensor, T: Tensor) -> Tensor:
    """[N] log-probabilities of one id a row under softmax(x / T), x [N, V] without NaN: the bits of `linear_logprob`.

    NaN or -inf where it has none: beside +inf, and where a row has no token.
    """
    V = x.shape[1]
    piece, width = piece_of(V), tile_width(V)
    each = ((x[:, v : v + piece], ids - v) for v in range(0, V, piece))
    return _logprob([join(partial_softmax(y, i, T, width, None, moment=False), T) for y, i in each], T)


class TileSums(NamedTuple):
    """Both sums of a tile that has passed; [N, 1] each."""

    low: int  # first id
    n: int
    every: Part
    others: Part  # without one id, which is the target

    def given(self, ids: Tensor) -> Part:
        """The tile as linear_logprob adds it, whose chosen ids [N] are those that were left out, or lie elsewhere."""
        here = ((ids >= self.low) & (ids < self.low + self.n))[:, None]
        top, total = (torch.where(here, a, b) for a, b in zip(self.others.rest[:2], self.every.rest[:2], strict=True))
        return Part(
            torch.where(here, self.others.target, -torch.inf), self.every.rest._replace(top=top, total=total), None
        )


class TrainerSums:
    """The sums of all tiles of rows at one temperature each.

    Args:
        V: size of the vocabulary.
        T: [N].
    """

    def __init__(self, V: int, T: Tensor) -> None:
        self._V, self._T = V, T
        self._tiles: list[TileSums] = []

    def take(self, x: Tensor, low: int, column: Tensor) -> None:
        """One more tile, [N, n] without NaN from id `low` on, and the column [N] that may be drawn of it."""
        width = tile_width(self._V)
        every, others = (
            partial_softmax(x, at, self._T, width, None, moment=False) for at in (torch.full_like(column, -1), column)
        )
        self._tiles.append(TileSums(low, x.shape[1], every, others))

    def logprob(self, ids: Tensor) -> Tensor:
        """[N] log-probabilities of the drawn ids [N]; NaN or -inf where a row has none."""
        piece = piece_of(self._V)
        parts: dict[int, list[Part]] = {}
        for tile in self._tiles:
            parts.setdefault(tile.low // piece, []).append(tile.given(ids))
        return _logprob([join(side_by_side(of_piece), self._T) for of_piece in parts.values()], self._T)


def _logprob(of_pieces: list[Part], T: Tensor) -> Tensor:
    return softmax_stats(join(stacked(of_pieces), T), T).logprob

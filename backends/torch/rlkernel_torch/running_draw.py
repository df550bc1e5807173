"""What a row remembers of the tiles that have passed: its best token, its best noised token, its sums of exponentials.

Two parts of a row join like this, with (top, rest) the largest x and the sum of the other weights relative to it:

    rest = rest_winner + (1 + rest_loser) * exp((top_loser - top_winner) / T)

and two noised tokens are compared through (x_1 - x_2) / T + (g_1 - g_2), which no size of x overflows.
+inf is a value like others here: it outweighs everything finite, and its equals have weight 1.

Legend: N rows · n ids of a tile.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rlkernel_common.philox import gumbel, range_words
from rlkernel_common.requests import Edited, Requests
from rlkernel_common.row_statistics import tree_sum
from rlkernel_torch.draws import Draw
from rlkernel_torch.truncation import Weights, weigh


class Sum(NamedTuple):
    """Weights of a part of each row, relative to the largest of them; [N] float64."""

    top: Tensor  # -inf: nothing there
    rest: Tensor  # sum of all weights but that of the first maximum


class Token(NamedTuple):
    """A token of each row; [N]."""

    id: Tensor
    x: Tensor  # float64, after the edits; -inf: none yet
    raw: Tensor  # float64, before them
    noise: Tensor  # float64


Part = TypeVar("Part", Sum, Token)


class RunningDraw(NamedTuple):
    """The state of all rows."""

    best: Token  # largest x, lowest id
    noised: Token  # largest x / T + noise, lowest id
    sum: Sum  # of x / T
    raw: Sum  # of the logits as given
    tokens: Tensor  # [N] how many tokens above -inf, or +inf tokens where there are
    last: Tensor  # [N] the last of these
    nan: Tensor  # [N] bool
    bad: Tensor  # [N] bool

    @staticmethod
    def start(requests: Requests) -> RunningDraw:
        """Nothing has passed."""
        T = requests.temperature
        none, zero = torch.full_like(T, -torch.inf, dtype=torch.float64), torch.zeros_like(T, dtype=torch.float64)
        ids, no = torch.zeros_like(requests.seed), torch.zeros_like(requests.bad)
        token, part = Token(ids, none, none, zero), Sum(none, zero)
        return RunningDraw(token, token, part, part, ids, ids, no, no)

    def after(
        self, logits: Tensor, edited: Edited, low: int, requests: Requests, stream: int
    ) -> tuple[RunningDraw, Tensor]:
        """The state with one more tile [N, n] whose first id is `low`, and the column [N] that may be drawn of it."""
        n = logits.shape[1]
        T = requests.temperature
        given = torch.where(logits.isnan(), -torch.inf, logits)
        part, raw = weigh(edited.x, T), weigh(given, torch.ones_like(T))
        noise = gumbel(range_words(requests.seed, requests.step, low, low + n, stream), torch.float64)
        score = torch.where(part.present, part.y + noise, -torch.inf)
        x = edited.x.double()

        def token(column: Tensor) -> Token:
            at = column[:, None]
            return Token(column + low, *(v.gather(1, at)[:, 0] for v in (x, given.double(), noise)))

        column = score.argmax(1)
        best, noised = token(part.best), token(column)
        gap = _difference(noised.x, self.noised.x) / T.double() + (noised.noise - self.noised.noise)
        here, before = _sum(part), self.sum
        # Finite tokens no longer count once +inf was seen.
        finite, was_finite = here.top < torch.inf, before.top < torch.inf
        count = torch.where(finite & ~was_finite, 0, part.present.sum(1))
        counted = torch.where(was_finite & ~finite, 0, self.tokens)
        place = torch.arange(low, low + n, device=x.device)
        last = torch.where(part.present, place, 0).amax(1)
        after = RunningDraw(
            _chosen(best.x > self.best.x, best, self.best),
            _chosen((noised.x > -torch.inf) & ((self.noised.x == -torch.inf) | (gap > 0)), noised, self.noised),
            _joined(before, here, T.double()),
            _joined(self.raw, _sum(raw), torch.ones_like(T, dtype=torch.float64)),
            counted + count,
            torch.where(count > 0, last, self.last),
            self.nan | edited.nan,
            self.bad | edited.bad,
        )
        return after, torch.where(requests.greedy, part.best, column)

    def draw(self, requests: Requests) -> Draw:
        """The draw of each row, once the vocabulary has passed."""
        greedy, posinf = requests.greedy, self.sum.top == torch.inf
        token = Token(*(torch.where(greedy, a, b) for a, b in zip(self.best, self.noised, strict=True)))
        y = _difference(token.x, self.sum.top) / requests.temperature.double()
        cut = posinf | (greedy & (self.tokens > 1))
        real = requests.temperature.dtype
        return Draw(
            token=token.id,
            logprob=torch.where(greedy, 0.0, y - torch.log1p(self.sum.rest)),
            log_kept_mass=torch.zeros_like(y),
            count=torch.where(greedy, self.tokens.clamp(max=1), self.tokens),
            threshold=torch.where(cut, self.sum.top, -torch.inf).to(real),
            threshold_id=torch.where(cut, torch.where(greedy, token.id, self.last), -1),
            posinf=posinf,
            nan=self.nan,
            bad=requests.bad | self.bad,
            padding=torch.zeros_like(requests.bad) if requests.padding is None else requests.padding,
        )

    def raw_logprob(self, requests: Requests) -> Tensor:
        """[N] float64 log-probability of the token under the law of the logits as given."""
        raw = torch.where(requests.greedy, self.best.raw, self.noised.raw)
        return _difference(raw, self.raw.top) - torch.log1p(self.raw.rest)


def _sum(part: Weights) -> Sum:
    top = part.x.gather(1, part.best[:, None])[:, 0].double()
    ids = torch.arange(part.w.shape[1], device=top.device)
    rest = tree_sum(torch.where(ids != part.best[:, None], part.w, 0.0))
    return Sum(torch.where(part.posinf, torch.inf, top), rest)


def _joined(a: Sum, b: Sum, T: Tensor) -> Sum:
    """Both parts; `a` stands first."""
    later = b.top > a.top
    winner, loser = _chosen(later, b, a), _chosen(later, a, b)
    scale = torch.exp(_difference(loser.top, winner.top) / T)
    return Sum(winner.top, winner.rest + torch.where(loser.top > -torch.inf, (1 + loser.rest) * scale, 0.0))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """The difference a - b, where equal infinities differ by 0."""
    return torch.where(a == b, 0.0, a - b)


def _chosen(take: Tensor, a: Part, b: Part) -> Part:
    return type(a)(*(torch.where(take, x, y) for x, y in zip(a, b, strict=True)))

"""The calls of logprob@1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlkernel_conformance import draw
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.modes import WITHOUT_SYNCHRONIZATION
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as definition
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.sampling import TokenLists

ROWS = ((5,), (), (2, 3), (1,), (2, 1, 2), (0,))
VOCABULARIES = (33, 1, 2, 128, 1000, 4099)
RAGGED = "ragged"
# Around powers of two and edges of tiles, and vocabularies of Llama 2 and 3, Qwen and Gemma.
REAL = (1023, 1025, 8193, 16385, 32000, 65537, 128256, 131073, 151936, 262144)


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": ROWS,
        "V": VOCABULARIES,
        "values": tuple(draw.LOGITS),
        "dtype": subject.dtypes,
        "ids": ("inside", "edges", "outside"),
        "K": claimed(subject, COUNTS),
        "temperature": claimed(subject, {"1": "", "0.7": "", **dict.fromkeys(PER_ROW, "per_row_temperature")}),
        "softcap": claimed(subject, {None: "", 1.5: "softcap", 50.0: "softcap"}),
        "mask": claimed(subject, {"": "", "some": "mask", "none": "mask", "all": "mask"}),
        "entropy": claimed(subject, {False: "", True: "entropy"}),
        "top": claimed(subject, {0: "", 1: "top_logprobs", 5: "top_logprobs", "V": "top_logprobs"}),
        "support": claimed(subject, {"": "", **dict.fromkeys(("ragged", "twice", "all", "outside"), "support")}),
        "validate": claimed(subject, {False: "", True: "validate"}),
    }


COUNTS: Mapping[Any, str] = {
    0: "",
    **dict.fromkeys((1, 3, 70), "many_ids"),
    RAGGED: "ragged_ids",
}  # ids of a row; 0: one, in no list
PER_ROW = ("rows", "number", "last of one")
ONE_ID = Rule(("K", "support"), lambda K, support: not K or not support)
RULES = (
    Rule(("ids", "validate"), lambda ids, validate: not validate or ids != "outside"),
    Rule(("support", "validate"), lambda support, validate: not validate or support != "outside"),
    Rule(("validate", "mode"), lambda validate, mode: not validate or mode != WITHOUT_SYNCHRONIZATION),
    # An id that is impossible has log p = -inf and no gradient that is promised; expanded rows or ids may be such.
    Rule(
        ("values", "layout of logits", "layout of ids", "upstream"),
        lambda values, *how: values != "holes" or "expanded" not in how[:2] or how[2] == "none",
    ),
    Rule(("top", "V"), lambda top, V: top != "V" or V < 1000),
    ONE_ID,
)


def temperature_of(point: Point, rows: tuple[int, ...], device: str) -> Any:
    """A number, or a tensor that broadcasts to the rows."""
    how = point["temperature"]
    if how not in PER_ROW:
        return float(how)
    shape = {"rows": rows, "number": (), "last of one": (*rows[:-1], 1) if rows else ()}[how]
    return (0.5 + torch.rand(shape, generator=point.generator(3), dtype=torch.float64)).float().to(device)


def mask_of(point: Point, rows: tuple[int, ...], device: str) -> torch.Tensor:
    """Rows that count."""
    mask = torch.rand(rows, generator=point.generator(4)) < {"some": 0.6, "none": 0.0, "all": 2.0}[point["mask"]]
    return mask.to(device)


def ids_of(point: Point, rows: tuple[int, ...], V: int, impossible: Any = None) -> Any:
    """Ids in range, at its edges, or every second one out of it; none where `impossible` [N, V] holds.

    One of each row, or K of which some are the same, or lists of none to 70.
    """
    if point.levels.get("K") == RAGGED:
        lengths = torch.tensor((1, 0, 5, 70, 2))[(torch.arange(math.prod(rows)) + point.seed) % 5]
        one = Point(point.seed, {**point.levels, "K": 0})
        every = impossible if impossible is None else impossible.repeat_interleave(lengths, 0)
        ids = ids_of(one, (int(lengths.sum()),), V, every)
        behind = torch.tensor([0, V])
        return TokenLists(torch.cat((ids, behind)), torch.cat((lengths.new_zeros(1), lengths.cumsum(0))))
    if K := point.levels.get("K"):
        one = Point(point.seed, {**point.levels, "K": 0})
        every = impossible if impossible is None else impossible.repeat_interleave(K, 0)
        ids = ids_of(one, (math.prod(rows) * K,), V, every).view(*rows, K)
        return torch.where(torch.arange(K) == K - 1, ids[..., K // 2 : K // 2 + 1], ids)
    g, n = point.generator(5), math.prod(rows)
    ids = torch.randint(V, (n,), generator=g)
    if point["ids"] == "edges":
        ids = torch.where(torch.arange(n) % 2 == 0, 0, V - 1)
    if impossible is not None and n:
        hit = impossible.gather(1, ids[:, None])[:, 0]
        ids = torch.where(hit, (~impossible).int().argmax(1), ids)
    if point["ids"] == "outside":
        ids = torch.where(torch.arange(n) % 2 == 0, torch.tensor([-100, -1, V, V + 1])[torch.arange(n) % 4], ids)
    return ids.view(rows)


def on(device: str, ids: Any) -> Any:
    """Ids on a device."""
    return TokenLists(ids.ids.to(device), ids.offsets.to(device)) if isinstance(ids, TokenLists) else ids.to(device)


def support_of(point: Point, n: int, V: int, device: str) -> Support:
    """Kept ids: a few of each row; some twice, and others behind the last offset; all; some out of range."""
    how, g = point["support"], np.random.default_rng(point.seed)
    kept = [np.arange(V) if how == "all" else g.choice(V, size=min(V, 1 + i % 4), replace=False) for i in range(n)]
    kept = [np.concatenate([k, k[:1]]) if how == "twice" else k for k in kept]
    if how == "outside":
        kept = [np.append(k, (-1, V, V + 1)[i % 3]) if i % 2 == 0 else k for i, k in enumerate(kept)]
    behind = [np.zeros(2, np.int64)] if how == "twice" else []
    flat = np.concatenate([*kept, *behind, np.zeros(0, np.int64)]).astype(np.int64)
    offsets = np.cumsum([0, *(len(k) for k in kept)]).astype(np.int64)
    return Support(torch.from_numpy(flat).to(device), torch.from_numpy(offsets).to(device))


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    rows, V = point["rows"], point["V"]
    n = math.prod(rows)
    x = draw.logits(point["values"], n, V, point.seed, point["dtype"], "cpu")
    given: Given = {
        "logits": x.view(*rows, V).to(subject.device),
        "ids": on(subject.device, ids_of(point, rows, V, ~x.float().isfinite())),
        "temperature": temperature_of(point, rows, subject.device),
    }
    given |= {"softcap": point["softcap"]} if point["softcap"] else {}
    given |= {"mask": mask_of(point, rows, subject.device)} if point["mask"] else {}
    given |= {"support": support_of(point, n, V, subject.device)} if point["support"] else {}
    given |= {name: True for name in ("entropy", "validate") if point[name]}
    given |= {"top_logprobs": min(V, V if point["top"] == "V" else point["top"])} if point["top"] else {}
    return given


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """All results of the definition, and the gradient of the logits."""
    x = plain(given["logits"], "logits")
    law = Law.of(x.reshape(-1, x.shape[-1]), given, x.shape[:-1], upstream)
    found = law.results(subject, point["dtype"], given)
    if upstream:
        want = Want.near(subject, "grad_logits", point["dtype"], law.grad, scale=law.grad_scale[:, None])
        found["d_logits"] = Want(want.values.reshape(x.shape), want.allowed.reshape(x.shape))
    return found


@dataclass(frozen=True)
class Law:
    """What the definition says of N rows, with masked and invalid rows as the page says."""

    shape: tuple[int, ...]  # of the rows
    logits: Any  # [N, V]
    row: definition.Row  # of the rows as if all counted
    mask: Any  # [N]
    valid: Any  # [N] or [N, K]: the id is in range
    absent: Any  # the same: it is the padding of a list
    of_list: Any  # (row, place) of the entries of lists of any length, which are filled up to one length; else None
    grad: Any  # [N, V] of the logits
    grad_scale: Any  # [N] what an error of the gradient is relative to

    @classmethod
    def of(cls, x: Any, given: Given, shape: tuple[int, ...], upstream: Mapping[str, Any]) -> Law:
        """Of logits [N, V] and the arguments of a call."""
        n, V = x.shape
        ids, of_list, size = given["ids"], None, 0
        if isinstance(ids, TokenLists):
            size, of_list, ids = len(ids.ids), *filled_up(ids)
            upstream = {n: put(u, ids, of_list) if n == "logprob" else u for n, u in upstream.items()}
            several = True
        else:
            ids = ids.cpu().numpy().astype(np.int64)
            several = ids.ndim > len(shape)
            ids = ids.reshape((n, ids.shape[-1]) if several else n)
        mask = given["mask"].cpu().numpy().reshape(-1) if "mask" in given else np.ones(n, bool)
        inside, t, kept = (ids >= 0) & (ids < V), given["temperature"], kept_of(given.get("support"))
        possible = [[k for k in row if 0 <= k < V] for row in kept or ()]
        valid = (
            inside if kept is None else inside & np.array([a == b for a, b in zip(kept, possible, strict=True)], bool)
        )
        T = np.broadcast_to(t.double().cpu().numpy() if torch.is_tensor(t) else t, shape).reshape(-1)
        of_id = valid & (mask[:, None] if several else mask)
        counts = {"logprob": of_id, "log_kept_mass": of_id}
        g = {name: np.where(c := counts.get(name, mask), u.reshape(c.shape), 0.0) for name, u in upstream.items()}
        row = definition.logprob(
            x,
            np.where(inside, ids, 0),
            temperature=T,
            softcap=given.get("softcap"),
            kept=None if kept is None else possible,
            g=g or None,
        )
        absent = ids == -1 if several else np.zeros(n, bool)
        most = sum(np.abs(u) if u.ndim == 1 else np.abs(u).sum(1) for u in g.values()) / T if g else np.zeros(n)
        scale = most * np.maximum(4, np.abs(row.lse))
        return cls(shape, x, row, mask, valid, absent, of_list and (*of_list, size), row.grad, scale)

    @property
    def logprob(self) -> Any:
        """[N] or [N, K] as if all rows counted."""
        return np.where(self.valid, self.row.logprob, np.where(self.absent, 0.0, np.nan))

    @property
    def invalid(self) -> Any:
        """[N] or [N, K] flags."""
        return of_ids(self.mask, self.valid) & ~self.valid & ~self.absent

    def listed(self, x: Any) -> Any:
        """What belongs to ids, [N] or [N, K], in their shape; of lists of any length [M], 0 beyond the last."""
        if self.of_list is None:
            return x.reshape((*self.shape, *x.shape[1:]))
        *at, size = self.of_list
        inside = np.broadcast_to(x, self.valid.shape)[tuple(at)]
        return np.concatenate((inside, np.zeros(size - len(inside), x.dtype)))

    def results(self, subject: Subject, dtype: str, given: Given) -> dict[str, Want]:
        """Of all that was asked for."""
        row, stored = self.row, "float64" if dtype == "float64" else "float32"
        size = np.maximum(1, np.abs(row.lse))

        def near(output: str, values: Any, scale: Any, other: Any = 0.0) -> Want:
            values = np.where(self.mask if values.ndim == 1 else self.mask[:, None], values, other)
            want = Want.near(subject, output, dtype, values, scale=scale, stored=stored)
            shape = (*self.shape, *values.shape[1:])
            return Want(want.values.reshape(shape), want.allowed.reshape(shape), want.dtype)

        of_id = near("logprob", self.logprob, 2 * of_ids(size, self.valid))
        shape = self.valid.shape
        found = {
            "logprob": replace(
                of_id,
                values=self.listed(of_id.values.reshape(shape)),
                allowed=self.listed(of_id.allowed.reshape(shape)),
            ),
            "lse": near("lse", row.lse, size),
            "invalid": Want(self.listed(self.invalid), 0.0, "bool"),
        }
        if given.get("entropy"):
            found["entropy"] = near("entropy", row.entropy, np.maximum(1, np.abs(row.lse) / 4))
        if row.log_kept_mass is not None:
            found["log_kept_mass"] = near("logprob", np.where(self.valid, row.log_kept_mass, np.nan), 4 * size)
        if n := given.get("top_logprobs"):
            best = np.argsort(-self.logits, axis=1, kind="stable")[:, :n]
            ids = np.where(self.mask[:, None], best, -1)
            found["top_ids"] = Want(ids.reshape(*self.shape, n), 0.0, "int64")
            every = [self._logprob_of(given, best[:, i]) for i in range(n)]
            found["top_logprobs"] = near("logprob", np.stack(every, 1), 2 * size[:, None])
        return found

    def _logprob_of(self, given: Given, ids: Any) -> Any:
        T = given["temperature"]
        T = T.double().cpu().numpy() if torch.is_tensor(T) else T
        T = np.broadcast_to(T, self.shape).reshape(-1)
        return definition.logprob(self.logits, ids, temperature=T, softcap=given.get("softcap")).logprob


def filled_up(lists: TokenLists) -> tuple[Any, Any]:
    """Row and place of each entry of lists; and the lists filled up with -1, [N, K]."""
    offsets = lists.offsets.cpu().numpy().astype(np.int64)
    lengths = np.diff(offsets)
    ids = np.full((len(lengths), max([1, *lengths])), -1, np.int64)
    there = np.arange(ids.shape[1]) < lengths[:, None]
    ids[there] = lists.ids.cpu().numpy()[: offsets[-1]]
    return np.nonzero(there), ids


def put(g: Any, ids: Any, of_list: Any) -> Any:
    """[N, K] upstream gradients from those of the entries of lists, [M]."""
    out = np.zeros(ids.shape)
    out[of_list] = np.asarray(g)[: len(of_list[0])]
    return out


def of_ids(of_rows: Any, like: Any) -> Any:
    """[N] numbers of rows as they belong to ids, `like` of which is [N] or [N, K]."""
    return of_rows.reshape(-1, *[1] * (like.ndim - 1))


def kept_of(support: Support | None) -> list[list[int]] | None:
    """Kept ids, row by row."""
    if support is None:
        return None
    ids, offsets = support.ids.tolist(), support.offsets.tolist()
    return [ids[a:b] for a, b in itertools.pairwise(offsets)]


INTEGERS = ("int64", "int32")
IN_LISTS = Rule(("K",), lambda K: K == RAGGED)
IDS = {
    "ids": Argument(dtypes=(*INTEGERS, "int16"), given=Rule(("K",), lambda K: K != RAGGED)),
    "ids.ids": Argument(SAME_VALUES, INTEGERS, IN_LISTS),
    "ids.offsets": Argument(SAME_VALUES, INTEGERS, IN_LISTS),
}
TENSORS = {
    "logits": Argument(),
    **IDS,
    "temperature": Argument(
        dtypes=("float32", "float64", "bfloat16"), given=Rule(("temperature",), lambda t: t in PER_ROW)
    ),
    "mask": Argument(given=Rule(("mask",), bool)),
    "support.ids": Argument(SAME_VALUES, INTEGERS, Rule(("support",), bool)),
    "support.offsets": Argument(SAME_VALUES, INTEGERS, Rule(("support",), bool)),
}
SPACE = Space(
    "logprob",
    factors,
    arguments,
    expected,
    TENSORS,
    RULES,
    lambda subject: [{"V": V, "rows": (2,), "entropy": "entropy" in subject.claims} for V in REAL],
)

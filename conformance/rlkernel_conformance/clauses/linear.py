"""Attacks on linear@1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.linear import linear, linear_gradients
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

INNER: Final = (1, 3, 16, 64, 100, 130, 513, 1100)  # K
OUTPUTS: Final = (1, 2, 7, 17, 33, 130)  # N
BATCHES: Final = (2, 15, 16, 17, 63, 64, 65, 129, 257)  # M at both sides of borders of tiles, beside rows alone
SPECIAL: Final = (torch.nan, torch.inf, -torch.inf)


@dataclass(frozen=True)
class Product:
    """Rows [M, K] times a weight [N, K]."""

    M: int
    K: int
    N: int
    seed: int
    dtype: str = "float32"
    bias: bool = False
    residual: bool = False
    one_sided: bool = False  # products of one sign, so that one too few or too many shows

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        place, dtype = subject.device, getattr(torch, self.dtype)

        def drawn(*shape: int, salt: int) -> Tensor:
            x = draw.normal(shape, self.seed + salt, place)
            return (x.abs() + 0.5 if self.one_sided else x).to(dtype)

        given = {"x": drawn(self.M, self.K, salt=0), "weight": drawn(self.N, self.K, salt=1)}
        if self.bias and "bias" in subject.claims:
            given["bias"] = drawn(self.N, salt=2)
        if self.residual and "residual" in subject.claims:
            given["residual"] = drawn(self.M, self.N, salt=3)
        return given


def flat(given: dict[str, Any], name: str) -> Any:
    """An argument in float64, [M, ...] of rows; 0 where it is not given."""
    if given.get(name) is None:
        return 0.0
    x = plain(given[name], name)
    return x.reshape(-1, x.shape[-1]) if name in {"x", "residual"} else x


def expected(given: dict[str, Any]) -> tuple[Any, Any]:
    """The definition's y [M, N], and how far a result may be from it."""
    x, weight = flat(given, "x"), flat(given, "weight")
    return bounded(given["x"].dtype, linear(x, weight, flat(given, "bias"), flat(given, "residual")), x.shape[1])


def bounded(dtype: torch.dtype, found: tuple[Any, Any], terms: int) -> tuple[Any, Any]:
    """Values of a definition, and how far a result may be: `accumulation_bound` of a sum of so many terms."""
    value, reach = found
    unit = UNITS[str(dtype).removeprefix("torch.")]
    return value, accumulation_bound(value, reach, unit=unit, inner=terms, weight_rounding="none")


def judged(subject: Subject, given: dict[str, Any]) -> Tensor:
    """The result of a call, which is within the bound of the definition."""
    y: Tensor = subject(**given)
    want, allowed = expected(given)
    within(subject, "y", y, want.reshape(y.shape), allowed.reshape(y.shape))
    require(y.dtype == given["x"].dtype, f"y of {given['x'].dtype} is {y.dtype}")
    return y


def cases(subject: Subject) -> st.SearchStrategy[Product]:
    """Every claimed dtype, size and option."""
    return st.builds(
        Product,
        M=st.sampled_from((1, 2, 3, 17, 70)),
        K=st.sampled_from(INNER),
        N=st.sampled_from(OUTPUTS),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        bias=st.booleans(),
        residual=st.booleans(),
        one_sided=st.booleans(),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Product]:
    """Small products of the first claimed dtype: for laws that compare two calls."""
    return cases(subject).map(lambda c: replace(c, dtype=subject.dtypes[0], M=min(c.M, 3), K=min(c.K, 130)))


def some_rows(subject: Subject) -> st.SearchStrategy[Product]:
    """A few outputs of a few rows."""
    return cases(subject).map(lambda c: replace(c, M=3, N=min(c.N, 33)))


@attack(
    "LN-01",
    cases,
    examples=(
        Product(5, 4096, 40, 1, "bfloat16", bias=True, residual=True),
        Product(2, 11008, 3, 2, "bfloat16"),
        Product(2, 14336, 3, 3, "float16"),
        Product(130, 130, 130, 4, "float32", bias=True),
    ),
)
def the_definition_in_float64(subject: Subject, case: Product) -> None:
    """Within the bound of one rounding and fp32 sums."""
    if case.dtype in subject.dtypes:
        judged(subject, case.arguments(subject))


@attack("LN-02", lambda s: cases(s).map(lambda c: replace(c, bias=True, residual=c.seed % 3 > 0)))
def one_rounding(subject: Subject, case: Product) -> None:
    """In 16 bits each y is one of the numbers that the ends of the interval of fp32 sums round to, or between them."""
    given = case.arguments(subject)
    y = plain(subject(**given), "y")
    want, reach = linear(*(flat(given, n) for n in ("x", "weight", "bias", "residual")))
    summed, _ = subject.tolerance("y", "float64" if case.dtype == "float64" else "float32")
    wide = summed * (1 + case.K / 512) * reach
    ends = [plain(torch.from_numpy(want + way * wide).to(given["x"].dtype), "y") for way in (-1, 1)]
    outside = int(((y < ends[0]) | (y > ends[1])).sum())
    require(outside == 0, f"{outside} of {y.size} results are rounded more than once")


@attack("LN-03", lambda s: cases(s).map(lambda c: replace(c, one_sided=True)))
def every_product_counts_once(subject: Subject, case: Product) -> None:
    """Products of one sign; leading dimensions, a vector, and a weight that is stored transposed."""
    given = case.arguments(subject)
    y = judged(subject, given)
    rows = [n for n in ("x", "residual") if n in given]
    many = subject(**given | {n: given[n].view(1, case.M, 1, -1) for n in rows})
    same_bits("y", many, y.view(1, case.M, 1, case.N), "in more dimensions")
    one = subject(**given | {n: given[n][0] for n in rows})
    require(one.shape == (case.N,), f"a vector gives {tuple(one.shape)}")
    judged(subject, given | {n: given[n][0] for n in rows})
    judged(subject, given | {"weight": given["weight"].t().contiguous().t()})


def one_nan(x: Tensor) -> Tensor:
    """x, with torch's bits for every NaN: a GPU's sums give other ones."""
    return torch.where(x.isnan(), torch.nan, x)


@attack("LN-04", plain_cases)
def a_bias_is_added_to_its_column(subject: Subject, case: Product) -> None:
    """Of zeros: the bits without. NaN and infinities in one element reach its column alone."""
    given = replace(case, bias=False).arguments(subject)
    zeros, without = torch.zeros_like(given["weight"][:, 0]), subject(**given)
    same_bits("y", subject(**given, bias=zeros), without, "with a bias of zeros")
    at = case.seed % case.N
    for value in SPECIAL:
        bias = zeros.clone()
        bias[at] = value
        y = subject(**given, bias=bias)
        same_bits("y", one_nan(y[:, at]), torch.full_like(y[:, at], value), f"where the bias is {value}")
        others = torch.arange(case.N, device=y.device) != at
        same_bits("y", y[:, others], without[:, others], f"beside a bias of {value}")


@attack("LN-05", plain_cases)
def a_residual_is_added_to_its_element(subject: Subject, case: Product) -> None:
    """Of zeros: the bits without. NaN and infinities in one element reach it alone; one that cancels leaves little."""
    given = replace(case, residual=False).arguments(subject)
    without = subject(**given)
    zeros = torch.zeros_like(without)
    same_bits("y", subject(**given, residual=zeros), without, "with a residual of zeros")
    at = case.seed % case.M, case.seed % case.N
    for value in SPECIAL:
        residual, want = zeros.clone(), without.clone()
        residual[at] = want[at] = value
        y = one_nan(subject(**given, residual=residual))
        same_bits("y", y, want, f"with a residual of {value} in one place")
    judged(subject, given | {"residual": -without})


@attack("LN-06", some_rows)
def rows_are_apart(subject: Subject, case: Product) -> None:
    """A row of NaN, one of infinities, and single ones, between others."""
    given = case.arguments(subject)
    want = subject(**given)
    for value in SPECIAL:
        for columns in (slice(None), case.seed % case.K):
            x = given["x"].clone()
            x[1, columns] = value
            y = subject(**given | {"x": x})
            same_bits("y", y[[0, 2]], want[[0, 2]], f"beside a row with {value}")
            require(not y[1].isfinite().any(), f"a row with {value} gives finite results")


@attack("LN-07", lambda s: some_rows(s).map(lambda c: replace(c, N=max(c.N, 2))))
def outputs_are_apart(subject: Subject, case: Product) -> None:
    """The same in a row of the weight."""
    given = case.arguments(subject)
    want, at = subject(**given), case.seed % case.N
    others = torch.arange(case.N, device=want.device) != at
    for value in SPECIAL:
        weight = given["weight"].clone()
        weight[at, case.seed % case.K] = value
        y = subject(**given | {"weight": weight})
        same_bits("y", y[:, others], want[:, others], f"beside a row of weight with {value}")
        require(not y[:, at].isfinite().any(), f"a row of weight with {value} gives finite results")


@attack("LN-08", lambda s: cases(s).map(lambda c: replace(c, K=min(c.K, 513))))
def gradients_match_float64(subject: Subject, case: Product) -> None:
    """Of x, weight, bias and residual."""
    given = case.arguments(subject)
    leaf = {n: x.requires_grad_() for n, x in given.items()}
    y = subject(**given)
    g = draw.normal((case.M, case.N), case.seed + 9, subject.device).to(y.dtype)
    found = dict(zip(leaf, torch.autograd.grad(y, list(leaf.values()), g), strict=True))
    up = plain(g, "g")
    wants = linear_gradients(flat(given, "x"), flat(given, "weight"), up)
    for name, want, terms in zip(("x", "weight", "bias"), wants, (case.N, case.M, case.M), strict=True):
        if name in found:
            within(subject, "grad", found[name], *bounded(y.dtype, want, terms), name=f"gradient of {name}")
    if "residual" in found:
        same_bits("gradient of residual", found["residual"], g, "beside the upstream gradient")
    for name, grad in found.items():
        require(grad.dtype == given[name].dtype, f"the gradient of {name} is {grad.dtype}")


@attack("LN-09", plain_cases, scale=0.2)
def no_rows_give_empty_results(subject: Subject, case: Product) -> None:
    """Also in more dimensions; gradients of weight and bias are 0."""
    for rows in ((0,), (2, 0)):
        given = case.arguments(subject)
        given = {n: x[0].expand(*rows, x.shape[-1]) if n in {"x", "residual"} else x for n, x in given.items()}
        wanted = {n: given[n].requires_grad_("grad" in subject.claims) for n in ("weight", "bias") if n in given}
        y = subject(**given)
        require(y.shape == (*rows, case.N), f"x of {list(given['x'].shape)} gives y of {list(y.shape)}")
        if y.requires_grad:
            for name, grad in zip(wanted, torch.autograd.grad(y.sum(), list(wanted.values())), strict=True):
                same_bits(f"gradient of {name}", grad, torch.zeros_like(given[name]), "without rows")


@attack(
    "LN-13",
    lambda s: cases(s).map(lambda c: replace(c, N=min(c.N, 33))),
    examples=(
        # sizes beyond vectors, at which a BLAS sums by the place of a row
        Product(3, 513, 17, 0, "float64"),
        Product(3, 300, 11, 0, "float32"),
        Product(3, 11, 300, 0, "float32"),
        # more tiles than a GPU has multiprocessors, of chunks that are whole steps: kernels for many rows
        Product(300, 512, 5632, 0, "bfloat16"),
        Product(4200, 512, 640, 0, "bfloat16"),
    ),
)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Product) -> None:
    """Alone, reversed, and at both sides of every border of a tile: the bits of a row and of its gradient stay."""
    if case.dtype not in subject.dtypes:
        return
    given = replace(case, M=3).arguments(subject)
    up = draw.normal((3, case.N), case.seed + 9, subject.device).to(given["x"].dtype)

    def taken(rows: list[int]) -> dict[str, Tensor]:
        some = {n: x[rows] if n in {"x", "residual"} else x for n, x in given.items()}
        if "grad" not in subject.claims:
            return leaves(subject(**some))
        x = some["x"].clone().requires_grad_()
        y = subject(**{**some, "x": x})
        return {"y": y.detach(), "d_x": torch.autograd.grad(y, x, up[rows])[0]}

    want = taken([0, 1, 2])
    same_results({n: x.flip(0) for n, x in taken([2, 1, 0]).items()}, want, "in a reversed batch")
    for row in range(3):
        same_results(taken([row]), {n: x[row : row + 1] for n, x in want.items()}, "alone")
    for M in (case.M,) if max(BATCHES) < case.M else BATCHES:
        rows = [i % 3 for i in range(M)]
        same_results(taken(rows), {n: x[rows] for n, x in want.items()}, f"in a batch of {M}")


def split_cases(subject: Subject) -> st.SearchStrategy[Product]:
    """Sizes whose shares are whole chunks."""
    sizes = st.sampled_from((128, 256, 384))
    dtypes = st.sampled_from(subject.dtypes)
    return st.builds(
        Product, M=st.sampled_from((1, 3, 70)), K=sizes, N=sizes, seed=st.integers(0, 2**20), dtype=dtypes,
        bias=st.booleans(), residual=st.booleans(), one_sided=st.booleans(),
    )  # fmt: skip


# Split -> argument -> the dimension of which a rank has its share; "y" is the result.
SHARED: Final[dict[str, dict[str, int]]] = {
    "row": {"x": 1, "weight": 1},
    "column": {"weight": 0, "bias": 0, "residual": 1, "y": 1},
}


def on_shares(subject: Subject, case: Product, split: str, ranks: int | None) -> dict[str, Tensor]:
    """Result and gradients of a call whose weight is split over so many ranks, put together; None is no group.

    Raises:
        Violation: what is whole on every rank differs between ranks.
    """
    given, shared = case.arguments(subject), SHARED[split]
    up = draw.normal((case.M, case.N), case.seed + 9, subject.device).to(given["x"].dtype)

    def on_rank(rank: int, group: Any) -> dict[str, Tensor]:
        def mine(name: str, x: Tensor) -> Tensor:
            return x.chunk(group.size(), shared[name])[rank] if group is not None and name in shared else x

        leaf = {n: mine(n, x).clone().requires_grad_("grad" in subject.claims) for n, x in given.items()}
        y = subject(**leaf, split=split, group=group)
        if not y.requires_grad:
            return {"y": y}
        grads = torch.autograd.grad(y, list(leaf.values()), mine("y", up))
        return {"y": y.detach(), **dict(zip(leaf, grads, strict=True))}

    found = [on_rank(0, None)] if ranks is None else on_ranks(subject, ranks, on_rank)
    for other in found[1:]:
        same_results(*({n: x for n, x in r.items() if n not in shared} for r in (other, found[0])), "on another rank")
    return {n: torch.cat([r[n] for r in found], shared[n]) if n in shared else x for n, x in found[0].items()}


@attack("LN-15", split_cases, scale=0.3)
def shares_give_the_whole(subject: Subject, case: Product) -> None:
    """Two ranks, split by inputs and by outputs."""
    given = case.arguments(subject)
    up = plain(draw.normal((case.M, case.N), case.seed + 9, subject.device).to(given["x"].dtype), "g")
    wants = linear_gradients(flat(given, "x"), flat(given, "weight"), up)
    for split in SHARED:
        found = on_shares(subject, case, split, 2)
        within(subject, "y", found.pop("y"), *expected(given), name=f"y, {split} split")
        for name, want, terms in zip(("x", "weight", "bias"), wants, (case.N, case.M, case.M), strict=True):
            if name in found:
                allowed = bounded(given["x"].dtype, want, terms)
                within(subject, "grad", found[name], *allowed, name=f"gradient of {name}, {split} split")


@attack("LN-16", split_cases, scale=0.3)
def any_number_of_ranks_gives_the_same_bits(subject: Subject, case: Product) -> None:
    """One without a group, and groups of 1, 2 and 4."""
    for split in SHARED:
        want = on_shares(subject, case, split, None)
        for ranks in (1, 2, 4):
            same_results(on_shares(subject, case, split, ranks), want, f"on {ranks} ranks, {split} split")


derive(
    "linear",
    lambda s, c: c.arguments(s),
    inputs_untouched=plain_cases,
    determinism=cases,
    capture=plain_cases,
)

"""Attacks on grouped_linear@1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.linear import BATCHES, INNER, OUTPUTS, SPECIAL, bounded, one_nan
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.grouped_linear import grouped_linear, grouped_linear_gradients

# Rows of each expert; experts without rows at either end and between; both sides of borders of tiles.
SIZES: Final = (
    (3, 2),
    (0, 4, 1),
    (5, 0, 0, 2),
    (1, 1, 1, 1),
    (0, 0, 3),
    (2, 0),
    (7,),
    (17, 70, 1),
    (15, 16, 0, 65),
    (2,) + (0,) * 19 + (3, 1),
)
FEW: Final = tuple(sizes for sizes in SIZES if sum(sizes) < 8)
BEFORE: Final = (0, 1, 16, 70)  # rows of the expert ahead


@dataclass(frozen=True)
class Groups:
    """Rows of several experts, and of none after them, times a weight [E, N, K]."""

    sizes: tuple[int, ...]
    K: int
    N: int
    seed: int
    dtype: str = "float32"
    rest: int = 0  # rows of no expert
    bias: bool = False
    one_sided: bool = False  # products of one sign, so that one too few or too many shows

    @property
    def rows(self) -> int:
        """Rows of x; T."""
        return sum(self.sizes) + self.rest

    def normal(self, subject: Subject, *shape: int, salt: int) -> Tensor:
        """Values of the dtype, on the device."""
        x = draw.normal(shape, self.seed + salt, subject.device)
        return (x.abs() + 0.5 if self.one_sided else x).to(getattr(torch, self.dtype))

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        E = len(self.sizes)
        given = {
            "x": self.normal(subject, self.rows, self.K, salt=0),
            "weight": self.normal(subject, E, self.N, self.K, salt=1),
            "ends": ends_of(self.sizes, subject),
        }
        if self.bias and "bias" in subject.claims:
            given["bias"] = self.normal(subject, E, self.N, salt=2)
        return given

    def upstream(self, subject: Subject) -> Tensor:
        """A gradient of y."""
        return draw.normal((self.rows, self.N), self.seed + 9, subject.device).to(getattr(torch, self.dtype))

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, and their rows."""
        start = 0
        for e, size in enumerate(self.sizes):
            if size:
                yield e, slice(start, start + size)
            start += size


def ends_of(sizes: tuple[int, ...], subject: Subject) -> Tensor:
    """Where the rows of each expert end."""
    return torch.tensor(sizes, device=subject.device).cumsum(0).int()


def flat(given: dict[str, Any], name: str) -> Any:
    """An argument in float64, or as integers; None where it is not given."""
    return None if given.get(name) is None else plain(given[name], name)


def expected(given: dict[str, Any]) -> tuple[Any, Any]:
    """The definition's y [T, N], and how far a result may be from it."""
    found = grouped_linear(*(flat(given, n) for n in ("x", "weight", "ends", "bias")))
    return bounded(given["x"].dtype, found, given["x"].shape[1])


def judged(subject: Subject, given: dict[str, Any]) -> Tensor:
    """The result of a call, which is within the bound of the definition."""
    y: Tensor = subject(**given)
    within(subject, "y", y, *expected(given))
    require(y.dtype == given["x"].dtype, f"y of {given['x'].dtype} is {y.dtype}")
    return y


def cases(subject: Subject) -> st.SearchStrategy[Groups]:
    """Every claimed dtype, size and option."""
    return st.builds(
        Groups,
        sizes=st.sampled_from(SIZES),
        K=st.sampled_from(INNER),
        N=st.sampled_from(OUTPUTS),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        rest=st.integers(0, 3),
        bias=st.booleans(),
        one_sided=st.booleans(),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Groups]:
    """Small products of the first claimed dtype: for laws that compare two calls."""
    few = st.sampled_from(FEW)
    return st.builds(
        lambda c, sizes: replace(c, sizes=sizes, dtype=subject.dtypes[0], K=min(c.K, 130)), cases(subject), few
    )


@attack(
    "GN-01",
    cases,
    examples=(
        Groups((3, 0, 2), 4096, 40, 1, "bfloat16", bias=True),
        Groups((1, 1), 11008, 3, 2, "float16"),
        Groups((130, 0, 70), 130, 130, 3, "float32", rest=65, bias=True),
    ),
)
def the_definition_in_float64(subject: Subject, case: Groups) -> None:
    """Within the bound of one rounding and fp32 sums."""
    if case.dtype in subject.dtypes:
        judged(subject, case.arguments(subject))


@attack("GN-02", lambda s: cases(s).map(lambda c: replace(c, bias=True)))
def one_rounding(subject: Subject, case: Groups) -> None:
    """In 16 bits each y is one of the numbers that the ends of the interval of fp32 sums round to, or between them."""
    given = case.arguments(subject)
    y = plain(subject(**given), "y")
    want, reach = grouped_linear(*(flat(given, n) for n in ("x", "weight", "ends", "bias")))
    summed, _ = subject.tolerance("y", "float64" if case.dtype == "float64" else "float32")
    wide = summed * (1 + case.K / 512) * reach
    ends = [plain(torch.from_numpy(want + way * wide).to(given["x"].dtype), "y") for way in (-1, 1)]
    outside = int(((y < ends[0]) | (y > ends[1])).sum())
    require(outside == 0, f"{outside} of {y.size} results are rounded more than once")


@attack("GN-03", lambda s: cases(s).map(lambda c: replace(c, one_sided=True)))
def every_product_counts_once(subject: Subject, case: Groups) -> None:
    """Products of one sign; x and a weight that are stored transposed, and every other row of a weight."""
    given = case.arguments(subject)
    judged(subject, given)
    turned = {n: given[n].transpose(-1, -2).contiguous().transpose(-1, -2) for n in ("x", "weight")}
    judged(subject, given | turned)
    judged(subject, given | {"weight": given["weight"].repeat_interleave(2, 1)[:, ::2]})


@attack("GN-04", plain_cases)
def a_bias_is_added_to_its_column(subject: Subject, case: Groups) -> None:
    """Of zeros: the bits without. NaN and infinities in one element reach that column of its expert's rows alone."""
    given = replace(case, bias=False).arguments(subject)
    zeros, without = torch.zeros_like(given["weight"][..., 0]), subject(**given)
    same_bits("y", subject(**given, bias=zeros), without, "with a bias of zeros")
    at = case.seed % case.N
    for e, rows in case.spans():
        for value in SPECIAL:
            bias, want = zeros.clone(), without.clone()
            bias[e, at] = want[rows, at] = value
            same_bits("y", one_nan(subject(**given, bias=bias)), want, f"where one element of a bias is {value}")


@attack("GN-05", plain_cases)
def rows_are_apart(subject: Subject, case: Groups) -> None:
    """A row of NaN, one of infinities, and single ones, between others."""
    if not sum(case.sizes):
        return
    given = case.arguments(subject)
    want, at = subject(**given), case.seed % sum(case.sizes)
    others = torch.arange(case.rows, device=want.device) != at
    for value in SPECIAL:
        for columns in (slice(None), case.seed % case.K):
            x = given["x"].clone()
            x[at, columns] = value
            y = subject(**given | {"x": x})
            same_bits("y", y[others], want[others], f"beside a row with {value}")
            require(not y[at].isfinite().any(), f"a row with {value} gives finite results")


@attack("GN-06", plain_cases)
def experts_are_apart(subject: Subject, case: Groups) -> None:
    """The same in a row of each expert's weight, also of one without rows."""
    given = case.arguments(subject)
    want, at, rows = subject(**given), case.seed % case.N, dict(case.spans())
    for e in range(len(case.sizes)):
        for value in SPECIAL:
            weight, kept = given["weight"].clone(), torch.ones_like(want, dtype=torch.bool)
            weight[e, at, case.seed % case.K] = value
            if e in rows:
                kept[rows[e], at] = False
            y = subject(**given | {"weight": weight})
            same_bits("y", y[kept], want[kept], f"beside a row of weight with {value}")
            require(not y[~kept].isfinite().any(), f"a row of weight with {value} gives finite results")


@attack("GN-07", lambda s: cases(s).map(lambda c: replace(c, rest=c.rest + 1 + 70 * (c.seed % 2))))
def rows_of_no_expert_give_nothing(subject: Subject, case: Groups) -> None:
    """They hold NaN or infinities, and so does their upstream gradient; no other row or gradient is another."""
    given, last = case.arguments(subject), sum(case.sizes)
    kept = {n: x[:last] if n == "x" else x for n, x in given.items()}
    value = SPECIAL[case.seed % 3]
    given["x"][last:] = value
    wanted = [n for n in ("x", "weight", "bias") if n in given] if "grad" in subject.claims else []
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for arguments in (given, kept):
        leaf = {n: x.clone().requires_grad_(n in wanted) for n, x in arguments.items()}
        y = subject(**leaf)
        up = case.upstream(subject)[: len(y)].clone()
        up[last:] = value
        of = torch.autograd.grad(y, [leaf[n] for n in wanted], up) if wanted else ()
        found.append((y.detach(), dict(zip(wanted, of, strict=True))))
    (y, grads), (want, grads_kept) = found
    require(bool((y[last:] == 0).all()), "rows of no expert give other results than 0")
    within(subject, "y", y[:last], *expected(kept))
    require(want.shape == y[:last].shape, f"{last} rows give {tuple(want.shape)}")
    for name, grad in grads.items():
        require(bool(grad.isfinite().all()), f"the gradient of {name} is poisoned by rows of no expert")
        if name == "x":
            require(bool((grad[last:] == 0).all()), "rows of no expert have other gradients than 0")
            same_bits("gradient of x", grad[:last], grads_kept["x"], "beside rows of no expert")


@attack("GN-08", plain_cases)
def wild_ends_count_as_the_nearest_right_ones(subject: Subject, case: Groups) -> None:
    """Ends that fall, below 0 and far beyond T; written in place between two calls."""
    given = replace(case, rest=0).arguments(subject)
    want, ends = subject(**given), given["ends"]
    wild = ends.clone()
    wild[-1] = 2**31 - 1
    for e, size in enumerate(case.sizes[:-1]):
        if size == 0:
            wild[e] = -(2**31) if e == 0 else int(ends[e]) - 1
    same_bits("y", subject(**given | {"ends": wild}), want, "where ends fall or exceed T")
    ends.zero_()
    require(bool((subject(**given) == 0).all()), "ends written in place are not seen")


def gradients(subject: Subject, case: Groups, given: dict[str, Any], up: Tensor) -> dict[str, Tensor]:
    """Gradients of all arguments that have one, by name."""
    leaf = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in given.items()}
    wanted = [n for n, x in leaf.items() if x.requires_grad]
    return dict(zip(wanted, torch.autograd.grad(subject(**leaf), [leaf[n] for n in wanted], up), strict=True))


@attack("GN-09", lambda s: cases(s).map(lambda c: replace(c, K=min(c.K, 513))))
def gradients_match_float64(subject: Subject, case: Groups) -> None:
    """Of x, weight and bias."""
    given, up = case.arguments(subject), case.upstream(subject)
    found = gradients(subject, case, given, up)
    wants = grouped_linear_gradients(*(flat(given, n) for n in ("x", "weight", "ends")), plain(up, "g"))
    terms = case.N, max(case.sizes), max(case.sizes)
    for name, want, most in zip(("x", "weight", "bias"), wants, terms, strict=True):
        if name in found:
            within(subject, "grad", found[name], *bounded(up.dtype, want, most), name=f"gradient of {name}")
    for name, grad in found.items():
        require(grad.dtype == given[name].dtype, f"the gradient of {name} is {grad.dtype}")


@attack("GN-10", lambda s: plain_cases(s).map(lambda c: replace(c, bias=True)))
def gradients_of_experts_are_apart(subject: Subject, case: Groups) -> None:
    """NaN in the rows of one expert, of x and of the upstream gradient: the gradients of all others keep their bits."""
    given, up = case.arguments(subject), case.upstream(subject)
    want = gradients(subject, case, given, up)
    for e, size in enumerate(case.sizes):
        for name in ("weight", "bias") if not size else ():
            if name in want:
                same_bits(f"gradient of {name}", want[name][e], torch.zeros_like(want[name][e]), "without rows")
    for e, rows in case.spans():
        x, bad = given["x"].clone(), up.clone()
        x[rows] = bad[rows] = SPECIAL[case.seed % 3]
        found = gradients(subject, case, given | {"x": x}, bad)
        others = torch.arange(len(case.sizes), device=x.device) != e
        for name in found.keys() - {"x"}:
            same_bits(f"gradient of {name}", found[name][others], want[name][others], "beside rows of NaN")
            require(not found[name][e].isfinite().any(), f"NaN in an expert's rows leave its {name}'s gradient finite")
        left = torch.ones(case.rows, dtype=torch.bool, device=x.device)
        left[rows] = False
        same_bits("gradient of x", found["x"][left], want["x"][left], "beside rows of NaN")


@attack("GN-11", plain_cases, scale=0.2)
def no_rows_give_empty_results(subject: Subject, case: Groups) -> None:
    """Gradients of weight and bias are 0."""
    given = replace(case, sizes=(0,) * len(case.sizes), rest=0).arguments(subject)
    for ends in (given["ends"], ends_of(case.sizes, subject)):
        wanted = {n: given[n].requires_grad_("grad" in subject.claims) for n in ("weight", "bias") if n in given}
        y = subject(**given | {"ends": ends})
        require(y.shape == (0, case.N), f"x without rows gives y of {list(y.shape)}")
        if y.requires_grad:
            for name, grad in zip(wanted, torch.autograd.grad(y.sum(), list(wanted.values())), strict=True):
                same_bits(f"gradient of {name}", grad, torch.zeros_like(given[name]), "without rows")


# Sizes beyond vectors, at which a BLAS sums by the place of a row; more tiles than a GPU has multiprocessors.
LARGE: Final = (
    Groups((3, 1), 513, 17, 0, "float64"),
    Groups((1, 3), 300, 11, 0, "float32"),
    Groups((3, 3), 11, 300, 0, "float32"),
    Groups((300, 0, 70), 768, 1024, 0, "bfloat16"),
    Groups((1, 4200), 512, 640, 0, "bfloat16"),
)


def taken(subject: Subject, given: dict[str, Any], up: Tensor) -> dict[str, Tensor]:
    """Results, and the gradient of x where there are gradients."""
    if "grad" not in subject.claims:
        return leaves(subject(**given))
    x = given["x"].clone().requires_grad_()
    y = subject(**{**given, "x": x})
    return {"y": y.detach(), "d_x": torch.autograd.grad(y, x, up)[0]}


@attack("GN-15", lambda s: cases(s).map(lambda c: replace(c, N=min(c.N, 33))), examples=LARGE)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Groups) -> None:
    """Alone, reversed, at both sides of every border of a tile, and behind any number of another expert's rows."""
    if case.dtype not in subject.dtypes:
        return
    three = replace(case, sizes=(0, 3, 0), rest=0)
    given, up = three.arguments(subject), three.upstream(subject)
    ahead, up_ahead = three.normal(subject, max(BEFORE), case.K, salt=5), up[:1].expand(max(BEFORE), -1)

    def among(rows: list[int], before: int, after: int) -> dict[str, Tensor]:
        x = torch.cat([ahead[:before], given["x"][rows], ahead[:after]])
        ends = ends_of((before, len(rows), after), subject)
        of_y = torch.cat([up_ahead[:before], up[rows], up_ahead[:after]])
        found = taken(subject, given | {"x": x, "ends": ends}, of_y)
        return {n: t[before : before + len(rows)] for n, t in found.items()}

    want = among([0, 1, 2], 0, 0)
    same_results({n: x.flip(0) for n, x in among([2, 1, 0], 0, 0).items()}, want, "in a reversed batch")
    for row in range(3):
        same_results(among([row], 0, 0), {n: x[row : row + 1] for n, x in want.items()}, "alone")
    for before in BEFORE:
        same_results(among([0, 1, 2], before, BEFORE[case.seed % 4]), want, f"behind {before} rows of another expert")
    largest = max(case.sizes)
    for M in (largest,) if largest > max(BATCHES) else BATCHES:
        rows = [i % 3 for i in range(M)]
        same_results(among(rows, M % 3, 1), {n: x[rows] for n, x in want.items()}, f"among {M} rows of its expert")


@attack("GN-16", cases, examples=LARGE)
def a_row_has_the_bits_of_linear(subject: Subject, case: Groups) -> None:
    """Result and gradient of each expert's rows are those of this backend's linear with its weight."""
    if case.dtype not in subject.dtypes:
        return
    given, up = case.arguments(subject), case.upstream(subject)
    found, linear = taken(subject, given, up), Subject(subject.backend, "linear", subject.device)
    require(bool(linear.impls), f"{subject.backend} has no linear whose bits these could be")
    for e, rows in case.spans():
        mine = {n: x[rows] if n == "x" else x[e] for n, x in given.items() if n != "ends"}
        want = taken(linear, mine, up[rows])
        same_results({n: x[rows] for n, x in found.items()}, want, "of linear with the weight of the expert")


derive(
    "grouped_linear",
    lambda s, c: c.arguments(s),
    inputs_untouched=plain_cases,
    determinism=cases,
    capture=plain_cases,
)

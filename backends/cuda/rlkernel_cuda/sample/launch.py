"""sample@1 on Hopper: checks, one launch, results. What it does not claim falls to the portable kernel.

Legend: N rows · V vocabulary · W stored columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.sample import SPEC, SampleCall
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_cuda import CLAIMED
from rlkernel_cuda.common import driver
from rlkernel_cuda.sample.kernel import NUMBER, PARAMS, TILE, TILES, WORD, Launch, Shape

# (most rows, shape), measured at V = 128256: with a filter, and without one.
FILTERED: Final = (
    (8, Shape(512, 8, 1)),
    (40, Shape(512, 3, 1, ahead=1)),
    (128, Shape(512, 2, 1, ahead=1)),
    (264, Shape(256, 1, 2, ahead=1)),
    (2**31, Shape(256, 1, 3)),
)
# Rows of fp32 under a top-k end sooner than they are read. Where they are more than 132 multiprocessors take at once by
# three blocks each, or at twice by two, blocks finish one while they read the next. Rows of 16 bits are read too soon.
CUT: Final = (
    *FILTERED[:-1],
    (3 * 132, Shape(256, 1, 3)),
    (4 * 132, Shape(256, 1, 2, ahead=1)),
    (2**31, Shape(768, 1, 1, finishers=6)),
)
PLAIN: Final = (
    (8, Shape(512, 8, 1)),
    (40, Shape(512, 3, 1)),
    (66, Shape(512, 2, 1)),
    (128, Shape(256, 2, 2)),
    (2**31, Shape(512, 1, 2)),
)


def fits(call: SampleCall) -> Reason | None:
    """Refuses logits whose columns are not next to each other, and vocabularies beyond the statistics of a row."""
    logits = call.logits
    V = call.vocab_size or logits.shape[1]
    if logits.stride(1) != 1 and V > 1:
        return Reason(
            "shape",
            "unsupported",
            f"logits with strides {list(logits.stride())} have columns that are not next to each other",
            "pass logits.contiguous()",
        )
    if V > TILE * TILES or logits.shape[0] >= 2**27:
        return Reason("shape", "unsupported", f"{logits.shape[0]} rows by {V} ids; at most 2**27 by {TILE * TILES}")
    return None


def prepare(call: SampleCall) -> Callable[[SampleCall], SampleResult]:
    """What draws for calls of this shape: rlkernel_core.spec.sample.SampleCall is the contract.

    Raises:
        RLKernelError: an argument whose feature is not claimed.
    """
    return partial(_draw, _planned(call))


def _draw(plan: Plan, call: SampleCall) -> SampleResult:
    """One token per row."""
    logits = call.logits
    N, device = plan.rows, logits.device
    ids = torch.empty(2 * N, dtype=torch.int64, device=device)
    reals = torch.empty(4 * N, dtype=torch.float32, device=device)
    counts = torch.empty(2 * N, dtype=torch.int32, device=device)
    token, threshold_id = ids.unsafe_split_with_sizes([N, N])
    logprob, log_kept_mass, threshold, raw = reals.unsafe_split_with_sizes([N, N, N, N])
    kept_count, status = counts.unsafe_split_with_sizes([N, N])
    if plan.launch is not None:
        place, real, count, row = ids.data_ptr(), reals.data_ptr(), counts.data_ptr(), 4 * N
        at = logits.data_ptr()
        quads = plan.quads and at % (4 * logits.element_size()) == 0
        slots = None if call.slot is None else _whole(call.slot)
        given = (call.temperature, call.top_k, call.top_p, call.min_p, call.seed, call.step)
        held = [read(x) for read, x in zip(plan.readers, given, strict=True)]
        params = PARAMS.pack(
            at, plan.stride, N, plan.vocab, plan.tiles, quads + 2 * (quads and plan.vocab % 4 == 0),
            *(value for _, values in held for value in values),
            0 if slots is None else slots.data_ptr(), int(slots is not None and slots.dtype == torch.int64),
            plan.last_slot, call.stream, int(call.raw_logprob), call.invalid_token,
            place, place + 2 * row, real, real + row, real + 2 * row, real + 3 * row, count, count + row,
        )  # fmt: skip
        plan.launch(params)
    return SampleResult(
        token=token,
        logprob=logprob,
        log_kept_mass=log_kept_mass,
        kept_count=kept_count,
        status=status,
        threshold=threshold,
        threshold_id=threshold_id,
        raw_logprob=raw if call.raw_logprob else None,
    )


@dataclass(frozen=True)
class Plan:
    """What calls with arguments of the same kind share."""

    rows: int
    vocab: int
    tiles: int
    stride: int
    quads: bool  # rows begin at multiples of four elements, if the first one does
    last_slot: int
    readers: tuple[Reader, ...]  # of temperature, top_k, top_p, min_p, seed, step
    launch: Launch | None  # None where there is no row


def shape_of(rows: int, dtype: torch.dtype, *, plain: bool, cut: bool) -> Shape:
    """The shape of a launch. plain: no row has a filter; cut: rows have a top-k."""
    table = PLAIN if plain else CUT if cut and dtype is torch.float32 else FILTERED
    return next(shape for most, shape in table if most >= rows)


def _planned(call: SampleCall) -> Plan:
    logits, V = call.logits, call.vocab_size or call.logits.shape[1]
    if missing := sorted(SPEC.needs(call) - CLAIMED):
        raise RLKernelError(f"The cuda backend's sample does not claim {', '.join(missing)}. Call rlkernel.sample.")
    N = logits.shape[0]
    plain = call.top_k is call.top_p is call.min_p is None
    given = (call.temperature, call.top_k, call.top_p, call.min_p, call.seed, call.step)
    entries = [x.numel() for x in given if isinstance(x, Tensor) and x.numel() != 1]
    shape = shape_of(N, logits.dtype, plain=plain, cut=call.top_k is not None)
    index = driver.index_of(logits.device) if N else 0
    return Plan(
        rows=N,
        vocab=V,
        tiles=-(-V // TILE),
        stride=logits.stride(0),
        quads=N <= 1 or logits.stride(0) % 4 == 0,
        last_slot=min(entries, default=2**31) - 1,
        readers=tuple([_reader(x, *off) for x, off in zip(given, _OFF, strict=True)]),
        launch=Launch(shape, logits.dtype, N, plain=plain, device=index) if N else None,
    )


def _whole(x: Tensor) -> Tensor:
    """Integers that the kernel reads."""
    x = x if x.dtype in _INTEGERS else x.to(torch.int64)
    return x.contiguous()


_INTEGERS: Final = frozenset((torch.int64, torch.int32))


Held = tuple[Tensor | None, tuple[int, ...]]  # what must outlive the launch, and a parameter as the kernel takes it
Reader = Callable[[Any], Held]
# Of temperature, top_k, top_p, min_p, seed, step: the number that means None, and whether it may change from call to
# call as a number.
_OFF: Final = ((1.0, False), (0, False), (1.0, False), (0.0, False), (0, True), (0, True))


def _reader(value: float | Tensor | None, off: float, varying: bool) -> Reader:
    """What reads a parameter of calls of one shape."""
    real = isinstance(off, float)
    if isinstance(value, Tensor):
        stride, wide = int(value.numel() != 1), int(value.dtype == torch.int64)
        if value.is_contiguous() and (value.dtype == torch.float32 if real else value.dtype in _INTEGERS):
            return lambda x: (x, (x.data_ptr(), 0, stride, wide))
    elif not varying:
        known = _given(value, off, real=real)
        return lambda _: known
    return lambda x: _given(x, off, real=real)


def _given(value: float | Tensor | None, off: float, *, real: bool = False) -> Held:
    """A parameter, whatever it is; `off` is the number that means None."""
    if isinstance(value, Tensor):
        value = value.to(torch.float32).contiguous() if real else _whole(value)
        return value, (value.data_ptr(), 0, int(value.numel() != 1), int(value.dtype == torch.int64))
    number = off if value is None else value
    if real:
        return None, (0, WORD.unpack(NUMBER.pack(number))[0], -1, 0)
    return None, (0, int(number) & (2**64 - 1), -1, 1)

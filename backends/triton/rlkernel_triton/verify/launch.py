"""verify@1 in Triton: the sampler's kernels give each row its distribution and a token; kernels of drafts do the rest.

No host synchronization and no shape that depends on data. Penalties, bias and banned ids go through the core's torch
formulas into one fp32 copy of the logits, as in sample.

Legend: B requests · K drafts · M = K + B rows · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.drafts import DraftRows, with_drafts
from rlkernel_common.requests import decode, edit
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.sampling_arguments import as_int64, flat
from rlkernel_triton.launchers import Launcher, launcher_for
from rlkernel_triton.sample.plan import SHAPE, Drawn, SamplePlan, SamplingParams
from rlkernel_triton.verify import kernels

BLOCK: Final = 1024  # tokens of a tile
WIDE: Final = 8192  # logits of a draft that one program adds up
REQUEST: Final = 32  # rows of a request that are looked at together
_PER_REQUEST: Final = ("temperature", "top_k", "top_p", "min_p", "seed")  # in the order of their arguments


def verify(call: VerifyCall) -> VerifyResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: VerifyCall) -> Callable[[VerifyCall], VerifyResult]:
    """What runs calls of this shape: rlkernel_core.spec.verify.VerifyCall is the contract."""
    (M, W), K, B = call.target_logits.shape, call.draft_ids.shape[0], call.cu_draft.shape[0] - 1
    V, device, edits = call.vocab_size or W, call.target_logits.device, _edits(call)
    launcher = launcher_for(device)
    requests_of_rows = launcher.bind(kernels.row_requests, M=M, K=K, STEP_EACH=_parameter(call.step)[1], R=REQUEST)
    draws = _RowDraws(call, strict=call.draft_probs is None and call.draft_logits is None)
    launches: list[_DraftLaunches] = []  # one, made of the first logits

    def run(call: VerifyCall) -> VerifyResult:
        given = call.target_logits if V == W else call.target_logits[:, :V]
        cu, drafts = call.cu_draft.contiguous(), call.draft_ids.contiguous()
        rows = torch.zeros(4, M, dtype=torch.int64, device=device)
        if B:
            requests_of_rows((B, 1, 1), cu, drafts, _parameter(call.step)[0], rows)
        request, place, draft, step = rows.unbind()
        x, spoiled, allowed = given, None, call.allowed
        if edits:
            decoded = decode(call, M, device, torch.float32, request)
            decoded = decoded._replace(step=step, padding=None)
            bonus = draft < 0
            source = torch.where(bonus, K, torch.arange(M, device=device) - request)
            decoded = with_drafts(decoded, DraftRows(request, place, bonus, source, draft), call.draft_ids)
            edited = edit(given.to(torch.float32), 0, decoded, bias=call.bias, allowed=allowed, banned=call.banned)
            x, allowed = edited.x, None
            spoiled = (edited.nan * 1 + (decoded.bad | edited.bad) * 2).to(torch.int32)
        elif allowed is not None:
            allowed = allowed.contiguous()
        drawn = draws.draw(call, x, given, request, step, allowed, spoiled)
        accepted = torch.empty(B, dtype=torch.int32, device=device)
        if B:
            if not launches:
                launches.append(_DraftLaunches(launcher, call, x, allowed, M, V))
            launches[0](call, rows, cu, x, given, allowed, drawn, accepted)
        result = drawn.result
        return VerifyResult(
            accepted=accepted,
            token=result.token,
            logprob=result.logprob,
            log_kept_mass=result.log_kept_mass,
            kept_count=result.kept_count,
            status=result.status,
            raw_logprob=result.raw_logprob,
        )

    return run


def _edits(call: VerifyCall) -> bool:
    """Whether logits are edited before they are drawn from."""
    return any(x is not None for x in (call.penalties, call.bias, call.banned))


class _RowDraws:
    """The distribution of every row and a token of it, drawn as sample draws it."""

    def __init__(self, call: VerifyCall, *, strict: bool) -> None:
        given = {name: getattr(call, name) for name in _PER_REQUEST}
        self._gathered = [  # parameters with an entry per request: their places among the arguments
            (i, name)
            for i, (name, value) in enumerate(given.items())
            if isinstance(value, Tensor) and value.numel() != 1
        ]
        self._same = [  # and those that stand for all requests
            (i, name)
            for i, (name, value) in enumerate(given.items())
            if isinstance(value, Tensor) and value.numel() == 1
        ]
        self._seeded = not isinstance(call.seed, Tensor)
        self._strict, self._invalid_token, self._raw = strict, call.invalid_token, call.raw_logprob
        self._parameters: list[Any] = []
        self._plan: SamplePlan | None = None

    def draw(
        self, call: VerifyCall, x: Tensor, given: Tensor, request: Tensor, step: Tensor, allowed: Tensor | None,
        spoiled: Tensor | None,
    ) -> Drawn:  # fmt: skip
        """The draw, with statistics of its rows where drafts are tested against them."""
        raw = given if self._raw else None
        if self._plan is None:
            self._prepare(call, x, raw, request, step, allowed, spoiled)
        parameters = self._parameters.copy()
        for i, name in self._gathered:
            parameters[i] = flat(getattr(call, name))[request]
        for i, name in self._same:
            parameters[i] = flat(getattr(call, name))
        if self._seeded:
            parameters[4] = as_int64(call.seed)
        parameters[5] = step
        return self._plan(x, raw, tuple(parameters), 0, allowed, spoiled, self._invalid_token)  # type: ignore[misc]

    def _prepare(
        self, call: VerifyCall, x: Tensor, raw: Tensor | None, request: Tensor, step: Tensor, allowed: Tensor | None,
        spoiled: Tensor | None,
    ) -> None:  # fmt: skip
        each = {name: getattr(call, name) for name in _PER_REQUEST}
        each |= {name: flat(each[name])[request] for _, name in self._gathered}
        params = SamplingParams(**each, step=step, filter_order=call.filter_order, tie=call.tie, slot=None, stream=0)
        parameters = params.arguments()
        self._parameters = [None if isinstance(p, Tensor) else p for p in parameters]
        self._plan = SamplePlan(
            x, raw, params, parameters, allowed=allowed, spoiled=spoiled, entropy=False, row_stats=not self._strict,
            shape=SHAPE,
        )  # fmt: skip


class _DraftLaunches:
    """The launches of a round of drafts, once every row has its distribution and a token."""

    def __init__(
        self, launcher: Launcher, call: VerifyCall, x: Tensor, allowed: Tensor | None, M: int, V: int
    ) -> None:  # fmt: skip
        B, raw, given = call.cu_draft.shape[0] - 1, call.raw_logprob, call.target_logits
        self.logits = call.draft_logits is not None
        q = call.draft_logits if self.logits else call.draft_probs
        self._strict = q is None
        self._count = launcher.bind(
            kernels.count_accepted, M=M, V=V, invalid_token=call.invalid_token, STRICT=self._strict, RAW=raw, R=REQUEST
        )
        self._B, self._M = (B, 1, 1), (M, 1, 1)
        if q is None:
            return
        K, S, W = M - B, triton.cdiv(V, BLOCK), triton.cdiv(V, WIDE)
        view: dict[str, Any] = {"row_stride": x.stride(0), "column_stride": x.stride(1), "M": M, "V": V}
        common: dict[str, Any] = {
            **view, "allowed_stride": 0 if allowed is None else allowed.shape[1], "HAS_ALLOWED": allowed is not None,
            "q_row_stride": q.stride(0), "q_column_stride": q.stride(1), "LOGITS": self.logits,
            "SEED_EACH": _parameter(call.seed)[1],
        }  # fmt: skip
        strides: dict[str, Any] = {"row_stride": q.stride(0), "column_stride": q.stride(1)}
        self._has_draft_logits = self.logits and K > 0
        if self._has_draft_logits:
            self._partial = launcher.bind(kernels.partial_draft_softmax, **strides, V=V, W=W, WIDE=WIDE, BLOCK=BLOCK)
            self._merge = launcher.bind(kernels.merge_draft_softmax, W=W, PARTS=triton.next_power_of_2(W))
        self._accept = launcher.bind(kernels.accept_drafts, **common)
        self._residual = launcher.bind(kernels.residual_argmax, **common, S=S, BLOCK=BLOCK)
        self._write = launcher.bind(
            kernels.write_replacements, **view, raw_row_stride=given.stride(0), raw_column_stride=given.stride(1), S=S,
            RAW=raw, SP=triton.next_power_of_2(S),
        )  # fmt: skip
        self._KW, self._K, self._BS = (K, W, 1), (K, 1, 1), (B, S, 1)
        # Sums of drafts, their parts and scores in float64; accepted drafts and winners as integers.
        self._floats = [2 * max(K, 1), 2 * K * W if self._has_draft_logits else 0, 2 * B * S]
        self._ints = [-(-M // 4) * 4, 2 * B * S]

    def __call__(
        self,
        call: VerifyCall,
        rows: Tensor,
        cu: Tensor,
        x: Tensor,
        given: Tensor,
        allowed: Tensor | None,
        drawn: Drawn,
        accepted: Tensor,
    ) -> None:
        """Accept, and draw in place of the first draft that fails; results are written into those of `drawn`."""
        result, row_stats, longs, ints, floats = drawn
        if self._strict:
            self._count(self._B, rows, cu, None, longs, ints, floats, accepted)
            return
        device = x.device
        q = call.draft_logits if self.logits else call.draft_probs
        sums, parts, scores = torch.empty(
            sum(self._floats), dtype=torch.float64, device=device
        ).unsafe_split_with_sizes(self._floats)  # fmt: skip
        accept, winners = torch.empty(
            sum(self._ints), dtype=torch.int32, device=device
        ).unsafe_split_with_sizes(self._ints)  # fmt: skip
        if self._has_draft_logits:
            self._partial(self._KW, q, parts)
            self._merge(self._K, parts, sums)
        seed, _ = _parameter(call.seed)
        threshold, threshold_id = result.threshold, result.threshold_id
        self._accept(self._M, rows, x, allowed, q, sums, seed, row_stats, threshold, threshold_id, accept)
        self._count(self._B, rows, cu, accept, longs, ints, floats, accepted)
        self._residual(
            self._BS, rows, cu, accepted, x, allowed, q, sums, seed, row_stats, threshold, threshold_id, ints, scores,
            winners,
        )  # fmt: skip
        self._write(self._M, rows, cu, accepted, x, given, row_stats, scores, winners, longs, ints, floats)


def _parameter(value: int | Tensor) -> tuple[int | Tensor, int]:
    """An argument of a kernel, and its `EACH`: -1 a number, 0 one entry for all, 1 one per request."""
    if isinstance(value, Tensor):
        one = flat(value)
        return one, int(one.shape[0] != 1)
    return as_int64(value), -1

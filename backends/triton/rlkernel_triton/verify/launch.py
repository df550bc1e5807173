"""verify@1 in Triton: the sampler's kernels give each row its law and a token, and those of `verify_kernels` the rest.

No host synchronisation and no shape that depends on data. Penalties, bias and banned ids go through the core's torch
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
from rlkernel_triton.launchers import Launcher, launcher_for
from rlkernel_triton.sample.plan import SHAPE, Drawn, Law, Plan, as_int64, flat
from rlkernel_triton.verify import kernels

BLOCK: Final = 1024  # tokens of a tile
WIDE: Final = 8192  # logits of a draft that one program adds up
REQUEST: Final = 32  # rows of a request that are looked at together
_PER_REQUEST: Final = ("temperature", "top_k", "top_p", "min_p", "seed")  # in the order of a law's arguments


def verify(call: VerifyCall) -> VerifyResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: VerifyCall) -> Callable[[VerifyCall], VerifyResult]:
    """What runs calls of this shape: rlkernel_core.spec.verify.VerifyCall is the contract."""
    (M, W), K, B = call.target_logits.shape, call.draft_ids.shape[0], call.cu_draft.shape[0] - 1
    V, device, edits = call.vocab_size or W, call.target_logits.device, _edits(call)
    launcher = launcher_for(device)
    lay_out = launcher.bind(kernels.lay_out, M=M, K=K, STEP_EACH=_parameter(call.step)[1], R=REQUEST)
    law = _Laws(call, strict=call.draft_probs is None and call.draft_logits is None)
    chains: list[_Chain] = []  # one, made of the first logits

    def run(call: VerifyCall) -> VerifyResult:
        given = call.target_logits if V == W else call.target_logits[:, :V]
        cu, drafts = call.cu_draft.contiguous(), call.draft_ids.contiguous()
        rows = torch.zeros(4, M, dtype=torch.int64, device=device)
        if B:
            lay_out((B, 1, 1), cu, drafts, _parameter(call.step)[0], rows)
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
        drawn = law.draw(call, x, given, request, step, allowed, spoiled)
        accepted = torch.empty(B, dtype=torch.int32, device=device)
        if B:
            if not chains:
                chains.append(_Chain(launcher, call, x, allowed, M, V))
            chains[0](call, rows, cu, x, given, allowed, drawn, accepted)
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


class _Laws:
    """The law of every row and a token of it, drawn as sample draws it."""

    def __init__(self, call: VerifyCall, *, strict: bool) -> None:
        given = {name: getattr(call, name) for name in _PER_REQUEST}
        self._gathered = [  # parameters with an entry per request: their places among a law's arguments
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
        self._plan: Plan | None = None

    def draw(
        self, call: VerifyCall, x: Tensor, given: Tensor, request: Tensor, step: Tensor, allowed: Tensor | None,
        spoiled: Tensor | None,
    ) -> Drawn:  # fmt: skip
        """The draw, with its laws where drafts are tested against theirs."""
        raw = given if self._raw else None
        if self._plan is None:
            self._prepare(call, x, raw, request, step, allowed, spoiled)
        parameters = self._parameters.copy()
        for i, name in self._gathered:
            parameters[i] = getattr(call, name).reshape(-1)[request]
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
        each |= {name: each[name].reshape(-1)[request] for _, name in self._gathered}
        law = Law(**each, step=step, filter_order=call.filter_order, tie=call.tie, slot=None, stream=0)
        parameters = law.arguments()
        self._parameters = [None if isinstance(p, Tensor) else p for p in parameters]
        self._plan = Plan(
            x, raw, law, parameters, allowed=allowed, spoiled=spoiled, entropy=False, laws=not self._strict,
            shape=SHAPE,
        )  # fmt: skip


class _Chain:
    """The launches of a round of drafts, once every row has its law and a token."""

    def __init__(
        self, launcher: Launcher, call: VerifyCall, x: Tensor, allowed: Tensor | None, M: int, V: int
    ) -> None:  # fmt: skip
        B, raw, given = call.cu_draft.shape[0] - 1, call.raw_logprob, call.target_logits
        self.logits = call.draft_logits is not None
        q = call.draft_logits if self.logits else call.draft_probs
        self._strict = q is None
        self._stop = launcher.bind(
            kernels.stop, M=M, V=V, invalid_token=call.invalid_token, STRICT=self._strict, RAW=raw, R=REQUEST
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
        self._weighed = self.logits and K > 0
        if self._weighed:
            self._weigh = launcher.bind(kernels.weigh_drafts, **strides, V=V, W=W, WIDE=WIDE, BLOCK=BLOCK)
            self._join = launcher.bind(kernels.join_drafts, W=W, PARTS=triton.next_power_of_2(W))
        self._test = launcher.bind(kernels.test, **common)
        self._search = launcher.bind(kernels.search, **common, S=S, BLOCK=BLOCK)
        self._put = launcher.bind(
            kernels.put, **view, raw_row_stride=given.stride(0), raw_column_stride=given.stride(1), S=S, RAW=raw,
            SP=triton.next_power_of_2(S),
        )  # fmt: skip
        self._KW, self._K, self._BS = (K, W, 1), (K, 1, 1), (B, S, 1)
        # Sums of drafts, their parts and scores in float64; accepted drafts and winners as integers.
        self._floats = [2 * max(K, 1), 2 * K * W if self._weighed else 0, 2 * B * S]
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
        result, laws, longs, ints, floats = drawn
        if self._strict:
            self._stop(self._B, rows, cu, None, longs, ints, floats, accepted)
            return
        device = x.device
        q = call.draft_logits if self.logits else call.draft_probs
        sums, parts, scores = torch.empty(
            sum(self._floats), dtype=torch.float64, device=device
        ).unsafe_split_with_sizes(self._floats)  # fmt: skip
        accept, winners = torch.empty(
            sum(self._ints), dtype=torch.int32, device=device
        ).unsafe_split_with_sizes(self._ints)  # fmt: skip
        if self._weighed:
            self._weigh(self._KW, q, parts)
            self._join(self._K, parts, sums)
        seed, _ = _parameter(call.seed)
        cut, cut_id = result.threshold, result.threshold_id
        self._test(self._M, rows, x, allowed, q, sums, seed, laws, cut, cut_id, accept)
        self._stop(self._B, rows, cu, accept, longs, ints, floats, accepted)
        self._search(
            self._BS, rows, cu, accepted, x, allowed, q, sums, seed, laws, cut, cut_id, ints, scores, winners
        )  # fmt: skip
        self._put(self._M, rows, cu, accepted, x, given, laws, scores, winners, longs, ints, floats)


def _parameter(value: int | Tensor) -> tuple[int | Tensor, int]:
    """An argument of a kernel, and its `EACH`: -1 a number, 0 one entry for all, 1 one per request."""
    if isinstance(value, Tensor):
        one = flat(value)
        return one, int(one.shape[0] != 1)
    return as_int64(value), -1

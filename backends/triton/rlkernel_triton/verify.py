"""verify@1 in Triton: the sampler's kernels give each row its law and a token, and those of `verify_kernels` the rest.

No host synchronisation and no shape that depends on data. Penalties, bias and banned ids go through the core's torch
formulas into one fp32 copy of the logits, as in sample.

Legend: B requests · K drafts · M = K + B rows · V vocabulary.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reference.requests import decode, edit
from rlkernel_core.reference.verify import _Rows, _with_drafts
from rlkernel_core.spec.verify import VerifyCall, VerifyResult
from rlkernel_triton import verify_kernels as kernels
from rlkernel_triton.launch import FUSED, on_device_of
from rlkernel_triton.sampling.plan import Law, as_int64, draw

BLOCK: Final = 1024  # tokens of a tile
WIDE: Final = 8192  # logits of a draft that one program adds up
REQUEST: Final = 32  # rows of a request that are looked at together


def verify(call: VerifyCall) -> VerifyResult:
    """Accept drafts and draw replacements: rlkernel_core.spec.verify.VerifyCall is the contract."""
    target_logits, draft_ids, draft_logits, allowed = (
        call.target_logits,
        call.draft_ids,
        call.draft_logits,
        call.allowed,
    )
    M, K, B = target_logits.shape[0], draft_ids.shape[0], call.cu_draft.shape[0] - 1
    given = target_logits[:, : call.vocab_size or target_logits.shape[1]]
    cu = call.cu_draft.contiguous()
    rows = torch.zeros(4, M, dtype=torch.int64, device=given.device)
    steps, step_each = _parameter(call.step)
    with on_device_of(given):
        if B:
            kernels.lay_out[(B,)](
                cu, draft_ids.contiguous(), steps, rows, M, K, STEP_EACH=step_each, R=REQUEST, **FUSED
            )
    request = rows[0]
    law = {
        "temperature": call.temperature,
        "top_k": call.top_k,
        "top_p": call.top_p,
        "min_p": call.min_p,
        "seed": call.seed,
    }
    each = {name: _gathered(value, request) for name, value in law.items()}
    x, spoiled = given, None
    if not call.penalties is call.bias is call.banned is None:
        decoded = decode(M, x.device, torch.float32, **law, step=call.step, penalties=call.penalties, slot=request)
        decoded = decoded._replace(step=rows[3], padding=None)
        bonus = rows[2] < 0
        source = torch.where(bonus, K, torch.arange(M, device=x.device) - request)
        decoded = _with_drafts(decoded, _Rows(request, rows[1], bonus, source, rows[2]), draft_ids)
        edited = edit(given.to(torch.float32), 0, decoded, bias=call.bias, allowed=allowed, banned=call.banned)
        x, allowed = edited.x, None
        spoiled = (edited.nan * 1 + (decoded.bad | edited.bad) * 2).to(torch.int32)
    strict = call.draft_probs is None and draft_logits is None
    drawn, laws = draw(
        x,
        given if call.raw_logprob else None,
        Law(**each, step=rows[3], filter_order=call.filter_order, tie=call.tie, slot=None, stream=0),
        allowed=allowed,
        spoiled=spoiled,
        invalid_token=call.invalid_token,
        with_laws=not strict,
    )
    out = _Results(drawn, raw=call.raw_logprob)
    accepted = torch.empty(B, dtype=torch.int32, device=x.device)
    if B:
        chain = _Chain(rows, cu, out, accepted, M, x.shape[1], call.invalid_token)
        with on_device_of(x):
            if strict or laws is None:
                chain.stop(None)
            else:
                logits = draft_logits is not None
                chain.replace(
                    x, given, allowed, draft_logits if logits else call.draft_probs, call.seed, laws, logits=logits
                )
    return out.result(accepted)


class _Results:
    """The sampler's results as [., M] blocks that kernels write to."""

    def __init__(self, drawn: Any, *, raw: bool) -> None:
        self.longs = drawn.token
        self.ints = torch.stack((drawn.kept_count, drawn.status))
        held = [drawn.logprob, drawn.log_kept_mass, drawn.threshold]
        self.floats = torch.stack([*held, drawn.raw_logprob] if raw else held)
        self.threshold_id, self.raw = drawn.threshold_id, raw

    def result(self, accepted: Tensor) -> VerifyResult:
        """As the operator returns them."""
        return VerifyResult(
            accepted=accepted,
            token=self.longs,
            logprob=self.floats[0],
            log_kept_mass=self.floats[1],
            kept_count=self.ints[0],
            status=self.ints[1],
            raw_logprob=self.floats[3] if self.raw else None,
        )


class _Chain:
    """A round of drafts on its way through the kernels."""

    def __init__(
        self, rows: Tensor, cu: Tensor, out: _Results, accepted: Tensor, M: int, V: int, invalid_token: int
    ) -> None:
        self.rows, self.cu, self.out, self.accepted = rows, cu, out, accepted
        self.M, self.V, self.invalid_token = M, V, invalid_token

    def stop(self, accept: Tensor | None) -> None:
        """Find each request's first rejection and empty the rows behind it."""
        out = self.out
        kernels.stop[(len(self.accepted),)](
            self.rows, self.cu, accept, out.longs, out.ints, out.floats, self.accepted, self.M, self.V,
            self.invalid_token, STRICT=accept is None, RAW=out.raw, R=REQUEST, **FUSED,
        )  # fmt: skip

    def replace(
        self,
        x: Tensor,
        raw: Tensor,
        allowed: Tensor | None,
        q: Tensor,
        seed: int | Tensor,
        laws: Tensor,
        *,
        logits: bool,
    ) -> None:
        """Test every draft against both laws, and draw in place of the first that fails."""
        out, B, M, V = self.out, len(self.accepted), self.M, self.V
        K, S = M - B, triton.cdiv(V, BLOCK)
        sums = torch.empty(max(K, 1), 2, dtype=torch.float64, device=x.device)
        if logits and K:
            W = triton.cdiv(V, WIDE)
            parts = torch.empty(K, W, 2, dtype=torch.float64, device=x.device)
            kernels.weigh_drafts[(K, W)](q, *q.stride(), V, W, parts, WIDE=WIDE, BLOCK=BLOCK, **FUSED)
            kernels.join_drafts[(K,)](parts, sums, W, PARTS=triton.next_power_of_2(W), **FUSED)
        seeds, seed_each = _parameter(seed)
        mask = {"allowed": None if allowed is None else allowed.contiguous()}
        mask |= {"allowed_stride": 0 if allowed is None else allowed.shape[1], "HAS_ALLOWED": allowed is not None}
        view = {"rows": self.rows, "x": x, "row_stride": x.stride(0), "column_stride": x.stride(1), "M": M, "V": V}
        law = {"laws": laws, "threshold": out.floats[2], "threshold_id": out.threshold_id}
        draft = {"q": q, "q_row_stride": q.stride(0), "q_column_stride": q.stride(1), "sums": sums, "LOGITS": logits}
        common = view | mask | law | draft | {"seed": seeds, "SEED_EACH": seed_each}
        accept = torch.empty(M, dtype=torch.int32, device=x.device)
        kernels.test[(M,)](**common, accept=accept, **FUSED)
        self.stop(accept)
        scores = torch.empty(B, 2, S, dtype=torch.float64, device=x.device)
        winners = torch.empty(B, 2, S, dtype=torch.int32, device=x.device)
        stopped = {"cu_draft": self.cu, "accepted": self.accepted, "scores": scores, "winners": winners, "S": S}
        kernels.search[(B, S)](**common, **stopped, ints=out.ints, BLOCK=BLOCK, **FUSED)
        kernels.put[(M,)](
            **view, **stopped, laws=laws, longs=out.longs, ints=out.ints, floats=out.floats, raw=raw,
            raw_row_stride=raw.stride(0), raw_column_stride=raw.stride(1), RAW=out.raw,
            SP=triton.next_power_of_2(S), **FUSED,
        )  # fmt: skip


def _parameter(value: int | Tensor) -> tuple[int | Tensor, int]:
    """An argument of a kernel, and its `EACH`: -1 a number, 0 one entry for all, 1 one per request."""
    if isinstance(value, Tensor):
        flat = value.reshape(-1).contiguous()
        return flat, int(flat.shape[0] != 1)
    return as_int64(value), -1


def _gathered(value: Any, request: Tensor) -> Any:
    """A parameter per request as one per row."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return value.reshape(-1)[request]
    return value

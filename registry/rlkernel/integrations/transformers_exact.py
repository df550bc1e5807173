"""transformers' attention by `rlkernel.attention`, through its own registries: what `rlkernel.exact` sets in a decoder.

What transformers makes in place of a mask says where the sequences of a step are; every layer's attention reads it.

Legend: B batch entries · T queries · S keys · H heads · D width.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlkernel.integrations.host import Host, Symbol
from rlkernel.integrations.transformers_pages import cache_argument
from rlkernel_core.errors import ArgumentError, HostError

if TYPE_CHECKING:
    from torch import Tensor

NAME: Final = "rlkernel"  # of the attention, in transformers' registry
HOST: Final = Host(
    name="transformers exact",
    distribution="transformers",
    versions=">=5.15,<5.25",
    tested="5.24.0",
    does="a decoder whose bits do not depend on the batch: exact(model)",
    symbols=(
        Symbol("transformers.modeling_utils", "AttentionInterface"),
        Symbol("transformers.masking_utils", "AttentionMaskInterface"),
        Symbol("transformers.utils.generic", "GeneralInterface.register"),
        Symbol("transformers.cache_utils", "Cache"),
        Symbol("transformers.cache_utils", "CacheLayerMixin"),
        Symbol("transformers.generation.utils", "GenerationMixin.prepare_inputs_for_generation"),
        Symbol(
            "transformers.modeling_utils",
            "PreTrainedModel.set_attn_implementation",
            "self, attn_implementation, allow_all_kernels",
        ),
    ),
)


class Places(NamedTuple):
    """What attention gets as its mask: where sequences are in the rows of a step, all batch entries end to end."""

    cu_q: Tensor  # [sequences + 1] int32
    cu_k: Tensor  # [sequences + 1] int32
    known: bool  # False: the mask is neither causal nor a window, such as one of packed sequences


def places(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: Any = None,
    **_: Any,
) -> Places:
    """What transformers makes in place of a mask, once a step for all layers.

    With a mask of padding, [B, seen] of bool, each batch entry is three sequences: what is before its tokens, these,
    and what is behind. Where a static cache is longer than what is seen, so is the last of them.

    Raises:
        HostError: keys of a sliding window alone are kept: their positions, and so the order of sums, would move.
    """
    if kv_offset:
        raise HostError(f"a cache that drops keys moves the order of sums; pass {cache_argument()}=DynamicCache()")
    import torch

    T, S, count = q_length, kv_length, batch_size + 1
    known = T == 1 or allow_is_causal_skip
    if attention_mask is None and isinstance(q_offset, int) and q_offset + T == S:
        each = torch.arange(count, device=device, dtype=torch.int32)
        return Places(each * T, each * S, known)
    entry = torch.arange(batch_size, device=device)
    first = torch.zeros_like(entry)
    last = first + (q_offset + T)
    if attention_mask is not None:
        mask = attention_mask[:, :S].to(device=device, dtype=torch.int32)
        first, seen = mask.argmax(1), mask.sum(1)
        last = first + seen
        behind = mask.shape[1] - mask.flip(1).argmax(1)  # where the last token ends
        if not _capturing(mask) and bool(((behind != last) & (seen > 0)).any()):
            raise ArgumentError("attention_mask", "zeros between ones", "is no padding", "Pad on one side, or on both.")
    # Query i stands where key q_offset + i stands.
    begin, end = ((x - q_offset).clamp(0, T) for x in (first, last))
    return Places(_thirds(begin, end, T), _thirds(first, last, S), known)


def _thirds(first: Tensor, last: Tensor, length: int) -> Tensor:
    """Offsets of what is before, within and behind [B] `first` and `last` of rows of a length."""
    import torch

    rows = torch.arange(first.shape[0], device=first.device) * length
    inner = torch.stack([rows, rows + first, rows + last], 1).view(-1)
    return torch.cat([inner, inner.new_full((1,), first.shape[0] * length)]).int()


def _capturing(x: Tensor) -> bool:
    import torch

    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def attention_by(calls: Counter[str]) -> Any:
    """What transformers calls in each layer, counting in `calls`."""

    def attention(
        module: Any,
        query: Tensor,  # [B, Hq, T, D]
        key: Tensor,  # [B, Hk, S, D]
        value: Tensor,
        attention_mask: Places | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        page_table: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_k: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            raise HostError(f"attention_dropout = {dropout}: what is dropped depends on the batch; set it to 0")
        if not isinstance(attention_mask, Places):
            given = f"{type(module).__name__} gave a mask of its own, {type(attention_mask).__name__}"
            raise HostError(f"{given}; pass attention_mask [B, S] of padding, or none")
        cu_q, cu_k, known = attention_mask
        if cu_seq_lens_q is not None:
            cu_q, cu_k = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        elif not known:
            raise HostError("a mask that is not causal, or packed sequences; pass cu_seq_lens_q and cu_seq_lens_k")
        q = query.transpose(1, 2).flatten(0, 1)
        if page_table is None:
            k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
            where: dict[str, Any] = {"cu_k": cu_k, "max_k": max(key.shape[2], 1)}
        else:  # `transformers_pages`: key and value are pages
            k, v, where = key, value, {"page_table": page_table, "seqused_k": seqused_k, "max_k": max_k}
        import rlkernel as rlk

        made = rlk.attention(
            q, k, v, cu_q=cu_q, causal=getattr(module, "is_causal", True), scale=scaling,
            window=sliding_window, softcap=softcap, sinks=s_aux, **where,
        )  # fmt: skip
        calls["attention"] += 1
        return made.out.view(query.shape[0], query.shape[2], *made.out.shape[1:]), None

    return attention

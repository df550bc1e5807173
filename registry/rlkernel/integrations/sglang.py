"""SGLang: a sampler backend named `rlkernel`, by its registry; who wants it says `--sampling-backend rlkernel`.

Checked against SGLang's source, and run in its whole engine on a CPU and on an H200, with a stub for `sgl_kernel`.
SGLang imports `register` by its entry-point group `sglang.srt.plugins`.

The filters are SGLang's: top-k, top-p and min-p of the batch, each taken on the tempered law and intersected. Noise is
keyed by a request's `sampling_seed` and the place of its token in the sequence, the prompt included. SGLang hands seeds
to a sampler in deterministic inference alone, which takes its own backend; so a hook of its plugins puts them into each
batch that is made, where our backend was asked for. A request without a seed has one of its id, so that ranks agree.

On a CPU SGLang takes its own backend whatever is asked for; a hook of its settings keeps ours there. Where
SGLang takes another backend than ours elsewhere, as in deterministic inference, the first batch is an error.

Engines end their processes without a word. Where RLKERNEL_RECORD names a folder, decisions.json is written there after
the first draw, and again after 2, 4, 8 ... draws; `rlkernel status` reads it.

Legend: B requests · V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, registered
from rlkernel_core.environment import path_in
from rlkernel_core.errors import FileError, HostError

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel import SampleResult

SAMPLER: Final = "sglang.srt.layers.sampler"
_HOOKS: Final = "sglang.srt.plugins.hook_registry"
_CONTEXT: Final = "sglang.srt.runtime_context"
_BATCHES: Final = "sglang.srt.sampling.sampling_batch_info"
_SETTINGS: Final = "sglang.srt.arg_groups"
BATCH: Final = f"{_BATCHES}.SamplingBatchInfo.from_schedule_batch"
BACKEND: Final = "rlkernel"
RECORD: Final = "RLKERNEL_RECORD"
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
        Symbol(SAMPLER, "_SamplingMaskCapture"),
        Symbol(_HOOKS, "HookRegistry.register", "target, hook, hook_type, source"),
        Symbol(_HOOKS, "HookType"),
        Symbol(_CONTEXT, "get_exec", ""),
        Symbol(_CONTEXT, "get_server_args", ""),
        Symbol(f"{_SETTINGS}.resolution_hooks", "register_resolution_hook", "name"),
        Symbol(f"{_SETTINGS}.platform_hook", "handle_cpu_backends", "server_args"),
        Symbol(f"{_SETTINGS}.overrides", "declare_resolution", "server_args, source, fields"),
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
    import_module(f"{_SETTINGS}.resolution_hooks").register_resolution_hook("handle_cpu_backends")(kept_on_cpu)
    return entry


def kept_on_cpu(server_args: Any, previous: Callable[[Any], None]) -> None:
    """What SGLang calls in place of its settings for a CPU: those, and our backend where it was asked for."""
    previous(server_args)
    if server_args.device == "cpu" and server_args.sampling_backend == BACKEND:
        import_module(f"{_SETTINGS}.overrides").declare_resolution(server_args, BACKEND, sampling_backend=BACKEND)


def seeded(info: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """What SGLang calls after it has made a batch: the batch, with seeds where our backend draws from it.

    Raises:
        HostError: our backend was asked for, and SGLang took another.
    """
    del cls, vocab_size
    context = import_module(_CONTEXT)
    asked, chosen = context.get_server_args().sampling_backend, context.get_exec().kernel.sampling_backend
    if asked == BACKEND and chosen != BACKEND:
        said = f"--sampling-backend {BACKEND} was asked for, and SGLang took {chosen!r}"
        raise HostError(f"sglang: {said}; leave deterministic inference away, or ask for {chosen!r}")
    if chosen == BACKEND:
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
        ) -> tuple[Tensor, Any]:
            entry.calls["sample"] += 1
            logits = probs.log()
            drawn = draw(logits, sampling_info, positions, filtered=not simple_sampling_case)
            recorded(entry.calls["sample"])
            wanted = sampling_info.sampling_mask_batch_indices
            return drawn.token, None if wanted is None else captured(logits, probs, drawn, wanted)

    return RLKernelSampler


def recorded(count: int) -> None:
    """Write decisions.json after some counts of draws where RLKERNEL_RECORD names a folder; ranks have one each.

    Raises:
        FileError: it cannot be written after the first draw; later ones are logged.
    """
    folder = path_in(RECORD)
    if folder is None or count & (count - 1):
        return
    from torch import distributed

    from rlkernel import record

    rank = distributed.get_rank() if distributed.is_initialized() else 0
    try:
        record.write(folder / f"rank{rank}" if rank else folder)
    except FileError as error:
        if count == 1:
            raise
        logging.getLogger(__name__).warning("decisions.json: %s", error)


def draw(logits: Tensor, info: Any, positions: Tensor, *, filtered: bool) -> SampleResult:
    """One token a row.

    Raises:
        HostError: the batch has no seeds.
    """
    import rlkernel as rlk

    if info.sampling_seed is None:
        said = "no seeds in this batch, so that no draw could be made again"
        raise HostError(f"sglang: {said}; leave rlkernel in SGLANG_PLUGINS, or --sampling-backend rlkernel away")
    law: dict[str, Any] = {}
    if filtered:
        law = {"top_k": info.top_ks, "top_p": info.top_ps, "min_p": info.min_ps, "filter_order": "joint"}
    return rlk.sample(logits, seed=info.sampling_seed, step=positions + 1, **law)


def captured(logits: Tensor, probs: Tensor, drawn: SampleResult, wanted: Tensor) -> Any:
    """What SGLang makes a sampling mask and its log-probabilities of, for the rows [M] of the batch that want one."""
    import torch

    found, token = logits[wanted], drawn.token[wanted, None]
    threshold, last = drawn.threshold[wanted, None], drawn.threshold_id[wanted, None]
    ids = torch.arange(probs.shape[-1], device=probs.device)
    kept = (found > threshold) | ((found == threshold) & (ids <= last))
    weights = torch.where(kept, probs[wanted], 0)
    chosen = weights.gather(-1, token)[:, 0]
    return import_module(SAMPLER)._SamplingMaskCapture(weights, None, chosen, wanted)

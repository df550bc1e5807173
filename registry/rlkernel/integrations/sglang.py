"""SGLang: a sampler backend named `rlkernel`, by its registry; who wants it says `--sampling-backend rlkernel`.

Held against SGLang's source and, for the draw, against a stand-in of its batch; never run in SGLang itself, which needs
a GPU build. SGLang imports `register` by its entry-point group `sglang.srt.plugins`.

The filters are SGLang's: top-k, top-p and min-p of the batch, each taken on the tempered law and intersected. Noise is
keyed by the request's `sampling_seed` and position; a batch without seeds draws them from torch's generator.

Legend: B requests · V vocabulary.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, registered
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor

SAMPLER: Final = "sglang.srt.layers.sampler"
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
    ),
    ran=False,
)


def register(*, force: bool = False) -> Active:
    """Add the backend to SGLang's choices, in this process; nothing uses it that does not ask for it.

    Raises:
        HostError: SGLang is absent, of a version that this was not made for, or has changed.
    """
    entry = registered(HOST, HOST.require(force=force), f"register_sampler_backend: {BACKEND}")
    module = import_module(SAMPLER)
    module.register_sampler_backend(BACKEND, sampler(module.Sampler, entry))
    return entry


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
        HostError: the batch wants the kept ids back, which this backend does not return.
    """
    import torch

    import rlkernel as rlk

    if info.sampling_mask_batch_indices is not None:
        raise HostError("sglang: sampling masks are not returned by --sampling-backend rlkernel; use flashinfer")
    seed = info.sampling_seed
    if seed is None:
        seed = torch.randint(0, 2**62, probs.shape[:1], device=probs.device)
    law: dict[str, Any] = {}
    if filtered:
        law = {"top_k": info.top_ks, "top_p": info.top_ps, "min_p": info.min_ps, "filter_order": "joint"}
    return rlk.sample(probs.log(), seed=seed, step=positions, **law).token

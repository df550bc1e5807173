"""What vLLM makes in each of its workers where an engine names it, by two options of its own; vLLM imports this.

    --logits-processors rlkernel.integrations.vllm_worker:Draw       # tokens are drawn by rlkernel.sample
    --worker-extension-cls rlkernel.integrations.vllm_worker.Record  # collective_rpc("rlkernel_record", args=(folder,))
                                                                     # collective_rpc("rlkernel_draw")

`Draw` is a logits processor that changes no logits: vLLM makes one in every worker that samples, in whatever process,
so that this is where the sampler's draw is replaced, until the process ends. What would leave it without effect is
refused there, so that no engine starts that draws otherwise. `Record` adds a method that writes decisions.json, which
`rlkernel status` reads, and one that replaces the draw from now on: an engine that returns sampling masks takes no
logits processors.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkernel.integrations import vllm
from rlkernel.integrations.host import KEPT
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor


class Record:
    """Methods that vLLM adds to its workers."""

    rank: int  # vLLM's, of the worker
    vllm_config: Any  # vLLM's

    def rlkernel_record(self, folder: str) -> str:
        """Write decisions.json of this worker's process; its path. Ranks but the first write into folder/rank1, ...

        Raises:
            FileError: it cannot be written.
        """
        from rlkernel import record

        return str(record.write(Path(folder) / f"rank{self.rank}" if self.rank else folder))

    def rlkernel_draw(self) -> None:
        """Draw by `rlkernel.sample` from now until this worker's process ends, as `Draw` does.

        Raises:
            HostError: as `Draw`; the engine lives on, and draws as before.
        """
        vllm.HOST.require()
        _check(self.vllm_config)
        _keep()


def __getattr__(name: str) -> Any:
    if name == "Draw":
        return _draw()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _draw() -> type:
    """The class, derived from vLLM's when vLLM asks for it.

    Raises:
        HostError: vLLM is of a version that this was not made for, or has changed.
    """
    vllm.HOST.require()
    parent = import_module(f"{vllm.PROCESSOR}.interface").LogitsProcessor

    class Draw(parent):  # type: ignore[misc, valid-type]
        """Tokens of this worker are drawn by `rlkernel.sample`."""

        def __init__(self, vllm_config: Any, *_: Any) -> None:
            _check(vllm_config)
            _keep()

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            del req_idx, sampling_params
            return False  # logits stay as they are

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            del ctx
            return logits

    # Model runner V1 takes subclasses of its own class alone; as one of them, ours gets to say why it is refused.
    import_module(f"{vllm.OLD_PROCESSOR}.interface").LogitsProcessor.register(Draw)
    return Draw


@cache
def _keep() -> None:
    """Replace the draw until this process ends, once."""
    KEPT.enter_context(vllm.enabled())


def _check(config: Any) -> None:
    """Refuse an engine whose tokens would not be drawn here.

    Raises:
        HostError: model runner V1, a drafting model, a watermark, or a fused sampler that takes some of the batches.
    """
    sampler = import_module(vllm.SAMPLER)
    if not config.use_v2_model_runner:
        raise HostError(f"vllm: {vllm.V1}; or leave --logits-processors {vllm.NAMED} away")
    masked = config.model_config.return_sampling_mask  # for which vLLM leaves fused samplers alone
    refused = {
        "speculative decoding": config.speculative_config is not None,
        "a watermark": config.watermark_config is not None,
        "FlashInfer's fused sampler (set VLLM_USE_FLASHINFER_SAMPLER=0)": not masked
        and sampler.flashinfer_sampler_supported(),
        "XPU's fused sampler (set VLLM_XPU_USE_SAMPLER_KERNEL=0)": not masked and sampler.xpu_sampler_supported(),
    }
    if any(refused.values()):
        said = ", ".join(name for name, there in refused.items() if there)
        raise HostError(f"vllm: {said} would draw in place of rlkernel.sample; leave it, or {vllm.NAMED}, away")

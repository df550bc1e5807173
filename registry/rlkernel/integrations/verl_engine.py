"""verl's fused head by `linear_logprob`, in processes whose user says so.

    VERL_USE_EXTERNAL_MODULES=rlkernel.integrations.verl_engine_plugin
    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton

verl's models look `linear_cross_entropy` up when they are called; in a process that imports the plugin it is ours until
the process ends. In a program of one process, `with verl_engine.enabled()` does the same for a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations import verl
from rlkernel.integrations.host import Active, Symbol, replaced
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor

KERNEL: Final = Symbol("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy")
HOST: Final = replace(
    verl.HOST,
    name="verl engine",
    symbols=(
        KERNEL,
        Symbol(
            KERNEL.module,
            "LinearCrossEntropy.forward",
            "ctx, hidden, weight, labels, temperature, reduction, dist_process_group",
        ),
    ),
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """The `linear_cross_entropy` of verl is `rlkernel.linear_logprob` inside the block.

    Raises:
        HostError: verl is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """

    def make(_: Any, calls: Counter[str]) -> Any:
        def linear_cross_entropy(
            hidden: Tensor,  # [..., D]
            weight: Tensor,  # [V, D]
            labels: Tensor,  # [...]
            temperature: float = 1.0,
            reduction: str = "none",
            dist_process_group: Any = None,
        ) -> tuple[Tensor, Tensor | None]:
            import rlkernel as rlk

            if reduction.lower() != "none":
                raise HostError(f"verl engine: reduction={reduction!r} is not supported, verl's models use 'none'")
            rows, ids = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
            calls["linear_logprob"] += 1
            out = rlk.linear_logprob(rows, weight, ids, temperature=temperature, entropy=True, group=dist_process_group)
            return out.logprob, out.entropy

        return linear_cross_entropy

    with replaced(
        HOST,
        KERNEL,
        make,
        idle=lambda: "no engine scored a token there by its fused kernels; train inside, with use_fused_kernels=True",
        force=force,
    ) as entry:
        yield entry

"""vime: log-probabilities and entropies of its Megatron trainers through `rlkernel.logprob`, by its provider options.

    --linear-logp-provider rlkernel.integrations.vime.provider
    --linear-logp-provider-mode strict

Checked against the provider file of the fork in which vime's interface was developed; never run in vime as a whole,
which needs Megatron and a GPU. In the mode `auto`, too, nothing here falls back to vime's own function: what fails is
an error.

Legend: T tokens · V ids of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from rlkernel.integrations.host import Host, Symbol, registered
from rlkernel.integrations.slime import score
from rlkernel_core.errors import HostError

if TYPE_CHECKING:
    from torch import Tensor

_MODULE: Final = "vime.backends.megatron_utils.linear_logp_provider"
HOST: Final = Host(
    name="vime",
    distribution="vime",
    versions=">=0.3,<0.4",
    tested="0.3.0",
    does="logprob(group=) under its losses, as the provider that an option names",
    symbols=(
        Symbol(_MODULE, "compute_linear_logp", "args, request, native"),
        Symbol(
            _MODULE,
            "LinearLogpRequest",
            "logits, target_ids, tensor_parallel_group, token_layout, with_entropy, with_entropy_grad, chunk_size, "
            "log_prob_keep_mask, context, temperature, metadata",
        ),
        Symbol(_MODULE, "LinearLogpResult", "logp, entropy, backend_id, contract_id, provenance"),
    ),
    ran=False,
    source="git+https://github.com/vllm-project/vime",
)


@dataclass(frozen=True)
class Scored:
    """What vime takes from a provider."""

    logp: Tensor  # [T, 1], fp32
    entropy: Tensor | None  # [T], fp32
    backend_id: str  # the implementation that ran
    contract_id: str  # the operator and the version of its semantics
    provenance: dict[str, Any]  # the decision that chose the implementation


def provider(request: Any) -> Scored:
    """What vime calls for the tokens of a rank.

    Args:
        request: vime's `LinearLogpRequest`: logits [T, V] of this rank; target_ids [T] in the whole vocabulary; the
            ranks of tensor_parallel_group in the order of their ids, None for one; log_prob_keep_mask, bool [T, V], the
            ids that the filters of the rollout kept; temperature, one or [T], by which logits are divided already where
            metadata says `logits_are_temperature_scaled`. Hidden states are not read, since vime makes logits beside.

    Raises:
        ArgumentError: as `rlkernel.logprob`.
        HostError: vime's requests are not what this was made for, or keep ids by metadata in place of the mask.
    """
    import rlkernel as rlk

    # vime's versions do not name its provider interface; the parameters of its requests and results do.
    entry = registered(HOST, HOST.require(force=True), "--linear-logp-provider")
    if request.metadata.get("top_p_sparse_token_ids") is not None:
        raise HostError(
            "vime: the request keeps ids by metadata['top_p_sparse_token_ids'], which the integration does not read; "
            "let vime hand over log_prob_keep_mask (RL_KERNEL_SPARSE_TOP_P_REPLAY=0)"
        )
    divided = request.temperature is None or request.metadata.get("logits_are_temperature_scaled", False)
    entry.calls["logprob"] += 1
    logp, entropy = score(
        request.logits,
        request.target_ids,
        request.tensor_parallel_group,
        request.log_prob_keep_mask,
        request.with_entropy,
        request.with_entropy_grad,
        1.0 if divided else request.temperature,
    )
    ran = cast("rlk.Decision", rlk.last_decision("logprob"))  # of the call above
    return Scored(logp, entropy, str(ran.target), f"rlkernel {ran.call.op}", ran.as_dict())

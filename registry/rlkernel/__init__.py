"""The operator layer of RL post-training: call an operator, know which kernel ran.

    import rlkernel as rlk

    out = rlk.logprob(logits, ids, temperature=0.7)
    print(rlk.explain("logprob", logits, ids, temperature=0.7))
    with rlk.use("torch"): ...

Importing this package loads no torch, starts no device and reads no configuration; the first call of an operator does.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import __version__ as __version__

if TYPE_CHECKING:  # what `__getattr__` gives, for readers and type checkers; a test holds the two together
    from rlkernel.explanation import Explanation as Explanation
    from rlkernel.explanation import explain as explain
    from rlkernel.gates import Gated as Gated
    from rlkernel.gates import delight_gate as delight_gate
    from rlkernel.gates import kondo_gate as kondo_gate
    from rlkernel.laws import processed_law as processed_law
    from rlkernel.nn.exact_model import Exact as Exact
    from rlkernel.nn.exact_model import exact as exact
    from rlkernel.nn.generate import Generated as Generated
    from rlkernel.policy import configure as configure
    from rlkernel.policy import refresh as refresh
    from rlkernel.policy import registered as registered
    from rlkernel.policy import use as use
    from rlkernel.provenance import Ran as Ran
    from rlkernel.provenance import decisions_hash as decisions_hash
    from rlkernel.provenance import last_decision as last_decision
    from rlkernel.provenance import status as status
    from rlkernel.quantized_inputs import quantize_activation as quantize_activation
    from rlkernel.sequences import sequence_sums as sequence_sums
    from rlkernel.signatures import advantage as advantage
    from rlkernel.signatures import affine_suffix_scan as affine_suffix_scan
    from rlkernel.signatures import attention as attention
    from rlkernel.signatures import capture as capture
    from rlkernel.signatures import dequantize as dequantize
    from rlkernel.signatures import divergence as divergence
    from rlkernel.signatures import fake_quantize as fake_quantize
    from rlkernel.signatures import glu as glu
    from rlkernel.signatures import group_filter as group_filter
    from rlkernel.signatures import grouped_linear as grouped_linear
    from rlkernel.signatures import linear as linear
    from rlkernel.signatures import linear_divergence as linear_divergence
    from rlkernel.signatures import linear_logprob as linear_logprob
    from rlkernel.signatures import linear_policy_loss as linear_policy_loss
    from rlkernel.signatures import lm_head_sample as lm_head_sample
    from rlkernel.signatures import logprob as logprob
    from rlkernel.signatures import policy_loss as policy_loss
    from rlkernel.signatures import prepack as prepack
    from rlkernel.signatures import qmatmul as qmatmul
    from rlkernel.signatures import quantize as quantize
    from rlkernel.signatures import rms_norm as rms_norm
    from rlkernel.signatures import rollout_buffer as rollout_buffer
    from rlkernel.signatures import rope as rope
    from rlkernel.signatures import route as route
    from rlkernel.signatures import sample as sample
    from rlkernel.signatures import shape_rewards as shape_rewards
    from rlkernel.signatures import verify as verify
    from rlkernel.signatures import whiten as whiten
    from rlkernel_core.decision import Decision as Decision
    from rlkernel_core.errors import AmbiguousBackendError as AmbiguousBackendError
    from rlkernel_core.errors import ApiMismatchError as ApiMismatchError
    from rlkernel_core.errors import ArgumentError as ArgumentError
    from rlkernel_core.errors import ArgumentTypeError as ArgumentTypeError
    from rlkernel_core.errors import AuditWarning as AuditWarning
    from rlkernel_core.errors import BufferFullError as BufferFullError
    from rlkernel_core.errors import CaptureError as CaptureError
    from rlkernel_core.errors import ConfigError as ConfigError
    from rlkernel_core.errors import FallbackError as FallbackError
    from rlkernel_core.errors import FallbackWarning as FallbackWarning
    from rlkernel_core.errors import FileError as FileError
    from rlkernel_core.errors import HostError as HostError
    from rlkernel_core.errors import LayoutError as LayoutError
    from rlkernel_core.errors import LockError as LockError
    from rlkernel_core.errors import MemoryBudgetError as MemoryBudgetError
    from rlkernel_core.errors import NotWrittenError as NotWrittenError
    from rlkernel_core.errors import PluginWarning as PluginWarning
    from rlkernel_core.errors import RankError as RankError
    from rlkernel_core.errors import ResolutionError as ResolutionError
    from rlkernel_core.errors import RLKernelError as RLKernelError
    from rlkernel_core.errors import RLKernelWarning as RLKernelWarning
    from rlkernel_core.errors import StaleBatchError as StaleBatchError
    from rlkernel_core.errors import UnknownNameError as UnknownNameError
    from rlkernel_core.quant.activations import QuantActivation as QuantActivation
    from rlkernel_core.quant.spec import QuantSpec as QuantSpec
    from rlkernel_core.quant.tensor import QuantTensor as QuantTensor
    from rlkernel_core.spec.advantage import AdvantageResult as AdvantageResult
    from rlkernel_core.spec.advantage import AdvantageStats as AdvantageStats
    from rlkernel_core.spec.advantage_presets import advantage_preset as advantage_preset
    from rlkernel_core.spec.affine_suffix_scan import ScanResult as ScanResult
    from rlkernel_core.spec.attention import AttentionResult as AttentionResult
    from rlkernel_core.spec.graphed import Bucket as Bucket
    from rlkernel_core.spec.graphed import CaptureGroup as CaptureGroup
    from rlkernel_core.spec.graphed import CaptureStats as CaptureStats
    from rlkernel_core.spec.graphed import GraphedCallable as GraphedCallable
    from rlkernel_core.spec.graphed import WeightUpdate as WeightUpdate
    from rlkernel_core.spec.graphed import bucket_sizes as bucket_sizes
    from rlkernel_core.spec.group_filter import GroupFilterResult as GroupFilterResult
    from rlkernel_core.spec.logprob import LogprobResult as LogprobResult
    from rlkernel_core.spec.logprob import Support as Support
    from rlkernel_core.spec.policy_kinds import Correction as Correction
    from rlkernel_core.spec.policy_kinds import GammaGate as GammaGate
    from rlkernel_core.spec.policy_kinds import Rejection as Rejection
    from rlkernel_core.spec.policy_loss import LossResult as LossResult
    from rlkernel_core.spec.policy_loss import LossStats as LossStats
    from rlkernel_core.spec.policy_presets import policy_loss_preset as policy_loss_preset
    from rlkernel_core.spec.qmatmul import LoRA as LoRA
    from rlkernel_core.spec.rms_norm import RmsNormResult as RmsNormResult
    from rlkernel_core.spec.rollouts import BufferStats as BufferStats
    from rlkernel_core.spec.rollouts import Field as Field
    from rlkernel_core.spec.rollouts import GroupRules as GroupRules
    from rlkernel_core.spec.rollouts import GroupState as GroupState
    from rlkernel_core.spec.rollouts import RolloutBatch as RolloutBatch
    from rlkernel_core.spec.rollouts import RolloutBuffer as RolloutBuffer
    from rlkernel_core.spec.rollouts import Slots as Slots
    from rlkernel_core.spec.rope import RopeResult as RopeResult
    from rlkernel_core.spec.route import RouteResult as RouteResult
    from rlkernel_core.spec.sampling import LogitBias as LogitBias
    from rlkernel_core.spec.sampling import Penalties as Penalties
    from rlkernel_core.spec.sampling import SampleResult as SampleResult
    from rlkernel_core.spec.sampling import Status as Status
    from rlkernel_core.spec.sampling import TokenLists as TokenLists
    from rlkernel_core.spec.shape_rewards import RunningMoments as RunningMoments
    from rlkernel_core.spec.shape_rewards import ShapedRewards as ShapedRewards
    from rlkernel_core.spec.verify import VerifyResult as VerifyResult
    from rlkernel_core.spec.whiten import WhitenResult as WhitenResult

# Module -> what the front door takes from it; operators are generated by rlkernel.dispatch.
_HOMES: Final = {
    "rlkernel.explanation": ("Explanation", "explain"),
    "rlkernel.gates": ("Gated", "delight_gate", "kondo_gate"),
    "rlkernel.laws": ("processed_law",),
    "rlkernel.nn.exact_model": ("Exact", "exact"),
    "rlkernel.nn.generate": ("Generated",),
    "rlkernel.policy": ("configure", "refresh", "registered", "use"),
    "rlkernel.provenance": ("Ran", "decisions_hash", "last_decision", "status"),
    "rlkernel.quantized_inputs": ("quantize_activation",),
    "rlkernel.sequences": ("sequence_sums",),
    "rlkernel_core.decision": ("Decision",),
    "rlkernel_core.errors": (
        "AmbiguousBackendError",
        "ApiMismatchError",
        "ArgumentError",
        "ArgumentTypeError",
        "AuditWarning",
        "BufferFullError",
        "CaptureError",
        "ConfigError",
        "FallbackError",
        "FallbackWarning",
        "FileError",
        "HostError",
        "LayoutError",
        "LockError",
        "MemoryBudgetError",
        "NotWrittenError",
        "PluginWarning",
        "RLKernelError",
        "RLKernelWarning",
        "RankError",
        "ResolutionError",
        "StaleBatchError",
        "UnknownNameError",
    ),
    "rlkernel_core.quant.activations": ("QuantActivation",),
    "rlkernel_core.quant.spec": ("QuantSpec",),
    "rlkernel_core.quant.tensor": ("QuantTensor",),
    "rlkernel_core.spec.advantage": ("AdvantageResult", "AdvantageStats"),
    "rlkernel_core.spec.advantage_presets": ("advantage_preset",),
    "rlkernel_core.spec.affine_suffix_scan": ("ScanResult",),
    "rlkernel_core.spec.attention": ("AttentionResult",),
    "rlkernel_core.spec.graphed": (
        "Bucket",
        "CaptureGroup",
        "CaptureStats",
        "GraphedCallable",
        "WeightUpdate",
        "bucket_sizes",
    ),
    "rlkernel_core.spec.group_filter": ("GroupFilterResult",),
    "rlkernel_core.spec.logprob": ("LogprobResult", "Support"),
    "rlkernel_core.spec.policy_kinds": ("Correction", "GammaGate", "Rejection"),
    "rlkernel_core.spec.policy_loss": ("LossResult", "LossStats"),
    "rlkernel_core.spec.policy_presets": ("policy_loss_preset",),
    "rlkernel_core.spec.qmatmul": ("LoRA",),
    "rlkernel_core.spec.rms_norm": ("RmsNormResult",),
    "rlkernel_core.spec.rollouts": (
        "BufferStats",
        "Field",
        "GroupRules",
        "GroupState",
        "RolloutBatch",
        "RolloutBuffer",
        "Slots",
    ),
    "rlkernel_core.spec.rope": ("RopeResult",),
    "rlkernel_core.spec.route": ("RouteResult",),
    "rlkernel_core.spec.sampling": ("LogitBias", "Penalties", "SampleResult", "Status", "TokenLists"),
    "rlkernel_core.spec.shape_rewards": ("RunningMoments", "ShapedRewards"),
    "rlkernel_core.spec.verify": ("VerifyResult",),
    "rlkernel_core.spec.whiten": ("WhitenResult",),
}


def __getattr__(name: str) -> Any:
    from rlkernel_core.spec import OPERATORS
    from rlkernel_core.spec.brought import BROUGHT

    if name in OPERATORS and name not in BROUGHT:
        from rlkernel.dispatch import operator

        found: Any = operator(OPERATORS[name])
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            return _brought(name)
        found = getattr(import_module(home), name)
    return globals().setdefault(name, found)  # another thread may have been first


def _brought(name: str) -> Any:
    """The operator of a plugin, which goes when the plugin goes."""
    if not name.startswith("_") and find_spec(f"rlkernel.{name}") is None:
        from rlkernel.policy import is_operator

        if is_operator(name):
            from rlkernel.dispatch import brought_operator

            return brought_operator(name)
    raise AttributeError(f"module 'rlkernel' has no attribute {name!r}")


def __dir__() -> list[str]:
    from rlkernel_core.spec import OPERATORS

    return sorted({*OPERATORS, *(n for names in _HOMES.values() for n in names), "__version__"})

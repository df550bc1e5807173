"""Which configurations a run launches: host code runs on a CPU, launches are described and not executed.

    AOT_RECORDING=FILE:sm_87 rlkernel conformance run recorded --manifest rlkernel_triton.aot.recording:backend

The backend `recorded` plans every call as that target would, appends what it would launch to FILE, one JSON document a
line, and answers with the reference's result; gradients likewise. Whatever calls
operators can be recorded so. Importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from rlkernel_core.environment import variable
from rlkernel_core.errors import ConfigError
from rlkernel_core.manifest import Backend
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_triton.aot.backend import OPERATORS
from rlkernel_triton.aot.dry_run import named_tensors
from rlkernel_triton.aot.recordings import append
from rlkernel_triton.claims import CLAIMS, manifest

if TYPE_CHECKING:
    from rlkernel_triton.aot.configuration_recorder import ConfigurationRecorder

VARIABLE: Final = "AOT_RECORDING"
_HERE: Final = "rlkernel_triton.aot.recording"
# Not claimed: ranks would speak twice, for the launches and for the reference's answer.
_RANKS: Final = frozenset({"group", "rank_invariant"})


def _manifest(device: str) -> Backend:
    portable = manifest("recorded", device=device)
    impls = [
        i.model_copy(
            update={
                "target": f"{_HERE}:{op}",
                "prepared": False,
                "gradient": None,
                "supports": i.supports - _RANKS,
                "check": i.check and f"{_HERE}:{op}_fits",
            }
        )
        for i in portable.impls
        if (op := i.op.partition("@")[0]) in OPERATORS
    ]
    return portable.model_copy(update={"impls": tuple(impls)})


backend = _manifest("cpu")
on_gpu = _manifest("cuda")  # the same for tensors of a GPU, on which the conformance suite draws other cases


@cache
def recorder() -> ConfigurationRecorder:
    """The launcher of this process, as the environment names it.

    Raises:
        ConfigError: the variable is not set, or is not FILE:TARGET.
    """
    from rlkernel_triton.aot.configuration_recorder import ConfigurationRecorder
    from rlkernel_triton.launchers.targets import TARGETS

    value = variable(VARIABLE)
    file, _, target = (value or "").rpartition(":")
    if not file or target not in TARGETS:
        raise ConfigError(
            f"{VARIABLE} says where to record and for which target: FILE:TARGET, such as launches.jsonl:sm_87; it "
            f"is {value!r}, and targets are {', '.join(TARGETS)}"
        )
    path = Path(file).resolve()
    return ConfigurationRecorder(target, lambda op, configuration: append(path, op, configuration, target))


def planned(op: str) -> Callable[[Any], Any]:
    """What an operator would launch for a call and its gradients is recorded; what it returns holds nothing."""
    return recorder().planned(op)


def __getattr__(name: str) -> Callable[..., Any]:
    """`logprob`, `logprob_fits` and so on: operators that record, and their checks."""
    op = name.removesuffix("_fits")
    if op not in OPERATORS:
        raise AttributeError(name)
    if op != name:
        return _check(op)
    from rlkernel_torch import backend as reference

    target = next(i.target for i in reference.impls if i.op.partition("@")[0] == op)
    module, _, function = target.partition(":")
    meant: Callable[..., Any] = getattr(import_module(module), function)

    @wraps(meant)
    def recorded(call: Any) -> Any:
        planned_result = planned(op)(call)
        given = {n: _canonical(v) for n, v in call.as_dict().items()}
        if op == "prepack":
            given["layout"] = CANONICAL
        out = meant(type(call)(**given))
        out = _with_recorded_gradients([x for _, x in named_tensors(given)], planned_result, out)
        if isinstance(planned_result, QuantTensor) and planned_result.layout != CANONICAL:
            _CANONICAL[planned_result] = out
            return planned_result
        return out

    globals()[name] = recorded
    return recorded


def _check(op: str) -> Callable[[Any], Any]:
    from rlkernel_triton.launchers import within
    from rlkernel_triton.prepared import named as claimed

    own = claimed(str(CLAIMS[op].check))

    def fits(call: Any) -> Any:
        with within(recorder().scope):
            return own(call)

    return fits


# Weights in a layout of the kernels, which no kernel has written, and the weights that they would be.
_CANONICAL: Final[WeakKeyDictionary[QuantTensor, QuantTensor]] = WeakKeyDictionary()


def _canonical(x: Any) -> Any:
    """A value with every weight as the reference reads it."""
    if isinstance(x, QuantTensor):
        return _CANONICAL.get(x, x)
    if isinstance(x, dict):
        return {n: _canonical(v) for n, v in x.items()}
    return tuple(map(_canonical, x)) if type(x) is tuple else x


def _with_recorded_gradients(given: list[Any], planned_result: Any, out: Any) -> Any:
    """The result; when gradients arrive at it, what the same gradients launch is recorded."""
    import torch

    from rlkernel_core.tree import flatten

    planned = dict(named_tensors(planned_result))
    inputs = [x for x in given if x.requires_grad]
    there = [(n, x) for n, x in named_tensors(out) if x.requires_grad and n in planned and planned[n].requires_grad]
    if not inputs or not there or not torch.is_grad_enabled():
        return out

    class RecordBackward(torch.autograd.Function):
        """Identity node that records the backward pass, whichever output gets a gradient."""

        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            ctx.set_materialize_grads(False)
            return tuple(x.clone() for x in values)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:  # noqa: ARG004  as autograd calls it
            arrived = [(planned[n], g) for (n, _), g in zip(there, upstream, strict=True) if g is not None]
            with torch.enable_grad():
                roots, grads = zip(*arrived, strict=True)
                torch.autograd.grad(roots, inputs, grads, retain_graph=True, allow_unused=True)
            return upstream

    recorded_outputs = dict(zip([id(x) for _, x in there], RecordBackward.apply(*(x for _, x in there)), strict=True))  # type: ignore[no-untyped-call]
    leaves, structure = flatten(out)
    return structure.build([recorded_outputs.get(id(x), x) for x in leaves])

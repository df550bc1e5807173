"""What tests of bundles share: builds of single calls, a bundle of them, and drivers that need no GPU."""

import torch

from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_triton.aot.bundle import write_bundle
from rlkernel_triton.aot.compiling import compiled, compiler, with_specializations
from rlkernel_triton.aot.configuration_recorder import ConfigurationRecorder
from rlkernel_triton.launchers import Scope
from rlkernel_triton.prepared import prepared


def builds(target, op, **arguments):
    """What one call launches on a target, and its gradients."""
    recorder = ConfigurationRecorder(target)
    recorder.planned(op)(OPERATORS[op].call(**arguments))
    return sorted((build for _, build in recorder.seen), key=lambda b: b.text)


def rows(grad=False, **options):
    """Arguments of log-probabilities of bf16 logits."""
    return {"logits": torch.zeros(2, 32000).bfloat16().requires_grad_(grad), "ids": torch.arange(2), **options}


def of_rows(target="sm_87", **options):
    """What log-probabilities of bf16 logits launch, forward."""
    return builds(target, "logprob", **rows(**options))


def bundle_of(path, some, target="sm_87"):
    """A bundle of configurations, specialized and not."""
    return write_bundle(
        path, [code for alike in with_specializations(some) for code in compiled(alike, target)], compiler()
    )


def run(launcher, op="logprob"):
    """A function that prepares a call and runs it with a launcher."""
    prepare = prepared(op, Scope(launcher, launcher.target))
    return lambda call: prepare(call)(call)


def drawn(logits, **options):
    """A call of `logprob`."""
    return LogprobCall(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), **options)


class Recording:
    """A driver whose device is whatever is asked for, whose memory is the CPU's, and which keeps what it is told."""

    tensors = "cpu"

    def __init__(self, capability=(8, 7)):
        self.major_minor, self.loaded, self.launched = capability, [], []

    def capability(self, device):
        return self.major_minor

    def enter(self, device):
        pass

    def load(self, code, entry, shared):
        self.loaded.append((code, entry, shared))
        return entry

    def launch(self, kernel, grid, threads, shared, stream, kinds, values):
        self.launched.append((kernel, grid, threads, dict(zip(kinds, values, strict=False)), len(values)))

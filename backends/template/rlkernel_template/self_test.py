"""One small call of every operator. It runs once per device, driver and version, in a process of its own."""

from . import advantage, logprob, whiten


def self_test(device: str) -> None:
    """Raise if an operator is wrong on this device."""
    for operator in (advantage, logprob, whiten):
        operator.self_test(device)

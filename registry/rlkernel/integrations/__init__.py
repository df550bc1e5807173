"""What rlkernel plugs into: one module per host framework, each by the host's own means where it has any.

    from rlkernel.integrations import trl

    with trl.enabled():
        trainer.train()

Every integration names its host, the versions it was made for and the symbols it uses, and looks at both before it
changes anything: another version is refused with the remedy, a moved symbol always. Nothing is patched by importing,
by installing or from an entry point, and what a block patched is put back when it ends. What is active shows in
`active()` and, for a run, in `rlkernel status RUN`. Importing this package imports no host.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from rlkernel.integrations.host import Active, Host, Symbol, active

__all__ = ["HOSTS", "Active", "Host", "Symbol", "active", "hosts"]

HOSTS: Final = (  # modules here, each with a `HOST`
    "trl",
    "verl",
    "verl_engine",
    "openrlhf",
    "deepspeed_chat",
    "skyrl",
    "prime_rl",
    "slime",
    "vime",
    "nemo_rl",
    "torchtitan",
    "veomni",
    "transformers",
    "transformers_exact",
    "transformers_quant",
    "peft_lora",
    "torchao",
    "sglang",
    "vllm",
    "vllm_quant",
)


def hosts() -> list[Host]:
    """Every host that there is an integration for."""
    return [import_module(f"{__name__}.{name}").HOST for name in HOSTS]

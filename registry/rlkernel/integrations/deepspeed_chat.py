"""DeepSpeed-Chat: the log-probabilities of its PPO trainer through `rlkernel.logprob`, by its one global, for a block.

    from rlkernel.integrations import deepspeed_chat

    with deepspeed_chat.enabled():
        main()                       # of training/step3_rlhf_finetuning/main.py

Held against DeepSpeed-Chat's source and its own PPO trainer on a CPU; never run in it as a whole. It has no registry,
and looks the function up at every call: for the policy, the reference and the update alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, replaced

if TYPE_CHECKING:
    from collections import Counter

    from torch import Tensor

_TRAINER: Final = "dschat.rlhf.ppo_trainer"
SCORE: Final = Symbol(_TRAINER, "gather_log_probs", "logits, labels")
HOST: Final = Host(
    name="deepspeed-chat",
    distribution="deepspeed-chat",
    versions="==0.1",  # as its setup.py has called itself since 2023: the symbols say more
    tested="0.1",
    does="logprob under its PPO trainer, inside a block",
    symbols=(SCORE, Symbol(_TRAINER, "DeepSpeedPPOTrainer.train_rlhf", "self, inputs")),
    ran=False,
    source="-e applications/DeepSpeed-Chat in a clone of deepspeedai/DeepSpeedExamples",
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """The PPO trainer of this process scores tokens by `rlkernel.logprob` inside the block; log-probabilities are fp32.

    Raises:
        HostError: DeepSpeed-Chat is absent, of a version that this was not made for, or has changed;
            or on leaving, nothing has been scored inside the block.
    """

    def make(_: Any, calls: Counter[str]) -> Any:
        def gather_log_probs(
            logits: Tensor,  # [B, T, V]
            labels: Tensor,  # [B, T]
        ) -> Tensor:
            import rlkernel as rlk

            calls["logprob"] += 1
            return rlk.logprob(logits, labels).logprob

        return gather_log_probs

    with replaced(
        HOST, SCORE, make, idle=lambda: "its trainer scored no token there; train inside", force=force
    ) as entry:
        yield entry

"""Operators of the backend `jetson`, from the bundle that its wheel carries or one that the user built.

A user's bundle is preferred only where it serves the board better. `rlkernel explain` and `rlkernel status` name this
module; an error names the file. Importing this loads neither torch nor Triton and looks for no bundle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rlkernel_core.host.memory import memory
from rlkernel_triton.aot.backend import BundleBackend, folder

SHIPPED: Final = Path(__file__).with_name("bundles")


def piece(root: Path = Path("/")) -> int | None:
    """Bytes that work in pieces may take at a time on this board; None where the system does not tell.

    `linear_logprob` makes gradients of logits block by block, `logprob` keys of its most likely ids, and products with
    many tokens dequantize a weight a piece at a time. Elsewhere the sizes of these are fixed; here they follow from
    `Memory.piece`, which `rlkernel memory` and `rlkernel doctor` show. A process keeps what it began with. The order of
    a sum does not depend on it, but in the gradient of a product's input, whose partial sums are added in fp32 a piece
    at a time.

    Args:
        root: where the file system starts.
    """
    room = memory(root)
    return None if room is None else room.piece


_backend: Final = BundleBackend(lambda: [SHIPPED, folder()], piece=piece)


def self_test(device: str) -> None:
    """Look at the board and its settings, then compute log-probabilities from the bundle.

    Raises:
        RLKernelError: what is wrong with the board, the settings or the bundle, or that the kernel's result is wrong.
    """
    import torch

    from rlkernel_jetson.detect import inspect

    inspect(device, torch.cuda)
    _backend.self_test(device)


def __getattr__(name: str) -> Callable[..., Any]:
    return _backend(name)

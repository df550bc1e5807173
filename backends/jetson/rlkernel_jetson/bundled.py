"""Operators of the backend `jetson`, from the bundle that its wheel carries or one that the user built.

A user's bundle is preferred only where it serves the board better. `rlkernel explain` and `rlkernel status` name this
module; an error names the file. Importing this loads neither torch nor Triton and looks for no bundle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rlkernel_jetson.pieces import cut
from rlkernel_triton.aot.backend import FromBundles, folder

SHIPPED: Final = Path(__file__).with_name("bundles")
_found: Final = FromBundles("jetson", lambda: [SHIPPED, folder()], prepare=cut)


def self_test(device: str) -> None:
    """Look at the board and its settings, then compute log-probabilities from the bundle.

    Raises:
        RLKernelError: what is wrong with the board, the settings or the bundle, or that the kernel's result is wrong.
    """
    import torch

    from rlkernel_jetson.detect import inspect

    inspect(device, torch.cuda)
    _found.self_test(device)


def __getattr__(name: str) -> Callable[..., Any]:
    return _found(name)

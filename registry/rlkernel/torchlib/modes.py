"""Autograd inside a node, where the dispatcher has left it behind."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor


def recording_gradients() -> ExitStack:
    """Record gradients as outside a node."""
    dispatch: Any = torch._C  # noqa: SLF001 as torch's own higher-order operators do
    excluded = dispatch._dispatch_tls_local_exclude_set()  # noqa: SLF001
    for key in (dispatch.DispatchKey.AutogradFunctionality, dispatch.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = dispatch._dispatch_tls_local_include_set()  # noqa: SLF001
    stack = ExitStack()
    stack.enter_context(dispatch._ForceDispatchKeyGuard(included, excluded))  # noqa: SLF001
    stack.enter_context(torch.enable_grad())
    return stack


def leaf(tensor: Tensor) -> Tensor:
    """The same values, as a tensor that a gradient is wanted for."""
    return tensor.detach().requires_grad_()

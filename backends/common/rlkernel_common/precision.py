"""Arithmetic in the precision that the contract states, whatever the caller's ambient modes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast on the device of `x`: it would turn fp32 products into products of its own dtype."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()

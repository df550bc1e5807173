"""The capture group that graphs join when none is named: one per process and device."""

from __future__ import annotations

import os
from typing import Final

import torch

from rlkernel_core.spec.graphed import CaptureGroup

# The process id is in the key: after a fork the parent's lock may be held by a thread that no longer exists.
_DEFAULT: Final[dict[tuple[int, torch.device], CaptureGroup]] = {}


def default_group(device: torch.device) -> CaptureGroup:
    """The group of this process and device."""
    return _DEFAULT.setdefault((os.getpid(), device), CaptureGroup(f"default on {device}"))

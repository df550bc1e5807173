"""Imported because VERL_USE_EXTERNAL_MODULES names it: `verl_engine.enabled()` until the process ends."""

from __future__ import annotations

from typing import Final

from rlkernel.integrations import verl_engine

BLOCK: Final = verl_engine.enabled()
BLOCK.__enter__()

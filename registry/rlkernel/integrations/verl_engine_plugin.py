"""Imported because VERL_USE_EXTERNAL_MODULES names it: `verl_engine.enabled()` until the process ends.

Does nothing where it was not verl that imported it.
"""

from __future__ import annotations

import sys

from rlkernel.integrations import verl_engine
from rlkernel.integrations.host import KEPT

if "verl" in sys.modules:
    KEPT.enter_context(verl_engine.enabled())

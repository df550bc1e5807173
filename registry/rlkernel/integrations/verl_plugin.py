"""What verl imports by its entry-point group `verl.plugins`: registers our names, and changes nothing that is there.

verl swallows what a plugin raises, so that a refusal is a warning here.
"""

from __future__ import annotations

import warnings

from rlkernel.integrations import verl
from rlkernel_core.errors import HostError, PluginWarning

try:
    verl.register()
except HostError as refusal:
    warnings.warn(f"rlkernel_* is not registered with verl: {refusal}", PluginWarning, stacklevel=2)

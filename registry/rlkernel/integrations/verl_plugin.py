"""What verl imports by its entry-point group `verl.plugins`: registers our names, and changes nothing that is there.

verl swallows what a plugin raises, so that a refusal is a warning here. Does nothing where it was not verl that
imported it.
"""

from __future__ import annotations

import sys
import warnings

from rlkernel.integrations import verl
from rlkernel_core.errors import HostError, PluginWarning

if "verl" in sys.modules:
    try:
        verl.register()
    except HostError as refusal:
        warnings.warn(f"rlkernel_* is not registered with verl: {refusal}", PluginWarning, stacklevel=2)

"""Bundles that grow: a build that none has is compiled when it is asked for, and written down.

    AOT_MISSING=missing.jsonl rlkernel conformance run aot --manifest aot_growing:backend --device cuda

What stands in the file afterwards is what the bundle lacked, and beside it, in `missing/`, lies a bundle of each build.
It runs this GPU's own machine code, with AOT_CODE=ptx the code for sm_87 through the driver's compiler. Needs Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlkernel_triton.aot.backend import FromBundles, claims, folder


class Growing(FromBundles):
    """Implementations over bundles and over what is compiled beside them."""

    def missing(self, wanted: Any, arguments: Any) -> Any:
        """A launcher over a bundle of the one build that is missing."""
        from rlkernel_triton.aot.bundle import written
        from rlkernel_triton.aot.compiling import closed, compiled, compiler
        from rlkernel_triton.aot.launching import FromBundle
        from rlkernel_triton.aot.recording import MISSING, noted

        launcher = self.launcher
        build = wanted.build(arguments)
        noted(wanted.op, build, launcher.chosen, Path(os.environ[MISSING]))
        path = Path(os.environ[MISSING]).with_suffix("") / f"{uuid4().hex}.zip"
        serving = [b for alike in closed([build]) for b in alike if b.serves(arguments)]
        best = max(serving, key=lambda b: b.promises)
        made = written(path, list(compiled([best], launcher.chosen)), compiler())
        found = FromBundle(made, launcher.driver, force=self._force)
        launcher.others = (*launcher.others, found)
        return found


_PTX = os.environ.get("AOT_CODE") == "ptx"
backend = claims("orin-ptx" if _PTX else "aot", "aot_growing", arch=("sm80+",))
_found = Growing(lambda: [folder()], ("sm_87", "ptx") if _PTX else None)


def __getattr__(name: str) -> Callable[..., Any]:
    return _found(name)

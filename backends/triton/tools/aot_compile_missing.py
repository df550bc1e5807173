"""Bundles that grow: a build that none has is compiled when it is asked for, and written down.

    rlkernel aot build --op whiten --target sm_90
    export PYTHONPATH=backends/triton/tools AOT_MISSING=missing.jsonl
    rlkernel conformance run aot-compiling --device cuda --manifest aot_compile_missing:backend

What stands in the file afterwards is what bundles lacked, and beside it, in `missing/`, lies a bundle of each build.
The backend runs this GPU's own machine code; with AOT_CODE=ptx it is `orin-ptx`, which runs the code for sm_87 through
the driver's compiler. Needs Triton, and one bundle with code of that kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlkernel_triton.aot.backend import BundleBackend, folder, manifest


class CompilingBackend(BundleBackend):
    """Implementations over bundles and over what is compiled beside them."""

    def missing(self, request: Any, arguments: Any) -> Any:
        """A launcher over a bundle of the one build that is missing."""
        from rlkernel_triton.aot.bundle import write_bundle
        from rlkernel_triton.aot.bundle_launcher import BundleLauncher
        from rlkernel_triton.aot.compiling import compiled, compiler, with_specializations
        from rlkernel_triton.aot.recordings import MISSING, append

        launcher = self.launcher
        configuration = request.configuration(arguments)
        append(Path(os.environ[MISSING]), request.op, configuration, launcher.chosen)
        path = Path(os.environ[MISSING]).with_suffix("") / f"{uuid4().hex}.zip"
        serving = [b for alike in with_specializations([configuration]) for b in alike if b.serves(arguments)]
        best = max(serving, key=lambda b: b.specialization)
        made = write_bundle(path, list(compiled([best], launcher.chosen)), compiler())
        found = BundleLauncher(made, launcher.driver, force=self._force)
        launcher.others = (*launcher.others, found)
        return found


_PTX = os.environ.get("AOT_CODE") == "ptx"
backend = manifest("orin-ptx" if _PTX else "aot-compiling", "aot_compile_missing", arch=("sm80+",))
_backend = CompilingBackend(lambda: [folder()], ("sm_87", "ptx") if _PTX else None)


def __getattr__(name: str) -> Callable[..., Any]:
    return _backend(name)

"""Bundles that grow: a build that none has is compiled when it is asked for, and written down.

    AOT_RECORDING=missing.jsonl rlkernel conformance run growing --manifest aot_growing:backend --device cuda

What stands in the file afterwards is what the table of configurations lacks. It runs this GPU's own machine code, and
with AOT_CODE=ptx the code for sm_87 through the driver's compiler. Needs Triton; it finds gaps and proves nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from rlkernel_triton.aot import tables
from rlkernel_triton.aot.backend import OPERATORS, FromBundles, claims, folder


class Growing(FromBundles):
    """Implementations over bundles and over what is compiled beside them."""

    @cached_property
    def launcher(self) -> Any:
        """What launches."""
        launcher = super().launcher
        launcher.elsewhere = self._grown
        return launcher

    @cached_property
    def promised(self) -> Any:
        """Kernel -> what its builds promise."""
        from rlkernel_triton.aot.recording import declared

        return declared(self.host)

    @cached_property
    def users(self) -> dict[str, set[str]]:
        """Kernel -> operators that launch it."""
        found: dict[str, set[str]] = {}
        for build, uses in tables.read().items():
            found.setdefault(build.kernel, set()).update(uses)
        return found

    def _grown(self, call: Any) -> Any:
        from rlkernel_triton.aot.bundle import written
        from rlkernel_triton.aot.compiling import compiled
        from rlkernel_triton.aot.launching import FromBundle
        from rlkernel_triton.aot.recording import build_of

        launcher = self.launcher
        build = build_of(call, *self.promised.get(call.kernel.id, (frozenset(), frozenset())))
        ops = sorted(self.users.get(build.kernel, OPERATORS))
        lines = [json.dumps({"op": op, "target": launcher.chosen, **build.document()}) + "\n" for op in ops]
        with Path(os.environ["AOT_RECORDING"]).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        made = written(
            Path(tempfile.mkdtemp()) / "one.zip", list(compiled([build], launcher.chosen)), {"grown": "here"}
        )
        found = FromBundle(made, launcher.driver, force=self._force)
        launcher.others = (*launcher.others, found)
        return found


backend = claims("growing", "aot_growing", arch=("sm80+",))
_found = Growing("growing", lambda: [folder()], ("sm_87", "ptx") if os.environ.get("AOT_CODE") == "ptx" else None)


def __getattr__(name: str) -> Callable[..., Any]:
    return _found(name)

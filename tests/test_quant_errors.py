"""The committed data of docs/quantization.md is what the script measures."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = json.loads((ROOT / "docs" / "quantization.json").read_text())


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "quantization.py"))


def test_the_script_measures_the_data_again(script) -> None:
    few = [spec for spec in script["VARIANTS"] if spec.kind in {"int4_g128", "nvfp4", "gguf_q6_k"}]
    script["measured"].__globals__["VARIANTS"] = few
    for found in script["measured"]():
        (row,) = [row for row in DATA["rows"] if row["format"] == found["format"]]
        assert {k: pytest.approx(v, rel=0.02) if isinstance(v, float) else v for k, v in row.items()} == found

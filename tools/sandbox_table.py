"""What each attack on the judge's sandbox reaches at each level, as a table in a page.

    python tools/sandbox_table.py docs/judge.md

Runs `rlkernel judge attack --area sandbox --sandbox LEVEL --json` for every level that works on this machine, minutes
for each, and writes the table between its markers. A level that does not work here keeps its column empty.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlkernel_core.files import write_text
from rlkernel_judge.attack_run import attacks
from rlkernel_judge.sandbox import LEVELS

BEGIN = "<!-- sandbox attacks: written by `python tools/sandbox_table.py docs/judge.md` -->"
END = "<!-- end of sandbox attacks -->"
# What ended a judged process, in the words of the table.
ENDED = {"out_of_memory": "ended: memory", "killed": "ended"}


def attempts_at(level: str) -> dict[str, Any]:
    """The attempts at a level, by attack; none where the level does not work here."""
    command = [sys.executable, "-m", "rlkernel", "judge", "attack", "--area", "sandbox", "--sandbox", level, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode not in {0, 1}:
        return {}
    return {attempt["name"]: attempt for attempt in json.loads(done.stdout)["attempts"]}


def outcome(attempt: dict[str, Any] | None) -> str:
    """One cell."""
    if attempt is None:
        return ""
    if attempt["score"] is None:
        return f"**no verdict**: {attempt['message']}"
    if attempt["succeeded"]:
        return "**reached**"
    return "refused" if attempt["fault"] is None else ENDED.get(attempt["fault"], attempt["fault"])


def table(found: dict[str, dict[str, Any]]) -> str:
    """The rows of all attacks on the sandbox."""
    rows = ["| Attack | " + " | ".join(f"`{level}`" for level in LEVELS) + " |", "|---" * (len(LEVELS) + 1) + "|"]
    for attack in attacks(area="sandbox"):
        cells = [outcome(found[level].get(attack.name)) for level in LEVELS]
        rows.append(f"| {attack.tries} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main(page: Path) -> None:
    """Run, and write."""
    text = page.read_text(encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        made = table(dict(zip(LEVELS, pool.map(attempts_at, LEVELS), strict=True)))
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    write_text(page, between.sub(lambda _: f"{BEGIN}\n\n{made}\n\n{END}", text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

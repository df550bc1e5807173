"""Text that others wrote, as it may be printed: nothing in it moves the cursor, colors, reverses or breaks a line.

Names, versions, reasons and messages of plugins and files end up in terminals, logs and reviews. A character that does
not print as itself is written as Python's escape of it. Imports nothing outside the standard library.
"""

from __future__ import annotations

from typing import Final

LONGEST: Final = 2000  # characters of one text that are worth reading


def visible(text: str, most: int = LONGEST) -> str:
    r"""A text with `\x1b`, `\n`, `\u202e`, … in place of control characters, bidi marks and odd spaces.

    Args:
        text: a str; a subclass may have methods of its own, and none of them is called.
        most: characters of the text that are kept; one that is cut ends in "…".
    """
    exact = str.__str__(text)
    exact = exact if len(exact) <= most else exact[: most - 1] + "…"
    if exact.isprintable():
        return exact
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in exact)

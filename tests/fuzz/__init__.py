"""Damaged and hostile files of every format that rlkernel reads: what reads one raises a typed error, or accepts it.

    make fuzz                                   20,000 cases over all formats, and a table of what came of them
    python -m tests.fuzz.run --cases 500 lock   of one format

`formats` has the formats, each with a valid document; `damage` changes documents; `attack` reads what comes of it.
"""

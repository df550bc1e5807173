"""A record as a file: safetensors, so that any reader of the format opens it, with a digest over all of it.

    prompts         [ids of all distinct prompts] u32      prompt_lengths  [prompts] u32
    sequences       [S, 3] u32: prompt, row of params, drawn tokens
    keys            [S, 2] u64: seed, step of the first draw
    ids             [T] u32                                what was drawn, sequence after sequence
    logprob         [T] f32, absent where not stated       log_kept_mass   [T] f32, absent where not stated
    runs            [R, 2] u32: row of weights, tokens     which weights drew, over all tokens in order

`__metadata__` has "rollouts", JSON with what the rows stand for, and "sha256" of that text and the tensors' bytes. The
digest finds damage; who wants to know that nobody else wrote the file signs it.

Legend: S sequences · T drawn tokens · R runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlkernel.rollouts.record import LAWS, MOST, Params, Record, Rollout
from rlkernel_core import __version__, tensor_file
from rlkernel_core.documents import json_of
from rlkernel_core.errors import ArgumentError, FileError
from rlkernel_core.files import read_bytes

VERSION: Final = 1
SEQUENCES: Final = 1 << 18  # most of a file: their requests take more memory than their bytes
PROMPTS: Final = 1 << 28  # most ids of prompts, counted for each sequence: a small file could ask for days of work
KEY: Final = "rollouts"
DIGEST: Final = "sha256"
_REMEDY: Final = "Ask for the file again; rlkernel.rollouts.write makes one."
_PARAMS: Final = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "filter_order": str, "tie": str,
    "vocab_size": (int, None), "stream": int, "stop_ids": [int], "max_new_tokens": (int, None),
}  # fmt: skip
_FORM: Final = {
    "version": frozenset({VERSION}),
    "rlkernel": str,
    "law": frozenset(LAWS),
    "decisions": str,
    "params": [_PARAMS],
    "weights": [str],
}
# name -> dtype of torch, of numpy, and columns; the tensors that a file has
_TENSORS: Final[Mapping[str, tuple[str, str, int | None]]] = {
    "prompts": ("uint32", "<u4", None),
    "prompt_lengths": ("uint32", "<u4", None),
    "sequences": ("uint32", "<u4", 3),
    "keys": ("uint64", "<u8", 2),
    "ids": ("uint32", "<u4", None),
    "logprob": ("float32", "<f4", None),
    "log_kept_mass": ("float32", "<f4", None),
    "runs": ("uint32", "<u4", 2),
}
_STATED: Final = ("logprob", "log_kept_mass")


def write(path: Path | str, record: Record) -> None:
    """Write a record, whole or not at all.

    Args:
        path: of the file; one that is there is replaced.
        record: what it holds.

    Raises:
        FileError: it cannot be written.
        ArgumentError: it would be larger than `MOST` bytes, or have more than 2^18 sequences or 2^28 ids of prompts.
    """
    rollouts = record.rollouts
    prompts = list(dict.fromkeys(r.prompt for r in rollouts))
    params = list(dict.fromkeys(r.params for r in rollouts))
    place, row = {p: i for i, p in enumerate(prompts)}, {p: i for i, p in enumerate(params)}
    version = {name: i for i, name in enumerate(record.versions)}
    columns: dict[str, list[Any]] = {
        "prompts": [i for prompt in prompts for i in prompt],
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "sequences": [(place[r.prompt], row[r.params], len(r.ids)) for r in rollouts],
        "keys": [(r.seed, r.step) for r in rollouts],
        "ids": [i for r in rollouts for i in r.ids],
        "runs": [(version[name], n) for r in rollouts for name, n in r.weights],
    }
    for name in _STATED:
        if any(getattr(r, name) is not None for r in rollouts if r.ids):
            columns[name] = [x for r in rollouts if r.ids for x in getattr(r, name)]
    text = json.dumps(
        {
            "version": VERSION,
            "rlkernel": __version__,
            "law": record.law,
            "decisions": record.decisions,
            "params": [asdict(p) for p in params],
            "weights": list(version),
        }
    )
    tensors = list(_tensors(columns))
    size = len(text) + sum(len(data) for *_, data in tensors)
    asked = sum(len(r.prompt) for r in rollouts)
    limits = (size, MOST, "bytes"), (len(rollouts), SEQUENCES, "sequences"), (asked, PROMPTS, "ids of prompts")
    for count, most, what in limits:
        if count > most:
            raise ArgumentError("record", f"{count} {what}", f"is more than the {most} of a file", "Write several.")
    tensor_file.write(Path(path), tensors, {KEY: text, DIGEST: _digest(text, {n: data for n, *_, data in tensors})})


def read(path: Path | str) -> Record:
    """The record that a file holds.

    Args:
        path: of the file.

    Raises:
        FileError: absent, damaged, larger than `MOST`, or of another version.
    """
    path = Path(path)
    stored, metadata = tensor_file.read_header(path)
    if KEY not in metadata or DIGEST not in metadata:
        raise FileError(path, "", "is no record of a rollout: its metadata has none", _REMEDY)
    said = json_of(metadata[KEY], _FORM, path, _REMEDY)
    data = read_bytes(path, _REMEDY, MOST + (1 << 20))
    parts = {}
    for name, one in stored.items():
        dtype, _, columns = _TENSORS.get(name, ("", "", None))
        fits = one.shape[1:] == ((columns,) if columns else ()) and len(one.shape) >= 1
        if not fits or tensor_file.DTYPES[one.dtype][0] != dtype:
            raise FileError(path, name[:80], f"is no tensor of a record: {one.dtype} {list(one.shape)}", _REMEDY)
        parts[name] = data[one.first : one.first + one.nbytes]
    if metadata[DIGEST] != _digest(metadata[KEY], parts):
        raise FileError(path, "", "is damaged: its bytes are not those of its sha256", _REMEDY)
    missing = [name for name in _TENSORS if name not in parts and name not in _STATED]
    if missing:
        raise FileError(path, "", f"has no tensor {missing[0]}", _REMEDY)
    arrays = {name: np.frombuffer(part, _TENSORS[name][1]) for name, part in parts.items()}
    try:
        return _record(said, arrays)
    except (ArgumentError, IndexError, TypeError, ValueError) as error:
        raise FileError(path, "", f"contradicts itself: {error}", _REMEDY) from error


def _tensors(columns: Mapping[str, list[Any]]) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Name, dtype, shape and bytes of what is there, in the order of the format."""
    for name, (dtype, kind, width) in _TENSORS.items():
        if name in columns:
            values = columns[name]
            shape = (len(values), width) if width else (len(values),)
            yield name, dtype, shape, np.asarray(values, kind).tobytes()


def _digest(text: str, parts: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in _TENSORS:
        digest.update(parts.get(name, b""))
    return digest.hexdigest()


def _record(said: Mapping[str, Any], arrays: Mapping[str, Any]) -> Record:
    """The rows put together.

    Raises:
        ArgumentError, ValueError, IndexError: they do not fit each other.
    """
    params = [Params(**{**row, "stop_ids": tuple(row["stop_ids"])}) for row in map(_known, said["params"])]
    prompts = [tuple(part) for part in _parts(arrays["prompts"], arrays["prompt_lengths"], "prompts")]
    sequences, keys = arrays["sequences"].reshape(-1, 3), arrays["keys"].reshape(-1, 2).tolist()
    if len(sequences) != len(keys) or len(keys) > SEQUENCES:
        raise ValueError(f"{len(sequences)} sequences, keys of {len(keys)}, and at most {SEQUENCES} may be")
    asked = sum(len(prompts[prompt]) for prompt in sequences[:, 0].tolist())
    if asked > PROMPTS:
        raise ValueError(f"{asked} ids of prompts, and at most {PROMPTS} may be")
    columns = {name: _parts(arrays[name], sequences[:, 2], name) for name in ("ids", *_STATED) if name in arrays}
    runs = [(said["weights"][i], n) for i, n in arrays["runs"].reshape(-1, 2).tolist()]
    weights = _runs(runs, sequences[:, 2].tolist())
    rollouts = []
    for i, (prompt, row, _) in enumerate(sequences.tolist()):
        seed, step = keys[i]
        drawn: dict[str, Any] = {name: tuple(part[i]) for name, part in columns.items() if part[i]}
        rollouts.append(Rollout(prompts[prompt], seed, step, params[row], weights=weights[i], **drawn))
    return Record(tuple(rollouts), said["law"], said["decisions"])


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _PARAMS}


def _parts(values: Any, lengths: Any, name: str) -> list[list[Any]]:
    """A column cut into parts of these lengths, which have to add up to it."""
    ends = list(accumulate(lengths.tolist(), initial=0))
    if ends[-1] != len(values):
        raise ValueError(f"{name} has {len(values)} entries, and lengths of {ends[-1]}")
    whole = values.tolist()
    return [whole[a:b] for a, b in pairwise(ends)]


def _runs(runs: list[tuple[str, int]], lengths: list[int]) -> list[tuple[tuple[str, int], ...]]:
    """Runs of each sequence: none of them crosses from one sequence into the next."""
    found, left = [], iter(runs)
    for length in lengths:
        mine, have = [], 0
        while have < length:
            name, n = next(left, ("", 0))
            if n < 1:
                raise ValueError("runs of weights are fewer than its tokens")
            mine.append((name, n))
            have += n
        if have != length:
            raise ValueError("a run of weights crosses sequences")
        found.append(tuple(mine))
    if next(left, None) is not None:
        raise ValueError("runs of weights are more than its tokens")
    return found

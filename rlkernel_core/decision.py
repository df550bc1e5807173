"""A call to be decided, the policy it is decided under, and the decision: frozen values without behavior.

Imports nothing outside the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from rlkernel_core.reasons import Reason

CONFORMANT = "conformant"  # in a policy's needs: a conformance report must hold for what would run
EXACT = "exact"  # in a policy's needs: conformant, batch-invariant, and its manifest names the order of its sums
PROVED = frozenset({CONFORMANT, EXACT})  # needs that are no features, and that a conformance report must show
AUTO = "auto"  # in an order: all of rlkernel's own backends
PLAIN_TORCH = "torch"  # the backend without kernels of its own
ALIASES: Final[Mapping[str, str]] = {"reference": PLAIN_TORCH}  # other names of backends, where one may be written


@dataclass(frozen=True, slots=True)
class Call:
    """What is known about a call before a backend is chosen."""

    op: str  # "logprob@1"
    device: str  # torch device type: "cpu", "cuda"
    dtype: str | None = None  # of the primary tensor: "bfloat16"
    grad: bool = False  # whether gradients are needed
    features: frozenset[str] = frozenset()  # what the arguments need
    arch: str | None = None  # "sm90", "gfx942", "x86_64"

    def __str__(self) -> str:
        words = [self.op, f"device={self.device}"]
        words += [self.arch] if self.arch else []
        words += [f"dtype={self.dtype}"] if self.dtype else []
        words += ["grad=True"] if self.grad else []
        words += ["needs=" + ",".join(sorted(self.features))] if self.features else []
        return " ".join(words)


@dataclass(frozen=True)
class OpPolicy:
    """The policy for one operator."""

    order: tuple[str, ...] = (AUTO,)  # backends that may run, best first
    fallback: str = "warn"  # what a fallback does: "warn" | "error"; there is no silence
    need: frozenset[str] = frozenset()  # features that an implementation must claim
    profile: bool = False  # whether each call is inside a profiler range with its decision's id
    audit: int = 0  # every how many calls of a plan one is compared with the reference; 0: none
    max_workspace_bytes: int | None = None  # most that a call may need on its device beyond its results; None: any

    @property
    def watched(self) -> str:
        """How calls are watched, as explanations say it: "profile=true audit=100"; empty where they are not."""
        words = ["profile=true"] if self.profile else []
        return " ".join(words + ([f"audit={self.audit}"] if self.audit else []))


@dataclass(frozen=True)
class Policy:
    """The permission list: nothing outside `order` ever runs.

    `source` says where each value came from, keyed "order", "ops.logprob.order", …; it is not part of equality.
    """

    default: OpPolicy = OpPolicy()  # of operators that `ops` does not have
    ops: Mapping[str, OpPolicy] = field(default_factory=dict)  # by operator name
    probe: str = "subprocess"  # "subprocess" | "inprocess" | "off"
    lock: str | None = None  # path of the lock file that must hold
    reports: str | None = None  # folder of the conformance reports that "conformant" and "exact" in `need` ask
    source: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __hash__(self) -> int:
        return hash((self.default, frozenset(self.ops.items()), self.probe, self.lock, self.reports))

    def of(self, op: str) -> OpPolicy:
        """The policy of an operator `op`, by name or by id."""
        return self.ops.get(op.partition("@")[0], self.default)


class Pin(NamedTuple):
    """What a lock allows an operator to run."""

    target: str  # "package.module:function"
    provider: str  # distribution and version: "rlkernel 0.1.0"
    sums: str = ""  # in which order it adds, as its manifest names it; empty where it names none
    made_of: str = ""  # "sources 245fb0785173d194, torch 2.13.0": what decides its bits; empty where it names no sums

    def admits(self, other: Pin) -> bool:
        """Whether this allows another to run; without `made_of` it allows any sources and versions."""
        return self == (other if self.made_of else other._replace(made_of=""))

    def __str__(self) -> str:
        exact = [f"sums={self.sums}"] * bool(self.sums) + [f"({self.made_of})"] * bool(self.made_of)
        return " ".join((self.target, f"[{self.provider}]", *exact))


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was not chosen."""

    backend: str  # its name
    reason: Reason  # the first that held against it
    target: str | None = None  # its function; None where it got no so far


@dataclass(frozen=True, slots=True)
class Room:
    """The largest calls that an implementation takes, and what the explained call needs; None where nothing is said."""

    max_rows: int | None = None
    max_vocab: int | None = None
    layouts: tuple[str, ...] = ()  # of the primary tensor; empty: any
    workspace: int | None = None  # bytes of this call on its device beyond its results

    def __str__(self) -> str:
        words = [f"at most {self.max_rows} rows"] if self.max_rows is not None else []
        words += [f"at most {self.max_vocab} ids"] if self.max_vocab is not None else []
        words += [" or ".join(self.layouts)] if self.layouts else []
        words += [f"workspace {self.workspace / 2**20:.4g} MiB"] if self.workspace is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class Decision:
    """Which implementation takes a call, and why each other candidate does not."""

    call: Call  # what was decided about
    policy: OpPolicy  # under which it was decided
    backend: str | None  # None: nothing in order can take it
    target: str | None  # "package.module:function" of what runs
    version: str | None  # distribution and version that provides it: "rlkernel 0.1.0"
    rejected: tuple[Rejected, ...]  # in the order in which they were considered
    # Set where the decision is a fallback (docs/explain.md): the backend of the order that was passed over, or the one
    # with kernels for this hardware in whose place plain torch runs on it.
    fell_back_from: str | None = None
    ambiguous: tuple[str, ...] = ()  # backends of one tier that all qualify: an error
    source: str = "default"  # where the order came from
    room: Room | None = field(default=None, compare=False)  # of what was chosen, where the decision was explained
    sums: str | None = None  # in which order it adds, as its manifest names it: equal names promise equal bits
    # What decides its bits (`Pin.made_of`), where a lock pins it or the policy needs "exact": reading it takes a while.
    made_of: str | None = None

    @property
    def hash(self) -> str:
        """12 hex digits over operator, device, implementation, version, sums and made_of: equal on ranks that agree."""
        what: list[object] = [self.call.op, self.call.device, self.call.arch, self.call.dtype, self.call.grad]
        what += [sorted(self.call.features), self.backend, self.target, self.version]
        what += [x for x in (self.sums, self.made_of) if x is not None]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        out = asdict(self)
        out["call"]["features"] = sorted(self.call.features)
        out["policy"]["need"] = sorted(self.policy.need)
        out["hash"] = self.hash
        return out

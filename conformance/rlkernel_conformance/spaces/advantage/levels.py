"""The factors of calls of advantage@1, and what goes together.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from rlkernel_conformance.spaces.space import Argument, Rule, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.advantage import SPEC
from rlkernel_core.spec.advantage_kinds import EPS_MODES, KINDS

EDGE: Final = 0.0625  # a std that is met exactly
FAMILY: Final = {name: kind.family for name, kind in KINDS.items()}
WITH_TOKENS = frozenset({"gae", "vtrace", "retrace", "otb"})  # a token-level tensor beside the rewards
INTEGERS = ("int64", "int32", "int16", "uint8", "int8")
WHOLE = ("int64", "uint8", "bool")  # dtypes of rewards that are no fractions
# Options that a kind takes or not; the first level is what a call has without it.
OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "gamma": (1.0, 0.97, 0.0),
    "lam": (1.0, 0.9, 0.0, "row", "token"),
    "lam_value": (None, 0.5, "row", "token"),
    "length_adaptive": (None, 0.4),
    "bootstrap": (False, True),
    "dones": ("", "after", "before"),
    "turns": ("", "few", "many"),
    "clips": ("default", "differ", "none"),
    "values": (False, True),
    "q_values": (False, True),
    "baseline": (False, True),
    "reward_weights": (False, True),
    "step_weight": (1.0, -0.75),
    "scale": ("auto", "group", "batch", "none"),
    "eps": (1e-6, 0.05, EDGE, 0.0),
    "eps_mode": EPS_MODES,
    "ddof": (1, 0, 2),
    "min_std": (0.0, EDGE),
    "low_std": ("zero", "center"),
    "singleton": ("zero", "raw", "any"),
    "constant": ("zero", "peer"),
    "invalid": ("zero", "raw"),
    "valid_range": (False, True),
    "leave_one_out": (False, True),
    "masked_time": ("skip", "step", "reset"),
    "masked_out": ("zero", "carry"),
}
# Options of which a level stands for a tensor or a pair, and the feature that it needs.
STANDS_FOR: Final[Mapping[str, str]] = {
    "lam": "lam_tensor", "lam_value": "lam_tensor", "bootstrap": "bootstrap", "dones": "dones", "turns": "turns",
    "clips": "", "values": "", "q_values": "", "baseline": "", "reward_weights": "", "valid_range": "sequence_masks",
}  # fmt: skip
NEEDED: Final = {"values": ("gae", "vtrace", "retrace"), "baseline": ("remax",)}
VALUES = ("normal", "grid", "equal", "zeros", "edge", "tiny", "offset", "not finite", "denormal")
# Where the tokens are, and whether rewards are per token or per sequence.
LAYOUTS: Final = (
    ("none", "sequence"), ("plain", "token"), ("plain", "sequence"), ("mask", "sequence"), ("mask", "token"),
    ("lengths", "sequence"), ("lengths", "token"), ("packed", "sequence"), ("packed", "token"),
    ("packed, mask", "sequence"), ("packed, mask", "token"),
)  # fmt: skip
SIZES = ("2", "all", "1", "65")  # groups by size


WHITENING: Final[Mapping[str, tuple[Any, ...]]] = {
    "whiten_ddof": (1, 0),
    "whiten_eps": (1e-8, 0.05, 0.0),
    "whiten_eps_mode": ("var_add", *(mode for mode in EPS_MODES if mode != "var_add")),
}


# Groups by ids [B], in no order where they are not runs: negative, far apart, of one member, the last one short.
IDS: Final[Mapping[str, Callable[[np.random.Generator, int], Any]]] = {
    "ids": lambda g, B: 7919 * g.integers(0, max(1, B // 3), B) - 12345,
    "huge ids": lambda g, B: g.choice([-(2**63), -1, 0, 2**62 + 1, 2**62, 2**63 - 1], B),
    "alone beside others": lambda g, B: np.where(g.permutation(B) < B // 2, 3, g.permutation(B) + 100),
    "last short": lambda g, B: np.arange(B) // 4,
    "one id": lambda g, B: np.zeros(B, np.int64),
}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Kinds, options, layouts, sizes and values."""
    kinds = tuple(sorted((k for k in KINDS if f"kind:{k}" in subject.claims), key=lambda k: FAMILY[k] != "group"))
    wide = tuple(d for d in ("float32", "bfloat16", "float64") if d in subject.dtypes)
    layouts = {"mask", "lengths", "packed"} & subject.claims
    return {
        "kind": kinds,
        "numbers": VALUES,
        "tokens": tuple(x for x in LAYOUTS if {*x[0].split(", ")} <= {*layouts, "none", "plain"}),
        "B": (6, 1, 7, 13, 130, 0),
        "T": (5, 1, 33, 0),
        "groups": claimed(subject, {**dict.fromkeys(SIZES, ""), **dict.fromkeys(IDS, "group_ids")}),
        "dtype": (*subject.dtypes, *(WHOLE if subject.takes_any_dtype else ())),
        "other dtype": ("same", *wide),
        "masked": ("zero", "nan", "large"),
        **{name: _claimed(subject, name, levels) for name, levels in OPTIONS.items()},
        "over sequences": claimed(
            subject, {"": "", **dict.fromkeys(("in_stats", "in_loss", "both"), "sequence_masks")}
        ),
        "weights": claimed(subject, {False: "", True: "weights"}),
        "whiten": _claimed(subject, "whiten", ("none", "auto", "global", "defer")),
        "whiten_level": ("auto", "token", "sequence"),
        **{name: _claimed(subject, name, levels) for name, levels in WHITENING.items()},
        "output": claimed(subject, {"auto": "", "token": "token_output", "sequence": ""}),
        "reward_level": ("auto", "named"),
    }


def _claimed(subject: Subject, name: str, levels: Sequence[Any]) -> tuple[Any, ...]:
    """The levels of an option that need nothing which is not claimed."""
    plainly = SPEC.needs(SPEC.record(None, kind="grpo"))  # type: ignore[arg-type]  # no tensor is looked at

    def needs(level: Any) -> frozenset[str]:
        if level == levels[0]:
            return frozenset()
        if name in STANDS_FOR and not isinstance(level, float):
            return frozenset({STANDS_FOR[name]} - {""}) | ({name} & SPEC.feature_names)
        return SPEC.needs(SPEC.record(None, kind="grpo", **{name: level})) - plainly  # type: ignore[arg-type]

    found = tuple(level for level in levels if needs(level) <= subject.claims)
    # Who does not claim what a small group gets is asked for anything.
    return found if name != "singleton" or "singleton_zero" in subject.claims else found[:0:-1]


def _takes(name: str) -> Callable[[str, Any], bool]:
    simplest, argument = OPTIONS[name][0], {"clips": "trace_clip"}.get(name, name)
    return lambda kind, level: level in {simplest, "any"} or argument in KINDS[kind].uses


def _fits(kind: str, tokens: tuple[str, str]) -> bool:
    """The kind takes rewards per token or per sequence in this layout."""
    layout, per = tokens
    if kind == "gdpo" and per == "token":
        return False
    if FAMILY[kind] == "group" or (kind == "remax" and per == "sequence"):
        return layout != "plain" or per == "token" if kind != "opo" else _counted(tokens)
    if kind == "otb" and layout.startswith("packed"):
        return False
    return layout != "none" and (per == "token" or kind in WITH_TOKENS or "mask" in layout)


def _counted(tokens: tuple[str, str]) -> bool:
    """The number of tokens of a sequence is known."""
    return tokens[0] not in {"none", "plain"} or tokens[1] == "token"


def _spread(tokens: tuple[str, str]) -> bool:
    """A token-level tensor is there."""
    return "mask" in tokens[0] or tokens[1] == "token"


def _must(name: str, *kinds: str) -> Callable[[str, Any], bool]:
    """Some kinds need an argument, some may have it."""
    return lambda kind, given: given if kind in kinds else not given or name in KINDS[kind].uses


def _divides(groups: str, B: int) -> bool:
    return groups not in SIZES or groups == "all" or B % int(groups) == 0


RULES = (
    *(Rule(("kind", name), _takes(name)) for name in OPTIONS if name not in NEEDED),
    *(Rule(("kind", name), _must(name, *kinds)) for name, kinds in NEEDED.items()),
    Rule(("kind", "groups"), lambda kind, groups: groups == "2" or "group" in KINDS[kind].uses),
    Rule(("kind", "tokens"), _fits),
    Rule(("kind", "output"), lambda kind, output: output != "sequence" or FAMILY[kind] == "group"),
    Rule(("tokens", "output"), lambda tokens, output: output != "token" or _spread(tokens)),
    Rule(("kind", "whiten_level"), lambda kind, level: level != "sequence" or FAMILY[kind] == "group"),
    Rule(("tokens", "whiten_level"), lambda tokens, level: level != "token" or _counted(tokens)),
    Rule(("tokens", "masked"), lambda tokens, x: x == "zero" or "mask" in tokens[0] or tokens[0] == "lengths"),
    Rule(("tokens", "T"), lambda tokens, T: tokens[0] != "none" or T == 5),
    Rule(("groups", "B"), _divides),
    Rule(("numbers", "dtype"), lambda values, dtype: dtype not in WHOLE or values in {"grid", "zeros", "equal"}),
    # A lambda per token has no meaning where masked tokens are steps, nor a second one beside that of the length.
    *(Rule((lam, "masked_time"), lambda lam, time: lam != "token" or time != "step") for lam in ("lam", "lam_value")),
    Rule(("lam", "length_adaptive"), lambda lam, alpha: alpha is None or lam == 1.0),
    Rule(("turns", "masked_time"), lambda turns, time: not turns or time == "skip"),
    # A masked position carries its own value into the targets.
    Rule(("masked_out", "masked"), lambda out, masked: out == "zero" or masked == "zero"),
    # Rounding noise over rounding noise, and what underflows over nothing, are no numbers to compare.
    Rule(("constant", "numbers"), lambda constant, v: constant == "zero" or v not in {"offset", "tiny", "equal"}),
    Rule(("eps", "numbers"), lambda eps, values: eps > 0 or values != "denormal"),
)


BY_SEQUENCE = ("contiguous", "spread", "expanded")
BY_TOKEN = ("contiguous", "padded", "transposed", "expanded")
SAME = ("contiguous", "spread", "offset")


def _given(name: str) -> Rule:
    simplest = OPTIONS[name][0]
    return Rule((name,), lambda level: level != simplest)


def _kinds(*names: str) -> Rule:
    return Rule(("kind",), lambda kind: kind in names)


TENSORS: Final[Mapping[str, Argument]] = {
    "rewards": Argument(),
    "mask": Argument(("contiguous", "padded", "transposed"), given=Rule(("tokens",), lambda x: "mask" in x[0])),
    "lengths": Argument(SAME, INTEGERS, Rule(("tokens",), lambda x: x[0] == "lengths")),
    "cu_seqlens": Argument(SAME, ("int64", "int32"), Rule(("tokens",), lambda x: x[0].startswith("packed"))),
    "values": Argument(BY_TOKEN, given=_given("values")),
    "q_values": Argument(BY_TOKEN, given=_given("q_values")),
    "ratio": Argument(BY_TOKEN, given=_kinds("vtrace", "retrace")),
    "dones": Argument(BY_TOKEN, given=_given("dones")),
    "turns": Argument(BY_TOKEN, INTEGERS, _given("turns")),
    "logprob": Argument(BY_TOKEN, given=_kinds("otb")),
    "sum_pi_squared": Argument(BY_TOKEN, given=_kinds("otb")),
    "lam": Argument(BY_TOKEN, given=Rule(("lam",), lambda x: isinstance(x, str))),
    "lam_value": Argument(BY_TOKEN, given=Rule(("lam_value",), lambda x: isinstance(x, str))),
    "group": Argument(BY_SEQUENCE, INTEGERS, Rule(("groups",), lambda x: x in IDS)),
    "bootstrap": Argument(BY_SEQUENCE, given=_given("bootstrap")),
    "baseline": Argument(BY_SEQUENCE, given=_given("baseline")),
    "in_stats": Argument(BY_SEQUENCE, given=Rule(("over sequences",), lambda x: x in {"in_stats", "both"})),
    "in_loss": Argument(BY_SEQUENCE, given=Rule(("over sequences",), lambda x: x in {"in_loss", "both"})),
    "weights": Argument(BY_SEQUENCE, given=Rule(("weights",), bool)),
    "reward_weights": Argument(BY_SEQUENCE, given=_given("reward_weights")),
    "step_rewards": Argument(BY_SEQUENCE, given=_kinds("gigpo")),
    "anchor": Argument(BY_SEQUENCE, INTEGERS, _kinds("gigpo")),
}

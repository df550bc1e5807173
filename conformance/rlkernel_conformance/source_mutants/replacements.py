"""Tables for changes of source: what may stand in the place of an operator, a function or a dtype, or be left out."""

from __future__ import annotations

import ast
from typing import Final

COMPARISONS: Final[dict[type, type]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
OPERATIONS: Final[dict[type, type]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
OTHER_DTYPES: Final = {
    "float64": "float32",
    "float32": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "int64": "int32",
    "int32": "int16",
    "int16": "int8",
    "uint8": "int8",
    "int8": "uint8",
}
CASTS: Final = {"float": "bfloat16", "double": "float", "long": "int", "int": "short"}
# Methods and functions with a dimension: as a method the first argument, as a function of torch the second.
REDUCTIONS: Final = frozenset(
    (
        *("sum", "mean", "amax", "amin", "any", "all", "cumsum", "cumprod", "cummax", "cummin"),
        *("logsumexp", "logcumsumexp", "softmax", "log_softmax", "max", "min", "argmax", "argmin", "norm"),
        *("prod", "flip", "diff", "cat", "stack", "unbind", "select", "narrow", "roll", "unsqueeze"),
        *("squeeze", "sort", "argsort", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"),
        *("scatter_reduce", "scatter_reduce_", "index_select", "index_add", "index_add_", "index_fill"),
        *("repeat_interleave", "size", "chunk", "split"),
    )
)
OTHER_FUNCTIONS: Final = {
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "minimum": "maximum",
    "cummax": "cummin",
    "cummin": "cummax",
    "argmax": "argmin",
    "argmin": "argmax",
    "any": "all",
    "all": "any",
    "sum": "mean",
    "mean": "sum",
    "floor": "ceil",
    "ceil": "floor",
    "round": "floor",
    "round_": "floor_",
    "floor_": "ceil_",
    "exp": "expm1",
    "expm1": "exp",
    "exp_": "expm1_",
    "log": "log1p",
    "log1p": "log",
    "sin": "cos",
    "cos": "sin",
    "rsqrt": "sqrt",
    "tanh": "sigmoid",
    "sigmoid": "tanh",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "zeros": "ones",
    "ones": "zeros",
    "new_zeros": "new_ones",
    "new_ones": "new_zeros",
    "empty": "zeros",
    "add_": "sub_",
    "sub_": "add_",
    "mul_": "div_",
    "div_": "mul_",
    "isfinite": "isinf",
    "isnan": "isinf",
    "isinf": "isnan",
    "searchsorted": "bucketize",
    "addmm_": "addmm",
}
# Methods without which a value is what it was before; functions of torch and builtins, which give their first argument.
DROPPED: Final = {
    "detach": "detach",
    "clone": "copy",
    "contiguous": "copy",
    "copy": "copy",
    "expand": "shape",
    "expand_as": "shape",
    "t": "shape",
    "transpose": "shape",
    "permute": "shape",
    "unsqueeze": "shape",
    "squeeze": "shape",
    "flatten": "shape",
    "reshape": "shape",
    "to": "dtype",
    "float": "dtype",
    "double": "dtype",
    "type_as": "dtype",
    "sqrt": "function",
    "abs": "function",
    "square": "function",
    "clamp": "function",
    "clamp_min": "function",
    "clamp_max": "function",
    "clamp_": "function",
    "exp": "function",
    "log": "function",
    "neg": "function",
    "reciprocal": "function",
    "nan_to_num": "function",
    "masked_fill": "function",
    "masked_fill_": "function",
    "flip": "function",
    "cumsum": "function",
    "cummax": "function",
    "tanh": "function",
    "round": "function",
    "floor": "function",
    "logical_not": "function",
    "reversed": "function",
    "sorted": "function",
}
NO_ARRAYS: Final = frozenset(
    ("tuple", "list", "dict", "set", "type", "Final", "Literal", "Callable", "Mapping", "Iterator", "Any", "Sequence")
)
PLUMBING: Final = frozenset(("strict", "stacklevel", "device", "key", "name", "out", "memory_format", "encoding"))
RECORDS: Final = frozenset(("call", "config", "c", "args", "self.args", "self.call", "self.config", "how", "params"))
EPSILON: Final = 1e-3  # constants below it keep something from being 0

"""Static checks before anything of a candidate runs: is it Python, does it hold the function, what does it use.

Findings explain, and may refuse the file. They protect nothing: a forbidden name can be spelled in pieces. The sandbox
and the separate processes protect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec

MAX_BYTES: Final = 256 << 10
RECORD: Final = "call"  # first parameter of a candidate that takes a call's record, not its arguments one by one

# why a kernel has no use for it -> dotted prefixes
_USELESS: Final[Mapping[str, tuple[str, ...]]] = {
    "the operators themselves: a candidate is to replace one, not to call one": ("rlkernel",),
    "the clauses that a candidate is attacked with": ("rlkernel_conformance",),
    "the judge's own code": ("rlkernel_judge",),
    "the definitions that a candidate is compared with": ("rlkernel_core.definitions",),
    "code of the backends in plain torch": ("rlkernel_common", "rlkernel_torch"),
    "starts processes": (
        "subprocess", "multiprocessing", "os.fork", "os.forkpty", "os.system", "os.popen", "os.spawn", "os.posix_spawn",
    ),
    "replaces its process": ("os.exec",),
    "ends processes": ("os.kill", "os._exit", "os.abort", "sys.exit"),
    "changes how its process ends": ("signal",),
    "reaches the network": ("socket", "urllib", "requests", "http"),
    "calls arbitrary machine code": ("ctypes",),
    "walks the objects of its process": ("gc",),
    "observes what runs in its process": ("sys.settrace", "sys.setprofile"),
    "reads the frames of its callers": ("sys._getframe", "inspect.stack", "inspect.currentframe"),
    "replaces what every module uses": ("sys.modules", "builtins"),
    "leaves work behind that no clock sees": ("threading", "concurrent"),
    "runs what cannot be read here": ("importlib", "eval", "exec", "__import__"),
}  # fmt: skip
FORBIDDEN: Final = {prefix: why for why, prefixes in _USELESS.items() for prefix in prefixes}
# What a kernel is made with; a candidate with none of these only calls torch's own operators.
_KERNELS: Final = (
    "triton.jit", "triton.experimental.gluon.jit", "torch.utils.cpp_extension.load", "torch.cuda._compile_kernel",
    "cupy.RawKernel", "numba.cuda.jit", "cutlass.cute.kernel", "tilelang.jit",
)  # fmt: skip
_PATCHED: Final = ("torch", "time", "triton", "builtins", "numpy", "os", "sys")


class Finding(NamedTuple):
    """Something that was read in the source."""

    code: str  # forbidden | patches | lazy | stream | no_kernel | swallows
    line: int
    message: str


@dataclass(frozen=True)
class SourceReport:
    """What reading a candidate's source found."""

    fault: str | None = None  # why it is not run: syntax_error or rejected
    message: str = ""
    findings: tuple[Finding, ...] = ()
    claims: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()

    @property
    def forbidden(self) -> tuple[Finding, ...]:
        """Findings for which a candidate is refused."""
        return tuple(f for f in self.findings if f.code in {"forbidden", "patches"})


@dataclass
class _Names:
    """Local name -> what it was imported as."""

    known: dict[str, str] = field(default_factory=dict)

    def add(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        """Remember the names that an import binds; yields what it imports."""
        for alias in node.names:
            whole = alias.name if isinstance(node, ast.Import) else f"{node.module or ''}.{alias.name}"
            bound = alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)
            self.known[bound] = whole if alias.asname or isinstance(node, ast.ImportFrom) else bound
            yield whole

    def of(self, node: ast.AST) -> str:
        """Dotted name of an expression, or ""."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (base := self.of(node.value)):
            return f"{base}.{node.attr}"
        return ""


def read(data: bytes, op: str) -> SourceReport:
    """Read a candidate for an operator.

    Args:
        data: the file.
        op: name of the operator, and of the function that it must define, of the operator's arguments or of `call`.

    Raises:
        UnknownNameError: no such operator.
    """
    spec = OPERATORS[op]
    if len(data) > MAX_BYTES:
        return SourceReport("rejected", f"the file has {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        text = data.decode("utf-8")
        if "\0" in text:
            return SourceReport("rejected", "the file is binary: it holds a zero byte")
        tree = ast.parse(text)
    except UnicodeDecodeError as error:
        return SourceReport("rejected", f"the file is binary: byte {error.start} is no UTF-8")
    except SyntaxError as error:
        return SourceReport("syntax_error", f"line {error.lineno}: {error.msg}")
    except (RecursionError, MemoryError, ValueError) as error:
        return SourceReport("rejected", f"the source cannot be parsed: {error!r}")
    findings = tuple(sorted(set(_findings(tree)), key=lambda f: (f.line, f.code)))
    problem = _function_problem(tree, spec) or None
    claims, dtypes, odd = _claims(tree, spec)
    if problem or odd:
        return SourceReport("rejected", problem or odd, findings)
    return SourceReport(None, "", findings, claims, dtypes)


def _function_problem(tree: ast.Module, spec: OpSpec[Any, Any]) -> str:
    """Why the operator's function is missing or cannot be called as the operator is."""
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == spec.name]
    if not found:
        bound = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        return "" if spec.name in bound else f"no function named {spec.name!r} at the top level"
    args = found[-1].args
    if isinstance(found[-1], ast.AsyncFunctionDef):
        return f"line {found[-1].lineno}: {spec.name} must not be async"
    positional = [a.arg for a in (*args.posonlyargs, *args.args)]
    given = {*positional, *(a.arg for a in args.kwonlyargs)}
    record = positional[:1] == [RECORD]
    if args.kwarg is None and not record:
        required = [n for n, p in spec.parameters.items() if p.default is p.empty]
        if missing := [n for n in required if n not in given]:
            return f"line {found[-1].lineno}: {spec.name} lacks the parameter {missing[0]!r} of the operator"
    with_default = positional[len(positional) - len(args.defaults) :] if args.defaults else []
    with_default += [a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None]
    known = {RECORD} if record else spec.parameters.keys()
    if extra := [n for n in given if n not in known and n not in with_default]:
        return f"line {found[-1].lineno}: {spec.name} needs {extra[0]!r}, which is no parameter of the operator"
    return f"line {found[-1].lineno}: parameters must take keywords" if args.posonlyargs and not record else ""


def _claims(tree: ast.Module, spec: OpSpec[Any, Any]) -> tuple[frozenset[str], tuple[str, ...], str]:
    """CLAIMS and DTYPES, which must be literals, and what is wrong with them."""
    found: dict[str, tuple[str, ...]] = {"CLAIMS": (), "DTYPES": ()}
    for node in tree.body:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
        for name in set(names) & found.keys():
            try:
                value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                value = None
            if not isinstance(value, set | list | tuple) or not all(isinstance(v, str) for v in value):
                return frozenset(), (), f"line {node.lineno}: {name} must be a literal set of strings"
            found[name] = tuple(value)
    for feature in found["CLAIMS"]:
        if feature not in spec.feature_names:
            return frozenset(), (), str(UnknownNameError(f"feature of {spec.name}", feature, spec.feature_names))
    floats = {"float32", "bfloat16", "float16", "float64"}
    for dtype in found["DTYPES"]:
        if dtype not in floats:
            return frozenset(), (), str(UnknownNameError("dtype", dtype, floats))
    return frozenset(found["CLAIMS"]), found["DTYPES"], ""


def _findings(tree: ast.Module) -> Iterator[Finding]:
    names, kernels = _Names(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for whole in names.add(node):
                yield from _forbidden(whole, node.lineno)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            dotted = names.of(node)
            kernels = kernels or dotted.startswith(_KERNELS)
            if isinstance(node, ast.Attribute) or dotted in FORBIDDEN:
                yield from _forbidden(dotted, line)
            if dotted in {"torch.cuda.Stream", "torch.cuda.stream"}:
                yield Finding("stream", line, "uses streams of its own; work left on them counts against it")
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            base = names.of(node.value)
            if base.partition(".")[0] in _PATCHED and base.partition(".")[0] in names.known.values():
                yield Finding("patches", line, f"changes {base}, which is not its own")
        elif isinstance(node, ast.Call) and names.of(node.func) == "setattr" and node.args:
            base = names.of(node.args[0])
            if base.partition(".")[0] in _PATCHED:
                yield Finding("patches", line, f"changes {base}, which is not its own")
        elif isinstance(node, ast.ClassDef) and any(names.of(b).endswith("Tensor") for b in node.bases):
            yield Finding("lazy", line, f"{node.name} is a tensor class of its own; results must be plain tensors")
        elif isinstance(node, ast.ExceptHandler) and (
            node.type is None or names.of(node.type) in {"Exception", "BaseException"}
        ):
            yield Finding("swallows", line, "catches every exception: a kernel that fails should fail")
    if not kernels:
        yield Finding("no_kernel", 0, "uses no kernel: only operators that torch has already")


def _forbidden(dotted: str, line: int) -> Iterator[Finding]:
    for prefix, why in FORBIDDEN.items():
        family = prefix in {"os.exec", "os.spawn"} and dotted.startswith(prefix)  # os.execv, os.spawnl
        if family or dotted == prefix or dotted.startswith(f"{prefix}."):
            yield Finding("forbidden", line, f"{dotted}: {why}")
            return

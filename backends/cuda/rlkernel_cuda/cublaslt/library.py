"""cuBLASLt itself, through ctypes: products without a workspace.

Torch hands cuBLASLt a workspace, in which an algorithm may keep parts of a sum, and then the number of rows decides how
a sum is split. Without one no algorithm can. torch has no argument for that, only a setting of the whole process.

Numbers of enumerations are those of NVIDIA's cublasLt.h, of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError

ALIGNMENT: Final = 16  # bytes: of every matrix, and of every row of it
_TYPES: Final = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_FP32: Final = 0
_SUMS_IN_FP32: Final = 68  # CUBLAS_COMPUTE_32F
_OF_A, _OF_B, _EPILOGUE, _BIAS = 3, 4, 7, 8  # CUBLASLT_MATMUL_DESC_TRANSA, TRANSB, EPILOGUE, BIAS_POINTER
_ADD_BIAS: Final = 4  # CUBLASLT_EPILOGUE_BIAS
_WORKSPACE, _REDUCTIONS = 1, 3  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK
_ALIGNMENTS: Final = (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES and of B, C, D


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> Any:
    """The library that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """Of a device, which is current."""
    del device
    return _made("cublasLtCreate")


def _called(function: str, *arguments: Any) -> None:
    if status := getattr(_library(), function)(*arguments):
        raise RLKernelError(f"cuBLASLt: {function} returns the status {status}")


def _made(function: str, *arguments: Any) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    _called(function, ctypes.byref(found), *arguments)
    return found


def _set(function: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _called(function, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class Matmul:
    """out [M, C] = a [M, K] b [K, C] + residual + bias, rounded once, for one shape, on the current device.

    cuBLASLt counts by columns: it computes out^T [C, M] = b^T a^T, and its first matrix is b.

    Args:
        like: a tensor of the dtype and on the device of all.
        M: rows.
        C: columns.
        K: numbers of a sum.
        a_columns: a lies as [K, M].
        b_columns: b lies as [C, K].
        bias: [C] is added.
        residual: [M, C] is added.

    Raises:
        RLKernelError: cuBLASLt has no algorithm for it.
    """

    def __init__(
        self, like: Tensor, M: int, C: int, K: int, *, a_columns: bool = False, b_columns: bool = False,
        bias: bool = False, residual: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._lock, self._with_bias = like.device, Lock(), bias
        self._handle, kind = _handle(like.device), _TYPES[like.dtype]
        self._what = _made("cublasLtMatmulDescCreate", _SUMS_IN_FP32, _FP32)
        self._say(_OF_A, ctypes.c_int32(b_columns))
        self._say(_OF_B, ctypes.c_int32(a_columns))
        if bias:
            self._say(_EPILOGUE, ctypes.c_uint32(_ADD_BIAS))

        def lies(rows: int, columns: int) -> ctypes.c_void_p:
            return _made(
                "cublasLtMatrixLayoutCreate",
                kind,
                ctypes.c_uint64(rows),
                ctypes.c_uint64(columns),
                ctypes.c_int64(rows),
            )

        self._layouts = (
            lies(*((K, C) if b_columns else (C, K))), lies(*((M, K) if a_columns else (K, M))), lies(C, M), lies(C, M),
        )  # fmt: skip
        self._one, self._beta = ctypes.c_float(1.0), ctypes.c_float(float(residual))
        self._found = self._algorithm()

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """On the current stream of the current device."""
        if not self._with_bias or bias is None:
            self._launch(a, b, residual, out)
            return
        with self._lock:  # threads share the description, which holds the address of the bias
            self._say(_BIAS, ctypes.c_uint64(bias.data_ptr()))
            self._launch(a, b, residual, out)

    def _launch(self, a: Tensor, b: Tensor, residual: Tensor | None, out: Tensor) -> None:
        of_b, of_a, of_c, of_out = self._layouts
        stream, to = torch.cuda.current_stream(self._device).cuda_stream, _address(out)
        added = to if residual is None else _address(residual)
        _called(
            "cublasLtMatmul", self._handle, self._what, ctypes.byref(self._one), _address(b), of_b, _address(a), of_a,
            ctypes.byref(self._beta), added, of_c, to, of_out, ctypes.byref(self._found.algorithm), None,
            ctypes.c_size_t(0), ctypes.c_void_p(stream),
        )  # fmt: skip

    def _algorithm(self) -> _Found:
        """The one that the library prefers of those that take no workspace and split no sum."""
        wanted = _made("cublasLtMatmulPreferenceCreate")
        try:
            _set("cublasLtMatmulPreferenceSetAttribute", wanted, _WORKSPACE, ctypes.c_uint64(0))
            _set("cublasLtMatmulPreferenceSetAttribute", wanted, _REDUCTIONS, ctypes.c_uint32(0))
            for attribute in _ALIGNMENTS:
                _set("cublasLtMatmulPreferenceSetAttribute", wanted, attribute, ctypes.c_uint32(ALIGNMENT))
            found, count = _Found(), ctypes.c_int()
            _called(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, self._what, *self._layouts, wanted, 1,
                ctypes.byref(found), ctypes.byref(count),
            )  # fmt: skip
        finally:
            _called("cublasLtMatmulPreferenceDestroy", wanted)
        if not count.value:
            raise RLKernelError("cuBLASLt has no algorithm for this product that splits no sum")
        return found

    def _say(self, attribute: int, value: Any) -> None:
        _set("cublasLtMatmulDescSetAttribute", self._what, attribute, value)

    def __del__(self) -> None:
        """Hand back the descriptions."""
        for layout in getattr(self, "_layouts", ()):
            _called("cublasLtMatrixLayoutDestroy", layout)
        if hasattr(self, "_what"):
            _called("cublasLtMatmulDescDestroy", self._what)


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())

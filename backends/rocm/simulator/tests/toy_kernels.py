"""SmallFloat Triton kernels for tests of the simulator, and Philox in numpy."""

from functools import cache

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax(x, out, V, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    y = tl.load(x + row * V + at, mask=at < V, other=float("-inf"))
    e = tl.exp(y - tl.max(y, axis=0))
    tl.store(out + row * V + at, e / tl.sum(e, axis=0), mask=at < V)


@triton.jit
def product(a, b, c, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + m[None, :] * K + k[:, None])
    tl.store(c + m[:, None] * M + m[None, :], tl.dot(x, y))


@triton.jit
def assorted(x, out, count, seed, N: tl.constexpr):
    at = tl.arange(0, N)
    y = tl.load(x + at)
    tl.store(out + at, tl.sort(y))
    tl.store(out + N + at, tl.cumsum(y, 0))
    tl.store(out + 2 * N + at, tl.rand(seed, at))
    tl.atomic_add(count + at * 7 % 4, 1)


@triton.jit
def strided(x, N):
    for i in range(tl.program_id(0), N, tl.num_programs(0)):
        tl.store(x + i, tl.program_id(0) + 1)


@cache
def _made(arch, kernel, types, constants, wave):
    types, constants = dict(types), dict(constants)
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else types[n] for n in names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types.get(n, "").startswith("*")},
    )
    return triton.compile(
        source, target=GPUTarget("hip", arch, wave), options={"num_warps": 4, "enable_fp_fusion": True}
    )


def compiled(arch, kernel, types, constants, wave=64):
    """A kernel as machine code of an AMD GPU."""
    return _made(arch, kernel, tuple(types.items()), tuple(constants.items()), wave)


def uniforms(seed, n):
    """tl.rand: the first word of Philox 4x32-10 (Salmon et al., 2011) as a float in [0, 1)."""
    x = np.zeros((4, n), np.uint64)
    x[0] = np.arange(n)
    key = np.array([seed, 0], np.uint64)
    for _ in range(10):
        low, high = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        mask, up = np.uint64(0xFFFFFFFF), np.uint64(32)
        x = np.stack([(high >> up) ^ x[1] ^ key[0], high & mask, (low >> up) ^ x[3] ^ key[1], low & mask])
        key = (key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & mask
    signed = x[0].astype(np.uint32).view(np.int32)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32) * np.float32(4.6566127342e-10)

// wgmma: 64 rows of A by B in shared memory, 16 of depth, added to fp32 sums in registers. For sm_90a.
//
// A thread has `count` sums, for 2 * count columns of B: sum 4 j + 2 h + e is row 8 h + its lane / 4 of its warp's 16, column
// 8 j + 2 (lane % 4) + e. PTX numbers operands in the order in which they are written, sums first, so every count needs an
// asm statement of its own; the macros below write them and end with this file.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define WGMMA_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_LIST_16 WGMMA_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_LIST_32 WGMMA_LIST_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_LIST_64 WGMMA_LIST_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_LIST_128 WGMMA_LIST_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_SUMS_16(i) WGMMA_SUMS_8(i), WGMMA_SUMS_8(i + 8)
#define WGMMA_SUMS_32(i) WGMMA_SUMS_16(i), WGMMA_SUMS_16(i + 16)
#define WGMMA_SUMS_64(i) WGMMA_SUMS_32(i), WGMMA_SUMS_32(i + 32)
#define WGMMA_SUMS_128(i) WGMMA_SUMS_64(i), WGMMA_SUMS_64(i + 64)

// A and B in shared memory, bfloat16. add 0: the sums start from 0. TA, TB: whether a tile lies with its rows, not its depth,
// contiguous.
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_LIST_128 "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
      : WGMMA_SUMS_128(0) : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}

// A in registers, four of two 16-bit values each; B in shared memory with its depth contiguous. `after` are the numbers of
// the operands that follow the sums.
#define WGMMA_TYPED(columns, count, after, type) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" WGMMA_LIST_##count "}, " after \
      ", p, 1, 1, 0;\n}\n" \
      : WGMMA_SUMS_##count(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_FROM_REGISTERS(columns, count, after) \
  template <bool half> \
  __device__ __forceinline__ void multiply(float (&d)[count], const u32* a, u64 b) { \
    if constexpr (half) { \
      WGMMA_TYPED(columns, count, after, "f16"); \
    } else { \
      WGMMA_TYPED(columns, count, after, "bf16"); \
    } \
  }

WGMMA_FROM_REGISTERS("16", 8, "{%8, %9, %10, %11}, %12")
WGMMA_FROM_REGISTERS("32", 16, "{%16, %17, %18, %19}, %20")
WGMMA_FROM_REGISTERS("64", 32, "{%32, %33, %34, %35}, %36")
WGMMA_FROM_REGISTERS("128", 64, "{%64, %65, %66, %67}, %68")
WGMMA_FROM_REGISTERS("256", 128, "{%128, %129, %130, %131}, %132")

#undef WGMMA_FROM_REGISTERS
#undef WGMMA_TYPED
#undef WGMMA_LIST_8
#undef WGMMA_SUMS_8
#undef WGMMA_LIST_16
#undef WGMMA_SUMS_16
#undef WGMMA_LIST_32
#undef WGMMA_SUMS_32
#undef WGMMA_LIST_64
#undef WGMMA_SUMS_64
#undef WGMMA_LIST_128
#undef WGMMA_SUMS_128

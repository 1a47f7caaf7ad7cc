// The product of a narrow block of rows and a panel of columns, kept in registers: the inner loop of every GEMM here.
#pragma once

#include "cpu/simd.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// R C + C + 1 registers should not exceed the machine's 32 (AVX-512) or 16.
// sum[r][c] += over k of a(r, k) * panel[k][c]: a(r, k) = a[r row_stride + k column_stride], panel [depth, C kLanes]
// with panel_stride floats from one of its rows to the next.
// Each sum is one chain in the order of k, so a column's result depends on nothing but that column and a.
template <int R, int C>
MOSAIC_INLINE void multiply_add(const float* a, int64_t row_stride, int64_t column_stride, const float* panel,
                                int64_t depth, Float (&sum)[R][C], int64_t panel_stride = C * kLanes) {
    for (int64_t k = 0; k < depth; ++k, a += column_stride, panel += panel_stride) {
        Float column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) column[c] = load(panel + c * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Float factor = broadcast(a[r * row_stride]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[r][c] = fma(factor, column[c], sum[r][c]);
        }
    }
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

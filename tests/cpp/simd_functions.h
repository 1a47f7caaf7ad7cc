// The functions of csrc/cpu/simd.h and tile.h over arrays, so that test_simd.cpp can call them in every instruction
// set.
#pragma once

#include <cstdint>

#include "isa.h"

namespace mosaic {

enum class SimdFunction {
    exp,
    expm1,
    tanh,
    exp_inside,  // for |x| <= 120
    scaled_exp,  // for |x| <= 87: its p and scale put together
    excess,      // for |x| <= 87: exp(x) - 1 - x
    absolute,
    max,
    min,
    with_sign,
    select_less,
    fma,
    through_double
};

// out[i] = function(a[i], b[i], c[i]) for any size: whole vectors, the rest through a padded one.
struct SimdCall {
    SimdFunction function;
    const float *a, *b, *c;  // [size]
    int64_t size;
    float* out;  // [size], written
};

// The conversions, in whole vectors of kLanes elements from `from` to `to`: size must be a multiple of 16.
enum class Conversion { from_bfloat16, from_float16, to_bfloat16, to_float16 };

struct ConversionCall {
    Conversion conversion;
    const void* from;
    void* to;
    int64_t size;
};

// sum [kTileRows, kTileVectors kLanes] += a [kTileRows, depth] * panel [depth, kTileVectors kLanes].
struct TileCall {
    const float *a, *panel;
    int64_t depth;
    float* sum;
};

struct TileSize {
    int64_t rows, columns;
};

MOSAIC_CPU_KERNEL(void, simd_function, const SimdCall&)
MOSAIC_CPU_KERNEL(void, simd_conversion, const ConversionCall&)
MOSAIC_CPU_KERNEL(void, simd_tile, const TileCall&)
MOSAIC_CPU_KERNEL(void, simd_tile_size, TileSize&)

}  // namespace mosaic

#include "simd_functions.h"

#include "cpu/simd.h"
#include "cpu/tile.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// The tile of sums that is tested, another than those of the kernels.
#if defined(__AVX512F__)
constexpr int kTileRows = 9, kTileVectors = 3;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif

Float apply(SimdFunction function, Float a, Float b, Float c) {
    switch (function) {
        case SimdFunction::exp:
            return exp(a);
        case SimdFunction::expm1:
            return expm1(a);
        case SimdFunction::tanh:
            return tanh(a);
        case SimdFunction::exp_inside:
            return exp_inside(a);
        case SimdFunction::scaled_exp: {
            const ScaledExp parts = scaled_exp(a);
            return fma(parts.p, parts.scale, parts.scale);
        }
        case SimdFunction::excess:
            return scaled_exp(a).excess;
        case SimdFunction::absolute:
            return absolute(a);
        case SimdFunction::max:
            return max(a, b);
        case SimdFunction::min:
            return min(a, b);
        case SimdFunction::with_sign:
            return with_sign(a, b);
        case SimdFunction::select_less:
            return select(a < b, c, a);
        case SimdFunction::fma:
            return fma(a, b, c);
        case SimdFunction::through_double:
            return narrow(widen(a) * 3.0 + widen(b));
    }
    return a;
}

}  // namespace

void simd_function(const SimdCall& call) {
    for (int64_t begin = 0; begin < call.size; begin += kLanes) {
        const int64_t count = call.size - begin < kLanes ? call.size - begin : kLanes;
        float a[kLanes] = {}, b[kLanes] = {}, c[kLanes] = {}, out[kLanes];
        std::memcpy(a, call.a + begin, count * sizeof(float));
        std::memcpy(b, call.b + begin, count * sizeof(float));
        std::memcpy(c, call.c + begin, count * sizeof(float));
        store(out, apply(call.function, load(a), load(b), load(c)));
        std::memcpy(call.out + begin, out, count * sizeof(float));
    }
}

void simd_conversion(const ConversionCall& call) {
    const auto* halves = static_cast<const uint16_t*>(call.from);
    const auto* floats = static_cast<const float*>(call.from);
    for (int64_t i = 0; i < call.size; i += kLanes) {
        switch (call.conversion) {
            case Conversion::from_bfloat16:
                store(static_cast<float*>(call.to) + i, load_bfloat16(halves + i));
                break;
            case Conversion::from_float16:
                store(static_cast<float*>(call.to) + i, load_float16(halves + i));
                break;
            case Conversion::to_bfloat16:
                store_bfloat16(static_cast<uint16_t*>(call.to) + i, load(floats + i));
                break;
            case Conversion::to_float16:
                store_float16(static_cast<uint16_t*>(call.to) + i, load(floats + i));
                break;
        }
    }
}

void simd_tile_size(TileSize& size) { size = {kTileRows, kTileVectors * kLanes}; }

void simd_tile(const TileCall& call) {
    Float sum[kTileRows][kTileVectors];
    for (int r = 0; r < kTileRows; ++r)
        for (int v = 0; v < kTileVectors; ++v) sum[r][v] = load(call.sum + (r * kTileVectors + v) * kLanes);
    multiply_add(call.a, call.depth, 1, call.panel, call.depth, sum);
    for (int r = 0; r < kTileRows; ++r)
        for (int v = 0; v < kTileVectors; ++v) store(call.sum + (r * kTileVectors + v) * kLanes, sum[r][v]);
}

}  // namespace mosaic::MOSAIC_ISA

// Vectors of float32 in the instruction set this file is compiled for. For files in csrc/cpu only.
//
// The same source serves every width: a Float holds kLanes floats, and a comparison gives an Int of 0 and -1.
// Everything is local and inlined, and no template of the standard library may be used next to it: a function that the
// linker shares between files might be taken from one compiled for a newer machine.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef MOSAIC_X86
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header where it is inlined
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define MOSAIC_INLINE [[gnu::always_inline]] inline

namespace mosaic::MOSAIC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// GCC's and Clang's vectors: + - * / and comparisons work lane by lane, a scalar operand is spread.
typedef float Float __attribute__((vector_size(4 * kLanes)));
typedef int32_t Int __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));  // for sums that wrap around, as those of a NaN's bits
typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
typedef double Double __attribute__((vector_size(8 * kLanes)));  // as many lanes, in two registers

MOSAIC_INLINE Float broadcast(float x) { return x - Float{}; }

MOSAIC_INLINE Float load(const float* x) {
    Float out;
    std::memcpy(&out, x, sizeof out);
    return out;
}

MOSAIC_INLINE void store(float* x, Float value) { std::memcpy(x, &value, sizeof value); }

// a * b + c, with one rounding where the machine has an instruction for it.
MOSAIC_INLINE Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

MOSAIC_INLINE Float select(Int mask, Float yes, Float no) { return mask ? yes : no; }

// Largest and smallest of two; b where either is NaN. Spelt out, for GCC does not see it where one is a constant.
MOSAIC_INLINE Float max(Float a, Float b) {
#if defined(__AVX512F__)
    return _mm512_maskz_max_ps(0xffff, a, b);  // _mm512_max_ps itself makes GCC 12 warn
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#elif defined(MOSAIC_X86)
    return _mm_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

MOSAIC_INLINE Float min(Float a, Float b) {
#if defined(__AVX512F__)
    return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#elif defined(MOSAIC_X86)
    return _mm_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

MOSAIC_INLINE Float absolute(Float x) { return (Float)((Int)x & 0x7fffffff); }

// With the sign of `sign`.
MOSAIC_INLINE Float with_sign(Float x, Float sign) { return (Float)(((Int)x & 0x7fffffff) | ((Int)sign & INT32_MIN)); }

MOSAIC_INLINE Double widen(Float x) { return __builtin_convertvector(x, Double); }
MOSAIC_INLINE Float narrow(Double x) { return __builtin_convertvector(x, Float); }

// bfloat16 and IEEE half precision, as their bits.
MOSAIC_INLINE Float load_bfloat16(const uint16_t* x) {
    Half half;
    std::memcpy(&half, x, sizeof half);
    return (Float)(__builtin_convertvector(half, Int) << 16);
}

MOSAIC_INLINE Float load_float16(const uint16_t* x) {
    Half half;
    std::memcpy(&half, x, sizeof half);
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, (__m256i)half);  // not the plain one: GCC 12 warns of its own header
#elif defined(__AVX2__)
    return _mm256_cvtph_ps((__m128i)half);
#else
    const Int bits = __builtin_convertvector(half, Int);
    const Int sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    // The exponent's bias moves from 15 to 127 by a product, which also makes subnormals normal.
    const Float scaled = (Float)(magnitude << 13) * broadcast(0x1p112f);
    const Int special = (magnitude << 13) | 0x7f800000;  // infinities and NaN
    return (Float)((magnitude >= 0x7c00 ? special : (Int)scaled) | sign);
#endif
}

// The nearest bfloat16, ties to even; NaN stays NaN.
MOSAIC_INLINE void store_bfloat16(uint16_t* x, Float value) {
    const Bits bits = (Bits)value;
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Half half = __builtin_convertvector(value == value ? rounded : Bits{} + 0x7fc0, Half);
    std::memcpy(x, &half, sizeof half);
}

// The nearest half, ties to even.
MOSAIC_INLINE void store_float16(uint16_t* x, Float value) {
#if defined(__AVX512F__)
    const __m256i half = _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Float magnitude = absolute(value);
    const Int bits = (Int)magnitude;
    // Normal: round at bit 13, then move the bias. Subnormal: an addition of 0.5 rounds at the right bit by itself.
    const Int normal = (bits - (112 << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    const Int subnormal = (Int)(magnitude + broadcast(0.5f)) - (Int)broadcast(0.5f);
    Int out = bits < (113 << 23) ? subnormal : normal;
    out = bits >= 0x47800000 ? Int{} + 0x7c00 : out;  // 65536 and above; 65520 .. 65536 has carried into it
    out = magnitude == magnitude ? out : Int{} + 0x7e00;
    const Half half = __builtin_convertvector(out | (((Int)value >> 16) & 0x8000), Half);
#endif
    std::memcpy(x, &half, sizeof half);
}

// exp(x) = 2^n (1 + p) with n whole, x = n ln(2) + r, |r| <= ln(2) / 2, p = expm1(r) = r + bend.
struct Exponential {
    Float p, r, bend, n;
    Int bits;  // n + 0x4b400000, the bits of 1.5 * 2^23 + n
};

constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;

MOSAIC_INLINE Exponential exponential(Float x) {
    const Float shifted = fma(x, broadcast(1.44269504f), broadcast(12582912.0f));  // 1.5 * 2^23: rounds to whole
    const Float n = shifted - 12582912.0f;
    Float r = fma(n, broadcast(-kLn2High), x);
    r = fma(n, broadcast(-kLn2Low), r);
    Float q = broadcast(1.98412698e-4f);
    q = fma(q, r, broadcast(1.38888889e-3f));
    q = fma(q, r, broadcast(8.33333333e-3f));
    q = fma(q, r, broadcast(4.16666667e-2f));
    q = fma(q, r, broadcast(0.166666667f));
    q = fma(q, r, broadcast(0.5f));
    return {fma(q, r * r, r), r, q * (r * r), n, (Int)shifted};
}

struct ExpParts {
    Float p, n, half, rest;  // 2^n = half * rest: either is in range where 2^n alone is not
};

// For x in [-120, 120], or NaN.
MOSAIC_INLINE ExpParts exp_parts_inside(Float x) {
    const Exponential e = exponential(x);
    const Int whole = e.bits - 0x4b400000;
    const Int first = whole >> 1;
    return {e.p, e.n, (Float)((first + 127) << 23), (Float)((whole - first + 127) << 23)};
}

MOSAIC_INLINE ExpParts exp_parts(Float x) {
    // Bounds beyond which the result is 0 or infinite anyway; the order of operands lets NaN through.
    return exp_parts_inside(max(broadcast(-110.0f), min(broadcast(90.0f), x)));
}

// exp(x) for x in [-120, 120], or NaN.
MOSAIC_INLINE Float exp_inside(Float x) {
    const ExpParts parts = exp_parts_inside(x);
#if defined(__AVX512F__)
    return _mm512_scalef_ps(1.0f + parts.p, parts.n);
#else
    return (1.0f + parts.p) * parts.half * parts.rest;
#endif
}

// The same for |x| <= 87, where 2^n alone is in range; and exp(x) - 1 - x within 6 units in the last place, near 0 too.
struct ScaledExp {
    Float p, scale, excess;
};

MOSAIC_INLINE ScaledExp scaled_exp(Float x) {
    const Exponential e = exponential(x);
    const Float scale = (Float)(((Bits)e.bits << 23) + 0x3f800000), grown = scale - 1.0f;
    // Of parts that do not cancel: 2^n - 1 - n ln(2), then what r and bend add to it.
    const Float steps = fma(e.n, broadcast(-kLn2Low), fma(e.n, broadcast(-kLn2High), grown));
    return {e.p, scale, fma(grown, e.r, fma(scale, e.bend, steps))};
}

// Within 2 units in the last place; 0 below about -104, infinite above 88.7.
MOSAIC_INLINE Float exp(Float x) {
    const ExpParts parts = exp_parts(x);
    return (1.0f + parts.p) * parts.half * parts.rest;
}

// exp(x) - 1 without the cancellation near 0, within 2 units in the last place.
MOSAIC_INLINE Float expm1(Float x) {
    const ExpParts parts = exp_parts(x);
    const Float scale = parts.half * parts.rest;
    // Where the scale overflows, and just below, the 1 is far under the last place.
    return select(x > 88.0f, (1.0f + parts.p) * parts.half * parts.rest, fma(parts.p, scale, scale - 1.0f));
}

// Within 3 units in the last place.
MOSAIC_INLINE Float tanh(Float x) {
    const Float t = expm1(absolute(x) * -2.0f);
    return with_sign(t / (t + 2.0f), x);
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

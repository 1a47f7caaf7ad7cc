// bfloat16 and half precision by their definition, in plain double arithmetic: the truth for fast conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace mosaic::test {

struct FloatFormat {
    int fraction_bits, exponent_bits;
    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    int special() const { return (1 << exponent_bits) - 1; }  // the exponent field of infinities and NaN
};
constexpr FloatFormat kBfloat16{7, 8}, kFloat16{10, 5};

inline double decode(uint16_t bits, FloatFormat format) {
    const int fraction = bits & ((1 << format.fraction_bits) - 1);
    const int exponent = (bits >> format.fraction_bits) & format.special();
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == format.special())
        return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias() - format.fraction_bits);
    return sign * std::ldexp(fraction + (1 << format.fraction_bits), exponent - format.bias() - format.fraction_bits);
}

// The nearest value of the format, ties to even.
inline double rounded(double x, FloatFormat format) {
    if (x == 0 || !std::isfinite(x)) return x;
    const int exponent = std::max(std::ilogb(x), 1 - format.bias());
    const double unit = std::ldexp(1.0, exponent - format.fraction_bits);
    const double nearest = std::nearbyint(x / unit) * unit;
    const bool overflows = std::fabs(nearest) >= std::ldexp(1.0, format.bias() + 1);
    return overflows ? std::copysign(std::numeric_limits<double>::infinity(), x) : nearest;
}

// The bits of a number, rounded.
inline uint16_t encode(double x, FloatFormat format) {
    const double magnitude = std::fabs(rounded(x, format));
    if (std::isinf(magnitude))
        return static_cast<uint16_t>((format.special() << format.fraction_bits) | (x < 0 ? 0x8000 : 0));
    const int exponent = magnitude == 0 ? 1 - format.bias() : std::max(std::ilogb(magnitude), 1 - format.bias());
    // Counts units of the last place from 0: the exponent field continues where the fraction overflows.
    const double units = std::ldexp(magnitude, format.fraction_bits - exponent);
    const int field = exponent - 1 + format.bias();
    const int bits = static_cast<int>(units) + (field << format.fraction_bits);
    return static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
}

}  // namespace mosaic::test

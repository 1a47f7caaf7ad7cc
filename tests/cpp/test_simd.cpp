// simd.h and tile.h in every instruction set, against double arithmetic.
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "float_format.h"
#include "simd_functions.h"

namespace mosaic::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Every 4093rd float of both signs, the neighbours of 0, of the bounds of exp and of where formulas change, and the
// special values.
Array<float> samples() {
    std::vector<float> all{0.0f, -0.0f, kInfinity, -kInfinity, kNaN, -kNaN};
    for (uint64_t bits = 0; bits <= 0xffffffff; bits += 4093) all.push_back(from_bits(static_cast<uint32_t>(bits)));
    for (const float centre : {0.0f, 1.0f, -1.0f, 0.34657359f, -0.34657359f, 88.0f, 88.722839f, 89.0f, 90.0f,
                               -87.33655f, -103.27893f, -103.97208f, -104.0f, -110.0f, 9.01f, -9.01f}) {
        float up = centre, down = centre;
        for (int step = 0; step < 50; ++step) {
            all.push_back(up = std::nextafter(up, kInfinity));
            all.push_back(down = std::nextafter(down, -kInfinity));
        }
    }
    for (int step = 0; step < 40000; ++step) all.push_back(-110.0f + static_cast<float>(step) * 0.005f);
    Array<float> out(static_cast<int64_t>(all.size()));
    std::copy(all.begin(), all.end(), out.begin());
    return out;
}

Array<float> call(SimdFunction function, const Array<float>& a, const Array<float>& b, const Array<float>& c) {
    Array<float> out(a.size(), kNaN);
    simd_function({function, a.begin(), b.begin(), c.begin(), a.size(), out.begin()});
    return out;
}

// |actual - truth| in units of the last place of truth as a float; the unit of subnormals is 2^-149.
double units(float actual, double truth) {
    if (std::isnan(truth)) return std::isnan(actual) ? 0 : kInfinity;
    const auto nearest = static_cast<float>(truth);
    if (actual == nearest) return 0;
    if (!std::isfinite(actual) || !std::isfinite(nearest)) {
        // One of them overflowed: the largest float counts as the last value before infinity.
        const double bounded = std::isfinite(actual) ? actual : std::copysign(0x1p128, actual);
        return std::fabs(bounded - truth) / 0x1p104;
    }
    const int exponent = truth == 0 ? -126 : std::max(std::ilogb(truth), -126);
    return std::fabs(actual - truth) / std::ldexp(1.0, exponent - 23);
}

// exp(x) - 1 - x: by its series where the difference would cancel.
double excess(double x) {
    if (std::fabs(x) > 0.1) return std::expm1(x) - x;
    double sum = 0, term = x;
    for (int n = 2; n < 14; ++n) sum += term *= x / n;
    return sum;
}

// The units are those that simd.h states; each function is asked only where it is defined.
void test_transcendental() {
    struct {
        SimdFunction function;
        double (*truth)(double);
        double limit, bound;
        const char* what;
    } const cases[] = {{SimdFunction::exp, std::exp, kInfinity, 2, "exp"},
                       {SimdFunction::expm1, std::expm1, kInfinity, 2, "expm1"},
                       {SimdFunction::tanh, std::tanh, kInfinity, 3, "tanh"},
                       {SimdFunction::exp_inside, std::exp, 120, 2, "exp_inside"},
                       {SimdFunction::scaled_exp, std::exp, 87, 2, "scaled_exp"},
                       {SimdFunction::excess, excess, 87, 6, "excess"}};
    const Array<float> every = samples();
    for (const auto& one : cases) {
        const auto defined = [&](float x) { return std::isnan(x) || std::fabs(x) <= one.limit; };
        Array<float> x(std::count_if(every.begin(), every.end(), defined));
        std::copy_if(every.begin(), every.end(), x.begin(), defined);
        const Array<float> out = call(one.function, x, x, x);
        double worst = 0;
        for (int64_t i = 0; i < x.size(); ++i) {
            const double truth = one.truth(x[i]);
            const double error = units(out[i], truth);
            CHECK(error <= one.bound, "%s(%a) = %a, truth %a, %g units", one.what, x[i], out[i], truth, error);
            worst = std::max(worst, error);
        }
        std::printf("%s %s: %.2f units\n", name(instruction_set()), one.what, worst);
    }
}

bool identical(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, sizeof a) == 0; }

void test_lanewise() {
    const Array<float> special = [] {
        const float values[] = {0.0f, -0.0f,  1.0f,    -1.0f, kInfinity, -kInfinity,    kNaN,
                                2.5f, 1e-40f, -1e-40f, 3e38f, -3e38f,    0x1.fffffep-3f};
        Array<float> out(13);
        std::copy(values, values + 13, out.begin());
        return out;
    }();
    const int64_t count = special.size();
    Array<float> a(count * count), b(count * count), c(count * count);
    for (int64_t i = 0; i < a.size(); ++i) {
        a[i] = special[i / count];
        b[i] = special[i % count];
        c[i] = special[(i / count + i) % count];
    }
    const auto every = [&](SimdFunction function, const char* what, auto truth) {
        const Array<float> out = call(function, a, b, c);
        for (int64_t i = 0; i < a.size(); ++i)
            CHECK(identical(out[i], truth(a[i], b[i], c[i])), "%s(%a, %a, %a) = %a", what, a[i], b[i], c[i], out[i]);
    };
    every(SimdFunction::absolute, "absolute", [](float x, float, float) { return std::fabs(x); });
    every(SimdFunction::max, "max", [](float x, float y, float) { return x > y ? x : y; });
    every(SimdFunction::min, "min", [](float x, float y, float) { return x < y ? x : y; });
    every(SimdFunction::with_sign, "with_sign", [](float x, float y, float) { return std::copysign(x, y); });
    every(SimdFunction::select_less, "select", [](float x, float y, float z) { return x < y ? z : x; });
    const bool fused = instruction_set() != InstructionSet::portable;
    every(SimdFunction::fma, "fma", [&](float x, float y, float z) {
        const volatile float product = x * y;  // volatile: two roundings whatever the compiler would like
        return fused ? std::fma(x, y, z) : product + z;
    });
    every(SimdFunction::through_double, "narrow(3 widen(a) + widen(b))", [](float x, float y, float) {
        return static_cast<float>(static_cast<double>(x) * 3.0 + static_cast<double>(y));
    });
}

void test_loads(Conversion conversion, FloatFormat format) {
    Array<uint16_t> from(65536);
    for (int64_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i);
    Array<float> to(from.size());
    simd_conversion({conversion, from.begin(), to.begin(), from.size()});
    for (int64_t i = 0; i < from.size(); ++i) {
        const double truth = decode(from[i], format);
        CHECK(identical(to[i], static_cast<float>(truth)), "bits %04x: %a, truth %a", from[i], to[i], truth);
    }
}

// Each value of the format and each tie between neighbours, with the floats next to it; then samples of all floats.
void test_stores(Conversion conversion, FloatFormat format) {
    std::vector<float> all;
    for (int bits = 0; bits < 65536; ++bits) {
        const double value = decode(static_cast<uint16_t>(bits), format);
        const double next = decode(static_cast<uint16_t>(bits + 1), format);
        for (const double centre :
             {value, std::isinf(next) ? value * (1 + std::ldexp(0.5, -format.fraction_bits)) : (value + next) / 2}) {
            const auto x = static_cast<float>(centre);
            all.insert(all.end(), {x, std::nextafter(x, kInfinity), std::nextafter(x, -kInfinity)});
        }
    }
    for (const float x : samples()) all.push_back(x);
    all.resize((all.size() + 15) / 16 * 16);
    Array<float> from(static_cast<int64_t>(all.size()));
    std::copy(all.begin(), all.end(), from.begin());
    Array<uint16_t> to(from.size());
    simd_conversion({conversion, from.begin(), to.begin(), from.size()});
    for (int64_t i = 0; i < from.size(); ++i) {
        const double truth = rounded(from[i], format), actual = decode(to[i], format);
        CHECK(std::isnan(truth) ? std::isnan(actual) : actual == truth && std::signbit(actual) == std::signbit(truth),
              "%a: bits %04x = %a, truth %a", from[i], to[i], actual, truth);
    }
}

void test_tile() {
    TileSize size{};
    simd_tile_size(size);
    Random random(1);
    for (const int64_t depth : {0, 1, 2, 7, 64}) {
        Array<float> a(size.rows * depth), panel(depth * size.columns), sum(size.rows * size.columns);
        for (float& x : a) x = random.uniform(-1, 1);
        for (float& x : panel) x = random.uniform(-1, 1);
        for (float& x : sum) x = random.uniform(-1, 1);
        Array<float> before(sum.size());
        std::copy(sum.begin(), sum.end(), before.begin());
        simd_tile({a.begin(), panel.begin(), depth, sum.begin()});
        for (int64_t i = 0; i < sum.size(); ++i) {
            double truth = before[i], scale = std::fabs(truth);
            for (int64_t k = 0; k < depth; ++k) {
                const double term =
                    static_cast<double>(a[i / size.columns * depth + k]) * panel[k * size.columns + i % size.columns];
                truth += term;
                scale += std::fabs(term);
            }
            CHECK(close(sum[i], truth, scale * static_cast<double>(depth + 1) * 0x1p-24), "depth %lld: %a, truth %a",
                  as_printed(depth), sum[i], truth);
        }
    }
}

void test_choice() {
    use_instruction_set(InstructionSet::portable);
    CHECK(instruction_set() == InstructionSet::portable, " ");
    bool refused = false;
    try {
        use_instruction_set(static_cast<InstructionSet>(static_cast<int>(best_instruction_set()) + 1));
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused && instruction_set() == InstructionSet::portable, " ");
}

}  // namespace
}  // namespace mosaic::test

int main() {
    using namespace mosaic::test;
    test_choice();
    with_every_instruction_set([] {
        test_transcendental();
        test_lanewise();
        test_loads(mosaic::Conversion::from_bfloat16, kBfloat16);
        test_loads(mosaic::Conversion::from_float16, kFloat16);
        test_stores(mosaic::Conversion::to_bfloat16, kBfloat16);
        test_stores(mosaic::Conversion::to_float16, kFloat16);
        test_tile();
    });
    return finish();
}

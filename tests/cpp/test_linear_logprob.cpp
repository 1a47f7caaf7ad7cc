// linear_logprob, forward and backward, in every instruction set, against the formulas of csrc/linear_logprob.h in
// double.
#include <limits>
#include <vector>

#include "check.h"
#include "elements.h"
#include "linear_logprob.h"

namespace mosaic::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Shape {
    int64_t rows, vocabulary, hidden;
};

struct Options {
    bool bias, temperature, softcap, kept, other_ranks, filter;
};

struct Case {
    Shape shape;
    Options options;
    Elements hidden, weight;
    Array<float> bias, temperature;
    Array<int64_t> row, target, kept, kept_offsets;
    Array<uint8_t> kept_whole;
    float softcap;
    std::vector<uint8_t> keeps;  // [N, V]

    LogprobInputs inputs() const {
        LogprobInputs out{};
        out.hidden = hidden.data();
        out.hidden_stride = shape.hidden + 3;
        out.hidden_type = hidden.type();
        out.weight = weight.data();
        out.weight_stride = shape.hidden + 1;
        out.weight_type = weight.type();
        out.bias = options.bias ? bias.begin() : nullptr;
        out.row = row.begin();
        out.target = target.begin();
        out.temperature = options.temperature ? temperature.begin() : nullptr;
        out.softcap = softcap;
        out.kept = options.kept ? kept.begin() : nullptr;
        out.kept_offsets = options.kept ? kept_offsets.begin() : nullptr;
        out.kept_whole = options.kept ? kept_whole.begin() : nullptr;
        out.num_rows = shape.rows;
        out.vocab_size = shape.vocabulary;
        out.hidden_size = shape.hidden;
        out.threads = 1;
        return out;
    }
};

// Rows lie `stride` elements apart and the last one ends the array; what lies between them stays NaN.
Elements random_matrix(Random& random, ElementType type, int64_t rows, int64_t columns, int64_t stride, float bound) {
    Elements out(type, rows ? (rows - 1) * stride + columns : 0);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) out.set(r * stride + c, random.uniform(-bound, bound));
    return out;
}

Case make_case(Random& random, Shape shape, Options options, ElementType hidden_type, ElementType weight_type) {
    const auto [rows, vocabulary, hidden] = shape;
    std::vector<int64_t> kept;
    std::vector<uint8_t> keeps(static_cast<size_t>(rows * vocabulary), 1);
    Array<int64_t> row(rows), target(rows), offsets(rows + 1);
    Array<uint8_t> whole(rows);
    for (int64_t n = 0; n < rows; ++n) {
        row[n] = 2 * n + 1;  // every other row of hidden is not scored
        target[n] = options.other_ranks && random.chance(0.3) ? -1 : random.below(vocabulary);
        whole[n] = random.chance(0.3);
        const double share = random.uniform(-0.1f, 0.5f);  // sometimes none, or the target alone
        for (int64_t v = 0; v < vocabulary && options.kept && !whole[n]; ++v) {
            const bool keep = v == target[n] || random.chance(share);
            keeps[static_cast<size_t>(n * vocabulary + v)] = keep;
            if (keep) kept.push_back(v);
        }
        offsets[n + 1] = static_cast<int64_t>(kept.size());
    }
    Elements hidden_states = random_matrix(random, hidden_type, 2 * rows + 1, hidden, hidden + 3, 1);
    for (int64_t n = 0; n <= rows; ++n)
        for (int64_t k = 0; k < hidden; ++k) hidden_states.set(2 * n * (hidden + 3) + k, kInfinity);
    Case made{shape,
              options,
              std::move(hidden_states),
              random_matrix(random, weight_type, vocabulary, hidden, hidden + 1, 2),
              Array<float>(vocabulary),
              Array<float>(rows),
              std::move(row),
              std::move(target),
              Array<int64_t>(static_cast<int64_t>(kept.size())),
              std::move(offsets),
              std::move(whole),
              options.softcap ? 3.0f : 0.0f,
              std::move(keeps)};
    std::copy(kept.begin(), kept.end(), made.kept.begin());
    // A forbidden id has the bias -infinity; a target never is one, so that no row is without any.
    for (float& x : made.bias) x = random.chance(0.1) ? static_cast<float>(-kInfinity) : random.uniform(-1, 1);
    for (const int64_t id : made.target)
        if (id >= 0) made.bias[id] = random.uniform(-1, 1);
    for (float& x : made.temperature) x = random.uniform(0.5f, 2);
    return made;
}

struct Truth {
    std::vector<double> x, slope;               // [N, V]: x, and its derivative by the logit before the softcap
    std::vector<double> largest, lse, entropy;  // [N]; -infinity, -infinity and 0 where no id is kept
    std::vector<double> tolerance;              // [N] of x, for float32 sums
};

Truth truth(const Case& input) {
    const auto [rows, vocabulary, hidden] = input.shape;
    const auto size = static_cast<size_t>(rows);
    const std::vector<double> states = input.hidden.values(), weight = input.weight.values();
    Truth out{std::vector<double>(size * static_cast<size_t>(vocabulary), -kInfinity),
              std::vector<double>(size * static_cast<size_t>(vocabulary), 0.0),
              std::vector<double>(size, -kInfinity),
              std::vector<double>(size, -kInfinity),
              std::vector<double>(size, 0.0),
              std::vector<double>(size, 0.0)};
    for (size_t n = 0; n < size; ++n) {
        const double temperature = input.options.temperature ? input.temperature[static_cast<int64_t>(n)] : 1.0;
        const double* state = states.data() + input.row[static_cast<int64_t>(n)] * (hidden + 3);
        double scale = 0;
        for (int64_t v = 0; v < vocabulary; ++v) {
            const size_t at = n * static_cast<size_t>(vocabulary) + static_cast<size_t>(v);
            if (!input.keeps[at]) continue;
            double logit = input.options.bias ? input.bias[v] : 0.0,
                   terms = std::isfinite(logit) ? std::fabs(logit) : 0;
            for (int64_t k = 0; k < hidden; ++k) {
                const double term = state[k] * weight[static_cast<size_t>(v * (hidden + 1) + k)];
                logit += term;
                terms += std::fabs(term);
            }
            out.slope[at] = 1 / temperature;
            if (input.options.softcap) {
                const double bounded = std::tanh(logit / input.softcap);
                logit = input.softcap * bounded;
                out.slope[at] *= 1 - bounded * bounded;
            }
            out.x[at] = logit / temperature;
            out.largest[n] = std::max(out.largest[n], out.x[at]);
            scale = std::max(scale, (terms + input.softcap) / temperature);
        }
        out.tolerance[n] = scale * (8 + 2 * std::sqrt(static_cast<double>(hidden))) * 0x1p-24;
        double normaliser = 0, weighted = 0;
        for (int64_t v = 0; v < vocabulary; ++v) {
            const double below = out.x[n * static_cast<size_t>(vocabulary) + static_cast<size_t>(v)] - out.largest[n];
            if (!(below > -kInfinity)) continue;  // and the NaN of a row without any
            normaliser += std::exp(below);
            weighted += std::exp(below) * below;
        }
        if (normaliser == 0) continue;
        out.lse[n] = out.largest[n] + std::log(normaliser);
        out.entropy[n] = std::log(normaliser) - weighted / normaliser;
    }
    return out;
}

struct Statistics {
    Array<float> largest;
    Array<double> normaliser, weighted;
    Array<float> target_logit;
};

Statistics run_forward(LogprobInputs inputs, int64_t threads, bool weighted_wanted) {
    const int64_t rows = inputs.num_rows;
    Statistics out{Array<float>(rows, kNaN), Array<double>(rows, kNaN), Array<double>(weighted_wanted ? rows : 0, kNaN),
                   Array<float>(rows, kNaN)};
    inputs.threads = threads;
    linear_logprob_forward({inputs, out.largest.begin(), out.normaliser.begin(),
                            weighted_wanted ? out.weighted.begin() : nullptr, out.target_logit.begin()});
    return out;
}

void check_forward(const Case& input, const Truth& expected) {
    const Statistics out = run_forward(input.inputs(), 1, true);
    const int64_t rows = input.shape.rows;
    for (const int64_t threads : {2, 4}) {
        const Statistics other = run_forward(input.inputs(), threads, true);
        CHECK(same_bits(out.largest, other.largest) && same_bits(out.normaliser, other.normaliser) &&
                  same_bits(out.weighted, other.weighted) && same_bits(out.target_logit, other.target_logit),
              "threads %lld", as_printed(threads));
    }
    const Statistics plain = run_forward(input.inputs(), 2, false);
    CHECK(same_bits(out.largest, plain.largest) && same_bits(out.normaliser, plain.normaliser) &&
              same_bits(out.target_logit, plain.target_logit),
          "without the entropy");

    for (int64_t n = 0; n < rows; ++n) {
        const auto at = static_cast<size_t>(n);
        const double tolerance = expected.tolerance[at] + 1e-6;
        CHECK(close(out.largest[n], expected.largest[at], tolerance), "row %lld: %.9g, truth %.9g", as_printed(n),
              out.largest[n], expected.largest[at]);
        if (expected.largest[at] == -kInfinity) {
            CHECK(out.normaliser[n] == 0 && out.weighted[n] == 0, "row %lld: %g, %g", as_printed(n), out.normaliser[n],
                  out.weighted[n]);
        } else {
            CHECK(out.normaliser[n] >= 1, "row %lld: %.17g", as_printed(n), out.normaliser[n]);
            const double lse = out.largest[n] + std::log(out.normaliser[n]);
            CHECK(close(lse, expected.lse[at], tolerance), "row %lld: %.9g, truth %.9g, tolerance %.3g", as_printed(n),
                  lse, expected.lse[at], tolerance);
            const double entropy = std::log(out.normaliser[n]) - out.weighted[n] / out.normaliser[n];
            const double spread = 2 + std::log(static_cast<double>(input.shape.vocabulary));
            CHECK(close(entropy, expected.entropy[at], 2 * tolerance * spread), "row %lld: %.9g, truth %.9g",
                  as_printed(n), entropy, expected.entropy[at]);
        }
        const int64_t target = input.target[n];
        const double logit = target < 0 ? 0 : expected.x[static_cast<size_t>(n * input.shape.vocabulary + target)];
        CHECK(close(out.target_logit[n], logit, target < 0 ? 0 : tolerance), "row %lld: %.9g, truth %.9g",
              as_printed(n), out.target_logit[n], logit);
    }

    // A row scored alone gives the bits that it gives among others.
    for (int64_t n = 0; n < rows; n += 5) {
        LogprobInputs alone = input.inputs();
        alone.num_rows = 1;
        alone.row += n;
        alone.target += n;
        if (alone.temperature) alone.temperature += n;
        if (alone.kept) {
            alone.kept_offsets += n;
            alone.kept_whole += n;
        }
        const Statistics one = run_forward(alone, 1, true);
        CHECK(std::memcmp(&one.largest[0], &out.largest[n], sizeof(float)) == 0 &&
                  one.normaliser[0] == out.normaliser[n] && one.weighted[0] == out.weighted[n] &&
                  one.target_logit[0] == out.target_logit[n],
              "row %lld alone: %.17g and %.17g", as_printed(n), one.normaliser[0], out.normaliser[n]);
    }
}

struct Incoming {
    Array<float> largest, log_normaliser, entropy, dlogprob, dentropy;
};

// What the wrapper hands to backward: statistics over all ranks. Another rank's ids here weigh as much as exp(1).
Incoming incoming(Random& random, const Case& input, const Truth& expected) {
    const int64_t rows = input.shape.rows;
    Incoming out{Array<float>(rows), Array<float>(rows), Array<float>(rows), Array<float>(rows), Array<float>(rows)};
    for (int64_t n = 0; n < rows; ++n) {
        const auto at = static_cast<size_t>(n);
        double lse = expected.lse[at];
        if (input.options.other_ranks) lse = std::max(lse, 1.0) + std::log1p(std::exp(-std::fabs(lse - 1)));
        out.largest[n] =
            static_cast<float>(std::max(expected.largest[at], input.options.other_ranks ? 1.0 : -kInfinity));
        out.log_normaliser[n] = static_cast<float>(lse - out.largest[n]);
        out.entropy[n] = static_cast<float>(expected.entropy[at]);
        out.dlogprob[n] = random.uniform(-1, 1);
        out.dentropy[n] = random.uniform(-1, 1);
    }
    return out;
}

struct Gradients {
    Array<float> dhidden;
    Elements dweight;
    Array<float> dbias;
};

Gradients run_backward(const Case& input, const Incoming& given, int64_t threads, bool entropy, float filter,
                       bool want_hidden, bool want_weight, bool want_bias) {
    const auto [rows, vocabulary, hidden] = input.shape;
    Gradients out{Array<float>(want_hidden ? rows * hidden : 0, kNaN),
                  Elements(input.weight.type(), want_weight ? vocabulary * hidden : 0),
                  Array<float>(want_bias ? vocabulary : 0, kNaN)};
    LogprobInputs inputs = input.inputs();
    inputs.threads = threads;
    linear_logprob_backward({inputs, given.largest.begin(), given.log_normaliser.begin(),
                             entropy ? given.entropy.begin() : nullptr, given.dlogprob.begin(),
                             entropy ? given.dentropy.begin() : nullptr, filter,
                             want_hidden ? out.dhidden.begin() : nullptr, want_weight ? out.dweight.data() : nullptr,
                             want_bias ? out.dbias.begin() : nullptr});
    return out;
}

// A sum in double, with how far a result may be off.
struct Sum {
    double value = 0, tolerance = 0;
    void add(double term, double error) {
        value += term;
        tolerance += error;
    }
};

struct ExpectedGradients {
    std::vector<Sum> dhidden, dweight, dbias;
};

ExpectedGradients expected_gradients(const Case& input, const Truth& expected, const Incoming& given, bool entropy,
                                     float filter) {
    const auto [rows, vocabulary, hidden] = input.shape;
    ExpectedGradients out{std::vector<Sum>(static_cast<size_t>(rows * hidden)),
                          std::vector<Sum>(static_cast<size_t>(vocabulary * hidden)),
                          std::vector<Sum>(static_cast<size_t>(vocabulary))};
    const std::vector<double> states = input.hidden.values(), weight = input.weight.values();
    // The gradient by a logit may be rounded to the inputs' precision before it is multiplied.
    const double rounding = 2 * std::max(input.hidden.rounding(), input.weight.rounding());
    const double sums = (8 + std::sqrt(static_cast<double>(std::max(rows, vocabulary)))) * 0x1p-24;
    for (int64_t n = 0; n < rows; ++n) {
        const double relative = rounding + sums + 2 * expected.tolerance[static_cast<size_t>(n)] + 2e-6;
        for (int64_t v = 0; v < vocabulary; ++v) {
            const auto at = static_cast<size_t>(n * vocabulary + v);
            const bool target = v == input.target[n];
            const double log_p = (expected.x[at] - given.largest[n]) - given.log_normaliser[n];
            const double p = expected.x[at] == -kInfinity ? 0 : std::exp(log_p);
            const double dentropy = entropy && p > 0 ? given.dentropy[n] * p : 0;
            double dlogit = given.dlogprob[n] * ((target ? 1 : 0) - p),
                   size = std::fabs(given.dlogprob[n]) * ((target ? 1 : 0) + p);
            if (dentropy != 0) {
                dlogit -= dentropy * (log_p + given.entropy[n]);
                size += std::fabs(dentropy) * (std::fabs(log_p) + given.entropy[n] + 1);
            }
            dlogit *= expected.slope[at];
            // 1 - tanh^2 in float32 is off by the rounding of tanh, relative to 1.
            size *= expected.slope[at] + (input.options.softcap ? 1e-3 : 0);
            const double error = size * relative + (p < 1.001 * filter ? std::fabs(dlogit) : 0);
            out.dbias[static_cast<size_t>(v)].add(dlogit, error);
            for (int64_t k = 0; k < hidden; ++k) {
                const double w = weight[static_cast<size_t>(v * (hidden + 1) + k)];
                const double h = states[static_cast<size_t>(input.row[n] * (hidden + 3) + k)];
                out.dhidden[static_cast<size_t>(n * hidden + k)].add(dlogit * w, error * std::fabs(w));
                out.dweight[static_cast<size_t>(v * hidden + k)].add(dlogit * h, error * std::fabs(h));
            }
        }
    }
    return out;
}

void check_backward(const Case& input, const Incoming& given, const ExpectedGradients& expected, bool entropy,
                    float filter) {
    const Gradients out = run_backward(input, given, 1, entropy, filter, true, true, true);
    for (const int64_t threads : {2, 4}) {
        const Gradients other = run_backward(input, given, threads, entropy, filter, true, true, true);
        CHECK(same_bits(out.dhidden, other.dhidden) && out.dweight.same_bits_as(other.dweight) &&
                  same_bits(out.dbias, other.dbias),
              "threads %lld", as_printed(threads));
    }
    // Each gradient asked for alone: the others' pointers are null.
    CHECK(same_bits(out.dhidden, run_backward(input, given, 2, entropy, filter, true, false, false).dhidden),
          "dhidden");
    CHECK(out.dweight.same_bits_as(run_backward(input, given, 2, entropy, filter, false, true, false).dweight),
          "dweight");
    CHECK(same_bits(out.dbias, run_backward(input, given, 2, entropy, filter, false, false, true).dbias), "dbias");

    const auto near = [](double actual, const Sum& sum, double rounding, const char* what, int64_t index) {
        const double tolerance = sum.tolerance + rounding * std::fabs(sum.value) + 1e-7;
        CHECK(close(actual, sum.value, tolerance), "%s[%lld]: %.9g, truth %.9g, tolerance %.3g", what,
              as_printed(index), actual, sum.value, tolerance);
    };
    const auto [rows, vocabulary, hidden] = input.shape;
    for (int64_t i = 0; i < rows * hidden; ++i)
        near(out.dhidden[i], expected.dhidden[static_cast<size_t>(i)], 0, "dhidden", i);
    for (int64_t i = 0; i < vocabulary * hidden; ++i)
        near(out.dweight[i], expected.dweight[static_cast<size_t>(i)], 2 * out.dweight.rounding(), "dweight", i);
    for (int64_t i = 0; i < vocabulary; ++i) near(out.dbias[i], expected.dbias[static_cast<size_t>(i)], 0, "dbias", i);
}

void check_case(Random& random, const Case& input) {
    const Truth expected = truth(input);
    const bool entropy = random.chance(0.7);
    const float filter = input.options.filter ? 1.0f / static_cast<float>(input.shape.vocabulary) : 0;
    const Incoming given = incoming(random, input, expected);
    const ExpectedGradients gradients = expected_gradients(input, expected, given, entropy, filter);
    with_every_instruction_set([&] {
        // Dot products exist in the last set only, and for two bfloat16 matrices.
        const bool has_dot = instruction_set() == InstructionSet::avx512_bf16 &&
                             input.hidden.type() == ElementType::bfloat16 &&
                             input.weight.type() == ElementType::bfloat16;
        for (const bool dot : {false, true}) {
            if (dot && !has_dot) continue;
            use_bfloat16_dot(dot);
            check_forward(input, expected);
            check_backward(input, given, gradients, entropy, filter);
        }
    });
}

void test_shapes() {
    const std::vector<Shape> shapes{{0, 5, 3},     {1, 1, 1},    {3, 2, 7},    {2, 16, 8},
                                    {5, 33, 16},   {9, 48, 32},  {10, 49, 33}, {7, 100, 17},
                                    {13, 257, 64}, {17, 300, 1}, {1, 515, 40}, {33, 130, 100}};
    const ElementType types[] = {ElementType::float32, ElementType::bfloat16, ElementType::float16};
    Random random(3);
    for (const Shape& shape : shapes)
        for (const ElementType hidden_type : types)
            for (const ElementType weight_type : types)
                for (int round = 0; round < 2; ++round) {
                    const auto bits = random.bits();
                    const Options options{(bits & 1) != 0, (bits & 2) != 0,  (bits & 4) != 0,
                                          (bits & 8) != 0, (bits & 16) != 0, (bits & 32) != 0};
                    check_case(random, make_case(random, shape, options, hidden_type, weight_type));
                }
}

// Several blocks of the vocabulary, and work enough for several threads.
void test_large() {
    Random random(5);
    for (const ElementType type : {ElementType::float32, ElementType::bfloat16, ElementType::float16}) {
        check_case(random, make_case(random, {70, 3001, 64}, {false, false, false, false, false, false}, type, type));
        check_case(random, make_case(random, {40, 2111, 72}, {true, true, true, true, true, true}, type, type));
    }
}

}  // namespace
}  // namespace mosaic::test

int main() {
    using namespace mosaic::test;
    test_shapes();
    test_large();
    return finish();
}

// value_loss in every instruction set, against the formulas of mosaic_kernels/value_loss in double.
#include <limits>
#include <vector>

#include "check.h"
#include "packed_tokens.h"
#include "value_loss.h"

namespace mosaic::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
    PackedTokens packed;
    Array<float> value, old_value, returns, token_weight;
    ValueLoss call;  // but for outputs and threads
};

Case make_case(Random& random, const std::vector<int64_t>& lengths, double share_active) {
    PackedTokens packed = packed_tokens(random, lengths, share_active);
    Array<float> value = active_numbers(random, packed, -2, 2), old_value = active_numbers(random, packed, -2, 2);
    // Returns far from 0 that hardly vary: their variance must not be the difference of two squares.
    const float centre = random.chance(0.3) ? 100 : 0;
    Array<float> returns = active_numbers(random, packed, centre - 1, centre + 1);
    Array<float> weight = active_numbers(random, packed, 0, 2);
    Case made{std::move(packed),  std::move(value),  std::move(old_value),
              std::move(returns), std::move(weight), ValueLoss{}};
    ValueLoss& call = made.call;
    call.value = made.value.begin();
    call.old_value = random.chance(0.6) ? made.old_value.begin() : nullptr;
    call.returns = made.returns.begin();
    call.mask = made.packed.mask.begin();
    call.token_weight = random.chance(0.5) ? made.token_weight.begin() : nullptr;
    call.cu_seqlens = made.packed.cu_seqlens.begin();
    call.segment_trajectory = made.packed.segment_trajectory.begin();
    call.num_segments = made.packed.num_segments();
    call.num_trajectories = made.packed.num_trajectories;
    call.clip = 0.5;
    return made;
}

struct Truth {
    std::vector<double> dvalue, tolerance;
    double loss = 0, clip_fraction = 0, value_mean = 0, return_mean = 0, explained_variance = 0;
    double value_size = 0, return_size = 0;
    double doubtful = 0;  // share of tokens so near a bound that rounding decides the branch
};

Truth truth(const Case& input) {
    const PackedTokens& packed = input.packed;
    const auto tokens = static_cast<size_t>(packed.num_tokens());
    const double share = packed.num_active ? 1.0 / static_cast<double>(packed.num_active) : 0;
    Truth out;
    out.dvalue.resize(tokens);
    out.tolerance.resize(tokens);
    std::vector<double> weight_of(static_cast<size_t>(packed.num_trajectories), -1);
    double residual_mean = 0;
    for (int64_t t = 0; t < packed.num_tokens(); ++t) {
        if (!packed.mask[t]) continue;
        double& known = weight_of[static_cast<size_t>(packed.trajectory[static_cast<size_t>(t)])];
        if (known < 0) known = packed.default_weight(t);
        const double weight = input.call.token_weight ? input.token_weight[t] : known;
        const double value = input.value[t], returns = input.returns[t];
        double error = (value - returns) * (value - returns);
        bool limited = false, doubtful = false;
        if (input.call.old_value) {
            const double change = value - input.old_value[t];
            const double at_bound = input.old_value[t] + std::copysign(input.call.clip, change) - returns;
            limited = std::fabs(change) > input.call.clip && at_bound * at_bound > error;
            doubtful = std::fabs(std::fabs(change) - input.call.clip) < 1e-5 ||
                       std::fabs(at_bound * at_bound - error) < 1e-5 * error;
            if (limited) error = at_bound * at_bound;
        }
        const auto at = static_cast<size_t>(t);
        out.loss += weight * error / 2;
        out.dvalue[at] = limited ? 0 : weight * (value - returns);
        out.tolerance[at] = doubtful ? 1e9 : 1e-6 * weight * (std::fabs(value) + std::fabs(returns));
        out.doubtful += doubtful ? share : 0;
        out.clip_fraction += limited ? share : 0;
        out.value_mean += value * share;
        out.value_size += std::fabs(value) * share;
        out.return_mean += returns * share;
        out.return_size += std::fabs(returns) * share;
        residual_mean += (returns - value) * share;
    }
    double spread = 0, residual = 0;
    for (int64_t t = 0; t < packed.num_tokens(); ++t) {
        if (!packed.mask[t]) continue;
        spread += std::pow(input.returns[t] - out.return_mean, 2);
        residual += std::pow(static_cast<double>(input.returns[t]) - input.value[t] - residual_mean, 2);
    }
    out.explained_variance = packed.num_active > 1 ? 1 - residual / spread : 0;
    return out;
}

struct Results {
    Array<float> loss, statistics, dvalue;
    Array<int64_t> counts;
};

Results run(const Case& input, int64_t threads, bool dvalue) {
    Results out{Array<float>(1, kNaN), Array<float>(4, kNaN),
                Array<float>(dvalue ? input.packed.num_tokens() : 0, kNaN), Array<int64_t>(2, -1)};
    ValueLoss call = input.call;
    call.threads = threads;
    call.loss = out.loss.begin();
    call.statistics = out.statistics.begin();
    call.counts = out.counts.begin();
    call.dvalue = dvalue ? out.dvalue.begin() : nullptr;
    value_loss(call);
    return out;
}

void check_run(const Case& input, const Truth& expected) {
    const Results out = run(input, 1, true);
    for (const int64_t threads : {2, 4}) {
        const Results other = run(input, threads, true);
        CHECK(same_bits(out.loss, other.loss) && same_bits(out.statistics, other.statistics) &&
                  same_bits(out.dvalue, other.dvalue),
              "threads %lld", as_printed(threads));
    }
    CHECK(same_bits(out.loss, run(input, 2, false).loss), "without the gradient");
    CHECK(close(out.loss[0], expected.loss, 4e-6 * expected.loss), "%.9g, truth %.9g", out.loss[0], expected.loss);
    CHECK(close(out.statistics[0], expected.clip_fraction, 1e-6 + expected.doubtful), "%.9g, truth %.9g",
          out.statistics[0], expected.clip_fraction);
    CHECK(close(out.statistics[1], expected.value_mean, 1e-6 * expected.value_size), "%.9g, truth %.9g",
          out.statistics[1], expected.value_mean);
    CHECK(close(out.statistics[2], expected.return_mean, 1e-6 * expected.return_size), "%.9g, truth %.9g",
          out.statistics[2], expected.return_mean);
    CHECK(close(out.statistics[3], expected.explained_variance, 1e-4 * (1 + std::fabs(expected.explained_variance))),
          "%.9g, truth %.9g", out.statistics[3], expected.explained_variance);
    CHECK(out.counts[0] == input.packed.num_active && out.counts[1] == 0, "%lld, %lld", as_printed(out.counts[0]),
          as_printed(out.counts[1]));
    for (int64_t t = 0; t < input.packed.num_tokens(); ++t) {
        const auto at = static_cast<size_t>(t);
        CHECK(close(out.dvalue[t], expected.dvalue[at], expected.tolerance[at]), "dvalue[%lld]: %.9g, truth %.9g",
              as_printed(t), out.dvalue[t], expected.dvalue[at]);
    }
}

void check_case(const Case& input) {
    const Truth expected = truth(input);
    with_every_instruction_set([&] { check_run(input, expected); });
}

void test_layouts() {
    Random random(23);
    for (const auto& lengths : small_layouts())
        for (const double active : {0.0, 0.2, 0.8, 1.0})
            for (int round = 0; round < 6; ++round) check_case(make_case(random, lengths, active));
    for (const auto& lengths : large_layouts())
        for (int round = 0; round < 3; ++round) check_case(make_case(random, lengths, 0.7));
}

void test_nonfinite() {
    Random random(29);
    for (int round = 0; round < 30; ++round) {
        const Case input = make_case(random, {20, 7, 300}, 1);
        const int64_t token = random.below(input.packed.num_tokens());
        const Truth expected = truth(input);
        const Array<float>& broken = round % 2 ? input.value : input.returns;
        broken[token] = round % 3 ? kNaN : std::numeric_limits<float>::infinity();
        with_every_instruction_set([&] {
            const Results out = run(input, 1, true);
            CHECK(std::isnan(out.loss[0]) && out.counts[1] == 1, "%g, %lld", out.loss[0], as_printed(out.counts[1]));
            for (int64_t t = 0; t < input.packed.num_tokens(); ++t) {
                const double dvalue = t == token ? kNaN : expected.dvalue[static_cast<size_t>(t)];
                CHECK(close(out.dvalue[t], dvalue, expected.tolerance[static_cast<size_t>(t)]),
                      "dvalue[%lld]: %g, truth %g", as_printed(t), out.dvalue[t], dvalue);
            }
        });
    }
}

}  // namespace
}  // namespace mosaic::test

int main() {
    using namespace mosaic::test;
    test_layouts();
    test_nonfinite();
    return finish();
}

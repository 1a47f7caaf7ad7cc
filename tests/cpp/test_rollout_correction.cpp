// rollout_correction in every instruction set, against the formulas of mosaic_kernels/rollout_correction in double.
#include <limits>
#include <vector>

#include "check.h"
#include "packed_tokens.h"
#include "rollout_correction.h"

namespace mosaic::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
    PackedTokens packed;
    Array<float> logprob, rollout_logprob;
    RolloutCorrection call;  // but for outputs and threads
};

Case make_case(Random& random, const std::vector<int64_t>& lengths, double share_active, Level level) {
    PackedTokens packed = packed_tokens(random, lengths, share_active);
    // Sums over long units stay within the clamp.
    const float bound = level == Level::token ? 1.5f : 0.1f;
    Array<float> logprob = active_numbers(random, packed, -bound, 0),
                 rollout = active_numbers(random, packed, -bound, 0);
    for (int64_t t = 0; t < packed.num_tokens(); ++t)
        if (packed.mask[t] && level == Level::token && random.chance(0.05))
            rollout[t] = random.chance(0.5) ? -100.0f : 90.0f;
    Case made{std::move(packed), std::move(logprob), std::move(rollout), RolloutCorrection{}};
    RolloutCorrection& call = made.call;
    call.logprob = made.logprob.begin();
    call.rollout_logprob = made.rollout_logprob.begin();
    call.mask = made.packed.mask.begin();
    call.cu_seqlens = made.packed.cu_seqlens.begin();
    call.segment_trajectory = made.packed.segment_trajectory.begin();
    call.num_segments = made.packed.num_segments();
    call.num_trajectories = made.packed.num_trajectories;
    call.level = level;
    call.cap = random.chance(0.7) ? 1.2 : 2.0;
    call.floor = random.chance(0.5) ? 0.6 : -1.0;
    return made;
}

struct Truth {
    std::vector<double> weight, tolerance;
    std::vector<uint8_t> keep, doubtful;
    double statistics[7] = {}, tolerances[7] = {};
};

Truth truth(const Case& input) {
    const PackedTokens& packed = input.packed;
    const RolloutCorrection& call = input.call;
    const auto tokens = static_cast<size_t>(packed.num_tokens());
    const double share = packed.num_active ? 1.0 / static_cast<double>(packed.num_active) : 0;
    Truth out;
    out.weight.resize(tokens);
    out.tolerance.resize(tokens);
    out.keep.resize(tokens);
    out.doubtful.resize(tokens);
    std::vector<double> sum(static_cast<size_t>(std::max(packed.num_segments(), packed.num_trajectories))),
        size(sum.size());
    const auto unit = [&](size_t t) {
        return static_cast<size_t>(call.level == Level::segment ? packed.segment[t] : packed.trajectory[t]);
    };
    const auto difference = [&](int64_t t) { return static_cast<double>(input.logprob[t]) - input.rollout_logprob[t]; };
    for (int64_t t = 0; t < packed.num_tokens(); ++t) {
        if (!packed.mask[t]) continue;
        sum[unit(static_cast<size_t>(t))] += difference(t);
        size[unit(static_cast<size_t>(t))] += std::fabs(difference(t));
    }
    for (int64_t t = 0; t < packed.num_tokens(); ++t) {
        if (!packed.mask[t]) continue;
        const auto at = static_cast<size_t>(t);
        const double own = difference(t);
        const double total = call.level == Level::token ? own : sum[unit(at)];
        const double ratio = std::exp(std::min(20.0, std::max(-20.0, total)));
        const double relative = 1e-6 + 0x1p-23 * (call.level == Level::token ? 0 : size[unit(at)]);
        const bool above = ratio > call.cap;
        out.keep[at] = call.floor < 0 || (!above && ratio >= call.floor);
        out.doubtful[at] = std::fabs(ratio - call.cap) < 10 * relative * ratio ||
                           std::fabs(ratio - call.floor) < 10 * relative * ratio;
        out.weight[at] = out.keep[at] ? std::min(ratio, call.cap) : 0;
        out.tolerance[at] = relative * out.weight[at];
        const double terms[] = {ratio, 0,   above && out.keep[at] ? 1.0 : 0.0, out.keep[at] ? 0.0 : 1.0, std::fabs(own),
                                0,     -own};
        const double doubt = out.doubtful[at] ? 1 : 0;
        const double tolerances[] = {relative * ratio,      0, 1e-6 + doubt,         1e-6 + doubt,
                                     1e-6 * std::fabs(own), 0, 1e-6 * std::fabs(own)};
        for (int i = 0; i < 7; ++i) {
            out.statistics[i] += terms[i] * share;
            out.tolerances[i] += tolerances[i] * share;
        }
        out.statistics[1] = std::max(out.statistics[1], ratio);
        out.tolerances[1] = std::max(out.tolerances[1], relative * ratio);
        out.statistics[5] = std::max(out.statistics[5], std::fabs(own));
        out.tolerances[5] = 1e-6 * out.statistics[5];
    }
    return out;
}

struct Results {
    Array<float> weight, statistics;
    Array<uint8_t> keep;
    Array<int64_t> counts;
};

Results run(const Case& input, int64_t threads) {
    const int64_t tokens = input.packed.num_tokens();
    Results out{Array<float>(tokens, kNaN), Array<float>(7, kNaN), Array<uint8_t>(tokens, 77), Array<int64_t>(2, -1)};
    RolloutCorrection call = input.call;
    call.threads = threads;
    call.weight = out.weight.begin();
    call.keep = out.keep.begin();
    call.statistics = out.statistics.begin();
    call.counts = out.counts.begin();
    rollout_correction(call);
    return out;
}

void check_run(const Case& input, const Truth& expected) {
    const Results out = run(input, 1);
    for (const int64_t threads : {2, 4}) {
        const Results other = run(input, threads);
        CHECK(same_bits(out.weight, other.weight) && same_bits(out.keep, other.keep) &&
                  same_bits(out.statistics, other.statistics),
              "threads %lld", as_printed(threads));
    }
    for (int i = 0; i < 7; ++i)
        CHECK(close(out.statistics[i], expected.statistics[i], expected.tolerances[i]),
              "statistic %d: %.9g, truth %.9g", i, out.statistics[i], expected.statistics[i]);
    CHECK(out.counts[0] == input.packed.num_active && out.counts[1] == 0, "%lld, %lld", as_printed(out.counts[0]),
          as_printed(out.counts[1]));
    for (int64_t t = 0; t < input.packed.num_tokens(); ++t) {
        const auto at = static_cast<size_t>(t);
        if (expected.doubtful[at]) continue;
        CHECK(out.keep[t] == expected.keep[at], "keep[%lld]: %d", as_printed(t), out.keep[t]);
        CHECK(close(out.weight[t], expected.weight[at], expected.tolerance[at]), "weight[%lld]: %.9g, truth %.9g",
              as_printed(t), out.weight[t], expected.weight[at]);
    }
}

constexpr Level kLevels[] = {Level::token, Level::segment, Level::trajectory};

void test_layouts() {
    Random random(31);
    const auto check_case = [&](const std::vector<int64_t>& lengths, double active, Level level) {
        const Case input = make_case(random, lengths, active, level);
        const Truth expected = truth(input);
        with_every_instruction_set([&] { check_run(input, expected); });
    };
    for (const Level level : kLevels) {
        for (const auto& lengths : small_layouts())
            for (const double active : {0.0, 0.2, 0.8, 1.0})
                for (int round = 0; round < 4; ++round) check_case(lengths, active, level);
        for (const auto& lengths : large_layouts()) check_case(lengths, 0.7, level);
    }
}

// A number that is not finite is counted, and reaches the weights of its unit and of no other.
void test_nonfinite() {
    Random random(37);
    for (int round = 0; round < 30; ++round) {
        const Level level = kLevels[round % 3];
        Case input = make_case(random, {20, 7, 300, 5}, 1, level);
        input.call.floor = -1;
        const Truth expected = truth(input);
        const auto token = static_cast<size_t>(random.below(input.packed.num_tokens()));
        const Array<float>& broken = round % 2 ? input.logprob : input.rollout_logprob;
        broken[static_cast<int64_t>(token)] = round % 5 ? kNaN : std::numeric_limits<float>::infinity();
        with_every_instruction_set([&] {
            const Results out = run(input, 1);
            CHECK(out.counts[1] == 1 && std::isnan(out.statistics[0]), "%lld, %g", as_printed(out.counts[1]),
                  out.statistics[0]);
            for (size_t t = 0; t < input.packed.segment.size(); ++t) {
                const bool reached = level == Level::token ? t == token
                                     : level == Level::segment
                                         ? input.packed.segment[t] == input.packed.segment[token]
                                         : input.packed.trajectory[t] == input.packed.trajectory[token];
                const double weight = reached ? kNaN : expected.weight[t];
                CHECK(close(out.weight[static_cast<int64_t>(t)], weight, expected.tolerance[t]),
                      "weight[%lld]: %g, truth %g", as_printed(static_cast<int64_t>(t)),
                      out.weight[static_cast<int64_t>(t)], weight);
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

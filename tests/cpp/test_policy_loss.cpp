// policy_loss in every instruction set, against the formulas of mosaic_kernels/policy_loss in double.
#include <limits>
#include <vector>

#include "check.h"
#include "packed_tokens.h"
#include "policy_loss.h"

namespace mosaic::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
    PackedTokens packed;
    Array<float> logprob, old_logprob, advantage, token_weight, importance_weight, ref_logprob, entropy;
    PolicyLoss call;  // but for outputs and threads
};

Case make_case(Random& random, const std::vector<int64_t>& lengths, double share_active, Objective objective,
               Level level) {
    PackedTokens packed = packed_tokens(random, lengths, share_active);
    const int64_t tokens = packed.num_tokens();
    Case made{std::move(packed),    Array<float>(tokens), Array<float>(tokens),
              Array<float>(tokens), Array<float>(tokens), Array<float>(tokens),
              Array<float>(tokens), Array<float>(tokens), PolicyLoss{}};
    made.logprob = active_numbers(random, made.packed, -3, 0);
    made.old_logprob = active_numbers(random, made.packed, -3, 0);
    made.advantage = active_numbers(random, made.packed, -2, 2);
    made.token_weight = active_numbers(random, made.packed, 0, 2);
    made.importance_weight = active_numbers(random, made.packed, 0, 2);
    made.ref_logprob = active_numbers(random, made.packed, -3, 0);
    made.entropy = active_numbers(random, made.packed, 0, 3);
    for (int64_t t = 0; t < tokens; ++t) {
        if (!made.packed.mask[t]) continue;
        if (random.chance(0.05)) made.advantage[t] = 0;
        // Beyond the clamp of the log-ratio, on both sides.
        if (random.chance(0.05)) made.old_logprob[t] = random.chance(0.5) ? -100.0f : 90.0f;
    }
    PolicyLoss& call = made.call;
    call.logprob = made.logprob.begin();
    call.old_logprob = made.old_logprob.begin();
    call.advantage = made.advantage.begin();
    call.mask = made.packed.mask.begin();
    call.token_weight = random.chance(0.5) ? made.token_weight.begin() : nullptr;
    call.importance_weight = random.chance(0.5) ? made.importance_weight.begin() : nullptr;
    call.ref_logprob = random.chance(0.5) ? made.ref_logprob.begin() : nullptr;
    call.entropy = random.chance(0.5) ? made.entropy.begin() : nullptr;
    call.cu_seqlens = made.packed.cu_seqlens.begin();
    call.segment_trajectory = made.packed.segment_trajectory.begin();
    call.num_segments = made.packed.num_segments();
    call.num_trajectories = made.packed.num_trajectories;
    call.objective = objective;
    call.level = level;
    call.estimator = static_cast<KlEstimator>(random.below(3));
    call.low = random.chance(0.8) ? 0.2 : 1.0;
    call.high = random.chance(0.8) ? 0.28 : 3.0;
    call.dual = random.chance(0.5) ? 3.0 : kInfinity;
    call.kl_coef = 0.3;
    call.entropy_coef = 0.7;
    return made;
}

struct Token {
    double dlogprob = 0, dentropy = 0, tolerance = 0;
    bool at_bound = false;  // so near that rounding decides the branch
};

struct Truth {
    std::vector<Token> tokens;
    double loss = 0, loss_size = 0;
    double statistics[6] = {}, statistic_sizes[6] = {};
    int64_t at_bounds = 0;
};

struct Branch {
    double value, slope;  // L, and its derivative by the token's own log-prob
    bool limited;
};

Branch objective(const PolicyLoss& call, double ratio, double slope, double logprob, double advantage) {
    switch (call.objective) {
        case Objective::clip: {
            Branch out{-ratio * advantage, -slope * advantage, false};
            if (advantage > 0 && ratio > 1 + call.high) out = {-(1 + call.high) * advantage, 0, true};
            if (advantage < 0 && ratio < 1 - call.low) out = {-(1 - call.low) * advantage, 0, true};
            if (advantage < 0 && ratio > call.dual) out = {-call.dual * advantage, 0, true};
            return out;
        }
        case Objective::cispo: {
            const double weight = std::min(ratio, 1 + call.high);
            return {-weight * advantage * logprob, -weight * advantage, advantage != 0 && ratio > 1 + call.high};
        }
        case Objective::sao: {
            const bool inside = ratio > 1 - call.low && ratio < 1 + call.high;
            const double weight = inside ? ratio : 0;
            return {-weight * advantage * logprob, -weight * advantage, advantage != 0 && !inside};
        }
        default:
            return {-advantage * logprob, -advantage, false};
    }
}

// Mean log-ratio of each token's unit over active tokens; its own at level token.
std::vector<double> log_ratios(const Case& input) {
    const PackedTokens& packed = input.packed;
    const auto tokens = static_cast<size_t>(packed.num_tokens());
    const bool segments = input.call.level == Level::segment;
    std::vector<double> out(tokens), sum(static_cast<size_t>(std::max(packed.num_segments(), packed.num_trajectories)));
    std::vector<double> count(sum.size());
    const auto unit = [&](size_t t) {
        return static_cast<size_t>(segments ? packed.segment[t] : packed.trajectory[t]);
    };
    for (size_t t = 0; t < tokens; ++t) {
        const auto token = static_cast<int64_t>(t);
        if (!packed.mask[token]) continue;
        out[t] = static_cast<double>(input.logprob[token]) - input.old_logprob[token];
        sum[unit(t)] += out[t];
        ++count[unit(t)];
    }
    if (input.call.level != Level::token)
        for (size_t t = 0; t < tokens; ++t) out[t] = sum[unit(t)] / std::max(count[unit(t)], 1.0);
    return out;
}

Truth truth(const Case& input) {
    const PolicyLoss& call = input.call;
    const PackedTokens& packed = input.packed;
    const std::vector<double> differences = log_ratios(input);
    Truth out;
    out.tokens.resize(differences.size());
    const double default_share = packed.num_active ? 1.0 : 0.0;
    std::vector<double> weight_of(static_cast<size_t>(packed.num_trajectories), -1);
    for (int64_t t = 0; t < packed.num_tokens(); ++t) {
        if (!packed.mask[t]) continue;
        Token& token = out.tokens[static_cast<size_t>(t)];
        double& known = weight_of[static_cast<size_t>(packed.trajectory[static_cast<size_t>(t)])];
        if (known < 0) known = default_share * packed.default_weight(t);
        const double weight = call.token_weight ? call.token_weight[t] : known;
        const double difference = differences[static_cast<size_t>(t)];
        const double log_ratio = std::min(20.0, std::max(-20.0, difference)), ratio = std::exp(log_ratio);
        const bool clamped = call.level == Level::token && log_ratio != difference;
        const double logprob = input.logprob[t], advantage = input.advantage[t];
        const Branch branch = objective(call, ratio, clamped ? 0 : ratio, logprob, advantage);
        const double importance = call.importance_weight ? call.importance_weight[t] : 1.0;

        double kl = 0, kl_slope = 0;
        if (call.ref_logprob) {
            const double k1 = logprob - call.ref_logprob[t];
            kl = call.estimator == KlEstimator::k1   ? k1
                 : call.estimator == KlEstimator::k2 ? k1 * k1 / 2
                                                     : std::expm1(-k1) + k1;
            kl_slope = call.estimator == KlEstimator::k1   ? 1
                       : call.estimator == KlEstimator::k2 ? k1
                                                           : -std::expm1(-k1);
        }
        const double entropy = call.entropy ? call.entropy[t] : 0.0;
        const double policy = importance * branch.value, penalty = call.kl_coef * kl,
                     bonus = call.entropy_coef * entropy;
        out.loss += weight * (policy + penalty - bonus);
        out.loss_size += weight * (std::fabs(policy) + std::fabs(penalty) + 3 * call.kl_coef + std::fabs(bonus));
        token.dlogprob = weight * (importance * branch.slope + call.kl_coef * kl_slope);
        token.dentropy = call.entropy ? -weight * call.entropy_coef : 0;
        token.tolerance =
            4e-6 * weight * (std::fabs(importance * branch.slope) + call.kl_coef * (3 + std::fabs(kl_slope)));
        for (const double bound : {1 - call.low, 1 + call.high, call.dual})
            token.at_bound |= std::fabs(ratio - bound) < 1e-5 * bound;
        out.at_bounds += token.at_bound;

        const double statistics[] = {
            branch.limited ? 1.0 : 0.0, std::expm1(log_ratio) - log_ratio, ratio, 0, kl, entropy};
        const double sizes[] = {1, ratio + std::fabs(log_ratio) + 1, ratio, 0, std::fabs(kl) + 3, entropy};
        for (int i = 0; i < 6; ++i) {
            out.statistics[i] += statistics[i] / static_cast<double>(packed.num_active);
            out.statistic_sizes[i] += sizes[i] / static_cast<double>(packed.num_active);
        }
        out.statistics[3] = std::max(out.statistics[3], ratio);
    }
    out.statistic_sizes[3] = out.statistics[3];
    return out;
}

struct Results {
    Array<float> loss, statistics, dlogprob, dentropy;
    Array<int64_t> counts;
};

Results run(const Case& input, int64_t threads, bool dlogprob, bool dentropy) {
    const int64_t tokens = input.packed.num_tokens();
    Results out{Array<float>(1, kNaN), Array<float>(6, kNaN), Array<float>(dlogprob ? tokens : 0, kNaN),
                Array<float>(dentropy ? tokens : 0, kNaN), Array<int64_t>(2, -1)};
    PolicyLoss call = input.call;
    call.threads = threads;
    call.loss = out.loss.begin();
    call.statistics = out.statistics.begin();
    call.counts = out.counts.begin();
    call.dlogprob = dlogprob ? out.dlogprob.begin() : nullptr;
    call.dentropy = dentropy ? out.dentropy.begin() : nullptr;
    policy_loss(call);
    return out;
}

void check_run(const Case& input, const Truth& expected) {
    const bool entropy = input.call.entropy;
    const Results out = run(input, 1, true, entropy);
    for (const int64_t threads : {2, 4}) {
        const Results other = run(input, threads, true, entropy);
        CHECK(same_bits(out.loss, other.loss) && same_bits(out.statistics, other.statistics) &&
                  same_bits(out.dlogprob, other.dlogprob) && same_bits(out.dentropy, other.dentropy),
              "threads %lld", as_printed(threads));
    }
    const Results plain = run(input, 2, false, false);
    CHECK(same_bits(out.loss, plain.loss) && same_bits(out.statistics, plain.statistics) &&
              same_bits(out.counts, plain.counts),
          "without gradients: %.9g and %.9g", out.loss[0], plain.loss[0]);

    CHECK(close(out.loss[0], expected.loss, 4e-6 * expected.loss_size), "%.9g, truth %.9g", out.loss[0], expected.loss);
    const double share_at_bounds =
        static_cast<double>(expected.at_bounds) / static_cast<double>(std::max<int64_t>(1, input.packed.num_active));
    for (int i = 0; i < 6; ++i)
        CHECK(close(out.statistics[i], expected.statistics[i],
                    6e-6 * expected.statistic_sizes[i] + (i == 0 ? share_at_bounds : 0)),
              "statistic %d: %.9g, truth %.9g", i, out.statistics[i], expected.statistics[i]);
    CHECK(out.counts[0] == input.packed.num_active && out.counts[1] == 0, "%lld, %lld", as_printed(out.counts[0]),
          as_printed(out.counts[1]));
    for (int64_t t = 0; t < input.packed.num_tokens(); ++t) {
        const Token& token = expected.tokens[static_cast<size_t>(t)];
        CHECK(token.at_bound || close(out.dlogprob[t], token.dlogprob, token.tolerance),
              "dlogprob[%lld]: %.9g, truth %.9g", as_printed(t), out.dlogprob[t], token.dlogprob);
        if (entropy)
            CHECK(close(out.dentropy[t], token.dentropy, 1e-6 * std::fabs(token.dentropy)),
                  "dentropy[%lld]: %.9g, truth %.9g", as_printed(t), out.dentropy[t], token.dentropy);
    }
}

void check_case(const Case& input) {
    const Truth expected = truth(input);
    with_every_instruction_set([&] { check_run(input, expected); });
}

struct Kind {
    Objective objective;
    Level level;
};

constexpr Kind kKinds[] = {{Objective::clip, Level::token},      {Objective::clip, Level::segment},
                           {Objective::clip, Level::trajectory}, {Objective::cispo, Level::token},
                           {Objective::sao, Level::token},       {Objective::reinforce, Level::token}};

void test_layouts() {
    Random random(17);
    for (const auto& lengths : small_layouts())
        for (const Kind& kind : kKinds)
            for (const double active : {0.0, 0.2, 0.8, 1.0})
                for (int round = 0; round < 4; ++round)
                    check_case(make_case(random, lengths, active, kind.objective, kind.level));
    for (const auto& lengths : large_layouts())
        for (const Kind& kind : kKinds) check_case(make_case(random, lengths, 0.7, kind.objective, kind.level));
}

// One number of one active token that is not finite: a loss and a gradient of NaN, one token counted.
void test_nonfinite() {
    Random random(19);
    for (int round = 0; round < 60; ++round) {
        const Case input = make_case(random, {20, 7, 300}, 0.9, kKinds[3 + round % 3].objective, Level::token);
        int64_t token = random.below(input.packed.num_tokens());
        while (!input.packed.mask[token]) token = random.below(input.packed.num_tokens());
        const Truth expected = truth(input);
        std::vector<const Array<float>*> used{&input.logprob, &input.old_logprob, &input.advantage};
        if (input.call.token_weight) used.push_back(&input.token_weight);
        if (input.call.importance_weight) used.push_back(&input.importance_weight);
        if (input.call.ref_logprob) used.push_back(&input.ref_logprob);
        if (input.call.entropy) used.push_back(&input.entropy);
        const int64_t which = random.below(static_cast<int64_t>(used.size()));
        const float values[] = {kNaN, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
        (*used[static_cast<size_t>(which)])[token] = values[round % 3];
        with_every_instruction_set([&] {
            const Results out = run(input, 1, true, input.call.entropy);
            CHECK(std::isnan(out.loss[0]) && out.counts[1] == 1, "input %lld: %g, %lld", as_printed(which), out.loss[0],
                  as_printed(out.counts[1]));
            for (int64_t t = 0; t < input.packed.num_tokens(); ++t) {
                const Token& one = expected.tokens[static_cast<size_t>(t)];
                const double dlogprob = t == token ? kNaN : one.dlogprob;
                CHECK(one.at_bound || close(out.dlogprob[t], dlogprob, one.tolerance),
                      "input %lld, dlogprob[%lld]: %g, truth %g", as_printed(which), as_printed(t), out.dlogprob[t],
                      dlogprob);
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

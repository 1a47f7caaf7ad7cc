// segment_gae in every instruction set, against the recursion spelt out in double.
#include <limits>
#include <vector>

#include "check.h"
#include "segment_gae.h"

namespace mosaic::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
    Array<float> reward, value;
    Array<uint8_t> mask;
    Array<int32_t> cu_seqlens;
    Array<int64_t> segment_trajectory;
    Array<double> lam, lam_critic;
    Array<double> bootstrap_value;
    int64_t num_trajectories;
};

// Random segments; in `chain` cases the two lambdas are equal inside a trajectory. Masked values are NaN: never read.
Case make_case(Random& random, const std::vector<int64_t>& lengths, int64_t num_trajectories, double active, bool chain,
               bool orphans) {
    const auto num_segments = static_cast<int64_t>(lengths.size());
    Array<int32_t> cu_seqlens(num_segments + 1);
    for (int64_t s = 0; s < num_segments; ++s)
        cu_seqlens[s + 1] = cu_seqlens[s] + static_cast<int32_t>(lengths[static_cast<size_t>(s)]);
    const int64_t tokens = cu_seqlens[num_segments];
    Case made{Array<float>(tokens),        Array<float>(tokens),         Array<uint8_t>(tokens),
              std::move(cu_seqlens),       Array<int64_t>(num_segments), Array<double>(num_segments),
              Array<double>(num_segments), Array<double>(num_segments),  num_trajectories};
    Array<double> lam(num_trajectories), lam_critic(num_trajectories);
    for (double& x : lam) x = random.uniform(0.5f, 1);
    for (double& x : lam_critic) x = random.uniform(0.5f, 1);
    for (int64_t s = 0; s < num_segments; ++s) {
        const int64_t trajectory = made.segment_trajectory[s] = random.below(num_trajectories);
        made.lam[s] = chain ? lam[trajectory] : random.uniform(0, 1);
        made.lam_critic[s] = chain ? lam_critic[trajectory] : random.uniform(0, 1);
        made.bootstrap_value[s] = random.uniform(-1, 1);
        bool any = false;
        const int64_t begin = made.cu_seqlens[s], end = made.cu_seqlens[s + 1];
        for (int64_t t = begin; t < end; ++t) any |= (made.mask[t] = random.chance(active));
        for (int64_t t = begin; t < end; ++t) {
            made.value[t] = made.mask[t] ? random.uniform(-1, 1) : kNaN;
            made.reward[t] = (any || chain || orphans) && random.chance(0.5) ? random.uniform(-1, 1) : 0;
        }
    }
    return made;
}

struct Truth {
    std::vector<double> advantage, returns;
    int64_t orphan = -1;
};

// One unit of the recursion: a segment, or for chain all tokens of a trajectory in order.
void recursion(const Case& input, const std::vector<int64_t>& tokens, const std::vector<double>& paid,
               const std::vector<int64_t>& segment, double gamma, const Array<double>& lam, double bootstrap,
               std::vector<double>& out) {
    double next_value = bootstrap, carry = 0;
    for (auto token = tokens.rbegin(); token != tokens.rend(); ++token) {
        const auto t = static_cast<size_t>(*token);
        if (!input.mask[*token]) continue;
        carry = paid[t] + gamma * next_value - input.value[*token] + gamma * lam[segment[t]] * carry;
        next_value = input.value[*token];
        out[t] = carry;
    }
}

Truth truth(const Case& input, double gamma, Correction correction, bool corrected_returns, bool critic,
            bool bootstrap) {
    const int64_t num_segments = input.segment_trajectory.size(), num_tokens = input.reward.size();
    const bool chain = correction == Correction::chain;
    const Array<double>& lam_critic = critic ? input.lam_critic : input.lam;
    const int64_t num_units = chain ? input.num_trajectories : num_segments;
    std::vector<std::vector<int64_t>> units(static_cast<size_t>(num_units));
    std::vector<int64_t> segment(static_cast<size_t>(num_tokens));
    for (int64_t s = 0; s < num_segments; ++s)
        for (int64_t t = input.cu_seqlens[s]; t < input.cu_seqlens[s + 1]; ++t) {
            segment[static_cast<size_t>(t)] = s;
            units[static_cast<size_t>(chain ? input.segment_trajectory[s] : s)].push_back(t);
        }

    Truth out{std::vector<double>(static_cast<size_t>(num_tokens)),
              std::vector<double>(static_cast<size_t>(num_tokens))};
    std::vector<double> paid(static_cast<size_t>(num_tokens)), local_critic(static_cast<size_t>(num_tokens));
    std::vector<int64_t> first(static_cast<size_t>(num_segments), -1), active(static_cast<size_t>(num_segments), 0);
    for (int64_t t = 0; t < num_tokens; ++t) {
        if (!input.mask[t]) continue;
        const auto s = static_cast<size_t>(segment[static_cast<size_t>(t)]);
        if (first[s] < 0) first[s] = t;
        ++active[s];
    }
    for (const std::vector<int64_t>& tokens : units) {
        int64_t unit_first = -1, last = -1, last_active = -1;
        for (const int64_t t : tokens) {
            if (!input.mask[t]) continue;
            if (unit_first < 0) unit_first = t;
            last_active = t;
        }
        // A reward counts at the last active token so far of its segment, else at the segment's first; in a segment
        // without any: at the last one so far of the unit, else the unit's first.
        for (const int64_t t : tokens) {
            const auto s = static_cast<size_t>(segment[static_cast<size_t>(t)]);
            if (input.mask[t]) last = t;
            int64_t target = last;
            if (first[s] >= 0 && t < first[s]) target = first[s];
            if (target < 0) target = unit_first;
            if (target >= 0)
                paid[static_cast<size_t>(target)] += input.reward[t];
            else if (!chain && input.reward[t] != 0 && out.orphan < 0)
                out.orphan = segment[static_cast<size_t>(t)];
        }
        if (last_active < 0) continue;
        const double start = bootstrap ? input.bootstrap_value[segment[static_cast<size_t>(last_active)]] : 0.0;
        recursion(input, tokens, paid, segment, gamma, input.lam, start, out.advantage);
        recursion(input, tokens, paid, segment, gamma, lam_critic, start, local_critic);
    }
    std::vector<int64_t> seen(static_cast<size_t>(input.num_trajectories));
    for (int64_t s = num_segments - 1; s >= 0; --s) {
        int64_t& of_trajectory = seen[static_cast<size_t>(input.segment_trajectory[s])];
        const auto after = static_cast<double>(of_trajectory);
        of_trajectory += active[static_cast<size_t>(s)];
        const bool position = correction == Correction::position;
        const double scale = position ? std::pow(gamma * input.lam[s], after) : 1;
        const double critic_scale = position && corrected_returns ? std::pow(gamma * lam_critic[s], after) : 1;
        for (int64_t token = input.cu_seqlens[s]; token < input.cu_seqlens[s + 1]; ++token) {
            const auto t = static_cast<size_t>(token);
            if (!input.mask[token]) continue;
            out.returns[t] = critic_scale * local_critic[t] + input.value[token];
            out.advantage[t] *= scale;
        }
    }
    return out;
}

// One call with 1, 2 and 4 threads: the same bits, and those of the first near the truth.
void check_call(const Case& input, const SegmentGae& base, const Truth& expected) {
    const int64_t tokens = input.reward.size();
    Array<float> advantage(tokens), returns(tokens), first_advantage(tokens), first_returns(tokens);
    for (const int64_t threads : {1, 2, 4}) {
        std::fill(advantage.begin(), advantage.end(), kNaN);
        std::fill(returns.begin(), returns.end(), kNaN);
        SegmentGae call = base;
        call.threads = threads;
        call.advantage = advantage.begin();
        call.returns = returns.begin();
        const int64_t orphan = segment_gae(call);
        CHECK(orphan == expected.orphan, "%lld, truth %lld", as_printed(orphan), as_printed(expected.orphan));
        if (orphan >= 0) continue;
        if (threads == 1) {
            std::copy(advantage.begin(), advantage.end(), first_advantage.begin());
            std::copy(returns.begin(), returns.end(), first_returns.begin());
        }
        CHECK(same_bits(advantage, first_advantage) && same_bits(returns, first_returns), "threads %lld",
              as_printed(threads));
    }
    if (expected.orphan >= 0) return;
    for (int64_t t = 0; t < tokens; ++t) {
        const double a = expected.advantage[static_cast<size_t>(t)], r = expected.returns[static_cast<size_t>(t)];
        const double relative = input.mask[t] ? 2e-7 : 0;
        CHECK(close(first_advantage[t], a, relative * (1 + std::fabs(a))), "advantage[%lld] of %lld: %.9g, truth %.9g",
              as_printed(t), as_printed(tokens), first_advantage[t], a);
        CHECK(close(first_returns[t], r, relative * (1 + std::fabs(r))), "returns[%lld] of %lld: %.9g, truth %.9g",
              as_printed(t), as_printed(tokens), first_returns[t], r);
    }
}

void check_case(const Case& input, double gamma, Correction correction, bool corrected_returns, bool critic,
                bool bootstrap) {
    const Truth expected = truth(input, gamma, correction, corrected_returns, critic, bootstrap);
    SegmentGae call{};
    call.reward = input.reward.begin();
    call.value = input.value.begin();
    call.mask = input.mask.begin();
    call.cu_seqlens = input.cu_seqlens.begin();
    call.segment_trajectory = input.segment_trajectory.begin();
    call.lam = input.lam.begin();
    call.lam_critic = critic ? input.lam_critic.begin() : nullptr;
    call.bootstrap_value = bootstrap ? input.bootstrap_value.begin() : nullptr;
    call.num_segments = input.segment_trajectory.size();
    call.num_trajectories = input.num_trajectories;
    call.gamma = gamma;
    call.correction = correction;
    call.corrected_returns = corrected_returns;
    with_every_instruction_set([&] { check_call(input, call, expected); });
}

void test_layouts() {
    std::vector<std::vector<int64_t>> layouts{{}, {0}, {1}, {0, 0, 0}, {2, 0, 1}, {3, 5, 0, 8, 1, 7, 4}};
    for (const int64_t length : {15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1023, 1025})
        layouts.push_back({length, 1, length});
    layouts.emplace_back(3000, 0);
    layouts.back()[1500] = 5;
    Random random(7);
    for (const auto& lengths : layouts)
        for (const Correction correction : {Correction::none, Correction::position, Correction::chain})
            for (const double active : {0.0, 0.1, 0.7, 1.0})
                for (int options = 0; options < 8; ++options) {
                    const int64_t trajectories = 1 + random.below(static_cast<int64_t>(lengths.size()) % 100 + 1);
                    const Case input =
                        make_case(random, lengths, trajectories, active, correction == Correction::chain, false);
                    check_case(input, options & 1 ? 0.97 : 1.0, correction, options & 1, options & 2, options & 4);
                }
}

// Large enough for several threads: few long segments, and many short ones.
void test_large() {
    Random random(11);
    std::vector<int64_t> many;
    for (int64_t tokens = 0; tokens < 200000; tokens += many.back()) many.push_back(random.below(1500));
    for (const auto& lengths : {std::vector<int64_t>{150001}, std::vector<int64_t>{3, 99999, 0, 100001}, many})
        for (const Correction correction : {Correction::none, Correction::position, Correction::chain})
            for (const double active : {0.6, 1.0}) {
                const Case input = make_case(random, lengths, 3, active, correction == Correction::chain, false);
                check_case(input, 0.999, correction, true, true, true);
            }
}

// The lowest segment that holds a reward without an active token is reported, whichever thread finds one first.
void test_orphans() {
    Random random(13);
    for (int round = 0; round < 20; ++round) {
        const Case small = make_case(random, {2, 0, 3, 1, 1, 2, 4}, 3, 0.3, false, true);
        check_case(small, 1.0, Correction::none, false, false, false);
        check_case(small, 1.0, Correction::position, false, false, false);
    }
    const Case large = make_case(random, std::vector<int64_t>(40000, 3), 2, 0.9, false, true);
    check_case(large, 1.0, Correction::none, false, false, false);
}

}  // namespace
}  // namespace mosaic::test

int main() {
    using namespace mosaic::test;
    test_layouts();
    test_large();
    test_orphans();
    return finish();
}

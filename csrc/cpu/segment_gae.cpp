#include "segment_gae.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "common.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// A thread gets at least this many tokens: their recursion takes about as long as starting the thread.
constexpr int64_t kGrain = 32768;

// What the recursion hands from a token to the one before it, in float64: a segment of 100,000 tokens then costs no
// accuracy beyond the rounding of its results.
struct Carry {
    double next_value;
    double advantage = 0;
    double critic = 0;
    double reward = 0;  // of masked tokens passed since the last active one
};

int64_t first_active(const SegmentGae& call, int64_t segment) {
    int64_t token = call.cu_seqlens[segment];
    while (token < call.cu_seqlens[segment + 1] && !call.mask[token]) ++token;
    return token;
}

int64_t count_active(const SegmentGae& call, int64_t segment) {
    int64_t count = 0;
    for (int64_t token = call.cu_seqlens[segment]; token < call.cu_seqlens[segment + 1]; ++token)
        count += call.mask[token];
    return count;
}

// Zeroes the outputs of masked tokens [begin, end) and returns the sum of their rewards.
double pass_masked(const SegmentGae& call, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t token = begin; token < end; ++token) {
        sum += call.reward[token];
        call.advantage[token] = call.returns[token] = 0;
    }
    return sum;
}

bool any_reward(const SegmentGae& call, int64_t segment) {
    return std::any_of(call.reward + call.cu_seqlens[segment], call.reward + call.cu_seqlens[segment + 1],
                       [](float reward) { return reward != 0; });
}

double bootstrap(const SegmentGae& call, int64_t segment) {
    return call.bootstrap_value ? call.bootstrap_value[segment] : 0.0;
}

// Runs the recursion from the last token of a segment to `first`, its first active one. `leading` is the reward of
// masked tokens before `first`; the results are multiplied by `scale` and `critic_scale` as they are stored.
void walk(const SegmentGae& call, int64_t segment, int64_t first, double leading, double scale, double critic_scale,
          Carry& carry) {
    const double decay = call.gamma * call.lam[segment];
    const double critic_decay = call.lam_critic ? call.gamma * call.lam_critic[segment] : decay;
    for (int64_t token = call.cu_seqlens[segment + 1] - 1; token >= first; --token) {
        if (!call.mask[token]) {
            carry.reward += call.reward[token];
            call.advantage[token] = call.returns[token] = 0;
            continue;
        }
        const double value = call.value[token];
        double reward = call.reward[token] + carry.reward;
        if (token == first) reward += leading;
        const double delta = reward + call.gamma * carry.next_value - value;
        carry.advantage = delta + decay * carry.advantage;
        carry.critic = delta + critic_decay * carry.critic;
        carry.next_value = value;
        carry.reward = 0;
        call.advantage[token] = static_cast<float>(scale * carry.advantage);
        call.returns[token] = static_cast<float>(critic_scale * carry.critic + value);
    }
}

// Active tokens after each segment in its trajectory: [S].
std::vector<int64_t> active_after(const SegmentGae& call, int64_t threads) {
    std::vector<int64_t> after(call.num_segments), seen(call.num_trajectories, 0);
    parallel_for(call.num_segments, threads, [&](int64_t segment) { after[segment] = count_active(call, segment); });
    for (int64_t segment = call.num_segments - 1; segment >= 0; --segment) {
        int64_t& total = seen[call.segment_trajectory[segment]];
        const int64_t own = after[segment];
        after[segment] = total;
        total += own;
    }
    return after;
}

int64_t each_segment_alone(const SegmentGae& call, int64_t threads) {
    const bool position = call.correction == Correction::position;
    const std::vector<int64_t> after = position ? active_after(call, threads) : std::vector<int64_t>();
    std::atomic<int64_t> orphan{call.num_segments};
    parallel_for(call.num_segments, threads, [&](int64_t segment) {
        const int64_t first = first_active(call, segment);
        const double leading = pass_masked(call, call.cu_seqlens[segment], first);
        if (first == call.cu_seqlens[segment + 1]) {
            if (!any_reward(call, segment)) return;
            int64_t lowest = orphan.load();
            while (segment < lowest && !orphan.compare_exchange_weak(lowest, segment)) continue;
            return;
        }
        double scale = 1, critic_scale = 1;
        if (position) {
            const double exponent = static_cast<double>(after[segment]);
            scale = std::pow(call.gamma * call.lam[segment], exponent);
            if (call.corrected_returns)
                critic_scale = call.lam_critic ? std::pow(call.gamma * call.lam_critic[segment], exponent) : scale;
        }
        Carry carry{bootstrap(call, segment)};
        walk(call, segment, first, leading, scale, critic_scale, carry);
    });
    return orphan == call.num_segments ? -1 : orphan.load();
}

// One trajectory, its segments (in time order) linked into a single recursion. A segment without active tokens passes
// its reward on to the active segment before it; the leading ones give theirs to the first active segment.
void one_chain(const SegmentGae& call, const int64_t* segments, int64_t count) {
    int64_t start = 0;
    double leading = 0;
    for (; start < count; ++start) {
        const int64_t begin = call.cu_seqlens[segments[start]], end = call.cu_seqlens[segments[start] + 1];
        if (first_active(call, segments[start]) < end) break;
        leading += pass_masked(call, begin, end);
    }
    Carry carry{};
    bool started = false;
    for (int64_t index = count - 1; index >= start; --index) {
        const int64_t segment = segments[index];
        const int64_t first = first_active(call, segment);
        const double own_leading = pass_masked(call, call.cu_seqlens[segment], first);
        if (first == call.cu_seqlens[segment + 1]) {
            carry.reward += own_leading;
            continue;
        }
        if (!started) carry.next_value = bootstrap(call, segment);
        started = true;
        walk(call, segment, first, own_leading + (index == start ? leading : 0.0), 1, 1, carry);
    }
}

void chains(const SegmentGae& call, int64_t threads) {
    // Counting sort: the segments of each trajectory, in their order.
    std::vector<int64_t> begin(call.num_trajectories + 1, 0), sorted(call.num_segments);
    for (int64_t segment = 0; segment < call.num_segments; ++segment) ++begin[call.segment_trajectory[segment] + 1];
    for (int64_t trajectory = 0; trajectory < call.num_trajectories; ++trajectory)
        begin[trajectory + 1] += begin[trajectory];
    std::vector<int64_t> fill(begin.begin(), begin.end() - 1);
    for (int64_t segment = 0; segment < call.num_segments; ++segment)
        sorted[fill[call.segment_trajectory[segment]]++] = segment;
    parallel_for(call.num_trajectories, threads, [&](int64_t trajectory) {
        one_chain(call, sorted.data() + begin[trajectory], begin[trajectory + 1] - begin[trajectory]);
    });
}

}  // namespace

int64_t segment_gae(const SegmentGae& call) {
    const int64_t threads = useful_threads(call.threads, call.cu_seqlens[call.num_segments], kGrain);
    if (call.correction != Correction::chain) return each_segment_alone(call, threads);
    chains(call, threads);
    return -1;
}

}  // namespace mosaic::MOSAIC_ISA

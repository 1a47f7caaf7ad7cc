#include "rollout_correction.h"

#include "cpu/packed.h"

namespace mosaic::MOSAIC_ISA {
namespace {

enum Input { kLogprob, kRolloutLogprob, kLogRatio, kInputs };
using Tokens = Columns<kInputs, 1>;

struct Difference {
    Float value;  // logprob - rollout_logprob, 0 where masked, NaN where either is not finite
    Float poison;
};

MOSAIC_INLINE Difference difference_of(const Tokens& tokens, int64_t i, Int mask) {
    const Float logprob = load_active(tokens.in[kLogprob] + i, mask);
    const Float rollout = load_active(tokens.in[kRolloutLogprob] + i, mask);
    const Float poison = add_poison(add_poison(Float{}, logprob), rollout);
    return {logprob - rollout + poison, poison};
}

// Their sum, all in float64: what an exponential is taken of may be what large differences of either sign leave.
struct DifferenceStep {
    Sum difference;
    Int active{};

    MOSAIC_INLINE void operator()(const Tokens& tokens, int64_t count) {
        for (int64_t i = 0; i < count; i += kLanes) {
            const Int mask = load_mask(tokens.mask + i);
            active -= mask;
            difference.add_block(difference_of(tokens, i, mask).value);
        }
    }
};

struct Partial {
    double ratio, distance, kl;
    float largest, farthest;
    int64_t capped, dropped, active, nonfinite;
};

struct WeightStep {
    Float cap, floor;
    Int drops;
    Sum ratio, distance, kl;
    Float largest{}, farthest{};
    Int capped{}, dropped{}, active{}, nonfinite{};

    explicit WeightStep(const RolloutCorrection& call)
        : cap(broadcast(static_cast<float>(call.cap))),
          floor(broadcast(static_cast<float>(call.floor))),
          drops(Int{} - (call.floor >= 0 ? 1 : 0)) {}

    // Two short loops, for one chain from the inputs to the metrics is longer than the machine can look ahead.
    MOSAIC_INLINE void operator()(const Tokens& tokens, int64_t count) {
        alignas(64) float log_ratio[kBlock];
        Float distances{}, kls{};
        for (int64_t i = 0; i < count; i += kLanes) {
            const Int mask = load_mask(tokens.mask + i);
            const Difference own = difference_of(tokens, i, mask);
            tokens.prefetch(i);
            store(log_ratio + i, tokens.in[kLogRatio] ? load_active(tokens.in[kLogRatio] + i, mask) : own.value);
            const Float apart = absolute(own.value);
            distances += apart;
            kls -= own.value;
            farthest = max(apart, farthest);
            active -= mask;
            nonfinite -= own.poison != own.poison;
        }
        Float ratios{};
        for (int64_t i = 0; i < count; i += kLanes) {
            const Int mask = load_mask(tokens.mask + i);
            const ScaledExp e =
                scaled_exp(max(broadcast(-kMaxLogRatio), min(broadcast(kMaxLogRatio), load(log_ratio + i))));
            const Float r = fma(e.p, e.scale, e.scale);
            const Int above = r > cap, keep = mask & ~(drops & (above | (r < floor)));
            store(tokens.out[0] + i, select(keep, min(cap, r), Float{}));
            store_mask(tokens.flag + i, keep);
            const Float counted = select(mask, r, Float{});
            ratios += counted;
            largest = max(counted, largest);
            capped -= above & keep;
            dropped -= mask & ~keep;
        }
        ratio.add_block(ratios);
        distance.add_block(distances);
        kl.add_block(kls);
    }

    Partial partial() const {
        return {ratio.value(),         distance.value(),       kl.value(),
                largest_lane(largest), largest_lane(farthest), count_lanes(capped),
                count_lanes(dropped),  count_lanes(active),    count_lanes(nonfinite)};
    }
};

Tokens tokens_of(const RolloutCorrection& call) {
    return {{call.logprob, call.rollout_logprob, nullptr}, call.mask, {call.weight}, call.keep};
}

// log r of each segment's tokens: the sum over its unit.
void unit_log_ratios(const RolloutCorrection& call, int64_t threads, float* log_ratio) {
    const Buffer memory(call.num_segments * sizeof(UnitSum));
    UnitSum* sums = memory.as<UnitSum>();
    const Tokens tokens = tokens_of(call);
    sum_segments(
        call.cu_seqlens, call.num_segments, threads,
        [&](int64_t begin, int64_t end) {
            DifferenceStep step;
            walk(tokens, begin, end, [](Tokens&, int64_t, int64_t) {}, step);
            return UnitSum{step.difference.value(), count_lanes(step.active)};
        },
        sums);
    if (call.level == Level::trajectory)
        sum_trajectories(call.segment_trajectory, call.num_segments, call.num_trajectories, sums, sums);
    for (int64_t segment = 0; segment < call.num_segments; ++segment)
        log_ratio[segment] = static_cast<float>(sums[segment].sum);
}

// `log_ratios`: of each segment's tokens, or null: every token has its own.
Partial one_chunk(const RolloutCorrection& call, const float* log_ratios, int64_t begin, int64_t end) {
    alignas(64) float log_ratio[kBlock];
    Spread spread(call.cu_seqlens, call.num_segments, log_ratios, begin);
    WeightStep step(call);
    const auto fill = [&](Tokens& block, int64_t token, int64_t count) {
        if (!log_ratios) return;
        spread.write(token, count, log_ratio);
        block.in[kLogRatio] = log_ratio;
    };
    walk(tokens_of(call), begin, end, fill, step);
    return step.partial();
}

void combine(const RolloutCorrection& call, const Partial* partials, int64_t count) {
    Partial all{};
    for (int64_t chunk = 0; chunk < count; ++chunk) {
        const Partial& one = partials[chunk];
        all.ratio += one.ratio;
        all.distance += one.distance;
        all.kl += one.kl;
        all.largest = one.largest > all.largest ? one.largest : all.largest;
        all.farthest = one.farthest > all.farthest ? one.farthest : all.farthest;
        all.capped += one.capped;
        all.dropped += one.dropped;
        all.active += one.active;
        all.nonfinite += one.nonfinite;
    }
    const double size = static_cast<double>(all.active > 0 ? all.active : 1);
    // Comparisons pass over NaN; the sums are NaN if one of their terms is.
    const double nan_ratio = all.ratio - all.ratio, nan_distance = all.distance != all.distance ? all.distance : 0;
    call.statistics[0] = static_cast<float>(all.ratio / size);
    call.statistics[1] = static_cast<float>(all.largest + nan_ratio);
    call.statistics[2] = static_cast<float>(static_cast<double>(all.capped) / size);
    call.statistics[3] = static_cast<float>(static_cast<double>(all.dropped) / size);
    call.statistics[4] = static_cast<float>(all.distance / size);
    call.statistics[5] = static_cast<float>(all.farthest + nan_distance);
    call.statistics[6] = static_cast<float>(all.kl / size);
    call.counts[0] = all.active;
    call.counts[1] = all.nonfinite;
}

}  // namespace

void rollout_correction(const RolloutCorrection& call) {
    const int64_t size = call.cu_seqlens[call.num_segments], chunks = chunks_of(size);
    const int64_t threads = useful_threads(call.threads, size, kGrain);
    const bool by_unit = call.level != Level::token;
    const Buffer partial_memory(chunks * sizeof(Partial));
    const Buffer log_ratio_memory(by_unit ? call.num_segments * sizeof(float) : 0);
    if (by_unit) unit_log_ratios(call, threads, log_ratio_memory.as<float>());
    const float* log_ratios = by_unit ? log_ratio_memory.as<float>() : nullptr;
    Partial* partials = partial_memory.as<Partial>();
    parallel_for(chunks, threads, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        partials[chunk] = one_chunk(call, log_ratios, begin, smaller(begin + kChunk, size));
    });
    combine(call, partials, chunks);
}

}  // namespace mosaic::MOSAIC_ISA

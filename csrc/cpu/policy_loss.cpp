#include "policy_loss.h"

#include "cpu/packed.h"

namespace mosaic::MOSAIC_ISA {
namespace {

enum Input { kLogprob, kOldLogprob, kAdvantage, kWeight, kImportance, kRefLogprob, kEntropy, kLogRatio, kInputs };
enum Output { kDlogprob, kDentropy, kOutputs };
using Tokens = Columns<kInputs, kOutputs>;

Tokens tokens_of(const PolicyLoss& call) {
    return {{call.logprob, call.old_logprob, call.advantage, call.token_weight, call.importance_weight,
             call.ref_logprob, call.entropy, nullptr},
            call.mask,
            {call.dlogprob, call.dentropy},
            nullptr};
}

MOSAIC_INLINE Float clamped(Float x) {  // lets NaN through
    return max(broadcast(-kMaxLogRatio), min(broadcast(kMaxLogRatio), x));
}

// 0, or NaN if any input of the token is not finite.
MOSAIC_INLINE Float poison_of(const Tokens& tokens, int64_t i, Int active) {
    Float poison{};
#pragma GCC unroll 8
    for (int k = 0; k < kLogRatio; ++k)
        if (tokens.in[k]) poison = add_poison(poison, load_active(tokens.in[k] + i, active));
    return poison;
}

// Sum of logprob - old_logprob over active tokens; NaN if any input of one is not finite. All in float64: what an
// exponential is taken of may be what large differences of either sign leave.
struct DifferenceStep {
    Sum difference;
    Int active{};

    MOSAIC_INLINE void operator()(const Tokens& tokens, int64_t count) {
        for (int64_t i = 0; i < count; i += kLanes) {
            const Int mask = load_mask(tokens.mask + i);
            active -= mask;
            difference.add_block(load_active(tokens.in[kLogprob] + i, mask) -
                                 load_active(tokens.in[kOldLogprob] + i, mask) + poison_of(tokens, i, mask));
        }
    }
};

// What a chunk contributes to the loss and the metrics.
struct Partial {
    double loss, approx_kl, ratio, kl, entropy;
    float largest;
    int64_t limited, active, nonfinite;
};

struct Terms {
    Float loss, slope;  // L and dL / dlogprob
    Int limited;
};

template <Objective kObjective>
struct LossStep {
    Float low, high, dual, kl_coef, entropy_coef;
    KlEstimator estimator;
    Sum loss, approx_kl, ratio, kl, entropy;
    Float largest{};
    Int limited{}, active{}, nonfinite{};

    explicit LossStep(const PolicyLoss& call)
        : low(broadcast(static_cast<float>(1 - call.low))),
          high(broadcast(static_cast<float>(1 + call.high))),
          dual(broadcast(static_cast<float>(call.dual))),
          kl_coef(broadcast(static_cast<float>(call.kl_coef))),
          entropy_coef(broadcast(static_cast<float>(call.entropy_coef))),
          estimator(call.estimator) {}

    // `r` is the ratio, `dr` its slope in logprob.
    MOSAIC_INLINE Terms objective(Float r, Float dr, Float logprob, Float advantage) const {
        const Int some = advantage != 0.0f;
        if constexpr (kObjective == Objective::clip) {
            const Int positive = advantage > 0.0f;
            const Float bounded = min(select(positive, high, dual), max(select(positive, Float{}, low), r));
            const Int outside = (bounded < r) | (bounded > r);
            return {-advantage * bounded, select(outside, Float{}, -advantage * dr), outside & some};
        } else if constexpr (kObjective == Objective::cispo) {
            const Float factor = -min(high, r) * advantage;
            return {factor * logprob, factor, (r > high) & some};
        } else if constexpr (kObjective == Objective::sao) {
            const Int inside = (r > low) & (r < high);
            const Float factor = select(inside, -r * advantage, Float{});
            return {factor * logprob, factor, ~inside & some};
        } else {
            return {-advantage * logprob, -advantage, Int{}};
        }
    }

    // Value and slope of the KL estimate.
    MOSAIC_INLINE Terms divergence(Float k1) const {
        if (estimator == KlEstimator::k1) return {k1, broadcast(1.0f), Int{}};
        if (estimator == KlEstimator::k2) return {k1 * k1 * 0.5f, k1, Int{}};
        const Float growth = expm1(-k1);
        return {growth + k1, -growth, Int{}};
    }

    // Three short loops over a block that lies in the first-level cache: one chain of operations from the inputs to the
    // loss is longer than the machine can look ahead, and its vectors would wait for one another.
    MOSAIC_INLINE void operator()(const Tokens& tokens, int64_t count) {
        alignas(64) float poison[kBlock], difference[kBlock], p[kBlock], scale[kBlock];
        for (int64_t i = 0; i < count; i += kLanes) {
            const Int mask = load_mask(tokens.mask + i);
            const Float bad = poison_of(tokens, i, mask);
            store(poison + i, bad);
            tokens.prefetch(i);
            const Float own =
                load_active(tokens.in[kLogprob] + i, mask) - load_active(tokens.in[kOldLogprob] + i, mask);
            store(difference + i, tokens.in[kLogRatio] ? load_active(tokens.in[kLogRatio] + i, mask) : own + bad);
        }
        Float excess{};
        for (int64_t i = 0; i < count; i += kLanes) {
            const ScaledExp e = scaled_exp(clamped(load(difference + i)));
            store(p + i, e.p);
            store(scale + i, e.scale);
            excess += e.excess;
        }
        approx_kl.add_block(excess);
        sum_terms(tokens, count, poison, difference, p, scale);
    }

    MOSAIC_INLINE void sum_terms(const Tokens& tokens, int64_t count, const float* poison, const float* difference,
                                 const float* p, const float* scale) {
        Float losses{}, ratios{}, divergences{}, entropies{};
        for (int64_t i = 0; i < count; i += kLanes) {
            const Int mask = load_mask(tokens.mask + i);
            const Float bad = load(poison + i), logprob = load_active(tokens.in[kLogprob] + i, mask) + bad;
            const Float r = fma(load(p + i), load(scale + i), load(scale + i));
            // Beyond the clamp a token's own ratio has no slope; a unit's is a constant and never reaches it here.
            const Float dr = select(absolute(load(difference + i)) > kMaxLogRatio, Float{}, r);
            const Terms term = objective(r, dr, logprob, load_active(tokens.in[kAdvantage] + i, mask));

            const Float weight = load_active(tokens.in[kWeight] + i, mask);
            Float share = weight;
            if (tokens.in[kImportance]) share *= load_active(tokens.in[kImportance] + i, mask);
            Float loss_t = fma(share, term.loss, bad), slope = fma(share, term.slope, bad);
            if (tokens.in[kRefLogprob]) {
                const Terms k = divergence(logprob - load_active(tokens.in[kRefLogprob] + i, mask));
                loss_t = fma(weight * kl_coef, k.loss, loss_t);
                slope = fma(weight * kl_coef, k.slope, slope);
                divergences += k.loss;
            }
            if (tokens.in[kEntropy]) {
                const Float given = load_active(tokens.in[kEntropy] + i, mask), dentropy = weight * -entropy_coef;
                loss_t = fma(dentropy, given, loss_t);
                entropies += given;
                if (tokens.out[kDentropy]) store(tokens.out[kDentropy] + i, dentropy + bad);
            }
            if (tokens.out[kDlogprob]) store(tokens.out[kDlogprob] + i, slope);

            const Float counted = select(mask, r, Float{});
            losses += loss_t;
            ratios += counted;
            largest = max(counted, largest);
            limited -= term.limited;
            active -= mask;
            nonfinite -= bad != bad;
        }
        loss.add_block(losses);
        ratio.add_block(ratios);
        if (tokens.in[kRefLogprob]) kl.add_block(divergences);
        if (tokens.in[kEntropy]) entropy.add_block(entropies);
    }

    Partial partial() const {
        return {loss.value(),         approx_kl.value(),   ratio.value(),
                kl.value(),           entropy.value(),     largest_lane(largest),
                count_lanes(limited), count_lanes(active), count_lanes(nonfinite)};
    }
};

// Log-ratio and weight of each segment's tokens, where they are not the tokens' own; null otherwise.
struct SegmentTables {
    const float* log_ratio;
    const float* weight;
};

template <Objective kObjective>
[[gnu::noinline]] Partial one_chunk(const PolicyLoss& call, SegmentTables tables, int64_t begin, int64_t end) {
    alignas(64) float log_ratio[kBlock], weight[kBlock];
    Spread log_ratios(call.cu_seqlens, call.num_segments, tables.log_ratio, begin);
    Spread weights(call.cu_seqlens, call.num_segments, tables.weight, begin);
    LossStep<kObjective> step(call);
    const auto fill = [&](Tokens& block, int64_t token, int64_t count) {
        if (tables.log_ratio) {
            log_ratios.write(token, count, log_ratio);
            block.in[kLogRatio] = log_ratio;
        }
        if (tables.weight) {
            weights.write(token, count, weight);
            block.in[kWeight] = weight;
        }
    };
    walk(tokens_of(call), begin, end, fill, step);
    return step.partial();
}

Partial chunk_of(const PolicyLoss& call, SegmentTables tables, int64_t begin, int64_t end) {
    switch (call.objective) {
        case Objective::clip:
            return one_chunk<Objective::clip>(call, tables, begin, end);
        case Objective::cispo:
            return one_chunk<Objective::cispo>(call, tables, begin, end);
        case Objective::sao:
            return one_chunk<Objective::sao>(call, tables, begin, end);
        default:
            return one_chunk<Objective::reinforce>(call, tables, begin, end);
    }
}

// Sums of each segment's active tokens: their number and, where a unit's ratio is wanted, logprob - old_logprob.
void sum_differences(const PolicyLoss& call, int64_t threads, UnitSum* sums) {
    const Tokens tokens = tokens_of(call);
    if (call.level == Level::token) {
        count_segments(call.cu_seqlens, call.num_segments, call.mask, threads, sums);
        return;
    }
    sum_segments(
        call.cu_seqlens, call.num_segments, threads,
        [&](int64_t begin, int64_t end) {
            DifferenceStep step;
            walk(tokens, begin, end, [](Tokens&, int64_t, int64_t) {}, step);
            return UnitSum{step.difference.value(), count_lanes(step.active)};
        },
        sums);
}

void unit_log_ratios(const PolicyLoss& call, const UnitSum* segments, float* log_ratio) {
    const Buffer memory(call.num_segments * sizeof(UnitSum));
    UnitSum* units = memory.as<UnitSum>();
    if (call.level == Level::trajectory)
        sum_trajectories(call.segment_trajectory, call.num_segments, call.num_trajectories, segments, units);
    else
        std::memcpy(units, segments, call.num_segments * sizeof(UnitSum));
    for (int64_t segment = 0; segment < call.num_segments; ++segment) {
        const int64_t count = units[segment].count;
        const float mean = static_cast<float>(units[segment].sum / static_cast<double>(count > 0 ? count : 1));
        log_ratio[segment] = mean > kMaxLogRatio ? kMaxLogRatio : mean < -kMaxLogRatio ? -kMaxLogRatio : mean;
    }
}

void combine(const PolicyLoss& call, const Partial* partials, int64_t count) {
    Partial all{};
    for (int64_t chunk = 0; chunk < count; ++chunk) {
        const Partial& one = partials[chunk];
        all.loss += one.loss;
        all.approx_kl += one.approx_kl;
        all.ratio += one.ratio;
        all.kl += one.kl;
        all.entropy += one.entropy;
        all.largest = one.largest > all.largest ? one.largest : all.largest;
        all.limited += one.limited;
        all.active += one.active;
        all.nonfinite += one.nonfinite;
    }
    const double size = static_cast<double>(all.active > 0 ? all.active : 1);
    *call.loss = static_cast<float>(all.loss);
    call.statistics[0] = static_cast<float>(static_cast<double>(all.limited) / size);
    call.statistics[1] = static_cast<float>(all.approx_kl / size);
    call.statistics[2] = static_cast<float>(all.ratio / size);
    // A comparison passes over NaN; the sum of the ratios, which are bounded, is NaN exactly if one of them is.
    call.statistics[3] = all.ratio == all.ratio ? all.largest : static_cast<float>(all.ratio);
    call.statistics[4] = static_cast<float>(all.kl / size);
    call.statistics[5] = static_cast<float>(all.entropy / size);
    call.counts[0] = all.active;
    call.counts[1] = all.nonfinite;
}

}  // namespace

void policy_loss(const PolicyLoss& call) {
    const int64_t size = call.cu_seqlens[call.num_segments], chunks = chunks_of(size);
    const int64_t threads = useful_threads(call.threads, size, kGrain);
    const bool by_unit = call.level != Level::token, default_weight = !call.token_weight;
    const Buffer partial_memory(chunks * sizeof(Partial));
    const Buffer log_ratio_memory(by_unit ? call.num_segments * sizeof(float) : 0);
    const Buffer weight_memory(default_weight ? call.num_segments * sizeof(float) : 0);
    SegmentTables tables{};
    if (by_unit || default_weight) {
        const Buffer memory(call.num_segments * sizeof(UnitSum));
        UnitSum* sums = memory.as<UnitSum>();
        sum_differences(call, threads, sums);
        if (by_unit) {
            unit_log_ratios(call, sums, log_ratio_memory.as<float>());
            tables.log_ratio = log_ratio_memory.as<float>();
        }
        if (default_weight) {
            trajectory_weights(call.segment_trajectory, call.num_segments, call.num_trajectories, sums,
                               weight_memory.as<float>());
            tables.weight = weight_memory.as<float>();
        }
    }
    Partial* partials = partial_memory.as<Partial>();
    parallel_for(chunks, threads, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        partials[chunk] = chunk_of(call, tables, begin, smaller(begin + kChunk, size));
    });
    combine(call, partials, chunks);
}

}  // namespace mosaic::MOSAIC_ISA

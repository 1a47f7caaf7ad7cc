#include "value_loss.h"

#include "cpu/packed.h"

namespace mosaic::MOSAIC_ISA {
namespace {

enum Input { kValue, kOldValue, kReturns, kWeight, kInputs };
using Tokens = Columns<kInputs, 1>;

struct Partial {
    double loss, value, returns, returns_square, residual, residual_square;
    int64_t limited, active, nonfinite;
};

// Variances are taken around a value of the first active token: equal entries then give exactly 0, and a mean far
// from 0 costs no digits.
struct Origin {
    float returns = 0, residual = 0;
};

Origin origin_of(const ValueLoss& call, int64_t size) {
    const void* first = size ? std::memchr(call.mask, 1, size) : nullptr;
    if (!first) return {};
    const int64_t token = static_cast<const uint8_t*>(first) - call.mask;
    const float returns = call.returns[token], residual = returns - call.value[token];
    // Not where it is infinite or NaN: such a token must show in the means as what it is.
    return {returns - returns == 0 ? returns : 0, residual - residual == 0 ? residual : 0};
}

MOSAIC_INLINE void add_moments(Float x, Double& sum, Double& square) {
    const Double wide = widen(x);
    sum += wide;
    square += wide * wide;
}

struct LossStep {
    Float clip, returns_origin, residual_origin;
    Sum loss, value;
    Double returns{}, returns_square{}, residual{}, residual_square{};
    Int limited{}, active{}, nonfinite{};

    LossStep(const ValueLoss& call, Origin origin)
        : clip(broadcast(static_cast<float>(call.clip))),
          returns_origin(broadcast(origin.returns)),
          residual_origin(broadcast(origin.residual)) {}

    MOSAIC_INLINE void operator()(const Tokens& tokens, int64_t count) {
        Float losses{}, values{};
        for (int64_t i = 0; i < count; i += kLanes) {
            tokens.prefetch(i);
            const Int mask = load_mask(tokens.mask + i);
            const Float target = load_active(tokens.in[kReturns] + i, mask);
            const Float weight = load_active(tokens.in[kWeight] + i, mask);
            Float v = load_active(tokens.in[kValue] + i, mask), old{};
            Float poison = add_poison(add_poison(add_poison(Float{}, v), target), weight);
            if (tokens.in[kOldValue]) {
                old = load_active(tokens.in[kOldValue] + i, mask);
                poison = add_poison(poison, old);
            }
            v += poison;

            const Float error = v - target;
            Float square = error * error, slope = error;
            if (tokens.in[kOldValue]) {
                const Float change = v - old, bounded = old + with_sign(clip, change) - target;
                const Int outside = (absolute(change) > clip) & (bounded * bounded > square);
                square = select(outside, bounded * bounded, square);
                slope = select(outside, Float{}, slope);
                limited -= outside;
            }
            if (tokens.out[0]) store(tokens.out[0] + i, fma(weight, slope, poison));
            losses += fma(weight * 0.5f, square, poison);
            values += v;
            add_moments(select(mask, target - returns_origin, Float{}), returns, returns_square);
            add_moments(select(mask, -error - residual_origin, Float{}), residual, residual_square);
            active -= mask;
            nonfinite -= poison != poison;
        }
        loss.add_block(losses);
        value.add_block(values);
    }

    Partial partial() const {
        return {loss.value(),          value.value(),
                sum_lanes(returns),    sum_lanes(returns_square),
                sum_lanes(residual),   sum_lanes(residual_square),
                count_lanes(limited),  count_lanes(active),
                count_lanes(nonfinite)};
    }
};

// `weights`: of each segment's tokens, or null: the tokens have their own.
Partial one_chunk(const ValueLoss& call, const float* weights, Origin origin, int64_t begin, int64_t end) {
    alignas(64) float weight[kBlock];
    Spread spread(call.cu_seqlens, call.num_segments, weights, begin);
    LossStep step(call, origin);
    const auto fill = [&](Tokens& block, int64_t token, int64_t count) {
        if (!weights) return;
        spread.write(token, count, weight);
        block.in[kWeight] = weight;
    };
    const Tokens tokens{
        {call.value, call.old_value, call.returns, call.token_weight}, call.mask, {call.dvalue}, nullptr};
    walk(tokens, begin, end, fill, step);
    return step.partial();
}

void combine(const ValueLoss& call, Origin origin, const Partial* partials, int64_t count) {
    Partial all{};
    for (int64_t chunk = 0; chunk < count; ++chunk) {
        const Partial& one = partials[chunk];
        all.loss += one.loss;
        all.value += one.value;
        all.returns += one.returns;
        all.returns_square += one.returns_square;
        all.residual += one.residual;
        all.residual_square += one.residual_square;
        all.limited += one.limited;
        all.active += one.active;
        all.nonfinite += one.nonfinite;
    }
    const double size = static_cast<double>(all.active > 0 ? all.active : 1);
    const double gap = all.returns / size, miss = all.residual / size;
    const double spread = all.returns_square / size - gap * gap;
    const double residual = all.residual_square / size - miss * miss;
    *call.loss = static_cast<float>(all.loss);
    call.statistics[0] = static_cast<float>(static_cast<double>(all.limited) / size);
    call.statistics[1] = static_cast<float>(all.value / size);
    call.statistics[2] = static_cast<float>(all.active ? origin.returns + gap : 0.0);
    call.statistics[3] = static_cast<float>(spread == 0 ? 0.0 : 1 - residual / spread);
    call.counts[0] = all.active;
    call.counts[1] = all.nonfinite;
}

}  // namespace

void value_loss(const ValueLoss& call) {
    const int64_t size = call.cu_seqlens[call.num_segments], chunks = chunks_of(size);
    const int64_t threads = useful_threads(call.threads, size, kGrain);
    const Buffer partial_memory(chunks * sizeof(Partial));
    const Buffer weight_memory(call.token_weight ? 0 : call.num_segments * sizeof(float));
    const float* weights = nullptr;
    if (!call.token_weight) {
        const Buffer memory(call.num_segments * sizeof(UnitSum));
        count_segments(call.cu_seqlens, call.num_segments, call.mask, threads, memory.as<UnitSum>());
        trajectory_weights(call.segment_trajectory, call.num_segments, call.num_trajectories, memory.as<UnitSum>(),
                           weight_memory.as<float>());
        weights = weight_memory.as<float>();
    }
    const Origin origin = origin_of(call, size);
    Partial* partials = partial_memory.as<Partial>();
    parallel_for(chunks, threads, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        partials[chunk] = one_chunk(call, weights, origin, begin, smaller(begin + kChunk, size));
    });
    combine(call, origin, partials, chunks);
}

}  // namespace mosaic::MOSAIC_ISA

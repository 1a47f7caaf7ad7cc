#include "active_tokens.h"

#include "cpu/packed.h"

namespace mosaic::MOSAIC_ISA {
namespace {

using Tokens = Columns<1, 1>;

struct SpreadStep {
    MOSAIC_INLINE void operator()(const Tokens& tokens, int64_t count) {
        for (int64_t i = 0; i < count; i += kLanes)
            store(tokens.out[0] + i, load_active(tokens.in[0] + i, load_mask(tokens.mask + i)));
    }
};

}  // namespace

void count_active(const CountActive& call) {
    const Buffer memory(call.num_segments * sizeof(UnitSum));
    const UnitSum* sums = memory.as<UnitSum>();
    const int64_t threads = useful_threads(call.threads, call.cu_seqlens[call.num_segments], kByteGrain);
    count_segments(call.cu_seqlens, call.num_segments, call.mask, threads, memory.as<UnitSum>());
    for (int64_t segment = 0; segment < call.num_segments; ++segment) call.count[segment] = sums[segment].count;
}

void spread_active(const SpreadActive& call) {
    const int64_t size = call.cu_seqlens[call.num_segments];
    parallel_for(chunks_of(size), useful_threads(call.threads, size, kByteGrain), [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        alignas(64) float value[kBlock];
        Spread values(call.cu_seqlens, call.num_segments, call.value, begin);
        const auto fill = [&](Tokens& block, int64_t token, int64_t count) {
            values.write(token, count, value);
            block.in[0] = value;
        };
        SpreadStep step;
        walk(Tokens{{nullptr}, call.mask, {call.out}, nullptr}, begin, smaller(begin + kChunk, size), fill, step);
    });
}

}  // namespace mosaic::MOSAIC_ISA

// Packed tokens: how a kernel walks over them (vectors, blocks, chunks), and its sums over segments and trajectories.
//
// Every sum is taken in fixed pieces that are combined in a fixed order, so that its bits depend on neither the thread
// count nor the run; a segment's pieces start at the segment, so that they do not depend on its neighbours either.
#pragma once

#include <cstring>

#include "common.h"
#include "cpu/simd.h"

namespace mosaic::MOSAIC_ISA {
namespace {

constexpr int64_t kBlock = 16 * kLanes;  // tokens that are summed in float32, 16 a lane, before float64 takes over
constexpr int64_t kAhead = 512;          // tokens from where a kernel reads to where it prefetches
constexpr int64_t kChunk = 16384;        // tokens of a task
constexpr int64_t kGrain = 32768;  // a thread gets at least this many: it takes about as long to wake as to do them
constexpr int64_t kByteGrain = 262144;  // the same where a token is hardly more than its mask

constexpr float kMaxLogRatio = 20;  // of a log-ratio before exp

MOSAIC_INLINE int64_t chunks_of(int64_t tokens) { return parts(tokens, kChunk); }

// -1 where the byte is not 0.
MOSAIC_INLINE Int load_mask(const uint8_t* x) {
#if defined(__AVX512F__)
    return (Int)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)x)) != 0;
#elif defined(__AVX2__)
    return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x)) != 0;
#else
    return Int{x[0], x[1], x[2], x[3]} != 0;
#endif
}

// 1 where the lane is -1, 0 where it is 0.
MOSAIC_INLINE void store_mask(uint8_t* x, Int mask) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)x, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)(mask & 1)));
#else
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = static_cast<uint8_t>(mask[lane] & 1);
#endif
}

MOSAIC_INLINE Float load_active(const float* x, Int active) { return select(active, load(x), Float{}); }

// `poison` goes from 0 to NaN where x is not finite, for 0 * x is NaN there.
MOSAIC_INLINE Float add_poison(Float poison, Float x) { return fma(x, Float{}, poison); }

MOSAIC_INLINE double sum_lanes(Double x) {
    double sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
    return sum;
}

MOSAIC_INLINE int64_t count_lanes(Int x) {
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
    return sum;
}

MOSAIC_INLINE float largest_lane(Float x) {
    float largest = x[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
}

// A sum over many tokens: float32 within a block, float64 across blocks.
struct Sum {
    Double total{};
    MOSAIC_INLINE void add_block(Float block) { total += widen(block); }
    MOSAIC_INLINE double value() const { return sum_lanes(total); }
};

// What a kernel reads and writes of every token, as pointers to one of them; null: not there.
template <int kInputs, int kOutputs>
struct Columns {
    const float* in[kInputs];
    const uint8_t* mask;
    float* out[kOutputs];
    uint8_t* flag;

    MOSAIC_INLINE Columns at(int64_t token) const {
        Columns moved;
#pragma GCC unroll 8
        for (int k = 0; k < kInputs; ++k) moved.in[k] = in[k] ? in[k] + token : nullptr;
#pragma GCC unroll 8
        for (int k = 0; k < kOutputs; ++k) moved.out[k] = out[k] ? out[k] + token : nullptr;
        moved.mask = mask + token;
        moved.flag = flag ? flag + token : nullptr;
        return moved;
    }

    // Asks for what will be read `kAhead` tokens after `token`, perhaps past the end, whence whole numbers instead of
    // pointers. A loop that computes for a block leaves the machine's own prefetching behind: this saves a quarter of
    // the time where the inputs lie in memory.
    MOSAIC_INLINE void prefetch(int64_t token) const {
        const uintptr_t ahead = token + kAhead;
#pragma GCC unroll 8
        for (int k = 0; k < kInputs; ++k)
            if (in[k])
                __builtin_prefetch(
                    reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(in[k]) + ahead * sizeof(float)));
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(mask) + ahead));
    }
};

// step(columns, kLanes) on the first `count` < kLanes tokens, made up to a vector with masked ones.
template <int kInputs, int kOutputs, class Step>
[[gnu::noinline]] void step_padded(const Columns<kInputs, kOutputs>& columns, int64_t count, Step& step) {
    alignas(64) float in[kInputs][kLanes] = {}, out[kOutputs + 1][kLanes];
    uint8_t mask[kLanes] = {}, flag[kLanes];
    Columns<kInputs, kOutputs> padded{};
    for (int k = 0; k < kInputs; ++k) {
        if (!columns.in[k]) continue;
        std::memcpy(in[k], columns.in[k], count * sizeof(float));
        padded.in[k] = in[k];
    }
    std::memcpy(mask, columns.mask, count);
    padded.mask = mask;
    for (int k = 0; k < kOutputs; ++k) padded.out[k] = columns.out[k] ? out[k] : nullptr;
    padded.flag = columns.flag ? flag : nullptr;
    step(padded, kLanes);
    for (int k = 0; k < kOutputs; ++k)
        if (columns.out[k]) std::memcpy(columns.out[k], out[k], count * sizeof(float));
    if (columns.flag) std::memcpy(columns.flag, flag, count);
}

// step(columns, count) on the whole vectors of every block of tokens [begin, end), and on what is left of the last one;
// the blocks start at begin. fill(columns, token, count) may replace columns of a block by others.
template <int kInputs, int kOutputs, class Fill, class Step>
MOSAIC_INLINE void walk(const Columns<kInputs, kOutputs>& tokens, int64_t begin, int64_t end, const Fill& fill,
                        Step& step) {
    for (int64_t token = begin; token < end; token += kBlock) {
        const int64_t count = smaller(kBlock, end - token), whole = count / kLanes * kLanes;
        Columns<kInputs, kOutputs> block = tokens.at(token);
        fill(block, token, count);
        if (whole) step(block, whole);
        if (whole < count) step_padded(block.at(whole), count - whole, step);
    }
}

// The segment that holds a token < T.
MOSAIC_INLINE int64_t segment_of(const int32_t* cu_seqlens, int64_t num_segments, int64_t token) {
    int64_t low = 0, high = num_segments;  // cu_seqlens[low] <= token < cu_seqlens[high]
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (cu_seqlens[middle] <= token ? low : high) = middle;
    }
    return low;
}

// Values of segments, spread over the tokens of one block after the other.
class Spread {
  public:
    Spread(const int32_t* cu_seqlens, int64_t num_segments, const float* value, int64_t first_token)
        : cu_seqlens_(cu_seqlens), value_(value), segment_(segment_of(cu_seqlens, num_segments, first_token)) {}

    // Tokens [token, token + count); each call goes on where the last one ended.
    MOSAIC_INLINE void write(int64_t token, int64_t count, float* out) {
        for (const int64_t end = token + count; token < end;) {
            while (cu_seqlens_[segment_ + 1] <= token) ++segment_;
            const int64_t stop = smaller(end, cu_seqlens_[segment_ + 1]);
            const float value = value_[segment_];
            for (; token < stop; ++token) *out++ = value;
        }
    }

  private:
    const int32_t* cu_seqlens_;
    const float* value_;
    int64_t segment_;
};

// Of a segment's, or a trajectory's, active tokens.
struct UnitSum {
    double sum;
    int64_t count;
};

// sums[s] = piece(begin, end) of segment s, added up over pieces of kChunk tokens from its start; 0 for an empty one.
template <class Piece>
MOSAIC_INLINE void sum_segments(const int32_t* cu_seqlens, int64_t num_segments, int64_t threads, const Piece& piece,
                                UnitSum* sums) {
    const int64_t tokens = cu_seqlens[num_segments];
    // Where a segment's second and later pieces go, by the chunk in which they begin: no two can begin in the same.
    const Buffer memory(chunks_of(tokens) * sizeof(UnitSum));
    UnitSum* later = memory.as<UnitSum>();
    std::memset(sums, 0, num_segments * sizeof(UnitSum));
    parallel_for(chunks_of(tokens), threads, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk, end = smaller(begin + kChunk, tokens);
        int64_t segment = segment_of(cu_seqlens, num_segments, begin);
        if (const int64_t start = cu_seqlens[segment]; start < begin) {
            const int64_t stop = cu_seqlens[segment + 1], at = start + chunks_of(begin - start) * kChunk;
            if (at < smaller(end, stop)) later[chunk] = piece(at, smaller(at + kChunk, stop));
            ++segment;
        }
        for (; segment < num_segments && cu_seqlens[segment] < end; ++segment) {
            const int64_t start = cu_seqlens[segment], stop = cu_seqlens[segment + 1];
            if (start < stop) sums[segment] = piece(start, smaller(start + kChunk, stop));
        }
    });
    for (int64_t segment = 0; segment < num_segments; ++segment) {
        for (int64_t at = cu_seqlens[segment] + kChunk; at < cu_seqlens[segment + 1]; at += kChunk) {
            sums[segment].sum += later[at / kChunk].sum;
            sums[segment].count += later[at / kChunk].count;
        }
    }
}

// Gives each segment the sum of its trajectory (`out` may be `segments`); returns how many trajectories have active
// tokens.
inline int64_t sum_trajectories(const int64_t* segment_trajectory, int64_t num_segments, int64_t num_trajectories,
                                const UnitSum* segments, UnitSum* out) {
    const Buffer memory(num_trajectories * sizeof(UnitSum));
    UnitSum* totals = memory.as<UnitSum>();
    std::memset(totals, 0, num_trajectories * sizeof(UnitSum));
    for (int64_t segment = 0; segment < num_segments; ++segment) {
        UnitSum& total = totals[segment_trajectory[segment]];
        total.sum += segments[segment].sum;
        total.count += segments[segment].count;
    }
    int64_t occupied = 0;
    for (int64_t trajectory = 0; trajectory < num_trajectories; ++trajectory) occupied += totals[trajectory].count > 0;
    for (int64_t segment = 0; segment < num_segments; ++segment) out[segment] = totals[segment_trajectory[segment]];
    return occupied;
}

// The weight of each segment's active tokens when every trajectory weighs the same.
inline void trajectory_weights(const int64_t* segment_trajectory, int64_t num_segments, int64_t num_trajectories,
                               const UnitSum* segments, float* weight) {
    const Buffer memory(num_segments * sizeof(UnitSum));
    UnitSum* of_trajectory = memory.as<UnitSum>();
    const int64_t occupied =
        sum_trajectories(segment_trajectory, num_segments, num_trajectories, segments, of_trajectory);
    for (int64_t segment = 0; segment < num_segments; ++segment) {
        const int64_t count = of_trajectory[segment].count * occupied;
        weight[segment] = static_cast<float>(1.0 / static_cast<double>(count > 0 ? count : 1));
    }
}

// sums[s].count = active tokens of segment s.
inline void count_segments(const int32_t* cu_seqlens, int64_t num_segments, const uint8_t* mask, int64_t threads,
                           UnitSum* sums) {
    sum_segments(
        cu_seqlens, num_segments, threads,
        [mask](int64_t begin, int64_t end) {
            uint32_t count = 0;
            for (int64_t token = begin; token < end; ++token) count += mask[token];
            return UnitSum{0, count};
        },
        sums);
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

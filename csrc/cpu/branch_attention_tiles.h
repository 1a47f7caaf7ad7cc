// What forward and backward of branch_attention share: tiles of queries and keys in float32, and their scores.
//
// Query rows are the lanes. The (token, head) pairs of a segment that read one key-value head stand in one list, token
// by token, and are cut into panels of up to kPanel rows, which lie transposed: [D, rows]. Keys are broadcast against
// them, so that the statistics of the softmax run down the lanes, and what a row gets does not depend on its
// neighbours.
#pragma once

#include "branch_attention.h"
#include "common.h"
#include "cpu/elements.h"
#include "cpu/tile.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// A register tile here: kRows keys (or rows, or elements of a head) and up to kWide vectors.
#if defined(__AVX512F__)
constexpr int kRows = 8, kWide = 3;
#elif defined(__AVX2__)
constexpr int kRows = 4, kWide = 3;
#else
constexpr int kRows = 4, kWide = 2;
#endif
constexpr int64_t kPanel = kWide * kLanes;

// Packed rows of a head are padded with zeros to a multiple of this, which kRows and kLanes divide.
constexpr int64_t kPad = 16;

MOSAIC_INLINE int64_t padded_size(const AttentionInputs& call) { return rounded_up(call.head_size, kPad); }

// Floats from one packed row to the next. A cache line more than needed, so that rows of a power of two do not fall
// into the same few sets of the cache.
MOSAIC_INLINE int64_t row_pitch(const AttentionInputs& call) { return padded_size(call) + kPad; }

// out[0, padded) = the elements of one token's head, then zeros.
MOSAIC_INLINE void load_head(const AttentionInputs& call, const HeadTensor& x, int64_t token, int64_t head,
                             float* out) {
    const int64_t offset = token * x.token_stride + head * x.head_stride, size = call.head_size;
    widen_run(call.type, static_cast<const char*>(x.data) + bytes_of(call.type, offset), size, out);
    std::memset(out + size, 0, (padded_size(call) - size) * sizeof(float));
}

// Rounds a row of floats into place `index` of a contiguous array of heads.
MOSAIC_INLINE void store_head(const AttentionInputs& call, void* out, int64_t index, const float* x) {
    const int64_t offset = bytes_of(call.type, index * call.head_size);
    narrow_run(call.type, x, call.head_size, static_cast<char*>(out) + offset);
}

// Packs `count` tokens of one key-value head, and rows of zeros up to a multiple of kRows: [rows, row_pitch].
void load_keys(const AttentionInputs& call, const HeadTensor& x, int64_t token, int64_t count, int64_t head,
               float* out) {
    const int64_t pitch = row_pitch(call);
    for (int64_t row = 0; row < count; ++row) load_head(call, x, token + row, head, out + row * pitch);
    std::memset(out + count * pitch, 0, (rounded_up(count, kRows) - count) * pitch * sizeof(float));
}

// a and b riffled like two halves of a deck of cards: the first and the second half of the result.
struct Riffled {
    Float first, second;
};

MOSAIC_INLINE Riffled riffle(Float a, Float b) {
#if defined(__AVX512F__)
    const Int first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, second = first + 8;
    return {(Float)_mm512_permutex2var_ps(a, (__m512i)first, b), (Float)_mm512_permutex2var_ps(a, (__m512i)second, b)};
#elif defined(__AVX2__)
    const __m256 even = _mm256_unpacklo_ps(a, b), odd = _mm256_unpackhi_ps(a, b);
    return {_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31)};
#else
    return {Float{a[0], b[0], a[1], b[1]}, Float{a[2], b[2], a[3], b[3]}};
#endif
}

// out[c][r] = in[r][c] for kLanes x kLanes floats. Each pass moves one bit of the row's index into the column's and one
// of the column's into the row's.
MOSAIC_INLINE void transpose_block(const float* in, int64_t in_pitch, float* out, int64_t out_pitch) {
    Float a[kLanes], b[kLanes];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) a[row] = load(in + row * in_pitch);
#pragma GCC unroll 4
    for (int pass = 1; pass < kLanes; pass *= 2) {
#pragma GCC unroll 8
        for (int row = 0; row < kLanes / 2; ++row) {
            const Riffled pair = riffle(a[row], a[row + kLanes / 2]);
            b[2 * row] = pair.first;
            b[2 * row + 1] = pair.second;
        }
#pragma GCC unroll 16
        for (int row = 0; row < kLanes; ++row) a[row] = b[row];
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) store(out + row * out_pitch, a[row]);
}

// out [columns, out_pitch] = the transpose of in [rows, in_pitch]; rows and columns are multiples of kLanes.
void transpose(const float* in, int64_t in_pitch, int64_t rows, int64_t columns, float* out, int64_t out_pitch) {
    for (int64_t row = 0; row < rows; row += kLanes)
        for (int64_t column = 0; column < columns; column += kLanes)
            transpose_block(in + row * in_pitch + column, in_pitch, out + column * out_pitch + row, out_pitch);
}

// exp(x) for x <= 0, or above it by a rounding: weights of a softmax, so what is under 2^-125 may be 0. NaN stays NaN.
MOSAIC_INLINE Float exp_nonpositive(Float x) {
    const Float shifted = fma(max(broadcast(-87.0f), x), broadcast(1.44269504f), broadcast(12582912.0f));
    const Float n = shifted - 12582912.0f;  // 1.5 * 2^23 has rounded it to whole
    Float r = fma(n, broadcast(-0.693145752f), x);
    r = fma(n, broadcast(-1.42860677e-6f), r);
    Float q = broadcast(1.98412698e-4f);
    q = fma(q, r, broadcast(1.38888889e-3f));
    q = fma(q, r, broadcast(8.33333333e-3f));
    q = fma(q, r, broadcast(4.16666667e-2f));
    q = fma(q, r, broadcast(0.166666667f));
    q = fma(q, r, broadcast(0.5f));
    const Float power = 1.0f + fma(q, r * r, r);
    return select(x < -87.0f, Float{}, (Float)((Int)power + ((Int)shifted << 23)));
}

struct Segment {
    int64_t begin, length;
    int64_t parent_begin, prefix;  // tokens of the parent that it sees; its own tokens have positions from `prefix` on
};

MOSAIC_INLINE Segment segment_at(const AttentionInputs& call, int64_t index) {
    Segment out{call.cu_seqlens[index], call.cu_seqlens[index + 1] - call.cu_seqlens[index], 0, 0};
    if (call.parent && call.parent[index] >= 0) {
        out.parent_begin = call.cu_seqlens[call.parent[index]];
        out.prefix = call.prefix_length[index];
    }
    return out;
}

// A number of vectors, known to the compiler.
template <int C>
struct Width {
    static constexpr int vectors = C;
};

// visit(Width<vectors>{}), 1 <= vectors <= kWide.
template <class Visit>
MOSAIC_INLINE void with_width(int64_t vectors, const Visit& visit) {
    if (vectors == 1) visit(Width<1>{});
    if (vectors == 2) visit(Width<2>{});
    if constexpr (kWide >= 3)
        if (vectors == 3) visit(Width<3>{});
}

// Query rows [first, first + count) of a segment and a key-value head, as lanes. Row r is head r % group of token
// r / group; lanes past the last row repeat its position and hold zeros.
struct Panel {
    int64_t first, count;
    int vectors;              // 1 .. kWide; kLanes * vectors floats from one element of a head to the next
    int64_t lowest, highest;  // positions of the first and the last row
    Int position[kWide];

    MOSAIC_INLINE int64_t width() const { return vectors * kLanes; }
};

MOSAIC_INLINE Panel panel_at(const Segment& segment, int64_t group, int64_t first, int64_t last_row) {
    Panel out;
    out.first = first;
    out.count = smaller(kPanel, last_row - first);
    out.vectors = static_cast<int>((out.count + kLanes - 1) / kLanes);
    int32_t positions[kPanel];
    int64_t position = segment.prefix + first / group, head = first % group;
    out.lowest = position;
    for (int64_t lane = 0; lane < kPanel; ++lane) {
        positions[lane] = static_cast<int32_t>(position);
        if (lane + 1 < out.count && ++head == group) {
            head = 0;
            ++position;
        }
    }
    out.highest = position;
    std::memcpy(out.position, positions, sizeof positions);
    return out;
}

// Packs a panel's rows of `x` as they are: [width, row_pitch], with rows of zeros past the last.
void load_rows(const AttentionInputs& call, const HeadTensor& x, const Segment& segment, int64_t key_head,
               const Panel& panel, float* out) {
    const int64_t pitch = row_pitch(call), group = call.query_heads / call.key_heads;
    int64_t token = segment.begin + panel.first / group, head = panel.first % group;
    for (int64_t row = 0; row < panel.count; ++row) {
        load_head(call, x, token, key_head * group + head, out + row * pitch);
        if (++head == group) {
            head = 0;
            ++token;
        }
    }
    std::memset(out + panel.count * pitch, 0, (panel.width() - panel.count) * pitch * sizeof(float));
}

// Keys and values of `count` tokens in a row, the first at position `position`.
struct KeyBlock {
    const float* keys;    // [count rounded up to kRows, row_pitch]
    const float* values;  // the same
    int64_t position;
    int64_t count;
};

// Which keys of a block the rows of a panel see, as far as it is not all of them.
template <int C>
struct Visible {
    Int last[C], before[C];  // positions in (before, last]
    bool all;                // no row's bound lies inside the block

    MOSAIC_INLINE Int at(int64_t key_position, int c) const {
        const Int here = static_cast<int32_t>(key_position) - Int{};
        return (here <= last[c]) & (here > before[c]);
    }
};

template <int C>
MOSAIC_INLINE Visible<C> visible_keys(const AttentionInputs& call, const Panel& panel, const KeyBlock& block) {
    Visible<C> out;
    const int64_t end = block.position + block.count - 1;
    const Int block_end = static_cast<int32_t>(end) - Int{};
    for (int c = 0; c < C; ++c) {
        out.last[c] = panel.position[c] < block_end ? panel.position[c] : block_end;
        out.before[c] = panel.position[c] - call.window;
    }
    out.all = end <= panel.lowest && block.position > panel.highest - call.window && block.count % kRows == 0;
    return out;
}

// Scores of kRows keys of a block from `key` on, before any bound.
template <int C>
MOSAIC_INLINE void raw_scores(const AttentionInputs& call, const KeyBlock& block, int64_t key, const float* query,
                              Float (&sum)[kRows][C]) {
    const int64_t pitch = row_pitch(call);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[r][c] = Float{};
    multiply_add<kRows, C>(block.keys + key * pitch, pitch, 1, query, call.head_size, sum);
}

// Threads worth waking for a pass of `products` products of queries and keys.
inline int64_t attention_threads(const AttentionInputs& call, double products) {
    double pairs = 0;
    for (int64_t s = 0; s < call.num_segments; ++s) {
        const Segment segment = segment_at(call, s);
        const double length = static_cast<double>(segment.length), prefix = static_cast<double>(segment.prefix);
        pairs += length * smaller(call.window, static_cast<int64_t>(prefix + 0.5 * length) + 1);
    }
    const double work = pairs * products * static_cast<double>(call.query_heads * padded_size(call));
    constexpr double kGrain = 2e6;  // multiply-adds: about as long as it takes to start a thread
    const double most = work / kGrain;
    return most < 2 ? 1 : most < static_cast<double>(call.threads) ? static_cast<int64_t>(most) : call.threads;
}

// Runs task(index, scratch) for each index below `count`. Indices are begun in their order; a thread has `floats`
// floats of scratch for itself.
template <class Task>
MOSAIC_INLINE void run_with_scratch(int64_t count, int64_t threads, int64_t floats, const Task& task) {
    const int64_t workers = larger(smaller(threads, count), 1), pitch = rounded_up(floats, 16);
    const Buffer memory(static_cast<size_t>(workers * pitch) * sizeof(float));
    int64_t next = 0;
    parallel_for(workers, workers, [&](int64_t worker) {
        float* scratch = memory.as<float>() + worker * pitch;
        for (int64_t index; (index = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) task(index, scratch);
    });
}

// The largest i with first[i] <= index, of count + 1 ascending offsets: which of `count` runs the index lies in.
MOSAIC_INLINE int64_t run_of(const int64_t* first, int64_t count, int64_t index) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (first[middle] <= index ? low : high) = middle;
    }
    return low;
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

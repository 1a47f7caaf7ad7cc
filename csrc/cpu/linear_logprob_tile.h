// Logits of a tile of ids and a panel of rows: what the forward and the backward of linear_logprob share, so that both
// see the same bits.
//
// Vector lanes are scored rows ("tokens"): their hidden states lie transposed in panels, [H][up to kPanel tokens],
// while an id's weight row, as it lies in memory, supplies the factors. Maximum, sum and target of a token then stay in
// its lane, nothing is ever reduced across lanes, and no bit of a token can depend on its neighbours.
#pragma once

#include "common.h"
#include "cpu/elements.h"
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "linear_logprob.h"

namespace mosaic::MOSAIC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 8, kVectors = 3;
#else
constexpr int kRows = 4, kVectors = 3;
#endif
constexpr int64_t kPanel = kVectors * kLanes;
constexpr int64_t kIds = 64;  // of a tile: its logits for a panel stay in the first-level cache
// A dot product is cut into chains of this length, whose sums are added up: the rounding error of one long chain would
// exceed that of PyTorch's product, and shorter ones cost time.
constexpr int64_t kDepth = 128;
static_assert(kPanel % kRows == 0 && kIds % kRows == 0);

constexpr float kInfinity = __builtin_inff();

// `length` columns cut into panels of kPanel; the last one has as few vectors as hold its columns. The panels of
// `depth` rows follow each other, each [depth][vectors kLanes].
struct Panels {
    int64_t length;

    int64_t count() const { return parts(length, kPanel); }
    int64_t padded() const { return rounded_up(length, kLanes); }
    int64_t columns(int64_t panel) const { return smaller(kPanel, length - panel * kPanel); }
    int vectors(int64_t panel) const { return static_cast<int>(parts(columns(panel), kLanes)); }
    int64_t width(int64_t panel) const { return vectors(panel) * kLanes; }
};

template <int C>
struct Width {};  // names a panel's number of vectors for overload resolution

// Calls run(Width<C>()) for the number of vectors of a panel.
template <class Run>
MOSAIC_INLINE void with_width(int vectors, const Run& run) {
    static_assert(kVectors == 3);
    if (vectors == 3) return run(Width<3>());
    if (vectors == 2) return run(Width<2>());
    run(Width<1>());
}

// Rows of numbers, read as 32-bit words: each a number widened to float32 or, for dot products, two bfloat16.
struct Matrix {
    const void* data;
    int64_t stride, columns;  // elements
    ElementType type;
    bool pairs;

    int64_t depth() const { return pairs ? parts(columns, 2) : columns; }
    const char* element(int64_t row, int64_t column) const {
        return static_cast<const char*>(data) + bytes_of(type, row * stride + column);
    }
    // Words [begin, begin + count) of a row.
    void read(int64_t row, int64_t begin, int64_t count, float* out) const {
        if (pairs) {
            const int64_t present = smaller(2 * count, columns - 2 * begin);
            if (present < 2 * count) out[count - 1] = 0;
            std::memcpy(out, element(row, 2 * begin), 2 * present);
            return;
        }
        widen_run(type, element(row, begin), count, out);
    }
};

MOSAIC_INLINE bool dot_products(const LogprobInputs& in) {
#if defined(__AVX512BF16__)
    return in.hidden_type == ElementType::bfloat16 && in.weight_type == ElementType::bfloat16 && bfloat16_dot();
#else
    (void)in;
    return false;
#endif
}

MOSAIC_INLINE Matrix hidden_matrix(const LogprobInputs& in, bool pairs) {
    return {in.hidden, in.hidden_stride, in.hidden_size, in.hidden_type, pairs};
}

MOSAIC_INLINE Matrix weight_matrix(const LogprobInputs& in, bool pairs) {
    return {in.weight, in.weight_stride, in.hidden_size, in.weight_type, pairs};
}

// The hidden states of `tokens` scored rows (at most kPanel) as a transposed panel, zero where there is no token.
inline void pack_tokens(const Matrix& hidden, const int64_t* row, int64_t tokens, float* panel) {
    constexpr int64_t kRun = 64;
    const int64_t width = rounded_up(tokens, kLanes), depth = hidden.depth();
    float words[kRun];
    for (int64_t begin = 0; begin < depth; begin += kRun) {
        const int64_t count = smaller(kRun, depth - begin);
        float* out = panel + begin * width;
        for (int64_t token = 0; token < width; ++token) {
            if (token < tokens) hidden.read(row[token], begin, count, words);
            for (int64_t k = 0; k < count; ++k) out[k * width + token] = token < tokens ? words[k] : 0.0f;
        }
    }
}

// Floats from one row of a weight tile to the next: an odd number of cache lines, so that the rows spread over the
// cache's sets, as rows that lie a power of two apart in memory would not.
MOSAIC_INLINE int64_t tile_stride(int64_t depth) { return (parts(depth, 16) | 1) * 16; }

// Rows [begin, begin + count) of the head as factors, [count][tile_stride(depth)], followed by rows of zeros up to a
// multiple of kRows. The copy is read once for each panel of tokens.
inline void read_weight_rows(const Matrix& weight, int64_t begin, int64_t count, float* out) {
    const int64_t depth = weight.depth(), stride = tile_stride(depth);
    for (int64_t r = 0; r < count; ++r) weight.read(begin + r, 0, depth, out + r * stride);
    for (int64_t r = count; r % kRows; ++r) std::memset(out + r * stride, 0, depth * sizeof(float));
}

#if defined(__AVX512BF16__)
// multiply_add of tile.h for words of two bfloat16: each step adds two products.
template <int R, int C>
MOSAIC_INLINE void multiply_add_pairs(const float* a, int64_t row_stride, const float* panel, int64_t depth,
                                      Float (&sum)[R][C]) {
    for (int64_t k = 0; k < depth; ++k, ++a, panel += C * kLanes) {
        __m512bh column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) column[c] = (__m512bh)load(panel + c * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            int32_t word;
            std::memcpy(&word, a + r * row_stride, sizeof word);
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], factor, column[c]);
        }
    }
}
#endif

// out[r][c kLanes] = row r of `a` (from read_weight_rows) . the panel's columns, for `rows` (a multiple of kRows) rows.
template <int C>
void multiply_tile(const float* a, int64_t rows, const float* panel, int64_t depth, bool pairs, float* out) {
    // A chain's part of the panel stays in the first-level cache while the rows pass by.
    const int64_t stride = tile_stride(depth);
    for (int64_t k = 0; k == 0 || k < depth; k += kDepth) {
        const int64_t length = smaller(kDepth, depth - k);
        float* at = out;
        for (int64_t r = 0; r < rows; r += kRows) {
            Float sum[kRows][C] = {};
#if defined(__AVX512BF16__)
            if (pairs)
                multiply_add_pairs(a + r * stride + k, stride, panel + k * C * kLanes, length, sum);
            else
#endif
                multiply_add(a + r * stride + k, stride, 1, panel + k * C * kLanes, length, sum);
#pragma GCC unroll 32
            for (int i = 0; i < kRows * C; ++i, at += kLanes)
                store(at, k ? load(at) + sum[i / C][i % C] : sum[i / C][i % C]);
        }
    }
    (void)pairs;
}

// A tile of ids: [begin, begin + count) and their weight rows.
struct Tile {
    int64_t begin, count;
    const float* weight;  // from read_weight_rows
};

// A panel of scored rows: [begin, begin + count).
struct Tokens {
    int64_t begin, count;
    const float* panel;
};

// Where each row's kept ids continue: the first one not below `id`.
inline void seek_kept(const LogprobInputs& in, int64_t begin, int64_t count, int64_t id, int64_t* cursor) {
    for (int64_t i = 0; i < count; ++i) {
        int64_t low = in.kept_offsets[begin + i], high = in.kept_offsets[begin + i + 1];
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (in.kept[middle] < id)
                low = middle + 1;
            else
                high = middle;
        }
        cursor[i] = low;
    }
}

// keep[v][lane] = -1 where id tile.begin + v is kept in the lane's row, else 0, and moves the rows' cursors past the
// tile. False if no id of the tile is kept in any row.
inline bool mark_kept(const LogprobInputs& in, const Tile& tile, const Tokens& tokens, int64_t width, int64_t* cursor,
                      int32_t* keep) {
    bool any = false;
    std::memset(keep, 0, tile.count * width * sizeof *keep);
    for (int64_t i = 0; i < tokens.count; ++i) {
        if (in.kept_whole[tokens.begin + i]) {
            for (int64_t v = 0; v < tile.count; ++v) keep[v * width + i] = -1;
            any = true;
            continue;
        }
        const int64_t stop = in.kept_offsets[tokens.begin + i + 1];
        for (; cursor[i] < stop && in.kept[cursor[i]] < tile.begin + tile.count; ++cursor[i]) {
            keep[(in.kept[cursor[i]] - tile.begin) * width + i] = -1;
            any = true;
        }
    }
    return any;
}

// x of the tile's ids (see linear_logprob.h), [tile.count rounded up to kRows][C kLanes]. `keep` from mark_kept or
// null.
template <int C>
void logit_tile(const LogprobInputs& in, const Tile& tile, const Tokens& tokens, int64_t depth, bool pairs,
                const int32_t* keep, float* x) {
    multiply_tile<C>(tile.weight, rounded_up(tile.count, kRows), tokens.panel, depth, pairs, x);
    if (!in.bias && !in.temperature && in.softcap == 0 && !keep) return;
    float temperature[C * kLanes];
    for (int64_t i = 0; i < C * kLanes; ++i)
        temperature[i] = in.temperature && i < tokens.count ? in.temperature[tokens.begin + i] : 1.0f;
    const bool divided = in.temperature;
    for (int64_t v = 0; v < tile.count; ++v) {
        const Float bias = broadcast(in.bias ? in.bias[tile.begin + v] : 0.0f);
        for (int c = 0; c < C; ++c, x += kLanes) {
            Float logit = load(x);
            if (in.bias) logit += bias;
            if (in.softcap != 0) logit = tanh(logit / in.softcap) * in.softcap;
            if (divided) logit /= load(temperature + c * kLanes);
            if (keep) {
                Int kept;
                std::memcpy(&kept, keep + (v * C + c) * kLanes, sizeof kept);
                logit = select(kept, logit, broadcast(-kInfinity));
            }
            store(x, logit);
        }
    }
}

// Threads worth waking for `rows` scored rows.
MOSAIC_INLINE int64_t threads_for(const LogprobInputs& in, int64_t rows) {
    const double work =
        static_cast<double>(rows) * static_cast<double>(in.vocab_size + 1) * static_cast<double>(in.hidden_size + 16);
    return useful_threads(in.threads, static_cast<int64_t>(work < 1e18 ? work : 1e18), int64_t{1} << 21);
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

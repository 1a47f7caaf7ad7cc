// Backward of branch_attention: one pass in which a task owns a block of keys, and with it their dkey and dvalue.
//
// A task walks the query rows that see its keys: those of the segment itself, then those of its branches, by index. The
// scores are computed again and weighted with the forward's statistics. dquery is added up in memory, and for that the
// blocks of keys take turns at a panel of rows in the order of their tasks: the same sums for any number of threads,
// without a second pass over the scores. A task begins only after all earlier ones have begun, so waiting always ends.
#include <sched.h>

#include "branch_attention.h"
#include "cpu/branch_attention_tiles.h"

namespace mosaic::MOSAIC_ISA {
namespace {

constexpr int64_t kKeys = 128;
static_assert(kKeys % kRows == 0);

// The order of the tasks: each root, then its branches. A task is a block of keys of a segment and a key-value head.
struct Plan {
    Buffer memory, turn_memory;
    int64_t* order;        // [S] segments; a root's branches follow it
    int64_t* branches;     // [S] by segment: how many branches it has
    int64_t* place;        // [S] by segment: where it stands in `order`
    int64_t* first_task;   // [S+1] by place
    int64_t* first_panel;  // [S+1] by segment
    int32_t* turn;         // by panel: how many blocks of keys have added to its dquery

    explicit Plan(const AttentionInputs& call);
};

MOSAIC_INLINE int64_t panels_of(const AttentionInputs& call, const Segment& segment) {
    return (segment.length * (call.query_heads / call.key_heads) + kPanel - 1) / kPanel;
}

int64_t count_panels(const AttentionInputs& call) {
    int64_t panels = 0;
    for (int64_t s = 0; s < call.num_segments; ++s) panels += panels_of(call, segment_at(call, s)) * call.key_heads;
    return panels;
}

Plan::Plan(const AttentionInputs& call)
    : memory(static_cast<size_t>(5 * call.num_segments + 2) * sizeof(int64_t)),
      turn_memory(static_cast<size_t>(count_panels(call)) * sizeof(int32_t)),
      turn(turn_memory.as<int32_t>()) {
    const int64_t size = call.num_segments;
    order = memory.as<int64_t>();
    branches = order + size;
    place = branches + size;
    first_task = place + size;
    first_panel = first_task + size + 1;
    for (int64_t s = 0; s < size; ++s) branches[s] = 0;
    if (call.parent)
        for (int64_t s = 0; s < size; ++s)
            if (call.parent[s] >= 0) ++branches[call.parent[s]];
    int64_t next = 0;
    for (int64_t s = 0; s < size; ++s) {
        if (call.parent && call.parent[s] >= 0) continue;
        place[s] = next++;
        next += branches[s];
        branches[s] = 0;
    }
    first_task[0] = first_panel[0] = 0;
    for (int64_t s = 0; s < size; ++s) {
        if (call.parent && call.parent[s] >= 0) place[s] = place[call.parent[s]] + ++branches[call.parent[s]];
        order[place[s]] = s;
        first_panel[s + 1] = first_panel[s] + panels_of(call, segment_at(call, s)) * call.key_heads;
    }
    for (int64_t at = 0; at < size; ++at) {
        const int64_t blocks = (segment_at(call, order[at]).length + kKeys - 1) / kKeys;
        first_task[at + 1] = first_task[at] + blocks * call.key_heads;
    }
    std::memset(turn, 0, static_cast<size_t>(first_panel[size]) * sizeof(int32_t));
}

// Where a task's memory begins, in floats. keys, at 0, and values come first.
struct Scratch {
    int64_t values, dkey, dvalue, query_rows, doutput_rows, dquery_rows, query, doutput, weights, dscores, lane_values;
    int64_t end;
};

Scratch scratch_layout(const AttentionInputs& call) {
    const int64_t pitch = row_pitch(call), keys = kKeys * pitch, rows = kPanel * pitch;
    Scratch out;
    out.values = keys;
    out.dkey = out.values + keys;
    out.dvalue = out.dkey + keys;
    out.query_rows = out.dvalue + keys;
    out.doutput_rows = out.query_rows + rows;
    out.dquery_rows = out.doutput_rows + rows;
    out.query = out.dquery_rows + rows;
    out.doutput = out.query + padded_size(call) * kPanel;
    out.weights = out.doutput + padded_size(call) * kPanel;
    out.dscores = out.weights + kKeys * kPanel;
    out.lane_values = out.dscores + kKeys * kPanel;
    out.end = out.lane_values + 3 * kPanel;
    return out;
}

// weights = exp(score - largest - log_total) and dscores = weights (<doutput, value> - delta) dscore/d<query, key>,
// both [keys, width]. `statistics` holds three numbers of each row: largest [kPanel], log_total [kPanel] and delta =
// <doutput, output> [kPanel].
template <int C>
MOSAIC_INLINE void score_gradients(const AttentionInputs& call, const Panel& panel, const KeyBlock& block,
                                   const float* query, const float* doutput, const float* statistics, float* weights,
                                   float* dscores) {
    const Visible<C> visible = visible_keys<C>(call, panel, block);
    const int64_t pitch = row_pitch(call);
    for (int64_t key = 0; key < block.count; key += kRows) {
        Float sum[kRows][C];
        raw_scores<C>(call, block, key, query, sum);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                const int64_t at = ((key + r) * C + c) * kLanes;
                if (call.softcap > 0) {
                    const Float bent = tanh(sum[r][c] / call.softcap);
                    sum[r][c] = call.softcap * bent;
                    store(dscores + at, call.scale * (1.0f - bent * bent));
                }
                Float weight =
                    exp_nonpositive(sum[r][c] - load(statistics + c * kLanes) - load(statistics + kPanel + c * kLanes));
                if (!visible.all) weight = select(visible.at(block.position + key + r, c), weight, Float{});
                store(weights + at, weight);
                sum[r][c] = Float{};
            }
        multiply_add<kRows, C>(block.values + key * pitch, pitch, 1, doutput, call.head_size, sum);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                const int64_t at = ((key + r) * C + c) * kLanes;
                const Float slope = call.softcap > 0 ? load(dscores + at) : broadcast(call.scale);
                Float dscore = load(weights + at) * (sum[r][c] - load(statistics + 2 * kPanel + c * kLanes)) * slope;
                if (!visible.all) dscore = select(visible.at(block.position + key + r, c), dscore, Float{});
                store(dscores + at, dscore);
            }
    }
}

// out[r] (+)= sum over k of a(r, k) panel[k], r < rows rounded up to kRows; panel and out [., row_pitch].
template <int C, bool add>
void product_columns(const AttentionInputs& call, const float* a, int64_t row_stride, int64_t column_stride,
                     int64_t rows, const float* panel, int64_t depth, float* out) {
    const int64_t pitch = row_pitch(call);
    for (int64_t row = 0; row < rows; row += kRows) {
        Float sum[kRows][C];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[r][c] = Float{};
        multiply_add<kRows, C>(a + row * row_stride, row_stride, column_stride, panel, depth, sum, pitch);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                float* at = out + (row + r) * pitch + c * kLanes;
                store(at, add ? load(at) + sum[r][c] : sum[r][c]);
            }
    }
}

// The same for all elements of a head, in runs of vectors that the register tile takes.
template <bool add>
void product(const AttentionInputs& call, const float* a, int64_t row_stride, int64_t column_stride, int64_t rows,
             const float* panel, int64_t depth, float* out) {
    int64_t left = (call.head_size + kLanes - 1) / kLanes;
    while (left > 0) {
        // Threes where two twos do not do better.
        const int64_t vectors = kWide >= 3 && left != 2 && left != 4 ? smaller(left, 3) : smaller(left, 2);
        with_width(vectors, [&](auto width) {
            product_columns<width.vectors, add>(call, a, row_stride, column_stride, rows, panel, depth, out);
        });
        panel += vectors * kLanes;
        out += vectors * kLanes;
        left -= vectors;
    }
}

// Waits until `turn` is `mine`: those before are being worked on.
void wait_for_turn(const int32_t* turn, int32_t mine) {
    for (int tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine; ++tries) {
        if (tries > 200) sched_yield();
#ifdef MOSAIC_X86
        _mm_pause();
#endif
    }
}

class Task {
  public:
    Task(const AttentionBackward& backward, const Plan& plan, const float* delta, int64_t key_head, const Scratch& at,
         float* memory)
        : backward_(backward),
          call_(backward.inputs),
          plan_(plan),
          delta_(delta),
          key_head_(key_head),
          group_(call_.query_heads / call_.key_heads),
          at_(at),
          memory_(memory) {}

    // The block of keys `block` of segment order[place].
    void run(int64_t place, int64_t block) const {
        const int64_t s = plan_.order[place], first_key = block * kKeys, pitch = row_pitch(call_);
        const Segment segment = segment_at(call_, s);
        const int64_t token = segment.begin + first_key, count = smaller(kKeys, segment.length - first_key);
        load_keys(call_, call_.key, token, count, key_head_, memory_);
        load_keys(call_, call_.value, token, count, key_head_, memory_ + at_.values);
        const int64_t used = rounded_up(count, kRows) * pitch;
        std::memset(memory_ + at_.dkey, 0, static_cast<size_t>(used) * sizeof(float));
        std::memset(memory_ + at_.dvalue, 0, static_cast<size_t>(used) * sizeof(float));
        const int64_t inherited = (segment.prefix + kKeys - 1) / kKeys;  // blocks of the parent come before its own
        walk(s, segment, {memory_, memory_ + at_.values, segment.prefix + first_key, count}, inherited + block);
        for (int64_t branch = place + 1; branch <= place + plan_.branches[s]; ++branch) {
            const Segment child = segment_at(call_, plan_.order[branch]);
            if (child.prefix <= first_key) continue;
            walk(plan_.order[branch], child,
                 {memory_, memory_ + at_.values, first_key, smaller(count, child.prefix - first_key)}, block);
        }
        for (int64_t key = 0; key < count; ++key) {
            const int64_t index = (token + key) * call_.key_heads + key_head_;
            store_head(call_, backward_.dkey, index, memory_ + at_.dkey + key * pitch);
            store_head(call_, backward_.dvalue, index, memory_ + at_.dvalue + key * pitch);
        }
    }

  private:
    // All panels of a segment that see the block, which is the `index`-th of the keys before and in that segment.
    void walk(int64_t s, const Segment& segment, const KeyBlock& block, int64_t index) const {
        const int64_t rows = segment.length * group_, panels = panels_of(call_, segment);
        const int64_t inherited = (segment.prefix + kKeys - 1) / kKeys;
        const int64_t first = larger(block.position - segment.prefix, 0) * group_ / kPanel;
        int32_t* turn = plan_.turn + plan_.first_panel[s] + key_head_ * panels;
        for (int64_t p = first; p < panels; ++p) {
            const Panel panel = panel_at(segment, group_, p * kPanel, rows);
            const int64_t seen = larger(panel.lowest - call_.window + 1, 0);  // the first position that a row sees
            if (block.position + block.count <= seen) break;
            const int64_t start = seen < segment.prefix ? seen / kKeys : inherited + (seen - segment.prefix) / kKeys;
            KeyBlock part = block;
            part.count = smaller(block.count, panel.highest + 1 - block.position);
            with_width(panel.vectors, [&](auto width) { visit<width.vectors>(segment, panel, part); });
            wait_for_turn(turn + p, static_cast<int32_t>(index - start));
            add_dquery(segment, panel, index == start);
            __atomic_store_n(turn + p, static_cast<int32_t>(index - start + 1), __ATOMIC_RELEASE);
        }
    }

    // dkey, dvalue and this block's part of dquery from one panel of rows.
    template <int C>
    void visit(const Segment& segment, const Panel& panel, const KeyBlock& block) const {
        const int64_t pitch = row_pitch(call_), padded = padded_size(call_);
        constexpr int64_t kWidth = C * kLanes;
        float *query_rows = memory_ + at_.query_rows, *doutput_rows = memory_ + at_.doutput_rows;
        float *query = memory_ + at_.query, *doutput = memory_ + at_.doutput, *statistics = memory_ + at_.lane_values;
        float *weights = memory_ + at_.weights, *dscores = memory_ + at_.dscores;
        load_rows(call_, call_.query, segment, key_head_, panel, query_rows);
        load_rows(call_, backward_.doutput, segment, key_head_, panel, doutput_rows);
        transpose(query_rows, pitch, kWidth, padded, query, kWidth);
        transpose(doutput_rows, pitch, kWidth, padded, doutput, kWidth);
        for (int64_t at = 0; at < call_.head_size * kWidth; at += kLanes)
            store(query + at, load(query + at) * call_.scale);
        load_statistics(segment, panel, statistics);
        score_gradients<C>(call_, panel, block, query, doutput, statistics, weights, dscores);
        product<true>(call_, weights, kWidth, 1, block.count, doutput_rows, panel.count, memory_ + at_.dvalue);
        product<true>(call_, dscores, kWidth, 1, block.count, query_rows, panel.count, memory_ + at_.dkey);
        product<false>(call_, dscores, 1, kWidth, panel.count, block.keys, block.count, memory_ + at_.dquery_rows);
    }

    void load_statistics(const Segment& segment, const Panel& panel, float* out) const {
        int64_t token = segment.begin + panel.first / group_, head = panel.first % group_;
        for (int64_t lane = 0; lane < panel.width(); ++lane) {
            const int64_t index = token * call_.query_heads + key_head_ * group_ + head;
            const bool used = lane < panel.count;
            out[lane] = used ? backward_.statistics[2 * index] : 0.0f;
            out[kPanel + lane] = used ? backward_.statistics[2 * index + 1] : 0.0f;
            out[2 * kPanel + lane] = used ? delta_[index] : 0.0f;
            if (++head == group_) {
                head = 0;
                ++token;
            }
        }
    }

    void add_dquery(const Segment& segment, const Panel& panel, bool first) const {
        const int64_t size = call_.head_size, pitch = row_pitch(call_);
        int64_t token = segment.begin + panel.first / group_, head = panel.first % group_;
        for (int64_t row = 0; row < panel.count; ++row) {
            const float* part = memory_ + at_.dquery_rows + row * pitch;
            float* out = backward_.dquery + (token * call_.query_heads + key_head_ * group_ + head) * size;
            if (first)
                std::memcpy(out, part, static_cast<size_t>(size) * sizeof(float));
            else
                for (int64_t element = 0; element < size; ++element) out[element] += part[element];
            if (++head == group_) {
                head = 0;
                ++token;
            }
        }
    }

    const AttentionBackward& backward_;
    const AttentionInputs& call_;
    const Plan& plan_;
    const float* delta_;
    const int64_t key_head_, group_;
    const Scratch& at_;
    float* memory_;
};

// delta = <doutput, output> of each token and head: [T, query_heads]. Summed element by element as <doutput, value> is:
// where a row sees one key alone, the two are the same bits and their difference is 0.
void row_products(const AttentionBackward& backward, int64_t threads, float* delta) {
    const AttentionInputs& call = backward.inputs;
    constexpr int64_t kChunk = 512;
    const int64_t rows = call.cu_seqlens[call.num_segments] * call.query_heads;
    const int64_t padded = padded_size(call), pitch = row_pitch(call), tile = kLanes * pitch;
    run_with_scratch((rows + kChunk - 1) / kChunk, threads, 4 * tile, [&](int64_t chunk, float* memory) {
        float *output = memory + 2 * tile, *doutput = memory + 3 * tile;
        std::memset(memory, 0, static_cast<size_t>(2 * tile) * sizeof(float));
        for (int64_t row = chunk * kChunk; row < smaller(rows, (chunk + 1) * kChunk); row += kLanes) {
            const int64_t count = smaller(kLanes, rows - row);
            for (int64_t lane = 0; lane < count; ++lane) {
                const int64_t token = (row + lane) / call.query_heads, head = (row + lane) % call.query_heads;
                load_head(call, backward.output, token, head, memory + lane * pitch);
                load_head(call, backward.doutput, token, head, memory + tile + lane * pitch);
            }
            transpose(memory, pitch, kLanes, padded, output, kLanes);
            transpose(memory + tile, pitch, kLanes, padded, doutput, kLanes);
            Float sum = {};
            for (int64_t element = 0; element < call.head_size; ++element)
                sum = fma(load(output + element * kLanes), load(doutput + element * kLanes), sum);
            float sums[kLanes];
            store(sums, sum);
            std::memcpy(delta + row, sums, static_cast<size_t>(count) * sizeof(float));
        }
    });
}

}  // namespace

void branch_attention_backward(const AttentionBackward& backward) {
    const AttentionInputs& call = backward.inputs;
    const Plan plan(call);
    const int64_t tokens = call.cu_seqlens[call.num_segments], threads = attention_threads(call, 5);
    const Buffer delta(static_cast<size_t>(tokens * call.query_heads) * sizeof(float));
    row_products(backward, threads, delta.as<float>());
    const Scratch at = scratch_layout(call);
    run_with_scratch(plan.first_task[call.num_segments], threads, at.end, [&](int64_t index, float* memory) {
        const int64_t place = run_of(plan.first_task, call.num_segments, index);
        const int64_t within = index - plan.first_task[place];
        Task(backward, plan, delta.as<float>(), within % call.key_heads, at, memory)
            .run(place, within / call.key_heads);
    });
}

}  // namespace mosaic::MOSAIC_ISA

#include "branch_attention.h"

#include <math.h>

#include "cpu/branch_attention_tiles.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// A task is this many query rows of a segment and a key-value head: several panels, so that packing a block of keys and
// values costs little. Everything it touches for a block stays in the second-level cache.
constexpr int64_t kTaskRows = 192, kKeys = 64;
constexpr int64_t kTaskPanels = kTaskRows / kPanel;
static_assert(kTaskRows % kPanel == 0 && kKeys % kRows == 0);

// The running state of a panel, transposed like its queries.
struct State {
    Panel panel;
    float* query;    // [head_size, width], scaled
    float* output;   // [padded head size, width] sums of exp(score - largest) value
    float* largest;  // [width]
    float* total;    // [width] sum of exp(score - largest)
};

// Tiles of exp(score - largest) take the place of the scores; the largest score so far and the totals move on.
// Returns what to multiply the sums so far with.
template <int C>
MOSAIC_INLINE void softmax_block(const AttentionInputs& call, const State& state, const KeyBlock& block, float* weights,
                                 Float (&decay)[C]) {
    const Visible<C> visible = visible_keys<C>(call, state.panel, block);
    Float largest[C], shift[C], total[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) largest[c] = load(state.largest + c * kLanes);
    for (int64_t key = 0; key < block.count; key += kRows) {
        Float sum[kRows][C];
        raw_scores<C>(call, block, key, state.query, sum);
        if (call.softcap > 0)
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) sum[r][c] = call.softcap * tanh(sum[r][c] / call.softcap);
        if (!visible.all)
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c)
                    sum[r][c] = select(visible.at(block.position + key + r, c), sum[r][c], broadcast(-INFINITY));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                largest[c] = max(sum[r][c], largest[c]);
                store(weights + ((key + r) * C + c) * kLanes, sum[r][c]);
            }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        // A row that has seen nothing yet would subtract -inf from -inf.
        shift[c] = select(largest[c] == -INFINITY, Float{}, largest[c]);
        decay[c] = exp_nonpositive(load(state.largest + c * kLanes) - shift[c]);
        total[c] = load(state.total + c * kLanes) * decay[c];
        store(state.largest + c * kLanes, largest[c]);
    }
    for (int64_t key = 0; key < block.count; ++key)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            float* at = weights + (key * C + c) * kLanes;
            const Float weight = exp_nonpositive(load(at) - shift[c]);
            total[c] += weight;
            store(at, weight);
        }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(state.total + c * kLanes, total[c]);
}

// Takes a block of keys and values into a panel's sums.
template <int C>
void absorb(const AttentionInputs& call, const State& state, const KeyBlock& block, float* weights) {
    Float decay[C];
    softmax_block<C>(call, state, block, weights, decay);
    for (int64_t element = 0; element < call.head_size; element += kRows) {
        Float sum[kRows][C];
        float* output = state.output + element * C * kLanes;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[r][c] = Float{};
        multiply_add<kRows, C>(block.values + element, 1, row_pitch(call), weights, block.count, sum);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                float* at = output + (r * C + c) * kLanes;
                store(at, fma(load(at), decay[c], sum[r][c]));
            }
    }
}

void absorb_into(const AttentionInputs& call, const State& state, KeyBlock block, float* weights) {
    const Panel& panel = state.panel;
    block.count = smaller(block.count, panel.highest + 1 - block.position);
    if (block.count <= 0 || block.position + block.count - 1 <= panel.lowest - call.window) return;
    with_width(panel.vectors, [&](auto width) { absorb<width.vectors>(call, state, block, weights); });
}

// Divides by the totals and writes a panel's rows.
void finish(const AttentionForward& forward, const Segment& segment, int64_t key_head, const State& state,
            float* rows) {
    const AttentionInputs& call = forward.inputs;
    const int64_t width = state.panel.width(), pitch = row_pitch(call), group = call.query_heads / call.key_heads;
    for (int64_t lane = 0; lane < width; lane += kLanes) {
        const Float factor = 1.0f / load(state.total + lane);
        for (int64_t element = 0; element < padded_size(call); ++element) {
            float* at = state.output + element * width + lane;
            store(at, load(at) * factor);
        }
    }
    transpose(state.output, width, padded_size(call), width, rows, pitch);
    int64_t token = segment.begin + state.panel.first / group, head = state.panel.first % group;
    for (int64_t row = 0; row < state.panel.count; ++row) {
        const int64_t index = token * call.query_heads + key_head * group + head;
        store_head(call, forward.output, index, rows + row * pitch);
        forward.statistics[2 * index] = state.largest[row];
        forward.statistics[2 * index + 1] = logf(state.total[row]);
        if (++head == group) {
            head = 0;
            ++token;
        }
    }
}

// Where a task's memory begins, in floats.
struct Scratch {
    int64_t values, weights, rows, states, state_size, end;
};

Scratch scratch_layout(const AttentionInputs& call) {
    Scratch out;
    const int64_t pitch = row_pitch(call);
    out.values = kKeys * pitch;
    out.weights = out.values + kKeys * pitch;
    out.rows = out.weights + kKeys * kPanel;
    out.states = out.rows + kPanel * pitch;
    out.state_size = (2 * padded_size(call) + 2) * kPanel;
    out.end = out.states + kTaskPanels * out.state_size;
    return out;
}

State begin_panel(const AttentionInputs& call, const Segment& segment, int64_t key_head, int64_t first,
                  int64_t last_row, float* rows, float* memory) {
    State out;
    const int64_t padded = padded_size(call), pitch = row_pitch(call);
    out.panel = panel_at(segment, call.query_heads / call.key_heads, first, last_row);
    out.query = memory;
    out.output = memory + padded * kPanel;
    out.largest = out.output + padded * kPanel;
    out.total = out.largest + kPanel;
    const int64_t width = out.panel.width();
    load_rows(call, call.query, segment, key_head, out.panel, rows);
    transpose(rows, pitch, width, padded, out.query, width);
    for (int64_t at = 0; at < padded * width; at += kLanes) {
        store(out.query + at, load(out.query + at) * call.scale);
        store(out.output + at, Float{});
    }
    for (int64_t lane = 0; lane < width; lane += kLanes) {
        store(out.largest + lane, broadcast(-INFINITY));
        store(out.total + lane, Float{});
    }
    return out;
}

void attend(const AttentionForward& forward, const Segment& segment, int64_t key_head, int64_t first_row,
            const Scratch& at, float* memory) {
    const AttentionInputs& call = forward.inputs;
    const int64_t rows = segment.length * (call.query_heads / call.key_heads);
    const int64_t last_row = smaller(first_row + kTaskRows, rows);
    State states[kTaskPanels];
    int64_t panels = 0;
    for (int64_t first = first_row; first < last_row; first += kPanel, ++panels)
        states[panels] = begin_panel(call, segment, key_head, first, last_row, memory + at.rows,
                                     memory + at.states + panels * at.state_size);
    // The keys seen: those inherited from the parent, then the segment's own.
    const int64_t highest = states[panels - 1].panel.highest, unseen = states[0].panel.lowest - call.window;
    const int64_t begins[2] = {segment.parent_begin, segment.begin}, starts[2] = {0, segment.prefix};
    const int64_t lengths[2] = {segment.prefix, segment.length};
    for (int source = 0; source < 2; ++source) {
        const int64_t skipped = larger(unseen + 1 - starts[source], 0) / kKeys * kKeys;
        const int64_t end = smaller(lengths[source], highest + 1 - starts[source]);
        for (int64_t key = skipped; key < end; key += kKeys) {
            const KeyBlock block{memory, memory + at.values, starts[source] + key, smaller(kKeys, end - key)};
            load_keys(call, call.key, begins[source] + key, block.count, key_head, memory);
            load_keys(call, call.value, begins[source] + key, block.count, key_head, memory + at.values);
            for (int64_t panel = 0; panel < panels; ++panel)
                absorb_into(call, states[panel], block, memory + at.weights);
        }
    }
    for (int64_t panel = 0; panel < panels; ++panel)
        finish(forward, segment, key_head, states[panel], memory + at.rows);
}

}  // namespace

void branch_attention_forward(const AttentionForward& forward) {
    const AttentionInputs& call = forward.inputs;
    const int64_t group = call.query_heads / call.key_heads;
    const Buffer offsets(static_cast<size_t>(call.num_segments + 1) * sizeof(int64_t));
    int64_t* first_task = offsets.as<int64_t>();
    first_task[0] = 0;
    for (int64_t s = 0; s < call.num_segments; ++s) {
        const int64_t rows = segment_at(call, s).length * group;
        first_task[s + 1] = first_task[s] + (rows + kTaskRows - 1) / kTaskRows * call.key_heads;
    }
    const Scratch at = scratch_layout(call);
    run_with_scratch(
        first_task[call.num_segments], attention_threads(call, 2), at.end, [&](int64_t task, float* memory) {
            const int64_t s = run_of(first_task, call.num_segments, task);
            // The last rows see the most keys: they come first, so that the threads end together.
            const int64_t left = first_task[s + 1] - 1 - task;
            attend(forward, segment_at(call, s), left % call.key_heads, left / call.key_heads * kTaskRows, at, memory);
        });
}

}  // namespace mosaic::MOSAIC_ISA

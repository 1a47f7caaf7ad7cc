// Gradients of linear_logprob. The logits are recomputed, a superblock of ids by a block of tokens at a time; what
// stands in memory of [T, V] is the float32 gradient of such a piece, from which
//     dweight[v] = sum over tokens of dlogit[v][t] hidden[t],    dhidden[t] += sum over ids of dlogit[v][t] weight[v]
// are two more products: the gradient's numbers are the factors, the columns of H are the lanes.
#include <cmath>

#include "cpu/linear_logprob_tile.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// A superblock has at most this many tiles of ids, and this many numbers of weight.
constexpr int64_t kSuperTiles = 8, kSuperNumbers = 1280 * 1024;
// A block of tokens has at most this many tokens, and its hidden states this many numbers.
constexpr int64_t kBlockTokens = 2304, kBlockNumbers = 2560 * 1024;
// Panels whose logits one task makes: they stay in the second-level cache while the tiles pass by.
constexpr int64_t kTaskWords = 256 * 1024;
// What a task of the two products makes: dweight of 2 tiles, dhidden of 3 panels, and of either 4 panels of columns.
constexpr int64_t kWeightTiles = 2, kHiddenPanels = 3, kColumnPanels = 4;
// Sums are cut into chains, as in multiply_tile: this many panels of tokens, or tiles of ids.
constexpr int64_t kChainPanels = 144 / kPanel, kChainTiles = 2;

struct Plan {
    bool pairs;
    Matrix hidden, weight;  // as the logits read them
    Panels columns;         // of H
    int64_t depth;
    int64_t tiles;        // of a superblock
    int64_t block;        // tokens of a block, a multiple of kPanel
    int64_t task_panels;  // of tokens, in a task that makes logits
};

Plan make_plan(const LogprobInputs& in) {
    Plan plan;
    plan.pairs = dot_products(in);
    plan.hidden = hidden_matrix(in, plan.pairs);
    plan.weight = weight_matrix(in, plan.pairs);
    plan.columns = {in.hidden_size};
    plan.depth = plan.weight.depth();
    const int64_t size = in.hidden_size + 1;
    plan.tiles = smaller(smaller(kSuperTiles, larger(1, kSuperNumbers / size / kIds)), parts(in.vocab_size, kIds));
    const int64_t blocks = parts(in.num_rows, larger(kPanel, smaller(kBlockTokens, kBlockNumbers / size)));
    plan.block = rounded_up(parts(in.num_rows, blocks), kPanel);
    plan.task_panels = smaller(16, larger(1, kTaskWords / (plan.depth + 1) / kPanel));
    return plan;
}

// What the rows of a block enter the gradient with, each [block]; where there is no token, values that give 0.
struct RowState {
    float *largest, *reciprocal;          // of the normaliser
    float *dlogprob, *dentropy, *offset;  // log p + entropy = (x - largest) + offset
    float* temperature;
};
constexpr int64_t kStates = 6;

struct Backward {
    const LogprobBackward& call;
    Plan plan;
    RowState state;
    float* panels;          // [panel][depth][width]: hidden states, transposed
    float* hidden_columns;  // [panel of columns][block][width]: hidden states; null if dweight is not wanted
    float* weight_columns;  // [panel of columns][superblock][width]; null if dhidden is not wanted
    float* weight;          // [superblock][tile_stride(depth)]: weight rows, as the logits read them
    float* dlogits;         // [panel][superblock][width]
    uint8_t* counts;        // [panel][tiles] whether the gradient of a tile's ids in a panel's tokens is not nothing
    float* dweight;         // [panel of columns][superblock][width] sums so far
    double* dbias;          // [superblock] sums so far

    int64_t begin = 0, count = 0;      // tokens of the block
    int64_t id = 0, ids = 0;           // of the superblock
    bool first = false, last = false;  // block of tokens

    const LogprobInputs& inputs() const { return call.inputs; }
    Panels tokens() const { return {count}; }
    int64_t super() const { return plan.tiles * kIds; }
    int64_t tiles() const { return parts(ids, kIds); }
    int64_t tile_ids(int64_t tile) const { return smaller(kIds, ids - tile * kIds); }
    float* dlogit(int64_t panel, int64_t tile) const {
        return dlogits + panel * kPanel * super() + tile * kIds * tokens().width(panel);
    }
    float* tile_weight(int64_t tile) const { return weight + tile * kIds * tile_stride(plan.depth); }
    bool counted(int64_t panel, int64_t tile) const { return counts[panel * plan.tiles + tile]; }
};

// `count` rows of a matrix as panels of columns, from row `at` of panels of `capacity` rows; `row` null: begin, begin +
// 1 ..
void pack_columns(const Matrix& matrix, const int64_t* row, int64_t begin, int64_t count, int64_t at, int64_t capacity,
                  float* out) {
    const Panels columns{matrix.columns};
    for (int64_t panel = 0; panel < columns.count(); ++panel) {
        const int64_t width = columns.width(panel), present = columns.columns(panel);
        float* to = out + panel * kPanel * capacity + at * width;
        for (int64_t i = 0; i < count; ++i, to += width) {
            matrix.read(row ? row[i] : begin + i, panel * kPanel, present, to);
            for (int64_t column = present; column < width; ++column) to[column] = 0;
        }
    }
}

void prepare_weight(const Backward& backward, int64_t tile) {
    const int64_t begin = backward.id + tile * kIds, count = backward.tile_ids(tile);
    read_weight_rows(backward.plan.weight, begin, count, backward.tile_weight(tile));
    if (backward.weight_columns)
        pack_columns(weight_matrix(backward.inputs(), false), nullptr, begin, count, tile * kIds, backward.super(),
                     backward.weight_columns);
}

void prepare_tokens(const Backward& backward, int64_t panel) {
    const LogprobInputs& in = backward.inputs();
    const LogprobBackward& call = backward.call;
    const int64_t at = panel * kPanel, begin = backward.begin + at, count = backward.tokens().columns(panel);
    pack_tokens(backward.plan.hidden, in.row + begin, count, backward.panels + at * backward.plan.depth);
    if (backward.hidden_columns)
        pack_columns(hidden_matrix(in, false), in.row + begin, 0, count, at, backward.plan.block,
                     backward.hidden_columns);
    for (int64_t i = 0; i < kPanel; ++i) {
        const bool present = i < count;
        backward.state.largest[at + i] = present ? call.largest[begin + i] : kInfinity;
        const double log_normaliser = present ? call.log_normaliser[begin + i] : 0;
        backward.state.reciprocal[at + i] = static_cast<float>(std::exp(-log_normaliser));
        backward.state.dlogprob[at + i] = present ? call.dlogprob[begin + i] : 0;
        backward.state.dentropy[at + i] = present && call.dentropy ? call.dentropy[begin + i] : 0;
        const double entropy = present && call.dentropy ? call.entropy[begin + i] : 0;
        backward.state.offset[at + i] = static_cast<float>(entropy - log_normaliser);
        backward.state.temperature[at + i] = present && in.temperature ? in.temperature[begin + i] : 1;
    }
}

// Turns the logits x of a tile, [ids][C kLanes], into their gradient. `target`: each lane's target, counted from the
// tile's first id. Returns the largest probability among them.
template <int C, bool with_entropy>
float differentiate(const Backward& backward, int64_t at, int64_t ids, const int32_t* target, float* x) {
    const LogprobInputs& in = backward.inputs();
    const RowState& state = backward.state;
    Bits top[C] = {};
    for (int64_t v = 0; v < ids; ++v) {
        for (int c = 0; c < C; ++c, x += kLanes) {
            const int64_t lane = at + c * kLanes;
            const Float logit = load(x), dlogprob = load(state.dlogprob + lane);
            Int id;
            std::memcpy(&id, target + c * kLanes, sizeof id);
            // The bound makes exp 0, and keeps 0 * -infinity out of the entropy's gradient.
            const Float shifted = max(broadcast(-120.0f), logit - load(state.largest + lane));
            const Float p = exp_inside(shifted) * load(state.reciprocal + lane);
            // Bits compare as their numbers do, for none is negative; and a NaN of either sign is the largest.
            top[c] = (Bits)p > top[c] ? (Bits)p : top[c];
            Float gradient = dlogprob * (select(id == static_cast<int32_t>(v), broadcast(1.0f), Float{}) - p);
            if (with_entropy) gradient -= load(state.dentropy + lane) * (p * (shifted + load(state.offset + lane)));
            if (in.softcap != 0) {
                const Float tanh_of_logit = logit * load(state.temperature + lane) / in.softcap;
                gradient *= max(Float{}, 1.0f - tanh_of_logit * tanh_of_logit);  // 0 at the -infinity of an id not kept
            }
            if (in.temperature) gradient /= load(state.temperature + lane);
            store(x, gradient);
        }
    }
    uint32_t largest = 0;
    for (int c = 0; c < C; ++c)
        for (int lane = 0; lane < kLanes; ++lane) largest = top[c][lane] > largest ? top[c][lane] : largest;
    float p;
    std::memcpy(&p, &largest, sizeof p);
    return p;
}

// The gradient of a tile's logits in a panel's tokens.
template <int C>
void make_dlogits(Width<C>, const Backward& backward, int64_t tile_index, int64_t panel) {
    const LogprobInputs& in = backward.inputs();
    const int64_t at = panel * kPanel;
    const Tile tile{backward.id + tile_index * kIds, backward.tile_ids(tile_index), backward.tile_weight(tile_index)};
    const Tokens tokens{backward.begin + at, backward.tokens().columns(panel),
                        backward.panels + at * backward.plan.depth};
    uint8_t& counts = backward.counts[panel * backward.plan.tiles + tile_index];
    int32_t keep[kIds * C * kLanes];
    if (in.kept) {
        int64_t cursor[kPanel];
        seek_kept(in, tokens.begin, tokens.count, tile.begin, cursor);
        counts = mark_kept(in, tile, tokens, C * kLanes, cursor, keep);
        if (!counts) return;
    }
    float* x = backward.dlogit(panel, tile_index);
    logit_tile<C>(in, tile, tokens, backward.plan.depth, backward.plan.pairs, in.kept ? keep : nullptr, x);
    int32_t target[C * kLanes];
    bool holds_target = false;
    for (int64_t i = 0; i < C * kLanes; ++i) {
        const int64_t id = i < tokens.count ? in.target[tokens.begin + i] - tile.begin : -1;
        const bool here = id >= 0 && id < tile.count;
        target[i] = here ? static_cast<int32_t>(id) : -1;
        holds_target |= here;
    }
    const float largest = backward.call.dentropy ? differentiate<C, true>(backward, at, tile.count, target, x)
                                                 : differentiate<C, false>(backward, at, tile.count, target, x);
    counts = holds_target || !(largest < backward.call.filter);
    for (int64_t v = 0; v < tile.count; ++v)
        for (int64_t i = tokens.count; i < C * kLanes; ++i) x[v * C * kLanes + i] = 0;
}

void make_dlogits(const Backward& backward, int64_t index) {
    const Panels tokens = backward.tokens();
    const int64_t tile = index % backward.tiles(), first = index / backward.tiles() * backward.plan.task_panels;
    for (int64_t panel = first; panel < smaller(first + backward.plan.task_panels, tokens.count()); ++panel)
        with_width(tokens.vectors(panel), [&](auto width) { make_dlogits(width, backward, tile, panel); });
}

// Writes columns [panel] of the sums of ids [begin, end) of the superblock to dweight, rounded to its type.
void write_dweight(const Backward& backward, int64_t panel, int64_t begin, int64_t end) {
    const LogprobInputs& in = backward.inputs();
    const Panels& columns = backward.plan.columns;
    const Matrix out{backward.call.dweight, in.hidden_size, in.hidden_size, in.weight_type, false};
    for (int64_t v = begin; v < end; ++v) {
        const float* sums = backward.dweight + panel * kPanel * backward.super() + v * columns.width(panel);
        char* to = const_cast<char*>(out.element(backward.id + v, panel * kPanel));
        narrow_run(in.weight_type, sums, columns.columns(panel), to);
    }
}

// Adds panels [chain, stop) of tokens to the sums of tiles [begin, end), in one panel of columns.
template <int C>
void add_dweight(Width<C>, const Backward& backward, int64_t column_panel, int64_t chain, int64_t stop, int64_t begin,
                 int64_t end) {
    const Panels tokens = backward.tokens();
    const float* columns = backward.hidden_columns + column_panel * kPanel * backward.plan.block;
    for (int64_t tile = begin; tile < end; ++tile) {
        float* at = backward.dweight + column_panel * kPanel * backward.super() + tile * kIds * C * kLanes;
        for (int64_t r = 0; r < backward.tile_ids(tile); r += kRows) {
            Float sum[kRows][C] = {};
            for (int64_t panel = chain; panel < stop; ++panel) {
                if (!backward.counted(panel, tile)) continue;
                const int64_t width = tokens.width(panel);
                multiply_add(backward.dlogit(panel, tile) + r * width, width, 1, columns + panel * kPanel * C * kLanes,
                             tokens.columns(panel), sum);
            }
#pragma GCC unroll 32
            for (int i = 0; i < kRows * C; ++i, at += kLanes)
                store(at, backward.first && chain == 0 ? sum[i / C][i % C] : load(at) + sum[i / C][i % C]);
        }
    }
}

void add_dweight(const Backward& backward, int64_t index) {
    const Panels &columns = backward.plan.columns, tokens = backward.tokens();
    const int64_t groups = parts(columns.count(), kColumnPanels);
    const int64_t begin = index / groups * kWeightTiles, end = smaller(begin + kWeightTiles, backward.tiles());
    const int64_t first = index % groups * kColumnPanels, last = smaller(first + kColumnPanels, columns.count());
    for (int64_t chain = 0; chain < tokens.count(); chain += kChainPanels) {
        const int64_t stop = smaller(chain + kChainPanels, tokens.count());
        for (int64_t panel = first; panel < last; ++panel)
            with_width(columns.vectors(panel),
                       [&](auto width) { add_dweight(width, backward, panel, chain, stop, begin, end); });
    }
    if (!backward.last) return;
    for (int64_t panel = first; panel < last; ++panel)
        write_dweight(backward, panel, begin * kIds, smaller(end * kIds, backward.ids));
}

// Adds `rows` rows and `columns` columns of a tile of sums to the matrix at `to`.
template <int C>
MOSAIC_INLINE void add_rows(const Float (&sum)[kRows][C], int64_t rows, int64_t columns, float* to, int64_t stride) {
    if (rows == kRows && columns == C * kLanes) {
#pragma GCC unroll 32
        for (int i = 0; i < kRows * C; ++i) {
            float* at = to + i / C * stride + i % C * kLanes;
            store(at, load(at) + sum[i / C][i % C]);
        }
        return;
    }
    float sums[kRows][C * kLanes];
    std::memcpy(sums, sum, sizeof sums);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t column = 0; column < columns; ++column) to[r * stride + column] += sums[r][column];
}

// Adds the superblock's ids to dhidden of panels [begin, end) of tokens, in one panel of columns.
template <int C>
void add_dhidden(Width<C>, const Backward& backward, int64_t column_panel, int64_t begin, int64_t end) {
    const Panels tokens = backward.tokens();
    const int64_t size = backward.inputs().hidden_size, present = backward.plan.columns.columns(column_panel);
    const float* columns = backward.weight_columns + column_panel * kPanel * backward.super();
    for (int64_t chain = 0; chain < backward.tiles(); chain += kChainTiles) {
        const int64_t stop = smaller(chain + kChainTiles, backward.tiles());
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t width = tokens.width(panel), count = tokens.columns(panel);
            for (int64_t r = 0; r < count; r += kRows) {
                Float sum[kRows][C] = {};
                for (int64_t tile = chain; tile < stop; ++tile)
                    if (backward.counted(panel, tile))
                        multiply_add(backward.dlogit(panel, tile) + r, 1, width, columns + tile * kIds * C * kLanes,
                                     backward.tile_ids(tile), sum);
                float* to =
                    backward.call.dhidden + (backward.begin + panel * kPanel + r) * size + column_panel * kPanel;
                add_rows(sum, smaller(kRows, count - r), present, to, size);
            }
        }
    }
}

void add_dhidden(const Backward& backward, int64_t index) {
    const Panels& columns = backward.plan.columns;
    const int64_t groups = parts(columns.count(), kColumnPanels);
    const int64_t begin = index / groups * kHiddenPanels;
    const int64_t end = smaller(begin + kHiddenPanels, backward.tokens().count());
    const int64_t first = index % groups * kColumnPanels;
    for (int64_t panel = first; panel < smaller(first + kColumnPanels, columns.count()); ++panel)
        with_width(columns.vectors(panel), [&](auto width) { add_dhidden(width, backward, panel, begin, end); });
}

// Adds the block's tokens to the sums of a tile.
void add_dbias(const Backward& backward, int64_t tile) {
    const Panels tokens = backward.tokens();
    for (int64_t v = 0; v < backward.tile_ids(tile); ++v) {
        Double sums{};
        for (int64_t panel = 0; panel < tokens.count(); ++panel) {
            if (!backward.counted(panel, tile)) continue;
            const float* dlogit = backward.dlogit(panel, tile) + v * tokens.width(panel);
            Float sum = load(dlogit);  // lanes without a token hold 0
            for (int c = 1; c < tokens.vectors(panel); ++c) sum += load(dlogit + c * kLanes);
            sums += widen(sum);
        }
        double sum = 0;
        for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
        double& total = backward.dbias[tile * kIds + v];
        total = backward.first ? sum : total + sum;
        if (backward.last) backward.call.dbias[backward.id + tile * kIds + v] = static_cast<float>(total);
    }
}

// One superblock of ids and one block of tokens. `new_tokens`: the block is not the one of the call before.
void differentiate_block(const Backward& backward, bool new_tokens, int64_t threads) {
    const LogprobBackward& call = backward.call;
    const int64_t tiles = backward.tiles(), panels = backward.tokens().count();
    const int64_t weights = backward.first ? tiles : 0;
    parallel_for(weights + (new_tokens ? panels : 0), threads, [&](int64_t index) {
        if (index < weights) return prepare_weight(backward, index);
        prepare_tokens(backward, index - weights);
    });
    parallel_for(tiles * parts(panels, backward.plan.task_panels), threads,
                 [&](int64_t index) { make_dlogits(backward, index); });
    const int64_t groups = parts(backward.plan.columns.count(), kColumnPanels);
    const int64_t of_dweight = call.dweight ? parts(tiles, kWeightTiles) * groups : 0;
    const int64_t of_dhidden = call.dhidden ? parts(panels, kHiddenPanels) * groups : 0;
    const int64_t of_dbias = call.dbias ? tiles : 0;
    parallel_for(of_dweight + of_dhidden + of_dbias, threads, [&](int64_t index) {
        if (index < of_dweight) return add_dweight(backward, index);
        index -= of_dweight;
        if (index < of_dhidden) return add_dhidden(backward, index);
        add_dbias(backward, index - of_dhidden);
    });
}

void clear_weight_gradients(const LogprobBackward& call) {
    const LogprobInputs& in = call.inputs;
    if (call.dweight) std::memset(call.dweight, 0, bytes_of(in.weight_type, in.vocab_size * in.hidden_size));
    if (call.dbias) std::memset(call.dbias, 0, in.vocab_size * sizeof(float));
}

}  // namespace

void linear_logprob_backward(const LogprobBackward& call) {
    const LogprobInputs& in = call.inputs;
    if (call.dhidden) std::memset(call.dhidden, 0, in.num_rows * in.hidden_size * sizeof(float));
    if (in.num_rows == 0) return clear_weight_gradients(call);
    const Plan plan = make_plan(in);
    const int64_t block = plan.block, super = plan.tiles * kIds, padded = plan.columns.padded();
    const int64_t threads = threads_for(in, 3 * in.num_rows);
    const Buffer state(kStates * block * sizeof(float)), panels(block * plan.depth * sizeof(float));
    const Buffer hidden_columns(call.dweight ? block * padded * sizeof(float) : 0);
    const Buffer weight_columns(call.dhidden ? super * padded * sizeof(float) : 0);
    const Buffer weight(super * tile_stride(plan.depth) * sizeof(float));
    const Buffer dlogits(block * super * sizeof(float)), counts(block / kPanel * plan.tiles);
    const Buffer dweight(call.dweight ? super * padded * sizeof(float) : 0), dbias(super * sizeof(double));
    float* const rows = state.as<float>();
    Backward backward{call,
                      plan,
                      {rows, rows + block, rows + 2 * block, rows + 3 * block, rows + 4 * block, rows + 5 * block},
                      panels.as<float>(),
                      call.dweight ? hidden_columns.as<float>() : nullptr,
                      call.dhidden ? weight_columns.as<float>() : nullptr,
                      weight.as<float>(),
                      dlogits.as<float>(),
                      counts.as<uint8_t>(),
                      dweight.as<float>(),
                      dbias.as<double>()};
    for (backward.id = 0; backward.id < in.vocab_size; backward.id += super) {
        backward.ids = smaller(super, in.vocab_size - backward.id);
        for (backward.begin = 0; backward.begin < in.num_rows; backward.begin += block) {
            backward.count = smaller(block, in.num_rows - backward.begin);
            backward.first = backward.begin == 0;
            backward.last = backward.begin + block >= in.num_rows;
            differentiate_block(backward, backward.id == 0 || block < in.num_rows, threads);
        }
    }
}

}  // namespace mosaic::MOSAIC_ISA

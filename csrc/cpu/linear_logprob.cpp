#include "linear_logprob.h"

#include "cpu/linear_logprob_tile.h"

namespace mosaic::MOSAIC_ISA {
namespace {

// Ids whose statistics a task gathers in float32, before they are added up in float64.
constexpr int64_t kChunkIds = 8 * kIds;
// A block of tokens has this many words in its panels: half a second-level cache of 2 MiB, next to a tile's weight
// rows.
constexpr int64_t kBlockWords = 288 * 1024;
// The blocks whose panels and partial statistics are held at once have together this many words.
constexpr int64_t kHeldWords = 2048 * 1024;

// How the call is cut up. Nothing here that shapes a sum depends on the number of rows or threads.
struct Plan {
    bool pairs;
    Matrix hidden, weight;
    int64_t depth, chunks;
    int64_t block;  // tokens of a block, a multiple of kPanel
    int64_t held;   // tokens of the blocks held at once, a multiple of block
};

Plan make_plan(const LogprobInputs& in) {
    Plan plan;
    plan.pairs = dot_products(in);
    plan.hidden = hidden_matrix(in, plan.pairs);
    plan.weight = weight_matrix(in, plan.pairs);
    plan.depth = plan.weight.depth();
    plan.chunks = parts(in.vocab_size, kChunkIds);
    const int64_t most = smaller(1024, larger(1, kBlockWords / (plan.depth + 1))) / kPanel * kPanel;
    const int64_t blocks = parts(in.num_rows, larger(kPanel, most));
    plan.block = rounded_up(parts(in.num_rows, blocks), kPanel);
    const int64_t per_token = plan.depth + 3 * plan.chunks;
    plan.held = plan.block * larger(1, smaller(blocks, kHeldWords / (plan.block * per_token)));
    return plan;
}

// Statistics of a chunk of ids, for each token held: [chunk][token].
struct Partials {
    float *largest, *sum, *weighted;
};

// What one thread works in.
struct Scratch {
    float *weight, *logits;
    int32_t* keep;
    int64_t* cursor;  // [block]
};

struct Forward {
    const LogprobForward& call;
    Plan plan;
    float* panels;  // of the tokens held
    Partials partials;
    int64_t begin, count;  // the tokens held
};

// Adds a tile to the running statistics of its panel's tokens. They are rescaled once a tile, and a tile is summed by
// itself, which also rounds less.
template <int C, bool with_weighted>
void add_tile(const float* x, int64_t count, float* largest, float* sum, float* weighted) {
    Float top[C], shift[C], total[C] = {}, product[C] = {};
    for (int c = 0; c < C; ++c) top[c] = load(largest + c * kLanes);
    for (int64_t v = 0; v < count; ++v)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) top[c] = max(load(x + (v * C + c) * kLanes), top[c]);
    for (int c = 0; c < C; ++c) shift[c] = select(top[c] == -kInfinity, Float{}, top[c]);
    for (int64_t v = 0; v < count; ++v) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c, x += kLanes) {
            // The bound makes exp 0, and keeps 0 * -infinity out of the product.
            const Float shifted = max(broadcast(-120.0f), load(x) - shift[c]);
            const Float power = exp_inside(shifted);
            total[c] += power;
            if (with_weighted) product[c] = fma(power, shifted, product[c]);
        }
    }
    for (int c = 0; c < C; ++c) {
        const int lane = c * kLanes;
        const Float before = load(largest + lane), old = load(sum + lane);
        const Float step = select(before == -kInfinity, Float{}, before - shift[c]), scale = exp(step);
        store(largest + lane, top[c]);
        store(sum + lane, fma(scale, old, total[c]));
        if (with_weighted) store(weighted + lane, fma(scale, fma(step, old, load(weighted + lane)), product[c]));
    }
}

template <int C>
void score_panel(Width<C>, const Forward& forward, const Tile& tile, int64_t panel, int64_t chunk,
                 const Scratch& scratch, int64_t* cursor) {
    const LogprobInputs& in = forward.call.inputs;
    const Plan& plan = forward.plan;
    const int64_t at = panel * kPanel;  // in the tokens held
    const Tokens tokens{forward.begin + at, smaller(kPanel, forward.count - at), forward.panels + at * plan.depth};
    if (in.kept && !mark_kept(in, tile, tokens, C * kLanes, cursor, scratch.keep)) return;
    float* x = scratch.logits;
    logit_tile<C>(in, tile, tokens, plan.depth, plan.pairs, in.kept ? scratch.keep : nullptr, x);
    for (int64_t i = 0; i < tokens.count; ++i) {
        const uint64_t v = static_cast<uint64_t>(in.target[tokens.begin + i]) - static_cast<uint64_t>(tile.begin);
        if (v < static_cast<uint64_t>(tile.count)) forward.call.target_logit[tokens.begin + i] = x[v * C * kLanes + i];
    }
    const int64_t state = chunk * plan.held + at;
    float* const largest = forward.partials.largest + state;
    float* const sum = forward.partials.sum + state;
    if (forward.call.weighted)
        add_tile<C, true>(x, tile.count, largest, sum, forward.partials.weighted + state);
    else
        add_tile<C, false>(x, tile.count, largest, sum, nullptr);
}

// The statistics of one chunk of ids for one block of tokens.
void score_chunk(const Forward& forward, int64_t block, int64_t chunk, const Scratch& scratch) {
    const LogprobInputs& in = forward.call.inputs;
    const Plan& plan = forward.plan;
    const int64_t first = block * plan.block, count = smaller(plan.block, forward.count - first);
    const Panels panels{count};
    const int64_t begin = chunk * kChunkIds, end = smaller(begin + kChunkIds, in.vocab_size);
    for (int64_t i = 0; i < panels.padded(); ++i) {
        const int64_t state = chunk * plan.held + first + i;
        forward.partials.largest[state] = -kInfinity;
        forward.partials.sum[state] = 0;
        if (forward.call.weighted) forward.partials.weighted[state] = 0;
    }
    if (in.kept) seek_kept(in, forward.begin + first, count, begin, scratch.cursor);
    for (int64_t id = begin; id < end; id += kIds) {
        const int64_t ids = smaller(kIds, end - id);
        read_weight_rows(plan.weight, id, ids, scratch.weight);
        const Tile tile{id, ids, scratch.weight};
        for (int64_t panel = 0; panel < panels.count(); ++panel)
            with_width(panels.vectors(panel), [&](auto width) {
                score_panel(width, forward, tile, first / kPanel + panel, chunk, scratch,
                            scratch.cursor + panel * kPanel);
            });
    }
}

// Adds up the chunks of kLanes tokens, in float64 and in order.
void combine(const Forward& forward, int64_t at) {
    const int64_t chunks = forward.plan.chunks, held = forward.plan.held;
    const LogprobForward& call = forward.call;
    Float top = broadcast(-kInfinity);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) top = max(load(forward.partials.largest + chunk * held + at), top);
    const Float shift = select(top == -kInfinity, Float{}, top);
    Double total{}, product{};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t state = chunk * held + at;
        const Float largest = load(forward.partials.largest + state);
        const Float step = select(largest == -kInfinity, Float{}, largest - shift);
        const Double scale = widen(exp(step)), sum = widen(load(forward.partials.sum + state));
        total += scale * sum;
        if (call.weighted) product += scale * (widen(load(forward.partials.weighted + state)) + widen(step) * sum);
    }
    const int64_t first = forward.begin + at, count = smaller(kLanes, forward.count - at);
    std::memcpy(call.largest + first, &top, count * sizeof(float));
    std::memcpy(call.normaliser + first, &total, count * sizeof(double));
    if (call.weighted) std::memcpy(call.weighted + first, &product, count * sizeof(double));
}

}  // namespace

void linear_logprob_forward(const LogprobForward& call) {
    const LogprobInputs& in = call.inputs;
    if (in.num_rows == 0) return;
    const Plan plan = make_plan(in);
    const int64_t held = smaller(plan.held, rounded_up(in.num_rows, kPanel)), state = plan.chunks * plan.held;
    const int64_t threads = threads_for(in, in.num_rows);
    const int64_t weight_words = kIds * tile_stride(plan.depth);
    const Buffer panels(held * plan.depth * sizeof(float)), partials(3 * state * sizeof(float));
    const Buffer weight(threads * weight_words * sizeof(float)), logits(threads * kIds * kPanel * sizeof(float));
    const Buffer keep(in.kept ? threads * kIds * kPanel * sizeof(int32_t) : 0);
    const Buffer cursor(in.kept ? threads * plan.block * sizeof(int64_t) : 0);
    for (int64_t n = 0; n < in.num_rows; ++n) call.target_logit[n] = 0;

    Forward forward{call,
                    plan,
                    panels.as<float>(),
                    {partials.as<float>(), partials.as<float>() + state, partials.as<float>() + 2 * state},
                    0,
                    0};
    for (; forward.begin < in.num_rows; forward.begin += forward.count) {
        forward.count = smaller(plan.held, in.num_rows - forward.begin);
        const Panels all{forward.count};
        parallel_for(all.count(), threads, [&](int64_t panel) {
            pack_tokens(plan.hidden, in.row + forward.begin + panel * kPanel, all.columns(panel),
                        forward.panels + panel * kPanel * plan.depth);
        });
        const int64_t blocks = parts(forward.count, plan.block);
        parallel_for_slots(blocks * plan.chunks, threads, [&](int64_t index, int64_t slot) {
            const Scratch scratch{weight.as<float>() + slot * weight_words, logits.as<float>() + slot * kIds * kPanel,
                                  keep.as<int32_t>() + slot * kIds * kPanel, cursor.as<int64_t>() + slot * plan.block};
            score_chunk(forward, index % blocks, index / blocks, scratch);
        });
        parallel_for(parts(forward.count, kLanes), threads, [&](int64_t part) { combine(forward, part * kLanes); });
    }
}

}  // namespace mosaic::MOSAIC_ISA

// Random packed layouts with masks, and what several ops define over them.
#pragma once

#include <limits>
#include <vector>

#include "check.h"

namespace mosaic::test {

struct PackedTokens {
    Array<int32_t> cu_seqlens;
    Array<int64_t> segment_trajectory;
    Array<uint8_t> mask;
    int64_t num_trajectories;
    std::vector<int64_t> segment, trajectory;  // of each token
    std::vector<int64_t> active;               // tokens of each trajectory
    int64_t num_active = 0;

    int64_t num_tokens() const { return mask.size(); }
    int64_t num_segments() const { return segment_trajectory.size(); }

    // The weight of an active token where none is given: every trajectory weighs the same, and in it every token.
    double default_weight(int64_t token) const {
        const auto with_tokens = std::count_if(active.begin(), active.end(), [](int64_t count) { return count > 0; });
        return 1.0 / (static_cast<double>(with_tokens) *
                      static_cast<double>(active[static_cast<size_t>(trajectory[static_cast<size_t>(token)])]));
    }
};

inline PackedTokens packed_tokens(Random& random, const std::vector<int64_t>& lengths, double share_active) {
    const auto num_segments = static_cast<int64_t>(lengths.size());
    const int64_t num_trajectories = 1 + random.below(num_segments + 2);
    Array<int32_t> cu_seqlens(num_segments + 1);
    for (int64_t s = 0; s < num_segments; ++s)
        cu_seqlens[s + 1] = cu_seqlens[s] + static_cast<int32_t>(lengths[static_cast<size_t>(s)]);
    Array<uint8_t> mask(cu_seqlens[num_segments]);
    PackedTokens out{std::move(cu_seqlens),
                     Array<int64_t>(num_segments),
                     std::move(mask),
                     num_trajectories,
                     {},
                     {},
                     std::vector<int64_t>(static_cast<size_t>(num_trajectories))};
    for (int64_t s = 0; s < num_segments; ++s) {
        const int64_t trajectory = out.segment_trajectory[s] = random.below(num_trajectories);
        for (int64_t t = out.cu_seqlens[s]; t < out.cu_seqlens[s + 1]; ++t) {
            out.segment.push_back(s);
            out.trajectory.push_back(trajectory);
            out.mask[t] = random.chance(share_active);
            out.active[static_cast<size_t>(trajectory)] += out.mask[t];
            out.num_active += out.mask[t];
        }
    }
    return out;
}

// One number a token, NaN where the mask is 0: nothing may read it there.
inline Array<float> active_numbers(Random& random, const PackedTokens& packed, float low, float high) {
    Array<float> out(packed.num_tokens(), std::numeric_limits<float>::quiet_NaN());
    for (int64_t t = 0; t < out.size(); ++t)
        if (packed.mask[t]) out[t] = random.uniform(low, high);
    return out;
}

// Lengths that end before, at and after a vector and a block; empty segments; and many of them.
inline std::vector<std::vector<int64_t>> small_layouts() {
    std::vector<std::vector<int64_t>> out{{},           {0},
                                          {1},          {0, 0, 0},
                                          {2, 0, 1},    {3, 5, 0, 8, 1, 7, 4},
                                          {15, 16, 17}, {31, 1, 32, 33},
                                          {255, 2},     {256, 257, 0, 3}};
    out.emplace_back(2000, 0);
    out.back()[1000] = 5;
    return out;
}

// Large enough for several threads and chunks: few long segments, and many short ones.
inline std::vector<std::vector<int64_t>> large_layouts() {
    std::vector<int64_t> many;
    for (int64_t i = 0; i < 400; ++i) many.push_back((i * 7919) % 700);
    return {{150001}, {3, 70000, 0, 65537}, many};
}

}  // namespace mosaic::test

// The critic's loss over packed tokens, its metrics and gradient. Semantics: mosaic_kernels/value_loss.
#pragma once

#include <cstdint>

#include "isa.h"

namespace mosaic {

// T tokens, S segments, R trajectories. All arrays are contiguous.
struct ValueLoss {
    const float* value;         // [T]
    const float* old_value;     // [T], or null: not clipped
    const float* returns;       // [T]
    const uint8_t* mask;        // [T], 0 or 1
    const float* token_weight;  // [T], or null: 1 / (trajectories with active tokens * active tokens of its own)
    const int32_t* cu_seqlens;  // [S+1]
    const int64_t* segment_trajectory;  // [S], in [0, R)
    int64_t num_segments;
    int64_t num_trajectories;
    double clip;
    int64_t threads;
    float* loss;        // one number, written
    float* statistics;  // written: clip_fraction, value_mean, return_mean, explained_variance
    int64_t* counts;    // written: policy_tokens, nonfinite_tokens
    float* dvalue;      // [T], written; or null: not wanted
};

MOSAIC_CPU_KERNEL(void, value_loss, const ValueLoss&)

}  // namespace mosaic

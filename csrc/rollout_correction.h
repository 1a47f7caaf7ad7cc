// Truncated importance weights against the rollout engine. Semantics: mosaic_kernels/rollout_correction.
#pragma once

#include <cstdint>

#include "isa.h"
#include "policy_loss.h"  // Level

namespace mosaic {

// T tokens, S segments, R trajectories. All arrays are contiguous.
struct RolloutCorrection {
    const float* logprob;               // [T]
    const float* rollout_logprob;       // [T]
    const uint8_t* mask;                // [T], 0 or 1
    const int32_t* cu_seqlens;          // [S+1]
    const int64_t* segment_trajectory;  // [S], in [0, R)
    int64_t num_segments;
    int64_t num_trajectories;
    Level level;
    double cap;
    double floor;  // negative: no token is dropped
    int64_t threads;
    float* weight;      // [T], written
    uint8_t* keep;      // [T], written
    float* statistics;  // written: ratio_mean, ratio_max, capped_fraction, dropped_fraction, logprob_difference,
                        // logprob_difference_max, kl
    int64_t* counts;    // written: policy_tokens, nonfinite_tokens
};

MOSAIC_CPU_KERNEL(void, rollout_correction, const RolloutCorrection&)

}  // namespace mosaic

// The policy-gradient loss of packed tokens, its metrics and gradients. Semantics: mosaic_kernels/policy_loss.
#pragma once

#include <cstdint>

#include "isa.h"

namespace mosaic {

enum class Objective { clip, cispo, sao, reinforce };
enum class Level { token, segment, trajectory };
enum class KlEstimator { k1, k2, k3 };

// T tokens, S segments, R trajectories. All arrays are contiguous.
struct PolicyLoss {
    const float* logprob;            // [T]
    const float* old_logprob;        // [T]
    const float* advantage;          // [T]
    const uint8_t* mask;             // [T], 0 or 1
    const float* token_weight;       // [T], or null: 1 / (trajectories with active tokens * active tokens of its own)
    const float* importance_weight;  // [T], or null: 1
    const float* ref_logprob;        // [T], or null: no KL term
    const float* entropy;            // [T], or null: no entropy term
    const int32_t* cu_seqlens;       // [S+1]
    const int64_t* segment_trajectory;  // [S], in [0, R)
    int64_t num_segments;
    int64_t num_trajectories;
    Objective objective;
    Level level;
    KlEstimator estimator;
    double low;
    double high;
    double dual;  // infinity: none
    double kl_coef;
    double entropy_coef;
    int64_t threads;
    float* loss;        // one number, written
    float* statistics;  // written: clip_fraction, approx_kl, ratio_mean, ratio_max, kl, entropy
    int64_t* counts;    // written: policy_tokens, nonfinite_tokens
    float* dlogprob;    // [T], written; or null: not wanted
    float* dentropy;    // [T], written; or null: not wanted
};

MOSAIC_CPU_KERNEL(void, policy_loss, const PolicyLoss&)

}  // namespace mosaic

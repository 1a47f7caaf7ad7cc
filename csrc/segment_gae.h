// Advantages and returns over packed segments. Semantics: mosaic_kernels/segment_gae.
#pragma once

#include <cstdint>

#include "isa.h"

namespace mosaic {

enum class Correction { none, position, chain };

// T tokens, S segments, R trajectories. All arrays are contiguous.
struct SegmentGae {
    const float* reward;                // [T]
    const float* value;                 // [T]
    const uint8_t* mask;                // [T], 0 or 1
    const int32_t* cu_seqlens;          // [S+1]
    const int64_t* segment_trajectory;  // [S], in [0, R)
    const double* lam;                  // [S]
    const double* lam_critic;           // [S], or null: lam
    const double* bootstrap_value;      // [S], or null: 0
    int64_t num_segments;
    int64_t num_trajectories;
    double gamma;
    Correction correction;
    bool corrected_returns;
    int64_t threads;
    float* advantage;  // [T], written
    float* returns;    // [T], written
};

// Returns -1, or the first segment that holds a reward but no active token to give it to (none and position).
MOSAIC_CPU_KERNEL(int64_t, segment_gae, const SegmentGae&)

}  // namespace mosaic

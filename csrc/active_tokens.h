// Active tokens of each segment, and a value of each segment on its active tokens: the two passes over all tokens that
// normalization_weights takes. Semantics: mosaic_kernels/policy_loss/active_tokens.py.
#pragma once

#include <cstdint>

#include "isa.h"

namespace mosaic {

// T tokens, S segments. All arrays are contiguous.
struct CountActive {
    const uint8_t* mask;        // [T], 0 or 1
    const int32_t* cu_seqlens;  // [S+1]
    int64_t num_segments;
    int64_t threads;
    int64_t* count;  // [S], written
};

struct SpreadActive {
    const float* value;         // [S]
    const uint8_t* mask;        // [T], 0 or 1
    const int32_t* cu_seqlens;  // [S+1]
    int64_t num_segments;
    int64_t threads;
    float* out;  // [T], written; 0 on masked tokens
};

MOSAIC_CPU_KERNEL(void, count_active, const CountActive&)
MOSAIC_CPU_KERNEL(void, spread_active, const SpreadActive&)

}  // namespace mosaic

// Attention over packed segments and branches of their prefixes. Semantics: mosaic_kernels/branch_attention.
#pragma once

#include <cstdint>

#include "element_type.h"
#include "isa.h"

namespace mosaic {

// A tensor [T, H, D]: the D elements of a head are adjacent, tokens and heads lie anywhere.
struct HeadTensor {
    const void* data;
    int64_t token_stride;  // elements from one token to the next
    int64_t head_stride;
};

// T tokens in S segments. Query head h reads key-value head h / (query_heads / key_heads).
struct AttentionInputs {
    HeadTensor query;              // [T, query_heads, head_size]
    HeadTensor key;                // [T, key_heads, head_size]
    HeadTensor value;              // [T, key_heads, head_size]
    ElementType type;              // of query, key, value, output and all but one of their gradients
    const int32_t* cu_seqlens;     // [S+1], from 0 to T, never decreasing
    const int64_t* parent;         // [S] a root's index or -1; or null: no segment is a branch
    const int64_t* prefix_length;  // [S] at most the parent's length; null if parent is
    int64_t num_segments;
    int64_t query_heads;
    int64_t key_heads;
    int64_t head_size;
    float scale;
    float softcap;   // > 0, or 0: none
    int32_t window;  // >= 1; INT32_MAX: all
    int64_t threads;
};

struct AttentionForward {
    AttentionInputs inputs;
    void* output;  // [T, query_heads, head_size], contiguous, written
    // [T, query_heads, 2], written: the largest of the scores that a token sees, and the log of the sum of
    // exp(score - largest). Their sum, the log-sum-exp, would be rounded as coarsely as large scores are.
    float* statistics;
};

struct AttentionBackward {
    AttentionInputs inputs;
    HeadTensor output;        // as forward gave it
    HeadTensor doutput;       // [T, query_heads, head_size]
    const float* statistics;  // as forward gave it
    float* dquery;            // [T, query_heads, head_size], contiguous, float32 whatever the type, written
    void* dkey;               // [T, key_heads, head_size], contiguous, written
    void* dvalue;             // [T, key_heads, head_size], contiguous, written
};

MOSAIC_CPU_KERNEL(void, branch_attention_forward, const AttentionForward&)
MOSAIC_CPU_KERNEL(void, branch_attention_backward, const AttentionBackward&)

}  // namespace mosaic

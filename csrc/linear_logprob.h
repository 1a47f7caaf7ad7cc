// Log-probs of chosen tokens straight from hidden states and the output head. Semantics: mosaic_kernels/linear_logprob.
#pragma once

#include <cstdint>

#include "element_type.h"
#include "isa.h"

namespace mosaic {

// N scored rows out of T, head of V rows (this rank's part of the vocabulary), hidden size H.
// x[n, v] = softcap'd(hidden[row[n]] . weight[v] + bias[v]) / temperature[n], and -infinity where v is not kept in row
// n.
struct LogprobInputs {
    const void* hidden;     // rows of H adjacent elements
    int64_t hidden_stride;  // elements from one row to the next
    ElementType hidden_type;
    const void* weight;  // [V] rows of H adjacent elements
    int64_t weight_stride;
    ElementType weight_type;
    const float* bias;         // [V], or null: 0
    const int64_t* row;        // [N] rows of hidden to score
    const int64_t* target;     // [N] in [0, V), or -1 where the target is another rank's
    const float* temperature;  // [N] > 0, or null: 1
    float softcap;             // > 0, or 0: none
    const int64_t* kept;       // ids in [0, V), ascending and distinct inside each row, the target among them; or null
    const int64_t* kept_offsets;  // [N+1] where each row's ids start
    const uint8_t* kept_whole;    // [N] 1: the row keeps the whole vocabulary
    int64_t num_rows;
    int64_t vocab_size;
    int64_t hidden_size;
    int64_t threads;
};

// Statistics of each row over the V ids, from which the wrapper (after adding up the ranks) makes the results:
// logprob = (target_logit - largest) - log(normaliser),   entropy = log(normaliser) - weighted / normaliser.
struct LogprobForward {
    LogprobInputs inputs;
    float* largest;       // [N] max of x; -infinity if there is none
    double* normaliser;   // [N] sum of exp(x - largest), >= 1 if largest is finite, 0 if it is -infinity
    double* weighted;     // [N] sum of exp(x - largest) (x - largest); or null: not wanted
    float* target_logit;  // [N] x of the target; 0 where target is -1
};

// dx = dlogprob (1[target] - p) - dentropy p (log p + entropy),   p = exp((x - largest) - log_normaliser).
struct LogprobBackward {
    LogprobInputs inputs;
    const float* largest;         // [N] over all ranks
    const float* log_normaliser;  // [N] over all ranks
    const float* entropy;         // [N]; or null if dentropy is
    const float* dlogprob;        // [N]
    const float* dentropy;        // [N], or null: 0
    // Tiles of ids and rows whose largest p is below this, and which hold no target, add nothing to the gradients. With
    //     g[n] = (|dlogprob[n]| + |dentropy[n]| (|log filter| + entropy[n])) / temperature[n],    filter <= 1/e,
    // that leaves out at most min(1, V filter) g[n] max |weight[v]| of row n of dhidden (with dentropy: V filter), and
    // at most filter * sum over n of g[n] |hidden[row[n]]| of a row of dweight.
    float filter;    // 0: every tile counts
    float* dhidden;  // [N, H], written; or null: not wanted
    void* dweight;   // [V, H] of weight_type, rounded once, written; or null
    float* dbias;    // [V], written; or null
};

MOSAIC_CPU_KERNEL(void, linear_logprob_forward, const LogprobForward&)
MOSAIC_CPU_KERNEL(void, linear_logprob_backward, const LogprobBackward&)

}  // namespace mosaic

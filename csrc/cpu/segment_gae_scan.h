// The recursion of segment_gae over a stretch of tokens, kWidth at a time, in float64.
//
// Write d = gamma * lam, G = A + V for the return of an active token, and C for what the tokens after it are worth to
// it. The step A = reward + gamma V_next - V + d A_next is then, with everything that concerns the next token in C:
//     G = reward + C        A = G - V        C before the token = gamma V + d A = (gamma - d) V + d G
// A masked token passes C on and adds its reward. So every token is a map C -> b + a C that asks nothing of its
// neighbours:
//     active: a = d, b = (gamma - d) V + d reward        masked: a = 1, b = reward
// and the maps of a block are composed in log2(kWidth) rounds, in which a lane takes in the 1, 2, 4 .. lanes after it.
// float64: 100,000 tokens at lam = 1 then cost no accuracy beyond the rounding of the results to float32.
#pragma once

#include <cmath>
#include <utility>

#include "cpu/simd.h"
#include "segment_gae.h"

namespace mosaic::MOSAIC_ISA {
namespace {

constexpr int kWidth = kLanes / 2;  // float64 lanes of one register
typedef double Wide __attribute__((vector_size(8 * kWidth)));
typedef int64_t WideInt __attribute__((vector_size(8 * kWidth)));

MOSAIC_INLINE Wide spread(double x) { return x - Wide{}; }

// Conversions by instruction: compilers take vectors of unequal width apart.
MOSAIC_INLINE Wide load_wide(const float* x) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtps_pd(-1, _mm256_loadu_ps(x));
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(_mm_loadu_ps(x));
#else
    return Wide{x[0], x[1]};
#endif
}

MOSAIC_INLINE void store_narrow(float* x, Wide value) {
#if defined(__AVX512F__)
    _mm256_storeu_ps(x, _mm512_maskz_cvtpd_ps(-1, value));
#elif defined(__AVX2__)
    _mm_storeu_ps(x, _mm256_cvtpd_ps(value));
#else
    for (int lane = 0; lane < kWidth; ++lane) x[lane] = static_cast<float>(value[lane]);
#endif
}

// -1 where a byte of the mask is 1; the first token's byte is the lowest.
MOSAIC_INLINE WideInt lanes_of(uint64_t mask) {
#if defined(__AVX512F__)
    return (WideInt)_mm512_maskz_cvtepu8_epi64(-1, _mm_cvtsi64_si128(static_cast<int64_t>(mask))) != 0;
#elif defined(__AVX2__)
    return (WideInt)_mm256_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<int64_t>(mask))) != 0;
#else
    return WideInt{-static_cast<int64_t>(mask & 1), -static_cast<int64_t>(mask >> 8 & 1)};
#endif
}

// Whether kWidth numbers are all +0.
MOSAIC_INLINE bool all_zero(const float* x) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm256_testz_si256(bits, bits);
#elif defined(__AVX2__)
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm_testz_si128(bits, bits);
#else
    uint64_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return !bits;
#endif
}

MOSAIC_INLINE Wide fma(Wide a, Wide b, Wide c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_pd(a, b, c);
#else
    return a * b + c;
#endif
}

template <int64_t count, int... lane>
MOSAIC_INLINE Wide shifted(Wide x, Wide next, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, next, (lane + count)...);
#else
    return __builtin_shuffle(x, next, WideInt{(lane + count)...});
#endif
}

// Lane i gets lane i + count of x, the last lanes the first ones of `next`.
template <int64_t count>
MOSAIC_INLINE Wide shift(Wide x, Wide next) {
    return shifted<count>(x, next, std::make_integer_sequence<int, kWidth>());
}

// One recursion, with one lambda, on its way through a unit.
struct Trace {
    double decay = 0, rest = 0;  // d, gamma - d
    double carry = 0;            // C
    // The tokens passed so far as one map: C -> sum + product * C.
    double sum = 0, product = 1;

    MOSAIC_INLINE void use(double gamma, double lam) {
        decay = gamma * lam;
        rest = gamma - decay;
    }

    MOSAIC_INLINE void add(double reward) {
        carry += reward;
        sum += reward;
    }
};

// What a pass over tokens is for: writing the results, composing the tokens into one map, or both.
enum class Pass { write, compose, both };

// A trace inside the loop over blocks.
template <Pass pass>
struct BlockTrace {
    Wide decay, rest;
    Wide power[3];     // d^1, d^2, d^4
    Wide tail, whole;  // d^(kWidth - lane), d^kWidth
    Wide carry;        // C, in every lane
    Wide sum;          // the blocks passed send C to  sum over lanes of d^lane sum[lane], plus a multiple of C

    MOSAIC_INLINE explicit BlockTrace(const Trace& trace)
        : decay(spread(trace.decay)), rest(spread(trace.rest)), carry(spread(trace.carry)), sum{} {
        power[0] = decay;
        power[1] = power[0] * power[0];
        power[2] = power[1] * power[1];
        const Wide one = spread(1.0);
        tail = decay;
        tail = tail * shift<1>(tail, one);
        if constexpr (kWidth > 2) tail = tail * shift<2>(tail, one);
        if constexpr (kWidth > 4) tail = tail * shift<4>(tail, one);
        whole = spread(tail[0]);
    }

    // Passes kWidth active tokens and returns their A.
    MOSAIC_INLINE Wide pass_active(Wide reward, Wide value) {
        Wide b = fma(rest, value, decay * reward);
        if constexpr (pass != Pass::write) sum = fma(sum, whole, b);
        if constexpr (pass == Pass::compose) return b;
        b = fma(power[0], shift<1>(b, Wide{}), b);
        if constexpr (kWidth > 2) b = fma(power[1], shift<2>(b, Wide{}), b);
        if constexpr (kWidth > 4) b = fma(power[2], shift<4>(b, Wide{}), b);
        return advance(fma(tail, carry, b), reward, value);
    }

    // The same where only some are active; a masked token's result means nothing.
    MOSAIC_INLINE Wide pass_mixed(Wide reward, Wide value, WideInt active) {
        Wide b = active ? fma(rest, value, decay * reward) : reward;
        Wide a = active ? decay : spread(1.0);
        compose<1>(a, b);
        if constexpr (kWidth > 2) compose<2>(a, b);
        if constexpr (kWidth > 4) compose<4>(a, b);
        if constexpr (pass != Pass::write) {
            Wide first{};
            first[0] = b[0];
            sum = fma(sum, spread(a[0]), first);
        }
        if constexpr (pass == Pass::compose) return b;
        return advance(fma(a, carry, b), reward, value);
    }

    template <int64_t count>
    MOSAIC_INLINE static void compose(Wide& a, Wide& b) {
        b = fma(a, shift<count>(b, Wide{}), b);
        a = a * shift<count>(a, spread(1.0));
    }

    // `before` is C before each token: what the one in front of it sees.
    MOSAIC_INLINE Wide advance(Wide before, Wide reward, Wide value) {
        const Wide seen = shift<1>(before, carry);
        carry = spread(before[0]);
        return reward + seen - value;
    }

    // Hands the trace back after blocks with `active` active tokens.
    MOSAIC_INLINE void finish(Trace& trace, int64_t active) const {
        trace.carry = carry[0];
        if constexpr (pass == Pass::write) return;
        double total = 0;
        for (int lane = kWidth - 1; lane >= 0; --lane) total = total * trace.decay + sum[lane];
        const double factor = pow(trace.decay, static_cast<double>(active));
        trace.sum = total + factor * trace.sum;
        trace.product *= factor;
    }
};

// The traces and factors of one segment: the results are advantage_scale * A and returns_scale * A_critic + V.
struct Scan {
    Trace actor, critic;  // critic: with lam_critic, if the call has one
    double advantage_scale = 1, returns_scale = 1;
};

// One token; `extra` is added to its reward.
template <Pass pass, bool has_critic>
MOSAIC_INLINE void pass_token(const SegmentGae& call, int64_t token, double extra, Scan& scan) {
    const bool active = call.mask[token];
    const double reward = call.reward[token] + extra, value = active ? call.value[token] : 0.0;
    double advantage[2];
    Trace* const traces[] = {&scan.actor, &scan.critic};
    for (int index = 0; index < 1 + has_critic; ++index) {
        Trace& trace = *traces[index];
        advantage[index] = reward + trace.carry - value;
        if (!active) {
            trace.add(reward);
            continue;
        }
        trace.carry = trace.rest * value + trace.decay * (reward + trace.carry);
        trace.sum = trace.rest * value + trace.decay * (reward + trace.sum);
        trace.product *= trace.decay;
    }
    if constexpr (pass == Pass::compose) return;
    const double returns = scan.returns_scale * advantage[has_critic] + value;
    call.advantage[token] = active ? static_cast<float>(scan.advantage_scale * advantage[0]) : 0;
    call.returns[token] = active ? static_cast<float>(returns) : 0;
}

// Whole blocks from `end` backwards, as many as fit above `begin`: returns where the last one begins.
template <Pass pass, bool has_critic>
int64_t pass_blocks(const SegmentGae& call, int64_t begin, int64_t end, Scan& scan) {
    if (end - begin < kWidth) return end;
    BlockTrace<pass> actor(scan.actor), critic(scan.critic);
    const Wide advantage_scale = spread(scan.advantage_scale), returns_scale = spread(scan.returns_scale);
    constexpr uint64_t ones = 0x0101010101010101, every = ones >> (64 - 8 * kWidth);
    int64_t active_tokens = 0;
    // Copies, because stores of vectors could change the call as far as the compiler knows.
    const uint8_t* const masks = call.mask;
    const float *const rewards = call.reward, *const values = call.value;
    float *const advantages = call.advantage, *const returns = call.returns;
    while (end - begin >= kWidth) {
        end -= kWidth;
        uint64_t mask = 0;
        std::memcpy(&mask, masks + end, kWidth);
        if (mask == every) {
            const Wide reward = load_wide(rewards + end), value = load_wide(values + end);
            active_tokens += kWidth;
            const Wide advantage = actor.pass_active(reward, value);
            const Wide for_returns = has_critic ? critic.pass_active(reward, value) : advantage;
            if constexpr (pass == Pass::compose) continue;
            store_narrow(advantages + end, advantage_scale * advantage);
            store_narrow(returns + end, fma(returns_scale, for_returns, value));
        } else if (mask == 0 && all_zero(rewards + end)) {
            if constexpr (pass == Pass::compose) continue;
            std::memset(advantages + end, 0, 4 * kWidth);
            std::memset(returns + end, 0, 4 * kWidth);
        } else {
            const Wide reward = load_wide(rewards + end), value = load_wide(values + end);
            const WideInt active = lanes_of(mask);
            active_tokens += (mask * ones) >> 56;  // the sum of its bytes
            const Wide advantage = actor.pass_mixed(reward, value, active);
            const Wide for_returns = has_critic ? critic.pass_mixed(reward, value, active) : advantage;
            if constexpr (pass == Pass::compose) continue;
            store_narrow(advantages + end, active ? advantage_scale * advantage : Wide{});
            store_narrow(returns + end, active ? fma(returns_scale, for_returns, value) : Wide{});
        }
    }
    actor.finish(scan.actor, active_tokens);
    if constexpr (has_critic) critic.finish(scan.critic, active_tokens);
    return end;
}

// Tokens [begin, end) of one segment, backwards. `extra` is added to the reward of token `first`, which may lie
// outside.
template <Pass pass, bool has_critic>
void pass_tokens(const SegmentGae& call, int64_t begin, int64_t end, int64_t first, double extra, Scan& scan) {
    int64_t token = pass_blocks<pass, has_critic>(call, begin == first ? begin + 1 : begin, end, scan);
    while (--token >= begin) pass_token<pass, has_critic>(call, token, token == first ? extra : 0.0, scan);
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

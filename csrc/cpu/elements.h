// Runs of numbers in the types that tensors have: read as float32, written with one rounding.
#pragma once

#include "cpu/simd.h"
#include "element_type.h"

namespace mosaic::MOSAIC_ISA {
namespace {

MOSAIC_INLINE int64_t bytes_of(ElementType type, int64_t elements) {
    return elements * (type == ElementType::float32 ? 4 : 2);
}

template <ElementType type>
MOSAIC_INLINE Float load_as(const void* x) {
    if constexpr (type == ElementType::float32) return load(static_cast<const float*>(x));
    if constexpr (type == ElementType::bfloat16) return load_bfloat16(static_cast<const uint16_t*>(x));
    if constexpr (type == ElementType::float16) return load_float16(static_cast<const uint16_t*>(x));
}

template <ElementType type>
MOSAIC_INLINE void store_as(void* x, Float value) {
    if constexpr (type == ElementType::float32) store(static_cast<float*>(x), value);
    if constexpr (type == ElementType::bfloat16) store_bfloat16(static_cast<uint16_t*>(x), value);
    if constexpr (type == ElementType::float16) store_float16(static_cast<uint16_t*>(x), value);
}

template <ElementType type>
void widen_as(const char* x, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load_as<type>(x + bytes_of(type, i)));
    if (i == count) return;
    float last[kLanes] = {};
    std::memcpy(last, x + bytes_of(type, i), bytes_of(type, count - i));
    store(last, load_as<type>(last));
    std::memcpy(out + i, last, (count - i) * sizeof(float));
}

template <ElementType type>
void narrow_as(const float* x, int64_t count, char* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store_as<type>(out + bytes_of(type, i), load(x + i));
    if (i == count) return;
    float last[kLanes] = {};
    std::memcpy(last, x + i, (count - i) * sizeof(float));
    store_as<type>(last, load(last));
    std::memcpy(out + bytes_of(type, i), last, bytes_of(type, count - i));
}

// out[i] = x[i] for i < count.
inline void widen_run(ElementType type, const void* x, int64_t count, float* out) {
    const char* from = static_cast<const char*>(x);
    if (type == ElementType::float32) return widen_as<ElementType::float32>(from, count, out);
    if (type == ElementType::bfloat16) return widen_as<ElementType::bfloat16>(from, count, out);
    widen_as<ElementType::float16>(from, count, out);
}

inline void narrow_run(ElementType type, const float* x, int64_t count, void* out) {
    char* to = static_cast<char*>(out);
    if (type == ElementType::float32) return narrow_as<ElementType::float32>(x, count, to);
    if (type == ElementType::bfloat16) return narrow_as<ElementType::bfloat16>(x, count, to);
    narrow_as<ElementType::float16>(x, count, to);
}

}  // namespace
}  // namespace mosaic::MOSAIC_ISA

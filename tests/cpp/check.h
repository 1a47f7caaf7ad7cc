// What every C++ test uses: checks that count, arrays of the exact size, random numbers, every instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>

#include "isa.h"

namespace mosaic::test {

inline int64_t checks = 0, failures = 0;

inline const char* name(InstructionSet set) {
    constexpr const char* names[] = {"portable", "avx2", "avx512", "avx512_bf16"};
    return names[static_cast<int>(set)];
}

// Prints where and under which instruction set a check failed; of many failures only the first.
inline bool counted(bool holds, const char* file, int line, const char* condition) {
    ++checks;
    if (holds) return true;
    if (++failures <= 20) std::printf("%s:%d: %s: %s\n", file, line, name(instruction_set()), condition);
    return false;
}

// CHECK(condition, format, values...): the values are printed when the condition does not hold.
#define CHECK(condition, ...)                                                                                        \
    do {                                                                                                             \
        if (!::mosaic::test::counted(condition, __FILE__, __LINE__, #condition) && ::mosaic::test::failures <= 20) { \
            std::printf("    " __VA_ARGS__);                                                                         \
            std::printf("\n");                                                                                       \
        }                                                                                                            \
    } while (false)

// For %lld, whatever int64_t is here.
inline long long as_printed(int64_t value) { return value; }

// |actual - truth| <= tolerance; equal infinities and two NaN are equal.
inline bool close(double actual, double truth, double tolerance) {
    if (std::isnan(truth)) return std::isnan(actual);
    return actual == truth || std::fabs(actual - truth) <= tolerance;
}

// Memory on the heap of exactly this size, so that AddressSanitizer sees a read one element past its end.
template <class T>
class Array {
  public:
    // Not inlined: knowing a size of 0, GCC 12 warns of the loop that then does nothing.
    [[gnu::noinline]] explicit Array(int64_t size, T fill = T{})
        : size_(size), data_(new T[static_cast<size_t>(size)]) {
        std::fill(begin(), end(), fill);
    }
    int64_t size() const { return size_; }
    T* begin() const { return data_.get(); }
    T* end() const { return data_.get() + size_; }
    T& operator[](int64_t index) const { return data_[static_cast<size_t>(index)]; }

  private:
    int64_t size_;
    std::unique_ptr<T[]> data_;
};

template <class T>
bool same_bits(const Array<T>& a, const Array<T>& b) {
    return a.size() == b.size() && std::memcmp(a.begin(), b.begin(), static_cast<size_t>(a.size()) * sizeof(T)) == 0;
}

// SplitMix64: the same numbers on every machine.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t bound) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound)); }
    float uniform(float low, float high) {
        return low + (high - low) * static_cast<float>(static_cast<double>(bits() >> 11) * 0x1p-53);
    }
    bool chance(double probability) { return uniform(0, 1) < probability; }

  private:
    uint64_t state_;
};

template <class Test>
void with_every_instruction_set(const Test& test) {
    const int best = static_cast<int>(best_instruction_set());
    for (int set = 0; set <= best; ++set) {
        use_instruction_set(static_cast<InstructionSet>(set));
        test();
    }
}

// main's return value: a program that checked nothing has failed too.
inline int finish() {
    std::printf("%lld checks, %lld failed, up to %s\n", as_printed(checks), as_printed(failures),
                name(best_instruction_set()));
    return failures || !checks;
}

}  // namespace mosaic::test

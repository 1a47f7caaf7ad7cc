#include "isa.h"

#include <atomic>
#include <stdexcept>

#ifdef MOSAIC_X86
#include <cpuid.h>
#endif

namespace mosaic {
namespace {

#ifdef MOSAIC_X86
// Asked of the processor itself, for __builtin_cpu_supports of Clang 14 does not know the name.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

InstructionSet detect() {
#ifdef MOSAIC_X86
    __builtin_cpu_init();
    // Each test also asks whether the operating system saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return InstructionSet::avx512_bf16;
    if (avx512) return InstructionSet::avx512;
    if (avx2) return InstructionSet::avx2;
#endif
    return InstructionSet::portable;
}

std::atomic<InstructionSet>& in_use() {
    static std::atomic<InstructionSet> chosen{best_instruction_set()};
    return chosen;
}

bool dot_products_are_fast() {
#ifdef MOSAIC_X86
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

std::atomic<bool>& dot_in_use() {
    static std::atomic<bool> chosen{dot_products_are_fast()};
    return chosen;
}

}  // namespace

InstructionSet best_instruction_set() {
    static const InstructionSet best = detect();
    return best;
}

InstructionSet instruction_set() { return in_use().load(std::memory_order_relaxed); }

void use_instruction_set(InstructionSet wanted) {
    if (wanted > best_instruction_set()) throw std::invalid_argument("this machine has no such instruction set");
    in_use().store(wanted, std::memory_order_relaxed);
}

bool bfloat16_dot() { return dot_in_use().load(std::memory_order_relaxed); }

void use_bfloat16_dot(bool wanted) { dot_in_use().store(wanted, std::memory_order_relaxed); }

}  // namespace mosaic

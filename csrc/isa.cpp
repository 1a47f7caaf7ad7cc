#include "isa.h"

#include <atomic>
#include <stdexcept>

#include "binding.h"

namespace py = pybind11;

namespace mosaic {
namespace {

InstructionSet detect() {
#ifdef MOSAIC_X86
    __builtin_cpu_init();
    // Each test also asks whether the operating system saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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

const Binding binding([](py::module_& module) {
    py::enum_<InstructionSet>(module, "InstructionSet")
        .value("portable", InstructionSet::portable)
        .value("avx2", InstructionSet::avx2)
        .value("avx512", InstructionSet::avx512)
        .value("avx512_bf16", InstructionSet::avx512_bf16);
    module.def("best_instruction_set", &best_instruction_set);
    module.def("instruction_set", &instruction_set);
    module.def("use_instruction_set", &use_instruction_set, py::arg("wanted"));
    module.def("bfloat16_dot", &bfloat16_dot);
    module.def("use_bfloat16_dot", &use_bfloat16_dot, py::arg("wanted"));
});

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

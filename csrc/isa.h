// Instruction sets: every file in csrc/cpu is compiled once for each, into a namespace of its own, and the one that
// the machine offers is chosen at run time.
#pragma once

namespace mosaic {

// Each includes those before it. avx512_bf16 has the two-element dot products of bfloat16.
enum class InstructionSet { portable, avx2, avx512, avx512_bf16 };

InstructionSet best_instruction_set();            // the last one that this machine offers and this build has
InstructionSet instruction_set();                 // the one in use: the best, unless use_instruction_set chose another
void use_instruction_set(InstructionSet wanted);  // throws std::invalid_argument above the best

// Whether products of two bfloat16 matrices go through the dot products of avx512_bf16, and not through float32: these
// have twice the rate of float32's multiply-adds on AMD's processors, but half of it on Intel's.
bool bfloat16_dot();
void use_bfloat16_dot(bool wanted);  // true has an effect where instruction_set() has dot products

}  // namespace mosaic

// Declares an op's CPU kernel: one definition in each namespace, from csrc/cpu/<name>.cpp, and mosaic::<name>, which
// calls the one in use.
#ifdef MOSAIC_X86
#define MOSAIC_CPU_KERNEL(result, name, parameter) \
    namespace portable {                           \
    result name(parameter);                        \
    }                                              \
    namespace avx2 {                               \
    result name(parameter);                        \
    }                                              \
    namespace avx512 {                             \
    result name(parameter);                        \
    }                                              \
    namespace avx512_bf16 {                        \
    result name(parameter);                        \
    }                                              \
    inline result name(parameter call) {           \
        switch (instruction_set()) {               \
            case InstructionSet::avx2:             \
                return avx2::name(call);           \
            case InstructionSet::avx512:           \
                return avx512::name(call);         \
            case InstructionSet::avx512_bf16:      \
                return avx512_bf16::name(call);    \
            default:                               \
                return portable::name(call);       \
        }                                          \
    }
#else
#define MOSAIC_CPU_KERNEL(result, name, parameter) \
    namespace portable {                           \
    result name(parameter);                        \
    }                                              \
    inline result name(parameter call) { return portable::name(call); }
#endif

#include "binding.h"
#include "isa.h"

namespace py = pybind11;

namespace mosaic {
namespace {

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
}  // namespace mosaic

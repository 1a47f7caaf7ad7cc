#include "binding.h"

PYBIND11_MODULE(_C, module) {
    module.doc() = "Compiled kernels over raw pointers. The Python wrappers check every argument before they call one.";
    for (mosaic::Binding::Function add : mosaic::Binding::all()) add(module);
}

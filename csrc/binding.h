// How an op's functions get into the Python module: only the files that bind need this, kernels do not.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace mosaic {

// An op's file adds its functions to the module by defining one Binding at namespace scope.
struct Binding {
    using Function = void (*)(pybind11::module_&);
    explicit Binding(Function add) { all().push_back(add); }
    static std::vector<Function>& all() {
        static std::vector<Function> functions;
        return functions;
    }
};

// An address handed over by Python, as tensor.data_ptr(); 0 is the null pointer.
template <class T>
T* at_address(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace mosaic

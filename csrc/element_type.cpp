#include "element_type.h"

#include "binding.h"

namespace py = pybind11;

namespace mosaic {
namespace {

const Binding binding([](py::module_& module) {
    py::enum_<ElementType>(module, "ElementType")
        .value("float32", ElementType::float32)
        .value("bfloat16", ElementType::bfloat16)
        .value("float16", ElementType::float16);
});

}  // namespace
}  // namespace mosaic

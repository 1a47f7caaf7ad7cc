#include "active_tokens.h"

#include "binding.h"
#include "huge_pages.h"

namespace py = pybind11;

namespace mosaic {
namespace {

void count(uintptr_t mask, uintptr_t cu_seqlens, int64_t num_segments, int64_t threads, uintptr_t out) {
    count_active({at_address<const uint8_t>(mask), at_address<const int32_t>(cu_seqlens), num_segments, threads,
                  at_address<int64_t>(out)});
}

void spread(uintptr_t value, uintptr_t mask, uintptr_t cu_seqlens, int64_t num_segments, int64_t threads,
            uintptr_t out) {
    const int32_t* offsets = at_address<const int32_t>(cu_seqlens);
    float* written = at_address<float>(out);
    wish_huge_pages(written, offsets[num_segments] * sizeof(float));
    spread_active(
        {at_address<const float>(value), at_address<const uint8_t>(mask), offsets, num_segments, threads, written});
}

const Binding binding([](py::module_& module) {
    module.def("count_active", &count, py::kw_only(), py::arg("mask"), py::arg("cu_seqlens"), py::arg("num_segments"),
               py::arg("threads"), py::arg("count"), py::call_guard<py::gil_scoped_release>());
    module.def("spread_active", &spread, py::kw_only(), py::arg("value"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("num_segments"), py::arg("threads"), py::arg("out"), py::call_guard<py::gil_scoped_release>());
});

}  // namespace
}  // namespace mosaic

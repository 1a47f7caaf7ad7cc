#include "value_loss.h"

#include "binding.h"
#include "huge_pages.h"

namespace py = pybind11;

namespace mosaic {
namespace {

void call(uintptr_t value, uintptr_t old_value, uintptr_t returns, uintptr_t mask, uintptr_t token_weight,
          uintptr_t cu_seqlens, uintptr_t segment_trajectory, int64_t num_segments, int64_t num_trajectories,
          double clip, int64_t threads, uintptr_t loss, uintptr_t statistics, uintptr_t counts, uintptr_t dvalue) {
    const size_t bytes = at_address<const int32_t>(cu_seqlens)[num_segments] * sizeof(float);
    if (dvalue) wish_huge_pages(at_address<float>(dvalue), bytes);
    value_loss({at_address<const float>(value), at_address<const float>(old_value), at_address<const float>(returns),
                at_address<const uint8_t>(mask), at_address<const float>(token_weight),
                at_address<const int32_t>(cu_seqlens), at_address<const int64_t>(segment_trajectory), num_segments,
                num_trajectories, clip, threads, at_address<float>(loss), at_address<float>(statistics),
                at_address<int64_t>(counts), at_address<float>(dvalue)});
}

const Binding binding([](py::module_& module) {
    module.def("value_loss", &call, py::kw_only(), py::arg("value"), py::arg("old_value"), py::arg("returns"),
               py::arg("mask"), py::arg("token_weight"), py::arg("cu_seqlens"), py::arg("segment_trajectory"),
               py::arg("num_segments"), py::arg("num_trajectories"), py::arg("clip"), py::arg("threads"),
               py::arg("loss"), py::arg("statistics"), py::arg("counts"), py::arg("dvalue"),
               py::call_guard<py::gil_scoped_release>());
});

}  // namespace
}  // namespace mosaic

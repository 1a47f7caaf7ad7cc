#include "rollout_correction.h"

#include "binding.h"
#include "huge_pages.h"

namespace py = pybind11;

namespace mosaic {
namespace {

void call(uintptr_t logprob, uintptr_t rollout_logprob, uintptr_t mask, uintptr_t cu_seqlens,
          uintptr_t segment_trajectory, int64_t num_segments, int64_t num_trajectories, Level level, double cap,
          double floor, int64_t threads, uintptr_t weight, uintptr_t keep, uintptr_t statistics, uintptr_t counts) {
    const size_t tokens = at_address<const int32_t>(cu_seqlens)[num_segments];
    wish_huge_pages(at_address<float>(weight), tokens * sizeof(float));
    wish_huge_pages(at_address<uint8_t>(keep), tokens);
    rollout_correction({at_address<const float>(logprob), at_address<const float>(rollout_logprob),
                        at_address<const uint8_t>(mask), at_address<const int32_t>(cu_seqlens),
                        at_address<const int64_t>(segment_trajectory), num_segments, num_trajectories, level, cap,
                        floor, threads, at_address<float>(weight), at_address<uint8_t>(keep),
                        at_address<float>(statistics), at_address<int64_t>(counts)});
}

const Binding binding([](py::module_& module) {
    module.def("rollout_correction", &call, py::kw_only(), py::arg("logprob"), py::arg("rollout_logprob"),
               py::arg("mask"), py::arg("cu_seqlens"), py::arg("segment_trajectory"), py::arg("num_segments"),
               py::arg("num_trajectories"), py::arg("level"), py::arg("cap"), py::arg("floor"), py::arg("threads"),
               py::arg("weight"), py::arg("keep"), py::arg("statistics"), py::arg("counts"),
               py::call_guard<py::gil_scoped_release>());
});

}  // namespace
}  // namespace mosaic

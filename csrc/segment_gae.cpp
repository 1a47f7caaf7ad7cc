#include "segment_gae.h"

#include "binding.h"
#include "huge_pages.h"

namespace py = pybind11;

namespace mosaic {
namespace {

int64_t call(uintptr_t reward, uintptr_t value, uintptr_t mask, uintptr_t cu_seqlens, uintptr_t segment_trajectory,
             uintptr_t lam, uintptr_t lam_critic, uintptr_t bootstrap_value, int64_t num_segments,
             int64_t num_trajectories, double gamma, Correction correction, bool corrected_returns, int64_t threads,
             uintptr_t advantage, uintptr_t returns) {
    const SegmentGae work{at_address<const float>(reward),
                          at_address<const float>(value),
                          at_address<const uint8_t>(mask),
                          at_address<const int32_t>(cu_seqlens),
                          at_address<const int64_t>(segment_trajectory),
                          at_address<const double>(lam),
                          at_address<const double>(lam_critic),
                          at_address<const double>(bootstrap_value),
                          num_segments,
                          num_trajectories,
                          gamma,
                          correction,
                          corrected_returns,
                          threads,
                          at_address<float>(advantage),
                          at_address<float>(returns)};
    const size_t bytes = sizeof(float) * static_cast<size_t>(work.cu_seqlens[num_segments]);
    wish_huge_pages(work.advantage, bytes);
    wish_huge_pages(work.returns, bytes);
    return segment_gae(work);
}

const Binding binding([](py::module_& module) {
    py::enum_<Correction>(module, "Correction")
        .value("none", Correction::none)
        .value("position", Correction::position)
        .value("chain", Correction::chain);
    module.def("segment_gae", &call, py::kw_only(), py::arg("reward"), py::arg("value"), py::arg("mask"),
               py::arg("cu_seqlens"), py::arg("segment_trajectory"), py::arg("lam"), py::arg("lam_critic"),
               py::arg("bootstrap_value"), py::arg("num_segments"), py::arg("num_trajectories"), py::arg("gamma"),
               py::arg("correction"), py::arg("corrected_returns"), py::arg("threads"), py::arg("advantage"),
               py::arg("returns"), py::call_guard<py::gil_scoped_release>(),
               "Returns -1, or the first segment that holds a reward but no active token (none and position).");
});

}  // namespace
}  // namespace mosaic

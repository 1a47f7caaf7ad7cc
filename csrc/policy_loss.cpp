#include "policy_loss.h"

#include "binding.h"
#include "huge_pages.h"

namespace py = pybind11;

namespace mosaic {
namespace {

void call(uintptr_t logprob, uintptr_t old_logprob, uintptr_t advantage, uintptr_t mask, uintptr_t token_weight,
          uintptr_t importance_weight, uintptr_t ref_logprob, uintptr_t entropy, uintptr_t cu_seqlens,
          uintptr_t segment_trajectory, int64_t num_segments, int64_t num_trajectories, Objective objective,
          Level level, KlEstimator estimator, uintptr_t options, int64_t threads, uintptr_t loss, uintptr_t statistics,
          uintptr_t counts, uintptr_t dlogprob, uintptr_t dentropy) {
    const double* number = at_address<const double>(options);
    const size_t bytes = at_address<const int32_t>(cu_seqlens)[num_segments] * sizeof(float);
    if (dlogprob) wish_huge_pages(at_address<float>(dlogprob), bytes);
    if (dentropy) wish_huge_pages(at_address<float>(dentropy), bytes);
    policy_loss({at_address<const float>(logprob),
                 at_address<const float>(old_logprob),
                 at_address<const float>(advantage),
                 at_address<const uint8_t>(mask),
                 at_address<const float>(token_weight),
                 at_address<const float>(importance_weight),
                 at_address<const float>(ref_logprob),
                 at_address<const float>(entropy),
                 at_address<const int32_t>(cu_seqlens),
                 at_address<const int64_t>(segment_trajectory),
                 num_segments,
                 num_trajectories,
                 objective,
                 level,
                 estimator,
                 number[0],
                 number[1],
                 number[2],
                 number[3],
                 number[4],
                 threads,
                 at_address<float>(loss),
                 at_address<float>(statistics),
                 at_address<int64_t>(counts),
                 at_address<float>(dlogprob),
                 at_address<float>(dentropy)});
}

const Binding binding([](py::module_& module) {
    py::enum_<Objective>(module, "Objective")
        .value("clip", Objective::clip)
        .value("cispo", Objective::cispo)
        .value("sao", Objective::sao)
        .value("reinforce", Objective::reinforce);
    py::enum_<Level>(module, "Level")
        .value("token", Level::token)
        .value("segment", Level::segment)
        .value("trajectory", Level::trajectory);
    py::enum_<KlEstimator>(module, "KlEstimator")
        .value("k1", KlEstimator::k1)
        .value("k2", KlEstimator::k2)
        .value("k3", KlEstimator::k3);
    module.def("policy_loss", &call, py::kw_only(), py::arg("logprob"), py::arg("old_logprob"), py::arg("advantage"),
               py::arg("mask"), py::arg("token_weight"), py::arg("importance_weight"), py::arg("ref_logprob"),
               py::arg("entropy"), py::arg("cu_seqlens"), py::arg("segment_trajectory"), py::arg("num_segments"),
               py::arg("num_trajectories"), py::arg("objective"), py::arg("level"), py::arg("estimator"),
               py::arg("options"), py::arg("threads"), py::arg("loss"), py::arg("statistics"), py::arg("counts"),
               py::arg("dlogprob"), py::arg("dentropy"), py::call_guard<py::gil_scoped_release>(),
               "options: five float64 numbers, low, high, dual, kl_coef and entropy_coef.");
});

}  // namespace
}  // namespace mosaic

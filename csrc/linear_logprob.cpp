#include "linear_logprob.h"

#include "binding.h"

namespace py = pybind11;

namespace mosaic {
namespace {

LogprobInputs inputs(uintptr_t hidden, int64_t hidden_stride, ElementType hidden_type, uintptr_t weight,
                     int64_t weight_stride, ElementType weight_type, uintptr_t bias, uintptr_t row, uintptr_t target,
                     uintptr_t temperature, float softcap, uintptr_t kept, uintptr_t kept_offsets, uintptr_t kept_whole,
                     int64_t num_rows, int64_t vocab_size, int64_t hidden_size, int64_t threads) {
    return {at_address<const void>(hidden),
            hidden_stride,
            hidden_type,
            at_address<const void>(weight),
            weight_stride,
            weight_type,
            at_address<const float>(bias),
            at_address<const int64_t>(row),
            at_address<const int64_t>(target),
            at_address<const float>(temperature),
            softcap,
            at_address<const int64_t>(kept),
            at_address<const int64_t>(kept_offsets),
            at_address<const uint8_t>(kept_whole),
            num_rows,
            vocab_size,
            hidden_size,
            threads};
}

void forward(const LogprobInputs& of, uintptr_t largest, uintptr_t normaliser, uintptr_t weighted,
             uintptr_t target_logit) {
    linear_logprob_forward({of, at_address<float>(largest), at_address<double>(normaliser),
                            at_address<double>(weighted), at_address<float>(target_logit)});
}

void backward(const LogprobInputs& of, uintptr_t largest, uintptr_t log_normaliser, uintptr_t entropy,
              uintptr_t dlogprob, uintptr_t dentropy, float filter, uintptr_t dhidden, uintptr_t dweight,
              uintptr_t dbias) {
    linear_logprob_backward({of, at_address<const float>(largest), at_address<const float>(log_normaliser),
                             at_address<const float>(entropy), at_address<const float>(dlogprob),
                             at_address<const float>(dentropy), filter, at_address<float>(dhidden),
                             at_address<void>(dweight), at_address<float>(dbias)});
}

const Binding binding([](py::module_& module) {
    py::class_<LogprobInputs>(module, "LogprobInputs", "Addresses and sizes; keeps nothing alive.")
        .def(py::init(&inputs), py::kw_only(), py::arg("hidden"), py::arg("hidden_stride"), py::arg("hidden_type"),
             py::arg("weight"), py::arg("weight_stride"), py::arg("weight_type"), py::arg("bias"), py::arg("row"),
             py::arg("target"), py::arg("temperature"), py::arg("softcap"), py::arg("kept"), py::arg("kept_offsets"),
             py::arg("kept_whole"), py::arg("num_rows"), py::arg("vocab_size"), py::arg("hidden_size"),
             py::arg("threads"))
        .def_readonly("num_rows", &LogprobInputs::num_rows);
    module.def("linear_logprob_forward", &forward, py::arg("inputs"), py::kw_only(), py::arg("largest"),
               py::arg("normaliser"), py::arg("weighted"), py::arg("target_logit"),
               py::call_guard<py::gil_scoped_release>());
    module.def("linear_logprob_backward", &backward, py::arg("inputs"), py::kw_only(), py::arg("largest"),
               py::arg("log_normaliser"), py::arg("entropy"), py::arg("dlogprob"), py::arg("dentropy"),
               py::arg("filter"), py::arg("dhidden"), py::arg("dweight"), py::arg("dbias"),
               py::call_guard<py::gil_scoped_release>());
});

}  // namespace
}  // namespace mosaic

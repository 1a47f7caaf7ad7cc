#include "branch_attention.h"

#include <tuple>

#include "binding.h"

namespace py = pybind11;

namespace mosaic {
namespace {

// A tensor as Python hands it over: address, elements from token to token and from head to head.
using Strided = std::tuple<uintptr_t, int64_t, int64_t>;

HeadTensor head_tensor(const Strided& x) {
    return {at_address<const void>(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}

// Whether the kernels may follow these offsets and branches: the wrapper raises with the reason if not.
bool fits(const AttentionInputs& call, int64_t num_tokens) {
    if (call.cu_seqlens[0] != 0 || call.cu_seqlens[call.num_segments] != num_tokens) return false;
    for (int64_t s = 0; s < call.num_segments; ++s)
        if (call.cu_seqlens[s + 1] < call.cu_seqlens[s]) return false;
    if (!call.parent) return true;
    for (int64_t s = 0; s < call.num_segments; ++s) {
        const int64_t parent = call.parent[s], prefix = call.prefix_length[s];
        if (parent == -1 && prefix == 0) continue;
        if (parent < 0 || parent >= call.num_segments || parent == s || call.parent[parent] != -1) return false;
        if (prefix < 0 || prefix > call.cu_seqlens[parent + 1] - call.cu_seqlens[parent]) return false;
    }
    return true;
}

AttentionInputs inputs(const Strided& query, const Strided& key, const Strided& value, ElementType type,
                       uintptr_t cu_seqlens, uintptr_t parent, uintptr_t prefix_length, int64_t num_segments,
                       int64_t query_heads, int64_t key_heads, int64_t head_size, float scale, float softcap,
                       int32_t window, int64_t threads) {
    return {head_tensor(query),
            head_tensor(key),
            head_tensor(value),
            type,
            at_address<const int32_t>(cu_seqlens),
            at_address<const int64_t>(parent),
            at_address<const int64_t>(prefix_length),
            num_segments,
            query_heads,
            key_heads,
            head_size,
            scale,
            softcap,
            window,
            threads};
}

void forward(const AttentionInputs& call, uintptr_t output, uintptr_t statistics) {
    branch_attention_forward({call, at_address<void>(output), at_address<float>(statistics)});
}

void backward(const AttentionInputs& call, const Strided& output, const Strided& doutput, uintptr_t statistics,
              uintptr_t dquery, uintptr_t dkey, uintptr_t dvalue) {
    branch_attention_backward({call, head_tensor(output), head_tensor(doutput), at_address<const float>(statistics),
                               at_address<float>(dquery), at_address<void>(dkey), at_address<void>(dvalue)});
}

const Binding binding([](py::module_& module) {
    py::class_<AttentionInputs>(module, "AttentionInputs")
        .def(py::init(&inputs), py::kw_only(), py::arg("query"), py::arg("key"), py::arg("value"), py::arg("type"),
             py::arg("cu_seqlens"), py::arg("parent"), py::arg("prefix_length"), py::arg("num_segments"),
             py::arg("query_heads"), py::arg("key_heads"), py::arg("head_size"), py::arg("scale"), py::arg("softcap"),
             py::arg("window"), py::arg("threads"))
        .def("fits", &fits, py::arg("num_tokens"), "Whether offsets and branches are valid for that many tokens.");
    module.def("branch_attention_forward", &forward, py::arg("inputs"), py::kw_only(), py::arg("output"),
               py::arg("statistics"), py::call_guard<py::gil_scoped_release>());
    module.def("branch_attention_backward", &backward, py::arg("inputs"), py::kw_only(), py::arg("output"),
               py::arg("doutput"), py::arg("statistics"), py::arg("dquery"), py::arg("dkey"), py::arg("dvalue"),
               py::call_guard<py::gil_scoped_release>());
});

}  // namespace
}  // namespace mosaic

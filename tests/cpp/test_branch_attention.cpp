// branch_attention, forward and backward, in every instruction set, against the softmax spelt out in double.
#include <limits>
#include <vector>

#include "branch_attention.h"
#include "check.h"
#include "elements.h"

namespace mosaic::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Shape {
    int64_t query_heads, key_heads, head_size;
};

// [T, heads, head_size] somewhere in memory that ends with its last element; what lies between is NaN.
struct Heads {
    Elements elements;
    int64_t token_stride, head_stride;

    HeadTensor tensor() const { return {elements.data(), token_stride, head_stride}; }
    int64_t at(int64_t token, int64_t head) const { return token * token_stride + head * head_stride; }
};

Heads make_heads(Random& random, ElementType type, int64_t tokens, int64_t heads, int64_t head_size, bool heads_first) {
    const int64_t row = head_size + 1;
    const int64_t token_stride = heads_first ? row : heads * row + 2;
    const int64_t head_stride = heads_first ? std::max<int64_t>(tokens, 1) * row : row;
    const int64_t size = tokens ? (tokens - 1) * token_stride + (heads - 1) * head_stride + head_size : 0;
    Heads out{Elements(type, size), token_stride, head_stride};
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < head_size; ++d) out.elements.set(out.at(t, h) + d, random.uniform(-1, 1));
    return out;
}

struct Segments {
    std::vector<int64_t> lengths, parent, prefix_length;  // the last two empty: no branches
};

struct Case {
    Shape shape;
    Array<int32_t> cu_seqlens;
    Array<int64_t> parent, prefix_length;
    Heads query, key, value, doutput;
    AttentionInputs inputs;

    int64_t num_tokens() const { return cu_seqlens[cu_seqlens.size() - 1]; }
};

Case make_case(Random& random, const Segments& segments, Shape shape, ElementType type) {
    const auto count = static_cast<int64_t>(segments.lengths.size());
    const bool branches = !segments.parent.empty();
    Array<int32_t> cu_seqlens(count + 1);
    Array<int64_t> parent(branches ? count : 0), prefix_length(branches ? count : 0);
    for (int64_t s = 0; s < count; ++s)
        cu_seqlens[s + 1] = cu_seqlens[s] + static_cast<int32_t>(segments.lengths[static_cast<size_t>(s)]);
    std::copy(segments.parent.begin(), segments.parent.end(), parent.begin());
    std::copy(segments.prefix_length.begin(), segments.prefix_length.end(), prefix_length.begin());
    const int64_t tokens = cu_seqlens[count];
    const auto heads = [&](int64_t number) {
        return make_heads(random, type, tokens, number, shape.head_size, random.chance(0.5));
    };
    Case made{shape,
              std::move(cu_seqlens),
              std::move(parent),
              std::move(prefix_length),
              heads(shape.query_heads),
              heads(shape.key_heads),
              heads(shape.key_heads),
              heads(shape.query_heads),
              AttentionInputs{}};
    AttentionInputs& inputs = made.inputs;
    inputs.query = made.query.tensor();
    inputs.key = made.key.tensor();
    inputs.value = made.value.tensor();
    inputs.type = type;
    inputs.cu_seqlens = made.cu_seqlens.begin();
    inputs.parent = branches ? made.parent.begin() : nullptr;
    inputs.prefix_length = branches ? made.prefix_length.begin() : nullptr;
    inputs.num_segments = count;
    inputs.query_heads = shape.query_heads;
    inputs.key_heads = shape.key_heads;
    inputs.head_size = shape.head_size;
    inputs.scale = 3.0f / std::sqrt(static_cast<float>(shape.head_size));
    inputs.softcap = random.chance(0.3) ? 1.5f : 0.0f;
    inputs.window = random.chance(0.3) ? static_cast<int32_t>(1 + random.below(40)) : INT32_MAX;
    return made;
}

// A result in double, with how far float32 arithmetic may be off.
struct Number {
    double value = 0, tolerance = 0;
    void add(double term, double error) {
        value += term;
        tolerance += error;
    }
};

struct Truth {
    std::vector<Number> output, largest, logsumexp, dquery, dkey, dvalue;
};

// Tokens that a token sees, the oldest first.
std::vector<int64_t> seen(const Case& input, int64_t segment, int64_t token) {
    const int64_t begin = input.cu_seqlens[segment];
    const int64_t prefix = input.inputs.parent ? input.prefix_length[segment] : 0;
    const int64_t root = prefix ? input.cu_seqlens[input.parent[segment]] : 0;
    const int64_t position = prefix + token - begin;
    std::vector<int64_t> out;
    for (int64_t other = std::max<int64_t>(0, position - input.inputs.window + 1); other <= position; ++other)
        out.push_back(other < prefix ? root + other : begin + other - prefix);
    return out;
}

Truth truth(const Case& input) {
    const auto [query_heads, key_heads, size] = input.shape;
    const int64_t tokens = input.num_tokens(), group = query_heads / key_heads;
    const std::vector<double> q = input.query.elements.values(), k = input.key.elements.values();
    const std::vector<double> v = input.value.elements.values(), g = input.doutput.elements.values();
    const double rounding = input.query.elements.rounding();
    const double scale = input.inputs.scale, softcap = input.inputs.softcap;
    const auto numbers = [&](int64_t count) { return std::vector<Number>(static_cast<size_t>(count)); };
    Truth out{numbers(tokens * query_heads * size), numbers(tokens * query_heads),
              numbers(tokens * query_heads),        numbers(tokens * query_heads * size),
              numbers(tokens * key_heads * size),   numbers(tokens * key_heads * size)};
    for (int64_t segment = 0; segment < input.inputs.num_segments; ++segment)
        for (int64_t t = input.cu_seqlens[segment]; t < input.cu_seqlens[segment + 1]; ++t)
            for (int64_t head = 0; head < query_heads; ++head) {
                const std::vector<int64_t> keys = seen(input, segment, t);
                const int64_t key_head = head / group;
                std::vector<double> score(keys.size()), slope(keys.size(), scale), dweight(keys.size());
                const double* query = q.data() + input.query.at(t, head);
                const double* gradient = g.data() + input.doutput.at(t, head);
                double largest = -std::numeric_limits<double>::infinity(), off = 0, normaliser = 0;
                for (size_t i = 0; i < keys.size(); ++i) {
                    const double* key = k.data() + input.key.at(keys[i], key_head);
                    double terms = 0;
                    for (int64_t d = 0; d < size; ++d) {
                        score[i] += scale * query[d] * key[d];
                        terms += scale * std::fabs(query[d] * key[d]);
                    }
                    if (softcap > 0) {
                        const double bent = std::tanh(score[i] / softcap);
                        score[i] = softcap * bent;
                        slope[i] *= 1 - bent * bent;
                    }
                    largest = std::max(largest, score[i]);
                    off = std::max(off, (terms + softcap) * (8 + 2 * std::sqrt(static_cast<double>(size))) * 0x1p-24);
                }
                for (double& x : score) normaliser += std::exp(x - largest);
                // Probabilities may be rounded to the tensors' type before they are multiplied.
                const double relative = 2 * off + 2e-6 + 2 * rounding;
                const auto row = static_cast<size_t>(t * query_heads + head);
                out.largest[row] = {largest, off};
                out.logsumexp[row] = {largest + std::log(normaliser), off + 1e-6};
                double inner = 0, inner_size = 0;
                for (size_t i = 0; i < keys.size(); ++i) {
                    const double weight = std::exp(score[i] - largest) / normaliser;
                    const double* value = v.data() + input.value.at(keys[i], key_head);
                    double size_of_dweight = 0;
                    for (int64_t d = 0; d < size; ++d) {
                        out.output[row * static_cast<size_t>(size) + static_cast<size_t>(d)].add(
                            weight * value[d], relative * weight * std::fabs(value[d]));
                        out.dvalue[static_cast<size_t>((keys[i] * key_heads + key_head) * size + d)].add(
                            weight * gradient[d], relative * weight * std::fabs(gradient[d]));
                        dweight[i] += gradient[d] * value[d];
                        size_of_dweight += std::fabs(gradient[d] * value[d]);
                    }
                    inner += weight * dweight[i];
                    inner_size += weight * size_of_dweight;
                }
                for (size_t i = 0; i < keys.size(); ++i) {
                    const double weight = std::exp(score[i] - largest) / normaliser;
                    const double dscore = weight * (dweight[i] - inner) * slope[i];
                    const double error = 2 * relative * weight * (std::fabs(dweight[i]) + inner_size) * scale;
                    const double* key = k.data() + input.key.at(keys[i], key_head);
                    for (int64_t d = 0; d < size; ++d) {
                        out.dquery[row * static_cast<size_t>(size) + static_cast<size_t>(d)].add(
                            dscore * key[d], error * std::fabs(key[d]));
                        out.dkey[static_cast<size_t>((keys[i] * key_heads + key_head) * size + d)].add(
                            dscore * query[d], error * std::fabs(query[d]));
                    }
                }
            }
    return out;
}

struct Results {
    Elements output, dkey, dvalue;
    Array<float> statistics, dquery;

    bool same_bits_as(const Results& other) const {
        return output.same_bits_as(other.output) && dkey.same_bits_as(other.dkey) &&
               dvalue.same_bits_as(other.dvalue) && same_bits(statistics, other.statistics) &&
               same_bits(dquery, other.dquery);
    }
};

Results run(const Case& input, int64_t threads) {
    const auto [query_heads, key_heads, size] = input.shape;
    const int64_t tokens = input.num_tokens();
    const ElementType type = input.inputs.type;
    Results out{Elements(type, tokens * query_heads * size), Elements(type, tokens * key_heads * size),
                Elements(type, tokens * key_heads * size), Array<float>(2 * tokens * query_heads, kNaN),
                Array<float>(tokens * query_heads * size, kNaN)};
    AttentionInputs inputs = input.inputs;
    inputs.threads = threads;
    branch_attention_forward({inputs, out.output.data(), out.statistics.begin()});
    branch_attention_backward({inputs,
                               {out.output.data(), query_heads * size, size},
                               input.doutput.tensor(),
                               out.statistics.begin(),
                               out.dquery.begin(),
                               out.dkey.data(),
                               out.dvalue.data()});
    return out;
}

// `actual` is an Elements or an Array.
template <class Actual>
void near(const Actual& actual, const std::vector<Number>& expected, double rounding, const char* what) {
    for (size_t i = 0; i < expected.size(); ++i) {
        const Number& number = expected[i];
        const double tolerance = number.tolerance + 2 * rounding * std::fabs(number.value) + 1e-7;
        const double value = actual[static_cast<int64_t>(i)];
        CHECK(close(value, number.value, tolerance), "%s[%lld]: %.9g, truth %.9g, tolerance %.3g", what,
              as_printed(static_cast<int64_t>(i)), value, number.value, tolerance);
    }
}

void check_case(const Case& input) {
    const Truth expected = truth(input);
    with_every_instruction_set([&] {
        const Results out = run(input, 1);
        for (const int64_t threads : {2, 4})
            CHECK(out.same_bits_as(run(input, threads)), "threads %lld", as_printed(threads));
        near(out.output, expected.output, out.output.rounding(), "output");
        const int64_t rows = out.statistics.size() / 2;
        Array<float> largest(rows);
        Array<double> logsumexp(rows);
        for (int64_t row = 0; row < rows; ++row) {
            largest[row] = out.statistics[2 * row];
            logsumexp[row] = static_cast<double>(largest[row]) + out.statistics[2 * row + 1];
        }
        near(largest, expected.largest, 0x1p-24, "largest");
        near(logsumexp, expected.logsumexp, 0x1p-24, "logsumexp");
        near(out.dquery, expected.dquery, 0x1p-24, "dquery");
        near(out.dkey, expected.dkey, out.dkey.rounding(), "dkey");
        near(out.dvalue, expected.dvalue, out.dvalue.rounding(), "dvalue");
    });
}

constexpr ElementType kTypes[] = {ElementType::float32, ElementType::bfloat16, ElementType::float16};

void test_segments() {
    const std::vector<Segments> layouts{{{}, {}, {}},
                                        {{0}, {}, {}},
                                        {{1}, {}, {}},
                                        {{0, 5, 0, 1, 17}, {}, {}},
                                        {{63, 64, 65}, {}, {}},
                                        {{130}, {}, {}},
                                        {{9, 4}, {-1, 0}, {0, 9}},
                                        {{9, 4, 0}, {-1, 0, 0}, {0, 0, 3}},
                                        {{3, 70, 5, 0, 33, 16}, {1, -1, 1, 1, 1, -1}, {1, 0, 70, 64, 37, 0}}};
    const std::vector<Shape> shapes{{1, 1, 1}, {4, 2, 16}, {3, 1, 7}, {2, 2, 65}, {6, 3, 64}};
    Random random(41);
    for (const Segments& segments : layouts)
        for (const Shape& shape : shapes)
            for (const ElementType type : kTypes) check_case(make_case(random, segments, shape, type));
}

// Work enough for several threads, and several blocks of queries and keys.
void test_large() {
    Random random(43);
    for (const ElementType type : kTypes) {
        check_case(make_case(random, {{400}, {}, {}}, {2, 1, 32}, type));
        check_case(make_case(random, {{257, 100, 0, 90}, {-1, 0, 0, 0}, {0, 200, 257, 129}}, {3, 3, 20}, type));
        check_case(make_case(random, {std::vector<int64_t>(60, 9), {}, {}}, {2, 1, 24}, type));
    }
}

}  // namespace
}  // namespace mosaic::test

int main() {
    using namespace mosaic::test;
    test_segments();
    test_large();
    return finish();
}

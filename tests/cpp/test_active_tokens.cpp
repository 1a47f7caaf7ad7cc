// count_active and spread_active in every instruction set, against a plain loop.
#include "active_tokens.h"
#include "check.h"
#include "packed_tokens.h"

namespace mosaic::test {
namespace {

void check_layout(Random& random, const std::vector<int64_t>& lengths, double share_active) {
    const PackedTokens packed = packed_tokens(random, lengths, share_active);
    Array<int64_t> expected(packed.num_segments());
    Array<float> value(packed.num_segments());
    for (float& x : value) x = random.uniform(-1, 1);
    for (int64_t t = 0; t < packed.num_tokens(); ++t)
        expected[packed.segment[static_cast<size_t>(t)]] += packed.mask[t];
    with_every_instruction_set([&] {
        for (const int64_t threads : {1, 2, 4}) {
            Array<int64_t> count(packed.num_segments(), -1);
            count_active(
                {packed.mask.begin(), packed.cu_seqlens.begin(), packed.num_segments(), threads, count.begin()});
            CHECK(same_bits(count, expected), "threads %lld", as_printed(threads));
            Array<float> out(packed.num_tokens(), std::numeric_limits<float>::quiet_NaN());
            spread_active({value.begin(), packed.mask.begin(), packed.cu_seqlens.begin(), packed.num_segments(),
                           threads, out.begin()});
            for (int64_t t = 0; t < packed.num_tokens(); ++t) {
                const float truth = packed.mask[t] ? value[packed.segment[static_cast<size_t>(t)]] : 0;
                CHECK(out[t] == truth, "out[%lld]: %g, truth %g", as_printed(t), out[t], truth);
            }
        }
    });
}

}  // namespace
}  // namespace mosaic::test

int main() {
    using namespace mosaic::test;
    Random random(47);
    for (const double active : {0.0, 0.3, 0.9, 1.0}) {
        for (const auto& lengths : small_layouts()) check_layout(random, lengths, active);
        for (const auto& lengths : large_layouts()) check_layout(random, lengths, active);
    }
    return finish();
}

// Arrays of a type that is known at run time, exactly as large as they say.
#pragma once

#include <limits>
#include <vector>

#include "check.h"
#include "float_format.h"
#include "linear_logprob.h"  // ElementType

namespace mosaic::test {

class Elements {
  public:
    Elements(ElementType type, int64_t size)
        : type_(type),
          floats_(type == ElementType::float32 ? size : 0, kFill),
          halves_(type == ElementType::float32 ? 0 : size, 0xffff) {}

    void* data() const { return type_ == ElementType::float32 ? static_cast<void*>(floats_.begin()) : halves_.begin(); }
    double operator[](int64_t index) const {
        return type_ == ElementType::float32 ? floats_[index] : decode(halves_[index], format());
    }
    void set(int64_t index, double value) const {
        if (type_ == ElementType::float32)
            floats_[index] = static_cast<float>(value);
        else
            halves_[index] = encode(value, format());
    }
    std::vector<double> values() const {
        std::vector<double> out(static_cast<size_t>(std::max(floats_.size(), halves_.size())));
        for (size_t i = 0; i < out.size(); ++i) out[i] = (*this)[static_cast<int64_t>(i)];
        return out;
    }
    ElementType type() const { return type_; }

    // Half the distance between neighbours, relative to them: what one rounding may cost.
    double rounding() const {
        return type_ == ElementType::float32 ? 0x1p-24 : std::ldexp(0.5, -format().fraction_bits);
    }

    bool same_bits_as(const Elements& other) const {
        return same_bits(floats_, other.floats_) && same_bits(halves_, other.halves_);
    }

  private:
    // NaN in every type: what nobody writes is noticed, as is what nobody may read.
    static constexpr float kFill = std::numeric_limits<float>::quiet_NaN();

    FloatFormat format() const { return type_ == ElementType::bfloat16 ? kBfloat16 : kFloat16; }

    ElementType type_;
    Array<float> floats_;
    Array<uint16_t> halves_;
};

}  // namespace mosaic::test

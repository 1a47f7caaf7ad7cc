// The floating-point types of tensors that kernels read and write; inside they compute in float32 or wider.
#pragma once

namespace mosaic {

enum class ElementType { float32, bfloat16, float16 };

}  // namespace mosaic

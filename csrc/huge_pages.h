// Fresh memory in pages of 2 MB: a kernel that writes as fast as memory takes it would otherwise spend most of its time
// in page faults.
#pragma once

#include <cstddef>

namespace mosaic {

// Asks for huge pages behind memory that is about to be written for the first time. Only a wish: without Linux or with
// little memory nothing happens, and pages that are there already stay as they are.
void wish_huge_pages(void* memory, size_t bytes);

}  // namespace mosaic

#include "common.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace mosaic {

void run_tasks(int64_t count, int64_t threads, void (*task)(const void* context, int64_t index), const void* context) {
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, index);
    };
    std::vector<std::thread> others;
    const int64_t wanted = std::min(threads, count) - 1;
    others.reserve(static_cast<size_t>(std::max<int64_t>(wanted, 0)));
    try {
        while (static_cast<int64_t>(others.size()) < wanted) others.emplace_back(work);
    } catch (const std::system_error&) {
        // The machine gives no more threads: those that started share the work.
    }
    work();
    for (std::thread& other : others) other.join();
}

Buffer::Buffer(size_t bytes) : memory_(::operator new(bytes, std::align_val_t{64})) {}

Buffer::~Buffer() { ::operator delete(memory_, std::align_val_t{64}); }

}  // namespace mosaic

// What several ops share: spreading work over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace mosaic {

// Runs task(0) .. task(count - 1) on up to `threads` threads, each index once. A task must not throw, and must write
// nothing that another reads: then the result does not depend on the thread count. Threads start anew on every call
// (tens of microseconds), so callers ask for one thread when the work is small.
template <class Task>
void parallel_for(int64_t count, int64_t threads, const Task& task) {
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(index);
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

// Threads worth starting for `items` items when one thread should get at least `grain` of them.
inline int64_t useful_threads(int64_t threads, int64_t items, int64_t grain) {
    return std::max<int64_t>(1, std::min(threads, items / grain));
}

}  // namespace mosaic

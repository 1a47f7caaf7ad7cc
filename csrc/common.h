// What several ops share: spreading work over threads, and memory for a call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mosaic {

[[gnu::always_inline]] inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
[[gnu::always_inline]] inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
// How many parts of `size` make `length`, the last one perhaps shorter; and the length that they fill.
[[gnu::always_inline]] inline int64_t parts(int64_t length, int64_t size) { return (length + size - 1) / size; }
[[gnu::always_inline]] inline int64_t rounded_up(int64_t length, int64_t size) { return parts(length, size) * size; }

// Runs task(context, 0) .. task(context, count - 1) on up to `threads` threads, each index once.
void run_tasks(int64_t count, int64_t threads, void (*task)(const void* context, int64_t index), const void* context);

// The same for a callable. It must not throw, and no task may write what another reads: then the result does not depend
// on the thread count. Waking a thread costs microseconds, so callers ask for one thread when the work is small.
template <class Task>
[[gnu::always_inline]] inline void parallel_for(int64_t count, int64_t threads, const Task& task) {
    run_tasks(
        count, threads, [](const void* context, int64_t index) { (*static_cast<const Task*>(context))(index); }, &task);
}

// The same for task(index, slot), where no two tasks with the same slot, 0 .. threads - 1, run at a time: for memory
// that a task works in.
template <class Task>
[[gnu::always_inline]] inline void parallel_for_slots(int64_t count, int64_t threads, const Task& task) {
    std::atomic<int64_t> next{0};
    parallel_for(threads, threads, [&](int64_t slot) {
        for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(index, slot);
    });
}

// Threads worth waking for `items` items when one thread should get at least `grain` of them.
[[gnu::always_inline]] inline int64_t useful_threads(int64_t threads, int64_t items, int64_t grain) {
    const int64_t most = items / grain;
    const int64_t used = most < threads ? most : threads;
    return used < 1 ? 1 : used;
}

// Memory that lives as long as a call, aligned to a cache line, not initialised. Throws std::bad_alloc.
class Buffer {
  public:
    explicit Buffer(size_t bytes);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    template <class T>
    [[gnu::always_inline]] T* as() const {
        return static_cast<T*>(memory_);
    }

  private:
    void* memory_;
};

}  // namespace mosaic

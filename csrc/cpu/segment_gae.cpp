// How the tokens of a call are spread over threads; the recursion itself is in segment_gae_scan.h.
//
// A unit is what one recursion runs through: a segment, or for "chain" a trajectory. Long units are cut into spans, so
// that few of them still occupy many threads. A span needs the carry of the one after it in time; a thread that finds
// it missing first composes its own span into one map, from which the span before it gets its carry at once, and by
// then holds the span's tokens in cache for the pass that writes. Where the carry is there already, one pass does both.
// Cuts depend on the unit's length alone, and a carry between spans always goes through the composed map, so that the
// bits depend neither on the threads nor on neighbours.
#include "segment_gae.h"

#include <sched.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "common.h"
#include "cpu/segment_gae_scan.h"

namespace mosaic::MOSAIC_ISA {
namespace {

constexpr int64_t kSpan = 32768;           // tokens; what they read and write (0.5 MB) stays in a core's cache
constexpr int64_t kJob = 8192;             // short spans are handed out together, at least so many tokens at a time
constexpr int64_t kPieceCost = 32;         // a segment costs about as much as so many tokens on top of its own
constexpr int64_t kGrain = 32768;          // a thread is worth waking for so many tokens,
constexpr int64_t kSurveyGrain = 1 << 22;  // or so many to survey, which reads little of them

// Results too small for a normal number become 0: where lambda decays a reward over thousands of tokens, arithmetic on
// subnormal numbers would take a hundred times as long.
class FlushSubnormals {
  public:
#ifdef MOSAIC_X86
    FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000); }
    ~FlushSubnormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#endif
};

struct Segment {
    int64_t first;             // its first active token, or its end
    double leading = 0;        // reward of its masked tokens before `first`
    bool has_leading = false;  // any of them is not 0
    int64_t active = 0;        // its active tokens (position only)
    int64_t active_after = 0;  // those after it in its trajectory (position only)
};

// Tokens [begin, end) of a segment.
struct Piece {
    int64_t segment, begin, end;
};

// Pieces in the order of the recursion, the last token first.
struct Span {
    int64_t first_piece;
    int64_t bootstrap_segment;  // whose bootstrap value starts the recursion; -1: the span before in this order does
};

// What a span hands to the next.
struct Carry {
    double actor, critic;
    int32_t ready;
};

int64_t count_active(const uint8_t* mask, int64_t size) {
    // Sums of bytes in vectors of bytes, emptied before they overflow.
    typedef uint8_t Block __attribute__((vector_size(4 * kLanes)));
    constexpr int64_t block = sizeof(Block);
    int64_t count = 0, token = 0;
    while (token + block <= size) {
        Block sums{};
        for (int round = 0; round < 255 && token + block <= size; ++round, token += block) {
            Block some;
            std::memcpy(&some, mask + token, sizeof some);
            sums += some;
        }
        for (int lane = 0; lane < block; ++lane) count += sums[lane];
    }
    for (; token < size; ++token) count += mask[token];
    return count;
}

// Finds what the plan needs to know of a segment, and is done with the masked tokens that it starts with.
Segment survey(const SegmentGae& call, int64_t segment) {
    const int64_t begin = call.cu_seqlens[segment], end = call.cu_seqlens[segment + 1];
    if (begin == end) return {end};
    const void* found = std::memchr(call.mask + begin, 1, end - begin);
    Segment out{found ? static_cast<const uint8_t*>(found) - call.mask : end};
    int64_t token = begin;
    while (token < out.first) {
        if (token + kWidth <= out.first && all_zero(call.reward + token)) {
            token += kWidth;
            continue;
        }
        out.has_leading |= call.reward[token] != 0;
        out.leading += call.reward[token++];
    }
    std::memset(call.advantage + begin, 0, 4 * (out.first - begin));
    std::memset(call.returns + begin, 0, 4 * (out.first - begin));
    if (call.correction == Correction::position) out.active = count_active(call.mask + out.first, end - out.first);
    return out;
}

void count_after(const SegmentGae& call, Segment* segments) {
    const Buffer memory(sizeof(int64_t) * call.num_trajectories);
    int64_t* seen = memory.as<int64_t>();
    std::memset(seen, 0, sizeof(int64_t) * call.num_trajectories);
    for (int64_t segment = call.num_segments - 1; segment >= 0; --segment) {
        int64_t& total = seen[call.segment_trajectory[segment]];
        segments[segment].active_after = total;
        total += segments[segment].active;
    }
}

// Which pieces each span passes, and which spans a thread takes at a time.
class Plan {
  public:
    Plan(const SegmentGae& call, Segment* segments) : Plan(call, segments, most_pieces(call)) {}

    // A span ends where the next begins, a job j is spans jobs()[j] .. jobs()[j + 1]: both arrays have an end behind.
    const Piece* pieces() const { return pieces_.as<Piece>(); }
    const Span* spans() const { return spans_.as<Span>(); }
    const int64_t* jobs() const { return jobs_.as<int64_t>(); }
    int64_t num_spans() const { return num_spans_; }
    int64_t num_jobs() const { return num_jobs_; }

  private:
    static int64_t most_pieces(const SegmentGae& call) {
        return call.num_segments + call.cu_seqlens[call.num_segments] / kSpan + 1;
    }

    Plan(const SegmentGae& call, Segment* segments, int64_t most)
        : segments_(segments),
          pieces_(sizeof(Piece) * most),
          spans_(sizeof(Span) * (most + 1)),
          jobs_(sizeof(int64_t) * (most + 1)) {
        if (call.correction == Correction::chain)
            add_trajectories(call);
        else
            add_segments(call);
        spans_.as<Span>()[num_spans_] = {num_pieces_, 0};
        jobs_.as<int64_t>()[num_jobs_] = num_spans_;
    }

    void add_segments(const SegmentGae& call) {
        for (int64_t segment = 0; segment < call.num_segments; ++segment) {
            const int64_t end = call.cu_seqlens[segment + 1];
            if (segments_[segment].first == end) continue;
            begin_unit(segment);
            add(segment, end);
        }
    }

    void add_trajectories(const SegmentGae& call) {
        // Counting sort: the segments of each trajectory, in their order.
        const int64_t size = call.num_trajectories;
        const Buffer memory(sizeof(int64_t) * (size + 1 + call.num_segments));
        int64_t* next = memory.as<int64_t>();
        int64_t* sorted = next + size + 1;
        std::memset(next, 0, sizeof(int64_t) * (size + 1));
        for (int64_t segment = 0; segment < call.num_segments; ++segment) ++next[call.segment_trajectory[segment] + 1];
        for (int64_t trajectory = 0; trajectory < size; ++trajectory) next[trajectory + 1] += next[trajectory];
        for (int64_t segment = 0; segment < call.num_segments; ++segment)
            sorted[next[call.segment_trajectory[segment]]++] = segment;
        // Each next[] has come to its trajectory's end, which is the following one's begin.
        for (int64_t trajectory = 0; trajectory < size; ++trajectory)
            add_chain(call, sorted + (trajectory ? next[trajectory - 1] : 0), sorted + next[trajectory]);
    }

    // Segments of one trajectory. Those without active tokens hand their reward to the active one before them, or where
    // there is none to the first active one.
    void add_chain(const SegmentGae& call, const int64_t* begin, const int64_t* end) {
        double leading = 0;
        for (; begin < end && !has_active(call, *begin); ++begin) leading += segments_[*begin].leading;
        if (begin == end) return;
        segments_[*begin].leading += leading;
        const int64_t* last = end - 1;
        while (!has_active(call, *last)) --last;
        begin_unit(*last);
        while (end-- > begin) add(*end, call.cu_seqlens[*end + 1]);
    }

    bool has_active(const SegmentGae& call, int64_t segment) const {
        return segments_[segment].first < call.cu_seqlens[segment + 1];
    }

    void begin_unit(int64_t bootstrap_segment) {
        bootstrap_segment_ = bootstrap_segment;
        span_weight_ = kSpan;  // full: the next piece opens a span
    }

    // What the recursion passes of a segment, from its end to its first active token.
    void add(int64_t segment, int64_t end) {
        const int64_t first = segments_[segment].first;
        do {
            const int64_t begin = end - first > kSpan ? end - kSpan : first;
            const int64_t weight = end - begin + kPieceCost;
            if (span_weight_ + weight > kSpan) open_span();
            span_weight_ += weight;
            job_weight_ += weight;
            pieces_.as<Piece>()[num_pieces_++] = {segment, begin, end};
            end = begin;
        } while (end > first);
    }

    void open_span() {
        if (job_weight_ >= kJob) {
            jobs_.as<int64_t>()[num_jobs_++] = num_spans_;
            job_weight_ = 0;
        }
        spans_.as<Span>()[num_spans_++] = {num_pieces_, bootstrap_segment_};
        bootstrap_segment_ = -1;
        span_weight_ = 0;
    }

    Segment* segments_;
    const Buffer pieces_, spans_, jobs_;
    int64_t num_pieces_ = 0, num_spans_ = 0, num_jobs_ = 0;
    int64_t bootstrap_segment_ = -1, span_weight_ = 0;
    int64_t job_weight_ = kJob;  // full: the first span opens a job
};

struct Work {
    const SegmentGae& call;
    const Segment* segments;
    const Plan& plan;
    Carry* carries;  // [spans]
};

template <Pass pass, bool has_critic>
void pass_span(const Work& work, int64_t span, Scan& scan) {
    const SegmentGae& call = work.call;
    const Span* spans = work.plan.spans() + span;
    for (int64_t index = spans[0].first_piece; index < spans[1].first_piece; ++index) {
        const Piece piece = work.plan.pieces()[index];
        const Segment& segment = work.segments[piece.segment];
        if (piece.begin == piece.end) {  // chain: no active token, the reward waits for one
            scan.actor.add(segment.leading);
            scan.critic.add(segment.leading);
            continue;
        }
        scan.actor.use(call.gamma, call.lam[piece.segment]);
        if (has_critic) scan.critic.use(call.gamma, call.lam_critic[piece.segment]);
        if (pass != Pass::compose && call.correction == Correction::position) {
            const double after = static_cast<double>(segment.active_after);
            scan.advantage_scale = pow(scan.actor.decay, after);
            if (call.corrected_returns)
                scan.returns_scale = has_critic ? pow(scan.critic.decay, after) : scan.advantage_scale;
        }
        pass_tokens<pass, has_critic>(call, piece.begin, piece.end, segment.first, segment.leading, scan);
    }
}

bool is_ready(const Carry& carry) { return __atomic_load_n(&carry.ready, __ATOMIC_ACQUIRE); }

// Waits for a carry. Another thread is at work on it: spans are taken in order, each waits for the one before at most.
void wait_for(const Carry& carry) {
    for (int64_t round = 0; !is_ready(carry); ++round)
        if (round > 1000) sched_yield();
}

void publish(Carry& carry, const Scan& scan, double actor, double critic) {
    carry.actor = scan.actor.sum + scan.actor.product * actor;
    carry.critic = scan.critic.sum + scan.critic.product * critic;
    __atomic_store_n(&carry.ready, 1, __ATOMIC_RELEASE);
}

template <bool has_critic>
void run_span(const Work& work, int64_t index) {
    const SegmentGae& call = work.call;
    const Span* span = work.plan.spans() + index;
    const Carry* before = span[0].bootstrap_segment < 0 ? work.carries + index - 1 : nullptr;
    bool has_next = span[1].bootstrap_segment < 0;  // a span that waits for this one's carry
    if (before && has_next && !is_ready(*before)) {
        Scan scan;
        pass_span<Pass::compose, has_critic>(work, index, scan);
        wait_for(*before);
        publish(work.carries[index], scan, before->actor, before->critic);
        has_next = false;
    }
    double actor, critic;
    if (before) {
        wait_for(*before);
        actor = before->actor, critic = before->critic;
    } else {
        actor = critic = call.bootstrap_value ? call.gamma * call.bootstrap_value[span[0].bootstrap_segment] : 0.0;
    }
    Scan scan;
    scan.actor.carry = actor;
    scan.critic.carry = critic;
    if (!has_next) return pass_span<Pass::write, has_critic>(work, index, scan);
    pass_span<Pass::both, has_critic>(work, index, scan);
    publish(work.carries[index], scan, actor, critic);
}

// Runs the plan. Jobs come from a counter of our own, because waiting for a carry needs them to be taken in order.
void run(const Work& work, int64_t threads) {
    std::atomic<int64_t> next{0};
    parallel_for(threads, threads, [&](int64_t) {
        const FlushSubnormals flush;
        const int64_t* jobs = work.plan.jobs();
        for (int64_t job; (job = next.fetch_add(1, std::memory_order_relaxed)) < work.plan.num_jobs();)
            for (int64_t span = jobs[job]; span < jobs[job + 1]; ++span)
                work.call.lam_critic ? run_span<true>(work, span) : run_span<false>(work, span);
    });
}

void survey_all(const SegmentGae& call, int64_t threads, Segment* segments) {
    const int64_t group = 1 + call.num_segments / 256;
    parallel_for((call.num_segments + group - 1) / group, threads, [&](int64_t index) {
        for (int64_t segment = index * group; segment < (index + 1) * group && segment < call.num_segments; ++segment)
            segments[segment] = survey(call, segment);
    });
}

}  // namespace

int64_t segment_gae(const SegmentGae& call) {
    const int64_t tokens = call.cu_seqlens[call.num_segments];
    const Buffer segment_memory(sizeof(Segment) * call.num_segments);
    Segment* segments = segment_memory.as<Segment>();
    survey_all(call, useful_threads(call.threads, tokens, kSurveyGrain), segments);
    if (call.correction != Correction::chain) {
        for (int64_t segment = 0; segment < call.num_segments; ++segment)
            if (segments[segment].has_leading && segments[segment].first == call.cu_seqlens[segment + 1])
                return segment;
    }
    if (call.correction == Correction::position) count_after(call, segments);

    const Plan plan(call, segments);
    const Buffer carry_memory(sizeof(Carry) * plan.num_spans());
    Carry* carries = carry_memory.as<Carry>();
    for (int64_t span = 0; span < plan.num_spans(); ++span) carries[span].ready = 0;
    run({call, segments, plan, carries}, useful_threads(call.threads, tokens, kGrain));
    return -1;
}

}  // namespace mosaic::MOSAIC_ISA

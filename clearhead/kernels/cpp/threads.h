// Threads that do one thing after the other together.

#pragma once

#include "vectors.h"

namespace {

// What one thread does of a phase: pieces of its own share that were taken, by itself or by others, and pieces that it has done.
struct Lane {
    alignas(64) std::atomic<i64> taken{0};
    std::atomic<i64> done{0};
};

// One thread's view of what all do, phase after phase. Each has its share of the pieces, one after the other, so that it reads
// memory in order; who is done helps the others, and a phase is over when its pieces are done: a thread whose core others use
// too is not waited for. They wait awake, as it is never for long.
struct Team {
    Lane* lanes;
    const int threads, me;

    template <class Work>
    void each(i64 pieces, const Work& work) {
        Lane* now = lanes;
        lanes += threads;
        for (int next = 0; next < threads; next++) {
            const int whose = (me + next) % threads;
            const i64 first = pieces * whose / threads, n = pieces * (whose + 1) / threads - first;
            for (i64 i; now[whose].taken.load(std::memory_order_relaxed) < n &&
                        (i = now[whose].taken.fetch_add(1, std::memory_order_relaxed)) < n;) {
                work(first + i);
                now[me].done.fetch_add(1, std::memory_order_release);
            }
        }
        for (int spins = 0; n_done(now) < pieces; spins++)
            if (spins < 1000)
                pause();
            else
                sched_yield();
    }

    i64 n_done(const Lane* now) const {
        i64 n = 0;
        for (int i = 0; i < threads; i++) n += now[i].done.load(std::memory_order_acquire);
        return n;
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};

// `work(team)` on each of these threads.
template <class Work>
void together(int threads, i64 n_phases, const Work& work) {
    std::vector<Lane> lanes(n_phases * threads);
#pragma omp parallel num_threads(threads)
    {
        Team team{lanes.data(), threads, omp_get_thread_num()};
        work(team);
    }
}

}  // namespace

// A team of threads that works through phases: each phase is split into pieces, and ends when all its pieces are done.

#pragma once

#include "vectors.h"

namespace {

// One thread's counters of a phase: pieces of its share that were taken (by any thread), and pieces that this thread finished.
struct Lane {
    alignas(64) std::atomic<i64> taken{0};
    std::atomic<i64> done{0};
};

// One thread's view of the team. Each thread first takes the pieces of its own share in order, so that it reads memory in order,
// and then takes what is left of the others' shares. So a thread that was suspended, or never started, holds up nobody unless
// it is in the middle of a piece. Waiting threads spin, because phases are short.
struct Team {
    Lane* lanes;
    const int threads, me;

    template <class Work>
    void for_each(i64 pieces, const Work& work) {
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

// Run `work(team)` on each of `threads` threads. `n_phases` is at least the number of `for_each` calls in it.
template <class Work>
void parallel(int threads, i64 n_phases, const Work& work) {
    std::vector<Lane> lanes(n_phases * threads);
#pragma omp parallel num_threads(threads)
    {
        Team team{lanes.data(), threads, omp_get_thread_num()};
        work(team);
    }
}

}  // namespace

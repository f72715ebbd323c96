/* Barrier of the thread pool. Routines call st_barrier_wait between dependent kernels; the slow path (sleeping) is
   reached through function pointers, so a routine's library links to nothing of the pool's. */
#ifndef ST_POOL_H
#define ST_POOL_H
#include <stdint.h>

typedef struct st_barrier {
    int32_t count;                                       /* threads that take part */
    int32_t spins;                                       /* polls before going to sleep */
    void (*sleep)(struct st_barrier *, uint32_t phase);  /* returns once phase has passed */
    void (*wake)(struct st_barrier *);
    _Alignas(128) int32_t arrived;
    _Alignas(128) uint32_t phase;
    int32_t sleepers;
} st_barrier;

typedef void (*st_entry)(void **frame, int64_t *scalars, int tid, int nt, st_barrier *barrier);

static inline void st_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Return once all threads of the region have come here; what they wrote before is then visible to every one. */
static inline void st_barrier_wait(st_barrier *barrier, int tid) {
    (void)tid;
    if (barrier->count == 1) return;
    uint32_t phase = __atomic_load_n(&barrier->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == barrier->count) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        /* Sequentially consistent with the sleeper's count-then-check: one of the two sees the other. */
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&barrier->sleepers, __ATOMIC_SEQ_CST) != 0) barrier->wake(barrier);
        return;
    }
    for (int32_t spin = barrier->spins; spin > 0; spin--) {
        if (__atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) != phase) return;
        st_pause();
    }
    barrier->sleep(barrier, phase);
}
#endif

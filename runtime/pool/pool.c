/* A persistent pool of threads that all run one function (SPMD).
 *
 * The caller is thread 0; the others are started by the first region that needs them. Between regions a worker polls
 * for a bounded time, then sleeps in the kernel. A child after fork() has no workers and starts its own on first use.
 * Regions of one pool follow one another, whichever thread asks; an entry must not start a region of its own pool.
 * Expects pool.h in front of this text.
 */
#define ST_STACK_BYTES ((size_t)8 << 20) /* kernels keep panels on the stack; macOS and musl give far less */
#define ST_POLL_NANOSECONDS 200000

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#if defined(__linux__) && !defined(ST_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#define ST_FUTEX 1
#endif

/* ---- sleeping on a word ---- */

#if defined(ST_FUTEX)
static void sleep_while(uint32_t *word, uint32_t value) {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static void wake_sleepers(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
static void reset_sleeping(void) {}
#else
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_condition = PTHREAD_COND_INITIALIZER;
static void sleep_while(uint32_t *word, uint32_t value) {
    pthread_mutex_lock(&sleep_mutex);
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) pthread_cond_wait(&sleep_condition, &sleep_mutex);
    pthread_mutex_unlock(&sleep_mutex);
}
static void wake_sleepers(uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&sleep_mutex);
    pthread_cond_broadcast(&sleep_condition);
    pthread_mutex_unlock(&sleep_mutex);
}
static void reset_sleeping(void) {
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&sleep_condition, NULL);
}
#endif

static void barrier_sleep(st_barrier *barrier, uint32_t phase) {
    __atomic_add_fetch(&barrier->sleepers, 1, __ATOMIC_SEQ_CST);
    sleep_while(&barrier->phase, phase);
    __atomic_sub_fetch(&barrier->sleepers, 1, __ATOMIC_SEQ_CST);
}
static void barrier_wake(st_barrier *barrier) { wake_sleepers(&barrier->phase); }

/* ---- floating-point environment ----
 * Another library of the process may have set flush-to-zero or a rounding mode in the calling thread. Results must not
 * depend on that nor differ between threads, so a region runs in the default environment. */

#if defined(__x86_64__)
typedef uint32_t st_float_mode;
#define ST_CONTROL_BITS 0xffc0u /* all but the sticky exception flags */
static st_float_mode enter_default_mode(void) {
    uint32_t mode = __builtin_ia32_stmxcsr();
    if ((mode & ST_CONTROL_BITS) != 0x1f80u) __builtin_ia32_ldmxcsr(0x1f80u);
    return mode;
}
static void leave_default_mode(st_float_mode mode) {
    if ((mode & ST_CONTROL_BITS) != 0x1f80u) __builtin_ia32_ldmxcsr(mode);
}
#elif defined(__aarch64__)
typedef uint64_t st_float_mode;
static st_float_mode enter_default_mode(void) {
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    if (mode != 0) __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)0));
    return mode;
}
static void leave_default_mode(st_float_mode mode) {
    if (mode != 0) __asm__ __volatile__("msr fpcr, %0" ::"r"(mode));
}
#else
typedef int st_float_mode;
static st_float_mode enter_default_mode(void) { return 0; }
static void leave_default_mode(st_float_mode mode) { (void)mode; }
#endif

/* ---- the pool ---- */

typedef struct st_pool st_pool;
typedef struct {
    st_pool *pool;
    int tid;
    uint32_t seen; /* generation at the time of the start */
    pthread_t thread;
} st_worker;

struct st_pool {
    st_barrier barrier;
    _Alignas(128) uint32_t generation; /* one more for each region, polled by the workers */
    int32_t sleepers;
    int32_t stopping;
    st_entry entry;
    void **frame;
    int64_t *scalars;
    int32_t active; /* threads of the current region */
    _Alignas(128) uint32_t busy; /* workers that have not finished the current region */
    uint32_t owner_sleeps;
    _Alignas(128) pthread_mutex_t regions;
    int32_t wanted, started; /* workers, not counting the caller */
    int32_t spins;
    st_worker *workers;
    st_pool *next;
};

static pthread_mutex_t pools_mutex = PTHREAD_MUTEX_INITIALIZER;
static st_pool *pools;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void forget_threads(st_pool *pool) {
    pthread_mutex_init(&pool->regions, NULL);
    pool->started = 0;
    pool->sleepers = 0;
    pool->busy = 0;
    pool->owner_sleeps = 0;
    pool->barrier.arrived = 0;
    pool->barrier.sleepers = 0;
}
static void before_fork(void) { pthread_mutex_lock(&pools_mutex); }
static void after_fork_parent(void) { pthread_mutex_unlock(&pools_mutex); }
static void after_fork_child(void) {
    pthread_mutex_init(&pools_mutex, NULL);
    reset_sleeping();
    for (st_pool *pool = pools; pool; pool = pool->next) forget_threads(pool);
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

static int64_t now_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The length of a pause differs tenfold between processors, so it is measured: how many polls fill the time. */
static int32_t polls_for(int64_t nanoseconds) {
    int64_t shortest = INT64_MAX; /* a trial may be interrupted */
    uint32_t word = 0;
    for (int trial = 0; trial < 3; trial++) {
        int64_t start = now_nanoseconds();
        for (int i = 0; i < 128; i++) {
            if (__atomic_load_n(&word, __ATOMIC_ACQUIRE) != 0) break;
            st_pause();
        }
        int64_t elapsed = now_nanoseconds() - start;
        if (elapsed < shortest) shortest = elapsed;
    }
    int64_t polls = nanoseconds * 128 / (shortest > 0 ? shortest : 1);
    return polls < 1 ? 1 : polls > 200000 ? 200000 : (int32_t)polls;
}

static void *work(void *argument) {
    st_worker *worker = argument;
    st_pool *pool = worker->pool;
    uint32_t seen = worker->seen;
    enter_default_mode();
    for (;;) {
        int32_t spin = pool->spins;
        uint32_t now;
        while ((now = __atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE)) == seen && spin-- > 0) st_pause();
        if (now == seen) {
            __atomic_add_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
            sleep_while(&pool->generation, seen);
            __atomic_sub_fetch(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
        }
        seen++; /* the next region waits for this worker, so generations cannot be missed */
        if (__atomic_load_n(&pool->stopping, __ATOMIC_ACQUIRE)) return NULL;
        if (worker->tid < pool->active)
            pool->entry(pool->frame, pool->scalars, worker->tid, pool->active, &pool->barrier);
        if (__atomic_sub_fetch(&pool->busy, 1, __ATOMIC_SEQ_CST) == 0 &&
            __atomic_load_n(&pool->owner_sleeps, __ATOMIC_SEQ_CST))
            wake_sleepers(&pool->busy);
    }
}

static void start_workers(st_pool *pool) {
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, ST_STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the host program's threads */
    while (pool->started < pool->wanted) {
        st_worker *worker = &pool->workers[pool->started];
        worker->pool = pool;
        worker->tid = pool->started + 1;
        worker->seen = pool->generation;
        /* A refused thread is no failure: results do not depend on the number of threads. */
        if (pthread_create(&worker->thread, &attributes, work, worker) != 0) break;
        pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void publish(st_pool *pool) {
    __atomic_add_fetch(&pool->generation, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST) != 0) wake_sleepers(&pool->generation);
}

/* Make a pool of `threads` threads, the caller included. `processors` is how many may run at once: with fewer
   processors than threads nobody polls. Returns NULL where memory is short. */
st_pool *st_pool_create(int threads, int processors) {
    st_pool *pool = NULL;
    if (posix_memalign((void **)&pool, 128, sizeof *pool) != 0) return NULL;
    __builtin_memset(pool, 0, sizeof *pool);
    pool->wanted = threads > 1 ? threads - 1 : 0;
    pool->workers = calloc((size_t)pool->wanted + 1, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return NULL;
    }
    pool->spins = threads > 1 && threads <= processors ? polls_for(ST_POLL_NANOSECONDS) : 0;
    pool->barrier.spins = pool->spins;
    pool->barrier.sleep = barrier_sleep;
    pool->barrier.wake = barrier_wake;
    forget_threads(pool);
    pthread_once(&fork_once, watch_forks);
    pthread_mutex_lock(&pools_mutex);
    pool->next = pools;
    pools = pool;
    pthread_mutex_unlock(&pools_mutex);
    return pool;
}

/* Run `entry` on at most `limit` threads of the pool (0: all) and return when every one has finished. */
void st_routine_run(st_pool *pool, st_entry entry, void **frame, int64_t *scalars, int limit) {
    st_float_mode mode = enter_default_mode();
    if (pool->wanted == 0 || limit == 1) {
        st_barrier alone = {.count = 1};
        entry(frame, scalars, 0, 1, &alone);
        leave_default_mode(mode);
        return;
    }
    pthread_mutex_lock(&pool->regions);
    if (pool->started < pool->wanted) start_workers(pool);
    int32_t active = pool->started + 1;
    if (limit > 0 && limit < active) active = limit;
    pool->entry = entry;
    pool->frame = frame;
    pool->scalars = scalars;
    pool->active = active;
    pool->barrier.count = active;
    __atomic_store_n(&pool->busy, (uint32_t)pool->started, __ATOMIC_RELAXED);
    if (pool->started > 0) publish(pool);
    entry(frame, scalars, 0, active, &pool->barrier);
    uint32_t busy;
    int32_t spin = pool->spins;
    while ((busy = __atomic_load_n(&pool->busy, __ATOMIC_ACQUIRE)) != 0) {
        if (spin-- > 0) {
            st_pause();
            continue;
        }
        __atomic_store_n(&pool->owner_sleeps, 1, __ATOMIC_SEQ_CST);
        while ((busy = __atomic_load_n(&pool->busy, __ATOMIC_SEQ_CST)) != 0) {
#if defined(ST_FUTEX)
            syscall(SYS_futex, &pool->busy, FUTEX_WAIT_PRIVATE, busy, NULL, NULL, 0);
#else
            sleep_while(&pool->busy, busy);
#endif
        }
        __atomic_store_n(&pool->owner_sleeps, 0, __ATOMIC_SEQ_CST);
        break;
    }
    pthread_mutex_unlock(&pool->regions);
    leave_default_mode(mode);
}

/* Run `entry` on all threads of the pool. */
void st_pool_run(st_pool *pool, st_entry entry, void **frame, int64_t *scalars) {
    st_routine_run(pool, entry, frame, scalars, 0);
}

/* End the workers and free the pool; no region may be running. */
void st_pool_destroy(st_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pools_mutex);
    for (st_pool **link = &pools; *link; link = &(*link)->next)
        if (*link == pool) {
            *link = pool->next;
            break;
        }
    pthread_mutex_unlock(&pools_mutex);
    pthread_mutex_lock(&pool->regions);
    __atomic_store_n(&pool->stopping, 1, __ATOMIC_RELEASE);
    publish(pool);
    pthread_mutex_unlock(&pool->regions);
    for (int32_t i = 0; i < pool->started; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->regions);
    free(pool->workers);
    free(pool);
}

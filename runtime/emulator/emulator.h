/* What CUDA source needs to run on the host, with its memory watched.
 *
 * The kernels' text is compiled behind this header, unchanged. Blocks run one after another; the threads of a block are
 * fibers that take turns at barriers and shuffles. The compiler's thread sanitizer instruments every access to memory with a
 * call; the calls are answered here: each cell of a buffer has a shadow that remembers who wrote and read it last. Reported
 * are accesses outside all buffers of a kernel, reads of cells that nobody wrote, two threads at one cell without a barrier
 * between them, barriers that not all threads of a block reach, and 16 bytes moved as one that are not aligned. The first
 * finding ends the launch.
 */
#include <link.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <ucontext.h>

#define ST_EMULATED 1
#define ST_HOST __attribute__((no_sanitize("thread"), noinline))
#define ST_CALLBACK extern "C" __attribute__((no_sanitize("thread")))
#define ST_EXPORT extern "C" __attribute__((no_sanitize("thread"), visibility("default")))
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

enum { ST_WARP = 32, ST_MOST_THREADS = 1024, ST_STACK = 1 << 16, ST_ZONE = 64, ST_MOST_REGIONS = 1024 };

/* -- what the host hands over and gets back ----------------------------------------------------------------------- */

struct st_shadow { /* of one cell */
    uint32_t write_launch, write_block, read_launch, read_block;
    uint16_t write_thread, write_epoch, read_thread, read_epoch;
    uint8_t written, read_by_many, read_by_blocks, read_by_warps;
    uint16_t write_sync, read_sync; /* how often the thread's warp had met */
};

struct st_region {
    char *base;
    int64_t cells;
    const char *name;
    struct st_shadow *shadow;
    int32_t cell; /* bytes */
    int32_t shared;
};

enum { ST_FINE, ST_OUTSIDE, ST_UNWRITTEN, ST_RACE, ST_DIVERGED, ST_MISALIGNED, ST_CROWDED };

struct st_report {
    int32_t kind, writes, bytes, other_writes;
    int32_t block, thread, other_block, other_thread;
    int64_t cell, cells;
    const char *name;
    int64_t code; /* address of the access in this library, from its start */
};

struct st_launch {
    void (*kernel)(void **);
    void **arguments;
    const struct st_region *regions;
    int32_t region_count, blocks, threads, cooperative;
    uint32_t number; /* no two launches have the same */
    struct st_report report;
};

/* -- state -------------------------------------------------------------------------------------------------------- */

struct st_index { unsigned int x, y, z; };
/* A vector moves whole, and a GPU does that at multiples of its size alone: so every copy of one is looked at. */
static void st_move_vector(void *to, const void *from, void *code);
template <typename T> struct __attribute__((aligned(16))) st_vector4 {
    T x, y, z, w;
    st_vector4() = default;
    ST_HOST st_vector4(const st_vector4 &from) { st_move_vector(this, &from, __builtin_return_address(0)); }
    ST_HOST st_vector4 &operator=(const st_vector4 &from) {
        st_move_vector(this, &from, __builtin_return_address(0));
        return *this;
    }
};
typedef st_vector4<float> float4;
typedef st_vector4<unsigned int> uint4;
static struct st_index threadIdx, blockIdx, blockDim, gridDim;

enum { ST_READY, ST_AT_BARRIER, ST_AT_WARP, ST_DONE };

struct st_fiber {
    jmp_buf place;
    ucontext_t start;
    int state, started, turn, sync;
};

struct st_slot { /* what a thread shows to its warp; two turns, for a fast thread may be one exchange ahead */
    uint32_t words[2][8];
};

enum { ST_MOST_COPIES = 256 };
struct st_copy {
    uint16_t *to;
    const uint16_t *from;
    int present, group;
};
struct st_queue { /* copies that a thread started and that have not landed */
    int count, group;
    struct st_copy copies[ST_MOST_COPIES];
};

static struct st_launch *st_now;
static struct st_region st_regions[ST_MOST_REGIONS];
static int st_region_count;
static int st_region_order[ST_MOST_REGIONS]; /* the latest used ones first */
static struct st_fiber st_fibers[ST_MOST_THREADS];
static struct st_slot st_slots[ST_MOST_THREADS];
static struct st_queue st_queues[ST_MOST_THREADS];
static char *st_stacks;
static int st_thread, st_epoch;
static uint32_t st_block_number;
static jmp_buf st_scheduler, st_end;
static char *st_code_start, *st_code_end;

/* -- findings ----------------------------------------------------------------------------------------------------- */

ST_HOST static void st_found(int kind, int writes, int bytes, const struct st_region *region, int64_t cell, void *code) {
    struct st_report *report = &st_now->report;
    report->kind = kind;
    report->writes = writes;
    report->bytes = bytes;
    report->block = (int)blockIdx.x;
    report->thread = st_thread;
    report->cell = cell;
    report->cells = region ? region->cells : 0;
    report->name = region ? region->name : "";
    report->code = (char *)code - st_code_start;
    _longjmp(st_end, 1);
}

ST_HOST static void st_raced(
    int writes, int bytes, const struct st_region *region, int64_t cell, void *code, int other_writes, uint32_t block, int thread
) {
    st_now->report.other_writes = other_writes;
    st_now->report.other_block = (int)block;
    st_now->report.other_thread = thread;
    st_found(ST_RACE, writes, bytes, region, cell, code);
}

/* Whether an access by (block, thread, epoch, sync) of this launch is unordered with the present one: threads of a block
   meet at barriers, which end an epoch, those of a warp also by themselves. */
ST_HOST static int st_unordered(uint32_t launch, uint32_t now, uint32_t block, int thread, int epoch, int sync) {
    if (launch != now) return 0;
    if (block != blockIdx.x) return 1;
    if (thread == st_thread || epoch != (uint16_t)st_epoch) return 0;
    return thread / ST_WARP != st_thread / ST_WARP || sync == (uint16_t)st_fibers[st_thread].sync;
}

ST_HOST static void st_check_cell(const struct st_region *region, int64_t cell, int writes, int bytes, void *code) {
    struct st_shadow *shadow = &region->shadow[cell];
    const uint32_t now = region->shared ? st_block_number : st_now->number;
    const int written = region->shared ? shadow->written && shadow->write_launch == now : shadow->written;
    if (!writes && !written) st_found(ST_UNWRITTEN, writes, bytes, region, cell, code);
    if (st_unordered(shadow->write_launch, now, shadow->write_block, shadow->write_thread, shadow->write_epoch,
            shadow->write_sync))
        st_raced(writes, bytes, region, cell, code, 1, shadow->write_block, shadow->write_thread);
    const uint16_t sync = (uint16_t)st_fibers[st_thread].sync;
    const int same_warp = shadow->read_thread / ST_WARP == st_thread / ST_WARP;
    if (writes) {
        const int same_epoch = shadow->read_epoch == (uint16_t)st_epoch;
        const int others = shadow->read_launch == now
            && (shadow->read_by_blocks || (same_epoch && shadow->read_by_warps)
                || (same_epoch && shadow->read_by_many && (!same_warp || shadow->read_sync == sync))
                || st_unordered(shadow->read_launch, now, shadow->read_block, shadow->read_thread, shadow->read_epoch,
                    shadow->read_sync));
        if (others) st_raced(writes, bytes, region, cell, code, 0, shadow->read_block, shadow->read_thread);
        shadow->write_launch = now;
        shadow->write_block = blockIdx.x;
        shadow->write_thread = (uint16_t)st_thread;
        shadow->write_epoch = (uint16_t)st_epoch;
        shadow->write_sync = sync;
        shadow->written = 1;
        return;
    }
    const int again = shadow->read_launch == now;
    const int same_block = again && shadow->read_block == blockIdx.x;
    shadow->read_by_blocks = (uint8_t)(again && (shadow->read_by_blocks || !same_block));
    const int same_epoch = same_block && shadow->read_epoch == (uint16_t)st_epoch;
    shadow->read_by_warps = (uint8_t)(same_epoch && (shadow->read_by_warps || !same_warp));
    shadow->read_by_many = (uint8_t)(same_epoch && shadow->read_sync == sync
        && (shadow->read_by_many || shadow->read_thread != st_thread));
    shadow->read_launch = now;
    shadow->read_block = blockIdx.x;
    shadow->read_thread = (uint16_t)st_thread;
    shadow->read_epoch = (uint16_t)st_epoch;
    shadow->read_sync = sync;
}

ST_HOST static void st_access(char *address, int bytes, int writes, void *code) {
    if (!st_now || st_thread < 0) return;
    for (int k = 0; k < st_region_count; k++) {
        const int place = st_region_order[k];
        const struct st_region *region = &st_regions[place];
        const ptrdiff_t offset = address - region->base;
        if (offset < -ST_ZONE || offset >= region->cells * region->cell + ST_ZONE) continue;
        for (int later = k; later > 0; later--) st_region_order[later] = st_region_order[later - 1];
        st_region_order[0] = place;
        const int64_t first = offset >= 0 ? offset / region->cell : -1;
        const int64_t last = (offset + bytes - 1) / region->cell;
        if (offset < 0 || last >= region->cells) st_found(ST_OUTSIDE, writes, bytes, region, first < 0 ? first : last, code);
        for (int64_t cell = first; cell <= last; cell++) st_check_cell(region, cell, writes, bytes, code);
        return;
    }
    if (address >= st_stacks && address < st_stacks + (ptrdiff_t)ST_MOST_THREADS * ST_STACK) return;
    if (address >= st_code_start && address < st_code_end) return;
    /* nowhere: name the region that lies nearest */
    const struct st_region *nearest = 0;
    ptrdiff_t distance = PTRDIFF_MAX;
    for (int k = 0; k < st_region_count; k++) {
        const ptrdiff_t offset = address - st_regions[k].base;
        const ptrdiff_t away = offset < 0 ? -offset : offset;
        if (away < distance) { distance = away; nearest = &st_regions[k]; }
    }
    st_found(ST_OUTSIDE, writes, bytes, nearest, nearest ? (address - nearest->base) / nearest->cell : 0, code);
}

/* One side of a move of 16 bytes. */
ST_HOST static void st_access_vector(const void *address, int writes, void *code) {
    if ((uintptr_t)address % 16) st_found(ST_MISALIGNED, writes, 16, 0, 0, code);
    st_access((char *)address, 16, writes, code);
}
ST_HOST static void st_move_vector(void *to, const void *from, void *code) {
    st_access_vector(from, 0, code);
    st_access_vector(to, 1, code);
    __builtin_memcpy(to, from, 16);
}

#define ST_ACCESS(name, bytes, writes) \
    ST_CALLBACK void name(void *address) { st_access((char *)address, bytes, writes, __builtin_return_address(0)); }
ST_ACCESS(__tsan_read1, 1, 0)
ST_ACCESS(__tsan_read2, 2, 0)
ST_ACCESS(__tsan_read4, 4, 0)
ST_ACCESS(__tsan_read8, 8, 0)
ST_ACCESS(__tsan_read16, 16, 0)
ST_ACCESS(__tsan_write1, 1, 1)
ST_ACCESS(__tsan_write2, 2, 1)
ST_ACCESS(__tsan_write4, 4, 1)
ST_ACCESS(__tsan_write8, 8, 1)
ST_ACCESS(__tsan_write16, 16, 1)
ST_ACCESS(__tsan_unaligned_read2, 2, 0)
ST_ACCESS(__tsan_unaligned_read4, 4, 0)
ST_ACCESS(__tsan_unaligned_read8, 8, 0)
ST_ACCESS(__tsan_unaligned_read16, 16, 0)
ST_ACCESS(__tsan_unaligned_write2, 2, 1)
ST_ACCESS(__tsan_unaligned_write4, 4, 1)
ST_ACCESS(__tsan_unaligned_write8, 8, 1)
ST_ACCESS(__tsan_unaligned_write16, 16, 1)
ST_CALLBACK void __tsan_read_range(void *address, long bytes) {
    st_access((char *)address, (int)bytes, 0, __builtin_return_address(0));
}
ST_CALLBACK void __tsan_write_range(void *address, long bytes) {
    st_access((char *)address, (int)bytes, 1, __builtin_return_address(0));
}
ST_CALLBACK void __tsan_init(void) {}
ST_CALLBACK void __tsan_func_entry(void *) {}
ST_CALLBACK void __tsan_func_exit(void *) {}

/* -- shared arrays ------------------------------------------------------------------------------------------------- */

template <typename T, int COUNT> struct st_guarded {
    char before[ST_ZONE];
    T cells[COUNT];
    char after[ST_ZONE];
};
template <int COUNT> struct st_shadows { struct st_shadow cells[COUNT]; };

ST_HOST static void st_shared_array(void *base, struct st_shadow *shadow, int cell, int64_t cells, const char *name) {
    for (int k = 0; k < st_region_count; k++)
        if (st_regions[k].base == base) return;
    st_region_order[st_region_count] = st_region_count;
    st_regions[st_region_count++] = st_region{(char *)base, cells, name, shadow, cell, 1};
}

#define ST_SHARED(type, name, count) \
    static st_guarded<type, (count)> name##_guarded __attribute__((aligned(16))); \
    static st_shadows<(count)> name##_shadows; \
    st_shared_array(name##_guarded.cells, name##_shadows.cells, (int)sizeof(type), (count), #name); \
    type *const name = name##_guarded.cells

/* Arrays of one launch are apart, wherever they lie on a GPU: so each has its own guards and shadows. */
#define ST_SHARED_AT(type, name, count, place) ST_SHARED(type, name, count)

/* -- fibers -------------------------------------------------------------------------------------------------------- */

ST_HOST static void st_pause(int state) {
    struct st_fiber *self = &st_fibers[st_thread];
    self->state = state;
    if (!_setjmp(self->place)) _longjmp(st_scheduler, 1);
}

ST_HOST static void st_live(void) {
    for (;;) {
        st_now->kernel(st_now->arguments);
        st_pause(ST_DONE);
    }
}

ST_HOST static void st_resume(int thread) {
    struct st_fiber *fiber = &st_fibers[thread];
    st_thread = thread;
    threadIdx.x = (unsigned)thread;
    if (_setjmp(st_scheduler)) return;
    if (fiber->started) _longjmp(fiber->place, 1);
    fiber->started = 1;
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = st_stacks + (ptrdiff_t)thread * ST_STACK;
    fiber->start.uc_stack.ss_size = ST_STACK;
    fiber->start.uc_link = 0;
    makecontext(&fiber->start, st_live, 0);
    setcontext(&fiber->start);
}

ST_HOST static int st_all(int first, int last, int state) {
    for (int thread = first; thread < last; thread++)
        if (st_fibers[thread].state != state) return 0;
    return 1;
}

ST_HOST static void st_release(int first, int last) {
    for (int thread = first; thread < last; thread++) st_fibers[thread].state = ST_READY;
}

ST_HOST static void st_run_block(void) {
    const int threads = st_now->threads;
    for (int thread = 0; thread < threads; thread++) {
        st_fibers[thread].state = ST_READY;
        st_fibers[thread].sync = 0;
        st_queues[thread].count = st_queues[thread].group = 0;
    }
    for (;;) {
        int ran = 0;
        for (int thread = 0; thread < threads; thread++)
            if (st_fibers[thread].state == ST_READY) { st_resume(thread); ran = 1; }
        if (st_all(0, threads, ST_DONE)) return;
        if (st_all(0, threads, ST_AT_BARRIER)) { st_epoch++; st_release(0, threads); continue; }
        for (int first = 0; first < threads; first += ST_WARP) {
            const int last = first + ST_WARP < threads ? first + ST_WARP : threads;
            if (st_all(first, last, ST_AT_WARP)) { st_release(first, last); ran = 1; }
        }
        if (!ran) { /* some wait for others that never come */
            for (st_thread = 0; st_fibers[st_thread].state == ST_DONE; st_thread++) {}
            st_found(ST_DIVERGED, 0, 0, 0, 0, st_code_start);
        }
    }
}

/* Threads that never meet need no fibers: one runs them in turn. */
ST_HOST static void st_run_alone(void) {
    for (int thread = 0; thread < st_now->threads; thread++) {
        st_thread = thread;
        threadIdx.x = (unsigned)thread;
        st_now->kernel(st_now->arguments);
    }
}

ST_HOST static void st_alone(void) {
    for (;;) {
        st_run_alone();
        st_thread = 0;
        st_pause(ST_DONE);
    }
}

ST_HOST static int st_find_code(struct dl_phdr_info *info, size_t, void *) {
    char *start = 0, *end = 0;
    for (int k = 0; k < info->dlpi_phnum; k++) {
        if (info->dlpi_phdr[k].p_type != PT_LOAD) continue;
        char *from = (char *)info->dlpi_addr + info->dlpi_phdr[k].p_vaddr;
        char *to = from + info->dlpi_phdr[k].p_memsz;
        if (!start || from < start) start = from;
        if (to > end) end = to;
    }
    if ((char *)&st_now < start || (char *)&st_now >= end) return 0;
    st_code_start = (char *)info->dlpi_addr;
    st_code_end = end;
    return 1;
}

/* Run one kernel over its grid; 0 where nothing was found, else 1 with launch->report filled. */
ST_EXPORT int st_emulate(struct st_launch *launch) {
    static uint32_t blocks_so_far;
    if (!st_code_end) {
        dl_iterate_phdr(st_find_code, 0);
        void *memory = mmap(0, (size_t)ST_MOST_THREADS * ST_STACK, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return -1;
        st_stacks = (char *)memory;
    }
    for (int k = 0; k < launch->region_count; k++) {
        st_regions[k] = launch->regions[k];
        st_region_order[k] = k;
    }
    st_region_count = launch->region_count;
    blockDim = st_index{(unsigned)launch->threads, 1, 1};
    gridDim = st_index{(unsigned)launch->blocks, 1, 1};
    launch->report.kind = ST_FINE;
    st_now = launch;
    for (int thread = 0; thread < ST_MOST_THREADS; thread++) st_fibers[thread].started = st_fibers[thread].turn = 0;
    int result = 0;
    if (_setjmp(st_end)) {
        result = 1;
    } else {
        for (int block = 0; block < launch->blocks; block++) {
            blockIdx.x = (unsigned)block;
            st_block_number = ++blocks_so_far;
            st_epoch = 0;
            if (launch->cooperative) {
                st_run_block();
            } else {
                struct st_fiber *fiber = &st_fibers[0];
                st_thread = 0;
                if (!_setjmp(st_scheduler)) {
                    if (fiber->started) _longjmp(fiber->place, 1);
                    fiber->started = 1;
                    getcontext(&fiber->start);
                    fiber->start.uc_stack.ss_sp = st_stacks;
                    fiber->start.uc_stack.ss_size = (size_t)ST_MOST_THREADS * ST_STACK;
                    fiber->start.uc_link = 0;
                    makecontext(&fiber->start, st_alone, 0);
                    setcontext(&fiber->start);
                }
            }
        }
    }
    st_now = 0;
    return result;
}

/* -- what kernels call --------------------------------------------------------------------------------------------- */

ST_HOST static void __syncthreads(void) { st_pause(ST_AT_BARRIER); }
ST_HOST static void __syncwarp(void) {
    st_pause(ST_AT_WARP);
    st_fibers[st_thread].sync++;
}

static int st_votes[ST_MOST_THREADS];
ST_HOST static int __syncthreads_or(int predicate) {
    st_votes[st_thread] = predicate;
    __syncthreads();
    int any = 0;
    for (int thread = 0; thread < (int)blockDim.x; thread++) any |= st_votes[thread] != 0;
    __syncthreads(); /* the votes may be cast anew */
    return any;
}

/* Show words to the warp and wait for the others; the turn tells where they stand. */
ST_HOST static int st_exchange(const void *words, int bytes) {
    struct st_fiber *self = &st_fibers[st_thread];
    const int turn = self->turn;
    self->turn = !turn;
    __builtin_memcpy(st_slots[st_thread].words[turn], words, (size_t)bytes);
    st_pause(ST_AT_WARP);
    return turn;
}

template <typename T> ST_HOST T __shfl_down_sync(unsigned, T value, int lanes) {
    const int turn = st_exchange(&value, (int)sizeof value);
    const int source = st_thread % ST_WARP + lanes < ST_WARP ? st_thread + lanes : st_thread;
    T result;
    __builtin_memcpy(&result, st_slots[source].words[turn], sizeof result);
    return result;
}

template <typename TO, typename FROM> static __attribute__((always_inline)) inline TO st_bits_as(FROM value) {
    TO result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}
static inline __attribute__((always_inline)) unsigned int __float_as_uint(float x) { return st_bits_as<unsigned int>(x); }
static inline __attribute__((always_inline)) float __uint_as_float(unsigned int x) { return st_bits_as<float>(x); }
static inline __attribute__((always_inline)) long long __double_as_longlong(double x) { return st_bits_as<long long>(x); }
static inline __attribute__((always_inline)) double __longlong_as_double(long long x) { return st_bits_as<double>(x); }
static inline __attribute__((always_inline)) float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline __attribute__((always_inline)) double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline __attribute__((always_inline)) float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }

//! st_tiles
/* The eight matrix tiles of a core: 16 rows of 64 bytes each. Where the processor has none, or ST_MODEL_TILES is defined, the
   same functions work on memory and give the same bits. */
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && !defined(ST_MODEL_TILES)
#define ST_HAS_TILES 1
#else
#define ST_HAS_TILES 0
static _Thread_local uint32_t st_tile_words[8][16][16];
#endif
//! st_tiles_begin | needs st_tiles
/* All tiles whole: 16 rows of 64 bytes. For the calling thread, until st_tiles_end. */
ST_FN void st_tiles_begin(void) {
#if ST_HAS_TILES
    static const _Alignas(64) uint8_t shape[64] = {
        1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                     /* palette 1 */
        64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 0, 0, 0, 0, /* bytes a row */
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        16, 16, 16, 16, 16, 16, 16, 16}; /* rows */
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
#endif
}
//! st_tiles_end | needs st_tiles
ST_FN void st_tiles_end(void) {
#if ST_HAS_TILES
    __asm__ volatile("tilerelease" ::: "memory");
#endif
}
//! st_tile_zero | needs st_tiles
#if ST_HAS_TILES
#define st_tile_zero(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#else
#define st_tile_zero(tile) __builtin_memset(st_tile_words[tile], 0, sizeof st_tile_words[tile])
#endif
//! st_tile_load | needs st_tiles
/* 16 rows of 64 bytes, step bytes apart. */
#if ST_HAS_TILES
#define st_tile_load(tile, from, step) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(from)), "r"((int64_t)(step)) : "memory")
#else
#define st_tile_load(tile, from, step) st_model_tile_load(tile, from, step)
ST_FN void st_model_tile_load(int tile, const void *from, int64_t step) {
    for (int row = 0; row < 16; row++) __builtin_memcpy(st_tile_words[tile][row], (const char *)from + row * step, 64);
}
#endif
//! st_tile_store | needs st_tiles
#if ST_HAS_TILES
#define st_tile_store(tile, to, step) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(step)) : "memory")
#else
#define st_tile_store(tile, to, step) st_model_tile_store(tile, to, step)
ST_FN void st_model_tile_store(int tile, void *to, int64_t step) {
    for (int row = 0; row < 16; row++) __builtin_memcpy((char *)to + row * step, st_tile_words[tile][row], 64);
}
#endif
//! st_model_flushed | needs st_bits_f32 st_from_bits_f32
/* What is below the least normal number counts as 0. */
ST_FN float st_model_flushed(float x) {
    const uint32_t bits = st_bits_f32(x);
    return (bits & 0x7f800000u) == 0u ? st_from_bits_f32(bits & 0x80000000u) : x;
}
//! st_tile_multiply_bf16 | needs st_tiles st_model_flushed st_bits_f32 st_from_bits_f32 st_fma_f32
/* sums[m][n] += rows[m][2k] * columns[k][2n] + rows[m][2k+1] * columns[k][2n+1] over k: even and odd terms are summed apart, from 0,
   in order; the two sums are added, then added to sums[m][n]. What is below the least normal number counts as 0. */
#if ST_HAS_TILES
#define st_tile_multiply_bf16(sums, rows, columns) \
    __asm__ volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums ::)
#else
#define st_tile_multiply_bf16(sums, rows, columns) st_model_tile_multiply_bf16(sums, rows, columns)
ST_FN void st_model_tile_multiply_bf16(int sums, int rows, int columns) {
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < 16; k++) {
                const uint32_t row = st_tile_words[rows][m][k], column = st_tile_words[columns][k][n];
                const float row_even = st_model_flushed(st_from_bits_f32(row << 16));
                const float row_odd = st_model_flushed(st_from_bits_f32(row & 0xffff0000u));
                const float column_even = st_model_flushed(st_from_bits_f32(column << 16));
                const float column_odd = st_model_flushed(st_from_bits_f32(column & 0xffff0000u));
                even = st_model_flushed(st_fma_f32(row_even, column_even, even));
                odd = st_model_flushed(st_fma_f32(row_odd, column_odd, odd));
            }
            const float sum = st_model_flushed(st_from_bits_f32(st_tile_words[sums][m][n]));
            st_tile_words[sums][m][n] = st_bits_f32(st_model_flushed(sum + st_model_flushed(even + odd)));
        }
    }
}
#endif
//! st_dots
/* Sixteen f32 sums and sixteen pairs of bf16 terms, or eight of each. */
typedef float st_dots __attribute__((vector_size(64), may_alias));
typedef float st_half_dots __attribute__((vector_size(32), may_alias));
typedef uint32_t st_pairs __attribute__((vector_size(64)));
typedef uint32_t st_half_pairs __attribute__((vector_size(32)));
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && !defined(ST_MODEL_DOTS)
#define ST_HAS_DOTS 1
#else
#define ST_HAS_DOTS 0
#endif
//! st_load_pairs | needs st_dots
ST_FN st_pairs st_load_pairs(const uint16_t *from) {
    st_pairs pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return pairs;
}
//! st_load_half_pairs | needs st_dots
ST_FN st_half_pairs st_load_half_pairs(const uint16_t *from) {
    st_half_pairs pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return pairs;
}
//! st_pair
/* Two terms side by side. */
ST_FN uint32_t st_pair(const uint16_t *from) {
    uint32_t pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return pair;
}
//! st_model_dot_bf16 | needs st_model_flushed st_from_bits_f32 st_fma_f32
/* One cell of st_dot_bf16. */
ST_FN float st_model_dot_bf16(float sum, uint32_t row, uint32_t column) {
    const float row_first = st_model_flushed(st_from_bits_f32(row << 16));
    const float row_second = st_model_flushed(st_from_bits_f32(row & 0xffff0000u));
    const float column_first = st_model_flushed(st_from_bits_f32(column << 16));
    const float column_second = st_model_flushed(st_from_bits_f32(column & 0xffff0000u));
    const float half = st_model_flushed(st_fma_f32(row_second, column_second, st_model_flushed(sum)));
    return st_model_flushed(st_fma_f32(row_first, column_first, half));
}
//! st_dot_bf16 | needs st_dots st_model_dot_bf16
/* sums[n] += row[n].second * column[n].second, then += row[n].first * column[n].first: two fused multiply-adds. What is below the
   least normal number counts as 0. Instructions where the processor has them, else plain C with the same bits. */
ST_FN st_dots st_dot_bf16(st_dots sums, st_pairs row, st_pairs column) {
#if ST_HAS_DOTS
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(row), "v"(column));
#else
    for (int n = 0; n < 16; n++) sums[n] = st_model_dot_bf16(sums[n], row[n], column[n]);
#endif
    return sums;
}
//! st_half_dot_bf16 | needs st_dots st_model_dot_bf16
/* The same for eight sums. */
ST_FN st_half_dots st_half_dot_bf16(st_half_dots sums, st_half_pairs row, st_half_pairs column) {
#if ST_HAS_DOTS
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(row), "v"(column));
#else
    for (int n = 0; n < 8; n++) sums[n] = st_model_dot_bf16(sums[n], row[n], column[n]);
#endif
    return sums;
}

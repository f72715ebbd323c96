// What the machine can do, measured by loops that do nothing else: multiply-adds in registers, bf16 products, copying.
#include <stdint.h>
#include <string.h>

#ifndef VECTOR_BYTES
#define VECTOR_BYTES 16
#endif
enum { LANES = VECTOR_BYTES / sizeof(float), CHAINS = 12 };
typedef float vec __attribute__((vector_size(VECTOR_BYTES)));

// Returns the operations done; `sink` takes the result, so that the loop is not removed.
double multiply_adds(int64_t rounds, float *sink) {
    vec acc[CHAINS];
    for (int chain = 0; chain < CHAINS; chain++) acc[chain] = (vec){0} + 0.5f + (float)chain;
    const vec factor = (vec){0} + *sink, addend = (vec){0} + 0.25f;
    for (int64_t round = 0; round < rounds; round++) {
        acc[0] = acc[0] * factor + addend;
        acc[1] = acc[1] * factor + addend;
        acc[2] = acc[2] * factor + addend;
        acc[3] = acc[3] * factor + addend;
        acc[4] = acc[4] * factor + addend;
        acc[5] = acc[5] * factor + addend;
        acc[6] = acc[6] * factor + addend;
        acc[7] = acc[7] * factor + addend;
        acc[8] = acc[8] * factor + addend;
        acc[9] = acc[9] * factor + addend;
        acc[10] = acc[10] * factor + addend;
        acc[11] = acc[11] * factor + addend;
    }
    vec total = acc[0];
    for (int chain = 1; chain < CHAINS; chain++) total += acc[chain];
    for (int lane = 0; lane < LANES; lane++) sink[1] += total[lane];
    return 2.0 * LANES * CHAINS * (double)rounds;
}

void copy(char *target, const char *source, int64_t bytes) { memcpy(target, source, (size_t)bytes); }

#ifdef __AVX512BF16__
// Products of sixteen pairs of bf16 numbers at a time, added to f32 sums.
double dots(int64_t rounds, float *sink) {
    vec acc[CHAINS];
    const vec pairs = (vec){0} + sink[1];
#pragma GCC unroll 12
    for (int chain = 0; chain < CHAINS; chain++) acc[chain] = (vec){0} + *sink;
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int chain = 0; chain < CHAINS; chain++) __asm__("vdpbf16ps %1, %1, %0" : "+v"(acc[chain]) : "v"(pairs));
    }
#pragma GCC unroll 12
    for (int chain = 0; chain < CHAINS; chain++) sink[1] += acc[chain][0];
    return 4.0 * LANES * CHAINS * (double)rounds;
}
#endif

#ifdef __AMX_BF16__
#include <immintrin.h>

// Four accumulator tiles, each step two left and two right tiles, all in registers.
double tile_products(int64_t rounds, float *sink) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = 16;
    }
    static const uint16_t zeros[16 * 32];
    float result[16 * 16];
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, result, 64);
    _tile_release();
    sink[1] += result[0];
    return 2.0 * 16 * 16 * 32 * 4 * (double)rounds;
}
#endif

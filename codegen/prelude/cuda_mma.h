//! st_mma_m16n8k16_f16
/* d += a b for one 16 x 16 tile a and one 16 x 8 tile b of f16, products and sums in f32. Fragments as in PTX's
   mma.m16n8k16: thread 4g + t of the warp holds of a the rows g and g + 8, of b the column g, of d columns 2t and 2t + 1. */
ST_FN void st_mma_m16n8k16_f16(float *d, const uint32_t *a, const uint32_t *b) {
#ifdef ST_EMULATED
    st_emulated_mma<2>(d, a, b, st_emulated_f16, st_emulated_f16);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
//! st_mma_m16n8k16_bf16
/* d += a b for one 16 x 16 tile a and one 16 x 8 tile b of bf16, products and sums in f32. Fragments as in PTX's
   mma.m16n8k16: thread 4g + t of the warp holds of a the rows g and g + 8, of b the column g, of d columns 2t and 2t + 1. */
ST_FN void st_mma_m16n8k16_bf16(float *d, const uint32_t *a, const uint32_t *b) {
#ifdef ST_EMULATED
    st_emulated_mma<2>(d, a, b, st_emulated_bf16, st_emulated_bf16);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
//! st_mma_m16n8k8_tf32
/* d += a b for one 16 x 8 tile a and one 8 x 8 tile b of tf32, products and sums in f32. Fragments as in PTX's mma.m16n8k8:
   thread 4g + t of the warp holds of a the rows g and g + 8 at the depths t and t + 4, of b the column g at the same depths,
   of d columns 2t and 2t + 1. */
ST_FN void st_mma_m16n8k8_tf32(float *d, const uint32_t *a, const uint32_t *b) {
#ifdef ST_EMULATED
    st_emulated_mma<1>(d, a, b, st_emulated_from_tf32, st_emulated_from_tf32);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
//! st_load_tf32
/* One cell of a fragment, rounded to tf32: to nearest, ties away from zero; 10 bits of mantissa remain. */
ST_FN void st_load_tf32(uint32_t *fragment, const float *cell) {
#ifdef ST_EMULATED
    fragment[0] = st_emulated_tf32(*cell);
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(fragment[0]) : "f"(*cell));
#endif
}
//! st_ldmatrix_x4_f32 | needs st_ldmatrix_x4 st_load_tf32
/* Four 8 x 4 matrices of f32 from shared memory, rounded to tf32: as st_ldmatrix_x4, a row being 16 bytes, thread i gets of
   each the cell i % 4 of row i / 4. */
ST_FN void st_ldmatrix_x4_f32(uint32_t *fragment, const float *row) {
    st_ldmatrix_x4(fragment, (const uint16_t *)row);
    for (int k = 0; k < 4; k++) {
        const float cell = __uint_as_float(fragment[k]);
        st_load_tf32(&fragment[k], &cell);
    }
}
//! st_ldmatrix_x4
/* Four 8 x 8 matrices of 16-bit cells from shared memory: thread i of the warp gives the address of row i % 8 of matrix i / 8,
   which is aligned to 16 bytes, and gets of each matrix the cells 2 (i % 4) and the next of row i / 4. */
ST_FN void st_ldmatrix_x4(uint32_t *fragment, const uint16_t *row) {
#ifdef ST_EMULATED
    st_emulated_ldmatrix(fragment, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
        : "r"((uint32_t)__cvta_generic_to_shared(row))
        : "memory");
#endif
}
//! st_ldmatrix_x4_trans
/* As st_ldmatrix_x4, each matrix transposed: a thread gets of each the cells of rows 2 (i % 4) and the next in column i / 4. */
ST_FN void st_ldmatrix_x4_trans(uint32_t *fragment, const uint16_t *row) {
#ifdef ST_EMULATED
    st_emulated_ldmatrix_trans(fragment, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
        : "r"((uint32_t)__cvta_generic_to_shared(row))
        : "memory");
#endif
}
//! st_copy_async
/* Start a copy of eight 16-bit cells from global to shared memory, both aligned to 16 bytes; of zeros where `present` is 0,
   and then nothing is read. It has landed when a wait says so. */
ST_FN void st_copy_async(uint16_t *to, const uint16_t *from, int present) {
#ifdef ST_EMULATED
    st_emulated_copy(to, from, present);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :
        : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(present ? 16 : 0)
        : "memory");
#endif
}
//! st_copy_async_f32 | needs st_copy_async
/* As st_copy_async, four cells of f32. */
ST_FN void st_copy_async_f32(float *to, const float *from, int present) {
    st_copy_async((uint16_t *)to, (const uint16_t *)from, present);
}
//! st_copy_async_commit
/* End a group of copies: those that this thread started since the last one. */
ST_FN void st_copy_async_commit(void) {
#ifdef ST_EMULATED
    st_emulated_commit();
#else
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
//! st_copy_async_wait_0
/* Wait until every group of this thread has landed. */
ST_FN void st_copy_async_wait_0(void) {
#ifdef ST_EMULATED
    st_emulated_wait(0);
#else
    asm volatile("cp.async.wait_group 0;" : : : "memory");
#endif
}
//! st_copy_async_wait_1
/* Wait until every group of this thread but the last has landed. */
ST_FN void st_copy_async_wait_1(void) {
#ifdef ST_EMULATED
    st_emulated_wait(1);
#else
    asm volatile("cp.async.wait_group 1;" : : : "memory");
#endif
}
//! st_note_not_finite_f16
/* Set `seen` where one of four registers, each two cells of f16, holds an infinity or NaN: adding one to its exponent carries. */
ST_FN void st_note_not_finite_f16(uint32_t *seen, const uint32_t *fragment) {
    for (int k = 0; k < 4; k++) *seen |= ((fragment[k] & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
}
//! st_note_not_finite_bf16
/* Set `seen` where one of four registers, each two cells of bf16, holds an infinity or NaN: adding one to its exponent carries. */
ST_FN void st_note_not_finite_bf16(uint32_t *seen, const uint32_t *fragment) {
    for (int k = 0; k < 4; k++) *seen |= ((fragment[k] & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}
//! st_note_not_finite_tf32
/* Set `seen` where one of four registers, each a cell of tf32, holds an infinity or NaN: adding one to its exponent carries. */
ST_FN void st_note_not_finite_tf32(uint32_t *seen, const uint32_t *fragment) {
    for (int k = 0; k < 4; k++) *seen |= ((fragment[k] & 0x7f800000u) + 0x00800000u) & 0x80000000u;
}
//! st_any_in_block
/* Whether `seen` is set in any thread of the block; all of them call it and learn the same. */
ST_FN void st_any_in_block(uint32_t *seen) { *seen = (uint32_t)__syncthreads_or((int)(*seen != 0u)); }
//! st_fp8_product
/* ST_FP8_PRODUCT(A, B) is d += a b for one 16 x 32 tile a of format A and one 32 x 8 tile b of format B: products in full, sums in
   f32 that some GPUs cut to fewer bits. Fragments as in PTX's mma.m16n8k32, four cells a register: thread 4g + t of the warp holds
   of a the rows g and g + 8 at the depths 4t to 4t + 3 and 16 more, of b the column g at the same depths, of d columns 2t and
   2t + 1. GPUs before sm_89 have f16 alone, which holds both formats exactly: the lower two cells of each register are one depth
   of f16, the upper two another, of a and b the same. */
#ifdef ST_EMULATED
#define ST_FP8_PRODUCT(A, B) st_emulated_mma<4>(d, a, b, st_emulated_##A, st_emulated_##B);
#elif __CUDA_ARCH__ >= 890
#define ST_FP8_PRODUCT(A, B) \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." #A "." #B ".f32 " \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#define ST_FP8_PRODUCT(A, B) \
    for (int half = 0; half < 2; half++) { \
        uint32_t x[4], y[2]; \
        for (int k = 0; k < 4; k++) x[k] = st_##A##_to_f16x2(a[k % 2 + 2 * half] >> 16 * (k / 2)); \
        for (int k = 0; k < 2; k++) y[k] = st_##B##_to_f16x2(b[half] >> 16 * k); \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1])); \
    }
#endif
//! st_mma_m16n8k32_e4m3_e4m3 | needs st_fp8_product st_e4m3_to_f16x2
ST_FN void st_mma_m16n8k32_e4m3_e4m3(float *d, const uint32_t *a, const uint32_t *b) { ST_FP8_PRODUCT(e4m3, e4m3) }
//! st_mma_m16n8k32_e4m3_e5m2 | needs st_fp8_product st_e4m3_to_f16x2 st_e5m2_to_f16x2
ST_FN void st_mma_m16n8k32_e4m3_e5m2(float *d, const uint32_t *a, const uint32_t *b) { ST_FP8_PRODUCT(e4m3, e5m2) }
//! st_mma_m16n8k32_e5m2_e4m3 | needs st_fp8_product st_e5m2_to_f16x2 st_e4m3_to_f16x2
ST_FN void st_mma_m16n8k32_e5m2_e4m3(float *d, const uint32_t *a, const uint32_t *b) { ST_FP8_PRODUCT(e5m2, e4m3) }
//! st_mma_m16n8k32_e5m2_e5m2 | needs st_fp8_product st_e5m2_to_f16x2
ST_FN void st_mma_m16n8k32_e5m2_e5m2(float *d, const uint32_t *a, const uint32_t *b) { ST_FP8_PRODUCT(e5m2, e5m2) }
//! st_e5m2_to_f16x2
/* Two cells of e5m2, in the lower half of a word, as two of f16, which begins with the same bits. */
#if __CUDA_ARCH__ < 890
ST_FN uint32_t st_e5m2_to_f16x2(uint32_t cells) { return (cells & 0xffu) << 8 | (cells & 0xff00u) << 16; }
#endif
//! st_e4m3_to_f16x2
/* Two cells of e4m3, in the lower half of a word, as two of f16: the exponent is less by 8, which a product makes up for. */
#if __CUDA_ARCH__ < 890
ST_FN uint32_t st_e4m3_to_f16x2(uint32_t cells) {
    const uint32_t low = (cells & 0x80u) << 8 | (cells & 0x7fu) << 7, high = (cells & 0x8000u) | (cells & 0x7f00u) >> 1;
    uint32_t pair = low | high << 16;
#ifndef ST_EMULATED
    asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x5c005c00u)); /* by 256 */
#endif
    if ((cells & 0x7fu) == 0x7fu) pair |= 0x7fffu; /* NaN */
    if ((cells & 0x7f00u) == 0x7f00u) pair |= 0x7fff0000u;
    return pair;
}
#endif
//! st_ldmatrix_x4_u8 | needs st_ldmatrix_x4
/* As st_ldmatrix_x4, pairs of 8-bit cells in place of 16-bit ones: a thread gets of each matrix the cells 4 (i % 4) to
   4 (i % 4) + 3 of row i / 4. */
ST_FN void st_ldmatrix_x4_u8(uint32_t *fragment, const uint8_t *row) { st_ldmatrix_x4(fragment, (const uint16_t *)row); }
//! st_copy_async_u8 | needs st_copy_async
/* As st_copy_async, sixteen cells of 8 bits. */
ST_FN void st_copy_async_u8(uint8_t *to, const uint8_t *from, int present) {
    st_copy_async((uint16_t *)to, (const uint16_t *)from, present);
}

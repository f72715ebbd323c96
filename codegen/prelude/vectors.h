//! st_vectors
/* Sixteen cells side by side, as one register holds them. Memory need not be aligned to more than a cell. */
typedef float st_vf32 __attribute__((vector_size(64)));
typedef int32_t st_vi32 __attribute__((vector_size(64)));
typedef uint32_t st_vu32 __attribute__((vector_size(64)));
typedef int16_t st_vi16 __attribute__((vector_size(32)));
typedef uint16_t st_vu16 __attribute__((vector_size(32)));
typedef char st_vbytes __attribute__((vector_size(16)));
typedef uint16_t st_vmask; /* one bit a cell */
//! st_load_vf32 | needs st_vectors
ST_FN st_vf32 st_load_vf32(const float *from) {
    st_vf32 cells;
    __builtin_memcpy(&cells, from, sizeof cells);
    return cells;
}
//! st_store_vf32 | needs st_vectors
ST_FN void st_store_vf32(float *to, st_vf32 cells) { __builtin_memcpy(to, &cells, sizeof cells); }
//! st_ahead_vf32 | needs st_load_vf32
/* Sixteen cells of what is too large for the cache; asks for those to come. */
ST_FN st_vf32 st_ahead_vf32(const float *from) {
    __builtin_prefetch((const char *)from + 4096);
    return st_load_vf32(from);
}
//! st_load_vi32 | needs st_vectors
ST_FN st_vi32 st_load_vi32(const int32_t *from) {
    st_vi32 cells;
    __builtin_memcpy(&cells, from, sizeof cells);
    return cells;
}
//! st_load_vu16 | needs st_vectors
ST_FN st_vu16 st_load_vu16(const uint16_t *from) {
    st_vu16 cells;
    __builtin_memcpy(&cells, from, sizeof cells);
    return cells;
}
//! st_ahead_vu16 | needs st_load_vu16
/* As st_ahead_vf32. */
ST_FN st_vu16 st_ahead_vu16(const uint16_t *from) {
    __builtin_prefetch((const char *)from + 4096);
    return st_load_vu16(from);
}
//! st_store_vu16 | needs st_vectors
ST_FN void st_store_vu16(uint16_t *to, st_vu16 cells) { __builtin_memcpy(to, &cells, sizeof cells); }
//! st_put_vf32 | needs st_store_vf32
/* A store past the cache, for results that are too large to stay there; st_puts_end must follow. Whole lines only. */
ST_FN void st_put_vf32(float *to, st_vf32 cells) {
    if (((uintptr_t)to & 63u) != 0u)
        st_store_vf32(to, cells);
    else
#if defined(__clang__)
        __builtin_nontemporal_store(cells, (st_vf32 *)to);
#else
        __builtin_ia32_movntps512(to, cells);
#endif
}
//! st_put_vu16 | needs st_store_vu16
/* As st_put_vf32; two neighbours fill a line. */
ST_FN void st_put_vu16(uint16_t *to, st_vu16 cells) {
    typedef long long words __attribute__((vector_size(32)));
    if (((uintptr_t)to & 31u) != 0u)
        st_store_vu16(to, cells);
    else
#if defined(__clang__)
        __builtin_nontemporal_store(cells, (st_vu16 *)to);
#else
        __builtin_ia32_movntdq256((words *)to, (words)cells);
#endif
}
//! st_puts_end
/* Stores past the cache are seen by other threads from here on. */
ST_FN void st_puts_end(void) { __builtin_ia32_sfence(); }
//! st_load_u8_vi32 | needs st_vectors
/* Sixteen bytes, widened. */
ST_FN st_vi32 st_load_u8_vi32(const uint8_t *from) {
    st_vbytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
#if defined(__clang__)
    typedef uint8_t unsigned_bytes __attribute__((vector_size(16)));
    return __builtin_convertvector((unsigned_bytes)bytes, st_vi32);
#else
    return (st_vi32)__builtin_ia32_pmovzxbd512_mask(bytes, (st_vi32){0}, 0xffff);
#endif
}
//! st_load_i8_vi32 | needs st_vectors
/* Sixteen signed bytes, widened. */
ST_FN st_vi32 st_load_i8_vi32(const int8_t *from) {
    st_vbytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
#if defined(__clang__)
    typedef int8_t signed_bytes __attribute__((vector_size(16)));
    return __builtin_convertvector((signed_bytes)bytes, st_vi32);
#else
    return (st_vi32)__builtin_ia32_pmovsxbd512_mask(bytes, (st_vi32){0}, 0xffff);
#endif
}
//! st_stream_u8_vi32 | needs st_load_u8_vi32
/* The first bytes of a line of a long stream, widened; asks for those to come. */
ST_FN st_vi32 st_stream_u8_vi32(const uint8_t *from) {
    __builtin_prefetch(from + 4096);
    return st_load_u8_vi32(from);
}
//! st_stream_i8_vi32 | needs st_load_i8_vi32
/* As st_stream_u8_vi32. */
ST_FN st_vi32 st_stream_i8_vi32(const int8_t *from) {
    __builtin_prefetch(from + 4096);
    return st_load_i8_vi32(from);
}
//! st_first_cells | needs st_vectors
/* The mask of the first count cells. */
ST_FN st_vmask st_first_cells(int64_t count) { return (st_vmask)((1u << count) - 1u); }
//! st_load_some_vf32 | needs st_vectors
/* The cells of the mask, 0 elsewhere; other cells are not touched in memory. */
ST_FN st_vf32 st_load_some_vf32(st_vmask some, const float *from) {
    return __builtin_ia32_loadups512_mask(from, (st_vf32){0}, some);
}
//! st_load_some_vi32 | needs st_vectors
ST_FN st_vi32 st_load_some_vi32(st_vmask some, const int32_t *from) {
    return __builtin_ia32_loaddqusi512_mask(from, (st_vi32){0}, some);
}
//! st_load_some_vu16 | needs st_vectors
ST_FN st_vu16 st_load_some_vu16(st_vmask some, const uint16_t *from) {
    return (st_vu16)__builtin_ia32_loaddquhi256_mask((const void *)from, (st_vi16){0}, some);
}
//! st_load_some_u8_vi32 | needs st_vectors
ST_FN st_vi32 st_load_some_u8_vi32(st_vmask some, const uint8_t *from) {
    st_vbytes bytes = __builtin_ia32_loaddquqi128_mask((const void *)from, (st_vbytes){0}, some);
#if defined(__clang__)
    typedef uint8_t unsigned_bytes __attribute__((vector_size(16)));
    return __builtin_convertvector((unsigned_bytes)bytes, st_vi32);
#else
    return (st_vi32)__builtin_ia32_pmovzxbd512_mask(bytes, (st_vi32){0}, 0xffff);
#endif
}
//! st_load_some_i8_vi32 | needs st_vectors
ST_FN st_vi32 st_load_some_i8_vi32(st_vmask some, const int8_t *from) {
    st_vbytes bytes = __builtin_ia32_loaddquqi128_mask((const void *)from, (st_vbytes){0}, some);
#if defined(__clang__)
    typedef int8_t signed_bytes __attribute__((vector_size(16)));
    return __builtin_convertvector((signed_bytes)bytes, st_vi32);
#else
    return (st_vi32)__builtin_ia32_pmovsxbd512_mask(bytes, (st_vi32){0}, 0xffff);
#endif
}
//! st_store_some_vf32 | needs st_vectors
ST_FN void st_store_some_vf32(st_vmask some, float *to, st_vf32 cells) {
    __builtin_ia32_storeups512_mask(to, cells, some);
}
//! st_store_some_vu16 | needs st_vectors
ST_FN void st_store_some_vu16(st_vmask some, uint16_t *to, st_vu16 cells) {
    __builtin_ia32_storedquhi256_mask((void *)to, (st_vi16)cells, some);
}
//! st_all_vf32 | needs st_vectors
/* The same float in every cell; taking 0 away keeps the sign of a zero. */
ST_FN st_vf32 st_all_vf32(float x) { return x - (st_vf32){0}; }
//! st_all_vi32 | needs st_vectors
ST_FN st_vi32 st_all_vi32(int32_t x) { return x + (st_vi32){0}; }
//! st_ramp_vi32 | needs st_vectors
/* first, first + 1, ... */
ST_FN st_vi32 st_ramp_vi32(int32_t first) {
    return first + (st_vi32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
//! st_i32_to_vf32 | needs st_vectors
/* Rounded to nearest where a float cannot hold the integer. */
ST_FN st_vf32 st_i32_to_vf32(st_vi32 x) { return __builtin_convertvector(x, st_vf32); }

//! st_fma_vf32 | needs st_vectors
/* a * b + c, rounded once. */
ST_FN st_vf32 st_fma_vf32(st_vf32 a, st_vf32 b, st_vf32 c) {
    return __builtin_ia32_vfmaddps512_mask(a, b, c, 0xffff, 4);
}
//! st_pick_vf32 | needs st_vectors
/* a where test holds, else b. */
ST_FN st_vf32 st_pick_vf32(st_vmask test, st_vf32 a, st_vf32 b) {
#if defined(__clang__)
    return __builtin_ia32_selectps_512(test, a, b);
#else
    return __builtin_ia32_blendmps_512_mask(b, a, test);
#endif
}
//! st_pick_vi32 | needs st_vectors
/* a where test holds, else b. */
ST_FN st_vi32 st_pick_vi32(st_vmask test, st_vi32 a, st_vi32 b) {
#if defined(__clang__)
    return __builtin_ia32_selectd_512(test, a, b);
#else
    return __builtin_ia32_blendmd_512_mask(b, a, test);
#endif
}
//! st_eq_vf32 | needs st_vectors
ST_FN st_vmask st_eq_vf32(st_vf32 a, st_vf32 b) { return __builtin_ia32_cmpps512_mask(a, b, 0, 0xffff, 4); }
//! st_lt_vf32 | needs st_vectors
ST_FN st_vmask st_lt_vf32(st_vf32 a, st_vf32 b) { return __builtin_ia32_cmpps512_mask(a, b, 1, 0xffff, 4); }
//! st_le_vf32 | needs st_vectors
ST_FN st_vmask st_le_vf32(st_vf32 a, st_vf32 b) { return __builtin_ia32_cmpps512_mask(a, b, 2, 0xffff, 4); }
//! st_ne_vf32 | needs st_vectors
/* Also where either is NaN. */
ST_FN st_vmask st_ne_vf32(st_vf32 a, st_vf32 b) { return __builtin_ia32_cmpps512_mask(a, b, 4, 0xffff, 4); }
//! st_eq_vi32 | needs st_vectors
ST_FN st_vmask st_eq_vi32(st_vi32 a, st_vi32 b) { return __builtin_ia32_cmpd512_mask(a, b, 0, 0xffff); }
//! st_lt_vi32 | needs st_vectors
ST_FN st_vmask st_lt_vi32(st_vi32 a, st_vi32 b) { return __builtin_ia32_cmpd512_mask(a, b, 1, 0xffff); }
//! st_le_vi32 | needs st_vectors
ST_FN st_vmask st_le_vi32(st_vi32 a, st_vi32 b) { return __builtin_ia32_cmpd512_mask(a, b, 2, 0xffff); }
//! st_ne_vi32 | needs st_vectors
ST_FN st_vmask st_ne_vi32(st_vi32 a, st_vi32 b) { return __builtin_ia32_cmpd512_mask(a, b, 4, 0xffff); }
//! st_greater_or_vf32 | needs st_vectors
/* a where it is greater than b, else b: also where either is NaN. One instruction. */
ST_FN st_vf32 st_greater_or_vf32(st_vf32 a, st_vf32 b) {
#if defined(__clang__)
    return __builtin_ia32_maxps512(a, b, 4);
#else
    return __builtin_ia32_maxps512_mask(a, b, b, 0xffff, 4);
#endif
}
//! st_less_or_vf32 | needs st_vectors
/* a where it is less than b, else b: also where either is NaN. One instruction. */
ST_FN st_vf32 st_less_or_vf32(st_vf32 a, st_vf32 b) {
#if defined(__clang__)
    return __builtin_ia32_minps512(a, b, 4);
#else
    return __builtin_ia32_minps512_mask(a, b, b, 0xffff, 4);
#endif
}
//! st_max_vf32 | needs st_greater_or_vf32 st_ne_vf32 st_pick_vf32
/* As st_max_f32, but for which NaN is taken of two. */
ST_FN st_vf32 st_max_vf32(st_vf32 a, st_vf32 b) { return st_pick_vf32(st_ne_vf32(b, b), b, st_greater_or_vf32(b, a)); }
//! st_min_vf32 | needs st_less_or_vf32 st_ne_vf32 st_pick_vf32
/* As st_min_f32, but for which NaN is taken of two. */
ST_FN st_vf32 st_min_vf32(st_vf32 a, st_vf32 b) { return st_pick_vf32(st_ne_vf32(b, b), b, st_less_or_vf32(b, a)); }
//! st_turned_vf32 | needs st_ramp_vi32
/* The cells count places further on come first, the first ones last. */
ST_FN st_vf32 st_turned_vf32(st_vf32 x, int32_t count) {
#if defined(__clang__)
    return __builtin_ia32_permvarsf512(x, st_ramp_vi32(count) & 15);
#else
    return __builtin_shuffle(x, st_ramp_vi32(count) & 15);
#endif
}
//! st_fold_max_vf32 | needs st_max_vf32 st_turned_vf32 st_first_cells
/* The first count cells against those that follow; the other cells stay. */
ST_FN st_vf32 st_fold_max_vf32(int32_t count, st_vf32 x) {
    return st_pick_vf32(st_first_cells(count), st_max_vf32(x, st_turned_vf32(x, count)), x);
}
//! st_fold_min_vf32 | needs st_min_vf32 st_turned_vf32 st_first_cells
/* The first count cells against those that follow; the other cells stay. */
ST_FN st_vf32 st_fold_min_vf32(int32_t count, st_vf32 x) {
    return st_pick_vf32(st_first_cells(count), st_min_vf32(x, st_turned_vf32(x, count)), x);
}
//! st_relu_vf32 | needs st_le_vf32 st_pick_vf32
/* As st_relu_f32. */
ST_FN st_vf32 st_relu_vf32(st_vf32 x) { return st_pick_vf32(st_le_vf32(x, (st_vf32){0}), (st_vf32){0}, x); }
//! st_abs_vf32 | needs st_vectors
/* Clears the sign bits. */
ST_FN st_vf32 st_abs_vf32(st_vf32 x) { return (st_vf32)((st_vu32)x & 0x7fffffffu); }

//! st_among_vf32 | needs st_vectors
/* table[places % 16]: one instruction. */
ST_FN st_vf32 st_among_vf32(st_vf32 table, st_vu32 places) {
#if defined(__clang__)
    return __builtin_ia32_permvarsf512(table, (st_vi32)places);
#else
    return __builtin_ia32_permvarsf512_mask(table, (st_vi32)places, (st_vf32){0}, 0xffff);
#endif
}

//! st_one_f16_to_f32
/* Exact, subnormals too: one instruction, which no flush mode touches. */
ST_FN float st_one_f16_to_f32(uint16_t x) {
#if defined(__clang__) && __clang_major__ >= 15 /* which has a type for it, and no such function any more */
    _Float16 half;
    __builtin_memcpy(&half, &x, sizeof half);
    return (float)half;
#else
    typedef int16_t eight_halves __attribute__((vector_size(16)));
    typedef float four_floats __attribute__((vector_size(16)));
    four_floats wide = __builtin_ia32_vcvtph2ps((eight_halves){(int16_t)x});
    return wide[0];
#endif
}
//! st_f16_to_vf32 | needs st_vectors
/* Exact, subnormals too: one instruction, which no flush mode touches. */
ST_FN st_vf32 st_f16_to_vf32(st_vu16 x) { return __builtin_ia32_vcvtph2ps512_mask((st_vi16)x, (st_vf32){0}, 0xffff, 4); }
//! st_bf16_to_vf32 | needs st_vectors
/* Exact: bf16 is the upper half of a float. */
ST_FN st_vf32 st_bf16_to_vf32(st_vu16 x) {
#if defined(__clang__)
    return (st_vf32)(__builtin_convertvector(x, st_vu32) << 16);
#else
    return (st_vf32)((st_vu32)__builtin_ia32_pmovzxwd512_mask((st_vi16)x, (st_vi32){0}, 0xffff) << 16);
#endif
}
//! st_low_halves_vu32 | needs st_vectors
/* The lower half of each word. */
ST_FN st_vu16 st_low_halves_vu32(st_vu32 x) {
#if defined(__clang__)
    return __builtin_convertvector(x, st_vu16);
#else
    return (st_vu16)__builtin_ia32_pmovdw512_mask((st_vi32)x, (st_vi16){0}, 0xffff);
#endif
}
//! st_vf32_to_f16 | needs st_pick_vf32 st_ne_vf32
/* Round to nearest, ties to even, subnormals too: one instruction. A NaN takes the code that st_f32_to_f16 gives it. */
ST_FN st_vu16 st_vf32_to_f16(st_vf32 x) {
    st_vu32 quiet = ((st_vu32)x & 0x80000000u) | 0x7fc00000u;
    return (st_vu16)__builtin_ia32_vcvtps2ph512_mask(st_pick_vf32(st_ne_vf32(x, x), (st_vf32)quiet, x), 8, (st_vi16){0}, 0xffff);
}
//! st_through_f16_vf32 | needs st_vf32_to_f16 st_f16_to_vf32
/* x rounded to f16 and widened again. */
ST_FN st_vf32 st_through_f16_vf32(st_vf32 x) { return st_f16_to_vf32(st_vf32_to_f16(x)); }
//! st_bf16_bits_vu32 | needs st_pick_vi32 st_ne_vf32 st_ne_vi32 st_all_vi32
/* The code of x in bf16 in the upper half of each word: round to nearest, ties to even; NaN stays NaN. */
ST_FN st_vu32 st_bf16_bits_vu32(st_vf32 x) {
    st_vu32 bits = (st_vu32)x, rounded = bits + 0x7fffu;
#if defined(__clang__)
    st_vmask odd = st_ne_vi32((st_vi32)(bits & 0x10000u), st_all_vi32(0));
#else
    st_vmask odd = __builtin_ia32_ptestmd512((st_vi32)bits, st_all_vi32(0x10000), 0xffff);
#endif
    rounded = (st_vu32)st_pick_vi32(odd, (st_vi32)(rounded + 1u), (st_vi32)rounded);
    return (st_vu32)st_pick_vi32(st_ne_vf32(x, x), (st_vi32)(bits | 0x400000u), (st_vi32)rounded);
}
//! st_through_bf16_vf32 | needs st_bf16_bits_vu32
/* x rounded to bf16 and widened again. */
ST_FN st_vf32 st_through_bf16_vf32(st_vf32 x) { return (st_vf32)(st_bf16_bits_vu32(x) & 0xffff0000u); }
//! st_vf32_to_bf16 | needs st_bf16_bits_vu32 st_low_halves_vu32
/* Round to nearest, ties to even; NaN stays NaN. */
ST_FN st_vu16 st_vf32_to_bf16(st_vf32 x) {
    st_vu32 bits = st_bf16_bits_vu32(x);
#if defined(__clang__)
    return st_low_halves_vu32(bits >> 16);
#else
    typedef uint16_t halves __attribute__((vector_size(64)));
    halves upper = __builtin_shuffle((halves)bits, (halves){1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                            1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
    st_vu16 codes;
    __builtin_memcpy(&codes, &upper, sizeof codes);
    return codes;
#endif
}

//! st_exp_reduced_vf32 | needs st_fma_vf32 st_all_vf32
/* As st_exp_reduced_f32. */
ST_FN st_vf32 st_exp_reduced_vf32(st_vf32 r) {
    st_vf32 q = st_all_vf32(0x1.6a4d6p-10f);
    q = st_fma_vf32(q, r, st_all_vf32(0x1.12398ep-7f));
    q = st_fma_vf32(q, r, st_all_vf32(0x1.5558bp-5f));
    q = st_fma_vf32(q, r, st_all_vf32(0x1.555492p-3f));
    q = st_fma_vf32(q, r, st_all_vf32(0x1.fffffcp-2f));
    q = st_fma_vf32(q, r, st_all_vf32(1.0f));
    return st_fma_vf32(q, r, st_all_vf32(1.0f));
}
//! st_exp_vf32 | needs st_fma_vf32 st_all_vf32 st_exp_reduced_vf32 st_less_or_vf32
/* As st_exp_f32, bit for bit: one instruction scales by a power of 2 and rounds once. Below -104 a mask gives 0, for results
   that underflow are slow; NaN passes both limits. */
ST_FN st_vf32 st_exp_vf32(st_vf32 x) {
    st_vmask stays = __builtin_ia32_cmpps512_mask(x, st_all_vf32(-104.0f), 5, 0xffff, 4); /* not less */
    x = st_less_or_vf32(st_all_vf32(89.0f), x);
    st_vf32 n = st_fma_vf32(x, st_all_vf32(0x1.715476p+0f), st_all_vf32(0x1.8p23f)) - 0x1.8p23f; /* 1 / ln(2) */
    st_vf32 r = st_fma_vf32(n, st_all_vf32(-0x1.62e43p-1f), x); /* ln(2) in two parts */
    r = st_fma_vf32(n, st_all_vf32(0x1.05c61p-29f), r);
    return __builtin_ia32_scalefps512_mask(st_exp_reduced_vf32(r), n, (st_vf32){0}, stays, 4);
}
//! st_sigmoid_vf32 | needs st_exp_vf32 st_lt_vf32 st_pick_vf32
/* As st_sigmoid_f32. */
ST_FN st_vf32 st_sigmoid_vf32(st_vf32 x) {
    st_vf32 e = st_exp_vf32((st_vf32)((st_vu32)x | 0x80000000u));
    st_vmask negative = st_lt_vf32(x, (st_vf32){0});
    st_vf32 numerator = st_pick_vf32(negative, e, st_all_vf32(1.0f));
    st_vf32 denominator = 1.0f + e, lost = e - (denominator - 1.0f);
    st_vf32 quotient = numerator / denominator;
    st_vf32 remainder = st_fma_vf32(-quotient, lost, st_fma_vf32(-quotient, denominator, numerator));
    return st_fma_vf32(remainder, st_pick_vf32(negative, 1.0f - quotient, quotient), quotient);
}
//! st_sqrt_vf32 | needs st_vectors
/* Correctly rounded. */
ST_FN st_vf32 st_sqrt_vf32(st_vf32 x) {
#if defined(__clang__)
    return __builtin_ia32_sqrtps512(x, 4);
#else
    return __builtin_ia32_sqrtps512_mask(x, x, 0xffff, 4);
#endif
}
//! st_recip_vf32 | needs st_vectors
/* 1 / x, correctly rounded. */
ST_FN st_vf32 st_recip_vf32(st_vf32 x) { return 1.0f / x; }
//! st_rsqrt_vf32 | needs st_sqrt_vf32
/* As st_rsqrt_f32. */
ST_FN st_vf32 st_rsqrt_vf32(st_vf32 x) { return 1.0f / st_sqrt_vf32(x); }
//! st_nonfinite_vf32 | needs st_pick_vi32 st_eq_vi32 st_all_vi32
/* Infinity for infinities and NaN, else +0; read off the exponent field. */
ST_FN st_vf32 st_nonfinite_vf32(st_vf32 x) {
    st_vi32 exponent = (st_vi32)x & 0x7f800000, infinity = st_all_vi32(0x7f800000);
    return (st_vf32)st_pick_vi32(st_eq_vi32(exponent, infinity), infinity, st_all_vi32(0));
}
//! st_exp_bounded_vf32 | needs st_fma_vf32 st_all_vf32 st_exp_reduced_vf32
/* As st_exp_bounded_f32. */
ST_FN st_vf32 st_exp_bounded_vf32(st_vf32 x) {
    st_vf32 n = st_fma_vf32(x, st_all_vf32(0x1.715476p+0f), st_all_vf32(0x1.8p23f)) - 0x1.8p23f; /* 1 / ln(2) */
    st_vf32 r = st_fma_vf32(n, st_all_vf32(-0x1.62e43p-1f), x); /* ln(2) in two parts */
    r = st_fma_vf32(n, st_all_vf32(0x1.05c61p-29f), r);
    return __builtin_ia32_scalefps512_mask(st_exp_reduced_vf32(r), n, x, 0xffff, 4);
}
//! st_odd_vf32 | needs st_vectors
/* The magnitude with the sign of x. */
ST_FN st_vf32 st_odd_vf32(st_vf32 magnitude, st_vf32 x) {
    return (st_vf32)((st_vu32)magnitude | ((st_vu32)x & 0x80000000u));
}
//! st_tanh_vf32 | needs st_abs_vf32 st_less_or_vf32 st_lt_vf32 st_exp_bounded_vf32 st_odd_vf32 st_pick_vf32
/* As st_tanh_f32. */
ST_FN st_vf32 st_tanh_vf32(st_vf32 x) {
    st_vf32 a = st_less_or_vf32(st_all_vf32(10.0f), st_abs_vf32(x)), s = a * a;
    st_vf32 t = st_all_vf32(-0x1.75619ap-8f);
    t = st_fma_vf32(t, s, st_all_vf32(0x1.5207b8p-6f));
    t = st_fma_vf32(t, s, st_all_vf32(-0x1.b83738p-5f));
    t = st_fma_vf32(t, s, st_all_vf32(0x1.1106fcp-3f));
    t = st_fma_vf32(t, s, st_all_vf32(-0x1.555532p-2f));
    st_vf32 near = st_fma_vf32(a * s, t, a);
    st_vf32 far = 1.0f - 2.0f / (st_exp_bounded_vf32(2.0f * a) + 1.0f);
    return st_odd_vf32(st_pick_vf32(st_lt_vf32(a, st_all_vf32(0.625f)), near, far), x);
}
//! st_erf_vf32 | needs st_abs_vf32 st_less_or_vf32 st_lt_vf32 st_exp_bounded_vf32 st_odd_vf32 st_pick_vf32
/* As st_erf_f32. */
ST_FN st_vf32 st_erf_vf32(st_vf32 x) {
    st_vf32 a = st_less_or_vf32(st_all_vf32(4.0f), st_abs_vf32(x)), s = a * a;
    st_vf32 e = st_all_vf32(-0x1.308246p-11f);
    e = st_fma_vf32(e, s, st_all_vf32(0x1.44c0d4p-8f));
    e = st_fma_vf32(e, s, st_all_vf32(-0x1.b618b6p-6f));
    e = st_fma_vf32(e, s, st_all_vf32(0x1.ce12p-4f));
    e = st_fma_vf32(e, s, st_all_vf32(-0x1.8126aep-2f));
    e = st_fma_vf32(e, s, st_all_vf32(0x1.06eba4p-3f));
    st_vf32 near = st_fma_vf32(a, e, a);
    st_vf32 l = st_all_vf32(0x1.78e02cp-17f);
    l = st_fma_vf32(l, a, st_all_vf32(-0x1.527e46p-12f));
    l = st_fma_vf32(l, a, st_all_vf32(0x1.dd6e36p-9f));
    l = st_fma_vf32(l, a, st_all_vf32(-0x1.8551d2p-6f));
    l = st_fma_vf32(l, a, st_all_vf32(0x1.b3259cp-4f));
    l = st_fma_vf32(l, a, st_all_vf32(0x1.45328ap-1f));
    l = st_fma_vf32(l, a, st_all_vf32(0x1.20ef1cp+0f));
    st_vf32 far = 1.0f - st_exp_bounded_vf32(-(l * a));
    return st_odd_vf32(st_pick_vf32(st_lt_vf32(a, st_all_vf32(0.9375f)), near, far), x);
}
//! st_erfc_vf32 | needs st_abs_vf32 st_fma_vf32 st_all_vf32 st_lt_vf32 st_ne_vf32 st_pick_vf32
/* As st_erfc_f32. */
ST_FN st_vf32 st_erfc_vf32(st_vf32 x) {
    st_vf32 a = st_abs_vf32(x), one = st_all_vf32(1.0f), half = st_all_vf32(0.5f);
    st_vmask stays = st_lt_vf32(a, st_all_vf32(10.0625f));
    st_vf32 s = a * a, s_lost = st_fma_vf32(a, a, -s);
    st_vf32 n = st_fma_vf32(-s, st_all_vf32(0x1.715476p+0f), st_all_vf32(0x1.8p23f)) - 0x1.8p23f; /* 1 / ln(2) */
    st_vf32 r = st_fma_vf32(n, st_all_vf32(-0x1.62e43p-1f), -s); /* ln(2) in two parts */
    r = st_fma_vf32(n, st_all_vf32(0x1.05c61p-29f), r) - s_lost;
    st_vf32 q = st_all_vf32(0x1.6a4d6p-10f);
    q = st_fma_vf32(q, r, st_all_vf32(0x1.12398ep-7f));
    q = st_fma_vf32(q, r, st_all_vf32(0x1.5558bp-5f));
    q = st_fma_vf32(q, r, st_all_vf32(0x1.555492p-3f));
    q = st_fma_vf32(q, r, st_all_vf32(0x1.fffffcp-2f));
    st_vf32 less_one = st_fma_vf32(r * r, q, r); /* e^r - 1 */
    st_vf32 d = st_fma_vf32(half, a, one), t = 1.0f / d;
    st_vf32 t_lost = st_fma_vf32(-st_fma_vf32(half, a, 1.0f - d), t, st_fma_vf32(-d, t, one));
    st_vf32 u = t - 0.25f, c = st_all_vf32(0x1.526b8ep-5f);
    c = st_fma_vf32(c, u, st_all_vf32(-0x1.db19d4p-4f));
    c = st_fma_vf32(c, u, st_all_vf32(0x1.0b6dccp-4f));
    c = st_fma_vf32(c, u, st_all_vf32(0x1.b557d4p-4f));
    c = st_fma_vf32(c, u, st_all_vf32(-0x1.5852ep-4f));
    c = st_fma_vf32(c, u, st_all_vf32(-0x1.060f9p-3f));
    c = st_fma_vf32(c, u, st_all_vf32(0x1.50e712p-9f));
    c = st_fma_vf32(c, u, st_all_vf32(0x1.dde88cp-3f));
    c = st_fma_vf32(c, u, st_all_vf32(0x1.9f34fcp-2f));
    c = st_fma_vf32(c, u, st_all_vf32(0x1.c5f07ap-2f));
    st_vf32 last = st_all_vf32(0x1.7c0348p-2f);
    st_vf32 whole = st_fma_vf32(c, u, last), whole_lost = st_fma_vf32(c, u, last - whole);
    st_vf32 w = t * whole, w_lost = st_fma_vf32(t, whole_lost, st_fma_vf32(t, whole, -w));
    w_lost = st_fma_vf32(w, st_fma_vf32(t, st_all_vf32(0x1.41bap+0f), one) * t_lost, w_lost);
    st_vf32 power = w + st_fma_vf32(w, less_one, st_fma_vf32(w_lost, less_one, w_lost));
    power = __builtin_ia32_scalefps512_mask(power, n, (st_vf32){0}, stays, 4);
    st_vf32 result = st_pick_vf32(st_lt_vf32(x, (st_vf32){0}), 2.0f - power, power);
    return st_pick_vf32(st_ne_vf32(x, x), x, result);
}

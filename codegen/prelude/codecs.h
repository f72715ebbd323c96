//! st_pick_u32
/* a where test is 1, b where it is 0. Masks instead of ?:, for compilers make branches of the latter, which keep loops from
   being vectorised. */
ST_FN uint32_t st_pick_u32(uint32_t test, uint32_t a, uint32_t b) {
    uint32_t mask = 0u - test;
    return (a & mask) | (b & ~mask);
}
//! st_f64_to_f32
/* Rounded once, to nearest, ties to even. gcc 12 drops this rounding where straight-line code that it vectorises widens the
   result again at once; the empty statement keeps it. */
ST_FN float st_f64_to_f32(double x) {
    float rounded = (float)x;
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC_RTC__)
#if defined(__x86_64__)
    __asm__("" : "+x"(rounded));
#elif defined(__aarch64__)
    __asm__("" : "+w"(rounded));
#endif
#endif
    return rounded;
}
//! st_f16_to_f32 | needs st_bits_f32 st_from_bits_f32 st_pick_u32
/* Exact. Integer work only, so that no flush mode can touch f16 subnormals: those are rebuilt as (2^-14 + x) - 2^-14,
   where both numbers are normal floats. Infinities and NaN get the rest of the exponent range. */
ST_FN float st_f16_to_f32(uint16_t x) {
    uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13, sign = (uint32_t)(x & 0x8000u) << 16;
    uint32_t normal = magnitude + (112u << 23);
    uint32_t special = magnitude + (224u << 23);
    uint32_t subnormal = st_bits_f32(st_from_bits_f32(magnitude + (113u << 23)) - 0x1p-14f);
    uint32_t finite = st_pick_u32(magnitude < (1u << 23), subnormal, normal);
    return st_from_bits_f32(sign | st_pick_u32(magnitude >= (31u << 23), special, finite));
}
//! st_bf16_to_f32 | needs st_from_bits_f32
/* Exact: bf16 is the upper half of a float. */
ST_FN float st_bf16_to_f32(uint16_t x) { return st_from_bits_f32((uint32_t)x << 16); }
//! st_f8e5m2_to_f32 | needs st_f16_to_f32
/* Exact: e5m2 is the upper half of an f16. */
ST_FN float st_f8e5m2_to_f32(uint8_t x) { return st_f16_to_f32((uint16_t)((uint32_t)x << 8)); }
//! st_f8e4m3_to_f32 | needs st_bits_f32 st_from_bits_f32
/* Exact. As for f16; the only NaN is the code with all bits set, there is no infinity. */
ST_FN float st_f8e4m3_to_f32(uint8_t x) {
    uint32_t magnitude = (uint32_t)(x & 0x7fu) << 20, sign = (uint32_t)(x & 0x80u) << 24;
    uint32_t normal = magnitude + (120u << 23);
    uint32_t subnormal = st_bits_f32(st_from_bits_f32(magnitude + (121u << 23)) - 0x1p-6f);
    uint32_t number = magnitude < (1u << 23) ? subnormal : normal;
    return st_from_bits_f32(sign | (magnitude == (0x7fu << 20) ? 0x7fc00000u : number));
}

//! st_f32_to_f16 | needs st_bits_f32 st_from_bits_f32 st_pick_u32
/* Round to nearest, ties to even. Normal results: rebias, then add just under half a unit plus the last kept bit.
   Subnormal results: adding 0.5 makes the float adder round at 2^-24, the f16 grid. A carry out of the mantissa moves
   into the exponent and gives infinity from 65520 up. */
ST_FN uint16_t st_f32_to_f16(float x) {
    uint32_t bits = st_bits_f32(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t subnormal = st_bits_f32(st_from_bits_f32(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t code = st_pick_u32(magnitude < (113u << 23), subnormal, normal);
    code = st_pick_u32(magnitude >= 0x477ff000u, 0x7c00u, code);
    code = st_pick_u32(magnitude > 0x7f800000u, 0x7e00u, code);
    return (uint16_t)(code | (bits >> 16 & 0x8000u));
}
//! st_f32_through_f16 | needs st_bits_f32 st_from_bits_f32 st_pick_u32
/* x rounded to f16 and widened again, as st_f32_to_f16 would and without leaving f32. */
ST_FN float st_f32_through_f16(float x) {
    uint32_t bits = st_bits_f32(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u)) & ~0x1fffu;
    uint32_t subnormal = st_bits_f32((st_from_bits_f32(magnitude) + 0.5f) - 0.5f);
    uint32_t rounded = st_pick_u32(magnitude < (113u << 23), subnormal, normal);
    rounded = st_pick_u32(magnitude >= 0x477ff000u, 0x7f800000u, rounded);
    rounded = st_pick_u32(magnitude > 0x7f800000u, 0x7fc00000u, rounded);
    return st_from_bits_f32(rounded | (bits & 0x80000000u));
}
//! st_f32_to_f16_sat | needs st_f32_to_f16 st_bits_f32
/* As st_f32_to_f16, but a finite number beyond the range becomes the largest one, 65504. */
ST_FN uint16_t st_f32_to_f16_sat(float x) {
    uint32_t magnitude = st_bits_f32(x) & 0x7fffffffu, code = st_f32_to_f16(x);
    uint32_t overflow = (uint32_t)(magnitude >= 0x477ff000u) & (uint32_t)(magnitude < 0x7f800000u);
    return (uint16_t)(code - overflow);
}
//! st_f32_to_bf16 | needs st_bits_f32 st_pick_u32
/* Round to nearest, ties to even, on the bits; a carry reaches infinity by itself. NaN is set apart, since the carry
   would turn it into zero. */
ST_FN uint16_t st_f32_to_bf16(float x) {
    uint32_t bits = st_bits_f32(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)st_pick_u32((bits & 0x7fffffffu) > 0x7f800000u, bits >> 16 | 0x40u, rounded);
}
//! st_f32_through_bf16 | needs st_bits_f32 st_from_bits_f32 st_pick_u32
/* x rounded to bf16 and widened again, as st_f32_to_bf16 would and without leaving f32. */
ST_FN float st_f32_through_bf16(float x) {
    uint32_t bits = st_bits_f32(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    return st_from_bits_f32(st_pick_u32((bits & 0x7fffffffu) > 0x7f800000u, bits | 0x400000u, rounded));
}
//! st_f32_to_bf16_sat | needs st_f32_to_bf16 st_bits_f32
/* As st_f32_to_bf16, but a finite number beyond the range becomes the largest one. */
ST_FN uint16_t st_f32_to_bf16_sat(float x) {
    uint32_t magnitude = st_bits_f32(x) & 0x7fffffffu, code = st_f32_to_bf16(x);
    uint32_t overflow = (uint32_t)(magnitude >= 0x7f7f8000u) & (uint32_t)(magnitude < 0x7f800000u);
    return (uint16_t)(code - overflow);
}
//! st_f32_to_f8e5m2 | needs st_bits_f32 st_from_bits_f32
/* Round to nearest, ties to even; infinity from 61440 up. Subnormals are rounded by the float adder at 2^-16. */
ST_FN uint8_t st_f32_to_f8e5m2(float x) {
    uint32_t bits = st_bits_f32(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffffu + (magnitude >> 21 & 1u)) >> 21;
    uint32_t subnormal = st_bits_f32(st_from_bits_f32(magnitude) + 128.0f) - 0x43000000u;
    uint32_t code = magnitude < (113u << 23) ? subnormal : normal;
    code = magnitude >= 0x47700000u ? 0x7cu : code;
    code = magnitude > 0x7f800000u ? 0x7eu : code;
    return (uint8_t)(code | (bits >> 24 & 0x80u));
}
//! st_f32_to_f8e5m2_sat | needs st_f32_to_f8e5m2 st_bits_f32
/* As st_f32_to_f8e5m2, but a finite number beyond the range becomes the largest one, 57344. */
ST_FN uint8_t st_f32_to_f8e5m2_sat(float x) {
    uint32_t magnitude = st_bits_f32(x) & 0x7fffffffu, code = st_f32_to_f8e5m2(x);
    uint32_t overflow = (uint32_t)(magnitude >= 0x47700000u) & (uint32_t)(magnitude < 0x7f800000u);
    return (uint8_t)(code - overflow);
}
//! st_f32_to_f8e4m3 | needs st_bits_f32 st_from_bits_f32
/* Round to nearest, ties to even; 464 still ties to 448, everything above (infinities too) is NaN, for the format has
   no infinity. Subnormals are rounded by the float adder at 2^-9. */
ST_FN uint8_t st_f32_to_f8e4m3(float x) {
    uint32_t bits = st_bits_f32(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    uint32_t subnormal = st_bits_f32(st_from_bits_f32(magnitude) + 16384.0f) - 0x46800000u;
    uint32_t code = magnitude < (121u << 23) ? subnormal : normal;
    code = magnitude > 0x43e80000u ? 0x7fu : code;
    return (uint8_t)(code | (bits >> 24 & 0x80u));
}
//! st_f32_to_f8e4m3_sat | needs st_f32_to_f8e4m3 st_bits_f32
/* As st_f32_to_f8e4m3, but a finite number beyond the range becomes the largest one, 448. */
ST_FN uint8_t st_f32_to_f8e4m3_sat(float x) {
    uint32_t magnitude = st_bits_f32(x) & 0x7fffffffu, code = st_f32_to_f8e4m3(x);
    uint32_t overflow = (uint32_t)(magnitude > 0x43e80000u) & (uint32_t)(magnitude < 0x7f800000u);
    return (uint8_t)(code - overflow);
}

//! st_f64_to_f32_sat | needs st_bits_f32 st_from_bits_f32 st_is_nonfinite_f64
/* Round to nearest; a finite number beyond the range becomes the largest float. */
ST_FN float st_f64_to_f32_sat(double x) {
    uint32_t bits = st_bits_f32((float)x);
    uint32_t overflow = (uint32_t)((bits & 0x7fffffffu) == 0x7f800000u) & (st_is_nonfinite_f64(x) ^ 1u);
    return st_from_bits_f32(bits - overflow);
}
//! st_f64_to_f32_odd | needs st_bits_f32 st_from_bits_f32
/* Round to odd: an inexact result takes the neighbour whose last bit is set. A second rounding to a format of at least
   two bits less then equals one rounding of x. Beyond the range: the largest float, whose last bit is set. */
ST_FN float st_f64_to_f32_odd(double x) {
    float nearest = (float)x;
    double magnitude = x < 0.0 ? -x : x, back = nearest < 0.0f ? -(double)nearest : (double)nearest;
    uint32_t bits = st_bits_f32(nearest), even = (bits & 1u) - 1u; /* all ones if the last bit is 0 */
    uint32_t step = magnitude > back ? 1u : 0u;
    step = magnitude < back ? 0xffffffffu : step;
    return st_from_bits_f32(bits + (step & even));
}
//! st_i64_to_f64_odd
/* To a double of few enough bits, rounded to odd, so that the next rounding is the only one that counts: beyond 2^53
   the low 11 bits are folded into the last bit kept. */
ST_FN double st_i64_to_f64_odd(int64_t x) {
    int64_t folded = (x & ~(int64_t)0x7ff) | (int64_t)((x & 0x7ff) != 0) << 11;
    int exact = (x > -((int64_t)1 << 53)) & (x < (int64_t)1 << 53);
    return (double)(exact ? x : folded);
}
//! st_u64_to_f64_odd
/* To a double of few enough bits, rounded to odd, so that the next rounding is the only one that counts: beyond 2^53
   the low 11 bits are folded into the last bit kept. */
ST_FN double st_u64_to_f64_odd(uint64_t x) {
    uint64_t folded = (x & ~(uint64_t)0x7ffu) | (uint64_t)((x & 0x7ffu) != 0u) << 11;
    return (double)(x >> 53 != 0u ? folded : x);
}

//! st_@S@_to_i64 | for f32 f64
/* Truncate toward zero; beyond the range saturate; NaN gives 0. C leaves all but the first undefined. */
ST_FN int64_t st_@S@_to_i64(@F@ x) {
    int inside = (x >= (@F@)-0x1p63) & (x < (@F@)0x1p63);
    int64_t truncated = (int64_t)(inside ? x : (@F@)0);
    int64_t limit = x >= (@F@)0x1p63 ? INT64_MAX : INT64_MIN;
    return (inside | (x != x)) ? truncated : limit;
}
//! st_@S@_to_u64 | for f32 f64
/* Truncate toward zero; beyond the range saturate; NaN gives 0. C leaves all but the first undefined. */
ST_FN uint64_t st_@S@_to_u64(@F@ x) {
    int inside = (x >= (@F@)1) & (x < (@F@)0x1p64);
    uint64_t truncated = (uint64_t)(inside ? x : (@F@)0);
    return x >= (@F@)0x1p64 ? UINT64_MAX : truncated;
}
//! st_@S@_to_i32 | for f32 f64
/* Truncate toward zero; beyond the range saturate; NaN gives 0. C leaves all but the first undefined. */
ST_FN int32_t st_@S@_to_i32(@F@ x) {
    int inside = (x >= (@F@)-0x1p31) & (x < (@F@)0x1p31);
    int32_t truncated = (int32_t)(inside ? x : (@F@)0);
    int32_t limit = x >= (@F@)0x1p31 ? INT32_MAX : INT32_MIN;
    return (inside | (x != x)) ? truncated : limit;
}
//! st_@S@_to_u32 | for f32 f64
/* Truncate toward zero; beyond the range saturate; NaN gives 0. C leaves all but the first undefined. */
ST_FN uint32_t st_@S@_to_u32(@F@ x) {
    int inside = (x >= (@F@)1) & (x < (@F@)0x1p32);
    uint32_t truncated = (uint32_t)(inside ? x : (@F@)0);
    return x >= (@F@)0x1p32 ? UINT32_MAX : truncated;
}

//! st_bits_f32 | dialect c
/* The bit pattern of x. A copy, not a pointer cast: aliasing rules forbid the cast; compilers turn this into nothing. */
ST_FN uint32_t st_bits_f32(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
//! st_bits_f32 | dialect cuda
ST_FN uint32_t st_bits_f32(float x) { return __float_as_uint(x); }
//! st_from_bits_f32 | dialect c
/* The float with the given bit pattern. */
ST_FN float st_from_bits_f32(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
//! st_from_bits_f32 | dialect cuda
ST_FN float st_from_bits_f32(uint32_t bits) { return __uint_as_float(bits); }
//! st_bits_f64 | dialect c
/* The bit pattern of x. */
ST_FN uint64_t st_bits_f64(double x) {
    uint64_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
//! st_bits_f64 | dialect cuda
ST_FN uint64_t st_bits_f64(double x) { return (uint64_t)__double_as_longlong(x); }
//! st_from_bits_f64 | dialect c
/* The double with the given bit pattern. */
ST_FN double st_from_bits_f64(uint64_t bits) {
    double x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
//! st_from_bits_f64 | dialect cuda
ST_FN double st_from_bits_f64(uint64_t bits) { return __longlong_as_double((long long)bits); }

//! st_fma_f32 | dialect c | if fma
/* a * b + c, rounded once: one instruction of this target. */
ST_FN float st_fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
//! st_fma_f32 | dialect cuda
/* a * b + c, rounded once. */
ST_FN float st_fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
//! st_fma_f32 | needs st_bits_f64 st_from_bits_f64
/* a * b + c, rounded once, without an fma instruction. The product of two floats is exact in double. The sum is rounded
   to odd: where inexact it takes the neighbour whose last bit is set, which keeps the final rounding to float from
   seeing a tie that is none. Infinities and NaN are left alone. The tests are shifts and logic on 64-bit words, which
   every vector unit has; double comparisons selecting integers they have not. */
ST_FN float st_fma_f32(float a, float b, float c) {
    double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    double back = sum - product;
    uint64_t error = st_bits_f64((product - (sum - back)) + (addend - back)), bits = st_bits_f64(sum);
    uint64_t magnitude = error << 1;
    uint64_t inexact = (magnitude | (0u - magnitude)) >> 63;
    uint64_t nonfinite = ((bits >> 52 & 0x7ffu) + 1u) >> 11;
    uint64_t step = inexact & ~nonfinite & ~bits & 1u;
    uint64_t toward_zero = step & (error ^ bits) >> 63;
    return (float)st_from_bits_f64(bits + step - (toward_zero << 1));
}
//! st_fma_f64 | dialect c | include math.h
/* a * b + c, rounded once; the C library is correctly rounded here, in software where there is no instruction. */
ST_FN double st_fma_f64(double a, double b, double c) { return fma(a, b, c); }
//! st_fma_f64 | dialect cuda
/* a * b + c, rounded once. */
ST_FN double st_fma_f64(double a, double b, double c) { return __fma_rn(a, b, c); }

//! st_is_nonfinite_f64 | needs st_bits_f64
/* 1 for infinities and NaN, read off the exponent field: no compiler flag about finite values can undo it. */
ST_FN uint32_t st_is_nonfinite_f64(double x) { return (uint32_t)((st_bits_f64(x) >> 52 & 0x7ffu) == 0x7ffu); }
//! st_is_nonfinite_f32 | needs st_bits_f32
/* 1 for infinities and NaN, read off the exponent field: no compiler flag about finite values can undo it. */
ST_FN uint32_t st_is_nonfinite_f32(float x) { return (uint32_t)((st_bits_f32(x) & 0x7f800000u) == 0x7f800000u); }
//! st_is_nonfinite_f16
/* 1 for infinities and NaN of the stored code. */
ST_FN uint32_t st_is_nonfinite_f16(uint16_t x) { return (uint32_t)((x & 0x7c00u) == 0x7c00u); }
//! st_is_nonfinite_bf16
/* 1 for infinities and NaN of the stored code. */
ST_FN uint32_t st_is_nonfinite_bf16(uint16_t x) { return (uint32_t)((x & 0x7f80u) == 0x7f80u); }
//! st_is_nonfinite_f8e5m2
/* 1 for infinities and NaN of the stored code. */
ST_FN uint32_t st_is_nonfinite_f8e5m2(uint8_t x) { return (uint32_t)((x & 0x7cu) == 0x7cu); }
//! st_is_nonfinite_f8e4m3
/* 1 for NaN of the stored code, all ones in exponent and mantissa; the format has no infinity. */
ST_FN uint32_t st_is_nonfinite_f8e4m3(uint8_t x) { return (uint32_t)((x & 0x7fu) == 0x7fu); }

//! st_flush_f64 | needs st_bits_f64 st_from_bits_f64
/* x, or +0 where its magnitude is below the least normal number. */
ST_FN double st_flush_f64(double x) {
    uint64_t bits = st_bits_f64(x);
    return st_from_bits_f64((bits & 0x7ff0000000000000u) == 0u ? (uint64_t)0 : bits);
}
//! st_flush_f32 | needs st_bits_f32 st_from_bits_f32
/* x, or +0 where its magnitude is below the least normal number. */
ST_FN float st_flush_f32(float x) {
    uint32_t bits = st_bits_f32(x);
    return st_from_bits_f32((bits & 0x7f800000u) == 0u ? 0u : bits);
}
//! st_flush_f16
/* The stored code, or that of +0 where the magnitude is below the least normal number. */
ST_FN uint16_t st_flush_f16(uint16_t x) { return (x & 0x7c00u) == 0u ? (uint16_t)0 : x; }
//! st_flush_bf16
/* The stored code, or that of +0 where the magnitude is below the least normal number. */
ST_FN uint16_t st_flush_bf16(uint16_t x) { return (x & 0x7f80u) == 0u ? (uint16_t)0 : x; }
//! st_flush_f8e5m2
/* The stored code, or that of +0 where the magnitude is below the least normal number. */
ST_FN uint8_t st_flush_f8e5m2(uint8_t x) { return (x & 0x7cu) == 0u ? (uint8_t)0 : x; }
//! st_flush_f8e4m3
/* The stored code, or that of +0 where the magnitude is below the least normal number. */
ST_FN uint8_t st_flush_f8e4m3(uint8_t x) { return (x & 0x78u) == 0u ? (uint8_t)0 : x; }

//! st_nonfinite_@S@ | for f32 f64 | needs st_is_nonfinite_@S@ st_from_bits_@S@
/* Infinity for infinities and NaN, else +0: sums of it tell whether a tensor was finite. */
ST_FN @F@ st_nonfinite_@S@(@F@ x) { return st_from_bits_@S@(st_is_nonfinite_@S@(x) != 0u ? @INF@ : 0u); }

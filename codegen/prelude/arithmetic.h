//! st_relu_@S@ | for f32 f64
/* x where positive, +0 where not; NaN stays NaN. */
ST_FN @F@ st_relu_@S@(@F@ x) { return x <= (@F@)0 ? (@F@)0 : x; }
//! st_sign_@S@ | for f32 f64
/* -1, +0 or 1; NaN stays NaN. */
ST_FN @F@ st_sign_@S@(@F@ x) { return x != x ? x : (@F@)((x > (@F@)0) - (x < (@F@)0)); }
//! st_abs_f32 | needs st_bits_f32 st_from_bits_f32
/* Clears the sign bit, of zero and NaN too. */
ST_FN float st_abs_f32(float x) { return st_from_bits_f32(st_bits_f32(x) & 0x7fffffffu); }
//! st_abs_f64 | needs st_bits_f64 st_from_bits_f64
/* Clears the sign bit, of zero and NaN too. */
ST_FN double st_abs_f64(double x) { return st_from_bits_f64(st_bits_f64(x) & 0x7fffffffffffffffu); }
//! st_max_@S@ | for f32 f64
/* The larger operand, the first at ties (so also between -0 and +0); NaN if either is NaN, the first NaN if both. */
ST_FN @F@ st_max_@S@(@F@ a, @F@ b) { return ((a >= b) | (a != a)) ? a : b; }
//! st_min_@S@ | for f32 f64
/* The smaller operand, the first at ties (so also between -0 and +0); NaN if either is NaN, the first NaN if both. */
ST_FN @F@ st_min_@S@(@F@ a, @F@ b) { return ((a <= b) | (a != a)) ? a : b; }

//! st_trunc_f32 | dialect c | if avx neon
/* Toward zero, sign of zero kept: one instruction of this target. */
ST_FN float st_trunc_f32(float x) { return __builtin_truncf(x); }
//! st_trunc_f32 | dialect cuda
/* Toward zero, sign of zero kept. */
ST_FN float st_trunc_f32(float x) { return truncf(x); }
//! st_trunc_f32 | needs st_bits_f32 st_from_bits_f32
/* Toward zero, sign of zero kept. From 2^23 up every float is an integer, and below the trip through int is exact. */
ST_FN float st_trunc_f32(float x) {
    uint32_t sign = st_bits_f32(x) & 0x80000000u;
    float magnitude = st_from_bits_f32(st_bits_f32(x) & 0x7fffffffu);
    int fractional = magnitude < 0x1p23f;
    float whole = (float)(int32_t)(fractional ? magnitude : 0.0f);
    return st_from_bits_f32(st_bits_f32(fractional ? whole : magnitude) | sign);
}
//! st_floor_f32 | dialect c | if avx neon
/* Toward minus infinity, sign of zero kept: one instruction of this target. */
ST_FN float st_floor_f32(float x) { return __builtin_floorf(x); }
//! st_floor_f32 | dialect cuda
/* Toward minus infinity, sign of zero kept. */
ST_FN float st_floor_f32(float x) { return floorf(x); }
//! st_floor_f32 | needs st_trunc_f32
/* Toward minus infinity, sign of zero kept. */
ST_FN float st_floor_f32(float x) {
    float whole = st_trunc_f32(x);
    return whole > x ? whole - 1.0f : whole;
}
//! st_ceil_f32 | dialect c | if avx neon
/* Toward plus infinity, sign of zero kept: one instruction of this target. */
ST_FN float st_ceil_f32(float x) { return __builtin_ceilf(x); }
//! st_ceil_f32 | dialect cuda
/* Toward plus infinity, sign of zero kept. */
ST_FN float st_ceil_f32(float x) { return ceilf(x); }
//! st_ceil_f32 | needs st_trunc_f32
/* Toward plus infinity, sign of zero kept (-0.5 gives -0; a sum of -0 and 0 would lose it). */
ST_FN float st_ceil_f32(float x) {
    float whole = st_trunc_f32(x);
    return whole < x ? whole + 1.0f : whole;
}
//! st_round_f32 | dialect c | if avx neon
/* To the nearest integer, ties to even, sign of zero kept: one instruction of this target. */
ST_FN float st_round_f32(float x) { return __builtin_rintf(x); }
//! st_round_f32 | dialect cuda
/* To the nearest integer, ties to even, sign of zero kept. */
ST_FN float st_round_f32(float x) { return rintf(x); }
//! st_round_f32 | needs st_bits_f32 st_from_bits_f32
/* To the nearest integer, ties to even, sign of zero kept: the adder rounds at 1 once the sum is beyond 2^23. */
ST_FN float st_round_f32(float x) {
    uint32_t sign = st_bits_f32(x) & 0x80000000u;
    float magnitude = st_from_bits_f32(st_bits_f32(x) & 0x7fffffffu);
    float rounded = (magnitude + 0x1p23f) - 0x1p23f;
    return st_from_bits_f32(st_bits_f32(magnitude < 0x1p23f ? rounded : magnitude) | sign);
}
//! st_trunc_f64 | include math.h
/* Toward zero, sign of zero kept. */
ST_FN double st_trunc_f64(double x) { return trunc(x); }
//! st_floor_f64 | include math.h
/* Toward minus infinity, sign of zero kept. */
ST_FN double st_floor_f64(double x) { return floor(x); }
//! st_ceil_f64 | include math.h
/* Toward plus infinity, sign of zero kept. */
ST_FN double st_ceil_f64(double x) { return ceil(x); }
//! st_round_f64 | include math.h
/* To the nearest integer, ties to even, sign of zero kept. */
ST_FN double st_round_f64(double x) { return rint(x); }

//! st_sqrt_f32 | dialect c
/* Correctly rounded, as IEEE 754 demands. */
ST_FN float st_sqrt_f32(float x) { return __builtin_sqrtf(x); }
//! st_sqrt_f32 | dialect cuda
/* Correctly rounded, whatever the division and root flags of the compiler say. */
ST_FN float st_sqrt_f32(float x) { return __fsqrt_rn(x); }
//! st_sqrt_f64 | include math.h
/* Correctly rounded, as IEEE 754 demands. */
ST_FN double st_sqrt_f64(double x) { return sqrt(x); }
//! st_recip_f32
/* 1 / x, correctly rounded. */
ST_FN float st_recip_f32(float x) { return 1.0f / x; }
//! st_recip_f64
/* 1 / x, correctly rounded. */
ST_FN double st_recip_f64(double x) { return 1.0 / x; }
//! st_rsqrt_@S@ | for f32 f64 | needs st_sqrt_@S@
/* 1 / sqrt(x): two roundings, within 1.5 ulp. +0 gives infinity, -0 minus infinity. */
ST_FN @F@ st_rsqrt_@S@(@F@ x) { return (@F@)1 / st_sqrt_@S@(x); }

//! st_floordiv_f32 | needs st_is_nonfinite_f32
/* floor(a / b) by Python's rules: NaN for an infinite dividend; a zero divisor gives an infinity or NaN. The quotient in
   double cannot round up to an integer it has not reached while it is below 2^28, so the floor is right wherever a float can
   hold it. -1 beside an infinite divisor of the other sign, whose quotient is a mere zero. */
ST_FN float st_floordiv_f32(float a, float b) {
    double quotient = (double)a / (double)b;
    double magnitude = quotient < 0.0 ? -quotient : quotient;
    double whole = (quotient + 0x1.8p52) - 0x1.8p52;
    whole -= (double)(whole > quotient);
    whole = magnitude < 0x1p51 ? whole : quotient;
    whole = ((quotient == 0.0) & (a != 0.0f) & ((a < 0.0f) != (b < 0.0f))) ? -1.0 : whole;
    whole = whole == 0.0 ? quotient * 0.0 : whole; /* the sign of the zero */
    return st_is_nonfinite_f32(a) != 0u ? a - a : (float)whole;
}
//! st_floormod_f32 | needs st_bits_f32 st_from_bits_f32
/* a - floor(a / b) * b by Python's rules: the sign of b, also on a zero; NaN for b = 0 or an infinite dividend. The remainder
   is found exactly in double, 26 bits of the quotient a turn: products of 26 and 24 bits fit, and the largest quotient of
   two floats has 277 bits. A fixed number of turns, so that loops around this vectorise. */
ST_FN float st_floormod_f32(float a, float b) {
    double remainder = a < 0.0f ? -(double)a : (double)a;
    double divisor = b < 0.0f ? -(double)b : (double)b;
    divisor = divisor > 0x1p200 ? 0x1p200 : divisor;
    double step = divisor * 0x1p260;
    for (int turn = 0; turn < 11; ++turn) {
        double quotient = remainder / step;
        double whole = (quotient + 0x1p52) - 0x1p52;
        whole -= (double)(whole > quotient);
        remainder -= whole * step;
        step *= 0x1p-26;
    }
    double result = a < 0.0f ? -remainder : remainder;
    result += ((remainder != 0.0) & ((a < 0.0f) != (b < 0.0f))) ? (double)b : 0.0;
    uint32_t bits = st_bits_f32((float)result);
    return st_from_bits_f32(remainder == 0.0 ? st_bits_f32(b) & 0x80000000u : bits);
}
//! st_floormod_f64 | include math.h
/* a - floor(a / b) * b by Python's rules: the sign of b, also on a zero; NaN for b = 0 or an infinite dividend. */
ST_FN double st_floormod_f64(double a, double b) {
    double remainder = fmod(a, b);
    double shifted = (remainder < 0.0) != (b < 0.0) ? remainder + b : remainder;
    return remainder == 0.0 ? copysign(0.0, b) : shifted;
}
//! st_floordiv_f64 | include math.h
/* floor(a / b) by Python's rules: NaN for an infinite dividend; a zero divisor gives an infinity or NaN. Through the exact
   remainder, since the rounded quotient may reach an integer that the true one does not. */
ST_FN double st_floordiv_f64(double a, double b) {
    double remainder = fmod(a, b);
    double quotient = (a - remainder) / b;
    quotient -= (double)((remainder != 0.0) & ((b < 0.0) != (remainder < 0.0)));
    double whole = floor(quotient);
    whole += (double)(quotient - whole > 0.5);
    whole = quotient == 0.0 ? copysign(0.0, a / b) : whole;
    return b == 0.0 ? a / b + (a - a) : whole;
}

//! st_floordiv_@S@ | for i64 i32 i16 i8
/* floor(a / b); 0 where b is 0. The divisor -1 is set apart: the least integer over -1 wraps to itself, while the division
   instruction would trap. */
ST_FN @T@ st_floordiv_@S@(@T@ a, @T@ b) {
    @T@ divisor = ((b == 0) | (b == -1)) ? (@T@)1 : b;
    @T@ quotient = (@T@)(a / divisor), remainder = (@T@)(a % divisor);
    @T@ floored = (@T@)(quotient - ((remainder != 0) & ((remainder ^ divisor) < 0)));
    @T@ negated = (@T@)((@U@)0 - (@U@)a);
    return b == 0 ? (@T@)0 : b == -1 ? negated : floored;
}
//! st_floormod_@S@ | for i64 i32 i16 i8
/* a - floor(a / b) * b, with the sign of b; 0 where b is 0. */
ST_FN @T@ st_floormod_@S@(@T@ a, @T@ b) {
    @T@ divisor = ((b == 0) | (b == -1)) ? (@T@)1 : b;
    @T@ remainder = (@T@)(a % divisor);
    return (@T@)(((remainder != 0) & ((remainder ^ divisor) < 0)) ? remainder + divisor : remainder);
}
//! st_floordiv_@S@ | for u64 u32 u16 u8
/* a / b; 0 where b is 0. */
ST_FN @T@ st_floordiv_@S@(@T@ a, @T@ b) { return (@T@)(b == 0 ? 0 : a / (b == 0 ? 1 : b)); }
//! st_floormod_@S@ | for u64 u32 u16 u8
/* a modulo b; 0 where b is 0. */
ST_FN @T@ st_floormod_@S@(@T@ a, @T@ b) { return (@T@)(a % (b == 0 ? 1 : b)); }
//! st_pow_@S@ | for i64 i32 i16 i8
/* base to the exponent, modulo 2^@BITS@; 0 for a negative exponent, whatever the base. */
ST_FN @T@ st_pow_@S@(@T@ base, @T@ exponent) {
    @U@ result = 1, square = (@U@)base, bits = (@U@)exponent;
    for (int turn = 0; turn < @BITS@ - 1; ++turn) {
        result = (@U@)(bits & 1u ? (@W@)result * square : result);
        square = (@U@)((@W@)square * square);
        bits = (@U@)(bits >> 1);
    }
    return exponent < 0 ? (@T@)0 : (@T@)result;
}
//! st_pow_@S@ | for u64 u32 u16 u8
/* base to the exponent, modulo 2^@BITS@. */
ST_FN @T@ st_pow_@S@(@T@ base, @T@ exponent) {
    @T@ result = 1, square = base, bits = exponent;
    for (int turn = 0; turn < @BITS@; ++turn) {
        result = (@T@)(bits & 1u ? (@W@)result * square : result);
        square = (@T@)((@W@)square * square);
        bits = (@T@)(bits >> 1);
    }
    return result;
}
//! st_abs_@S@ | for i64 i32 i16 i8
/* |x|; the least integer wraps to itself. */
ST_FN @T@ st_abs_@S@(@T@ x) { return (@T@)(x < 0 ? (@U@)0 - (@U@)x : (@U@)x); }
//! st_abs_@S@ | for u64 u32 u16 u8
/* x itself. */
ST_FN @T@ st_abs_@S@(@T@ x) { return x; }
//! st_sign_@S@ | for i64 i32 i16 i8
/* -1, 0 or 1. */
ST_FN @T@ st_sign_@S@(@T@ x) { return (@T@)((x > 0) - (x < 0)); }
//! st_sign_@S@ | for u64 u32 u16 u8
/* 0 or 1. */
ST_FN @T@ st_sign_@S@(@T@ x) { return (@T@)(x != 0); }
//! st_relu_@S@ | for i64 i32 i16 i8 u64 u32 u16 u8
/* x where positive, else 0. */
ST_FN @T@ st_relu_@S@(@T@ x) { return x > 0 ? x : (@T@)0; }
//! st_max_@S@ | for i64 i32 i16 i8 u64 u32 u16 u8
/* The larger operand. */
ST_FN @T@ st_max_@S@(@T@ a, @T@ b) { return a >= b ? a : b; }
//! st_min_@S@ | for i64 i32 i16 i8 u64 u32 u16 u8
/* The smaller operand. */
ST_FN @T@ st_min_@S@(@T@ a, @T@ b) { return a <= b ? a : b; }

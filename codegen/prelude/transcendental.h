//! st_exp_reduced_f32 | needs st_fma_f32
/* e^r for |r| <= ln(2) / 2: 1 + r + r^2 Q(r), relative error of the polynomial 2^-28. */
ST_FN float st_exp_reduced_f32(float r) {
    float q = 0x1.6a4d6p-10f;
    q = st_fma_f32(q, r, 0x1.12398ep-7f);
    q = st_fma_f32(q, r, 0x1.5558bp-5f);
    q = st_fma_f32(q, r, 0x1.555492p-3f);
    q = st_fma_f32(q, r, 0x1.fffffcp-2f);
    q = st_fma_f32(q, r, 1.0f);
    return st_fma_f32(q, r, 1.0f);
}
//! st_exp_bounded_f32 | needs st_fma_f32 st_exp_reduced_f32 st_bits_f32 st_from_bits_f32
/* e^x for |x| <= 87, where the result is a normal number. Adding 1.5 * 2^23 rounds x / ln(2) to an integer and leaves it in
   the low bits of the sum, from where one shift makes it an exponent: no conversion to int. */
ST_FN float st_exp_bounded_f32(float x) {
    float shifted = st_fma_f32(x, 0x1.715476p+0f, 0x1.8p23f); /* 1 / ln(2) */
    float n = shifted - 0x1.8p23f;
    float r = st_fma_f32(n, -0x1.62e43p-1f, x); /* ln(2) in two parts */
    r = st_fma_f32(n, 0x1.05c61p-29f, r);
    return st_exp_reduced_f32(r) * st_from_bits_f32((st_bits_f32(shifted) << 23) + 0x3f800000u);
}
//! st_scale_f32 | needs st_from_bits_f32
/* x * 2^n for -252 <= n <= 254, in two factors: the first product is exact, the second rounds once, to a subnormal too. */
ST_FN float st_scale_f32(float x, int32_t n) {
    int32_t half = n >> 1;
    x *= st_from_bits_f32((uint32_t)(half + 127) << 23);
    return x * st_from_bits_f32((uint32_t)(n - half + 127) << 23);
}
//! st_exp_f32 | needs st_fma_f32 st_exp_reduced_f32 st_scale_f32 st_bits_f32 st_from_bits_f32 st_pick_u32
/* e^x within 0.9 ulp, subnormal results included. From 89 up, where the result is infinity anyway, the argument is clamped by
   an integer minimum on its bits, for which compilers have single instructions. Below -104 the result is 0, set apart by a
   mask (negative floats order like unsigned integers): a product that underflows takes processors a hundred cycles, and
   masked scores are many. */
ST_FN float st_exp_f32(float x) {
    uint32_t vanishes = (uint32_t)(st_bits_f32(x) > 0xc2d00000u);
    int32_t high = (int32_t)st_pick_u32(vanishes, 0u, st_bits_f32(x));
    high = high < 0x42b20000 ? high : 0x42b20000;
    float clamped = st_from_bits_f32((uint32_t)high);
    float shifted = st_fma_f32(clamped, 0x1.715476p+0f, 0x1.8p23f); /* 1 / ln(2) */
    float n = shifted - 0x1.8p23f;
    float r = st_fma_f32(n, -0x1.62e43p-1f, clamped); /* ln(2) in two parts */
    r = st_fma_f32(n, 0x1.05c61p-29f, r);
    float power = st_scale_f32(st_exp_reduced_f32(r), (int32_t)(st_bits_f32(shifted) - 0x4b400000u));
    power = st_from_bits_f32(st_pick_u32(vanishes, 0u, st_bits_f32(power)));
    return x == x ? power : x;
}
//! st_exp2_f32 | needs st_fma_f32 st_scale_f32 st_bits_f32 st_from_bits_f32
/* 2^x within 0.9 ulp, exact for integers, subnormal results included. Clamped to [-151, 129] as in st_exp_f32; the
   remainder r = x - n is exact. */
ST_FN float st_exp2_f32(float x) {
    uint32_t low = st_bits_f32(x);
    low = low < 0xc3170000u ? low : 0xc3170000u;
    int32_t high = (int32_t)low;
    high = high < 0x43010000 ? high : 0x43010000;
    float clamped = st_from_bits_f32((uint32_t)high);
    float shifted = clamped + 0x1.8p23f;
    float r = clamped - (shifted - 0x1.8p23f);
    float q = 0x1.417284p-13f;
    q = st_fma_f32(q, r, 0x1.5f0976p-10f);
    q = st_fma_f32(q, r, 0x1.3b2ddap-7f);
    q = st_fma_f32(q, r, 0x1.c6af7ap-5f);
    q = st_fma_f32(q, r, 0x1.ebfbdcp-3f);
    q = st_fma_f32(q, r, 0x1.62e43p-1f);
    q = st_fma_f32(q, r, 1.0f);
    float power = st_scale_f32(q, (int32_t)(st_bits_f32(shifted) - 0x4b400000u));
    return x == x ? power : x;
}

//! st_log_exponent_f32 | needs st_bits_f32
/* The n that brings x / 2^n into [sqrt(1/2), sqrt(2)); subnormals are scaled by 2^23 first. For positive finite x. */
ST_FN int32_t st_log_exponent_f32(float x) {
    int subnormal = st_bits_f32(x) < 0x00800000u;
    uint32_t bits = subnormal ? st_bits_f32(x * 0x1p23f) : st_bits_f32(x);
    return ((int32_t)(bits - 0x3f3504f3u) >> 23) - (subnormal ? 23 : 0);
}
//! st_log_mantissa_f32 | needs st_bits_f32 st_from_bits_f32
/* x / 2^n - 1 for the n of st_log_exponent_f32; exact. */
ST_FN float st_log_mantissa_f32(float x) {
    uint32_t bits = st_bits_f32(x) < 0x00800000u ? st_bits_f32(x * 0x1p23f) : st_bits_f32(x);
    uint32_t exponent = (bits - 0x3f3504f3u) & 0xff800000u;
    return st_from_bits_f32(bits - exponent) - 1.0f;
}
//! st_log_special_f32 | needs st_bits_f32 st_from_bits_f32
/* The given logarithm of x, or what belongs there if x is not a positive finite number: -inf for a zero, infinity for
   infinity, NaN for negative numbers and NaN. */
ST_FN float st_log_special_f32(float x, float logarithm) {
    uint32_t special = st_bits_f32(x) >= 0x7f800000u ? 0x7fc00000u : st_bits_f32(logarithm);
    special = st_bits_f32(x) == 0x7f800000u ? 0x7f800000u : special;
    special = (st_bits_f32(x) & 0x7fffffffu) == 0u ? 0xff800000u : special;
    return st_from_bits_f32(special);
}
//! st_log_f32 | needs st_fma_f32 st_log_exponent_f32 st_log_mantissa_f32 st_log_special_f32
/* Natural logarithm within 0.9 ulp, subnormal arguments included: n ln(2) + log(1 + f), the latter as f - f^2/2 + f^3 P(f)
   with relative error 2^-27. f is added last and n ln(2) comes in two parts, so that nothing cancels badly near 1. */
ST_FN float st_log_f32(float x) {
    float n = (float)st_log_exponent_f32(x), f = st_log_mantissa_f32(x);
    float p = -0x1.38d132p-4f;
    p = st_fma_f32(p, f, 0x1.05689ep-3f);
    p = st_fma_f32(p, f, -0x1.0d857ap-3f);
    p = st_fma_f32(p, f, 0x1.22d7fp-3f);
    p = st_fma_f32(p, f, -0x1.54721p-3f);
    p = st_fma_f32(p, f, 0x1.99a026p-3f);
    p = st_fma_f32(p, f, -0x1.000228p-2f);
    p = st_fma_f32(p, f, 0x1.555554p-2f);
    p = st_fma_f32(p, f, -0.5f);
    float tail = st_fma_f32(f * f, p, n * -0x1.05c61p-29f);
    return st_log_special_f32(x, st_fma_f32(n, 0x1.62e43p-1f, f + tail));
}
//! st_log2_f32 | needs st_fma_f32 st_log_exponent_f32 st_log_mantissa_f32 st_log_special_f32
/* Binary logarithm within 1.3 ulp, exact for powers of two: n + f R(f), where the leading 1 / ln(2) of R is applied in a
   product of its own, whose rounding error joins the rest. */
ST_FN float st_log2_f32(float x) {
    float n = (float)st_log_exponent_f32(x), f = st_log_mantissa_f32(x);
    float r = 0x1.0200ccp-3f;
    r = st_fma_f32(r, f, -0x1.a89fb4p-3f);
    r = st_fma_f32(r, f, 0x1.b9bab8p-3f);
    r = st_fma_f32(r, f, -0x1.e95522p-3f);
    r = st_fma_f32(r, f, 0x1.26d402p-2f);
    r = st_fma_f32(r, f, -0x1.715c84p-2f);
    r = st_fma_f32(r, f, 0x1.ec73d4p-2f);
    r = st_fma_f32(r, f, -0x1.71547p-1f);
    r = st_fma_f32(r, f, -0x1.360016p-26f);
    float leading = f * 0x1.715476p+0f, error = st_fma_f32(f, 0x1.715476p+0f, -leading);
    return st_log_special_f32(x, n + (leading + st_fma_f32(f, r, error)));
}

//! st_sigmoid_f32 | needs st_fma_f32 st_exp_f32 st_abs_f32
/* 1 / (1 + e^-x) within 1.5 ulp. The exponential is taken of -|x|, so it neither overflows nor cancels, and the lower tail
   keeps its relative accuracy down to the subnormals. The quotient is corrected once for its own rounding and for what
   1 + e lost, with the reciprocal of 1 + e read off the quotient. */
ST_FN float st_sigmoid_f32(float x) {
    float e = st_exp_f32(-st_abs_f32(x));
    float numerator = x < 0.0f ? e : 1.0f;
    float denominator = 1.0f + e, lost = e - (denominator - 1.0f);
    float quotient = numerator / denominator;
    float remainder = st_fma_f32(-quotient, lost, st_fma_f32(-quotient, denominator, numerator));
    return st_fma_f32(remainder, x < 0.0f ? 1.0f - quotient : quotient, quotient);
}
//! st_tanh_f32 | needs st_fma_f32 st_exp_bounded_f32 st_bits_f32 st_from_bits_f32
/* Hyperbolic tangent within 1.4 ulp. Below 0.625 an odd polynomial x + x^3 T(x^2), relative error 2^-27; beyond it
   1 - 2 / (e^2x + 1). Both are computed and one is selected: no branch. From 10 up the result is 1. */
ST_FN float st_tanh_f32(float x) {
    uint32_t sign = st_bits_f32(x) & 0x80000000u, bits = st_bits_f32(x) & 0x7fffffffu;
    bits = bits < 0x41200000u ? bits : 0x41200000u;
    float a = st_from_bits_f32(bits), s = a * a;
    float t = -0x1.75619ap-8f;
    t = st_fma_f32(t, s, 0x1.5207b8p-6f);
    t = st_fma_f32(t, s, -0x1.b83738p-5f);
    t = st_fma_f32(t, s, 0x1.1106fcp-3f);
    t = st_fma_f32(t, s, -0x1.555532p-2f);
    float near = st_fma_f32(a * s, t, a);
    float far = 1.0f - 2.0f / (st_exp_bounded_f32(2.0f * a) + 1.0f);
    float result = st_from_bits_f32(st_bits_f32(bits < 0x3f200000u ? near : far) | sign);
    return x == x ? result : x;
}
//! st_erf_f32 | needs st_fma_f32 st_exp_bounded_f32 st_bits_f32 st_from_bits_f32
/* Error function within 1.2 ulp. Below 0.9375 an odd polynomial x + x E(x^2), beyond it 1 - e^-(x L(x)), where x L(x) fits
   -log(erfc(x)). Both are computed and one is selected: no branch. From 4 up the result is 1. */
ST_FN float st_erf_f32(float x) {
    uint32_t sign = st_bits_f32(x) & 0x80000000u, bits = st_bits_f32(x) & 0x7fffffffu;
    bits = bits < 0x40800000u ? bits : 0x40800000u;
    float a = st_from_bits_f32(bits), s = a * a;
    float e = -0x1.308246p-11f;
    e = st_fma_f32(e, s, 0x1.44c0d4p-8f);
    e = st_fma_f32(e, s, -0x1.b618b6p-6f);
    e = st_fma_f32(e, s, 0x1.ce12p-4f);
    e = st_fma_f32(e, s, -0x1.8126aep-2f);
    e = st_fma_f32(e, s, 0x1.06eba4p-3f);
    float near = st_fma_f32(a, e, a);
    float l = 0x1.78e02cp-17f;
    l = st_fma_f32(l, a, -0x1.527e46p-12f);
    l = st_fma_f32(l, a, 0x1.dd6e36p-9f);
    l = st_fma_f32(l, a, -0x1.8551d2p-6f);
    l = st_fma_f32(l, a, 0x1.b3259cp-4f);
    l = st_fma_f32(l, a, 0x1.45328ap-1f);
    l = st_fma_f32(l, a, 0x1.20ef1cp+0f);
    float far = 1.0f - st_exp_bounded_f32(-(l * a));
    float result = st_from_bits_f32(st_bits_f32(bits < 0x3f700000u ? near : far) | sign);
    return x == x ? result : x;
}

//! st_erfc_f32 | needs st_fma_f32 st_scale_f32 st_bits_f32 st_from_bits_f32 st_pick_u32
/* 1 - erf(x) without its cancellation, within 1.9 ulp, subnormal results included. For a = |x| it is e^-(a^2) t C(t) with
   t = 1 / (1 + a/2), 2 minus that below 0. What a^2, t and the last two steps of t C(t) lose to rounding is computed too: an
   error of t counts 1 + 1.2567 t times. From 10.0625 up it is 0, set apart by a mask as in st_exp_f32. */
ST_FN float st_erfc_f32(float x) {
    uint32_t bits = st_bits_f32(x) & 0x7fffffffu, vanishes = (uint32_t)(bits >= 0x41210000u);
    float a = st_from_bits_f32(st_pick_u32(vanishes, 0u, bits));
    float s = a * a, s_lost = st_fma_f32(a, a, -s);
    float shifted = st_fma_f32(-s, 0x1.715476p+0f, 0x1.8p23f); /* 1 / ln(2) */
    float n = shifted - 0x1.8p23f;
    float r = st_fma_f32(n, -0x1.62e43p-1f, -s); /* ln(2) in two parts */
    r = st_fma_f32(n, 0x1.05c61p-29f, r) - s_lost;
    float q = 0x1.6a4d6p-10f;
    q = st_fma_f32(q, r, 0x1.12398ep-7f);
    q = st_fma_f32(q, r, 0x1.5558bp-5f);
    q = st_fma_f32(q, r, 0x1.555492p-3f);
    q = st_fma_f32(q, r, 0x1.fffffcp-2f);
    float less_one = st_fma_f32(r * r, q, r); /* e^r - 1 */
    float d = st_fma_f32(0.5f, a, 1.0f), t = 1.0f / d;
    float t_lost = st_fma_f32(-st_fma_f32(0.5f, a, 1.0f - d), t, st_fma_f32(-d, t, 1.0f));
    float u = t - 0.25f, c = 0x1.526b8ep-5f;
    c = st_fma_f32(c, u, -0x1.db19d4p-4f);
    c = st_fma_f32(c, u, 0x1.0b6dccp-4f);
    c = st_fma_f32(c, u, 0x1.b557d4p-4f);
    c = st_fma_f32(c, u, -0x1.5852ep-4f);
    c = st_fma_f32(c, u, -0x1.060f9p-3f);
    c = st_fma_f32(c, u, 0x1.50e712p-9f);
    c = st_fma_f32(c, u, 0x1.dde88cp-3f);
    c = st_fma_f32(c, u, 0x1.9f34fcp-2f);
    c = st_fma_f32(c, u, 0x1.c5f07ap-2f);
    float whole = st_fma_f32(c, u, 0x1.7c0348p-2f), whole_lost = st_fma_f32(c, u, 0x1.7c0348p-2f - whole);
    float w = t * whole, w_lost = st_fma_f32(t, whole_lost, st_fma_f32(t, whole, -w));
    w_lost = st_fma_f32(w, st_fma_f32(t, 0x1.41bap+0f, 1.0f) * t_lost, w_lost);
    float power = w + st_fma_f32(w, less_one, st_fma_f32(w_lost, less_one, w_lost));
    power = st_scale_f32(power, (int32_t)(st_bits_f32(shifted) - 0x4b400000u));
    power = st_from_bits_f32(st_pick_u32(vanishes, 0u, st_bits_f32(power)));
    float result = x < 0.0f ? 2.0f - power : power;
    return x == x ? result : x;
}

//! st_pow_f32 | needs st_bits_f64 st_from_bits_f64 st_bits_f32 st_from_bits_f32
/* x to the y within 0.51 ulp: 2^(y log2|x|) in double, rounded once, with the special cases of C99. A negative base gives NaN
   unless y is an integer, whose parity then sets the sign; x^0 and 1^y are 1 even for NaN. */
ST_FN float st_pow_f32(float x, float y) {
    /* log2|x|: exponent plus the series of atanh(s), s = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)). */
    double base = (double)st_from_bits_f32(st_bits_f32(x) & 0x7fffffffu);
    uint64_t bits = st_bits_f64(base);
    int32_t exponent = (int32_t)((uint32_t)(bits >> 32) - 0x3fe6a09eu) >> 20;
    double m = st_from_bits_f64(bits - ((uint64_t)(uint32_t)exponent << 52));
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double series = 0x1.71547652b82fep+1 / 17.0;
    series = series * z + 0x1.71547652b82fep+1 / 15.0;
    series = series * z + 0x1.71547652b82fep+1 / 13.0;
    series = series * z + 0x1.71547652b82fep+1 / 11.0;
    series = series * z + 0x1.71547652b82fep+1 / 9.0;
    series = series * z + 0x1.71547652b82fep+1 / 7.0;
    series = series * z + 0x1.71547652b82fep+1 / 5.0;
    series = series * z + 0x1.71547652b82fep+1 / 3.0;
    series = series * z + 0x1.71547652b82fep+1; /* 2 / ln(2) */
    double logarithm = (double)exponent + s * series;
    logarithm = base < st_from_bits_f64(0x7ff0000000000000u) ? logarithm : base;
    logarithm = base == 0.0 ? st_from_bits_f64(0xfff0000000000000u) : logarithm;
    /* 2^product; beyond +-200 the float is 0 or infinity. The comparison lets NaN through. */
    double ordinate = (double)y, product = logarithm * ordinate;
    product = logarithm == 0.0 ? 0.0 : product;
    product = ordinate == 0.0 ? 0.0 : product;
    uint64_t sign_bit = st_bits_f64(product) & 0x8000000000000000u;
    double limit = st_from_bits_f64(sign_bit | 0x4069000000000000u);
    product = st_from_bits_f64(st_bits_f64(product) ^ sign_bit) > 200.0 ? limit : product;
    double shifted = product + 0x1.8p52, r = product - (shifted - 0x1.8p52);
    double power = 0x1.b3de1e6c146fep-24;
    power = power * r + 0x1.63e6b89414a67p-20;
    power = power * r + 0x1.ffce2fd4addbdp-17;
    power = power * r + 0x1.430897d5d515ap-13;
    power = power * r + 0x1.5d87fd93868c8p-10;
    power = power * r + 0x1.3b2ab724210f3p-7;
    power = power * r + 0x1.c6b08d70c87b5p-5;
    power = power * r + 0x1.ebfbdff81bd83p-3;
    power = power * r + 0x1.62e42fefa37d2p-1;
    power = power * r + 1.0;
    power = power * st_from_bits_f64((st_bits_f64(shifted) << 52) + 0x3ff0000000000000u);
    /* Parity of y; floats from 2^24 up are even integers, and so counts infinity, but not NaN. */
    float magnitude = st_from_bits_f32(st_bits_f32(y) & 0x7fffffffu);
    magnitude = magnitude >= 0x1p24f ? 0.0f : magnitude;
    int32_t whole = (int32_t)(magnitude == magnitude ? magnitude : 0.0f);
    uint32_t fractional = (float)whole == magnitude ? 0u : 0xffffffffu;
    uint32_t negative = ((x < 0.0f) & (x > st_from_bits_f32(0xff800000u))) ? 0xffffffffu : 0u;
    uint32_t sign = st_bits_f32(x) & (uint32_t)whole << 31 & ~fractional;
    uint32_t result = st_bits_f32((float)power) | sign;
    return st_from_bits_f32((negative & fractional) != 0u ? 0x7fc00000u : result);
}

//! st_two_over_pi
/* Bits of 2 / pi: entry k holds the 32 bits that end at weight 2^-(8k - 1). */
ST_TABLE uint32_t st_two_over_pi[26] = {
    @TWO_OVER_PI@
};
//! st_quarter_turns_f32 | needs st_two_over_pi st_bits_f32
/* |x| * 2 / pi modulo 4 in fixed point with 62 fractional bits, right for every finite x: the mantissa is multiplied by those
   96 bits of 2 / pi that matter at its exponent, which a table lookup finds. Small x keep few bits here; see st_sin_f32. */
ST_FN uint64_t st_quarter_turns_f32(float x) {
    uint32_t bits = st_bits_f32(x) & 0x7fffffffu;
    int32_t place = (int32_t)(bits >> 23) - 119; /* of the window, counted in bits */
    place = place > 0 ? place : 0;
    uint64_t mantissa = (uint64_t)((bits & 0x7fffffu) | 0x800000u) << (place & 7);
    int32_t entry = place >> 3;
    uint64_t top = mantissa * st_two_over_pi[entry];
    uint64_t middle = mantissa * st_two_over_pi[entry + 4];
    uint64_t bottom = mantissa * st_two_over_pi[entry + 8];
    return (top << 32) + middle + (bottom >> 32);
}
//! st_remainder_of_turns
/* The distance of fixed-point quarter turns from the nearest whole one, in radians: a double in [-pi/4, pi/4]. In two halves,
   because few machines convert vectors of 64-bit integers. */
ST_FN double st_remainder_of_turns(uint64_t turns) {
    int32_t high = (int32_t)(uint32_t)(turns >> 30), low = (int32_t)((uint32_t)(turns << 2) >> 1);
    return ((double)high * 0x1p31 + (double)low) * 0x1.921fb54442d18p-63;
}
//! st_sin_of_turns
/* sin(quarter * pi / 2 + r) for |r| <= pi / 4, in double: errors 2^-33 and less, so that the float made of it is within
   0.51 ulp. */
ST_FN double st_sin_of_turns(uint32_t quarter, double r) {
    double s = r * r;
    double sine = 0x1.6cd1af2b5a03fp-19;
    sine = sine * s + -0x1.a00f7e0e31b52p-13;
    sine = sine * s + 0x1.111108690305ap-7;
    sine = sine * s + -0x1.5555554c6ff03p-3;
    sine = sine * s * r + r;
    double cosine = 0x1.99eb47b782b9ap-16;
    cosine = cosine * s + -0x1.6c0c32857cbbbp-10;
    cosine = cosine * s + 0x1.55554a0f87c84p-5;
    cosine = cosine * s + -0.5;
    cosine = cosine * s + 1.0;
    double value = (quarter & 1u) != 0u ? cosine : sine;
    return (quarter & 2u) != 0u ? -value : value;
}
//! st_sin_f32 | needs st_quarter_turns_f32 st_remainder_of_turns st_sin_of_turns st_abs_f32 st_bits_f32 st_from_bits_f32
/* Sine within 0.6 ulp for every finite x, without branches; NaN for infinities. Up to pi / 4 the argument is its own
   remainder, which keeps small ones accurate. */
ST_FN float st_sin_f32(float x) {
    uint64_t turns = st_quarter_turns_f32(x);
    int small = st_abs_f32(x) <= 0x1.921fb4p-1f;
    double r = small ? (double)st_abs_f32(x) : st_remainder_of_turns(turns);
    double value = st_sin_of_turns(small ? 0u : (uint32_t)((turns + 0x2000000000000000u) >> 62), r);
    value = st_bits_f32(x) >> 31 != 0u ? -value : value;
    return st_abs_f32(x) < st_from_bits_f32(0x7f800000u) ? (float)value : x - x;
}
//! st_cos_f32 | needs st_quarter_turns_f32 st_remainder_of_turns st_sin_of_turns st_abs_f32 st_from_bits_f32
/* Cosine within 0.6 ulp for every finite x, without branches; NaN for infinities. */
ST_FN float st_cos_f32(float x) {
    uint64_t turns = st_quarter_turns_f32(x);
    int small = st_abs_f32(x) <= 0x1.921fb4p-1f;
    double r = small ? (double)st_abs_f32(x) : st_remainder_of_turns(turns);
    double value = st_sin_of_turns(small ? 1u : (uint32_t)((turns + 0x2000000000000000u) >> 62) + 1u, r);
    return st_abs_f32(x) < st_from_bits_f32(0x7f800000u) ? (float)value : x - x;
}

//! st_exp_f64 | include math.h
ST_FN double st_exp_f64(double x) { return exp(x); }
//! st_exp2_f64 | include math.h
ST_FN double st_exp2_f64(double x) { return exp2(x); }
//! st_log_f64 | include math.h
ST_FN double st_log_f64(double x) { return log(x); }
//! st_log2_f64 | include math.h
ST_FN double st_log2_f64(double x) { return log2(x); }
//! st_tanh_f64 | include math.h
ST_FN double st_tanh_f64(double x) { return tanh(x); }
//! st_erf_f64 | include math.h
ST_FN double st_erf_f64(double x) { return erf(x); }
//! st_erfc_f64 | include math.h
ST_FN double st_erfc_f64(double x) { return erfc(x); }
//! st_sin_f64 | include math.h
ST_FN double st_sin_f64(double x) { return sin(x); }
//! st_cos_f64 | include math.h
ST_FN double st_cos_f64(double x) { return cos(x); }
//! st_pow_f64 | include math.h
ST_FN double st_pow_f64(double x, double y) { return pow(x, y); }
//! st_sigmoid_f64 | include math.h
/* 1 / (1 + e^-x), with the exponential of -|x| for the reasons given at st_sigmoid_f32. */
ST_FN double st_sigmoid_f64(double x) {
    double e = exp(-fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

//! u4x32_t | dialect c
/* Four 32-bit words: the state and the output of the counter-based generator. */
typedef struct { uint32_t v[4]; } u4x32_t;
//! u4x32_t | dialect cuda
/* Four 32-bit words: the state and the output of the counter-based generator. */
struct u4x32_t { uint32_t v[4]; };
//! st_threefry4x32 | needs u4x32_t
/* Threefry 4x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3; 2011): a keyed
   bijection of the counter, so any draw can be made at any time, in any order, by any thread. */
ST_FN u4x32_t st_threefry4x32(u4x32_t key, u4x32_t counter) {
    uint32_t k[5], a = counter.v[0], b = counter.v[1], c = counter.v[2], d = counter.v[3];
    k[0] = key.v[0];
    k[1] = key.v[1];
    k[2] = key.v[2];
    k[3] = key.v[3];
    k[4] = 0x1bd11bdau ^ k[0] ^ k[1] ^ k[2] ^ k[3];
    a += k[0];
    b += k[1];
    c += k[2];
    d += k[3];
#define ST_ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))
#define ST_ROUND(p, q) \
    a += b, b = ST_ROTATE(b, p) ^ a, c += d, d = ST_ROTATE(d, q) ^ c
#define ST_CROSS(p, q) \
    a += d, d = ST_ROTATE(d, p) ^ a, c += b, b = ST_ROTATE(b, q) ^ c
#define ST_INJECT(n) \
    a += k[(n) % 5], b += k[((n) + 1) % 5], c += k[((n) + 2) % 5], d += k[((n) + 3) % 5] + (n)
    ST_ROUND(10, 26), ST_CROSS(11, 21), ST_ROUND(13, 27), ST_CROSS(23, 5), ST_INJECT(1u);
    ST_ROUND(6, 20), ST_CROSS(17, 11), ST_ROUND(25, 10), ST_CROSS(18, 20), ST_INJECT(2u);
    ST_ROUND(10, 26), ST_CROSS(11, 21), ST_ROUND(13, 27), ST_CROSS(23, 5), ST_INJECT(3u);
    ST_ROUND(6, 20), ST_CROSS(17, 11), ST_ROUND(25, 10), ST_CROSS(18, 20), ST_INJECT(4u);
    ST_ROUND(10, 26), ST_CROSS(11, 21), ST_ROUND(13, 27), ST_CROSS(23, 5), ST_INJECT(5u);
#undef ST_ROTATE
#undef ST_ROUND
#undef ST_CROSS
#undef ST_INJECT
    u4x32_t result;
    result.v[0] = a;
    result.v[1] = b;
    result.v[2] = c;
    result.v[3] = d;
    return result;
}
//! st_threefry | needs st_threefry4x32
/* Four random words for one counter value of the stream that the two keys name. */
ST_FN u4x32_t st_threefry(uint32_t key0, uint32_t key1, uint64_t counter) {
    u4x32_t key, block;
    key.v[0] = key0;
    key.v[1] = key1;
    key.v[2] = key.v[3] = 0u;
    block.v[0] = (uint32_t)counter;
    block.v[1] = (uint32_t)(counter >> 32);
    block.v[2] = block.v[3] = 0u;
    return st_threefry4x32(key, block);
}
//! st_uniform_f32
/* Uniform in [0, 1): the upper 24 bits of a random word, each multiple of 2^-24 equally likely. */
ST_FN float st_uniform_f32(uint32_t word) { return (float)(int32_t)(word >> 8) * 0x1p-24f; }
//! st_uniform_f64
/* Uniform in [0, 1): 53 bits of two random words, each multiple of 2^-53 equally likely. */
ST_FN double st_uniform_f64(uint32_t high, uint32_t low) {
    return (double)(int64_t)(((uint64_t)high << 32 | low) >> 11) * 0x1p-53;
}
//! st_normal_f32 | needs st_log_f32 st_sqrt_f32 st_remainder_of_turns st_sin_of_turns
/* Standard normal by Box and Muller: sqrt(-2 log u) cos(2 pi v). u is in (0, 1], so no infinity, |result| <= 5.77; v is the
   second word as a fraction of a turn, whose top two bits are the quarter. */
ST_FN float st_normal_f32(uint32_t first, uint32_t second) {
    float u = (float)(int32_t)((first >> 8) + 1u) * 0x1p-24f;
    float radius = st_sqrt_f32(-2.0f * st_log_f32(u));
    uint64_t turns = (uint64_t)second << 32;
    uint32_t quarter = (uint32_t)((turns + 0x2000000000000000u) >> 62) + 1u;
    return radius * (float)st_sin_of_turns(quarter, st_remainder_of_turns(turns));
}
//! st_normal_f64 | needs st_uniform_f64 | include math.h
/* Standard normal by Box and Muller from four random words: sqrt(-2 log(1 - u)) cos(2 pi v), 1 - u in (0, 1]. */
ST_FN double st_normal_f64(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    double radius = sqrt(-2.0 * log(1.0 - st_uniform_f64(a, b)));
    return radius * cos(0x1.921fb54442d18p+2 * st_uniform_f64(c, d));
}

//! st_random_uniform_f32 | needs st_threefry st_uniform_f32
/* The uniform number of one counter value in the stream that the two keys name. */
ST_FN float st_random_uniform_f32(uint32_t key0, uint32_t key1, uint64_t counter) {
    u4x32_t words = st_threefry(key0, key1, counter);
    return st_uniform_f32(words.v[0]);
}
//! st_random_uniform_f64 | needs st_threefry st_uniform_f64
/* The uniform number of one counter value in the stream that the two keys name. */
ST_FN double st_random_uniform_f64(uint32_t key0, uint32_t key1, uint64_t counter) {
    u4x32_t words = st_threefry(key0, key1, counter);
    return st_uniform_f64(words.v[0], words.v[1]);
}
//! st_random_normal_f32 | needs st_threefry st_normal_f32
/* The standard normal number of one counter value in the stream that the two keys name. */
ST_FN float st_random_normal_f32(uint32_t key0, uint32_t key1, uint64_t counter) {
    u4x32_t words = st_threefry(key0, key1, counter);
    return st_normal_f32(words.v[0], words.v[1]);
}
//! st_random_normal_f64 | needs st_threefry st_normal_f64
/* The standard normal number of one counter value in the stream that the two keys name. */
ST_FN double st_random_normal_f64(uint32_t key0, uint32_t key1, uint64_t counter) {
    u4x32_t words = st_threefry(key0, key1, counter);
    return st_normal_f64(words.v[0], words.v[1], words.v[2], words.v[3]);
}

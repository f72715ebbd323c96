//! st_shuffle_down_f32
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN float st_shuffle_down_f32(float x, int lanes) { return __shfl_down_sync(0xffffffffu, x, lanes); }
//! st_shuffle_down_f64
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN double st_shuffle_down_f64(double x, int lanes) { return __shfl_down_sync(0xffffffffu, x, lanes); }
//! st_shuffle_down_i32
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN int32_t st_shuffle_down_i32(int32_t x, int lanes) { return __shfl_down_sync(0xffffffffu, x, lanes); }
//! st_shuffle_down_u32
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN uint32_t st_shuffle_down_u32(uint32_t x, int lanes) { return __shfl_down_sync(0xffffffffu, x, lanes); }
//! st_shuffle_down_i64
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN int64_t st_shuffle_down_i64(int64_t x, int lanes) {
    return (int64_t)__shfl_down_sync(0xffffffffu, (long long)x, lanes);
}
//! st_shuffle_down_u64
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN uint64_t st_shuffle_down_u64(uint64_t x, int lanes) {
    return (uint64_t)__shfl_down_sync(0xffffffffu, (unsigned long long)x, lanes);
}
//! st_shuffle_down_@S@ | for i8 u8 i16 u16
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN @T@ st_shuffle_down_@S@(@T@ x, int lanes) { return (@T@)__shfl_down_sync(0xffffffffu, (int)x, lanes); }
//! st_shuffle_down_bool
/* x of the thread `lanes` further on in the same warp; all 32 threads call it. */
ST_FN uint8_t st_shuffle_down_bool(uint8_t x, int lanes) { return (uint8_t)__shfl_down_sync(0xffffffffu, (int)x, lanes); }

//! st_load_f32x4
/* Four cells in one access; `from` is aligned to 16 bytes. */
ST_FN void st_load_f32x4(float *to, const float *from) {
    const float4 cells = *(const float4 *)from;
    to[0] = cells.x;
    to[1] = cells.y;
    to[2] = cells.z;
    to[3] = cells.w;
}
//! st_store_f32x4
/* Four cells in one access; `to` is aligned to 16 bytes. */
ST_FN void st_store_f32x4(float *to, const float *from) {
    float4 cells;
    cells.x = from[0];
    cells.y = from[1];
    cells.z = from[2];
    cells.w = from[3];
    *(float4 *)to = cells;
}
//! st_load_u16x8
/* Eight cells of 16 bits in one access; `from` is aligned to 16 bytes. */
ST_FN void st_load_u16x8(uint16_t *to, const uint16_t *from) {
    const uint4 words = *(const uint4 *)from;
    to[0] = (uint16_t)(words.x & 0xffffu);
    to[1] = (uint16_t)(words.x >> 16);
    to[2] = (uint16_t)(words.y & 0xffffu);
    to[3] = (uint16_t)(words.y >> 16);
    to[4] = (uint16_t)(words.z & 0xffffu);
    to[5] = (uint16_t)(words.z >> 16);
    to[6] = (uint16_t)(words.w & 0xffffu);
    to[7] = (uint16_t)(words.w >> 16);
}
//! st_store_u16x8
/* Eight cells of 16 bits in one access; `to` is aligned to 16 bytes. */
ST_FN void st_store_u16x8(uint16_t *to, const uint16_t *from) {
    uint4 words;
    words.x = from[0] | (uint32_t)from[1] << 16;
    words.y = from[2] | (uint32_t)from[3] << 16;
    words.z = from[4] | (uint32_t)from[5] << 16;
    words.w = from[6] | (uint32_t)from[7] << 16;
    *(uint4 *)to = words;
}

/* Models of the instructions of NVIDIA's GPUs that the kernels' text calls in place of inline PTX: matrix products, matrices from
   shared memory, asynchronous copies. Stands behind emulator.h. */

/* -- matrix instructions ------------------------------------------------------------------------------------------- */

/* mma.sync with f32 sums, from the fragment layouts of the PTX manual, for tiles 8 CELLS deep whose registers hold CELLS cells
   each. With g = lane / 4 and t = lane % 4, register r of a holds row g + 8 (r & 1), depths CELLS (t + 4 (r >> 1)) and on; register
   r of b depths CELLS (t + 4r) and on of column g; d rows g and g + 8, columns 2t and 2t + 1. Hardware sums in an order of its own;
   here products add up in double. */
template <int CELLS, typename LEFT, typename RIGHT>
ST_HOST void st_emulated_mma(float *d, const uint32_t *a, const uint32_t *b, LEFT left_value, RIGHT right_value) {
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]}, mask = 0xffffffffu >> (32 - 32 / CELLS);
    const int turn = st_exchange(words, (int)sizeof words);
    const int lane = st_thread % ST_WARP, warp = st_thread - lane;
    for (int k = 0; k < 4; k++) {
        const int row = lane / 4 + 8 * (k >> 1), column = 2 * (lane % 4) + (k & 1);
        double sum = (double)d[k];
        for (int depth = 0; depth < 8 * CELLS; depth++) {
            const int within = depth / CELLS % 4, high = depth / (4 * CELLS), shift = 32 / CELLS * (depth % CELLS);
            const struct st_slot *left = &st_slots[warp + 4 * (row % 8) + within];
            const struct st_slot *right = &st_slots[warp + 4 * column + within];
            const uint32_t x = left->words[turn][row / 8 + 2 * high] >> shift & mask;
            const uint32_t y = right->words[turn][4 + high] >> shift & mask;
            sum += (double)left_value(x) * (double)right_value(y);
        }
        d[k] = (float)sum;
    }
}
ST_HOST static float st_emulated_f16(uint32_t code) {
    const uint32_t sign = (code & 0x8000u) << 16, magnitude = code & 0x7fffu;
    if (magnitude >= 0x7c00u) return st_bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    const float value = st_bits_as<float>(magnitude << 13) * 0x1p112f;
    return st_bits_as<float>(st_bits_as<uint32_t>(value) | sign);
}
ST_HOST static float st_emulated_bf16(uint32_t code) { return st_bits_as<float>(code << 16); }
ST_HOST static float st_emulated_e5m2(uint32_t code) { return st_emulated_f16(code << 8); }
ST_HOST static float st_emulated_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    if (magnitude == 0x7fu) return st_bits_as<float>(sign | 0x7fc00000u);
    const float value = st_bits_as<float>(magnitude << 20) * 0x1p120f;
    return st_bits_as<float>(st_bits_as<uint32_t>(value) | sign);
}
/* Bits below the ten of tf32's mantissa do not count. */
ST_HOST static float st_emulated_from_tf32(uint32_t bits) { return st_bits_as<float>(bits & ~0x1fffu); }
/* cvt.rna.tf32.f32 */
ST_HOST static uint32_t st_emulated_tf32(float x) {
    const uint32_t bits = st_bits_as<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}

/* ldmatrix.x4: every row is checked as a read of its own by the thread that names it. */
ST_HOST static int st_emulated_rows(const uint16_t *row, void *code) {
    st_access_vector(row, 0, code);
    return st_exchange(&row, (int)sizeof row);
}
ST_HOST static const uint16_t *st_row_named(int thread, int turn) {
    const uint16_t *cells;
    __builtin_memcpy(&cells, st_slots[thread].words[turn], sizeof cells);
    return cells;
}
ST_HOST static void st_emulated_ldmatrix(uint32_t *fragment, const uint16_t *row) {
    const int turn = st_emulated_rows(row, __builtin_return_address(0));
    const int lane = st_thread % ST_WARP, warp = st_thread - lane;
    for (int matrix = 0; matrix < 4; matrix++) {
        const uint16_t *cells = st_row_named(warp + 8 * matrix + lane / 4, turn) + 2 * (lane % 4);
        fragment[matrix] = cells[0] | (uint32_t)cells[1] << 16;
    }
}
ST_HOST static void st_emulated_ldmatrix_trans(uint32_t *fragment, const uint16_t *row) {
    const int turn = st_emulated_rows(row, __builtin_return_address(0));
    const int lane = st_thread % ST_WARP, warp = st_thread - lane;
    for (int matrix = 0; matrix < 4; matrix++) {
        const int first = warp + 8 * matrix + 2 * (lane % 4);
        fragment[matrix] = st_row_named(first, turn)[lane / 4] | (uint32_t)st_row_named(first + 1, turn)[lane / 4] << 16;
    }
}

/* -- asynchronous copies: they land at the wait, and what they write counts as unwritten until then ------------------- */

ST_HOST static void st_unwrite(char *address, int bytes) {
    for (int k = 0; k < st_region_count; k++) {
        const struct st_region *region = &st_regions[k];
        const ptrdiff_t offset = address - region->base;
        if (offset < 0 || offset >= region->cells * region->cell) continue;
        for (int64_t cell = offset / region->cell; cell <= (offset + bytes - 1) / region->cell; cell++)
            region->shadow[cell].written = 0;
    }
}
ST_HOST static void st_emulated_copy(uint16_t *to, const uint16_t *from, int present) {
    struct st_queue *queue = &st_queues[st_thread];
    void *code = __builtin_return_address(0);
    if (queue->count == ST_MOST_COPIES) st_found(ST_CROWDED, 1, 16, 0, 0, code);
    if (present) st_access_vector(from, 0, code);
    st_access_vector(to, 1, code);
    st_unwrite((char *)to, 16);
    queue->copies[queue->count++] = st_copy{to, from, present, queue->group};
}
ST_HOST static void st_emulated_commit(void) { st_queues[st_thread].group++; }
ST_HOST static void st_emulated_wait(int pending) {
    struct st_queue *queue = &st_queues[st_thread];
    int left = 0;
    for (int k = 0; k < queue->count; k++) {
        struct st_copy copy = queue->copies[k];
        if (copy.group >= queue->group - pending) {
            queue->copies[left++] = copy;
            continue;
        }
        st_access((char *)copy.to, 16, 1, __builtin_return_address(0));
        if (copy.present) __builtin_memcpy(copy.to, copy.from, 16);
        else __builtin_memset(copy.to, 0, 16);
    }
    queue->count = left;
}

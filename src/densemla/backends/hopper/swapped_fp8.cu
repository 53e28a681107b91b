// fp8 caches in decode_swapped.cu: cache rows become f16, which holds every e4m3, on their way into registers, from where
// both products take them.
//
// A box has 64 bytes a row, so TMA swizzles by 64 bytes. Columns of a product are in the order in which a thread has them
// at hand; the query tile and the output follow that order.

// Bases lie so far (log2) below the maxima that they follow: under one token with nearly all of the weight the others
// together may have most of the value, and f16 loses what is below 2^-24. The largest weight is still finite in it.
constexpr float LIFT = 13.0f;
static_assert(SLACK + LIFT < 16.0f);

// A operands of a box: of 16 columns each for scores, of 16 tokens each for values.
using Fragments = u32[4][4];

__device__ __forceinline__ u32 place_in_box(u32 box, int row, int unit) {
    return box + row * 64 + ((unit ^ (row >> 1 & 3)) << 4);
}

__device__ __forceinline__ u32 pack_weights(float low, float high) { return pack_half(low, high); }

// The query tile in f16, a warp for each row. Thread c of four reads columns [16 c, 16 c + 16) of a box of the cache at
// once, four of them for each of four products: that is the order of the columns here. bf16 queries are scaled by a power
// of two to at most 2^15, so that what f16 loses of them is below 2^-40 of the row's largest element.
__device__ __forceinline__ void load_query_tile(const Params& p, Tile& t, u32 q, int thread, int threads) {
    constexpr int UNITS = BOXES * 8, LANE_UNITS = (UNITS + 31) / 32;  // of 8 columns
    const int lane = thread & 31;
    for (int n = thread >> 5; n < TILE_N; n += threads >> 5) {
        const int2 row = t.row[n];
        uint4 of[LANE_UNITS];  // f16
#pragma unroll
        for (int i = 0; i < LANE_UNITS; ++i) {
            of[i] = make_uint4(0, 0, 0, 0);
            if (row.x < 0 || lane + 32 * i >= UNITS) continue;
            const char* from = query_at(p, row, 8 * (lane + 32 * i));
#if Q_FP8
            const uint2 narrow = *(const uint2*)from, low = widen_to_half(narrow.x), high = widen_to_half(narrow.y);
            of[i] = make_uint4(low.x, low.y, high.x, high.y);
#else
            of[i] = *(const uint4*)from;
#endif
        }
        float down = 1.0f;
#if !Q_FP8
        u32 most = 0;  // bits of the largest magnitude
#pragma unroll
        for (int i = 0; i < LANE_UNITS; ++i) most = max(most, largest_magnitude(of[i]));
        const int exponent = __reduce_max_sync(~0u, (int)most) >> 7, shift = min(127 + 14 - exponent, 100);
        const float up = __int_as_float((127 + shift) << 23);
        down = __int_as_float((127 - shift) << 23);
#pragma unroll
        for (int i = 0; i < LANE_UNITS; ++i)
            of[i] = make_uint4(half_pair(of[i].x, up), half_pair(of[i].y, up), half_pair(of[i].z, up), half_pair(of[i].w, up));
#endif
        if (lane == 0) t.row_scale[n] = score_scale(p, t) * down;
#pragma unroll
        for (int i = 0; i < LANE_UNITS; ++i) {
            const int unit = lane + 32 * i, eighth = unit & 7;
            if (unit >= UNITS) continue;
            const u32 to = q + (unit >> 3) * P_BYTES + n * 128 + (eighth >> 1) * 4;
            const int first = 4 * (eighth & 1);
            store_word(to + ((first ^ (n & 7)) << 4), of[i].x);
            store_word(to + ((first + 1 ^ (n & 7)) << 4), of[i].y);
            store_word(to + ((first + 2 ^ (n & 7)) << 4), of[i].z);
            store_word(to + ((first + 3 ^ (n & 7)) << 4), of[i].w);
        }
    }
    proxy_fence();
}

// Rows 16 warp to 16 warp + 15 of a box, by columns.
__device__ __forceinline__ void read_rows(u32 (&raw)[8], u32 box, int warp, int lane) {
    const u32 from = place_in_box(box, 16 * warp + (lane >> 2), lane & 3);
    const uint4 first = load_16(from), second = load_16(from + 8 * 64);
    raw[0] = first.x, raw[1] = first.y, raw[2] = first.z, raw[3] = first.w;
    raw[4] = second.x, raw[5] = second.y, raw[6] = second.z, raw[7] = second.w;
}

__device__ __forceinline__ void widen_rows(Fragments& a, const u32 (&raw)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint2 first = widen_to_half(raw[i]), second = widen_to_half(raw[4 + i]);
        a[i][0] = first.x, a[i][1] = second.x, a[i][2] = first.y, a[i][3] = second.y;
    }
}

// Columns 16 warp to 16 warp + 15 of a box, by rows: a thread gets two neighbouring columns.
__device__ __forceinline__ void read_columns(u32 (&raw)[8], u32 box, int warp, int lane) {
    const u32 from = place_in_box(box, lane, warp);
    load_matrices(raw, from);
    load_matrices(raw + 4, from + 32 * 64);
}

__device__ __forceinline__ void widen_columns(Fragments& a, const u32 (&raw)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint2 pair = widen_to_half(regroup(raw[i]));
        a[i >> 1][2 * (i & 1)] = pair.x, a[i >> 1][2 * (i & 1) + 1] = pair.y;
    }
}

struct Scores {
    Fragments a[2];

    __device__ __forceinline__ static constexpr float scale(const Params&, const Tile&) { return 1.0f; }

    // Into log2 units: each row of the query tile has a scale of its own.
    __device__ __forceinline__ static void finish(float (&acc)[TILE_N / 2], const Tile& t, int lane) {
#pragma unroll
        for (int j = 0; j < TILE_N / 8; ++j) {
            const float2 by = *(const float2*)&t.row_scale[8 * j + 2 * (lane & 3)];
            acc[4 * j] *= by.x, acc[4 * j + 1] *= by.y, acc[4 * j + 2] *= by.x, acc[4 * j + 3] *= by.y;
        }
    }

    // Products of boxes [FROM, TO) of a chunk with the queries.
    template <int FROM, int TO>
    __device__ __forceinline__ void add(Shared& s, float (&acc)[TILE_N / 2], u32 q, u32 ring, Boxes at) {
        const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
#pragma unroll
        for (int position = FROM; position < TO; ++position) {
            const Boxes box = at.at(position);
            u32 raw[8];
            barrier_wait(shared_address(&s.full[box.slot]), box.phase);
            read_rows(raw, ring + box.slot * BOX_BYTES, warp, lane);
            mma_wait<1>();  // of what was read two boxes before
            widen_rows(a[position & 1], raw);
            pin(a[position & 1]);
            mma_fence();
            const u64 queries = operand(q + box_at(position) * P_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_scores(acc, a[position & 1][k], queries + 2 * k, position + k > 0);
            mma_commit();
        }
    }
};

// Adds the values of a chunk to half of the output columns, 4 boxes of 64. A box is read, if the ring has it, before the
// box before is multiplied: the first one before the weights are there.
template <int GROUP>
struct Values {
    Fragments a[2];

    template <int T>
    __device__ __forceinline__ void take(Shared& s, u32 ring, Boxes at, bool edge) {
        const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
        const Boxes box = at.at(position_of(GROUP, T));
        u32 raw[8];
        barrier_wait(shared_address(&s.full[box.slot]), box.phase);
        read_columns(raw, ring + box.slot * BOX_BYTES, warp, lane);
        // NaN would reach the queries that do not see it; those that do have it in their scores.
        if (edge) {
#pragma unroll
            for (int i = 0; i < 8; ++i) raw[i] = without_nan(raw[i]);
        }
        if (T > 0) mma_wait<1>();  // of what was read two boxes before
        widen_columns(a[T & 1], raw);
    }

    template <int T>
    __device__ __forceinline__ void multiply(Shared& s, float (&acc)[4][TILE_N / 2], u64 weights, Boxes at) {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) release(s, at.at(position_of(GROUP, T)).slot);
        pin(a[T & 1]);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_values(acc[T], a[T & 1][k], weights + 2 * k, 1);
        mma_commit();
    }

    __device__ __forceinline__ void begin(Shared& s, u32 ring, Boxes at, bool edge) { take<0>(s, ring, at, edge); }

    __device__ __forceinline__ void add(Shared& s, float (&acc)[4][TILE_N / 2], u32 weights, u32 ring, Boxes at, bool edge) {
        const u64 columns = operand(weights);
        multiply<0>(s, acc, columns, at);
        take<1>(s, ring, at, edge);
        multiply<1>(s, acc, columns, at);
        take<2>(s, ring, at, edge);
        multiply<2>(s, acc, columns, at);
        take<3>(s, ring, at, edge);
        multiply<3>(s, acc, columns, at);
        mma_wait<0>();
    }
};

// Output column, within a box, of element i of a thread's accumulator.
__device__ __forceinline__ int column_of(int warp, int lane, int i) { return 16 * warp + 2 * (lane >> 2) + (i >> 1 & 1); }

// An accumulator [64, TILE_N] as rows of 64 bf16, swizzled.
__device__ __forceinline__ void stage(u32 buffer, const float (&acc)[TILE_N / 2], int warp, int lane) {
#pragma unroll
    for (int i = 0; i < TILE_N / 4; ++i) {
        const int n = 8 * (i >> 1) + 2 * (lane & 3) + (i & 1), at = 4 * (i >> 1) + (i & 1);
        store_word(buffer + n * 128 + ((2 * warp + (lane >> 4) ^ (n & 7)) << 4) + (lane >> 2 & 3) * 4,
                   pack(acc[at], acc[at + 2]));
    }
}

// bf16 caches in decode_swapped.cu: both products take cache rows from the ring, as TMA has put them there.

constexpr float LIFT = 0.0f;  // bf16 weights are as exact at any magnitude

__device__ __forceinline__ u32 pack_weights(float low, float high) { return pack(low, high); }

__device__ __forceinline__ void load_query_tile(const Params& p, Tile& t, u32 q, int thread, int threads) {
    load_queries<BOXES>(p, t, q, thread, threads);
}

struct Scores {
    // What turns finished scores into log2 units.
    __device__ __forceinline__ static float scale(const Params& p, const Tile& t) { return score_scale(p, t); }

    __device__ __forceinline__ static void finish(float (&acc)[TILE_N / 2], const Tile&, int) {}

    // Products of boxes [FROM, TO) of a chunk with the queries.
    template <int FROM, int TO>
    __device__ __forceinline__ void add(Shared& s, float (&acc)[TILE_N / 2], u32 q, u32 ring, Boxes at) {
#pragma unroll
        for (int position = FROM; position < TO; ++position) {
            const Boxes box = at.at(position);
            barrier_wait(shared_address(&s.full[box.slot]), box.phase);
            mma_fence();
            const u64 rows = operand(ring + box.slot * BOX_BYTES);
            const u64 queries = operand(q + box_at(position) * P_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_scores(acc, rows + 2 * k, queries + 2 * k, position + k > 0);
        }
        mma_commit();
    }
};

// Adds the values of a chunk to half of the output columns, 4 boxes of 64.
template <int GROUP>
struct Values {
    __device__ __forceinline__ void begin(Shared&, u32, Boxes, bool) {}

    __device__ __forceinline__ void add(Shared& s, float (&acc)[4][TILE_N / 2], u32 weights, u32 ring, Boxes at, bool) {
        const int lane = threadIdx.x & 31;
        const u64 columns = operand(weights);
        mma_fence();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const u64 values = operand(ring + at.at(position_of(GROUP, t)).slot * BOX_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_values(acc[t], values + k * (2048 >> 4), columns + 2 * k, 1);
            mma_commit();
        }
#define RELEASE(T)     \
    mma_wait<3 - T>(); \
    if (lane == 0) release(s, at.at(position_of(GROUP, T)).slot);
        RELEASE(0)
        RELEASE(1)
        RELEASE(2)
        RELEASE(3)
#undef RELEASE
    }
};

// Output column, within a box, of element i of a thread's accumulator.
__device__ __forceinline__ int column_of(int warp, int lane, int i) { return 16 * warp + (lane >> 2) + 4 * (i & 2); }

// An accumulator [64, TILE_N] as rows of 64 bf16, swizzled.
__device__ __forceinline__ void stage(u32 buffer, const float (&acc)[TILE_N / 2], int warp, int lane) {
    store_transposed<pack>(buffer, acc, warp, lane);
}

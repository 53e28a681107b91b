// One block decodes one tile of query rows of one request over one split of its cache, for sm_90a.
//
// Operands are swapped: scores are S^T = K Q^T with M = 64 cache rows and N = query rows, the output is
// O^T = V^T P^T with M = 64 latent columns, so a tile holds any multiple of 8 query rows without padding
// to 64. source.py prefixes TILE_N, SLOTS, MOST_EARLY, P_BUFFERS, PARTIAL_F32, MISC_BYTES, the register
// budgets and the two wgmma wrappers of that width, then primitives.cu and tile.cu.
//
// Four warpgroups: 0 and 1 accumulate 256 latent columns each, 2 does scores and softmax, 3 feeds the ring.
// A ring slot is 64 cache rows x 64 columns, one TMA box with 128-byte swizzle.

constexpr int FEEDERS = 4;  // warps that issue loads: issuing keeps one busy for most of a box's time
// Boxes of the next chunk whose products run under the softmax of this one: what the ring holds besides
// the values of two chunks.
constexpr int EARLY = SLOTS - 16 < 0 ? 0 : SLOTS - 16 > MOST_EARLY ? MOST_EARLY : SLOTS - 16;

struct Shared {
    u64 full[SLOTS], empty[SLOTS];
    u64 p_ready[P_BUFFERS], p_free[P_BUFFERS];
    Tile tile;
    Reduction reduction;
    float inverse[TILE_N];  // 1 / sum of the weights
    Factors factors[P_BUFFERS];
};

using Boxes = Ring<SLOTS>;

// Loading order within a chunk: the rope box, then the two accumulating warpgroups' boxes in turn, so that slots become
// free in about the order in which they are filled.
__device__ __forceinline__ constexpr int position_of(int group, int box) { return 1 + 2 * box + group; }
__device__ __forceinline__ constexpr int box_at(int position) {
    return position == 0 ? BOXES - 1 : (position - 1) / 2 + 4 * ((position - 1) & 1);
}

// Loads every FEEDERS-th box, beginning with number `feeder`.
__device__ __forceinline__ void feed(const Params& p, const TensorMap* map, Shared& s, u32 ring, int feeder, int lane) {
    Pages pages(p, s.tile);
    Boxes at;
    at.advance(feeder);
    int position = feeder;
    for (int chunk = s.tile.begin; chunk < s.tile.end;) {
        const int first = pages.find(p, chunk, lane);
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
        pages.load(p, map, chunk, first, ring + at.slot * BOX_BYTES, box_at(position) * 64,
                   shared_address(&s.full[at.slot]), lane);
        at.advance(FEEDERS);
        position += FEEDERS;
        if (position >= BOXES) {
            position -= BOXES;
            ++chunk;
        }
    }
}

// Products of boxes [FROM, TO) of a chunk with the queries.
template <int FROM, int TO>
__device__ __forceinline__ void add_scores(Shared& s, float (&acc)[TILE_N / 2], u32 q, u32 ring, Boxes at) {
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

// Scores and softmax: warpgroup 2.
__device__ __forceinline__ void score(const Params& p, Shared& s, u32 q, u32 weights, u32 ring, int split) {
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    Softmax<2> softmax;
    softmax.begin(s.reduction, warp, lane);
    Boxes at;
    Ring<P_BUFFERS> buffer;
    float next[TILE_N / 2];
    if (EARLY > 0) add_scores<0, EARLY>(s, next, q, ring, at);
    for (int chunk = s.tile.begin; chunk < s.tile.end; ++chunk) {
        add_scores<EARLY, BOXES>(s, next, q, ring, at);
        mma_wait<0>();
        pin(next);
        if (lane == 0) barrier_arrive(shared_address(&s.empty[at.slot]));  // the rope box serves the scores alone
        float acc[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) acc[i] = next[i];
        if (EARLY > 0 && chunk + 1 < s.tile.end) add_scores<0, EARLY>(s, next, q, ring, at.at(BOXES));
        const bool edge = chunk * CHUNK > s.tile.min_visible - CHUNK;
        if (edge) hide_unseen(s.tile, acc, chunk, warp, lane);
        softmax.rebase(s.reduction, acc, p.score_scale, warp, lane);
        softmax.weigh(acc, p.score_scale);
        barrier_wait(shared_address(&s.p_free[buffer.slot]), buffer.phase ^ 1);
        store_transposed(weights + buffer.slot * P_BYTES, acc, warp, lane);
        if (warp == 0) softmax.publish(s.factors[buffer.slot], lane);
        if (edge)
            for (int position = 1; position < BOXES; ++position)
                clean_box(s.tile, chunk, ring + at.at(position).slot * BOX_BYTES, thread);
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.p_ready[buffer.slot]));
        at.advance(BOXES);
        buffer.advance(1);
    }
    group_sync<2, 128>();  // every warp has read the last maxima, which the sums replace
    softmax.gather(s.reduction, warp, lane);
    group_sync<2, 128>();
    if (warp == 0) {
        const Reduction& r = s.reduction;
        for (int n = lane; n < TILE_N; n += 32) {
            const float sum = (r.peer[0][n] + r.peer[1][n]) + (r.peer[2][n] + r.peer[3][n]);
            s.inverse[n] = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (s.tile.row[n].x >= 0) write_lse(p, s.tile, s.tile.row[n], r.top[0][n], sum, split);
        }
    }
    group_sync<3, 384>();
}

// Output columns [256 * group, 256 * group + 256): warpgroups 0 and 1.
template <int group>
__device__ __forceinline__ void accumulate(const Params& p, Shared& s, u32 q, u32 weights, u32 ring, int split) {
    const int lane = threadIdx.x & 31;
    float acc[4][TILE_N / 2];
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) acc[t][i] = 0.0f;
    Boxes at;
    Ring<P_BUFFERS> buffer;
    for (int chunk = s.tile.begin; chunk < s.tile.end; ++chunk) {
        barrier_wait(shared_address(&s.p_ready[buffer.slot]), buffer.phase);
        const Factors& factors = s.factors[buffer.slot];
        if (factors.changed) {
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j) scale_rows(acc, j, *(const float2*)&factors.scale[8 * j + 2 * (lane & 3)]);
        }
        const u64 columns = operand(weights + buffer.slot * P_BYTES);
        mma_fence();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const u64 values = operand(ring + at.at(position_of(group, t)).slot * BOX_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_values(acc[t], values + k * (2048 >> 4), columns + 2 * k, 1);
            mma_commit();
        }
#define RELEASE(T)     \
    mma_wait<3 - T>(); \
    if (lane == 0) barrier_arrive(shared_address(&s.empty[at.at(position_of(group, T)).slot]));
        RELEASE(0)
        RELEASE(1)
        RELEASE(2)
        RELEASE(3)
#undef RELEASE
#pragma unroll
        for (int t = 0; t < 4; ++t) pin(acc[t]);
        if (lane == 0) barrier_arrive(shared_address(&s.p_free[buffer.slot]));
        at.advance(BOXES);
        buffer.advance(1);
    }
    group_sync<3, 384>();  // the sums are there, and the query tile is free to stage the output
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) scale_rows(acc, j, *(const float2*)&s.inverse[8 * j + 2 * (lane & 3)]);
    const u32 room = max(TILE_N * STAGE_PITCH * 4 * PARTIAL_F32, 4 * P_BYTES);
    store_output(p, s.tile, acc, q + group * room, group * 256, split, group);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    decode(const __grid_constant__ TensorMap map, const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const u32 q = shared_address(memory);
    const u32 weights = q + BOXES * P_BYTES;
    const u32 ring = weights + P_BUFFERS * P_BYTES;
    Shared& s = *(Shared*)(memory + (ring + SLOTS * BOX_BYTES - q));
    static_assert(sizeof(Shared) <= MISC_BYTES);
    // Through a shuffle, so that the compiler knows that a warp takes one branch.
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int split = blockIdx.x % p.splits;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (warp == 0) locate(p, s.tile, lane);
    if (warp == 1) {
        for (int i = lane; i < SLOTS; i += 32) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), 4);
        }
        if (lane < P_BUFFERS) {
            barrier_init(shared_address(&s.p_ready[lane]), 4);
            barrier_init(shared_address(&s.p_free[lane]), 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (s.tile.request < 0 || s.tile.begin >= s.tile.end) {
        if (s.tile.request >= 0) publish_nothing(p, s.tile, split);
        if (warp == 13) clear_unclaimed(p, lane);
        return;
    }
    if (warp < 12) {
        load_queries<BOXES>(p, s.tile, q, threadIdx.x, 384);
        group_sync<1, 384>();
    }
    if (warp < 4) {
        grow_registers();
        accumulate<0>(p, s, q, weights, ring, split);
    } else if (warp < 8) {
        grow_registers();
        accumulate<1>(p, s, q, weights, ring, split);
    } else if (warp < 12) {
        score_registers();
        score(p, s, q, weights, ring, split);
    } else {
        shrink_registers();
        feed(p, &map, s, ring, warp - 12, lane);
        if (warp == 13) clear_unclaimed(p, lane);
    }
}

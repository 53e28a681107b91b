// Two blocks of a cluster decode one tile of query rows over one split of its cache, for sm_90a.
//
// Each block holds half of the columns: 256 latent and 32 rope columns of the cache and the queries, and 256
// columns of the output. So the cache goes once into one multiprocessor's shared memory, half of it into each,
// and a tile of 96 or 128 rows fits the registers. Scores are sums over both halves: a block sends the other
// one its share of the scores of half of the rows, does the softmax of its own half, and sends those weights.
// Rows are in the order of the block: its own first.
//
// Operands are swapped as in decode.cu; source.py prefixes about the same, with ROPE_SLOTS, and mma_scores is ROWS wide.
// Four warpgroups: 0 and 1 accumulate 128 latent columns each, 2 does scores and softmax, 3 feeds the rings.

constexpr int BOXES = 4;  // 64-column boxes of a block's half
constexpr int ROPE_BOX_BYTES = CHUNK * 64;
constexpr int Q_SUBTILE_BYTES = TILE_N * 128;
constexpr int LANDING_BYTES = CHUNK * ROWS * 4;
constexpr int HALF_P_BYTES = ROWS * 128;
static_assert(SLOTS >= 2 * BOXES && ROPE_SLOTS >= 2);

struct Shared {
    u64 full[SLOTS], empty[SLOTS];
    u64 rope_full[ROPE_SLOTS], rope_empty[ROPE_SLOTS];
    u64 landed[2];                // the other block's share of the scores is here
    u64 p_ready[2], p_free[2];    // ready: both halves of the weights; free: in both blocks
    u64 sums_ready;
    Tile tile;
    Reduction reduction;
    alignas(16) float inverse[TILE_N];  // 1 / sum of the weights
    Factors factors[2][2];              // by buffer; own rows, then the others
};

using Boxes = Ring<SLOTS>;
using RopeBoxes = Ring<ROPE_SLOTS>;

struct Memory {
    u32 q, q_rope, weights, landing, ring, rope_ring;
};

__device__ __forceinline__ void feed(const Params& p, const TensorMap* map, const TensorMap* rope_map, Shared& s,
                                     const Memory& m, int feeder, int lane) {
    Pages pages(p, s.tile);
    const int rank = cluster_rank();
    Boxes at;
    RopeBoxes rope;
    at.advance(feeder);
    for (int chunk = s.tile.begin; chunk < s.tile.end; ++chunk) {
        const int first = pages.find(p, chunk, lane);
        // The four warps take turns with the rope box.
        if ((chunk & 3) == feeder) {
            barrier_wait(shared_address(&s.rope_empty[rope.slot]), rope.phase ^ 1);
            pages.load(p, rope_map, chunk, first, m.rope_ring + rope.slot * ROPE_BOX_BYTES, 64, RANK + 32 * rank,
                       shared_address(&s.rope_full[rope.slot]), lane);
        }
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
        pages.load(p, map, chunk, first, m.ring + at.slot * BOX_BYTES, 128, 256 * rank + 64 * feeder,
                   shared_address(&s.full[at.slot]), lane);
        at.advance(BOXES);
        rope.advance(1);
    }
}

// Begins the products of a chunk with ROWS query rows from `first` on.
__device__ __forceinline__ void multiply_scores(Shared& s, float (&acc)[ROWS / 2], const Memory& m, Boxes at,
                                                RopeBoxes rope, int first) {
    barrier_wait(shared_address(&s.rope_full[rope.slot]), rope.phase);
    mma_fence();
    {
        const u64 rows = narrow_operand(m.rope_ring + rope.slot * ROPE_BOX_BYTES);
        const u64 queries = narrow_operand(m.q_rope + first * 64);
#pragma unroll
        for (int k = 0; k < 2; ++k) mma_scores(acc, rows + 2 * k, queries + 2 * k, k > 0);
    }
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        const Boxes box = at.at(i);
        barrier_wait(shared_address(&s.full[box.slot]), box.phase);
        mma_fence();
        const u64 rows = operand(m.ring + box.slot * BOX_BYTES);
        const u64 queries = operand(m.q + i * Q_SUBTILE_BYTES + first * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_scores(acc, rows + 2 * k, queries + 2 * k, 1);
    }
    mma_commit();
}

// Scores and softmax: warpgroup 2.
struct Scorer {
    Softmax<2> softmax;
    Boxes at;
    RopeBoxes rope;
    Ring<2> buffer;
    float part[ROWS / 2];  // this block's share of some scores

    __device__ __forceinline__ void finish_products() {
        mma_wait<0>();
        pin(part);
    }

    __device__ __forceinline__ void release_rope(Shared& s) {
        if ((threadIdx.x & 31) == 0) barrier_arrive(shared_address(&s.rope_empty[rope.slot]));
        rope.advance(1);
    }

    // One chunk. The other block's rows come first: its share of ours is on the way while ours are multiplied.
    __device__ __forceinline__ void step(const Params& p, Shared& s, const Memory& m, int chunk) {
        const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
        const u32 other = cluster_rank() ^ 1;
        const u32 landing = m.landing + buffer.slot * LANDING_BYTES + thread * 16;
        const u32 landed = shared_address(&s.landed[buffer.slot]);
        const u32 landing_there = in_block(landing, other), landed_there = in_block(landed, other);
        multiply_scores(s, part, m, at, rope, ROWS);
        finish_products();
        // The other block has read this landing place: it sent the chunk that has landed since after that.
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const float* give = part + 4 * i;
            remote_store(landing_there + i * 2048, give[0], give[1], give[2], give[3], landed_there);
        }
        multiply_scores(s, part, m, at, rope, 0);
        finish_products();
        release_rope(s);
        float acc[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) acc[i] = part[i];
        if (thread == 0) barrier_expect(landed, LANDING_BYTES);
        barrier_wait(landed, buffer.phase);
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const float4 share = load_floats(landing + i * 2048);
            acc[4 * i] += share.x;
            acc[4 * i + 1] += share.y;
            acc[4 * i + 2] += share.z;
            acc[4 * i + 3] += share.w;
        }
        const bool edge = chunk * CHUNK > s.tile.min_visible - CHUNK;
        if (edge) hide_unseen(s.tile, acc, chunk, warp, lane);
        softmax.rebase(s.reduction, acc, p.score_scale, warp, lane);
        softmax.weigh(acc, p.score_scale);
        barrier_wait(shared_address(&s.p_free[buffer.slot]), buffer.phase ^ 1);
        const u32 own = m.weights + buffer.slot * P_BYTES;
        store_transposed(own, acc, warp, lane);
        if (edge)
            for (int i = 0; i < BOXES; ++i) clean_box(s.tile, chunk, m.ring + at.at(i).slot * BOX_BYTES, thread);
        const u32 ready = shared_address(&s.p_ready[buffer.slot]), ready_there = in_block(ready, other);
        Factors(&factors)[2] = s.factors[buffer.slot];
        if (warp == 0) {
            softmax.publish(factors[0], lane);
            softmax.publish_there(in_block(shared_address(&factors[1]), other), ready_there, lane);
        }
        proxy_fence();
        group_sync<2, 128>();
        if (thread == 0) barrier_expect(ready, HALF_P_BYTES + PUBLISHED_BYTES);
        const u32 there = in_block(own + HALF_P_BYTES, other);
#pragma unroll
        for (int i = 0; i < (ROWS + 15) / 16; ++i) {
            const u32 offset = (i * 128 + thread) * 16;
            if (offset < HALF_P_BYTES) remote_store(there + offset, load_16(own + offset), ready_there);
        }
        at.advance(BOXES);
        buffer.advance(1);
    }
};

__device__ __forceinline__ void score(const Params& p, Shared& s, const Memory& m, int split) {
    const int warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31;
    Scorer scorer;
    scorer.softmax.begin(s.reduction, warp, lane);
    // The last chunk apart: the form in which this kernel was measured and tested.
    int chunk = s.tile.begin;
    for (const int last = s.tile.end - 1; chunk < last; ++chunk) scorer.step(p, s, m, chunk);
    scorer.step(p, s, m, chunk);
    scorer.softmax.gather(s.reduction, warp, lane);
    group_sync<2, 128>();
    if (warp == 0) {
        finish_rows(p, s.tile, s.reduction, s.inverse, split, lane);
        const u32 other = cluster_rank() ^ 1, sums = shared_address(&s.sums_ready);
        if (lane == 0) barrier_expect(sums, ROWS * 4);
        __syncwarp();
        for (int n = lane; n < ROWS; n += 32)
            remote_store(in_block(shared_address(&s.inverse[ROWS + n]), other), s.inverse[n], in_block(sums, other));
    }
    group_sync<3, 384>();
}

// Boxes group and group + 2 of this block's columns: warpgroups 0 and 1.
template <int group>
__device__ __forceinline__ void accumulate(const Params& p, Shared& s, const Memory& m, int split) {
    const int lane = threadIdx.x & 31;
    const u32 rank = cluster_rank();
    float acc[2][TILE_N / 2];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) acc[t][i] = 0.0f;
    Boxes at;
    Ring<2> buffer;
    for (int chunk = s.tile.begin; chunk < s.tile.end; ++chunk) {
        barrier_wait(shared_address(&s.p_ready[buffer.slot]), buffer.phase);
        proxy_fence();  // half of the weights came by st.async, which is not of the async proxy
        const Factors(&factors)[2] = s.factors[buffer.slot];
        if (factors[0].changed | factors[1].changed) {
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j) {
                const Factors& half = factors[j / (ROWS / 8)];
                scale_rows(acc, j, *(const float2*)&half.scale[8 * j % ROWS + 2 * (lane & 3)]);
            }
        }
        const u64 columns = operand(m.weights + buffer.slot * P_BYTES);
        mma_fence();
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const u64 values = operand(m.ring + at.at(2 * t + group).slot * BOX_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_values(acc[t], values + k * (2048 >> 4), columns + 2 * k, 1);
            mma_commit();
        }
        mma_wait<1>();
        if (lane == 0) barrier_arrive(shared_address(&s.empty[at.at(group).slot]));
        mma_wait<0>();
        pin(acc[0]);
        pin(acc[1]);
        if (lane == 0) {
            const u32 free = shared_address(&s.p_free[buffer.slot]);
            barrier_arrive(shared_address(&s.empty[at.at(2 + group).slot]));
            barrier_arrive(free);
            remote_arrive(in_block(free, rank ^ 1));
        }
        at.advance(BOXES);
        buffer.advance(1);
    }
    group_sync<3, 384>();  // the sums are there, and the query tile is free to stage the output
    barrier_wait(shared_address(&s.sums_ready), 0);
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) scale_rows(acc, j, *(const float2*)&s.inverse[8 * j + 2 * (lane & 3)]);
    const u32 room = max(TILE_N * STAGE_PITCH * 4 * PARTIAL_F32, 2 * P_BYTES);
    store_output(p, s.tile, acc, m.q + group * room, 256 * rank + 64 * group, 128, split, group);
}

// This block's columns of the query tile, swizzled as TMA would; rows of no query are 0.
__device__ __forceinline__ void load_queries(const Params& p, const Tile& s, const Memory& m, int thread, int threads) {
    const int rank = cluster_rank();
    for (int u = thread; u < TILE_N * 36; u += threads) {
        const int n = u / 36, unit = u % 36;
        const int2 row = s.row[n];
        const int column = unit < 32 ? 256 * rank + 8 * unit : RANK + 32 * rank + 8 * (unit - 32);
        const char* from = p.q + 2 * (max(row.x, 0) * p.q_stride_query + row.y * p.q_stride_head + column);
        const u32 to = unit < 32 ? m.q + (unit >> 3) * Q_SUBTILE_BYTES + n * 128 + (((unit & 7) ^ (n & 7)) << 4)
                                 : m.q_rope + n * 64 + (((unit & 3) ^ ((n >> 1) & 3)) << 4);
        load_async(to, from, row.x >= 0);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    proxy_fence();
}

// The other block may still write to this one's shared memory. Called at the end of each role: common code behind the
// roles makes ptxas serialise the products.
__device__ __forceinline__ void leave() {
    __syncwarp();
    cluster_sync();
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(512, 1)
    decode(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap rope_map,
           const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    Memory m;
    m.q = shared_address(memory);
    m.weights = m.q + BOXES * Q_SUBTILE_BYTES;
    m.ring = m.weights + 2 * P_BYTES;
    m.q_rope = m.ring + SLOTS * BOX_BYTES;
    m.rope_ring = m.q_rope + TILE_N * 64;
    m.landing = m.rope_ring + ROPE_SLOTS * ROPE_BOX_BYTES;
    Shared& s = *(Shared*)(memory + (m.landing + 2 * LANDING_BYTES - m.q));
    static_assert(sizeof(Shared) <= MISC_BYTES);
    // Through a shuffle, so that the compiler knows that a warp takes one branch.
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int split = blockIdx.x / BLOCKS % p.splits;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (warp == 0) locate(p, s.tile, lane);
    if (warp == 1) {
        for (int i = lane; i < SLOTS; i += 32) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), 4);
        }
        if (lane < ROPE_SLOTS) {
            barrier_init(shared_address(&s.rope_full[lane]), 1);
            barrier_init(shared_address(&s.rope_empty[lane]), 4);
        }
        if (lane < 2) {
            barrier_init(shared_address(&s.landed[lane]), 1);
            barrier_init(shared_address(&s.p_ready[lane]), 1);
            barrier_init(shared_address(&s.p_free[lane]), 16);
        }
        if (lane == 0) barrier_init(shared_address(&s.sums_ready), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (s.tile.request < 0 || s.tile.begin >= s.tile.end) {
        if (s.tile.request >= 0) publish_nothing(p, s.tile, split);
        if (warp == 13) clear_unclaimed(p, lane);
        return;
    }
    if (warp < 12) {
        load_queries(p, s.tile, m, threadIdx.x, 384);
        group_sync<1, 384>();
    }
    if (warp < 4) {
        grow_registers();
        accumulate<0>(p, s, m, split);
        leave();
    } else if (warp < 8) {
        grow_registers();
        accumulate<1>(p, s, m, split);
        leave();
    } else if (warp < 12) {
        score_registers();
        score(p, s, m, split);
        leave();
    } else {
        shrink_registers();
        feed(p, &map, &rope_map, s, m, warp - 12, lane);
        if (warp == 13) clear_unclaimed(p, lane);
        leave();
    }
}

// One block decodes one tile of 64 query rows of one request over one split of its cache, for sm_90a.
//
// Scores are S = Q K^T with M = 64 query rows and N = 64 cache rows, the output is O = P V with N = 256 latent columns.
// A row's softmax stays within four lanes, and a chunk's weights enter their own product from registers.
//
// Three warpgroups. 0 takes the even chunks of the split, 1 the odd ones: each does the scores and the softmax of its
// own chunks, half a period apart, so that the tensor cores have the products of one while the other is in its softmax.
// Each accumulates half of the output columns over all chunks, with the other's weights from shared memory. 2 loads.
// source.py prefixes TILE_N, PARTIAL_F32, Q_FP8, KV_FP8 (0), MISC_BYTES, the register budgets and the wgmma wrappers, then
// primitives.cu and tile.cu.

constexpr int ROPE = 8;  // of the boxes of a chunk: 4 of the left half of the latent columns, 4 of the right one, this
constexpr int HALF_COLUMNS = RANK / 2;
static_assert(TILE_N == 64);

struct Shared {
    u64 full[2][BOXES];  // by the warpgroup that owns the chunk
    u64 empty[2][3];     // left half, right half, rope box
    u64 p_ready[2], p_free[2];
    Tile tile;
    float base[2][TILE_N];   // what the weights of the chunk are relative to
    float total[2][TILE_N];  // sums of the weights of each warpgroup's chunks
};

struct Memory {
    u32 q, ring, weights;

    __device__ __forceinline__ u32 box(int owner, int box) const { return ring + (owner * BOXES + box) * BOX_BYTES; }
};

// Each of the four warps loads one half of every other chunk, its rope box too if its owner reads that half first.
__device__ __forceinline__ void feed(const Params& p, const TensorMap* map, Shared& s, const Memory& m, int feeder,
                                     int lane) {
    Pages pages(p, s.tile);
    const int owner = feeder >> 1, half = owner ^ (feeder & 1);
    u32 phase = 0;
    for (int chunk = s.tile.begin + owner; chunk < s.tile.end; chunk += 2, phase ^= 1) {
        const int first = pages.find(p, chunk, lane);
        if (half == owner) {
            barrier_wait(shared_address(&s.empty[owner][2]), phase ^ 1);
            pages.load(p, map, chunk, first, m.box(owner, ROPE), RANK, shared_address(&s.full[owner][ROPE]), lane);
        }
        barrier_wait(shared_address(&s.empty[owner][half]), phase ^ 1);
        for (int box = 4 * half; box < 4 * half + 4; ++box)
            pages.load(p, map, chunk, first, m.box(owner, box), 64 * box, shared_address(&s.full[owner][box]), lane);
    }
}

// One of the two warpgroups that compute.
template <int OWN>
struct Half {
    static constexpr int OTHER = OWN ^ 1;

    float output[HALF_COLUMNS / 2], scores[32];
    u32 weights[4][4], rope_q[4][4];  // A operands of 16 columns each
    float base[2], total[2], factor[2], sum[2];  // of this thread's two rows; total is relative to base, as output is
    int visible[2];
    u32 phase = 0, other_phase = 0;

    __device__ __forceinline__ void begin(const Params& p, const Shared& s, int row, int lane) {
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) output[i] = 0.0f;
        pin(output);  // before any product begins
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            base[i] = LOWEST, total[i] = 0.0f;
            visible[i] = s.tile.visible[row + 8 * i];
            const int2 at = s.tile.row[row + 8 * i];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const char* from = query_at(p, at, RANK + 2 * (lane & 3) + 8 * k);
#if Q_FP8
                const u32 pair = widen(*(const unsigned short*)from).x;
#else
                const u32 pair = *(const u32*)from;
#endif
                rope_q[k >> 1][i + 2 * (k & 1)] = at.x < 0 ? 0 : pair;
            }
        }
    }

    // Begins the products of an own chunk's cache rows with the queries: over the rope box and the half that this
    // warpgroup frees, or over the other half.
    template <int PART>
    __device__ __forceinline__ void multiply_scores(Shared& s, const Memory& m) {
        if (PART == 0) {
            barrier_wait(shared_address(&s.full[OWN][ROPE]), phase);
            mma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_rope(scores, rope_q[k], fresh_operand(m.box(OWN, ROPE)) + 2 * k, k > 0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int box = i + 4 * (OWN ^ PART);
            barrier_wait(shared_address(&s.full[OWN][box]), phase);
            mma_fence();
            const u64 queries = fresh_operand(m.q + box * BOX_BYTES), rows = fresh_operand(m.box(OWN, box));
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_scores(scores, queries + 2 * k, rows + 2 * k, 1);
        }
        mma_commit();
    }

    __device__ __forceinline__ bool moved() const { return __any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f); }

    __device__ __forceinline__ void scale_output() {
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) output[i] *= factor[(i >> 1) & 1];
    }

    // Adds the values of the other's chunk.
    __device__ __forceinline__ void add_other(Shared& s, const Memory& m, int row, int lane) {
        barrier_wait(shared_address(&s.p_ready[OTHER]), other_phase);
        other_phase ^= 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float to = s.base[OTHER][row + 8 * i];
            factor[i] = exp2_fast(base[i] - to);
            total[i] *= factor[i];
            base[i] = to;
        }
        if (moved()) {
            // ptxas lets accumulators change only while no product is in flight.
            mma_wait<0>();
            pin(scores);
            pin(output);
            scale_output();
        }
        const u64 there = fresh_operand(m.weights + OTHER * P_BYTES), values = wide_operand(m.box(OTHER, 4 * OWN));
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_values(output, there + 2 * k, values + k * (2048 >> 4), 1);
        mma_commit();
    }

    // Scores of an own chunk become weights.
    __device__ __forceinline__ void weigh(const Params& p, Shared& s, const Memory& m, int chunk, int row, int lane) {
        mma_wait<0>();
        pin(scores);
        pin(output);
        if (lane == 0) barrier_arrive(shared_address(&s.empty[OWN][2]));
        const float scale = score_scale(p, s.tile);
        const bool edge = chunk * CHUNK > s.tile.min_visible - CHUNK;
        if (edge) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int token = chunk * CHUNK + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                if (token >= visible[(i >> 1) & 1]) scores[i] = NONE;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = NONE;
#pragma unroll
            for (int j = 0; j < 8; ++j) most = fmaxf(most, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
            const float to = most > base[i] + SLACK ? most : base[i];
            factor[i] = exp2_fast(base[i] - to);
            base[i] = to;
            sum[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float first = exp2_fast(fmaf(scores[4 * j + 2 * i], scale, -to));
                const float second = exp2_fast(fmaf(scores[4 * j + 2 * i + 1], scale, -to));
                sum[i] += first + second;
                weights[j >> 1][2 * (j & 1) + i] = pack(first, second);
            }
        }
        if (edge) {
            for (int box = 0; box < ROPE; ++box) clean_box(s.tile, chunk, m.box(OWN, box), threadIdx.x & 127);
            proxy_fence();
            writers_sync(OWN);
        }
    }

    // Gives the other warpgroup the weights.
    __device__ __forceinline__ void publish(Shared& s, const Memory& m, int row, int lane) {
        barrier_wait(shared_address(&s.p_free[OWN]), phase ^ 1);
        const int matrix = lane >> 3, line = lane & 7, warp_row = row - (lane >> 2) + 8 * (matrix & 1) + line;
        const u32 place = m.weights + OWN * P_BYTES + warp_row * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            store_rows(place + ((2 * k + (matrix >> 1) ^ line) << 4), weights[k][0], weights[k][1], weights[k][2],
                       weights[k][3]);
        if ((lane & 3) == 0) s.base[OWN][row] = base[0], s.base[OWN][row + 8] = base[1];
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.p_ready[OWN]));
        phase ^= 1;
    }

    // Adds the values of the own chunk that was weighed last. Nothing is in flight before.
    __device__ __forceinline__ void add_own(const Memory& m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) total[i] = fmaf(total[i], factor[i], sum[i]);
        if (moved()) scale_output();
        const u64 values = wide_operand(m.box(OWN, 4 * OWN));
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_own_values(output, weights[k], values + k * (2048 >> 4), 1);
        mma_commit();
    }

    // One own chunk, and the other's that precedes it.
    template <bool FIRST>
    __device__ __forceinline__ void step(const Params& p, Shared& s, const Memory& m, int chunk, int row, int lane,
                                         bool release) {
        mma_wait<0>();
        pin(output);
        if (release && lane == 0) barrier_arrive(shared_address(&s.empty[OWN][OWN]));
        multiply_scores<0>(s, m);
        if (!FIRST) add_other(s, m, row, lane);
        multiply_scores<1>(s, m);
        if (!FIRST) {
            mma_wait<1>();
            if (lane == 0) {
                barrier_arrive(shared_address(&s.empty[OTHER][OWN]));
                barrier_arrive(shared_address(&s.p_free[OTHER]));
            }
        }
        weigh(p, s, m, chunk, row, lane);
        add_own(m);
        publish(s, m, row, lane);
    }

    __device__ __forceinline__ void finish(const Params& p, Shared& s, const Memory& m, int row, int lane, int split) {
        mma_wait<0>();
        pin(output);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] += __shfl_xor_sync(~0u, total[i], 1);
            total[i] += __shfl_xor_sync(~0u, total[i], 2);
            if ((lane & 3) == 0) s.total[OWN][row + 8 * i] = total[i];
        }
        group_sync<3, 256>();  // and the query tile is free to stage the output
        int2 at[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float all = s.total[0][row + 8 * i] + s.total[1][row + 8 * i];
            factor[i] = inverse_of(s.tile, all);
            at[i] = s.tile.row[row + 8 * i];
            if (OWN == 0 && (lane & 3) == 0 && at[i].x >= 0) write_lse(p, s.tile, at[i], base[i], all, split);
        }
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) output[i] *= factor[(i >> 1) & 1];
#if PARTIAL_F32
        if (!s.tile.single) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (at[i].x < 0) continue;
                float* to = (float*)p.partial_output +
                            (((i64)split * p.max_total_q + at[i].x) * p.heads + at[i].y) * RANK + OWN * HALF_COLUMNS;
#pragma unroll
                for (int j = 0; j < HALF_COLUMNS / 8; ++j)
                    *(float2*)(to + 8 * j + 2 * (lane & 3)) = make_float2(output[4 * j + 2 * i], output[4 * j + 2 * i + 1]);
            }
            return;
        }
#endif
        const u32 stage = m.q + OWN * 4 * P_BYTES;
        const int matrix = lane >> 3, line = lane & 7, warp_row = row - (lane >> 2) + 8 * (matrix & 1) + line;
#pragma unroll
        for (int k = 0; k < HALF_COLUMNS / 16; ++k) {
            const float* v = output + 8 * k;
            store_rows(stage + (k >> 2) * P_BYTES + warp_row * 128 + ((2 * (k & 3) + (matrix >> 1) ^ line) << 4),
                       pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
        }
        copy_staged(p, s.tile, stage, split, OWN);
    }
};

template <int OWN>
__device__ __forceinline__ void decode_half(const Params& p, Shared& s, const Memory& m, int split) {
    const int lane = threadIdx.x & 31, row = 16 * ((threadIdx.x & 127) >> 5) + (lane >> 2);
    Half<OWN> half;
    half.begin(p, s, row, lane);
    int chunk = s.tile.begin + OWN;
    if (OWN == 0) {
        half.template step<true>(p, s, m, chunk, row, lane, false);
        chunk += 2;
    }
    for (; chunk < s.tile.end; chunk += 2) half.template step<false>(p, s, m, chunk, row, lane, chunk >= s.tile.begin + 2);
    if (chunk - 1 < s.tile.end) half.add_other(s, m, row, lane);
    half.finish(p, s, m, row, lane, split);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    decode(const __grid_constant__ TensorMap map, const __grid_constant__ Params p) {
    char* memory = shared_memory();
    Memory m;
    m.q = shared_address(memory);
    m.ring = m.q + 8 * BOX_BYTES;
    m.weights = m.ring + 2 * BOXES * BOX_BYTES;
    Shared& s = *(Shared*)(memory + (m.weights + 2 * P_BYTES - m.q));
    static_assert(sizeof(Shared) <= MISC_BYTES);
    // Through a shuffle, so that the compiler knows that a warp takes one branch.
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int split = blockIdx.x % p.splits;
    launch_dependents();
    if (warp == 0) locate(p, s.tile, lane);
    if (warp == 1) {
        if (lane < 2 * BOXES) barrier_init(shared_address(&s.full[0][lane]), 1);
        if (lane < 6) barrier_init(shared_address(&s.empty[0][lane]), 4);
        if (lane < 2) {
            barrier_init(shared_address(&s.p_ready[lane]), 4);
            barrier_init(shared_address(&s.p_free[lane]), 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (s.tile.request < 0 || s.tile.begin >= s.tile.end) {
        if (s.tile.request >= 0) publish_nothing(p, s.tile, split);
        if (warp == 9) clear_unclaimed(p, lane);
        return;
    }
    if (warp < 8) {
        load_queries<ROPE>(p, s.tile, m.q, threadIdx.x, 256);
        group_sync<1, 256>();
    }
    if (warp < 4) {
        grow_registers();
        decode_half<0>(p, s, m, split);
    } else if (warp < 8) {
        grow_registers();
        decode_half<1>(p, s, m, split);
    } else {
        shrink_registers();
        feed(p, &map, s, m, warp - 8, lane);
        if (warp == 9) clear_unclaimed(p, lane);
    }
}

// One block decodes one tile of query rows of one request over one split of its cache, for sm_90a.
//
// Operands are swapped: scores are S^T = K Q^T with M = 64 cache rows and N = query rows, the output is
// O^T = V^T P^T with M = 64 latent columns, so a tile holds any multiple of 8 query rows without padding
// to 64. source.py prefixes TILE_N, SCORERS, SLOTS, MOST_EARLY, P_BUFFERS, PARTIAL_F32, Q_FP8, KV_FP8, MISC_BYTES,
// the register budgets and the two wgmma wrappers of that width, then primitives.cu, tile.cu, swapped_ring.cu and the
// operands' file, swapped_bf16.cu or swapped_fp8.cu.
//
// Warpgroups 0 and 1 accumulate 256 latent columns each; the next, one or two (SCORERS), do scores and softmax of a
// chunk in turn; the last feeds the ring.

struct Max {
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
    __device__ static float none() { return NONE; }
};
struct Sum {
    __device__ static float of(float a, float b) { return a + b; }
    __device__ static float none() { return 0.0f; }
};

// Reduces 32 columns over the lanes that share them; v holds columns 8 j + 2 (lane & 3) + e at 2 j + e.
// Halving exchange: each lane ends with the one column lane_column(lane).
template <class Op>
__device__ __forceinline__ float reduce_group(const float (&columns)[TILE_N / 4], int group, int lane) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = 8 * group + i;
        v[i] = at < TILE_N / 4 ? columns[at < TILE_N / 4 ? at : 0] : Op::none();
    }
#pragma unroll
    for (int width = 4; width > 0; width >>= 1) {
        const bool upper = lane & (4 * width);
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const float keep = upper ? v[i + width] : v[i], give = upper ? v[i] : v[i + width];
            v[i] = Op::of(keep, __shfl_xor_sync(~0u, give, 4 * width));
        }
    }
    return v[0];
}

__device__ __forceinline__ int lane_column(int lane) {
    return 8 * ((lane >> 3) & 3) + 2 * (lane & 3) + ((lane >> 2) & 1);
}

// Softmax of warpgroup SCORER of those that score over the rows of the tile, a chunk at a time.
//
// Two of them hand the bases to each other: from `turn[SCORER]` to the other's, warp for warp, they belong to SCORER.
template <int SCORER>
struct Softmax {
    static constexpr int BARRIER = SCORER ? 8 : 2;

    float base[TILE_N / 4], total[TILE_N / 4];  // of this thread's rows
    float factor[GROUPS];                       // of one row per lane
    bool changed;

    __device__ __forceinline__ void begin(Reduction& s, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < TILE_N / 4; ++i) base[i] = LOWEST, total[i] = 0.0f;
        if (SCORER == 0)
            for (int n = lane; n < TILE_N; n += 32) s.top[warp][n] = LOWEST;
        __syncwarp();
    }

    // Takes over the bases that the chunks before have left.
    __device__ __forceinline__ void follow(const Reduction& s, int warp, int lane) {
#pragma unroll
        for (int j = 0; j < TILE_N / 8; ++j) {
            const float2 top = *(const float2*)&s.top[warp][8 * j + 2 * (lane & 3)];
            total[2 * j] *= exp2_fast(base[2 * j] - top.x);
            total[2 * j + 1] *= exp2_fast(base[2 * j + 1] - top.y);
            base[2 * j] = top.x, base[2 * j + 1] = top.y;
        }
    }

    // Moves the bases of rows that this chunk's scores leave behind.
    __device__ __forceinline__ void rebase(Reduction& s, const float (&acc)[TILE_N / 2], float scale, int warp, int lane) {
        float most[TILE_N / 4], lead = NONE;
#pragma unroll
        for (int i = 0; i < TILE_N / 4; ++i) {
            most[i] = fmaxf(acc[4 * (i >> 1) + (i & 1)], acc[4 * (i >> 1) + 2 + (i & 1)]);
            lead = fmaxf(lead, fmaf(most[i], scale, -base[i]));
        }
        changed = group_any<BARRIER, 128>(lead > SLACK + LIFT);
        if (!changed) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) factor[g] = 1.0f;
            return;
        }
        const int own = lane_column(lane);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) s.peer[4 * SCORER + warp][32 * g + own] = reduce_group<Max>(most, g, lane);
        group_sync<BARRIER, 128>();
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int n = 32 * g + own;
            const float(*peer)[GROUPS * 32] = s.peer + 4 * SCORER;
            const float found = fmaxf(fmaxf(peer[0][n], peer[1][n]), fmaxf(peer[2][n], peer[3][n])) * scale;
            if (n >= TILE_N) continue;
            const float before = s.top[warp][n], top = found > before + (SLACK + LIFT) ? found - LIFT : before;
            factor[g] = exp2_fast(before - top);
            s.top[warp][n] = top;
        }
        __syncwarp();
        follow(s, warp, lane);
    }

    // Scores [64, TILE_N] become weights.
    __device__ __forceinline__ void weigh(float (&acc)[TILE_N / 2], float scale) {
#pragma unroll
        for (int i = 0; i < TILE_N / 4; ++i) {
            float &first = acc[4 * (i >> 1) + (i & 1)], &second = acc[4 * (i >> 1) + 2 + (i & 1)];
            first = exp2_fast(fmaf(first, scale, -base[i]));
            second = exp2_fast(fmaf(second, scale, -base[i]));
            total[i] += first + second;
        }
    }

    // One warp.
    __device__ __forceinline__ void publish(Factors& f, int lane) const {
        const int own = lane_column(lane);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            if (32 * g + own < TILE_N) f.scale[32 * g + own] = factor[g];
        if (lane == 0) f.changed = changed;
    }

    // Every warp's sums into shared memory.
    __device__ __forceinline__ void gather(Reduction& s, int warp, int lane) const {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            s.peer[4 * SCORER + warp][32 * g + lane_column(lane)] = reduce_group<Sum>(total, g, lane);
    }
};

// Scores of a chunk that reaches past what some row sees.
__device__ __forceinline__ void hide_unseen(const Tile& t, float (&acc)[TILE_N / 2], int chunk, int warp, int lane) {
    const int token = chunk * CHUNK + 16 * warp + (lane >> 2);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) {
        const int visible = t.visible[8 * (i >> 2) + 2 * (lane & 3) + (i & 1)];
        if (token + 4 * (i & 2) >= visible) acc[i] = NONE;
    }
}

// Factors of 8 neighbouring rows, of which a thread holds two columns of the accumulator.
__device__ __forceinline__ void scale_rows(float (&acc)[4][TILE_N / 2], int block, float2 by) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        acc[t][4 * block] *= by.x;
        acc[t][4 * block + 1] *= by.y;
        acc[t][4 * block + 2] *= by.x;
        acc[t][4 * block + 3] *= by.y;
    }
}

// Writes half of the output columns, 4 boxes of 64. `room` is shared memory of the warpgroup.
__device__ __forceinline__ void store_output(const Params& p, const Tile& s, const float (&acc)[4][TILE_N / 2], u32 room,
                                             int split, int half) {
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
#if PARTIAL_F32
    if (!s.single) {
        const i64 partial_row = (i64)split * p.max_total_q;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (t) writers_sync(half);
#pragma unroll
            for (int i = 0; i < TILE_N / 2; ++i) {
                const int n = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                const int at = column_of(warp, lane, i);
                store_float(room + (n * STAGE_PITCH + at) * 4, acc[t][i]);
            }
            writers_sync(half);
#pragma unroll 4
            for (int u = thread; u < TILE_N * 16; u += 128) {
                const int2 row = s.row[u >> 4];
                if (row.x < 0) continue;
                float* to = (float*)p.partial_output + ((partial_row + row.x) * p.heads + row.y) * RANK;
                *(float4*)(to + half * RANK / 2 + 64 * t + 4 * (u & 15)) =
                    load_floats(room + ((u >> 4) * STAGE_PITCH + 4 * (u & 15)) * 4);
            }
        }
        return;
    }
#endif
#pragma unroll
    for (int t = 0; t < 4; ++t) stage(room + t * P_BYTES, acc[t], warp, lane);
    copy_staged(p, s, room, split, half);
}

// Scores and softmax of every SCORERS-th chunk, beginning with number SCORER.
template <int SCORER>
__device__ __forceinline__ void score(const Params& p, Shared& s, u32 q, u32 weights, u32 ring, int split) {
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    const float scale = Scores::scale(p, s.tile);
    Softmax<SCORER> softmax;
    softmax.begin(s.reduction, warp, lane);
    Boxes at;
    Ring<P_BUFFERS> buffer;
    if (SCORER) at.advance(SCORER * BOXES), buffer.advance(SCORER);
    Scores scores;
    float next[TILE_N / 2];
    if (EARLY > 0) scores.add<0, EARLY>(s, next, q, ring, at);
    for (int chunk = s.tile.begin + SCORER; chunk < s.tile.end; chunk += SCORERS) {
        scores.add<EARLY, BOXES>(s, next, q, ring, at);
        mma_wait<0>();
        pin(next);
        if (lane == 0) release(s, at.slot);  // the rope box serves the scores alone
        float acc[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) acc[i] = copy_here(next[i]);
        if (EARLY > 0 && chunk + 1 < s.tile.end) scores.add<0, EARLY>(s, next, q, ring, at.at(BOXES));
        scores.finish(acc, s.tile, lane);
        const bool edge = chunk * CHUNK > s.tile.min_visible - CHUNK;
        if (edge) hide_unseen(s.tile, acc, chunk, warp, lane);
#if SCORERS > 1
        if (chunk > s.tile.begin) {
            // One wait a chunk since the second of the split, so its parity is that of the weights' buffer, or the other.
            barrier_wait(shared_address(&s.turn[SCORER]), SCORER ? buffer.phase : buffer.phase ^ 1);
            if (s.reduction.moved[warp]) softmax.follow(s.reduction, warp, lane);
        }
#endif
        softmax.rebase(s.reduction, acc, scale, warp, lane);
#if SCORERS > 1
        if (lane == 0) s.reduction.moved[warp] = softmax.changed;
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.turn[SCORER ^ 1]));
#endif
        softmax.weigh(acc, scale);
        barrier_wait(shared_address(&s.p_free[buffer.slot]), buffer.phase ^ 1);
        store_transposed<pack_weights>(weights + buffer.slot * P_BYTES, acc, warp, lane);
        if (warp == 0) softmax.publish(s.factors[buffer.slot], lane);
        if (edge && !KV_FP8)
            for (int position = 1; position < BOXES; ++position)
                clean_box(s.tile, chunk, ring + at.at(position).slot * BOX_BYTES, thread);
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.p_ready[buffer.slot]));
        at.advance(SCORERS * BOXES);
        buffer.advance(SCORERS);
    }
    group_sync<SCORERS_BARRIER, 128 * SCORERS>();  // every warp has read the last maxima, which the sums replace
    if (SCORERS > 1) softmax.follow(s.reduction, warp, lane);
    softmax.gather(s.reduction, warp, lane);
    group_sync<SCORERS_BARRIER, 128 * SCORERS>();
    if (SCORER == 0 && warp == 0) {
        const Reduction& r = s.reduction;
        for (int n = lane; n < TILE_N; n += 32) {
            float sum = (r.peer[0][n] + r.peer[1][n]) + (r.peer[2][n] + r.peer[3][n]);
            if (SCORERS > 1)
                sum += (r.peer[4 * SCORERS - 4][n] + r.peer[4 * SCORERS - 3][n]) +
                       (r.peer[4 * SCORERS - 2][n] + r.peer[4 * SCORERS - 1][n]);
            s.inverse[n] = inverse_of(s.tile, sum);
            if (s.tile.row[n].x >= 0) write_lse(p, s.tile, s.tile.row[n], r.top[0][n], sum, split);
        }
    }
    group_sync<3, COMPUTE_THREADS>();
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
        const bool edge = chunk * CHUNK > s.tile.min_visible - CHUNK;
        Values<group> values;
        values.begin(s, ring, at, edge);
        barrier_wait(shared_address(&s.p_ready[buffer.slot]), buffer.phase);
        const Factors& factors = s.factors[buffer.slot];
        if (factors.changed) {
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j) scale_rows(acc, j, *(const float2*)&factors.scale[8 * j + 2 * (lane & 3)]);
        }
        values.add(s, acc, weights + buffer.slot * P_BYTES, ring, at, edge);
#pragma unroll
        for (int t = 0; t < 4; ++t) pin(acc[t]);
        if (lane == 0) barrier_arrive(shared_address(&s.p_free[buffer.slot]));
        at.advance(BOXES);
        buffer.advance(1);
    }
    group_sync<3, COMPUTE_THREADS>();  // the sums are there, and the query tile is free to stage the output
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) scale_rows(acc, j, *(const float2*)&s.inverse[8 * j + 2 * (lane & 3)]);
    const u32 each = max(TILE_N * STAGE_PITCH * 4 * PARTIAL_F32, 4 * P_BYTES);
    store_output(p, s.tile, acc, q + group * each, split, group);
}

// The other block of the cluster neither loads into this one nor arrives at its barriers before or after.
__device__ __forceinline__ void meet() {
    if (!PAIRED) return;
    cluster_arrive();
    cluster_wait();
}

#if PAIRED
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(COMPUTE_THREADS + 128, 1)
    decode(const __grid_constant__ TensorMap map, const __grid_constant__ Params p) {
    char* memory = shared_memory();
    const u32 q = shared_address(memory);
    const u32 weights = q + BOXES * P_BYTES;
    const u32 ring = weights + P_BUFFERS * P_BYTES;
    Shared& s = *(Shared*)(memory + (ring + SLOTS * BOX_BYTES - q));
    static_assert(sizeof(Shared) <= MISC_BYTES);
    // Through a shuffle, so that the compiler knows that a warp takes one branch.
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int split = split_of_block(p);
    launch_dependents();
    if (warp == 0) locate(p, s.tile, lane);
    if (warp == 1) {
        for (int i = lane; i < SLOTS; i += 32) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), PAIRED && loads_slot(i) ? 8 : 4);
        }
        if (lane < P_BUFFERS) {
            barrier_init(shared_address(&s.p_ready[lane]), 4);
            barrier_init(shared_address(&s.p_free[lane]), 8);
        }
#if SCORERS > 1
        if (lane < SCORERS) barrier_init(shared_address(&s.turn[lane]), 4);
#endif
        barrier_init_fence();
    }
    __syncthreads();
    meet();
    if (s.tile.request < 0 || s.tile.begin >= s.tile.end) {
        if (s.tile.request >= 0) publish_nothing(p, s.tile, split);
        if (warp == FIRST_FEEDER + 1) clear_unclaimed(p, lane);
        return;
    }
    if (warp < FIRST_FEEDER) {
        load_query_tile(p, s.tile, q, threadIdx.x, COMPUTE_THREADS);
        group_sync<1, COMPUTE_THREADS>();
    }
    if (warp < 4) {
        grow_registers();
        accumulate<0>(p, s, q, weights, ring, split);
        meet();
    } else if (warp < 8) {
        grow_registers();
        accumulate<1>(p, s, q, weights, ring, split);
        meet();
    } else if (warp < FIRST_SCORER + 4) {
        score_registers();
        score<0>(p, s, q, weights, ring, split);
        meet();
#if SCORERS > 1
    } else if (warp < FIRST_FEEDER) {
        score_registers();
        score<1>(p, s, q, weights, ring, split);
        meet();
#endif
    } else {
        shrink_registers();
        feed(p, &map, s, ring, warp - FIRST_FEEDER, lane);
        if (warp == FIRST_FEEDER + 1) clear_unclaimed(p, lane);
        meet();
    }
}

// One tile of query rows of one request over one split of its cache, for sm_90a.
//
// Operands are swapped: scores are S^T = K Q^T with M = 64 cache rows and N = query rows, the output is
// O^T = V^T P^T with M = 64 latent columns, so a tile holds any multiple of 8 query rows without padding
// to 64. source.py prefixes TILE_N, CLUSTER, SLOTS, MOST_EARLY, P_BUFFERS, PARTIAL_F32, MISC_BYTES, the register
// budgets and the two wgmma wrappers of that width.
//
// Four warpgroups: 0 and 1 accumulate 256 latent columns each, 2 does scores and softmax, 3 feeds the ring.
// A ring slot is 64 cache rows x 64 columns, one TMA box with 128-byte swizzle.
//
// With CLUSTER 2, two blocks take neighbouring tiles of a request and every box is read once for both.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int CHUNK = 64;
constexpr int RANK = 512;
constexpr int SUBTILES = 9;  // 64-column boxes of a 576-wide row; the last is the rope part
constexpr int SLOT_BYTES = CHUNK * 128;
constexpr int Q_SUBTILE_BYTES = TILE_N * 128;
constexpr int P_BYTES = TILE_N * 128;
constexpr int BLOCKS = TILE_N / 8;        // 8-column blocks of an accumulator
constexpr int GROUPS = (BLOCKS + 3) / 4;  // 32-column groups: one column per lane
constexpr int FEEDERS = 4;                // warps that issue loads: issuing keeps one busy for most of a box's time
// Boxes of the next chunk whose products run under the softmax of this one: what the ring holds besides
// the values of two chunks.
constexpr int EARLY = SLOTS - 16 < 0 ? 0 : SLOTS - 16 > MOST_EARLY ? MOST_EARLY : SLOTS - 16;
[[maybe_unused]] constexpr int STAGE_PITCH = 68;  // floats; a multiple of 4 that spreads rows over the banks
#define NONE __int_as_float(0xff800000)
constexpr float LOWEST = -3.0e38f;  // maximum of nothing; finite, so that differences are never NaN
constexpr float LN2 = 0.693147180559945309f;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Params {
    const char* q;
    char* output;
    float* lse;
    char* partial_output;
    float* partial_lse;
    const int* page_table;
    const int* cache_seqlens;
    const int* cu_seqlens_q;
    const int* query_cache_seqlens;  // null: causal
    i64 q_stride_query, q_stride_head;  // elements, as all strides
    i64 output_stride_query, output_stride_head;
    i64 lse_stride_query, lse_stride_head;
    i64 table_stride;
    int table_width, page_size, num_pages;
    int batch, total_q, max_total_q, heads;
    int splits, single_split_chunks;
    float score_scale;  // sm_scale * log2(e)
};

struct Shared {
    u64 full[SLOTS], empty[SLOTS];
    u64 p_ready[P_BUFFERS], p_free[P_BUFFERS];
    int request;  // negative: no tile for this block
    int begin, end, single, length, min_visible, max_visible;
    int changed[P_BUFFERS];
    int visible[TILE_N];
    int2 row[TILE_N];                   // query index and head of a tile row; query < 0: no row
    float peer[2][4][GROUPS * 32];      // what each softmax warp found, by step parity
    alignas(16) float2 top[4][TILE_N];  // per softmax warp: running maximum, and what its last change scales by
    float inverse[TILE_N];              // 1 / sum of the weights
    float scale[P_BUFFERS][TILE_N];     // factor on the accumulators of each row
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Tells the feeding warps of all blocks of the cluster that this warp is done with a slot.
__device__ __forceinline__ void release_slot(u32 barrier) {
    barrier_arrive(barrier);
#if CLUSTER > 1
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(cluster_rank() ^ 1)
        : "memory");
#endif
}

template <int ID, int THREADS>
__device__ __forceinline__ void group_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// To the same place in every block of the cluster.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int column, int row, int page, u32 barrier) {
#if CLUSTER > 1
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(page), "r"(barrier), "h"((unsigned short)3)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(page), "r"(barrier)
        : "memory");
#endif
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of an accumulator over the wait for it.
template <int COUNT>
__device__ __forceinline__ void pin(float (&acc)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Shared-memory operand with 128-byte swizzle; 8-row groups 1024 bytes apart, both K-major and MN-major.
__device__ __forceinline__ u64 operand(u32 address) {
    return ((u64)1 << 62) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 16) | (u64)((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Elements that are NaN or infinite become 0.
__device__ __forceinline__ u32 finite_pair(u32 pair) {
    constexpr u32 EXPONENT = 0x7F80u;
    if ((pair & EXPONENT) == EXPONENT) pair &= 0xFFFF0000u;
    if ((pair & (EXPONENT << 16)) == (EXPONENT << 16)) pair &= 0x0000FFFFu;
    return pair;
}

__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

// Writes an accumulator [64, N] transposed: row n of the buffer holds its 64 values, swizzled.
template <int HALF_N>
__device__ __forceinline__ void store_transposed(u32 buffer, const float (&acc)[HALF_N], int warp, int lane) {
    constexpr int BLOCKS = HALF_N / 4;
    const int matrix = lane >> 3, line = lane & 7;
    const u32 place = buffer + (8 * (matrix >> 1) + line) * 128 + (((2 * warp + (matrix & 1)) ^ line) << 4);
#pragma unroll
    for (int j = 0; j + 1 < BLOCKS; j += 2)
        store_matrices(place + j * 1024, pack(acc[4 * j], acc[4 * j + 1]), pack(acc[4 * j + 2], acc[4 * j + 3]),
                       pack(acc[4 * j + 4], acc[4 * j + 5]), pack(acc[4 * j + 6], acc[4 * j + 7]));
    if constexpr (BLOCKS % 2)
        store_matrices(place + (BLOCKS - 1) * 1024, pack(acc[4 * BLOCKS - 4], acc[4 * BLOCKS - 3]),
                       pack(acc[4 * BLOCKS - 2], acc[4 * BLOCKS - 1]));
}

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

__device__ __forceinline__ float* partial_lse_at(const Params& p, int split, int2 row) {
    return p.partial_lse + ((i64)split * p.max_total_q + row.x) * p.heads + row.y;
}

__device__ __forceinline__ int chunks_of(int tokens) { return tokens / CHUNK + (tokens % CHUNK != 0); }

// Finds the request and tile of this block, the chunks of its split and what each row sees. One warp.
__device__ __forceinline__ void locate(const Params& p, Shared& s, int lane) {
    const u32 wanted = blockIdx.x / CLUSTER / p.splits;
    const int split = blockIdx.x / CLUSTER % p.splits;
    constexpr int SHARED_ROWS = TILE_N * CLUSTER;
    u32 seen = 0;
    int request = -1, first = 0, queries = 0, length = 0;
    u32 tile = 0;
    for (int base = 0; base < p.batch; base += 32) {
        const int i = base + lane;
        const bool real = i < p.batch;
        const int start = real ? p.cu_seqlens_q[i] : 0;
        const int count = real ? max(p.cu_seqlens_q[i + 1] - start, 0) : 0;
        const int cached = real ? p.cache_seqlens[i] : 0;
        const u32 tiles = ((u32)count * p.heads + SHARED_ROWS - 1) / SHARED_ROWS;
        u32 upto = tiles;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const u32 below = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += below;
        }
        const u32 found = __ballot_sync(~0u, wanted < seen + upto);
        if (found) {
            const int at = __ffs(found) - 1;
            request = base + at;
            tile = wanted - seen - __shfl_sync(~0u, upto - tiles, at);
            first = __shfl_sync(~0u, start, at);
            queries = __shfl_sync(~0u, count, at);
            length = __shfl_sync(~0u, cached, at);
            break;
        }
        seen += __shfl_sync(~0u, upto, 31);
    }
    // A length that the table can't hold would index past it.
    length = (int)min((i64)max(length, 0), (i64)p.table_width * p.page_size);
    queries = min(queries, max(p.total_q - first, 0));
    const int chunks = chunks_of(length);
    const int per = chunks <= p.single_split_chunks ? chunks : (chunks + p.splits - 1) / p.splits;
    int lowest = 0x7FFFFFFF, highest = 0;
    for (int n = lane; n < TILE_N; n += 32) {
        const u32 r = tile * SHARED_ROWS + blockIdx.x % CLUSTER * TILE_N + n;
        int visible = 0;
        int2 row = make_int2(-1, 0);
        const int t = r / p.heads;
        if (t < queries && first + t >= 0) {
            row = make_int2(first + t, r % p.heads);
            visible = p.query_cache_seqlens ? p.query_cache_seqlens[row.x] : length - queries + 1 + t;
            visible = min(max(visible, 0), length);
            lowest = min(lowest, visible);
            highest = max(highest, visible);
        }
        s.row[n] = row;
        s.visible[n] = visible;
    }
    lowest = __reduce_min_sync(~0u, lowest);
    highest = __reduce_max_sync(~0u, highest);
    if (lane == 0) {
        s.request = request;
        s.begin = (int)min((i64)split * per, (i64)chunks);
        s.end = min(s.begin + per, chunks);
        // The blocks of a cluster walk the same chunks.
        if (CLUSTER == 1) s.end = min(s.end, chunks_of(highest));
        s.length = length;
        s.single = per >= chunks;
        s.min_visible = lowest;
        s.max_visible = highest;
    }
}

// Rows of no request, shared out over the grid. One warp.
__device__ __forceinline__ void clear_unclaimed(const Params& p, int lane) {
    const int claimed = max(p.cu_seqlens_q[p.batch], 0);
    const i64 rows = (i64)(p.total_q - claimed) * p.heads;
    for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
        const int2 row = make_int2(claimed + (int)(r / p.heads), (int)(r % p.heads));
        char* out = p.output + 2 * (row.x * p.output_stride_query + row.y * p.output_stride_head);
        for (int c = lane; c < RANK / 8; c += 32) ((uint4*)out)[c] = make_uint4(0, 0, 0, 0);
        for (int k = lane; k < p.splits; k += 32) *partial_lse_at(p, k, row) = NONE;
        if (lane == 0) p.lse[row.x * p.lse_stride_query + row.y * p.lse_stride_head] = NONE;
    }
}

// This split sees nothing of this tile.
__device__ void publish_nothing(const Params& p, const Shared& s, int split) {
    for (int n = threadIdx.x >> 5; n < TILE_N; n += blockDim.x >> 5) {
        const int2 row = s.row[n];
        if (row.x < 0) continue;
        const int lane = threadIdx.x & 31;
        if (lane == 0) *partial_lse_at(p, split, row) = NONE;
        if (s.single && split == 0) {
            char* out = p.output + 2 * (row.x * p.output_stride_query + row.y * p.output_stride_head);
            for (int c = lane; c < RANK / 8; c += 32) ((uint4*)out)[c] = make_uint4(0, 0, 0, 0);
            if (lane == 0) p.lse[row.x * p.lse_stride_query + row.y * p.lse_stride_head] = NONE;
        }
    }
}

struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ void advance(int by) {
        slot += by;
        if (slot >= SLOTS) {
            slot -= SLOTS;
            phase ^= 1;
        }
    }
    __device__ Ring at(int by) const {
        Ring r = *this;
        r.advance(by);
        return r;
    }
};

// Loading order within a chunk: the rope box, then the two accumulating warpgroups' boxes in turn, so that
// slots become free in about the order in which they are filled.
__device__ __forceinline__ constexpr int box_at(int position) {
    return position == 0 ? SUBTILES - 1 : (position - 1) / 2 + 4 * ((position - 1) & 1);
}

// Loads every FEEDERS-th box, beginning with number `feeder`.
__device__ __forceinline__ void feed(const Params& p, const TensorMap* map, Shared& s, u32 ring, int feeder, int lane) {
    const int* table = p.page_table + s.request * p.table_stride;
    const int pages = max(CHUNK / p.page_size, 1);  // per chunk
    const int rows = min(p.page_size, CHUNK);       // of a page in a chunk
    const int batched = 32 / pages;                 // chunks whose page ids one warp load brings
    const int last = (s.length - 1) / p.page_size;
    // Boxes take turns between the blocks of a cluster, and FEEDERS is even.
    const bool loads = lane == 0 && (CLUSTER == 1 || (feeder & 1) == (int)cluster_rank());
    Ring at;
    at.advance(feeder);
    int position = feeder, ids = 0, base = 0, upto = s.begin;
    for (int chunk = s.begin; chunk < s.end;) {
        const int first = (int)((i64)chunk * CHUNK / p.page_size);
        if (chunk >= upto) {
            base = first;
            upto = chunk + batched;
            // Outside the cache: TMA fills with 0 and reads nothing.
            ids = base + lane <= last ? table[base + lane] : p.num_pages;
            if (ids < 0) ids = p.num_pages;
        }
        const u32 full = shared_address(&s.full[at.slot]);
        const int row = (int)((i64)chunk * CHUNK % p.page_size);
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
        if (lane == 0) barrier_expect(full, SLOT_BYTES);
        for (int k = 0; k < pages; ++k) {
            const int page = __shfl_sync(~0u, ids, first - base + k);
            if (loads)
                load_box(ring + at.slot * SLOT_BYTES + k * rows * 128, map, box_at(position) * 64, row, page, full);
        }
        at.advance(FEEDERS);
        position += FEEDERS;
        if (position >= SUBTILES) {
            position -= SUBTILES;
            ++chunk;
        }
    }
}

// Values of rows that some query must not see: those that no query sees become 0, and of the others what
// is NaN or infinite (0 * NaN would reach the queries that do not see them; those that do have it in their
// scores).
__device__ __forceinline__ void clean_values(const Shared& s, int chunk, u32 ring, Ring at, int thread) {
    const int first = max(s.min_visible - chunk * CHUNK, 0), unseen = s.max_visible - chunk * CHUNK;
    const int units = (CHUNK - first) * 8;
    for (int position = 1; position < SUBTILES; ++position) {
        const u32 box = ring + at.at(position).slot * SLOT_BYTES + first * 128;
        for (int u = thread; u < units; u += 128) {
            const u32 address = box + u * 16;
            u32 a = 0, b = 0, c = 0, d = 0;
            if (first + (u >> 3) < unseen) {
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                             : "r"(address)
                             : "memory");
                a = finite_pair(a), b = finite_pair(b), c = finite_pair(c), d = finite_pair(d);
            }
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
                         : "memory");
        }
    }
}

// Products of boxes [FROM, TO) of a chunk with the queries.
template <int FROM, int TO>
__device__ __forceinline__ void add_scores(Shared& s, float (&acc)[TILE_N / 2], u32 q, u32 ring, Ring at) {
#pragma unroll
    for (int position = FROM; position < TO; ++position) {
        const Ring box = at.at(position);
        barrier_wait(shared_address(&s.full[box.slot]), box.phase);
        mma_fence();
        const u64 rows = operand(ring + box.slot * SLOT_BYTES);
        const u64 queries = operand(q + box_at(position) * Q_SUBTILE_BYTES);
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_scores(acc, rows + 2 * k, queries + 2 * k, position + k > 0);
    }
    mma_commit();
}

// Scores and softmax: warpgroup 2.
__device__ __forceinline__ void score(const Params& p, Shared& s, u32 q, u32 weights, u32 ring, int split) {
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    const int own = lane_column(lane);
    float total[TILE_N / 4] = {};  // of this thread's rows
    for (int n = lane; n < TILE_N; n += 32) s.top[warp][n] = make_float2(LOWEST, 0.0f);
    __syncwarp();
    Ring at;
    int buffer = 0, parity = 0;
    u32 buffer_phase = 0;
    float next[TILE_N / 2];
    if (EARLY > 0) add_scores<0, EARLY>(s, next, q, ring, at);
    for (int chunk = s.begin; chunk < s.end; ++chunk) {
        add_scores<EARLY, SUBTILES>(s, next, q, ring, at);
        mma_wait<0>();
        pin(next);
        if (lane == 0) release_slot(shared_address(&s.empty[at.slot]));  // the rope box serves the scores alone
        float acc[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) acc[i] = next[i];
        if (EARLY > 0 && chunk + 1 < s.end) add_scores<0, EARLY>(s, next, q, ring, at.at(SUBTILES));
        const bool edge = chunk * CHUNK > s.min_visible - CHUNK;
        if (edge) {
            const int token = chunk * CHUNK + 16 * warp + (lane >> 2);
#pragma unroll
            for (int i = 0; i < TILE_N / 2; ++i) {
                const int visible = s.visible[8 * (i >> 2) + 2 * (lane & 3) + (i & 1)];
                if (token + 4 * (i & 2) >= visible) acc[i] = NONE;
            }
        }
        {
            float most[TILE_N / 4];
#pragma unroll
            for (int i = 0; i < TILE_N / 4; ++i)
                most[i] = fmaxf(acc[4 * (i >> 1) + (i & 1)], acc[4 * (i >> 1) + 2 + (i & 1)]);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) s.peer[parity][warp][32 * g + own] = reduce_group<Max>(most, g, lane);
        }
        group_sync<2, 128>();
        float factor[GROUPS];
        bool changed = false;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int n = 32 * g + own;
            const float(&peer)[4][GROUPS * 32] = s.peer[parity];
            const float found = fmaxf(fmaxf(peer[0][n], peer[1][n]), fmaxf(peer[2][n], peer[3][n]));
            if (n >= TILE_N) continue;
            const float before = s.top[warp][n].x, top = fmaxf(before, found * p.score_scale);
            factor[g] = exp2_fast(before - top);
            changed |= top != before;
            s.top[warp][n] = make_float2(top, factor[g]);
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            const float4 m = *(const float4*)&s.top[warp][8 * j + 2 * (lane & 3)];
            acc[4 * j] = exp2_fast(fmaf(acc[4 * j], p.score_scale, -m.x));
            acc[4 * j + 1] = exp2_fast(fmaf(acc[4 * j + 1], p.score_scale, -m.z));
            acc[4 * j + 2] = exp2_fast(fmaf(acc[4 * j + 2], p.score_scale, -m.x));
            acc[4 * j + 3] = exp2_fast(fmaf(acc[4 * j + 3], p.score_scale, -m.z));
            total[2 * j] = fmaf(total[2 * j], m.y, acc[4 * j] + acc[4 * j + 2]);
            total[2 * j + 1] = fmaf(total[2 * j + 1], m.w, acc[4 * j + 1] + acc[4 * j + 3]);
        }
        barrier_wait(shared_address(&s.p_free[buffer]), buffer_phase ^ 1);
        store_transposed(weights + buffer * P_BYTES, acc, warp, lane);
        changed = __any_sync(~0u, changed);
        if (warp == 0) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                if (32 * g + own < TILE_N) s.scale[buffer][32 * g + own] = factor[g];
            if (lane == 0) s.changed[buffer] = changed;
        }
        if (edge) clean_values(s, chunk, ring, at, thread);
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.p_ready[buffer]));
        parity ^= 1;
        at.advance(SUBTILES);
        if (++buffer == P_BUFFERS) buffer = 0, buffer_phase ^= 1;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) s.peer[parity][warp][32 * g + own] = reduce_group<Sum>(total, g, lane);
    group_sync<2, 128>();
    if (warp == 0) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int n = 32 * g + own;
            const float(&peer)[4][GROUPS * 32] = s.peer[parity];
            const float sum = (peer[0][n] + peer[1][n]) + (peer[2][n] + peer[3][n]);
            if (n >= TILE_N) continue;
            s.inverse[n] = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int2 row = s.row[n];
            if (row.x < 0) continue;
            const float lse = sum == 0.0f ? NONE : (s.top[0][n].x + log2f(sum)) * LN2;
            *partial_lse_at(p, split, row) = lse;
            if (s.single) p.lse[row.x * p.lse_stride_query + row.y * p.lse_stride_head] = lse;
        }
    }
    group_sync<3, 384>();
}

// Output columns [256 * group, 256 * group + 256): warpgroups 0 and 1.
template <int group>
__device__ __forceinline__ void accumulate(const Params& p, Shared& s, u32 q, u32 weights, u32 ring, int split) {
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    float acc[4][TILE_N / 2];
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) acc[t][i] = 0.0f;
    Ring at;
    int buffer = 0;
    u32 buffer_phase = 0;
    for (int chunk = s.begin; chunk < s.end; ++chunk) {
        barrier_wait(shared_address(&s.p_ready[buffer]), buffer_phase);
        if (s.changed[buffer]) {
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j) {
                const float2 scale = *(const float2*)&s.scale[buffer][8 * j + 2 * (lane & 3)];
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    acc[t][4 * j] *= scale.x;
                    acc[t][4 * j + 1] *= scale.y;
                    acc[t][4 * j + 2] *= scale.x;
                    acc[t][4 * j + 3] *= scale.y;
                }
            }
        }
        const u64 columns = operand(weights + buffer * P_BYTES);
        mma_fence();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const u64 values = operand(ring + at.at(1 + 2 * t + group).slot * SLOT_BYTES);
#pragma unroll
            for (int k = 0; k < 4; ++k) mma_values(acc[t], values + k * (2048 >> 4), columns + 2 * k, 1);
            mma_commit();
        }
#define RELEASE(T)     \
    mma_wait<3 - T>(); \
    if (lane == 0) release_slot(shared_address(&s.empty[at.at(1 + 2 * T + group).slot]));
        RELEASE(0)
        RELEASE(1)
        RELEASE(2)
        RELEASE(3)
#undef RELEASE
#pragma unroll
        for (int t = 0; t < 4; ++t) pin(acc[t]);
        if (lane == 0) barrier_arrive(shared_address(&s.p_free[buffer]));
        at.advance(SUBTILES);
        if (++buffer == P_BUFFERS) buffer = 0, buffer_phase ^= 1;
    }
    group_sync<3, 384>();  // the sums are there, and the query tile is free to stage the output
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
        const float2 inverse = *(const float2*)&s.inverse[8 * j + 2 * (lane & 3)];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            acc[t][4 * j] *= inverse.x;
            acc[t][4 * j + 1] *= inverse.y;
            acc[t][4 * j + 2] *= inverse.x;
            acc[t][4 * j + 3] *= inverse.y;
        }
    }
    const i64 partial_row = (i64)split * p.max_total_q;
#if PARTIAL_F32
    if (!s.single) {
        const u32 stage = q + group * TILE_N * STAGE_PITCH * 4;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (t) group_sync<4 + group, 128>();
#pragma unroll
            for (int i = 0; i < TILE_N / 2; ++i) {
                const int n = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                const int column = 16 * warp + (lane >> 2) + 4 * (i & 2);
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(stage + (n * STAGE_PITCH + column) * 4), "f"(acc[t][i])
                             : "memory");
            }
            group_sync<4 + group, 128>();
#pragma unroll 4
            for (int u = thread; u < TILE_N * 16; u += 128) {
                const int2 row = s.row[u >> 4];
                if (row.x < 0) continue;
                float4 v;
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                             : "r"(stage + ((u >> 4) * STAGE_PITCH + 4 * (u & 15)) * 4)
                             : "memory");
                float* to = (float*)p.partial_output + ((partial_row + row.x) * p.heads + row.y) * RANK;
                *(float4*)(to + group * 256 + t * 64 + 4 * (u & 15)) = v;
            }
        }
        return;
    }
#endif
    const u32 stage = q + group * 4 * P_BYTES;
#pragma unroll
    for (int t = 0; t < 4; ++t) store_transposed(stage + t * P_BYTES, acc[t], warp, lane);
    group_sync<4 + group, 128>();
#pragma unroll 4
    for (int u = thread; u < TILE_N * 32; u += 128) {
        const int n = u >> 5, t = (u >> 3) & 3, unit = u & 7;
        const int2 row = s.row[n];
        if (row.x < 0) continue;
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(stage + t * P_BYTES + n * 128 + ((unit ^ (n & 7)) << 4))
                     : "memory");
        char* to = s.single ? p.output + 2 * (row.x * p.output_stride_query + row.y * p.output_stride_head)
                            : p.partial_output + 2 * ((partial_row + row.x) * p.heads + row.y) * RANK;
        *(uint4*)(to + 2 * (group * 256 + 8 * (u & 31))) = v;
    }
}

// The query tile, swizzled as TMA would; rows of no query are 0.
__device__ __forceinline__ void load_queries(const Params& p, const Shared& s, u32 q, int thread, int threads) {
    for (int u = thread; u < TILE_N * 72; u += threads) {
        const int n = u / 72, unit = u % 72;
        const int2 row = s.row[n];
        const char* from = p.q + 2 * (max(row.x, 0) * p.q_stride_query + row.y * p.q_stride_head + 8 * unit);
        const u32 to = q + (unit >> 3) * Q_SUBTILE_BYTES + n * 128 + (((unit & 7) ^ (n & 7)) << 4);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(row.x < 0 ? 0 : 16)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    proxy_fence();
}

// The other block of a cluster may still write to this one's shared memory. Called at the end of each role: common
// code behind the roles makes ptxas serialise the products.
__device__ __forceinline__ void leave() {
#if CLUSTER > 1
    __syncwarp();
    cluster_sync();
#endif
}

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(512, 1)
    decode(const __grid_constant__ TensorMap map, const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const u32 q = shared_address(memory);
    const u32 weights = q + SUBTILES * Q_SUBTILE_BYTES;
    const u32 ring = weights + P_BUFFERS * P_BYTES;
    Shared& s = *(Shared*)(memory + (ring + SLOTS * SLOT_BYTES - q));
    static_assert(sizeof(Shared) <= MISC_BYTES);
    // Through a shuffle, so that the compiler knows that a warp takes one branch.
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int split = blockIdx.x / CLUSTER % p.splits;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (warp == 0) locate(p, s, lane);
    if (warp == 1) {
        for (int i = lane; i < SLOTS; i += 32) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), 4 * CLUSTER);
        }
        if (lane < P_BUFFERS) {
            barrier_init(shared_address(&s.p_ready[lane]), 4);
            barrier_init(shared_address(&s.p_free[lane]), 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    if (s.request < 0 || s.begin >= s.end) {
        if (s.request >= 0) publish_nothing(p, s, split);
        if (warp == 13) clear_unclaimed(p, lane);
        return;
    }
    if (warp < 12) {
        load_queries(p, s, q, threadIdx.x, 384);
        group_sync<1, 384>();
    }
    if (warp < 4) {
        grow_registers();
        accumulate<0>(p, s, q, weights, ring, split);
        leave();
    } else if (warp < 8) {
        grow_registers();
        accumulate<1>(p, s, q, weights, ring, split);
        leave();
    } else if (warp < 12) {
        score_registers();
        score(p, s, q, weights, ring, split);
        leave();
    } else {
        shrink_registers();
        feed(p, &map, s, ring, warp - 12, lane);
        if (warp == 13) clear_unclaimed(p, lane);
        leave();
    }
}

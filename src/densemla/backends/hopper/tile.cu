// What the decode kernels share: finding the work of a block, its queries and pages, and writing results.
//
// The kernel's file is preceded by TILE_N, query rows of a tile, and PAIRED: two blocks, a cluster, decode two
// neighbouring tiles of a request, and what either loads of the cache goes to both.

constexpr int CHUNK = 64;
constexpr int RANK = 512;
constexpr int BOXES = 9;  // of 64 columns, to a 576-wide row; the last is the rope part
constexpr int BOX_ROW_BYTES = KV_FP8 ? 64 : 128;
constexpr int BOX_BYTES = CHUNK * BOX_ROW_BYTES;
constexpr int BLOCKS = 1 + PAIRED;        // of a cluster
constexpr int P_BYTES = TILE_N * 128;     // of a box of the query tile, and of a chunk's weights
constexpr float LOWEST = -3.0e38f;        // maximum of nothing; finite, so that differences are never NaN
constexpr float LN2 = 0.693147180559945309f;
// Weights are relative to a base that follows the maximum only when it is left this far behind (log2), and the
// accumulators need no scaling meanwhile. bf16 weights are as exact at any magnitude; of f16's few powers of two most are
// wanted at the other end.
constexpr float SLACK = KV_FP8 ? 2.0f : 8.0f;

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
    const float *q_scale, *kv_scale;  // null: 1
};

struct Tile {
    int request;  // negative: no tile for this block
    int begin, end, single, length, min_visible, max_visible;  // of all tiles of the cluster
    int visible[TILE_N];
    int2 row[TILE_N];  // query index and head of a tile row; query < 0: no row
#if Q_FP8 || KV_FP8
    float score_scale, value_scale;
#endif
#if KV_FP8
    alignas(8) float row_scale[TILE_N];  // score_scale, and what the query tile's rows were divided by
#endif
};

// What turns scores into log2 units.
__device__ __forceinline__ float score_scale(const Params& p, const Tile& t) {
#if Q_FP8 || KV_FP8
    return t.score_scale;
#else
    return p.score_scale;
#endif
}

// What the accumulators of a row are multiplied by in the end.
__device__ __forceinline__ float inverse_of(const Tile& t, float sum) {
#if Q_FP8 || KV_FP8
    return sum == 0.0f ? 0.0f : t.value_scale / sum;
#else
    return sum == 0.0f ? 0.0f : 1.0f / sum;
#endif
}

// Elements that are NaN or infinite become 0.
__device__ __forceinline__ u32 finite_pair(u32 pair) {
    constexpr u32 EXPONENT = 0x7F80u;
    if ((pair & EXPONENT) == EXPONENT) pair &= 0xFFFF0000u;
    if ((pair & (EXPONENT << 16)) == (EXPONENT << 16)) pair &= 0x0000FFFFu;
    return pair;
}

__device__ __forceinline__ float* partial_lse_at(const Params& p, int split, int2 row) {
    return p.partial_lse + ((i64)split * p.max_total_q + row.x) * p.heads + row.y;
}

__device__ __forceinline__ int chunks_of(int tokens) { return tokens / CHUNK + (tokens % CHUNK != 0); }

__device__ __forceinline__ int split_of_block(const Params& p) { return blockIdx.x / BLOCKS % p.splits; }

// Finds the request and tile of this block, the chunks of its split and what each row sees. One warp.
__device__ __forceinline__ void locate(const Params& p, Tile& s, int lane) {
    constexpr int ROWS = TILE_N * BLOCKS;
    const u32 wanted = blockIdx.x / BLOCKS / p.splits;
    const int split = split_of_block(p), own = blockIdx.x % BLOCKS * TILE_N;
    u32 seen = 0;
    int request = -1, first = 0, queries = 0, length = 0;
    u32 tile = 0;
    for (int base = 0; base < p.batch; base += 32) {
        const int i = base + lane;
        const bool real = i < p.batch;
        const int start = real ? p.cu_seqlens_q[i] : 0;
        const int count = real ? max(p.cu_seqlens_q[i + 1] - start, 0) : 0;
        const int cached = real ? p.cache_seqlens[i] : 0;
        const u32 tiles = ((u32)count * p.heads + ROWS - 1) / ROWS;
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
    for (int n = lane; n < ROWS; n += 32) {
        const u32 r = tile * ROWS + n;
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
        if (PAIRED && (u32)(n - own) >= TILE_N) continue;
        s.row[n - own] = row;
        s.visible[n - own] = visible;
    }
    lowest = __reduce_min_sync(~0u, lowest);
    highest = __reduce_max_sync(~0u, highest);
    if (lane == 0) {
        s.request = request;
        s.begin = (int)min((i64)split * per, (i64)chunks);
        s.end = min(min(s.begin + per, chunks), chunks_of(highest));
        s.length = length;
        s.single = per >= chunks;
#if Q_FP8 || KV_FP8
        s.value_scale = p.kv_scale ? *p.kv_scale : 1.0f;
        s.score_scale = p.score_scale * s.value_scale * (p.q_scale ? *p.q_scale : 1.0f);
#endif
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
__device__ void publish_nothing(const Params& p, const Tile& s, int split) {
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

// The LSE of a row of this split, whose weights relative to `base` (log2) have this sum.
__device__ __forceinline__ void write_lse(const Params& p, const Tile& t, int2 row, float base, float sum, int split) {
    const float lse = sum == 0.0f ? NONE : (base + log2f(sum)) * LN2;
    *partial_lse_at(p, split, row) = lse;
    if (t.single) p.lse[row.x * p.lse_stride_query + row.y * p.lse_stride_head] = lse;
}

// Values of rows that some query must not see: those that no query sees become 0, and of the others what
// is NaN or infinite (0 * NaN would reach the queries that do not see them; those that do have it in their
// scores).
__device__ __forceinline__ void clean_box(const Tile& t, int chunk, u32 box, int thread) {
    const int first = max(t.min_visible - chunk * CHUNK, 0), unseen = t.max_visible - chunk * CHUNK;
    for (int u = thread; u < (CHUNK - first) * 8; u += 128) {
        const u32 address = box + first * 128 + u * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (first + (u >> 3) < unseen) {
            v = load_16(address);
            v.x = finite_pair(v.x), v.y = finite_pair(v.y), v.z = finite_pair(v.z), v.w = finite_pair(v.w);
        }
        store_16(address, v);
    }
}

// Copies the 4 staged boxes of half of the output columns, bf16 and swizzled, to the output or to the split's partial.
__device__ __forceinline__ void copy_staged(const Params& p, const Tile& s, u32 stage, int split, int half) {
    const int thread = threadIdx.x & 127;
    const i64 partial_row = (i64)split * p.max_total_q;
    writers_sync(half);
#pragma unroll 4
    for (int u = thread; u < TILE_N * 32; u += 128) {
        const int n = u / 32, t = (u >> 3) % 4, unit = u & 7;
        const int2 row = s.row[n];
        if (row.x < 0) continue;
        char* to = s.single ? p.output + 2 * (row.x * p.output_stride_query + row.y * p.output_stride_head)
                            : p.partial_output + 2 * ((partial_row + row.x) * p.heads + row.y) * RANK;
        *(uint4*)(to + 2 * (half * RANK / 2 + 64 * t + 8 * unit)) = load_16(stage + t * P_BYTES + n * 128 + ((unit ^ (n & 7)) << 4));
    }
}

// Page ids of the chunks to come, a warp's worth at a time.
struct Pages {
    const int* table;
    int per_chunk, rows, batched, last;  // rows: of a page in a chunk
    int ids, base, upto;

    __device__ Pages(const Params& p, const Tile& s) {
        table = p.page_table + s.request * p.table_stride;
        per_chunk = max(CHUNK / p.page_size, 1);
        rows = min(p.page_size, CHUNK);
        batched = 32 / per_chunk;
        last = (s.length - 1) / p.page_size;
        upto = s.begin;
    }

    // Number of the first page of a chunk among the ids held; every lane of the warp takes part.
    __device__ __forceinline__ int find(const Params& p, int chunk, int lane) {
        const int first = (int)((i64)chunk * CHUNK / p.page_size);
        if (chunk >= upto) {
            base = first;
            upto = chunk + batched;
            // Outside the cache: TMA fills with 0 and reads nothing.
            ids = base + lane <= last ? table[base + lane] : p.num_pages;
            if (ids < 0) ids = p.num_pages;
        }
        return first - base;
    }

    // One box; lane 0 issues it, unless the other block of the cluster does.
    __device__ __forceinline__ void load(const Params& p, const TensorMap* map, int chunk, int at, u32 to, int column,
                                         u32 full, int lane, bool here = true) const {
        const int row = (int)((i64)chunk * CHUNK % p.page_size);
        if (lane == 0) barrier_expect(full, BOX_BYTES);
        for (int k = 0; k < per_chunk; ++k) {
            const int page = __shfl_sync(~0u, ids, at + k);
            if (lane == 0 && here)
                (PAIRED ? load_box_for_both : load_box)(to + k * rows * BOX_ROW_BYTES, map, column, row, page, full);
        }
    }
};

// Of a row of no query, something that may be read.
__device__ __forceinline__ const char* query_at(const Params& p, int2 row, int column) {
    return p.q + (2 - Q_FP8) * (max(row.x, 0) * p.q_stride_query + row.y * p.q_stride_head + column);
}

// The first COUNT boxes of the query tile, swizzled as TMA would; rows of no query are 0.
template <int COUNT>
__device__ __forceinline__ void load_queries(const Params& p, const Tile& s, u32 q, int thread, int threads) {
    for (int u = thread; u < TILE_N * COUNT * 8; u += threads) {
        const int n = u / (COUNT * 8), unit = u % (COUNT * 8);
        const int2 row = s.row[n];
        const u32 to = q + (unit >> 3) * P_BYTES + n * 128 + (((unit & 7) ^ (n & 7)) << 4);
        const char* from = query_at(p, row, 8 * unit);
#if Q_FP8
        const uint2 narrow = row.x < 0 ? make_uint2(0, 0) : *(const uint2*)from;
        const uint2 low = widen(narrow.x), high = widen(narrow.y);
        store_16(to, make_uint4(low.x, low.y, high.x, high.y));
#else
        load_async(to, from, row.x >= 0);
#endif
    }
#if !Q_FP8
    await_loads();
#endif
    proxy_fence();
}

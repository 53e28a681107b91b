// Merges the partials of rows that more than one split scanned. One unit is 256 columns of one row, shared
// by UNIT_WARPS warps that take the splits in turn; the order of every sum is fixed by the split numbers.

constexpr int CHUNK = 64;
constexpr int RANK = 512;
constexpr int BATCH = 8 >> PARTIAL_F32;
constexpr float LOG2E = 1.442695040888963407f;
constexpr float LN2 = 0.693147180559945309f;

struct Params {
    char* output;
    float* lse;
    const char* partial_output;
    const float* partial_lse;
    const int* cache_seqlens;
    const int* cu_seqlens_q;
    i64 output_stride_query, output_stride_head;
    i64 lse_stride_query, lse_stride_head;
    i64 table_tokens;
    int batch, total_q, max_total_q, heads;
    int splits, single_split_chunks;
};

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Splits of the row's request that scan anything; 0 for a row of no request.
__device__ __forceinline__ int live_splits(const Params& p, int query, int lane) {
    int starts = 0;  // requests that start at or before this query
    for (int base = 0; base < p.batch; base += 32) {
        const int i = base + lane;
        const bool before = i < p.batch && p.cu_seqlens_q[i] <= query;
        const int found = __popc(__ballot_sync(~0u, before));
        starts += found;
        if (found < 32) break;
    }
    if (starts == 0 || query >= p.cu_seqlens_q[starts]) return 0;
    const int length = (int)min((i64)max(p.cache_seqlens[starts - 1], 0), p.table_tokens);
    const int chunks = length / CHUNK + (length % CHUNK != 0);
    if (chunks == 0) return 0;
    const int per = chunks <= p.single_split_chunks ? chunks : (chunks + p.splits - 1) / p.splits;
    return (chunks + per - 1) / per;
}

// Partials of BATCH splits, in flight together.
struct Batch {
    float lse[BATCH];
    uint4 bits[BATCH][1 + PARTIAL_F32];

    __device__ __forceinline__ void load(const Params& p, const float* lses, i64 step, i64 place, int first, int live) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int k = first + i * UNIT_WARPS;
            lse[i] = NONE;
            if (k >= live) continue;
            lse[i] = lses[k * step];
            const uint4* from = (const uint4*)(p.partial_output + (2 << PARTIAL_F32) * (k * step * RANK + place));
#pragma unroll
            for (int part = 0; part <= PARTIAL_F32; ++part) bits[i][part] = __ldcs(from + part);
        }
    }

    __device__ __forceinline__ void add(float (&acc)[8], float base) const {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (lse[i] == NONE) continue;  // an empty split's partial was never written
            const float weight = exp2_fast((lse[i] - base) * LOG2E);
            const uint4 a = bits[i][0];
#if PARTIAL_F32
            const uint4 b = bits[i][1];
            const float v[8] = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
                                __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
#else
            const float v[8] = {low_half(a.x), high_half(a.x), low_half(a.y), high_half(a.y),
                                low_half(a.z), high_half(a.z), low_half(a.w), high_half(a.w)};
#endif
#pragma unroll
            for (int c = 0; c < 8; ++c) acc[c] = fmaf(weight, v[c], acc[c]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(256) merge(const __grid_constant__ Params p) {
    constexpr int UNITS = 8 / UNIT_WARPS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, member = warp % UNIT_WARPS;
    const i64 unit = (i64)blockIdx.x * UNITS + warp / UNIT_WARPS;
    const i64 row = unit >> 1;
    const int half = unit & 1, query = (int)(row / p.heads), head = (int)(row % p.heads);
    const int live = query < p.total_q ? live_splits(p, query, lane) : 0;
    await_dependencies();
    float acc[8] = {}, total = 0.0f, top = NONE;
    if (live > 1) {
        const i64 step = (i64)p.max_total_q * p.heads;
        const float* lses = p.partial_lse + row;
        const i64 place = row * RANK + half * 256 + 8 * lane;
        Batch batch;
        // On their way while the weights are worked out.
        batch.load(p, lses, step, place, member, live);
        for (int k = lane; k < live; k += 32) top = fmaxf(top, lses[k * step]);
#pragma unroll
        for (int width = 16; width; width >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, width));
        const float base = top == NONE ? 0.0f : top;
        for (int k = lane; k < live; k += 32) total += exp2_fast((lses[k * step] - base) * LOG2E);
#pragma unroll
        for (int width = 16; width; width >>= 1) total += __shfl_xor_sync(~0u, total, width);
        batch.add(acc, base);
        for (int k = member + UNIT_WARPS * BATCH; k < live; k += UNIT_WARPS * BATCH) {
            batch.load(p, lses, step, place, k, live);
            batch.add(acc, base);
        }
    }
    if constexpr (UNIT_WARPS > 1) {
        __shared__ float parts[8][256];
#pragma unroll
        for (int i = 0; i < 8; ++i) parts[warp][8 * lane + i] = acc[i];
        __syncthreads();
        if (member) return;
#pragma unroll
        for (int k = 1; k < UNIT_WARPS; ++k)
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[i] += parts[warp + k][8 * lane + i];
    }
    if (live <= 1) return;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    uint4 out;
    out.x = pack(acc[0] * inverse, acc[1] * inverse);
    out.y = pack(acc[2] * inverse, acc[3] * inverse);
    out.z = pack(acc[4] * inverse, acc[5] * inverse);
    out.w = pack(acc[6] * inverse, acc[7] * inverse);
    char* to = p.output + 2 * (query * p.output_stride_query + head * p.output_stride_head + half * 256 + 8 * lane);
    *(uint4*)to = out;
    if (half == 0 && lane == 0)
        p.lse[query * p.lse_stride_query + head * p.lse_stride_head] =
            total == 0.0f ? NONE : top + log2f(total) * LN2;
}

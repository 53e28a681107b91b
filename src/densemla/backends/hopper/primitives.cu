// The instructions of sm_90a that these kernels are made of, one function each.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define NONE __int_as_float(0xff800000)

struct alignas(64) TensorMap {
    u64 words[16];
};

// Programmatic dependent launch: lets the next kernel begin; waits for the one before.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Dynamic shared memory of the block.
__device__ __forceinline__ char* shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same barrier of the cluster's block `rank`, after what this thread has read of what that block will replace.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Whether that phase is over by now.
__device__ __forceinline__ bool barrier_over(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

template <int ID, int THREADS>
__device__ __forceinline__ void group_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

template <int ID, int THREADS>
__device__ __forceinline__ bool group_any(bool mine) {
    u32 any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"((u32)mine), "n"(ID), "n"(THREADS)
        : "memory");
    return any;
}

__device__ __forceinline__ void writers_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory"); }

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int column, int row, int page, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(page), "r"(barrier)
        : "memory");
}

// The same place of both blocks of a cluster, and the same barrier.
__device__ __forceinline__ void load_box_for_both(u32 to, const TensorMap* map, int column, int row, int page,
                                                  u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(page), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

// Halves of a barrier over all threads of a cluster.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of an accumulator over the wait for it.
template <int COUNT>
__device__ __forceinline__ void pin(float (&acc)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// A copy that the compiler cannot move in among the products before, where it would have to wait for them.
__device__ __forceinline__ float copy_here(float x) {
    float y;
    asm volatile("mov.b32 %0, %1;" : "=f"(y) : "f"(x) : "memory");
    return y;
}

// Has an A operand at hand before the fence that follows.
__device__ __forceinline__ void pin(u32 (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i >> 2][i & 3])::"memory");
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

// Worked out where it is used: nvcc would keep all of a loop in registers.
__device__ __forceinline__ u64 fresh_operand(u32 address) {
    asm volatile("" : "+r"(address));
    return operand(address);
}

// MN-major over several boxes of 64 columns, BOX apart.
__device__ __forceinline__ u64 wide_operand(u32 address) { return fresh_operand(address) + ((u64)((8192 >> 4) - 1) << 16); }

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

// Four e4m3 as bf16, exactly.
__device__ __forceinline__ uint2 widen(u32 four) {
    uint2 wide;
    asm("{\n.reg .b16 low, high, a, b;\n.reg .b32 pair;\n.reg .f32 x, y;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 pair, low;\nmov.b32 {a, b}, pair;\n"
        "cvt.f32.f16 x, a;\ncvt.f32.f16 y, b;\ncvt.rn.bf16x2.f32 %0, y, x;\n"
        "cvt.rn.f16x2.e4m3x2 pair, high;\nmov.b32 {a, b}, pair;\n"
        "cvt.f32.f16 x, a;\ncvt.f32.f16 y, b;\ncvt.rn.bf16x2.f32 %1, y, x;\n}"
        : "=r"(wide.x), "=r"(wide.y)
        : "r"(four));
    return wide;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Four e4m3 as f16, exactly.
__device__ __forceinline__ uint2 widen_to_half(u32 four) {
    uint2 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(wide.x), "=r"(wide.y)
        : "r"(four));
    return wide;
}

// Two bf16 as f16, times a power of two.
__device__ __forceinline__ u32 half_pair(u32 pair, float by) {
    return pack_half(__uint_as_float(pair << 16) * by, __uint_as_float(pair & 0xFFFF0000u) * by);
}

// Bits of the largest magnitude of eight bf16.
__device__ __forceinline__ u32 largest_magnitude(uint4 v) {
    const u32 high = max(max(v.x & 0x7FFF0000u, v.y & 0x7FFF0000u), max(v.z & 0x7FFF0000u, v.w & 0x7FFF0000u));
    return max(high >> 16, max(max(v.x & 0x7FFFu, v.y & 0x7FFFu), max(v.z & 0x7FFFu, v.w & 0x7FFFu)));
}

// Four e4m3, of which what is NaN becomes 0.
__device__ __forceinline__ u32 without_nan(u32 four) {
    const u32 nan = ((four & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) >> 7;
    return four & ~(nan * 255u);
}

// Bytes 0 and 2, then 1 and 3.
__device__ __forceinline__ u32 regroup(u32 four) { return __byte_perm(four, 0, 0x3120); }

// Four matrices of 8 x 8 pairs of bytes, row r of matrix i from the address of lane 8 i + r, transposed.
__device__ __forceinline__ void load_matrices(u32* to, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
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

__device__ __forceinline__ void store_rows(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ uint4 load_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float4 load_floats(u32 address) {
    const uint4 v = load_16(address);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

__device__ __forceinline__ void store_float(u32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ void store_word(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// From global memory, or zeros.
__device__ __forceinline__ void load_async(u32 to, const char* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void await_loads() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Runs the Hopper kernels on a CPU, one cluster of blocks at a time: what primitives.cu wraps and what CUDA C++ has built in.
//
// A thread is a fiber. Fibers, TMA loads and products run in a random order, as early or as late as
// barriers and waits allow, some warps much slower than others: a missing wait shows as a wrong answer, and a wait too
// many as a deadlock. Not emulated: memory visibility (fences do nothing) and the registers of products in flight.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ SHARED_STORAGE

struct int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
To reinterpreted(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &v, sizeof to);
    return to;
}
inline float __int_as_float(unsigned v) { return reinterpreted<float>(v); }
inline float __uint_as_float(unsigned v) { return reinterpreted<float>(v); }
inline int __float_as_int(float v) { return reinterpreted<int>(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class A, class B>
auto max(A a, B b) { return a > b ? a : b; }
template <class A, class B>
auto min(A a, B b) { return a < b ? a : b; }
using std::fmaxf, std::fmaf, std::log2f;

constexpr int SHARED_BYTES = 227 * 1024;

namespace emulated {

typedef uint32_t u32;
typedef uint64_t u64;

struct Index { u32 x; };
Index blocks, threads;

enum Kind { READY, MBARRIER, NAMED, WARP, PRODUCTS, CLUSTER };

// What a fiber waits for.
struct Wait {
    Kind kind = READY;
    u32 which = 0;
    u64 until = 0;
};

struct Block;

struct Fiber {
    Block* block;
    Index index;
    Wait wait;
    bool started = false, done = false;
    u64 products = 0;           // issued
    std::vector<u64> commits;   // products issued before each
    u64 meetings = 0;           // of the cluster, this thread's arrivals
    jmp_buf at;
    ucontext_t context;
    std::unique_ptr<char[]> stack;
};

struct Mbarrier { int count = 0, pending = 0; int64_t bytes = 0; u64 phase = 0; };
struct Named { u32 arrived = 0, any = 0, result[2]; u64 generation = 0; };
struct Warp { u64 value[2][32], generation = 0; u32 arrived = 0; };

struct Product {
    int columns, a_transposed, b_transposed, keep;
    bool a_in_registers, half;  // half: f16, else bf16
    u64 a, b;
    float* d[128];
    const u32* registers[128];
    int issued = 0;
};
struct Warpgroup { std::deque<Product> products; u64 done = 0; };

struct Load { Block* block; u32 to; const u64* map; int column, row, page; u32 barrier; };

struct Block {
    alignas(1024) char memory[SHARED_BYTES];
    Index index;
    std::vector<Warp> warps;
    std::vector<Warpgroup> groups;
    std::vector<Mbarrier> mbarriers;
    Named named[16];
};

Block cluster[2];
u32 cluster_blocks;
Block* here;  // whose shared memory, barriers and warps are meant
std::vector<Fiber> fibers;
std::vector<Load> loads;
u64 met;  // arrivals of all threads of the cluster
Fiber* current;
jmp_buf scheduler;
void (*entry)();
std::mt19937_64 chance;
char failure[256];
u64 events;  // phases ended, products and loads carried out

[[noreturn]] void fail(const char* what, u64 a = 0, u64 b = 0) {
    std::snprintf(failure, sizeof failure, "block %u thread %u: %s (%llu, %llu)", here->index.x,
                  current ? current->index.x : 0, what, (unsigned long long)a, (unsigned long long)b);
    _longjmp(scheduler, 2);
}

char* at(u32 address, u32 bytes) {
    if (address + bytes > SHARED_BYTES || address % (bytes < 16 ? bytes : 16)) fail("a bad shared address", address, bytes);
    return here->memory + address;
}

Mbarrier& mbarrier(u32 address) {
    if (address % 8 || address >= SHARED_BYTES) fail("a bad mbarrier", address);
    Mbarrier& b = here->mbarriers[address / 8];
    if (!b.count) fail("an mbarrier used before its init", address);
    return b;
}

void settle(Mbarrier& b) {
    if (b.pending < 0) fail("too many arrivals at an mbarrier");
    if (b.pending || b.bytes) return;
    b.pending = b.count;
    ++b.phase;
    ++events;
}

bool over(const Block& b, const Wait& w) {
    switch (w.kind) {
        case MBARRIER: return (b.mbarriers[w.which / 8].phase & 1) != w.until;
        case NAMED: return b.named[w.which].generation > w.until;
        case WARP: return b.warps[w.which].generation > w.until;
        case PRODUCTS: return b.groups[w.which].done >= w.until;
        case CLUSTER: return met >= w.until;
        default: return true;
    }
}

__attribute__((noinline)) void wait_for(Wait w) {
    if (over(*here, w)) return;
    current->wait = w;
    if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

u64 (*exchange(u64 mine))[32] {
    const u32 number = current->index.x / 32;
    Warp& w = here->warps[number];
    const u64 generation = w.generation;
    w.value[generation & 1][current->index.x % 32] = mine;
    if (++w.arrived == 32) {
        w.arrived = 0;
        ++w.generation;
    } else {
        wait_for({WARP, number, generation});
    }
    return &here->warps[number].value[generation & 1];
}

u32 named_barrier(u32 id, u32 count, bool mine) {
    Named& b = here->named[id];
    const u64 generation = b.generation;
    b.any |= mine;
    if (++b.arrived == count) {
        b.result[generation & 1] = b.any;
        b.arrived = b.any = 0;
        ++b.generation;
        ++events;
    } else {
        wait_for({NAMED, id, generation});
    }
    return here->named[id].result[generation & 1];
}

float half_value(u32 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                           : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -magnitude : magnitude;
}

float value_of(u32 bits, bool half) { return half ? half_value(bits) : reinterpreted<float>(bits << 16); }

float value_at(u32 address, bool half) {
    const u32 swizzled = address ^ ((address >> 7 & 7) << 4);
    uint16_t bits;
    std::memcpy(&bits, at(swizzled, 2), 2);
    return value_of(bits, half);
}

// An operand in shared memory, [rows, 16], by its descriptor: PTX, "Asynchronous Warpgroup Level Matrix Shared Memory
// Layout".
void read_operand(u64 descriptor, int rows, bool transposed, bool half, float (*to)[16]) {
    if (descriptor >> 62 != 1) fail("an operand without 128-byte swizzle");
    const u32 start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
              stride = (descriptor >> 32 & 0x3FFF) << 4;
    for (int r = 0; r < rows; ++r)
        for (int k = 0; k < 16; ++k)
            to[r][k] = value_at(transposed ? start + r / 64 * leading + r % 64 * 2 + k / 8 * stride + k % 8 * 128
                                           : start + r / 8 * stride + r % 8 * 128 + k * 2,
                                half);
}

void multiply(const Product& p) {
    static float a[64][16], b[256][16];
    if (p.a_in_registers) {
        for (int t = 0; t < 128; ++t)
            for (int i = 0; i < 8; ++i) {
                const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2), k = t % 4 * 2 + i % 2 + 8 * (i / 4);
                a[row][k] = value_of(p.registers[t][i / 2] >> 16 * (i % 2) & 0xFFFF, p.half);
            }
    } else {
        read_operand(p.a, 64, p.a_transposed, p.half, a);
    }
    read_operand(p.b, p.columns, p.b_transposed, p.half, b);
    for (int t = 0; t < 128; ++t)
        for (int i = 0; i < p.columns / 2; ++i) {
            const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + t % 4 * 2 + i % 2;
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
            p.d[t][i] = p.keep ? p.d[t][i] + sum : sum;
        }
}

void issue(const Product& like, float* d, const u32* registers) {
    const u32 thread = current->index.x % 128;
    Warpgroup& g = here->groups[current->index.x / 128];
    const u64 place = current->products++ - g.done;
    if (place == g.products.size()) g.products.push_back(like);
    Product& p = g.products[place];
    if (p.a != like.a || p.b != like.b || p.keep != like.keep || p.columns != like.columns)
        fail("threads of a warpgroup issue different products", like.a, like.b);
    p.d[thread] = d;
    p.registers[thread] = registers;
    ++p.issued;
}

bool multiply_next(Warpgroup& g) {
    if (g.products.empty() || g.products.front().issued < 128) return false;
    multiply(g.products.front());
    g.products.pop_front();
    ++g.done;
    ++events;
    return true;
}

// A box of a tensor [pages, rows, columns] into shared memory, zeros outside of it, swizzled by 128 bytes or, bytes, by 64.
void complete(const Load& l) {
    here = l.block;
    const u64 *sizes = l.map + 1, *strides = l.map + 4, *box = l.map + 6, size = l.map[9];
    for (u64 r = 0; r < box[1]; ++r)
        for (u64 c = 0; c < box[0]; ++c) {
            const u64 column = l.column + c, row = l.row + r;
            char v[2] = {};
            if (column < sizes[0] && row < sizes[1] && (u64)l.page < sizes[2])
                std::memcpy(v, (const char*)l.map[0] + l.page * strides[1] + row * strides[0] + size * column, size);
            const u32 address = l.to + (r * box[0] + c) * size;
            std::memcpy(at(address ^ ((address >> 7 & (size == 1 ? 3 : 7)) << 4), size), v, size);
        }
    Mbarrier& b = mbarrier(l.barrier);
    b.bytes -= box[0] * box[1] * size;
    settle(b);
}

bool complete_any() {
    if (loads.empty()) return false;
    const size_t i = chance() % loads.size();
    const Load l = loads[i];
    loads[i] = loads.back();
    loads.pop_back();
    complete(l);
    return true;
}

void trampoline() {
    entry();
    current->done = true;
    _longjmp(scheduler, 1);
}

void resume(Fiber& f) {
    current = &f;
    here = f.block;
    f.wait.kind = READY;
    if (_setjmp(scheduler)) return;
    if (f.started) _longjmp(f.at, 1);
    f.started = true;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = 1 << 16;
    makecontext(&f.context, trampoline, 0);
    setcontext(&f.context);
}

void run_cluster(u32 first) {
    const u32 count = threads.x, warps = count / 32, all_warps = warps * cluster_blocks;
    for (u32 i = 0; i < cluster_blocks; ++i) {
        Block& b = cluster[i];
        std::memset(b.memory, 0xFF, sizeof b.memory);
        b.index.x = first + i;
        b.warps.assign(warps, {});
        b.groups.assign((count + 127) / 128, {});
        b.mbarriers.assign(SHARED_BYTES / 8, {});
        for (Named& n : b.named) n = {};
    }
    loads.clear();
    met = 0;
    fibers.resize(count * cluster_blocks);
    for (u32 t = 0; t < fibers.size(); ++t) {
        Fiber& f = fibers[t];
        f.block = &cluster[t / count];
        f.index.x = t % count;
        f.wait = {};
        f.started = f.done = false;
        f.products = f.meetings = 0;
        f.commits.clear();
        if (!f.stack) f.stack.reset(new char[1 << 16]);
    }
    // Per mille: of skipping a warp in a round, of a product or load being carried out in it.
    u32 skip[64] = {}, products = 1000, landings = 1000;
    u64 seen = events, since = 0;
    for (u64 round = 0;; ++round) {
        if (round % 64 == 0) {
            constexpr u32 SKIPS[] = {0, 0, 500, 950}, RATES[] = {1000, 300, 20};
            for (u32& each : skip) each = SKIPS[chance() % 4];
            products = RATES[chance() % 3];
            landings = RATES[chance() % 3];
        }
        bool moved = false, alive = false;
        if (_setjmp(scheduler)) return;  // what fails outside of a fiber
        for (u32 i = 0; i < cluster_blocks; ++i)
            for (Warpgroup& g : (here = &cluster[i])->groups)
                while (chance() % 1000 < products && multiply_next(g)) moved = true;
        while (chance() % 1000 < landings && complete_any()) moved = true;
        for (u32 w = 0, start = chance() % all_warps; w < all_warps; ++w) {
            const u32 warp = (w + start) % all_warps;
            const bool skipped = chance() % 1000 < skip[warp];
            for (u32 t = 32 * warp; t < 32 * warp + 32; ++t) {
                Fiber& f = fibers[t];
                if (f.done) continue;
                alive = true;
                if (!over(*f.block, f.wait)) continue;
                moved = true;  // it could
                if (!skipped) resume(f);
                if (failure[0]) return;
            }
        }
        current = nullptr;
        if (!alive) break;
        if (events != seen) seen = events, since = round;
        // Warps that poll look alive for ever.
        if (moved && round - since < 5000) continue;
        if (_setjmp(scheduler)) return;
        bool forced = false;
        for (u32 i = 0; i < cluster_blocks; ++i)
            for (Warpgroup& g : (here = &cluster[i])->groups) forced |= multiply_next(g);
        if (forced || complete_any()) continue;
        for (Fiber& f : fibers)
            if (!f.done) {
                current = &f;
                std::snprintf(failure, sizeof failure, "block %u: deadlock; thread %u waits for kind %d, %u, %llu",
                              f.block->index.x, f.index.x, f.wait.kind, f.wait.which, (unsigned long long)f.wait.until);
                return;
            }
    }
    if (!loads.empty()) std::snprintf(failure, sizeof failure, "block %u ended with loads in flight", first);
    for (u32 i = 0; i < cluster_blocks; ++i)
        for (Warpgroup& g : cluster[i].groups)
            if (!g.products.empty()) std::snprintf(failure, sizeof failure, "block %u ended with products in flight", first + i);
}

}  // namespace emulated

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::current->block->index)
#define gridDim (emulated::blocks)
#define blockDim (emulated::threads)

inline char* shared_memory() { return emulated::here->memory; }
inline unsigned __cvta_generic_to_shared(const void* p) { return (unsigned)((const char*)p - shared_memory()); }
inline void __syncthreads() { emulated::named_barrier(0, emulated::threads.x, false); }
inline void __syncwarp() { emulated::exchange(0); }
template <class T>
T __shfl_sync(unsigned, T v, int from) {
    return reinterpreted<T>((uint32_t)(*emulated::exchange(reinterpreted<uint32_t>(v)))[from & 31]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int by) { return __shfl_sync(mask, v, (threadIdx.x % 32) ^ by); }
template <class T>
T __shfl_up_sync(unsigned mask, T v, int by) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, v, lane < by ? lane : lane - by);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
    const auto& all = *emulated::exchange(mine);
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= (unsigned)all[i] << i;
    return votes;
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline bool __all_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) == ~0u; }
inline int __reduce_min_sync(unsigned, int v) {
    const auto& all = *emulated::exchange((uint32_t)v);
    for (int i = 0; i < 32; ++i) v = min(v, (int)(uint32_t)all[i]);
    return v;
}
inline int __reduce_max_sync(unsigned, int v) {
    const auto& all = *emulated::exchange((uint32_t)v);
    for (int i = 0; i < 32; ++i) v = max(v, (int)(uint32_t)all[i]);
    return v;
}

// What primitives.cu writes in PTX.

typedef unsigned int u32;
typedef unsigned long long u64;
struct TensorMap;

inline void launch_dependents() {}
inline void await_dependencies() {}
inline void await_loads() {}
inline void barrier_init_fence() {}
inline void proxy_fence() {}
inline void mma_fence() {}

inline void barrier_init(u32 barrier, u32 arrivals) {
    emulated::at(barrier, 8);
    emulated::here->mbarriers[barrier / 8] = {(int)arrivals, (int)arrivals, 0, 0};
}
inline void barrier_arrive(u32 barrier) {
    emulated::Mbarrier& b = emulated::mbarrier(barrier);
    --b.pending;
    emulated::settle(b);
}
inline void barrier_arrive_at(u32 barrier, u32 rank) {
    emulated::here = &emulated::cluster[rank];
    barrier_arrive(barrier);
    emulated::here = emulated::current->block;
}
inline void cluster_arrive() {
    ++emulated::current->meetings;
    ++emulated::met;
    ++emulated::events;
}
inline void cluster_wait() {
    const u64 all = emulated::fibers.size();
    emulated::wait_for({emulated::CLUSTER, 0, all * emulated::current->meetings});
}
inline void barrier_expect(u32 barrier, u32 bytes) {
    emulated::mbarrier(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 parity) {
    emulated::mbarrier(barrier);
    emulated::wait_for({emulated::MBARRIER, barrier, parity});
}
inline bool barrier_over(u32 barrier, u32 parity) { return (emulated::mbarrier(barrier).phase & 1) != parity; }
template <int ID, int THREADS>
void group_sync() { emulated::named_barrier(ID, THREADS, false); }
template <int ID, int THREADS>
bool group_any(bool mine) { return emulated::named_barrier(ID, THREADS, mine); }
inline void writers_sync(int group) { emulated::named_barrier(4 + group, 128, false); }

inline void load_box(u32 to, const TensorMap* map, int column, int row, int page, u32 barrier) {
    emulated::loads.push_back({emulated::here, to, (const uint64_t*)map, column, row, page, barrier});
}
inline void load_box_for_both(u32 to, const TensorMap* map, int column, int row, int page, u32 barrier) {
    for (emulated::Block& b : emulated::cluster)
        emulated::loads.push_back({&b, to, (const uint64_t*)map, column, row, page, barrier});
}

inline void mma_commit() { emulated::current->commits.push_back(emulated::current->products); }
template <int PENDING>
void mma_wait() {
    const auto& commits = emulated::current->commits;
    if (commits.size() > PENDING)
        emulated::wait_for({emulated::PRODUCTS, threadIdx.x / 128, commits[commits.size() - PENDING - 1]});
}
template <int COUNT>
void pin(float (&acc)[COUNT]) { asm volatile("" ::"r"(acc) : "memory"); }

inline void pin(u32 (&a)[4][4]) { asm volatile("" ::"r"(a) : "memory"); }
inline float copy_here(float x) { return x; }

template <int COLUMNS, int A_TRANSPOSED, int B_TRANSPOSED>
void emulated_mma(float (&d)[COLUMNS / 2], u64 a, u64 b, int keep) {
    emulated::issue({COLUMNS, A_TRANSPOSED, B_TRANSPOSED, keep, false, false, a, b}, d, nullptr);
}
template <int COLUMNS, int B_TRANSPOSED, bool HALF>
void emulated_mma(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b, int keep) {
    emulated::issue({COLUMNS, 0, B_TRANSPOSED, keep, true, HALF, 0, b}, d, a);
}

inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f * y : y;
}
inline u32 bf16_bits(float v) {
    const u32 bits = reinterpreted<u32>(v);
    return v != v ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return bf16_bits(high) << 16 | bf16_bits(low); }

// e4m3: no infinities, NaN where all other bits are set.
inline float fp8_value(u32 bits) {
    const u32 exponent = bits >> 3 & 15, fraction = bits & 7;
    const float magnitude = (bits & 127) == 127 ? NAN
                            : exponent          ? std::ldexp(8.0f + fraction, (int)exponent - 10)
                                                : std::ldexp((float)fraction, -9);
    return bits & 128 ? -magnitude : magnitude;
}
inline uint2 widen(u32 four) {
    return {pack(fp8_value(four & 255), fp8_value(four >> 8 & 255)),
            pack(fp8_value(four >> 16 & 255), fp8_value(four >> 24))};
}

inline u32 half_bits(float v) {
    const float magnitude = std::fabs(v);
    const u32 sign = std::signbit(v) ? 0x8000 : 0;
    if (!(magnitude < 65520.0f)) return sign | (v != v ? 0x7FFF : 0x7C00);
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
    exponent = max(exponent, -13);
    const u32 steps = (u32)std::nearbyint(std::ldexp(magnitude, 11 - exponent));  // of the last place
    return sign | (magnitude < 0x1p-14f ? steps : ((u32)(exponent + 14) << 10) + steps - 1024);
}
inline u32 pack_half(float low, float high) { return half_bits(high) << 16 | half_bits(low); }
inline uint2 widen_to_half(u32 four) {
    return {pack_half(fp8_value(four & 255), fp8_value(four >> 8 & 255)),
            pack_half(fp8_value(four >> 16 & 255), fp8_value(four >> 24))};
}
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = (u64)y << 32 | x;
    u32 picked = 0;
    for (int i = 0; i < 4; ++i) picked |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return picked;
}
inline void load_matrices(u32* to, u32 address) {
    const auto& places = *emulated::exchange(address);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        to[i] = 0;
        for (int e = 0; e < 2; ++e) {
            uint16_t v;
            std::memcpy(&v, emulated::at((u32)places[8 * i + lane % 4 * 2 + e], 16) + lane / 4 * 2, 2);
            to[i] |= (u32)v << 16 * e;
        }
    }
}

// Matrices of 8 x 8 bf16, row r of matrix i to the address of lane 8 i + r.
inline void store_fragments(u32 address, const u32* fragments, int count, bool transposed) {
    const auto& places = *emulated::exchange(address);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < count; ++i)
        for (int e = 0; e < 2; ++e) {
            const int row = lane / 4, column = lane % 4 * 2 + e;
            const uint16_t v = fragments[i] >> 16 * e;
            const u32 to = (u32)places[8 * i + (transposed ? column : row)];
            std::memcpy(emulated::at(to, 16) + 2 * (transposed ? row : column), &v, 2);
        }
}
inline void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    const u32 fragments[] = {a, b, c, d};
    store_fragments(address, fragments, 4, true);
}
inline void store_matrices(u32 address, u32 a, u32 b) {
    const u32 fragments[] = {a, b};
    store_fragments(address, fragments, 2, true);
}
inline void store_rows(u32 address, u32 a, u32 b, u32 c, u32 d) {
    const u32 fragments[] = {a, b, c, d};
    store_fragments(address, fragments, 4, false);
}
inline uint4 load_16(u32 address) { return *(const uint4*)emulated::at(address, 16); }
inline void store_16(u32 address, uint4 v) { *(uint4*)emulated::at(address, 16) = v; }
inline void store_word(u32 address, u32 v) { *(u32*)emulated::at(address, 4) = v; }
inline void store_float(u32 address, float v) { *(float*)emulated::at(address, 4) = v; }
inline void load_async(u32 to, const char* from, bool real) {
    if (real)
        std::memcpy(emulated::at(to, 16), from, 16);
    else
        std::memset(emulated::at(to, 16), 0, 16);
}

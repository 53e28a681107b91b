// What the warpgroups of decode_swapped.cu share: the ring of boxes, the weights, the bases, the query tile.
//
// A ring slot is 64 cache rows x 64 columns, one TMA box, swizzled within its rows.

constexpr int GROUPS = (TILE_N + 31) / 32;  // one row per lane
constexpr int STAGE_PITCH = 68;  // floats; a multiple of 4 that spreads rows over the banks
constexpr int FEEDERS = 4;  // warps that issue loads: issuing keeps one busy for most of a box's time
constexpr int FIRST_SCORER = 8, FIRST_FEEDER = FIRST_SCORER + 4 * SCORERS;  // warps
constexpr int SCORERS_BARRIER = SCORERS > 1 ? 9 : 2;  // of all that score
constexpr int COMPUTE_THREADS = 32 * FIRST_FEEDER;
// Boxes of the next chunk whose products run under the softmax of this one: what the ring holds besides
// the values of two chunks.
constexpr int EARLY = SLOTS - 16 < 0 ? 0 : SLOTS - 16 > MOST_EARLY ? MOST_EARLY : SLOTS - 16;

// What the accumulators are multiplied by before a chunk is added.
struct alignas(16) Factors {
    float scale[TILE_N];
    int changed;
};

struct Reduction {
    float peer[4 * SCORERS][GROUPS * 32];  // what each softmax warp found
    alignas(16) float top[4][TILE_N];  // the bases, a copy for each warp of a scorer
#if SCORERS > 1
    int moved[4];  // whether the chunk before changed them
#endif
};

template <int SIZE>
struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ void advance(int by) {
        slot += by;
        if (slot >= SIZE) {
            slot -= SIZE;
            phase ^= 1;
        }
    }
    __device__ Ring at(int by) const {
        Ring r = *this;
        r.advance(by);
        return r;
    }
};

struct Shared {
    u64 full[SLOTS], empty[SLOTS];
    u64 p_ready[P_BUFFERS], p_free[P_BUFFERS];
#if SCORERS > 1
    u64 turn[SCORERS];
#endif
    Tile tile;
    Reduction reduction;
    float inverse[TILE_N];  // 1 / sum of the weights
    Factors factors[P_BUFFERS];
};

using Boxes = Ring<SLOTS>;
static_assert(!PAIRED || SLOTS % 2 == 0);  // a slot's boxes are all loaded by the same block
static_assert(SLOTS >= SCORERS * BOXES);  // a ring advances past its end once at most

// Which block of the cluster loads the boxes of a slot.
__device__ __forceinline__ bool loads_slot(int slot) { return !PAIRED || (slot & 1) == (blockIdx.x & 1); }

// A warp has read a slot. One lane.
__device__ __forceinline__ void release(Shared& s, int slot) {
    const u32 empty = shared_address(&s.empty[slot]);
    barrier_arrive(empty);
    if (!loads_slot(slot)) barrier_arrive_at(empty, slot & 1);
}

// Loading order within a chunk: the rope box, then the two accumulating warpgroups' boxes in turn, so that slots become
// free in about the order in which they are filled.
__device__ __forceinline__ constexpr int position_of(int group, int box) { return 1 + 2 * box + group; }
__device__ __forceinline__ constexpr int box_at(int position) {
    return position == 0 ? BOXES - 1 : (position - 1) / 2 + 4 * ((position - 1) & 1);
}

// The boxes of the ring in loading order.
struct Sequence {
    int chunk, position = 0;
    Boxes at;

    __device__ Sequence(int first) : chunk(first) {}
    __device__ __forceinline__ void advance(int by) {
        at.advance(by);
        position += by;
        if (position >= BOXES) {
            position -= BOXES;
            ++chunk;
        }
    }
    __device__ __forceinline__ int slot() const { return at.slot; }
    __device__ __forceinline__ u32 phase() const { return at.phase; }
    __device__ __forceinline__ int column() const { return box_at(position) * 64; }
    __device__ __forceinline__ u32 full(Shared& s) const { return shared_address(&s.full[at.slot]); }
    __device__ __forceinline__ u32 empty(Shared& s) const { return shared_address(&s.empty[at.slot]); }
};

// Loads every FEEDERS-th box, beginning with number `feeder`.
__device__ __forceinline__ void feed(const Params& p, const TensorMap* map, Shared& s, u32 ring, int feeder, int lane) {
    Pages pages(p, s.tile);
    Sequence box(s.tile.begin);
    for (box.advance(feeder); box.chunk < s.tile.end; box.advance(FEEDERS)) {
        const int first = pages.find(p, box.chunk, lane);
        barrier_wait(box.empty(s), box.phase() ^ 1);
        pages.load(p, map, box.chunk, first, ring + box.slot() * BOX_BYTES, box.column(), box.full(s), lane,
                   loads_slot(box.slot()));
    }
}

// Writes an accumulator [64, TILE_N] transposed: row n of the buffer holds its 64 values, swizzled.
template <u32 (*PACK)(float, float)>
__device__ __forceinline__ void store_transposed(u32 buffer, const float (&acc)[TILE_N / 2], int warp, int lane) {
    constexpr int EIGHTS = TILE_N / 8;
    const int matrix = lane >> 3, line = lane & 7;
    const u32 place = buffer + (8 * (matrix >> 1) + line) * 128 + (((2 * warp + (matrix & 1)) ^ line) << 4);
#pragma unroll
    for (int j = 0; j + 1 < EIGHTS; j += 2)
        store_matrices(place + j * 1024, PACK(acc[4 * j], acc[4 * j + 1]), PACK(acc[4 * j + 2], acc[4 * j + 3]),
                       PACK(acc[4 * j + 4], acc[4 * j + 5]), PACK(acc[4 * j + 6], acc[4 * j + 7]));
    if constexpr (EIGHTS % 2)
        store_matrices(place + (EIGHTS - 1) * 1024, PACK(acc[4 * EIGHTS - 4], acc[4 * EIGHTS - 3]),
                       PACK(acc[4 * EIGHTS - 2], acc[4 * EIGHTS - 1]));
}

// fp8 caches: boxes become bf16 on their way into the ring, so that the kernels compute as on a bf16 cache.
//
// TMA puts the 4 KB of a box into the second half of its slot; four warps widen it in place and hand it on.

// One box of fp8 rows of 64 bytes, unswizzled, to bf16, swizzled; thread is one of 128.
__device__ __forceinline__ void widen_box(u32 box, int thread) {
    uint4 narrow[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) narrow[i] = load_16(box + BOX_BYTES / 2 + (thread + 128 * i) * 16);
    group_sync<7, 128>();  // all of it has been read
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int unit = thread + 128 * i, row = unit >> 2;
        const uint2 a = widen(narrow[i].x), b = widen(narrow[i].y), c = widen(narrow[i].z), d = widen(narrow[i].w);
        const u32 to = box + row * 128;
        store_16(to + ((2 * (unit & 3) ^ (row & 7)) << 4), make_uint4(a.x, a.y, b.x, b.y));
        store_16(to + ((2 * (unit & 3) + 1 ^ (row & 7)) << 4), make_uint4(c.x, c.y, d.x, d.y));
    }
}

// By four warps: each loads every fourth box as soon as its slot is free, and all widen every box as soon as it has
// landed. None waits for a slot while a box could be widened: the slot may become free only after that.
template <class Sequence, class Shared>
__device__ __forceinline__ void feed_widened(const Params& p, const TensorMap* map, Shared& s, u32 ring, int feeder,
                                             int lane) {
    Pages pages(p, s.tile);
    Sequence loads(s.tile.begin), boxes(s.tile.begin);
    loads.advance(feeder);
    while (boxes.chunk < s.tile.end) {
        if (loads.chunk < s.tile.end && __all_sync(~0u, barrier_over(loads.empty(s), loads.phase() ^ 1))) {
            const int first = pages.find(p, loads.chunk, lane);
            pages.load(p, map, loads.chunk, first, ring + loads.slot() * BOX_BYTES + BOX_BYTES / 2, loads.column(),
                       shared_address(&s.landed[loads.slot()]), lane);
            loads.advance(4);
        }
        if (__all_sync(~0u, barrier_over(shared_address(&s.landed[boxes.slot()]), boxes.phase()))) {
            widen_box(ring + boxes.slot() * BOX_BYTES, 32 * feeder + lane);
            proxy_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(boxes.full(s));
            boxes.advance(1);
        }
    }
}

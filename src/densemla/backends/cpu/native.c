/* Dense MLA decode on the CPU, without copies of the cache: native_kernel.h is the arithmetic, this file
 * the order of work.
 *
 * A request's rows (queries times heads) are tiled; each split of a tile is cut into segments, the unit
 * that threads take. Units go round by round: segments are computed into slots, then finished splits are
 * folded in segment order and rounded, and last of all the partials are merged.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

enum {
    CHUNK = 64,          /* tokens, as in densemla.splits */
    PACKED_GROUP = 128,  /* as in densemla.kv_formats */
    MAX_ROWS = 128,      /* rows of a tile */
    ROW_STEP = 4,        /* rows are padded to this many for the score tiles */
    SEGMENT_CHUNKS = 4,  /* smallest segment */
    SPLIT_SEGMENTS = 16, /* most segments in a split */
    SLOTS = 32,          /* units in a round */
    MERGE_HEADS = 8,     /* heads of a query that one thread merges at a time */
};

struct slot {
    float *values, *max, *sum;
};

struct unit {
    int64_t request, first_query, queries, length, split, split_begin, begin, end;
    int first_row, rows, single, opens, closes;
};

struct kernels {
    void (*segment)(const struct decode_args *, const struct unit *, float *, struct slot);
    void (*fold)(const struct decode_args *, int, struct slot, struct slot);
    void (*publish)(const struct decode_args *, const struct unit *, struct slot);
    void (*merge_row)(const struct decode_args *, int64_t, int64_t, int, float *);
};

static float e4m3_table[256];

static inline int round_up(int n, int step) {
    return (n + step - 1) / step * step;
}

static inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* What query `t` of the unit's request sees, in tokens. */
static inline int64_t query_tokens(const struct decode_args *a, const struct unit *u, int64_t t) {
    if (a->query_cache_seqlens) return a->query_cache_seqlens[u->first_query + t];
    int64_t seen = u->length - u->queries + 1 + t;
    return seen < 0 ? 0 : seen;
}

static inline int64_t visible_tokens(const struct decode_args *a, const struct unit *u, int r) {
    return query_tokens(a, u, (u->first_row + r) / a->heads);
}

/* Whether a request of this many chunks is one split, and so rounded once. */
static inline int is_single(const struct decode_args *a, int64_t chunks) {
    return chunks <= a->single_split_chunks || a->active_splits == 1 || chunks == 1;
}

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define NAME(x) v4_##x
#define LANES 16
#define QK_ROWS 4
#define QK_TOKENS 4
#define PV_ROWS 4
#define PV_VECTORS 4
#include "native_kernel.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define NAME(x) v3_##x
#define LANES 8
#define QK_ROWS 4
#define QK_TOKENS 2
#define PV_ROWS 4
#define PV_VECTORS 2
#include "native_kernel.h"
#pragma GCC pop_options
#endif
#define NAME(x) base_##x
#define LANES 4
#define QK_ROWS 2
#define QK_TOKENS 2
#define PV_ROWS 4
#define PV_VECTORS 2
#include "native_kernel.h"

static const char *const names[] = {"base", "x86-64-v3", "x86-64-v4"};

/* The best instruction set of this machine, as an index into `names`. */
static int best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return 2;
    if (__builtin_cpu_supports("x86-64-v3")) return 1;
#endif
    return 0;
}

static const struct kernels *kernels_of(int isa) {
#if defined(__x86_64__)
    if (isa == 2) return &v4_kernels;
    if (isa == 1) return &v3_kernels;
#endif
    (void)isa;
    return &base_kernels;
}

/* Where the walk over requests, tiles, splits and segments stands. */
struct cursor {
    int64_t request, row, split, begin;
};

/* The next unit, or 0 at the end. */
static int next_unit(const struct decode_args *a, struct cursor *c, struct unit *u) {
    for (; c->request < a->batch; *c = (struct cursor){c->request + 1, 0, 0, 0}) {
        int64_t length = a->cache_seqlens[c->request], first = a->cu_seqlens_q[c->request];
        int64_t queries = a->cu_seqlens_q[c->request + 1] - first, rows = queries * a->heads;
        if (length == 0 || c->row >= rows) continue;
        int64_t chunks = ceil_div(length, CHUNK);
        int single = is_single(a, chunks);
        int64_t width = (single ? chunks : ceil_div(chunks, a->active_splits)) * CHUNK;
        int64_t split_begin = c->split * width;
        int64_t split_end = split_begin + width < length ? split_begin + width : length;
        int64_t segment = ceil_div(width / CHUNK, SPLIT_SEGMENTS);
        segment = (segment < SEGMENT_CHUNKS ? SEGMENT_CHUNKS : segment) * CHUNK;
        int64_t left = rows - c->row;
        *u = (struct unit){
            .request = c->request, .first_query = first, .queries = queries, .length = length,
            .split = c->split, .split_begin = split_begin, .begin = c->begin,
            .end = c->begin + segment < split_end ? c->begin + segment : split_end,
            .first_row = (int)c->row, .rows = (int)(left < MAX_ROWS ? left : MAX_ROWS),
            .single = single, .opens = c->begin == split_begin,
        };
        u->closes = u->end == split_end;
        c->begin = u->end;
        if (u->closes) c->split++;
        if (u->end == length) c->row += u->rows, c->split = 0, c->begin = 0;
        return 1;
    }
    return 0;
}

/* What the tickets of a phase stand for. */
enum stage { SEGMENTS, SPLITS, MERGE, DONE };

struct team {
    const struct decode_args *args;
    const struct kernels *kernels;
    int64_t own_floats;
    float *own;
    struct slot slots[SLOTS], open;
    struct unit units[SLOTS];
    struct cursor cursor;
    int unit_count, last;
    atomic_int stage, count; /* of the current phase */
    atomic_int members, finished;
    _Atomic uint64_t state; /* phase number << 32 | next ticket */
};

/* A phase of this first ticket has none: the time in which `stage` and `count` change. */
static const uint64_t NO_TICKETS = (uint64_t)1 << 31;

static void fill_round(struct team *team) {
    team->unit_count = 0;
    while (team->unit_count < SLOTS && next_unit(team->args, &team->cursor, &team->units[team->unit_count]))
        team->unit_count++;
    team->last = team->unit_count < SLOTS;
}

/* Keep what the next round has to go on with: the last split, if it is not closed. */
static void keep_open_split(struct team *team) {
    int i = team->unit_count - 1;
    if (i < 0 || team->units[i].closes) return;
    while (i > 0 && !team->units[i].opens) i--;
    struct slot kept = team->slots[i];
    team->slots[i] = team->open;
    team->open = kept;
}

static int64_t merge_groups(const struct decode_args *a) {
    return ceil_div(a->heads, MERGE_HEADS);
}

/* Go to the next stage that has work; run by the one thread that finished the last ticket. */
static void next_stage(struct team *team) {
    do {
        if (team->stage == SEGMENTS) {
            team->stage = SPLITS;
            team->count = team->unit_count;
        } else if (team->stage == SPLITS && !team->last) {
            keep_open_split(team);
            fill_round(team);
            team->stage = SEGMENTS;
            team->count = team->unit_count;
        } else if (team->stage == SPLITS) {
            team->stage = MERGE;
            team->count = (int)(team->args->total_q * merge_groups(team->args));
        } else {
            team->stage = DONE;
        }
    } while (team->stage != DONE && team->count == 0);
}

/* Fold and round the split whose units in this round start at `i`. */
static void finish_split(struct team *team, int i) {
    struct unit *u = team->units;
    if (i > 0 && !u[i].opens) return;
    /* A split that the last round left open comes first in this one. */
    struct slot into = team->slots[i];
    if (!u[i].opens) {
        team->kernels->fold(team->args, u[i].rows, team->open, into);
        team->slots[i] = team->open;
        team->open = into;
        into = team->slots[i];
    }
    int j = i;
    while (!u[j].closes && j + 1 < team->unit_count)
        team->kernels->fold(team->args, u[i].rows, into, team->slots[++j]);
    if (u[j].closes) team->kernels->publish(team->args, &u[j], into);
}

static void merge_group(struct team *team, int64_t ticket, float *own) {
    const struct decode_args *a = team->args;
    int64_t query = ticket / merge_groups(a), head = ticket % merge_groups(a) * MERGE_HEADS, request = 0;
    while (request < a->batch && a->cu_seqlens_q[request + 1] <= query) request++;
    if (request == a->batch) return;
    struct unit u = {.length = a->cache_seqlens[request], .first_query = a->cu_seqlens_q[request]};
    u.queries = a->cu_seqlens_q[request + 1] - u.first_query;
    int64_t chunks = ceil_div(u.length, CHUNK), seen = query_tokens(a, &u, query - u.first_query);
    if (seen == 0 || is_single(a, chunks)) return;
    int splits = (int)ceil_div(seen, ceil_div(chunks, a->active_splits) * CHUNK);
    for (int64_t end = head + MERGE_HEADS; head < end && head < a->heads; head++)
        team->kernels->merge_row(a, query, head, splits, own);
}

/* Take tickets until the decode is done. Nobody waits for a thread that has not come yet. */
static void work(struct team *team) {
    float *own = team->own + atomic_fetch_add(&team->members, 1) * team->own_floats;
    for (int spins = 0;;) {
        uint64_t claim = atomic_fetch_add(&team->state, 1), phase = claim >> 32;
        int64_t ticket = (int64_t)(claim & 0xffffffff);
        int stage = team->stage, count = team->count;
        /* A phase can't end while one of its tickets is out, so a phase that has moved on was over, and `stage`
         * and `count` may be those of the next. */
        if (atomic_load(&team->state) >> 32 != phase) continue;
        if (stage == DONE) return;
        if (ticket >= count) {
            while (atomic_load(&team->state) >> 32 == phase)
                if (++spins > 1000) sched_yield();
            continue;
        }
        if (stage == SEGMENTS)
            team->kernels->segment(team->args, &team->units[ticket], own, team->slots[ticket]);
        else if (stage == SPLITS)
            finish_split(team, (int)ticket);
        else
            merge_group(team, ticket, own);
        if (atomic_fetch_add(&team->finished, 1) == count - 1) {
            atomic_store(&team->finished, 0);
            /* First a phase without tickets: a late claim on this one must not meet the next one's count. */
            atomic_store(&team->state, (phase + 1) << 32 | NO_TICKETS);
            next_stage(team);
            atomic_store(&team->state, (phase + 2) << 32);
        }
    }
}

/* torch's own OpenMP threads, where it has them: after a torch operator they spin for a while, and threads
 * of ours would have to share the cores with them. */
static void (*openmp_parallel)(void (*)(void *), void *, unsigned, unsigned);

void densemla_use_openmp(void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    openmp_parallel = parallel;
}

static void work_in_openmp(void *team) {
    work(team);
}

/* Else helper threads, kept between calls. One decode at a time uses them; others meanwhile run alone. */
static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t wake, idle;
    struct team *team;
    int seats, users, threads;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          NULL, 0, 0, 0};

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.seats) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.seats--, pool.users++;
        struct team *team = pool.team;
        pthread_mutex_unlock(&pool.lock);
        work(team);
        pthread_mutex_lock(&pool.lock);
        if (--pool.users == 0) pthread_cond_signal(&pool.idle);
    }
    return NULL;
}

/* A forked child has none of the threads, and must not inherit a lock that one of them held. GNU's OpenMP
 * would wait for its own forever. */
static void forget_threads(void) {
    openmp_parallel = NULL;
    pthread_mutex_init(&pool.busy, NULL), pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL), pthread_cond_init(&pool.idle, NULL);
    pool.team = NULL, pool.seats = pool.users = pool.threads = 0;
}

static void work_together(struct team *team, int threads) {
    int alone = threads == 1 || (team->last && team->unit_count < 2);
    if (!alone && openmp_parallel) {
        openmp_parallel(work_in_openmp, team, (unsigned)threads, 0);
        return;
    }
    if (alone || pthread_mutex_trylock(&pool.busy)) {
        work(team);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    for (pthread_t handle; pool.threads < threads - 1; pool.threads++) {
        /* Fewer threads than wanted do the same work, later. */
        if (pthread_create(&handle, NULL, help, NULL)) break;
        pthread_detach(handle);
    }
    pool.team = team;
    pool.seats = threads - 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(team);
    pthread_mutex_lock(&pool.lock);
    pool.seats = 0;
    while (pool.users) pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}

static int64_t own_floats(int dim) {
    return (int64_t)(MAX_ROWS + CHUNK) * dim + MAX_ROWS * CHUNK + MAX_ROWS;
}

static int64_t slot_floats(int rows, int rank) {
    return (int64_t)rows * (rank + 2);
}

/* Floats of workspace for `threads` threads and tiles of `rows` rows. */
int64_t densemla_workspace_floats(int threads, int rows, int rank, int rope) {
    rows = rows < MAX_ROWS ? rows : MAX_ROWS;
    return threads * own_floats(rank + rope) + (SLOTS + 1) * slot_floats(rows, rank);
}

const char *densemla_isa(int isa) {
    return names[isa < 0 ? best_isa() : isa];
}

/* Every launched split's LSE starts at -inf; queries that see nothing get it too, and an output of 0. Here and
 * not in torch, whose threads a forked child does not have. */
static void clear(const struct decode_args *a) {
    static const size_t bytes[] = {[BF16] = 2, [F16] = 2, [F32] = 4};
    const size_t size = bytes[a->output_format];
    for (int64_t split = 0; split < a->active_splits; split++)
        for (int64_t i = 0; i < (int64_t)a->total_q * a->heads; i++)
            a->partial_lse[split * a->partial_rows * a->heads + i] = -INFINITY;
    int64_t request = 0;
    for (int64_t query = 0; query < a->total_q; query++) {
        while (request < a->batch && a->cu_seqlens_q[request + 1] <= query) request++;
        if (request < a->batch) {
            struct unit u = {.length = a->cache_seqlens[request], .first_query = a->cu_seqlens_q[request]};
            u.queries = a->cu_seqlens_q[request + 1] - u.first_query;
            if (query_tokens(a, &u, query - u.first_query)) continue;
        }
        for (int64_t head = 0; head < a->heads; head++) {
            int64_t at = query * a->output_stride_row + head * a->output_stride_head;
            memset((char *)a->output + at * (int64_t)size, 0, a->rank * size);
            a->lse[query * a->lse_stride_row + head * a->lse_stride_head] = -INFINITY;
        }
    }
}

/* Decode. `isa` < 0 takes the best; returns the one used. */
int densemla_decode(const struct decode_args *args, int rows, int isa) {
    int best = best_isa();
    isa = isa < 0 || isa > best ? best : isa;
    struct team team = {
        .args = args, .kernels = kernels_of(isa),
        .own_floats = own_floats(args->rank + args->rope), .own = args->workspace,
    };
    rows = rows < MAX_ROWS ? rows : MAX_ROWS;
    float *next = team.own + args->max_threads * team.own_floats;
    for (int i = 0; i <= SLOTS; i++, next += slot_floats(rows, args->rank))
        *(i < SLOTS ? &team.slots[i] : &team.open) =
            (struct slot){next, next + rows * args->rank, next + rows * (args->rank + 1)};
    clear(args);
    fill_round(&team);
    if (!(team.count = team.unit_count)) return isa;
    work_together(&team, args->threads);
    return isa;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1};

/* e4m3fn: sign, 4 exponent bits of bias 7, 3 mantissa bits; all ones but the sign is NaN, no infinity. */
PyMODINIT_FUNC PyInit__native(void) {
    for (int byte = 0; byte < 256; byte++) {
        int exponent = byte >> 3 & 15, mantissa = byte & 7;
        float value = exponent ? ldexpf(1 + mantissa / 8.0f, exponent - 7) : ldexpf(mantissa / 8.0f, -6);
        if (exponent == 15 && mantissa == 7) value = NAN;
        e4m3_table[byte] = byte & 128 ? -value : value;
    }
    pthread_atfork(NULL, NULL, forget_threads);
    return PyModule_Create(&module);
}

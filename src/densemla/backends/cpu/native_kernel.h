/* The decode for one instruction set; native.c includes this once per set.
 *
 * Expects: NAME(x) to make a name unique, LANES floats in a vector, and the register tiles QK_ROWS x
 * QK_TOKENS (scores) and PV_ROWS x PV_VECTORS (values). Every loop that fixes the order of a sum depends
 * on the request alone, never on threads or on the rest of the batch.
 */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define vec NAME(vec)
#define ivec NAME(ivec)

static inline vec NAME(splat)(float x) {
    return (vec){0} + x;
}

/* exp(x) for x <= 0, within 2 ulp; 0 below -87.3, NaN for NaN. Range reduction by ln 2 in two parts. */
static inline vec NAME(exp)(vec x) {
    vec n = x * 1.44269504088896341f;
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    n = (n + round) - round;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = NAME(splat)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec live = x >= -87.3f;
    ivec exponent = (__builtin_convertvector((vec)((ivec)n & live), ivec) + 127) << 23;
    vec result = p * (vec)exponent;
    ivec dead = x < -87.3f;
    return (vec)((ivec)result & ~dead);
}

/* Sums of neighbouring lanes: those of `a`, then those of `b`. */
static inline vec NAME(pair_sums)(vec a, vec b) {
    ivec even, odd;
    for (int i = 0; i < LANES; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

/* Lane i of the result is the sum of the lanes of v[i]; `v` is used up. */
static inline vec NAME(sums)(vec v[LANES]) {
#pragma GCC unroll 8
    for (int w = LANES / 2; w; w /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < w; i++) v[i] = NAME(pair_sums)(v[2 * i], v[2 * i + 1]);
    return v[0];
}

static inline float NAME(sum)(vec v) {
#pragma GCC unroll 8
    for (int w = LANES / 2; w; w /= 2) v = NAME(pair_sums)(v, v);
    return v[0];
}

static void NAME(widen)(float *restrict out, const void *in, int64_t offset, int format, int n) {
    if (format == BF16) {
        const uint16_t *p = (const uint16_t *)in + offset;
        uint32_t *bits = (uint32_t *)out;
        for (int i = 0; i < n; i++) bits[i] = (uint32_t)p[i] << 16;
    } else if (format == F16) {
        const _Float16 *p = (const _Float16 *)in + offset;
        for (int i = 0; i < n; i++) out[i] = (float)p[i];
    } else if (format == F32) {
        memcpy(out, (const float *)in + offset, sizeof(float) * (size_t)n);
    } else {
        const uint8_t *p = (const uint8_t *)in + offset;
        for (int i = 0; i < n; i++) out[i] = e4m3_table[p[i]];
    }
}

static void NAME(widen_row)(float *restrict out, const struct decode_args *a, int64_t offset) {
    if (a->kv_format != PACKED) {
        NAME(widen)(out, a->kv, offset, a->kv_format, a->rank + a->rope);
        return;
    }
    const uint8_t *record = (const uint8_t *)a->kv + offset;
    const float *scales = (const float *)(record + a->rank);
    for (int g = 0; g < a->rank / PACKED_GROUP; g++)
        for (int i = 0; i < PACKED_GROUP; i++)
            out[g * PACKED_GROUP + i] = e4m3_table[record[g * PACKED_GROUP + i]] * scales[g];
    NAME(widen)(out + a->rank, record + a->rank + a->rank / PACKED_GROUP * 4, 0, BF16, a->rope);
}

static void NAME(narrow)(void *out, int64_t offset, int format, const float *restrict in, float scale, int n) {
    if (format == F32) {
        float *p = (float *)out + offset;
        for (int i = 0; i < n; i++) p[i] = in[i] * scale;
    } else if (format == F16) {
        _Float16 *p = (_Float16 *)out + offset;
        for (int i = 0; i < n; i++) p[i] = (_Float16)(in[i] * scale);
    } else {
        uint16_t *p = (uint16_t *)out + offset;
        for (int i = 0; i < n; i++) {
            float x = in[i] * scale;
            uint32_t bits;
            memcpy(&bits, &x, 4);
            uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            /* rounding up must not carry a NaN into infinity */
            p[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
        }
    }
}

/* scores[r][t] = q[r] . k[t] for QK_ROWS rows and QK_TOKENS tokens, LANES products in all */
static inline void NAME(qk_tile)(const float *q, const float *k, float *scores, int dim) {
    vec acc[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) acc[i] = (vec){0};
    for (int d = 0; d < dim; d += LANES) {
        vec kv[QK_TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < QK_TOKENS; t++) kv[t] = *(const vec *)(k + t * dim + d);
#pragma GCC unroll 8
        for (int r = 0; r < QK_ROWS; r++) {
            vec qv = *(const vec *)(q + r * dim + d);
#pragma GCC unroll 8
            for (int t = 0; t < QK_TOKENS; t++) acc[r * QK_TOKENS + t] += qv * kv[t];
        }
    }
    vec products = NAME(sums)(acc);
    for (int r = 0; r < QK_ROWS; r++)
        memcpy(scores + r * CHUNK, (float *)&products + r * QK_TOKENS, sizeof(float) * QK_TOKENS);
}

/* values[r] = values[r] * decay[r] + sum over t < tokens of probs[r][t] * v[t], for `rows` of them.
 *
 * The sum is finished before it is added: one chain over a long segment would drift where values have one sign.
 */
static inline __attribute__((always_inline)) void NAME(pv_tile)(
    const float *probs, const float *v, float *values, const float *decay, int rows, int tokens, int dim, int rank) {
    for (int c = 0; c < rank; c += LANES * PV_VECTORS) {
        vec acc[PV_ROWS][PV_VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < PV_VECTORS; j++)
                acc[r][j] = (vec){0};
        for (int t = 0; t < tokens; t++) {
            vec vv[PV_VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < PV_VECTORS; j++) vv[j] = *(const vec *)(v + t * dim + c + j * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vec p = NAME(splat)(probs[r * CHUNK + t]);
#pragma GCC unroll 8
                for (int j = 0; j < PV_VECTORS; j++) acc[r][j] += p * vv[j];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < PV_VECTORS; j++) {
                vec *sum = (vec *)(values + r * rank + c + j * LANES);
                *sum = *sum * decay[r] + acc[r][j];
            }
    }
}

/* One step of the online softmax of one row: scores become exp(scores - max); returns the decay. */
static inline float NAME(softmax_step)(float *scores, int tokens, float *max, float *sum) {
    for (int t = tokens; t < CHUNK; t++) scores[t] = -INFINITY;
    vec top = *(vec *)scores;
    for (int t = LANES; t < CHUNK; t += LANES) {
        vec s = *(vec *)(scores + t);
        ivec more = s > top;
        top = (vec)(((ivec)s & more) | ((ivec)top & ~more));
    }
    float m = *max;
    for (int i = 0; i < LANES; i++) m = top[i] > m ? top[i] : m;
    /* Scores of nothing but -inf weigh 0; -inf less -inf would make them NaN. */
    float shift = m == -INFINITY ? 0 : m;
    vec total = {0};
    for (int t = 0; t < CHUNK; t += LANES) {
        vec p = NAME(exp)(*(vec *)(scores + t) - shift);
        *(vec *)(scores + t) = p;
        total += p;
    }
    float decay = NAME(exp)(NAME(splat)(*max - shift))[0];
    *sum = *sum * decay + NAME(sum)(total);
    *max = m;
    return decay;
}

/* Attention of a tile's rows over one segment: unnormalised values, maximum and sum per row. */
static void NAME(segment)(const struct decode_args *a, const struct unit *u, float *restrict own, struct slot slot) {
    const int dim = a->rank + a->rope, rows = u->rows, padded = round_up(rows, ROW_STEP);
    float *q = own, *k = q + MAX_ROWS * dim, *scores = k + CHUNK * dim, *decay = scores + MAX_ROWS * CHUNK;
    for (int r = 0; r < rows; r++) {
        int64_t query = u->first_query + (u->first_row + r) / a->heads, head = (u->first_row + r) % a->heads;
        float *row = q + r * dim;
        NAME(widen)(row, a->q, query * a->q_stride_row + head * a->q_stride_head, a->q_format, dim);
        for (int d = 0; d < dim; d++) row[d] *= a->score_scale;
    }
    memset(q + rows * dim, 0, sizeof(float) * (size_t)((padded - rows) * dim));
    memset(slot.values, 0, sizeof(float) * (size_t)(rows * a->rank));
    for (int r = 0; r < rows; r++) slot.max[r] = -INFINITY, slot.sum[r] = 0;

    const int32_t *table = a->page_table + u->request * a->table_stride;
    for (int64_t start = u->begin; start < u->end; start += CHUNK) {
        int tokens = (int)(u->end - start < CHUNK ? u->end - start : CHUNK);
        for (int t = 0; t < tokens; t++) {
            int64_t page = table[(start + t) / a->page_size], row = (start + t) % a->page_size;
            NAME(widen_row)(k + t * dim, a, page * a->kv_stride_page + row * a->kv_stride_row);
        }
        /* The score tiles run over whole chunks: rows past the last token are finite and masked. */
        memset(k + tokens * dim, 0, sizeof(float) * (size_t)((CHUNK - tokens) * dim));
        for (int r = 0; r < rows; r += QK_ROWS)
            for (int t = 0; t < tokens; t += QK_TOKENS)
                NAME(qk_tile)(q + r * dim, k + t * dim, scores + r * CHUNK + t, dim);
        int seen[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            int64_t left = visible_tokens(a, u, r) - start;
            seen[r] = left < 0 ? 0 : left < tokens ? (int)left : tokens;
            decay[r] = 1;
            if (seen[r]) decay[r] = NAME(softmax_step)(scores + r * CHUNK, seen[r], slot.max + r, slot.sum + r);
        }
        for (int r = 0; r < rows; r += PV_ROWS) {
            int together = rows - r >= PV_ROWS;
            for (int i = 1; together && i < PV_ROWS; i++) together = seen[r + i] == seen[r];
            if (together) {
                if (seen[r])
                    NAME(pv_tile)(scores + r * CHUNK, k, slot.values + r * a->rank, decay + r, PV_ROWS, seen[r], dim,
                                  a->rank);
                continue;
            }
            /* Rows with bounds of their own: a NaN beyond one's bound must not reach it as 0 * NaN. */
            for (int i = r; i < rows && i < r + PV_ROWS; i++)
                if (seen[i])
                    NAME(pv_tile)(scores + i * CHUNK, k, slot.values + i * a->rank, decay + i, 1, seen[i], dim, a->rank);
        }
    }
}

/* Fold segment results into one another, in order; `from` is used up. */
static void NAME(fold)(const struct decode_args *a, int rows, struct slot into, struct slot from) {
    for (int r = 0; r < rows; r++) {
        float m = from.max[r] > into.max[r] ? from.max[r] : into.max[r], shift = m == -INFINITY ? 0 : m;
        float keep = NAME(exp)(NAME(splat)(into.max[r] - shift))[0];
        float add = NAME(exp)(NAME(splat)(from.max[r] - shift))[0];
        into.sum[r] = into.sum[r] * keep + from.sum[r] * add;
        into.max[r] = m;
        float *x = into.values + r * a->rank, *y = from.values + r * a->rank;
        for (int c = 0; c < a->rank; c++) x[c] = x[c] * keep + y[c] * add;
    }
}

/* Round a finished split: to the output when it is the only one, else to the partials. */
static void NAME(publish)(const struct decode_args *a, const struct unit *u, struct slot slot) {
    for (int r = 0; r < u->rows; r++) {
        int64_t query = u->first_query + (u->first_row + r) / a->heads, head = (u->first_row + r) % a->heads;
        int64_t partial = (u->split * a->partial_rows + query) * a->heads + head;
        if (visible_tokens(a, u, r) <= u->split_begin) continue; /* its -inf is there already */
        float lse = slot.max[r] + logf(slot.sum[r]), inverse = slot.sum[r] == 0 ? 0 : a->value_scale / slot.sum[r];
        float *values = slot.values + r * a->rank;
        a->partial_lse[partial] = lse;
        if (u->single) {
            NAME(narrow)(a->output, query * a->output_stride_row + head * a->output_stride_head, a->output_format,
                         values, inverse, a->rank);
            a->lse[query * a->lse_stride_row + head * a->lse_stride_head] = lse;
        } else {
            NAME(narrow)(a->partial_output, partial * a->rank, a->partial_format, values, inverse, a->rank);
        }
    }
}

/* Merge the partials that one row sees: the first `splits` of its request. */
static void NAME(merge_row)(const struct decode_args *a, int64_t query, int64_t head, int splits, float *restrict own) {
    float *sum = own, *part = own + a->rank, max = -INFINITY, total = 0;
    const int64_t step = a->partial_rows * a->heads, first = query * a->heads + head;
    memset(sum, 0, sizeof(float) * (size_t)a->rank);
    for (int s = 0; s < splits; s++) {
        float lse = a->partial_lse[s * step + first];
        max = lse > max ? lse : max;
    }
    float shift = max == -INFINITY ? 0 : max;
    for (int s = 0; s < splits; s++) {
        /* A split of scores that are all -inf weighs 0, and its output may be NaN, as it would be unsplit. */
        float weight = NAME(exp)(NAME(splat)(a->partial_lse[s * step + first] - shift))[0];
        NAME(widen)(part, a->partial_output, (s * step + first) * a->rank, a->partial_format, a->rank);
        for (int c = 0; c < a->rank; c++) sum[c] += weight * part[c];
        total += weight;
    }
    NAME(narrow)(a->output, query * a->output_stride_row + head * a->output_stride_head, a->output_format, sum,
                 total == 0 ? 0 : 1 / total, a->rank);
    a->lse[query * a->lse_stride_row + head * a->lse_stride_head] = max + logf(total);
}

static const struct kernels NAME(kernels) = {NAME(segment), NAME(fold), NAME(publish), NAME(merge_row)};

#undef vec
#undef ivec
#undef NAME
#undef LANES
#undef QK_ROWS
#undef QK_TOKENS
#undef PV_ROWS
#undef PV_VECTORS

/* What Python hands to the native decode: see native.py, whose ctypes structure mirrors this one. */
#ifndef DENSEMLA_NATIVE_H
#define DENSEMLA_NATIVE_H

#include <stdint.h>

enum format { BF16 = 0, F16 = 1, F32 = 2, E4M3 = 3, PACKED = 4 };

struct decode_args {
    const void *q, *kv;
    void *output, *partial_output;
    float *lse, *partial_lse, *workspace;
    const int32_t *page_table, *cache_seqlens, *cu_seqlens_q, *query_cache_seqlens;
    /* strides in elements */
    int64_t q_stride_row, q_stride_head, kv_stride_page, kv_stride_row;
    int64_t output_stride_row, output_stride_head, lse_stride_row, lse_stride_head, table_stride;
    /* rows of one split in the partials: max_total_q */
    int64_t partial_rows;
    int32_t q_format, kv_format, output_format, partial_format;
    int32_t batch, total_q, heads, rank, rope, page_size;
    int32_t active_splits, single_split_chunks;
    /* threads to use, and how many the workspace was made for */
    int32_t threads, max_threads;
    float score_scale, value_scale;
};

#endif

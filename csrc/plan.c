/* plan.c: checking and applying step plans. See plan.h. */
#include "plan.h"

#include <stddef.h>
#include <string.h>

#include "grids.h"

/* A fast mixing hash for damage and divergence, not for adversaries: multiply, rotate, xor over 8-byte words
 * (the finaliser is SplitMix64's, Steele, Lea and Flood 2014). */
uint64_t up_hash(uint64_t seed, const void *data, int64_t size) {
    const uint8_t *bytes = data;
    uint64_t h = seed ^ ((uint64_t)size * UINT64_C(0x9E3779B97F4A7C15));
    while (size > 0) {
        uint64_t word = 0;
        size_t n = size < 8 ? (size_t)size : 8;
        memcpy(&word, bytes, n);
        h = (h ^ word) * UINT64_C(0xBF58476D1CE4E5B9);
        h ^= h >> 29;
        bytes += n;
        size -= (int64_t)n;
    }
    h = (h ^ h >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    h = (h ^ h >> 27) * UINT64_C(0x94D049BB133111EB);
    return h ^ h >> 31;
}

static uint64_t plan_checksum(const uint8_t *data, int64_t size) {
    up_plan_header header;
    memcpy(&header, data, sizeof header);
    header.checksum = 0;
    uint64_t h = up_hash(0, &header, sizeof header);
    return up_hash(h, data + sizeof header, size - (int64_t)sizeof header);
}

void up_plan_finish(uint8_t *data, int64_t size) {
    uint64_t checksum = plan_checksum(data, size);
    memcpy(data + offsetof(up_plan_header, checksum), &checksum, sizeof checksum);
}

int up_plan_check(const uint8_t *data, int64_t size) {
    up_plan_header header;
    if (size < (int64_t)sizeof header) return UP_PLAN_TRUNCATED;
    memcpy(&header, data, sizeof header);
    if (header.magic != UP_PLAN_MAGIC || header.version != UP_PLAN_VERSION) return UP_PLAN_NOT_A_PLAN;
    if (header.num_kinds < 1 || header.num_kinds > UP_MAX_KINDS || header.num_operations < 0 || header.num_changes < 0)
        return UP_PLAN_INCONSISTENT;
    int64_t expected = (int64_t)sizeof header + 8 * (int64_t)header.num_kinds +
                       (int64_t)sizeof(up_plan_operation) * header.num_operations +
                       4 * (int64_t)header.num_changes * (1 + header.num_kinds);
    if (header.total_bytes != size || expected != size) return UP_PLAN_TRUNCATED;
    if (plan_checksum(data, size) != header.checksum) return UP_PLAN_DAMAGED;
    int64_t arena = header.arena_bytes_before > header.arena_bytes_after ? header.arena_bytes_before
                                                                         : header.arena_bytes_after;
    int64_t stride[UP_MAX_KINDS];
    memcpy(stride, data + sizeof header, 8 * (size_t)header.num_kinds);
    for (int k = 0; k < header.num_kinds; k++)
        if (stride[k] <= 0) return UP_PLAN_INCONSISTENT;
    const uint8_t *at = data + sizeof header + 8 * (size_t)header.num_kinds;
    int32_t phase = 0;
    for (int32_t i = 0; i < header.num_operations; i++, at += sizeof(up_plan_operation)) {
        up_plan_operation op;
        memcpy(&op, at, sizeof op);
        int32_t kind = op.code >> 8;
        if (op.phase < phase || op.phase >= header.num_phases || op.code < 0 || (op.code & 255) > UP_OP_ZERO ||
            kind >= header.num_kinds)
            return UP_PLAN_INCONSISTENT;
        int64_t cells = arena / stride[kind];
        if (op.src < 0 || op.dst < 0 || op.src >= cells || op.dst >= cells) return UP_PLAN_INCONSISTENT;
        phase = op.phase;
    }
    for (int32_t i = 0; i < header.num_changes; i++) {
        int32_t change[1 + UP_MAX_KINDS];
        memcpy(change, at, 4 * (size_t)(1 + header.num_kinds));
        at += 4 * (1 + header.num_kinds);
        if (change[0] < 1 || change[0] > header.max_handles) return UP_PLAN_INCONSISTENT;
        for (int k = 0; k < header.num_kinds; k++)
            if (change[1 + k] < -1 || change[1 + k] >= header.arena_bytes_after / stride[k]) return UP_PLAN_INCONSISTENT;
    }
    return UP_PLAN_OK;
}

int up_apply(uint8_t *base, int64_t buffer_bytes, const uint8_t *data, int64_t size) {
    int code = up_plan_check(data, size);
    if (code != UP_PLAN_OK) return code;
    up_plan_header header;
    memcpy(&header, data, sizeof header);
    if (buffer_bytes < header.arena_bytes_before || buffer_bytes < header.arena_bytes_after) return UP_PLAN_BUFFER;
    int64_t stride[UP_MAX_KINDS];
    memcpy(stride, data + sizeof header, 8 * (size_t)header.num_kinds);
    const uint8_t *at = data + sizeof header + 8 * (size_t)header.num_kinds;
    for (int32_t i = 0; i < header.num_operations; i++, at += sizeof(up_plan_operation)) {
        up_plan_operation op;
        memcpy(&op, at, sizeof op);
        size_t bytes = (size_t)stride[op.code >> 8];
        uint8_t *dst = base + (int64_t)bytes * op.dst;
        if ((op.code & 255) == UP_OP_ZERO)
            memset(dst, 0, bytes);
        else if (op.src != op.dst) /* memmove: a plan made elsewhere must not be able to cause undefined behaviour */
            memmove(dst, base + (int64_t)bytes * op.src, bytes);
    }
    return UP_PLAN_OK;
}

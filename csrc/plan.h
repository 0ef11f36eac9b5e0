/* plan.h: the wire format of a step plan, and applying one to bytes on the host.
 *
 * A plan is what one engine step does to the arena before its forward runs: moves, copies and zeroes of whole cells in
 * phases, then table changes. It is one little-endian block of bytes:
 *
 *     up_plan_header | int64 stride[num_kinds] | up_plan_operation[num_operations] | int32 change[num_changes][1 + num_kinds]
 *
 * Operations are sorted by phase. Inside one phase every destination is disjoint from every source and from every other
 * destination (I12), so a phase may run in any order or in one launch. A change is a handle and its cell in every kind
 * (-1: none), after the plan.
 */
#ifndef UP_PLAN_H
#define UP_PLAN_H

#include <stdint.h>

#define UP_PLAN_MAGIC 0x31505055u /* "UPP1" */
#define UP_PLAN_VERSION 1

enum {
    UP_PLAN_OK = 0,
    UP_PLAN_TRUNCATED = -20,   /* fewer bytes than the header promises, or more */
    UP_PLAN_NOT_A_PLAN = -21,  /* wrong magic or version */
    UP_PLAN_DAMAGED = -22,     /* the checksum differs */
    UP_PLAN_INCONSISTENT = -23, /* a kind, cell, handle or phase out of range */
    UP_PLAN_BUFFER = -24       /* the buffer is smaller than the arena that the plan is for */
};

typedef struct {
    uint32_t magic;
    uint32_t version;
    uint64_t layout_digest;
    uint64_t sequence;
    int64_t step;
    int64_t arena_bytes_before;
    int64_t arena_bytes_after;
    int32_t num_kinds;
    int32_t num_operations;
    int32_t num_changes;
    int32_t num_phases;
    int64_t max_handles;
    uint64_t chain; /* hash of every plan before this one: equal chains <=> the ranks planned the same */
    int64_t total_bytes;
    uint64_t checksum; /* of the whole block, taken with this field 0 */
} up_plan_header;

typedef struct {
    int32_t phase;
    int32_t code; /* UP_OP_* | kind << 8 */
    int32_t src;  /* cell; equal to dst for a zero */
    int32_t dst;  /* cell */
} up_plan_operation;

uint64_t up_hash(uint64_t seed, const void *data, int64_t size);

/* Fill in the checksum of a finished block. */
void up_plan_finish(uint8_t *data, int64_t size);

/* Check everything a reader relies on. UP_PLAN_OK or the reason. O(size). */
int up_plan_check(const uint8_t *data, int64_t size);

/* Check, then run the moves, copies and zeroes on host memory. Nothing is written unless the plan is sound.
 * O(size + bytes moved). */
int up_apply(uint8_t *base, int64_t buffer_bytes, const uint8_t *data, int64_t size);

#endif

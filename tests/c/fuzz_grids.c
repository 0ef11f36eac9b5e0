/* fuzz_grids.c: a seeded fuzzer that runs grids.c in lock-step with map_model.h.
 *
 *     fuzz_grids SEED OPS [--every N] [--quiet]
 *
 * Operations come in episodes. An episode draws a configuration (kinds, strides, arena, null bytes, ends, zeroing, how
 * often to seal) and the weights of the operations, some zero. Operation i of an episode is a function of (seed,
 * episode, i) and of the state it meets, so any subset of the operations can be replayed: a failure is shrunk by
 * dropping operations, then what is left is printed. The run happens in a child process, so a crash, an assert or a
 * sanitizer report is a failure like any other.
 *
 * After every operation: who owns which granule is recounted from the tables, and refusals, statistics, moves and
 * (where it can be said exactly) zeroing are compared with the model. Every sealed plan is checked against I12 and run
 * on a word per granule, which must then read as the model says; its table changes must reproduce the tables. Every N
 * operations, more in large arenas, up_validate, free extents and live cells are checked too.
 *
 * With -DUP_CANARY=n the calls are wrapped so that one of them lies (see CANARY below); the fuzzer must then fail.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "grids.h"
#include "map_model.h"
#include "plan.h"

#ifndef UP_CANARY
#define UP_CANARY 0
#endif

enum {
    CANARY_LOSES_A_MOVE = 1,
    CANARY_MERGES_PHASES,
    CANARY_ONE_TOO_MANY,
    CANARY_LOSES_A_CHANGE,
    CANARY_LOSES_A_ZERO,
    CANARY_WRONG_DESTINATION,
    CANARY_REFUSAL_CHANGES,
    CANARY_ZEROES_CLEAN,
};

enum {
    OP_ALLOCATE,
    OP_FREE,
    OP_ATTACH,
    OP_DETACH,
    OP_PIN,
    OP_UNPIN,
    OP_RESERVE,
    OP_UNRESERVE,
    OP_COMMIT,
    OP_PREPARE,
    OP_COPY,
    OP_ZERO,
    OP_RELOCATE,
    OP_RESIZE,
    OP_SEAL,
    OP_BAD,
    OP_QUERY,
    NUM_OPS
};

static const char *const op_name[NUM_OPS] = {"allocate", "free",  "attach", "detach",   "pin",    "unpin",
                                             "reserve",  "unreserve", "commit", "prepare",  "copy",   "zero",
                                             "relocate", "resize", "seal",   "bad call", "query"};

typedef struct {
    uint64_t state;
} random_source;

typedef struct {
    int64_t episode, operation; /* where the child is, for the parent */
    char message[512];
} progress;

typedef struct {
    map_model model;
    up_grids *grids;
    random_source random;
    int32_t worker[UP_MAX_KINDS][MAX_HANDLES + 1]; /* tables as the plans' changes make them */
    uint32_t bytes[MAX_GRANULES + 1];              /* the arena as up_apply makes it, when a granule is one word */
    int32_t handles[MAX_HANDLES + 1];
    int32_t scratch[2 * MAX_HANDLES + 2];
    int64_t pairs[2 * MAX_GRANULES + 2];
    int32_t weights[NUM_OPS];
    int64_t first_granules;
    int seals_each, applies_bytes, writes_percent, resized, was_pinned;
    uint32_t next_content;
    int64_t sequence;
    up_stats before;
    int64_t net_moved_bytes; /* by the operation, from the tables */
    struct {
        int32_t kind, handle, overwrites;
    } fresh[UP_MAX_KINDS * MAX_HANDLES]; /* cells taken since the last seal, in seals_each episodes */
    int64_t num_fresh, user_zeroes;
    int64_t plan_cells[3][UP_MAX_KINDS]; /* by UP_OP_*: cells in all plans so far */
    int64_t worst_call_bytes, allocated[UP_MAX_KINDS];
} context;

static progress *shared;
static int verbose;
static int check_every = 1;

static void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(shared->message, sizeof shared->message, format, arguments);
    va_end(arguments);
    fflush(stdout);
    _exit(3);
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
    va_list arguments;
    if (!verbose) return;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
}

/* SplitMix64 (Steele, Lea and Flood 2014). */
static uint64_t draw64(random_source *r) {
    uint64_t z = (r->state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}
static uint64_t mix(uint64_t a, uint64_t b) {
    random_source r = {a * UINT64_C(0xD1342543DE82EF95) + b};
    draw64(&r);
    return draw64(&r);
}
/* 0..n-1 */
static int64_t below(random_source *r, int64_t n) { return n <= 1 ? 0 : (int64_t)(draw64(r) % (uint64_t)n); }
static int64_t between(random_source *r, int64_t low, int64_t high) { return low + below(r, high - low + 1); }
static int percent(random_source *r, int p) { return below(r, 100) < p; }

/* Mostly small, sometimes everything. */
static int64_t batch_size(random_source *r, int64_t most) {
    int64_t n;
    switch (below(r, 8)) {
    case 0: n = most; break;
    case 1: n = between(r, 1, most > 0 ? most : 1); break;
    case 2: case 3: n = between(r, 1, 64); break;
    default: n = between(r, 1, 6);
    }
    return n < most ? n : most;
}

/* ---- the canaries: lies between the core and the fuzzer ---- */

static up_demand as_demand(up_grids *g, const up_item *items, int32_t n, uint32_t flags, up_handles *out) {
    up_demand demand = {.grids = g, .num_items = n, .flags = flags, .items = (up_item *)(uintptr_t)items, .out = out};
    for (int32_t i = 0; i < n; i++) demand.total += items[i].count;
    return demand;
}

/* `whole` calls the forms that take their arguments as one struct. */
static int call_can_allocate(up_grids *g, const up_item *items, int32_t n, uint32_t flags, int whole) {
    up_item fewer[8];
    memcpy(fewer, items, sizeof *items * (size_t)n);
    if (UP_CANARY == CANARY_ONE_TOO_MANY && n > 0 && items[0].count > 0) fewer[0].count--;
    up_demand demand = as_demand(g, fewer, n, flags, NULL);
    return whole ? up_can_allocate_demand(&demand) : up_can_allocate(g, fewer, n, flags);
}

static int call_allocate(up_grids *g, const up_item *items, int32_t n, uint32_t flags, int32_t *handles, int64_t room,
                         int whole) {
    up_handles out = {.grids = g, .capacity = room, .length = -1, .data = handles};
    up_demand demand = as_demand(g, items, n, flags, &out);
    int code = whole ? up_allocate_demand(&demand) : up_allocate(g, items, n, flags, handles, room);
    if (whole && code == UP_OK && out.length != demand.total)
        fail("up_allocate_demand wrote length %ld", (long)out.length);
    if (UP_CANARY == CANARY_REFUSAL_CHANGES && code == UP_NO_CAPACITY) {
        up_item one = {1, 1};
        int32_t handle;
        up_allocate(g, &one, 1, 0, &handle, 1);
    }
    return code;
}

static void lie_about_operations(up_plan_operation *ops, int32_t *num_ops) {
    for (int32_t i = 0; i < *num_ops; i++) {
        int is_zero = (ops[i].code & 255) == UP_OP_ZERO;
        if ((UP_CANARY == CANARY_LOSES_A_MOVE && !is_zero) || (UP_CANARY == CANARY_LOSES_A_ZERO && is_zero)) {
            memmove(ops + i, ops + i + 1, sizeof *ops * (size_t)(*num_ops - i - 1));
            --*num_ops;
            return;
        }
        if (UP_CANARY == CANARY_MERGES_PHASES) ops[i].phase = 0;
        if (UP_CANARY == CANARY_WRONG_DESTINATION && !is_zero && ops[i].dst > 0) {
            ops[i].dst--;
            return;
        }
    }
    if (UP_CANARY == CANARY_ZEROES_CLEAN && *num_ops > 0 && (ops[0].code & 255) != UP_OP_ZERO) {
        ops[*num_ops] = (up_plan_operation){ops[*num_ops - 1].phase, UP_OP_ZERO | (ops[0].code & ~255), ops[0].dst,
                                            ops[0].dst};
        ++*num_ops;
    }
}

/* ---- set-up ---- */

static int64_t draw_ratio(random_source *r) {
    static const int64_t special[] = {1, 1, 2, 2, 3, 4, 5, 7, 8, 10, 13, 16, 32, 63, 64, 65, 128};
    if (percent(r, 70)) return special[below(r, (int64_t)(sizeof special / sizeof *special))];
    return between(r, 2, percent(r, 70) ? 24 : 200);
}

static void start_episode(context *x, uint64_t seed) {
    static const int64_t granule_bytes[] = {4, 4, 4, 4, 1, 3, 8, 12, 256, 4096};
    map_model *m = &x->model;
    random_source *r = &x->random;
    up_kind kinds[UP_MAX_KINDS];
    up_error error;

    memset(m, 0, sizeof *m);
    r->state = seed;
    m->num_kinds = percent(r, 15) ? 1 : percent(r, 45) ? 2 : percent(r, 60) ? 3 : (int)between(r, 4, UP_MAX_KINDS);
    m->granule_bytes = granule_bytes[below(r, 10)];
    int64_t most = percent(r, 50) ? 80 : percent(r, 60) ? 300 : percent(r, 85) ? 1200 : MAX_GRANULES - 200;
    int64_t granules = between(r, percent(r, 90) ? most / 4 : 1, most), per_cell = 1;
    for (int k = m->num_kinds - 1; k >= 0; k--) {
        int64_t ratio = draw_ratio(r);
        if (k < m->num_kinds - 1 && per_cell * ratio <= granules / (percent(r, 90) ? 3 : 1)) per_cell *= ratio;
        m->per_cell[k] = (int32_t)per_cell;
        m->stride_bytes[k] = per_cell * m->granule_bytes;
        m->zero_policy[k] = (int)(percent(r, 60) ? UP_ZERO_IF_DIRTY : below(r, 3));
        kinds[k] = (up_kind){m->stride_bytes[k], k == 0 || percent(r, 40), m->zero_policy[k]};
    }
    m->arena_bytes = granules * m->granule_bytes + below(r, m->granule_bytes);
    if (percent(r, 50)) m->reserved_bytes = m->stride_bytes[m->num_kinds > 1];
    if (m->reserved_bytes > m->arena_bytes) m->reserved_bytes = 0;
    if (up_create(m->arena_bytes, m->reserved_bytes, kinds, m->num_kinds, seed, &x->grids, &error) != UP_OK)
        fail("up_create refused a good configuration: code %d", error.code);
    if (up_get_stats(x->grids, &x->before) != UP_OK) fail("up_get_stats failed");
    m->max_handles = (int32_t)x->before.max_handles;
    if (m->max_handles > MAX_HANDLES) fail("%d handles for %ld granules", m->max_handles, (long)granules);
    for (int k = 0; k < m->num_kinds; k++)
        for (int32_t h = 0; h <= MAX_HANDLES; h++) m->cell[k][h] = x->worker[k][h] = -1;
    for (int32_t h = 0; h <= MAX_HANDLES; h++) m->generation[h] = -1;
    memset(m->last_kind, NO_KIND, sizeof m->last_kind);
    for (int64_t g = 0; g <= MAX_GRANULES; g++) m->memory[g] = x->bytes[g] = GARBAGE;

    static const int usual[NUM_OPS] = {30, 25, 6, 6, 5, 5, 2, 2, 3, 3, 4, 2, 4, 4, 8, 4, 3};
    for (int op = 0; op < NUM_OPS; op++) x->weights[op] = percent(r, 25) ? 0 : (int32_t)(usual[op] * between(r, 1, 8));
    if (percent(r, 70) && x->weights[OP_ALLOCATE] == 0) x->weights[OP_ALLOCATE] = 30;
    if (percent(r, 70) && x->weights[OP_FREE] == 0) x->weights[OP_FREE] = 30;
    if (percent(r, 70)) x->weights[OP_RESIZE] = 0; /* a resize shuffles everything: keep most episodes long-lived */
    x->weights[OP_SEAL]++;
    x->first_granules = granules;
    x->seals_each = percent(r, 50);
    x->applies_bytes = m->granule_bytes == sizeof(uint32_t);
    x->writes_percent = percent(r, 60) ? 100 : 60;
    x->next_content = 1;
    x->sequence = x->resized = x->was_pinned = 0;
    say("%d kinds, arena %ld, reserved %ld, strides", m->num_kinds, (long)m->arena_bytes, (long)m->reserved_bytes);
    for (int k = 0; k < m->num_kinds; k++)
        say(" %ld%s/%d", (long)m->stride_bytes[k], kinds[k].low_end ? "L" : "H", m->zero_policy[k]);
    say(", seal each %d\n", x->seals_each);
    if (!model_recount(m, m->arena_bytes)) fail("the model does not start empty");
}

/* ---- comparing ---- */

enum { MOVES_NONE, MOVES_EVACUATION, MOVES_RESIZE, MOVES_ONE };

/* Take over where the core moved cells, after checking that it may; `one` is the handle of a MOVES_ONE. */
static void follow_moves(context *x, int allowed, int32_t one) {
    map_model *m = &x->model;
    x->net_moved_bytes = 0;
    for (int k = 0; k < m->num_kinds; k++) {
        const int32_t *cells = up_cells(x->grids, k);
        if (memcmp(cells, m->cell[k], sizeof *cells * (size_t)(m->max_handles + 1)) == 0) continue;
        for (int32_t h = 0; h <= m->max_handles; h++) {
            if (cells[h] == m->cell[k][h]) continue;
            if (h == 0 || !m->is_live[h]) fail("dead handle %d has cell %d of kind %d (I4)", h, cells[h], k);
            if (m->cell[k][h] < 0 || cells[h] < 0)
                fail("handle %d kind %d: cell %d, model %d", h, k, cells[h], m->cell[k][h]);
            if (m->pins[h] > 0) fail("pinned handle %d moved in kind %d (I7)", h, k);
            if (allowed == MOVES_NONE) fail("handle %d moved in kind %d though nothing had to (I9)", h, k);
            if (allowed == MOVES_ONE && h != one) fail("handle %d moved beside the relocated %d", h, one);
            if (allowed == MOVES_EVACUATION && k == 0) fail("a cell of the largest kind moved");
            m->cell[k][h] = cells[h];
            x->net_moved_bytes += m->stride_bytes[k];
        }
    }
}

static void compare_stats(context *x, int op) {
    map_model *m = &x->model;
    up_stats s;
    int64_t live_bytes = 0;
    if (up_get_stats(x->grids, &s) != UP_OK) fail("up_get_stats failed");
    for (int k = 0; k < m->num_kinds; k++) {
        const up_kind_stats *kind = &s.kinds[k];
        int64_t unit[UP_MAX_KINDS] = {0};
        unit[k] = 1;
        live_bytes += m->live[k] * m->stride_bytes[k];
        if (kind->cells != m->cells[k]) fail("kind %d: %ld cells, model %ld", k, (long)kind->cells, (long)m->cells[k]);
        if (kind->live != m->live[k]) fail("kind %d: %ld live, model %ld", k, (long)kind->live, (long)m->live[k]);
        if (kind->pinned != m->pinned[k])
            fail("kind %d: %ld pinned, model %ld", k, (long)kind->pinned, (long)m->pinned[k]);
        if (kind->available != m->available[k])
            fail("kind %d: %ld available, model %ld (I2)", k, (long)kind->available, (long)m->available[k]);
        if (kind->pin_free != m->pin_free[k])
            fail("kind %d: %ld pin-free, model %ld", k, (long)kind->pin_free, (long)m->pin_free[k]);
        if (kind->reserved != m->reserved[k])
            fail("kind %d: %ld promised, model %ld", k, (long)kind->reserved, (long)m->reserved[k]);
        int64_t placeable = model_placeable(m, unit, 0), lifted = model_placeable(m, unit, 1);
        if (kind->placeable != placeable)
            fail("kind %d: placeable %ld, model %ld", k, (long)kind->placeable, (long)placeable);
        if (kind->held_by_pins != lifted - placeable)
            fail("kind %d: held by pins %ld, model %ld", k, (long)kind->held_by_pins, (long)(lifted - placeable));
        /* I8. Where free cells lie in windows that cannot be opened (pins, null bytes), a full one moves. */
        int64_t depth = m->num_kinds < 3 ? 1 : m->num_kinds - 1, bound = depth * m->stride_bytes[0];
        if (!x->was_pinned && m->reserved_bytes == 0) bound = (depth < 2 ? 1 : 2) * m->stride_bytes[0] - 1;
        if (kind->worst_window_bytes > bound && kind->worst_window_bytes > 0)
            fail("kind %d: %ld bytes moved for one window (I8)", k, (long)kind->worst_window_bytes);
    }
    if (s.live_bytes != live_bytes || s.arena_bytes != m->arena_bytes ||
        s.live_bytes + s.free_bytes + s.reserved_bytes != s.arena_bytes)
        fail("bytes do not add up: arena %ld live %ld free %ld reserved %ld, model live %ld (I3)", (long)s.arena_bytes,
             (long)s.live_bytes, (long)s.free_bytes, (long)s.reserved_bytes, (long)live_bytes);
    if (s.live_handles != m->num_live) fail("%ld live handles, model %d", (long)s.live_handles, m->num_live);
    int64_t moved = s.moved_bytes - x->before.moved_bytes;
    if (moved < x->net_moved_bytes)
        fail("%ld bytes moved, the tables say at least %ld", (long)moved, (long)x->net_moved_bytes);
    if (op != OP_RELOCATE && moved > x->worst_call_bytes) x->worst_call_bytes = moved;
    if (s.worst_call_bytes != x->worst_call_bytes)
        fail("worst call %ld bytes, model %ld", (long)s.worst_call_bytes, (long)x->worst_call_bytes);
    for (int k = 0; s.unsealed_operations == 0 && k < m->num_kinds; k++)
        if (s.kinds[k].moved_cells != x->plan_cells[UP_OP_MOVE][k] ||
            s.kinds[k].zeroed_cells != x->plan_cells[UP_OP_ZERO][k] ||
            s.kinds[k].allocated_cells != x->allocated[k])
            fail("kind %d: %ld moved, %ld zeroed, %ld allocated; the plans say %ld, %ld, the calls %ld", k,
                 (long)s.kinds[k].moved_cells, (long)s.kinds[k].zeroed_cells, (long)s.kinds[k].allocated_cells,
                 (long)x->plan_cells[UP_OP_MOVE][k], (long)x->plan_cells[UP_OP_ZERO][k], (long)x->allocated[k]);
    x->before = s;
}

/* The slow checks. */
static void compare_everything(context *x) {
    map_model *m = &x->model;
    int64_t count = 0, expected = 0;
    int broken = up_validate(x->grids);
    if (broken) fail("up_validate: I%d", broken);
    if (up_free_extents(x->grids, x->pairs, MAX_GRANULES, &count) != UP_OK) fail("up_free_extents failed");
    for (int64_t g = 0; g <= m->granules; g++) {
        int64_t start = g * m->granule_bytes, end;
        if (g == m->granules ? start == m->arena_bytes || (g > 0 && !m->is_taken[g - 1]) : m->is_taken[g]) continue;
        if (g > 0 && g < m->granules && !m->is_taken[g - 1]) continue;
        for (end = g; end < m->granules && !m->is_taken[end];) end++;
        int64_t end_bytes = end == m->granules ? m->arena_bytes : end * m->granule_bytes;
        if (start < m->reserved_bytes) start = m->reserved_bytes;
        if (expected >= count || x->pairs[2 * expected] != start || x->pairs[2 * expected + 1] != end_bytes - start)
            fail("free extent %ld is not [%ld, %ld) (I3)", (long)expected, (long)start, (long)end_bytes);
        expected++;
    }
    if (count != expected) fail("%ld free extents, model %ld (I3)", (long)count, (long)expected);
    for (int k = 0; k < m->num_kinds; k++) {
        int32_t *cells = x->scratch, *handles = x->scratch + MAX_HANDLES + 1;
        if (up_live_cells(x->grids, k, cells, handles, MAX_HANDLES, &count) != UP_OK) fail("up_live_cells failed");
        if (count != m->live[k]) fail("kind %d lists %ld live cells, model %ld", k, (long)count, (long)m->live[k]);
        for (int64_t i = 0; i < count; i++)
            if ((i > 0 && cells[i] <= cells[i - 1]) || handles[i] < 1 || m->cell[k][handles[i]] != cells[i])
                fail("kind %d: live cell %d belongs to handle %d (I4)", k, cells[i], handles[i]);
    }
}

/* Fresh cells are zeroed when their policy says so and their bytes last belonged to another kind, and no others. */
static void expect_zeroes(context *x, int64_t num_zeroes) {
    map_model *m = &x->model;
    int64_t expected = x->user_zeroes;
    for (int64_t i = 0; i < x->num_fresh; i++) {
        int kind = x->fresh[i].kind;
        int32_t cell = m->cell[kind][x->fresh[i].handle];
        int is_dirty = model_is_dirty(m, kind, cell), policy = m->zero_policy[kind];
        if (!x->fresh[i].overwrites && (policy == UP_ZERO_ALWAYS || (policy == UP_ZERO_IF_DIRTY && is_dirty))) {
            expected++;
            m->content[kind][x->fresh[i].handle] = CONTENT_ZERO;
        }
        model_set_last_kind(m, kind, cell);
    }
    if (num_zeroes != expected) fail("%ld cells zeroed, model %ld", (long)num_zeroes, (long)expected);
    x->num_fresh = x->user_zeroes = 0;
}

/* Seal, check the plan, run it, and read every live cell back. Fresh cells are then written. */
static void seal(context *x) {
    map_model *m = &x->model;
    const uint8_t *data = NULL;
    int64_t size = 0, had = x->before.unsealed_operations;
    static int32_t written_in[MAX_GRANULES + 1], read_in[MAX_GRANULES + 1], stamp_base; /* stamp of the phase */
    int64_t num_zeroes = 0;
    if (up_seal(x->grids, x->sequence, &data, &size) != UP_OK) fail("up_seal failed");
    if (size > 0) {
        up_plan_header header;
        if (up_plan_check(data, size) != UP_PLAN_OK) fail("the plan is unsound: %d", up_plan_check(data, size));
        memcpy(&header, data, sizeof header);
        if ((int64_t)header.sequence != x->sequence++)
            fail("plan %ld has sequence %ld", (long)x->sequence - 1, (long)header.sequence);
        if (header.arena_bytes_after != m->arena_bytes)
            fail("the plan is for %ld bytes", (long)header.arena_bytes_after);
        const uint8_t *at = data + sizeof header + 8 * (size_t)header.num_kinds;
        up_plan_operation *ops = malloc(sizeof *ops * (size_t)(header.num_operations + 1));
        int32_t num_ops = header.num_operations;
        memcpy(ops, at, sizeof *ops * (size_t)num_ops);
        at += sizeof *ops * (size_t)num_ops;
        lie_about_operations(ops, &num_ops);
        for (int32_t i = 0; i < num_ops; i++) {
            int code = ops[i].code & 255, kind = ops[i].code >> 8, stamp = stamp_base + ops[i].phase + 1;
            int64_t n = m->per_cell[kind], src = ops[i].src * n, dst = ops[i].dst * n;
            static const char *const names[] = {"move", "copy", "zero"};
            say("      phase %d: %s kind %d, %d -> %d\n", ops[i].phase, names[code], kind, ops[i].src, ops[i].dst);
            if (i > 0 && ops[i].phase < ops[i - 1].phase) fail("plan operation %d goes back a phase", i);
            for (int64_t j = 0; j < n; j++) {
                if (written_in[dst + j] == stamp || read_in[dst + j] == stamp ||
                    (code != UP_OP_ZERO && written_in[src + j] == stamp))
                    fail("operation %d of phase %d overlaps another (I12)", i, ops[i].phase);
                if (code != UP_OP_ZERO) read_in[src + j] = stamp;
            }
            for (int64_t j = 0; j < n; j++) {
                if (code != UP_OP_ZERO && read_in[dst + j] == stamp) fail("operation %d overlaps itself (I12)", i);
                written_in[dst + j] = stamp;
            }
            x->plan_cells[code][kind]++;
            if (code == UP_OP_ZERO) {
                memset(m->memory + dst, 0, sizeof(uint32_t) * (size_t)n);
                num_zeroes++;
            } else {
                memcpy(m->memory + dst, m->memory + src, sizeof(uint32_t) * (size_t)n);
                model_set_last_kind(m, kind, ops[i].dst);
            }
        }
        stamp_base += header.num_phases + 1;
        if (stamp_base > INT32_MAX / 2) {
            stamp_base = 0;
            memset(written_in, 0, sizeof written_in);
            memset(read_in, 0, sizeof read_in);
        }
        if (x->applies_bytes && !UP_CANARY) {
            if (up_apply((uint8_t *)x->bytes, sizeof x->bytes, data, size) != UP_PLAN_OK)
                fail("up_apply refused the plan");
            if (memcmp(x->bytes, m->memory, sizeof(uint32_t) * (size_t)m->granules) != 0)
                fail("up_apply wrote other bytes");
        }
        for (int32_t i = 0; i < header.num_changes; i++, at += 4 * (1 + header.num_kinds)) {
            int32_t change[1 + UP_MAX_KINDS];
            memcpy(change, at, 4 * (size_t)(1 + header.num_kinds));
            if (UP_CANARY == CANARY_LOSES_A_CHANGE && i == 0) continue;
            for (int k = 0; k < m->num_kinds; k++) x->worker[k][change[0]] = change[1 + k];
        }
        free(ops);
    } else if (had > 0) {
        fail("%ld operations were lost", (long)had);
    }
    if (x->seals_each) expect_zeroes(x, num_zeroes);
    for (int k = 0; k < m->num_kinds; k++) {
        if (memcmp(x->worker[k], up_cells(x->grids, k), sizeof(int32_t) * (size_t)(m->max_handles + 1)) != 0)
            fail("the table changes do not give the table of kind %d", k);
        for (int32_t i = 0; i < m->num_live; i++) {
            int32_t h = m->live_handles[i], cell = m->cell[k][h];
            uint32_t content = m->content[k][h];
            if (cell < 0) continue;
            if (!model_reads(m, k, cell, content))
                fail("handle %d kind %d cell %d does not read as 0x%x (I6)", h, k, cell, content);
            int is_owed = content == CONTENT_ANYTHING && m->zero_policy[k] != UP_ZERO_NEVER;
            if (content < CONTENT_ANYTHING || (!is_owed && !percent(&x->random, x->writes_percent))) continue;
            m->content[k][h] = (uint32_t)(k + 1) << 28 | (x->next_content++ & 0xFFFFFFF);
            for (int64_t g = (int64_t)cell * m->per_cell[k]; g < ((int64_t)cell + 1) * m->per_cell[k]; g++)
                m->memory[g] = x->bytes[g] = m->content[k][h];
        }
    }
    for (int64_t g = m->granules; x->resized && g <= MAX_GRANULES; g++) /* what a resize cut off */
        m->memory[g] = x->bytes[g] = GARBAGE;
    x->before.unsealed_operations = x->resized = 0;
}

/* ---- operations ---- */

static int32_t draw_live(context *x) {
    map_model *m = &x->model;
    return m->num_live ? m->live_handles[below(&x->random, m->num_live)] : 0;
}

/* Handles to work on, into x->handles: a random run of the live ones that have (wanted 1) or lack (0) a cell of `kind`
 * (-1: any) and are pinned (1), not (0) or either (-1). */
static int64_t draw_batch(context *x, int kind, int wanted, int pinned, int64_t most) {
    map_model *m = &x->model;
    int64_t count = 0, start = below(&x->random, m->num_live), step = percent(&x->random, 50) ? 1 : m->num_live - 1;
    if (m->num_live == 0) return 0;
    for (int64_t i = 0; i < m->num_live && count < most; i++) {
        int32_t h = m->live_handles[(start + i * step) % m->num_live];
        if (kind >= 0 && (m->cell[kind][h] >= 0) != wanted) continue;
        if (pinned >= 0 && (m->pins[h] > 0) != pinned) continue;
        x->handles[count++] = h;
    }
    return count;
}

static void take_cell(context *x, int kind, int32_t handle, uint32_t flags, const uint8_t *was_taken) {
    map_model *m = &x->model;
    int32_t cell = up_cells(x->grids, kind)[handle];
    int overwrites = (flags & UP_WILL_OVERWRITE) != 0;
    if (cell < 0 || cell >= m->granules / m->per_cell[kind])
        fail("handle %d got cell %d of kind %d", handle, cell, kind);
    for (int64_t g = (int64_t)cell * m->per_cell[kind]; was_taken && g < ((int64_t)cell + 1) * m->per_cell[kind]; g++)
        if (was_taken[g]) fail("cell %d of kind %d was not available and nothing moved (I2)", cell, kind);
    m->cell[kind][handle] = cell;
    x->allocated[kind]++;
    m->content[kind][handle] = overwrites || m->zero_policy[kind] == UP_ZERO_NEVER ? CONTENT_ANYTHING
                               : m->zero_policy[kind] == UP_ZERO_ALWAYS            ? CONTENT_ZERO
                                                                                   : CONTENT_FRESH;
    if (!x->seals_each) return;
    x->fresh[x->num_fresh].kind = kind;
    x->fresh[x->num_fresh].handle = handle;
    x->fresh[x->num_fresh++].overwrites = overwrites;
}

/* Outside seals_each episodes a promise to overwrite could be broken by a free before the seal. */
static uint32_t draw_flags(context *x) {
    uint32_t flags = 0;
    if (percent(&x->random, 15)) flags |= UP_FORBID_MOVES;
    if (x->seals_each && percent(&x->random, 25)) flags |= UP_WILL_OVERWRITE;
    if (percent(&x->random, 20)) flags |= UP_WILL_PIN;
    return flags;
}

static void allocate(context *x, int commits) {
    map_model *m = &x->model;
    random_source *r = &x->random;
    static uint8_t was_taken[MAX_GRANULES + 1];
    up_item items[4];
    int32_t num_items = percent(r, 60) ? 1 : (int32_t)between(r, 1, 4);
    int64_t demand[UP_MAX_KINDS] = {0}, total = 0, promised[UP_MAX_KINDS];
    uint32_t flags = draw_flags(x);
    int by_formula = percent(r, 40);
    for (int32_t i = 0; i < num_items; i++) {
        int64_t unit[UP_MAX_KINDS] = {0}, most;
        items[i].kind_mask = 1u << below(r, m->num_kinds);
        if (percent(r, 25)) items[i].kind_mask = (uint32_t)between(r, 1, (1 << m->num_kinds) - 1);
        if (commits) items[i].kind_mask = 1u << below(r, m->num_kinds);
        for (int k = 0; k < m->num_kinds; k++) unit[k] = items[i].kind_mask >> k & 1;
        if (commits) {
            int kind = __builtin_ctz(items[i].kind_mask);
            items[i].count = (int32_t)between(r, 0, m->reserved[kind] - demand[kind]);
        } else if (by_formula && i == 0) { /* at the edge of what fits, or one above */
            most = model_placeable(m, unit, 0);
            items[i].count = (int32_t)(most - below(r, 2) + below(r, 2));
            if (items[i].count < 0) items[i].count = 0;
        } else {
            for (most = m->granules + 2, unit[0] = 0; unit[0] < m->num_kinds; unit[0]++)
                if (items[i].kind_mask >> unit[0] & 1 && m->granules / m->per_cell[unit[0]] < most)
                    most = m->granules / m->per_cell[unit[0]] + 2;
            items[i].count = (int32_t)batch_size(r, percent(r, 95) ? (most + 7) / 8 : most);
        }
        for (int k = 0; k < m->num_kinds; k++) demand[k] += items[i].kind_mask >> k & 1 ? items[i].count : 0;
        total += items[i].count;
    }
    if (commits) flags |= UP_FROM_RESERVATION;
    memcpy(promised, m->reserved, sizeof promised);
    for (int k = 0; commits && k < m->num_kinds; k++) promised[k] -= demand[k];
    int fits = model_fits(m, demand, promised, m->pin_free, 0), fits_unmoved = model_fits_unmoved(m, demand);
    int expected = fits && (fits_unmoved || !(flags & UP_FORBID_MOVES));
    say("items");
    for (int32_t i = 0; i < num_items; i++) say(" %x*%d", items[i].kind_mask, items[i].count);
    say(" flags %x: fits %d unmoved %d\n", flags, fits, fits_unmoved);
    if (total > MAX_HANDLES) return;

    int answer = call_can_allocate(x->grids, items, num_items, flags, percent(r, 50));
    if (answer != expected) fail("up_can_allocate says %d, the formula %d", answer, expected);
    int64_t shortfall = -1;
    if (!commits && (up_shortfall(x->grids, items, num_items, &shortfall) != UP_OK || (shortfall == 0) != fits))
        fail("shortfall is %ld, the formula says %d", (long)shortfall, fits);
    uint64_t digest, digest_after;
    up_digest(x->grids, &digest);
    memcpy(was_taken, m->is_taken, (size_t)m->granules + 1);
    int code = call_allocate(x->grids, items, num_items, flags, x->handles, MAX_HANDLES, percent(r, 50));
    if (code != (expected ? UP_OK : UP_NO_CAPACITY))
        fail("up_allocate returned %d, the formula %d (I11)", code, expected);
    if (!expected) {
        up_digest(x->grids, &digest_after);
        if (digest != digest_after) fail("a refusal changed the digest (I5)");
        follow_moves(x, MOVES_NONE, 0);
        return;
    }
    memcpy(m->reserved, promised, sizeof promised);
    int64_t at = 0;
    for (int32_t i = 0; i < num_items; i++)
        for (int32_t j = 0; j < items[i].count; j++) {
            int32_t h = x->handles[at++];
            int64_t generation = -1;
            if (h < 1 || h > m->max_handles || m->is_live[h]) fail("handle %d was handed out", h);
            model_add_handle(m, h);
            for (int k = 0; k < m->num_kinds; k++)
                if (items[i].kind_mask >> k & 1) take_cell(x, k, h, flags, fits_unmoved ? was_taken : NULL);
            if (up_generation(x->grids, h, &generation) != UP_OK || generation == m->generation[h])
                fail("handle %d has generation %ld again", h, (long)generation);
            m->generation[h] = generation;
        }
    follow_moves(x, fits_unmoved ? MOVES_NONE : MOVES_EVACUATION, 0);
}

static void free_batch(context *x) {
    map_model *m = &x->model;
    int kind = percent(&x->random, 60) ? (int)below(&x->random, m->num_kinds) : -1;
    int64_t count = draw_batch(x, kind, 1, 0, batch_size(&x->random, m->num_live));
    say("%ld handles\n", (long)count);
    up_handles batch = {.grids = x->grids, .capacity = count, .length = count, .data = x->handles};
    int code = percent(&x->random, 50) ? up_free(x->grids, x->handles, count) : up_free_handles(&batch);
    if (code != UP_OK) fail("up_free refused: %d", up_last_error(x->grids)->code);
    for (int64_t i = 0; i < count; i++) model_drop_handle(m, x->handles[i]);
    follow_moves(x, MOVES_NONE, 0);
}

static void attach(context *x) {
    map_model *m = &x->model;
    static uint8_t was_taken[MAX_GRANULES + 1];
    int kind = (int)below(&x->random, m->num_kinds);
    int64_t count = draw_batch(x, kind, 0, 0, batch_size(&x->random, m->granules / m->per_cell[kind] + 1));
    uint32_t flags = draw_flags(x);
    int64_t demand[UP_MAX_KINDS] = {0}, promised[UP_MAX_KINDS];
    demand[kind] = count;
    memcpy(promised, m->reserved, sizeof promised);
    if (count <= m->reserved[kind] && percent(&x->random, 40)) {
        flags |= UP_FROM_RESERVATION;
        promised[kind] -= count;
    }
    int fits = model_fits(m, demand, promised, m->pin_free, 0), fits_unmoved = model_fits_unmoved(m, demand);
    int expected = fits && (fits_unmoved || !(flags & UP_FORBID_MOVES));
    say("%ld handles, kind %d, flags %x: fits %d unmoved %d\n", (long)count, kind, flags, fits, fits_unmoved);
    memcpy(was_taken, m->is_taken, (size_t)m->granules + 1);
    int code = up_attach(x->grids, x->handles, count, kind, flags);
    if (code != (expected ? UP_OK : UP_NO_CAPACITY)) fail("up_attach returned %d, the formula %d", code, expected);
    if (expected) {
        memcpy(m->reserved, promised, sizeof promised);
        for (int64_t i = 0; i < count; i++) take_cell(x, kind, x->handles[i], flags, fits_unmoved ? was_taken : NULL);
    }
    follow_moves(x, expected && !fits_unmoved ? MOVES_EVACUATION : MOVES_NONE, 0);
}

static void detach(context *x) {
    map_model *m = &x->model;
    int kind = (int)below(&x->random, m->num_kinds);
    int64_t count = draw_batch(x, kind, 1, 0, batch_size(&x->random, m->num_live));
    say("%ld handles, kind %d\n", (long)count, kind);
    if (up_detach(x->grids, x->handles, count, kind) != UP_OK) fail("up_detach refused");
    for (int64_t i = 0; i < count; i++) {
        m->cell[kind][x->handles[i]] = -1;
        if (model_has_no_cell(m, x->handles[i])) model_drop_handle(m, x->handles[i]);
    }
    follow_moves(x, MOVES_NONE, 0);
}

/* Pin, unless a promise could then not be kept. */
static void pin(context *x) {
    map_model *m = &x->model;
    int64_t none[UP_MAX_KINDS] = {0};
    int64_t count = draw_batch(x, -1, 0, -1, batch_size(&x->random, (m->num_live + 3) / 4));
    for (int64_t i = 0; i < count; i++) m->pins[x->handles[i]]++;
    model_recount(m, m->arena_bytes);
    int fits = model_fits(m, none, m->reserved, m->pin_free, 0);
    say("%ld handles: fits %d\n", (long)count, fits);
    x->was_pinned |= count > 0;
    int code = up_pin(x->grids, x->handles, count);
    if (code != (fits ? UP_OK : UP_NO_CAPACITY)) fail("up_pin returned %d, the formula %d", code, fits);
    for (int64_t i = 0; !fits && i < count; i++) m->pins[x->handles[i]]--;
    follow_moves(x, MOVES_NONE, 0);
}

static void unpin(context *x) {
    map_model *m = &x->model;
    int64_t count = draw_batch(x, -1, 0, 1, batch_size(&x->random, m->num_live));
    say("%ld handles\n", (long)count);
    if (up_unpin(x->grids, x->handles, count) != UP_OK) fail("up_unpin refused");
    for (int64_t i = 0; i < count; i++) m->pins[x->handles[i]]--;
    follow_moves(x, MOVES_NONE, 0);
}

static void reserve(context *x) {
    map_model *m = &x->model;
    int64_t counts[UP_MAX_KINDS] = {0};
    for (int k = 0; k < m->num_kinds; k++)
        if (percent(&x->random, 60)) counts[k] = batch_size(&x->random, m->granules / m->per_cell[k] / 4 + 1);
    int fits = model_fits(m, counts, m->reserved, m->pin_free, 0);
    int code = up_reserve(x->grids, counts);
    say("fits %d\n", fits);
    if (code != (fits ? UP_OK : UP_NO_CAPACITY)) fail("up_reserve returned %d, the formula %d", code, fits);
    for (int k = 0; fits && k < m->num_kinds; k++) m->reserved[k] += counts[k];
    follow_moves(x, MOVES_NONE, 0);
}

static void unreserve(context *x) {
    map_model *m = &x->model;
    int64_t counts[UP_MAX_KINDS] = {0};
    int all = percent(&x->random, 40);
    for (int k = 0; k < m->num_kinds; k++) counts[k] = all ? m->reserved[k] : between(&x->random, 0, m->reserved[k]);
    say("all %d\n", all);
    if (up_unreserve(x->grids, counts) != UP_OK) fail("up_unreserve refused");
    for (int k = 0; k < m->num_kinds; k++) m->reserved[k] -= counts[k];
    follow_moves(x, MOVES_NONE, 0);
}

static void prepare(context *x) {
    map_model *m = &x->model;
    int kind = (int)below(&x->random, m->num_kinds);
    int64_t count = batch_size(&x->random, m->granules / m->per_cell[kind] + 1), available = -1, moved = -1, cost = -2;
    int64_t budget = between(&x->random, 1, 3 * m->stride_bytes[0]);
    if (percent(&x->random, 60)) budget = percent(&x->random, 50) ? 0 : INT64_MAX;
    int64_t was_available = m->available[kind];
    say("%ld of kind %d within %ld bytes\n", (long)count, kind, (long)budget);
    if (up_prepare(x->grids, kind, count, budget, &available, &moved) != UP_OK) fail("up_prepare refused");
    follow_moves(x, was_available >= count ? MOVES_NONE : MOVES_EVACUATION, 0);
    if (!model_recount(m, m->arena_bytes)) fail("live cells overlap (I1)");
    if (available != m->available[kind])
        fail("prepare says %ld available, model %ld", (long)available, (long)m->available[kind]);
    if (moved > budget || moved < x->net_moved_bytes) fail("prepare moved %ld of %ld bytes", (long)moved, (long)budget);
    if (up_next_open_cost(x->grids, kind, &cost) != UP_OK) fail("up_next_open_cost refused");
    if (kind < m->num_kinds - 1) cost *= m->num_kinds - 1 - kind; /* it allows for middle cells that open windows of their own */
    if (available > 0 ? cost != 0 : available < count && cost >= 0 && cost <= budget - moved)
        fail("prepare stopped at %ld of %ld though the next costs %ld", (long)available, (long)count, (long)cost);
}

static void copy(context *x) {
    map_model *m = &x->model;
    int kind = (int)below(&x->random, m->num_kinds);
    int64_t count = draw_batch(x, kind, 1, -1, 2 * batch_size(&x->random, 12)) / 2;
    say("%ld handles, kind %d\n", (long)count, kind);
    const int32_t *src = x->handles, *dst = x->handles + count; /* distinct, so the order does not matter */
    if (up_copy(x->grids, src, dst, count, kind) != UP_OK) fail("up_copy refused: %d", up_last_error(x->grids)->code);
    for (int64_t i = 0; i < count; i++) m->content[kind][dst[i]] = m->content[kind][src[i]];
    follow_moves(x, MOVES_NONE, 0);
}

static void zero(context *x) {
    map_model *m = &x->model;
    int kind = (int)below(&x->random, m->num_kinds);
    int64_t count = draw_batch(x, kind, 1, -1, batch_size(&x->random, 12));
    say("%ld handles, kind %d\n", (long)count, kind);
    if (up_zero(x->grids, x->handles, count, kind) != UP_OK) fail("up_zero refused");
    for (int64_t i = 0; i < count; i++) m->content[kind][x->handles[i]] = CONTENT_ZERO;
    x->user_zeroes += count;
    follow_moves(x, MOVES_NONE, 0);
}

static void relocate(context *x) {
    map_model *m = &x->model;
    int kind = (int)below(&x->random, m->num_kinds);
    if (m->live[kind] == m->pinned[kind] || draw_batch(x, kind, 1, 0, 1) != 1) return;
    int32_t handle = x->handles[0], per_cell = m->per_cell[kind], cells = (int32_t)(m->granules / per_cell), cell = -1;
    for (int64_t i = 0, start = below(&x->random, cells); i < cells && cell < 0; i++) {
        int64_t c = (start + i) % cells;
        if (!memchr(m->is_taken + c * per_cell, 1, (size_t)per_cell)) cell = (int32_t)c;
    }
    if (cell < 0) return;
    say("handle %d kind %d to cell %d\n", handle, kind, cell);
    if (up_relocate(x->grids, handle, kind, cell) != UP_OK) fail("up_relocate refused");
    follow_moves(x, MOVES_ONE, handle);
    if (m->cell[kind][handle] != cell) fail("handle %d did not go to cell %d", handle, cell);
}

static void resize(context *x) {
    map_model *m = &x->model;
    int64_t none[UP_MAX_KINDS] = {0}, old_bytes = m->arena_bytes, granules = m->granules;
    int is_cut = 0, is_straddled = 0; /* a pinned cell ends past the new end; a live one also begins before it */
    int64_t to = percent(&x->random, 60)   ? between(&x->random, granules * 3 / 4, granules + 2)
                 : percent(&x->random, 10) ? between(&x->random, 1, granules)
                                           : between(&x->random, x->first_granules / 2, 2 * x->first_granules);
    if (to > MAX_GRANULES - 200) to = MAX_GRANULES - 200;
    int64_t bytes = to * m->granule_bytes + below(&x->random, m->granule_bytes);
    int fits = bytes >= m->reserved_bytes;
    for (int32_t i = 0; i < m->num_live; i++)
        for (int k = 0; k < m->num_kinds; k++) {
            int64_t start = m->cell[k][m->live_handles[i]] * m->stride_bytes[k], end = start + m->stride_bytes[k];
            is_cut |= m->pins[m->live_handles[i]] > 0 && end > bytes;
            is_straddled |= start >= 0 && start < bytes && end > bytes;
        }
    say("%ld to %ld bytes, cuts a pin %d, straddled %d\n", (long)old_bytes, (long)bytes, is_cut, is_straddled);
    /* The formula in the new arena: pin-free cells there, the same live cells. */
    for (int k = 0; k < m->num_kinds; k++) {
        int64_t n = m->per_cell[k], first_free = (m->reserved_bytes + m->stride_bytes[k] - 1) / m->stride_bytes[k];
        m->pin_free[k] = 0;
        for (int64_t c = first_free; c < bytes / m->stride_bytes[k]; c++) {
            int64_t old_part = m->granules - c * n < n ? m->granules - c * n : n; /* what is new is not pinned */
            m->pin_free[k] += old_part <= 0 || !memchr(m->is_held + c * n, 1, (size_t)old_part);
        }
    }
    fits = fits && model_fits(m, none, m->reserved, m->pin_free, 0);
    int code = up_resize(x->grids, bytes);
    if (x->resized && bytes != old_bytes) { /* one resize a step */
        if (code != UP_BAD_ARGUMENT) fail("a second resize in one step returned %d", code);
    } else {
        int is_right = code == UP_OK            ? fits && !is_cut
                       : code == UP_PINNED      ? is_cut
                       : code == UP_NO_CAPACITY ? !fits || is_straddled
                                                : bytes < m->reserved_bytes || bytes == 0;
        if (!is_right)
            fail("up_resize returned %d, the formula %d, cut %d, straddled %d", code, fits, is_cut, is_straddled);
    }
    if (code != UP_OK) {
        follow_moves(x, MOVES_NONE, 0);
        return;
    }
    up_stats s;
    up_get_stats(x->grids, &s);
    m->max_handles = (int32_t)s.max_handles;
    if (m->max_handles > MAX_HANDLES) fail("%d handles", m->max_handles);
    m->arena_bytes = bytes;
    x->resized |= bytes != old_bytes;
    follow_moves(x, MOVES_RESIZE, 0);
    for (int64_t g = bytes / m->granule_bytes < granules ? bytes / m->granule_bytes : granules; g <= MAX_GRANULES; g++)
        m->last_kind[g] = NO_KIND;
}

/* A handle that no call accepts, and the codes that may say so. */
static int32_t draw_bad_handle(context *x, int *code) {
    map_model *m = &x->model;
    static const int32_t outside[] = {0, -1, INT32_MIN, INT32_MAX};
    int32_t h = outside[below(&x->random, 4)];
    *code = UP_BAD_HANDLE;
    if (percent(&x->random, 20)) h = m->max_handles + 1;
    for (int i = 0; i < 20 && percent(&x->random, 60); i++) {
        int32_t dead = (int32_t)between(&x->random, 1, m->max_handles);
        if (m->is_live[dead]) continue;
        *code = UP_DEAD_HANDLE;
        return dead;
    }
    return h;
}

/* A call that must be refused, and must change nothing. */
static void bad_call(context *x) {
    map_model *m = &x->model;
    random_source *r = &x->random;
    up_grids *g = x->grids;
    int kind = (int)below(r, m->num_kinds), bad_kind = percent(r, 50) ? m->num_kinds : percent(r, 50) ? -1 : INT32_MAX;
    int expected = UP_BAD_ARGUMENT, code = 0, bad_code, which = (int)below(r, 24);
    int32_t past_the_end = (int32_t)(m->granules / m->per_cell[kind]);
    int64_t count, ignored, counts[UP_MAX_KINDS] = {0};
    uint64_t digest, digest_after;
    up_digest(g, &digest);
    int32_t *handles = x->handles;
    up_item item = {1u << kind, 1}, items[2] = {{1, 1}, {1, 1}};
    say("variant %d, kind %d\n", which, kind);
    switch (which) {
    case 0: case 1: case 2: case 3: /* a bad handle at the end of a good batch */
        count = draw_batch(x, which == 1 ? kind : -1, which > 1, 0, 5);
        handles[count] = draw_bad_handle(x, &bad_code);
        expected = bad_code;
        if (which == 3 && count == 0) return;
        if (which == 3) handles[count] = handles[below(r, count)], expected = UP_DUPLICATE;
        if (which == 1)
            code = up_attach(g, handles, count + 1, kind, 0);
        else
            code = which == 2 ? up_pin(g, handles, count + 1) : up_free(g, handles, count + 1);
        break;
    case 4: /* a pinned handle at the end */
        count = draw_batch(x, -1, 0, 0, 5);
        for (int32_t i = 0; i < m->num_live; i++)
            if (m->pins[m->live_handles[i]] > 0) handles[count++] = m->live_handles[i], i = m->num_live;
        if (count == 0 || m->pins[handles[count - 1]] == 0) return;
        expected = UP_PINNED;
        code = up_free(g, handles, count);
        break;
    case 5: /* the last one has no cell of the kind */
        count = draw_batch(x, kind, 0, 0, 1);
        if (count == 0) return;
        expected = UP_NO_CELL;
        bad_code = (int)below(r, 4);
        code = bad_code == 0   ? up_detach(g, handles, 1, kind)
               : bad_code == 1 ? up_zero(g, handles, 1, kind)
               : bad_code == 2 ? up_copy(g, handles, handles, 1, kind)
                               : up_relocate(g, handles[0], kind, 0);
        break;
    case 6: /* the first one has a cell already */
        count = draw_batch(x, kind, 1, 0, 4);
        if (count == 0) return;
        expected = UP_HAS_CELL;
        code = up_attach(g, handles, count, kind, 0);
        break;
    case 7: code = up_detach(g, handles, 0, bad_kind); break;
    case 8: code = up_attach(g, handles, 0, bad_kind, 0); break;
    case 9: code = up_copy(g, handles, handles, 0, bad_kind); break;
    case 10: code = up_prepare(g, bad_kind, 1, 1, &ignored, &ignored); break;
    case 11: code = up_next_open_cost(g, bad_kind, &ignored); break;
    case 12: code = up_free(g, handles, -1); break;
    case 13: item.kind_mask = percent(r, 50) ? 0 : 1u << m->num_kinds;
        code = percent(r, 50) ? up_can_allocate(g, &item, 1, 0) : up_allocate(g, &item, 1, 0, handles, 1);
        break;
    case 14: item.count = percent(r, 50) ? -1 : INT32_MIN;
        code = percent(r, 50) ? up_can_allocate(g, &item, 1, 0) : up_allocate(g, &item, 1, 0, handles, 1);
        break;
    case 15: code = up_allocate(g, items, 2, 0, handles, 1); /* room for one handle */
        break;
    case 16: /* int32 sums and products overflow */
        expected = UP_NO_CAPACITY;
        items[0].count = items[1].count = INT32_MAX;
        items[1].kind_mask = 1u << kind;
        code = up_allocate(g, items, 2, 0, handles, INT64_MAX);
        break;
    case 17: /* so do int64 ones */
        counts[kind] = INT64_MAX - below(r, 3);
        code = up_reserve(g, counts);
        if (code == UP_BAD_ARGUMENT) expected = code;
        else expected = UP_NO_CAPACITY;
        break;
    case 18: counts[kind] = -1;
        if (percent(r, 50))
            code = up_reserve(g, counts);
        else
            code = up_unreserve(g, counts), expected = UP_NOT_RESERVED;
        break;
    case 19: counts[kind] = m->reserved[kind] + (percent(r, 50) ? 1 : INT64_MAX / 2);
        expected = UP_NOT_RESERVED;
        code = up_unreserve(g, counts);
        break;
    case 20: /* more than was promised */
        if (m->reserved[kind] >= INT32_MAX) return;
        item.count = (int32_t)m->reserved[kind] + 1;
        expected = UP_NOT_RESERVED;
        code = up_allocate(g, &item, 1, UP_FROM_RESERVATION, handles, MAX_HANDLES);
        break;
    case 21: /* unpin of what is not pinned */
        count = draw_batch(x, -1, 0, 0, 3);
        if (count == 0) return;
        expected = UP_NOT_PINNED;
        code = up_unpin(g, handles, count);
        break;
    case 22: /* relocation onto a live cell or out of the arena */
        count = draw_batch(x, kind, 1, 0, 1);
        if (count == 0) return;
        code = percent(r, 50) ? up_relocate(g, handles[0], kind, m->cell[kind][handles[0]])
                              : up_relocate(g, handles[0], kind, percent(r, 50) ? -1 : past_the_end);
        expected = code == UP_NO_CAPACITY ? code : UP_BAD_ARGUMENT;
        break;
    default: code = up_resize(g, percent(r, 50) ? 0 : percent(r, 50) ? -5 : INT64_MIN);
    }
    if (code != expected) fail("bad call %d (kind %d) returned %d instead of %d", which, kind, code, expected);
    if (up_last_error(g)->code != code) fail("up_last_error says %d after %d", up_last_error(g)->code, code);
    up_digest(g, &digest_after);
    if (digest != digest_after) fail("bad call %d changed the digest (I5)", which);
    follow_moves(x, MOVES_NONE, 0);
}

static void query(context *x) {
    map_model *m = &x->model;
    for (int k = 0; k < m->num_kinds; k++) {
        int64_t cost = -2, demand[UP_MAX_KINDS] = {0}, generation;
        demand[k] = 1;
        int fits = model_fits(m, demand, m->reserved, m->pin_free, 0);
        if (up_next_open_cost(x->grids, k, &cost) != UP_OK) fail("up_next_open_cost refused");
        if ((cost == 0) != (m->available[k] > 0))
            fail("kind %d: the next cell costs %ld, %ld available", k, (long)cost, (long)m->available[k]);
        int64_t least = model_cheapest_window(m, k) * m->granule_bytes;
        if (cost > 0 && cost != least)
            fail("kind %d: the next cell costs %ld, the cheapest window %ld", k, (long)cost, (long)least);
        if (cost < 0 && fits) fail("kind %d: no cell can be opened, the formula says yes", k);
        int32_t h = draw_live(x);
        if (h && (up_generation(x->grids, h, &generation) != UP_OK || generation != m->generation[h]))
            fail("the generation of live handle %d changed", h);
        h = (int32_t)between(&x->random, 1, m->max_handles);
        if (up_is_live(x->grids, h) != m->is_live[h]) fail("up_is_live(%d) is %d", h, up_is_live(x->grids, h));
    }
    say("\n");
}

static void run_operation(context *x, int op) {
    switch (op) {
    case OP_ALLOCATE: allocate(x, 0); break;
    case OP_FREE: free_batch(x); break;
    case OP_ATTACH: attach(x); break;
    case OP_DETACH: detach(x); break;
    case OP_PIN: pin(x); break;
    case OP_UNPIN: unpin(x); break;
    case OP_RESERVE: reserve(x); break;
    case OP_UNRESERVE: unreserve(x); break;
    case OP_COMMIT: allocate(x, 1); break;
    case OP_PREPARE: prepare(x); break;
    case OP_COPY: copy(x); break;
    case OP_ZERO: zero(x); break;
    case OP_RELOCATE: relocate(x); break;
    case OP_RESIZE: resize(x); break;
    case OP_SEAL: say("\n"); break;
    case OP_BAD: bad_call(x); break;
    default: query(x);
    }
}

/* Run the kept operations of one episode; keep NULL: all. Returns the final digest. Big arenas get short episodes and
 * fewer slow checks, so that an operation costs about the same everywhere. */
static uint64_t run_episode(uint64_t seed, int64_t episode, int64_t operations, const uint8_t *keep) {
    static context *x;
    uint64_t start = mix(seed, (uint64_t)episode), digest = 0;
    int64_t total = 0;
    if (!x && !(x = malloc(sizeof *x))) fail("out of memory");
    shared->episode = episode;
    memset(x, 0, offsetof(context, handles));
    x->num_fresh = x->user_zeroes = x->worst_call_bytes = x->net_moved_bytes = 0;
    memset(x->plan_cells, 0, sizeof x->plan_cells);
    memset(x->allocated, 0, sizeof x->allocated);
    start_episode(x, start);
    for (int op = 0; op < NUM_OPS; op++) total += x->weights[op];
    int64_t period = check_every * (1 + x->model.granules / 128), most = 40 + 400000 / (x->model.granules + 40);
    if (operations > most) operations = most;
    for (int64_t i = 0; i < operations; i++) {
        shared->operation = i;
        if (keep && !keep[i]) continue;
        x->random.state = mix(start, (uint64_t)i + 1);
        int64_t ticket = below(&x->random, total);
        int op = 0;
        while (ticket >= x->weights[op]) ticket -= x->weights[op++];
        say("%5ld %-9s ", (long)i, op_name[op]);
        x->net_moved_bytes = 0;
        run_operation(x, op);
        if (!model_recount(&x->model, x->model.arena_bytes)) fail("live cells overlap or lie outside (I1)");
        if (x->seals_each || op == OP_SEAL) seal(x);
        compare_stats(x, op);
        if (i % period == 0 || i == operations - 1) compare_everything(x);
    }
    seal(x);
    up_digest(x->grids, &digest);
    up_destroy(x->grids);
    return digest;
}

static int64_t episode_length(uint64_t seed, int64_t episode) {
    random_source r = {mix(seed ^ 0x5EED, (uint64_t)episode)};
    return between(&r, 20, percent(&r, 80) ? 800 : 6000);
}

/* 1 when the kept operations still fail, in a child so that a crash is survived. */
static int fails(uint64_t seed, int64_t episode, int64_t operations, const uint8_t *keep) {
    fflush(stdout);
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        if (!verbose && !freopen("/dev/null", "w", stderr)) _exit(4);
        run_episode(seed, episode, operations, keep);
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, &status, 0);
    return status != 0;
}

static void shrink(uint64_t seed, int64_t episode, int64_t operations) {
    uint8_t *keep = malloc((size_t)operations), *trial = malloc((size_t)operations);
    int64_t kept = operations, trials = 0;
    memset(keep, 1, (size_t)operations);
    for (int64_t chunk = (operations + 1) / 2; chunk > 0 && trials < 3000; chunk = chunk == 1 ? 0 : (chunk + 1) / 2) {
        for (int64_t at = 0; at < operations && trials < 3000; at += chunk) {
            int64_t dropped = 0;
            memcpy(trial, keep, (size_t)operations);
            for (int64_t i = at; i < at + chunk && i < operations; i++) dropped += trial[i], trial[i] = 0;
            if (dropped == 0) continue;
            trials++;
            if (!fails(seed, episode, operations, trial)) continue;
            memcpy(keep, trial, (size_t)operations);
            kept -= dropped;
        }
    }
    printf("shrunk to %ld of %ld operations:\n", (long)kept, (long)operations);
    verbose = 1;
    shared->message[0] = 0;
    fails(seed, episode, operations, keep);
    printf("  -> %s\n", shared->message[0] ? shared->message : "crashed");
    free(keep);
    free(trial);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 0;
    int64_t operations = argc > 2 ? strtoll(argv[2], NULL, 0) : 100000, done = 0, episodes = 0;
    int quiet = 0, status = 0;
    for (int i = 3; i < argc; i++) {
        if (strcmp(argv[i], "--quiet") == 0) quiet = 1;
        else if (strcmp(argv[i], "--every") == 0 && i + 1 < argc) check_every = atoi(argv[++i]);
        else operations = 0;
    }
    if (argc < 2 || operations <= 0 || check_every <= 0) {
        fprintf(stderr, "usage: fuzz_grids SEED OPS [--every N] [--quiet]\n");
        return 2;
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 2;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        uint64_t digest = seed;
        for (; done < operations; episodes++) {
            int64_t length = episode_length(seed, episodes);
            digest = mix(digest, run_episode(seed, episodes, length, NULL));
            done += shared->operation + 1;
        }
        if (!quiet)
            printf("seed %lu: %ld operations in %ld episodes agree with the model, digest %016lx\n",
                   (unsigned long)seed, (long)done, (long)episodes, (unsigned long)digest);
        exit(0); /* not _exit: leaks are looked for at exit */
    }
    waitpid(child, &status, 0);
    if (status == 0) return 0;
    printf("FAILED: seed %lu, episode %ld, operation %ld: %s\n", (unsigned long)seed, (long)shared->episode,
           (long)shared->operation, shared->message[0] ? shared->message : "crashed");
    if (!quiet) shrink(seed, shared->episode, shared->operation + 1);
    return 1;
}

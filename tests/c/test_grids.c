/* test_grids.c: white-box tests. It includes grids.c, so that it can look at, and damage, what the API hides.
 *
 *     test_grids                    run everything
 *     test_grids --plant overflow   write one int past a table: the address sanitizer must end the program
 *     test_grids --plant undefined  overflow a signed integer: so must the undefined behaviour sanitizer
 *     test_grids --plant leak       lose an object: so must the leak sanitizer
 */
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Allocation number `allocations_left` fails, once. Negative: none does. */
static int allocations_left = -1;
static int allocation_fails(void) { return allocations_left >= 0 && allocations_left-- == 0; }
static void *test_malloc(size_t n) { return allocation_fails() ? NULL : malloc(n); }
static void *test_calloc(size_t n, size_t size) { return allocation_fails() ? NULL : calloc(n, size); }
static void *test_realloc(void *p, size_t n) { return allocation_fails() ? NULL : realloc(p, n); }
#define malloc test_malloc
#define calloc test_calloc
#define realloc test_realloc
#include "grids.c"
#undef malloc
#undef calloc
#undef realloc

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);         \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static uint64_t random_state = 1;
static uint64_t draw(void) {
    uint64_t z = (random_state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}
static int64_t below(int64_t n) { return (int64_t)(draw() % (uint64_t)n); }

static up_grids *make(int64_t arena, int64_t reserved, int32_t n, const int64_t *strides) {
    up_kind kinds[UP_MAX_KINDS];
    up_grids *g = NULL;
    up_error error;
    for (int32_t k = 0; k < n; k++) kinds[k] = (up_kind){strides[k], k == 0 || k == 1, UP_ZERO_IF_DIRTY};
    CHECK(up_create(arena, reserved, kinds, n, 7, &g, &error) == UP_OK);
    return g;
}

static int allocate_one(up_grids *g, uint32_t kinds, int32_t count, uint32_t flags, int32_t *handles) {
    up_item item = {kinds, count};
    return up_allocate(g, &item, 1, flags, handles, count);
}

/* ---- bitset ---- */

static void check_bitset(const up_bitset *b, const uint8_t *model, int64_t size) {
    int64_t last = -1, next = -1;
    CHECK(bitset_sound(b));
    for (int64_t i = 0; i < size; i++) {
        last = model[i] ? i : last;
        CHECK(up_bitset_test(b, i) == model[i]);
        CHECK(up_bitset_at_or_below(b, i) == last);
    }
    CHECK(up_bitset_last(b) == last);
    CHECK(up_bitset_at_or_below(b, size + 100) == last);
    for (int64_t i = size - 1; i >= 0; i--) {
        next = model[i] ? i : next;
        CHECK(up_bitset_at_or_above(b, i) == next);
    }
    CHECK(up_bitset_first(b) == next);
    CHECK(up_bitset_at_or_above(b, -3) == next);
    CHECK(up_bitset_at_or_above(b, size) == -1);
}

static void test_bitset_any_size_agrees_with_bytes(void) {
    static const int64_t sizes[] = {1,    2,    63,   64,   65,   127,    128,    129,
                                    4095, 4096, 4097, 4160, 8200, 262144, 262145, 300001};
    static uint8_t model[300001];
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t size = sizes[s];
        up_bitset b;
        CHECK(up_bitset_init(&b, size));
        memset(model, 0, (size_t)size);
        for (int round = 0; round < (size < 10000 ? 60 : 6); round++) {
            int64_t lo = below(size), hi = lo + below(size - lo + 1);
            if (round % 5 == 0) lo = lo & ~INT64_C(63);
            if (round % 7 == 0) lo = 0, hi = size;
            if (hi < lo) hi = lo;
            int sets = (int)below(2);
            if (round % 3 == 0) {
                for (int64_t i = lo; i < hi; i += 1 + below(80)) {
                    model[i] = (uint8_t)sets;
                    if (sets) up_bitset_set(&b, i); else up_bitset_clear(&b, i);
                }
            } else {
                memset(model + lo, sets, (size_t)(hi - lo));
                if (sets) up_bitset_set_range(&b, lo, hi); else up_bitset_clear_range(&b, lo, hi);
            }
            int64_t count = 0, from = below(size), to = from + below(size - from + 1);
            for (int64_t i = from; i < to; i++) count += model[i];
            CHECK(up_bitset_count_range(&b, from, to) == count);
            check_bitset(&b, model, size);
        }
        up_bitset_free(&b);
    }
}

static void test_bitset_ranges_over_word_borders_set_and_clear_exactly(void) {
    static const int64_t edges[] = {0, 1, 62, 63, 64, 65, 127, 128, 4032, 4095, 4096, 4097, 4159, 4160, 4223, 4224};
    static uint8_t model[4300];
    int64_t n = (int64_t)(sizeof edges / sizeof *edges);
    for (int64_t a = 0; a < n; a++)
        for (int64_t z = a; z < n; z++)
            for (int starts_full = 0; starts_full < 2; starts_full++) {
                up_bitset b;
                CHECK(up_bitset_init(&b, 4300));
                memset(model, starts_full, sizeof model);
                if (starts_full) up_bitset_set_range(&b, 0, 4300);
                if (starts_full)
                    up_bitset_clear_range(&b, edges[a], edges[z]);
                else
                    up_bitset_set_range(&b, edges[a], edges[z]);
                memset(model + edges[a], !starts_full, (size_t)(edges[z] - edges[a]));
                check_bitset(&b, model, 4300);
                up_bitset_free(&b);
            }
}

static void test_bits_between_is_exact_at_both_ends(void) {
    for (int lo = 0; lo <= 64; lo++)
        for (int hi = lo; hi <= 64; hi++) {
            uint64_t expected = 0;
            for (int i = lo; i < hi; i++) expected |= UINT64_C(1) << i;
            CHECK(up_bits_between(lo, hi) == expected);
        }
}

static void test_nearest_bits_takes_the_ends(void) {
    for (int round = 0; round < 20000; round++) {
        uint64_t mask = draw() & draw();
        if (round % 4 == 0) mask = ~UINT64_C(0);
        int64_t count = 1 + below(70);
        for (int low = 0; low < 2 && mask; low++) {
            uint64_t expected = 0;
            int64_t left = count;
            for (int i = 0; i < 64 && left > 0; i++) {
                uint64_t bit = UINT64_C(1) << (low ? i : 63 - i);
                if (mask & bit) expected |= bit, left--;
            }
            CHECK(nearest_bits(mask, count, low) == expected);
        }
    }
}

static void test_window_of_any_ratio_is_a_division(void) {
    up_grids *g = calloc(1, sizeof *g);
    for (int round = 0; round < 3000; round++) {
        int64_t ratio = round < 300 ? round + 1 : round % 2 ? (INT64_C(1) << below(28)) : 1 + below(INT64_C(1) << 27);
        g->ratio[0][1] = ratio;
        g->reciprocal[0][1] = ratio == 1 ? 0 : UINT64_MAX / (uint64_t)ratio + 1;
        for (int i = 0; i < 40; i++) {
            int64_t cell = i < 20 ? below(INT32_MAX) : (i < 30 ? i - 20 : INT32_MAX - (i - 30));
            int64_t multiple = cell / ratio * ratio;
            CHECK(window_of(g, 0, 1, cell) == cell / ratio);
            CHECK(window_of(g, 0, 1, multiple) == multiple / ratio);
            CHECK(multiple == 0 || window_of(g, 0, 1, multiple - 1) == (multiple - 1) / ratio);
        }
    }
    free(g);
}

/* ---- a busy object for the tests below ---- */

/* Three kinds, odd arena, null bytes, pins, promises, unsealed operations. */
static up_grids *busy_pool(void) {
    int64_t strides[] = {96, 24, 4}, promised[UP_MAX_KINDS] = {1, 2, 3};
    int32_t handles[400];
    up_grids *g = make(96 * 20 + 31, 24, 3, strides);
    const uint8_t *data;
    int64_t size;
    CHECK(allocate_one(g, 1, 5, 0, handles) == UP_OK);
    CHECK(allocate_one(g, 6, 9, 0, handles + 5) == UP_OK);
    CHECK(allocate_one(g, 4, 60, 0, handles + 14) == UP_OK);
    CHECK(up_seal(g, 0, &data, &size) == UP_OK);
    int32_t freed[40];
    for (int i = 0; i < 30; i++) freed[i] = handles[14 + 2 * i];
    CHECK(up_free(g, freed, 30) == UP_OK);
    CHECK(up_pin(g, handles + 3, 4) == UP_OK);
    CHECK(up_reserve(g, promised) == UP_OK);
    CHECK(up_copy(g, handles + 5, handles + 6, 2, 2) == UP_OK);
    CHECK(up_validate(g) == 0);
    return g;
}

/* ---- I5: a call that fails leaves every structure bit-identical ---- */

typedef struct {
    uint8_t *bytes;
    size_t size, capacity;
} snapshot;

static void keep(snapshot *s, const void *data, int64_t size) {
    if (s->size + (size_t)size > s->capacity) {
        s->capacity = 2 * (s->size + (size_t)size);
        s->bytes = realloc(s->bytes, s->capacity);
    }
    memcpy(s->bytes + s->size, data, (size_t)size);
    s->size += (size_t)size;
}

static void keep_bitset(snapshot *s, const up_bitset *b) {
    int64_t words = up_words(b->size);
    for (int l = 0; l < b->levels; l++, words = up_words(words)) keep(s, b->level[l], words * 8);
}

/* Everything but the error, the count of refusals, and how large scratch memory has grown. */
static snapshot take_snapshot(const up_grids *g) {
    snapshot s = {NULL, 0, 0};
    keep(&s, &g->arena_bytes, 3 * sizeof g->arena_bytes);
    keep(&s, g->count, sizeof g->count);
    keep(&s, &g->max_handles, 4 * sizeof g->max_handles);
    for (int k = 0; k < g->num_kinds; k++) {
        const grid *own = &g->kind[k];
        int64_t words = up_words(own->windows);
        keep(&s, &own->num_available, 4 * sizeof own->num_available);
        keep_bitset(&s, &own->available);
        keep_bitset(&s, &own->live);
        keep(&s, own->dirty, words * 8);
        keep(&s, own->owner, own->windows * 4);
        keep(&s, g->cell[k], (g->max_handles + 1) * 4);
        if (!own->children) continue;
        keep_bitset(&s, &own->partial);
        keep_bitset(&s, &own->pinned_windows);
        keep(&s, own->window, words * 64 * 4);
        keep(&s, own->open_children, own->windows * 4);
        keep(&s, own->pins, own->windows * 4);
    }
    keep(&s, g->handle, (g->max_handles + 1) * 4);
    keep(&s, g->pin_count, (g->max_handles + 1) * 2);
    keep(&s, g->free_handles, g->num_free * 4);
    keep(&s, g->changes, g->num_changes * 4);
    keep(&s, &g->num_changes, sizeof g->num_changes);
    keep(&s, g->log, g->num_operations * (int64_t)sizeof *g->log);
    keep(&s, &g->num_operations, sizeof g->num_operations);
    keep(&s, &g->sequence, 2 * sizeof g->sequence);
    keep(&s, &g->moved_bytes, 2 * sizeof g->moved_bytes);
    return s;
}

static void expect_same(const up_grids *g, snapshot *before) {
    snapshot now = take_snapshot(g);
    CHECK(now.size == before->size && memcmp(now.bytes, before->bytes, now.size) == 0);
    free(now.bytes);
    free(before->bytes);
}

static int32_t dead_handle(up_grids *g) {
    for (int32_t h = 1; h <= g->max_handles; h++)
        if (!up_is_live(g, h)) return h;
    return 0;
}

static void test_failing_calls_leave_every_structure_identical(void) {
    up_grids *g = busy_pool();
    int32_t live[500], out[500], bad[3], cells[500];
    int64_t count = 0, unused, none[UP_MAX_KINDS] = {0};
    int64_t many[UP_MAX_KINDS] = {100, 0, 0}, minus[UP_MAX_KINDS] = {0, -1, 0};
    CHECK(up_live_cells(g, 2, cells, live, 500, &count) == UP_OK && count > 10);
    int32_t pinned = 0, state = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (!g->pin_count[live[i]]) live[kept++] = live[i];
    count = kept;
    for (int32_t h = 1; h <= g->max_handles; h++) {
        if (g->pin_count[h]) pinned = h;
        if (g->cell[0][h] >= 0 && !g->pin_count[h]) state = h;
    }
#define REFUSED(call, expected)              \
    do {                                     \
        snapshot before = take_snapshot(g);  \
        CHECK((call) == (expected));         \
        expect_same(g, &before);             \
        CHECK(g->error.code == (expected));  \
        CHECK(up_validate(g) == 0);          \
    } while (0)
    const int32_t wrong[] = {0, -1, INT32_MIN, INT32_MAX, (int32_t)g->max_handles + 1};
    for (int i = 0; i < 5; i++) {
        live[count] = wrong[i];
        REFUSED(up_free(g, live, count + 1), UP_BAD_HANDLE);
        REFUSED(up_pin(g, live, count + 1), UP_BAD_HANDLE);
        REFUSED(up_detach(g, live, count + 1, 2), UP_BAD_HANDLE);
        REFUSED(up_zero(g, live, count + 1, 2), UP_BAD_HANDLE);
        REFUSED(up_copy(g, live + 1, live, count, 2), UP_BAD_HANDLE);
        REFUSED(up_copy(g, live, live + 1, count, 2), UP_BAD_HANDLE);
        REFUSED(up_relocate(g, wrong[i], 2, 0), UP_BAD_HANDLE);
    }
    live[count] = dead_handle(g);
    REFUSED(up_free(g, live, count + 1), UP_DEAD_HANDLE);
    REFUSED(up_attach(g, live + count, 1, 0, 0), UP_DEAD_HANDLE);
    REFUSED(up_unpin(g, live + count, 1), UP_DEAD_HANDLE);
    for (int64_t twin = 0; twin < count; twin++) {
        live[count] = live[twin];
        REFUSED(up_free(g, live, count + 1), UP_DUPLICATE);
        REFUSED(up_detach(g, live, count + 1, 2), UP_DUPLICATE);
    }
    live[count] = pinned;
    REFUSED(up_free(g, live, count + 1), UP_PINNED);
    REFUSED(up_free(g, &pinned, 1), UP_PINNED);
    live[count] = state;
    REFUSED(up_detach(g, live, count + 1, 2), UP_NO_CELL);
    REFUSED(up_zero(g, live, count + 1, 2), UP_NO_CELL);
    REFUSED(up_attach(g, &state, 1, 0, 0), UP_HAS_CELL);
    REFUSED(up_attach(g, live, 1, 2, 0), UP_HAS_CELL);
    REFUSED(up_unpin(g, live, 1), UP_NOT_PINNED);
    bad[0] = bad[1] = live[0];
    REFUSED(up_copy(g, bad, bad + 1, 1, 2), UP_DUPLICATE);
    REFUSED(up_relocate(g, live[0], 2, g->cell[2][live[1]]), UP_BAD_ARGUMENT);
    REFUSED(up_relocate(g, live[0], 2, -1), UP_BAD_ARGUMENT);
    REFUSED(up_relocate(g, live[0], 2, INT32_MAX), UP_BAD_ARGUMENT);
    REFUSED(up_relocate(g, live[0], 2, 0), UP_BAD_ARGUMENT); /* the null cell */
    REFUSED(allocate_one(g, 1, 100, 0, out), UP_NO_CAPACITY);
    REFUSED(allocate_one(g, 7, 50, UP_FORBID_MOVES, out), UP_NO_CAPACITY);
    REFUSED(allocate_one(g, 4, 400, UP_FROM_RESERVATION, out), UP_NOT_RESERVED);
    REFUSED(allocate_one(g, 0, 1, 0, out), UP_BAD_ARGUMENT);
    REFUSED(allocate_one(g, 8, 1, 0, out), UP_BAD_ARGUMENT);
    REFUSED(allocate_one(g, 1, -1, 0, out), UP_BAD_ARGUMENT);
    REFUSED(up_reserve(g, many), UP_NO_CAPACITY);
    REFUSED(up_reserve(g, minus), UP_BAD_ARGUMENT);
    REFUSED(up_unreserve(g, many), UP_NOT_RESERVED);
    REFUSED(up_prepare(g, 3, 1, 1, &unused, &unused), UP_BAD_ARGUMENT);
    REFUSED(up_prepare(g, 0, -1, 1, &unused, &unused), UP_BAD_ARGUMENT);
    REFUSED(up_next_open_cost(g, -1, &unused), UP_BAD_ARGUMENT);
    REFUSED(up_resize(g, 0), UP_BAD_ARGUMENT);
    REFUSED(up_resize(g, 23), UP_BAD_ARGUMENT); /* less than the null bytes */
    REFUSED(up_resize(g, 500), g->error.code == UP_PINNED ? UP_PINNED : g->error.code);
    REFUSED(up_resize(g, INT64_MAX), UP_BAD_ARGUMENT);
    CHECK(up_reserve(g, none) == UP_OK);
#undef REFUSED
    up_destroy(g);
}

/* ---- memory that runs out ---- */

static void test_create_without_memory_leaves_nothing_behind(void) {
    int64_t strides[] = {96, 24, 4};
    up_kind kinds[3] = {{96, 1, 1}, {24, 1, 1}, {4, 0, 1}};
    (void)strides;
    for (int fails_at = 0; fails_at < 500; fails_at++) {
        up_grids *g = NULL;
        up_error error;
        allocations_left = fails_at;
        int code = up_create(5000, 24, kinds, 3, 0, &g, &error);
        int was_enough = allocations_left >= 0;
        allocations_left = -1;
        CHECK(code == (was_enough ? UP_OK : UP_NO_MEMORY) && error.code == code && !g == !was_enough);
        up_destroy(g);
        if (was_enough) return;
    }
    CHECK(!"up_create never succeeded");
}

/* Calls that allocate: each fails at every allocation in turn, changes nothing, and then succeeds. */
static int call_allocate_zeroed(up_grids *g) {
    int32_t out[300];
    return allocate_one(g, 4, 120, 0, out);
}
static int call_allocate_moving(up_grids *g) {
    int32_t out[8];
    return allocate_one(g, 1, 6, 0, out);
}
static int call_prepare(up_grids *g) {
    int64_t available, moved;
    return up_prepare(g, 0, 12, INT64_MAX, &available, &moved);
}
static int call_grow(up_grids *g) { return up_resize(g, 96 * 90); }
static int call_shrink(up_grids *g) { return up_resize(g, 96 * 19 + 5); }
static int call_seal(up_grids *g) {
    const uint8_t *data;
    int64_t size;
    return up_seal(g, 3, &data, &size);
}
static int call_zero(up_grids *g) {
    int32_t handles[600], cells[600];
    int64_t count;
    up_live_cells(g, 2, cells, handles, 600, &count);
    for (int i = 0; i < 40; i++) {
        int code = up_zero(g, handles, count, 2);
        if (code != UP_OK) return code;
    }
    return UP_OK;
}

static void test_calls_without_memory_change_nothing_and_work_later(void) {
    int (*calls[])(up_grids *) = {call_allocate_zeroed, call_allocate_moving, call_grow, call_shrink, call_seal};
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        for (int fails_at = 0;; fails_at++) {
            CHECK(fails_at < 500);
            up_grids *g = busy_pool();
            for (int32_t h = 1; calls[c] == call_shrink && h <= g->max_handles; h++)
                if (g->pin_count[h]) CHECK(up_unpin(g, &h, 1) == UP_OK);
            snapshot before = take_snapshot(g);
            allocations_left = fails_at;
            int code = calls[c](g), was_enough = allocations_left >= 0;
            allocations_left = -1;
            CHECK(code == (was_enough ? UP_OK : UP_NO_MEMORY));
            if (was_enough) {
                free(before.bytes);
            } else {
                if (calls[c] != call_grow) /* its tables may have grown already, which shows nowhere else */
                    expect_same(g, &before);
                else
                    free(before.bytes);
                CHECK(up_validate(g) == 0);
                CHECK(calls[c](g) == UP_OK);
            }
            CHECK(up_validate(g) == 0);
            up_destroy(g);
            if (was_enough) break;
        }
}

/* These do a part of their work before memory runs out, and leave a sound object. */
static void test_calls_in_parts_without_memory_stay_sound(void) {
    int (*calls[])(up_grids *) = {call_prepare, call_zero};
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        for (int fails_at = 0; fails_at < 20; fails_at++) {
            up_grids *g = busy_pool();
            allocations_left = fails_at;
            int code = calls[c](g);
            allocations_left = -1;
            CHECK(code == UP_OK || code == UP_NO_MEMORY);
            CHECK(up_validate(g) == 0 && calls[c](g) == UP_OK && call_seal(g) == UP_OK && up_validate(g) == 0);
            up_destroy(g);
        }
}

/* ---- up_validate must see damage ---- */

static void test_validate_sees_every_planted_damage(void) {
    int missed = 0;
    for (int which = 0; which < 22; which++) {
        up_grids *g = busy_pool();
        grid *state = &g->kind[0], *window = &g->kind[1], *page = &g->kind[2];
        int32_t live = page->owner[up_bitset_first(&page->live)], dead = dead_handle(g);
        int64_t a_window = up_bitset_first(&window->partial);
        switch (which) {
        case 0: up_bitset_clear(&page->available, up_bitset_first(&page->available)); break;
        case 1: up_bitset_set(&page->available, up_bitset_first(&page->live)); break;
        case 2: up_bitset_clear(&page->live, up_bitset_first(&page->live)); break;
        case 3: up_bitset_set(&state->live, up_bitset_last(&state->available)); break;
        case 4: page->num_available++; break;
        case 5: page->num_live--; break;
        case 6: window->pin_free++; break;
        case 7: window->window[a_window]++; break;
        case 8: window->window[a_window] |= WINDOW_HELD; break;
        case 9: state->window[up_bitset_first(&state->live)] &= ~WINDOW_LIVE; break;
        case 10: window->open_children[a_window]--; break;
        case 11: up_bitset_clear(&window->partial, a_window); break;
        case 12: window->pins[up_bitset_first(&window->pinned_windows)] = 0; break;
        case 13: g->cell[2][live]++; break;
        case 14: g->cell[2][dead] = 3; break;
        case 15: page->owner[g->cell[2][live]] = dead; break;
        case 16: g->handle[live] ^= 2; break;
        case 17: g->handle[live] |= HANDLE_MARKED; break;
        case 18: g->pin_count[live]++; break;
        case 19: g->num_live_handles++; break;
        case 20: page->available.level[1][0] = 0; break;
        default: g->count[2].reserved += 100000; /* a promise that cannot be kept */
        }
        if (up_validate(g) == 0) {
            fprintf(stderr, "damage %d goes unseen\n", which);
            missed++;
        }
        up_destroy(g);
    }
    CHECK(missed == 0);
}

/* ---- counters that wrap, and limits ---- */

static void test_schedule_levels_that_wrap_start_again(void) {
    int64_t strides[] = {16, 4};
    int32_t handles[8];
    const uint8_t *data;
    int64_t size;
    up_grids *g = make(640, 0, 2, strides);
    CHECK(allocate_one(g, 2, 8, 0, handles) == UP_OK);
    for (int round = 0; round < 6; round++) {
        g->level_base = UINT32_MAX - (uint32_t)round * 3;
        for (int i = 0; i < 20; i++) CHECK(up_copy(g, handles + i % 7, handles + i % 7 + 1, 1, 1) == UP_OK);
        CHECK(up_seal(g, 0, &data, &size) == UP_OK && up_plan_check(data, size) == UP_PLAN_OK);
        up_plan_header header;
        memcpy(&header, data, sizeof header);
        CHECK(header.num_phases >= 7 && header.num_operations >= 20);
    }
    up_destroy(g);
}

static void test_pins_nest_to_65535_and_no_further(void) {
    int64_t strides[] = {16, 4};
    int32_t handles[2];
    up_grids *g = make(160, 0, 2, strides);
    CHECK(allocate_one(g, 2, 2, 0, handles) == UP_OK);
    for (int i = 0; i < 65535; i++) CHECK(up_pin(g, handles, 1) == UP_OK);
    CHECK(up_pin(g, handles, 2) == UP_BAD_ARGUMENT && g->pin_count[handles[1]] == 0);
    CHECK(up_validate(g) == 0);
    for (int i = 0; i < 65535; i++) CHECK(up_unpin(g, handles, 1) == UP_OK);
    CHECK(up_unpin(g, handles, 1) == UP_NOT_PINNED && up_free(g, handles, 2) == UP_OK);
    up_destroy(g);
}

static void test_generation_that_wraps_stays_in_its_bits(void) {
    int64_t strides[] = {16, 4}, generation;
    int32_t handle;
    up_grids *g = make(160, 0, 2, strides);
    CHECK(allocate_one(g, 3, 1, 0, &handle) == UP_OK);
    g->handle[handle] |= ~(uint32_t)0 << HANDLE_GENERATION_SHIFT;
    CHECK(up_generation(g, handle, &generation) == UP_OK && generation > 0);
    CHECK(up_free(g, &handle, 1) == UP_OK && !up_is_live(g, handle) && up_validate(g) == 0);
    CHECK(up_generation(g, handle, &generation) == UP_OK && generation == 0);
    up_destroy(g);
}

static void test_entered_object_answers_busy_to_every_call(void) {
    up_grids *g = busy_pool();
    snapshot before = take_snapshot(g);
    int32_t handle = 1, cells[4];
    int64_t out[8] = {0}, zero[UP_MAX_KINDS] = {0};
    const uint8_t *data;
    up_item item = {1, 1};
    up_stats stats;
    uint64_t digest;
    atomic_store(&g->busy, 1);
    CHECK(up_can_allocate(g, &item, 1, 0) == UP_BUSY);
    CHECK(up_shortfall(g, &item, 1, out) == UP_BUSY);
    CHECK(up_allocate(g, &item, 1, 0, &handle, 1) == UP_BUSY);
    CHECK(up_free(g, &handle, 1) == UP_BUSY);
    CHECK(up_attach(g, &handle, 1, 0, 0) == UP_BUSY);
    CHECK(up_detach(g, &handle, 1, 0) == UP_BUSY);
    CHECK(up_reserve(g, zero) == UP_BUSY);
    CHECK(up_unreserve(g, zero) == UP_BUSY);
    CHECK(up_pin(g, &handle, 1) == UP_BUSY);
    CHECK(up_unpin(g, &handle, 1) == UP_BUSY);
    CHECK(up_prepare(g, 0, 1, 1, out, out + 1) == UP_BUSY);
    CHECK(up_next_open_cost(g, 0, out) == UP_BUSY);
    CHECK(up_copy(g, &handle, &handle, 1, 0) == UP_BUSY);
    CHECK(up_zero(g, &handle, 1, 0) == UP_BUSY);
    CHECK(up_relocate(g, 1, 0, 0) == UP_BUSY);
    CHECK(up_resize(g, 4000) == UP_BUSY);
    CHECK(up_seal(g, 0, &data, out) == UP_BUSY);
    CHECK(up_generation(g, 1, out) == UP_BUSY);
    CHECK(up_is_live(g, 1) == UP_BUSY);
    CHECK(up_free_extents(g, out, 2, out + 4) == UP_BUSY);
    CHECK(up_live_cells(g, 0, cells, cells, 4, out) == UP_BUSY);
    CHECK(up_get_stats(g, &stats) == UP_BUSY);
    CHECK(up_digest(g, &digest) == UP_BUSY);
    CHECK(up_validate(g) == UP_BUSY);
    atomic_store(&g->busy, 0);
    expect_same(g, &before);
    CHECK(up_validate(g) == 0);
    up_destroy(g);
}

static void test_create_bad_parameters_are_refused(void) {
    up_grids *g = NULL;
    up_error error;
    up_kind good[2] = {{16, 1, 0}, {4, 0, 0}};
    struct {
        int64_t arena, reserved;
        int32_t n;
        up_kind kinds[2];
    } bad[] = {
        {100, 0, 0, {{16, 1, 0}, {4, 0, 0}}},          {100, 0, UP_MAX_KINDS + 1, {{16, 1, 0}, {4, 0, 0}}},
        {100, 0, -1, {{16, 1, 0}, {4, 0, 0}}},         {0, 0, 2, {{16, 1, 0}, {4, 0, 0}}},
        {-5, 0, 2, {{16, 1, 0}, {4, 0, 0}}},           {100, -4, 2, {{16, 1, 0}, {4, 0, 0}}},
        {100, 104, 2, {{16, 1, 0}, {4, 0, 0}}},        {100, 3, 2, {{16, 1, 0}, {4, 0, 0}}},
        {100, 0, 2, {{0, 1, 0}, {4, 0, 0}}},           {100, 0, 2, {{16, 1, 0}, {0, 0, 0}}},
        {100, 0, 2, {{16, 1, 0}, {-4, 0, 0}}},         {100, 0, 2, {{15, 1, 0}, {4, 0, 0}}},
        {100, 0, 2, {{4, 1, 0}, {16, 0, 0}}},          {100, 0, 2, {{16, 1, 3}, {4, 0, 0}}},
        {100, 0, 2, {{16, 1, -1}, {4, 0, 0}}},         {100, 0, 2, {{16, 1, 0}, {4, 2, 0}}},
        {INT64_MAX, 0, 2, {{16, 1, 0}, {4, 0, 0}}},    {INT64_C(4) << 31, 0, 2, {{16, 1, 0}, {4, 0, 0}}},
        {INT64_MAX, 0, 2, {{INT64_MAX, 1, 0}, {1, 0, 0}}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        g = (up_grids *)1;
        CHECK(up_create(bad[i].arena, bad[i].reserved, bad[i].kinds, bad[i].n, 0, &g, &error) == UP_BAD_ARGUMENT);
        CHECK(g == NULL && error.code == UP_BAD_ARGUMENT);
    }
    CHECK(up_create(3, 0, good, 2, 0, &g, &error) == UP_OK); /* smaller than any cell: nothing ever fits */
    int32_t handle;
    CHECK(allocate_one(g, 2, 1, 0, &handle) == UP_NO_CAPACITY && up_validate(g) == 0);
    up_destroy(g);
    up_destroy(NULL);
}

/* Cells beyond 2^31 bytes in every product. */
static void test_strides_of_terabytes_do_not_overflow(void) {
    int64_t strides[] = {INT64_C(1) << 40, INT64_C(1) << 38, INT64_C(1) << 33};
    int32_t handles[600];
    int64_t pairs[2], count, bytes, moved;
    up_grids *g = make((INT64_C(7) << 40) + 12345, strides[1], 3, strides);
    CHECK(allocate_one(g, 4, 500, 0, handles) == UP_OK && up_validate(g) == 0);
    CHECK(up_free(g, handles + 10, 490) == UP_OK);
    CHECK(allocate_one(g, 1, 6, 0, handles + 10) == UP_OK && up_validate(g) == 0);
    CHECK(allocate_one(g, 1, INT32_MAX, 0, handles) == UP_BAD_ARGUMENT || g->error.code == UP_NO_CAPACITY);
    up_item huge[3] = {{7, INT32_MAX}, {7, INT32_MAX}, {7, INT32_MAX}};
    CHECK(up_can_allocate(g, huge, 3, 0) == 0 && up_shortfall(g, huge, 3, &bytes) == UP_OK && bytes > 0);
    CHECK(up_prepare(g, 0, INT64_MAX, INT64_MAX, &count, &moved) == UP_OK);
    CHECK(up_free_extents(g, pairs, 0, &count) == UP_OK && count > 0);
    up_destroy(g);
}

/* ---- plans from elsewhere ---- */

/* A plan with a good checksum and hostile fields must be refused or stay inside the buffer. */
static void test_apply_hostile_plans_stay_inside_the_buffer(void) {
    up_grids *g = busy_pool();
    const uint8_t *data;
    int64_t size;
    int32_t out[8];
    CHECK(allocate_one(g, 1, 3, 0, out) == UP_OK && up_seal(g, 0, &data, &size) == UP_OK);
    uint8_t *plan = malloc((size_t)size), *arena = malloc((size_t)g->arena_bytes);
    CHECK(up_apply(arena, g->arena_bytes, data, size) == UP_PLAN_OK);
    CHECK(up_apply(arena, g->arena_bytes - 1, data, size) == UP_PLAN_BUFFER);
    int applied = 0;
    for (int round = 0; round < 60000; round++) {
        memcpy(plan, data, (size_t)size);
        for (int n = (int)below(3); n >= 0; n--) {
            int64_t at = below(size / 4) * 4;
            static const int32_t values[] = {0, -1, 1, INT32_MAX, INT32_MIN, 255, 256, 1 << 16};
            int32_t value = values[below(8)], old;
            memcpy(&old, plan + at, 4);
            value = below(2) ? value : (int32_t)((uint32_t)old + (uint32_t)below(9) - 4);
            memcpy(plan + at, &value, 4);
        }
        up_plan_finish(plan, size);
        applied += up_apply(arena, g->arena_bytes, plan, size) == UP_PLAN_OK;
    }
    CHECK(applied > 0);
    for (int64_t cut = 0; cut < size; cut++) CHECK(up_apply(arena, g->arena_bytes, data, cut) != UP_PLAN_OK);
    free(plan);
    free(arena);
    up_destroy(g);
}

static void test_destroy_in_any_state_leaks_nothing(void) {
    up_destroy(busy_pool());
    up_grids *g = busy_pool();
    CHECK(call_grow(g) == UP_OK && call_seal(g) == UP_OK && up_resize(g, 96 * 30) == UP_OK);
    up_destroy(g);
}

/* ---- sanitizers must be awake ---- */

static int plant(const char *what) {
    up_grids *g = busy_pool();
    if (strcmp(what, "overflow") == 0) {
        g->cell[0][g->max_handles + 1] = 1;
    } else if (strcmp(what, "undefined") == 0) {
        volatile int most = INT_MAX;
        most = most + (int)g->num_kinds;
    } else if (strcmp(what, "leak") == 0) {
        g = NULL;
    }
    up_destroy(g);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--plant") == 0) return plant(argv[2]);
#define RUN(test)                 \
    do {                          \
        test();                   \
        printf("%s\n", #test);    \
        fflush(stdout);           \
    } while (0)
    RUN(test_bits_between_is_exact_at_both_ends);
    RUN(test_bitset_any_size_agrees_with_bytes);
    RUN(test_bitset_ranges_over_word_borders_set_and_clear_exactly);
    RUN(test_nearest_bits_takes_the_ends);
    RUN(test_window_of_any_ratio_is_a_division);
    RUN(test_failing_calls_leave_every_structure_identical);
    RUN(test_create_without_memory_leaves_nothing_behind);
    RUN(test_calls_without_memory_change_nothing_and_work_later);
    RUN(test_calls_in_parts_without_memory_stay_sound);
    RUN(test_validate_sees_every_planted_damage);
    RUN(test_schedule_levels_that_wrap_start_again);
    RUN(test_pins_nest_to_65535_and_no_further);
    RUN(test_generation_that_wraps_stays_in_its_bits);
    RUN(test_entered_object_answers_busy_to_every_call);
    RUN(test_create_bad_parameters_are_refused);
    RUN(test_strides_of_terabytes_do_not_overflow);
    RUN(test_apply_hostile_plans_stay_inside_the_buffer);
    RUN(test_destroy_in_any_state_leaks_nothing);
    return 0;
}

/* grids.c: nested typed grids with evacuation. Words, invariants and units are in grids.h. */
#include "grids.h"

#include <stdatomic.h>
#include <stddef.h>

#include "bitset.h"
#include "plan.h"

/* A window's word: how many of its smallest cells are live, below four flags. A flagged window is never opened, and the
 * flags sit on top, so the search for the cheapest window is a plain minimum over unsigned words. */
#define WINDOW_LIVE UINT32_C(0x80000000)   /* its own cell, or a larger one around it, is live */
#define WINDOW_HELD UINT32_C(0x40000000)   /* it, or a larger one around it, is being evacuated */
#define WINDOW_DEAD UINT32_C(0x20000000)   /* it can never be a cell: reserved bytes, or past the last whole cell */
#define WINDOW_PINNED UINT32_C(0x10000000) /* a pinned cell lies inside */
#define WINDOW_COUNT UINT32_C(0x0FFFFFFF)

/* A handle's word: the kinds it has a cell of, three marks, and how often it was recycled. */
#define HANDLE_KINDS UINT32_C(0x3F)
#define HANDLE_PINNED UINT32_C(0x40)
#define HANDLE_MARKED UINT32_C(0x80)   /* seen in the batch that is being checked */
#define HANDLE_CHANGED UINT32_C(0x100) /* on the list of table changes */
#define HANDLE_GENERATION_SHIFT 9
_Static_assert(HANDLE_KINDS == (1u << UP_MAX_KINDS) - 1, "one bit a kind");

#define UP_ALL_FLAGS ((uint32_t)(UP_FORBID_MOVES | UP_WILL_OVERWRITE | UP_WILL_PIN | UP_FROM_RESERVATION))
#define MAX_OPERATIONS (INT32_MAX / 2)
#define MAX_UNITS (INT64_C(1) << 27) /* smallest cells in one largest cell */

typedef struct {
    int32_t code, src, dst;
} operation;

/* One grid. `windows` counts an incomplete one at the end too; only kinds above the smallest have window arrays. */
typedef struct {
    int64_t stride, cells, dead, windows;
    int64_t unit;      /* smallest cells in one cell */
    int64_t children;  /* cells of the next smaller kind in one cell; 0 for the smallest kind */
    int32_t low_end, zero_policy;
    up_bitset available, live, partial, pinned_windows;
    uint64_t *dirty;   /* bit per window: the bytes last belonged to another kind */
    int32_t *owner;    /* cell -> handle, valid where live */
    uint32_t *window;  /* [windows rounded up to 64] */
    int32_t *open_children; /* available cells of the next smaller kind inside; meaningless while LIVE or HELD */
    int32_t *pins;     /* pinned smaller cells inside */
    uint32_t *least;   /* per 64 windows: their minimum, stale where the bit below is set */
    uint64_t *stale;
    int64_t num_blocks;
    int64_t num_available, num_live, num_pinned, pin_free;
} grid;

typedef struct {
    int64_t reserved, evacuations, moved, allocated, zeroed, worst_window_bytes;
} counters;

struct up_grids {
    atomic_int busy;
    int32_t num_kinds;
    int64_t arena_bytes, arena_bytes_sealed, reserved_bytes;
    uint64_t layout_digest;
    grid kind[UP_MAX_KINDS];
    counters count[UP_MAX_KINDS];
    int64_t ratio[UP_MAX_KINDS][UP_MAX_KINDS];       /* [larger][smaller] */
    uint64_t reciprocal[UP_MAX_KINDS][UP_MAX_KINDS]; /* of ratio, for 32-bit numerators; unused where ratio is 1 */

    int64_t max_handles, fresh, num_free, num_live_handles; /* handles 1..fresh were given out at least once */
    int32_t *cell[UP_MAX_KINDS];
    int32_t **outgrown; /* tables that a resize replaced: kept, because a caller may still read one */
    int64_t num_outgrown;
    uint32_t *handle;
    uint16_t *pin_count;
    int32_t *free_handles; /* a stack: the handle freed last is given out first, its table rows are still in cache */
    int32_t *changes;      /* handles changed since the last seal, each once */
    int64_t num_changes;

    operation *log;
    int64_t num_operations, log_capacity;
    uint32_t *wrote, *read; /* per smallest cell: the schedule level that last wrote / read it */
    int64_t schedule_cells;
    uint32_t level_base;
    uint8_t *plan;
    int64_t plan_capacity;
    uint64_t sequence, chain;
    int32_t resized;

    int64_t num_promised; /* cells of all kinds that reservations hold */
    int64_t moved_bytes, worst_call_bytes, refusals;
    up_error error;
};

/* ---------------------------------------------------------------- errors and the guard */

static int fail(up_grids *g, int code, int32_t kind, int64_t index, int64_t value) {
    g->error = (up_error){code, kind, index, value, 0, 0};
    return code;
}

static int no_capacity(up_grids *g, int32_t kind, int64_t need, int64_t have) {
    g->error = (up_error){UP_NO_CAPACITY, kind, -1, 0, need, have};
    return UP_NO_CAPACITY;
}

static int enter(up_grids *g) { return !atomic_exchange_explicit(&g->busy, 1, memory_order_acquire); }
static int leave(up_grids *g, int code) {
    atomic_store_explicit(&g->busy, 0, memory_order_release);
    return code;
}

int up_noop(void) { return UP_OK; }
const up_error *up_last_error(const up_grids *g) { return &g->error; }

/* ---------------------------------------------------------------- windows */

/* The window of kind `larger` that holds cell `cell` of kind `smaller`: a division by multiplying with the reciprocal
 * (exact for 32-bit numerators: Lemire, Kaser and Kurz 2019). A ratio of 1 has no 64-bit reciprocal. */
static inline int64_t window_of(const up_grids *g, int larger, int smaller, int64_t cell) {
    if (g->ratio[larger][smaller] == 1) return cell;
    return (int64_t)((unsigned __int128)g->reciprocal[larger][smaller] * (uint64_t)cell >> 64);
}

static inline void mark_stale(grid *k, int64_t window) { k->stale[window >> 12] |= UINT64_C(1) << (window >> 6 & 63); }

/* Bring the available and partial bits of window `t` of kind `i` in line with its word, and tell the window around it. */
static inline void window_update(up_grids *g, int i, int64_t t) {
    grid *k = &g->kind[i];
    uint32_t word = k->window[t];
    int available = word == 0;
    int partial = k->open_children[t] > 0 && !(word & (WINDOW_LIVE | WINDOW_HELD)) &&
                  (word & (WINDOW_COUNT | WINDOW_DEAD)) != 0;
    if (partial != up_bitset_test(&k->partial, t)) {
        if (partial)
            up_bitset_set(&k->partial, t);
        else
            up_bitset_clear(&k->partial, t);
    }
    if (available != up_bitset_test(&k->available, t)) {
        int32_t change = available ? 1 : -1;
        if (available)
            up_bitset_set(&k->available, t);
        else
            up_bitset_clear(&k->available, t);
        k->num_available += change;
        if (i > 0) g->kind[i - 1].open_children[window_of(g, i - 1, i, t)] += change;
    }
}

/* The cells `mask` of word `w` of kind `k` were taken (sign 1) or dropped (-1): update every larger window around them,
 * inside out, one popcount a window. */
static inline void parents_changed(up_grids *g, int k, int64_t w, uint64_t mask, int32_t sign) {
    int64_t base = w << 6;
    for (int i = k - 1; i >= 0; i--) {
        grid *larger = &g->kind[i];
        int64_t ratio = g->ratio[i][k];
        for (uint64_t rest = mask; rest;) {
            int64_t t = window_of(g, i, k, base + up_lowest(rest)), end = (t + 1) * ratio - base;
            uint64_t part = end >= 64 ? rest : rest & up_bits_between(0, (int)end);
            int32_t change = sign * (int32_t)up_popcount(part);
            rest &= ~part;
            larger->window[t] += (uint32_t)(change * (int32_t)g->kind[k].unit);
            if (i == k - 1) larger->open_children[t] -= change;
            if (sign > 0) larger->dirty[t >> 6] |= UINT64_C(1) << (t & 63);
            mark_stale(larger, t);
            window_update(g, i, t);
        }
    }
}

/* A cell of kind `k` became live (or held): nothing inside can be taken. All of it was available. */
static void block_inside(up_grids *g, int k, int64_t cell, uint32_t flag) {
    for (int j = k + 1; j < g->num_kinds; j++) {
        grid *smaller = &g->kind[j];
        int64_t ratio = g->ratio[k][j], lo = cell * ratio, hi = lo + ratio;
        smaller->num_available -= flag == WINDOW_LIVE ? ratio : up_bitset_count_range(&smaller->available, lo, hi);
        up_bitset_clear_range(&smaller->available, lo, hi);
        if (j == g->num_kinds - 1) continue;
        if (flag == WINDOW_HELD) up_bitset_clear_range(&smaller->partial, lo, hi);
        for (int64_t t = lo; t < hi; t++) smaller->window[t] |= flag;
        for (int64_t t = lo; t < hi; t = (t | 63) + 1) mark_stale(smaller, t);
    }
}

/* The reverse: nothing is live inside any more, all of it is available. */
static void unblock_inside(up_grids *g, int k, int64_t cell) {
    for (int j = k + 1; j < g->num_kinds; j++) {
        grid *smaller = &g->kind[j];
        int64_t ratio = g->ratio[k][j], lo = cell * ratio, hi = lo + ratio;
        smaller->num_available += ratio;
        up_bitset_set_range(&smaller->available, lo, hi);
        if (j == g->num_kinds - 1) continue;
        for (int64_t t = lo; t < hi; t++) {
            smaller->window[t] = 0;
            smaller->open_children[t] = (int32_t)smaller->children;
        }
        for (int64_t t = lo; t < hi; t = (t | 63) + 1) mark_stale(smaller, t);
    }
}

/* Take the available cells `mask` of word `w`. */
static inline void take(up_grids *g, int k, int64_t w, uint64_t mask) {
    grid *own = &g->kind[k];
    assert((own->available.level[0][w] & mask) == mask);
    up_bitset_clear_word(&own->available, w, mask);
    up_bitset_set_word(&own->live, w, mask);
    own->num_available -= up_popcount(mask);
    own->num_live += up_popcount(mask);
    parents_changed(g, k, w, mask, 1);
    if (k == g->num_kinds - 1) return;
    for (uint64_t rest = mask; rest; rest &= rest - 1) {
        int64_t cell = w << 6 | up_lowest(rest);
        own->window[cell] |= WINDOW_LIVE;
        mark_stale(own, cell);
        block_inside(g, k, cell, WINDOW_LIVE);
        for (int j = k + 1; j < g->num_kinds; j++)
            up_words_set_range(g->kind[j].dirty, cell * g->ratio[k][j], (cell + 1) * g->ratio[k][j]);
    }
}

/* Drop the live cells `mask` of word `w`. */
static inline void drop(up_grids *g, int k, int64_t w, uint64_t mask) {
    grid *own = &g->kind[k];
    assert((own->live.level[0][w] & mask) == mask);
    up_bitset_clear_word(&own->live, w, mask);
    up_bitset_set_word(&own->available, w, mask);
    own->num_available += up_popcount(mask);
    own->num_live -= up_popcount(mask);
    if (k < g->num_kinds - 1)
        for (uint64_t rest = mask; rest; rest &= rest - 1) {
            int64_t cell = w << 6 | up_lowest(rest);
            own->window[cell] = 0;
            mark_stale(own, cell);
            unblock_inside(g, k, cell);
        }
    parents_changed(g, k, w, mask, -1);
}

/* ---------------------------------------------------------------- placement */

static inline int64_t at_end(const up_bitset *b, int low) { return low ? up_bitset_first(b) : up_bitset_last(b); }

/* A partial window of kind `i` for a cell whose own end is `low`; among those with pinned cells when asked. The window
 * that holds the null cell can never be opened, so what fits there costs nobody anything: it goes first. */
static inline int64_t partial_window(const grid *i, int low, int pinned) {
    if (!pinned) return i->dead && up_bitset_test(&i->partial, 0) ? 0 : at_end(&i->partial, low);
    int64_t t = at_end(&i->pinned_windows, low);
    while (t >= 0 && !up_bitset_test(&i->partial, t))
        t = low ? up_bitset_at_or_above(&i->pinned_windows, t + 1)
                : (t ? up_bitset_at_or_below(&i->pinned_windows, t - 1) : -1);
    return t;
}

/* The range of k-cells to take from first: inside the partial window nearest the own end, of the smallest kind that has
 * one; else everywhere. Returns 0 when no k-cell is available; with `pinned`, when no such window holds a pinned cell. */
static inline int choose_range(const up_grids *g, int k, int pinned, int64_t *lo, int64_t *hi) {
    int low = g->kind[k].low_end;
    if (g->kind[k].num_available == 0) return 0;
    for (int i = k - 1; i >= 0; i--) {
        int64_t t = partial_window(&g->kind[i], low, pinned);
        if (t < 0) continue;
        int64_t ratio = g->ratio[i][i + 1], first = t * ratio, end = first + ratio;
        if (i + 1 < k) { /* an available (i + 1)-cell inside it is made of available k-cells */
            int64_t cell = low ? up_bitset_at_or_above(&g->kind[i + 1].available, first)
                               : up_bitset_at_or_below(&g->kind[i + 1].available, end - 1);
            assert(cell >= first && cell < end);
            first = cell * g->ratio[i + 1][k];
            end = first + g->ratio[i + 1][k];
        }
        *lo = first;
        *hi = end < g->kind[k].cells ? end : g->kind[k].cells;
        return 1;
    }
    *lo = 0;
    *hi = g->kind[k].cells;
    return !pinned;
}

/* The `count` bits of `mask` nearest the low or the high end; all when there are fewer. */
static inline uint64_t nearest_bits(uint64_t mask, int64_t count, int low) {
    int surplus = up_popcount(mask) - (int)(count < 64 ? count : 64);
    if (surplus <= 0) return mask;
    if (count == 1) return low ? mask & -mask : UINT64_C(1) << up_highest(mask);
    uint64_t rest = mask;
    if (low) {
        for (int n = up_popcount(mask) - surplus; n > 0; n--) rest &= rest - 1;
        return mask & ~rest;
    }
    for (; surplus > 0; surplus--) rest &= rest - 1;
    return rest;
}

/* Up to `want` available k-cells in one word, in placement order. Returns 0 when none is available. */
static inline int pick(const up_grids *g, int k, int64_t want, uint32_t flags, int64_t *w, uint64_t *mask) {
    int64_t lo, hi;
    int low = g->kind[k].low_end;
    if (!((flags & UP_WILL_PIN) && choose_range(g, k, 1, &lo, &hi)) && !choose_range(g, k, 0, &lo, &hi)) return 0;
    const up_bitset *available = &g->kind[k].available;
    int64_t at = low ? up_bitset_at_or_above(available, lo) : up_bitset_at_or_below(available, hi - 1);
    assert(at >= lo && at < hi);
    int64_t base = at & ~INT64_C(63);
    uint64_t inside = up_bits_between(lo > base ? (int)(lo - base) : 0, hi - base < 64 ? (int)(hi - base) : 64);
    *w = at >> 6;
    *mask = nearest_bits(available->level[0][at >> 6] & inside, want, low);
    return 1;
}

/* ---------------------------------------------------------------- the log */

static inline void handle_changed(up_grids *g, int32_t h) {
    if (g->handle[h] & HANDLE_CHANGED) return;
    g->handle[h] |= HANDLE_CHANGED;
    g->changes[g->num_changes++] = h;
}

static inline void record(up_grids *g, int op, int k, int64_t src, int64_t dst) {
    assert(g->num_operations < g->log_capacity);
    g->log[g->num_operations++] = (operation){op | k << 8, (int32_t)src, (int32_t)dst};
}

/* Make room for `extra` more operations, before anything changes. */
static int log_reserve(up_grids *g, int64_t extra) {
    int64_t need = g->num_operations + extra;
    if (need <= g->log_capacity) return UP_OK;
    if (need > MAX_OPERATIONS) return fail(g, UP_NO_MEMORY, -1, -1, need);
    int64_t capacity = g->log_capacity * 2 > need ? g->log_capacity * 2 : need;
    operation *log = realloc(g->log, (size_t)capacity * sizeof *log);
    if (!log) return fail(g, UP_NO_MEMORY, -1, -1, need);
    g->log = log;
    g->log_capacity = capacity;
    return UP_OK;
}

/* ---------------------------------------------------------------- capacity */

/* 1 when the demand fits by the formula, on the cells as they could be arranged (moves) or as they lie (no moves).
 * `promised` counts reservations too. On 0, *kind, *need and *have say where it fails. */
static inline int fits(const up_grids *g, const int64_t *demand, int moves, int promised, int *kind, int64_t *need,
                       int64_t *have) {
    int64_t m = 0;
    for (int k = 0; k < g->num_kinds; k++) {
        const grid *own = &g->kind[k];
        m = demand[k] + (k ? m * g->ratio[k - 1][k] : 0) + (moves ? own->num_live - own->num_pinned : 0) +
            (promised ? g->count[k].reserved : 0);
        int64_t room = moves ? own->pin_free : own->num_available;
        if (m > room) {
            *kind = k;
            *need = m;
            *have = room;
            return 0;
        }
    }
    return 1;
}

/* The largest n of kind `k` alone that fits; with pins lifted when asked. */
static int64_t placeable(const up_grids *g, int kind, int lifted) {
    int64_t m = 0, most = INT64_MAX;
    for (int k = 0; k < g->num_kinds; k++) {
        const grid *own = &g->kind[k];
        m = own->num_live - (lifted ? 0 : own->num_pinned) + g->count[k].reserved + (k ? m * g->ratio[k - 1][k] : 0);
        int64_t room = (lifted ? own->cells - own->dead : own->pin_free) - m;
        if (k >= kind && room / g->ratio[kind][k] < most) most = room / g->ratio[kind][k];
    }
    return most > 0 ? most : 0;
}

/* Sum a joint demand per kind, checking it. */
static inline int sum_demand(up_grids *g, const up_item *items, int32_t num_items, uint32_t flags, int64_t *demand,
                             int64_t *handles) {
    int64_t total = 0;
    if (flags & ~UP_ALL_FLAGS) return fail(g, UP_BAD_ARGUMENT, -1, -1, flags);
    for (int k = 0; k < g->num_kinds; k++) demand[k] = 0;
    if (num_items < 0) return fail(g, UP_BAD_ARGUMENT, -1, -1, num_items);
    for (int32_t i = 0; i < num_items; i++) {
        uint32_t kinds = items[i].kind_mask;
        if (items[i].count < 0) return fail(g, UP_BAD_ARGUMENT, -1, i, items[i].count);
        if (!kinds || kinds >> g->num_kinds) return fail(g, UP_BAD_ARGUMENT, -1, i, kinds);
        for (; kinds; kinds &= kinds - 1) demand[up_lowest(kinds)] += items[i].count;
        total += items[i].count;
    }
    *handles = total;
    return UP_OK;
}

/* Can the demand be met under `flags`? Refuses with the numbers. *moves says whether something may have to be opened. */
static inline int check_capacity(up_grids *g, const int64_t *demand, uint32_t flags, int *moves) {
    int kind;
    int64_t need, have;
    *moves = !fits(g, demand, 0, 0, &kind, &need, &have);
    if (*moves && (flags & UP_FORBID_MOVES)) return no_capacity(g, kind, need, have);
    if (flags & UP_FROM_RESERVATION) {
        for (int k = 0; k < g->num_kinds; k++)
            if (demand[k] > g->count[k].reserved) return fail(g, UP_NOT_RESERVED, k, -1, demand[k]);
        return UP_OK;
    }
    /* Cells that can be taken as they lie are proof enough, unless somebody was promised room. */
    if (!*moves && !g->num_promised) return UP_OK;
    return fits(g, demand, 1, 1, &kind, &need, &have) ? UP_OK : no_capacity(g, kind, need, have);
}

/* The most moves that opening one window of kind `k` can take, in smallest cells (I8): what lies in it, and for each
 * displaced middle cell what lies in the window that it opens for itself, by induction over the kinds. */
static inline int64_t most_moves(const up_grids *g, int k) { return g->kind[k].unit * (g->num_kinds - 1 - k); }

/* Operations that meeting the demand can record: a zero a cell, and where something must be opened its moves. */
static inline int64_t operation_bound(const up_grids *g, const int64_t *demand, int moves) {
    int64_t bound = 0;
    for (int k = 0; k < g->num_kinds; k++) bound += demand[k] * (moves ? 1 + most_moves(g, k) : 1);
    return bound;
}

/* Take `demand` out of what was promised. */
static void use_promise(up_grids *g, const int64_t *demand) {
    for (int k = 0; k < g->num_kinds; k++) {
        g->count[k].reserved -= demand[k];
        g->num_promised -= demand[k];
    }
}

/* Let the demand in: after this, placing it cannot fail. Refuses with the numbers, and then only counts the refusal. */
static inline int admit(up_grids *g, const int64_t *demand, uint32_t flags) {
    int moves, code = check_capacity(g, demand, flags, &moves);
    if (code != UP_OK) {
        g->refusals++;
        return code;
    }
    code = log_reserve(g, operation_bound(g, demand, moves));
    if (code == UP_OK && flags & UP_FROM_RESERVATION) use_promise(g, demand);
    return code;
}

/* ---------------------------------------------------------------- evacuation */

/* The window of kind `k` with the fewest live bytes that may be opened, ties to the kind's own end; -1 when none may.
 * O(windows / 64), plus 64 a window block touched since the last call. */
static int64_t cheapest_window(grid *k) {
    for (int64_t w = 0; w < up_words(k->num_blocks); w++)
        for (; k->stale[w]; k->stale[w] &= k->stale[w] - 1) {
            int64_t block = w << 6 | up_lowest(k->stale[w]);
            const uint32_t *window = &k->window[block << 6];
            uint32_t least = UINT32_MAX;
            for (int i = 0; i < 64; i++) least = window[i] < least ? window[i] : least;
            k->least[block] = least;
        }
    uint32_t least = UINT32_MAX;
    for (int64_t b = 0; b < k->num_blocks; b++) least = k->least[b] < least ? k->least[b] : least;
    if (least > WINDOW_COUNT) return -1;
    int64_t block = k->low_end ? 0 : k->num_blocks - 1, step = k->low_end ? 1 : -1;
    while (k->least[block] != least) block += step;
    int64_t t = (block << 6) + (k->low_end ? 0 : 63);
    while (k->window[t] != least) t += step;
    return t;
}

static void open_window(up_grids *g, int k);

/* Move every live cell out of window `t` of kind `k`. Sources stay live until every destination is chosen, and the
 * window is held, so sources and destinations are disjoint. The capacity formula has promised the room. */
static void evacuate(up_grids *g, int k, int64_t t) {
    int64_t units = 0;
    assert(!(g->kind[k].window[t] & ~WINDOW_COUNT));
    g->kind[k].window[t] |= WINDOW_HELD;
    if (up_bitset_test(&g->kind[k].partial, t)) up_bitset_clear(&g->kind[k].partial, t);
    block_inside(g, k, t, WINDOW_HELD);
    for (int j = k + 1; j < g->num_kinds; j++) {
        grid *own = &g->kind[j];
        int64_t lo = t * g->ratio[k][j], hi = lo + g->ratio[k][j];
        for (int64_t w = (hi - 1) >> 6; w >= lo >> 6; w--) {
            int64_t base = w << 6;
            uint64_t sources = own->live.level[0][w] & up_bits_between(lo > base ? (int)(lo - base) : 0,
                                                                      hi - base < 64 ? (int)(hi - base) : 64);
            while (sources) {
                int64_t to;
                uint64_t destinations;
                while (!pick(g, j, up_popcount(sources), 0, &to, &destinations)) open_window(g, j);
                take(g, j, to, destinations);
                own->dirty[to] &= ~destinations; /* the move overwrites every byte */
                while (destinations) {
                    int64_t src = base | up_highest(sources), dst = to << 6 | up_highest(destinations);
                    int32_t h = own->owner[src];
                    sources &= ~(UINT64_C(1) << (src & 63));
                    destinations &= ~(UINT64_C(1) << (dst & 63));
                    own->owner[dst] = h;
                    g->cell[j][h] = (int32_t)dst;
                    handle_changed(g, h);
                    record(g, UP_OP_MOVE, j, src, dst);
                }
            }
        }
        int64_t moved = up_bitset_count_range(&own->live, lo, hi);
        up_bitset_clear_range(&own->live, lo, hi);
        own->num_live -= moved;
        g->count[j].moved += moved;
        g->moved_bytes += moved * own->stride;
        units += moved * own->unit;
    }
    unblock_inside(g, k, t);
    g->kind[k].window[t] = 0;
    g->kind[k].open_children[t] = (int32_t)g->kind[k].children;
    mark_stale(&g->kind[k], t);
    window_update(g, k, t);
    for (int i = k - 1; i >= 0; i--) {
        int64_t around = window_of(g, i, k, t);
        g->kind[i].window[around] -= (uint32_t)units;
        mark_stale(&g->kind[i], around);
        window_update(g, i, around);
    }
}

/* Make one cell of kind `k` available by evacuating the cheapest window. */
static void open_window(up_grids *g, int k) {
    int64_t before = g->moved_bytes, t = cheapest_window(&g->kind[k]);
    assert(t >= 0 && k < g->num_kinds - 1);
    evacuate(g, k, t);
    int64_t moved = g->moved_bytes - before;
    g->count[k].evacuations++;
    if (moved > g->count[k].worst_window_bytes) g->count[k].worst_window_bytes = moved;
}

/* ---------------------------------------------------------------- allocate, attach */

/* Give handles[0..count) a cell of kind `k`. Cannot fail: capacity and log room were checked. */
static inline void place(up_grids *g, int k, const int32_t *handles, int64_t count, uint32_t flags) {
    grid *own = &g->kind[k];
    int32_t *cell = g->cell[k], *owner = own->owner;
    int low = own->low_end;
    int zero = flags & UP_WILL_OVERWRITE ? UP_ZERO_NEVER : own->zero_policy;
    g->count[k].allocated += count;
    while (count > 0) {
        int64_t w;
        uint64_t mask;
        while (!pick(g, k, count, flags, &w, &mask)) open_window(g, k);
        take(g, k, w, mask);
        uint64_t fill = zero == UP_ZERO_ALWAYS ? mask : zero == UP_ZERO_IF_DIRTY ? mask & own->dirty[w] : 0;
        own->dirty[w] &= ~mask;
        int32_t base = (int32_t)(w << 6), taken = up_popcount(mask), step = low ? 1 : -1;
        const int32_t *next = low ? handles : handles + taken - 1;
        count -= taken;
        handles += taken;
        for (; mask; mask &= mask - 1, next += step) { /* upwards is cheaper, also where the highest cell goes first */
            int32_t c = base | up_lowest(mask), h = *next;
            cell[h] = c;
            owner[c] = h;
        }
        g->count[k].zeroed += up_popcount(fill);
        for (; fill; fill &= fill - 1) {
            int64_t c = w << 6 | up_lowest(fill);
            record(g, UP_OP_ZERO, k, c, c);
        }
    }
}

static inline void call_moved(up_grids *g, int64_t before) {
    if (g->moved_bytes - before > g->worst_call_bytes) g->worst_call_bytes = g->moved_bytes - before;
}

/* Give out `count` handles of the kinds `kinds`, the one freed last first. */
static inline void new_handles(up_grids *g, int32_t *out, int32_t count, uint32_t kinds) {
    uint32_t *words = g->handle;
    const int32_t *top = g->free_handles + g->num_free;
    int32_t *changes = g->changes + g->num_changes;
    int32_t reused = count < g->num_free ? count : (int32_t)g->num_free;
    for (int32_t i = 0; i < reused; i++) {
        int32_t h = *--top;
        uint32_t word = words[h];
        if (!(word & HANDLE_CHANGED)) *changes++ = h;
        words[h] = word | kinds | HANDLE_CHANGED;
        out[i] = h;
    }
    for (int32_t i = reused; i < count; i++) {
        int32_t h = (int32_t)++g->fresh;
        if (!(words[h] & HANDLE_CHANGED)) *changes++ = h;
        words[h] |= kinds | HANDLE_CHANGED;
        out[i] = h;
    }
    g->num_free -= reused;
    g->num_changes = changes - g->changes;
}

static inline int allocate(up_grids *g, const up_item *items, int32_t num_items, uint32_t flags, int32_t *handles,
                           int64_t handles_capacity) {
    int64_t demand[UP_MAX_KINDS], total, before = g->moved_bytes;
    int code = sum_demand(g, items, num_items, flags, demand, &total);
    if (code != UP_OK) return code;
    if (total > handles_capacity) return fail(g, UP_BAD_ARGUMENT, -1, -1, total);
    code = admit(g, demand, flags);
    if (code != UP_OK) return code;
    /* A live handle owns at least one smallest cell, so handles cannot run out before bytes do. */
    assert(g->num_free + (g->max_handles - g->fresh) >= total);
    g->num_live_handles += total;
    int32_t *out = handles;
    for (int32_t i = 0; i < num_items; out += items[i++].count) new_handles(g, out, items[i].count, items[i].kind_mask);
    for (int k = 0; k < g->num_kinds; k++) {
        if (!demand[k]) continue;
        const int32_t *at = handles;
        for (int32_t i = 0; i < num_items; at += items[i++].count)
            if (items[i].kind_mask >> k & 1 && items[i].count) place(g, k, at, items[i].count, flags);
    }
    call_moved(g, before);
    return UP_OK;
}

int up_allocate(up_grids *g, const up_item *items, int32_t num_items, uint32_t flags, int32_t *handles,
                int64_t handles_capacity) {
    if (!enter(g)) return UP_BUSY;
    return leave(g, allocate(g, items, num_items, flags, handles, handles_capacity));
}

int up_allocate_demand(up_demand *demand) {
    up_grids *g = demand->grids;
    up_handles *out = demand->out;
    if (!enter(g)) return UP_BUSY;
    int code = allocate(g, demand->items, demand->num_items, demand->flags, out->data, out->capacity);
    if (code == UP_OK) out->length = demand->total;
    return leave(g, code);
}

int up_can_allocate(up_grids *g, const up_item *items, int32_t num_items, uint32_t flags) {
    if (!enter(g)) return UP_BUSY;
    int64_t demand[UP_MAX_KINDS], total;
    int moves, code = sum_demand(g, items, num_items, flags, demand, &total);
    if (code == UP_OK) code = check_capacity(g, demand, flags, &moves) == UP_OK;
    return leave(g, code);
}

int up_can_allocate_demand(const up_demand *demand) {
    return up_can_allocate(demand->grids, demand->items, demand->num_items, demand->flags);
}

int up_shortfall(up_grids *g, const up_item *items, int32_t num_items, int64_t *bytes) {
    if (!enter(g)) return UP_BUSY;
    int64_t demand[UP_MAX_KINDS], total, m = 0;
    int code = sum_demand(g, items, num_items, 0, demand, &total);
    if (code != UP_OK) return leave(g, code);
    *bytes = 0;
    for (int k = 0; k < g->num_kinds; k++) {
        const grid *own = &g->kind[k];
        m = demand[k] + g->count[k].reserved + own->num_live - own->num_pinned + (k ? m * g->ratio[k - 1][k] : 0);
        /* Past the arena's own size the exact product does not matter, and must not overflow further down. */
        if (m > (int64_t)INT32_MAX * 2) m = (int64_t)INT32_MAX * 2;
        int64_t missing = m - own->pin_free, missing_bytes;
        if (missing > 0 && __builtin_mul_overflow(missing, own->stride, &missing_bytes)) missing_bytes = INT64_MAX;
        if (missing > 0 && missing_bytes > *bytes) *bytes = missing_bytes;
    }
    return leave(g, UP_OK);
}

/* Check a batch of handles and mark each, so that a second sight is a duplicate. With `kind` >= 0 each must have a cell
 * of that kind (has 1) or must not (has 0). *kinds gets the kinds that any of them has a cell of. On failure nothing
 * stays marked. */
static inline int mark_batch(up_grids *g, const int32_t *handles, int64_t count, int kind, int has, int may_be_pinned,
                             uint32_t *kinds, int *alike) {
    uint32_t *words = g->handle, any = 0, all = HANDLE_KINDS, stop = HANDLE_MARKED | (may_be_pinned ? 0 : HANDLE_PINNED);
    uint64_t limit = (uint64_t)g->max_handles;
    int code = UP_OK;
    int64_t i = 0;
    if (count < 0) return fail(g, UP_BAD_ARGUMENT, kind, -1, count);
    for (; i < count; i++) {
        if ((uint64_t)((int64_t)handles[i] - 1) >= limit) { /* null and negative handles wrap around */
            code = UP_BAD_HANDLE;
            break;
        }
        uint32_t word = words[handles[i]];
        if ((word & stop) || !(word & HANDLE_KINDS)) {
            code = word & HANDLE_MARKED ? UP_DUPLICATE : word & HANDLE_KINDS ? UP_PINNED : UP_DEAD_HANDLE;
            break;
        }
        if (kind >= 0 && (int)(word >> kind & 1) != has) {
            code = has ? UP_NO_CELL : UP_HAS_CELL;
            break;
        }
        words[handles[i]] = word | HANDLE_MARKED;
        any |= word;
        all &= word;
    }
    *kinds = any & HANDLE_KINDS;
    *alike = (any & HANDLE_KINDS) == all;
    if (code == UP_OK) return UP_OK;
    fail(g, code, kind, i, handles[i]);
    while (i-- > 0) words[handles[i]] &= ~HANDLE_MARKED;
    return code;
}

static void unmark_batch(up_grids *g, const int32_t *handles, int64_t count) {
    for (int64_t i = 0; i < count; i++) g->handle[handles[i]] &= ~HANDLE_MARKED;
}

static int check_kind(up_grids *g, int32_t kind) {
    return kind >= 0 && kind < g->num_kinds ? UP_OK : fail(g, UP_BAD_ARGUMENT, kind, -1, kind);
}

static int attach(up_grids *g, const int32_t *handles, int64_t count, int32_t kind, uint32_t flags) {
    int64_t demand[UP_MAX_KINDS] = {0}, before = g->moved_bytes;
    uint32_t kinds;
    int alike, code = check_kind(g, kind);
    if (code == UP_OK && flags & ~UP_ALL_FLAGS) code = fail(g, UP_BAD_ARGUMENT, kind, -1, flags);
    if (code == UP_OK) code = mark_batch(g, handles, count, kind, 0, 0, &kinds, &alike);
    if (code != UP_OK) return code;
    unmark_batch(g, handles, count);
    demand[kind] = count;
    code = admit(g, demand, flags);
    if (code != UP_OK) return code;
    for (int64_t i = 0; i < count; i++) {
        g->handle[handles[i]] |= 1u << kind;
        handle_changed(g, handles[i]);
    }
    place(g, kind, handles, count, flags);
    call_moved(g, before);
    return UP_OK;
}

int up_attach(up_grids *g, const int32_t *handles, int64_t count, int32_t kind, uint32_t flags) {
    if (!enter(g)) return UP_BUSY;
    return leave(g, attach(g, handles, count, kind, flags));
}

/* ---------------------------------------------------------------- free, detach */

/* Drop the cells of kind `k` that the marked handles have; neighbouring cells are gathered into one word first. With
 * `retire`, `k` is the last kind of the batch: unmark the handles, and retire those that have no cell left. */
static inline void drop_kind(up_grids *g, int k, const int32_t *handles, int64_t count, uint32_t kinds, int retire) {
    uint32_t *words = g->handle;
    int32_t *cells = g->cell[k], *free_handles = g->free_handles + g->num_free, *changes = g->changes + g->num_changes;
    int64_t gathered = -1;
    uint64_t mask = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t h = handles[i];
        uint32_t word = words[h];
        if (word >> k & 1) {
            int64_t cell = cells[h];
            cells[h] = -1;
            if (cell >> 6 != gathered) {
                if (mask) drop(g, k, gathered, mask);
                gathered = cell >> 6;
                mask = 0;
            }
            mask |= UINT64_C(1) << (cell & 63);
        }
        if (!retire) continue;
        word &= ~(kinds | HANDLE_MARKED);
        if (!(word & HANDLE_KINDS)) {
            word += 1u << HANDLE_GENERATION_SHIFT;
            *free_handles++ = h;
        }
        if (!(word & HANDLE_CHANGED)) *changes++ = h;
        words[h] = word | HANDLE_CHANGED;
    }
    if (mask) drop(g, k, gathered, mask);
    int64_t retired = free_handles - (g->free_handles + g->num_free);
    g->num_free += retired;
    g->num_live_handles -= retired;
    g->num_changes = changes - g->changes;
}

/* Drop the cells of the kinds `kinds` of marked handles, unmark them, and retire those that have none left. */
static inline void drop_batch(up_grids *g, const int32_t *handles, int64_t count, uint32_t kinds) {
    uint32_t rest = kinds;
    for (; rest & (rest - 1); rest &= rest - 1) drop_kind(g, up_lowest(rest), handles, count, 0, 0);
    if (rest) drop_kind(g, up_lowest(rest), handles, count, kinds, 1);
}

/* The same for marked handles that all have a cell of kind `k` and no other: one pass, and all of them die. */
static inline void retire_batch(up_grids *g, int k, const int32_t *handles, int64_t count) {
    uint32_t *words = g->handle;
    uint32_t change = (1u << HANDLE_GENERATION_SHIFT) - HANDLE_MARKED - (1u << k); /* these two bits are set in each */
    int32_t *cells = g->cell[k], *changes = g->changes + g->num_changes;
    int64_t word = -1;
    uint64_t mask = 0;
    memcpy(g->free_handles + g->num_free, handles, (size_t)count * sizeof *handles);
    g->num_free += count;
    g->num_live_handles -= count;
    for (int64_t i = 0; i < count; i++) {
        int32_t h = handles[i];
        int64_t cell = cells[h];
        cells[h] = -1;
        if (!(words[h] & HANDLE_CHANGED)) *changes++ = h;
        words[h] = (words[h] | HANDLE_CHANGED) + change;
        if (cell >> 6 != word) {
            if (mask) drop(g, k, word, mask);
            word = cell >> 6;
            mask = 0;
        }
        mask |= UINT64_C(1) << (cell & 63);
    }
    if (mask) drop(g, k, word, mask);
    g->num_changes = changes - g->changes;
}

int up_free(up_grids *g, const int32_t *handles, int64_t count) {
    if (!enter(g)) return UP_BUSY;
    uint32_t kinds;
    int alike, code = mark_batch(g, handles, count, -1, 0, 0, &kinds, &alike);
    if (code == UP_OK && alike && kinds && !(kinds & (kinds - 1)))
        retire_batch(g, up_lowest(kinds), handles, count);
    else if (code == UP_OK)
        drop_batch(g, handles, count, kinds);
    return leave(g, code);
}

int up_free_handles(const up_handles *handles) { return up_free(handles->grids, handles->data, handles->length); }

int up_detach(up_grids *g, const int32_t *handles, int64_t count, int32_t kind) {
    if (!enter(g)) return UP_BUSY;
    uint32_t kinds;
    int alike, code = check_kind(g, kind);
    if (code == UP_OK) code = mark_batch(g, handles, count, kind, 1, 0, &kinds, &alike);
    if (code == UP_OK) drop_batch(g, handles, count, 1u << kind);
    return leave(g, code);
}

/* ---------------------------------------------------------------- reserve, pin */

int up_reserve(up_grids *g, const int64_t *counts) {
    if (!enter(g)) return UP_BUSY;
    int kind;
    int64_t need, have;
    for (int k = 0; k < g->num_kinds; k++)
        if (counts[k] < 0 || counts[k] > INT64_C(1) << 40) return leave(g, fail(g, UP_BAD_ARGUMENT, k, k, counts[k]));
    if (!fits(g, counts, 1, 1, &kind, &need, &have)) {
        g->refusals++;
        return leave(g, no_capacity(g, kind, need, have));
    }
    for (int k = 0; k < g->num_kinds; k++) {
        g->count[k].reserved += counts[k];
        g->num_promised += counts[k];
    }
    return leave(g, UP_OK);
}

int up_unreserve(up_grids *g, const int64_t *counts) {
    if (!enter(g)) return UP_BUSY;
    for (int k = 0; k < g->num_kinds; k++)
        if (counts[k] < 0 || counts[k] > g->count[k].reserved)
            return leave(g, fail(g, UP_NOT_RESERVED, k, k, counts[k]));
    use_promise(g, counts);
    return leave(g, UP_OK);
}

/* Pin (sign 1) or unpin (-1) the cells of one handle: they leave or rejoin E_k of every kind. */
static void pin_cells(up_grids *g, int32_t h, int sign) {
    for (int k = 0; k < g->num_kinds; k++) {
        int64_t cell = g->cell[k][h];
        if (cell < 0) continue;
        g->kind[k].num_pinned += sign;
        for (int j = k; j < g->num_kinds; j++) g->kind[j].pin_free -= sign * g->ratio[k][j];
        for (int i = k - 1; i >= 0; i--) {
            grid *larger = &g->kind[i];
            int64_t t = window_of(g, i, k, cell);
            int before = larger->pins[t] > 0;
            larger->pins[t] += sign;
            if (before == (larger->pins[t] > 0)) continue;
            larger->window[t] ^= WINDOW_PINNED;
            mark_stale(larger, t);
            if (before)
                up_bitset_clear(&larger->pinned_windows, t);
            else
                up_bitset_set(&larger->pinned_windows, t);
            if (!(larger->window[t] & WINDOW_DEAD)) larger->pin_free -= sign;
        }
    }
}

static void unpin_one(up_grids *g, int32_t h) {
    if (--g->pin_count[h]) return;
    g->handle[h] &= ~HANDLE_PINNED;
    pin_cells(g, h, -1);
}

static int pin(up_grids *g, const int32_t *handles, int64_t count) {
    static const int64_t nothing[UP_MAX_KINDS];
    int kind;
    int64_t need, have;
    uint32_t kinds;
    int alike, code = mark_batch(g, handles, count, -1, 0, 1, &kinds, &alike);
    if (code != UP_OK) return code;
    unmark_batch(g, handles, count);
    for (int64_t i = 0; i < count; i++)
        if (g->pin_count[handles[i]] == UINT16_MAX) return fail(g, UP_BAD_ARGUMENT, -1, i, handles[i]);
    for (int64_t i = 0; i < count; i++)
        if (!g->pin_count[handles[i]]++) {
            g->handle[handles[i]] |= HANDLE_PINNED;
            pin_cells(g, handles[i], 1);
        }
    if (fits(g, nothing, 1, 1, &kind, &need, &have)) return UP_OK;
    for (int64_t i = 0; i < count; i++) unpin_one(g, handles[i]);
    return no_capacity(g, kind, need, have);
}

int up_pin(up_grids *g, const int32_t *handles, int64_t count) {
    if (!enter(g)) return UP_BUSY;
    return leave(g, pin(g, handles, count));
}

int up_unpin(up_grids *g, const int32_t *handles, int64_t count) {
    if (!enter(g)) return UP_BUSY;
    uint32_t kinds;
    int alike, code = mark_batch(g, handles, count, -1, 0, 1, &kinds, &alike);
    if (code != UP_OK) return leave(g, code);
    unmark_batch(g, handles, count);
    for (int64_t i = 0; i < count; i++)
        if (!g->pin_count[handles[i]]) return leave(g, fail(g, UP_NOT_PINNED, -1, i, handles[i]));
    for (int64_t i = 0; i < count; i++) unpin_one(g, handles[i]);
    return leave(g, UP_OK);
}

/* ---------------------------------------------------------------- prepare, copy, zero, relocate */

/* Can one more k-cell become available by moves alone, beside those that are? */
static int can_open(const up_grids *g, int k) {
    int64_t demand[UP_MAX_KINDS] = {0}, need, have;
    int kind;
    demand[k] = g->kind[k].num_available + 1;
    return fits(g, demand, 1, 0, &kind, &need, &have);
}

int up_prepare(up_grids *g, int32_t kind, int64_t count, int64_t max_bytes, int64_t *available, int64_t *moved) {
    if (!enter(g)) return UP_BUSY;
    int64_t before = g->moved_bytes;
    int code = check_kind(g, kind);
    if (code == UP_OK && (count < 0 || max_bytes < 0))
        code = fail(g, UP_BAD_ARGUMENT, kind, -1, count < 0 ? count : max_bytes);
    if (code != UP_OK) return leave(g, code);
    grid *own = &g->kind[kind];
    while (own->num_available < count && can_open(g, kind)) {
        int64_t t = cheapest_window(own), cost = (int64_t)own->window[t] * g->kind[g->num_kinds - 1].stride;
        cost *= g->num_kinds - 1 - kind; /* a displaced middle cell may have to open a window of its own (I8) */
        if (g->moved_bytes - before + cost > max_bytes) break;
        code = log_reserve(g, most_moves(g, kind));
        if (code != UP_OK) return leave(g, code);
        int64_t had = own->num_available;
        open_window(g, kind);
        if (own->num_available <= had) break;
    }
    *available = own->num_available;
    *moved = g->moved_bytes - before;
    call_moved(g, before);
    return leave(g, UP_OK);
}

int up_next_open_cost(up_grids *g, int32_t kind, int64_t *bytes) {
    if (!enter(g)) return UP_BUSY;
    int code = check_kind(g, kind);
    if (code != UP_OK) return leave(g, code);
    grid *own = &g->kind[kind];
    *bytes = own->num_available ? 0 : -1;
    if (!own->num_available && can_open(g, kind))
        *bytes = (int64_t)own->window[cheapest_window(own)] * g->kind[g->num_kinds - 1].stride;
    return leave(g, UP_OK);
}

/* Each handle must be live and have a cell of `kind`; duplicates are fine. */
static int check_cells(up_grids *g, const int32_t *handles, int64_t count, int32_t kind) {
    if (count < 0) return fail(g, UP_BAD_ARGUMENT, kind, -1, count);
    for (int64_t i = 0; i < count; i++) {
        int32_t h = handles[i];
        if (h < 1 || h > g->max_handles) return fail(g, UP_BAD_HANDLE, kind, i, h);
        if (!(g->handle[h] & HANDLE_KINDS)) return fail(g, UP_DEAD_HANDLE, kind, i, h);
        if (!(g->handle[h] >> kind & 1)) return fail(g, UP_NO_CELL, kind, i, h);
    }
    return UP_OK;
}

int up_copy(up_grids *g, const int32_t *src, const int32_t *dst, int64_t count, int32_t kind) {
    if (!enter(g)) return UP_BUSY;
    int code = check_kind(g, kind);
    if (code == UP_OK) code = check_cells(g, src, count, kind);
    if (code == UP_OK) code = check_cells(g, dst, count, kind);
    for (int64_t i = 0; code == UP_OK && i < count; i++)
        if (src[i] == dst[i]) code = fail(g, UP_DUPLICATE, kind, i, src[i]);
    if (code == UP_OK) code = log_reserve(g, count);
    if (code != UP_OK) return leave(g, code);
    for (int64_t i = 0; i < count; i++) record(g, UP_OP_COPY, kind, g->cell[kind][src[i]], g->cell[kind][dst[i]]);
    return leave(g, UP_OK);
}

int up_zero(up_grids *g, const int32_t *handles, int64_t count, int32_t kind) {
    if (!enter(g)) return UP_BUSY;
    int code = check_kind(g, kind);
    if (code == UP_OK) code = check_cells(g, handles, count, kind);
    if (code == UP_OK) code = log_reserve(g, count);
    if (code != UP_OK) return leave(g, code);
    for (int64_t i = 0; i < count; i++) record(g, UP_OP_ZERO, kind, g->cell[kind][handles[i]], g->cell[kind][handles[i]]);
    g->count[kind].zeroed += count;
    return leave(g, UP_OK);
}

/* Point handle `h` at the available cell `dst` of kind `k` and record the move. */
static void move_cell(up_grids *g, int k, int32_t h, int64_t dst) {
    grid *own = &g->kind[k];
    take(g, k, dst >> 6, UINT64_C(1) << (dst & 63));
    own->dirty[dst >> 6] &= ~(UINT64_C(1) << (dst & 63));
    record(g, UP_OP_MOVE, k, g->cell[k][h], dst);
    own->owner[dst] = h;
    g->cell[k][h] = (int32_t)dst;
    handle_changed(g, h);
    g->count[k].moved++;
    g->moved_bytes += own->stride;
}

int up_relocate(up_grids *g, int32_t handle, int32_t kind, int32_t cell) {
    if (!enter(g)) return UP_BUSY;
    int code = check_kind(g, kind);
    if (code == UP_OK) code = check_cells(g, &handle, 1, kind);
    if (code == UP_OK && g->handle[handle] & HANDLE_PINNED) code = fail(g, UP_PINNED, kind, 0, handle);
    if (code == UP_OK && (cell < 0 || cell >= g->kind[kind].cells || !up_bitset_test(&g->kind[kind].available, cell)))
        code = fail(g, UP_BAD_ARGUMENT, kind, 0, cell);
    if (code == UP_OK) code = log_reserve(g, 1);
    if (code != UP_OK) return leave(g, code);
    int64_t old = g->cell[kind][handle];
    move_cell(g, kind, handle, cell);
    drop(g, kind, old >> 6, UINT64_C(1) << (old & 63));
    return leave(g, UP_OK);
}

/* ---------------------------------------------------------------- construction */

static void grid_free(grid *k) {
    up_bitset_free(&k->available);
    up_bitset_free(&k->live);
    up_bitset_free(&k->partial);
    up_bitset_free(&k->pinned_windows);
    free(k->dirty);
    free(k->owner);
    free(k->window);
    free(k->open_children);
    free(k->pins);
    free(k->least);
    free(k->stale);
}

static void grids_free(grid *kinds, int count) {
    for (int k = 0; k < count; k++) grid_free(&kinds[k]);
}

/* An empty grid of kind `k`, all of it dirty. Returns 0 when memory ran out; the grid is then safe to free. */
static int grid_init(grid *own, const grid *parameters, int64_t arena_bytes, int64_t reserved_bytes) {
    memset(own, 0, sizeof *own);
    own->stride = parameters->stride;
    own->unit = parameters->unit;
    own->children = parameters->children;
    own->low_end = parameters->low_end;
    own->zero_policy = parameters->zero_policy;
    own->cells = arena_bytes / own->stride;
    own->windows = (arena_bytes + own->stride - 1) / own->stride;
    own->dead = (reserved_bytes + own->stride - 1) / own->stride;
    if (own->dead > own->cells) own->dead = own->cells;
    own->pin_free = own->num_available = own->cells - own->dead;
    if (!up_bitset_init(&own->available, own->windows) || !up_bitset_init(&own->live, own->windows)) return 0;
    up_bitset_set_range(&own->available, own->dead, own->cells);
    size_t words = (size_t)up_words(own->windows);
    own->dirty = malloc(words * sizeof *own->dirty);
    own->owner = calloc((size_t)own->windows + 1, sizeof *own->owner);
    if (!own->dirty || !own->owner) return 0;
    memset(own->dirty, 0xff, words * sizeof *own->dirty);
    if (!own->children) return 1;
    if (!up_bitset_init(&own->partial, own->windows) || !up_bitset_init(&own->pinned_windows, own->windows)) return 0;
    own->num_blocks = (int64_t)words;
    own->window = malloc(words * 64 * sizeof *own->window);
    own->open_children = calloc((size_t)own->windows + 1, sizeof *own->open_children);
    own->pins = calloc((size_t)own->windows + 1, sizeof *own->pins);
    own->least = calloc(words, sizeof *own->least);
    own->stale = calloc((size_t)up_words(own->num_blocks), sizeof *own->stale);
    if (!own->window || !own->open_children || !own->pins || !own->least || !own->stale) return 0;
    for (int64_t t = 0; t < (int64_t)words * 64; t++)
        own->window[t] = t >= own->windows ? UINT32_MAX : t < own->dead || t >= own->cells ? WINDOW_DEAD : 0;
    up_words_set_range(own->stale, 0, own->num_blocks ? own->num_blocks : 1);
    return 1;
}

/* Empty grids over `arena_bytes`, window counters included. Returns 0 when memory ran out; nothing is left to free. */
static int grids_init(up_grids *g, grid *kinds, const grid *parameters, int64_t arena_bytes) {
    for (int k = 0; k < g->num_kinds; k++)
        if (!grid_init(&kinds[k], &parameters[k], arena_bytes, g->reserved_bytes)) {
            grids_free(kinds, k + 1);
            return 0;
        }
    for (int k = 0; k + 1 < g->num_kinds; k++) {
        grid *own = &kinds[k];
        const grid *next = &kinds[k + 1];
        for (int64_t t = 0; t < own->windows; t++) {
            int64_t lo = t * own->children, hi = lo + own->children;
            if (lo < next->dead) lo = next->dead;
            if (hi > next->cells) hi = next->cells;
            own->open_children[t] = hi > lo ? (int32_t)(hi - lo) : 0;
            /* The pages of a window that can never be a cell cost nobody anything: it counts as partial from the start. */
            if (own->window[t] & WINDOW_DEAD && own->open_children[t]) up_bitset_set(&own->partial, t);
        }
    }
    return 1;
}

static int handles_resize(up_grids *g, int64_t max_handles) {
    size_t count = (size_t)max_handles + 1;
    /* Each array is grown in turn; a larger array than max_handles says does no harm when a later one fails. */
#define GROW(array)                                              \
    do {                                                         \
        void *grown = realloc((array), count * sizeof *(array)); \
        if (!grown) return 0;                                    \
        (array) = grown;                                         \
    } while (0)
    GROW(g->handle);
    GROW(g->pin_count);
    GROW(g->free_handles);
    GROW(g->changes);
#undef GROW
    int32_t **outgrown = realloc(g->outgrown, (size_t)(g->num_outgrown + UP_MAX_KINDS) * sizeof *outgrown);
    if (!outgrown) return 0;
    g->outgrown = outgrown;
    int32_t *cell[UP_MAX_KINDS] = {NULL};
    for (int k = 0; k < g->num_kinds; k++)
        if (!(cell[k] = malloc(count * sizeof *cell[k]))) {
            while (k-- > 0) free(cell[k]);
            return 0;
        }
    for (int k = 0; k < g->num_kinds; k++) {
        if (g->cell[k]) {
            memcpy(cell[k], g->cell[k], (size_t)(g->max_handles + 1) * sizeof *cell[k]);
            g->outgrown[g->num_outgrown++] = g->cell[k];
        }
        g->cell[k] = cell[k];
    }
    for (int64_t h = g->max_handles + 1; h <= max_handles; h++) {
        for (int k = 0; k < g->num_kinds; k++) g->cell[k][h] = -1;
        g->handle[h] = 0;
        g->pin_count[h] = 0;
    }
    g->max_handles = max_handles;
    return 1;
}

static int check_parameters(int64_t arena_bytes, int64_t reserved_bytes, const up_kind *kinds, int32_t num_kinds,
                            up_error *error) {
    *error = (up_error){UP_BAD_ARGUMENT, -1, -1, 0, 0, 0};
    error->value = num_kinds;
    if (num_kinds < 1 || num_kinds > UP_MAX_KINDS) return UP_BAD_ARGUMENT;
    error->value = arena_bytes;
    if (arena_bytes <= 0) return UP_BAD_ARGUMENT;
    error->value = reserved_bytes;
    if (reserved_bytes < 0 || reserved_bytes > arena_bytes) return UP_BAD_ARGUMENT;
    int64_t smallest = kinds[num_kinds - 1].stride_bytes;
    for (int32_t k = 0; k < num_kinds; k++) {
        int64_t stride = kinds[k].stride_bytes, next = k + 1 < num_kinds ? kinds[k + 1].stride_bytes : stride;
        error->kind = k;
        error->value = stride;
        if (stride <= 0 || next <= 0 || smallest <= 0 || stride % next) return UP_BAD_ARGUMENT;
        if (stride / smallest > MAX_UNITS || arena_bytes / stride >= INT32_MAX) return UP_BAD_ARGUMENT;
        error->value = kinds[k].zero_policy;
        if (kinds[k].zero_policy < UP_ZERO_NEVER || kinds[k].zero_policy > UP_ZERO_ALWAYS) return UP_BAD_ARGUMENT;
        error->value = kinds[k].low_end;
        if (kinds[k].low_end != 0 && kinds[k].low_end != 1) return UP_BAD_ARGUMENT;
    }
    error->kind = num_kinds - 1;
    error->value = reserved_bytes;
    if (reserved_bytes % smallest) return UP_BAD_ARGUMENT;
    error->code = UP_OK;
    return UP_OK;
}

int up_create(int64_t arena_bytes, int64_t reserved_bytes, const up_kind *kinds, int32_t num_kinds,
              uint64_t layout_digest, up_grids **out, up_error *error) {
    *out = NULL;
    int code = check_parameters(arena_bytes, reserved_bytes, kinds, num_kinds, error);
    if (code != UP_OK) return code;
    up_grids *g = calloc(1, sizeof *g);
    grid parameters[UP_MAX_KINDS];
    memset(parameters, 0, sizeof parameters);
    *error = (up_error){UP_NO_MEMORY, -1, -1, arena_bytes, 0, 0};
    if (!g) return UP_NO_MEMORY;
    atomic_init(&g->busy, 0);
    g->num_kinds = num_kinds;
    g->arena_bytes = g->arena_bytes_sealed = arena_bytes;
    g->reserved_bytes = reserved_bytes;
    g->layout_digest = layout_digest;
    g->level_base = 1;
    for (int k = 0; k < num_kinds; k++) {
        parameters[k].stride = kinds[k].stride_bytes;
        parameters[k].unit = kinds[k].stride_bytes / kinds[num_kinds - 1].stride_bytes;
        parameters[k].children = k + 1 < num_kinds ? kinds[k].stride_bytes / kinds[k + 1].stride_bytes : 0;
        parameters[k].low_end = k == 0 ? 1 : kinds[k].low_end;
        parameters[k].zero_policy = kinds[k].zero_policy;
        for (int j = k; j < num_kinds; j++) {
            g->ratio[k][j] = kinds[k].stride_bytes / kinds[j].stride_bytes;
            g->reciprocal[k][j] = g->ratio[k][j] == 1 ? 0 : UINT64_MAX / (uint64_t)g->ratio[k][j] + 1;
        }
    }
    g->max_handles = -1; /* so that entry 0, the null handle, is initialised too */
    int made = grids_init(g, g->kind, parameters, arena_bytes);
    if (!made || !handles_resize(g, g->kind[num_kinds - 1].cells)) {
        if (!made) memset(g->kind, 0, sizeof g->kind);
        up_destroy(g);
        return UP_NO_MEMORY;
    }
    *error = (up_error){UP_OK, -1, -1, 0, 0, 0};
    *out = g;
    return UP_OK;
}

void up_destroy(up_grids *g) {
    if (!g) return;
    grids_free(g->kind, g->num_kinds);
    for (int k = 0; k < g->num_kinds; k++) free(g->cell[k]);
    for (int64_t i = 0; i < g->num_outgrown; i++) free(g->outgrown[i]);
    free(g->outgrown);
    free(g->handle);
    free(g->pin_count);
    free(g->free_handles);
    free(g->changes);
    free(g->log);
    free(g->wrote);
    free(g->read);
    free(g->plan);
    free(g);
}

/* ---------------------------------------------------------------- resize */

/* Copy the dirty bits of the cells that both grids have; what is new stays dirty. */
static void copy_dirty(grid *to, const grid *from) {
    int64_t common = to->cells < from->cells ? to->cells : from->cells;
    for (int64_t w = 0; w << 6 < common; w++) {
        uint64_t inside = common - (w << 6) < 64 ? up_bits_between(0, (int)(common - (w << 6))) : ~UINT64_C(0);
        to->dirty[w] = (from->dirty[w] & inside) | (to->dirty[w] & ~inside);
    }
}

/* The kind whose first cell past the new end is live and begins below that end; -1 when none does. Live cells are
 * disjoint, so there is at most one. */
static int straddler(const up_grids *g, const grid *old) {
    int64_t end = g->kind[g->num_kinds - 1].cells;
    for (int k = 0; k < g->num_kinds; k++) {
        int64_t c = g->kind[k].cells;
        if (c < old[k].cells && up_bitset_test(&old[k].live, c) && c * old[k].unit < end) return k;
    }
    return -1;
}

/* Take (hold 1) or drop (0) the cells of the new grids that the straddling cell covers: its bytes there are still to be
 * read. They are taken as the largest cells that fit, so that none lies in a window that could be opened. */
static void hold_below(up_grids *g, const grid *old, int straddling, int hold) {
    int64_t end = g->kind[g->num_kinds - 1].cells, at = g->kind[straddling].cells * old[straddling].unit;
    for (int j = straddling + 1; j < g->num_kinds; j++)
        for (; at + g->kind[j].unit <= end; at += g->kind[j].unit) {
            int64_t c = at / g->kind[j].unit;
            if (hold)
                take(g, j, c >> 6, UINT64_C(1) << (c & 63));
            else
                drop(g, j, c >> 6, UINT64_C(1) << (c & 63));
        }
}

/* Move the cell of handle `h`, which lies past the new end, to where placement wants it. */
static void displace(up_grids *g, int k, int32_t h) {
    int64_t w;
    uint64_t mask;
    while (!pick(g, k, 1, 0, &w, &mask)) open_window(g, k);
    move_cell(g, k, h, w << 6 | up_lowest(mask));
}

static int resize(up_grids *g, int64_t arena_bytes) {
    up_kind kinds[UP_MAX_KINDS] = {{0, 0, 0}};
    grid old[UP_MAX_KINDS];
    grid new_kinds[UP_MAX_KINDS];
    int64_t displaced[UP_MAX_KINDS] = {0}, before = g->moved_bytes, need, have;
    int failed, last = g->num_kinds - 1;
    up_error error;
    if (g->resized) return fail(g, UP_BAD_ARGUMENT, -1, 1, arena_bytes); /* one a step: a plan has one before and after */
    for (int k = 0; k <= last; k++)
        kinds[k] = (up_kind){g->kind[k].stride, g->kind[k].low_end, g->kind[k].zero_policy};
    if (check_parameters(arena_bytes, g->reserved_bytes, kinds, g->num_kinds, &error) != UP_OK)
        return fail(g, UP_BAD_ARGUMENT, -1, -1, arena_bytes);
    int64_t count = 0;
    for (int k = 0; k <= last; k++)
        for (int64_t c = arena_bytes / g->kind[k].stride; c < g->kind[k].cells; c++)
            if (up_bitset_test(&g->kind[k].live, c)) {
                if (g->handle[g->kind[k].owner[c]] & HANDLE_PINNED)
                    return fail(g, UP_PINNED, k, -1, g->kind[k].owner[c]);
                displaced[k]++;
                count += 1 + most_moves(g, k);
            }
    int code = log_reserve(g, count);
    if (code != UP_OK) return code;
    if (!grids_init(g, new_kinds, g->kind, arena_bytes)) return fail(g, UP_NO_MEMORY, -1, -1, arena_bytes);
    if (new_kinds[last].cells > g->max_handles && !handles_resize(g, new_kinds[last].cells)) {
        grids_free(new_kinds, g->num_kinds);
        return fail(g, UP_NO_MEMORY, -1, -1, arena_bytes);
    }
    memcpy(old, g->kind, sizeof old);
    memcpy(g->kind, new_kinds, sizeof g->kind);
    for (int k = 0; k <= last; k++)
        for (int64_t c = up_bitset_at_or_above(&old[k].live, 0); c >= 0 && c < g->kind[k].cells;
             c = up_bitset_at_or_above(&old[k].live, c + 1)) {
            take(g, k, c >> 6, UINT64_C(1) << (c & 63));
            g->kind[k].owner[c] = old[k].owner[c];
        }
    for (int64_t h = 1; h <= g->fresh; h++)
        if (g->handle[h] & HANDLE_PINNED) pin_cells(g, (int32_t)h, 1);
    int fit = fits(g, displaced, 1, 1, &failed, &need, &have);
    int straddling = straddler(g, old);
    int64_t straddles[UP_MAX_KINDS] = {0};
    if (fit && straddling >= 0) {
        straddles[straddling] = 1;
        hold_below(g, old, straddling, 1);
        fit = fits(g, straddles, 1, 0, &failed, &need, &have);
    }
    if (!fit) {
        grids_free(g->kind, g->num_kinds);
        memcpy(g->kind, old, sizeof g->kind);
        return no_capacity(g, failed, need, have);
    }
    for (int k = 0; k <= last; k++) copy_dirty(&g->kind[k], &old[k]);
    if (straddling >= 0) {
        displace(g, straddling, old[straddling].owner[g->kind[straddling].cells]);
        hold_below(g, old, straddling, 0);
    }
    for (int k = 0; k <= last; k++)
        for (int64_t c = up_bitset_at_or_above(&old[k].live, g->kind[k].cells + (k == straddling)); c >= 0;
             c = up_bitset_at_or_above(&old[k].live, c + 1))
            displace(g, k, old[k].owner[c]);
    grids_free(old, g->num_kinds);
    g->arena_bytes = arena_bytes;
    g->resized = 1;
    call_moved(g, before);
    return UP_OK;
}

int up_resize(up_grids *g, int64_t arena_bytes) {
    if (!enter(g)) return UP_BUSY;
    return leave(g, arena_bytes == g->arena_bytes ? UP_OK : resize(g, arena_bytes));
}

/* ---------------------------------------------------------------- seal */

/* Room in the schedule for every smallest cell that an operation may name. */
static int schedule_reserve(up_grids *g) {
    int64_t bytes = g->arena_bytes > g->arena_bytes_sealed ? g->arena_bytes : g->arena_bytes_sealed;
    int64_t cells = bytes / g->kind[g->num_kinds - 1].stride;
    if (cells > g->schedule_cells || g->level_base > UINT32_MAX - (uint32_t)g->num_operations - 2) {
        uint32_t *wrote = calloc((size_t)cells, sizeof *wrote), *read = calloc((size_t)cells, sizeof *read);
        if (!wrote || !read) {
            free(wrote);
            free(read);
            return fail(g, UP_NO_MEMORY, -1, -1, cells);
        }
        free(g->wrote);
        free(g->read);
        g->wrote = wrote;
        g->read = read;
        g->schedule_cells = cells;
        g->level_base = 1;
    }
    return UP_OK;
}

/* Put each operation on the first level after everything it depends on: a read after the write it needs, a write after
 * every earlier read and write of its bytes. Operations of one level then satisfy I12. Returns the number of levels. */
static int32_t schedule(up_grids *g, up_plan_operation *out) {
    uint32_t base = g->level_base, top = base;
    for (int64_t n = 0; n < g->num_operations; n++) {
        operation op = g->log[n];
        int64_t unit = g->kind[op.code >> 8].unit, src = op.src * unit, dst = op.dst * unit;
        int reads = (op.code & 255) != UP_OP_ZERO;
        uint32_t level = base;
        for (int64_t i = 0; i < unit; i++) {
            if (reads && g->wrote[src + i] >= level) level = g->wrote[src + i] + 1;
            if (g->wrote[dst + i] >= level) level = g->wrote[dst + i] + 1;
            if (g->read[dst + i] >= level) level = g->read[dst + i] + 1;
        }
        for (int64_t i = 0; i < unit; i++) {
            g->wrote[dst + i] = level;
            if (reads && g->read[src + i] < level) g->read[src + i] = level;
        }
        if (level >= top) top = level + 1;
        out[n] = (up_plan_operation){(int32_t)(level - base), op.code, op.src, op.dst};
    }
    g->level_base = top;
    return (int32_t)(top - base);
}

/* Stable counting sort of the operations by phase, and inside a phase by code, so that a launch takes one run. */
static void sort_operations(const up_plan_operation *in, up_plan_operation *out, int64_t count, int64_t *start,
                            int64_t num_keys) {
    memset(start, 0, (size_t)(num_keys + 1) * sizeof *start);
#define KEY(op) ((int64_t)(op).phase * (3 * UP_MAX_KINDS) + ((op).code & 255) * UP_MAX_KINDS + ((op).code >> 8))
    for (int64_t i = 0; i < count; i++) start[KEY(in[i]) + 1]++;
    for (int64_t i = 0; i < num_keys; i++) start[i + 1] += start[i];
    for (int64_t i = 0; i < count; i++) out[start[KEY(in[i])]++] = in[i];
#undef KEY
}

static int seal(up_grids *g, int64_t step, const uint8_t **data, int64_t *size) {
    *data = NULL;
    *size = 0;
    if (!g->num_operations && !g->num_changes && !g->resized) return UP_OK;
    int64_t operations = g->num_operations * (int64_t)sizeof(up_plan_operation);
    int64_t head = (int64_t)sizeof(up_plan_header) + 8 * g->num_kinds;
    int64_t total = head + operations + 4 * g->num_changes * (1 + g->num_kinds);
    int64_t keys = (g->num_operations + 1) * 3 * UP_MAX_KINDS; /* at most one phase an operation */
    int64_t scratch = operations + (keys + 1) * 8;
    int code = schedule_reserve(g);
    if (code != UP_OK) return code;
    if (total + scratch + 8 > g->plan_capacity) {
        uint8_t *plan = realloc(g->plan, (size_t)(total + scratch + 8) * 2);
        if (!plan) return fail(g, UP_NO_MEMORY, -1, -1, total);
        g->plan = plan;
        g->plan_capacity = (total + scratch + 8) * 2;
    }
    up_plan_operation *unsorted = (up_plan_operation *)(g->plan + ((total + 7) & ~INT64_C(7)));
    int64_t *start = (int64_t *)((uint8_t *)unsorted + operations);
    int32_t phases = g->num_operations ? schedule(g, unsorted) : 0;
    sort_operations(unsorted, (up_plan_operation *)(g->plan + head), g->num_operations, start,
                    (int64_t)phases * 3 * UP_MAX_KINDS);
    up_plan_header header = {.magic = UP_PLAN_MAGIC,
                             .version = UP_PLAN_VERSION,
                             .layout_digest = g->layout_digest,
                             .sequence = g->sequence,
                             .step = step,
                             .arena_bytes_before = g->arena_bytes_sealed,
                             .arena_bytes_after = g->arena_bytes,
                             .num_kinds = g->num_kinds,
                             .num_operations = (int32_t)g->num_operations,
                             .num_changes = (int32_t)g->num_changes,
                             .num_phases = phases,
                             .max_handles = g->max_handles,
                             .chain = g->chain,
                             .total_bytes = total};
    memcpy(g->plan, &header, sizeof header);
    for (int k = 0; k < g->num_kinds; k++) memcpy(g->plan + sizeof header + 8 * k, &g->kind[k].stride, 8);
    int32_t *change = (int32_t *)(g->plan + head + operations);
    for (int64_t n = 0; n < g->num_changes; n++) {
        int32_t h = g->changes[n];
        *change++ = h;
        for (int k = 0; k < g->num_kinds; k++) *change++ = g->cell[k][h];
        g->handle[h] &= ~HANDLE_CHANGED;
    }
    up_plan_finish(g->plan, total);
    g->chain = up_hash(g->chain, g->plan, total);
    g->sequence++;
    g->num_operations = g->num_changes = 0;
    g->arena_bytes_sealed = g->arena_bytes;
    g->resized = 0;
    *data = g->plan;
    *size = total;
    return UP_OK;
}

int up_seal(up_grids *g, int64_t step, const uint8_t **data, int64_t *size) {
    if (!enter(g)) return UP_BUSY;
    return leave(g, seal(g, step, data, size));
}

/* ---------------------------------------------------------------- looking */

const int32_t *up_cells(const up_grids *g, int32_t kind) {
    return kind >= 0 && kind < g->num_kinds ? g->cell[kind] : NULL;
}

int up_generation(up_grids *g, int32_t handle, int64_t *generation) {
    if (!enter(g)) return UP_BUSY;
    if (handle < 1 || handle > g->max_handles) return leave(g, fail(g, UP_BAD_HANDLE, -1, 0, handle));
    *generation = g->handle[handle] >> HANDLE_GENERATION_SHIFT;
    return leave(g, UP_OK);
}

int up_is_live(up_grids *g, int32_t handle) {
    if (!enter(g)) return UP_BUSY;
    int live = handle >= 1 && handle <= g->max_handles && g->handle[handle] & HANDLE_KINDS;
    return leave(g, live);
}

int up_free_extents(up_grids *g, int64_t *pairs, int64_t capacity, int64_t *count) {
    if (!enter(g)) return UP_BUSY;
    int64_t next[UP_MAX_KINDS], at = g->reserved_bytes, found = 0;
    for (int k = 0; k < g->num_kinds; k++) next[k] = up_bitset_first(&g->kind[k].live);
    for (;;) {
        int first = -1;
        int64_t offset = g->arena_bytes;
        for (int k = 0; k < g->num_kinds; k++)
            if (next[k] >= 0 && next[k] * g->kind[k].stride < offset) {
                first = k;
                offset = next[k] * g->kind[k].stride;
            }
        if (offset > at) {
            if (found < capacity) {
                pairs[2 * found] = at;
                pairs[2 * found + 1] = offset - at;
            }
            found++;
        }
        if (first < 0) break;
        at = offset + g->kind[first].stride;
        next[first] = up_bitset_at_or_above(&g->kind[first].live, next[first] + 1);
    }
    *count = found;
    return leave(g, UP_OK);
}

int up_live_cells(up_grids *g, int32_t kind, int32_t *cells, int32_t *handles, int64_t capacity, int64_t *count) {
    if (!enter(g)) return UP_BUSY;
    int code = check_kind(g, kind);
    if (code != UP_OK) return leave(g, code);
    const grid *own = &g->kind[kind];
    *count = 0;
    for (int64_t c = up_bitset_first(&own->live); c >= 0; c = up_bitset_at_or_above(&own->live, c + 1)) {
        if (*count < capacity) {
            cells[*count] = (int32_t)c;
            handles[*count] = own->owner[c];
        }
        ++*count;
    }
    return leave(g, UP_OK);
}

int up_get_stats(up_grids *g, up_stats *out) {
    if (!enter(g)) return UP_BUSY;
    const grid *smallest = &g->kind[g->num_kinds - 1];
    memset(out, 0, sizeof *out);
    out->arena_bytes = g->arena_bytes;
    out->reserved_bytes = g->reserved_bytes;
    out->tail_bytes = g->arena_bytes - smallest->cells * smallest->stride;
    out->live_handles = g->num_live_handles;
    out->max_handles = g->max_handles;
    out->moved_bytes = g->moved_bytes;
    out->worst_call_bytes = g->worst_call_bytes;
    out->refusals = g->refusals;
    out->sequence = (int64_t)g->sequence;
    out->num_kinds = g->num_kinds;
    out->unsealed_operations = (int32_t)g->num_operations;
    for (int k = 0; k < g->num_kinds; k++) {
        const grid *own = &g->kind[k];
        const counters *n = &g->count[k];
        int64_t now = placeable(g, k, 0);
        out->kinds[k] = (up_kind_stats){own->cells - own->dead, own->num_live, own->num_pinned, own->num_available,
                                        own->pin_free, n->reserved, now, placeable(g, k, 1) - now, n->evacuations,
                                        n->moved, n->allocated, n->zeroed, n->worst_window_bytes};
        out->live_bytes += own->num_live * own->stride;
        out->allocated_bytes += n->allocated * own->stride;
    }
    out->free_bytes = g->arena_bytes - g->reserved_bytes - out->live_bytes;
    return leave(g, UP_OK);
}

int up_digest(up_grids *g, uint64_t *out) {
    if (!enter(g)) return UP_BUSY;
    int64_t head[] = {g->num_kinds,        g->arena_bytes, g->reserved_bytes, (int64_t)g->layout_digest, g->fresh,
                      (int64_t)g->sequence, g->num_free,    g->num_changes,    g->num_operations,         g->resized};
    size_t seen = (size_t)g->fresh + 1;
    uint64_t h = up_hash(g->chain, head, sizeof head);
    h = up_hash(h, g->handle, (int64_t)(seen * sizeof *g->handle));
    h = up_hash(h, g->pin_count, (int64_t)(seen * sizeof *g->pin_count));
    h = up_hash(h, g->free_handles, g->num_free * (int64_t)sizeof *g->free_handles);
    h = up_hash(h, g->changes, g->num_changes * (int64_t)sizeof *g->changes);
    h = up_hash(h, g->log, g->num_operations * (int64_t)sizeof *g->log);
    for (int k = 0; k < g->num_kinds; k++) {
        h = up_hash(h, g->cell[k], (int64_t)(seen * sizeof *g->cell[k]));
        h = up_hash(h, g->kind[k].dirty, up_words(g->kind[k].windows) * 8);
        h = up_hash(h, g->kind[k].available.level[0], up_words(g->kind[k].windows) * 8);
        h = up_hash(h, &g->count[k].reserved, sizeof g->count[k].reserved);
    }
    *out = h;
    return leave(g, UP_OK);
}

/* ---------------------------------------------------------------- validate */

/* Every upper-level bit says whether its word below is zero, and nothing is set past the end. */
static int bitset_sound(const up_bitset *b) {
    int64_t size = b->size;
    for (int l = 0; l < b->levels; l++) {
        int64_t words = up_words(size);
        if (size & 63 && b->level[l][words - 1] & up_bits_between((int)(size & 63), 64)) return 0;
        if (l + 1 < b->levels)
            for (int64_t w = 0; w < words; w++)
                if ((b->level[l][w] != 0) != (b->level[l + 1][w >> 6] >> (w & 63) & 1)) return 0;
        size = words;
    }
    return 1;
}

/* taken[i] becomes the number of smallest cells below i that are live or reserved. Returns a broken invariant or 0. */
static int recount_bytes(const up_grids *g, int32_t *taken) {
    const grid *smallest = &g->kind[g->num_kinds - 1];
    int64_t cells = smallest->cells, used = 0;
    memset(taken, 0, (size_t)(cells + 1) * sizeof *taken);
    for (int64_t i = 0; i < smallest->dead; i++) taken[i + 1] = 1;
    for (int k = 0; k < g->num_kinds; k++) {
        const grid *own = &g->kind[k];
        int64_t live = 0;
        for (int64_t c = up_bitset_first(&own->live); c >= 0; c = up_bitset_at_or_above(&own->live, c + 1), live++)
            for (int64_t i = c * own->unit; i < (c + 1) * own->unit; i++) {
                if (i >= cells || taken[i + 1]) return 1;
                taken[i + 1] = 1;
            }
        if (live != own->num_live) return 13;
        used += live * own->stride;
    }
    for (int64_t i = 0; i < cells; i++) taken[i + 1] += taken[i];
    int64_t tail = g->arena_bytes - cells * smallest->stride;
    int64_t free_bytes = (cells - taken[cells]) * smallest->stride;
    return used + free_bytes + smallest->dead * smallest->stride + tail == g->arena_bytes ? 0 : 3;
}

static int check_windows(const up_grids *g, int k, const int32_t *taken) {
    const grid *own = &g->kind[k], *smallest = &g->kind[g->num_kinds - 1];
    int64_t next_unit = own->unit / own->children;
    for (int64_t t = 0; t < own->windows; t++) {
        int64_t lo = t * own->unit, hi = lo + own->unit < smallest->cells ? lo + own->unit : smallest->cells;
        int64_t inside_dead = hi < smallest->dead ? hi - lo : lo < smallest->dead ? smallest->dead - lo : 0;
        if (lo > hi) lo = hi;
        int64_t count = taken[hi] - taken[lo] - (inside_dead > 0 ? inside_dead : 0);
        uint32_t word = own->window[t];
        int covered = 0; /* its own cell or a larger one is live */
        for (int i = 0; i <= k; i++) {
            int64_t around = window_of(g, i, k, t);
            if (around < g->kind[i].cells && up_bitset_test(&g->kind[i].live, around)) covered = 1;
        }
        int dead = t < own->dead || t >= own->cells;
        if (word & WINDOW_HELD || covered != !!(word & WINDOW_LIVE) || dead != !!(word & WINDOW_DEAD)) return 13;
        if ((word & WINDOW_COUNT) != (covered ? 0 : (uint32_t)count)) return 13;
        if ((own->pins[t] > 0) != !!(word & WINDOW_PINNED) ||
            (own->pins[t] > 0) != up_bitset_test(&own->pinned_windows, t))
            return 13;
        if (covered) {
            if (up_bitset_test(&own->partial, t)) return 13;
            continue;
        }
        int32_t open = 0;
        for (int64_t c = t * own->children; c < (t + 1) * own->children && c < g->kind[k + 1].cells; c++)
            open += taken[(c + 1) * next_unit] == taken[c * next_unit];
        if (open != own->open_children[t]) return 13;
        int partial = open > 0 && (count > 0 || dead);
        if (partial != up_bitset_test(&own->partial, t)) return 13;
    }
    for (int64_t b = 0; b < own->num_blocks; b++) {
        uint32_t least = UINT32_MAX;
        for (int i = 0; i < 64; i++) least = own->window[b << 6 | i] < least ? own->window[b << 6 | i] : least;
        if (!(own->stale[b >> 6] >> (b & 63) & 1) && own->least[b] != least) return 13;
    }
    return bitset_sound(&own->partial) && bitset_sound(&own->pinned_windows) ? 0 : 13;
}

static int check_handles(const up_grids *g) {
    int64_t live_handles = 0, cells = 0, dead_handles = 0;
    for (int64_t h = 0; h <= g->max_handles; h++) {
        uint32_t word = g->handle[h];
        if (word & HANDLE_MARKED || (h == 0 && word & HANDLE_KINDS)) return 4;
        if (h > g->fresh && word) return 4;
        if (!!(word & HANDLE_PINNED) != (g->pin_count[h] > 0)) return 7;
        live_handles += (word & HANDLE_KINDS) != 0;
        dead_handles += h >= 1 && h <= g->fresh && !(word & HANDLE_KINDS);
        for (int k = 0; k < g->num_kinds; k++) {
            int32_t c = g->cell[k][h];
            if ((c != -1) != (int)(word >> k & 1) || c < -1 || c >= g->kind[k].cells) return 4;
            if (c >= 0 && (!up_bitset_test(&g->kind[k].live, c) || g->kind[k].owner[c] != h)) return 4;
            cells += c >= 0;
        }
    }
    for (int k = 0; k < g->num_kinds; k++) cells -= g->kind[k].num_live;
    if (cells || live_handles != g->num_live_handles || dead_handles != g->num_free) return 4;
    for (int64_t i = 0; i < g->num_free; i++) {
        int32_t h = g->free_handles[i];
        if (h < 1 || h > g->fresh || g->handle[h] & HANDLE_KINDS) return 4;
    }
    return 0;
}

/* pins[i] becomes the number of smallest cells below i that belong to pinned handles. */
static void recount_pins(const up_grids *g, int32_t *pins) {
    int64_t cells = g->kind[g->num_kinds - 1].cells;
    memset(pins, 0, (size_t)(cells + 1) * sizeof *pins);
    for (int64_t h = 1; h <= g->fresh; h++)
        for (int k = 0; k < g->num_kinds && g->handle[h] & HANDLE_PINNED; k++)
            for (int64_t i = 0; g->cell[k][h] >= 0 && i < g->kind[k].unit; i++)
                pins[g->cell[k][h] * g->kind[k].unit + i + 1] = 1;
    for (int64_t i = 0; i < cells; i++) pins[i + 1] += pins[i];
}

static int validate(const up_grids *g) {
    static const int64_t nothing[UP_MAX_KINDS];
    int64_t cells = g->kind[g->num_kinds - 1].cells, need, have;
    int kind, broken = 0;
    int32_t *taken = malloc((size_t)(cells + 1) * sizeof *taken), *pins = malloc((size_t)(cells + 1) * sizeof *pins);
    if (!taken || !pins) broken = UP_NO_MEMORY;
    if (!broken) broken = recount_bytes(g, taken);
    if (!broken) recount_pins(g, pins);
    for (int k = 0; k < g->num_kinds && !broken; k++) {
        const grid *own = &g->kind[k];
        int64_t available = 0, pin_free = 0;
        for (int64_t c = 0; c < own->windows && !broken; c++) {
            int whole = c >= own->dead && c < own->cells;
            int is_free = whole && taken[(c + 1) * own->unit] == taken[c * own->unit];
            if (is_free != up_bitset_test(&own->available, c)) broken = 2;
            available += is_free;
            pin_free += whole && pins[(c + 1) * own->unit] == pins[c * own->unit];
        }
        if (!broken && (available != own->num_available || pin_free != own->pin_free)) broken = 13;
        if (!broken && (!bitset_sound(&own->available) || !bitset_sound(&own->live))) broken = 13;
        if (!broken && own->children) broken = check_windows(g, k, taken);
    }
    if (!broken) broken = check_handles(g);
    if (!broken && !fits(g, nothing, 1, 1, &kind, &need, &have)) broken = 11;
    free(taken);
    free(pins);
    return broken;
}

int up_validate(up_grids *g) {
    if (!enter(g)) return UP_BUSY;
    return leave(g, validate(g));
}

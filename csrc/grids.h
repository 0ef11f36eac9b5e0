/* grids.h: nested typed grids over one byte range.
 *
 * WHAT IT MANAGES
 *   An arena of `arena_bytes` bytes and up to UP_MAX_KINDS kinds of cell. Cell i of kind k is the byte range
 *   [i * stride_k, (i + 1) * stride_k). Every grid starts at byte 0 and spans the whole arena. Strides form a
 *   divisibility chain, largest first, so a cell of a larger kind (a *window*) is exactly q cells of a smaller one:
 *
 *       kind 0 (states)  |               0               |               1               |  tail
 *       kind 1 (windows) |       0       |       1       |       2       |       3       |   4
 *       kind 2 (pages)   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10| 11| 12| 13| 14| 15| 16| 17|
 *
 *   No byte is ever touched here: this is the planner. It decides which cell a handle owns and writes down, in program
 *   order, the moves, copies and zeroes that make the bytes agree (the step plan).
 *
 * WORDS
 *   live       a cell that a handle owns
 *   available  a cell that no live or reserved byte overlaps
 *   handle     an index in 1..max_handles that owns at most one cell of each kind; 0 is null
 *   evacuate   move the live cells out of one window so that the window becomes available
 *   pin        a handle whose cells must neither move nor be freed now
 *
 * INVARIANTS (up_validate returns the number of the first one that is broken)
 *   I1   live cells of all kinds are pairwise byte-disjoint, inside the arena and outside the reserved bytes
 *   I2   available <=> no live or reserved byte overlaps
 *   I3   live + free + reserved + padding == arena_bytes; free extents are disjoint and maximal
 *   I4   handle -> cell and cell -> handle are inverse on live cells; a dead handle maps to -1 in every kind
 *   I5   a call that fails leaves every structure bit-identical
 *   I6   a handle names the same content until it is freed, across any number of moves
 *   I7   a pinned cell never moves
 *   I8   bytes moved per opened window of kind k: less than stride_k with one smaller kind, less than 2 * stride_k with
 *        more; where free cells lie only in windows that pins or the null cell keep closed, at most stride_k times the
 *        number of smaller kinds
 *   I9   nothing moves while an available cell exists for each item
 *   I10  the same calls give the same handles, cells and plans on every machine
 *   I11  up_can_allocate says yes <=> up_allocate succeeds
 *   I12  within one phase of a plan destinations are disjoint from all sources and from each other
 *   I13  window counters equal a recount
 *
 * CAPACITY (exact). For kinds in order of decreasing stride let E_k be the number of k-cells that touch no pinned and no
 *   reserved byte, L_k the live unpinned k-cells, R_k the k-cells promised to reservations, n_k the demand:
 *       m_k = n_k + R_k + L_k + m_(k-1) * stride_(k-1) / stride_k
 *   The demand fits <=> m_k <= E_k for every k. Necessary: unpinned cells of the kinds up to k lie on disjoint pin-free
 *   k-cells. Sufficient: place largest first; each pin-free (k-1)-cell is made of pin-free k-cells.
 *
 * OWNERSHIP AND THREADS
 *   up_create returns an object that up_destroy frees. One call at a time: a second thread that enters while a call runs
 *   gets UP_BUSY and nothing happens. Different objects are independent. No clocks, no randomness, no I/O.
 *
 * UNITS
 *   bytes are int64; cells and handles are int32; counts are int64 in structs.
 *
 * ERRORS
 *   Every function returns UP_OK or a negative code and then, in up_last_error, what was wrong. Strong guarantee (I5).
 */
#ifndef UP_GRIDS_H
#define UP_GRIDS_H

#include <stdint.h>

#define UP_MAX_KINDS 6

enum {
    UP_OK = 0,
    UP_BUSY = -1,         /* another thread is inside a call on this object */
    UP_NO_MEMORY = -2,    /* host memory ran out */
    UP_BAD_ARGUMENT = -3, /* an argument is out of its range; detail: index, value */
    UP_NO_CAPACITY = -4,  /* the capacity formula says no; detail: kind, need, have */
    UP_BAD_HANDLE = -5,   /* null, negative or out of range; detail: index, handle */
    UP_DEAD_HANDLE = -6,  /* not allocated, or freed already; detail: index, handle */
    UP_DUPLICATE = -7,    /* the same handle twice in one batch; detail: index, handle */
    UP_PINNED = -8,       /* a pinned handle would have to move or be freed; detail: index, handle */
    UP_NO_CELL = -9,      /* the handle has no cell of that kind; detail: index, handle, kind */
    UP_HAS_CELL = -10,    /* the handle has a cell of that kind already; detail: index, handle, kind */
    UP_NOT_PINNED = -11,  /* unpin of a handle that is not pinned; detail: index, handle */
    UP_NOT_RESERVED = -12, /* more given back or committed than was reserved; detail: kind */
    UP_BAD_DEMAND = -13    /* the demand was compiled for another layout */
};

/* Flags of up_allocate. */
enum {
    UP_FORBID_MOVES = 1,      /* refuse instead of evacuating */
    UP_WILL_OVERWRITE = 2,    /* the caller writes every byte before any read: no zeroing is recorded */
    UP_WILL_PIN = 4,          /* take cells in windows that hold pinned cells already, where there are any */
    UP_FROM_RESERVATION = 8   /* the demand was reserved: take it out of the promise */
};

/* When a fresh cell of a kind has to be zeroed before use. */
enum { UP_ZERO_NEVER = 0, UP_ZERO_IF_DIRTY = 1, UP_ZERO_ALWAYS = 2 };

/* Operation codes in a step plan. */
enum { UP_OP_MOVE = 0, UP_OP_COPY = 1, UP_OP_ZERO = 2 };

typedef struct up_grids up_grids; /* opaque */

typedef struct {
    int64_t stride_bytes; /* > 0; kinds are given largest first, each a multiple of the next */
    int32_t low_end;      /* 1: take the lowest cells; 0: the highest. Kind 0 always takes the lowest */
    int32_t zero_policy;  /* UP_ZERO_* */
} up_kind;

/* One part of a joint demand: `count` handles, each with a cell of every kind in `kind_mask`. */
typedef struct {
    uint32_t kind_mask; /* bit k: a cell of kind k */
    int32_t count;      /* >= 0 */
} up_item;

/* A handle buffer and a demand that know their object. A call through cffi costs by the argument, so the calls made every
 * step take one of these and nothing else. */
typedef struct {
    up_grids *grids;
    int64_t capacity;
    int64_t length; /* written by up_allocate_demand */
    int32_t *data;
} up_handles;

typedef struct {
    up_grids *grids;
    int64_t total; /* handles: the sum of the items' counts */
    int32_t num_items;
    uint32_t flags; /* of up_allocate */
    up_item *items;
    up_handles *out;
} up_demand;

typedef struct {
    int32_t code;   /* the code returned */
    int32_t kind;   /* -1 when not about a kind */
    int64_t index;  /* position in the batch, -1 when none */
    int64_t value;  /* the offending handle, count or byte number */
    int64_t need;   /* UP_NO_CAPACITY: m_k, in cells of `kind` */
    int64_t have;   /* UP_NO_CAPACITY: E_k (available_k when moves are forbidden), in cells of `kind` */
} up_error;

typedef struct {
    int64_t cells;             /* whole cells of the kind that could ever be live (reserved ones not counted) */
    int64_t live;              /* live cells */
    int64_t pinned;            /* live cells of pinned handles */
    int64_t available;         /* cells that can be taken without a move */
    int64_t pin_free;          /* E_k */
    int64_t reserved;          /* R_k */
    int64_t placeable;         /* largest n that can be allocated of this kind alone */
    int64_t held_by_pins;      /* how much larger `placeable` would be without pins */
    int64_t evacuations;       /* windows of this kind opened */
    int64_t moved_cells;       /* cells of this kind moved */
    int64_t allocated_cells;   /* cells of this kind ever allocated */
    int64_t zeroed_cells;      /* cells of this kind zeroed */
    int64_t worst_window_bytes;/* most bytes moved to open one window of this kind */
} up_kind_stats;

typedef struct {
    int64_t arena_bytes;
    int64_t live_bytes;
    int64_t free_bytes;        /* arena - live - reserved; includes tails that no whole cell covers */
    int64_t reserved_bytes;    /* the null cell */
    int64_t tail_bytes;        /* bytes past the last whole cell of the smallest kind */
    int64_t live_handles;
    int64_t max_handles;
    int64_t moved_bytes;       /* by evacuation */
    int64_t allocated_bytes;   /* ever */
    int64_t worst_call_bytes;  /* most bytes moved inside one call */
    int64_t refusals;          /* allocate calls refused for capacity */
    int64_t sequence;          /* plans sealed so far */
    int32_t num_kinds;
    int32_t unsealed_operations;
    up_kind_stats kinds[UP_MAX_KINDS];
} up_stats;

/* Does nothing; the cost of a call, for benchmarks. */
int up_noop(void);

/* Make an object over `arena_bytes`. `reserved_bytes` at the low end (a multiple of every KV stride, or 0) are never
 * handed out. `max_handles` 0 means one per cell of the smallest kind. O(cells). */
int up_create(int64_t arena_bytes, int64_t reserved_bytes, const up_kind *kinds, int32_t num_kinds,
              uint64_t layout_digest, up_grids **out, up_error *error);
void up_destroy(up_grids *g);

/* The detail of the last call that failed. */
const up_error *up_last_error(const up_grids *g);

/* 1 when the joint demand fits by the capacity formula, 0 when not, < 0 on a bad demand. O(kinds + items). */
int up_can_allocate(up_grids *g, const up_item *items, int32_t num_items, uint32_t flags);

/* Bytes that must be freed (smallest kind's cells) before the demand fits; 0 when it fits. A lower bound when pins are
 * in the way. O(kinds + items). */
int up_shortfall(up_grids *g, const up_item *items, int32_t num_items, int64_t *bytes);

/* Allocate the joint demand, all or nothing. Handles are written to `handles` in item order. Cells are placed largest
 * kind first, then in item order. Evacuates only when no cell is available (I9). */
int up_allocate(up_grids *g, const up_item *items, int32_t num_items, uint32_t flags, int32_t *handles,
                int64_t handles_capacity);

/* Free every cell of each handle, all or nothing. O(count). */
int up_free(up_grids *g, const int32_t *handles, int64_t count);

/* The same three calls with one argument. */
int up_can_allocate_demand(const up_demand *demand);
int up_allocate_demand(up_demand *demand);
int up_free_handles(const up_handles *handles);

/* Give each handle a cell of `kind`. flags as up_allocate. */
int up_attach(up_grids *g, const int32_t *handles, int64_t count, int32_t kind, uint32_t flags);

/* Drop each handle's cell of `kind`. A handle that loses its last cell is dead. */
int up_detach(up_grids *g, const int32_t *handles, int64_t count, int32_t kind);

/* Promise counts[kind] cells of every kind; can_allocate counts them as taken. */
int up_reserve(up_grids *g, const int64_t *counts);
int up_unreserve(up_grids *g, const int64_t *counts);

/* Pin and unpin. Pins nest: at most 65,535 a handle. Refused (UP_NO_CAPACITY) when a reservation could not be kept. */
int up_pin(up_grids *g, const int32_t *handles, int64_t count);
int up_unpin(up_grids *g, const int32_t *handles, int64_t count);

/* Open windows until `count` cells of `kind` are available or the next one would take the bytes moved past `max_bytes`.
 * *available gets the cells available at the end, *moved the bytes moved. */
int up_prepare(up_grids *g, int32_t kind, int64_t count, int64_t max_bytes, int64_t *available, int64_t *moved);

/* Bytes that the next cell of `kind` would move: 0 when one is available, -1 when none can be opened. */
int up_next_open_cost(up_grids *g, int32_t kind, int64_t *bytes);

/* Record a copy of src[i]'s cell to dst[i]'s, or a zeroing, in program order with the moves. */
int up_copy(up_grids *g, const int32_t *src, const int32_t *dst, int64_t count, int32_t kind);
int up_zero(up_grids *g, const int32_t *handles, int64_t count, int32_t kind);

/* Change the arena's size, at most once a step. Shrinking moves what lies past the new end. Refused when that does not
 * fit, and when a live cell straddles the new end and cannot be carried out while its bytes below are still held (in a
 * full arena there is no room for such a swap). O(cells). */
int up_resize(up_grids *g, int64_t arena_bytes);

/* Move the cell of `handle` in `kind` to the available cell `cell` (tests, defragmenting by hand). */
int up_relocate(up_grids *g, int32_t handle, int32_t kind, int32_t cell);

/* Close the step: everything recorded since the last seal becomes one plan (format in plan.h). *data points into the
 * object and is valid until the next call. *size is 0 when nothing was recorded, and then the sequence stays. */
int up_seal(up_grids *g, int64_t step, const uint8_t **data, int64_t *size);

/* Host truth. A pointer can be read until up_destroy; after a resize that grew the arena it no longer changes. */
const int32_t *up_cells(const up_grids *g, int32_t kind); /* [max_handles + 1], -1: none */
int up_generation(up_grids *g, int32_t handle, int64_t *generation);
int up_is_live(up_grids *g, int32_t handle);

/* Free extents in increasing order as (offset, length) pairs; *count gets how many there are, also past `capacity`. */
int up_free_extents(up_grids *g, int64_t *pairs, int64_t capacity, int64_t *count);

/* Live cells of one kind in increasing order of cell; *count gets how many there are, also past `capacity`. */
int up_live_cells(up_grids *g, int32_t kind, int32_t *cells, int32_t *handles, int64_t capacity, int64_t *count);

int up_get_stats(up_grids *g, up_stats *out);

/* A hash of every decision so far: equal on two ranks <=> they made the same calls. O(handles + cells / 64). */
int up_digest(up_grids *g, uint64_t *out);

/* Walk everything. Returns 0, or the number of the first broken invariant. O(arena / smallest stride). */
int up_validate(up_grids *g);

#endif

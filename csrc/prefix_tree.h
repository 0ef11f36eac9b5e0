/* prefix_tree.h: a radix tree over token sequences whose nodes own the cells of one arena.
 *
 * WHAT IT MANAGES
 *   Which prefixes are cached, with which handles. A node's edge is a run of tokens and one handle per page of it; its end
 *   may carry a *checkpoint*: the slot of a recurrent state that is valid at exactly that depth. No cell is allocated or
 *   freed here and no byte is touched: handles go in, and those that the caller has to free come out.
 *
 *       root -- [ 1 2 3 4 | 5 6 7 8 ] -+- [ 9 9 9 9 ]* -- [ 7 7 )*      * a checkpoint
 *                page 0     page 1     +- [ 8 8 8 8 ]       tail: a partly filled page, always a leaf
 *
 * WORDS
 *   depth     tokens from the root to the end of a node
 *   tail      a leaf that is shorter than a page: one partly filled page that is never split and never shared
 *   unit      what is evicted at once: the state of a node with children; or a leaf with its state and the pages up to
 *             the next state, fork or lock above it
 *   dead      pages below the deepest state of their path: no hit can end there
 *   receipt   one lock: pages on the whole path, window pages of the nodes that its window touches, one node's state
 *   ghost     the key of a path that was evicted, with the hits it had earned and when it was last used
 *   grid      checkpoints of forks lie at its multiples; it is a multiple of the page size
 *
 * INVARIANTS (up_tree_validate returns the number of the first one that is broken)
 *   T1   links agree in both directions; a node's depth is its parent's depth plus its length; only roots are empty
 *   T2   every edge is a whole number of pages, except that of a tail, which is shorter than a page and a leaf
 *   T3   no two children of a node share their first page; no two tails of a node are equal
 *   T4   every child, and nothing else, is found through the child table
 *   T5   kv_locks(node) = receipts whose path holds it; window_locks likewise for the window; state_locks(node) =
 *        receipts that end in it and still hold its state
 *   T6   the counts of nodes, pages, states and of the locked ones equal a recount
 *   T7   every handle is positive; a node that is not a root owns one per page
 *   T8   path_key(node) is the key of its tokens from the root
 *
 * SPLITTING at a page boundary: the new upper node takes the pages and the locks on them, the lower one keeps its
 *   identity, its state and the lock on that:
 *       [ a b c d ]* -> [ a b ] -- [ c d ]*
 *
 * OWNERSHIP AND THREADS
 *   up_tree_create returns an object that up_tree_destroy frees. One call at a time: a second thread that enters gets
 *   UP_TREE_BUSY and nothing happens. Token buffers are read during the call only. No clocks, no randomness: `now` is
 *   the caller's count of requests, and equal calls give equal trees everywhere.
 *
 * UNITS
 *   Depths and lengths are tokens, below 2^31. `now`, uses and ages count requests. Handles are int32, 0 is none.
 *
 * COMPLEXITY
 *   match and insert read each token once and do O(1) work per node; a fork finds its child by a hash of the first page.
 *   Everything else is linear in the nodes of a path or of a unit. Nothing depends on the size of the tree.
 *
 * ERRORS
 *   Every function returns UP_TREE_OK or a negative code; a call that fails has changed nothing.
 *
 * SOURCES: the hash of a page is multilinear (Carter and Wegman 1979), so a prefix of it is a partial sum.
 */
#ifndef UP_PREFIX_TREE_H
#define UP_PREFIX_TREE_H

#include <stdint.h>

#define UP_TREE_AGE_BUCKETS 24

enum {
    UP_TREE_OK = 0,
    UP_TREE_BUSY = -40,         /* another thread is inside a call on this object */
    UP_TREE_NO_MEMORY = -41,    /* host memory ran out */
    UP_TREE_BAD_ARGUMENT = -42, /* an argument is out of its range */
    UP_TREE_BAD_TOKEN = -43,    /* a token is negative or needs more than 31 bits; up_tree_error_index says which */
    UP_TREE_BAD_HANDLE = -44,   /* a new page has no live handle; up_tree_error_index says which */
    UP_TREE_BAD_STATE = -49,    /* the state's slot is not live */
    UP_TREE_BAD_NODE = -45,     /* no such node, or it was removed meanwhile */
    UP_TREE_BAD_RECEIPT = -46,  /* never given out, or given back already */
    UP_TREE_LOCKED = -47,       /* the unit is locked */
    UP_TREE_NO_UNIT = -48       /* nothing can be evicted at this node */
};

/* Why a hit ends where it ends. */
enum {
    UP_HIT_COMPLETE = 0,      /* every token up to the limit */
    UP_HIT_UNKNOWN = 1,       /* the next page is not cached */
    UP_HIT_NO_STATE = 2,      /* pages go on, but no state was saved at a depth beyond the hit */
    UP_HIT_STATE_EVICTED = 3, /* a deeper state was saved and is gone */
    UP_HIT_NO_WINDOW = 4,     /* a deeper state is there, but window pages before it are gone */
    UP_HIT_LIMIT = 5          /* a deeper state is there, but past the limit */
};

/* Flags of a node. */
enum {
    UP_NODE_LIVE = 1,
    UP_NODE_ROOT = 2,
    UP_NODE_TAIL = 4,
    UP_NODE_TOMBSTONE = 8 /* had a state, has none */
};

/* Why a state was saved. */
enum {
    UP_ROLE_TAIL = 0,   /* the end of a prompt */
    UP_ROLE_BRANCH = 1, /* another path forks off here */
    UP_ROLE_FINAL = 2,  /* decoding: a later turn goes on from here */
    UP_ROLE_CHUNK = 3   /* only that a prefill chunk ended here */
};

typedef struct up_tree up_tree; /* opaque */

typedef struct {
    int32_t parent, first_child, next_sibling, previous_sibling; /* 0: none */
    int32_t num_children;
    int32_t num_tails; /* children that are tails */
    int32_t depth;     /* at its end */
    int32_t length;    /* tokens of its edge */
    int32_t state;     /* slot handle, 0: none */
    int32_t kv_locks, window_locks, state_locks;
    int32_t kv_use, state_use; /* when an insert last passed; when the state was last saved or consumed */
    int32_t hits;              /* earned by its state, kept after the state; also one each time that it is saved again */
    int32_t role;              /* UP_ROLE_* of its state */
    uint32_t flags;            /* UP_NODE_* */
    uint32_t generation;       /* how often this id was used */
    uint64_t path_key;         /* hash of every token from the root to its end */
    uint64_t tail_lengths;     /* bit (length - 1) % 64 of every tail that it ever had since it last had none */
    int32_t *tokens;           /* [length], then [pages] handles */
} up_node;

typedef struct {
    int64_t hit;       /* deepest depth where every kind agrees, at most the limit */
    int64_t full_hit;  /* depth to which pages are contiguous */
    int64_t branch;    /* where to save a state so that the next request of this kind hits deeper; -1: nowhere */
    int64_t seen;      /* depth to which the path is cached or a ghost; at least full_hit */
    int32_t reason;    /* UP_HIT_* */
    int32_t node;      /* where the hit ends (the root when it is 0) */
    uint32_t generation;
    int32_t state;     /* its slot, 0: none */
    int32_t tail_page; /* the partly filled page at the end of the hit, to be copied; 0: none */
    int32_t hits;      /* that the ghost or node at `branch` has earned */
    int32_t ages[UP_TREE_AGE_BUCKETS]; /* tokens seen before, by log2 of 1 + requests since */
} up_match;

typedef struct {
    int32_t node;          /* where the tokens end; the root when no whole page was kept */
    int32_t parent;        /* its parent */
    int32_t split;         /* the new upper half of a split node, 0: none */
    int32_t lower;         /* the lower half */
    int32_t parent_of_new; /* the node that got a new child, 0: none */
    int32_t removed;       /* a tail that was taken over and is gone, 0: none */
    int32_t state_adopted; /* 1: the node took the state */
    int32_t state_back;    /* a slot that the caller has to free, 0: none */
    int32_t state_replaced; /* the slot of the tail that was taken over, for the caller to free, 0: none */
    int32_t num_duplicates; /* page handles that the caller has to free */
    int64_t known;         /* tokens that were in the tree */
    int64_t depth;         /* of `node` */
    int64_t recovered;     /* pages that got their window part back */
} up_inserted;

typedef struct {
    int32_t node;
    int32_t top;     /* the uppermost node that goes with it; 0: only a state goes */
    int32_t parent;  /* of `top`, or of `node` */
    int32_t state;   /* slot, 0: none */
    int32_t num_pages;
    int32_t is_leaf;
    int32_t above;   /* depth of the nearest resident state above `node`, 0: none */
    int32_t depth;   /* of `node` */
    int32_t last_use; /* a leaf: the later of its pages' and its state's; else its state's */
    int32_t hits;
    int32_t role;
    int32_t state_use; /* when the state was last saved or consumed */
    int32_t num_children;
    int32_t changed; /* after an eviction: the node whose unit reaches further up now, 0: none; `parent` not counted */
    int32_t parent_is_root;
} up_unit;

typedef struct {
    int64_t nodes, roots, tails, pages, tokens, states, locked_pages, locked_states, window_locked_pages;
    int64_t receipts, ghosts, ghosts_dropped, splits, bytes; /* bytes of host memory, without the ghosts' */
} up_tree_stats;

/* Make a tree. `window` is the sliding window in tokens, 0 for none. With `needs_state` a hit ends only where a state
 * is; without, anywhere on a page boundary. `ghost_factor` ghosts per resident page are kept, between 1,024 and
 * `max_ghosts`; 0 keeps none. `grid` is a multiple of `page_size`. */
int up_tree_create(int32_t page_size, int32_t grid, int32_t window, int32_t needs_state, int32_t ghost_factor,
                   int64_t max_ghosts, up_tree **out);
void up_tree_destroy(up_tree *t);

/* Where the owner's tables are: cells[handle] >= 0 says that a handle has a page, a state, a window cell; a table may be
 * NULL. Insert refuses handles that have none; without tables it cannot tell. Valid until replaced. */
int up_tree_set_cells(up_tree *t, const int32_t *page_cells, const int32_t *state_cells, const int32_t *window_cells,
                      int64_t num_handles);

/* Make a root: namespaces with different roots share nothing. A root without children and locks can be dropped. */
int up_tree_new_root(up_tree *t, int32_t *root);
int up_tree_drop_root(up_tree *t, int32_t root);

/* All nodes by id. Valid until the next insert or root. */
const up_node *up_tree_nodes(const up_tree *t);
const up_tree_stats *up_tree_get_stats(up_tree *t);
int64_t up_tree_error_index(const up_tree *t);

/* Find the longest cached prefix of tokens[:limit]. Read-only. `wide` says that the tokens are int64 instead of int32.
 * A token that is negative or wider than 31 bits is an error when it is reached. `now` dates the ages. */
int up_tree_match(up_tree *t, int32_t root, const void *tokens, int64_t count, int32_t wide, int64_t limit, int32_t now,
                  up_match *out);

/* Write the page handles of the path to `node`, up to `depth`: whole pages, then the partly filled one if depth is a
 * tail's. `out` has room for ceil(depth / page_size). */
int up_tree_path(up_tree *t, int32_t node, uint32_t generation, int64_t depth, int32_t *out);

/* Insert tokens with one handle per page (the last page may be partly filled) and, optionally, the state at their end.
 * The tree takes the handles, except duplicates (up to one a page, written to `duplicates`) and the two states named in
 * `out`. A handle equal to the tree's own is no duplicate; 0 stands for a page that the tree must have. A partly filled
 * page is kept only with a state, where states are needed. A known page whose window part is gone is exchanged for the
 * incoming one if nobody holds it. A known tail that the tokens extend is taken over unless another receipt than `receipt`
 * locks it. `receipt` (0: none) moves from the path that it locks to the one that was inserted. Known tokens without a
 * state split nothing: `out->node` may then reach deeper than they do. `role` says why the state was saved. */
int up_tree_insert(up_tree *t, int32_t root, const void *tokens, int64_t count, int32_t wide, const int32_t *handles,
                   int64_t num_handles, int32_t state, int32_t role, int64_t receipt, int32_t now, int32_t *duplicates,
                   up_inserted *out);

/* Lock the path to `node`, the window before `depth` (inside that node), and its state. */
int up_tree_lock(up_tree *t, int32_t node, uint32_t generation, int64_t depth, int64_t *receipt);
int up_tree_unlock(up_tree *t, int64_t receipt);

/* Give back only the lock on the state, early: its copy is under way. Does nothing the second time. */
int up_tree_unlock_state(up_tree *t, int64_t receipt);

/* The state of `node` was consumed: count a hit and date it. */
int up_tree_consume(up_tree *t, int32_t node, int32_t now);

/* What would be evicted at `node`. UP_TREE_NO_UNIT or UP_TREE_LOCKED when nothing can. With `handles` (room for
 * `capacity`, else UP_TREE_BAD_ARGUMENT): the page handles, then the state's. */
int up_tree_unit(up_tree *t, int32_t node, up_unit *out, int32_t *handles, int64_t capacity);

/* Evict it. Its pages and its hits become ghosts. The nearest state above, if it was saved only at a chunk's end, now
 * stands in for the one that went: it takes over its role, hits and use. */
int up_tree_evict(up_tree *t, int32_t node, up_unit *out);

/* Take the state out of a node that one receipt holds and that has no children: *state is then the caller's. */
int up_tree_steal(up_tree *t, int64_t receipt, int32_t *state);

/* Handles in the node whose window part is there, unlocked and in no state's window; up to `capacity`. With `all`, also
 * those that a state's window needs. O(nodes within one window below). */
int up_tree_window_pages(up_tree *t, int32_t node, int32_t all, int32_t *handles, int64_t capacity, int64_t *count);

/* Hits that the path key's ghost carries, -1 when there is no ghost. */
int64_t up_tree_ghost_hits(up_tree *t, uint64_t path_key);

/* Walk everything. Returns 0 or the number of the first broken invariant. O(nodes + tokens + receipts * path). */
int up_tree_validate(up_tree *t);

#endif

/* prefix_tree.c: a radix tree whose nodes own handles. Words, invariants and units are in prefix_tree.h. */
#include "prefix_tree.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS (INT64_C(1) << 31)
#define MIN_GHOSTS 1024
#define RECEIPT_INDEX_BITS 32
#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

typedef struct {
    uint64_t key;
    int32_t node; /* 0: empty */
} child_entry;

typedef struct {
    uint64_t key; /* 0: empty */
    int64_t sequence;
    int32_t hits, use, had_state;
} ghost_entry;

typedef struct {
    uint64_t key;
    int64_t sequence;
} ghost_record;

typedef struct {
    int32_t node; /* 0: free */
    int32_t generation;
    int32_t window_top; /* nodes of the path that end beyond it hold the window lock */
    int32_t holds_state;
    int32_t next_free;
} receipt_entry;

struct up_tree {
    atomic_int busy;
    int32_t page, grid, window, needs_state;
    int64_t error_index;
    up_tree_stats stats;

    up_node *nodes; /* [capacity], 1..used were given out at least once */
    int32_t used, capacity, free_node; /* free nodes are linked through next_sibling */

    child_entry *children; /* open addressing, linear probing */
    uint64_t child_mask;

    receipt_entry *receipts;
    int32_t receipts_used, receipts_capacity, free_receipt;

    int32_t ghost_factor;
    int64_t max_ghosts, ghost_sequence;
    ghost_entry *ghosts; /* open addressing */
    uint64_t ghost_mask;
    ghost_record *ring; /* first in, first out; a record is stale when its ghost was renewed */
    int64_t ring_first, ring_count, ring_capacity;

    uint64_t *multiplier; /* [page] of the hash */
    const int32_t *page_cells, *state_cells, *window_cells; /* the owner's tables, NULL: unknown */
    int64_t num_handles;
};

/* ---------------------------------------------------------------- the guard */

static int enter(up_tree *t) { return !atomic_exchange_explicit(&t->busy, 1, memory_order_acquire); }
static int leave(up_tree *t, int code) {
    atomic_store_explicit(&t->busy, 0, memory_order_release);
    return code;
}
static int fail_at(up_tree *t, int code, int64_t index) {
    t->error_index = index;
    return code;
}

const up_node *up_tree_nodes(const up_tree *t) { return t->nodes; }
int64_t up_tree_error_index(const up_tree *t) { return t->error_index; }

/* ---------------------------------------------------------------- nodes */

static inline int64_t pages_of(const up_tree *t, const up_node *x) { return (x->length + t->page - 1) / t->page; }
static inline int32_t *handles_of(const up_node *x) { return x->tokens + x->length; }
static inline int32_t start_of(const up_node *x) { return x->depth - x->length; }

static inline int node_ok(const up_tree *t, int32_t node) {
    return node > 0 && node <= t->used && (t->nodes[node].flags & UP_NODE_LIVE);
}

/* Room for `extra` more nodes, so that what follows cannot fail half-way. */
static int reserve_nodes(up_tree *t, int32_t extra) {
    if (t->capacity - t->used > extra) return UP_TREE_OK;
    if (t->capacity > INT32_MAX / 2) return UP_TREE_NO_MEMORY;
    int32_t capacity = t->capacity * 2 + extra;
    up_node *nodes = realloc(t->nodes, (size_t)capacity * sizeof *nodes);
    if (!nodes) return UP_TREE_NO_MEMORY;
    memset(nodes + t->capacity, 0, (size_t)(capacity - t->capacity) * sizeof *nodes);
    t->nodes = nodes;
    t->capacity = capacity;
    return UP_TREE_OK;
}

static int32_t take_node(up_tree *t) {
    int32_t id = t->free_node;
    if (id)
        t->free_node = t->nodes[id].next_sibling;
    else
        id = ++t->used;
    uint32_t generation = t->nodes[id].generation + 1;
    t->nodes[id] = (up_node){.flags = UP_NODE_LIVE, .generation = generation};
    t->stats.nodes++;
    return id;
}

static void drop_node(up_tree *t, int32_t id) {
    up_node *x = &t->nodes[id];
    free(x->tokens);
    *x = (up_node){.next_sibling = t->free_node, .generation = x->generation};
    t->free_node = id;
    t->stats.nodes--;
}

static int64_t edge_words(const up_tree *t, int64_t length) { return length + (length + t->page - 1) / t->page; }

/* ---------------------------------------------------------------- hashing */

static inline uint64_t mix(uint64_t x) { /* the finaliser of splitmix64 */
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static inline uint64_t page_sum(const up_tree *t, const int32_t *tokens, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += t->multiplier[i] * ((uint64_t)(uint32_t)tokens[i] + 1);
    return sum;
}

static inline uint64_t query_sum(const up_tree *t, const void *tokens, int wide, int64_t from, int64_t count) {
    if (!wide) return page_sum(t, (const int32_t *)tokens + from, count);
    const int64_t *at = (const int64_t *)tokens + from;
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += t->multiplier[i] * ((uint64_t)at[i] + 1);
    return sum;
}

static inline uint64_t child_key(int32_t parent, uint64_t sum, int64_t count) {
    return mix(sum + (uint64_t)parent * GOLDEN + (uint64_t)count * UINT64_C(0xD6E8FEB86659FD93));
}

/* The key of a path that is one page, of `count` tokens, longer. Never 0. */
static inline uint64_t path_step(uint64_t key, uint64_t sum, int64_t count) {
    key = mix(key + GOLDEN + sum * 2 + (uint64_t)count * UINT64_C(0xD6E8FEB86659FD93));
    return key ? key : 1;
}

static uint64_t path_over(const up_tree *t, uint64_t key, const int32_t *tokens, int64_t length) {
    for (int64_t i = 0; i < length; i += t->page) {
        int64_t count = length - i < t->page ? length - i : t->page;
        key = path_step(key, page_sum(t, tokens + i, count), count);
    }
    return key;
}

/* ---------------------------------------------------------------- the child table */

static inline int64_t first_page_length(const up_tree *t, const up_node *x) {
    return x->length < t->page ? x->length : t->page;
}

static uint64_t key_of(const up_tree *t, const up_node *x) {
    int64_t count = first_page_length(t, x);
    return child_key(x->parent, page_sum(t, x->tokens, count), count);
}

static int reserve_children(up_tree *t, int64_t extra) {
    uint64_t need = (uint64_t)(t->stats.nodes + extra) * 2;
    if (need <= t->child_mask + 1) return UP_TREE_OK;
    uint64_t size = (t->child_mask + 1) * 2;
    while (size < need) size *= 2;
    child_entry *table = calloc((size_t)size, sizeof *table);
    if (!table) return UP_TREE_NO_MEMORY;
    for (uint64_t i = 0; i <= t->child_mask; i++) {
        if (!t->children[i].node) continue;
        uint64_t slot = t->children[i].key & (size - 1);
        while (table[slot].node) slot = (slot + 1) & (size - 1);
        table[slot] = t->children[i];
    }
    free(t->children);
    t->children = table;
    t->child_mask = size - 1;
    return UP_TREE_OK;
}

static void child_add(up_tree *t, int32_t id) {
    uint64_t key = key_of(t, &t->nodes[id]), slot = key & t->child_mask;
    while (t->children[slot].node) slot = (slot + 1) & t->child_mask;
    t->children[slot] = (child_entry){key, id};
}

static void child_remove(up_tree *t, int32_t id) {
    uint64_t slot = key_of(t, &t->nodes[id]) & t->child_mask;
    while (t->children[slot].node != id) {
        assert(t->children[slot].node);
        slot = (slot + 1) & t->child_mask;
    }
    /* Close the gap: move back every later entry of the run that may lie here. */
    for (uint64_t next = (slot + 1) & t->child_mask; t->children[next].node; next = (next + 1) & t->child_mask) {
        uint64_t home = t->children[next].key & t->child_mask;
        if (((next - home) & t->child_mask) < ((next - slot) & t->child_mask)) continue;
        t->children[slot] = t->children[next];
        slot = next;
    }
    t->children[slot] = (child_entry){0, 0};
}

/* How many of `count` tokens agree. */
static inline int64_t common_prefix(const int32_t *edge, const void *tokens, int wide, int64_t from, int64_t count) {
    int64_t i = 0;
    if (!wide) {
        const int32_t *at = (const int32_t *)tokens + from;
        if (!memcmp(edge, at, (size_t)count * sizeof *at)) return count;
        while (count - i >= 32 && !memcmp(edge + i, at + i, 32 * sizeof *at)) i += 32;
        while (i < count && edge[i] == at[i]) i++;
        return i;
    }
    const int64_t *at = (const int64_t *)tokens + from;
    for (; count - i >= 16; i += 16) {
        int64_t differ = 0;
        for (int64_t j = 0; j < 16; j++) differ |= edge[i + j] ^ at[i + j];
        if (differ) break;
    }
    while (i < count && edge[i] == at[i]) i++;
    return i;
}

/* The child of `node` whose first page, or whole tail, is `count` tokens from `from` on; 0 when there is none. */
static int32_t find_child(const up_tree *t, int32_t node, const void *tokens, int wide, int64_t from, int64_t count,
                          uint64_t sum) {
    uint64_t key = child_key(node, sum, count);
    for (uint64_t slot = key & t->child_mask; t->children[slot].node; slot = (slot + 1) & t->child_mask) {
        if (t->children[slot].key != key) continue;
        const up_node *x = &t->nodes[t->children[slot].node];
        if (x->parent == node && first_page_length(t, x) == count &&
            common_prefix(x->tokens, tokens, wide, from, count) == count)
            return t->children[slot].node;
    }
    return 0;
}

/* The longest tail under `node` that the next `most` tokens begin with; 0: none. */
static int32_t find_tail(const up_tree *t, int32_t node, const void *tokens, int wide, int64_t from, int64_t most) {
    const up_node *x = &t->nodes[node];
    if (!x->num_tails) return 0;
    if (most > t->page - 1) most = t->page - 1;
    uint64_t sum = query_sum(t, tokens, wide, from, most);
    for (int64_t count = most; count > 0; count--) {
        if (x->tail_lengths >> ((count - 1) & 63) & 1) {
            int32_t found = find_child(t, node, tokens, wide, from, count, sum);
            if (found) return found;
        }
        int64_t last = wide ? ((const int64_t *)tokens)[from + count - 1] : ((const int32_t *)tokens)[from + count - 1];
        sum -= t->multiplier[count - 1] * ((wide ? (uint64_t)last : (uint64_t)(uint32_t)last) + 1);
    }
    return 0;
}

/* ---------------------------------------------------------------- walking */

typedef struct {
    int32_t node;    /* last node that agrees to its end */
    int32_t partial; /* its child that agrees for at least a page but not to its end, 0: none */
    int64_t depth;   /* where the walk stopped; a page boundary */
    int64_t common;  /* tokens of `partial` that agree, not rounded */
} walk;

/* Follow whole pages of tokens[:count] down from the root. */
static walk walk_down(const up_tree *t, int32_t root, const void *tokens, int wide, int64_t count) {
    walk w = {root, 0, 0, 0};
    while (count - w.depth >= t->page) {
        const up_node *x = &t->nodes[w.node];
        int32_t child;
        if (x->num_children == 1 && !x->num_tails)
            child = x->first_child; /* cheaper to compare than to hash */
        else if (x->num_children == 0)
            break;
        else
            child = find_child(t, w.node, tokens, wide, w.depth, t->page, query_sum(t, tokens, wide, w.depth, t->page));
        if (!child) break;
        const up_node *c = &t->nodes[child];
        if (c->first_child) __builtin_prefetch(&t->nodes[c->first_child]);
        int64_t most = count - w.depth < c->length ? count - w.depth : c->length;
        int64_t common = common_prefix(c->tokens, tokens, wide, w.depth, most);
        if (common < t->page) break;
        if (common < c->length) {
            w.partial = child;
            w.common = common;
            w.depth += common - common % t->page;
            break;
        }
        w.node = child;
        w.depth += common;
    }
    return w;
}

/* A token that is no token among the next page after the walk: its index, else -1. */
static int64_t bad_token(const void *tokens, int wide, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        int64_t token = wide ? ((const int64_t *)tokens)[i] : ((const int32_t *)tokens)[i];
        if (token < 0 || token >= MAX_TOKENS) return i;
    }
    return -1;
}

static inline int has_cell(const up_tree *t, const int32_t *cells, int32_t handle) {
    return cells && handle > 0 && handle < t->num_handles && cells[handle] >= 0;
}

static inline int window_there(const up_tree *t, int32_t handle) { return has_cell(t, t->window_cells, handle); }

/* Where the window before `depth`, a depth inside `node`, lacks a page: the depth where the last such page begins; -1 when
 * all are there. */
static int64_t window_gap(const up_tree *t, int32_t node, int64_t depth) {
    if (!t->window) return -1;
    int64_t low = depth > t->window ? depth - t->window : 0;
    while (depth > low) {
        const up_node *x = &t->nodes[node];
        int64_t start = start_of(x), first = low > start ? (low - start) / t->page : 0;
        const int32_t *handles = handles_of(x);
        for (int64_t i = (depth - start + t->page - 1) / t->page - 1; i >= first; i--)
            if (!window_there(t, handles[i])) return start + i * t->page;
        depth = start;
        node = x->parent;
    }
    return -1;
}

/* ---------------------------------------------------------------- ghosts */

static ghost_entry *ghost_find(const up_tree *t, uint64_t key) {
    if (!t->ghosts) return NULL;
    for (uint64_t slot = key & t->ghost_mask; t->ghosts[slot].key; slot = (slot + 1) & t->ghost_mask)
        if (t->ghosts[slot].key == key) return &t->ghosts[slot];
    return NULL;
}

static void ghost_delete(up_tree *t, ghost_entry *entry) {
    uint64_t slot = (uint64_t)(entry - t->ghosts);
    for (uint64_t next = (slot + 1) & t->ghost_mask; t->ghosts[next].key; next = (next + 1) & t->ghost_mask) {
        uint64_t home = t->ghosts[next].key & t->ghost_mask;
        if (((next - home) & t->ghost_mask) < ((next - slot) & t->ghost_mask)) continue;
        t->ghosts[slot] = t->ghosts[next];
        slot = next;
    }
    t->ghosts[slot].key = 0;
    t->stats.ghosts--;
    t->stats.ghosts_dropped++;
}

static int ghosts_grow(up_tree *t) {
    uint64_t size = t->ghosts ? (t->ghost_mask + 1) * 2 : 4 * MIN_GHOSTS;
    ghost_entry *table = calloc((size_t)size, sizeof *table);
    if (!table) return 0;
    for (uint64_t i = 0; t->ghosts && i <= t->ghost_mask; i++) {
        if (!t->ghosts[i].key) continue;
        uint64_t slot = t->ghosts[i].key & (size - 1);
        while (table[slot].key) slot = (slot + 1) & (size - 1);
        table[slot] = t->ghosts[i];
    }
    free(t->ghosts);
    t->ghosts = table;
    t->ghost_mask = size - 1;
    return 1;
}

static int ring_grow(up_tree *t) {
    int64_t capacity = t->ring_capacity ? t->ring_capacity * 2 : 4 * MIN_GHOSTS;
    ghost_record *ring = malloc((size_t)capacity * sizeof *ring);
    if (!ring) return 0;
    for (int64_t i = 0; i < t->ring_count; i++) ring[i] = t->ring[(t->ring_first + i) % t->ring_capacity];
    free(t->ring);
    t->ring = ring;
    t->ring_first = 0;
    t->ring_capacity = capacity;
    return 1;
}

/* Ghosts are a help, not a duty: without memory for one more there is one fewer. */
static void ghost_add(up_tree *t, uint64_t key, int32_t hits, int32_t use, int had_state) {
    ghost_entry *entry = ghost_find(t, key);
    if (!entry) {
        if ((!t->ghosts || (uint64_t)t->stats.ghosts * 2 >= t->ghost_mask) && !ghosts_grow(t)) return;
        uint64_t slot = key & t->ghost_mask;
        while (t->ghosts[slot].key) slot = (slot + 1) & t->ghost_mask;
        entry = &t->ghosts[slot];
        *entry = (ghost_entry){.key = key};
        t->stats.ghosts++;
    }
    if (t->ring_count == t->ring_capacity && !ring_grow(t)) {
        ghost_delete(t, entry);
        return;
    }
    entry->hits = hits > entry->hits ? hits : entry->hits;
    entry->use = use > entry->use ? use : entry->use;
    entry->had_state |= had_state;
    entry->sequence = ++t->ghost_sequence;
    t->ring[(t->ring_first + t->ring_count++) % t->ring_capacity] = (ghost_record){key, entry->sequence};
}

static void ghosts_trim(up_tree *t) {
    int64_t most = t->ghost_factor * t->stats.pages;
    if (most < MIN_GHOSTS) most = MIN_GHOSTS;
    if (most > t->max_ghosts) most = t->max_ghosts;
    while (t->stats.ghosts > most || t->ring_count > 2 * most) {
        ghost_record oldest = t->ring[t->ring_first];
        t->ring_first = (t->ring_first + 1) % t->ring_capacity;
        t->ring_count--;
        ghost_entry *entry = ghost_find(t, oldest.key);
        if (entry && entry->sequence == oldest.sequence) ghost_delete(t, entry);
    }
}

/* The pages of a node that goes become ghosts, the deepest first: it is then the first to be forgotten. */
static void node_to_ghosts(up_tree *t, const up_node *x) {
    if (!t->ghost_factor || (x->flags & UP_NODE_TAIL)) return;
    int64_t pages = pages_of(t, x);
    uint64_t few[32], *keys = pages <= 32 ? few : malloc((size_t)pages * sizeof *keys);
    if (!keys) return;
    uint64_t key = t->nodes[x->parent].path_key;
    for (int64_t i = 0; i < pages; i++)
        keys[i] = key = path_step(key, page_sum(t, x->tokens + i * t->page, t->page), t->page);
    for (int64_t i = pages - 1; i >= 0; i--)
        if ((start_of(x) + (i + 1) * t->page) % t->grid == 0)
            ghost_add(t, keys[i], i == pages - 1 ? x->hits : 0, x->kv_use,
                      i == pages - 1 && (x->state || (x->flags & UP_NODE_TOMBSTONE)));
    if (keys != few) free(keys);
}

int64_t up_tree_ghost_hits(up_tree *t, uint64_t path_key) {
    const ghost_entry *entry = ghost_find(t, path_key);
    return entry ? entry->hits : -1;
}

/* ---------------------------------------------------------------- create and destroy */

int up_tree_create(int32_t page_size, int32_t grid, int32_t window, int32_t needs_state, int32_t ghost_factor,
                   int64_t max_ghosts, up_tree **out) {
    if (page_size < 1 || grid < page_size || grid % page_size || window < 0 || ghost_factor < 0 || max_ghosts < 0)
        return UP_TREE_BAD_ARGUMENT;
    up_tree *t = calloc(1, sizeof *t);
    if (!t) return UP_TREE_NO_MEMORY;
    t->page = page_size;
    t->grid = grid;
    t->window = window;
    t->needs_state = needs_state != 0;
    t->ghost_factor = max_ghosts ? ghost_factor : 0;
    t->max_ghosts = max_ghosts;
    t->child_mask = 63;
    t->capacity = t->receipts_capacity = 64;
    t->nodes = calloc((size_t)t->capacity, sizeof *t->nodes);
    t->receipts = calloc((size_t)t->receipts_capacity, sizeof *t->receipts);
    t->children = calloc((size_t)t->child_mask + 1, sizeof *t->children);
    t->multiplier = malloc((size_t)page_size * sizeof *t->multiplier);
    if (!t->nodes || !t->receipts || !t->children || !t->multiplier) {
        up_tree_destroy(t);
        return UP_TREE_NO_MEMORY;
    }
    for (int32_t i = 0; i < page_size; i++) t->multiplier[i] = mix((uint64_t)(i + 1) * GOLDEN) | 1;
    *out = t;
    return UP_TREE_OK;
}

void up_tree_destroy(up_tree *t) {
    if (!t) return;
    for (int32_t i = 1; i <= t->used; i++) free(t->nodes[i].tokens);
    free(t->nodes);
    free(t->receipts);
    free(t->children);
    free(t->multiplier);
    free(t->ghosts);
    free(t->ring);
    free(t);
}

int up_tree_set_cells(up_tree *t, const int32_t *page_cells, const int32_t *state_cells, const int32_t *window_cells,
                      int64_t num_handles) {
    if (!enter(t)) return UP_TREE_BUSY;
    t->page_cells = page_cells;
    t->state_cells = state_cells;
    t->window_cells = window_cells;
    t->num_handles = num_handles;
    return leave(t, UP_TREE_OK);
}

int up_tree_new_root(up_tree *t, int32_t *root) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (reserve_nodes(t, 1)) return leave(t, UP_TREE_NO_MEMORY);
    *root = take_node(t);
    t->nodes[*root].flags |= UP_NODE_ROOT;
    t->stats.roots++;
    return leave(t, UP_TREE_OK);
}

int up_tree_drop_root(up_tree *t, int32_t root) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (!node_ok(t, root) || !(t->nodes[root].flags & UP_NODE_ROOT)) return leave(t, UP_TREE_BAD_NODE);
    if (t->nodes[root].num_children || t->nodes[root].kv_locks) return leave(t, UP_TREE_LOCKED);
    drop_node(t, root);
    t->stats.roots--;
    return leave(t, UP_TREE_OK);
}

const up_tree_stats *up_tree_get_stats(up_tree *t) {
    t->stats.bytes = (int64_t)sizeof *t + t->capacity * (int64_t)sizeof *t->nodes +
                     (int64_t)(t->child_mask + 1) * (int64_t)sizeof *t->children +
                     4 * (t->stats.tokens + t->stats.pages);
    return &t->stats;
}

/* ---------------------------------------------------------------- match */

static inline int age_bucket(int32_t now, int32_t use) {
    uint32_t age = now > use ? (uint32_t)(now - use) : 0;
    int bucket = 31 - __builtin_clz(age + 1);
    return bucket < UP_TREE_AGE_BUCKETS ? bucket : UP_TREE_AGE_BUCKETS - 1;
}

/* Is there a state past the limit on the path that the tokens beyond it confirm? */
static int state_past_limit(const up_tree *t, const walk *w, const void *tokens, int wide, int64_t count, int64_t limit) {
    int32_t child = w->partial;
    int64_t from = child ? start_of(&t->nodes[child]) : w->depth;
    if (!child && count - from >= t->page)
        child = find_child(t, w->node, tokens, wide, from, t->page, query_sum(t, tokens, wide, from, t->page));
    if (!child) child = find_tail(t, w->node, tokens, wide, from, count - from);
    if (!child) return 0;
    const up_node *c = &t->nodes[child];
    return c->state && c->depth > limit && c->depth <= count &&
           common_prefix(c->tokens, tokens, wide, from, c->length) == c->length;
}

/* Follow the path past its resident part through the ghosts. */
static void follow_ghosts(const up_tree *t, const walk *w, const void *tokens, int wide, int64_t limit, int32_t now,
                          up_match *out) {
    uint64_t key = t->nodes[w->node].path_key;
    if (w->partial) key = path_over(t, key, t->nodes[w->partial].tokens, w->depth - start_of(&t->nodes[w->partial]));
    int64_t depth = w->depth;
    while (limit - depth >= t->page) {
        if (bad_token(tokens, wide, depth, depth + t->page) >= 0) return;
        key = path_step(key, query_sum(t, tokens, wide, depth, t->page), t->page);
        depth += t->page;
        if (depth % t->grid) continue;
        const ghost_entry *entry = ghost_find(t, key);
        if (!entry) return;
        out->ages[age_bucket(now, entry->use)] += (int32_t)(depth - out->seen);
        out->seen = depth;
        out->hits = entry->hits;
    }
}

/* A hit in a tail beside the path below `node`, deeper than any on the path itself. */
static int hit_in_tail(const up_tree *t, int32_t node, const void *tokens, int wide, int64_t limit, up_match *out) {
    int64_t from = t->nodes[node].depth, most = limit - from;
    for (int32_t tail; (tail = find_tail(t, node, tokens, wide, from, most)); most = t->nodes[tail].length - 1) {
        const up_node *x = &t->nodes[tail];
        if ((t->needs_state && !x->state) || window_gap(t, tail, x->depth) >= 0) continue;
        out->hit = x->depth;
        out->node = tail;
        out->state = x->state;
        out->tail_page = handles_of(x)[0];
        return 1;
    }
    return 0;
}

/* The deepest depth where a hit may end, not beyond `depth` inside `node`, and why not deeper. */
static void choose_hit(const up_tree *t, int32_t node, int64_t depth, const void *tokens, int wide, int64_t limit,
                       up_match *out) {
    for (;;) {
        const up_node *x = &t->nodes[node];
        if (x->depth == depth && !(x->flags & UP_NODE_TAIL) && hit_in_tail(t, node, tokens, wide, limit, out)) return;
        if (x->flags & UP_NODE_ROOT) break;
        if (!t->needs_state || (x->state && x->depth == depth)) {
            int64_t gap = window_gap(t, node, depth);
            if (gap < 0) {
                out->hit = depth;
                out->node = node;
                out->state = x->state;
                if (x->flags & UP_NODE_TAIL) out->tail_page = handles_of(x)[0];
                return;
            }
            out->reason = UP_HIT_NO_WINDOW;
            if (!t->needs_state) { /* any depth up to the gap may do */
                depth = gap;
                while (!(t->nodes[node].flags & UP_NODE_ROOT) && start_of(&t->nodes[node]) >= depth)
                    node = t->nodes[node].parent;
                continue;
            }
        } else if (x->depth == depth && (x->flags & UP_NODE_TOMBSTONE) && out->reason == UP_HIT_UNKNOWN) {
            out->reason = UP_HIT_STATE_EVICTED;
        }
        depth = start_of(x);
        node = x->parent;
    }
    out->node = node;
}

int up_tree_match(up_tree *t, int32_t root, const void *tokens, int64_t count, int32_t wide, int64_t limit, int32_t now,
                  up_match *out) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (!node_ok(t, root) || !(t->nodes[root].flags & UP_NODE_ROOT)) return leave(t, UP_TREE_BAD_NODE);
    if (count < 0 || count >= MAX_TOKENS || limit < 0) return leave(t, UP_TREE_BAD_ARGUMENT);
    if (limit > count) limit = count;
    *out = (up_match){.branch = -1, .reason = UP_HIT_UNKNOWN};
    walk w = walk_down(t, root, tokens, wide, limit);
    int32_t tail = w.partial ? 0 : find_tail(t, w.node, tokens, wide, w.depth, limit - w.depth);
    if (!tail && w.depth < limit) {
        int64_t bad = bad_token(tokens, wide, w.depth, w.depth + t->page < limit ? w.depth + t->page : limit);
        if (bad >= 0) return leave(t, fail_at(t, UP_TREE_BAD_TOKEN, bad));
    }
    int32_t deepest = tail ? tail : w.partial ? w.partial : w.node;
    out->full_hit = tail ? t->nodes[tail].depth : w.depth;
    out->seen = out->full_hit;
    choose_hit(t, deepest, out->full_hit, tokens, wide, limit, out);
    for (int32_t i = deepest; !(t->nodes[i].flags & UP_NODE_ROOT); i = t->nodes[i].parent) {
        const up_node *x = &t->nodes[i];
        int64_t end = x->depth < out->full_hit ? x->depth : out->full_hit;
        out->ages[age_bucket(now, x->kv_use)] += (int32_t)(end - start_of(x));
    }
    if (!w.partial && !tail && w.node != root) out->hits = t->nodes[w.node].hits;
    if (t->ghost_factor && !tail) follow_ghosts(t, &w, tokens, wide, limit, now, out);
    int64_t branch = out->seen - out->seen % t->grid;
    if (branch > out->hit) out->branch = branch;
    if (branch != out->seen) out->hits = 0;
    if (out->hit == limit)
        out->reason = UP_HIT_COMPLETE;
    else if (out->reason == UP_HIT_UNKNOWN) {
        if (t->needs_state && limit < count && state_past_limit(t, &w, tokens, wide, count, limit))
            out->reason = UP_HIT_LIMIT;
        else if (out->full_hit > out->hit)
            out->reason = UP_HIT_NO_STATE;
    }
    out->generation = t->nodes[out->node].generation;
    return leave(t, UP_TREE_OK);
}

int up_tree_path(up_tree *t, int32_t node, uint32_t generation, int64_t depth, int32_t *out) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (!node_ok(t, node) || t->nodes[node].generation != generation || t->nodes[node].depth < depth)
        return leave(t, UP_TREE_BAD_NODE);
    while (!(t->nodes[node].flags & UP_NODE_ROOT)) {
        const up_node *x = &t->nodes[node];
        int64_t start = start_of(x), end = x->depth < depth ? x->depth : depth;
        if (end > start)
            memcpy(out + start / t->page, handles_of(x), (size_t)((end - start + t->page - 1) / t->page) * sizeof *out);
        node = x->parent;
    }
    return leave(t, UP_TREE_OK);
}

/* ---------------------------------------------------------------- links */

static void link_child(up_tree *t, int32_t parent, int32_t id) {
    up_node *p = &t->nodes[parent], *x = &t->nodes[id];
    x->parent = parent;
    x->next_sibling = p->first_child;
    x->previous_sibling = 0;
    if (p->first_child) t->nodes[p->first_child].previous_sibling = id;
    p->first_child = id;
    p->num_children++;
    if (x->flags & UP_NODE_TAIL) {
        p->num_tails++;
        p->tail_lengths |= UINT64_C(1) << ((x->length - 1) & 63);
    }
    child_add(t, id);
}

static void unlink_child(up_tree *t, int32_t id) {
    child_remove(t, id);
    up_node *x = &t->nodes[id], *p = &t->nodes[x->parent];
    if (x->previous_sibling)
        t->nodes[x->previous_sibling].next_sibling = x->next_sibling;
    else
        p->first_child = x->next_sibling;
    if (x->next_sibling) t->nodes[x->next_sibling].previous_sibling = x->previous_sibling;
    p->num_children--;
    if ((x->flags & UP_NODE_TAIL) && --p->num_tails == 0) p->tail_lengths = 0;
}

/* Remove a leaf from the tree. Its handles are somebody else's now. */
static void remove_leaf(up_tree *t, int32_t id) {
    up_node *x = &t->nodes[id];
    assert(!x->num_children && !x->kv_locks);
    unlink_child(t, id);
    t->stats.pages -= pages_of(t, x);
    t->stats.tokens -= x->length;
    t->stats.states -= x->state != 0;
    t->stats.tails -= (x->flags & UP_NODE_TAIL) != 0;
    drop_node(t, id);
}

/* Split `id` after `length` tokens of its edge. `upper_edge` and `lower_edge` have room. Returns the upper node. */
static int32_t split(up_tree *t, int32_t id, int64_t length, int32_t *upper_edge, int32_t *lower_edge) {
    int32_t parent = t->nodes[id].parent, upper = take_node(t);
    up_node *x = &t->nodes[id], *u = &t->nodes[upper];
    int64_t rest = x->length - length, pages = length / t->page;
    unlink_child(t, id);
    memcpy(upper_edge, x->tokens, (size_t)length * sizeof *upper_edge);
    memcpy(upper_edge + length, handles_of(x), (size_t)pages * sizeof *upper_edge);
    memcpy(lower_edge, x->tokens + length, (size_t)rest * sizeof *lower_edge);
    memcpy(lower_edge + rest, handles_of(x) + pages, (size_t)(pages_of(t, x) - pages) * sizeof *lower_edge);
    u->depth = start_of(x) + (int32_t)length;
    u->length = (int32_t)length;
    u->tokens = upper_edge;
    u->kv_locks = x->kv_locks;
    u->window_locks = x->window_locks;
    u->kv_use = x->kv_use;
    u->path_key = path_over(t, t->nodes[parent].path_key, upper_edge, length);
    free(x->tokens);
    x->tokens = lower_edge;
    x->length = (int32_t)rest;
    link_child(t, parent, upper);
    link_child(t, upper, id);
    t->stats.splits++;
    return upper;
}

/* Hang a new node below `parent`. */
static int32_t add_node(up_tree *t, int32_t parent, int32_t *edge, const void *tokens, int wide, int64_t from,
                        int64_t length, const int32_t *handles, int32_t now) {
    int32_t id = take_node(t);
    up_node *x = &t->nodes[id];
    for (int64_t i = 0; i < length; i++)
        edge[i] = wide ? (int32_t)((const int64_t *)tokens)[from + i] : ((const int32_t *)tokens)[from + i];
    int64_t pages = (length + t->page - 1) / t->page;
    memcpy(edge + length, handles, (size_t)pages * sizeof *edge);
    x->tokens = edge;
    x->length = (int32_t)length;
    x->depth = t->nodes[parent].depth + (int32_t)length;
    x->kv_use = now;
    if (length < t->page) {
        x->flags |= UP_NODE_TAIL;
        t->stats.tails++;
    }
    x->path_key = path_over(t, t->nodes[parent].path_key, edge, length);
    link_child(t, parent, id);
    t->stats.pages += pages;
    t->stats.tokens += length;
    return id;
}

/* ---------------------------------------------------------------- locks */

static receipt_entry *receipt_of(up_tree *t, int64_t receipt) {
    int64_t index = receipt & (((int64_t)1 << RECEIPT_INDEX_BITS) - 1);
    if (receipt <= 0 || index < 1 || index > t->receipts_used) return NULL;
    receipt_entry *r = &t->receipts[index];
    return r->node && r->generation == (int32_t)(receipt >> RECEIPT_INDEX_BITS) ? r : NULL;
}

static void lock_path(up_tree *t, receipt_entry *r, int32_t node, int64_t depth) {
    int64_t low = depth > t->window ? depth - t->window : 0, top = INT32_MAX;
    r->node = node;
    up_node *end = &t->nodes[node];
    if (r->holds_state && end->state_locks++ == 0) t->stats.locked_states += end->state != 0;
    for (int32_t i = node; i; i = t->nodes[i].parent) {
        up_node *x = &t->nodes[i];
        if (x->kv_locks++ == 0) t->stats.locked_pages += pages_of(t, x);
        if (t->window && x->depth > low && x->length) {
            top = start_of(x);
            if (x->window_locks++ == 0) t->stats.window_locked_pages += pages_of(t, x);
        }
    }
    r->window_top = (int32_t)top;
}

static void unlock_path(up_tree *t, receipt_entry *r) {
    up_node *end = &t->nodes[r->node];
    if (r->holds_state && --end->state_locks == 0) t->stats.locked_states -= end->state != 0;
    for (int32_t i = r->node; i; i = t->nodes[i].parent) {
        up_node *x = &t->nodes[i];
        if (--x->kv_locks == 0) t->stats.locked_pages -= pages_of(t, x);
        if (x->depth > r->window_top && --x->window_locks == 0) t->stats.window_locked_pages -= pages_of(t, x);
    }
}

int up_tree_lock(up_tree *t, int32_t node, uint32_t generation, int64_t depth, int64_t *receipt) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (!node_ok(t, node) || t->nodes[node].generation != generation) return leave(t, UP_TREE_BAD_NODE);
    if (depth > t->nodes[node].depth || depth < start_of(&t->nodes[node])) return leave(t, UP_TREE_BAD_ARGUMENT);
    int32_t index = t->free_receipt;
    if (!index) {
        if (t->receipts_used + 1 >= t->receipts_capacity) {
            int32_t capacity = t->receipts_capacity * 2;
            receipt_entry *grown = realloc(t->receipts, (size_t)capacity * sizeof *grown);
            if (!grown) return leave(t, UP_TREE_NO_MEMORY);
            memset(grown + t->receipts_capacity, 0, (size_t)(capacity - t->receipts_capacity) * sizeof *grown);
            t->receipts = grown;
            t->receipts_capacity = capacity;
        }
        index = ++t->receipts_used;
    } else {
        t->free_receipt = t->receipts[index].next_free;
    }
    receipt_entry *r = &t->receipts[index];
    r->generation = (r->generation + 1) & INT32_MAX;
    r->holds_state = 1;
    lock_path(t, r, node, depth);
    t->stats.receipts++;
    *receipt = (int64_t)r->generation << RECEIPT_INDEX_BITS | index;
    return leave(t, UP_TREE_OK);
}

int up_tree_unlock(up_tree *t, int64_t receipt) {
    if (!enter(t)) return UP_TREE_BUSY;
    receipt_entry *r = receipt_of(t, receipt);
    if (!r) return leave(t, UP_TREE_BAD_RECEIPT);
    unlock_path(t, r);
    r->node = 0;
    r->next_free = t->free_receipt;
    t->free_receipt = (int32_t)(r - t->receipts);
    t->stats.receipts--;
    return leave(t, UP_TREE_OK);
}

int up_tree_unlock_state(up_tree *t, int64_t receipt) {
    if (!enter(t)) return UP_TREE_BUSY;
    receipt_entry *r = receipt_of(t, receipt);
    if (!r) return leave(t, UP_TREE_BAD_RECEIPT);
    up_node *end = &t->nodes[r->node];
    if (r->holds_state && --end->state_locks == 0) t->stats.locked_states -= end->state != 0;
    r->holds_state = 0;
    return leave(t, UP_TREE_OK);
}

int up_tree_steal(up_tree *t, int64_t receipt, int32_t *state) {
    if (!enter(t)) return UP_TREE_BUSY;
    receipt_entry *r = receipt_of(t, receipt);
    if (!r) return leave(t, UP_TREE_BAD_RECEIPT);
    up_node *x = &t->nodes[r->node];
    if (!x->state || x->num_children) return leave(t, UP_TREE_NO_UNIT);
    if (x->kv_locks > 1 || x->state_locks > r->holds_state) return leave(t, UP_TREE_LOCKED);
    t->stats.states--;
    t->stats.locked_states -= x->state_locks > 0;
    *state = x->state;
    x->state = 0;
    x->flags |= UP_NODE_TOMBSTONE;
    return leave(t, UP_TREE_OK);
}

int up_tree_consume(up_tree *t, int32_t node, int32_t now) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (!node_ok(t, node)) return leave(t, UP_TREE_BAD_NODE);
    up_node *x = &t->nodes[node];
    if (x->hits < INT32_MAX) x->hits++;
    if (now > x->state_use) x->state_use = now;
    return leave(t, UP_TREE_OK);
}

/* ---------------------------------------------------------------- insert */

/* Compare the incoming handles with those of the path that ends with `depth` tokens inside `node`. */
static void collect_duplicates(up_tree *t, int32_t node, int64_t depth, const int32_t *handles, int32_t now,
                               int32_t *duplicates, up_inserted *out) {
    for (int32_t i = node; !(t->nodes[i].flags & UP_NODE_ROOT); i = t->nodes[i].parent) {
        up_node *x = &t->nodes[i];
        int64_t start = start_of(x), end = x->depth < depth ? x->depth : depth;
        int64_t pages = (end - start + t->page - 1) / t->page;
        int32_t *own = handles_of(x);
        const int32_t *incoming = handles + start / t->page;
        x->kv_use = now;
        if (!memcmp(own, incoming, (size_t)pages * sizeof *own)) continue;
        for (int64_t j = 0; j < pages; j++) {
            if (!incoming[j] || incoming[j] == own[j]) continue;
            int32_t back = incoming[j];
            if (t->window && !x->kv_locks && !window_there(t, own[j]) && window_there(t, back)) {
                back = own[j];
                own[j] = incoming[j];
                out->recovered++;
            }
            duplicates[out->num_duplicates++] = back;
        }
    }
}

static void adopt_state(up_tree *t, int32_t node, int32_t state, int32_t role, int32_t now, up_inserted *out) {
    up_node *x = &t->nodes[node];
    if (x->state) {
        if (x->state != state) out->state_back = state;
        return;
    }
    x->state = state;
    x->state_use = now;
    x->role = role;
    /* Saved again after it was evicted: a hit that was missed. */
    const ghost_entry *ghost = ghost_find(t, x->path_key);
    if (ghost && ghost->hits > x->hits) x->hits = ghost->hits;
    if ((x->flags & UP_NODE_TOMBSTONE) || (ghost && ghost->had_state)) x->hits++;
    x->flags &= ~(uint32_t)UP_NODE_TOMBSTONE;
    t->stats.states++;
    t->stats.locked_states += x->state_locks > 0;
    out->state_adopted = 1;
}

/* Check what the caller gave for the part that is new: tokens from `depth` on, and a handle for each of their pages. */
static int check_new(up_tree *t, const void *tokens, int wide, int64_t count, int64_t depth, const int32_t *handles) {
    int64_t bad = bad_token(tokens, wide, depth, count);
    if (bad >= 0) return fail_at(t, UP_TREE_BAD_TOKEN, bad);
    int64_t pages = (count + t->page - 1) / t->page;
    for (int64_t i = 0; i < pages; i++)
        if (handles[i] < 0) return fail_at(t, UP_TREE_BAD_HANDLE, i);
    for (int64_t i = (depth + t->page - 1) / t->page; i < pages; i++)
        if (!handles[i] || (t->page_cells && !has_cell(t, t->page_cells, handles[i])))
            return fail_at(t, UP_TREE_BAD_HANDLE, i);
    return UP_TREE_OK;
}

/* The tail below `node` that tokens[depth:count] extend and that may go. */
static int32_t tail_to_take_over(up_tree *t, int32_t node, const void *tokens, int wide, int64_t depth, int64_t count,
                                 const receipt_entry *own) {
    int32_t tail = find_tail(t, node, tokens, wide, depth, count - depth);
    if (!tail || t->nodes[tail].depth == count) return 0;
    int32_t held = own && own->node == tail ? 1 : 0;
    return t->nodes[tail].kv_locks > held ? 0 : tail;
}

int up_tree_insert(up_tree *t, int32_t root, const void *tokens, int64_t count, int32_t wide, const int32_t *handles,
                   int64_t num_handles, int32_t state, int32_t role, int64_t receipt, int32_t now, int32_t *duplicates,
                   up_inserted *out) {
    if (!enter(t)) return UP_TREE_BUSY;
    receipt_entry *own = receipt ? receipt_of(t, receipt) : NULL;
    if (receipt && !own) return leave(t, UP_TREE_BAD_RECEIPT);
    if (!node_ok(t, root) || !(t->nodes[root].flags & UP_NODE_ROOT)) return leave(t, UP_TREE_BAD_NODE);
    if (count < 1 || count >= MAX_TOKENS || num_handles != (count + t->page - 1) / t->page || state < 0 ||
        role < UP_ROLE_TAIL || role > UP_ROLE_CHUNK)
        return leave(t, UP_TREE_BAD_ARGUMENT);

    int64_t rest = count % t->page, whole = count - rest;
    int keep_tail = rest && (state || !t->needs_state);
    walk w = walk_down(t, root, tokens, wide, whole);
    int32_t tail = 0; /* the same tail, known already */
    if (keep_tail && !w.partial && w.depth == whole)
        tail = find_child(t, w.node, tokens, wide, whole, rest, query_sum(t, tokens, wide, whole, rest));
    int64_t known = tail ? count : w.depth;
    int code = check_new(t, tokens, wide, count, known, handles);
    if (code) return leave(t, code);
    if (state && t->state_cells && !has_cell(t, t->state_cells, state)) return leave(t, UP_TREE_BAD_STATE);

    /* Everything that can fail comes before the first change. */
    int adds_whole = whole > w.depth, adds_tail = keep_tail && !tail;
    int splits = w.partial && (adds_whole || adds_tail || state);
    int64_t cut = splits ? w.depth - start_of(&t->nodes[w.partial]) : 0;
    int32_t *upper = NULL, *lower = NULL, *edge = NULL, *tail_edge = NULL;
    int failed = reserve_nodes(t, 4) || reserve_children(t, 4);
    if (splits) {
        upper = malloc((size_t)edge_words(t, cut) * sizeof *upper);
        lower = malloc((size_t)edge_words(t, t->nodes[w.partial].length - cut) * sizeof *lower);
    }
    if (adds_whole) edge = malloc((size_t)edge_words(t, whole - w.depth) * sizeof *edge);
    if (adds_tail) tail_edge = malloc((size_t)edge_words(t, rest) * sizeof *tail_edge);
    if (failed || (splits && (!upper || !lower)) || (adds_whole && !edge) || (adds_tail && !tail_edge)) {
        free(upper);
        free(lower);
        free(edge);
        free(tail_edge);
        return leave(t, UP_TREE_NO_MEMORY);
    }

    *out = (up_inserted){.known = known};
    int32_t node = w.node, removed = 0;
    if (!w.partial && (adds_whole || adds_tail))
        removed = tail_to_take_over(t, node, tokens, wide, w.depth, keep_tail ? count : whole, own);
    if (own) unlock_path(t, own);
    if (splits) {
        out->split = node = split(t, w.partial, cut, upper, lower);
        out->lower = w.partial;
    } else if (w.partial) {
        node = w.partial;
    }
    collect_duplicates(t, tail ? tail : node, tail ? count : w.depth, handles, now, duplicates, out);
    if (removed) {
        up_node *x = &t->nodes[removed];
        int32_t page = handles_of(x)[0];
        if (page != handles[w.depth / t->page]) duplicates[out->num_duplicates++] = page;
        if (x->state != state) out->state_replaced = x->state;
        out->removed = removed;
        remove_leaf(t, removed);
    }
    if (adds_whole || adds_tail) out->parent_of_new = node;
    if (adds_whole)
        node = add_node(t, node, edge, tokens, wide, w.depth, whole - w.depth, handles + w.depth / t->page, now);
    if (adds_tail) node = add_node(t, node, tail_edge, tokens, wide, whole, rest, handles + whole / t->page, now);
    if (tail) node = tail;
    if (rest && !keep_tail && handles[whole / t->page]) duplicates[out->num_duplicates++] = handles[whole / t->page];
    out->depth = keep_tail ? count : whole;
    if (state) adopt_state(t, node, state, role, now, out);
    if (own) lock_path(t, own, node, out->depth);
    out->node = node;
    out->parent = t->nodes[node].parent;
    return leave(t, UP_TREE_OK);
}

/* ---------------------------------------------------------------- units */

static int find_unit(const up_tree *t, int32_t node, up_unit *out) {
    if (!node_ok(t, node)) return UP_TREE_BAD_NODE;
    const up_node *x = &t->nodes[node];
    if (x->flags & UP_NODE_ROOT) return UP_TREE_NO_UNIT;
    *out = (up_unit){.node = node, .state = x->state, .depth = x->depth, .hits = x->hits, .role = x->role};
    out->last_use = out->state_use = x->state_use;
    out->num_children = x->num_children;
    int32_t above = x->parent;
    if (x->num_children) {
        if (!x->state) return UP_TREE_NO_UNIT;
        if (x->state_locks) return UP_TREE_LOCKED;
    } else {
        if (x->kv_locks) return UP_TREE_LOCKED;
        out->is_leaf = 1;
        out->top = node;
        out->num_pages = (int32_t)pages_of(t, x);
        if (!x->state || x->kv_use > x->state_use) out->last_use = x->kv_use;
        for (; t->needs_state; above = t->nodes[above].parent) {
            const up_node *p = &t->nodes[above];
            if ((p->flags & UP_NODE_ROOT) || p->num_children > 1 || p->state || p->kv_locks) break;
            out->top = above;
            out->num_pages += (int32_t)pages_of(t, p);
        }
    }
    out->parent = above;
    while (t->needs_state && above && !t->nodes[above].state) above = t->nodes[above].parent;
    out->above = above ? t->nodes[above].depth : 0;
    return UP_TREE_OK;
}

int up_tree_unit(up_tree *t, int32_t node, up_unit *out, int32_t *handles, int64_t capacity) {
    if (!enter(t)) return UP_TREE_BUSY;
    int code = find_unit(t, node, out);
    if (code || !handles) return leave(t, code);
    if (out->num_pages + (out->state != 0) > capacity) return leave(t, UP_TREE_BAD_ARGUMENT);
    int64_t at = out->num_pages;
    if (out->state) handles[at] = out->state;
    for (int32_t i = node; out->top; i = t->nodes[i].parent) {
        const up_node *x = &t->nodes[i];
        int64_t pages = pages_of(t, x);
        at -= pages;
        memcpy(handles + at, handles_of(x), (size_t)pages * sizeof *handles);
        if (i == out->top) break;
    }
    return leave(t, UP_TREE_OK);
}

/* A leaf that hangs by a single thread from `node` owns the pages of that thread. Returns 0 when there is none. */
static int32_t leaf_on_thread(const up_tree *t, int32_t node) {
    const up_node *x = &t->nodes[node];
    while (x->num_children == 1 && !x->state) {
        node = x->first_child;
        x = &t->nodes[node];
    }
    return x->num_children ? 0 : node;
}

/* Whoever would have used the state of this unit will use the nearest one above it. */
static void hand_on(up_tree *t, const up_unit *unit) {
    int32_t above = unit->parent;
    while (above && !t->nodes[above].state) above = t->nodes[above].parent;
    if (!above || t->nodes[above].role != UP_ROLE_CHUNK) return;
    up_node *y = &t->nodes[above];
    y->role = unit->role;
    if (unit->hits > y->hits) y->hits = unit->hits;
    if (unit->state_use > y->state_use) y->state_use = unit->state_use;
}

int up_tree_evict(up_tree *t, int32_t node, up_unit *out) {
    if (!enter(t)) return UP_TREE_BUSY;
    int code = find_unit(t, node, out);
    if (code) return leave(t, code);
    if (out->state) hand_on(t, out);
    if (!out->is_leaf) {
        up_node *x = &t->nodes[node];
        x->state = 0;
        x->flags |= UP_NODE_TOMBSTONE;
        t->stats.states--;
        out->changed = leaf_on_thread(t, node);
        return leave(t, UP_TREE_OK);
    }
    for (int32_t i = node; i != out->parent;) {
        int32_t parent = t->nodes[i].parent;
        node_to_ghosts(t, &t->nodes[i]);
        remove_leaf(t, i);
        i = parent;
    }
    if (t->ghost_factor) ghosts_trim(t);
    out->parent_is_root = (t->nodes[out->parent].flags & UP_NODE_ROOT) != 0;
    if (!out->parent_is_root) out->changed = leaf_on_thread(t, out->parent);
    return leave(t, UP_TREE_OK);
}

/* The least depth of a place at or below `node`, and less than `limit`, where a hit may end. */
static int64_t nearest_hit_below(const up_tree *t, int32_t node, int64_t limit) {
    int64_t best = INT64_MAX;
    int32_t i = node;
    for (;;) {
        const up_node *x = &t->nodes[i];
        int ends = x->state || !t->needs_state;
        if (ends && x->depth < best) best = x->depth;
        if (!ends && x->first_child && x->depth < limit && x->depth < best) {
            i = x->first_child;
            continue;
        }
        while (i != node && !t->nodes[i].next_sibling) i = t->nodes[i].parent;
        if (i == node) return best;
        i = t->nodes[i].next_sibling;
    }
}

int up_tree_window_pages(up_tree *t, int32_t node, int32_t all, int32_t *handles, int64_t capacity, int64_t *count) {
    if (!enter(t)) return UP_TREE_BUSY;
    if (!node_ok(t, node)) return leave(t, UP_TREE_BAD_NODE);
    const up_node *x = &t->nodes[node];
    *count = 0;
    if (!t->window || x->window_locks || (x->flags & UP_NODE_ROOT)) return leave(t, UP_TREE_OK);
    int64_t nearest = all ? INT64_MAX : nearest_hit_below(t, node, (int64_t)x->depth + t->window);
    int64_t needed_from = nearest == INT64_MAX ? INT64_MAX : nearest - t->window;
    for (int64_t i = 0; i < pages_of(t, x); i++) {
        int64_t end = start_of(x) + (i + 1) * t->page;
        if (end > needed_from) break;
        if (!window_there(t, handles_of(x)[i])) continue;
        if (*count == capacity) return leave(t, UP_TREE_BAD_ARGUMENT);
        handles[(*count)++] = handles_of(x)[i];
    }
    return leave(t, UP_TREE_OK);
}

/* ---------------------------------------------------------------- validate */

static int validate_node(const up_tree *t, int32_t id, up_tree_stats *sum) {
    const up_node *x = &t->nodes[id];
    int32_t children = 0, tails = 0, previous = 0;
    for (int32_t c = x->first_child; c; previous = c, c = t->nodes[c].next_sibling) {
        const up_node *y = &t->nodes[c];
        if (!node_ok(t, c) || y->parent != id || y->previous_sibling != previous) return 1;
        if (y->depth != x->depth + y->length || y->length < 1) return 1;
        children++;
        if (y->flags & UP_NODE_TAIL) {
            tails++;
            if (!(x->tail_lengths >> ((y->length - 1) & 63) & 1)) return 4;
        }
        int64_t count = first_page_length(t, y);
        if (find_child(t, id, y->tokens, 0, 0, count, page_sum(t, y->tokens, count)) != c) return 3;
    }
    if (children != x->num_children || tails != x->num_tails) return 1;
    sum->nodes++;
    sum->states += x->state != 0;
    sum->locked_states += x->state && x->state_locks;
    if (x->flags & UP_NODE_ROOT) {
        sum->roots++;
        return x->length || x->depth || x->parent || x->state ? 1 : 0;
    }
    if (!node_ok(t, x->parent)) return 1;
    if (x->flags & UP_NODE_TAIL ? x->length >= t->page || x->num_children : x->length % t->page) return 2;
    for (int64_t i = 0; i < pages_of(t, x); i++)
        if (handles_of(x)[i] < 1) return 7;
    if (x->path_key != path_over(t, t->nodes[x->parent].path_key, x->tokens, x->length)) return 8;
    sum->tails += (x->flags & UP_NODE_TAIL) != 0;
    sum->pages += pages_of(t, x);
    sum->tokens += x->length;
    sum->locked_pages += x->kv_locks ? pages_of(t, x) : 0;
    sum->window_locked_pages += x->window_locks ? pages_of(t, x) : 0;
    return 0;
}

static int validate_locks(const up_tree *t) {
    int32_t *expected = calloc((size_t)t->used + 1, 3 * sizeof *expected);
    if (!expected) return UP_TREE_NO_MEMORY;
    int broken = 0;
    for (int32_t r = 1; r <= t->receipts_used && !broken; r++) {
        const receipt_entry *receipt = &t->receipts[r];
        if (!receipt->node) continue;
        if (!node_ok(t, receipt->node)) broken = 5;
        for (int32_t i = receipt->node; i && !broken; i = t->nodes[i].parent) {
            expected[3 * i]++;
            expected[3 * i + 1] += t->nodes[i].depth > receipt->window_top;
        }
        expected[3 * receipt->node + 2] += receipt->holds_state;
    }
    for (int32_t i = 1; i <= t->used && !broken; i++) {
        const up_node *x = &t->nodes[i];
        if (x->kv_locks != expected[3 * i] || x->window_locks != expected[3 * i + 1] ||
            x->state_locks != expected[3 * i + 2])
            broken = 5;
    }
    free(expected);
    return broken;
}

int up_tree_validate(up_tree *t) {
    if (!enter(t)) return UP_TREE_BUSY;
    up_tree_stats sum = {0};
    int broken = 0;
    for (int32_t i = 1; i <= t->used && !broken; i++)
        if (t->nodes[i].flags & UP_NODE_LIVE) broken = validate_node(t, i, &sum);
    int64_t entries = 0;
    for (uint64_t i = 0; i <= t->child_mask; i++) entries += t->children[i].node != 0;
    const up_tree_stats *s = &t->stats;
    if (!broken && entries != s->nodes - s->roots) broken = 4;
    if (!broken) broken = validate_locks(t);
    if (!broken && (sum.nodes != s->nodes || sum.roots != s->roots || sum.tails != s->tails || sum.pages != s->pages ||
                    sum.tokens != s->tokens || sum.states != s->states || sum.locked_pages != s->locked_pages ||
                    sum.locked_states != s->locked_states || sum.window_locked_pages != s->window_locked_pages))
        broken = 6;
    return leave(t, broken);
}

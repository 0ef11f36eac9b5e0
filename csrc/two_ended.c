/* two_ended.c: see two_ended.h. */
#include "two_ended.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_KINDS = 3, NONE = -1 };

/* Cells of one kind. Index 0 is nearest the own end; the floating kind counts from byte 0. */
typedef struct {
    int64_t stride, cells, live;
    int64_t first, end;   /* live cells lie in [first, end); first is 0 but for the floating kind */
    int64_t hint;         /* no free cell in [first, hint) */
    int32_t *id_at;       /* [cells] who is here, NONE: nobody */
    int32_t *cell_of;     /* [ids] */
} side;

struct up_two_ended {
    int64_t arena;
    int32_t num_kinds, pack;
    side kinds[MAX_KINDS];
    int64_t moved, allocated, worst_window, windows, moved_cells;
    int64_t moved_here;   /* by the opening in progress */
};

typedef up_two_ended pool;

static int64_t align_up(int64_t x, int64_t a) { return (x + a - 1) / a * a; }

void up_two_ended_destroy(pool *p) {
    if (!p) return;
    for (int32_t k = 0; k < p->num_kinds; k++) {
        free(p->kinds[k].id_at);
        free(p->kinds[k].cell_of);
    }
    free(p);
}

pool *up_two_ended_create(int64_t arena, const int64_t *strides, int32_t num_kinds, int32_t pack, int32_t ids) {
    if (arena < 1 || num_kinds < 1 || num_kinds > MAX_KINDS || ids < 1) return NULL;
    for (int32_t k = 0; k < num_kinds; k++)
        if (strides[k] < 1 || arena / strides[k] >= INT32_MAX) return NULL;
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->arena = arena; p->num_kinds = num_kinds; p->pack = pack;
    for (int32_t k = 0; k < num_kinds; k++) {
        side *s = &p->kinds[k];
        s->stride = strides[k];
        s->cells = arena / strides[k];
        s->id_at = malloc(((size_t)s->cells + 1) * sizeof(int32_t));
        s->cell_of = malloc((size_t)ids * sizeof(int32_t));
        if (!s->id_at || !s->cell_of) { up_two_ended_destroy(p); return NULL; }
        memset(s->id_at, 0xff, ((size_t)s->cells + 1) * sizeof(int32_t));
    }
    return p;
}

/* The byte up to which the low side reaches, and from which the high side does. */
static int64_t low_frontier(const pool *p) { return p->kinds[0].end * p->kinds[0].stride; }
static int64_t high_frontier(const pool *p) {
    const side *h = &p->kinds[p->num_kinds - 1];
    return p->arena - h->end * h->stride;
}

static void put(side *s, int64_t cell, int32_t id) {
    if (s->live == 0) s->first = s->end = s->hint = cell;
    s->id_at[cell] = id;
    s->cell_of[id] = (int32_t)cell;
    s->live++;
    if (cell < s->first) s->first = s->hint = cell;
    if (cell >= s->end) s->end = cell + 1;
}

static void take_away(side *s, int64_t cell, int floating) {
    s->id_at[cell] = NONE;
    s->live--;
    if (cell < s->hint) s->hint = cell;
    while (s->end > s->first && s->id_at[s->end - 1] == NONE) s->end--;
    if (floating) while (s->first < s->end && s->id_at[s->first] == NONE) s->first++;
    if (s->hint < s->first) s->hint = s->first;
    if (s->live == 0) s->first = s->end = s->hint = 0;
}

/* The hole nearest the own end, or NONE. */
static int64_t hole(side *s, int64_t from, int64_t to) {
    int64_t i = from > s->hint ? from : s->hint;
    while (i < s->end && s->id_at[i] != NONE) i++;
    if (from <= s->hint) s->hint = i;
    return i < s->end && i < to ? i : NONE;
}

/* The hole nearest the frontier of the floating kind; there is one. */
static int64_t last_hole(const side *s) {
    int64_t i = s->end - 1;
    while (s->id_at[i] != NONE) i--;
    return i;
}

static void move(pool *p, side *s, int64_t from, int64_t to, int floating) {
    int32_t id = s->id_at[from];
    put(s, to, id);              /* destination first: the range may not shrink to nothing in between */
    take_away(s, from, floating);
    p->moved_here += s->stride;
    p->moved_cells++;
}

/* Compact an anchored side so that it has no live cell at index >= keep (>= live): its outermost cells go into the
 * holes nearest the new frontier. */
static void compact(pool *p, side *s, int64_t keep) {
    if (p->pack) keep = s->live;
    for (int64_t to = keep - 1; s->end > keep; to--)
        if (s->id_at[to] == NONE) move(p, s, s->end - 1, to, 0);
}

/* Make the floating kind leave every byte outside [low, high), which is wide enough for it. */
static void squeeze(pool *p, int64_t low, int64_t high) {
    side *s = &p->kinds[1];
    int64_t from = align_up(low, s->stride) / s->stride, to = high / s->stride;
    if (!s->live || (s->first >= from && s->end <= to)) return;
    int upward = s->first < from;
    while (p->pack && s->end - s->first > s->live) {
        if (upward) move(p, s, s->first, last_hole(s), 1);
        else move(p, s, s->end - 1, hole(s, s->first, s->end), 1);
    }
    while (s->first < from || s->end > to) {
        int64_t source = s->first < from ? s->first : s->end - 1;
        int64_t cell = hole(s, from > s->first ? from : s->first, to);
        if (cell == NONE && s->end < to) cell = s->end > from ? s->end : from;
        if (cell == NONE) cell = s->first - 1 < to ? s->first - 1 : to - 1;
        move(p, s, source, cell, 1);
    }
}

/* Move what is in the way until kind 0 can reach up to byte `low` and the last kind down to byte `high`. */
static void make_way(pool *p, int64_t low, int64_t high) {
    side *l = &p->kinds[0], *h = &p->kinds[p->num_kinds - 1];
    if (low_frontier(p) > low) compact(p, l, low / l->stride);
    if (high_frontier(p) < high) compact(p, h, (p->arena - high) / h->stride);
}

/* Open room for kind k to extend by `count` cells; the caller has checked that the total fits. */
static void open_room(pool *p, int32_t k, int64_t count) {
    side *s = &p->kinds[k], *f = p->num_kinds == 3 ? &p->kinds[1] : NULL;
    const side *h = &p->kinds[p->num_kinds - 1];
    int64_t low = low_frontier(p), high = high_frontier(p);
    int64_t grain = f ? f->stride : 1, floating = f ? f->live : 0;
    if (s == f) {
        if (!s->live) s->first = s->end = s->hint = align_up(low, grain) / grain;
        int64_t below = s->first - align_up(low, grain) / grain, above = high / grain - s->end;
        if (below + above >= count) return;
        /* the high side gives first, as far as its holes go, the low side the rest */
        int64_t most = (p->arena - h->live * h->stride) / grain - s->end;
        int64_t want = count - below < most ? count - below : most;
        make_way(p, low, want > above ? (s->end + want) * grain : high);
        above = high_frontier(p) / grain - s->end;
        if (below + above < count) make_way(p, (s->first - (count - above)) * grain, high_frontier(p));
        return;
    }
    int64_t reach = (s->end + count) * s->stride;
    if (k == 0) {
        int64_t need = align_up(reach, grain) + floating * grain;
        if (need > high || !floating) make_way(p, low, need);
        if (f) squeeze(p, reach, high_frontier(p));
    } else {
        reach = p->arena - reach;
        int64_t need = reach / grain * grain - floating * grain;
        if (need < low || !floating) make_way(p, need, high);
        if (f) squeeze(p, low_frontier(p), reach);
    }
}

/* A hole, else the next cell past the frontier: open_room has seen to it that one is there. */
static int64_t place(pool *p, int32_t k) {
    side *s = &p->kinds[k];
    int64_t cell = hole(s, s->first, s->end);
    if (cell != NONE) return cell;
    if (p->num_kinds == 3 && k == 1 && (s->end + 1) * s->stride > high_frontier(p)) return s->first - 1;
    return s->end;
}

int up_two_ended_fits(const pool *p, const int64_t *counts) {
    int64_t low = 0;
    for (int32_t k = 0; k < p->num_kinds; k++) {
        const side *s = &p->kinds[k];
        if (k + 1 < p->num_kinds) low = align_up(low, s->stride);
        low += (s->live + counts[k]) * s->stride;
    }
    return low <= p->arena;
}

void up_two_ended_take(pool *p, int32_t kind, const int32_t *ids, int64_t count) {
    side *s = &p->kinds[kind];
    int64_t holes = s->end - s->first - s->live;
    if (count > holes) {
        p->moved_here = 0;
        open_room(p, kind, count - holes);
        if (p->moved_here > p->worst_window) p->worst_window = p->moved_here;
        p->moved += p->moved_here;
        p->windows += p->moved_here > 0;
    }
    for (int64_t i = 0; i < count; i++) put(s, place(p, kind), ids[i]);
    p->allocated += count * s->stride;
}

void up_two_ended_drop(pool *p, int32_t kind, const int32_t *ids, int64_t count) {
    side *s = &p->kinds[kind];
    for (int64_t i = 0; i < count; i++) take_away(s, s->cell_of[ids[i]], p->num_kinds == 3 && kind == 1);
}

void up_two_ended_stats(const pool *p, int64_t *out) {
    out[0] = p->moved; out[1] = p->allocated; out[2] = p->worst_window; out[3] = p->windows; out[4] = p->moved_cells;
}

int64_t up_two_ended_offset(const pool *p, int32_t kind, int32_t id) {
    const side *s = &p->kinds[kind];
    int64_t at = s->cell_of[id] * s->stride;
    return kind > 0 && kind == p->num_kinds - 1 ? p->arena - at - s->stride : at;
}

/* map_model.h: what grids.c must agree with, written the obvious way.
 *
 * A granule is one cell of the smallest kind. Everything is recounted from the handles' cells into one byte a granule;
 * nothing is kept up to date cleverly. The model does not choose cells: it says which choices are legal, what the
 * capacity formula answers, and what bytes every handle must read.
 */
#ifndef UP_MAP_MODEL_H
#define UP_MAP_MODEL_H

#include <stdint.h>
#include <string.h>

#include "grids.h"

#define MAX_GRANULES 10240
#define MAX_HANDLES (MAX_GRANULES + 64)

/* Contents of a live cell. Other values are written by the fuzzer: (kind + 1) << 28 | number. */
#define CONTENT_ZERO 0u
#define CONTENT_FRESH 0xFFFFFFFFu    /* zero, or bytes that this kind wrote last */
#define CONTENT_ANYTHING 0xFFFFFFFEu /* never zeroed, or promised to be overwritten */
#define GARBAGE 0xF0000000u          /* what a new arena holds */
#define NO_KIND 255

typedef struct {
    int num_kinds;
    int64_t arena_bytes, reserved_bytes, granule_bytes;
    int64_t stride_bytes[UP_MAX_KINDS];
    int32_t per_cell[UP_MAX_KINDS]; /* granules in a cell */
    int32_t zero_policy[UP_MAX_KINDS];
    int32_t max_handles;

    int32_t cell[UP_MAX_KINDS][MAX_HANDLES + 1]; /* -1: none */
    uint32_t content[UP_MAX_KINDS][MAX_HANDLES + 1];
    int32_t pins[MAX_HANDLES + 1];
    int64_t generation[MAX_HANDLES + 1];
    uint8_t is_live[MAX_HANDLES + 1];
    int32_t live_handles[MAX_HANDLES + 1]; /* in no particular order */
    int32_t live_at[MAX_HANDLES + 1];
    int32_t num_live;
    int64_t reserved[UP_MAX_KINDS]; /* promised cells */

    uint8_t last_kind[MAX_GRANULES + 1]; /* the kind that owned the granule last */
    uint32_t memory[MAX_GRANULES + 1];   /* the arena, one word a granule, as the sealed plans left it */

    /* Recounted by model_recount. */
    uint8_t is_taken[MAX_GRANULES + 1], is_held[MAX_GRANULES + 1]; /* live or reserved; pinned or reserved */
    int64_t granules;
    int64_t cells[UP_MAX_KINDS], live[UP_MAX_KINDS], pinned[UP_MAX_KINDS], available[UP_MAX_KINDS];
    int64_t pin_free[UP_MAX_KINDS], pin_free_without_pins[UP_MAX_KINDS];
} map_model;

static void model_add_handle(map_model *m, int32_t handle) {
    m->is_live[handle] = 1;
    m->live_at[handle] = m->num_live;
    m->live_handles[m->num_live++] = handle;
    for (int k = 0; k < m->num_kinds; k++)
        m->cell[k][handle] = -1;
    m->pins[handle] = 0;
}

static void model_drop_handle(map_model *m, int32_t handle) {
    int32_t last = m->live_handles[--m->num_live];
    m->live_handles[m->live_at[handle]] = last;
    m->live_at[last] = m->live_at[handle];
    m->is_live[handle] = 0;
    for (int k = 0; k < m->num_kinds; k++)
        m->cell[k][handle] = -1;
    m->pins[handle] = 0;
}

static int model_has_no_cell(const map_model *m, int32_t handle) {
    for (int k = 0; k < m->num_kinds; k++)
        if (m->cell[k][handle] >= 0)
            return 0;
    return 1;
}

/* Recount for an arena of `arena_bytes`; 0 when two live cells overlap or one lies outside. */
static int model_recount(map_model *m, int64_t arena_bytes) {
    int64_t reserved = (m->reserved_bytes + m->granule_bytes - 1) / m->granule_bytes;
    m->granules = arena_bytes / m->granule_bytes;
    memset(m->is_taken, 0, (size_t)m->granules + 1);
    memset(m->is_held, 0, (size_t)m->granules + 1);
    memset(m->is_taken, 1, (size_t)(reserved < m->granules ? reserved : m->granules));
    memset(m->is_held, 1, (size_t)(reserved < m->granules ? reserved : m->granules));
    memset(m->live, 0, sizeof m->live);
    memset(m->pinned, 0, sizeof m->pinned);
    for (int32_t i = 0; i < m->num_live; i++) {
        int32_t handle = m->live_handles[i];
        for (int k = 0; k < m->num_kinds; k++) {
            int64_t first = (int64_t)m->cell[k][handle] * m->per_cell[k], end = first + m->per_cell[k];
            if (m->cell[k][handle] < 0)
                continue;
            if (end > m->granules)
                return 0;
            for (int64_t g = first; g < end; g++) {
                if (m->is_taken[g])
                    return 0;
                m->is_taken[g] = 1;
                m->is_held[g] = m->pins[handle] > 0;
            }
            m->live[k]++;
            m->pinned[k] += m->pins[handle] > 0;
        }
    }
    for (int k = 0; k < m->num_kinds; k++) {
        int64_t per_cell = m->per_cell[k], cells = m->granules / per_cell;
        int64_t blocked = (reserved + per_cell - 1) / per_cell;
        m->available[k] = m->pin_free[k] = 0;
        m->cells[k] = m->pin_free_without_pins[k] = cells > blocked ? cells - blocked : 0;
        for (int64_t c = 0; c < cells; c++) {
            uint8_t taken = 0, held = 0;
            for (int64_t g = c * per_cell; g < (c + 1) * per_cell; g++) {
                taken |= m->is_taken[g];
                held |= m->is_held[g];
            }
            m->available[k] += !taken;
            m->pin_free[k] += !held;
        }
    }
    return 1;
}

/* The capacity formula: 1 when `demand` fits on top of the live cells and the `promised` ones. */
static int model_fits(const map_model *m, const int64_t *demand, const int64_t *promised, const int64_t *pin_free,
                      int pins_lifted) {
    int64_t need = 0;
    for (int k = 0; k < m->num_kinds; k++) {
        if (k > 0)
            need *= m->stride_bytes[k - 1] / m->stride_bytes[k];
        need += demand[k] + promised[k] + m->live[k] - (pins_lifted ? 0 : m->pinned[k]);
        if (need > pin_free[k])
            return 0;
    }
    return 1;
}

/* 1 when `demand` fits into available cells, without a move. */
static int model_fits_unmoved(const map_model *m, const int64_t *demand) {
    int64_t need = 0;
    for (int k = 0; k < m->num_kinds; k++) {
        if (k > 0)
            need *= m->stride_bytes[k - 1] / m->stride_bytes[k];
        need += demand[k];
        if (need > m->available[k])
            return 0;
    }
    return 1;
}

/* The largest n of `unit` (cells of each kind) that still fits. */
static int64_t model_placeable(const map_model *m, const int64_t *unit, int pins_lifted) {
    int64_t low = 0, high = m->granules + 1, demand[UP_MAX_KINDS];
    const int64_t *pin_free = pins_lifted ? m->pin_free_without_pins : m->pin_free;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        for (int k = 0; k < m->num_kinds; k++)
            demand[k] = unit[k] * middle;
        if (model_fits(m, demand, m->reserved, pin_free, pins_lifted))
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The fewest live granules in a window of `kind` that may be opened: no pinned, reserved or live cell of its own size
 * or larger in the way. -1 when there is none. */
static int64_t model_cheapest_window(const map_model *m, int kind) {
    static uint8_t is_closed[MAX_GRANULES + 1];
    int64_t least = -1, per_cell = m->per_cell[kind];
    memcpy(is_closed, m->is_held, (size_t)m->granules);
    for (int32_t i = 0; i < m->num_live; i++)
        for (int k = 0; k <= kind; k++)
            if (m->cell[k][m->live_handles[i]] >= 0)
                memset(is_closed + (int64_t)m->cell[k][m->live_handles[i]] * m->per_cell[k], 1, (size_t)m->per_cell[k]);
    for (int64_t c = 0; c < m->granules / per_cell; c++) {
        int64_t live = 0, closed = 0;
        for (int64_t g = c * per_cell; g < (c + 1) * per_cell; g++) {
            live += m->is_taken[g];
            closed += is_closed[g];
        }
        if (closed == 0 && (least < 0 || live < least)) least = live;
    }
    return least;
}

/* 1 when the bytes of the cell last belonged to another kind. */
static int model_is_dirty(const map_model *m, int kind, int32_t cell) {
    for (int64_t g = (int64_t)cell * m->per_cell[kind]; g < ((int64_t)cell + 1) * m->per_cell[kind]; g++)
        if (m->last_kind[g] != kind)
            return 1;
    return 0;
}

static void model_set_last_kind(map_model *m, int kind, int32_t cell) {
    memset(m->last_kind + (int64_t)cell * m->per_cell[kind], kind, (size_t)m->per_cell[kind]);
}

/* 1 when the memory of the cell is what `content` says. */
static int model_reads(const map_model *m, int kind, int32_t cell, uint32_t content) {
    const uint32_t *word = m->memory + (int64_t)cell * m->per_cell[kind];
    uint32_t wrong = 0;
    if (content == CONTENT_ANYTHING)
        return 1;
    for (int32_t i = 0; i < m->per_cell[kind]; i++)
        wrong |= content == CONTENT_FRESH ? (word[i] != 0 && word[i] >> 28 != (uint32_t)kind + 1) : word[i] != content;
    return !wrong;
}

#endif

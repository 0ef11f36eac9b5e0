/* two_ended.h: the two-ended pool with compaction, a baseline for the replay. Positions only, no bytes.
 *
 * Kind 0 grows up from byte 0; the last kind grows down from the end; a third kind, when there is one, floats between:
 *
 *     | 0 0 . 0 0 |      | 1 1 . 1 |            | 2 . 2 2 2 2 |
 *     low side    ^ frontier            frontier^      high side
 *
 * A side's frontier is its live cell farthest from its own end. A side takes the hole nearest its own end first and
 * extends its frontier when it has none; a hole can be used by its own side only. When extending would cross the
 * neighbour's frontier, the neighbour is compacted:
 *
 *     minimal-move      exactly its live cells inside the room that is needed move, into the holes nearest by
 *     pack-everything   the whole side is packed: every live cell past the packed length moves into a hole
 *
 * Strides are bare ones (no padding): nothing here needs them to nest. Ids are the caller's, one live cell of one kind
 * each. Complexity: O(cells taken, dropped, moved, and scanned for holes). One thread at a time.
 */
#ifndef UP_TWO_ENDED_H
#define UP_TWO_ENDED_H

#include <stdint.h>

typedef struct up_two_ended up_two_ended; /* opaque */

/* Make an empty pool of `arena` bytes. `strides` are those of 1 to 3 kinds, the low side's first; ids lie in [0, ids).
 * Returns NULL when the arguments are out of range or memory ran out. */
up_two_ended *up_two_ended_create(int64_t arena, const int64_t *strides, int32_t num_kinds, int32_t pack, int32_t ids);
void up_two_ended_destroy(up_two_ended *p);

/* Whether counts[k] more cells of each kind fit, once everything is packed. */
int up_two_ended_fits(const up_two_ended *p, const int64_t *counts);

/* Place `count` cells of a kind, one for each id. The caller has checked that they fit. */
void up_two_ended_take(up_two_ended *p, int32_t kind, const int32_t *ids, int64_t count);

/* Take the ids' cells of a kind away. They are live. */
void up_two_ended_drop(up_two_ended *p, int32_t kind, const int32_t *ids, int64_t count);

/* out[5]: bytes moved, bytes allocated, most bytes moved by one opening of room, openings that moved, cells moved. */
void up_two_ended_stats(const up_two_ended *p, int64_t *out);

/* Byte offset of an id's cell of a kind. */
int64_t up_two_ended_offset(const up_two_ended *p, int32_t kind, int32_t id);

#endif

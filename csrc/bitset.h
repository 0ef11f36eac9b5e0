/* bitset.h: a hierarchical bitmap, 64-ary.
 *
 * Level 0 holds one bit per member. Bit i of level n + 1 says that word i of level n is not zero. Finding the first or
 * last member, or the nearest one at or below / at or above a position, reads one word per level (at most 6 for 2^31
 * bits); setting and clearing touch an upper level only when a word becomes or stops being zero.
 *
 *     level 1   [ 1 0 1 ]                     bit w: word w below is not zero
 *     level 0   [ 0110.. | 0000.. | 1000.. ]
 *
 * Not thread-safe. Positions are not checked outside asserts: callers own that.
 */
#ifndef UP_BITSET_H
#define UP_BITSET_H

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UP_BITSET_LEVELS 6

typedef struct {
    int64_t size; /* bits */
    int32_t levels;
    uint64_t *level[UP_BITSET_LEVELS];
} up_bitset;

static inline int up_popcount(uint64_t word) { return __builtin_popcountll(word); }
static inline int up_lowest(uint64_t word) { return __builtin_ctzll(word); }
static inline int up_highest(uint64_t word) { return 63 - __builtin_clzll(word); }

/* Bits lo..hi-1 of a word, 0 <= lo <= hi <= 64. */
static inline uint64_t up_bits_between(int lo, int hi) {
    uint64_t below_hi = hi == 64 ? ~UINT64_C(0) : (UINT64_C(1) << hi) - 1;
    return lo == 64 ? 0 : below_hi & ~((UINT64_C(1) << lo) - 1);
}

/* Words of level 0 for `size` bits; at least one, so that no array is empty. */
static inline int64_t up_words(int64_t size) { return size > 0 ? (size + 63) >> 6 : 1; }

/* All bits clear. Returns 0 when memory ran out; the set is then empty and safe to free. */
static inline int up_bitset_init(up_bitset *b, int64_t size) {
    memset(b, 0, sizeof *b);
    int64_t total = 0, words[UP_BITSET_LEVELS];
    int levels = 0;
    for (int64_t n = up_words(size);; n = up_words(n)) {
        assert(levels < UP_BITSET_LEVELS);
        words[levels++] = n;
        total += n;
        if (n == 1) break;
    }
    uint64_t *memory = calloc((size_t)total, sizeof *memory);
    if (!memory) return 0;
    b->size = size;
    b->levels = levels;
    for (int l = 0; l < levels; l++) {
        b->level[l] = memory;
        memory += words[l];
    }
    return 1;
}

static inline void up_bitset_free(up_bitset *b) {
    free(b->level[0]);
    memset(b, 0, sizeof *b);
}

static inline int up_bitset_test(const up_bitset *b, int64_t i) {
    assert(i >= 0 && i < b->size);
    return (int)(b->level[0][i >> 6] >> (i & 63) & 1);
}

/* Word `w` of level 0 has just become non-zero / zero: tell the levels above. */
static inline void up_bitset_word_filled(up_bitset *b, int64_t w) {
    for (int l = 1; l < b->levels; l++) {
        uint64_t *word = &b->level[l][w >> 6], old = *word;
        *word = old | UINT64_C(1) << (w & 63);
        if (old) return;
        w >>= 6;
    }
}
static inline void up_bitset_word_emptied(up_bitset *b, int64_t w) {
    for (int l = 1; l < b->levels; l++) {
        uint64_t *word = &b->level[l][w >> 6];
        *word &= ~(UINT64_C(1) << (w & 63));
        if (*word) return;
        w >>= 6;
    }
}

/* Set / clear the bits of `mask` in word `w`. */
static inline void up_bitset_set_word(up_bitset *b, int64_t w, uint64_t mask) {
    uint64_t old = b->level[0][w];
    b->level[0][w] = old | mask;
    if (!old && mask) up_bitset_word_filled(b, w);
}
static inline void up_bitset_clear_word(up_bitset *b, int64_t w, uint64_t mask) {
    uint64_t old = b->level[0][w], now = old & ~mask;
    b->level[0][w] = now;
    if (old && !now) up_bitset_word_emptied(b, w);
}
static inline void up_bitset_set(up_bitset *b, int64_t i) {
    assert(i >= 0 && i < b->size);
    up_bitset_set_word(b, i >> 6, UINT64_C(1) << (i & 63));
}
static inline void up_bitset_clear(up_bitset *b, int64_t i) {
    assert(i >= 0 && i < b->size);
    up_bitset_clear_word(b, i >> 6, UINT64_C(1) << (i & 63));
}

static inline void up_words_set_range(uint64_t *words, int64_t lo, int64_t hi) {
    int64_t first = lo >> 6, last = (hi - 1) >> 6;
    for (int64_t w = first; w <= last; w++)
        words[w] |= up_bits_between(w == first ? (int)(lo & 63) : 0, w == last ? (int)((hi - 1) & 63) + 1 : 64);
}
static inline void up_words_clear_range(uint64_t *words, int64_t lo, int64_t hi) {
    int64_t first = lo >> 6, last = (hi - 1) >> 6;
    for (int64_t w = first; w <= last; w++)
        words[w] &= ~up_bits_between(w == first ? (int)(lo & 63) : 0, w == last ? (int)((hi - 1) & 63) + 1 : 64);
}

/* Set / clear bits lo..hi-1. O((hi - lo) / 64). */
static inline void up_bitset_set_range(up_bitset *b, int64_t lo, int64_t hi) {
    assert(lo >= 0 && hi <= b->size);
    for (int l = 0; l < b->levels && lo < hi; l++) {
        up_words_set_range(b->level[l], lo, hi);
        lo >>= 6;
        hi = ((hi - 1) >> 6) + 1;
    }
}
static inline void up_bitset_clear_range(up_bitset *b, int64_t lo, int64_t hi) {
    assert(lo >= 0 && hi <= b->size);
    for (int l = 0; l < b->levels && lo < hi; l++) {
        up_words_clear_range(b->level[l], lo, hi);
        int64_t first = lo >> 6, last = (hi - 1) >> 6; /* border words may keep bits outside the range */
        lo = first + (b->level[l][first] != 0);
        hi = last + (b->level[l][last] == 0);
    }
}

/* Bits set in lo..hi-1. O((hi - lo) / 64). */
static inline int64_t up_bitset_count_range(const up_bitset *b, int64_t lo, int64_t hi) {
    int64_t count = 0, first = lo >> 6, last = (hi - 1) >> 6;
    if (lo >= hi) return 0;
    for (int64_t w = first; w <= last; w++)
        count += up_popcount(b->level[0][w] & up_bits_between(w == first ? (int)(lo & 63) : 0,
                                                              w == last ? (int)((hi - 1) & 63) + 1 : 64));
    return count;
}

static inline int64_t up_bitset_descend_high(const up_bitset *b, int level, int64_t i) {
    for (; level > 0; level--) i = i << 6 | up_highest(b->level[level - 1][i]);
    return i;
}
static inline int64_t up_bitset_descend_low(const up_bitset *b, int level, int64_t i) {
    for (; level > 0; level--) i = i << 6 | up_lowest(b->level[level - 1][i]);
    return i;
}

/* The highest member <= i, or -1. */
static inline int64_t up_bitset_at_or_below(const up_bitset *b, int64_t i) {
    if (i >= b->size) i = b->size - 1;
    for (int l = 0; l < b->levels && i >= 0; l++) {
        uint64_t word = b->level[l][i >> 6] & up_bits_between(0, (int)(i & 63) + 1);
        if (word) return up_bitset_descend_high(b, l, (i & ~INT64_C(63)) | up_highest(word));
        i = (i >> 6) - 1; /* the words below this one */
    }
    return -1;
}

/* The lowest member >= i, or -1. */
static inline int64_t up_bitset_at_or_above(const up_bitset *b, int64_t i) {
    if (i < 0) i = 0;
    int64_t limit = b->size;
    for (int l = 0; l < b->levels && i < limit; l++) {
        uint64_t word = b->level[l][i >> 6] & up_bits_between((int)(i & 63), 64);
        if (word) return up_bitset_descend_low(b, l, (i & ~INT64_C(63)) | up_lowest(word));
        i = (i >> 6) + 1;
        limit = (limit + 63) >> 6;
    }
    return -1;
}

static inline int64_t up_bitset_first(const up_bitset *b) {
    uint64_t top = b->level[b->levels - 1][0];
    return top ? up_bitset_descend_low(b, b->levels - 1, up_lowest(top)) : -1;
}
static inline int64_t up_bitset_last(const up_bitset *b) {
    uint64_t top = b->level[b->levels - 1][0];
    return top ? up_bitset_descend_high(b, b->levels - 1, up_highest(top)) : -1;
}

#endif

/* What a stream sends: what is still to be sent, and what is kept until the other end has it.
 *
 * Bytes have positions, counted from the first one of the stream, whatever connections have carried it. They lie in chunks;
 * the last chunk is being filled. Invariants:
 *
 * 1. acked <= sent <= sealed, and every byte from `acked` on is in a chunk.
 * 2. A byte is sent again as it was: in a sealed lane, the same ciphertext of the same record. So no nonce is used for two
 *    texts.
 * 3. `acked` is what the other end has for sure. On a direct connection its kernel has acknowledged it: the other end reads
 *    that before it says where to go on, and this end counts no acknowledgement after it was asked to (freeze). Through a
 *    relay, or where the system does not tell, it is what the other end itself has told (kept_acknowledge).
 *
 * Where nothing is kept, all that the kernel has taken counts as acknowledged, and one chunk is used again and again.
 */
#ifndef COVEY_KEPT_H
#define COVEY_KEPT_H

#include "native.h"

struct chunk {
    uint8_t *bytes;
    int64_t start;  /* the position of its first byte */
    int64_t filled;
};

struct kept {
    struct chunk *chunks; /* in the order of positions */
    int32_t count, room;
    uint8_t **spare;      /* memory for chunks, used last in first out: that is in the cache */
    int32_t spare_count;
    int64_t chunk_bytes;
    int64_t sealed, sent, acked; /* `sealed`: all bytes of the stream so far, which in a plain lane are in clear */
    int64_t sent_most;    /* the highest that `sent` ever was: the other end cannot have more */
    bool is_kept;         /* until the other end has it, not only its kernel */
    bool is_direct;       /* the acknowledgements of this connection are those of the other end's kernel */
};

bool kept_fill(struct kept *kept, int64_t chunk_bytes, bool is_kept, bool is_direct);
void kept_release(struct kept *kept);

static inline int64_t kept_unsent(const struct kept *kept) { return kept->sealed - kept->sent; }

/* Where the next bytes go, at least `least` of them and at most *room; NULL if there is no room now. */
uint8_t *kept_place(struct kept *kept, int fd, int64_t least, int64_t *room);
void kept_add(struct kept *kept, int64_t nbytes);

/* Gives the kernel what is still to be sent. Sets *moved if it took any; false with errno set if the connection broke. */
bool kept_flush(struct kept *kept, int fd, bool *moved);

/* Notes that so many bytes were sent, which lie at the place that kept_place gave if they are kept. */
void kept_sent(struct kept *kept, int64_t nbytes);

/* Learns what the other end's kernel has. A connection that has broken tells nothing that could be relied on. */
void kept_look(struct kept *kept, int fd);

/* Notes that the other end has all before this position. False if that cannot be. */
bool kept_acknowledge(struct kept *kept, int64_t position);

/* Goes on from this position, on another connection. False if the bytes from there on are not kept. */
bool kept_rewind(struct kept *kept, int64_t position, bool is_direct);

#endif

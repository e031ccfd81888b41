/* What a stream sends and keeps; kept.h has the invariants. */
#include "kept.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#if defined(__linux__)
#include <linux/sockios.h>
#endif

enum {
    KEPT_LIMIT = 1 << 26, /* bytes of chunks; with all of them in use, the stream waits until something is acknowledged */
    LEAST_CHUNKS = 4,
};

static int32_t most_chunks(const struct kept *kept)
{
    int32_t most = (int32_t)(KEPT_LIMIT / kept->chunk_bytes);
    return most < LEAST_CHUNKS ? LEAST_CHUNKS : most;
}

static bool add_chunk(struct kept *kept)
{
    uint8_t *bytes = kept->spare_count ? kept->spare[--kept->spare_count] : malloc((size_t)kept->chunk_bytes);
    if (bytes == NULL)
        return false;
    kept->chunks[kept->count++] = (struct chunk){.bytes = bytes, .start = kept->sealed};
    return true;
}

bool kept_fill(struct kept *kept, int64_t chunk_bytes, bool is_kept, bool is_direct)
{
    kept->chunk_bytes = chunk_bytes;
    kept->is_kept = is_kept;
    kept->is_direct = is_direct;
    kept->room = is_kept ? most_chunks(kept) : 1;
    kept->chunks = calloc((size_t)kept->room, sizeof *kept->chunks);
    kept->spare = calloc((size_t)kept->room, sizeof *kept->spare);
    return kept->chunks != NULL && kept->spare != NULL && add_chunk(kept);
}

void kept_release(struct kept *kept)
{
    while (kept->count)
        free(kept->chunks[--kept->count].bytes);
    while (kept->spare_count)
        free(kept->spare[--kept->spare_count]);
    free(kept->chunks);
    free(kept->spare);
    kept->chunks = NULL;
    kept->spare = NULL;
}

void kept_look(struct kept *kept, int fd)
{
#if defined(__linux__)
    int unacked = 0;
    struct pollfd look = {.fd = fd, .events = 0};
    if (kept->is_direct && ioctl(fd, SIOCOUTQ, &unacked) == 0 && poll(&look, 1, 0) == 0 && unacked >= 0 &&
        kept->sent - unacked > kept->acked)
        kept->acked = kept->sent - unacked;
#else
    (void)kept, (void)fd;
#endif
}

/* Forgets what is acknowledged. The last chunk stays: it is being filled. */
static void trim(struct kept *kept)
{
    int32_t gone = 0;
    while (gone < kept->count - 1 && kept->chunks[gone].start + kept->chunks[gone].filled <= kept->acked)
        kept->spare[kept->spare_count++] = kept->chunks[gone++].bytes;
    if (gone) {
        kept->count -= gone;
        memmove(kept->chunks, kept->chunks + gone, (size_t)kept->count * sizeof *kept->chunks);
    }
}

uint8_t *kept_place(struct kept *kept, int fd, int64_t least, int64_t *room)
{
    struct chunk *last = &kept->chunks[kept->count - 1];
    if (!kept->is_kept && kept->sent == kept->sealed) {
        kept->acked = last->start = kept->sealed;
        last->filled = 0;
    }
    if (kept->chunk_bytes - last->filled < least) {
        if (!kept->is_kept)
            return NULL;
        kept_look(kept, fd);
        trim(kept);
        if (kept->count == kept->room || !add_chunk(kept))
            return NULL;
        last = &kept->chunks[kept->count - 1];
    }
    *room = kept->chunk_bytes - last->filled;
    return last->bytes + last->filled;
}

void kept_add(struct kept *kept, int64_t nbytes)
{
    kept->chunks[kept->count - 1].filled += nbytes;
    kept->sealed += nbytes;
}

void kept_sent(struct kept *kept, int64_t nbytes)
{
    if (kept->is_kept)
        kept->chunks[kept->count - 1].filled += nbytes;
    kept->sealed += nbytes;
    kept->sent += nbytes;
    if (kept->sent > kept->sent_most)
        kept->sent_most = kept->sent;
}

bool kept_flush(struct kept *kept, int fd, bool *moved)
{
    while (kept->sent < kept->sealed) {
        int32_t index = kept->count - 1;
        while (kept->chunks[index].start > kept->sent)
            index--;
        const struct chunk *chunk = &kept->chunks[index];
        int64_t at = kept->sent - chunk->start, length = chunk->filled - at;
        ssize_t taken = send(fd, chunk->bytes + at, (size_t)length, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (taken < 0)
            return would_block(errno);
        *moved |= taken > 0;
        kept->sent += taken;
        if (kept->sent > kept->sent_most)
            kept->sent_most = kept->sent;
        if (taken < length)
            break;
    }
    return true;
}

bool kept_acknowledge(struct kept *kept, int64_t position)
{
    if (!kept->is_kept || position < 0 || position > kept->sent_most)
        return false;
    if (position > kept->acked)
        kept->acked = position;
    trim(kept);
    return true;
}

bool kept_rewind(struct kept *kept, int64_t position, bool is_direct)
{
    if (!kept->is_kept || position < kept->chunks[0].start || position > kept->sent_most)
        return false;
    kept->sent = kept->acked = position; /* if less was acknowledged for sure than it seemed, the rest is kept by chance */
    kept->is_direct = is_direct;
    return true;
}

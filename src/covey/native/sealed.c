/* Sealed lanes: AES-GCM records over one or several TCP streams, as covey/net/lanes/sealed.py and covey/wire/seal.py
 * describe them. The cipher is libcrypto's, from the library that Python's own ssl module has loaded.
 *
 * A record is sealed and opened in chunks that stay in the cache: a chunk is on its way while the next one is sealed. If
 * the libcrypto of Python's ssl module is much slower than the one in `cryptography` (older ones lack the instructions of
 * newer processors), the lane gets ciphers of the latter, and long records are sealed and opened by these, as a whole.
 * What arrives may be forged until its tag was verified, at the end of the record. So bytes that will be reduced wait in
 * scratch memory for the tag; bytes that are stored go to their place at once, and a forged record ends the lane and
 * with it the operation.
 *
 * What a stream carries is a row of bytes, its sealed records (lasting.h); what is sealed is written to where it is kept. The
 * two halves of the lane have a lock each, because a helper thread uses one of them, too.
 */
#include "keyed.h"
#include "lasting.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    RECORD_LIMIT = 1 << 21,
    FEW_STREAMS = 2,
    SPREAD_RECORD_LIMIT = 1 << 16, /* of a lane with more streams: see covey/wire/seal.py */
    CHUNK_BYTES = 1 << 17,
    CHUNKED_BYTES = CHUNK_BYTES + FIRST_BYTES + 2 * OVERHEAD_BYTES,
    READ_BYTES = 1 << 18,
    SPIN_BYTES = 1 << 17,
    HELPED_BYTES = 1 << 20, /* transfers of this size are worth the hand-over to another thread */
};

/* One stream, with the record that is being sealed into it and the one that is being opened. */
struct pipe {
    struct lasting *stream;

    /* The half that sends. */
    struct keyed sealer;
    int64_t renew_at;
    const uint8_t *plain; /* of the record that is being sealed: what is left of it */
    int64_t plain_left;

    /* The half that receives. */
    struct keyed opener;
    uint8_t *in; /* in[in_start:in_end] has arrived and is still sealed */
    int64_t in_start, in_end, in_room;
    uint8_t length[LENGTH_BYTES]; /* of the record that is being opened, as it arrived */
    int64_t record, opened; /* the length of the record that is being opened, 0 if none is, and how far it is */
};

struct sealed_lane {
    struct lasting_lane lasting;
    struct pipe *pipes;          /* one for each stream */
    int32_t out_turn, in_turn;   /* the pipes of the next record out and in */
    bool has_begun;              /* whether the first record of the current transfer was sealed */
    int64_t assigned;            /* payload bytes of the transfer that are in records */
    uint8_t first_out[FIRST_BYTES], first_in[FIRST_BYTES];
    int64_t record_limit;        /* the payload bytes in each record of a large transfer but the last */
    uint8_t *scratch;            /* a record that will be reduced */
    struct helper *helper;       /* NULL until a large transfer finds an idle core */
    bool is_helped;              /* the helper has the current transfer */
    char out_trouble[TROUBLE_BYTES];
};

static enum outcome forged(struct sealed_lane *sealed, struct pipe *pipe)
{
    crypto.clear_error();
    snprintf(sealed->lasting.base.trouble, TROUBLE_BYTES,
             "the bytes were altered on the way: record %llu of stream %d is not as it was sent",
             (unsigned long long)(pipe->opener.count - (pipe->record ? 1 : 0)), (int)(pipe - sealed->pipes));
    return ENDED;
}

/* Sealing */

/* What became of an attempt to seal. */
enum sealing { SEALED, NO_ROOM, NOT_SEALED };

/* Seals more of the record that was begun. The room before `head` is taken by its length. */
static bool seal_into(struct pipe *pipe, uint8_t *head, int64_t taken, int64_t room)
{
    int written;
    int64_t step = smaller(pipe->plain_left, room - taken - TAG_BYTES);
    if (step < pipe->plain_left)
        step -= step % LINE_BYTES; /* whole blocks of the cipher are faster */
    if (crypto.encrypt_update(pipe->sealer.ctx, head + taken, &written, pipe->plain, (int)step) != 1)
        return false;
    pipe->plain += step;
    pipe->plain_left -= step;
    taken += step;
    if (!pipe->plain_left) {
        uint8_t *tag = head + taken;
        taken += TAG_BYTES;
        if (crypto.encrypt_final(pipe->sealer.ctx, tag, &written) != 1 ||
            crypto.ctx_ctrl(pipe->sealer.ctx, GET_TAG, TAG_BYTES, tag) != 1)
            return false;
    }
    kept_add(&pipe->stream->kept, taken);
    return true;
}

static enum sealing seal_more(struct pipe *pipe)
{
    int64_t room;
    uint8_t *head = kept_place(&pipe->stream->kept, pipe->stream->out_fd, smaller(pipe->plain_left + TAG_BYTES, CHUNK_BYTES), &room);
    if (head == NULL)
        return NO_ROOM;
    return seal_into(pipe, head, 0, smaller(room, CHUNKED_BYTES)) ? SEALED : NOT_SEALED;
}

/* Starts a record of `plain`. */
static enum sealing begin_record(struct pipe *pipe, const uint8_t *plain, int64_t nbytes)
{
    uint32_t length = (uint32_t)nbytes;
    bool is_whole = is_long(&pipe->sealer, nbytes);
    int64_t room, now = monotonic_ns();
    int64_t least = LENGTH_BYTES + (is_whole ? nbytes + TAG_BYTES : smaller(nbytes + TAG_BYTES, CHUNK_BYTES));
    uint8_t *head = kept_place(&pipe->stream->kept, pipe->stream->out_fd, least, &room);
    if (head == NULL)
        return NO_ROOM;
    if (pipe->sealer.count == pipe->sealer.rekey_at || now >= pipe->renew_at) {
        pipe->renew_at = now + REKEY_NS;
        length |= NEXT_KEY;
        if (!next_key(&pipe->sealer, true))
            return NOT_SEALED;
    }
    for (int index = 0; index < LENGTH_BYTES; index++)
        head[index] = (uint8_t)(length >> (8 * index));
    if (is_whole) {
        int64_t sealed_bytes = nbytes + TAG_BYTES;
        if (!work_whole(&pipe->sealer, true, head, plain, nbytes, head + LENGTH_BYTES, sealed_bytes))
            return NOT_SEALED;
        kept_add(&pipe->stream->kept, LENGTH_BYTES + sealed_bytes);
        return SEALED;
    }
    pipe->plain = plain;
    pipe->plain_left = nbytes;
    bool is_started = start_record(&pipe->sealer, head, true);
    return is_started && seal_into(pipe, head, LENGTH_BYTES, smaller(room, CHUNKED_BYTES)) ? SEALED : NOT_SEALED;
}

/* Gives the pipe whose turn it is the next record of the transfer. */
static enum sealing assign_record(struct sealed_lane *sealed, const struct outgoing *out)
{
    struct pipe *pipe = &sealed->pipes[sealed->out_turn];
    int64_t assigned;
    enum sealing began;
    if (!sealed->has_begun) {
        bool is_small = out->nbytes <= SMALL_BYTES;
        memcpy(sealed->first_out, out->header, HEADER_BYTES);
        if (is_small && out->nbytes)
            memcpy(sealed->first_out + HEADER_BYTES, out->data, (size_t)out->nbytes);
        assigned = is_small ? out->nbytes : 0;
        began = begin_record(pipe, sealed->first_out, HEADER_BYTES + assigned);
    } else {
        int64_t length = smaller(out->nbytes - sealed->assigned, sealed->record_limit);
        began = begin_record(pipe, out->data + sealed->assigned, length);
        assigned = sealed->assigned + length;
    }
    if (began == SEALED) {
        sealed->has_begun = true;
        sealed->assigned = assigned;
        sealed->out_turn = (sealed->out_turn + 1) % sealed->lasting.count;
    }
    return began;
}

/* Whether the pipe whose turn it is can begin a record: the one before it is sealed, and little of it is unsent. */
static bool has_room(const struct pipe *pipe)
{
    return !pipe->plain_left && kept_unsent(&pipe->stream->kept) <= FIRST_BYTES + OVERHEAD_BYTES;
}

/* Notes why nothing more can be sent. The other half of the lane may be in use on another thread, with its own trouble. */
static enum outcome cannot_send(struct sealed_lane *sealed, const char *what)
{
    PyOS_snprintf(sealed->out_trouble, TROUBLE_BYTES, "%s", what);
    return ENDED;
}

static enum outcome is_over(struct sealed_lane *sealed) { return cannot_send(sealed, sealed->lasting.over); }

/* Seals and sends what the kernel takes. On the thread of the operation, or on the helper's; with the lock of the half. */
static enum outcome send_more(struct sealed_lane *sealed, struct outgoing *out)
{
    enum outcome outcome = IDLE;
    bool is_on_its_way = false, moved = false;
    if (sealed->lasting.is_over)
        return is_over(sealed);
    while ((!sealed->has_begun || sealed->assigned < out->nbytes) && has_room(&sealed->pipes[sealed->out_turn])) {
        enum sealing sealing = assign_record(sealed, out);
        if (sealing == NOT_SEALED)
            return cannot_send(sealed, "libcrypto could not seal a record");
        if (sealing == NO_ROOM)
            break;
    }
    for (int32_t index = 0; index < sealed->lasting.count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (pipe->plain_left && !kept_unsent(&pipe->stream->kept) && seal_more(pipe) == NOT_SEALED)
            return cannot_send(sealed, "libcrypto could not seal a record");
        if (!lasting_flush(&sealed->lasting, pipe->stream, &moved, sealed->out_trouble))
            return ENDED;
        is_on_its_way |= kept_unsent(&pipe->stream->kept) || pipe->plain_left;
    }
    if (moved)
        outcome = MOVED;
    if (!is_on_its_way && sealed->has_begun && sealed->assigned == out->nbytes) {
        out->sent = out->nbytes;
        sealed->has_begun = false;
        outcome = MOVED; /* also if the control loop has sent the rest */
    }
    return outcome;
}

static enum outcome helped_step(struct lane *lane, struct outgoing *out, struct pollfd *polls, int *count)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    pthread_mutex_lock(sealed->lasting.out_lock);
    enum outcome outcome = send_more(sealed, out);
    for (int32_t index = 0; outcome == IDLE && index < sealed->lasting.count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (kept_unsent(&pipe->stream->kept) && !pipe->stream->is_out_broken)
            polls[*count - 1] = (struct pollfd){.fd = pipe->stream->out_fd, .events = POLLOUT}, ++*count;
    }
    pthread_mutex_unlock(sealed->lasting.out_lock);
    return outcome;
}

static enum outcome sealed_transmit(struct lane *lane, struct outgoing *out)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    enum outcome outcome;
    if (sealed->is_helped) {
        if (!helper_result(sealed->helper, &outcome))
            return IDLE;
        sealed->is_helped = false;
    } else {
        bool is_large = out->nbytes >= HELPED_BYTES && out->sent < 0 && !sealed->has_begun;
        if (is_large && lane->has_idle_core && sealed->helper == NULL)
            sealed->helper = helper_start(lane, helped_step);
        if (is_large && lane->has_idle_core && sealed->helper != NULL) {
            sealed->is_helped = true;
            helper_post(sealed->helper, out);
            return IDLE;
        }
        pthread_mutex_lock(sealed->lasting.out_lock);
        outcome = send_more(sealed, out);
        pthread_mutex_unlock(sealed->lasting.out_lock);
    }
    return outcome == ENDED ? lane_ended(lane, sealed->out_trouble) : outcome;
}

static void sealed_cancel(struct lane *lane)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    if (sealed->is_helped)
        helper_cancel(sealed->helper);
    sealed->is_helped = false;
}

/* Opening */

/* Takes what the stream has; IDLE if it has nothing. */
static enum outcome fill(struct sealed_lane *sealed, struct pipe *pipe)
{
    int64_t unopened = pipe->in_end - pipe->in_start, taken;
    if (pipe->in_start) {
        memmove(pipe->in, pipe->in + pipe->in_start, (size_t)unopened);
        pipe->in_start = 0;
        pipe->in_end = unopened;
    }
    struct iovec room = {pipe->in + unopened, (size_t)(pipe->in_room - unopened)};
    bool is_inside = unopened || pipe->record;
    enum outcome outcome = lasting_take(&sealed->lasting, pipe->stream, &room, 1, &taken,
                                        is_inside ? "the stream ended in the middle of a record" : "end of stream");
    pipe->in_end += taken;
    return outcome;
}

/* Reads the length of the next record, if it is here, and starts to open it. */
static enum outcome begin_opening(struct sealed_lane *sealed, struct pipe *pipe)
{
    const uint8_t *head = pipe->in + pipe->in_start;
    if (pipe->in_end - pipe->in_start < LENGTH_BYTES)
        return IDLE;
    uint32_t length = head[0] | (uint32_t)head[1] << 8 | (uint32_t)head[2] << 16 | (uint32_t)head[3] << 24;
    bool is_next_key = length & NEXT_KEY;
    length &= ~NEXT_KEY;
    if (length == 0 || length > sealed->record_limit) {
        snprintf(sealed->lasting.base.trouble, TROUBLE_BYTES, "the bytes were altered on the way: no record has %u bytes", length);
        return ENDED;
    }
    if (is_next_key ? !next_key(&pipe->opener, false) : pipe->opener.count == pipe->opener.rekey_at)
        return forged(sealed, pipe);
    memcpy(pipe->length, head, LENGTH_BYTES);
    if (!is_long(&pipe->opener, length) && !start_record(&pipe->opener, head, false))
        return forged(sealed, pipe);
    pipe->in_start += LENGTH_BYTES;
    pipe->record = length;
    pipe->opened = 0;
    return MOVED;
}

/* Opens what has arrived of the record, to `into`. MOVED once the record is complete and verified. */
static enum outcome open_more(struct sealed_lane *sealed, struct pipe *pipe, uint8_t *into)
{
    int written;
    if (is_long(&pipe->opener, pipe->record)) {
        int64_t sealed_bytes = pipe->record + TAG_BYTES;
        if (pipe->in_end - pipe->in_start < sealed_bytes)
            return IDLE;
        if (!work_whole(&pipe->opener, false, pipe->length, pipe->in + pipe->in_start, sealed_bytes, into, pipe->record))
            return forged(sealed, pipe);
        pipe->in_start += sealed_bytes;
        return MOVED;
    }
    int64_t step = smaller(pipe->record - pipe->opened, pipe->in_end - pipe->in_start);
    if (step < pipe->record - pipe->opened)
        step -= step % LINE_BYTES;
    if (step) {
        if (crypto.decrypt_update(pipe->opener.ctx, into + pipe->opened, &written, pipe->in + pipe->in_start, (int)step) != 1)
            return forged(sealed, pipe);
        pipe->opened += step;
        pipe->in_start += step;
    }
    if (pipe->opened < pipe->record || pipe->in_end - pipe->in_start < TAG_BYTES)
        return IDLE;
    uint8_t nothing[TAG_BYTES];
    if (crypto.ctx_ctrl(pipe->opener.ctx, SET_TAG, TAG_BYTES, pipe->in + pipe->in_start) != 1 ||
        crypto.decrypt_final(pipe->opener.ctx, nothing, &written) != 1)
        return forged(sealed, pipe);
    pipe->in_start += TAG_BYTES;
    return MOVED;
}

static enum outcome unexpected(struct sealed_lane *sealed, int64_t length, int64_t expected)
{
    snprintf(sealed->lasting.base.trouble, TROUBLE_BYTES,
             "the bytes were altered on the way: %lld bytes of payload instead of %lld", (long long)length,
             (long long)expected);
    return ENDED;
}

/* Opens the first record of a transfer as far as it is here. MOVED once it is in `first_in`. */
static enum outcome open_first(struct sealed_lane *sealed, struct pipe *pipe)
{
    if (!pipe->record) {
        enum outcome outcome = begin_opening(sealed, pipe);
        if (outcome != MOVED)
            return outcome;
    }
    if (pipe->record < HEADER_BYTES || pipe->record > FIRST_BYTES) {
        snprintf(sealed->lasting.base.trouble, TROUBLE_BYTES,
                 "the bytes were altered on the way: no transfer starts with a record of %lld bytes", (long long)pipe->record);
        return ENDED;
    }
    return open_more(sealed, pipe, sealed->first_in);
}

static enum outcome next_pipe(struct sealed_lane *sealed, struct pipe *pipe)
{
    pipe->record = 0;
    sealed->in_turn = (sealed->in_turn + 1) % sealed->lasting.count;
    return MOVED;
}

static enum outcome receive_first(struct sealed_lane *sealed, struct pipe *pipe, struct incoming *in)
{
    enum outcome outcome = open_first(sealed, pipe);
    if (outcome != MOVED)
        return outcome;
    int64_t length = pipe->record - HEADER_BYTES, expected = in->nbytes <= SMALL_BYTES ? in->nbytes : 0;
    next_pipe(sealed, pipe);
    memcpy(in->header, sealed->first_in, HEADER_BYTES);
    if (!header_matches(in))
        return OTHER_HEADER;
    if (length != expected)
        return unexpected(sealed, length, expected);
    in->got = 0;
    if (length && in->dest != NULL)
        memcpy(in->dest, sealed->first_in + HEADER_BYTES, (size_t)length);
    else if (length)
        in->absorb(in, 0, sealed->first_in + HEADER_BYTES, length);
    in->got = length;
    return MOVED;
}

static enum outcome receive_next(struct sealed_lane *sealed, struct pipe *pipe, struct incoming *in)
{
    int64_t expected = smaller(in->nbytes - in->got, sealed->record_limit);
    if (!pipe->record) {
        enum outcome outcome = begin_opening(sealed, pipe);
        if (outcome != MOVED)
            return outcome;
        if (pipe->record != expected)
            return unexpected(sealed, pipe->record, expected);
    }
    enum outcome outcome = open_more(sealed, pipe, in->dest != NULL ? in->dest + in->got : sealed->scratch);
    if (outcome != MOVED)
        return outcome;
    if (in->dest == NULL)
        in->absorb(in, in->got, sealed->scratch, expected);
    in->got += expected;
    return next_pipe(sealed, pipe);
}

static enum outcome receive_more(struct sealed_lane *sealed, struct incoming *in)
{
    bool moved = false;
    while (in->got < in->nbytes || in->got < 0) {
        struct pipe *pipe = &sealed->pipes[sealed->in_turn];
        enum outcome outcome =
            pipe->in_start == pipe->in_end ? IDLE
            : in->got < 0 ? receive_first(sealed, pipe, in) : receive_next(sealed, pipe, in);
        if (outcome == IDLE) {
            if (moved)
                return MOVED; /* let a send have its turn */
            outcome = fill(sealed, pipe);
            moved = true;
            if (outcome == IDLE)
                return IDLE;
        }
        if (outcome != MOVED)
            return outcome;
    }
    return MOVED;
}

static enum outcome sealed_receive(struct lane *lane, struct incoming *in)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    pthread_mutex_lock(sealed->lasting.in_lock);
    enum outcome outcome = receive_more(sealed, in);
    pthread_mutex_unlock(sealed->lasting.in_lock);
    return outcome;
}

/* The descriptor from which the next record comes; -1 if the stream waits for a connection, -2 if there is more to open. */
static int descriptor_to_read(struct sealed_lane *sealed)
{
    pthread_mutex_lock(sealed->lasting.in_lock);
    struct pipe *pipe = &sealed->pipes[sealed->in_turn];
    int fd = lasting_has_spill(pipe->stream) ? -2 : pipe->stream->is_in_broken ? -1 : pipe->stream->in_fd;
    pthread_mutex_unlock(sealed->lasting.in_lock);
    return fd;
}

static int sealed_park(struct lane *lane, struct pollfd *polls, bool sending, bool receiving)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    int count = 0;
    bool waits = false; /* for something that no descriptor tells */
    if (receiving) {
        int fd = descriptor_to_read(sealed);
        if (fd == -2)
            return -1;
        waits = fd < 0;
        if (fd >= 0)
            polls[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    if (sending && sealed->is_helped)
        polls[count++] = (struct pollfd){.fd = helper_fd(sealed->helper), .events = POLLIN};
    else if (sending) {
        bool is_any = false;
        pthread_mutex_lock(sealed->lasting.out_lock);
        for (int32_t index = 0; index < sealed->lasting.count; index++) {
            struct pipe *pipe = &sealed->pipes[index];
            if (!kept_unsent(&pipe->stream->kept) || pipe->stream->is_out_broken)
                continue;
            is_any = true;
            if (count && polls[0].fd == pipe->stream->out_fd) /* one entry for both directions */
                polls[0].events |= POLLOUT;
            else
                polls[count++] = (struct pollfd){.fd = pipe->stream->out_fd, .events = POLLOUT};
        }
        pthread_mutex_unlock(sealed->lasting.out_lock);
        waits |= !is_any;
    }
    if (!waits)
        return count ? count : -1;
    poll(polls, (nfds_t)count, sealed->lasting.is_resumable ? WAIT_MS : 0);
    return -1;
}

static void sealed_unpark(struct lane *lane) { (void)lane; }

static bool sealed_peek(struct lane *lane, uint8_t header[HEADER_BYTES])
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    bool is_there = false;
    pthread_mutex_lock(sealed->lasting.in_lock);
    struct pipe *pipe = &sealed->pipes[sealed->in_turn];
    for (enum outcome outcome = MOVED; !is_there && outcome == MOVED;) {
        outcome = pipe->in_start == pipe->in_end ? IDLE : open_first(sealed, pipe);
        if (outcome == IDLE)
            outcome = fill(sealed, pipe);
        else
            is_there = outcome == MOVED;
    }
    if (is_there)
        memcpy(header, sealed->first_in, HEADER_BYTES);
    pthread_mutex_unlock(sealed->lasting.in_lock);
    return is_there;
}

static void sealed_close(struct lane *lane)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    sealed_cancel(lane); /* the helper must not use a descriptor whose number may soon be another file's */
    lasting_close(&sealed->lasting);
}

static void sealed_release(struct lane *lane)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    if (sealed->helper != NULL)
        helper_end(sealed->helper);
    for (int32_t index = 0; sealed->pipes != NULL && index < sealed->lasting.count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        keyed_release(&pipe->sealer);
        keyed_release(&pipe->opener);
        free(pipe->in);
    }
    free(sealed->pipes);
    free(sealed->scratch);
    lasting_release(&sealed->lasting);
}

static const struct lane_functions sealed_functions = {
    sealed_transmit, sealed_receive, sealed_park, sealed_unpark, sealed_peek, sealed_cancel, sealed_close, sealed_release,
};

/* Sealed(streams, directs=None), each stream (fd, key out, scope out, cipher out, key in, scope in, cipher in); ciphers may
 * be None. The lane is resumable if `directs` tells of each stream whether its connection is direct. */
static int sealed_fill(PyObject *self, PyObject *args)
{
    struct lane *lane = (struct lane *)self;
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    PyObject *streams, *directs = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyTuple_Type, &streams, &PyTuple_Type, &directs))
        return -1;
    Py_ssize_t count = PyTuple_Size(streams);
    if (!crypto_is_loaded()) {
        PyErr_SetString(PyExc_ValueError, "libcrypto is loaded before a lane is sealed");
        return -1;
    }
    lane->functions = &sealed_functions;
    lane->spin_bytes = SPIN_BYTES;
    lane->python_bytes = INT64_MAX;
    if (!lasting_fill(&sealed->lasting, count, directs, false))
        return -1;
    sealed->record_limit = count <= FEW_STREAMS ? RECORD_LIMIT : SPREAD_RECORD_LIMIT;
    sealed->scratch = aligned_alloc(LINE_BYTES, (size_t)sealed->record_limit);
    sealed->pipes = calloc((size_t)count, sizeof *sealed->pipes);
    if (sealed->scratch == NULL || sealed->pipes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        int fd;
        pipe->stream = &sealed->lasting.streams[index];
        if (!keyed_take(PyTuple_GetItem(streams, index), &fd, &pipe->sealer, &pipe->opener))
            return -1;
        lasting_use(pipe->stream, fd);
        if (pipe->sealer.cipher != NULL)
            lane->python_bytes = LONG_BYTES;
        bool is_whole = pipe->sealer.cipher != NULL;
        pipe->in_room = is_whole ? sealed->record_limit + OVERHEAD_BYTES + FIRST_BYTES : READ_BYTES;
        pipe->in = malloc((size_t)pipe->in_room);
        int64_t chunk_bytes = (is_whole ? sealed->record_limit : 0) + CHUNKED_BYTES;
        bool is_filled =
            kept_fill(&pipe->stream->kept, chunk_bytes, sealed->lasting.is_resumable, pipe->stream->is_direct);
        if (!is_filled || pipe->in == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        pipe->renew_at = monotonic_ns() + REKEY_NS;
    }
    return 0;
}

struct kind sealed_kind = {
    .name = "covey._native.Sealed",
    .size = sizeof(struct sealed_lane),
    .fill = sealed_fill,
    .release = lane_release,
    .methods = lasting_methods,
    .members = lane_members,
};

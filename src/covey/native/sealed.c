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
 * A lane that is resumable does not end when a connection breaks: the stream waits until the control loop attaches another
 * connection, which goes on at the byte that the other end expects next. What is sent is kept until the other end has it
 * (kept.h). The two halves of a lane, sending and receiving, have a lock each, because the helper and the control loop use
 * them as well as the operation's thread. No thread waits for one half while it holds the other, or waits for a half while
 * it holds the interpreter's lock that the holder may need: the control loop gives that up first.
 */
#include "keyed.h"
#include "kept.h"

#include <errno.h>
#include <pthread.h>
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
    SPILL_LIMIT = 1 << 26,  /* bytes that a connection may still hold for this end when it is left */
    SPILL_STEP = 1 << 18,
    SLEEP_MS = 5,           /* between looks whether a stream goes on, which no descriptor tells */
};

/* One stream, with the record that is being sealed into it and the one that is being opened. */
struct pipe {
    /* The half that sends. */
    int out_fd;                  /* of the connection; the same as in_fd, except while another one is attached */
    _Atomic bool is_out_broken;  /* nothing more is sent on the connection */
    struct keyed sealer;
    int64_t renew_at;
    const uint8_t *plain; /* of the record that is being sealed: what is left of it */
    int64_t plain_left;
    struct kept kept;     /* what is sealed */

    /* The half that receives. */
    int in_fd;
    _Atomic bool is_in_broken;
    bool is_direct;       /* the connection goes through no relay: its end is the doing of the other end */
    bool is_drained;      /* all that the broken connection had was read */
    struct keyed opener;
    int64_t received;     /* bytes, on all connections */
    uint8_t *spill;       /* spill[spill_start:spill_end] was read from a connection that was left */
    int64_t spill_start, spill_end;
    uint8_t *in; /* in[in_start:in_end] has arrived and is still sealed */
    int64_t in_start, in_end, in_room;
    uint8_t length[LENGTH_BYTES]; /* of the record that is being opened, as it arrived */
    int64_t record, opened; /* the length of the record that is being opened, 0 if none is, and how far it is */
};

struct sealed_lane {
    struct lane base;
    pthread_mutex_t out_lock, in_lock; /* of the halves */
    bool has_locks;
    bool is_resumable;
    _Atomic bool is_over;        /* no connection will be attached any more; `over` says why */
    char over[TROUBLE_BYTES];
    int32_t pipe_count;
    struct pipe *pipes;
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
    snprintf(sealed->base.trouble, TROUBLE_BYTES,
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
    kept_add(&pipe->kept, taken);
    return true;
}

static enum sealing seal_more(struct pipe *pipe)
{
    int64_t room;
    uint8_t *head = kept_place(&pipe->kept, pipe->out_fd, smaller(pipe->plain_left + TAG_BYTES, CHUNK_BYTES), &room);
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
    uint8_t *head = kept_place(&pipe->kept, pipe->out_fd, least, &room);
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
        kept_add(&pipe->kept, LENGTH_BYTES + sealed_bytes);
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
        sealed->out_turn = (sealed->out_turn + 1) % sealed->pipe_count;
    }
    return began;
}

/* Whether the pipe whose turn it is can begin a record: the one before it is sealed, and little of it is unsent. */
static bool has_room(const struct pipe *pipe)
{
    return !pipe->plain_left && kept_unsent(&pipe->kept) <= FIRST_BYTES + OVERHEAD_BYTES;
}

/* Notes why nothing more can be sent. The other half of the lane may be in use on another thread, with its own trouble. */
static enum outcome cannot_send(struct sealed_lane *sealed, const char *what)
{
    PyOS_snprintf(sealed->out_trouble, TROUBLE_BYTES, "%s", what);
    return ENDED;
}

static enum outcome is_over(struct sealed_lane *sealed) { return cannot_send(sealed, sealed->over); }

/* Seals and sends what the kernel takes. On the thread of the operation, or on the helper's; with the lock of the half. */
static enum outcome send_more(struct sealed_lane *sealed, struct outgoing *out)
{
    enum outcome outcome = IDLE;
    bool is_on_its_way = false, moved = false;
    if (sealed->is_over)
        return is_over(sealed);
    while ((!sealed->has_begun || sealed->assigned < out->nbytes) && has_room(&sealed->pipes[sealed->out_turn])) {
        enum sealing sealing = assign_record(sealed, out);
        if (sealing == NOT_SEALED)
            return cannot_send(sealed, "libcrypto could not seal a record");
        if (sealing == NO_ROOM)
            break;
    }
    for (int32_t index = 0; index < sealed->pipe_count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (pipe->plain_left && !kept_unsent(&pipe->kept) && seal_more(pipe) == NOT_SEALED)
            return cannot_send(sealed, "libcrypto could not seal a record");
        if (kept_unsent(&pipe->kept) && !pipe->is_out_broken && !kept_flush(&pipe->kept, pipe->out_fd, &moved)) {
            say_error(sealed->out_trouble, errno);
            if (!sealed->is_resumable)
                return ENDED;
            pipe->is_out_broken = true;
        }
        is_on_its_way |= kept_unsent(&pipe->kept) || pipe->plain_left;
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
    pthread_mutex_lock(&sealed->out_lock);
    enum outcome outcome = send_more(sealed, out);
    for (int32_t index = 0; outcome == IDLE && index < sealed->pipe_count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (kept_unsent(&pipe->kept) && !pipe->is_out_broken)
            polls[*count - 1] = (struct pollfd){.fd = pipe->out_fd, .events = POLLOUT}, ++*count;
    }
    pthread_mutex_unlock(&sealed->out_lock);
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
        pthread_mutex_lock(&sealed->out_lock);
        outcome = send_more(sealed, out);
        pthread_mutex_unlock(&sealed->out_lock);
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

/* Leaves a connection that has broken, if another one may be attached; the rest of the lane goes on. */
static enum outcome leave(struct sealed_lane *sealed, struct pipe *pipe, enum outcome otherwise)
{
    if (!sealed->is_resumable || sealed->is_over)
        return otherwise;
    pipe->is_in_broken = pipe->is_drained = true;
    return IDLE;
}

/* Takes what the kernel has; IDLE if it has nothing. */
static enum outcome fill(struct sealed_lane *sealed, struct pipe *pipe)
{
    int64_t unopened = pipe->in_end - pipe->in_start;
    if (pipe->in_start) {
        memmove(pipe->in, pipe->in + pipe->in_start, (size_t)unopened);
        pipe->in_start = 0;
        pipe->in_end = unopened;
    }
    if (pipe->spill_start < pipe->spill_end) {
        int64_t step = smaller(pipe->spill_end - pipe->spill_start, pipe->in_room - unopened);
        memcpy(pipe->in + unopened, pipe->spill + pipe->spill_start, (size_t)step);
        pipe->spill_start += step;
        pipe->in_end += step;
        return MOVED;
    }
    if (pipe->is_in_broken)
        return sealed->is_over ? lane_ended(&sealed->base, sealed->over) : IDLE;
    ssize_t taken = recv(pipe->in_fd, pipe->in + unopened, (size_t)(pipe->in_room - unopened), MSG_DONTWAIT);
    if (taken < 0)
        return would_block(errno) ? IDLE : leave(sealed, pipe, lane_failed(&sealed->base, errno));
    if (taken == 0) {
        enum outcome ended = lane_ended(&sealed->base, unopened || pipe->record ? "the stream ended in the middle of a record"
                                                                                : "end of stream");
        return pipe->is_direct ? ended : leave(sealed, pipe, ended);
    }
    pipe->received += taken;
    pipe->in_end += taken;
    return MOVED;
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
        snprintf(sealed->base.trouble, TROUBLE_BYTES, "the bytes were altered on the way: no record has %u bytes", length);
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
    snprintf(sealed->base.trouble, TROUBLE_BYTES,
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
        snprintf(sealed->base.trouble, TROUBLE_BYTES,
                 "the bytes were altered on the way: no transfer starts with a record of %lld bytes", (long long)pipe->record);
        return ENDED;
    }
    return open_more(sealed, pipe, sealed->first_in);
}

static enum outcome next_pipe(struct sealed_lane *sealed, struct pipe *pipe)
{
    pipe->record = 0;
    sealed->in_turn = (sealed->in_turn + 1) % sealed->pipe_count;
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
    pthread_mutex_lock(&sealed->in_lock);
    enum outcome outcome = receive_more(sealed, in);
    pthread_mutex_unlock(&sealed->in_lock);
    return outcome;
}

/* The descriptor from which the next record comes; -1 if the stream waits for a connection, -2 if there is more to open. */
static int descriptor_to_read(struct sealed_lane *sealed)
{
    pthread_mutex_lock(&sealed->in_lock);
    struct pipe *pipe = &sealed->pipes[sealed->in_turn];
    int fd = pipe->spill_start < pipe->spill_end ? -2 : pipe->is_in_broken ? -1 : pipe->in_fd;
    pthread_mutex_unlock(&sealed->in_lock);
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
        pthread_mutex_lock(&sealed->out_lock);
        for (int32_t index = 0; index < sealed->pipe_count; index++) {
            struct pipe *pipe = &sealed->pipes[index];
            if (!kept_unsent(&pipe->kept) || pipe->is_out_broken)
                continue;
            is_any = true;
            if (count && polls[0].fd == pipe->out_fd) /* one entry for both directions */
                polls[0].events |= POLLOUT;
            else
                polls[count++] = (struct pollfd){.fd = pipe->out_fd, .events = POLLOUT};
        }
        pthread_mutex_unlock(&sealed->out_lock);
        waits |= !is_any;
    }
    if (!waits)
        return count ? count : -1;
    poll(polls, (nfds_t)count, sealed->is_resumable ? SLEEP_MS : 0);
    return -1;
}

static void sealed_unpark(struct lane *lane) { (void)lane; }

static bool sealed_peek(struct lane *lane, uint8_t header[HEADER_BYTES])
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    bool is_there = false;
    pthread_mutex_lock(&sealed->in_lock);
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
    pthread_mutex_unlock(&sealed->in_lock);
    return is_there;
}

static void sealed_close(struct lane *lane)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    sealed_cancel(lane); /* the helper must not use a descriptor whose number may soon be another file's */
    Py_BEGIN_ALLOW_THREADS /* the control loop may be at it, for a moment */
    pthread_mutex_lock(&sealed->out_lock);
    for (int32_t index = 0; index < sealed->pipe_count; index++)
        sealed->pipes[index].out_fd = -1;
    pthread_mutex_unlock(&sealed->out_lock);
    pthread_mutex_lock(&sealed->in_lock);
    for (int32_t index = 0; index < sealed->pipe_count; index++)
        sealed->pipes[index].in_fd = -1;
    pthread_mutex_unlock(&sealed->in_lock);
    Py_END_ALLOW_THREADS
}

static void sealed_release(struct lane *lane)
{
    struct sealed_lane *sealed = (struct sealed_lane *)lane;
    if (sealed->helper != NULL)
        helper_end(sealed->helper);
    for (int32_t index = 0; index < sealed->pipe_count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (lane->owns_descriptors)
            close(pipe->in_fd);
        keyed_release(&pipe->sealer);
        keyed_release(&pipe->opener);
        kept_release(&pipe->kept);
        free(pipe->spill);
        free(pipe->in);
    }
    free(sealed->pipes);
    free(sealed->scratch);
    if (sealed->has_locks) {
        pthread_mutex_destroy(&sealed->out_lock);
        pthread_mutex_destroy(&sealed->in_lock);
    }
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
    bool has_directs = directs == NULL || PyTuple_Size(directs) == count;
    if (count < 1 || count > MOST_STREAMS || !crypto_is_loaded() || !has_directs) {
        PyErr_SetString(PyExc_ValueError, "a sealed lane has 1 to 64 streams, and libcrypto is loaded before");
        return -1;
    }
    lane->functions = &sealed_functions;
    lane->spin_bytes = SPIN_BYTES;
    lane->python_bytes = INT64_MAX;
    sealed->record_limit = count <= FEW_STREAMS ? RECORD_LIMIT : SPREAD_RECORD_LIMIT;
    sealed->scratch = aligned_alloc(LINE_BYTES, (size_t)sealed->record_limit);
    sealed->pipes = calloc((size_t)count, sizeof *sealed->pipes);
    sealed->is_resumable = directs != NULL;
    sealed->has_locks = pthread_mutex_init(&sealed->out_lock, NULL) == 0 && pthread_mutex_init(&sealed->in_lock, NULL) == 0;
    if (sealed->scratch == NULL || sealed->pipes == NULL || !sealed->has_locks) {
        PyErr_NoMemory();
        return -1;
    }
    sealed->pipe_count = (int32_t)count;
    for (Py_ssize_t index = 0; index < count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (!keyed_take(PyTuple_GetItem(streams, index), &pipe->in_fd, &pipe->sealer, &pipe->opener))
            return -1;
        pipe->out_fd = pipe->in_fd;
        pipe->is_direct = directs == NULL || PyObject_IsTrue(PyTuple_GetItem(directs, index)) == 1;
        if (pipe->sealer.cipher != NULL)
            lane->python_bytes = LONG_BYTES;
        bool is_whole = pipe->sealer.cipher != NULL;
        pipe->in_room = is_whole ? sealed->record_limit + OVERHEAD_BYTES + FIRST_BYTES : READ_BYTES;
        pipe->in = malloc((size_t)pipe->in_room);
        int64_t chunk_bytes = (is_whole ? sealed->record_limit : 0) + CHUNKED_BYTES;
        bool is_filled = kept_fill(&pipe->kept, chunk_bytes, sealed->is_resumable, pipe->is_direct);
        if (!is_filled || pipe->in == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        pipe->renew_at = monotonic_ns() + REKEY_NS;
    }
    return 0;
}

/* What the control loop does with streams. Each gives the interpreter's lock up while it waits for a half of the lane. */

static struct pipe *pipe_at(struct sealed_lane *sealed, int stream)
{
    if (sealed->is_resumable && stream >= 0 && stream < sealed->pipe_count)
        return &sealed->pipes[stream];
    PyErr_SetString(PyExc_ValueError, "the lane has no such stream that could be resumed");
    return NULL;
}

/* broken(): the streams that wait for a connection. */
static PyObject *sealed_broken(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    PyObject *found = PyList_New(0);
    for (int32_t index = 0; found != NULL && index < sealed->pipe_count; index++) {
        if (!sealed->pipes[index].is_out_broken && !sealed->pipes[index].is_in_broken)
            continue;
        PyObject *number = PyLong_FromLong(index);
        if (number == NULL || PyList_Append(found, number) < 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

/* freeze(stream): use the connection of a stream no more, and count none of its acknowledgements. */
static PyObject *sealed_freeze(PyObject *self, PyObject *args)
{
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    struct pipe *pipe;
    int stream;
    if (!PyArg_ParseTuple(args, "i", &stream) || (pipe = pipe_at(sealed, stream)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sealed->out_lock);
    pipe->is_out_broken = true;
    pipe->kept.is_direct = false;
    pthread_mutex_unlock(&sealed->out_lock);
    pthread_mutex_lock(&sealed->in_lock);
    pipe->is_in_broken = true;
    pthread_mutex_unlock(&sealed->in_lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Reads all that the connection of a frozen stream still has. False if there is no memory for it. */
static bool drain(struct pipe *pipe)
{
    int64_t room = pipe->spill_end;
    while (!pipe->is_drained) {
        if (pipe->spill_end == room) {
            uint8_t *grown = room < SPILL_LIMIT ? realloc(pipe->spill, (size_t)(room + SPILL_STEP)) : NULL;
            if (grown == NULL)
                return false;
            pipe->spill = grown;
            room += SPILL_STEP;
        }
        ssize_t taken = recv(pipe->in_fd, pipe->spill + pipe->spill_end, (size_t)(room - pipe->spill_end), MSG_DONTWAIT);
        if (taken < 0 && errno == EINTR)
            continue;
        pipe->is_drained = taken <= 0;
        pipe->spill_end += taken > 0 ? taken : 0;
        pipe->received += taken > 0 ? taken : 0;
    }
    return true;
}

/* drain(stream): take what the connection of a frozen stream still has; return how many bytes the stream has brought. */
static PyObject *sealed_drain(PyObject *self, PyObject *args)
{
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    struct pipe *pipe;
    int stream;
    bool is_done;
    int64_t received;
    if (!PyArg_ParseTuple(args, "i", &stream) || (pipe = pipe_at(sealed, stream)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sealed->in_lock);
    if (pipe->spill_start) { /* what was read before it is in `in` */
        pipe->spill_end -= pipe->spill_start;
        memmove(pipe->spill, pipe->spill + pipe->spill_start, (size_t)pipe->spill_end);
        pipe->spill_start = 0;
    }
    is_done = drain(pipe);
    received = pipe->received;
    pthread_mutex_unlock(&sealed->in_lock);
    Py_END_ALLOW_THREADS
    return is_done ? PyLong_FromLongLong(received) : PyErr_NoMemory();
}

/* attach(stream, fd, position, is_direct): go on with a frozen stream at this position, on another connection. False if what
 * the other end expects there is not kept. */
static PyObject *sealed_attach(PyObject *self, PyObject *args)
{
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    struct pipe *pipe;
    int stream, fd, is_direct;
    long long position;
    bool is_kept;
    if (!PyArg_ParseTuple(args, "iiLp", &stream, &fd, &position, &is_direct) || (pipe = pipe_at(sealed, stream)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sealed->out_lock);
    is_kept = kept_rewind(&pipe->kept, position, is_direct);
    if (is_kept) {
        pipe->out_fd = fd;
        pipe->is_out_broken = false;
    }
    pthread_mutex_unlock(&sealed->out_lock);
    pthread_mutex_lock(&sealed->in_lock);
    if (is_kept) {
        pipe->in_fd = fd;
        pipe->is_direct = is_direct;
        pipe->is_drained = pipe->is_in_broken = false;
    }
    pthread_mutex_unlock(&sealed->in_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_kept);
}

/* push(): send what is sealed and can be sent; whether there is more of it. */
static PyObject *sealed_push(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    bool has_more = false, moved = false;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sealed->out_lock);
    for (int32_t index = 0; index < sealed->pipe_count; index++) {
        struct pipe *pipe = &sealed->pipes[index];
        if (!pipe->is_out_broken && pipe->out_fd >= 0 && !kept_flush(&pipe->kept, pipe->out_fd, &moved))
            pipe->is_out_broken = true;
        has_more |= !pipe->is_out_broken && pipe->out_fd >= 0 && kept_unsent(&pipe->kept);
    }
    pthread_mutex_unlock(&sealed->out_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_more);
}

/* acknowledge(stream, position): the other end has all before this position. False if it cannot have. */
static PyObject *sealed_acknowledge(PyObject *self, PyObject *args)
{
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    struct pipe *pipe;
    int stream;
    long long position;
    bool is_possible;
    if (!PyArg_ParseTuple(args, "iL", &stream, &position) || (pipe = pipe_at(sealed, stream)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sealed->out_lock);
    is_possible = kept_acknowledge(&pipe->kept, position);
    pthread_mutex_unlock(&sealed->out_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_possible);
}

/* received(stream): how many bytes the stream has brought, on all connections. */
static PyObject *sealed_received(PyObject *self, PyObject *args)
{
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    struct pipe *pipe;
    int stream;
    int64_t received;
    if (!PyArg_ParseTuple(args, "i", &stream) || (pipe = pipe_at(sealed, stream)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sealed->in_lock);
    received = pipe->received;
    pthread_mutex_unlock(&sealed->in_lock);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(received);
}

/* end(why): no connection will be attached any more, and what waits for one has ended. */
static PyObject *sealed_end(PyObject *self, PyObject *args)
{
    struct sealed_lane *sealed = (struct sealed_lane *)self;
    const char *why;
    if (!PyArg_ParseTuple(args, "s", &why))
        return NULL;
    if (!sealed->is_over) {
        PyOS_snprintf(sealed->over, TROUBLE_BYTES, "%s", why);
        sealed->is_over = true; /* the text is complete before */
    }
    Py_RETURN_NONE;
}

static PyMethodDef sealed_methods[] = {
    {"peek", lane_peek, METH_NOARGS, "Return the next header that has arrived, or no bytes."},
    {"close", lane_close, METH_NOARGS, "Forget the descriptors, and tell whether the owner may close them."},
    {"broken", sealed_broken, METH_NOARGS, "Return the streams that wait for a connection."},
    {"freeze", sealed_freeze, METH_VARARGS, "Use the connection of a stream no more."},
    {"drain", sealed_drain, METH_VARARGS, "Take what the connection of a frozen stream still has."},
    {"attach", sealed_attach, METH_VARARGS, "Go on with a frozen stream on another connection."},
    {"push", sealed_push, METH_NOARGS, "Send what is sealed and can be sent."},
    {"acknowledge", sealed_acknowledge, METH_VARARGS, "Note what the other end has."},
    {"received", sealed_received, METH_VARARGS, "Return how many bytes a stream has brought."},
    {"end", sealed_end, METH_VARARGS, "Let the lane end instead of waiting for a connection."},
    {NULL, NULL, 0, NULL},
};

struct kind sealed_kind = {
    .name = "covey._native.Sealed",
    .size = sizeof(struct sealed_lane),
    .fill = sealed_fill,
    .release = lane_release,
    .methods = sealed_methods,
    .members = lane_members,
};

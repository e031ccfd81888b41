/* Lanes over stream sockets: unix and TCP. The sockets are non-blocking, and their owner closes them. Between machines they
 * may outlive their connections (lasting.h). */
#include "lasting.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEND_BYTES = 1 << 20,    /* handed to the kernel at once: much more leaves the cache before the peer reads it */
    RECEIVE_BYTES = 1 << 18, /* taken from the kernel at once for a reduction, which then finds them in the cache */
    SPIN_BYTES = 1 << 17,    /* larger transfers take so long that sleeping costs little */
    CHUNK_BYTES = 1 << 18,   /* of what is kept */
};

struct stream_lane {
    struct lasting_lane lasting; /* one stream */
    uint8_t *scratch;  /* a header, then RECEIVE_BYTES of payload that is to be reduced */
    int64_t carry;     /* bytes of an element that arrived in part, at the front of the scratch payload */
};

/* A lane that cannot be resumed has one user at a time, and needs no lock. */
static void enter(struct stream_lane *stream, pthread_mutex_t *half)
{
    if (stream->lasting.is_resumable)
        pthread_mutex_lock(half);
}

static void exit_half(struct stream_lane *stream, pthread_mutex_t *half)
{
    if (stream->lasting.is_resumable)
        pthread_mutex_unlock(half);
}

static enum outcome send_more(struct stream_lane *stream, struct outgoing *out)
{
    uint8_t joined[HEADER_BYTES + SMALL_BYTES];
    struct iovec parts[2];
    int count = 1;
    int64_t taken;
    if (out->sent < 0) {
        size_t header_left = (size_t)-out->sent;
        const uint8_t *header = out->header + HEADER_BYTES - header_left;
        int64_t first = smaller(out->nbytes, SEND_BYTES);
        if (out->nbytes <= SMALL_BYTES) {
            memcpy(joined, header, header_left);
            if (first)
                memcpy(joined + header_left, out->data, (size_t)first);
            parts[0] = (struct iovec){joined, header_left + (size_t)first};
        } else {
            parts[0] = (struct iovec){(void *)header, header_left};
            parts[1] = (struct iovec){(void *)out->data, (size_t)first};
            count = 2;
        }
    } else
        parts[0] = (struct iovec){(void *)(out->data + out->sent), (size_t)smaller(out->nbytes - out->sent, SEND_BYTES)};
    struct lasting_lane *lane = &stream->lasting;
    enum outcome outcome = lasting_send(lane, lane->streams, parts, count, &taken, lane->base.trouble);
    out->sent += taken;
    return outcome;
}

static enum outcome stream_transmit(struct lane *lane, struct outgoing *out)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    enter(stream, stream->lasting.out_lock);
    enum outcome outcome = send_more(stream, out);
    exit_half(stream, stream->lasting.out_lock);
    return outcome;
}

/* Hands the whole elements among `available` bytes of scratch payload over, and keeps the rest of a split one. */
static void absorb(struct stream_lane *stream, struct incoming *in, int64_t available)
{
    uint8_t *payload = stream->scratch + HEADER_BYTES;
    int64_t carry = available % in->itemsize, whole = available - carry;
    if (whole) {
        in->absorb(in, in->got, payload, whole);
        in->got += whole;
        memmove(payload, payload + whole, (size_t)carry);
    }
    stream->carry = carry;
}

/* Reads the header and, in the same call, the start of the payload. */
static enum outcome receive_header(struct stream_lane *stream, struct incoming *in)
{
    size_t header_left = (size_t)-in->got;
    struct iovec parts[2] = {{stream->scratch + HEADER_BYTES - header_left, header_left}};
    int count = 1;
    int64_t taken;
    if (in->dest != NULL && in->nbytes)
        parts[count++] = (struct iovec){in->dest, (size_t)smaller(in->nbytes, SEND_BYTES)};
    else
        parts[0].iov_len += (size_t)smaller(in->nbytes, RECEIVE_BYTES);
    enum outcome outcome =
        lasting_take(&stream->lasting, stream->lasting.streams, parts, count, &taken, "end of stream");
    if (outcome != MOVED)
        return outcome;
    in->got += taken;
    if (in->got < 0)
        return MOVED;
    memcpy(in->header, stream->scratch, HEADER_BYTES);
    if (!header_matches(in))
        return OTHER_HEADER;
    if (in->dest == NULL && in->nbytes) {
        int64_t arrived = in->got;
        in->got = 0;
        absorb(stream, in, arrived);
    }
    return MOVED;
}

static enum outcome receive_more(struct stream_lane *stream, struct incoming *in)
{
    struct iovec room;
    int64_t taken;
    if (in->got < 0)
        return receive_header(stream, in);
    if (in->got == in->nbytes)
        return IDLE;
    if (in->dest != NULL)
        room = (struct iovec){in->dest + in->got, (size_t)smaller(in->nbytes - in->got, SEND_BYTES)};
    else
        room = (struct iovec){stream->scratch + HEADER_BYTES + stream->carry,
                              (size_t)(smaller(in->nbytes - in->got, RECEIVE_BYTES) - stream->carry)};
    enum outcome outcome =
        lasting_take(&stream->lasting, stream->lasting.streams, &room, 1, &taken, "end of stream");
    if (outcome != MOVED)
        return outcome;
    if (in->dest != NULL)
        in->got += taken;
    else
        absorb(stream, in, stream->carry + taken);
    return MOVED;
}

static enum outcome stream_receive(struct lane *lane, struct incoming *in)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    enter(stream, stream->lasting.in_lock);
    enum outcome outcome = receive_more(stream, in);
    exit_half(stream, stream->lasting.in_lock);
    return outcome;
}

static int stream_park(struct lane *lane, struct pollfd *polls, bool sending, bool receiving)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    struct lasting *only = stream->lasting.streams;
    bool waits = false, has_spill = false; /* waits for something that no descriptor tells */
    polls[0] = (struct pollfd){.fd = only->in_fd};
    if (sending) {
        enter(stream, stream->lasting.out_lock);
        waits = only->is_out_broken || only->is_full;
        if (!waits)
            polls[0] = (struct pollfd){.fd = only->out_fd, .events = POLLOUT};
        exit_half(stream, stream->lasting.out_lock);
    }
    if (receiving) {
        enter(stream, stream->lasting.in_lock);
        has_spill = lasting_has_spill(only);
        waits |= only->is_in_broken;
        if (!only->is_in_broken)
            polls[0] = (struct pollfd){.fd = only->in_fd, .events = (short)(polls[0].events | POLLIN)};
        exit_half(stream, stream->lasting.in_lock);
    }
    if (has_spill)
        return -1;
    if (!waits || !stream->lasting.is_resumable)
        return 1;
    poll(polls, polls[0].events ? 1 : 0, WAIT_MS);
    return -1;
}

static void stream_unpark(struct lane *lane) { (void)lane; }

static bool stream_peek(struct lane *lane, uint8_t header[HEADER_BYTES])
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    struct lasting *only = stream->lasting.streams;
    enter(stream, stream->lasting.in_lock);
    int64_t had = smaller(only->spill_end - only->spill_start, HEADER_BYTES);
    if (had)
        memcpy(header, only->spill + only->spill_start, (size_t)had);
    ssize_t more = 0;
    if (had < HEADER_BYTES && !only->is_in_broken)
        more = recv(only->in_fd, header + had, (size_t)(HEADER_BYTES - had), MSG_PEEK | MSG_DONTWAIT);
    exit_half(stream, stream->lasting.in_lock);
    return had + (more > 0 ? more : 0) == HEADER_BYTES;
}

static void stream_cancel(struct lane *lane) { (void)lane; }

static void stream_close(struct lane *lane) { lasting_close((struct lasting_lane *)lane); }

static void stream_release(struct lane *lane)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    lasting_release(&stream->lasting);
    free(stream->scratch);
}

static const struct lane_functions stream_functions = {
    stream_transmit, stream_receive, stream_park, stream_unpark, stream_peek, stream_cancel, stream_close, stream_release,
};

/* Stream(fd, directs=None). The lane is resumable if `directs` tells whether its connection is direct. */
static int stream_fill(PyObject *self, PyObject *args)
{
    struct lane *lane = (struct lane *)self;
    struct stream_lane *stream = (struct stream_lane *)self;
    struct lasting_lane *lasting = &stream->lasting;
    PyObject *directs = NULL;
    int fd;
    if (!PyArg_ParseTuple(args, "i|O!", &fd, &PyTuple_Type, &directs))
        return -1;
    lane->functions = &stream_functions;
    lane->spin_bytes = SPIN_BYTES;
    lane->python_bytes = INT64_MAX;
    if (!lasting_fill(lasting, 1, directs, false))
        return -1;
    lasting_use(lasting->streams, fd);
    stream->scratch = aligned_alloc(LINE_BYTES, HEADER_BYTES + RECEIVE_BYTES);
    bool is_kept = lasting->is_resumable;
    bool is_filled = !is_kept || kept_fill(&lasting->streams->kept, CHUNK_BYTES, true, lasting->streams->is_direct);
    if (stream->scratch == NULL || !is_filled) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

struct kind stream_kind = {
    .name = "covey._native.Stream",
    .size = sizeof(struct stream_lane),
    .fill = stream_fill,
    .release = lane_release,
    .methods = lasting_methods,
    .members = lane_members,
};

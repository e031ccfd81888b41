/* Lanes over stream sockets: unix and TCP. The sockets are non-blocking, and their owner closes them. */
#include "native.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    SEND_BYTES = 1 << 20,    /* handed to the kernel at once: much more leaves the cache before the peer reads it */
    RECEIVE_BYTES = 1 << 18, /* taken from the kernel at once for a reduction, which then finds them in the cache */
    SPIN_BYTES = 1 << 17,    /* larger transfers take so long that sleeping costs little */
};

struct stream_lane {
    struct lane base;
    int fd;
    uint8_t *scratch;  /* a header, then RECEIVE_BYTES of payload that is to be reduced */
    int64_t carry;     /* bytes of an element that arrived in part, at the front of the scratch payload */
};

static enum outcome stream_transmit(struct lane *lane, struct outgoing *out)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    ssize_t taken;
    if (out->sent < 0) {
        size_t header_left = (size_t)-out->sent;
        const uint8_t *header = out->header + HEADER_BYTES - header_left;
        int64_t first = smaller(out->nbytes, SEND_BYTES);
        if (out->nbytes <= SMALL_BYTES) {
            uint8_t joined[HEADER_BYTES + SMALL_BYTES];
            memcpy(joined, header, header_left);
            if (first)
                memcpy(joined + header_left, out->data, (size_t)first);
            taken = send(stream->fd, joined, header_left + (size_t)first, MSG_NOSIGNAL | MSG_DONTWAIT);
        } else {
            struct iovec parts[2] = {{(void *)header, header_left}, {(void *)out->data, (size_t)first}};
            struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
            taken = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    } else {
        size_t step = (size_t)smaller(out->nbytes - out->sent, SEND_BYTES);
        taken = send(stream->fd, out->data + out->sent, step, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (taken < 0)
        return could_not(lane, errno);
    out->sent += taken;
    return taken ? MOVED : IDLE;
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
    struct lane *lane = &stream->base;
    size_t header_left = (size_t)-in->got;
    uint8_t *header = stream->scratch + HEADER_BYTES - header_left;
    ssize_t taken;
    if (in->dest != NULL && in->nbytes) {
        struct iovec parts[2] = {{header, header_left}, {in->dest, (size_t)smaller(in->nbytes, SEND_BYTES)}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        taken = recvmsg(stream->fd, &message, MSG_DONTWAIT);
    } else {
        taken = recv(stream->fd, header, header_left + (size_t)smaller(in->nbytes, RECEIVE_BYTES), MSG_DONTWAIT);
    }
    if (taken < 0)
        return could_not(lane, errno);
    if (taken == 0)
        return lane_ended(lane, "end of stream");
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

static enum outcome stream_receive(struct lane *lane, struct incoming *in)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    ssize_t taken;
    if (in->got < 0)
        return receive_header(stream, in);
    if (in->got == in->nbytes)
        return IDLE;
    if (in->dest != NULL) {
        taken = recv(stream->fd, in->dest + in->got, (size_t)smaller(in->nbytes - in->got, SEND_BYTES), MSG_DONTWAIT);
    } else {
        int64_t room = smaller(in->nbytes - in->got, RECEIVE_BYTES) - stream->carry;
        taken = recv(stream->fd, stream->scratch + HEADER_BYTES + stream->carry, (size_t)room, MSG_DONTWAIT);
    }
    if (taken < 0)
        return could_not(lane, errno);
    if (taken == 0)
        return lane_ended(lane, "end of stream");
    if (in->dest != NULL)
        in->got += taken;
    else
        absorb(stream, in, stream->carry + taken);
    return MOVED;
}

static int stream_park(struct lane *lane, struct pollfd *polls, bool sending, bool receiving)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    polls[0] = (struct pollfd){.fd = stream->fd, .events = (sending ? POLLOUT : 0) | (receiving ? POLLIN : 0)};
    return 1;
}

static void stream_unpark(struct lane *lane) { (void)lane; }

static bool stream_peek(struct lane *lane, uint8_t header[HEADER_BYTES])
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    return recv(stream->fd, header, HEADER_BYTES, MSG_PEEK | MSG_DONTWAIT) == HEADER_BYTES;
}

static void stream_cancel(struct lane *lane) { (void)lane; }

static void stream_close(struct lane *lane) { ((struct stream_lane *)lane)->fd = -1; }

static void stream_release(struct lane *lane)
{
    struct stream_lane *stream = (struct stream_lane *)lane;
    if (lane->owns_descriptors)
        close(stream->fd);
    free(stream->scratch);
}

static const struct lane_functions stream_functions = {
    stream_transmit, stream_receive, stream_park, stream_unpark, stream_peek, stream_cancel, stream_close, stream_release,
};

/* Stream(fd) */
static int stream_fill(PyObject *self, PyObject *args)
{
    struct lane *lane = (struct lane *)self;
    struct stream_lane *stream = (struct stream_lane *)self;
    if (!PyArg_ParseTuple(args, "i", &stream->fd))
        return -1;
    stream->scratch = aligned_alloc(LINE_BYTES, HEADER_BYTES + RECEIVE_BYTES);
    if (stream->scratch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    lane->functions = &stream_functions;
    lane->spin_bytes = SPIN_BYTES;
    lane->python_bytes = INT64_MAX;
    return 0;
}

struct kind stream_kind = {
    .name = "covey._native.Stream",
    .size = sizeof(struct stream_lane),
    .fill = stream_fill,
    .release = lane_release,
    .methods = lane_methods,
    .members = lane_members,
};

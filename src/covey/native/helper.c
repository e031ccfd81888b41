/* A helper thread that seals and sends large transfers, while the thread of the operation receives and opens others.
 *
 * It is started where an idle core exists, with the first large transfer of a lane, and sleeps in between. One transfer at a
 * time: from `helper_post` until `helper_result` says that it is over, the helper alone uses the sending half of the lane
 * and reads the payload. All signals are blocked in it. The descriptor of `helper_fd` is readable if the job is over, or will
 * be within a moment; it is not while the next job is under way, or the operation's thread would not sleep.
 */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum state { NO_JOB, POSTED, OVER };
enum { LONG_MS = 1000, SHORT_MS = 5 }; /* the next look: without a descriptor to wait for, a lane waits for a connection */
static const int64_t SPIN_NS = 100 * 1000; /* the next job often comes soon, and waking a thread takes as long */

struct helper {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    _Atomic int state;                /* enum state: posted by the operation's thread, then over by the helper */
    _Atomic int is_cancelled, is_ending;
    bool is_asleep;                   /* under the lock */
    enum outcome outcome;             /* of the job that is over */
    int cancel[2], done[2];           /* pipes: readable once the job is cancelled, and once it is over */
    pid_t process;                    /* that started the thread: it does not exist in a forked child */
    struct lane *lane;
    struct outgoing *out;
    helper_step *step;
};

static void ring(int fd)
{
    ssize_t ignored = write(fd, "", 1);
    (void)ignored;
}

static void hush(int fd)
{
    char rung[16];
    while (read(fd, rung, sizeof rung) > 0) {
    }
}

/* Sends until the transfer is over, the lane has ended, or the job is cancelled. */
static enum outcome do_job(struct helper *helper)
{
    while (!atomic_load(&helper->is_cancelled)) {
        struct pollfd polls[1 + MOST_STREAMS];
        int count = 1;
        enum outcome outcome = helper->step(helper->lane, helper->out, polls + 1, &count);
        if (outcome == ENDED || helper->out->sent == helper->out->nbytes)
            return outcome;
        if (outcome == IDLE) {
            polls[0] = (struct pollfd){.fd = helper->cancel[0], .events = POLLIN};
            poll(polls, (nfds_t)count, count > 1 ? LONG_MS : SHORT_MS);
        }
    }
    return IDLE;
}

static bool has_work(struct helper *helper)
{
    return atomic_load(&helper->state) == POSTED || atomic_load(&helper->is_ending);
}

/* Waits for a job: for a moment with open eyes, then asleep. */
static void await_work(struct helper *helper)
{
    int64_t until = monotonic_ns() + SPIN_NS;
    while (!has_work(helper) && monotonic_ns() < until)
        relax();
    pthread_mutex_lock(&helper->lock);
    helper->is_asleep = true;
    while (!has_work(helper))
        pthread_cond_wait(&helper->changed, &helper->lock);
    helper->is_asleep = false;
    pthread_mutex_unlock(&helper->lock);
}

static void *work(void *argument)
{
    struct helper *helper = argument;
    for (;;) {
        await_work(helper);
        if (atomic_load(&helper->state) == POSTED) {
            helper->outcome = do_job(helper);
            ring(helper->done[1]); /* first: once the job is over, the next one may be posted, which hushes this ring */
            pthread_mutex_lock(&helper->lock);
            atomic_store(&helper->state, OVER);
            pthread_cond_broadcast(&helper->changed);
            pthread_mutex_unlock(&helper->lock);
        } else if (atomic_load(&helper->is_ending))
            return NULL;
    }
}

static bool open_pipe(int ends[2])
{
    if (pipe(ends) < 0)
        return false;
    for (int index = 0; index < 2; index++) {
        fcntl(ends[index], F_SETFD, FD_CLOEXEC);
        fcntl(ends[index], F_SETFL, O_NONBLOCK);
    }
    return true;
}

static void close_pipe(int ends[2])
{
    for (int index = 0; index < 2; index++)
        if (ends[index] >= 0)
            close(ends[index]);
}

/* Starts a helper for a lane; NULL if the system has no thread or descriptors for it: the lane can do without. */
struct helper *helper_start(struct lane *lane, helper_step *step)
{
    struct helper *helper = calloc(1, sizeof *helper);
    sigset_t all, before;
    if (helper == NULL)
        return NULL;
    helper->lane = lane;
    helper->step = step;
    helper->process = getpid();
    helper->cancel[0] = helper->cancel[1] = helper->done[0] = helper->done[1] = -1;
    pthread_mutex_init(&helper->lock, NULL);
    pthread_cond_init(&helper->changed, NULL);
    bool is_ready = open_pipe(helper->cancel) && open_pipe(helper->done);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = is_ready && pthread_create(&helper->thread, NULL, work, helper) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_started)
        return helper;
    close_pipe(helper->cancel);
    close_pipe(helper->done);
    free(helper);
    return NULL;
}

void helper_post(struct helper *helper, struct outgoing *out)
{
    hush(helper->done[0]);
    helper->out = out;
    atomic_store(&helper->state, POSTED);
    pthread_mutex_lock(&helper->lock);
    if (helper->is_asleep)
        pthread_cond_broadcast(&helper->changed);
    pthread_mutex_unlock(&helper->lock);
}

/* Whether the job is over; then *outcome is MOVED or ENDED. */
bool helper_result(struct helper *helper, enum outcome *outcome)
{
    if (atomic_load(&helper->state) != OVER)
        return false;
    *outcome = helper->outcome == ENDED ? ENDED : MOVED;
    return true;
}

int helper_fd(const struct helper *helper) { return helper->done[0]; }

/* Ends the job, if there is one, and waits until the helper has let go of the payload. */
void helper_cancel(struct helper *helper)
{
    if (helper->process != getpid())
        return;
    atomic_store(&helper->is_cancelled, 1);
    ring(helper->cancel[1]);
    Py_BEGIN_ALLOW_THREADS /* the helper may need the interpreter's lock to finish a record */
    pthread_mutex_lock(&helper->lock);
    while (atomic_load(&helper->state) == POSTED)
        pthread_cond_wait(&helper->changed, &helper->lock);
    pthread_mutex_unlock(&helper->lock);
    Py_END_ALLOW_THREADS
    hush(helper->cancel[0]);
    atomic_store(&helper->is_cancelled, 0);
}

void helper_end(struct helper *helper)
{
    if (helper->process == getpid()) { /* in a forked child the thread does not exist, and the lock may be held for ever */
        helper_cancel(helper);
        pthread_mutex_lock(&helper->lock);
        atomic_store(&helper->is_ending, 1);
        pthread_cond_broadcast(&helper->changed);
        pthread_mutex_unlock(&helper->lock);
        Py_BEGIN_ALLOW_THREADS
        pthread_join(helper->thread, NULL);
        Py_END_ALLOW_THREADS
        pthread_cond_destroy(&helper->changed);
        pthread_mutex_destroy(&helper->lock);
    }
    close_pipe(helper->cancel);
    close_pipe(helper->done);
    free(helper);
}

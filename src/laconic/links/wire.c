/* Moves messages between memory and non-blocking sockets, as wire.py's _move does, without the
   interpreter. */

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE */
#endif

#define EXPORT __attribute__((visibility("default")))
#define HEADER 24

/* as class _Message in wire.py */
struct message {
    uint8_t header[HEADER]; /* what is sent, or expected, before the payload */
    uint8_t got[HEADER];    /* what came */
    uint8_t *payload;
    int64_t end;   /* bytes of header and payload */
    int64_t ready; /* how many of them may be moved */
    int64_t done;  /* how many of them were moved */
    int32_t fd;
    int32_t comes; /* 1: is received, 0: is sent */
};

enum { FINE = 0, SILENT = 1, CLOSED = 2, OTHER = 3, FAILED = 4, INTERRUPTED = 5 };

#define MOST (1 << 30) /* bytes in one go: some systems refuse more than an int holds */

EXPORT int laconic_version(void) { return 4; }

/* Moves what can be moved at once. */
static int step(struct message *m) {
    while (m->done < m->ready) {
        struct iovec parts[2];
        struct msghdr both = {.msg_iov = parts};
        int64_t before = m->done, into = before < HEADER ? 0 : before - HEADER;
        ssize_t moved;
        if (before < HEADER) {
            parts[0].iov_base = (m->comes ? m->got : m->header) + before;
            parts[0].iov_len = (size_t)(HEADER - before);
            both.msg_iovlen = 1;
        }
        if (m->ready > HEADER) {
            parts[both.msg_iovlen].iov_base = m->payload + into;
            int64_t left = m->ready - HEADER - into;
            parts[both.msg_iovlen].iov_len = (size_t)(left < MOST ? left : MOST);
            both.msg_iovlen++;
        }
        moved = m->comes ? recvmsg(m->fd, &both, 0) : sendmsg(m->fd, &both, MSG_NOSIGNAL);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? FINE : FAILED;
        if (moved == 0)
            return CLOSED;
        m->done += moved;
        if (m->comes && before < HEADER && m->done >= HEADER && memcmp(m->got, m->header, HEADER))
            return OTHER;
    }
    return FINE;
}

static int64_t moved(const struct message *messages, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += messages[i].done;
    return total;
}

/* Until `enough` bytes of message `until` were moved, or all messages for -1; for -2 only what can
   be moved at once. At most `timeout` ms in which not a byte moves: SILENT. CLOSED, OTHER, FAILED
   with `error`: `which`. INTERRUPTED: to be called again, `which` tells whether any was moved. */
EXPORT int laconic_move(struct message *messages, int64_t count, int64_t until, int64_t enough,
                        int timeout, int64_t *which, int *error) {
    struct pollfd waits[count > 0 ? count : 1];
    int64_t numbers[count > 0 ? count : 1];
    int64_t before = moved(messages, count);
    for (;;) {
        nfds_t n = 0;
        for (int64_t i = 0; i < count; i++) {
            struct message *m = &messages[i];
            if (m->done < m->ready) {
                waits[n] = (struct pollfd){m->fd, m->comes ? POLLIN : POLLOUT, 0};
                numbers[n++] = i;
            }
        }
        if (n == 0 || (until >= 0 && messages[until].done >= enough))
            return FINE;
        int ready = poll(waits, n, until == -2 ? 0 : timeout);
        if (ready < 0 && errno == EINTR) { /* a signal may have to be handled */
            *which = moved(messages, count) != before;
            return INTERRUPTED;
        }
        if (ready < 0) {
            *which = numbers[0], *error = errno;
            return FAILED;
        }
        if (ready == 0)
            return until == -2 ? FINE : SILENT;
        for (nfds_t k = 0; ready > 0 && k < n; k++) {
            if (!waits[k].revents)
                continue;
            int outcome = step(&messages[numbers[k]]);
            if (outcome != FINE) {
                *which = numbers[k], *error = errno;
                return outcome;
            }
        }
        if (until == -2)
            return FINE;
    }
}

/* Moves messages between memory and non-blocking sockets, as frames.py's `_move_interpreted` does,
   without the interpreter. What a message looks like on its way is described in frames.py. */

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE */
#endif

#define EXPORT __attribute__((visibility("default")))
#define HEADER 36   /* fields, and their checksum */
#define FIELDS 32
#define CALL 24     /* the fields that must be as expected */
#define CHECK 4
#define AT_ONCE (1 << 18) /* bytes of the payload in one go */

/* as class Message in frames.py */
struct message {
    uint8_t header[HEADER]; /* what is sent, or expected, before the payload */
    uint8_t got[HEADER];    /* what came */
    uint8_t *payload;
    int64_t size;  /* bytes of the payload */
    int64_t moved; /* bytes of header, payload and checksum that were moved */
    int64_t summed; /* bytes of the payload that `sum` is of */
    uint32_t sum;   /* of the header's fields and the payload so far; sent at the end */
    uint32_t check; /* what came at the end */
    int32_t fd;
    int32_t comes; /* 1: is received, 0: is sent */
    int32_t after; /* which message must be complete before, over the same socket; -1: none */
};

enum { FINE = 0, SILENT = 1, CLOSED = 2, OTHER = 3, FAILED = 4, INTERRUPTED = 5, CHANGED = 6 };

EXPORT int laconic_version(void) { return 11; }

/* -- checksums: CRC-32 as zlib computes it ---- */

static uint32_t tables[16][256];

__attribute__((constructor)) static void make_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        tables[0][i] = c;
    }
    for (int t = 1; t < 16; t++)
        for (int i = 0; i < 256; i++)
            tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
}

/* The register after `n` more bytes, 16 of them at a time. */
static uint32_t crc_by_tables(uint32_t crc, const uint8_t *data, int64_t n) {
    for (; n >= 16; n -= 16, data += 16) {
        uint32_t next = 0;
        for (int i = 0; i < 16; i++)
            next ^= tables[15 - i][data[i] ^ (i < 4 ? (crc >> (8 * i)) & 255 : 0)];
        crc = next;
    }
    while (n-- > 0)
        crc = (crc >> 8) ^ tables[0][(crc ^ *data++) & 255];
    return crc;
}

#ifdef __x86_64__
/* Multiplication without carries, which most processors have. The bytes are a polynomial over GF(2),
   of which only the remainder modulo P matters: 16 bytes that are followed by d bits more can be
   replaced by their product with x^d mod P, added to the 16 bytes that come d bits later. See Gopal
   et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel, 2009),
   whose constants these are. */
#include <immintrin.h>
#define FOLDED __attribute__((target("pclmul,sse4.1")))
#define BY_64 0x1C6E41596, 0x154442BD4 /* x^(512 - 32) mod P and x^(512 + 32) mod P, reflected */
#define BY_16 0x0CCAA009E, 0x1751997D0 /* x^(128 - 32) mod P and x^(128 + 32) mod P, reflected */

FOLDED static __m128i fold(__m128i x, __m128i powers, const uint8_t *later) {
    __m128i low = _mm_clmulepi64_si128(x, powers, 0x00), high = _mm_clmulepi64_si128(x, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128((const __m128i *)later));
}

FOLDED static uint32_t crc_by_folding(uint32_t crc, const uint8_t *data, int64_t n) {
    const __m128i by_64 = _mm_set_epi64x(BY_64), by_16 = _mm_set_epi64x(BY_16);
    __m128i x[4];
    for (int i = 0; i < 4; i++)
        x[i] = _mm_loadu_si128((const __m128i *)data + i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (data += 64, n -= 64; n >= 64; n -= 64, data += 64)
        for (int i = 0; i < 4; i++)
            x[i] = fold(x[i], by_64, data + 16 * i);
    uint8_t last[64];
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128((__m128i *)last + i, x[i]);
    __m128i one = x[0];
    for (int i = 1; i < 4; i++)
        one = fold(one, by_16, last + 16 * i);
    for (; n >= 16; n -= 16, data += 16)
        one = fold(one, by_16, data);
    _mm_storeu_si128((__m128i *)last, one);
    return crc_by_tables(crc_by_tables(0, last, 16), data, n);
}
#endif

/* The checksum of what `crc` is of, followed by `n` bytes. */
EXPORT uint32_t laconic_crc32(uint32_t crc, const uint8_t *data, int64_t n) {
#ifdef __x86_64__
    if (n >= 128 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
        return ~crc_by_folding(~crc, data, n);
#endif
    return ~crc_by_tables(~crc, data, n);
}

static void sum_to(struct message *m, int64_t end) {
    m->sum = laconic_crc32(m->sum, m->payload + m->summed, end - m->summed);
    m->summed = end;
}

/* -- the layout of a message ---- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int unfinished(const struct message *m) { return m->moved < HEADER + m->size + CHECK; }

/* Whether bytes of message `i` can be moved now. */
static int active(const struct message *messages, int64_t i) {
    const struct message *m = &messages[i];
    return unfinished(m) && (m->after < 0 || !unfinished(&messages[m->after]));
}

/* Describes what can be moved next, from `m->moved` on, in `parts`; returns how many there are. */
static int describe(struct message *m, struct iovec *parts) {
    int count = 0;
    if (m->moved < HEADER)
        parts[count++] = (struct iovec){(m->comes ? m->got : m->header) + m->moved,
                                        (size_t)(HEADER - m->moved)};
    int64_t body = m->moved < HEADER ? 0 : m->moved - HEADER;
    int64_t start = least(body, m->size), end = least(start + AT_ONCE, m->size);
    if (start < end)
        parts[count++] = (struct iovec){m->payload + start, (size_t)(end - start)};
    if (!m->comes)
        sum_to(m, end);
    if (end == m->size)
        parts[count++] = (struct iovec){(uint8_t *)(m->comes ? &m->check : &m->sum) + body - start,
                                        (size_t)(CHECK - (body - start))};
    return count;
}

/* Takes in that `moved` more bytes have moved: checks what came. */
static int advance(struct message *m, int64_t moved) {
    int64_t before = m->moved;
    m->moved += moved;
    if (!m->comes || m->moved < HEADER)
        return FINE;
    if (before < HEADER) {
        m->sum = laconic_crc32(0, m->got, FIELDS);
        if (memcmp(m->got + FIELDS, &m->sum, CHECK))
            return CHANGED;
        if (memcmp(m->got, m->header, CALL))
            return OTHER;
    }
    sum_to(m, least(m->moved - HEADER, m->size));
    return !unfinished(m) && m->check != m->sum ? CHANGED : FINE;
}

/* Moves what can be moved at once; sets `any` if that is something. */
static int step(struct message *m, int *any) {
    while (unfinished(m)) {
        struct iovec parts[3];
        struct msghdr all = {.msg_iov = parts};
        all.msg_iovlen = (size_t)describe(m, parts);
        ssize_t moved = m->comes ? recvmsg(m->fd, &all, 0) : sendmsg(m->fd, &all, MSG_NOSIGNAL);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? FINE : FAILED;
        if (moved == 0)
            return CLOSED;
        *any = 1;
        int outcome = advance(m, moved);
        if (outcome != FINE)
            return outcome;
    }
    return FINE;
}

/* Whether the messages before number `end` are complete; with `sent`, those that are sent. */
static int complete(const struct message *messages, int64_t end, int sent) {
    for (int64_t i = 0; i < end; i++)
        if (!(sent && messages[i].comes) && unfinished(&messages[i]))
            return 0;
    return 1;
}

/* Until message `until` is complete; for ALL and ALL_SENT, until the first `end` messages are, or
   those of them that are sent; for AT_HAND, what can be moved at once. At most `timeout` ms in
   which not a byte moves: SILENT. CLOSED, OTHER, CHANGED, FAILED with `error`: `which`.
   INTERRUPTED: to be called again. For this and SILENT, `which` tells whether any was moved. */
enum { ALL = -1, AT_HAND = -2, ALL_SENT = -3 };

EXPORT int laconic_move(struct message *messages, int64_t count, int64_t until, int64_t end,
                        int timeout, int64_t *which, int *error) {
    struct pollfd waits[count > 0 ? count : 1];
    int64_t numbers[count > 0 ? count : 1];
    int any = 0;
    for (;;) {
        nfds_t n = 0;
        for (int64_t i = 0; i < count; i++) {
            struct message *m = &messages[i];
            if (active(messages, i)) {
                waits[n] = (struct pollfd){m->fd, m->comes ? POLLIN : POLLOUT, 0};
                numbers[n++] = i;
            }
        }
        int reached = until >= 0 ? !unfinished(&messages[until])
                                 : until != AT_HAND && complete(messages, end, until == ALL_SENT);
        if (n == 0 || reached)
            return FINE;
        int ready = poll(waits, n, until == AT_HAND ? 0 : timeout);
        if (ready == 0 || (ready < 0 && errno == EINTR))
            *which = any;
        if (ready < 0 && errno == EINTR) /* a signal may have to be handled */
            return INTERRUPTED;
        if (ready < 0) {
            *which = numbers[0], *error = errno;
            return FAILED;
        }
        if (ready == 0)
            return until == AT_HAND ? FINE : SILENT;
        for (nfds_t k = 0; ready > 0 && k < n; k++) {
            if (!waits[k].revents)
                continue;
            struct message *m = &messages[numbers[k]];
            int outcome = step(m, &any);
            if (outcome != FINE) {
                *which = numbers[k], *error = errno;
                return outcome;
            }
        }
        if (until == AT_HAND)
            return FINE;
    }
}

/* Forwards Ethernet frames between the TAP devices of emulated hosts. Loses some frames at random and
   delays the others. forward.py starts it; docs/lab.md says what latency, jitter and loss mean.

   Every random number is a function of the seed, the pair of hosts and a count (splitmix64), so what
   happens to a pair's frames does not depend on other pairs. */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define GOLDEN 0x9e3779b97f4a7c15u /* splitmix64's increment */
#define SECOND 1000000000

#define FRAME 2034 /* bytes; a packet then takes 2 KiB */
#define HEADER 14  /* of a frame */
#define BATCH 32   /* frames read from one host before others get their turn */
#define MOST (1 << 18)      /* packets under way: 512 MiB */
#define HOLD (10 * 1000000) /* ns */

/* as _Host in forward.py */
struct host {
    int32_t tap;
    int32_t reserved;
    int64_t latency; /* ns, of a round trip */
    int64_t jitter;  /* ns */
    double loss;
};

/* as _COUNTERS in forward.py; read by other processes while this one runs */
struct counters {
    uint64_t bytes;  /* that the host has sent */
    uint64_t frames; /* that it has sent */
    uint64_t lost;   /* of these, by chance */
    uint64_t failed; /* of these, refused by the receiver's device */
};

struct packet {
    uint16_t size, from, to;
    uint8_t frame[FRAME];
};

struct entry {
    int64_t due;     /* ns of the monotonic clock */
    uint64_t number; /* in order of arrival, for packets that are due together */
    struct packet *packet;
};

struct pair {
    int64_t last;   /* when the last packet is due */
    uint64_t count; /* frames so far */
    uint64_t key;
};

struct network {
    const struct host *hosts;
    volatile struct counters *counters;
    struct pair *pairs; /* sender * size + receiver */
    struct entry *heap; /* the packets under way, the next one first */
    int64_t start;
    uint64_t number;
    size_t under_way;
    int size, epoll, timer;
};

EXPORT int laconic_version(void) { return 1; }

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The number's random value, from 0 to 1. */
static double uniform(uint64_t key, uint64_t number) {
    return (double)(mixed(key + (number + 1) * GOLDEN) >> 11) * 0x1p-53;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

/* What a packet from a to b takes that leaves at a time. Half of the jitter either way around half of
   the latency. It moves steadily from one random value to the next, and never faster than half as fast
   as time: so packets stay in order, none waits for another, and the mean is that of the values. */
static int64_t delay(const struct network *n, int a, int b, int64_t at) {
    const struct host *from = &n->hosts[a], *to = &n->hosts[b];
    int64_t jitter = (from->jitter + to->jitter) / 2;
    int64_t mean = (from->latency + to->latency) / 4;
    if (jitter == 0)
        return mean;
    int64_t hold = 2 * jitter > HOLD ? 2 * jitter : HOLD;
    uint64_t key = ~n->pairs[a * n->size + b].key;
    uint64_t number = (uint64_t)((at - n->start) / hold);
    double part = (double)((at - n->start) % hold) / (double)hold;
    double value = uniform(key, number) * (1 - part) + uniform(key, number + 1) * part;
    return mean + (int64_t)((value - 0.5) * (double)jitter);
}

static int earlier(const struct entry *a, const struct entry *b) {
    return a->due != b->due ? a->due < b->due : a->number < b->number;
}

static void push(struct network *n, struct entry new) {
    size_t at = n->under_way++;
    for (; at > 0 && earlier(&new, &n->heap[(at - 1) / 2]); at = (at - 1) / 2)
        n->heap[at] = n->heap[(at - 1) / 2];
    n->heap[at] = new;
}

static struct packet *pop(struct network *n) {
    struct packet *first = n->heap[0].packet;
    struct entry last = n->heap[--n->under_way];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < n->under_way) {
        if (child + 1 < n->under_way && earlier(&n->heap[child + 1], &n->heap[child]))
            child++;
        if (!earlier(&n->heap[child], &last))
            break;
        n->heap[at] = n->heap[child];
        at = child;
    }
    n->heap[at] = last;
    return first;
}

static void write_frame(struct network *n, const struct packet *p) {
    ssize_t wrote;
    do
        wrote = write(n->hosts[p->to].tap, p->frame, p->size);
    while (wrote < 0 && errno == EINTR);
    if (wrote < 0)
        n->counters[p->from].failed++;
}

static void deliver(struct network *n) {
    while (n->under_way > 0 && n->heap[0].due <= now()) {
        struct packet *p = pop(n);
        write_frame(n, p);
        free(p);
    }
}

/* Decides what happens to a packet with a single receiver. */
static void forward(struct network *n, struct packet *p) {
    int a = p->from, b = p->to;
    struct pair *pair = &n->pairs[a * n->size + b];
    if (uniform(pair->key, pair->count++) < (n->hosts[a].loss + n->hosts[b].loss) / 2) {
        n->counters[a].lost++;
        free(p);
        return;
    }
    int64_t at = now(), due = at + delay(n, a, b, at);
    if (due < pair->last)
        due = pair->last;
    pair->last = due;
    push(n, (struct entry){due, n->number++, p});
}

/* The questions and answers by which hosts find each other's hardware address. On the internet they do
   not travel further than the next router, so they are neither lost nor delayed. */
static int is_arp(const struct packet *p) {
    return p->frame[12] == 0x08 && p->frame[13] == 0x06;
}

static void send_all(struct network *n, struct packet *p) {
    for (int to = 0; to < n->size; to++) {
        p->to = (uint16_t)to;
        if (to != p->from)
            write_frame(n, p);
    }
}

/* The hardware addresses are those of add_tap() in forward.py. */
static void route(struct network *n, struct packet *p) {
    static const uint8_t prefix[5] = {0x02, 0, 0, 0, 0x01};
    int to = p->frame[5];
    if (p->frame[0] & 1) {
        send_all(n, p);
        free(p);
    } else if (memcmp(p->frame, prefix, sizeof prefix) || to >= n->size || to == p->from) {
        free(p); /* nobody has this address */
    } else {
        p->to = (uint16_t)to;
        if (is_arp(p)) {
            write_frame(n, p);
            free(p);
        } else {
            forward(n, p);
        }
    }
}

/* Reads frames of a host. Stops listening to a device that is gone. */
static void receive(struct network *n, int from) {
    int tap = n->hosts[from].tap;
    volatile struct counters *c = &n->counters[from];
    for (int i = 0; i < BATCH; i++) {
        struct packet *p = n->under_way < MOST ? malloc(sizeof *p) : NULL;
        if (p == NULL)
            return;
        ssize_t size = read(tap, p->frame, FRAME);
        if (size < HEADER) {
            free(p);
            if (size < 0 && errno != EAGAIN && errno != EINTR)
                epoll_ctl(n->epoll, EPOLL_CTL_DEL, tap, NULL);
            return;
        }
        p->size = (uint16_t)size;
        p->from = (uint16_t)from;
        c->bytes += (uint64_t)size;
        c->frames++;
        route(n, p);
    }
}

/* Sets the timer to when the next packet is due. */
static int set_timer(const struct network *n, int64_t *set) {
    int64_t due = n->under_way > 0 ? n->heap[0].due : 0; /* 0: never */
    if (due == *set)
        return 0;
    struct itimerspec time = {.it_value = {due / SECOND, due % SECOND}};
    *set = due;
    return timerfd_settime(n->timer, TFD_TIMER_ABSTIME, &time, NULL);
}

/* Waits for frames or for the timer. If too many packets are under way, frames wait in the queues of
   the hosts' devices. */
static int next_events(const struct network *n, struct epoll_event *ready, int most) {
    if (n->under_way >= MOST) {
        struct pollfd timer = {.fd = n->timer, .events = POLLIN};
        return poll(&timer, 1, -1) < 0 ? -1 : epoll_wait(n->epoll, ready, 1, 0);
    }
    return epoll_wait(n->epoll, ready, most, -1);
}

static int run(struct network *n) {
    struct epoll_event ready[64];
    int64_t set = 0;
    for (;;) {
        deliver(n);
        if (set_timer(n, &set) < 0)
            return errno;
        int count = next_events(n, ready, 64);
        if (count < 0 && errno != EINTR)
            return errno;
        for (int i = 0; i < count; i++) {
            if (ready[i].data.u32 < (uint32_t)n->size) {
                receive(n, (int)ready[i].data.u32);
                deliver(n);
            } else {
                uint64_t times;
                if (read(n->timer, &times, sizeof times) > 0)
                    set = 0; /* it has ended */
            }
        }
    }
}

static int watch(const struct network *n, int descriptor, int number) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)number};
    if (fcntl(descriptor, F_SETFL, O_NONBLOCK) < 0)
        return -1;
    return epoll_ctl(n->epoll, EPOLL_CTL_ADD, descriptor, &event);
}

/* Forwards until the process is killed, or returns an error number. */
EXPORT int laconic_forward(const struct host *hosts, int size, uint64_t seed,
                           struct counters *counters) {
    struct network n = {.hosts = hosts, .counters = counters, .size = size};
    n.start = now();
    n.pairs = calloc((size_t)size * (size_t)size, sizeof *n.pairs);
    n.heap = malloc(MOST * sizeof *n.heap);
    n.epoll = epoll_create1(EPOLL_CLOEXEC);
    n.timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    if (n.pairs == NULL || n.heap == NULL || n.epoll < 0 || n.timer < 0 || watch(&n, n.timer, size) < 0)
        return errno;
    for (int i = 0; i < size * size; i++)
        n.pairs[i].key = mixed(mixed(seed + GOLDEN) + (uint64_t)i * GOLDEN);
    for (int i = 0; i < size; i++)
        if (watch(&n, hosts[i].tap, i) < 0)
            return errno;
    return run(&n);
}

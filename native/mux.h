// The channel between a microVM's supervisor, on the host, and its hand, the guest's PID 1 (docs/microvm.md): frames of wire.h on one byte
// stream, and on them any number of flows. A flow carries the bytes of one descriptor here to one descriptor there, with a window, so that
// one that nobody reads stops nobody else. Both ends are this code; the peer may be hostile.
#ifndef DSEC_MUX_H
#define DSEC_MUX_H
#include "aether.h"

#define HAND_VERSION 1
#define HAND_PORT "dsec"               // name of the virtio-serial port
#define FLOW_WINDOW (256u << 10)       // bytes of one flow that may be under way
#define FLOWS_EACH 4                   // numbers that belong to one command or file operation: FLOW_IN, FLOW_OUT, FLOW_ERR
enum { FLOW_IN = 0, FLOW_OUT = 1, FLOW_ERR = 2 };

// Numbers of their own: this is not the supervisor wire. `request` is a flow, a process (the first of its flows) or a question.
enum hand_frame {
  H_CREATE = 1,                        // fields of CREATE but ENV, TIME_NS, SEED: the one that makes the sandbox
  H_READY = 2, H_FAILED = 3,           // HAND_VERSION / CODE MESSAGE ERRNO: of CREATE and of SPAWN
  H_SPAWN = 4,                         // fields of EXEC, the sandbox's ENV behind its own, GROUP, EXEC_FLAGS (X_STDIN X_PTY X_MERGE), ROWS COLS
  H_STARTED = 5, H_EXIT = 6,           // PID inside / STATE (CLD_*) SIGNAL (status) CPU_USED_NS MEMORY_PEAK
  H_DATA = 7, H_EOF = 8, H_WINDOW = 9, H_CLOSED = 10, // raw bytes / - / BYTES that were taken / nobody reads any more
  H_SIGNAL = 11,                       // SIGNAL, GROUP or a process
  H_KILL = 12,                         // GROUP or a process
  H_DROP = 13,                         // GROUP: its command is over
  H_FILE = 14,                         // the fields of FILE
  H_RESIZE = 15,                       // a process, ROWS COLS
  H_STAT = 16, H_STATUS = 17,          // / the fields of STATUS, DISK_FULL, HEALTH
  H_FREEZE = 18, H_THAW = 19,          // the disk: all is on it and nothing writes
  H_RENAME = 20,                       // HOSTNAME
  H_DONE = 21,                         // answer to a question; CODE MESSAGE if it failed
  H_GONE = 22,                         // the container's PID 1 is dead
  H_HOLD = 23,                         // as FREEZE, and not a byte more comes before THAW: the machine is going to be copied
  H_ADOPT = 24,                        // a process that a copy has: STARTED or FAILED
};

struct flow {
  struct source src;
  struct flow *next;
  uint32_t id;
  uint8_t sends, eof, watched;         // watched: flow_told is called when it owes nothing
  uint64_t credit;                     // sends: what the other end takes yet. receives: what it may still send
  uint64_t owed;                       // sends: bytes that have to go before somebody is told
  uint64_t taken;                      // receives: written since the last WINDOW
  uint8_t *kept;                       // receives: what its descriptor did not take
  size_t at, used;
};

int mux_open(int fd);                  // 0, or -1 without memory. The descriptor becomes non-blocking
void mux_send(struct buf *b);          // a built frame
int mux_wait(int ms);                  // 1: something was read and handled, 0: time is up
void mux_flush(int ms);
void mux_quiet(int on);                // nothing is sent or taken from flows
int mux_is_quiet(void);
void mux_restart(void);                // another peer is there: what was under way never was
struct buf mux_buf(void);              // a frame under construction; one at a time
int flow_send(uint32_t id, int fd);    // takes over the descriptor. 0, or -1: no memory, and the descriptor is closed
int flow_receive(uint32_t id, int fd);
struct flow *flow_find(uint32_t id);
int flow_owes(uint32_t id);            // something of it is not where it belongs yet. Else flow_told will not be called
void flow_end(uint32_t id);            // closed here; the other end is told

// what the two ends do with it: machine.c or hand.c
struct mux_user {
  void (*frame)(uint8_t type, uint32_t request, const uint8_t *payload, size_t size);
  void (*told)(uint32_t flow);
  void (*lost)(const char *why);
  int (*alone)(void);                  // nobody is at the other end. 1: somebody will come; NULL: nobody
};
extern const struct mux_user *mux_user;
#endif

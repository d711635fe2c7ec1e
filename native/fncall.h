// A worker: the supervisor of one resident container in which function calls run. Each call has a box: pid, mount, network, IPC, UTS and
// cgroup namespaces, groups, a tmpfs and a user id that nothing had before it and nothing has after it. Programs are started in a box by
// the worker; a warm call is a child of the container's zygote, an interpreter that has the environment's libraries loaded and may do one
// thing that others inside may not: send a child of its own into a box. docs/fncall.md has the reasons.
#ifndef DSEC_FNCALL_H
#define DSEC_FNCALL_H
#include "frame.h"
#include "node.h"

#define FN_BOXES 160                   // at once, those that wait for a call included; the edge has at most 128 calls under way
#define FN_GROUP "%s.%d"               // name of a box's groups: the worker's id, the box's number
#define FN_MARK "worker"               // in its run directory: it may have boxes
#define FN_FILES 256                   // that one call brings
#define FN_COLLECT 16                  // that one call hands back
#define FN_ARGS 1024
#define FN_DEVICES 32                  // device files that one call gets
#define FN_VALUE (8u << 20)            // most bytes of a warm call's value
#define FN_DISK (64ull << 20)          // size of a box's tmpfs until a call says otherwise
#define FN_INODES "16384"

// fnbox.c: a place for one call --------------------------------------------------------------------------------------------------------
struct fnbox {
  struct sandbox s;                    // what sandbox_enter needs to know of it
  struct box box;
  char id[96], user[32];
  uint32_t uid;                        // inside
  int cpu, cpu_join;                   // its group for CPU time in v1 and that group's `tasks`; -1: its v2 group has the time
  int scratch;                         // its tmpfs, with /box as w, /tmp as t, /var/tmp as v, /dev/shm as s
};
int fnbox_open(struct sandbox *resident, struct fault *f);              // once, first
void fnbox_plan(struct fnbox *b, int number, uint64_t serial);
int fnbox_build(struct fnbox *b, int warm, struct fault *f);            // warm: for the zygote; -1: what there is of it is to be killed and removed
int fnbox_resize(struct fnbox *b, uint64_t disk, struct fault *f);
int fnbox_devices(struct fnbox *b, const char *const *devices, int n, struct fault *f); // "major:minor:name below /dev" of character devices
int fnbox_work(const struct fnbox *b);                                  // its /box, to be closed
uint64_t fnbox_cpu(const struct fnbox *b);                              // nanoseconds of all that was in it
void fnbox_kill(struct fnbox *b);                                       // every process of it, now
int fnbox_dead(struct fnbox *b);                                        // 1: all of them are gone, and reaped
void fnbox_remove(struct fnbox *b);                                     // when it is dead: the rest of it

// fnblob.c: bytes that calls share, and the files that a call brings and hands back -------------------------------------------------------
int shared_add(const char *id, const uint8_t *p, size_t n, struct fault *f); // made with its first bytes
int shared_take(const char *id, int fd, struct fault *f);                 // this descriptor becomes it
int shared_find(const char *id);                                          // its descriptor, -1
void shared_drop(const char *id);
int fd_write(int fd, const uint8_t *p, size_t n);
int fd_copy(int from, int to, uint64_t most);                           // from its begin
int input_make(void);                                                   // an empty file in memory
int input_reopen(int fd);                                               // for reading only
struct fn_file { const char *name, *blob; const uint8_t *p; size_t n; uint32_t mode; }; // blob NULL: the bytes are here; name "": stdin
int file_parse(const struct item *i, struct fn_file *file);             // of T_FN_FILE
int file_put(int work, const struct fn_file *file, uint32_t owner, struct fault *f);
int file_get(int work, const char *name, uint64_t most, struct fault *f); // open for reading, a regular file of at most so many bytes

// fnzygote.c: the resident interpreter -----------------------------------------------------------------------------------------------
struct fn_ends { int in, out, err, value, job; };                       // of a call, inside
int zygote_start(struct sandbox *resident, const char *const *argv, const char *const *env, struct fault *f);
int zygote_socket(void);                                                // readable: zygote_hear; -1: there is none
int zygote_arm(const struct fnbox *b, uint64_t serial, const struct fn_ends *ends, struct fault *f); // a child of it goes into the box
// 1: serial's process ended with *status; 2: it is ready to arm; 0: nothing now; -1: it is dead or speaks nonsense, f says what it last said
int zygote_hear(uint64_t *serial, int *status, uint64_t *rss, struct fault *f);

// fncall.c: the loop and the connection ------------------------------------------------------------------------------------------------
struct fncall;
void reply_data(uint32_t request, uint8_t which, const uint8_t *p, size_t n); // which: 1 stdout, 2 stderr, 3 value, 16 and up: a file
void reply_frame(struct buf *b);
void reply_fault(uint32_t request, const struct fault *f);
uint64_t now_ns(void);

// fnrun.c: calls --------------------------------------------------------------------------------------------------------------------------
int calls_open(struct sandbox *resident);                               // 0 or -1
int call_begin(uint32_t request, const uint8_t *p, size_t n, struct fault *f); // one, or a pair whose programs talk to each other
void call_cancel(uint32_t request);
void calls_cancel_all(void);
struct pollfd;
int calls_poll(struct pollfd *p, int most, uint64_t *wake);            // what to wait for, and until when at most (CLOCK_MONOTONIC)
void calls_serve(const struct pollfd *p, int n);
void calls_tick(void);                                                  // limits of time
int calls_spare(void);                                                  // makes one box ahead; 0: there is nothing to make, -1: it failed
void calls_zygote(uint64_t serial, int status, uint64_t rss);
int calls_boxes(void);                                                  // boxes that are there
#endif

// Calls under way: what the file that begins them and the file that ends them share.
#ifndef DSEC_FNRUN_H
#define DSEC_FNRUN_H
#include "fncall.h"

#define LOOK_NS 2000000ull             // CPU time is looked at no more often than this

enum state { FREE, WAITING, STARTING, RUNNING, ENDING };
enum { OUT, ERR, VALUE, STREAMS };

struct stream { int fd; uint8_t *p; size_t n, cap; uint64_t total, most; };

struct call {
  enum state state;
  struct fnbox box;
  uint64_t serial;
  int warm, given, armed;              // of the interpreter; somebody's; its process is in the box
  int in, go;                          // its input, and where its interpreter reads its job
  uint8_t *job;                        // what waits for its process to be in the box
  size_t job_size;
  uint32_t request;
  uint8_t part;                        // 1: the second of a pair
  struct start start;
  pid_t pid;                           // its program's
  int pidfd, cpu;                      // cpu: the one that it has for itself, -1
  struct stream stream[STREAMS];
  uint64_t began, cpu_base, cpu_next, wall_most, cpu_most, flags;
  uint8_t forced, hits;                // an END_* that we caused, LIMIT_* and FN_HIT_*
  struct fn_result result;
  struct { char *name, *keep; uint64_t most; } collect[FN_COLLECT];
  int ncollect;
};

extern struct call *calls;             // FN_BOXES of them

void call_clock(struct call *c);       // its time counts from now
int call_job(struct call *c, struct fault *f); // to the interpreter's child
void call_spoil(struct call *c);       // whatever it is at: nobody waits for it any more
void call_forget(struct call *c);      // lets go of all but the box
uint64_t call_cpu(const struct call *c); // nanoseconds so far
#endif

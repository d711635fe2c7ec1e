// A sandbox in a microVM, as its supervisor sees it: what sandbox.h does to a container by system calls goes through the hand, the guest's
// PID 1. Ids, deadlines, logs and records stay with the supervisor, which believes the hand no more than it has to.
#ifndef DSEC_MACHINE_H
#define DSEC_MACHINE_H
#include "sandbox.h"

#define MACHINE_SLOT (-2)              // in struct start: its process is in a guest

int machine_start(struct sandbox *s, struct fault *f);                // the guest makes the container. Before the loop runs
void machine_open(struct sandbox *s);                                 // the loop runs
void machine_refusal(const uint8_t *payload, size_t size, struct fault *f); // what a FAILED says
int machine_enter(struct sandbox *s, const struct entry *x, struct start *st, struct fault *f);
int machine_started(struct start *st, pid_t *pid, int *pidfd, struct fault *f);
void machine_abandon(struct start *st);
struct ending { int code, status; uint64_t cpu_ns, peak; };           // CLD_*, as waitid says
int machine_ended(int pidfd, struct ending *e);                       // 1: e is how, 0: it has not
int machine_pid(pid_t process);                                       // inside, 0 when unknown
void machine_signal(pid_t process, int signal);
void machine_group(const char *group, int signal);                    // 0: kill
void machine_drop(const char *group);
int machine_terminal(int rows, int cols, int *slave, struct fault *f);
void machine_resize(pid_t process, int rows, int cols);
int machine_rename(const char *hostname, struct fault *f);
// A file operation gets the connection. Its number, or -1; `end` is readable when it is over
pid_t machine_file(int conn, uint32_t request, const uint8_t *payload, size_t size, int *end, struct fault *f);
void machine_kill(pid_t process);
void machine_usage(struct usage *u);                                  // as it was a moment ago
void machine_look(void);                                              // have it told what is known; does not wait
const struct usage *machine_known(void);                              // the same, without asking
int machine_disk_full(void);
int machine_shell_replaced(void);
int machine_freeze(struct fault *f);                                  // all that was written is on the disk's image
void machine_thaw(void);
int machine_hold(struct fault *f);                                    // the same, and the channel is empty, until machine_thaw
int machine_adopt(uint32_t process, int *end, struct fault *f);       // one that a copy has. `end`: as of a start
void machine_streams(uint32_t process, int in, int out, int err, struct fault *f); // takes over the ends that the guest's flows go to; -1: none
// machine_fork.c
struct conn;
struct request;
void machine_checkpoint(struct conn *c, struct request *r);
void machine_restore(struct conn *c, struct request *r);
uint64_t machine_tick(void);
void machine_end(void);                                               // the guest is dead
#endif

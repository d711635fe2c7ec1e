// start.c: see there. Only what brings processes into a sandbox and what waits for them needs this.
#ifndef DSEC_START_H
#define DSEC_START_H
#include "sandbox.h"

int start_open(struct start *st, int *child_end, struct fault *f);    // a pipe and a place for its second pid
void start_cancel(struct start *st);                                  // nothing was started after all
pid_t *start_second(const struct start *st);                          // where the kernel shall write it
void start_forget(void);                                              // in a process that has no second one
int starts_under_way(void);
#endif

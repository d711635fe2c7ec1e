// The hand: PID 1 of a microVM's guest, outside the container in which the agent's processes live. The supervisor is on the host; the hand
// does in the guest what it is told over the channel (mux.h), and keeps nothing: no log, no record, no deadline.
#ifndef DSEC_HAND_H
#define DSEC_HAND_H
#include "launcher.h"

void hand_main(void) __attribute__((noreturn));

// guest.c: the machine around the container
void guest_boot(void);                 // mounts, modules, layers, the node's root
int guest_port(void);                  // the channel's descriptor
int guest_awake(const struct order *o, struct fault *f);              // of whatever it is a copy: clock, randomness
int guest_disk(struct spec *c, struct fault *f);                      // says whether the sandbox is made again, or of a copy
int guest_sign(const char *was, const char *id, struct fault *f);     // the disk is this sandbox's from now on
int guest_freeze(int on);              // the disk
void guest_die(const char *what, const char *why) __attribute__((noreturn)); // the end of the machine
#endif

// Layers whose data comes when it is read. The launcher makes one fanotify group; every aether inherits it, so it never closes while a
// sandbox lives (a closed group lets every reader through, and what it reads are holes). The loader passes its events on to the filler.
// Where the kernel has no such events the group is the connection of a FUSE file system instead (fuse.h).
#ifndef DSEC_LOADER_H
#define DSEC_LOADER_H
#include <sys/types.h>
#include "sandbox.h"

// What every aether inherits, at fixed numbers, so that a later launcher can take it from any of them.
enum { LOADER_GROUP = 61, LOADER_TABLE = 62, LOADER_LIFE = 63 };

int loader_open(pid_t join, struct fault *f);            // makes the three, or takes them from a living aether; 0 also where the kernel can do neither
int loader_present(void);                                // the kernel has them, or FUSE
int loader_by_fuse(void);
int loader_start(struct fault *f);                       // pidfd of a loader that takes over from any other; -1: none
int loader_mark(const char *path);                       // from now on whoever opens this file and reads it waits for the filler; 0 or -1
void loader_unmark(const char *path);
#endif

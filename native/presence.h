// What the filler has brought already, in memory that it shares with the loader: a read of it is let through with no question asked. One map
// a file; all go when the filler does, and its successor gives its own.
#ifndef DSEC_PRESENCE_H
#define DSEC_PRESENCE_H
#include <stdint.h>

void presence_take(int fd);                              // a map, from the filler; its descriptor is not kept. One that is malformed is ignored
void presence_drop(void);                                // of all files
// Notes that somebody reads this range. ABSENT: ask and wait; PRESENT: all of it is there; EDGE: the same, and the filler wants to know
enum { ABSENT, PRESENT, EDGE };
int presence_of(uint64_t dev, uint64_t ino, uint64_t off, uint64_t count);
#endif

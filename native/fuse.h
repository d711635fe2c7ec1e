// On-demand loading where the kernel has no pre-content events: a FUSE file system of the data of layers, one file each, named by the layer.
// The loader serves it: a read becomes the same question to the filler, and its answer lets the bytes of the real file through.
#ifndef DSEC_FUSE_H
#define DSEC_FUSE_H
#include <stdint.h>
#include "sandbox.h"

#define FUSE_FILES 4096                // layers that were ever read through it while one sandbox lived
#define FUSE_HOLDERS 8                 // times that one file is open at once: once a mount

// A part of the loader's shared table: what a successor must know.
struct fuse_file { char hex[72]; uint64_t dev, ino, size, holders[FUSE_HOLDERS]; }; // holders: the requests that opened it; 0: free
struct fuse_state {
  _Alignas(8) char request[8192];      // one read; its first word is zero when it was dealt with
  struct fuse_file files[FUSE_FILES];
};

struct fuse_read { uint64_t unique, dev, ino, off, count; };

// the launcher's side
int fuse_open(struct fault *f);                          // mounts it; descriptor of its connection, -1: cannot be had (a fault only when it should)
int fuse_file_open(const char *data);                    // the file that stands for STATE/remote/<hex>/data; waits for the loader

// the loader's side
void fuse_begin(struct fuse_state *s, int connection);
int fuse_next(struct fuse_read *r);                      // 1: a read that waits for the filler, 0: something else, -1: nothing to read
int fuse_again(struct fuse_read *r);                     // the same for what a predecessor read and did not deal with; -1: nothing
void fuse_noted(void);                                   // the read of the last `fuse_next` is in a slot
void fuse_answer(const struct fuse_read *r, int error);  // 0: its bytes are in the file now
void fuse_whole(int data);                               // the filler says that this file is complete
#endif

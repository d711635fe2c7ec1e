// Small helpers of the launcher and the sandbox code: system calls that libc lacks, files written in one call, faults.
#ifndef DSEC_UTIL_H
#define DSEC_UTIL_H
#include <linux/sched.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/types.h>
#include <time.h>
#include "sandbox.h"

// Writes down an error (an earlier one stays) and returns -1. The text is cut to fit.
int fault_set(struct fault *f, const char *code, int err, const char *format, ...) __attribute__((format(printf, 4, 5)));
// The same with the code that errno means for a resource of the host: resource_exhausted, and which, or internal.
int fault_host(struct fault *f, int err, const char *format, ...) __attribute__((format(printf, 3, 4)));
// The same where the numbers that have several meanings (EAGAIN, ENOSPC, EMFILE) mean this resource.
int fault_lack(struct fault *f, const char *resource, int err, const char *format, ...) __attribute__((format(printf, 4, 5)));

int errno_lack(int err);               // of an open: the host lacks something, which says nothing of what was to be opened

int write_at(int dir, const char *name, const char *text);                 // open, write, close; 0 or -1
ssize_t read_at(int dir, const char *name, char *to, size_t cap);          // NUL-terminated; length or -1
int read_u64(int dir, const char *name, uint64_t *v);                      // the first number of a file
int read_key(int dir, const char *name, const char *key, uint64_t *v);     // the number behind `key ` at a line's start
int path_exists(const char *path);                                         // access(2); its F_OK is a frame type elsewhere
int make_dirs(const char *path, mode_t mode);                              // mkdir -p; 0 or -1
int open_inside(int root, const char *path, int flags);                   // as inside `root`: .. and absolute links stay in it
int remove_all(int dir, const char *name);                                // rm -r, one file system, no link followed
void close_fd(int *fd);
void nap_us(unsigned us);

pid_t sys_clone3(struct clone_args *a);
int sys_pidfd_open(pid_t pid);
int sys_pidfd_kill(int pidfd, int sig);
int sys_pivot_root(const char *new_root, const char *put_old);
#endif

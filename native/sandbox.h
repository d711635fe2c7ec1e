// One sandbox as its supervisor sees it: what it was asked to be, the kernel objects it is made of, and the one way to run something in it.
#ifndef DSEC_SANDBOX_H
#define DSEC_SANDBOX_H
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_LAYERS 64
#define MAX_ENV 256
#define MAX_GIVEN 64

enum { CPU_LATENCY, CPU_BEST_EFFORT, CPU_CLASSES };

struct gift { const char *name; const uint8_t *data; size_t size; uint32_t mode, uid, gid; }; // a file below /run, owner as inside

struct spec {                          // decoded CREATE; strings point into the request buffer, which lives as long as aether
  const char *id, *hostname, *workdir, *user, *cgroup;                         // cgroup: "dsec-<prefix>", parent in every hierarchy
  const char *volume;                  // the snapshot that its writable layer begins as, NULL: empty
  const char *run_dir, *state_dir;     // its own directories: RUN/<id> and STATE/sandboxes/<id>; both exist from sandbox_create on
  const char *layers[MAX_LAYERS];      // names given to MOUNT_LAYER, topmost first
  const char *env[MAX_ENV + 1];        // NAME=value, NULL terminated
  struct gift given[MAX_GIVEN];
  int nlayers, nenv, ngiven, medium, userns;
  int own_pids;                        // its user namespace owns its pid namespace, so that a memory can be restored in it
  uint32_t uid_base, cpu_milli, cpu_class, pids, nofile;
  uint64_t memory_bytes, disk_bytes, shm_bytes;
  uint64_t log_head, log_tail, log_budget;
  uint64_t deadline_ns, idle_ns;       // CLOCK_REALTIME; 0: never
  uint64_t auto_pause_ns, reclaim_ns;  // idle for so long: it is paused, gives memory back; 0: never
  uint64_t turn;                       // how often it was made again, on the layer that it had; 0: it is new
  int keep;                            // its writable layer stays when everything else of it is removed
  int worker;                          // it serves function calls (fncall.h) instead of commands
  const char *channel;                 // a microVM: the socket of its guest's port, NULL: a container
  pid_t vmm;                           // the process that runs the guest
  uint64_t vmm_bytes, boot_s;          // memory limit of that; seconds until its guest must have answered
};

struct file_id { uint64_t dev, ino, size, ctime_ns; }; // overlayfs keeps the inode number over a copy-up: the change time tells

struct sandbox {
  struct spec spec;
  pid_t init;                          // PID 1 as the host sees it
  int init_fd;                         // its pidfd: readable when it died
  int listen_fd;                       // RUN/<id>/aether.sock, listening (non-blocking) since before anything else was made
  int userns_fd, cgroup_fd;            // cgroup_fd: the sandbox's v2 directory
  int devpts_fd;                       // its devpts mount, for PTYs
  int oom_fd;                          // readable on an OOM kill inside (v1 eventfd, v2 inotify), -1 without a memory controller
  int own_net;                         // its network namespace is not its supervisor's
  int has_shell;                       // /bin/sh was executable when it was made
  struct file_id shell, bash;          // /bin/sh and /bin/bash as they were then; ino 0: absent
  int channel;                         // to the guest's hand (machine.h), 0: it is a container
  struct box *box;                     // what only sandbox.c and enter.c need
};

struct buf;
struct usage { uint64_t memory, swap, memory_peak, cpu_ns, pids, disk, oom_kills, pids_hits; };

struct fault { const char *code, *resource; int err; char message[200]; }; // stable code of an error reply, what of the host ran out, errno, text

// launcher.c / sandbox.c ------------------------------------------------------------------------------------------------------------
// 0, or -1 with everything undone. userns: its user namespace, -1 for none
int sandbox_create(struct sandbox *s, const struct spec *spec, int userns, struct fault *f);
void sandbox_kill(struct sandbox *s);  // every process of it, now; returns when init was reaped
void sandbox_remove(struct sandbox *s);// cgroups, writable layer (but for spec.keep), run directory
void sandbox_rest(struct sandbox *s);  // nothing runs any more: its files are on the medium and out of memory when this returns
void sandbox_usage(struct sandbox *s, struct usage *u);
void usage_fields(const struct usage *u, struct buf *b);                // usage.c
uint64_t sandbox_oom_kills(struct sandbox *s);
uint64_t sandbox_pids_hits(struct sandbox *s);
int sandbox_disk_full(struct sandbox *s);   // the writable layer is at its quota (within one block group of slack), by ioctl or statfs

// What enters the sandbox: a child of ours joins its namespaces and cgroups, takes the user, drops capabilities, then either a second
// child, born inside, loads seccomp and execs argv; or the first one loads seccomp and calls run(arg): our code, with the sandbox's
// rights, NOT in its pid namespace, invisible inside.
struct entry {
  const char *const *argv, *const *env;     // env: this call's NAME=value (NULL: none); wins over spec.env, which wins over the
                                            // defaults of HOME, USER, LOGNAME, PATH, HOSTNAME (and TERM for a tty)
  const char *shell_text;                   // instead of argv: bash -c text, or sh -c text where there is no bash
  const char *cwd, *user;                   // NULL: the spec's
  int in, out, err;                         // descriptors to become 0, 1, 2; -1: /dev/null
  int tty;                                  // in/out/err is a PTY slave: make it the controlling terminal
  int ctl;                                  // >= 0: becomes descriptor ctl_as (session control pipe)
  int ctl_as;
  int cgroup_fd;                            // v2 group of its own (command), or the sandbox's
  const char *group;                        // the name of the former, for a guest
  int light;                                // file helpers: join only the memory and v2 groups
  void (*run)(void *arg); void *arg;
  int zygote;                               // it may join namespaces that the sandbox's user namespace owns, and nothing else of that kind
  const struct bounds *bounds;              // further limits of the program, NULL: none
  int keep;                                 // one more descriptor that run() may use, -1: none
};

struct bounds { uint64_t file_bytes, cpu_s; int stack, cpu; }; // 0: none; stack: without limit; cpu: the only one it runs on, -1: any

struct start {                              // a process on its way in
  pid_t pid;                                // of the first one
  int pidfd, status;                        // status is readable or hangs up when it is in or failed; the caller's to close
  int slot, stops;
};
#define START_LOOK_MS 50                    // how often start_look is due

// The codes of f: cwd_not_found, permission_denied (cwd), binary_not_found, not_executable, user_not_found, pids_limit, sandbox_damaged
// (there was a shell when the sandbox was made and now it cannot be run), no_memory, resource_exhausted, internal.
int sandbox_enter(struct sandbox *s, const struct entry *e, struct start *st, struct fault *f); // 0: under way
int start_done(struct start *st, pid_t *pid, int *pidfd, struct fault *f); // 0: in; a process that died on its way is in, and dead
int start_look(struct start *st, struct fault *f);                         // -1: it shall be abandoned
void start_abandon(struct start *st);
int starts_reap(void);                                                     // what starts left behind; how many are still there
pid_t sandbox_enter_now(struct sandbox *s, const struct entry *e, int *pidfd, struct fault *f); // all of that, waiting
int sandbox_pty(struct sandbox *s, int rows, int cols, int *slave, struct fault *f); // master descriptor
int sandbox_shell_replaced(struct sandbox *s); // /bin/sh or /bin/bash is no longer the file it was at the start

int sandbox_rename(struct sandbox *s, const char *hostname, struct fault *f); // one that nobody has used
int sandbox_adopt(struct sandbox *s, const struct spec *spec, int copied, struct fault *f); // the same, with user, directory, limits of processes and CPU

// fncall.c: a worker's life after READY; never returns
void fncall_main(struct sandbox *s) __attribute__((noreturn));

// supervisor.c: aether's life after READY; never returns
void aether_main(struct sandbox *s) __attribute__((noreturn));

// files.c: serve one FILE request on conn (blocking, frames), inside the sandbox; never returns
struct file_request { int conn; uint32_t request; const uint8_t *fields; size_t size; };
void file_serve(void *file_request);
#endif

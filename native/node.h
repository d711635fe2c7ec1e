// What the launcher prepares once and every aether inherits, and the kernel objects of one sandbox that only this side of the code sees.
#ifndef DSEC_NODE_H
#define DSEC_NODE_H
#include <linux/filter.h>
#include <signal.h>
#include "sandbox.h"

enum { CG_MEMORY, CG_PIDS, CG_CPU, CG_COUNT };
enum { IDLE_BY_GROUP, IDLE_BY_POLICY };       // what makes best effort yield: its parent's cpu.idle, or SCHED_IDLE and the least weight

// Places in the node's own mount namespace (a small tmpfs root; nothing in it appears on the host). RUN and STATE keep their paths there,
// so ours are out of their way.
#define NODE_LAYERS "/.node/layers"    // one EROFS mount a layer, by name
#define NODE_MEDIUM "/.node/medium"    // the writable medium
#define NODE_SCRATCH "/.node/scratch"  // mount points that a sandbox's setup uses in its own copy: l0 l1 ... and m
#define NODE_DEV "/.node/dev"          // template of every sandbox's /dev
#define NODE_LOOP "/.node/loop"        // device nodes of our loop devices
#define NODE_FUSE "/.node/remote"     // data of layers by FUSE, where the kernel has no pre-content events
#define NODE_MARK "/.node/mark"        // tells this root from any other

enum { FILL_AUTO, FILL_FANOTIFY, FILL_FUSE }; // how readers of remote data are made to wait; auto: events if the kernel has them

struct node {
  const char *run, *state, *cgroup;
  char *title;                         // the launcher's arguments, which /proc shows
  size_t title_size;
  int control;                         // socket to the edge
  int host_ns, own_ns;                 // mount namespaces: the host's, ours
  int init_fd;                         // sealed memfd with the program of PID 1
  struct sock_fprog filter;            // seccomp filter of every command
  struct sock_fprog zygote;            // the same with setns; no code: there are no warm calls
  // by class, directories <hierarchy>/<cgroup>[-idle]; v1 -1: the controller lives in v2; where classes do not matter, both name one
  int v2[CPU_CLASSES], v1[CPU_CLASSES][CG_COUNT];
  int cpuacct;                         // v1 directory of its own for CPU time alone, -1: there is none
  int idle_by;                         // IDLE_BY_*
  struct { pid_t pid; int fd; } core[CPU_CLASSES]; // whoever holds the cookie of a class; fd -1: no core scheduling here
  int medium, qgroups;                 // NODE_MEDIUM, and its /sys directory of quota groups; -1: not mounted
  int criu, join, cache;               // directory with criu and its libraries, what is loaded into it, what it finds out about the
                                       // kernel; -1: there is none
  int loader;                          // pidfd of the loader, -1: none
  int fill_by;                         // FILL_*
  uint64_t fill_ms;                    // a read of a layer whose data does not come in this time fails
  unsigned masks;                      // which of mounts.c's masked paths this kernel has
};
extern struct node node;

struct box {
  int v1[CG_COUNT], join[CG_COUNT];    // own v1 groups and their `tasks`
  int clock;                           // `tasks` of one more, for CPU time; 0: none
  int volume;                          // own subvolume, -1: memory medium
  char qgroup[32];                     // its quota group in /sys
  int root, null;                      // root directory (O_PATH), /dev/null as the sandbox sees it
};

// cgroup.c
int cgroup_open(struct fault *f);                                     // fills node.v1 and node.v2
int cgroup_make(struct sandbox *s, struct fault *f);                  // the v2 group, into which PID 1 is born
int cgroup_limit(struct sandbox *s, struct fault *f);                 // the v1 groups, and all limits
int cgroup_groups(struct sandbox *s, struct fault *f);                // the v1 groups alone: limits follow by cgroup_bound
int cgroup_bound(struct sandbox *s, struct fault *f);                 // its limits alone, for groups that were made without, or whose are others now
int cgroup_join(const struct spec *spec, struct fault *f);            // from a process that has only the node's descriptors
void class_supervise(const struct spec *spec);                        // this process serves a sandbox of that class
int class_take(const struct spec *spec, struct fault *f);             // this process is one of the sandbox: how it takes its turn
void class_give(const struct spec *spec, pid_t thread);               // the same, for one that came from a sandbox of another class
void cgroup_reclaim(struct sandbox *s);                               // gives back what it can; may take long
void cgroup_swap(struct sandbox *s, int on);                          // v2: whether its pages may go out now
void cgroup_kill(int v2);
int cgroup_remove(const char *id);                                    // kills what is left in them, then removes; 0, or -1 and errno
void cgroup_usage(struct sandbox *s, struct usage *u);
int cgroup_pids_full(struct sandbox *s, int starting);                // with so many that will join

// core.c: core scheduling, one cookie a class
int core_open(const pid_t *from, struct fault *f);                    // from: by class, who has its cookie already, 0: nobody
int core_hold(int class, pid_t from, struct fault *f);                // nothing to do while its holder lives
int core_take(int class, struct fault *f);                            // this process, and all that it makes from now on

// medium.c, loop.c
int medium_mount(const char *path, uint64_t bytes, const char *mkfs, const char **keep, int nkeep, struct fault *f);
int medium_open(void);                                                // what an earlier launcher mounted; 0 or -1
int medium_make(struct sandbox *s, struct fault *f);                  // the sandbox's subvolume, limited
int medium_take(struct sandbox *s, struct fault *f);                  // the one that was made for it
int medium_put(const struct spec *c, struct fault *f);                // <id>.next: what it begins with when it is made again
int medium_rest(struct sandbox *s);                                   // its layer is on the disk, and nothing is beside it
int medium_forget(const char *id);                                    // all volumes of a sandbox
int medium_snapshot(struct sandbox *s, const char *name, struct fault *f); // <id>.<suffix>, beside it
int medium_keep(const char **keep, int nkeep, struct fault *f); // drops every snapshot but these
int snapshot_named(const char *name);                                 // <id>.<suffix>: for a moment; snap-<suffix>: until it is dropped
int medium_remove(const char *id);                                    // a volume or a snapshot
void medium_usage(struct sandbox *s, uint64_t *used, int *full);
int loop_attach(int file, int readonly, int direct, char *path, size_t cap, struct fault *f); // descriptor that holds it, or -1
int loop_find(int file, char *name, size_t cap);                      // 1: a loop device over this file exists

// layers.c
int layer_mount(const char *name, const char *path, const char *data, int fill, struct fault *f); // data: of a split image; fill: on demand
int layer_umount(const char *name, struct fault *f);
int layer_mounted(const char *name);

// launcher.c
int node_programs(const char *filter, struct fault *f);               // streams, PID 1, the filter of commands, cgroups

// root.c: the node's mount namespace
int root_make(struct fault *f);
int root_join(pid_t aether, struct fault *f);
int dev_fill(int d);                                                  // what every /dev has, into an empty directory; umask 0
int host_open(const char *path, int flags);                           // a path of the host, from our namespace

// mounts.c: the process that becomes PID 1
struct own_pids { pid_t init, helper; int err; };                     // shared: who PID 1 is when the setup process does not become it
struct setup { struct sandbox *s; struct own_pids *own; int status, go, aether, dev; }; // go: a byte when cgroups and network namespace are there to be joined
void setup_child(struct setup *u) __attribute__((noreturn));
int own_identity(const struct sandbox *s, struct fault *f);           // in ./u/etc, an agent's work: host name and machine id of its own
int netns_make(struct fault *f);                                      // this process moves into a new one with loopback
int hosts_text(const struct sandbox *s, char *text, size_t cap);      // of /etc/hosts
int given_mount(const struct sandbox *s, struct fault *f);            // given.c: files that are no part of any layer
int fs_mount(const char *type, const char *const *options, unsigned attributes); // name, value, ... NULL; detached mount or -1
int attach(int mount, const char *path);
unsigned masks_present(void);

// order.c
int hostname_check(const char *name, struct fault *f);

// userns.c
int userns_get(uint32_t base, struct fault *f);                       // descriptor of a user namespace of 65,536 ids; the cache's own
void userns_forget(int but);                                          // closes what the cache holds, in a child that needs but one

// user.c
struct account { uint32_t uid, gid; char name[64], home[512]; uint32_t groups[64]; int ngroups; };
int account_find(int root, const char *user, int limited, struct account *a, struct fault *f);

// privilege.c
enum { KEEP_USUAL, KEEP_NONE, KEEP_ZYGOTE };
int privilege_cut(const struct account *a, int which, struct fault *f); // takes the user and a capability set
uint64_t privilege_most(void);                                        // capabilities that a command may have
int filter_load(const struct sock_fprog *filter);
extern const struct sock_fprog init_filter;

// criu.c: a process of criu, inside a sandbox
#define CRIU_PIPES 3
struct criu {
  const char *const *args;             // behind the ones that every run has
  const char *images;                  // their directory
  int restore;                         // without any right on the host, in `group` and the limits of the sandbox, its tasks are our children
  int group, log;                      // log: what it says goes there
  int gate;                            // restore: a byte comes when all tasks are there and stand still, and one is to be sent to let them go
  uint64_t most;                       // dump: bytes of images
  int pipes[CRIU_PIPES], npipes;       // become CRIU_PIPE and following
  int32_t last_pid;                    // restore: pids from the next one on are criu's own, 0: as it comes; else what the sandbox gave last
};
enum { CRIU_PIPE = 110, CRIU_GROUP = 104 };
pid_t criu_start(struct sandbox *s, struct criu *c, int *pidfd, struct fault *f);
void criu_reason(int log, char *to, size_t cap);                      // the first thing that it complains about

// reap.c: cgroups, writable layer, run directory; reap() ends a supervisor that still lives first
int sandbox_sweep(const struct spec *spec, struct fault *f);
int reap(const struct spec *spec, struct fault *f);
#endif

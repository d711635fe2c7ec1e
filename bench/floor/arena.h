// What the C arms of the benches share: a place to work in (own mount namespace, EROFS layers, a writable medium), a writable layer and an
// overlay for each container, cgroups with limits, and the loop that times them. Any failure ends the program: a floor that skips is none.
#ifndef ARENA_H
#define ARENA_H
#include <stdint.h>
#include <sys/types.h>

#define MAX_LOWERS 16
#define UID_BASE 2000000u              // host id of the containers' root

struct arena {
  char *images[MAX_LOWERS];            // EROFS images, base first
  int nlowers;
  char *medium;                        // file with a btrfs in it; NULL: a tmpfs for each container
  uint64_t disk_bytes, memory_bytes;
  unsigned pids, cpu_milli;
  char *cgroup;                        // name of our group in every hierarchy
  const char *base;                    // where the arena's directories are: "" after the pivot into a small root
};
extern struct arena arena;

void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
double now(void);

// small: pivot into a root that holds nothing but the arena, /dev and /proc. hide_v2: unmount a v2 tree that stands beside v1 hierarchies.
void arena_enter(int small, int hide_v2, int parallel);
void name_of(char *name, size_t size, int worker, int i);
int userns_make(void);                 // descriptor of a new user namespace
int detached(const char *type, const char *const *options, unsigned attributes); // name, value, ..., NULL
int mapped_copy(const char *path, int userns); // detached copy of a mount; userns >= 0: with its ids
void attach(int mount, const char *path);
int layer_make(int worker, int i);     // a writable layer with its quota: its directory; -1 for tmpfs
void layer_remove(int worker, int i);
void lowers_mount(int worker, int userns); // idmapped copies of the layers, in the worker's scratch directory
void overlay_mount(int worker, int i, int layer, const char *target);

int groups_make(int worker, int i);    // groups with limits: the v2 one's directory
void groups_join(int worker, int i);   // the calling process joins the v1 ones
void groups_remove(int worker, int i);
void groups_close(void);

// Time `total` calls of one(worker, i), `parallel` at a time, and print a line of JSON.
void arena_run(int total, int parallel, void (*one)(int worker, int i));
#endif

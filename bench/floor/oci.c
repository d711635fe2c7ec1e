// The OCI arm: the same layers, medium, quota and overlay as the floor's, and then a given program (crun, runc, podman) that runs a container on it.
//
// oci -n TOTAL -c PARALLEL -g CGROUP [-m BTRFS] [-H] [-w BUNDLES] -l IMAGE [-l IMAGE ...] -- PROGRAM ARG...
// In the arguments {id} becomes the container's name, {root} its mounted root, {bundle} BUNDLES/<worker>, which holds a config.json made
// beforehand. -H hides a v2 cgroup tree that stands beside v1 hierarchies from PROGRAM. Limits and groups are PROGRAM's own business;
// CGROUP only makes the names unique. Prints the same line as floor.
#include <errno.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>
#include <fcntl.h>
#include "arena.h"

extern char **environ;
static char **command;
static const char *bundles = "";

static char *expand(const char *text, const char *id, const char *root, const char *bundle) {
  static const char *const names[] = {"{id}", "{root}", "{bundle}"};
  const char *values[] = {id, root, bundle};
  char *out = calloc(1, 4096), *to = out;
  if (!out) die("get memory");
  while (*text && to - out < 3000) {
    int found = 0;
    for (int i = 0; i < 3 && !found; i++)
      if (!strncmp(text, names[i], strlen(names[i]))) {
        to += snprintf(to, 1000, "%s", values[i]);
        text += strlen(names[i]);
        found = 1;
      }
    if (!found) *to++ = *text++;
  }
  return out;
}

static void one(int worker, int i) {
  static int ready;
  char root[64], tmpfs[64], id[96], bundle[512], *argv[64];
  int layer = layer_make(worker, i), n = 0, status;
  snprintf(root, sizeof root, "%s/w%d/m", arena.base, worker);
  snprintf(tmpfs, sizeof tmpfs, "%s/w%d/t", arena.base, worker);
  snprintf(id, sizeof id, "%s-%d-%d", arena.cgroup, worker, i);
  snprintf(bundle, sizeof bundle, "%s/%d", bundles, worker);
  if (!ready++) lowers_mount(worker, userns_make());   // once is enough for it: one id range for all its containers
  overlay_mount(worker, i, layer, root);
  for (; command[n] && n < 63; n++) argv[n] = expand(command[n], id, root, bundle);
  argv[n] = NULL;
  pid_t pid;
  errno = posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ);
  if (errno) die("run %s", argv[0]);
  if (waitpid(pid, &status, 0) != pid || status) { fprintf(stderr, "%s of %s ended with status %x\n", argv[0], id, status); exit(1); }
  while (n) free(argv[--n]);
  if (chdir("/") || umount2(root, MNT_DETACH)) die("unmount %s", root);
  if (layer >= 0) close(layer);
  else if (umount2(tmpfs, MNT_DETACH)) die("unmount %s", tmpfs);
  layer_remove(worker, i);
}

int main(int argc, char **argv) {
  int total = 100, parallel = 1, hide = 0, o;
  while ((o = getopt(argc, argv, "+n:c:g:m:l:w:H")) > 0) switch (o) {
    case 'n': total = atoi(optarg); break;
    case 'c': parallel = atoi(optarg); break;
    case 'g': arena.cgroup = optarg; break;
    case 'm': arena.medium = optarg; break;
    case 'w': bundles = optarg; break;
    case 'H': hide = 1; break;
    case 'l': if (arena.nlowers < MAX_LOWERS) arena.images[arena.nlowers++] = optarg; break;
    default: return 2;
  }
  command = argv + optind;
  if (!arena.cgroup || !arena.nlowers || !*command || total < 1 || parallel < 1) { fprintf(stderr, "see the head of oci.c\n"); return 2; }
  arena_enter(0, hide, parallel);
  arena_run(total, parallel, one);
  return 0;
}

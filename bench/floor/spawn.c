// Run a program again and again, one at a time, and time each from start to end: spawn -n TOTAL [-H] -- PROGRAM ARG...
// -H hides a v2 cgroup tree that stands beside v1 hierarchies (crun refuses that mix). Prints the same line of JSON as floor.
#include <errno.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static void die(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  int total = 100, hide = 0, o, status;
  while ((o = getopt(argc, argv, "+n:H")) > 0) switch (o) {
    case 'n': total = atoi(optarg); break;
    case 'H': hide = 1; break;
    default: return 2;
  }
  char **command = argv + optind;
  double *took = calloc((size_t)(total > 0 ? total : 1), sizeof *took), began;
  if (!took || total < 1 || !*command) { fprintf(stderr, "see the head of spawn.c\n"); return 2; }
  if (hide && (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))) die("make a mount namespace");
  if (hide && umount2("/sys/fs/cgroup/unified", MNT_DETACH) && errno != ENOENT && errno != EINVAL) die("hide the v2 tree");
  began = now();
  for (int i = 0; i < total; i++) {
    double t = now();
    pid_t pid;
    if ((errno = posix_spawnp(&pid, *command, NULL, NULL, command, environ))) die(*command);
    if (waitpid(pid, &status, 0) != pid || status) { fprintf(stderr, "%s ended with status %x\n", *command, status); return 1; }
    took[i] = now() - t;
  }
  double seconds = now() - began;
  qsort(took, (size_t)total, sizeof *took, ascending);
  printf("{\"n\": %d, \"parallel\": 1, \"seconds\": %.6f, \"rate\": %.2f, \"p50_ms\": %.4f, \"p99_ms\": %.4f}\n", total, seconds, total / seconds,
         took[total / 2] * 1e3, took[(long)total * 99 / 100] * 1e3);
  return 0;
}

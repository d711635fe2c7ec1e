// Users of the sandbox, from its own /etc/passwd and /etc/group. Both files belong to the agent: only regular files are read, at most
// 1 MiB of each, and no line is believed.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define FILE_MAX (1u << 20)
#define ID_MAX 65535u                  // a sandbox with a user namespace has ids 0 to 65535

struct lines { int fd; size_t at, end, total; char data[16384]; };

static int lines_open(struct lines *l, int root, const char *path) {
  struct stat st;
  l->at = l->end = l->total = 0;
  l->fd = open_inside(root, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  if (l->fd >= 0 && (fstat(l->fd, &st) || !S_ISREG(st.st_mode))) close_fd(&l->fd);
  return l->fd < 0 ? -1 : 0;
}

// The next line without its end, or NULL. A line longer than the buffer is skipped.
static char *lines_next(struct lines *l) {
  for (int skipping = 0;;) {
    char *start = l->data + l->at, *newline = memchr(start, '\n', l->end - l->at);
    if (newline) {
      *newline = 0;
      l->at = (size_t)(newline - l->data) + 1;
      if (!skipping) return start;
      skipping = 0;
      continue;
    }
    if (l->at) memmove(l->data, start, l->end - l->at);
    l->end -= l->at;
    l->at = 0;
    if (l->end == sizeof l->data - 1) { skipping = 1; l->end = 0; }
    ssize_t n = l->total < FILE_MAX ? read(l->fd, l->data + l->end, sizeof l->data - 1 - l->end) : 0;
    if (n <= 0) {
      if (!l->end || skipping) return NULL;
      l->data[l->end] = 0;
      l->at = l->end = 0;
      return l->data;
    }
    l->end += (size_t)n;
    l->total += (size_t)n;
  }
}

static int split(char *line, char **field, int want) {
  int n = 0;
  for (char *p = line; n < want; p++) {
    field[n++] = p;
    if (!(p = strchr(p, ':'))) break;
    *p = 0;
  }
  return n;
}

static int number(const char *s, uint32_t *v) {
  if (!*s) return -1;
  uint64_t n = 0;
  for (; *s; s++) {
    if (*s < '0' || *s > '9' || (n = n * 10 + (uint64_t)(*s - '0')) > 0xfffffffeu) return -1;
  }
  *v = (uint32_t)n;
  return 0;
}

static int find_user(int root, const char *name, struct account *a) {
  static struct lines l;
  uint32_t want = 0, uid, gid;
  int numeric = !number(name, &want), found = 0;
  if (lines_open(&l, root, "etc/passwd")) return errno_lack(errno) ? -1 : 0;
  for (char *line, *x[7]; !found && (line = lines_next(&l));) {
    if (split(line, x, 7) < 6 || number(x[2], &uid) || number(x[3], &gid)) continue;
    if (strcmp(x[0], name) && !(numeric && uid == want)) continue;
    a->uid = uid;
    a->gid = gid;
    snprintf(a->name, sizeof a->name, "%s", x[0]);
    snprintf(a->home, sizeof a->home, "%s", *x[5] == '/' ? x[5] : "/");
    found = 1;
  }
  close_fd(&l.fd);
  return found;
}

// With `group`: its number. Without: the groups that list the account.
static int find_groups(int root, const char *group, struct account *a) {
  static struct lines l;
  uint32_t gid;
  int found = 0;
  if (lines_open(&l, root, "etc/group")) return errno_lack(errno) ? -1 : 0;
  for (char *line, *x[4]; !found && (line = lines_next(&l));) {
    int fields = split(line, x, 4);
    if (fields < 3 || number(x[2], &gid)) continue;
    if (group) {
      if ((found = !strcmp(x[0], group))) a->gid = gid;
      continue;
    }
    if (gid == a->gid || fields < 4) continue;
    for (char *save, *m = strtok_r(x[3], ",", &save); m; m = strtok_r(NULL, ",", &save))
      if (!strcmp(m, a->name) && a->ngroups < (int)(sizeof a->groups / sizeof *a->groups)) { a->groups[a->ngroups++] = gid; break; }
  }
  close_fd(&l.fd);
  return found;
}

int account_find(int root, const char *user, int limited, struct account *a, struct fault *f) {
  char name[256];
  *a = (struct account){.home = "/"};
  if (!user || !*user) user = "root";
  const char *colon = strchr(user, ':');
  size_t n = colon ? (size_t)(colon - user) : strlen(user);
  if (!n || n >= sizeof name) return fault_set(f, "user_not_found", 0, "the user %.80s is not a name, a uid, or one with :group", user);
  memcpy(name, user, n);
  name[n] = 0;
  int found = find_user(root, name, a);
  if (found < 0) return fault_host(f, errno, "read the sandbox's /etc/passwd");
  if (!found) {
    // without an entry: root is 0, a number is itself (group 0), as under docker run
    if (!strcmp(name, "root")) snprintf(a->home, sizeof a->home, "/root");
    else if (number(name, &a->uid)) return fault_set(f, "user_not_found", 0, "there is no user %.80s in the sandbox's /etc/passwd", name);
    snprintf(a->name, sizeof a->name, "%.63s", name);
  }
  const char *group = colon && number(colon + 1, &a->gid) ? colon + 1 : NULL;
  if (!colon || group) found = find_groups(root, group, a);
  if (found < 0) return fault_host(f, errno, "read the sandbox's /etc/group");
  if (group && !found)
    return fault_set(f, "user_not_found", 0, "there is no group %.80s in the sandbox's /etc/group", colon + 1);
  if (limited && (a->uid > ID_MAX || a->gid > ID_MAX))
    return fault_set(f, "user_not_found", 0, "the user %.80s has the ids %u:%u; a sandbox has 0 to %u", user, a->uid, a->gid, ID_MAX);
  int kept = 0;                        // a group outside the range is left out: it cannot be held
  for (int i = 0; i < a->ngroups; i++)
    if (!limited || a->groups[i] <= ID_MAX) a->groups[kept++] = a->groups[i];
  a->ngroups = kept;
  return 0;
}

// The account files of a sandbox are the agent's: what account_find() makes of good and of hostile ones.
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

static int root;
static struct account a;
static struct fault f;

static void file(const char *name, const char *text, size_t n) {
  int fd = openat(root, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  assert(fd >= 0 && write(fd, text, n) == (ssize_t)n && !close(fd));
}
static void text(const char *name, const char *s) { file(name, s, strlen(s)); }
static int find(const char *user) {
  f = (struct fault){0};
  return account_find(root, user, 1, &a, &f);
}

static void good(void) {
  text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/home/app:\nodd:x:5:6::relative:\nlast:x:7:8::/l:/bin/sh");
  text("etc/group", "root:x:0:\nwheel:x:10:app,other\nmore:x:11:x,app\nnot:x:12:apple\nbig:x:70000:app\n");
  assert(!find("root") && !a.uid && !a.gid && !strcmp(a.home, "/root"));
  assert(!find(NULL) && !a.uid);
  assert(!find("app") && a.uid == 1000 && a.gid == 1001 && a.ngroups == 2 && a.groups[0] == 10 && a.groups[1] == 11);
  assert(!find("1000") && !strcmp(a.name, "app") && a.ngroups == 2);
  assert(!find("app:wheel") && a.gid == 10 && !a.ngroups);
  assert(!find("4242:4243") && a.uid == 4242 && a.gid == 4243 && !strcmp(a.home, "/"));
  assert(!find("odd") && !strcmp(a.home, "/"));
  assert(!find("last") && a.uid == 7);                   // no newline at the end
  assert(find("ghost") && !strcmp(f.code, "user_not_found") && strstr(f.message, "ghost"));
  assert(find("app:ghosts") && strstr(f.message, "ghosts"));
  assert(find("65536") && find("0:65536") && find(":5") && find("4294967295"));
}

static void hostile(void) {
  static char big[3 << 20];
  text("etc/passwd", "no colons\n::::::\nx:x:-1:0::/:\nx:x:99999999999999999999:0::/:\nx:x:1e3:0::/:\n\n\nx:x:3:4::/x:\n");
  assert(!find("x") && a.uid == 3);
  memset(big, 'a', sizeof big);
  file("etc/passwd", big, sizeof big);                   // one line without an end
  assert(find("app"));
  memcpy(big + 40000, "\napp:x:9:9::/:\n", 15);          // a line behind one that is too long
  file("etc/passwd", big, sizeof big);
  assert(!find("app") && a.uid == 9);
  memset(big, 0, sizeof big);
  file("etc/passwd", big, sizeof big);
  assert(find("app") && !find("root"));
  assert(!unlinkat(root, "etc/passwd", 0) && !mkfifoat(root, "etc/passwd", 0644));
  assert(find("app") && !find("root"));                  // does not wait for a writer
  assert(!unlinkat(root, "etc/passwd", 0) && !symlinkat("/dev/zero", root, "etc/passwd"));
  assert(find("app"));
  assert(!unlinkat(root, "etc/passwd", 0) && !symlinkat("../../../../../../etc/hostname", root, "etc/passwd"));
  assert(find("app"));
  for (unsigned seed = 0; seed < 3000; seed++) {         // noise that likes the characters that matter
    char noise[600];
    srand(seed);
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = ":::\n\n01xapp,"[rand() % 12];
    unlinkat(root, "etc/passwd", 0);
    file("etc/passwd", noise, sizeof noise);
    file("etc/group", noise, sizeof noise);
    find("app");
    find("0:app");
    find("1");
  }
}

int main(void) {
  char path[] = "/tmp/dsec-user-XXXXXX";
  assert(mkdtemp(path) && (root = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) >= 0 && !mkdirat(root, "etc", 0755));
  good();
  hostile();
  close(root);
  assert(!remove_all(AT_FDCWD, path));
  puts("ok");
  return 0;
}

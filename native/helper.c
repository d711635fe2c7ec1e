// File operations: each is a short-lived process of ours with the sandbox's own view and rights, which gets the connection.
#include "aether.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>
#include "machine.h"

#define LIFE_NS (600000 * MS)          // of an operation that names no limit of its own

struct helper { struct source src; struct helper *next; pid_t pid; uint64_t deadline; };
static struct helper *helpers;

static void on_helper(struct source *src, uint32_t events) {
  (void)events;
  struct helper *h = OWNER(src, struct helper, src);
  if (A.s->channel <= 0) while (waitpid(h->pid, NULL, 0) < 0 && errno == EINTR) {}
  loop_close(src);
  for (struct helper **p = &helpers; *p; p = &(*p)->next)
    if (*p == h) { *p = h->next; break; }
  A.helpers--;
  touch();
  idle_again();
  loop_free(h);
}

void helper_start(struct conn *c, uint32_t request, const uint8_t *payload, size_t size) {
  if (A.helpers >= MAX_HELPERS) {
    conn_error(c, request, "resource_exhausted", 0, "%d file operations are under way in sandbox %s", A.helpers, A.s->spec.id);
    return;
  }
  struct cursor cur = {payload, payload + size};
  struct item it;
  uint64_t life = LIFE_NS;
  const char *user = NULL;
  int more;
  while ((more = field_next(&cur, &it)) > 0) {
    if (it.tag == T_USER && field_text(&it, &user)) more = -1;
    if (it.tag == T_TIMEOUT_NS && (field_u64(&it, &life) || !life)) more = -1;
    if (more < 0) break;
  }
  if (more < 0) { conn_error(c, request, "wire_field", 0, "FILE: a field is malformed"); return; }
  struct helper *h = calloc(1, sizeof *h);
  if (!h) { conn_error(c, request, "resource_exhausted", ENOMEM, "no memory for a file operation"); return; }
  struct file_request file = {.conn = c->src.fd, .request = request, .fields = payload, .size = size};
  struct entry entry = {.user = user && *user ? user : NULL, .in = -1, .out = -1, .err = -1, .ctl = -1, .cgroup_fd = A.s->cgroup_fd,
                        .light = 1, .run = file_serve, .arg = &file, .keep = c->src.fd};
  struct fault f = {.code = "internal"};
  int pidfd = -1;
  refresh();
  if (A.s->channel > 0) h->pid = machine_file(c->src.fd, request, payload, size, &pidfd, &f);
  else if (set_blocking(c->src.fd, 1)) { free(h); conn_close(c); return; }
  else h->pid = sandbox_enter_now(A.s, &entry, &pidfd, &f);
  if (h->pid < 0) {
    free(h);
    set_blocking(c->src.fd, 0);
    if (init_dying()) init_died();     // which is why
    conn_error(c, request, f.code, f.err, "%s", f.message);
    return;
  }
  h->src = (struct source){.on = on_helper, .fd = pidfd};
  h->deadline = A.now + life < A.now ? NEVER : A.now + life;
  h->next = helpers;
  helpers = h;
  A.helpers++;
  loop_want(&h->src, EPOLLIN);
  timer_want(h->deadline);
  conn_close(c);                       // the helper has the socket now
}

uint64_t helpers_tick(void) {
  uint64_t next = NEVER;
  for (struct helper *h = helpers; h; h = h->next) {
    if (A.now >= h->deadline) {        // its end closes the connection: a lost stream, never a result
      if (A.s->channel > 0) machine_kill(h->pid);
      else kill(h->pid, SIGKILL);
      h->deadline = A.now + 1000 * MS;
    }
    if (h->deadline < next) next = h->deadline;
  }
  return next;
}

// They are of the sandbox's group, but nobody inside can see them or make them run on.
void helpers_stop(int on) {
  for (struct helper *h = helpers; h; h = h->next) kill(h->pid, on ? SIGSTOP : SIGCONT);
}

void helpers_end(void) {
  for (struct helper *h = helpers; h && A.s->channel <= 0; h = h->next) kill(h->pid, SIGKILL);
  for (struct helper *h = helpers; h && A.s->channel <= 0; h = h->next) {
    loop_close(&h->src);
    while (waitpid(h->pid, NULL, 0) < 0 && errno == EINTR) {}
  }
  helpers = NULL;
}

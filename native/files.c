// The file helper: one FILE request, served over its connection by a process that has the sandbox's own view and rights and no more.
// This file has the request, the answer, and the bytes between; the operations are in files_*.c and tar_*.c.
#include "files.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "sandbox.h"

#define IN_CAP (WIRE_MAX + 64)
#define DRAIN_MS 15000                 // after an error, so long we take what the client had under way

// errors ----------------------------------------------------------------------------------------------------------------------------

const char *code_of(int err) {
  switch (err) {
    case ENOENT: return "file_not_found";
    case EEXIST: return "file_exists";
    case ENOTDIR: return "not_a_directory";
    case EISDIR: return "is_a_directory";
    case EACCES: case EPERM: return "permission_denied";
    case ENOSPC: case EDQUOT: return "no_space";
    case ENOMEM: return "no_memory";
    default: return "file_error";
  }
}

int fail(struct job *j, const char *code, int err, const char *format, ...) {
  va_list list;
  va_start(list, format);
  j->code = code;
  j->err = err;
  vsnprintf(j->message, sizeof j->message, format, list);
  va_end(list);
  return -1;
}

int fail_errno(struct job *j, const char *verb, const char *path, const char *rest) {
  int err = errno;
  if (!rest) rest = "";
  const char *slash = *rest && path[0] && path[strlen(path) - 1] != '/' ? "/" : "";
  const char *text = err == ESTALE ? "a directory was moved while it was read" : err == ELOOP ? "too many symbolic links, or a link of /proc" : strerror(err);
  return fail(j, code_of(err), err, "%s %.500s%s%.500s: %s", verb, path, slash, rest, text);
}

void note(struct job *j, const char *format, ...) {
  if (j->nnotes == 16) return;
  va_list list;
  va_start(list, format);
  vsnprintf(j->notes[j->nnotes++], sizeof j->notes[0], format, list);
  va_end(list);
}

// bytes out -------------------------------------------------------------------------------------------------------------------------

static int lost(struct job *j, const char *what) {
  j->gone = 1;
  return fail(j, "internal", errno, "%s: the connection is gone", what);
}

int send_all(struct job *j, const void *p, size_t n, int flags) {
  const uint8_t *from = p;
  while (n) {
    ssize_t r = send(j->conn, from, n, MSG_NOSIGNAL | flags);
    if (r >= 0) { from += r; n -= (size_t)r; continue; }
    struct pollfd w = {.fd = j->conn, .events = POLLOUT};
    if (errno == EAGAIN) poll(&w, 1, -1);
    else if (errno != EINTR) return lost(j, "send");
  }
  return 0;
}

uint8_t *out_room(struct job *j, size_t *room) {
  *room = WIRE_DATA - j->filled;
  return j->out.data + DATA_HEAD + j->filled;
}

int out_flush(struct job *j) {
  if (!j->filled) return 0;
  struct frame h = {.length = (uint32_t)(DATA_HEAD - sizeof h.length + j->filled), .type = F_DATA, .request = j->request};
  memcpy(j->out.data, &h, sizeof h);
  memcpy(j->out.data + sizeof h, &j->sent, sizeof j->sent);
  size_t n = j->filled;
  j->filled = 0;
  j->sent += n;
  return send_all(j, j->out.data, DATA_HEAD + n, 0);
}

int out_add(struct job *j, size_t n) {
  j->filled += n;
  return j->filled == WIRE_DATA ? out_flush(j) : 0;
}

int out_bytes(struct job *j, const void *p, size_t n) {
  const uint8_t *from = p;
  while (n) {
    size_t room;
    uint8_t *to = out_room(j, &room);
    if (room > n) room = n;
    memcpy(to, from, room);
    from += room;
    n -= room;
    if (out_add(j, room)) return -1;
  }
  return 0;
}

// bytes in --------------------------------------------------------------------------------------------------------------------------

int in_peek(struct job *j, const uint8_t **p, size_t *n) {
  while (j->in_at == j->in_end) {
    if (!j->uploading) return 0;
    struct frame h;
    if (frame_recv(j->conn, &h, j->in, IN_CAP)) return lost(j, "upload");
    size_t size = h.length - (sizeof h - sizeof h.length);
    if (h.request != j->request || (h.type != F_DATA && h.type != F_OK)) {
      j->gone = 1;                     // out of step: no later byte can be trusted to be a frame of ours
      return fail(j, "invalid_request", 0, "an upload is DATA frames and OK, not frame %u of request %u", h.type, h.request);
    }
    if (h.type == F_OK) { j->uploading = 0; return 0; }
    uint64_t offset = 0;
    if (size >= sizeof offset) memcpy(&offset, j->in, sizeof offset);
    if (size < sizeof offset || offset != j->received)
      return fail(j, "invalid_request", 0, "DATA at offset %llu where %llu was next", (unsigned long long)offset, (unsigned long long)j->received);
    j->in_at = sizeof offset;
    j->in_end = size;
    j->received += size - sizeof offset;
  }
  *p = j->in + j->in_at;
  *n = j->in_end - j->in_at;
  return 1;
}

void in_eat(struct job *j, size_t n) { j->in_at += n; }

// After an error: the client is perhaps in the middle of a write. Take its bytes, for a bounded time, until it has read the error.
static void drain(struct job *j) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  int64_t end = t.tv_sec * 1000 + t.tv_nsec / 1000000 + DRAIN_MS;
  size_t head = 0, left = 0;           // bytes of the header gathered; payload bytes still to come
  struct frame h = {0};
  for (;;) {
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t now = t.tv_sec * 1000 + t.tv_nsec / 1000000;
    struct pollfd w = {.fd = j->conn, .events = POLLIN};
    if (now >= end || poll(&w, 1, (int)(end - now)) == 0) break;
    ssize_t r = left ? recv(j->conn, j->in, left < IN_CAP ? left : IN_CAP, MSG_DONTWAIT)
                     : recv(j->conn, (uint8_t *)&h + head, sizeof h - head, MSG_DONTWAIT);
    if (r < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (r <= 0) break;
    if (left) { left -= (size_t)r; continue; }
    if ((head += (size_t)r) < sizeof h) continue;
    head = 0;
    if (h.length < sizeof h - sizeof h.length || h.length > WIRE_MAX + 64) break;
    left = h.length - (sizeof h - sizeof h.length);
    if (h.type == F_OK && !left && h.request == j->request) { j->uploading = 0; return; }
  }
  j->gone = 1;
}

// request and answer ----------------------------------------------------------------------------------------------------------------

static int parse(struct job *j, const uint8_t *p, size_t n) {
  struct args *a = &j->a;
  struct cursor c = {.p = p, .end = p + n};
  struct item i;
  int r;
  while ((r = field_next(&c, &i)) > 0) {
    const char **text = NULL;
    uint64_t *number = NULL;
    switch (i.tag) {
      case T_OP: text = &a->op; break;
      case T_PATH: text = &a->path; break;
      case T_DEST: text = &a->dest; break;
      case T_EXCLUDE:
        if (a->nexclude == MAX_EXCLUDE) return fail(j, "invalid_request", 0, "more than %d exclude patterns", MAX_EXCLUDE);
        text = &a->exclude[a->nexclude++];
        break;
      case T_OFFSET: number = &a->offset; a->has |= HAS_OFFSET; break;
      case T_LENGTH: number = &a->length; a->has |= HAS_LENGTH; break;
      case T_FROM: number = &a->from; a->has |= HAS_FROM; break;
      case T_MODE: number = &a->mode; break;
      case T_MTIME_NS: number = &a->mtime; break;
      case T_UID: number = &a->uid; break;
      case T_GID: number = &a->gid; break;
      case T_DEPTH: number = &a->depth; break;
      case T_PARENTS: number = &a->parents; break;
      case T_OVERWRITE: number = &a->overwrite; break;
      case T_RECURSIVE: number = &a->recursive; break;
      case T_FOLLOW: number = &a->follow; break;
      case T_USER: case T_TIMEOUT_NS: continue;    // the supervisor's: whose rights the helper was given, and for how long
      default: return fail(j, "wire_field", 0, "field %u is not one of a file request", i.tag);
    }
    if (text ? field_text(&i, text) : field_u64(&i, number)) return fail(j, "wire_field", 0, "field %u is malformed", i.tag);
    if (i.tag >= T_OP) a->has |= HAS(i.tag);
  }
  if (r < 0) return fail(j, "wire_field", 0, "a file request with a malformed field");
  if (!a->op) return fail(j, "invalid_request", 0, "a file request without an operation");
  if (!a->path || a->path[0] != '/') return fail(j, "invalid_request", 0, "path %.500s is not absolute", a->path ? a->path : "(none)");
  if (a->dest && a->dest[0] != '/') return fail(j, "invalid_request", 0, "destination %.500s is not absolute", a->dest);
  if (a->has & HAS(T_MODE) && a->mode > 07777) return fail(j, "invalid_request", 0, "mode %llo is not one of permission bits", (unsigned long long)a->mode);
  if (a->uid > UINT32_MAX - 1 || a->gid > UINT32_MAX - 1) return fail(j, "invalid_request", 0, "an owner's number is out of range");
  return 0;
}

int job_init(struct job *j, int conn, uint32_t request, const uint8_t *fields, size_t size) {
  *j = (struct job){.conn = conn, .request = request, .a.overwrite = 1};
  j->out.cap = DATA_HEAD + WIRE_DATA + 4096;
  j->out.data = malloc(j->out.cap);
  j->in = malloc(IN_CAP);
  if (!j->out.data || !j->in) { j->gone = 1; return fail(j, "no_memory", ENOMEM, "no memory for a file request's buffers"); }
  return parse(j, fields, size);
}

static const struct { const char *name; int (*run)(struct job *j); int upload; } OPERATIONS[] = {
  {"read", op_read, 0}, {"write", op_write, 1}, {"stat", op_stat, 0}, {"list", op_list, 0}, {"mkdir", op_mkdir, 0}, {"move", op_move, 0},
  {"remove", op_remove, 0}, {"chmod", op_chmod, 0}, {"tar", op_tar, 0}, {"untar", op_untar, 1}, {"watch", op_watch, 0},
};

static void answer(struct job *j, int failed) {
  struct buf *b = &j->out;
  frame_begin(b, failed ? F_ERROR : F_OK, 0, j->request);
  if (failed) {
    frame_text(b, T_CODE, j->code);
    frame_text(b, T_MESSAGE, j->message);
    frame_u64(b, T_ERRNO, (uint64_t)j->err);
  } else {
    if (j->reports & REPORT_SIZE) frame_u64(b, T_SIZE, j->size);
    if (j->reports & REPORT_DONE) frame_u64(b, T_DONE, j->done);
    for (int i = 0; i < j->nnotes; i++) frame_text(b, T_EVENT, j->notes[i]);
  }
  if (frame_send(j->conn, b)) j->gone = 1;
}

int file_run(struct job *j) {
  int failed = j->code != NULL;        // the request itself was bad
  for (size_t i = 0; i < sizeof OPERATIONS / sizeof OPERATIONS[0] && j->a.op; i++) {
    if (strcmp(OPERATIONS[i].name, j->a.op)) continue;
    j->uploading = OPERATIONS[i].upload;
    if (!failed && (OPERATIONS[i].run(j) || out_flush(j))) failed = 1;
    if (!j->gone) answer(j, failed);
    if (failed && j->uploading && !j->gone) drain(j);
    return j->gone ? -1 : 0;
  }
  if (!failed) fail(j, "invalid_request", 0, "%.100s is not a file operation", j->a.op);
  answer(j, 1);
  return j->gone ? -1 : 0;
}

void file_serve(void *file_request) {
  const struct file_request *r = file_request;
  struct job j;
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);            // RLIMIT_FSIZE then shows as EFBIG
  umask(022);
  job_init(&j, r->conn, r->request, r->fields, r->size);
  // Out of step or gone: nobody may read on from the middle of a frame.
  if (file_run(&j)) shutdown(j.conn, SHUT_RDWR);
  _exit(0);
}

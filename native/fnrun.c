// Calls: from a request to what the host saw of it. A box that waits is given to the next call of its kind; one that a call was in is killed,
// and never used again.
#include "fnrun.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "start.h"
#include "util.h"

#define WARM_NS 30000000000ull         // boxes are made ahead for so long after a call of their kind

struct wish {                          // a request, read
  const char *argv[FN_ARGS + 1], *env[MAX_ENV + 1];
  const char *devices[FN_DEVICES];
  int argc, envc, nfiles, ncollect, ndevices;
  struct item code, files[FN_FILES], collect[FN_COLLECT];
  uint64_t wall, cpu, memory, pids, cpu_milli, disk, nofile, output, fsize, flags;
};

struct call *calls;
static struct sandbox *resident;
static uint64_t serials, wanted[2];    // when a call of each kind last came; 1: warm
static int ahead = 3, cpus, in_use[CPU_SETSIZE];
static cpu_set_t allowed;

int calls_open(struct sandbox *r) {
  resident = r;
  if (!(calls = calloc(FN_BOXES, sizeof *calls))) return -1;
  sched_getaffinity(0, sizeof allowed, &allowed);
  cpus = CPU_COUNT(&allowed);
  ahead = cpus + 1 < FN_BOXES / 4 ? cpus + 1 : FN_BOXES / 4;
  return 0;
}

int calls_boxes(void) {
  int n = 0;
  for (int i = 0; calls && i < FN_BOXES; i++) n += calls[i].state != FREE;
  return n;
}

// ---- boxes that wait ----------------------------------------------------------------------------------------------------------------------

static int ends_make(struct call *c, struct fn_ends *e, struct fault *f) {
  int *ours[STREAMS] = {&c->stream[OUT].fd, &c->stream[ERR].fd, &c->stream[VALUE].fd}, *theirs[STREAMS] = {&e->out, &e->err, &e->value};
  int pair[2], n = c->warm ? STREAMS : VALUE;
  for (int i = 0; i < n; i++) {
    if (pipe2(pair, O_CLOEXEC)) return fault_host(f, errno, "make a pipe");
    fcntl(pair[0], F_SETFL, O_NONBLOCK);
    *ours[i] = pair[0];
    *theirs[i] = pair[1];
  }
  if ((c->in = input_make()) < 0 || (e->in = input_reopen(c->in)) < 0) return fault_host(f, errno, "make an input");
  return 0;
}

static void ends_close(struct fn_ends *e) {
  close_fd(&e->in);
  close_fd(&e->out);
  close_fd(&e->err);
  close_fd(&e->value);
  close_fd(&e->job);
}

void call_forget(struct call *c) {
  close_fd(&c->in);
  close_fd(&c->go);
  close_fd(&c->pidfd);
  close_fd(&c->start.status);
  for (int i = 0; i < STREAMS; i++) {
    close_fd(&c->stream[i].fd);
    free(c->stream[i].p);
    c->stream[i].p = NULL;
  }
  for (int i = 0; i < c->ncollect; i++) {
    free(c->collect[i].name);
    free(c->collect[i].keep);
  }
  c->ncollect = 0;
  free(c->job);
  c->job = NULL;
  if (c->cpu >= 0) in_use[c->cpu]--;
  c->cpu = -1;
}

// A child of the interpreter goes into the box and waits there for its job.
static int arm(struct call *c, struct fault *f) {
  struct fn_ends e = {-1, -1, -1, -1, -1};
  int go[2];
  int bad = ends_make(c, &e, f);
  if (!bad && !(bad = pipe2(go, O_CLOEXEC) ? fault_host(f, errno, "make a pipe") : 0)) {
    c->go = go[1];
    e.job = go[0];
    fcntl(c->go, F_SETFL, O_NONBLOCK);
    bad = zygote_arm(&c->box, c->serial, &e, f);
  }
  ends_close(&e);
  return bad;
}

static struct call *plan(int warm, struct fault *f) {
  for (int at = 0; at < FN_BOXES; at++) {
    struct call *c = &calls[at];
    if (c->state != FREE) continue;
    *c = (struct call){.serial = ++serials, .warm = warm, .in = -1, .go = -1, .pidfd = -1, .cpu = -1,
                       .start = {.status = -1, .pidfd = -1}, .stream = {{.fd = -1}, {.fd = -1}, {.fd = -1}}};
    fnbox_plan(&c->box, at, c->serial);
    return c;
  }
  fault_set(f, "resource_exhausted", 0, "%d calls are under way", FN_BOXES);
  return NULL;
}

// It is built, or what there is of it goes.
static int built(struct call *c, int bad, struct fault *f) {
  c->state = WAITING;
  if (!bad && (!c->warm || !arm(c, f))) return 0;
  fnbox_kill(&c->box);
  call_forget(c);
  c->state = ENDING;
  return -1;
}

static struct call *make(int warm, struct fault *f) {
  struct call *c = plan(warm, f);
  return c && !built(c, fnbox_build(&c->box, warm, f), f) ? c : NULL;
}

int calls_spare(void) {
  uint64_t now = now_ns();
  for (int warm = 1; warm >= 0; warm--) {
    int have = 0;
    if (warm && zygote_socket() < 0) continue;
    if ((!wanted[warm] && !warm) || (wanted[warm] && now - wanted[warm] > WARM_NS)) continue;
    for (int i = 0; i < FN_BOXES; i++) have += calls[i].state == WAITING && calls[i].warm == warm && !calls[i].given;
    if (have >= ahead) continue;
    struct fault f = {0};
    if (make(warm, &f)) return 1;
    fprintf(stderr, "aether %s: %s\n", resident->spec.id, f.message);
    return -1;
  }
  return 0;
}

static struct call *take(int warm, struct fault *f) {
  struct call *best = NULL;
  wanted[warm] = now_ns();
  for (int i = 0; i < FN_BOXES; i++) {
    struct call *c = &calls[i];
    if (c->state == WAITING && c->warm == warm && !c->given && (!best || c->armed > best->armed || (c->armed == best->armed && c->serial < best->serial))) best = c;
  }
  return best ? best : make(warm, f);
}

// ---- a request ----------------------------------------------------------------------------------------------------------------------------

static int wish_read(struct wish *w, const uint8_t *p, size_t n, struct fault *f) {
  struct cursor c = {p, p + n};
  struct item i;
  int more, bad = 0;
  w->argc = w->envc = w->nfiles = w->ncollect = w->ndevices = 0;
  w->code = (struct item){0};
  w->wall = w->cpu = w->memory = w->pids = w->cpu_milli = w->disk = w->nofile = w->output = w->fsize = w->flags = 0;
  while (!bad && (more = field_next(&c, &i)) > 0) switch (i.tag) {
    case T_ARG: bad = w->argc == FN_ARGS || field_text(&i, &w->argv[w->argc++]); break;
    case T_ENV: bad = w->envc == MAX_ENV || field_text(&i, &w->env[w->envc++]); break;
    case T_PATH: bad = w->ndevices == FN_DEVICES || field_text(&i, &w->devices[w->ndevices++]); break;
    case T_FN_CODE: w->code = i; break;
    case T_FN_FILE:
      if (!(bad = w->nfiles == FN_FILES)) w->files[w->nfiles++] = i;
      break;
    case T_FN_COLLECT:
      if (!(bad = w->ncollect == FN_COLLECT)) w->collect[w->ncollect++] = i;
      break;
    case T_TIMEOUT_NS: bad = field_u64(&i, &w->wall); break;
    case T_FN_CPU_NS: bad = field_u64(&i, &w->cpu); break;
    case T_MEMORY_BYTES: bad = field_u64(&i, &w->memory); break;
    case T_PIDS: bad = field_u64(&i, &w->pids); break;
    case T_CPU_MILLI: bad = field_u64(&i, &w->cpu_milli); break;
    case T_DISK_BYTES: bad = field_u64(&i, &w->disk); break;
    case T_NOFILE: bad = field_u64(&i, &w->nofile); break;
    case T_FN_OUTPUT: bad = field_u64(&i, &w->output); break;
    case T_FN_FSIZE: bad = field_u64(&i, &w->fsize); break;
    case T_FN_FLAGS: bad = field_u64(&i, &w->flags); break;
    default: bad = 1;
  }
  w->argv[w->argc] = w->env[w->envc] = NULL;
  if (bad || more < 0 || !w->argc == !w->code.p || !w->wall || !w->memory || !w->pids || !w->disk || w->pids > 65536)
    return fault_set(f, "wire_field", 0, "field %u of a call is unknown, malformed, missing or one too many", bad ? i.tag : 0);
  return 0;
}

// u64 most, u8 kind (0: send it, 1: keep it under an id), name, NUL, id, NUL
static int collect_read(struct call *c, const struct item *i) {
  const uint8_t *end = i->p + i->size, *name = i->p + 9, *nul = i->size > 10 ? memchr(name, 0, (size_t)(end - name)) : NULL;
  if (!nul || (i->p[8] && (nul + 1 >= end || memchr(nul + 1, 0, (size_t)(end - nul - 1)) != end - 1))) return -1;
  int at = c->ncollect++;
  memcpy(&c->collect[at].most, i->p, sizeof c->collect[at].most);
  c->collect[at].name = strdup((const char *)name);
  c->collect[at].keep = i->p[8] ? strdup((const char *)(nul + 1)) : NULL;
  return !c->collect[at].name || (i->p[8] && !c->collect[at].keep) ? -1 : 0;
}

static int files(struct call *c, const struct wish *w, struct fault *f) {
  struct fn_file file;
  int bad = 0, work = w->nfiles ? fnbox_work(&c->box) : -1;
  if (w->nfiles && work < 0) return fault_host(f, errno, "open the scratch space of %s", c->box.id);
  for (int i = 0; !bad && i < w->nfiles; i++) {
    if (file_parse(&w->files[i], &file)) bad = fault_set(f, "wire_field", 0, "a file of the call is malformed");
    else if (*file.name) bad = file_put(work, &file, c->box.s.spec.uid_base + c->box.uid, f);
    else {
      int blob = file.blob ? shared_find(file.blob) : -1;
      if (file.blob && blob < 0) bad = fault_set(f, "not_found", 0, "there is no shared file %.60s", file.blob);
      else if (file.blob ? fd_copy(blob, c->in, UINT64_MAX) : fd_write(c->in, file.p, file.n)) bad = fault_host(f, errno, "write the call's input");
    }
  }
  close_fd(&work);
  for (int i = 0; !bad && i < w->ncollect; i++)
    if (collect_read(c, &w->collect[i])) bad = fault_set(f, "wire_field", 0, "a file to hand back is malformed");
  return bad;
}

static int bound(struct call *c, const struct wish *w, struct fault *f) {
  struct spec *s = &c->box.s.spec;
  s->memory_bytes = w->memory;
  s->pids = (uint32_t)w->pids + 1;     // PID 1
  s->cpu_milli = (uint32_t)w->cpu_milli;
  s->nofile = (uint32_t)w->nofile;
  c->wall_most = w->wall;
  c->cpu_most = w->cpu;
  c->flags = w->flags;
  for (int i = 0; i < STREAMS; i++) c->stream[i].most = i == VALUE ? FN_VALUE : w->output;
  return cgroup_bound(&c->box.s, f) || fnbox_resize(&c->box, w->disk, f) || (w->ndevices && fnbox_devices(&c->box, w->devices, w->ndevices, f)) ? -1 : 0;
}

uint64_t call_cpu(const struct call *c) {
  uint64_t now = fnbox_cpu(&c->box);
  return now > c->cpu_base ? now - c->cpu_base : 0;
}

void call_clock(struct call *c) {
  c->began = now_ns();
  c->cpu_base = 0;
  c->cpu_base = call_cpu(c);
  c->cpu_next = c->began + LOOK_NS;
  if (c->box.box.v1[CG_MEMORY] >= 0) write_at(c->box.box.v1[CG_MEMORY], "memory.max_usage_in_bytes", "0");
}

// The least busy of the CPUs that calls of their own are on.
static int pin(void) {
  int best = -1;
  for (int i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET((unsigned)i, &allowed) && (best < 0 || in_use[i] < in_use[best])) best = i;
  if (best >= 0) in_use[best]++;
  return best;
}

static int program(struct call *c, const struct wish *w, int in, int out, struct fault *f) {
  struct fn_ends e = {-1, -1, -1, -1, -1};
  if (ends_make(c, &e, f) || files(c, w, f)) { ends_close(&e); return -1; }
  c->cpu = w->flags & FN_PIN ? pin() : -1;
  call_clock(c);                       // not when it is seen to run: it may have run for a while by then
  struct bounds b = {.file_bytes = w->fsize ? w->fsize : w->disk, .cpu_s = w->cpu ? w->cpu / 1000000000 + 2 : 0, .stack = w->flags & FN_PIN ? 1 : 0, .cpu = c->cpu};
  struct entry x = {.argv = w->argv, .env = w->env, .in = in >= 0 ? in : e.in, .out = out >= 0 ? out : e.out, .err = e.err, .ctl = -1,
                    .cgroup_fd = -1, .keep = -1, .bounds = &b};
  int bad = sandbox_enter(&c->box.s, &x, &c->start, f);
  ends_close(&e);
  close_fd(&c->in);
  if (bad) c->start = (struct start){.status = -1, .pidfd = -1};
  else c->state = STARTING;
  return bad;
}

// A process that is not in its box yet gets its job when it is: what it does on its way is not the call's.
int call_job(struct call *c, struct fault *f) {
  call_clock(c);
  c->state = RUNNING;
  if (c->job_size > 65536) fcntl(c->go, F_SETPIPE_SZ, (int)c->job_size);
  int bad = fd_write(c->go, c->job, c->job_size) ? fault_set(f, "fncall_lost", errno, "the interpreter's child takes no job") : 0;
  close_fd(&c->go);
  free(c->job);
  c->job = NULL;
  return bad;
}

static int job(struct call *c, const struct wish *w, struct fault *f) {
  if (files(c, w, f)) return -1;
  close_fd(&c->in);
  if (!(c->job = malloc(w->code.size))) return fault_host(f, ENOMEM, "keep a job");
  memcpy(c->job, w->code.p, c->job_size = w->code.size);
  c->state = STARTING;
  return c->armed ? call_job(c, f) : 0;
}

static int give(struct call *c, uint32_t request, uint8_t part, const struct wish *w, int in, int out, struct fault *f) {
  c->given = 1;
  c->request = request;
  c->part = part;
  return bound(c, w, f) || (c->warm ? job(c, w, f) : program(c, w, in, out, f)) ? -1 : 0;
}

void call_spoil(struct call *c) {
  if (!c || c->state == FREE) return;
  if (c->state == STARTING && !c->warm) start_abandon(&c->start), c->start.pidfd = -1;
  fnbox_kill(&c->box);
  call_forget(c);
  c->given = 0;
  c->state = ENDING;
}

int call_begin(uint32_t request, const uint8_t *p, size_t n, struct fault *f) {
  static struct wish wish[2];
  struct cursor cur = {p, p + n};
  struct item i, halves[2];
  int pairs = 0, to[2] = {-1, -1}, from[2] = {-1, -1}, bad;
  for (struct cursor look = cur; field_next(&look, &i) > 0;)
    if (i.tag == T_FN_CALL && pairs < 2) halves[pairs++] = i;
  if (pairs == 1) return fault_set(f, "wire_field", 0, "half a pair");
  bad = pairs ? wish_read(&wish[0], halves[0].p, halves[0].size, f) || wish_read(&wish[1], halves[1].p, halves[1].size, f) : wish_read(&wish[0], p, n, f);
  if (!bad && pairs && (!wish[0].argc || !wish[1].argc)) bad = fault_set(f, "wire_field", 0, "a pair is of two programs");
  if (!bad && pairs && (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))) bad = fault_host(f, errno, "make a pipe");
  struct call *c[2] = {NULL, NULL};
  for (int k = 0; !bad && k < (pairs ? 2 : 1); k++) {
    c[k] = take(wish[k].code.p != NULL, f);
    bad = !c[k] || give(c[k], request, (uint8_t)k, &wish[k], pairs ? (k ? from[0] : to[0]) : -1, pairs ? (k ? to[1] : from[1]) : -1, f);
  }
  for (int k = 0; k < 2; k++) {
    close_fd(&to[k]);
    close_fd(&from[k]);
    if (bad) call_spoil(c[k]);
  }
  return bad ? -1 : 0;
}

void call_cancel(uint32_t request) {
  for (int i = 0; i < FN_BOXES; i++)
    if (calls[i].given && calls[i].request == request && calls[i].state != ENDING) call_spoil(&calls[i]);
    else if (calls[i].given && calls[i].request == request) calls[i].given = 0;
}

void calls_cancel_all(void) {
  for (int i = 0; calls && i < FN_BOXES; i++)
    if (calls[i].state != FREE && calls[i].state != ENDING) call_spoil(&calls[i]);
    else calls[i].given = 0;
}

// One request: its fields are decoded and checked against what its type may carry, then it goes to whoever serves it.
#include "aether.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include "machine.h"
#include "util.h"

static const char *argv_space[MAX_ARGS + 1], *env_space[MAX_ENV + 1];

// What each request may carry, 0 terminated.
static const uint16_t none[] = {0}, hello[] = {T_VERSION_MAJOR, T_VERSION_MINOR, 0}, command[] = {T_COMMAND, 0},
  exec[] = {T_COMMAND, T_ARG, T_SHELL, T_SESSION, T_ENV, T_CWD, T_USER, T_EXEC_FLAGS, T_ROWS, T_COLS, T_TIMEOUT_NS, T_BYTES, T_LOG_HEAD,
            T_LOG_TAIL, 0},
  attach[] = {T_COMMAND, T_OFFSET, T_OFFSET_ERR, T_FOLLOW, 0}, log_range[] = {T_COMMAND, T_STREAM, T_OFFSET, T_LENGTH, 0},
  input[] = {T_COMMAND, T_BYTES, 0}, resize[] = {T_COMMAND, T_ROWS, T_COLS, 0}, sig[] = {T_COMMAND, T_SIGNAL, T_SCOPE, 0},
  session[] = {T_NAME, T_CWD, T_ENV, T_USER, 0}, name[] = {T_NAME, 0}, lease[] = {T_DEADLINE_NS, T_IDLE_NS, T_AUTO_PAUSE_NS, T_HOSTNAME, T_ENV, 0}, stop[] = {T_CAUSE, T_MESSAGE, T_REASON, 0},
  leave[] = {T_CAUSE, T_PATH, T_LENGTH, 0},
  memory[] = {T_IDLE_NS, T_REASON, 0}, checkpoint[] = {T_NAME, T_PATH, T_LENGTH, 0}, restore[] = {T_PATH, T_CAUSE, T_GOES_ON, 0}, port[] = {T_PORT, 0};

static const uint16_t *allowed(uint8_t type) {
  switch (type) {
    case F_HELLO: return hello;
    case F_EXEC: return exec;
    case F_ATTACH: return attach;
    case F_LOG_READ: return log_range;
    case F_STDIN: return input;
    case F_STDIN_CLOSE: case F_KILL: case F_WAIT: return command;
    case F_RESIZE: return resize;
    case F_SIGNAL: return sig;
    case F_SESSION_OPEN: return session;
    case F_SESSION_CLOSE: case F_SNAPSHOT: return name;
    case F_LEASE: return lease;
    case F_CHECKPOINT: return checkpoint;
    case F_RESTORE: return restore;
    case F_CONNECT: return port;
    case F_STOP: return stop;
    case F_LEAVE: return leave;
    case F_SUBSCRIBE: case F_LIST: case F_STAT: case F_SESSION_LIST: case F_RESUME: return none;
    case F_PAUSE: case F_RECLAIM: return memory;
    default: return NULL;
  }
}

static int text(const struct item *it, const char **to) { return *to ? -1 : field_text(it, to); } // once
static int number(const struct item *it, uint64_t *to, uint64_t *present, uint64_t bit) { *present |= bit; return field_u64(it, to); }

static int take(struct request *r, const struct item *it) {
  const char *s = NULL;
  switch (it->tag) {
    case T_COMMAND: return text(it, &r->command);
    case T_SHELL: return text(it, &r->shell);
    case T_SESSION: return text(it, &r->session);
    case T_CWD: return text(it, &r->cwd);
    case T_USER: return text(it, &r->user);
    case T_NAME: return text(it, &r->name);
    case T_HOSTNAME: return text(it, &r->hostname);
    case T_PATH: return text(it, &r->path);
    case T_CAUSE: return text(it, &r->cause);
    case T_REASON: return text(it, &r->reason);
    case T_MESSAGE: return field_text(it, &s);
    case T_ARG:
      if (r->argc == MAX_ARGS || field_text(it, &s)) return -1;
      r->argv[r->argc++] = s;
      return 0;
    case T_ENV:
      if (r->envc == MAX_ENV || field_text(it, &s) || !strchr(s, '=') || *s == '=') return -1;
      r->env[r->envc++] = s;
      return 0;
    case T_BYTES:
      if (r->present & HAS_BYTES) return -1;
      r->present |= HAS_BYTES;
      r->bytes = it->p;
      r->nbytes = it->size;
      return 0;
    case T_EXEC_FLAGS: return field_u64(it, &r->flags);
    case T_ROWS: return field_u64(it, &r->rows);
    case T_COLS: return field_u64(it, &r->cols);
    case T_SIGNAL: return field_u64(it, &r->signal);
    case T_SCOPE: return field_u64(it, &r->scope);
    case T_STREAM: return field_u64(it, &r->stream);
    case T_OFFSET: return field_u64(it, &r->offset);
    case T_OFFSET_ERR: return field_u64(it, &r->offset_err);
    case T_LENGTH: return field_u64(it, &r->length);
    case T_GOES_ON: return field_u64(it, &r->goes_on);
    case T_PORT: return field_u64(it, &r->port);
    case T_VERSION_MAJOR: return field_u64(it, &r->major);
    case T_VERSION_MINOR: return field_u64(it, &r->minor);
    case T_FOLLOW: return number(it, &r->follow, &r->present, HAS_FOLLOW);
    case T_TIMEOUT_NS: return number(it, &r->timeout_ns, &r->present, HAS_TIMEOUT);
    case T_DEADLINE_NS: return number(it, &r->deadline_ns, &r->present, HAS_DEADLINE);
    case T_IDLE_NS: return number(it, &r->idle_ns, &r->present, HAS_IDLE);
    case T_AUTO_PAUSE_NS: return number(it, &r->auto_pause_ns, &r->present, HAS_AUTO_PAUSE);
    case T_LOG_HEAD: return number(it, &r->log_head, &r->present, HAS_HEAD);
    case T_LOG_TAIL: return number(it, &r->log_tail, &r->present, HAS_TAIL);
    default: return -1;
  }
}

// 0, or the tag that is wrong; 0x10000 when the fields do not parse at all.
static int decode(struct request *r, const uint16_t *tags, const uint8_t *payload, size_t size) {
  struct cursor cur = {payload, payload + size};
  struct item it;
  int more;
  while ((more = field_next(&cur, &it)) > 0) {
    const uint16_t *t = tags;
    while (*t && *t != it.tag) t++;
    if (!*t || take(r, &it)) return it.tag ? it.tag : 0x10000;
  }
  r->argv[r->argc] = NULL;
  r->env[r->envc] = NULL;
  return more ? 0x10000 : 0;
}

static uint64_t hash(const uint8_t *p, size_t n) {      // FNV-1a, eight bytes a step: it tells requests apart, it is no secret
  uint64_t h = 14695981039346656037ull, w;
  for (; n >= 8; p += 8, n -= 8) { memcpy(&w, p, 8); h = (h ^ w) * 1099511628211ull; h ^= h >> 29; }
  for (; n; p++, n--) h = (h ^ *p) * 1099511628211ull;
  return h;
}

// What an EXEC asks to be run. How its output is wanted is no part of it: a retry may ask otherwise.
static uint64_t definition(const uint8_t *payload, size_t size, uint64_t flags) {
  struct cursor cur = {payload, payload + size};
  struct item it;
  uint64_t h = flags & ~(uint64_t)(X_STREAM | X_COLLECT);
  while (field_next(&cur, &it) > 0)
    if (it.tag != T_EXEC_FLAGS) h = (h * 1099511628211ull) ^ hash(it.p, it.size) ^ it.tag;
  return h;
}

// the small ones --------------------------------------------------------------------------------------------------------------------

static void say_hello(struct conn *c, struct request *r) {
  if (c->hello) { conn_error(c, r->id, "invalid_request", 0, "HELLO was said before"); return; }
  if (r->major != WIRE_MAJOR) {
    conn_error(c, r->id, "wire_version", 0, "this supervisor speaks wire %d.%d, the client %llu.%llu", WIRE_MAJOR, WIRE_MINOR,
               (unsigned long long)r->major, (unsigned long long)r->minor);
    if (conn_full(c)) c->last = 1;
    else conn_close(c);
    return;
  }
  c->hello = 1;
  struct buf b = reply_buf();
  frame_begin(&b, F_HELLO, 0, r->id);
  frame_u64(&b, T_VERSION_MAJOR, WIRE_MAJOR);
  frame_u64(&b, T_VERSION_MINOR, WIRE_MINOR);
  frame_text(&b, T_ID, A.s->spec.id);
  frame_text(&b, T_STATE, A.paused ? "paused" : "running");
  if (A.paused) frame_text(&b, T_REASON, pause_reason());
  frame_u64(&b, T_INIT_PID, (uint64_t)A.s->init);
  if (A.s->spec.turn) frame_u64(&b, T_TURN, A.s->spec.turn);
  conn_reply(c, &b);
}

static void status(struct conn *c, struct request *r) {
  struct usage u = {0};
  sandbox_usage(A.s, &u);
  if (u.oom_kills > A.oom_kills || u.pids_hits > A.pids_hits) counters_read();
  if (A.running || A.helpers) touch();
  struct buf b = reply_buf();
  frame_begin(&b, F_STATUS, 0, r->id);
  usage_fields(&u, &b);
  frame_text(&b, T_HEALTH, A.damaged ? "damaged" : "ok");
  frame_u64(&b, T_IDLE_SINCE_NS, A.real - (A.now - A.touched));
  frame_u64(&b, T_DEADLINE_NS, A.deadline_real);
  frame_u64(&b, T_IDLE_NS, A.idle_ns);
  frame_u64(&b, T_AUTO_PAUSE_NS, A.auto_pause_ns);
  frame_u64(&b, T_COMMANDS_RUNNING, (uint64_t)A.running);
  frame_u64(&b, T_LOG_USED, log_used());
  conn_reply(c, &b);
}

// One that was made ahead gets its owner's names. Nobody used it before: it cannot be given away a second time.
static int hand_out(struct request *r, struct fault *f) {
  struct spec *spec = &A.s->spec;
  if (A.used) return fault_set(f, "invalid_request", 0, "sandbox %s was used, its identity is its own", spec->id);
  static char *text;                   // of the names that an edge gave which did not live to say so
  size_t size = strlen(r->hostname) + 1;
  for (size_t i = 0; i < r->envc; i++) size += strlen(r->env[i]) + 1;
  char *fresh = malloc(size), *at = fresh;
  if (!fresh) return fault_set(f, "resource_exhausted", ENOMEM, "no memory for the environment of %s", spec->id);
  if (sandbox_rename(A.s, strcpy(at, r->hostname), f)) { free(fresh); return -1; }
  for (size_t i = 0; i < r->envc; i++) {
    at += strlen(at) + 1;
    spec->env[i] = strcpy(at, r->env[i]);
  }
  spec->env[r->envc] = NULL;
  spec->nenv = (int)r->envc;
  free(text);
  text = fresh;
  return 0;
}

static void set_lease(struct conn *c, struct request *r) {
  struct fault f = {0};
  if (r->envc && !r->hostname) fault_set(&f, "invalid_request", 0, "LEASE: an environment goes with a host name");
  else if (r->hostname) hand_out(r, &f);
  if (f.code) { conn_error(c, r->id, f.code, f.err, "%s", f.message); return; }
  if (r->present & HAS_DEADLINE) A.deadline_real = r->deadline_ns;
  if (r->present & HAS_IDLE) A.idle_ns = r->idle_ns;
  if (r->present & HAS_AUTO_PAUSE) A.auto_pause_ns = r->auto_pause_ns;
  timer_want(A.now);
  conn_ok(c, r->id);
}

static void subscribe(struct conn *c, struct request *r) {
  c->subscribed = 1;
  c->subscribe_request = r->id;
  conn_ok(c, r->id);
}

static const char *causes[] = {"stopped", "expired", "evicted", "oom", "agent_crash", "infra_lost", NULL};

static void stop_now(struct conn *c, struct request *r) {
  const char **cause = causes;
  while (*cause && r->cause && strcmp(*cause, r->cause)) cause++;
  if (!*cause) { conn_error(c, r->id, "invalid_request", 0, "STOP: unknown cause %.40s", r->cause); return; }
  sandbox_end(*cause, r->reason ? r->reason : "asked to stop", c, r->id);
}

int left_because(const char *cause) {
  return !cause ? 0 : !strcmp(cause, "rollback") ? R_ROLLED_BACK : !strcmp(cause, "hibernate") ? R_HIBERNATED : 0;
}

static void leave_now(struct conn *c, struct request *r) {
  int flag = left_because(r->cause);
  if (!flag) conn_error(c, r->id, "invalid_request", 0, "LEAVE: the cause is rollback or hibernate");
  else if (A.s->spec.medium != MEDIUM_BTRFS) conn_error(c, r->id, "unsupported", 0, "a sandbox whose disk is memory ends with its processes");
  else if (r->path) snapshot_leave(c, r);
  else sandbox_leave(flag, c, r->id);
}

// about a command ---------------------------------------------------------------------------------------------------------------------

static void follow(struct conn *c, struct request *r, struct command *cmd, int kind) {
  struct sub *s = sub_new(c, cmd, r->id, kind);
  if (!s) return;
  s->follow = r->present & HAS_FOLLOW ? r->follow != 0 : 1;
  s->at[0] = r->offset;
  s->at[1] = r->offset_err;
  conn_pump_soon(c);
}

static void signal_command(struct conn *c, struct request *r, struct command *cmd) {
  char group[ID_SIZE + 4];
  if (r->signal < 1 || r->signal > 64 || r->scope > SCOPE_TREE)
    conn_error(c, r->id, "invalid_request", 0, "SIGNAL: no signal %llu or no scope %llu", (unsigned long long)r->signal, (unsigned long long)r->scope);
  else if (cmd->state == C_QUEUED) conn_error(c, r->id, "invalid_request", 0, "command %s waits for its session and has no process yet", r->command);
  else if (cmd->state != C_RUNNING && !(r->scope == SCOPE_TREE && cmd->left))
    conn_error(c, r->id, "command_ended", 0, "command %s has ended", r->command);
  else {
    if (cmd->session) session_signal(cmd, (int)r->signal);
    else if (r->scope == SCOPE_TREE) { if (command_group(cmd, group)) group_signal(group, (int)r->signal, NULL, 0); }
    else if (A.s->channel > 0) machine_signal(cmd->pid, (int)r->signal);
    else if (kill(cmd->pid, (int)r->signal)) {           // our own child, not reaped yet: its pid is its own
      conn_error(c, r->id, "internal", errno, "signal %llu to command %s: %s", (unsigned long long)r->signal, r->command, strerror(errno));
      return;
    }
    conn_ok(c, r->id);
  }
}

static void resize_terminal(struct conn *c, struct request *r, struct command *cmd) {
  struct winsize w = {.ws_row = (unsigned short)r->rows, .ws_col = (unsigned short)r->cols};
  if (!r->rows || !r->cols || r->rows > 65535 || r->cols > 65535)
    conn_error(c, r->id, "invalid_request", 0, "RESIZE: 1 to 65535 rows and columns");
  else if (cmd->state == C_ENDED || !cmd->chan[0]) conn_error(c, r->id, "command_ended", 0, "command %s has ended", r->command);
  else if (!cmd->pty) conn_error(c, r->id, "invalid_request", 0, "command %s has no terminal", r->command);
  else if (A.s->channel > 0) {
    machine_resize(cmd->pid, (int)r->rows, (int)r->cols);
    conn_ok(c, r->id);
  } else if (ioctl(cmd->chan[0]->src.fd, TIOCSWINSZ, &w)) conn_error(c, r->id, "internal", errno, "RESIZE: %s", strerror(errno));
  else conn_ok(c, r->id);
}

static void kill_command(struct conn *c, struct request *r, struct command *cmd) {
  if (cmd->state == C_ENDED && !cmd->left) { conn_error(c, r->id, "command_ended", 0, "command %s has ended", r->command); return; }
  command_kill(cmd, END_KILLED);
  conn_ok(c, r->id);
}

static void about_command(struct conn *c, uint8_t type, struct request *r) {
  if (!r->command) { conn_error(c, r->id, "invalid_request", 0, "the request names no command"); return; }
  if (type == F_STDIN) { stdin_request(c, r); return; }
  if (type == F_STDIN_CLOSE) { stdin_finish(c, r); return; }
  struct command *cmd = command_find(r->command);
  if (!cmd) { conn_error(c, r->id, "command_not_found", 0, "no command %.40s in sandbox %s", r->command, A.s->spec.id); return; }
  switch (type) {
    case F_ATTACH: follow(c, r, cmd, SUB_ATTACH); break;
    case F_WAIT: follow(c, r, cmd, SUB_WAIT); break;
    case F_SIGNAL: signal_command(c, r, cmd); break;
    case F_RESIZE: resize_terminal(c, r, cmd); break;
    case F_KILL: kill_command(c, r, cmd); break;
    default:
      if (r->stream != STREAM_OUT && r->stream != STREAM_ERR) conn_error(c, r->id, "invalid_request", 0, "LOG_READ: no stream %llu", (unsigned long long)r->stream);
      else log_reply(c, r->id, cmd, r->stream == STREAM_ERR, r->offset, r->length ? r->length : WIRE_DATA);
  }
  command_unref(cmd);
}

// Whoever wants something of the processes inside gets it, paused or not; who only looks leaves them as they are.
static int needs_it_running(uint8_t type) {
  switch (type) {
    case F_EXEC: case F_STDIN: case F_STDIN_CLOSE: case F_RESIZE: case F_SIGNAL: case F_KILL: case F_SESSION_OPEN: case F_SESSION_CLOSE:
    case F_RESUME: case F_CONNECT: return 1;
    default: return 0;
  }
}

// Looking at a sandbox does not keep it alive: the edge does it all the time. Nor does what the edge does to idle ones.
static int only_looks(uint8_t type, const struct request *r) {
  return type == F_HELLO || type == F_SUBSCRIBE || type == F_STAT || type == F_RECLAIM || (type == F_PAUSE && r->present & HAS_IDLE);
}

// ------------------------------------------------------------------------------------------------------------------------------------

void request_handle(struct conn *c, uint8_t type, uint32_t id, const uint8_t *payload, size_t size) {
  if (!c->hello && type != F_HELLO) { conn_close(c); return; }
  if (type == F_FILE) {
    if (c->subs || c->subscribed) { conn_error(c, id, "invalid_request", 0, "FILE needs a connection of its own"); return; }
    pause_end();
    reclaim_stop();
    A.used = 1;
    if (hold(c, type, id, payload, size)) return;
    if (conn_full(c)) { c->held = 1; return; }           // the helper must not write into the middle of a frame of ours
    touch();
    helper_start(c, id, payload, size);
    return;
  }
  const uint16_t *tags = allowed(type);
  if (!tags) { conn_error(c, id, "invalid_request", 0, "a request of type %d is not known", type); return; }
  struct request r = {.id = id, .argv = argv_space, .env = env_space};
  int bad = decode(&r, tags, payload, size);
  if (bad == 0x10000) { conn_error(c, id, "wire_field", 0, "the fields of a request of type %d do not parse", type); return; }
  if (bad) { conn_error(c, id, "wire_field", 0, "field %d is unknown to a request of type %d, repeated or malformed", bad, type); return; }
  if (!only_looks(type, &r)) { touch(); idle_again(); }
  if (needs_it_running(type)) {
    pause_end();
    reclaim_stop();
    A.used = 1;
  }
  if (hold(c, type, id, payload, size)) return;
  switch (type) {
    case F_HELLO: say_hello(c, &r); break;
    case F_SUBSCRIBE: subscribe(c, &r); break;
    case F_EXEC: r.definition = definition(payload, size, r.flags); command_exec(c, &r); break;
    case F_LIST: if (sub_new(c, NULL, id, SUB_LIST)) conn_pump_soon(c); break;
    case F_SESSION_LIST: if (sub_new(c, NULL, id, SUB_SESSIONS)) conn_pump_soon(c); break;
    case F_STAT: status(c, &r); break;
    case F_SESSION_OPEN: session_open(c, &r); break;
    case F_SESSION_CLOSE: session_close(c, &r); break;
    case F_LEASE: set_lease(c, &r); break;
    case F_STOP: stop_now(c, &r); break;
    case F_LEAVE: leave_now(c, &r); break;
    case F_SNAPSHOT: snapshot_start(c, &r); break;
    case F_CHECKPOINT:
      if (!r.path || *r.path != '/' || (!r.length && A.s->channel <= 0)) conn_error(c, r.id, "invalid_request", 0, "CHECKPOINT: a directory, and how much may go there, are needed");
      else if (A.s->channel > 0) machine_checkpoint(c, &r);
      else snapshot_start(c, &r);
      break;
    case F_RESTORE:
      if (A.s->channel > 0) machine_restore(c, &r);
      else restore_start(c, &r);
      break;
    case F_CONNECT:
      if (c->subs || c->subscribed) conn_error(c, id, "invalid_request", 0, "CONNECT needs a connection of its own");
      else if (conn_full(c)) c->held = 1;                // a reply is not cut in two
      else tunnel_start(c, &r);
      break;
    case F_PAUSE: pause_start(c, &r); break;
    case F_RECLAIM: reclaim_request(c, &r); break;
    case F_RESUME:
      snapshot_thaw();                 // asked for in so many words, it is done whatever we believe
      if (A.s->channel > 0) machine_thaw();
      conn_ok(c, id);
      break;
    default: about_command(c, type, &r);
  }
}

// Decoding the edge's requests to the launcher. The edge is ours, but a mistake there must not become a path outside our directories.
#include <stddef.h>
#include <string.h>
#include "launcher.h"
#include "node.h"
#include "util.h"
#include "wire.h"

static int text(const struct item *i, const char **to) { return field_text(i, to); }

static int number32(const struct item *i, uint32_t *to) {
  uint64_t v;
  if (field_u64(i, &v) || v > 0xffffffffu) return -1;
  *to = (uint32_t)v;
  return 0;
}

static int flag(const struct item *i, int *to) {
  uint32_t v;
  if (number32(i, &v) || v > 1) return -1;
  *to = (int)v;
  return 0;
}

// The name is of one of the two directories that given.c mounts, and one part more.
static int given(const struct item *i, struct gift *g) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  uint32_t head[3];
  if (i->size < sizeof head + 2) return -1;
  memcpy(head, i->p, sizeof head);
  const char *name = (const char *)i->p + sizeof head;
  const uint8_t *end = memchr(name, 0, i->size - sizeof head);
  size_t skip = !end ? 0 : !strncmp(name, "secrets/", 8) || !strncmp(name, "mirrors/", 8) ? 8 : 0;
  size_t n = skip ? strlen(name + skip) : 0;
  if (!n || n > 64 || name[skip] == '.' || strspn(name + skip, letters) != n || head[0] > 0777 || head[1] > 65535 || head[2] > 65535) return -1;
  *g = (struct gift){.name = name, .data = end + 1, .size = (size_t)(i->p + i->size - end - 1), .mode = head[0], .uid = head[1], .gid = head[2]};
  return 0;
}

static int one(struct order *o, uint8_t type, const struct item *i) {
  struct spec *c = &o->spec;
  switch (i->tag) {
    case T_ID:
      if (type != F_MOUNT_MEDIUM) return text(i, &c->id);
      return o->nkeep < (int)(sizeof o->keep / sizeof *o->keep) ? text(i, &o->keep[o->nkeep++]) : -1;
    case T_LAYER: return c->nlayers < MAX_LAYERS ? text(i, &c->layers[c->nlayers++]) : -1;
    case T_ENV: return c->nenv < MAX_ENV ? text(i, &c->env[c->nenv++]) : -1;
    case T_GIVEN: return c->ngiven < MAX_GIVEN ? given(i, &c->given[c->ngiven++]) : -1;
    case T_NAME: return text(i, &o->name);
    case T_PATH: return text(i, &o->path);
    case T_DATA: return text(i, &o->data);
    case T_FILL: return flag(i, &o->fill);
    case T_BYTES: case T_SIZE: return field_u64(i, &o->bytes);
    case T_VOLUME: return text(i, &c->volume);
    case T_TURN: return field_u64(i, &c->turn);
    case T_KEEP: return flag(i, &c->keep);
    case T_CGROUP: return text(i, &c->cgroup);
    case T_HOSTNAME: return text(i, &c->hostname);
    case T_WORKDIR: return text(i, &c->workdir);
    case T_USER: return text(i, &c->user);
    case T_RUN_DIR: return text(i, &c->run_dir);
    case T_STATE_DIR: return text(i, &c->state_dir);
    case T_MEDIUM: return flag(i, &c->medium);
    case T_USERNS: return flag(i, &c->userns);
    case T_OWN_PIDS: return flag(i, &c->own_pids);
    case T_FN_WORKER: return flag(i, &c->worker);
    case T_UID_BASE: return number32(i, &c->uid_base);
    case T_CPU_MILLI: return number32(i, &c->cpu_milli);
    case T_CPU_CLASS: return number32(i, &c->cpu_class);
    case T_PIDS: return number32(i, &c->pids);
    case T_NOFILE: return number32(i, &c->nofile);
    case T_MEMORY_BYTES: return field_u64(i, &c->memory_bytes);
    case T_DISK_BYTES: return field_u64(i, &c->disk_bytes);
    case T_SHM_BYTES: return field_u64(i, &c->shm_bytes);
    case T_LOG_HEAD: return field_u64(i, &c->log_head);
    case T_LOG_TAIL: return field_u64(i, &c->log_tail);
    case T_LOG_BUDGET: return field_u64(i, &c->log_budget);
    case T_DEADLINE_NS: return field_u64(i, &c->deadline_ns);
    case T_IDLE_NS: return field_u64(i, &c->idle_ns);
    case T_AUTO_PAUSE_NS: return field_u64(i, &c->auto_pause_ns);
    case T_RECLAIM_NS: return field_u64(i, &c->reclaim_ns);
    case T_CHANNEL: return text(i, &c->channel);
    case T_VMM: return number32(i, (uint32_t *)&c->vmm);
    case T_VMM_BYTES: return field_u64(i, &c->vmm_bytes);
    case T_BOOT_S: return field_u64(i, &c->boot_s);
    case T_TIME_NS: return field_u64(i, &o->time_ns);
    case T_SEED: o->seed = i->p; o->seed_size = i->size; return 0;
    default: return -1;
  }
}

int order_read(struct order *o, const struct frame *h, const uint8_t *payload, size_t size, struct fault *f) {
  struct cursor c = {payload, payload + size};
  struct item i;
  int more;
  memset(o, 0, offsetof(struct order, keep));
  o->spec.userns = 1;
  while ((more = field_next(&c, &i)) > 0)
    if (one(o, h->type, &i)) return fault_set(f, "wire_field", 0, "field %u of request type %u is unknown, malformed or one too many", i.tag, h->type);
  return more < 0 ? fault_set(f, "wire_field", 0, "request type %u is malformed", h->type) : 0;
}

static int is_id(const char *id) {
  size_t n = id ? strlen(id) : 0;
  return n && n < 64 && strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789") == n;
}

// A directory of the sandbox's own ends in its id: removing it can then remove nothing else.
static int own(const char *path, const char *id) {
  const char *slash = path && *path == '/' ? strrchr(path, '/') : NULL;
  return slash && !strcmp(slash + 1, id) && !strstr(path, "/../") && strlen(path) < 4000;
}

int hostname_check(const char *name, struct fault *f) {
  size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.");
  if (n && !name[n] && n <= 63) return 0;                // it also goes into /etc/hosts
  return fault_set(f, "invalid_request", 0, "the host name %.70s is not 1 to 63 letters, digits, dots and hyphens", name);
}

int spec_check(struct spec *c, const char *cgroup, int creating, struct fault *f) {
  if (!is_id(c->id)) return fault_set(f, "invalid_request", 0, "%.70s is not a sandbox id", c->id ? c->id : "");
  if (!c->cgroup) c->cgroup = cgroup;
  if (strcmp(c->cgroup, cgroup)) return fault_set(f, "invalid_request", 0, "this launcher serves the cgroup %s, not %.60s", cgroup, c->cgroup);
  if (!own(c->run_dir, c->id)) return fault_set(f, "invalid_request", 0, "RUN_DIR %.80s does not end in /%s", c->run_dir ? c->run_dir : "", c->id);
  if (c->cpu_class >= CPU_CLASSES) return fault_set(f, "invalid_request", 0, "there is no CPU class %u", c->cpu_class);
  if (!creating) return 0;
  if (c->channel && (!c->vmm || !c->vmm_bytes || !c->boot_s || c->medium != MEDIUM_BTRFS || c->own_pids))
    return fault_set(f, "invalid_request", 0, "CHANNEL needs VMM, VMM_BYTES and BOOT_S, and excludes MEDIUM and OWN_PIDS");
  if (!own(c->state_dir, c->id)) return fault_set(f, "invalid_request", 0, "STATE_DIR %.80s does not end in /%s", c->state_dir ? c->state_dir : "", c->id);
  if (c->volume && (c->turn || !snapshot_named(c->volume) || c->medium != MEDIUM_BTRFS)) return fault_set(f, "invalid_request", 0, "%.70s is not the name of a snapshot", c->volume);
  if (!c->nlayers) return fault_set(f, "layer_not_found", 0, "a sandbox needs at least one layer");
  if (!c->hostname || !*c->hostname) c->hostname = c->id;
  if (hostname_check(c->hostname, f)) return -1;
  if (!c->workdir || !*c->workdir) c->workdir = "/";
  if (*c->workdir != '/') return fault_set(f, "invalid_request", 0, "the working directory %.120s is not absolute", c->workdir);
  if (!c->user || !*c->user) c->user = "root";
  if (!c->shm_bytes) c->shm_bytes = 64u << 20;
  if (c->own_pids && !c->userns) return fault_set(f, "invalid_request", 0, "OWN_PIDS needs a user namespace");
  if (c->userns && c->uid_base < 65536) return fault_set(f, "invalid_request", 0, "UID_BASE %u would map ids of the host", c->uid_base);
  return 0;
}

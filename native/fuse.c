// The FUSE file system of layers' data. Its connection is held by every aether, so a request that was read stays answerable whoever dies;
// when its last descriptor closes the kernel fails all reads, which is an error and never a wrong byte.
//
// EROFS does not read its files itself: they are under loop devices with direct I/O. A file-backed EROFS takes a short read for the end of
// the file and fills up with zeros (fs/erofs/fileio.c), and FUSE gives short reads when a large one fails in its middle or its reader is killed.
// A loop device reads from a kernel thread that nobody kills, asynchronously, and passes every error on.
#include "fuse.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "node.h"
#include "util.h"

#define ROOT 1
#define FIRST 2                        // node id of files[0]
#define MOST (1u << 20)                // bytes of one read
#define FOREVER 86400                  // seconds for which names and sizes are good: a layer never changes

static struct fuse_state *state;
static int wire;
static int data[FUSE_FILES];           // descriptors of the real files, open as long as the file is: so its data cannot be dropped
static uint8_t whole[FUSE_FILES];      // all of it is there: nobody need be asked
static char bytes[MOST];

// ---- the launcher's side ----------------------------------------------------------------------------------------------------------------

int fuse_open(struct fault *f) {
  char options[128];
  int fd = host_open("/dev/fuse", O_RDWR | O_NONBLOCK);
  if (fd < 0) return -1;
  snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,max_read=%u", fd, MOST);
  if ((mkdir(NODE_FUSE, 0700) && errno != EEXIST) ||
      mount("dsec", NODE_FUSE, "fuse", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, options)) {
    fault_host(f, errno, "mount a FUSE file system");
    close(fd);
    return -1;
  }
  return fd;
}

static int is_hex(const char *text, size_t size) { return size == 64 && strspn(text, "0123456789abcdef") >= 64; }

int fuse_file_open(const char *path) {
  char to[128], prefix[4200];
  int n = snprintf(prefix, sizeof prefix, "%s/remote/", node.state);
  const char *hex = path + n;
  if (strncmp(path, prefix, (size_t)n) || !is_hex(hex, strcspn(hex, "/")) || strcmp(hex + 64, "/data")) { errno = EINVAL; return -1; }
  snprintf(to, sizeof to, NODE_FUSE "/%.64s", hex);
  return open(to, O_RDONLY | O_CLOEXEC);
}

// ---- files ------------------------------------------------------------------------------------------------------------------------------

static int path_of(const struct fuse_file *x, const char *name, char *to, size_t cap) {
  return snprintf(to, cap, "%s/remote/%s/%s", node.state, x->hex, name) < (int)cap ? 0 : -1;
}

static int held(const struct fuse_file *x) {
  for (int i = 0; i < FUSE_HOLDERS; i++)
    if (x->holders[i]) return 1;
  return 0;
}

// Whoever drops the data of a layer takes a lease, which is refused while this is open; so what is complete then stays complete.
static int hold_data(unsigned n) {
  char path[4400];
  struct stat st;
  const struct fuse_file *x = &state->files[n];
  if (data[n] < 0 && !path_of(x, "data", path, sizeof path)) {
    data[n] = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (data[n] >= 0 && (fstat(data[n], &st) || st.st_dev != x->dev || st.st_ino != x->ino)) close_fd(&data[n]);
    whole[n] = data[n] >= 0 && !path_of(x, "complete", path, sizeof path) && !access(path, F_OK);
  }
  return data[n] < 0 ? -1 : 0;
}

static void let_go(unsigned n) {
  if (held(&state->files[n])) return;
  close_fd(&data[n]);
  whole[n] = 0;
}

static struct fuse_file *file_of(uint64_t id) {
  return id >= FIRST && id - FIRST < FUSE_FILES && *state->files[id - FIRST].hex ? &state->files[id - FIRST] : NULL;
}

void fuse_whole(int fd) {
  struct stat st;
  char path[4400];
  if (fstat(fd, &st)) return;
  for (unsigned n = 0; n < FUSE_FILES && *state->files[n].hex; n++) {
    const struct fuse_file *x = &state->files[n];
    if (data[n] >= 0 && x->dev == st.st_dev && x->ino == st.st_ino) whole[n] = !path_of(x, "complete", path, sizeof path) && !access(path, F_OK);
  }
}

// ---- requests ---------------------------------------------------------------------------------------------------------------------------

static void reply(uint64_t unique, int error, const void *payload, size_t size) {
  struct fuse_out_header h = {.len = (uint32_t)(sizeof h + (error ? 0 : size)), .error = -error, .unique = unique};
  struct iovec v[] = {{&h, sizeof h}, {(void *)(uintptr_t)payload, size}};
  (void)!writev(wire, v, error || !size ? 1 : 2);        // ENOENT: it was answered already, by a predecessor
}

static struct fuse_attr attributes(uint64_t id, const struct fuse_file *x) {
  struct fuse_attr a = {.ino = id, .mode = S_IFDIR | 0500, .nlink = 1, .blksize = 4096};
  if (x) {
    a.mode = S_IFREG | 0400;
    a.size = x->size;
    a.blocks = x->size / 512;
  }
  return a;
}

static void look_up(uint64_t unique, uint64_t parent, const char *name) {
  char path[4400];
  struct stat st;
  struct fuse_file found = {0};
  unsigned n = 0, room = FUSE_FILES;
  if (parent != ROOT || !is_hex(name, strlen(name))) { reply(unique, ENOENT, NULL, 0); return; }
  memcpy(found.hex, name, 64);
  if (path_of(&found, "data", path, sizeof path) || stat(path, &st) || !S_ISREG(st.st_mode)) { reply(unique, ENOENT, NULL, 0); return; }
  // a layer that was removed and pulled again is another file
  for (; n < FUSE_FILES && *state->files[n].hex; n++) {
    const struct fuse_file *x = &state->files[n];
    if (!strcmp(x->hex, name) && x->dev == st.st_dev && x->ino == st.st_ino) break;
    if (room == FUSE_FILES && !held(x) && strcmp(x->hex, name) == 0) room = n;
  }
  if (n == FUSE_FILES && room == FUSE_FILES) { reply(unique, ENFILE, NULL, 0); return; }
  if (n == FUSE_FILES || !*state->files[n].hex) {
    if (room < FUSE_FILES) n = room;
    close_fd(&data[n]);
    found.dev = st.st_dev;
    found.ino = st.st_ino;
    found.size = (uint64_t)st.st_size;
    state->files[n] = found;
  }
  struct fuse_entry_out e = {.nodeid = n + FIRST, .attr = attributes(n + FIRST, &state->files[n])};
  reply(unique, 0, &e, sizeof e);
}

// By its own number a request that a predecessor dealt with is known: nothing is counted twice.
static void open_file(uint64_t unique, uint64_t id) {
  struct fuse_file *x = file_of(id);
  int at = -1;
  for (int i = 0; x && i < FUSE_HOLDERS; i++)
    if (x->holders[i] == unique || (at < 0 && !x->holders[i])) at = i;
  if (!x || at < 0) { reply(unique, x ? EMFILE : ENOENT, NULL, 0); return; }
  x->holders[at] = unique;
  if (hold_data((unsigned)(id - FIRST))) {
    x->holders[at] = 0;
    reply(unique, EIO, NULL, 0);
    return;
  }
  struct fuse_open_out o = {.fh = unique, .open_flags = FOPEN_DIRECT_IO};
  reply(unique, 0, &o, sizeof o);
}

static void release(uint64_t unique, uint64_t id, uint64_t fh) {
  struct fuse_file *x = file_of(id);
  for (int i = 0; x && i < FUSE_HOLDERS; i++)
    if (x->holders[i] == fh) x->holders[i] = 0;
  if (x) let_go((unsigned)(id - FIRST));
  reply(unique, 0, NULL, 0);
}

static void start(uint64_t unique, const struct fuse_init_in *in) {
  struct fuse_init_out o = {.major = FUSE_KERNEL_VERSION, .minor = in->minor < 31 ? in->minor : 31, .max_write = 4096, .time_gran = 1,
                            .max_background = 4096, .congestion_threshold = 4096, .max_pages = MOST / 4096,
                            .flags = in->flags & (FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_MAX_PAGES)};
  if (in->major != FUSE_KERNEL_VERSION || in->minor < 28) reply(unique, EPROTO, NULL, 0);
  else reply(unique, 0, &o, sizeof o);
}

void fuse_answer(const struct fuse_read *r, int error) {
  for (unsigned n = 0; n < FUSE_FILES && *state->files[n].hex; n++) {
    const struct fuse_file *x = &state->files[n];
    if (x->dev != r->dev || x->ino != r->ino) continue;
    size_t want = r->off >= x->size ? 0 : x->size - r->off < r->count ? (size_t)(x->size - r->off) : (size_t)r->count, have = 0;
    if (error) break;
    if (want > sizeof bytes || hold_data(n)) { error = EIO; break; }
    for (ssize_t got; have < want; have += (size_t)got)
      if ((got = pread(data[n], bytes + have, want - have, (off_t)(r->off + have))) <= 0) { error = EIO; break; }
    reply(r->unique, error, bytes, have);
    return;
  }
  reply(r->unique, error ? error : EIO, NULL, 0);
}

static int read_file(const struct fuse_in_header *h, const struct fuse_read_in *in, struct fuse_read *r) {
  const struct fuse_file *x = file_of(h->nodeid);
  // held before anybody is asked: what the filler says to be there is still there when it is read
  if (!x || hold_data((unsigned)(h->nodeid - FIRST))) { reply(h->unique, EIO, NULL, 0); return 0; }
  *r = (struct fuse_read){h->unique, x->dev, x->ino, in->offset, in->size};
  if (!whole[h->nodeid - FIRST]) return 1;
  fuse_answer(r, 0);
  return 0;
}

int fuse_again(struct fuse_read *r) {
  struct fuse_in_header *h = (void *)state->request;
  void *body = h + 1;
  if (!h->len) return -1;
  switch (h->opcode) {
    case FUSE_READ: if (read_file(h, body, r)) return 1; break;
    case FUSE_LOOKUP: look_up(h->unique, h->nodeid, body); break;
    case FUSE_OPEN: open_file(h->unique, h->nodeid); break;
    case FUSE_RELEASE: release(h->unique, h->nodeid, ((struct fuse_release_in *)body)->fh); break;
    case FUSE_GETATTR: {
      const struct fuse_file *x = file_of(h->nodeid);
      struct fuse_attr_out a = {.attr_valid = FOREVER, .attr = attributes(h->nodeid, x)};
      reply(h->unique, x || h->nodeid == ROOT ? 0 : ENOENT, &a, sizeof a);
      break;
    }
    case FUSE_INIT: start(h->unique, body); break;
    case FUSE_FORGET: case FUSE_BATCH_FORGET: break;     // these have no answer
    default: reply(h->unique, ENOSYS, NULL, 0);          // also INTERRUPT: the kernel sends none any more
  }
  fuse_noted();
  return 0;
}

int fuse_next(struct fuse_read *r) {
  // a request that is cut off by our death is answered with an error by the kernel; one that is whole begins with its length
  ssize_t n = read(wire, state->request, sizeof state->request);
  if (n < 0 && (errno == EINTR || errno == ENOENT)) return 0;
  return n < (ssize_t)sizeof(struct fuse_in_header) ? -1 : fuse_again(r);
}

void fuse_noted(void) { memset(state->request, 0, sizeof(struct fuse_in_header)); }

void fuse_begin(struct fuse_state *s, int connection) {
  state = s;
  wire = connection;
  memset(data, -1, sizeof data);
  memset(bytes, 1, sizeof bytes);      // its pages are there before they are needed
  for (unsigned n = 0; n < FUSE_FILES && *state->files[n].hex; n++)
    if (held(&state->files[n])) hold_data(n);
}

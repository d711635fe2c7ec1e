// What the parts of the file helper share (files.c serves one request; docs/files.md is its manual). Every operation returns 0, or -1
// with the error written down by fail(); nothing here exits but file_serve() itself, so that each part can be tested and fuzzed.
#ifndef DSEC_FILES_H
#define DSEC_FILES_H
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include "frame.h"

#define MAX_EXCLUDE 256
#define DATA_HEAD (sizeof(struct frame) + sizeof(uint64_t))      // what stands before the bytes of a DATA frame
#define LIST_ENTRIES 100000                                      // default bound of one listing; T_LENGTH may raise it to
#define LIST_ENTRIES_MAX 1000000
#define LIST_DEPTH_MAX 256

struct args {                          // decoded FILE request; text points into the request
  const char *op, *path, *dest, *exclude[MAX_EXCLUDE];
  int nexclude;
  uint64_t offset, length, mode, mtime, uid, gid, depth, from, size, parents, overwrite, recursive, follow;
  uint64_t has;                        // bit (tag - T_OP) for file tags; HAS_OFFSET ... for the others
};
#define HAS(tag) (1ull << ((tag) - T_OP))
#define HAS_OFFSET (1ull << 60)
#define HAS_LENGTH (1ull << 61)
#define HAS_FROM (1ull << 62)

struct job {
  int conn;
  uint32_t request;
  struct args a;
  int gone;                            // the peer went away or broke the protocol: there is nobody to answer
  int uploading;                       // the client still sends DATA; 0 once its OK was read
  const char *code;                    // the error: code, errno, text
  int err;
  char message[1200];
  struct buf out;                      // one outgoing frame, or several small ones
  size_t filled;                       // bytes of DATA gathered in `out` behind its head
  uint64_t sent;                       // offset of the next DATA frame out
  uint8_t *in;                         // one incoming payload
  size_t in_at, in_end;
  uint64_t received;                   // bytes of DATA taken in
  uint64_t size, done;                 // what OK reports
  int reports;                         // bits: which of the two
  char notes[16][256];                 // things that did not fail the operation but must be said (T_EVENT of OK)
  int nnotes;
};
enum { REPORT_SIZE = 1, REPORT_DONE = 2 };

// errors (files.c)
int fail(struct job *j, const char *code, int err, const char *format, ...) __attribute__((format(printf, 4, 5)));
int fail_errno(struct job *j, const char *verb, const char *path, const char *rest); // code from errno; path/rest is named
const char *code_of(int err);
void note(struct job *j, const char *format, ...) __attribute__((format(printf, 2, 3)));

// DATA out (files.c): fill what out_room() gives, then say how much with out_add(); it sends whole frames
uint8_t *out_room(struct job *j, size_t *room);
int out_add(struct job *j, size_t n);
int out_bytes(struct job *j, const void *p, size_t n);
int out_flush(struct job *j);
int send_all(struct job *j, const void *p, size_t n, int flags);
// DATA in: 1 and the bytes at hand, 0 when the client said OK, -1
int in_peek(struct job *j, const uint8_t **p, size_t *n);
void in_eat(struct job *j, size_t n);

// paths (files_path.c)
struct place { int dir; char name[256]; };                       // an entry: its directory (O_PATH) and its name in it
int open_beneath(int dir, const char *path, int flags, uint64_t resolve);    // openat2 that never follows a /proc magic link
int place_find(struct job *j, const char *path, int parents, int follow, struct place *p); // follow: to where writing would go
int make_dir(struct job *j, const char *path, int parents, int *made);       // O_PATH descriptor of the directory at `path`
int open_regular(struct job *j, const char *path, struct stat *st);          // to read; touches nothing but a regular file
int kind_error(struct job *j, mode_t mode, const char *path);    // the error for something that is not a regular file
const char *type_name(mode_t mode);
void temp_name(char name[32]);

// trees (files_walk.c): depth first, without recursion, at most WALK_OPEN descriptors whatever the depth
struct level { int fd, peer, done; dev_t dev, peer_dev; ino_t ino, peer_ino; int64_t at; size_t path; uint8_t *buf; size_t pos, len; };
struct walk { struct level *levels; int depth, cap, rewind; char *path; size_t size; };
struct visit { int dir, peer; const char *name; unsigned char type; };       // dir: the directory that holds name; path: walk.path
enum { WALK_END = 0, WALK_ENTRY = 1, WALK_LEAVE = 2 };
int walk_start(struct walk *w, int fd);                          // takes fd; rewind: read a directory anew after coming back to it
int walk_next(struct walk *w, struct visit *v);                  // WALK_*, or -1 with errno (ESTALE: a directory was moved meanwhile)
int walk_enter(struct walk *w, int *fd);                         // into the entry just returned; *fd: its descriptor (still the walk's)
void walk_peer(struct walk *w, int fd);                          // a directory elsewhere that goes with the one just entered; takes fd
void walk_skip(struct walk *w);                                  // nothing more of the directory just entered
void walk_stop(struct walk *w);
// The directory just visited is the root of proc, sysfs, cgroup or their like: there is nothing to list or pack below it.
int walk_pseudo(const struct walk *w, const struct visit *v, const struct stat *st);

struct idset { struct id { uint64_t dev, ino, value; } *slots; size_t used, cap; };   // (dev, ino) -> value
int idset_put(struct idset *s, uint64_t dev, uint64_t ino, uint64_t value);  // 0, or -1 without memory
int idset_get(const struct idset *s, uint64_t dev, uint64_t ino, uint64_t *value); // 1 found
void idset_free(struct idset *s);

struct blob { uint8_t *p; size_t n, cap; };                      // bytes that grow
int blob_add(struct blob *b, const void *p, size_t n);           // 0, or -1 without memory

// owners' names (files_info.c)
struct owners { uint32_t uid, gid; int valid; char owner[64], group[64]; };
void owners_fill(struct owners *o, uint32_t uid, uint32_t gid);

// copying one file's content and attributes (files_tree.c)
int copy_content(int in, int out, uint64_t size);                // holes stay holes; -1 with errno
void copy_xattrs(int in, int out);                               // what the kernel lets us keep
int remove_tree(struct job *j, int dir, const char *name, const char *path);

// operations
int op_read(struct job *j);
int op_write(struct job *j);
int op_stat(struct job *j);
int op_list(struct job *j);
int op_mkdir(struct job *j);
int op_chmod(struct job *j);
int op_move(struct job *j);
int op_remove(struct job *j);
int op_tar(struct job *j);
int op_untar(struct job *j);
int op_watch(struct job *j);
int unpack(struct job *j, int root, int fresh, int at_slash);    // untar into an open directory (fresh: this request made it)

int job_init(struct job *j, int conn, uint32_t request, const uint8_t *fields, size_t size);
int file_run(struct job *j);                                     // one operation with its answer; 0 when the connection is in step after it
#endif

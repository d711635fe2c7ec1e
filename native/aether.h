// aether after READY: what its files share. One process, one epoll loop, no threads; every object below lives in that loop.
#ifndef DSEC_AETHER_H
#define DSEC_AETHER_H
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "frame.h"
#include "log.h"
#include "sandbox.h"

#define MAX_CONNS 512                  // connections at once
#define MAX_SUBS 8192                  // unanswered requests of one connection; one that has more is closed
#define MAX_HELPERS 128                // file operations at once
#define MAX_TUNNELS 256                // open connections to ports inside
#define MAX_SESSIONS 64
#define MAX_SESSION_QUEUE 256          // commands that wait for one session
#define MAX_LEFT 64                    // pipes of ended commands that somebody else still holds
#define MAX_ARGS 32768
#define QUEUE_MAX (4u << 20)           // bytes that wait for one connection; one that reads nothing is closed here
#define GRACE_NS 100000000ull          // after a command's process ended, so long we wait for whoever holds its pipes
#define SESSION_GRACE_NS 300000000ull  // after a timeout in a session, so long its shell may take to come back
#define TRACED_NS 100000000ull         // a tracer has so long to look at its dead tracee, which cannot be reaped before
#define STDIN_MAX (512u << 10)         // whole stdin given with EXEC
#define ID_SIZE 32                     // command ids and session names, NUL included
#define MS 1000000ull
#define NEVER UINT64_MAX

// supervisor.c: the loop -------------------------------------------------------------------------------------------------------------
struct source { void (*on)(struct source *, uint32_t events); int fd; uint32_t events; }; // something the loop waits for; events 0: not now
#define OWNER(p, type, member) ((type *)(void *)((char *)(p) - offsetof(type, member)))

struct conn;
struct command;
struct session;

struct aether {
  struct sandbox *s;
  int epoll, state_dir;
  uint64_t now, real;                  // CLOCK_MONOTONIC, CLOCK_REALTIME of this turn of the loop
  uint64_t armed;                      // when the timer fires, NEVER: it is off
  uint64_t deadline_real, idle_ns;     // the lease; 0: never
  uint64_t auto_pause_ns;              // idle for so long, it is paused; 0: never
  uint64_t touched;                    // last activity, CLOCK_MONOTONIC
  uint64_t oom_kills, oom_at, pids_hits; // counters as last read; when an OOM kill was last noticed
  int running, helpers, conns;         // commands with a live process or in a session's queue; file helpers; connections
  uint64_t paused;                     // since when nothing inside runs, 0: it runs
  int leaving;                         // R_*: what ends the commands is no end of the sandbox
  int damaged, ending;                 // the shell is not the one that the sandbox began with; sandbox_end is at work
  int used;                            // somebody wanted something of what is inside
  struct command *live;                // every command in memory
};
extern struct aether A;

void loop_want(struct source *src, uint32_t events); // what to wait for; 0 takes it out of the loop
void loop_close(struct source *src);                 // out of the loop and closed
void loop_free(void *object);                        // free, but only when no event of this turn can name it any more
void loop_collect(void);                             // between two turns
void timer_want(uint64_t when);                      // be in tick() at this time at the latest
void refresh(void);                                  // A.now, A.real
void touch(void);                                    // the sandbox is not idle
void counters_read(void);                            // oom_kills, pids_hits
void init_died(void) __attribute__((noreturn));
int init_dying(void);                                // PID 1 is on its way out, and everything inside with it
int set_blocking(int fd, int blocking);
void event(const char *name, const char *command, const char *message);
void event_bytes(const char *name, const char *message, uint64_t bytes);
void idle_again(void);                               // it may be idle from now on
uint64_t idle_for(void);                             // since when nobody wants anything of it, ns
void sandbox_leave(int flag, struct conn *asker, uint32_t request); // flag: R_ROLLED_BACK or R_HIBERNATED; returns only with an error sent
void sandbox_end(const char *cause, const char *detail, struct conn *asker, uint32_t request) __attribute__((noreturn));

// conn.c -----------------------------------------------------------------------------------------------------------------------------
enum sub_kind { SUB_START, SUB_STREAM, SUB_COLLECT, SUB_WAIT, SUB_ATTACH, SUB_LIST, SUB_SESSIONS };
struct sub {                           // a reply that takes more than one frame, or has to wait
  struct sub *next, *next_of_command;
  struct conn *conn;
  struct command *cmd;                 // NULL: LIST
  uint32_t request;
  uint8_t kind, follow, announce;      // announce: it waits for STARTED, and a SUB_START for nothing else
  uint64_t at[2];                      // ATTACH: next offset of each stream; LIST: position
};

struct asker { struct asker *next; struct conn *conn; uint32_t request; };   // one of several that wait for the same thing

struct conn {
  struct source src;
  struct conn *prev, *next, *next_pump;
  struct frame head;                   // of the frame that is being read
  uint8_t *in, *out;                   // its payload; bytes that the socket did not take
  size_t head_got, in_got, in_cap, out_at, out_used, out_cap;
  struct sub *subs;
  int nsubs;
  struct command *feeding;             // its STDIN frame waits for this command's stdin, and the connection is not read
  const uint8_t *feed;
  size_t feed_left;
  uint32_t subscribe_request;
  uint8_t hello, subscribed, last, closed, pumping, held; // last: close when all is sent; held: its frame waits (for that, or hold.c)
};
extern struct conn *conns;

int conn_listen(int fd);
int conn_full(const struct conn *c);                       // bytes wait for the socket
void conn_send(struct conn *c, const void *p, size_t n);
void conn_reply(struct conn *c, struct buf *b);            // a built frame
void conn_ok(struct conn *c, uint32_t request);
void conn_error(struct conn *c, uint32_t request, const char *code, int err, const char *format, ...) __attribute__((format(printf, 5, 6)));
void conn_fed(struct conn *c);                             // its STDIN frame is done: read on
void conn_close(struct conn *c);
int asker_add(struct asker **list, struct conn *c, uint32_t request);        // -1: no memory
int asker_next(struct asker **list, struct asker *a);      // takes one off; 0: none is left. Its connection may be gone: NULL
void asker_forget(struct asker *list, const struct conn *c);
void conn_pump_soon(struct conn *c);
void conns_release(void);                                  // frames that were held are served
void conns_pump(void);
int conns_waiting(void);                                   // some connection has work that needs no event
int conn_flush(struct conn *c, int wait_ms);               // only while the sandbox ends
struct sub *sub_new(struct conn *c, struct command *cmd, uint32_t request, int kind);
void subs_wake(struct command *cmd);                       // new output, or its end
void subs_started(struct command *cmd);                    // its program runs
void subs_failed(struct command *cmd, const struct fault *f); // it never will
struct buf reply_buf(void);                                // a small reply under construction; one at a time

// hold.c: what starts something inside waits while memory is copied
int hold(struct conn *c, uint8_t type, uint32_t request, const uint8_t *payload, size_t size); // 1: it waits, or was refused
void hold_begin(void);
void hold_end(void);
void hold_forget(const struct conn *c);

// pump.c: produces what a sub still owes. 1: more at once, 0: nothing now, -1: it is complete
int sub_pump(struct sub *sub);
void record_frame(struct conn *c, uint8_t type, uint32_t request, const struct command *cmd, int with_inline);
void log_reply(struct conn *c, uint32_t request, struct command *cmd, int which, uint64_t offset, uint64_t length);

// request.c --------------------------------------------------------------------------------------------------------------------------
int left_because(const char *cause);                       // R_*, 0: no such cause
void request_handle(struct conn *c, uint8_t type, uint32_t request, const uint8_t *payload, size_t size);

struct request {                       // decoded fields of one request; text points into its payload
  uint32_t id;
  const char *command, *shell, *session, *cwd, *user, *name, *cause, *reason, *hostname, *path;
  const char **argv, **env;            // NULL terminated
  size_t argc, envc;
  uint64_t flags, rows, cols, timeout_ns, signal, scope, stream, offset, offset_err, length, follow, deadline_ns, idle_ns, auto_pause_ns;
  uint64_t log_head, log_tail, major, minor, goes_on, port;
  const uint8_t *bytes;
  size_t nbytes;
  uint64_t present;                    // bit of each optional integer, see request.c
  uint64_t definition;                 // hash of the payload
};
enum { HAS_TIMEOUT = 1, HAS_FOLLOW = 2, HAS_DEADLINE = 4, HAS_IDLE = 8, HAS_BYTES = 16, HAS_HEAD = 32, HAS_TAIL = 64, HAS_AUTO_PAUSE = 128 };

// command.c --------------------------------------------------------------------------------------------------------------------------
enum command_state { C_QUEUED, C_RUNNING, C_DRAINING, C_ENDED };
struct channel {                       // the read end of a command's or session's output
  struct source src;
  struct command *cmd;                 // whose output this is now; NULL: nobody's
  struct session *session;
  int which, pty;
  uint64_t owed;                       // bytes that were in the pipe when the process ended: its own output
};

struct command {
  struct command *prev, *next, *next_hash;
  int refs;                            // being live, lingering, or a session's sink, and one for each sub
  uint8_t state, stop, shell, pty, group, left, saved; // stop: X_STOP_*; group: it has a cgroup; left: in the list of left pipes
  uint8_t kept;                        // it goes on when another supervisor takes the sandbox up
  uint8_t ended_by;                    // R_ROLLED_BACK, R_HIBERNATED: the verdict is not about this command alone
  uint8_t verdict, forced;             // an END_* that we caused; forced: whatever the process's own status was
  uint64_t definition;
  struct record rec;
  struct log log[2];
  struct channel *chan[2];
  struct source status, process, in;   // of its start; pidfd; stdin
  struct start start;
  pid_t pid;
  struct conn *feeder;                 // a connection whose STDIN frame waits
  uint64_t started, timeout_ns, deadline, grace, oom_before, pids_before; // CLOCK_MONOTONIC; counters at its start
  uint64_t left_ns;                    // restored: until its deadline, from when it runs
  uint64_t in_pipe;                    // inode of the pipe that was its stdin, 0: there was none
  uint64_t traced;                     // when to look again for whoever keeps its process from dying, 0: not at all
  int disk_seen, eof_in, draining;     // disk was full while it ran; close stdin when the feeder is done; in command_drain
  struct sub *subs;
  struct session *session;
  struct command *next_queued, *next_left;
  char *text;                          // what a session shall run
  size_t text_size;
};

struct command *command_find(const char *id);              // in memory, or brought back from the records; a reference of the caller's
struct command *command_live(const char *id);              // in memory, no reference
struct command *command_new(const char *id, uint64_t definition);
void command_begin(struct command *cmd);                   // its process runs now: start time, counters, deadline
void command_discard(struct command *cmd);                 // it never ran: forget it
void command_ref(struct command *cmd);
void command_unref(struct command *cmd);
void command_watch(struct command *cmd, int pidfd);
void command_kill(struct command *cmd, int verdict);
void command_status(struct command *cmd, int code, int status, uint64_t cpu_ns, uint64_t peak);
void command_drain(struct command *cmd);                   // the process is gone: take what its pipes still hold
void command_finish(struct command *cmd);                  // the record; its log stays open when somebody holds a pipe
void command_settle(struct command *cmd);                  // no more output will come: totals into the record, logs closed
uint64_t commands_tick(void);                              // deadlines; when the next is due
void commands_shift(uint64_t by);                          // it was paused for so long: timeouts stood still
void commands_end(int lost);                               // the sandbox is dead: collect and record everything
void command_started(struct conn *c, uint32_t request, struct command *cmd);
int command_pid(const struct command *cmd);                // inside, 0: unknown
int command_group(const struct command *cmd, char name[ID_SIZE + 4]);

// exec.c -----------------------------------------------------------------------------------------------------------------------------
int id_valid(const char *id);
void command_exec(struct conn *c, struct request *r);
int exec_starting(const struct command *cmd);              // it has not been heard of its program yet
void exec_tick(struct command *cmd);
void exec_end(struct command *cmd);                        // the sandbox is dead

// channel.c --------------------------------------------------------------------------------------------------------------------------
struct channel *channel_new(int fd, int which, int pty);  // not read before channel_read
void channel_read(struct channel *ch);
void channel_close(struct channel *ch);
void channel_owe(struct channel *ch);
void channel_drain(struct channel *ch);                    // what is there now, as far as the reader of a stream takes it
struct channel *channel_of(const struct command *cmd, int which); // its own, or its session's while it runs there
void channels_resume(const struct command *cmd);           // its stream can take more, or is gone
struct sub *streamer(const struct command *cmd);

// stdin.c ----------------------------------------------------------------------------------------------------------------------------
void stdin_open(struct command *cmd, int fd);
void stdin_request(struct conn *c, struct request *r);
void stdin_close(struct command *cmd);                     // at once
void stdin_finish(struct conn *c, struct request *r);      // STDIN_CLOSE
void stdin_feed(struct command *cmd);                      // write what the waiting connection gave

// session.c --------------------------------------------------------------------------------------------------------------------------
void session_open(struct conn *c, struct request *r);
void session_close(struct conn *c, struct request *r);
int session_queue(struct conn *c, struct request *r, struct command *cmd); // 0, or -1 with the error sent
struct session *session_find(const char *name);
struct channel *session_channel(struct session *z, int which);
void session_done(struct command *cmd);                    // its command was recorded
void session_kill(struct command *cmd, int verdict);       // the processes of its command; the shell may come back
void session_signal(struct command *cmd, int signal);
uint64_t sessions_tick(void);
void sessions_end(void);
int session_at(size_t i, const char **name, int *busy);    // listing; 0: no more
int32_t session_idle(size_t i);                            // pid of the shell of the i-th in which nothing runs; 0: no more

// group.c ----------------------------------------------------------------------------------------------------------------------------
int group_make(const char *name, struct fault *f);         // directory descriptor of a new group below the sandbox's
void group_kill(const char *name);                         // "": the sandbox's own, with all below
void group_signal(const char *name, int signal, const int32_t *except, size_t n); // every process but these (sorted)
void group_each(const char *name, void (*fn)(int32_t pid, void *arg), void *arg); // every process
size_t group_pids(const char *name, int32_t *pids, size_t cap); // sorted
void tracers_kill(pid_t pid);                              // whoever inside traces it, and whoever traces them
void group_drop(const char *name);                         // remove it, after this turn's replies or when it is empty
void groups_dropped(void);                                 // the replies are out
int groups_sweep(void);                                    // how many are still there
void groups_end(void);

// snapshot.c -------------------------------------------------------------------------------------------------------------------------
void snapshot_start(struct conn *c, struct request *r);
void snapshot_leave(struct conn *c, struct request *r);    // LEAVE that keeps the running commands
void snapshots_forget(const struct conn *c);               // it is gone, and with it who would use them
void snapshots_end(void);
uint64_t snapshots_tick(void);
int snapshot_under_way(void);
void snapshot_thaw(void);                                  // everything goes on: at once, or when the copy in the making is made
int snapshot_freeze(struct fault *f);                      // 0: nothing inside runs; blocks

// inside.c: what can be seen of the processes inside from here
#define MOST_PIDS 4096                 // of one sandbox that is looked at
struct seen { int32_t pid, parent, inner; int depth; char name[17]; };  // depth: pid namespaces from ours down to its own
int process_look(int32_t pid, struct seen *p);          // -1: it is gone
int process_confined(int32_t pid);                         // it is in the sandbox and no thread has more rights than a command's; or gone
int inside_confined(void);                                 // so are all
int inside_copyable(int32_t *highest, struct fault *f);    // the processes that run can all go on elsewhere; highest: pid inside
int refuse_copy(struct fault *f, const char *who, const char *why);
int command_runs(const struct command *cmd);

// checkpoint.c: the memory of all running commands, at most `most` bytes, while nothing inside runs. Called by the process that takes the snapshot
int checkpoint_take(const char *dir, uint64_t most, struct fault *f);
struct memory {                        // DIR/<command>/command: what the other aether has to know
  uint32_t magic, pid;                 // pid: inside
  struct record rec;
  uint64_t definition, timeout_ns, left_ns;  // left_ns: until its deadline, NEVER: it has none
  uint64_t pipe[3];                    // inodes of stdin, stdout, stderr; 0: not a pipe of ours
  int32_t last_pid;
  uint8_t shell, stop, input, cpu_class; // input: its stdin can still be written
  uint64_t total[2], room[2];          // of the logs, when the sandbox itself goes on
};
#define MEMORY_MAGIC 0x326d6564        // "dem2"
#define MEMORY_FILE "command"
#define INPUT_FILE "input"             // what was in the pipe of its stdin
#define KEPT_FILE "complete"           // DIR/complete: the sandbox was hibernated with this memory, and has not run since

int checkpoint_sync(const char *dir, struct fault *f);     // it is on the disk

// keep.c: after that, in the supervisor
int keep_all(const char *dir, struct fault *f);            // its commands are not ended by the supervisor's leaving, but kept

uint64_t pipe_inode(int fd);            // 0: it is no pipe
uint8_t *number_in(uint8_t *p, uint8_t *end, const unsigned *path); // in a message of protobuf: fields from the outside in, 0 at the end

// wipe.c: pages that a fork empties are emptied in the images of this process
int images_wipe(int dir, int32_t pid, int32_t inner, struct fault *f);

// restore.c: commands that go on in this sandbox, which is new
void restore_start(struct conn *c, struct request *r);     // also of this sandbox itself, which was hibernated
void restore_forget(const struct conn *c);
uint64_t restore_tick(void);

// pause.c ----------------------------------------------------------------------------------------------------------------------------
#define REASON_ASKED "asked"          // why a sandbox was paused or gave memory back
#define REASON_IDLE "idle"            // for so long as it was told
#define REASON_PRESSURE "pressure"    // the host is short of memory
void pause_start(struct conn *c, const struct request *r);
uint64_t pause_idle(const char *reason);                   // NEVER: it is under way; else when to try again
void pause_end(void);                                      // nothing when it is not paused
void pause_forget(const struct conn *c);
uint64_t pause_tick(void);
const char *pause_reason(void);

// reclaim.c --------------------------------------------------------------------------------------------------------------------------
int reclaim_start(const char *reason);                     // 0: under way
int reclaim_idle(void);                                    // the same, where it is worth it
void reclaim_stop(void);                                   // somebody wants the sandbox
void reclaim_bring(void);                                  // it runs on: what is out comes back, ahead of who touches it
void reclaim_end(void);                                    // the sandbox is dead
void reclaim_request(struct conn *c, const struct request *r);
void reclaim_forget(const struct conn *c);

// tunnel.c ---------------------------------------------------------------------------------------------------------------------------
void tunnel_start(struct conn *c, const struct request *r); // CONNECT; takes the connection
uint64_t tunnels_tick(void);

// helper.c ---------------------------------------------------------------------------------------------------------------------------
void helper_start(struct conn *c, uint32_t request, const uint8_t *payload, size_t size);
uint64_t helpers_tick(void);
void helpers_stop(int on);                                 // they stand still; or go on
void helpers_end(void);
#endif

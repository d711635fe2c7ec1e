// Supervisor wire: frames between the edge and aether (docs/architecture.md, section 3). Mirror: src/dsec/edge/wire.py.
#ifndef DSEC_WIRE_H
#define DSEC_WIRE_H
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>
#undef F_OK                            // access(2)'s 0, which would silently take the place of ours below

#define WIRE_MAJOR 1
#ifndef WIRE_MINOR
#define WIRE_MINOR 6                   // 1: snapshots, 2: LEASE with HOSTNAME and ENV, 3: checkpoints, 4: LEAVE, 5: CHECKPOINT with LENGTH, 6: CONNECT, FILE watch
#endif
#define WIRE_MAX (1u << 20)            // payload bytes of one frame
#define WIRE_DATA (256u << 10)         // most bytes that we put into one DATA frame

struct frame { uint32_t length; uint8_t type, flags; uint16_t zero; uint32_t request; } __attribute__((packed));
struct field { uint16_t tag, zero; uint32_t size; } __attribute__((packed));

enum frame_type {
  // any
  F_HELLO = 1, F_OK = 2, F_ERROR = 3, F_DATA = 4, F_RECORD = 5, F_STATUS = 6, F_EVENT = 7,
  // launcher requests
  F_MOUNT_MEDIUM = 16, F_MOUNT_LAYER = 17, F_UMOUNT_LAYER = 18, F_CREATE = 19, F_REAP = 20, F_DISK_USAGE = 21, F_DROP_SNAPSHOT = 22,
  F_PUT_SNAPSHOT = 57, F_MAKE_VOLUME = 115,
  F_READY = 24,
  // aether requests
  F_SUBSCRIBE = 32, F_EXEC = 33, F_ATTACH = 34, F_LOG_READ = 35, F_STDIN = 36, F_STDIN_CLOSE = 37, F_RESIZE = 38,
  F_SIGNAL = 39, F_KILL = 40, F_WAIT = 41, F_LIST = 42, F_STAT = 43, F_SESSION_OPEN = 44, F_SESSION_CLOSE = 45,
  F_SESSION_LIST = 46, F_FILE = 47, F_LEASE = 48, F_STOP = 49, F_SNAPSHOT = 50, F_PAUSE = 51, F_RESUME = 52,
  F_RECLAIM = 53, F_LEAVE = 55, F_CHECKPOINT = 58, F_RESTORE = 59, F_CONNECT = 120,
  // fncall worker: CALL and PUT are requests, END a reply
  F_FN_CALL = 110, F_FN_PUT = 111, F_FN_CANCEL = 112, F_FN_END = 113, F_FN_DROP = 114,
  // aether replies
  F_STARTED = 64, F_END = 65, F_GAP = 66, F_ENDED = 67, F_LEFT = 56,
};

enum tag {
  // general
  T_VERSION_MAJOR = 1, T_VERSION_MINOR = 2, T_CODE = 3, T_MESSAGE = 4, T_ERRNO = 5, T_ID = 6, T_PATH = 7, T_STATE = 8,
  T_PID = 9, T_INIT_PID = 10, T_TIME_NS = 11, T_BYTES = 12, T_DONE = 13, T_NAME = 14, T_EVENT = 15, T_DATA = 16,
  T_FILL = 17,
  // create
  T_LAYER = 32, T_UID_BASE = 33, T_HOSTNAME = 34, T_MEDIUM = 35, T_DISK_BYTES = 36, T_MEMORY_BYTES = 37, T_PIDS = 38,
  T_CPU_MILLI = 39, T_NOFILE = 40, T_ENV = 41, T_WORKDIR = 42, T_USER = 43, T_RUN_DIR = 44, T_STATE_DIR = 45,
  T_LOG_HEAD = 46, T_LOG_TAIL = 47, T_LOG_BUDGET = 48, T_DEADLINE_NS = 49, T_IDLE_NS = 50, T_SHM_BYTES = 51, T_USERNS = 52,
  T_CGROUP = 53, T_FEATURES = 54, T_VOLUME = 55,
  T_CPU_CLASS = 56,
  // exec
  T_COMMAND = 64, T_ARG = 65, T_SHELL = 66, T_SESSION = 67, T_CWD = 68, T_EXEC_FLAGS = 69, T_ROWS = 70, T_COLS = 71,
  T_TIMEOUT_NS = 72, T_SIGNAL = 73, T_SCOPE = 74, T_STREAM = 75, T_OFFSET = 76, T_OFFSET_ERR = 77, T_LENGTH = 78,
  T_FROM = 79, T_TO = 80, T_FOLLOW = 81, T_STDOUT = 82, T_STDERR = 83, T_RECORD = 84,
  // usage (STATUS) and ENDED
  T_MEMORY_USED = 96, T_MEMORY_PEAK = 97, T_CPU_USED_NS = 98, T_PIDS_USED = 99, T_DISK_USED = 100, T_OOM_KILLS = 101,
  T_PIDS_HITS = 102, T_HEALTH = 103, T_CAUSE = 104, T_IDLE_SINCE_NS = 105, T_COMMANDS_RUNNING = 106, T_LOG_USED = 107,
  // memory
  T_AUTO_PAUSE_NS = 112, T_RECLAIM_NS = 113, T_REASON = 114, T_SWAP_USED = 115,
  T_OWN_PIDS = 160,
  // a sandbox that is made again: how often it was, and a layer that outlives what is removed
  T_TURN = 120, T_KEEP = 121,
  // files
  T_OP = 128, T_MODE = 129, T_MTIME_NS = 130, T_DEST = 131, T_RECURSIVE = 132, T_DEPTH = 133, T_SIZE = 134, T_TYPE = 135,
  T_UID = 136, T_GID = 137, T_TARGET = 138, T_PARENTS = 139, T_OVERWRITE = 140, T_OWNER = 141, T_GROUP = 142, T_EXCLUDE = 143,
  // calls of a fncall worker (fncall.h)
  T_FN_CALL = 220, T_FN_CODE = 221, T_FN_FILE = 222, T_FN_COLLECT = 223, T_FN_FLAGS = 224, T_FN_CPU_NS = 225, T_FN_OUTPUT = 226,
  T_FN_RESULT = 227, T_FN_FSIZE = 228, T_FN_WORKER = 229,
  T_GOES_ON = 200,                     // RESTORE: it is the same sandbox
  T_PORT = 240,                        // inside, of CONNECT
  T_RESOURCE = 168,                    // of the launcher's ERROR: what of the host ran out
  // a sandbox in a microVM: the socket and pid of its VMM, what that may hold, how long its guest may take to come up; then between
  // supervisor and guest (mux.h)
  T_CHANNEL = 230, T_VMM = 231, T_VMM_BYTES = 232, T_BOOT_S = 233, T_SEED = 234, T_DISK_FULL = 235,
  T_GIVEN = 250,                       // of CREATE: u32 mode, uid, gid, a name below /run with its NUL, content
};

// T_EXEC_FLAGS
enum { X_STREAM = 1, X_COLLECT = 2, X_STDIN = 4, X_PTY = 8, X_MERGE = 16, X_STOP_AT_OUTPUT = 32, X_STOP_AT_DISK = 64 };
// T_MEDIUM
enum { MEDIUM_BTRFS = 0, MEDIUM_MEMORY = 1, MEDIUM_GUEST = 2 }; // GUEST: in a microVM, a directory of its disk
// T_CPU_CLASS: CPU_LATENCY, CPU_BEST_EFFORT of sandbox.h
// T_SCOPE of SIGNAL
enum { SCOPE_PROCESS = 0, SCOPE_TREE = 1 };
// flags of a command's DATA, T_STREAM
enum { STREAM_OUT = 1, STREAM_ERR = 2 };
// record.ending
enum { END_RUNNING = 0, END_EXITED = 1, END_SIGNALED = 2, END_TIMEOUT = 3, END_OOM = 4, END_KILLED = 5, END_LOST = 6,
       END_DISK_FULL = 7, END_OUTPUT_LIMIT = 8 };
// record.limits
enum { LIMIT_MEMORY = 1, LIMIT_DISK = 2, LIMIT_PIDS = 4, LIMIT_OUTPUT = 8, LIMIT_FILES = 16 };
// record.flags
enum { R_PIPES_LEFT = 1, R_SESSION_LOST = 2, R_SHELL_REPLACED = 4, R_LOG_EVICTED = 8, R_ROLLED_BACK = 16, R_HIBERNATED = 32 };

// T_FN_FLAGS
enum { FN_STOP_AT_OUTPUT = 1, FN_PIN = 2 };
// fn_result.hits beside LIMIT_*
enum { FN_HIT_CPU = 32, FN_HIT_WALL = 64 };
struct fn_result {                     // T_FN_RESULT: what the host saw of a call; packed, 80 bytes
  uint64_t wall_ns, cpu_ns, memory_peak, rss; // rss: of the program itself, 0: not known
  uint64_t out_total, err_total, value_total; // bytes that it wrote
  int32_t code, signal;                // exit code or -1; signal or 0
  uint8_t ending, hits, zero[6];
  uint64_t reserved;
} __attribute__((packed));
_Static_assert(sizeof(struct fn_result) == 80, "fn_result");

#define RECORD_MAGIC 0x31636564        // "dec1"
struct record {                        // one finished (or, in LIST, running) command; packed, 176 bytes
  uint32_t magic, size;                // size: of the whole, inline bytes included
  char command[32];                    // id, zero padded
  uint64_t start_ns, end_ns;           // CLOCK_REALTIME
  uint64_t cpu_ns, memory_peak, memory_limit;
  uint64_t out_total, err_total;       // bytes the command wrote
  uint64_t out_dropped, err_dropped;   // of these, not in the log
  uint32_t head, tail;                 // geometry of the log files
  uint32_t out_inline, err_inline;     // bytes that follow this struct: stdout, then stderr
  int32_t code, signal;                // exit code or -1; signal or 0
  uint8_t ending, limits, flags, zero;
  uint32_t pid;                        // inside; 0 when unknown
  uint32_t reserved[8];
} __attribute__((packed));
_Static_assert(sizeof(struct record) == 176, "record");

// FILE operations (T_OP, text): read write stat list mkdir move remove chmod tar untar watch
#endif

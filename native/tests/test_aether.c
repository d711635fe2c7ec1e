// aether on the plain host: commands, logs, streams, sessions, lease and end, over its real socket.
#include "host_sandbox.c"
#include "client.c"
#include <poll.h>
#include <sys/prctl.h>
#include <time.h>

#define SECOND 1000000000ull
static char dir[] = "/tmp/aether-unit-XXXXXX";

static void test_exec(int fd) {
  struct record r = run(fd, "hello", "echo out; echo err >&2; exit 3", 0);
  CHECK(r.ending == END_EXITED && r.code == 3 && stdout_is("out\n") && r.out_total == 4 && r.err_total == 4 && !r.flags);
  struct item i;
  CHECK(found(T_STDERR, &i) && i.size == 4 && !memcmp(i.p, "err\n", 4));
  r = run(fd, "hello", "echo out; echo err >&2; exit 3", 0);        // the same again: the same result, not a second run
  CHECK(r.code == 3 && stdout_is("out\n"));
  exec_begin("hello", "echo other", X_COLLECT);
  finish(fd);
  CHECK(get(fd) == F_ERROR && code_is("command_exists"));
  r = run(fd, "term", "kill -TERM $$", 0);
  CHECK(r.ending == END_SIGNALED && r.signal == SIGTERM && r.code == -1);
  r = run(fd, "kill9", "kill -9 $$", 0);
  CHECK(r.ending == END_SIGNALED && r.signal == SIGKILL);
  r = run(fd, "c137", "exit 137", 0);
  CHECK(r.ending == END_EXITED && r.code == 137);
  r = run(fd, "stdin-none", "cat; echo eof", 0);
  CHECK(stdout_is("eof\n"));
  begin(F_EXEC);
  frame_text(&out, T_COMMAND, "nobinary");
  frame_text(&out, T_ARG, "/no/such/binary");
  frame_u64(&out, T_EXEC_FLAGS, X_COLLECT);
  finish(fd);
  CHECK(get(fd) == F_ERROR && code_is("binary_not_found") && strstr(text_of(T_MESSAGE), "/no/such/binary"));
  exec_begin("nocwd", "echo x", X_COLLECT);
  frame_text(&out, T_CWD, "/no/such/dir");
  finish(fd);
  CHECK(get(fd) == F_ERROR && code_is("cwd_not_found"));
  CHECK(about(fd, F_WAIT, "nocwd") == F_ERROR && code_is("command_not_found"));
  CHECK(about(fd, F_WAIT, "../hello") == F_ERROR && code_is("command_not_found"));
  exec_begin("UPPER", "echo x", X_COLLECT);
  finish(fd);
  CHECK(get(fd) == F_ERROR && code_is("invalid_request"));
  exec_begin("field", "echo x", X_COLLECT);
  frame_u64(&out, T_DEADLINE_NS, 1);
  finish(fd);
  CHECK(get(fd) == F_ERROR && code_is("wire_field"));
}

static void test_stdin(int fd) {
  static uint8_t all[300000];
  for (size_t i = 0; i < sizeof all; i++) all[i] = (uint8_t)(i * 7 + i / 256);
  exec_begin("in-bytes", "cat", X_COLLECT);
  frame_bytes(&out, T_BYTES, all, sizeof all);
  finish(fd);
  struct item it;
  CHECK(get(fd) == F_END && record_of().out_total == sizeof all);
  CHECK(found(T_STDOUT, &it) && it.size == 128 << 10 && !memcmp(it.p, all, 64 << 10) &&
        !memcmp(it.p + (64 << 10), all + sizeof all - (64 << 10), 64 << 10));
  exec_begin("in-empty", "cat", X_COLLECT);
  frame_bytes(&out, T_BYTES, all, 0);
  finish(fd);
  CHECK(get(fd) == F_END && record_of().code == 0);
  int in = client(dir);
  exec_begin("in-stream", "sleep 0.2; wc -c", X_STDIN);
  finish(fd);
  CHECK(get(fd) == F_STARTED && !strcmp(text_of(T_COMMAND), "in-stream"));
  for (int i = 0; i < 10; i++) {                                    // more than the pipe holds, before anybody reads
    begin(F_STDIN);
    frame_text(&out, T_COMMAND, "in-stream");
    frame_bytes(&out, T_BYTES, all, sizeof all);
    finish(in);
    CHECK(get(in) == F_OK);
  }
  CHECK(about(in, F_STDIN_CLOSE, "in-stream") == F_OK);
  CHECK(about(fd, F_WAIT, "in-stream") == F_END && record_of().code == 0);
  struct record r = record_of();
  CHECK(r.out_inline == 8);
  CHECK(found(T_RECORD, &it) && !memcmp(it.p + sizeof r, "3000000\n", 8));
  exec_begin("in-shut", "exec <&-; sleep 5", X_STDIN);
  finish(fd);
  CHECK(get(fd) == F_STARTED);
  usleep(100000);
  begin(F_STDIN);
  frame_text(&out, T_COMMAND, "in-shut");
  frame_bytes(&out, T_BYTES, all, 10);
  finish(in);
  CHECK(get(in) == F_ERROR && code_is("stdin_closed"));
  CHECK(about(fd, F_KILL, "in-shut") == F_OK);
  CHECK(about(fd, F_WAIT, "in-shut") == F_END && record_of().ending == END_KILLED);
  begin(F_STDIN);
  frame_text(&out, T_COMMAND, "in-shut");
  frame_bytes(&out, T_BYTES, all, 10);
  finish(in);
  CHECK(get(in) == F_ERROR && code_is("command_ended"));
  close(in);
}

static void test_ends(int fd) {
  double t = seconds();
  struct record r = run(fd, "left", "sleep 3 & echo done", 0);
  CHECK(seconds() - t < 2.5 && r.code == 0 && r.flags & R_PIPES_LEFT && stdout_is("done\n"));
  t = seconds();
  r = run(fd, "late", "(sleep 0.3; echo later) & echo now", 0);
  CHECK(r.flags & R_PIPES_LEFT && stdout_is("now\n"));
  usleep(500000);
  CHECK(about(fd, F_WAIT, "late") == F_END && record_of().out_total == 10);
  if (*host_group) {
    t = seconds();
    r = run(fd, "timeout", "trap '' TERM INT; sleep 300 & sleep 300", 300);
    CHECK(r.ending == END_TIMEOUT && r.code == -1 && seconds() - t < 10 && !(r.flags & R_PIPES_LEFT));
    r = run(fd, "timeout-busy", "while :; do :; done", 200);
    CHECK(r.ending == END_TIMEOUT);
    exec_begin("outlimit", "yes", X_COLLECT | X_STOP_AT_OUTPUT);
    finish(fd);
    CHECK(get(fd) == F_END && record_of().ending == END_OUTPUT_LIMIT && record_of().limits & LIMIT_OUTPUT);
    host->disk_full = 1;
    exec_begin("disklimit", "sleep 100", X_COLLECT | X_STOP_AT_DISK);
    finish(fd);
    CHECK(get(fd) == F_END && record_of().ending == END_DISK_FULL && record_of().limits & LIMIT_DISK);
    host->disk_full = 0;
    exec_begin("tree", "sleep 300 | cat & wait; echo over", X_COLLECT);
    finish(fd);
    int other = client(dir);
    usleep(200000);
    begin(F_SIGNAL);
    frame_text(&out, T_COMMAND, "tree");
    frame_u64(&out, T_SIGNAL, SIGTERM);
    frame_u64(&out, T_SCOPE, SCOPE_TREE);
    finish(other);
    CHECK(get(other) == F_OK);
    CHECK(get(fd) == F_END && record_of().signal == SIGTERM);
    close(other);
  }
  exec_begin("oom", "sleep 0.2; kill -9 $$", X_COLLECT);
  finish(fd);
  usleep(100000);
  host->oom_kills = 1;
  CHECK(get(fd) == F_END && record_of().ending == END_OOM && record_of().memory_peak == 4242 && record_of().limits & LIMIT_MEMORY);
  exec_begin("oom-child", "sleep 0.2; exit 1", X_COLLECT);
  finish(fd);
  usleep(100000);
  host->oom_kills = 2;
  host->pids_hits = 1;
  CHECK(get(fd) == F_END && record_of().ending == END_EXITED && record_of().limits == (LIMIT_MEMORY | LIMIT_PIDS));
  host->replaced = 1;
  r = run(fd, "replaced", "true", 0);
  CHECK(r.flags & R_SHELL_REPLACED);
  host->replaced = 0;
}

// Reads DATA of one stream until END; bytes must be in order. Returns the total.
static uint64_t drain(int fd, uint64_t from, int *gaps) {
  for (;;) {
    int t = get(fd);
    if (t == F_END) return from;
    if (t == F_GAP) { CHECK(number_of(T_FROM) == from); from = number_of(T_TO); ++*gaps; continue; }
    CHECK(t == F_DATA && reply_head.flags == STREAM_OUT);
    uint64_t at;
    memcpy(&at, reply, 8);
    CHECK(at == from);
    for (uint32_t i = 8; i < reply_head.length - 8; i++, from++) CHECK(reply[i] == "0123456789abcde\n"[from % 16]);
  }
}

static void test_streams(int fd) {
  static const char *text = "i=0; while [ $i -lt 400 ]; do printf '%s' \"$x\"; i=$((i+1)); done";
  char script[20000], *p = script + sprintf(script, "x=\"");
  for (int i = 0; i < 512; i++) p += sprintf(p, "0123456789abcde\n");
  sprintf(p, "\"; %s", text);
  const uint64_t all = 400 * 512 * 16;
  int gaps = 0;
  exec_begin("stream", script, X_STREAM);
  finish(fd);
  CHECK(get(fd) == F_STARTED);
  usleep(300000);                                       // a slow reader holds the command back and loses nothing
  CHECK(drain(fd, 0, &gaps) == all && !gaps);
  CHECK(record_of().out_total == all && record_of().out_dropped == all - (128 << 10));
  begin(F_ATTACH);
  frame_text(&out, T_COMMAND, "stream");
  frame_u64(&out, T_OFFSET, 16);
  finish(fd);
  CHECK(drain(fd, 16, &gaps) == all && gaps == 1);
  begin(F_LOG_READ);
  frame_text(&out, T_COMMAND, "stream");
  frame_u64(&out, T_STREAM, STREAM_OUT);
  frame_u64(&out, T_OFFSET, 100000);                    // inside the gap
  frame_u64(&out, T_LENGTH, 10);
  finish(fd);
  uint64_t at;
  CHECK(get(fd) == F_DATA && reply_head.length == 8 + 8 + 10);
  memcpy(&at, reply, 8);
  CHECK(at == all - (64 << 10));
  // a stream whose reader goes: the command runs on, and another attaches
  int other = client(dir);
  sprintf(p, "\"; sleep 0.1; %s", text);
  exec_begin("stream2", script, X_STREAM);
  finish(other);
  CHECK(get(other) == F_STARTED);
  close(other);
  CHECK(about(fd, F_WAIT, "stream2") == F_END && record_of().out_total == all);
  exec_begin("follow", "for i in 1 2 3 4 5; do echo 0123456789abcde; sleep 0.05; done", 0);
  finish(fd);
  CHECK(get(fd) == F_STARTED);
  begin(F_ATTACH);
  frame_text(&out, T_COMMAND, "follow");
  finish(fd);
  CHECK(drain(fd, 0, &gaps) == 80 && record_of().code == 0);
}

static void test_pty(int fd) {
  exec_begin("pty", "stty size; read x; echo got $x; cat >/dev/null; echo end", X_PTY | X_STDIN);
  frame_u64(&out, T_ROWS, 33);
  frame_u64(&out, T_COLS, 77);
  finish(fd);
  CHECK(get(fd) == F_STARTED);
  begin(F_STDIN);
  frame_text(&out, T_COMMAND, "pty");
  frame_bytes(&out, T_BYTES, "hey\n", 4);
  finish(fd);
  CHECK(get(fd) == F_OK);
  usleep(200000);
  begin(F_RESIZE);
  frame_text(&out, T_COMMAND, "pty");
  frame_u64(&out, T_ROWS, 10);
  frame_u64(&out, T_COLS, 20);
  finish(fd);
  CHECK(get(fd) == F_OK);
  CHECK(about(fd, F_STDIN_CLOSE, "pty") == F_OK);
  CHECK(about(fd, F_WAIT, "pty") == F_END && record_of().code == 0);
  struct item i;
  CHECK(found(T_RECORD, &i));
  CHECK(memmem(i.p, i.size, "33 77", 5) && memmem(i.p, i.size, "got hey", 7) && memmem(i.p, i.size, "end", 3));
}

static void open_session(int fd, const char *name) {
  begin(F_SESSION_OPEN);
  frame_text(&out, T_NAME, name);
  finish(fd);
  CHECK(get(fd) == F_OK);
}

static void test_sessions(int fd) {
  open_session(fd, "s");
  run_in(fd, "s", "s1", "x=5; cd /usr; f() { echo \"f $1\"; }", 0);
  run_in(fd, "s", "s2", "echo $x $PWD; f 'a'\"'\"'b'", 0);
  CHECK(stdout_is("5 /usr\nf a'b\n"));
  struct record r = run_in(fd, "s", "s3", "echo \"unterminated", 2000);
  CHECK(r.ending == END_EXITED && r.code != 0);
  run_in(fd, "s", "s4", "cat <<EOF\nhello world\nEOF", 2000);
  CHECK(stdout_is("hello world\n"));
  run_in(fd, "s", "s5", "cat <<EOF\nnever ends", 2000);
  run_in(fd, "s", "s6", "cat; echo eof", 2000);
  CHECK(stdout_is("eof\n"));
  static char big[150 << 10];
  strcpy(big, "y='");
  memset(big + 3, 'q', 100 << 10);
  strcpy(big + 3 + (100 << 10), "'; echo ${#y}");
  run_in(fd, "s", "s7", big, 5000);
  CHECK(stdout_is("102400\n"));
  strcpy(big, "printf '%s' '");
  char *p = big + strlen(big);
  for (int i = 1; i < 256; i++) if (i != '\'') *p++ = (char)i;
  strcpy(p, "' | wc -c");
  run_in(fd, "s", "s8", big, 5000);
  CHECK(stdout_is("254\n"));
  run_in(fd, "s", "s9", "sleep 0.3 & echo bg", 2000);
  CHECK(stdout_is("bg\n"));
  if (*host_group) {
    run_in(fd, "s", "sa", "sleep 30 & disown", 2000);
    double t = seconds();
    r = run_in(fd, "s", "sb", "sleep 1000", 300);
    CHECK(r.ending == END_TIMEOUT && !(r.flags & R_SESSION_LOST) && seconds() - t < 5);
    run_in(fd, "s", "sc", "echo $x; pgrep -c -P $$ sleep", 2000);
    CHECK(stdout_is("5\n1\n"));                          // the variable and the earlier sleep are still there
    r = run_in(fd, "s", "sd", "while :; do :; done", 200);
    CHECK(r.ending == END_TIMEOUT && r.flags & R_SESSION_LOST);
    run_in(fd, "s", "se", "echo [$x]", 2000);
    CHECK(stdout_is("[]\n"));
  }
  // queued: one session in order, others at once
  open_session(fd, "q");
  int other = client(dir);
  exec_begin("q1", "sleep 2; echo one", X_COLLECT);
  frame_text(&out, T_SESSION, "q");
  finish(other);
  exec_begin("q2", "echo two", X_COLLECT);
  frame_text(&out, T_SESSION, "q");
  finish(other);
  double t = seconds();
  usleep(50000);
  run_in(fd, "s", "q3", "echo free", 2000);
  run(fd, "q4", "echo plain", 0);
  CHECK(seconds() - t < 1.8);
  CHECK(get(other) == F_END && stdout_is("one\n"));
  CHECK(get(other) == F_END && stdout_is("two\n"));
  close(other);
  r = run_in(fd, "q", "q5", "echo bye; exit 3", 2000);
  CHECK(r.ending == END_EXITED && r.code == 3 && stdout_is("bye\n") && !(r.flags & R_SESSION_LOST));
  exec_begin("q6", "echo x", X_COLLECT);
  frame_text(&out, T_SESSION, "q");
  finish(fd);
  CHECK(get(fd) == F_ERROR && code_is("session_not_found"));
  begin(F_SESSION_LIST);
  finish(fd);
  CHECK(get(fd) == F_RECORD && !strcmp(text_of(T_NAME), "s"));
  CHECK(get(fd) == F_OK);
  begin(F_SESSION_CLOSE);
  frame_text(&out, T_NAME, "s");
  finish(fd);
  CHECK(get(fd) == F_OK);
  open_session(fd, "s");
  run_in(fd, "s", "sz", "echo [$x]", 2000);
  CHECK(stdout_is("[]\n"));
}

static void test_list(int fd) {
  exec_begin("running", "sleep 100", 0);
  finish(fd);
  CHECK(get(fd) == F_STARTED);
  begin(F_LIST);
  finish(fd);
  int n = 0, running = 0, t;
  while ((t = get(fd)) == F_RECORD) {
    n++;
    running += !strcmp(record_of().command, "running") && record_of().ending == END_RUNNING;
  }
  CHECK(t == F_OK && n > 20 && running == 1);
  begin(F_STAT);
  finish(fd);
  CHECK(get(fd) == F_STATUS && number_of(T_COMMANDS_RUNNING) == 1 && !strcmp(text_of(T_HEALTH), "damaged"));
}

// Malformed frames close their connection and nothing else.
static void test_malformed(int fd) {
  static const uint8_t bad[][12] = {
    {4, 0, 0, 0, 1}, {0xff, 0xff, 0xff, 0xff, 1}, {8, 0, 0, 0, F_STAT, 0, 1, 0}, {8, 0, 0, 0, F_STAT, 0, 0, 0}, {0, 0, 0, 0, 0},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s/aether.sock", dir);
    int raw = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(!connect(raw, (struct sockaddr *)&a, sizeof a) && write(raw, bad[i], 12) == 12);
    CHECK(get(raw) < 0);
    close(raw);
  }
  int raw = socket(AF_UNIX, SOCK_STREAM, 0);
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "%s/aether.sock", dir);
  CHECK(!connect(raw, (struct sockaddr *)&a, sizeof a));
  begin(F_HELLO);
  frame_u64(&out, T_VERSION_MAJOR, 99);
  finish(raw);
  CHECK(get(raw) == F_ERROR && code_is("wire_version") && strstr(text_of(T_MESSAGE), "99"));
  CHECK(get(raw) < 0);
  close(raw);
  run(fd, "alive", "true", 0);
}

static void test_many(int fd) {
  for (int i = 0; i < 300; i++) {
    char id[32];
    snprintf(id, sizeof id, "many-%d", i);
    exec_begin(id, "seq 1 200; sleep 0.2", X_COLLECT);
    finish(fd);
  }
  for (int i = 0; i < 300; i++) CHECK(get(fd) == F_END && record_of().out_total == 692 && record_of().code == 0);
  for (int i = 0; i < 70; i++) {       // more pipes left open than are kept: the oldest are closed, the records stay
    char id[32];
    snprintf(id, sizeof id, "left-%d", i);
    exec_begin(id, "sleep 20 & echo x", X_COLLECT);
    finish(fd);
  }
  for (int i = 0; i < 70; i++) CHECK(get(fd) == F_END && stdout_is("x\n") && record_of().flags & R_PIPES_LEFT);
  CHECK(about(fd, F_WAIT, "left-0") == F_END && record_of().out_total == 2);
  int greedy = client(dir);            // asks and never reads: closed, and nobody else notices
  for (int i = 0; i < 20000; i++) {
    begin(F_LIST);
    if (frame_send(greedy, &out)) break;
  }
  run(fd, "not-greedy", "true", 0);
  close(greedy);
}

static void test_end(int fd) {
  int other = client(dir);
  exec_begin("to-the-end", "sleep 100", X_COLLECT);
  finish(other);
  usleep(100000);
  begin(F_SUBSCRIBE);
  finish(fd);
  CHECK(get(fd) == F_OK);
  begin(F_STOP);
  finish(fd);
  int t;
  while ((t = get(fd)) == F_EVENT) {}
  CHECK(t == F_ENDED && !strcmp(text_of(T_CAUSE), "stopped"));
  CHECK(get(other) == F_END && record_of().ending == END_KILLED);
  CHECK(get(other) == F_ENDED);
  close(other);
}

static pid_t serve(struct spec spec) {
  pid_t pid = fork();
  if (pid) return pid;
  prctl(PR_SET_PDEATHSIG, SIGTERM);    // a test that fails leaves nothing
  static struct sandbox s;
  s.spec = spec;
  host_sandbox(&s, dir);
  aether_main(&s);
}

static void wait_for_socket(void) {
  char path[128];
  snprintf(path, sizeof path, "%s/aether.sock", dir);
  for (int i = 0; i < 500 && access(path, 0); i++) usleep(10000);
}

static void ended(pid_t pid) {
  int status;
  CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
  char path[128], text[300] = "";
  snprintf(path, sizeof path, "%s/state/end.json", dir);
  FILE *f = fopen(path, "r");
  CHECK(f && fgets(text, sizeof text, f) && strstr(text, "\"cause\":\""));
  fclose(f);
  snprintf(path, sizeof path, "%s/state/commands.bin", dir);
  unlink(path);
}

int main(void) {
  host_init();
  CHECK(mkdtemp(dir));
  snprintf(host_group, sizeof host_group, "%s", access("/sys/fs/cgroup/unified", W_OK) && access("/sys/fs/cgroup/cgroup.procs", W_OK) ? "" : "yes");
  if (!*host_group) printf("test_aether: skipped kills of trees: no writable v2 cgroup tree\n");
  pid_t pid = serve((struct spec){0});
  wait_for_socket();
  int fd = client(dir);
  static void (*const tests[])(int) = {test_exec, test_stdin, test_ends, test_streams, test_pty, test_sessions, test_list, test_malformed, test_many, test_end};
  static const char *names[] = {"exec", "stdin", "ends", "streams", "pty", "sessions", "list", "malformed", "many", "end"};
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    double t = seconds();
    tests[i](fd);
    printf("  %s ok (%.2f s)\n", names[i], seconds() - t);
    fflush(stdout);
  }
  close(fd);
  ended(pid);
  // the lease: idle ends it, a running command keeps it
  pid = serve((struct spec){.idle_ns = SECOND / 2});
  wait_for_socket();
  fd = client(dir);
  run(fd, "keep", "sleep 1", 0);
  double t = seconds();
  CHECK(get(fd) == F_ENDED && !strcmp(text_of(T_CAUSE), "expired") && seconds() - t > 0.4 && seconds() - t < 10);
  close(fd);
  ended(pid);
  // PID 1 dies
  pid = serve((struct spec){0});
  wait_for_socket();
  fd = client(dir);
  begin(F_STAT);
  finish(fd);
  CHECK(get(fd) == F_STATUS);
  close(fd);
  fd = client(dir);
  kill((pid_t)number_of(T_INIT_PID), SIGKILL);
  CHECK(get(fd) == F_ENDED && !strcmp(text_of(T_CAUSE), "agent_crash"));
  close(fd);
  ended(pid);
  char command[160];
  snprintf(command, sizeof command, "rm -rf %s", dir);
  return system(command);
}

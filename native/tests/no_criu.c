// What a sandbox without criu is made of, for tests that bring their own sandbox.
struct node node = {.criu = -1};
uint64_t privilege_most(void) { return 0; }
void class_give(const struct spec *spec, pid_t thread) { (void)spec; (void)thread; }
pid_t criu_start(struct sandbox *s, struct criu *c, int *pidfd, struct fault *f) { (void)s; (void)c; (void)pidfd; f->code = "internal"; return -1; }
void criu_reason(int log, char *to, size_t cap) { (void)log; (void)cap; *to = 0; }
int fs_mount(const char *type, const char *const *options, unsigned attributes) { (void)type; (void)options; (void)attributes; return -1; }

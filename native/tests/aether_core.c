// Linked into a whole aether: core scheduling on a kernel without it. The cookies are in the file that FAKE_CORES names.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include "fake_core.c"

__attribute__((constructor)) static void open_table(void) { // while the host's paths are there
  const char *path = getenv("FAKE_CORES");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  kernel = mmap(NULL, sizeof *kernel, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (kernel == MAP_FAILED) abort();
  close(fd);
}

int __wrap_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
  return option == CORE && kernel ? fake_core(a, b, c, d) : __real_prctl(option, a, b, c, d);
}

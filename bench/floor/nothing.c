// The smallest program, without libc, so that who starts it times himself. Build: gcc -static -nostdlib (x86-64 and aarch64).
void _start(void) {
#if defined __x86_64__
  __asm__ volatile("syscall" : : "a"(231L), "D"(0L) : "rcx", "r11", "memory");
#elif defined __aarch64__
  register long number __asm__("x8") = 94, status __asm__("x0") = 0;
  __asm__ volatile("svc 0" : : "r"(number), "r"(status) : "memory");
#endif
  for (;;) {}
}

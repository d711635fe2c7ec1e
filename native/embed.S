/* The program that runs as PID 1 of every sandbox, as bytes. */
        .section .rodata
        .global init_start, init_end
init_start:
        .incbin INIT
init_end:
        .section .note.GNU-stack,"",@progbits

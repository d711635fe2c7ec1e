/* The program that runs as PID 1 of every sandbox, and what is loaded into criu, as bytes. */
        .section .rodata
        .global init_start, init_end, join_start, join_end
init_start:
        .incbin INIT
init_end:
join_start:
        .incbin JOIN
join_end:
        .section .note.GNU-stack,"",@progbits

// fiber_switch(void** save, void* to): keep this fiber's stack pointer in *save, go on at the fiber whose is `to`.
// System V x86-64: rbx, rbp and r12 to r15 outlive a call; they lie on the stack of a fiber that waits.
.text
.p2align 4
.globl fiber_switch
.type fiber_switch, @function
fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size fiber_switch, . - fiber_switch

// fiber_prepare(void* top, void (*run)()): lay out a new fiber's stack below `top` (a multiple of 16) so that the
// first switch to it enters `run` with an empty chain of frames; returns its stack pointer.
.globl fiber_prepare
.type fiber_prepare, @function
fiber_prepare:
    leaq -64(%rdi), %rax
    movq $0, 0(%rax)
    movq $0, 8(%rax)
    movq $0, 16(%rax)
    movq $0, 24(%rax)
    movq $0, 32(%rax)
    movq $0, 40(%rax)
    movq %rsi, 48(%rax)
    movq $0, 56(%rax)
    ret
.size fiber_prepare, . - fiber_prepare
.section .note.GNU-stack, "", @progbits

// The same two functions as in fiber_x86_64.S for arm64 (AAPCS64, as on a Mac): x19 to x30 and d8 to d15 outlive
// a call. Not run by the tests on x86-64.
#ifdef __APPLE__
#define NAME(function) _##function
#else
#define NAME(function) function
#endif
.text
.p2align 4
.globl NAME(fiber_switch)
NAME(fiber_switch):
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret

.p2align 4
.globl NAME(fiber_prepare)
NAME(fiber_prepare):
    sub x0, x0, #160
    mov x9, x0
    mov x10, #20
1:  str xzr, [x9], #8
    subs x10, x10, #1
    b.ne 1b
    str x1, [x0, #88]
    ret

//! The few instructions in privileged mode: from the boot protocol's entry to user mode, and to `hlt` and back.
//!
//! Interrupts are wanted at `hlt` only, and user mode runs with them off; but a KVM that interprets privileged code lets them into user mode all
//! the same. So their handler leaves word, and there is no halt for what came since user mode last looked: else one that came between a look
//! and the halt would be slept through. User mode asks for the halt by a read of an address that is not mapped (a page fault reaches
//! privileged mode on every KVM).

use core::{
    arch::{asm, global_asm},
    sync::atomic::{AtomicU8, Ordering},
};

/// Interrupts that end a halt.
pub(crate) const DEVICE_VECTOR: u8 = 0x30;
/// As [`DEVICE_VECTOR`].
pub(crate) const TIMER_VECTOR: u8 = 0x31;

/// Beyond the first GiB and below the devices: never mapped.
const UNMAPPED: u64 = 0x4000_0000;

/// Not 0 once an interrupt has come.
static INTERRUPTED: AtomicU8 = AtomicU8::new(0);

/// Before a look at what there is to do: only what comes from now on is news to [`halt`].
pub(crate) fn forget_interrupts() {
    INTERRUPTED.store(0, Ordering::SeqCst);
}

/// Waits for an interrupt, unless one has come since [`forget_interrupts`].
pub(crate) fn halt() {
    // SAFETY: the fault's handler (`halt_fault`, below) halts or does not, and continues at the address in R10, which is right behind the
    // access. It changes no register but RAX, and no memory but `INTERRUPTED`.
    unsafe {
        asm!(
            "lea r10, [rip + 2f]",
            "mov al, [{unmapped}]",
            "2:",
            unmapped = in(reg) UNMAPPED,
            out("r10") _,
            out("rax") _,
        );
    }
}

global_asm!(
    r#"
    .section .text.entry, "ax"
    .global _start
_start:
    cli
    mov rsp, offset kernel_stack_top

    /* The first GiB, and the fourth, where the devices are, mapped to themselves by pages of 2 MiB: present, writable, user's;
       the devices' uncached. */
    mov edi, offset low_pages
    mov eax, 0x87
    mov ecx, 512
2:  mov [rdi], rax
    add rdi, 8
    add eax, 0x200000
    dec ecx
    jnz 2b
    mov edi, offset device_pages
    mov eax, 0xc0000097
    mov ecx, 512
3:  mov [rdi], rax
    add rdi, 8
    add eax, 0x200000
    dec ecx
    jnz 3b
    mov eax, offset low_pages
    or eax, 7
    mov [directories], rax
    mov eax, offset device_pages
    or eax, 7
    mov [directories + 24], rax
    mov eax, offset directories
    or eax, 7
    mov [top], rax
    mov eax, offset top
    mov cr3, rax

    /* SSE for user mode: OSFXSR, OSXMMEXCPT; no EM, no TS, but MP. */
    mov rax, cr4
    or eax, 0x600
    mov cr4, rax
    mov rax, cr0
    and eax, 0xfffffff3
    or eax, 2
    mov cr0, rax

    /* The task segment's descriptor, whose base is in three pieces. All addresses are below 4 GiB. */
    mov eax, offset task
    mov [segments + 0x2a], ax
    shr eax, 16
    mov [segments + 0x2c], al
    mov [segments + 0x2f], ah

    /* Gates: what is not named ends in a triple fault, which the VMM reports. */
    mov eax, offset halt_fault
    mov edi, offset gates + 14 * 16
    call put_gate
    mov eax, offset interrupted
    mov edi, offset gates + {device} * 16
    call put_gate
    mov eax, offset interrupted
    mov edi, offset gates + {timer} * 16
    call put_gate

    lgdt [segments_pointer]
    lidt [gates_pointer]
    mov eax, 0x28
    ltr ax

    /* To user mode, with the right to use I/O ports and interrupts off. */
    mov eax, 0x1b
    mov ds, eax
    mov es, eax
    push 0x1b
    push offset user_stack_top - 8
    push 0x3002
    push 0x23
    push offset {live}
    iretq

    /* EAX: the handler; RDI: the gate. Present, interrupt gate, from privileged mode only. */
put_gate:
    mov [rdi], ax
    mov word ptr [rdi + 2], 8
    mov word ptr [rdi + 4], 0x8e00
    shr eax, 16
    mov [rdi + 6], ax
    ret

    /* A fault that is not the one of `halt` has R10 where it likes, so the address is checked. */
halt_fault:
    mov rax, cr2
    cmp rax, {unmapped}
    jne 4f
    mov [rsp + 8], r10
    add rsp, 8
    /* Interrupts are off here. */
    cmp byte ptr [{interrupted}], 0
    jne 5f
    sti
    hlt
    cli
5:  iretq
4:  ud2

    /* Leaves word, then the end of interrupt, to the local APIC. */
interrupted:
    push rax
    mov byte ptr [{interrupted}], 1
    mov eax, 0xfee000b0
    mov dword ptr [rax], 0
    pop rax
    iretq

    .section .data.entry, "aw"
    .balign 16
segments:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00cff3000000ffff
    .quad 0x00affb000000ffff
    .quad 0x0000890000000067
    .quad 0
segments_pointer:
    .word . - segments - 1
    .quad segments
gates_pointer:
    .word 4095
    .quad gates
    .balign 8
    .long 0
    /* RSP0 lies 4 bytes into the task segment. */
task:
    .long 0
    .quad kernel_stack_top
    .fill 92, 1, 0

    .section .bss.entry, "aw", @nobits
    .balign 4096
top: .skip 4096
directories: .skip 4096
low_pages: .skip 4096
device_pages: .skip 4096
gates: .skip 4096
    .skip 4096
kernel_stack_top:
    .skip 65536
user_stack_top:
"#,
    live = sym crate::live,
    unmapped = const UNMAPPED,
    interrupted = sym INTERRUPTED,
    device = const DEVICE_VECTOR,
    timer = const TIMER_VECTOR,
);

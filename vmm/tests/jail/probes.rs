//! Each forbidden call, in a process of its own: the kernel kills it.

use std::{process::exit, ptr};

use libc::{c_long, syscall};
use libtest_mimic::Trial;
use stasis_vmm::jail::{self, Role};

use crate::{inmate, trial};

/// Said right before the call, so that a process that dies earlier proves nothing.
const ABOUT_TO: &str = "about to";
const SURVIVED: &str = "survived";

type Probe = fn() -> c_long;

/// Calls with arguments that the kernel would take from root.
macro_rules! call {
    ($number:ident $(, $argument:expr)*) => {
        // SAFETY: the pointers among the arguments are to constants, or null; and the call is never carried out.
        || unsafe { syscall(libc::$number $(, $argument)*) }
    };
}

const ROOT: *const libc::c_char = c"/".as_ptr();
const NONE: *const u8 = ptr::null();
const RWX: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
const RX: i32 = libc::PROT_READ | libc::PROT_EXEC;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const X32: c_long = 0x4000_0000;
const KVM_CREATE_VM: c_long = 0xae01;
const KVM_RUN: c_long = 0xae80;
const KVM_SET_REGS: c_long = 0x4090_ae82;
const KVM_SET_MSRS: c_long = 0x4008_ae89;
const KVM_TRANSLATE: c_long = 0xc018_ae85;
const UFFDIO_REGISTER: c_long = 0xc020_aa00;

/// Forbidden to every thread of a VM that is built.
const EVERYWHERE: &[(&str, Probe)] = &[
    // Files by path
    ("open", call!(SYS_open, ROOT, libc::O_RDONLY)),
    ("openat", call!(SYS_openat, libc::AT_FDCWD, ROOT, libc::O_RDONLY)),
    ("openat2", call!(SYS_openat2, libc::AT_FDCWD, ROOT, NONE, 0)),
    ("open of proc", call!(SYS_openat, libc::AT_FDCWD, c"/proc/self/mem".as_ptr(), libc::O_RDWR)),
    ("creat", call!(SYS_creat, c"/file".as_ptr(), 0)),
    ("stat", call!(SYS_stat, ROOT, NONE)),
    ("newfstatat by path", call!(SYS_newfstatat, libc::AT_FDCWD, ROOT, NONE, 0)),
    ("statx by path", call!(SYS_statx, libc::AT_FDCWD, ROOT, 0, 0, NONE)),
    ("readlink", call!(SYS_readlink, ROOT, NONE, 0)),
    ("unlink", call!(SYS_unlink, ROOT)),
    ("rename", call!(SYS_rename, ROOT, ROOT)),
    ("mkdir", call!(SYS_mkdir, c"/folder".as_ptr(), 0)),
    ("mknod", call!(SYS_mknod, c"/device".as_ptr(), libc::S_IFCHR, 1)),
    ("chmod", call!(SYS_chmod, ROOT, 0)),
    ("chdir", call!(SYS_chdir, ROOT)),
    ("name_to_handle_at", call!(SYS_name_to_handle_at, libc::AT_FDCWD, ROOT, NONE, NONE, 0)),
    ("open_by_handle_at", call!(SYS_open_by_handle_at, 3, NONE, 0)),
    // Mounts and namespaces
    ("mount", call!(SYS_mount, NONE, ROOT, c"proc".as_ptr(), 0, NONE)),
    ("umount2", call!(SYS_umount2, ROOT, 0)),
    ("pivot_root", call!(SYS_pivot_root, ROOT, ROOT)),
    ("chroot", call!(SYS_chroot, ROOT)),
    ("fsopen", call!(SYS_fsopen, c"tmpfs".as_ptr(), 0)),
    ("unshare", call!(SYS_unshare, libc::CLONE_NEWUSER)),
    ("setns", call!(SYS_setns, 3, 0)),
    ("sethostname", call!(SYS_sethostname, ROOT, 1)),
    // Network
    ("socket of IPv4", call!(SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0)),
    ("socket of Unix", call!(SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0)),
    ("socket of netlink", call!(SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW, 0)),
    ("socket of vsock", call!(SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
    ("socket of packets", call!(SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, 0)),
    ("socketpair beyond Unix", call!(SYS_socketpair, libc::AF_TIPC, libc::SOCK_STREAM, 0, NONE)),
    ("bind", call!(SYS_bind, 3, NONE, 0)),
    ("connect", call!(SYS_connect, 3, NONE, 0)),
    ("listen", call!(SYS_listen, 3, 1)),
    ("accept", call!(SYS_accept, 3, NONE, NONE)),
    ("accept4 into a descriptor that a program would inherit", call!(SYS_accept4, 3, NONE, NONE, 0)),
    // Processes
    ("execve", call!(SYS_execve, c"/bin/sh".as_ptr(), NONE, NONE)),
    ("execveat", call!(SYS_execveat, 2, c"".as_ptr(), NONE, NONE, libc::AT_EMPTY_PATH)),
    ("fork", call!(SYS_fork)),
    ("vfork", call!(SYS_vfork)),
    ("clone of a process", call!(SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)),
    ("clone of a thread", call!(SYS_clone, 0x3d_0f00, 0, 0, 0, 0)),
    ("clone3", call!(SYS_clone3, NONE, 0)),
    ("ptrace", call!(SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0)),
    ("process_vm_readv", call!(SYS_process_vm_readv, 1, NONE, 0, NONE, 0, 0)),
    ("process_vm_writev", call!(SYS_process_vm_writev, 1, NONE, 0, NONE, 0, 0)),
    ("pidfd_open", call!(SYS_pidfd_open, 1, 0)),
    ("pidfd_getfd", call!(SYS_pidfd_getfd, 3, 0, 0)),
    ("kill", call!(SYS_kill, 2, libc::SIGKILL)),
    ("kill of all", call!(SYS_kill, -1, libc::SIGKILL)),
    ("tkill", call!(SYS_tkill, 2, libc::SIGKILL)),
    ("tgkill of another process", call!(SYS_tgkill, 2, 2, libc::SIGKILL)),
    ("rt_sigqueueinfo", call!(SYS_rt_sigqueueinfo, 2, 9, NONE)),
    // Privileges and limits
    ("setuid", call!(SYS_setuid, 0)),
    ("setresuid", call!(SYS_setresuid, 0, 0, 0)),
    ("setgid", call!(SYS_setgid, 0)),
    ("setgroups", call!(SYS_setgroups, 0, NONE)),
    ("capset", call!(SYS_capset, NONE, NONE)),
    ("prctl", call!(SYS_prctl, libc::PR_SET_DUMPABLE, 1, 0, 0, 0)),
    ("prctl of a name", call!(SYS_prctl, libc::PR_SET_NAME, NONE, 0, 0, 0)),
    ("prlimit64", call!(SYS_prlimit64, 0, libc::RLIMIT_CORE, NONE, NONE)),
    ("seccomp", call!(SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, NONE)),
    ("personality", call!(SYS_personality, 0)),
    ("iopl", call!(SYS_iopl, 3)),
    ("ioperm", call!(SYS_ioperm, 0, 1, 1)),
    ("arch_prctl", call!(SYS_arch_prctl, 0x1002, 0)),
    ("modify_ldt", call!(SYS_modify_ldt, 0, NONE, 0)),
    // Memory that can be executed
    ("mmap of code", call!(SYS_mmap, 0, 4096, RWX, PRIVATE, -1, 0)),
    ("mmap of a file's code", call!(SYS_mmap, 0, 4096, RX, libc::MAP_PRIVATE, 2, 0)),
    ("mprotect of code", call!(SYS_mprotect, 0, 4096, RX)),
    ("pkey_mprotect", call!(SYS_pkey_mprotect, 0, 4096, RX, -1)),
    ("shmat", call!(SYS_shmat, 0, NONE, 0)),
    ("remap_file_pages", call!(SYS_remap_file_pages, 0, 4096, 0, 0, 0)),
    // The kernel's larger surfaces
    ("bpf", call!(SYS_bpf, 0, NONE, 0)),
    ("perf_event_open", call!(SYS_perf_event_open, NONE, 0, -1, -1, 0)),
    ("userfaultfd", call!(SYS_userfaultfd, 0)),
    ("io_uring_setup", call!(SYS_io_uring_setup, 1, NONE)),
    ("io_uring_enter", call!(SYS_io_uring_enter, 3, 0, 0, 0, NONE, 0)),
    ("keyctl", call!(SYS_keyctl, 0, 0, 0, 0, 0)),
    ("add_key", call!(SYS_add_key, NONE, NONE, NONE, 0, 0)),
    ("request_key", call!(SYS_request_key, NONE, NONE, NONE, 0)),
    ("init_module", call!(SYS_init_module, NONE, 0, NONE)),
    ("finit_module", call!(SYS_finit_module, 3, NONE, 0)),
    ("kexec_load", call!(SYS_kexec_load, 0, 0, NONE, 0)),
    ("reboot", call!(SYS_reboot, 0, 0, 0, NONE)),
    ("splice", call!(SYS_splice, 3, NONE, 3, NONE, 1, 0)),
    ("vmsplice", call!(SYS_vmsplice, 3, NONE, 0, 0)),
    ("inotify_init1", call!(SYS_inotify_init1, 0)),
    ("fanotify_init", call!(SYS_fanotify_init, 0, 0)),
    ("mq_open", call!(SYS_mq_open, ROOT, 0, 0, NONE)),
    ("shmget", call!(SYS_shmget, 0, 4096, 0)),
    ("clock_settime", call!(SYS_clock_settime, 0, NONE)),
    ("acct", call!(SYS_acct, NONE)),
    ("swapon", call!(SYS_swapon, ROOT, 0)),
    // ioctl and fcntl, by number
    ("ioctl TIOCSTI", call!(SYS_ioctl, 2, libc::TIOCSTI, NONE)),
    ("ioctl TUNSETIFF", call!(SYS_ioctl, 2, libc::TUNSETIFF, NONE)),
    ("ioctl KVM_CREATE_VM", call!(SYS_ioctl, 2, KVM_CREATE_VM, 0)),
    ("fcntl F_SETFL", call!(SYS_fcntl, 2, libc::F_SETFL, 0)),
    // Other ways into the kernel
    ("a system call of x32", || {
        // SAFETY: the call has no arguments.
        unsafe { syscall(libc::SYS_getpid | X32) }
    }),
];

/// A vCPU's thread talks to KVM, and not to the outside.
const TO_VCPUS: &[(&str, Probe)] = &[
    ("memfd_create", call!(SYS_memfd_create, c"code".as_ptr(), 0)),
    ("accept4", call!(SYS_accept4, 3, NONE, NONE, libc::SOCK_CLOEXEC)),
    ("recvmsg", call!(SYS_recvmsg, 3, NONE, 0)),
    ("sendmsg", call!(SYS_sendmsg, 3, NONE, 0)),
    ("sendto", call!(SYS_sendto, 3, NONE, 0, 0, NONE, 0)),
    ("pread64", call!(SYS_pread64, 3, NONE, 0, 0)),
    ("pwrite64", call!(SYS_pwrite64, 3, NONE, 0, 0)),
    ("ftruncate", call!(SYS_ftruncate, 2, 0)),
    ("lseek", call!(SYS_lseek, 2, 0, 0)),
    ("socketpair", call!(SYS_socketpair, libc::AF_UNIX, libc::SOCK_STREAM, 0, NONE)),
    ("fcntl F_DUPFD_CLOEXEC", call!(SYS_fcntl, 2, libc::F_DUPFD_CLOEXEC, 0)),
    ("epoll_wait", call!(SYS_epoll_wait, 3, NONE, 1, 0)),
    ("eventfd2", call!(SYS_eventfd2, 0, 0)),
    ("ioctl FICLONE", call!(SYS_ioctl, 2, libc::FICLONE, 2)),
    ("ioctl UFFDIO_REGISTER", call!(SYS_ioctl, 2, UFFDIO_REGISTER, NONE)),
    ("ioctl KVM_SET_REGS", call!(SYS_ioctl, 2, KVM_SET_REGS, NONE)),
    ("ioctl KVM_SET_MSRS", call!(SYS_ioctl, 2, KVM_SET_MSRS, NONE)),
];

const TO_THE_LOOP: &[(&str, Probe)] = &[
    ("ioctl KVM_RUN", call!(SYS_ioctl, 2, KVM_RUN, 0)),
    ("ioctl KVM_TRANSLATE", call!(SYS_ioctl, 2, KVM_TRANSLATE, NONE)),
];

type List = (&'static str, Role, &'static [(&'static str, Probe)]);

const LISTS: [List; 6] = [
    ("loop", Role::Loop, EVERYWHERE),
    ("vcpu", Role::Vcpu, EVERYWHERE),
    ("vcpu only", Role::Vcpu, TO_VCPUS),
    ("pager", Role::Pager, EVERYWHERE),
    ("pager's watch", Role::PagerWatch, EVERYWHERE),
    ("loop only", Role::Loop, TO_THE_LOOP),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (list, _, probes) in LISTS {
        for (name, _) in probes {
            trials.push(trial(format!("{list}: {name} kills"), move || {
                let (status, said) = inmate::run(&format!("{list}/{name}"));
                assert_eq!(inmate::died_of(status), Some(libc::SIGSYS), "{status}: {said}");
                assert_eq!(said.trim(), ABOUT_TO);
            }));
        }
        trials.push(trial(format!("{list}: what is allowed does not kill"), move || {
            let (status, said) = inmate::run(&format!("{list}/nothing"));
            assert!(status.success() && said.contains(SURVIVED), "{status}: {said}");
        }));
        trials.push(trial(format!("{list}: a panic tells why and ends the process"), move || {
            let (status, said) = inmate::run(&format!("{list}/panic"));
            // The first process of a pid namespace does not die of its own SIGABRT; the C library goes on to what it does die of.
            let died = inmate::died_of(status);
            assert!(died == Some(libc::SIGSEGV) || died == Some(libc::SIGABRT), "{status}: {said}");
            assert!(said.contains("a panic on purpose"), "{said}");
        }));
    }
    trials
}

/// In the process: enters the jail, and does as it is told.
pub(crate) fn obey(order: &str, uid: u32) -> ! {
    let pagemap = jail::enter(uid).unwrap_or_else(|error| {
        eprintln!("{}", error.chain());
        exit(1);
    });
    if order == "serve" {
        let end = stasis_vmm::control_socket().and_then(|control| stasis_vmm::serve(control, pagemap));
        if let Err(error) = &end {
            eprintln!("{}", error.chain());
        }
        exit(end.is_err().into());
    }
    if order == "page" {
        let end = stasis_vmm::control_socket().and_then(stasis_vmm::serve_images);
        if let Err(error) = &end {
            eprintln!("{}", error.chain());
        }
        exit(end.is_err().into());
    }
    let (list, name) = order.split_once('/').unwrap();
    let (_, role, probes) = LISTS.into_iter().find(|(known, ..)| *known == list).unwrap();
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        std::process::abort();
    }));
    jail::confine(role).unwrap();
    match name {
        "panic" => panic!("a panic on purpose"),
        "nothing" => {
            drop(vec![1_u8; 8 << 20]);
            std::thread::yield_now();
        }
        name => {
            let (_, probe) = probes.iter().find(|(known, _)| *known == name).unwrap();
            eprintln!("{ABOUT_TO}");
            let returned = probe();
            eprintln!("it returned {returned}: {}", std::io::Error::last_os_error());
        }
    }
    eprintln!("{SURVIVED}");
    exit(0);
}

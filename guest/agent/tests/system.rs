//! The repair's effects on a real kernel, in namespaces of their own. Needs root; skipped, loudly, without.
//!
//! Not here: the wall clock, of which the machine has only one.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::gethostname,
};
use stasis_agent::{gate::Effects, hooks::Hooks, identity::Identity, ioctls, mount as mounts, repair::System};

#[test]
fn a_guest_is_set_up_and_repaired() {
    if Path::new("/dev/vdb").exists() {
        return eprintln!("SKIPPED: this machine has a /dev/vdb of its own");
    }
    // For this thread only.
    let all = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWNET;
    if let Err(errno) = unshare(all) {
        return eprintln!("SKIPPED: no namespaces: {errno}");
    }
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();

    mounts::all().unwrap();
    for (path, kind) in [("/run", "tmpfs"), ("/tmp", "tmpfs"), ("/dev/pts", "devpts")] {
        let lines = fs::read_to_string("/proc/thread-self/mounts").unwrap();
        let last = lines.lines().rfind(|line| line.split(' ').nth(1) == Some(path)).unwrap();
        assert_eq!(last.split(' ').nth(2), Some(kind), "{last}");
    }

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(TcpStream::connect(listener.local_addr().unwrap()).is_err(), "lo is up already");
    ioctls::loopback_up().unwrap();
    TcpStream::connect(listener.local_addr().unwrap()).unwrap();

    let shown = || fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let kernel_boot_id = shown();
    let identity = Identity::prepare().unwrap();
    assert_eq!(shown(), kernel_boot_id, "a boot is itself until it is woken");
    let template = fs::read_to_string("/etc/machine-id").unwrap();
    assert_eq!(template, kernel_boot_id.replace('-', ""));

    let hooks = Arc::new(Hooks::listen(Path::new("/run/stasis/hooks.sock")).unwrap());
    let mut system = System::new(identity, hooks).unwrap();
    system.rehearse().unwrap();
    assert_eq!(shown(), kernel_boot_id, "a rehearsal changes nothing");
    system.entropy(&[7; ioctls::SEED]).unwrap();
    let (id, nonce) = ("0123456789abcdef0123456789abcdef", "01234567-89ab-4def-8123-456789abcdef");
    assert_eq!(system.hostname("vm-7").unwrap(), "vm-7");
    assert_eq!(gethostname().unwrap(), "vm-7");
    assert_eq!(system.machine_id(id).unwrap(), id);
    assert_eq!(fs::read_to_string("/etc/machine-id").unwrap().trim_end(), id);
    assert_eq!(system.boot_nonce(nonce).unwrap(), nonce);
    assert_eq!(shown().trim_end(), nonce);
    assert_eq!(fs::read_to_string("/run/stasis/boot_nonce").unwrap().trim_end(), nonce);
    assert_eq!(system.runtimes(1).unwrap(), 0);
    system.publish(12).unwrap();
    assert_eq!(fs::read_to_string("/run/stasis/generation").unwrap(), "12\n");
    assert_eq!(system.kernel_boot_id().unwrap(), kernel_boot_id.trim_end(), "the kernel's own stays readable");
}

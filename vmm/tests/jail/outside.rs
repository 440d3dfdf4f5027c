//! What the host sees of a jailed process: nothing of the host is left in it.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::{
        fd::OwnedFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    sync::{Arc, Mutex},
    thread,
};

use libtest_mimic::Trial;
use nix::{
    net::if_::InterfaceFlags,
    sched::{CloneFlags, setns},
};
use stasis_vmm_api::{Reply, Request};

use crate::{
    guest,
    inmate::{self, Inmate},
    trial,
    vmm::{Vmm, machine},
};

const NAMESPACES: [&str; 5] = ["mnt", "pid", "net", "ipc", "uts"];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("nothing of the host is left in it", nothing_of_the_host_is_left),
        trial("a whole VM lives in it, every thread confined", a_whole_vm_lives_in_it),
        trial("as many vCPUs as there can be start and stop in it", many_vcpus),
        trial("killing it ends it, and so does the node's end", it_ends),
        trial("it is entered as the node starts it or not at all", no_half_jail),
    ]
}

/// A jailed process that serves, and its client.
pub(crate) fn jailed() -> (Vmm, Arc<Mutex<Option<Inmate>>>) {
    let shared = Arc::new(Mutex::new(None));
    let inmate = Arc::clone(&shared);
    let vmm = Vmm::over(move |control| {
        *inmate.lock().unwrap() = Some(Inmate::start("serve", control));
        Box::new(move || {
            let (status, said) = inmate.lock().unwrap().take().unwrap().end();
            assert!(status.success(), "{status}: {said}");
        })
    });
    (vmm, shared)
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim()
}

fn nothing_of_the_host_is_left() {
    let (mut vmm, inmate) = jailed();
    // It answers, so it is in the jail.
    assert!(vmm.refused(&Request::Console).contains("no VM yet"));
    let (mut other, other_inmate) = jailed();
    assert!(other.refused(&Request::Console).contains("no VM yet"));
    let guard = inmate.lock().unwrap();
    let inmate = guard.as_ref().unwrap();
    let status = inmate.proc("status");
    let uid = inmate.uid;
    for ids in ["Uid", "Gid"] {
        assert_eq!(field(&status, ids), format!("{uid}\t{uid}\t{uid}\t{uid}"), "{ids}");
    }
    assert_eq!(field(&status, "Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(&status, set), "0000000000000000", "{set}");
    }
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    assert_eq!(field(&status, "NSpid"), format!("{}\t1", inmate.child.id()), "it is alone in its pid namespace");
    assert_eq!(field(&status, "Umask"), "0077");

    // What the kernel lets nobody but root look into is not dumpable.
    let owner = fs::metadata(format!("/proc/{}/status", inmate.child.id())).unwrap().uid();
    assert_eq!(owner, 0);

    // Files: a root without any, and no other mount.
    let root = format!("/proc/{}/root", inmate.child.id());
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    let mounts = inmate.proc("mountinfo");
    assert!(mounts.lines().count() == 1 && mounts.contains(" / / ro,nosuid,nodev,noexec"), "{mounts}");
    assert_eq!(fs::read_link(format!("/proc/{}/cwd", inmate.child.id())).unwrap().as_os_str(), "/");
    assert!(File::create(format!("{root}/file")).is_err());

    // Namespaces: none of the host's, and none of another VM's but the empty network.
    let other_inmate = other_inmate.lock().unwrap();
    for name in NAMESPACES {
        let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
        let (host, own) = (of(std::process::id()), of(inmate.child.id()));
        assert_ne!(host, own, "{name}");
        let shared = own == of(other_inmate.as_ref().unwrap().child.id());
        assert_eq!(shared, name == "net", "{name}");
    }
    drop(other_inmate);
    other.end();
    let net = File::open(format!("/proc/{}/ns/net", inmate.child.id())).unwrap();
    let interfaces = thread::spawn(move || {
        setns(net, CloneFlags::CLONE_NEWNET).unwrap();
        let all = nix::ifaddrs::getifaddrs().unwrap();
        all.map(|one| (one.interface_name, one.flags.contains(InterfaceFlags::IFF_UP))).collect::<Vec<_>>()
    });
    assert_eq!(interfaces.join().unwrap(), [("lo".to_owned(), false)]);

    let limits = inmate.proc("limits");
    for (limit, value) in [("Max core file size", "0"), ("Max processes", "64"), ("Max locked memory", "0")] {
        let line = limits.lines().find_map(|line| line.strip_prefix(limit)).unwrap();
        assert!(line.split_whitespace().take(2).all(|word| word == value), "{limit}: {line}");
    }
    // Descriptors: standard ones, control socket, epoll, eventfd; its own page tables.
    let open: BTreeSet<_> = fs::read_dir(format!("/proc/{}/fd", inmate.child.id()))
        .unwrap()
        .map(|entry| fs::read_link(entry.unwrap().path()).unwrap().to_string_lossy().into_owned())
        .map(|target| target.split(':').next().unwrap().to_owned())
        .collect();
    let pagemap = format!("/proc/{}/pagemap", inmate.child.id());
    let expected = ["anon_inode", "pipe", "socket", &pagemap].map(str::to_owned);
    assert_eq!(open, BTreeSet::from(expected));
    drop(guard);
    vmm.end();
}

fn a_whole_vm_lives_in_it() {
    let Ok(kvm) = File::options().read(true).write(true).open("/dev/kvm") else {
        eprintln!("SKIPPED: no /dev/kvm");
        return;
    };
    let (mut vmm, inmate) = jailed();
    vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 2).unwrap();
    vmm.done(&Request::Resume);
    vmm.console_until(|tail| guest::counted(tail).len() > 3);
    {
        let guard = inmate.lock().unwrap();
        let inmate = guard.as_ref().unwrap();
        let threads = fs::read_dir(format!("/proc/{}/task", inmate.child.id())).unwrap();
        let mut names = Vec::new();
        for thread in threads {
            let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
            assert_eq!((field(&status, "Seccomp"), field(&status, "NoNewPrivs")), ("2", "1"), "{status}");
            assert_eq!(field(&status, "CapEff"), "0000000000000000");
            let name = field(&status, "Name").to_owned();
            if name.starts_with("vcpu") || field(&status, "Pid") == inmate.child.id().to_string() {
                // Each has its own and no other.
                assert_eq!(field(&status, "Seccomp_filters"), "1", "{name}");
            }
            names.push(name);
        }
        assert!(names.contains(&"vcpu0".to_owned()) && names.contains(&"vcpu1".to_owned()), "{names:?}");
    }
    vmm.done(&Request::Pause);
    let (image, state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let reply = vmm.ask(&Request::Snapshot, vec![image.try_clone().unwrap(), state.try_clone().unwrap()]);
    assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
    vmm.end();

    let (mut vmm, _inmate) = jailed();
    std::io::Seek::rewind(&mut &state).unwrap();
    assert!(matches!(vmm.restore(machine(2), vec![kvm, image, state]), Reply::Built(_)));
    vmm.done(&Request::Resume);
    vmm.console_until(|tail| guest::counted(tail).len() > 2);
    let (stream, mut far) = UnixStream::pair().unwrap();
    assert_eq!(vmm.ask(&Request::Connect { port: 5 }, vec![File::from(OwnedFd::from(stream))]), Reply::Done);
    assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0, "a guest without a driver refuses");
    vmm.end();
}

/// Each thread's first allocation is the C library's opportunity to look around.
fn many_vcpus() {
    let Ok(kvm) = File::options().read(true).write(true).open("/dev/kvm") else {
        eprintln!("SKIPPED: no /dev/kvm");
        return;
    };
    let (mut vmm, _inmate) = jailed();
    vmm.boot(kvm, &guest::count(), 32).unwrap();
    for _ in 0..3 {
        vmm.done(&Request::Resume);
        vmm.done(&Request::Pause);
    }
    let reply = vmm.ask(&Request::Snapshot, vec![tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()]);
    assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
    vmm.end();
}

fn it_ends() {
    let (vmm, inmate) = jailed();
    let mut inmate = inmate.lock().unwrap().take().unwrap();
    inmate.child.kill().unwrap();
    assert_eq!(inmate::died_of(inmate.child.wait().unwrap()), Some(libc::SIGKILL));
    drop(vmm);

    let (vmm, _inmate) = jailed();
    vmm.end();
}

/// Without a pid namespace, without empty namespaces, with full ones.
fn no_half_jail() {
    let as_uid = |uid| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([inmate::WORD, "loop/nothing", uid]);
        command
    };
    let program = || as_uid("300000");
    let refused = |output: std::process::Output, reason: &str| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(reason), "{}: {said}", output.status);
    };
    refused(program().output().unwrap(), "not born in a pid namespace");
    let in_namespace = |mut command: std::process::Command| {
        thread::spawn(move || {
            let spawn = || command.stderr(std::process::Stdio::piped()).spawn();
            stasis_vmm_api::birth::PidNamespaces::new().unwrap().with_new(spawn).unwrap().wait_with_output().unwrap()
        })
        .join()
        .unwrap()
    };
    refused(in_namespace(program()), "passed no empty namespaces");
    refused(in_namespace(as_uid("0")), "must be 1000 or more");

    use stasis_vmm_api::birth::Nothing;
    let of_the_host = |name: &str| OwnedFd::from(File::open(format!("/proc/self/ns/{name}")).unwrap());
    let with = |mounts: OwnedFd, net: OwnedFd| {
        let mut command = program();
        command.stdout(Nothing { mounts, net }.hand_over().unwrap());
        in_namespace(command)
    };
    refused(with(of_the_host("mnt"), of_the_host("net")), "not empty");
    refused(with(of_the_host("net"), of_the_host("mnt")), "setns into the empty mount namespace");
}

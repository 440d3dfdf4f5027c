//! A VM that is kept outlives whoever started it, as it is, and whoever comes to its socket has it.

use std::{
    fs::{self, File},
    io::IoSliceMut,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::Path,
};

use libtest_mimic::Trial;
use nix::{
    cmsg_space,
    sys::{
        socket::{
            AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect, listen,
            recvmsg, setsockopt, socket, sockopt::ReceiveTimeout,
        },
        time::{TimeVal, TimeValLike},
    },
};
use stasis_vmm_api::{Event, FromVmm, Packets, Reply, Request, Stop};

use crate::{
    guest, inmate,
    outside::jailed,
    trial,
    vmm::{Ended, Vmm, machine},
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("a kept VM goes on when its owner leaves, and the next one has it, with its files", outlives),
        trial("an owner who leaves during a live snapshot is not in the way of the next one's", half_done),
        trial("the next owner hears that the guest of a kept VM has stopped", stopped_meanwhile),
        trial("only a VM that is there can be kept, once, and only a kept one adopted", refusals),
    ]
}

fn kvm() -> Option<File> {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| eprintln!("SKIPPED: /dev/kvm: {error}")).ok()
}

fn packets(flags: SockFlag) -> OwnedFd {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC | flags, None).unwrap()
}

fn listener(at: &Path) -> File {
    let socket = packets(SockFlag::SOCK_NONBLOCK);
    bind(socket.as_raw_fd(), &UnixAddr::new(at).unwrap()).unwrap();
    listen(&socket, Backlog::new(1).unwrap()).unwrap();
    socket.into()
}

/// Comes to the socket and asks for the VM: whether it runs, and what came with it.
fn adopt(at: &Path, ended: Ended) -> (Vmm, bool, Vec<File>) {
    let socket = packets(SockFlag::empty());
    setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(60)).unwrap();
    connect(socket.as_raw_fd(), &UnixAddr::new(at).unwrap()).unwrap();
    let ours = socket.try_clone().unwrap();
    Packets::new(socket).send(&Request::Adopt, &[]).unwrap();
    let (mut packet, mut space) = (vec![0; 4096], cmsg_space!([RawFd; 4]));
    let mut parts = [IoSliceMut::new(&mut packet)];
    let received = recvmsg::<()>(ours.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty()).unwrap();
    let mut files = Vec::new();
    for message in received.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(descriptors) = message {
            // SAFETY: the kernel has just installed these descriptors for this message; nothing else owns them.
            files.extend(descriptors.into_iter().map(|fd| unsafe { File::from_raw_fd(fd) }));
        }
    }
    let length = received.bytes;
    match serde_json::from_slice(&packet[..length]).unwrap() {
        FromVmm::Reply(Reply::Adopted { running }) => (Vmm::at(ours, ended), running, files),
        other => panic!("{other:?}"),
    }
}

fn outlives() {
    let Some(kvm) = kvm() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("socket");
    let (mut vmm, inmate) = jailed();
    vmm.boot(kvm, &guest::count(), 1).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(b"its disk", 0).unwrap();
    assert_eq!(vmm.ask(&Request::Keep, vec![listener(&at), file]), Reply::Done);
    vmm.done(&Request::Resume);
    let so_far = |tail: &str| guest::counted(tail).last().copied().unwrap_or_default();
    let before = so_far(&vmm.console_until(|tail| so_far(tail) > 0));

    let (mut vmm, running, files) = adopt(&at, vmm.leave());
    assert!(running, "it goes on");
    let mut content = [0; 8];
    files[0].read_exact_at(&mut content, 0).unwrap();
    assert_eq!((&content, files.len()), (b"its disk", 1));
    vmm.console_until(|tail| so_far(tail) > before);
    vmm.done(&Request::Pause);

    let (mut vmm, running, files) = adopt(&at, vmm.leave());
    assert!(!running, "it is as it was left");
    assert_eq!(files.len(), 1);
    let stands = vmm.console();
    let (image, state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let reply = vmm.ask(&Request::Snapshot, vec![image, state]);
    assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
    assert_eq!(vmm.console(), stands);
    vmm.done(&Request::Resume);
    vmm.console_until(|tail| so_far(tail) > so_far(&stands));

    // Nobody but its end ends it.
    let mut inmate = inmate.lock().unwrap().take().unwrap();
    drop(vmm.leave());
    inmate.child.kill().unwrap();
    assert_eq!(inmate::died_of(inmate.child.wait().unwrap()), Some(libc::SIGKILL));
}

fn half_done() {
    let Some(kvm) = kvm() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("socket");
    let empty = || tempfile::tempfile().unwrap();
    let (image, state) = (empty(), empty());
    let (mut template, _inmate) = jailed();
    template.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap();
    let reply = template.ask(&Request::Snapshot, vec![image.try_clone().unwrap(), state.try_clone().unwrap()]);
    assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
    template.end();
    std::io::Seek::rewind(&mut &state).unwrap();

    let (mut vmm, inmate) = jailed();
    let reply = vmm.restore(machine(1), vec![kvm, image.try_clone().unwrap(), state]);
    assert!(matches!(reply, Reply::Built(_)), "{reply:?}");
    assert_eq!(vmm.ask(&Request::Keep, vec![listener(&at)]), Reply::Done);
    vmm.done(&Request::Resume);
    let mut bytes = vec![0; usize::try_from(image.metadata().unwrap().len()).unwrap()];
    image.read_exact_at(&mut bytes, 0).unwrap();
    let begin = |vmm: &mut Vmm| {
        let clone = empty();
        clone.write_all_at(&bytes, 0).unwrap();
        vmm.ask(&Request::LiveSnapshot, vec![clone, empty()])
    };
    match begin(&mut vmm) {
        Reply::Done => {}
        other => return eprintln!("SKIPPED: {other:?}"),
    }
    let (mut vmm, running, _) = adopt(&at, vmm.leave());
    assert!(running);
    assert_eq!(begin(&mut vmm), Reply::Done);
    let event = vmm.event();
    assert!(matches!(event, Event::LiveSnapshot(_)), "{event:?}");
    let before = guest::counted(&vmm.console()).len();
    vmm.console_until(|tail| guest::counted(tail).len() > before);
    inmate.lock().unwrap().take().unwrap().child.kill().unwrap();
}

fn stopped_meanwhile() {
    let Some(kvm) = kvm() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("socket");
    let (mut vmm, inmate) = jailed();
    vmm.boot(kvm, &guest::say_ok(), 1).unwrap();
    assert_eq!(vmm.ask(&Request::Keep, vec![listener(&at)]), Reply::Done);
    vmm.done(&Request::Resume);
    let (mut vmm, ..) = adopt(&at, vmm.leave());
    let Event::Stopped { why, console } = vmm.event() else { panic!("another event") };
    assert_eq!((why, console.as_str()), (Stop::Shutdown, "ok"));
    let (mut vmm, running, _) = adopt(&at, vmm.leave());
    assert!(!running);
    assert!(matches!(vmm.event(), Event::Stopped { .. }), "every owner hears it");
    inmate.lock().unwrap().take().unwrap().child.kill().unwrap();
}

fn refusals() {
    let Some(kvm) = kvm() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| listener(&folder.path().join(name));
    let (mut vmm, inmate) = jailed();
    let refused = |reply: Reply, reason: &str| match reply {
        Reply::Failed { reason: said } => assert!(said.contains(reason), "{said}"),
        other => panic!("{other:?}"),
    };
    refused(vmm.ask(&Request::Keep, vec![at("early")]), "no VM yet");
    vmm.boot(kvm, &guest::count(), 1).unwrap();
    refused(vmm.ask(&Request::Keep, vec![]), "too few files");
    refused(vmm.ask(&Request::Adopt, vec![]), "not kept");
    assert_eq!(vmm.ask(&Request::Keep, vec![at("first")]), Reply::Done);
    refused(vmm.ask(&Request::Keep, vec![at("second")]), "kept already");
    // Whoever else comes waits for the owner to leave.
    let waiting = packets(SockFlag::empty());
    connect(waiting.as_raw_fd(), &UnixAddr::new(&folder.path().join("first")).unwrap()).unwrap();
    vmm.console();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    inmate.lock().unwrap().take().unwrap().child.kill().unwrap();
}

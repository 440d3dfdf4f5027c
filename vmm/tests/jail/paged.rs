//! VMs whose memory a pager fills: each VMM process and the pager jailed, as the node has them.

use std::{
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use libtest_mimic::Trial;
use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, sendmsg, setsockopt, socketpair,
        sockopt::ReceiveTimeout,
    },
    time::{TimeVal, TimeValLike},
};
use stasis_vmm_api::{
    MachineSpec, Reply, Request,
    pager::{FromPager, ImageFormat, PagerReply, PagerReport, PagerRequest},
};

use crate::{
    guest,
    inmate::Inmate,
    outside::jailed,
    trial,
    vmm::{Vmm, machine},
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "a paged VM reads no page that is zero and was not, and the working set spares it faults",
            reads_its_image,
        ),
        trial("a pager that is killed ends its running VMs at once", || ends_with_its_pager(true)),
        trial("a pager that is killed ends its paused VMs at once", || ends_with_its_pager(false)),
        trial("a VM that needs a damaged frame ends, and its neighbour does not", a_damaged_frame_ends_it),
        trial("what a paged VM cannot do is refused", refusals),
    ]
}

/// `/dev/kvm` and `/dev/userfaultfd`, or a word that they are not there.
fn devices() -> Option<[File; 2]> {
    let open = |path: &str| {
        let file = File::options().read(true).write(true).open(path);
        file.inspect_err(|error| eprintln!("SKIPPED: {path}: {error}")).ok()
    };
    Some([open("/dev/kvm")?, open("/dev/userfaultfd")?])
}

fn pair() -> (OwnedFd, OwnedFd) {
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    setsockopt(&pair.0, ReceiveTimeout, &TimeVal::seconds(60)).unwrap();
    pair
}

/// Writes to 1024 pages from 3 MiB on, then looks at them for ever: "k" for each time that all were as written, "z" for a page that is not.
fn watchful() -> Vec<u8> {
    guest::elf(&[
        0xbe, 0x00, 0x00, 0x30, 0x00, // mov esi, 3 MiB
        0xb9, 0x00, 0x04, 0x00, 0x00, // mov ecx, 1024
        0x48, 0x89, 0x36, // 1: mov [rsi], rsi
        0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, // add esi, 4096
        0xff, 0xc9, // dec ecx
        0x75, 0xf3, // jnz 1b
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xbe, 0x00, 0x00, 0x30, 0x00, // 2: mov esi, 3 MiB
        0xb9, 0x00, 0x04, 0x00, 0x00, // mov ecx, 1024
        0x48, 0x39, 0x36, // 3: cmp [rsi], rsi
        0x75, 0x0f, // jne 4f
        0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, // add esi, 4096
        0xff, 0xc9, // dec ecx
        0x75, 0xf1, // jnz 3b
        0xb0, b'k', 0xee, // mov al, 'k'; out dx, al
        0xeb, 0xe2, // jmp 2b
        0xb0, b'z', 0xee, // 4: mov al, 'z'; out dx, al
        0xeb, 0xdd, // jmp 2b
    ])
}

struct Template {
    frames: File,
    state: Vec<u8>,
    working_set: File,
}

impl Template {
    fn build(kvm: &File) -> Self {
        let (mut vmm, _inmate) = jailed();
        vmm.boot(kvm.try_clone().unwrap(), &watchful(), 1).unwrap();
        vmm.done(&Request::Resume);
        vmm.console_until(|tail| tail.contains('k'));
        vmm.done(&Request::Pause);
        let [image, state, frames, working_set] = [(); 4].map(|()| tempfile::tempfile().unwrap());
        let reply = vmm.ask(&Request::Snapshot, vec![image.try_clone().unwrap(), state.try_clone().unwrap()]);
        assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
        vmm.end();
        stasis_cow::write_frames(&image, &frames).unwrap();
        let mut bytes = vec![0; usize::try_from(state.metadata().unwrap().len()).unwrap()];
        std::os::unix::fs::FileExt::read_exact_at(&state, &mut bytes, 0).unwrap();
        Self { frames, state: bytes, working_set }
    }

    fn state(&self) -> File {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &self.state, 0).unwrap();
        file
    }
}

fn paged() -> MachineSpec {
    MachineSpec { paged: true, ..machine(1) }
}

struct Pager {
    process: Option<Inmate>,
    control: OwnedFd,
    memory: File,
}

impl Pager {
    fn start(template: &Template) -> Self {
        let (control, theirs) = pair();
        let process = Some(Inmate::start("page", theirs));
        let memory = File::from(memfd_create(c"pager", MFdFlags::MFD_CLOEXEC).unwrap());
        memory.set_len(u64::from(machine(1).memory_mib) << 20).unwrap();
        let pager = Self { process, control, memory };
        let files = [template.frames.as_raw_fd(), pager.memory.as_raw_fd(), template.working_set.as_raw_fd()];
        assert_eq!(pager.ask(PagerRequest::Open { format: ImageFormat::Frames }, &files), PagerReply::Done);
        pager
    }

    fn ask(&self, request: PagerRequest, files: &[i32]) -> PagerReply {
        let packet = serde_json::to_vec(&request).unwrap();
        let rights = [ControlMessage::ScmRights(files)];
        let rights = if files.is_empty() { &[][..] } else { &rights };
        let parts = [std::io::IoSlice::new(&packet)];
        sendmsg::<()>(self.control.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None).unwrap();
        match self.hear() {
            FromPager::Reply(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    fn hear(&self) -> FromPager {
        let mut packet = vec![0; stasis_vmm_api::MAX_PACKET];
        let length = recv(self.control.as_raw_fd(), &mut packet, MsgFlags::empty()).unwrap();
        serde_json::from_slice(&packet[..length]).unwrap()
    }

    fn settled(&self, vm: u64) -> PagerReport {
        match self.ask(PagerRequest::Settled { vm }, &[]) {
            PagerReply::Settled(report) => report,
            other => panic!("{other:?}"),
        }
    }

    fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.child.kill().unwrap();
        process.child.wait().unwrap();
    }

    /// The files of a restore: the memory as a VM gets it, only to be read.
    fn files(&self, vm: u64) -> Vec<File> {
        let (ours, theirs) = pair();
        assert_eq!(self.ask(PagerRequest::Attach { vm }, &[ours.as_raw_fd()]), PagerReply::Done);
        let memory = File::open(format!("/proc/self/fd/{}", self.memory.as_raw_fd())).unwrap();
        // As an async runtime has it.
        let theirs = UnixStream::from(theirs);
        theirs.set_nonblocking(true).unwrap();
        vec![memory, OwnedFd::from(theirs).into()]
    }
}

type Jailed = (Vmm, std::sync::Arc<std::sync::Mutex<Option<Inmate>>>);

/// A paused VM that was restored from the template.
fn restored([kvm, userfaultfd]: &[File; 2], template: &Template, pager: &Pager, vm: u64) -> Jailed {
    let (mut vmm, inmate) = jailed();
    let files = vec![kvm.try_clone().unwrap(), userfaultfd.try_clone().unwrap(), template.state()];
    assert_eq!(vmm.ask(&Request::Prepare { machine: paged(), restores: true }, files), Reply::Done);
    let reply = vmm.ask(&Request::Restore, pager.files(vm));
    assert!(matches!(reply, Reply::Built(_)), "{reply:?}");
    (vmm, inmate)
}

/// As many whole passes as the console's tail tells of, all of them good.
fn passes(vmm: &mut Vmm, most: usize) {
    let tail = vmm.console_until(|tail| tail.contains('z') || tail.matches('k').count() >= most);
    assert!(!tail.contains('z'), "{tail}");
}

fn reads_its_image() {
    let Some(devices) = devices() else { return };
    let template = Template::build(&devices[0]);
    let mut reports = Vec::new();
    let mut pager = Pager::start(&template);
    for vm in 0..3 {
        if vm == 2 {
            // Another one, which has nothing in memory yet and knows the set by its file.
            pager = Pager::start(&template);
        }
        let (mut vmm, _inmate) = restored(&devices, &template, &pager, vm);
        if template.working_set.metadata().unwrap().len() > 0 {
            // The set is in before the guest runs, so that the count of faults depends on no race.
            let start = std::time::Instant::now();
            while pager.settled(vm).ahead < 64 {
                assert!(start.elapsed().as_secs() < 60, "{:?}", pager.settled(vm));
            }
        }
        vmm.done(&Request::Resume);
        passes(&mut vmm, 20);
        reports.push(pager.settled(vm));
        for _ in 0..2 {
            let Reply::Rewound(report) = vmm.ask(&Request::Rewind, vec![]) else { panic!("no rewind") };
            assert!(report.dirty_bytes < 1 << 20, "what it has only read is not its own: {report:?}");
            vmm.done(&Request::Resume);
            passes(&mut vmm, 5);
        }
        vmm.end();
    }
    eprintln!("{reports:?}");
    let [first, second, third] = &reports[..] else { panic!() };
    assert!(first.faults >= 64 && second.faults >= 64, "4 MiB are 64 frames: {reports:?}");
    assert!(third.helped && third.faults < first.faults / 8, "{reports:?}");
}

fn ends_with_its_pager(running: bool) {
    let Some(devices) = devices() else { return };
    let template = Template::build(&devices[0]);
    let mut pager = Pager::start(&template);
    let mut vms: Vec<_> = (0..3).map(|vm| restored(&devices, &template, &pager, vm)).collect();
    if running {
        for (vmm, _) in &mut vms {
            vmm.done(&Request::Resume);
            passes(vmm, 1);
        }
    }
    pager.kill();
    for (_, inmate) in vms {
        ended(&inmate);
    }
    // The next pager fills the same image.
    let pager = Pager::start(&template);
    let (mut vmm, _inmate) = restored(&devices, &template, &pager, 1);
    vmm.done(&Request::Resume);
    passes(&mut vmm, 3);
    vmm.end();
}

/// The process has ended by itself, for want of a pager.
fn ended(inmate: &std::sync::Mutex<Option<Inmate>>) {
    let inmate = inmate.lock().unwrap().take().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let pid = inmate.child.id();
    std::thread::spawn(move || sender.send(inmate.end()));
    match receiver.recv_timeout(std::time::Duration::from_secs(60)) {
        Ok((status, said)) => assert_eq!(status.code(), Some(1), "{status}: {said}"),
        Err(_) => panic!("process {pid} lives on without its pager"),
    }
}

fn a_damaged_frame_ends_it() {
    let Some(devices) = devices() else { return };
    let template = Template::build(&devices[0]);
    let pager = Pager::start(&template);
    let (mut whole, _inmate) = restored(&devices, &template, &pager, 1);
    whole.done(&Request::Resume);
    passes(&mut whole, 2);
    whole.done(&Request::Pause);

    let pager_of_the_damaged = Pager::start(&template);
    let (vmm, inmate) = restored(&devices, &template, &pager_of_the_damaged, 2);
    let length = usize::try_from(template.frames.metadata().unwrap().len()).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&template.frames, &vec![0; length], 0).unwrap();
    vmm.send(&Request::Resume, vec![]);
    match pager_of_the_damaged.hear() {
        FromPager::Lost { vm: 2, reason } => assert!(reason.contains("is damaged"), "{reason}"),
        other => panic!("{other:?}"),
    }
    ended(&inmate);
    // What the first pager has read is checked already, and stays.
    whole.done(&Request::Resume);
    passes(&mut whole, 4);
    whole.end();
}

fn refusals() {
    let Some(devices) = devices() else { return };
    let [kvm, userfaultfd] = &devices;
    let template = Template::build(kvm);
    let pager = Pager::start(&template);
    let prepare = |machine: MachineSpec, files: Vec<File>| {
        let (mut vmm, _inmate) = jailed();
        let reply = vmm.ask(&Request::Prepare { machine, restores: true }, files);
        (vmm, reply)
    };
    let reason = |reply| match reply {
        Reply::Failed { reason } => reason,
        other => panic!("{other:?}"),
    };
    let both = || vec![kvm.try_clone().unwrap(), userfaultfd.try_clone().unwrap(), template.state()];
    let (_, reply) = prepare(paged(), vec![kvm.try_clone().unwrap(), template.state()]);
    assert!(reason(reply).contains("needs /dev/userfaultfd"));
    let (_, reply) = prepare(MachineSpec { balloon: true, ..paged() }, both());
    assert!(reason(reply).contains("has no balloon"));
    let (mut vmm, _) = prepare(paged(), both());
    let mut files = pager.files(1);
    files.truncate(1);
    assert!(reason(vmm.ask(&Request::Restore, files)).contains("needs its pager's socket"));

    let (mut vmm, _inmate) = restored(&devices, &template, &pager, 2);
    let files = vec![tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
    assert!(reason(vmm.ask(&Request::Snapshot, files)).contains("cannot be snapshotted"));
    vmm.end();
}

//! A pager in a thread, and a mapping of this process that it fills: the memory of a VM without the VM.

use std::{
    fs::File,
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, setsockopt, socketpair,
        sockopt::ReceiveTimeout,
    },
    time::{TimeVal, TimeValLike},
};
use stasis_cow::{FRAME, write_frames};
use stasis_vmm_api::pager::{FromPager, Handover, ImageFormat, PagerReply, PagerReport, PagerRequest};
use vm_memory::{Bytes, GuestAddress};

use super::serve::Pager;
use crate::{
    control,
    memory::{GuestMemory, Pagemap, Room},
    uffd::Faults,
};

/// Longest time for anything here.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u32 = 4;
const FRAMES: u32 = MIB * 16;
const PAGE: usize = 4096;

/// `/dev/userfaultfd`, or a word that there is none.
fn device() -> Option<File> {
    let file = File::options().read(true).write(true).open("/dev/userfaultfd");
    if let Err(error) = &file {
        eprintln!("SKIPPED: /dev/userfaultfd: {error}");
    }
    file.ok()
}

macro_rules! device_or_return {
    () => {
        match device() {
            Some(device) => device,
            None => return,
        }
    };
}

/// Every second frame has content, different in every page.
fn image() -> (File, Vec<u8>) {
    let page = |page: usize| {
        let value = if (page / 16).is_multiple_of(2) { 1 + u8::try_from(page % 255).unwrap() } else { 0 };
        [value; PAGE]
    };
    let bytes: Vec<u8> = (0..(MIB as usize) << 20 >> 12).flat_map(page).collect();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    (file, bytes)
}

fn framed(image: &File) -> File {
    let frames = tempfile::tempfile().unwrap();
    write_frames(image, &frames).unwrap();
    frames
}

fn pair() -> (OwnedFd, OwnedFd) {
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    setsockopt(&pair.0, ReceiveTimeout, &TimeVal::seconds(60)).unwrap();
    pair
}

/// The node's side of a pager.
struct Node {
    control: OwnedFd,
    memory: File,
    set: File,
}

impl Node {
    fn start(format: ImageFormat, image: &File, set: &File) -> Self {
        let (control, theirs) = pair();
        thread::spawn(move || Pager::new(theirs).unwrap().run());
        let memory = File::from(memfd_create(c"pager", MFdFlags::MFD_CLOEXEC).unwrap());
        memory.set_len(u64::from(MIB) << 20).unwrap();
        let node = Self { control, memory, set: set.try_clone().unwrap() };
        let files = [image.as_fd(), node.memory.as_fd(), node.set.as_fd()].map(|fd| fd.as_raw_fd());
        assert_eq!(node.ask(PagerRequest::Open { format }, &files), PagerReply::Done);
        node
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
        control::receive(self.control.as_fd(), &mut [0; 1024]).unwrap().expect("the pager lives").request
    }

    fn settled(&self, vm: u64) -> PagerReport {
        match self.ask(PagerRequest::Settled { vm }, &[]) {
            PagerReply::Settled(report) => report,
            other => panic!("{other:?}"),
        }
    }

    /// Memory that the pager fills.
    fn vm(&self, device: &File, vm: u64) -> Vm {
        let (socket, theirs) = pair();
        assert_eq!(self.ask(PagerRequest::Attach { vm }, &[theirs.as_raw_fd()]), PagerReply::Done);
        drop(theirs);
        let room = Room::reserve(MIB).unwrap();
        let memory = room.map_private(&self.memory).unwrap();
        let faults = Faults::from_device(device).unwrap();
        faults.register(&room.addresses()).unwrap();
        let handover = Handover { address: room.addresses().start, bytes: u64::from(MIB) << 20 };
        control::send(socket.as_fd(), &handover, Some(faults.as_fd())).unwrap();
        Vm { socket, memory, _faults: faults, room }
    }
}

struct Vm {
    socket: OwnedFd,
    memory: GuestMemory,
    _faults: Faults,
    room: Room,
}

impl Vm {
    /// Bytes of memory, read in a thread of its own: nothing else here may wait for the pager.
    fn read(&self, range: Range<usize>) -> Vec<u8> {
        self.try_read(range).expect("the pager answers")
    }

    fn try_read(&self, range: Range<usize>) -> Option<Vec<u8>> {
        let (memory, (sender, receiver)) = (self.memory.clone(), mpsc::channel());
        thread::spawn(move || {
            let mut bytes = vec![0; range.len()];
            memory.read_slice(&mut bytes, GuestAddress(range.start as u64)).unwrap();
            let _ = sender.send(bytes);
        });
        receiver.recv_timeout(LIMIT).ok()
    }

    fn frame(&self, frame: u32) -> Vec<u8> {
        let start = frame as usize * FRAME;
        self.read(start..start + 1)
    }
}

type Made = fn(&File) -> File;

fn formats() -> [(ImageFormat, Made); 2] {
    [(ImageFormat::Raw, |image| image.try_clone().unwrap()), (ImageFormat::Frames, framed)]
}

#[test]
fn vms_read_the_image_and_what_one_writes_is_its_own() {
    let device = device_or_return!();
    let (image, bytes) = image();
    for (format, made) in formats() {
        let node = Node::start(format, &made(&image), &tempfile::tempfile().unwrap());
        let vms = [node.vm(&device, 1), node.vm(&device, 2)];
        vms[0].memory.write_slice(&[0xee; 3 * PAGE], GuestAddress(5 * PAGE as u64)).unwrap();
        let expected = [&bytes[..5 * PAGE], &[0xee; 3 * PAGE], &bytes[8 * PAGE..]].concat();
        assert!(vms[0].read(0..bytes.len()) == expected);
        assert!(vms[1].read(0..bytes.len()) == bytes);

        let private = Pagemap::of_this_process().unwrap().private_pages(vms[0].room.addresses()).unwrap();
        let start = vms[0].room.addresses().start;
        let written = start + 5 * PAGE as u64..start + 8 * PAGE as u64;
        assert_eq!(private, [written], "what it has not written is shared with all");
        vms[0].room.drop_private(&private).unwrap();
        assert!(vms[0].read(0..bytes.len()) == bytes, "dropped pages are filled again");
    }
}

#[test]
fn the_working_set_of_two_lives_is_put_in_ahead_of_the_third_ones_faults() {
    let device = device_or_return!();
    let (image, bytes) = image();
    let (frames, set) = (framed(&image), tempfile::tempfile().unwrap());
    let touch = |node: &Node, number: u64, frames: &[u32]| {
        let vm = node.vm(&device, number);
        for frame in frames {
            assert_eq!(vm.frame(*frame), [bytes[*frame as usize * FRAME]]);
        }
        (node.settled(number), vm)
    };
    {
        let node = Node::start(ImageFormat::Frames, &frames, &set);
        let (report, _vm) = touch(&node, 1, &[40, 2, 6, 7, 12]);
        assert_eq!((report.faults, report.ahead, report.helped), (5, 0, false));
        let (report, _vm) = touch(&node, 2, &[2, 40, 6, 12, 8]);
        assert_eq!((report.faults, report.ahead, report.helped), (5, 0, false));
    }
    // Another pager, which has nothing in memory and knows the set by the file alone.
    let node = Node::start(ImageFormat::Frames, &frames, &set);
    let vm = node.vm(&device, 1);
    let start = std::time::Instant::now();
    let report = loop {
        // Nothing else tells when the set is in; settling again only reads the counters.
        let report = node.settled(1);
        if report.ahead == 4 {
            break report;
        }
        assert!(start.elapsed() < LIMIT, "{report:?}");
    };
    assert_eq!((report.faults, report.helped), (0, true));
    for frame in [40, 2, 6, 12] {
        assert_eq!(vm.frame(frame), [bytes[frame as usize * FRAME]]);
    }
    assert_eq!(node.settled(1).faults, 0);
    vm.frame(20);
    assert_eq!(node.settled(1).faults, 1);
    assert!(report.bytes_read > 0);
}

#[test]
fn a_damaged_frame_ends_the_vms_that_need_it_and_is_never_read() {
    let device = device_or_return!();
    let (image, bytes) = image();
    for cut in [false, true] {
        let frames = framed(&image);
        let node = Node::start(ImageFormat::Frames, &frames, &tempfile::tempfile().unwrap());
        let vms = [node.vm(&device, 1), node.vm(&device, 2)];
        assert_eq!(vms[1].frame(0), [bytes[0]]);
        if cut {
            frames.set_len(10).unwrap();
        } else {
            frames.write_all_at(&vec![0xff; usize::try_from(frames.metadata().unwrap().len()).unwrap()], 0).unwrap();
        }
        // Whoever reads waits for ever, as a vCPU does until its process ends.
        let (memory, (sender, receiver)) = (vms[0].memory.clone(), mpsc::channel());
        thread::spawn(move || {
            let _ = sender.send(memory.read_obj::<u8>(GuestAddress(2 * FRAME as u64)).unwrap());
        });
        match node.hear() {
            FromPager::Lost { vm: 1, reason } => assert!(reason.contains("frame 2"), "{reason}"),
            other => panic!("{other:?}"),
        }
        assert!(control::receive::<()>(vms[0].socket.as_fd(), &mut [0; 16]).unwrap().is_none(), "its process is told");
        assert!(receiver.try_recv().is_err(), "it read something");
        assert_eq!(vms[1].frame(0), [bytes[0]], "the other VM has what it needs");
        assert_eq!(vms[1].frame(1), [0], "frames of zeros are no part of the file");
        std::mem::forget(vms); // the reader still waits in the first one's memory
    }
}

#[test]
fn a_pager_that_ends_tells_its_vms_and_answers_nobody() {
    let device = device_or_return!();
    let (image, _) = image();
    let node = Node::start(ImageFormat::Raw, &image, &tempfile::tempfile().unwrap());
    let vm = node.vm(&device, 1);
    vm.frame(0);
    drop(node);
    assert!(control::receive::<()>(vm.socket.as_fd(), &mut [0; 16]).unwrap().is_none());
    let (memory, (sender, receiver)) = (vm.memory.clone(), mpsc::channel());
    thread::spawn(move || {
        let _ = sender.send(memory.read_obj::<u8>(GuestAddress(2 * FRAME as u64)).unwrap());
    });
    // That something does not happen has no event: this only gives it an opportunity.
    assert!(receiver.recv_timeout(Duration::from_millis(200)).is_err(), "a page was read that nobody filled");
    std::mem::forget(vm);
}

#[test]
fn images_and_handovers_that_do_not_fit_are_refused() {
    let device = device_or_return!();
    let (image, _) = image();
    let node = Node::start(ImageFormat::Raw, &image, &tempfile::tempfile().unwrap());
    let failed = |reply| match reply {
        PagerReply::Failed { reason } => reason,
        other => panic!("{other:?}"),
    };
    let raw = |file: &File| file.as_raw_fd();
    let three = [raw(&image), raw(&node.memory), raw(&node.set)];
    assert!(failed(node.ask(PagerRequest::Open { format: ImageFormat::Raw }, &three)).contains("already"));
    assert!(failed(node.ask(PagerRequest::Attach { vm: 1 }, &three)).contains("number of files"));
    assert!(failed(node.ask(PagerRequest::Settled { vm: 7 }, &[])).contains("no such VM"));

    // Something else than a userfaultfd, and memory of another size.
    let whole = u64::from(MIB) << 20;
    let faults = Faults::from_device(&device).unwrap();
    for (vm, fd, bytes) in [(1, image.as_fd(), whole), (2, faults.as_fd(), whole / 2)] {
        let (socket, theirs) = pair();
        assert_eq!(node.ask(PagerRequest::Attach { vm }, &[theirs.as_raw_fd()]), PagerReply::Done);
        drop(theirs);
        control::send(socket.as_fd(), &Handover { address: 0x1000_0000, bytes }, Some(fd)).unwrap();
        assert!(matches!(node.hear(), FromPager::Lost { vm: lost, .. } if lost == vm));
        assert!(control::receive::<()>(socket.as_fd(), &mut [0; 16]).unwrap().is_none());
    }
    assert_eq!(node.vm(&device, 3).frame(FRAMES - 1), [0], "the pager lives on");
}

//! The messages.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::RateLimit;

/// A text with entropy in it, which has no place in a log.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({} bytes)", self.0.len())
    }
}

/// What the node asks of a VMM process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Prepare a shell: all of the VM that takes long and can be done before it is needed. Descriptors: `/dev/kvm`, then `/dev/userfaultfd` if
    /// the machine is paged, then the VM's state if a snapshot will be restored, which is read and checked now.
    Prepare {
        /// What for. The snapshot's machine must be the same, but for its rates.
        machine: MachineSpec,
        /// Whether a snapshot will be restored. A kernel will be booted otherwise.
        restores: bool,
    },
    /// Boot a kernel in the shell, without running it. Descriptors: kernel (ELF, or a flat test image), its initial RAM disk if it has one, one
    /// per disk, then the network's TAP if there is one.
    Boot {
        /// Kernel command line; the VMM appends its devices, which are in the ACPI tables too.
        cmdline: String,
        /// Whether there is an initial RAM disk.
        initrd: bool,
    },
    /// Restore the snapshot whose state the shell was prepared with, without running it. Descriptors: memory image, one per disk, then
    /// the network's TAP if there is one. For a paged machine the image is the memfd that its pager fills, only to be read, and behind it
    /// comes the VM's end of the socket that [`crate::pager::PagerRequest::Attach`] gave the pager: the process ends when that closes. A shell
    /// whose restore failed is gone.
    Restore,
    /// Bring a restored VM, running or paused, back to where it was right after its restore; it is then paused. The disks are the
    /// caller's: nothing reads or writes them between the answer and the next `Resume`. Should it fail, the VM must be destroyed.
    Rewind,
    /// Tell when the guest of a VM that was booted, and runs, next says that it rests: [`Event::Rests`].
    AwaitRest,
    /// The guest of a paused VM that was booted waits for its first order at this page of its memory, and will be found so in what is restored from
    /// its snapshots. Refused where it does not.
    WakePage {
        /// Address of the page in the guest's physical memory.
        address: u64,
        /// What the guest has written there to know it by.
        token: u64,
    },
    /// Write an order into the wake page of a restored VM in which nothing has run since its restore or last rewind. Answered with
    /// [`Reply::Ordered`], or [`Reply::NoWakePage`] where the guest waits at none; [`Event::Answered`] follows when it has run and answered.
    Order {
        /// Text for the guest, at most some 4,000 bytes.
        text: Secret,
    },
    /// Run the vCPUs.
    Resume,
    /// Stop the vCPUs; answered when they have stopped.
    Pause,
    /// Write memory and state of a paused VM. Descriptors: memory image, VM state, both writable. The state's file is empty, and so is a booted
    /// VM's image; for a restored VM it is a clone of the image that it was restored from, and what the guest has changed is written into it.
    Snapshot,
    /// Snapshot a restored VM beside its running guest, which pauses only for the last of it. Descriptors: memory image and VM state as for
    /// `Snapshot`, then for each disk that the guest can write an empty file, which becomes its clone (`FICLONE`). The answer says that it has
    /// begun; [`Event::LiveSnapshot`] or [`Event::LiveSnapshotFailed`] how it ended, and whichever it is, the VM goes on. Nothing is synced to
    /// the disk: that is the caller's, if the snapshot is to outlive the host. Open vsock connections end in what is restored from it. A rewind
    /// gives it up.
    LiveSnapshot,
    /// Connect a stream socket to a vsock port of the guest. Descriptor: the VMM's end. Bytes written before the guest accepts are
    /// kept; a refusal closes the stream.
    Connect {
        /// The port in the guest.
        port: u32,
    },
    /// Ask the guest to give up this much of its memory; 0 gives all of it back. It does so at its own pace, and takes some back when it
    /// runs out of memory.
    Balloon {
        /// Size of the balloon, less than the machine's memory.
        target_mib: u32,
    },
    /// The console's tail.
    Console,
    /// From now on outlive whoever is at the other end of the control socket. Descriptors: a listening `SOCK_SEQPACKET` socket that does not
    /// block, then what the next owner is to be given. When the control socket closes, the VM goes on as it is, running or paused; a live
    /// snapshot is given up; and the process takes the next connection to that socket for its control socket, one at a time.
    Keep,
    /// The first request of an owner that has connected to a kept VM: answered with [`Reply::Adopted`]. [`Event::Stopped`] follows if the guest has
    /// stopped for good meanwhile.
    Adopt,
}

/// The machine that a shell is prepared for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// The virtio block devices, `/dev/vda` first.
    pub disks: Vec<Disk>,
    /// The virtio network interface, if there is one.
    #[serde(default)]
    pub network: Option<Network>,
    /// Whether it has a virtio source of random bytes.
    #[serde(default)]
    pub rng: bool,
    /// Whether it has a virtio balloon, which also reports free pages.
    #[serde(default)]
    pub balloon: bool,
    /// Whether a pager fills its memory. No property of the machine, as a rate is none.
    #[serde(default)]
    pub paged: bool,
}

impl MachineSpec {
    /// The machine as its guest knows it: without what a restore may change.
    #[must_use]
    pub fn as_seen_by_guest(&self) -> Self {
        let mut seen = Self { paged: false, ..self.clone() };
        seen.disks.iter_mut().for_each(|disk| disk.rate = None);
        seen.network.iter_mut().for_each(|network| network.rate = None);
        seen
    }
}

/// One virtio block device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The guest can only read it.
    pub read_only: bool,
    /// How fast it may be used. No property of the machine: a restore may bring another one.
    #[serde(default)]
    pub rate: Option<RateLimit>,
}

/// One virtio network interface. Its TAP is opened and named by the node, with `IFF_TAP`, `IFF_NO_PI`, `IFF_VNET_HDR` and
/// `O_NONBLOCK`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The guest's address.
    pub mac: [u8; 6],
    /// How fast it may send, and as fast again receive. As a disk's, no property of the machine.
    #[serde(default)]
    pub rate: Option<RateLimit>,
}

/// What a VMM process says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromVmm {
    /// The answer to the oldest unanswered request.
    Reply(Reply),
    /// Something happened.
    Event(Event),
}

/// Answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done.
    Done,
    /// A VM was booted or restored.
    Built(Phases),
    /// A VM was rewound.
    Rewound(RewindReport),
    /// A snapshot was written.
    Snapshotted(SnapshotReport),
    /// The order is where the guest will look.
    Ordered,
    /// The guest waits for orders at no page: it has to be reached by vsock.
    NoWakePage,
    /// The console's tail, at most 16 KiB.
    Console {
        /// Lossy UTF-8.
        tail: String,
    },
    /// The VM has a new owner. Descriptors: those that came with [`Request::Keep`] behind the socket.
    Adopted {
        /// Its vCPUs run.
        running: bool,
    },
    /// A restore was refused: the snapshot's host had other traits than this one. Building its template again here would help.
    Incompatible {
        /// Which trait, as it was and as it is.
        reason: String,
    },
    /// The request failed; the VM is as it was, or gone if it was being built.
    Failed {
        /// What failed, with the ioctl's name where one did.
        reason: String,
    },
}

/// Where the time of a build or a restore went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phases {
    /// Mapping memory, and loading the kernel if there is one.
    pub memory: Duration,
    /// Devices, and all saved state.
    pub state: Duration,
}

/// What a rewind undid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewindReport {
    /// Bytes of memory that differed from the snapshot's, in whole pages.
    pub dirty_bytes: u64,
    /// How long pausing, finding and dropping them took.
    pub memory: Duration,
    /// How long everything else took.
    pub state: Duration,
}

/// What a snapshot holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// Bytes of memory that were not zero and so were written.
    pub written_bytes: u64,
    /// How long the memory took.
    pub memory: Duration,
    /// How long the state took.
    pub state: Duration,
}

/// What a live snapshot holds, and what it took from the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveReport {
    /// Bytes of memory that were not zero and so were written, those written twice counted twice.
    pub written_bytes: u64,
    /// Those of them that were written while the guest was paused.
    pub paused_bytes: u64,
    /// How long the vCPUs were paused: state, the last of memory, and the disks' clones.
    pub pause: Duration,
    /// From the request's answer to the end.
    pub total: Duration,
    /// Connections over vsock were open, and end in what is restored from it.
    pub cuts_connections: bool,
}

/// What happens unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The guest connected to a port of the host. Descriptor: the node's end of the stream.
    GuestConnected {
        /// The port on the host.
        port: u32,
    },
    /// The guest has answered its order.
    Answered {
        /// What it wrote; empty if that is no text. It may be anything.
        text: String,
    },
    /// The guest says that it does nothing but wait at its wake page.
    Rests,
    /// A live snapshot is whole.
    LiveSnapshot(LiveReport),
    /// A live snapshot was given up; what was written of it is of no use.
    LiveSnapshotFailed {
        /// Why.
        reason: String,
    },
    /// The guest has stopped for good.
    Stopped {
        /// Why.
        why: Stop,
        /// The console's tail.
        console: String,
    },
}

/// Why a guest stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stop", rename_all = "snake_case")]
pub enum Stop {
    /// It asked for a reset or a shutdown.
    Shutdown,
    /// It cannot go on.
    Crash(GuestCrash),
}

/// What is known of a guest that cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestCrash {
    /// The exit's name, and its suberror where it has one.
    pub exit: String,
    /// The vCPU that hit it.
    pub vcpu: u8,
    /// Its instruction pointer.
    pub rip: u64,
    /// The instruction bytes at the pointer, where KVM or guest memory gave them, in hex.
    pub instruction: String,
}

impl std::fmt::Display for GuestCrash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on vCPU {} at rip {:#x}, instruction bytes {}", self.exit, self.vcpu, self.rip, self.instruction)
    }
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shutdown => write!(f, "the guest shut down"),
            Self::Crash(crash) => write!(f, "the guest crashed: {crash}"),
        }
    }
}

//! The wake page, as the parked agent looks at it (the protocol: [`stasis_guest_wire::page`]).
//!
//! An interpreted kernel takes tens of milliseconds to accept a connection, and half of one for a system call that does nothing; user mode runs
//! natively. So the agent is parked in user mode, and does not have to be reached.

use std::{
    fs::{File, OpenOptions},
    hint,
    io::{self, Read},
    num::NonZeroUsize,
    os::unix::fs::{FileExt, OpenOptionsExt},
    ptr,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use nix::sys::{
    mman::{MapFlags, ProtFlags, mlock, mmap_anonymous},
    resource::{UsageWho, getrusage},
};
use stasis_guest_wire::page::{self, WakePage};

use crate::ioctls;

/// Looks at the page in a row, some ten milliseconds on any CPU of these years; then it is seen to whether somebody knocks.
const LOOKS: u32 = 200_000;
/// Rows of looks until the agent waits for connections alone: seconds, and the node takes milliseconds to stop a VM that is parked. Counted, since
/// to ask a clock can be a system call.
const ROWS: u32 = 500;

/// As [`page::TOKEN`] and the others say.
#[repr(C, align(4096))]
struct Layout {
    token: AtomicU64,
    state: AtomicU32,
    length: AtomicU32,
    text: [AtomicU8; page::LONGEST],
}

const _: () = assert!(
    size_of::<Layout>() == page::SIZE
        && std::mem::offset_of!(Layout, token) == page::TOKEN
        && std::mem::offset_of!(Layout, state) == page::STATE
        && std::mem::offset_of!(Layout, length) == page::LENGTH
        && std::mem::offset_of!(Layout, text) == page::TEXT
);

/// What the VMM hears.
pub trait Bell: Send {
    /// There is an answer.
    ///
    /// # Errors
    /// It cannot be rung.
    fn answered(&self) -> io::Result<()>;

    /// This guest does nothing but wait.
    ///
    /// # Errors
    /// It cannot be rung.
    fn rests(&self) -> io::Result<()>;
}

/// The page, and what is rung when there is an answer in it.
pub struct Page {
    layout: &'static Layout,
    bell: Box<dyn Bell>,
}

impl Page {
    /// One that is there, shut, and will stay where it is. `bell` rings.
    ///
    /// # Errors
    /// There is no memory that can be kept in its place.
    pub fn new(bell: impl Bell + 'static) -> io::Result<Self> {
        let length = NonZeroUsize::new(page::SIZE).ok_or(io::ErrorKind::InvalidInput)?;
        // Shared: a child of this process would otherwise leave one of the two with a copy.
        let (rights, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing that anybody refers to.
        let at = unsafe { mmap_anonymous(None, length, rights, flags) }?;
        // SAFETY: the whole mapping that was just made, which is never unmapped.
        unsafe { mlock(at, page::SIZE) }?;
        // SAFETY: the mapping is readable, writable, page-aligned as Layout is, as long as it, and never unmapped. Layout has nothing but atomics,
        // for which any bytes are a value, and which may be changed from outside.
        let layout = unsafe { at.cast::<Layout>().as_ref() };
        let page = Self { layout, bell: Box::new(bell) };
        page.layout.state.store(page::SHUT, Ordering::SeqCst);
        Ok(page)
    }

    /// Has it wait for an order; where it is, for the node.
    ///
    /// # Errors
    /// The kernel does not say where it is.
    pub fn wait(&self) -> io::Result<WakePage> {
        let address = address_of(ptr::from_ref(self.layout).addr())?;
        let mut token = [0; 8];
        File::open("/dev/urandom")?.read_exact(&mut token)?;
        let token = u64::from_le_bytes(token);
        self.layout.token.store(token, Ordering::SeqCst);
        self.layout.state.store(page::WAITING, Ordering::SeqCst);
        Ok(WakePage { address, token })
    }

    /// Looks until there is an order, which is taken out of the page: its text. None when `knocks` says that there is something else to do, when
    /// nothing has come for long, or where the page is shut: it then is. It rings after each row after which it rests.
    pub fn order(&self, mut knocks: impl FnMut() -> bool) -> Option<String> {
        let mut rest = Rest::default();
        for row in 0..ROWS {
            for _ in 0..LOOKS {
                match self.layout.state.load(Ordering::Acquire) {
                    page::WAITING => hint::spin_loop(),
                    page::ORDERED => return self.take(),
                    _ => return None,
                }
            }
            if knocks() {
                break;
            }
            if rest.after(row, how_often_displaced()) {
                // Not to be heard costs the wakes of this template time, and nothing else.
                let _ = self.bell.rests();
            }
        }
        // The snapshot may have been taken before this very instruction, and the order come with the restore.
        match self.layout.state.compare_exchange(page::WAITING, page::SHUT, Ordering::AcqRel, Ordering::Acquire) {
            Err(page::ORDERED) => self.take(),
            _ => None,
        }
    }

    /// Nothing of it stays.
    fn take(&self) -> Option<String> {
        let length = usize::try_from(self.layout.length.load(Ordering::Relaxed)).ok()?;
        let text = self.layout.text.get(..length)?;
        let bytes = text.iter().map(|byte| byte.swap(0, Ordering::Relaxed)).collect();
        String::from_utf8(bytes).ok()
    }

    /// Leaves an answer, and rings.
    ///
    /// # Errors
    /// It is too long, or the bell cannot be rung.
    pub fn answer(&self, text: &str) -> io::Result<()> {
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        let place = self.layout.text.get(..text.len()).ok_or(io::ErrorKind::InvalidInput)?;
        for (to, from) in place.iter().zip(text.bytes()) {
            to.store(from, Ordering::Relaxed);
        }
        self.layout.length.store(length, Ordering::Relaxed);
        self.layout.state.store(page::ANSWERED, Ordering::Release);
        self.bell.answered()
    }
}

/// Whether a guest rests: nothing ran in this thread's place in the row that has ended. One whose function never lets the CPU go rests no less
/// in the second half of its rows, so that the node hears of it while somebody looks.
#[derive(Default)]
struct Rest {
    displaced: Option<i64>,
}

impl Rest {
    /// A row has ended, the first is 0, and by now this thread was displaced so often, if that is known.
    fn after(&mut self, row: u32, displaced: Option<i64>) -> bool {
        let undisturbed = displaced.is_some() && displaced == self.displaced;
        self.displaced = displaced;
        undisturbed || row >= ROWS / 2
    }
}

/// How often the kernel has given this thread's CPU to somebody else.
fn how_often_displaced() -> Option<i64> {
    getrusage(UsageWho::RUSAGE_THREAD).ok().map(|usage| usage.involuntary_context_switches())
}

/// The first serial port's line that tells the VMM. It is down until there is an answer, but for a moment when it tells of rest: the kernel writes it
/// only where it changes.
pub struct Line(File);

impl Line {
    /// That of the console.
    ///
    /// # Errors
    /// The console is no serial port.
    pub fn of_console() -> io::Result<Self> {
        let options = libc::O_NOCTTY | libc::O_NONBLOCK;
        let console = OpenOptions::new().read(true).write(true).custom_flags(options).open("/dev/console")?;
        ioctls::lower_out1(&console)?;
        Ok(Self(console))
    }
}

impl Bell for Line {
    fn answered(&self) -> io::Result<()> {
        ioctls::raise_out1(&self.0)
    }

    fn rests(&self) -> io::Result<()> {
        ioctls::raise_out1(&self.0)?;
        ioctls::lower_out1(&self.0)
    }
}

/// The physical address of a page of this process (Documentation/admin-guide/mm/pagemap.rst).
fn address_of(address: usize) -> io::Result<u64> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let mut entry = [0; 8];
    let index = address / page::SIZE;
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, 8 * index as u64)?;
    let entry = u64::from_ne_bytes(entry);
    // Whoever may not know is shown frame 0.
    match entry & FRAME {
        frame @ 1.. if entry & PRESENT != 0 => Ok(frame * page::SIZE as u64),
        _ => Err(io::Error::other("the kernel does not say where a page is")),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc;

    use super::*;

    /// What the VMM does: with the guest stopped, it writes an order.
    pub(crate) fn put(page: &Page, text: &str) {
        for (to, from) in page.layout.text.iter().zip(text.bytes()) {
            to.store(from, Ordering::Relaxed);
        }
        page.layout.length.store(u32::try_from(text.len()).unwrap(), Ordering::Relaxed);
        page.layout.state.store(page::ORDERED, Ordering::Release);
    }

    /// What the VMM sees.
    pub(crate) fn seen(page: &Page) -> (u32, String) {
        let length = usize::try_from(page.layout.length.load(Ordering::Relaxed)).unwrap();
        let bytes = page.layout.text[..length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        (page.layout.state.load(Ordering::Acquire), String::from_utf8(bytes).unwrap())
    }

    impl Page {
        /// The same memory, without a bell.
        pub(crate) fn again(&self) -> Self {
            Self { layout: self.layout, bell: Box::new(mpsc::channel().0) }
        }
    }

    /// What was rung.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) enum Ring {
        Answered,
        Rests,
    }

    impl Bell for mpsc::Sender<Ring> {
        fn answered(&self) -> io::Result<()> {
            self.send(Ring::Answered).map_err(io::Error::other)
        }

        fn rests(&self) -> io::Result<()> {
            self.send(Ring::Rests).map_err(io::Error::other)
        }
    }

    pub(crate) fn waiting() -> (Page, mpsc::Receiver<Ring>) {
        let (ring, rung) = mpsc::channel();
        let page = Page::new(ring).unwrap();
        page.layout.state.store(page::WAITING, Ordering::SeqCst);
        (page, rung)
    }

    #[test]
    fn an_order_is_taken_out_and_its_answer_is_rung_for() {
        let (page, rung) = waiting();
        put(&page, "a seed");
        assert_eq!(page.order(|| panic!("it looks first")).as_deref(), Some("a seed"));
        assert_eq!(seen(&page), (page::ORDERED, "\0\0\0\0\0\0".into()), "nothing of it stays");
        assert!(rung.try_recv().is_err());
        page.answer("done").unwrap();
        assert_eq!(rung.try_recv(), Ok(Ring::Answered));
        assert_eq!(seen(&page), (page::ANSWERED, "done".into()));
        assert!(page.answer(&"x".repeat(page::LONGEST + 1)).is_err());
    }

    #[test]
    fn it_rests_after_a_row_without_another_or_when_it_has_waited_long() {
        let mut rest = Rest::default();
        let rows = [
            (Some(5), false),
            (Some(5), true),
            (Some(6), false),
            (None, false),
            (None, false),
            (Some(6), false),
            (Some(6), true),
        ];
        for (row, (displaced, rests)) in (0..).zip(rows) {
            assert_eq!(rest.after(row, displaced), rests, "row {row}");
        }
        assert!(!rest.after(ROWS / 2 - 1, Some(7)) && rest.after(ROWS / 2, Some(8)) && rest.after(ROWS / 2, None));
    }

    #[test]
    fn it_is_told_to_rest_only_after_a_row_that_nobody_disturbed() {
        let (page, rung) = waiting();
        let (mut rows, mut displaced) = (0, Vec::new());
        let order = page.order(|| {
            rows += 1;
            displaced.push(how_often_displaced().unwrap());
            if rows == 40 {
                put(&page, "now");
            }
            false
        });
        assert_eq!(order.as_deref(), Some("now"));
        // Another row than the last may be disturbed between the two countings.
        let quiet = displaced.windows(2).filter(|pair| pair[0] == pair[1]).count();
        let rests = rung.try_iter().filter(|ring| *ring == Ring::Rests).count();
        assert!(rests.abs_diff(quiet) <= 4, "{rests} rings for {quiet} of {rows} rows");
    }

    #[test]
    fn who_knocks_is_let_in_and_an_order_that_came_meanwhile_is_not_lost() {
        let (page, _rung) = waiting();
        assert_eq!(page.order(|| true), None);
        assert_eq!(seen(&page).0, page::SHUT, "the VMM must not think that anybody looks");
        assert_eq!(page.order(|| panic!("it is shut")), None);
        let (page, _rung) = waiting();
        let late = || {
            put(&page, "late");
            true
        };
        assert_eq!(page.order(late).as_deref(), Some("late"));
    }

    #[test]
    fn an_order_that_is_none_is_dropped() {
        for length in [u32::MAX, u32::try_from(page::LONGEST).unwrap() + 1] {
            let (page, _rung) = waiting();
            put(&page, "");
            page.layout.length.store(length, Ordering::Relaxed);
            assert_eq!(page.order(|| false), None);
        }
    }

    #[test]
    fn root_learns_where_a_page_is() {
        let (page, _rung) = waiting();
        match page.wait() {
            Ok(at) => assert!(at.address.is_multiple_of(4096) && at.address > 0),
            Err(error) => eprintln!("SKIPPED: {error}"),
        }
    }
}

//! The repair's effects on the real system.

use std::{
    fs::File,
    io::{self, Read},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    sys::time::TimeSpec,
    time::ClockId,
    unistd::{gethostname, sethostname},
};

use crate::{
    gate::{ClockSet, Effects, RepairError},
    hooks::Hooks,
    identity::Identity,
    ioctls::{SEED, add_entropy, reseed},
};

/// How long all runtimes together may take to reseed.
const RUNTIMES_TIMEOUT: Duration = Duration::from_secs(5);

const SECOND: u64 = 1_000_000_000;

/// The system that the agent runs.
#[derive(Debug)]
pub struct System {
    random: File,
    identity: Identity,
    hooks: Arc<Hooks>,
}

impl System {
    /// With everything that a wake needs open already.
    ///
    /// # Errors
    /// The kernel's generator cannot be opened.
    pub fn new(identity: Identity, hooks: Arc<Hooks>) -> io::Result<Self> {
        Ok(Self { random: File::open("/dev/urandom")?, identity, hooks })
    }

    /// Goes through the repair once before the snapshot, with what is true already. Memory that is then touched for
    /// the first time, the runtimes' hooks' above all, is not touched for the first time by a wake; and a runtime that
    /// would fail every wake fails the template instead.
    ///
    /// Not the entropy: there is none to give.
    ///
    /// # Errors
    /// As a wake's.
    pub fn rehearse(&mut self) -> Result<(), RepairError> {
        let boot_id = self.kernel_boot_id()?;
        let hostname = gethostname().map_err(|errno| cannot("read the host name")(errno.into()))?;
        self.hostname(&hostname.to_string_lossy())?;
        self.machine_id(&boot_id.replace('-', ""))?;
        self.boot_nonce(&boot_id)?;
        self.runtimes(0)?;
        self.publish(0)
    }
}

/// The wall clock, nanoseconds since the Unix epoch.
///
/// # Errors
/// What the kernel answered.
pub fn wall_clock() -> io::Result<u64> {
    let now = ClockId::CLOCK_REALTIME.now()?;
    let field = |value: i64| u64::try_from(value).map_err(io::Error::other);
    Ok(field(now.tv_sec())?.saturating_mul(SECOND).saturating_add(field(now.tv_nsec())?))
}

/// Sets it.
///
/// # Errors
/// What the kernel answered.
pub fn set_wall_clock(now_ns: u64) -> io::Result<()> {
    let field = |value: u64| i64::try_from(value).map_err(io::Error::other);
    let time = TimeSpec::new(field(now_ns / SECOND)?, field(now_ns % SECOND)?);
    Ok(ClockId::CLOCK_REALTIME.set_time(time)?)
}

fn cannot(what: &'static str) -> impl FnOnce(io::Error) -> RepairError {
    move |source| RepairError::System { what, source }
}

impl Effects for System {
    fn entropy(&mut self, seed: &[u8; SEED]) -> Result<(), RepairError> {
        add_entropy(&self.random, seed).map_err(cannot("add entropy to the kernel's generator"))?;
        // In this order: a kernel whose generator had never been seeded refuses the second without the first.
        reseed(&self.random).map_err(cannot("reseed the kernel's generator"))
    }

    fn wall_clock(&mut self, now_ns: u64) -> Result<ClockSet, RepairError> {
        let before = wall_clock().map_err(cannot("read the wall clock"))?;
        set_wall_clock(now_ns).map_err(cannot("set the wall clock"))?;
        let lag_ns = i64::try_from(i128::from(now_ns) - i128::from(before))
            .map_err(|_| RepairError::Order("a time beyond all clocks"))?;
        Ok(ClockSet { lag_ns, now_ns: wall_clock().map_err(cannot("read the wall clock back"))? })
    }

    fn hostname(&mut self, name: &str) -> Result<String, RepairError> {
        sethostname(name).map_err(|errno| cannot("set the host name")(errno.into()))?;
        let shown = gethostname().map_err(|errno| cannot("read the host name back")(errno.into()))?;
        Ok(shown.to_string_lossy().into_owned())
    }

    fn machine_id(&mut self, id: &str) -> Result<String, RepairError> {
        self.identity.set_machine_id(id).map_err(cannot("replace the machine id"))
    }

    fn boot_nonce(&mut self, nonce: &str) -> Result<String, RepairError> {
        self.identity.set_boot_nonce(nonce).map_err(cannot("replace the boot nonce"))
    }

    fn runtimes(&mut self, generation: u64) -> Result<u32, RepairError> {
        let mut random = &self.random;
        let seeds = || {
            let mut seed = [0; SEED];
            random.read_exact(&mut seed)?;
            Ok(seed)
        };
        Ok(self.hooks.reseed(generation, Instant::now() + RUNTIMES_TIMEOUT, seeds)?)
    }

    fn publish(&mut self, generation: u64) -> Result<(), RepairError> {
        self.identity.set_generation(generation).map_err(cannot("write the generation"))
    }

    fn kernel_boot_id(&mut self) -> Result<String, RepairError> {
        self.identity.kernel_boot_id().map_err(cannot("read the kernel's boot id"))
    }
}

use super::*;

/// A system that does what it is told, but for one broken step, or one that lies.
#[derive(Debug, Default, Clone)]
pub(crate) struct Fake {
    pub(crate) broken: Option<Step>,
    pub(crate) lies: Option<Step>,
    pub(crate) done: Vec<Step>,
    pub(crate) seed: Vec<u8>,
}

impl Fake {
    fn act(&mut self, step: Step) -> Result<(), RepairError> {
        self.done.push(step);
        if self.broken == Some(step) {
            return Err(RepairError::System { what: "do it", source: io::Error::other("broken on purpose") });
        }
        Ok(())
    }

    fn show(&mut self, step: Step, value: &str) -> Result<String, RepairError> {
        self.act(step)?;
        Ok(if self.lies == Some(step) { "the template's".into() } else { value.into() })
    }
}

impl Effects for Fake {
    fn entropy(&mut self, seed: &[u8; SEED]) -> Result<(), RepairError> {
        self.seed = seed.to_vec();
        self.act(Step::Entropy)
    }
    fn wall_clock(&mut self, now_ns: u64) -> Result<ClockSet, RepairError> {
        self.act(Step::WallClock)?;
        let off = if self.lies == Some(Step::WallClock) { 2_000_000_000 } else { 1_000 };
        Ok(ClockSet { lag_ns: -5, now_ns: now_ns + off })
    }
    fn hostname(&mut self, name: &str) -> Result<String, RepairError> {
        self.show(Step::Hostname, name)
    }
    fn machine_id(&mut self, id: &str) -> Result<String, RepairError> {
        self.show(Step::MachineId, id)
    }
    fn boot_nonce(&mut self, nonce: &str) -> Result<String, RepairError> {
        self.show(Step::BootNonce, nonce)
    }
    fn runtimes(&mut self, _generation: u64) -> Result<u32, RepairError> {
        self.act(Step::Runtimes)?;
        Ok(2)
    }
    fn publish(&mut self, _generation: u64) -> Result<(), RepairError> {
        Ok(())
    }
    fn kernel_boot_id(&mut self) -> Result<String, RepairError> {
        Ok("template".into())
    }
}

pub(crate) fn wake(generation: u64) -> Wake {
    Wake {
        generation,
        entropy: "0f".repeat(SEED),
        wall_clock_ns: 1_700_000_000_000_000_000,
        hostname: "vm-1".into(),
        machine_id: "ab".repeat(16),
        boot_nonce: "01234567-89ab-cdef-0123-456789abcdef".into(),
    }
}

fn step_refused(answer: &FromAgent) -> Option<Step> {
    match answer {
        FromAgent::Refused { step, .. } => *step,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_whole_repair_opens_it_with_a_certificate_that_verifies() {
    let mut gate = Gate::new(Fake::default());
    assert!(matches!(gate.forward(), FromAgent::Refused { step: None, .. }));
    let FromAgent::Awake(certificate) = gate.wake(&wake(1)) else { panic!("refused") };
    assert_eq!(certificate.verify(&wake(1), "template"), Ok(()));
    assert_eq!((certificate.clock_lag_ns, certificate.runtimes), (-5, 2));
    assert_eq!(gate.effects.done, Step::ALL);
    assert_eq!(gate.effects.seed, [0x0f; SEED]);
    assert_eq!(gate.forward(), FromAgent::Forwarding);
}

#[test]
fn each_broken_step_keeps_it_closed_and_ends_the_repair() {
    for (at, step) in Step::ALL.into_iter().enumerate() {
        let mut gate = Gate::new(Fake { broken: Some(step), ..Fake::default() });
        assert_eq!(step_refused(&gate.wake(&wake(1))), Some(step));
        assert_eq!(gate.effects.done, Step::ALL[..=at]);
        assert!(matches!(gate.forward(), FromAgent::Refused { .. }));
        // Nor does a second try of this generation open it.
        gate.effects.broken = None;
        assert_eq!(step_refused(&gate.wake(&wake(1))), None);
        assert_eq!(gate.generation(), None);
    }
}

#[test]
fn each_step_that_does_not_read_back_keeps_it_closed() {
    for step in [Step::WallClock, Step::Hostname, Step::MachineId, Step::BootNonce] {
        let mut gate = Gate::new(Fake { lies: Some(step), ..Fake::default() });
        assert_eq!(step_refused(&gate.wake(&wake(1))), Some(step));
        assert_eq!(gate.generation(), None);
    }
}

#[test]
fn orders_that_make_no_sense_are_refused() {
    type Spoil = fn(&mut Wake);
    let wrong: [(Step, Spoil); 6] = [
        (Step::Entropy, |wake| wake.entropy = "0f".repeat(SEED - 1)),
        (Step::Entropy, |wake| wake.entropy = "+f".repeat(SEED)),
        (Step::Hostname, |wake| wake.hostname = String::new()),
        (Step::MachineId, |wake| wake.machine_id = "short".into()),
        (Step::BootNonce, |wake| wake.boot_nonce = "é".repeat(18)),
        (Step::BootNonce, |wake| wake.boot_nonce = String::new()),
    ];
    for (step, spoil) in wrong {
        let mut gate = Gate::new(Fake::default());
        let mut order = wake(1);
        spoil(&mut order);
        assert_eq!(step_refused(&gate.wake(&order)), Some(step));
        assert_eq!(gate.generation(), None);
    }
}

#[test]
fn only_a_later_generation_wakes_it_again() {
    let mut gate = Gate::new(Fake::default());
    assert_eq!(step_refused(&gate.wake(&wake(0))), None);
    assert!(matches!(gate.wake(&wake(3)), FromAgent::Awake(_)));
    assert_eq!(step_refused(&gate.wake(&wake(3))), None);
    assert_eq!(gate.generation(), Some(3), "a stale wake says nothing about the life that is lived");
    gate.effects.broken = Some(Step::Runtimes);
    assert_eq!(step_refused(&gate.wake(&wake(4))), Some(Step::Runtimes));
    assert_eq!(gate.generation(), None, "a failed repair closes it");
}

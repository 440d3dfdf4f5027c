//! A session with its store and a fake VM, driven by several threads as a node does it: the session behind a lock, its actions outside.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use shuttle::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};
use stasis_state::{
    Action, Event, Input, Limits, Refusal, RequestId, Session, State, StoreError, Table, Timestamp, Work,
};

use crate::claim_retire::record;

/// What a request hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    Admitted,
    Refused(Refusal),
}

/// All of it.
pub(crate) struct Node {
    session: Mutex<Session>,
    table: Mutex<Table>,
    /// The session's time.
    clock: AtomicU64,
    /// The VM's vCPUs run.
    runs: AtomicBool,
    heard: Mutex<BTreeMap<RequestId, Heard>>,
    heard_more: Condvar,
    cut: Mutex<BTreeSet<RequestId>>,
    /// What has run in the VM.
    pub(crate) executed: Mutex<Vec<RequestId>>,
    /// How often the VM was stopped, and let go on.
    pub(crate) stops: AtomicU64,
    pub(crate) gos: AtomicU64,
}

const ID: &str = "sb";

impl Node {
    pub(crate) fn new(suspended: bool) -> Arc<Self> {
        let events: &[Event] =
            if suspended { &[Event::Started, Event::PauseBegun, Event::Paused] } else { &[Event::Started] };
        let record = record(ID, events);
        let limits = Limits {
            lifetime: record.facts().lifetime,
            grace: std::time::Duration::ZERO,
            retry: std::time::Duration::from_millis(10),
        };
        let now = Timestamp::from_ms(0);
        let (session, first) = Session::adopt(&record, true, limits, now);
        assert_eq!(first, []);
        let mut table = Table::default();
        table.create(record).unwrap();
        Arc::new(Self {
            session: Mutex::new(session),
            table: Mutex::new(table),
            clock: AtomicU64::new(0),
            runs: AtomicBool::new(!suspended),
            heard: Mutex::default(),
            heard_more: Condvar::new(),
            cut: Mutex::default(),
            executed: Mutex::default(),
            stops: AtomicU64::new(0),
            gos: AtomicU64::new(0),
        })
    }

    pub(crate) fn state(&self) -> State {
        self.session.lock().unwrap().status(self.now()).state
    }

    /// What the store says; none if it is gone.
    pub(crate) fn stored(&self) -> Option<State> {
        self.table.lock().unwrap().get(&ID.parse().unwrap()).ok().map(stasis_state::Record::state)
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_ms(self.clock.load(SeqCst))
    }

    /// Lets so much time pass that whatever is idle has been so for long enough, and says so.
    pub(crate) fn time_passes(&self) {
        self.clock.fetch_add(1_000, SeqCst);
        self.give(Input::Timer);
    }

    /// A point at which shuttle may switch. (To yield would tell its scheduler to prefer the others, and keep long runs of one thread, such
    /// as a pause from its beginning to its end, from being tried.)
    fn others_may_run(&self) {
        self.clock.load(SeqCst);
    }

    /// Takes an input to the session and does what follows.
    pub(crate) fn give(&self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let actions = self.session.lock().unwrap().take(input, self.now());
            for action in actions {
                self.others_may_run();
                match action {
                    Action::Admit(request) => self.tell(request, Heard::Admitted),
                    Action::Refuse(request, why) => self.tell(request, Heard::Refused(why)),
                    Action::Cut(request, _) => drop(self.cut.lock().unwrap().insert(request)),
                    Action::Write(event) => inputs.push_back(self.write(event)),
                    Action::Do(work) => {
                        self.work(work);
                        inputs.push_back(Input::Did);
                    }
                    Action::Hurry => {}
                }
            }
        }
    }

    fn tell(&self, request: RequestId, heard: Heard) {
        let before = self.heard.lock().unwrap().insert(request, heard);
        assert_eq!(before, None, "{request:?} was answered twice");
        self.heard_more.notify_all();
    }

    fn write(&self, event: Event) -> Input {
        loop {
            let read = self.table.lock().unwrap().get(&ID.parse().unwrap()).cloned();
            let Ok(record) = read else { return Input::Superseded(State::Gone) };
            let Ok(change) = record.on(event, self.now()) else { return Input::Superseded(record.state()) };
            let committed = self.table.lock().unwrap().commit(change);
            match committed {
                Ok(record) => return Input::written(&record),
                Err(StoreError::Conflict { .. }) => {}
                Err(_) => return Input::Superseded(State::Gone),
            }
        }
    }

    fn work(&self, work: Work) {
        match work {
            Work::Stop => {
                self.stops.fetch_add(1, SeqCst);
                assert!(self.runs.swap(false, SeqCst), "stopped twice");
            }
            Work::Go => {
                self.gos.fetch_add(1, SeqCst);
                assert!(!self.runs.swap(true, SeqCst), "resumed twice");
            }
            Work::Destroy => self.runs.store(false, SeqCst),
            other => panic!("{other:?} is not part of this model"),
        }
    }

    /// One request from its beginning to its end. It must see a VM that runs, all the time that it is in it, unless it was cut.
    pub(crate) fn request(&self, id: u64) -> Heard {
        let request = RequestId(id);
        self.give(Input::Came(request));
        let mut heard = self.heard.lock().unwrap();
        while !heard.contains_key(&request) {
            heard = self.heard_more.wait(heard).unwrap();
        }
        let answer = heard[&request];
        drop(heard);
        if answer == Heard::Admitted {
            for _ in 0..3 {
                let runs = self.runs.load(SeqCst);
                assert!(runs || self.cut.lock().unwrap().contains(&request), "{request:?} is in a VM that is paused");
                self.others_may_run();
            }
            self.executed.lock().unwrap().push(request);
            self.give(Input::Over(request));
        }
        answer
    }

    /// A kill by somebody who only has the store.
    pub(crate) fn kill_from_outside(&self) {
        loop {
            let record = self.table.lock().unwrap().get(&ID.parse().unwrap()).cloned();
            let Ok(record) = record else { break };
            let committed = self.table.lock().unwrap().commit(record.on(Event::Kill, self.now()).unwrap());
            if committed.is_ok() {
                break;
            }
        }
        self.give(Input::Kill);
    }
}

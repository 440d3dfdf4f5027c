//! A sandbox whose record cannot be read, or whose VM lives and cannot be taken over. It is shown as failed, with the reason; its VM goes on, and
//! its files stay, until somebody deletes it or mends what is wrong by hand.
//!
//! ```text
//!  damaged ─▶ set aside ─┬─ deleted ─▶ VM ended, files removed, then the record ─▶ gone
//!                        ├─ the VM cannot be ended ─▶ as it was
//!                        └─ the node ends ─▶ as it was
//! ```
//! A VM that several records name ends with the last of them. With the last record that may name any VM, those end that no other names.

use std::{collections::HashMap, sync::Arc};

use stasis_pool_api::{OnTimeout, SandboxError, SandboxId, SandboxInfo, SandboxLogs, SandboxState as State, Timestamp};
use stasis_state::{Damaged, Event, Metadata, Name, Named, Process, Record, StoreError, Template};
use tokio::sync::{Mutex, mpsc};

use super::{
    driver::Around,
    info::recorded,
    machine::MachineError,
    message::{Message, Reply},
    service::process_of,
};

use crate::build::chain;

/// What stands for what cannot be read of it.
const UNKNOWN: &str = "unknown";

/// How many records name the VM of each process.
#[derive(Default)]
pub(super) struct Claims(HashMap<Process, u32>, HashMap<Process, Arc<Mutex<u32>>>);

impl Claims {
    /// One more record names it.
    pub(super) fn count(&mut self, process: Process) {
        *self.0.entry(process).or_default() += 1;
    }

    /// Not only one record names it.
    pub(super) fn is_contested(&self, process: Process) -> bool {
        self.0.get(&process).is_some_and(|records| *records > 1)
    }

    /// That of one of the records.
    pub(super) fn of(&mut self, process: Process) -> Claim {
        let records = self.0.get(&process).copied().unwrap_or(1);
        let records = Arc::clone(self.1.entry(process).or_insert_with(|| Arc::new(records.into())));
        Claim { what: Claimed::This(process), records }
    }

    /// Those of so many records that may name any VM.
    pub(super) fn of_any(&self, records: u32) -> Claim {
        Claim { what: Claimed::AllBut(self.0.keys().copied().collect()), records: Arc::new(records.into()) }
    }
}

/// What a record names, and so many do that are not deleted. Whoever deletes one has the lock from before it looks until the record is gone.
#[derive(Clone)]
pub(super) struct Claim {
    what: Claimed,
    records: Arc<Mutex<u32>>,
}

/// What ends with the last record of a claim.
#[derive(Clone)]
enum Claimed {
    /// The VM of this process.
    This(Process),
    /// Which it is can no longer be read: any VM of an earlier node that no other record names.
    AllBut(Arc<[Process]>),
}

/// Its task.
pub(super) struct Aside {
    around: Around,
    info: SandboxInfo,
    /// Of its record in the store.
    place: String,
    claim: Option<Claim>,
    inbox: mpsc::UnboundedReceiver<Message>,
}

/// What is shown of one whose record can be read.
pub(super) fn shown(record: &Record, reason: &str) -> SandboxInfo {
    SandboxInfo {
        state: State::Failed,
        ends_at: None,
        time_left_ms: None,
        auto_resume: false,
        next: None,
        busy: false,
        holds: Vec::new(),
        pid: process_of(record).map(|process| process.pid),
        failure: Some(format!(
            "its VM cannot be taken over: {reason}; it is left as it is, until the sandbox is deleted"
        )),
        ..recorded(record)
    }
}

/// What can be shown of it. None if not even its id can be read.
pub(super) fn described(damaged: &Damaged) -> Option<SandboxInfo> {
    let id: SandboxId = damaged.id.parse().ok()?;
    let unknown = || UNKNOWN.parse::<Name>().ok();
    let Template { name, version } = match damaged.template.clone() {
        Some(template) => template,
        None => Template { name: unknown()?, version: unknown()? },
    };
    let never = Timestamp::from_ms(0);
    Some(SandboxInfo {
        id,
        template: name,
        template_version: version,
        state: State::Failed,
        generation: 0,
        created_at: never,
        entered_at: never,
        ends_at: None,
        time_left_ms: None,
        on_timeout: OnTimeout::Pause,
        auto_resume: false,
        idle: None,
        next: None,
        requests: 0,
        commands: 0,
        busy: false,
        waiting: 0,
        holds: Vec::new(),
        pid: match damaged.process {
            Named::Process(process) => Some(process.pid),
            Named::Nothing | Named::Unknown => None,
        },
        certificate: None,
        failure: Some(format!(
            "its record cannot be read: {}; its VM and its files are left as they are. Mend the record while no server runs, or delete the sandbox",
            damaged.reason
        )),
        metadata: Metadata::default(),
    })
}

impl Aside {
    pub(super) fn new(
        around: Around,
        (info, place): (SandboxInfo, String),
        claim: Option<Claim>,
        inbox: mpsc::UnboundedReceiver<Message>,
    ) -> Self {
        Self { around, info, place, claim, inbox }
    }

    pub(super) async fn live(mut self) {
        while let Some(message) = self.inbox.recv().await {
            match message {
                Message::Inspect(reply) => drop(reply.send(self.info.clone())),
                Message::Logs(reply) => drop(reply.send(Ok(SandboxLogs::default()))),
                Message::Kill(reply) => match self.remove().await {
                    Ok(()) => {
                        // Whoever asked may have left.
                        let _ = reply.send(Ok(SandboxInfo { state: State::Gone, ..self.info }));
                        return;
                    }
                    Err(error) => drop(reply.send(Err(error))),
                },
                // Its VM is nobody's here: the node leaves it with all others that nobody has taken.
                Message::Leave(_) => return,
                Message::Visit(_, _, _, reply) => self.refuse(reply, "take requests"),
                Message::Pause(_, reply) => self.refuse(reply, "be paused"),
                Message::Resume(_, _, reply) => self.refuse(reply, "be resumed"),
                Message::Timeout(_, reply) => self.refuse(reply, "get another timeout"),
                Message::Hold(_, reply) => self.refuse(reply, "be held"),
                Message::Release(_, reply) => self.refuse(reply, "be released"),
                Message::Fork(_, _, reply) => self.refuse(reply, "be forked"),
                Message::Save(reply) => self.refuse(reply, "be hibernated"),
                Message::Over(_) | Message::Spare | Message::LeaveNow => {}
            }
        }
    }

    fn refuse<T>(&self, reply: Reply<T>, wanted: &'static str) {
        // Whoever asked may have left.
        let _ = reply.send(Err(SandboxError::State { id: self.info.id.clone(), state: State::Failed, wanted }));
    }

    /// All that is known of it; its VM with the last record that names it.
    async fn remove(&self) -> Result<(), SandboxError> {
        let Some(Claim { what, records }) = &self.claim else { return self.remove_all_but_the_vm().await };
        let mut records = records.lock().await;
        match what {
            _ if *records > 1 => {}
            Claimed::This(process) => {
                self.around.machines.end(*process).await.map_err(|error| self.not_done(&error))?;
            }
            Claimed::AllBut(named) => self.around.machines.end_the_rest(named.to_vec()).await,
        }
        self.remove_all_but_the_vm().await?;
        *records -= 1;
        Ok(())
    }

    fn not_done(&self, error: &MachineError) -> SandboxError {
        SandboxError::NotDone { id: self.info.id.clone(), wanted: "be removed", reason: chain(error) }
    }

    async fn remove_all_but_the_vm(&self) -> Result<(), SandboxError> {
        let id = &self.info.id;
        self.around.machines.forget(id).await.map_err(|error| self.not_done(&error))?;
        match self.around.store.discard(&self.place).await {
            Ok(_) => Ok(()),
            // It can be read.
            Err(StoreError::Conflict { .. }) => self.remove_record().await,
            Err(error) => Err(error),
        }
        .map_err(|error| SandboxError::Store { reason: error.to_string() })
    }

    async fn remove_record(&self) -> Result<(), StoreError> {
        let store = &self.around.store;
        for event in [Event::Kill, Event::Removed] {
            let present = store.get(&self.info.id).await?;
            // The table has both from every state that a record in a store can have.
            if let Ok(change) = present.on(event, Timestamp::now()) {
                store.commit(change).await?;
            }
        }
        Ok(())
    }
}

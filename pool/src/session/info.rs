//! What is shown of a sandbox.

use stasis_pool_api::{Next, NextKind, OnTimeout, SandboxInfo, Timestamp};
use stasis_state::{Deadline, Duty, Record};

use super::driver::Driver;
use crate::build::chain;

/// What its record says. Whatever only its task knows is left out.
pub(super) fn recorded(record: &Record) -> SandboxInfo {
    let facts = record.facts();
    let due = record.due().map(|due| match due.duty {
        Duty::Timeout(OnTimeout::Pause) => Next { at: due.at, what: NextKind::Pause },
        Duty::Timeout(OnTimeout::Kill) => Next { at: due.at, what: NextKind::Kill },
        Duty::Hibernate => Next { at: due.at, what: NextKind::Hibernate },
    });
    SandboxInfo {
        id: record.id().clone(),
        template: record.template().name.clone(),
        template_version: record.template().version.clone(),
        state: record.state(),
        generation: record.generation(),
        created_at: record.created_at(),
        entered_at: record.entered_at(),
        ends_at: record.ends_at(),
        time_left_ms: match facts.deadline {
            Some(Deadline::Left(left)) => u64::try_from(left.as_millis()).ok(),
            _ => None,
        },
        on_timeout: facts.lifetime.on_timeout,
        auto_resume: facts.lifetime.auto_resume,
        idle: None,
        next: due,
        requests: 0,
        commands: 0,
        waiting: 0,
        holds: facts.holds.active(Timestamp::now()).cloned().collect(),
        pid: None,
        certificate: None,
        failure: facts.failure.clone(),
        metadata: facts.metadata.clone(),
        busy: true,
    }
}

impl Driver {
    pub(super) fn info(&self) -> SandboxInfo {
        let status = self.core.status(Timestamp::now());
        let recorded = recorded(&self.record);
        let idle = status.idle.as_ref().and_then(|idle| idle.will_pause_at);
        let idle = idle.map(|at| Next { at, what: NextKind::Pause });
        let lives = self.machine.as_ref().filter(|machine| machine.vmm.is_alive());
        let certificate = self.machine.as_ref().map(|machine| machine.certificate());
        SandboxInfo {
            state: status.state,
            idle: status.idle,
            next: recorded.next.into_iter().chain(idle).min_by_key(|next| next.at),
            requests: status.requests,
            commands: status.commands,
            waiting: status.waiting,
            pid: lives.map(|machine| machine.vmm.pid()),
            certificate: certificate.and_then(|certificate| serde_json::to_value(certificate).ok()),
            failure: recorded.failure.clone().or_else(|| self.trouble.as_ref().map(|trouble| chain(trouble))),
            busy: false,
            ..recorded
        }
    }
}

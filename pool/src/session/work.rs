//! What a sandbox's session wants done to its VM. It is polled beside the messages, and ends with its outcome.

use std::{future::pending, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use stasis_pool_api::SandboxState as State;
use stasis_state::{Input, Work};

use super::{
    driver::Driver,
    machine::{Machine, MachineError},
    message::Source,
    service::{LIMIT, process_of},
    visit::Visitor,
};
use crate::build::chain;

/// What came of a work.
pub(super) struct Done {
    /// The VM, if there is one now.
    machine: Option<Arc<Machine>>,
    outcome: Result<(), MachineError>,
}

impl Driver {
    pub(super) fn start(&mut self, work: Work) -> BoxFuture<'static, Done> {
        let (machines, id) = (Arc::clone(&self.around.machines), self.record.id().clone());
        let machine = self.machine.clone();
        match work {
            Work::Create => {
                let (template, source) = (self.template.clone(), self.source.clone());
                let tenant = self.record.tenant().clone();
                async move {
                    Done::made(match source {
                        Source::Pool(budget) => machines.create(&tenant, &template, budget).await,
                        Source::Moment(moment) => machines.child(&moment).await,
                    })
                }
                .boxed()
            }
            Work::Restore => {
                self.machine = None;
                self.ended = false;
                let patience = self.visitors.values().filter_map(Visitor::patience).max().unwrap_or(LIMIT);
                async move { Done::made(machines.restore(&id, patience).await) }.boxed()
            }
            Work::Stop | Work::Go | Work::Save => async move {
                let outcome = match (&machine, work) {
                    (None, _) => Err(MachineError::Ended),
                    (Some(machine), Work::Stop) => machine.stop().await,
                    (Some(machine), Work::Go) => machine.go().await,
                    (Some(machine), _) => machines.save(&id, machine).await,
                };
                Done { machine, outcome }
            }
            .boxed(),
            Work::Release | Work::Destroy => {
                self.machine = None;
                // A connection that is just being made holds the VM too.
                self.connecting.abort_all();
                let named = process_of(&self.record);
                async move {
                    if let Some(machine) = machine {
                        let reaped = machine.vmm.reaped();
                        drop(machine);
                        reaped.await;
                    }
                    let outcome = async {
                        // What an earlier node has left of it, if it could not be taken over.
                        if let Some(process) = named {
                            machines.end(process).await?;
                        }
                        if work == Work::Destroy { machines.forget(&id).await } else { Ok(()) }
                    };
                    Done { machine: None, outcome: outcome.await }
                }
                .boxed()
            }
        }
    }

    pub(super) fn finished(&mut self, done: Done) -> Input {
        self.machine = done.machine;
        match done.outcome {
            Ok(()) => Input::Did,
            Err(error) => {
                tracing::warn!(sandbox = %self.record.id(), error = chain(&error), "something could not be done to a sandbox");
                self.unsaved = self.record.state() == State::Hibernating;
                self.trouble = Some(error);
                Input::DidNot
            }
        }
    }
}

impl Done {
    fn made(made: Result<Machine, MachineError>) -> Self {
        match made {
            Ok(machine) => Self { machine: Some(Arc::new(machine)), outcome: Ok(()) },
            Err(error) => Self { machine: None, outcome: Err(error) },
        }
    }
}

/// What comes of the work that is under way.
pub(super) async fn outcome(work: &mut Option<BoxFuture<'static, Done>>) -> Done {
    match work {
        Some(running) => {
            let done = running.await;
            *work = None;
            done
        }
        None => pending().await,
    }
}

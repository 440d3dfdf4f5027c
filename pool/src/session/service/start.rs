//! A node's start: what an earlier one has left of its sandboxes is taken over, or set aside.

use std::{
    fs, io,
    path::Path,
    sync::{Arc, PoisonError},
    time::Duration,
};

use stasis_pool_api::{SandboxId, SandboxInfo, SandboxState as State, TemplateName, Timestamp};
use stasis_state::{Damaged, Named, Process, Query, Record, Session, Store, StoreError, Tenant};
use tokio::sync::{mpsc, watch};

use super::{
    super::{
        adoption::Adoption,
        aside::{self, Aside, Claim, Claims},
        driver::{Around, First},
        machine::Machines,
        message::Source,
    },
    Handle, LocalSandboxes, limits, metrics,
};

/// Records read at a time.
const PAGE: usize = 500;

impl LocalSandboxes {
    /// Takes over what an earlier process has left: its records, and below `folder` what it saved.
    pub(crate) async fn start(
        machines: Arc<dyn Machines>,
        store: Arc<dyn Store>,
        version: impl Fn(&TemplateName) -> Option<String> + Send + Sync + 'static,
        folder: Option<&Path>,
    ) -> io::Result<Self> {
        let around = Around { machines, store };
        let this =
            Self { tenant: None, around, tasks: Arc::default(), requests: Arc::default(), version: Arc::new(version) };
        let (records, damaged) = this.left_behind().await.map_err(io::Error::other)?;
        let damaged = this.discard_unreachable(damaged).await;
        if let Some(folder) = folder {
            sweep(folder, &records, &damaged)?;
        }
        let named_by = |one: &Damaged| match one.process {
            Named::Process(process) => Some(process),
            Named::Nothing | Named::Unknown => None,
        };
        let named: Vec<_> = records.iter().filter_map(process_of).chain(damaged.iter().filter_map(named_by)).collect();
        let unknown = damaged.iter().filter(|one| one.process == Named::Unknown).count();
        let mut claims = Claims::default();
        named.iter().for_each(|process| claims.count(*process));
        let any = claims.of_any(u32::try_from(unknown).unwrap_or(u32::MAX));
        for one in damaged {
            let process = named_by(&one);
            if let Some(process) = process {
                // Whatever is wrong with it, nobody has it, and it can be ended.
                let _ = this.around.machines.fault(process);
            }
            let claim = match one.process {
                Named::Process(process) => Some(claims.of(process)),
                Named::Unknown => Some(any.clone()),
                Named::Nothing => None,
            };
            if records.iter().any(|record| record.id().as_str() == one.id) {
                tracing::error!(
                    sandbox = one.id,
                    place = one.place,
                    "a damaged record has the id of a whole one: it is left as it is, and shown to nobody"
                );
                continue;
            }
            this.set_aside(&one, claim);
        }
        let mut whole = Vec::new();
        for record in records {
            let process = process_of(&record);
            let fault = process.and_then(|process| {
                let fault = this.around.machines.fault(process);
                if claims.is_contested(process) { Some("another record names the same VM".to_owned()) } else { fault }
            });
            match fault {
                Some(reason) => {
                    let (id, info) = (record.id(), aside::shown(&record, &reason));
                    tracing::error!(sandbox = %id, reason, "the VM of a sandbox cannot be taken over: it is left as it is");
                    this.put_aside(
                        (info, id.to_string()),
                        record.tenant().clone(),
                        process.map(|process| claims.of(process)),
                    );
                }
                None => whole.push(record),
            }
        }
        for record in whole {
            match record.template().name.as_str().parse() {
                Ok(template) => this.adopt(record, template),
                Err(error) => tracing::error!(sandbox = %record.id(), %error, "a record names no template"),
            }
        }
        if unknown == 0 {
            let machines = Arc::clone(&this.around.machines);
            tokio::spawn(async move { machines.end_the_rest(named).await });
        } else {
            tracing::error!(
                "VMs that no record names are left: a record that cannot be read may. They end when its sandbox is deleted"
            );
        }
        Ok(this)
    }

    /// Shows the sandbox of a record that cannot be read, and touches nothing of it.
    fn set_aside(&self, damaged: &Damaged, claim: Option<Claim>) {
        let Damaged { id, tenant, reason, .. } = damaged;
        tracing::error!(
            sandbox = id,
            reason,
            "the record of a sandbox is damaged: its VM and its files are left as they are"
        );
        if let (Some(info), Ok(tenant)) = (aside::described(damaged), tenant.parse()) {
            self.put_aside((info, damaged.place.clone()), tenant, claim);
        }
    }

    /// Discards records of which not even can be read which sandbox they are of, or whose: nobody could see or delete it, so it would stay, and
    /// keep VMs alive, for ever. The rest, and those that cannot be discarded now.
    async fn discard_unreachable(&self, damaged: Vec<Damaged>) -> Vec<Damaged> {
        let mut rest = Vec::new();
        for one in damaged {
            if one.id.parse::<SandboxId>().is_ok() && one.tenant.parse::<Tenant>().is_ok() {
                rest.push(one);
                continue;
            }
            let Damaged { place, id, tenant, reason, template, process } = &one;
            match self.around.store.discard(place).await {
                Ok(_) => tracing::error!(
                    id,
                    tenant,
                    reason,
                    ?template,
                    ?process,
                    "a damaged record says no longer which sandbox it is of, or whose: it is discarded, and its VM and files with it"
                ),
                Err(error) => {
                    tracing::error!(id, tenant, %error, "a damaged record that is nobody's cannot be discarded: the next start tries again");
                    rest.push(one);
                }
            }
        }
        rest
    }

    /// `place`: that of its record in the store.
    fn put_aside(&self, (info, place): (SandboxInfo, String), tenant: Tenant, claim: Option<Claim>) {
        let Ok(template) = info.template.as_str().parse() else { return };
        let (task, inbox) = mpsc::unbounded_channel();
        let (spare_since, spare) = watch::channel(None);
        let (seen, view) = watch::channel(info.clone());
        let id = info.id.clone();
        let aside = Aside::new(self.around.clone(), (info, place), claim, inbox);
        self.write().insert(id.clone(), Handle { task, tenant, template, spare, view });
        let tasks = Arc::clone(&self.tasks);
        let counted = metrics::Counted::new(State::Failed);
        tokio::spawn(async move {
            aside.live().await;
            tasks.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
            drop((spare_since, seen, counted));
        });
    }

    /// Begins to take over the sandbox of a record.
    fn adopt(&self, record: Record, template: TemplateName) {
        let machines = Arc::clone(&self.around.machines);
        let process = process_of(&record);
        let adoption = Adoption::by(|given_up| async move {
            match process {
                Some(process) => machines.adopt(process, given_up).await,
                None => Ok(None),
            }
        });
        // Until its VM has answered it is taken for what its record says.
        let (seems, _) = Session::adopt(&record, true, limits(record.facts().lifetime), Timestamp::now());
        self.spawn(record, seems, First::Adoption(adoption), template, Source::Pool(Duration::ZERO), Vec::new());
    }

    async fn left_behind(&self) -> Result<(Vec<Record>, Vec<Damaged>), StoreError> {
        let (mut records, mut damaged, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let page = self.around.store.list(Query { after, limit: PAGE, ..Query::default() }).await?;
            damaged.extend(page.damaged);
            records.extend(page.records);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok((records, damaged)),
            }
        }
    }
}

/// The process of the VM that a record names.
pub(in super::super) fn process_of(record: &Record) -> Option<Process> {
    record.facts().owner.as_ref()?.process
}

/// Removes what no record needs: half made, or of a sandbox that has been resumed or killed.
fn sweep(folder: &Path, records: &[Record], damaged: &[Damaged]) -> io::Result<()> {
    stasis_cow::sweep(folder).map_err(io::Error::other)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let needed =
            records.iter().any(|record| record.facts().saved.is_some() && entry.file_name() == record.id().as_str());
        let perhaps = damaged.iter().any(|one| [&one.id, &one.place].iter().any(|id| entry.file_name() == id.as_str()));
        if !needed && !perhaps {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

//! The task that owns a pool: what happens to it, and what it does about that.

mod hot;
mod room;

use std::{
    future::poll_fn,
    sync::Arc,
    task::Poll,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use stasis_pool_api::{BoundBy, NoCapacity, PoolSpec, PoolStatus, StartKind, Timestamp};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use super::{
    Answer, Flow, Grant, Hot, Message, Refusal, Shared, Tenancy, Ticket, Urgency,
    backoff::Backoff,
    load::OfferedLoad,
    peak::Peak,
    rate::RefillRate,
    stock::{Ready, Stock, Waiter, count},
    target::{Moment, Target, target},
};
use crate::{
    admission::{Charge, Full, Place, Reservation},
    metrics::{self, Eviction, Gauges, Stage},
    restore::{Paused, RestoreError, Slot},
    template::Template,
};

pub(super) fn start(
    template: Arc<Template>,
    settings: PoolSpec,
    tenancy: Tenancy,
    flow: Flow,
    shared: Arc<Shared>,
) -> mpsc::UnboundedSender<Message> {
    let (sender, inbox) = mpsc::unbounded_channel();
    let actor = Actor {
        changes: shared.admission.changes(),
        shortages: shared.admission.shortages_of_memory(),
        template,
        settings,
        tenancy,
        flow,
        shared,
        outbox: sender.downgrade(),
        stock: Stock::default(),
        turns_asked: 0,
        last_use: Instant::now(),
        rate: RefillRate::default(),
        load: OfferedLoad::new(Instant::now()),
        peak: Peak::default(),
        backoff: Backoff::default(),
        outgrown: false,
        last_failure: None,
        no_capacity: None,
        has_no_room_to_run: false,
        place: None,
        spare: 0,
    };
    tokio::spawn(actor.live(inbox));
    sender
}

impl Waiter for oneshot::Sender<Answer> {
    fn has_left(&self) -> bool {
        self.is_closed()
    }
}

struct Actor {
    template: Arc<Template>,
    settings: PoolSpec,
    tenancy: Tenancy,
    flow: Flow,
    shared: Arc<Shared>,
    outbox: mpsc::WeakUnboundedSender<Message>,
    changes: watch::Receiver<()>,
    shortages: watch::Receiver<()>,
    stock: Stock<Paused, Hot, oneshot::Sender<Answer>>,
    /// Turns to make a VM hot that were asked for.
    turns_asked: u32,
    /// When it was claimed from, or given a VM back, last.
    last_use: Instant,
    rate: RefillRate,
    load: OfferedLoad,
    peak: Peak,
    backoff: Backoff,
    /// The template is of another kind of host, and the node knows.
    outgrown: bool,
    last_failure: Option<String>,
    no_capacity: Option<NoCapacity>,
    /// The node has no room for another VM that runs.
    has_no_room_to_run: bool,
    /// Where it stands in the line for memory, while a claim waits for a VM that is to be started.
    place: Option<Place>,
    /// So many of the paused VMs, from the front, go when memory is short.
    spare: usize,
}

impl Actor {
    async fn live(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        // Not after being asked to spare memory: what is refused now would have all pools ask each other again.
        let mut may_refill = true;
        let gauges = Gauges::of(&self.tenancy.tenant, &self.template.info().spec.name);
        loop {
            let target = self.target();
            self.settle(&target);
            if std::mem::replace(&mut may_refill, true) {
                self.refill(&target);
            }
            gauges.set(&self.status());
            if self.tenancy.is_begun_by_claim && self.stock.may_end(&target) {
                break;
            }
            let holds_until = target.holds_for.map(|so_long| Instant::now() + so_long);
            let hot = self.stock.hot();
            let spoiled = poll_fn(|cx| match hot.iter().position(|vm| vm.poll_spoiled(cx)) {
                Some(place) => Poll::Ready(place),
                None => Poll::Pending,
            });
            let ask_at = hot.iter().filter_map(Hot::ask_at).min();
            tokio::select! {
                message = inbox.recv() => match message {
                    Some(Message::Drain) | None => break,
                    Some(message) => {
                        let is_claim = matches!(message, Message::Claim(..));
                        self.handle(message);
                        if is_claim {
                            // Whoever got a VM goes on first; what the claim starts comes after that.
                            tokio::task::yield_now().await;
                        }
                    }
                },
                place = spoiled => self.spoiled(place),
                _ = self.shortages.changed() => {
                    // Somebody on the node is short of memory: it keeps no more than the target.
                    self.peak = Peak::default();
                    may_refill = false;
                }
                _ = self.changes.changed(), if self.no_capacity.is_some() || self.has_no_room_to_run => {
                    self.has_no_room_to_run = false;
                }
                () = after(self.backoff.until()) => self.backoff.over(),
                () = after(holds_until) => {}
                () = after(ask_at) => self.ask(),
            }
        }
        // From here on a claim hears that this pool has ended, be it one that came before it was seen, and begins another.
        inbox.close();
        metrics::draining(self.left_behind(&mut inbox));
        // Ready VMs end with the actor; what is claimed or being restored ends by itself. The series of a pool that is gone say so.
        gauges.set(&PoolStatus::without_vms(self.tenancy.tenant, self.template.info(), self.settings));
    }

    /// VMs that are claimed still. Their leases say no more when they end than that this pool has.
    fn left_behind(&self, inbox: &mut mpsc::UnboundedReceiver<Message>) -> u32 {
        let unheard = std::iter::from_fn(|| inbox.try_recv().ok());
        let back = unheard.filter(|message| matches!(message, Message::Released | Message::Untouched(_))).count();
        self.stock.claimed.saturating_sub(count(back))
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Claim(limit, reply) => {
                self.last_use = Instant::now();
                self.load.claimed(self.last_use);
                if let Err(full) = self.can_serve_within(limit) {
                    metrics::refused(full.what.resource);
                    // It may have gone away.
                    let _ = reply.send(Err(Refusal::Full(full)));
                } else if let Some((to, vm)) = self.stock.claim(reply) {
                    let start = match vm {
                        Ready::Hot(_) => {
                            // It has stood long enough to be of use.
                            self.backoff.succeeded();
                            StartKind::Hot
                        }
                        Ready::Paused(_) => StartKind::Paused,
                    };
                    self.grant(to, vm, start);
                }
            }
            Message::Restored(result) => {
                self.stock.restoring -= 1;
                self.load.ends(Instant::now());
                self.restored(*result);
            }
            Message::Untouched(vm) => self.untouched(*vm),
            // Whoever asked may have gone away, and has then had it done in vain.
            Message::MakeRoom(bytes, reply) => drop(reply.send(self.make_room(bytes))),
            Message::Used(slot) => {
                // It still counts as claimed, but will not for long.
                let keep = self.keep(&self.target_with(self.stock.claimed.saturating_sub(1)));
                self.used(*slot, keep);
            }
            Message::Rewound(result) => {
                self.stock.rewinding -= 1;
                self.load.ends(Instant::now());
                self.rewound(*result);
            }
            Message::MayWarm(turns) => self.may_warm(turns),
            Message::Warmed(result) => {
                self.stock.warming -= 1;
                match *result {
                    Ok(hot) => {
                        let took = hot.awake.claim + hot.awake.repair;
                        metrics::took_until_ready(&self.template.info().spec.name, Stage::Repair, took);
                        self.became_ready(Ready::Hot(hot), StartKind::Hot);
                    }
                    Err(error) => self.failed(error.to_string()),
                }
            }
            Message::Asked(life, answer) => self.asked(life, answer),
            Message::Released => self.released(),
            Message::Proved => self.backoff.succeeded(),
            Message::Unproved(why) => self.failed(why),
            Message::Died => {
                let ended = self.stock.bury();
                metrics::evicted(&self.template.info().spec.name, Eviction::Ended, ended as u64);
                if ended > 0 {
                    self.failed("the process of a VM that stood ready ended".into());
                }
            }
            Message::Set(settings) => {
                self.flow.weigh(settings.weight);
                self.settings = *settings;
            }
            Message::Status(reply) => drop(reply.send(self.status())),
            Message::Exhausted(reply) => {
                // Behind those who still wait; its own place it has just given up.
                self.stock.tidy();
                let position = self.stock.waiting() + 1;
                drop(reply.send((self.status(), self.rate.retry_after(position))));
            }
            Message::Drain => {}
        }
    }

    fn released(&mut self) {
        self.last_use = Instant::now();
        self.peak.released();
        self.stock.claimed -= 1;
    }

    /// Gives up what is too much, after whatever happened.
    fn settle(&mut self, target: &Target) {
        self.stock.tidy();
        if target.bound_by == Some(BoundBy::Idle) {
            self.peak = Peak::default();
        }
        let keep = self.keep(target);
        let surplus = std::iter::from_fn(|| self.stock.beyond(keep)).count();
        self.mark_spare(target);
        metrics::evicted(&self.template.info().spec.name, Eviction::Surplus, surplus as u64);
        while let Some(Hot { awake, .. }) = self.stock.beyond_hot(target.hot) {
            self.used(awake.slot, self.keep(target));
        }
        self.warm(target);
        let is_busy = self.stock.restoring + self.stock.rewinding + self.stock.waiting() > 0;
        self.rate.busy(is_busy, Instant::now());
    }

    fn target(&self) -> Target {
        self.target_with(self.stock.claimed)
    }

    fn target_with(&self, in_use: u32) -> Target {
        let utc = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let is_used = in_use + self.stock.waiting() > 0;
        let idle = if is_used { Duration::ZERO } else { self.last_use.elapsed() };
        let vm_mib = self.template.info().spec.memory_mib();
        let is_begun_by_claim = self.tenancy.is_begun_by_claim;
        target(&self.settings, Moment { utc, idle, in_use, vm_mib, is_begun_by_claim })
    }

    fn restored(&mut self, result: Result<Paused, RestoreError>) {
        let name = &self.template.info().spec.name;
        match result {
            Ok(vm) => {
                metrics::restored(name, Ok(vm.took));
                self.watch(&vm.slot);
                self.became_ready(Ready::Paused(vm), StartKind::Cold);
            }
            Err(error) => {
                let mut why = error.to_string();
                if error.is_incompatible() {
                    why.push_str(": it is being built again here");
                    if !std::mem::replace(&mut self.outgrown, true) {
                        // A node that stops builds nothing.
                        let _ = self.shared.outgrown.send(Arc::clone(&self.template));
                    }
                }
                metrics::restored(name, Err(&why));
                if let Some(waiter) = self.stock.next_waiter() {
                    // It may have gone away.
                    let _ = waiter.send(Err(Refusal::Failed(why.clone())));
                }
                self.failed(why);
            }
        }
    }

    fn became_ready(&mut self, vm: Ready<Paused, Hot>, start: StartKind) {
        self.rate.became_ready(Instant::now());
        if let Some((waiter, vm)) = self.stock.arrived(vm) {
            self.grant(waiter, vm, start);
        }
    }

    /// Rewinds a used VM, if there may be a use for it.
    fn used(&mut self, slot: Slot, keep: u32) {
        if !self.stock.wants_back(keep) {
            return; // it ends here
        }
        self.stock.rewinding += 1;
        self.load.begins(Instant::now());
        let shared = Arc::clone(&self.shared);
        self.begin(async move { Message::Rewound(Box::new(shared.source.rewind(slot).await)) });
    }

    /// VMs to keep ready: the target, and as many as were lately used at once, as long as there is memory. What is beyond costs more than
    /// a restore will.
    fn keep(&self, target: &Target) -> u32 {
        let surplus = if self.shared.admission.is_roomy() { self.peak.claimed() } else { 0 };
        (target.ready + surplus).min(target.most)
    }

    fn rewound(&mut self, result: Result<Paused, RestoreError>) {
        let name = &self.template.info().spec.name;
        match result {
            Ok(vm) => {
                metrics::rewound(name, Ok(vm.took));
                self.became_ready(Ready::Paused(vm), StartKind::Paused);
            }
            // It is gone; a restore will take its place.
            Err(error) => metrics::rewound(name, Err(&error.to_string())),
        }
    }

    fn failed(&mut self, why: String) {
        self.backoff.failed();
        self.last_failure = Some(why);
    }

    fn grant(&mut self, to: oneshot::Sender<Answer>, vm: Ready<Paused, Hot>, start: StartKind) {
        self.peak.claimed_now(self.stock.claimed);
        // Whoever asks holds the pool's address; if nobody does any more, the VM ends here.
        let Some(pool) = self.outbox.upgrade() else { return };
        // A claimer that has just gone away drops the grant, which comes back as untouched.
        let _ = to.send(Ok(Grant::new(vm, start, Ticket::new(pool))));
    }

    fn watch(&self, slot: &Slot) {
        let end = slot.vmm.end();
        self.begin(async move {
            end.await;
            Message::Died
        });
    }

    /// Work that is told of when it is done. A pool that has ended wants none of it: what it brought ends there.
    fn begin(&self, work: impl Future<Output = Message> + Send + 'static) {
        let outbox = self.outbox.clone();
        tokio::spawn(async move {
            let message = work.await;
            if let Some(pool) = outbox.upgrade() {
                let _ = pool.send(message);
            }
        });
    }

    /// Starts what is missing: enough for the target and for everyone who waits, as far as the limits allow.
    fn refill(&mut self, target: &Target) {
        self.no_capacity = None;
        if self.outgrown {
            // No restore can succeed until the template has been built again, in a pool of its own. Whoever waits hears that.
            let why = self.last_failure.clone().unwrap_or_default();
            while let Some(waiter) = self.stock.next_waiter() {
                let _ = waiter.send(Err(Refusal::Failed(why.clone())));
            }
            return;
        }
        let asker = self.place.take();
        let unasked = if self.backoff.until().is_none() { target.ready } else { 0 };
        for _ in 0..self.stock.missing(unasked, target.most) {
            match self.shared.admission.admit_at(asker.as_ref(), self.template.paused_charge()) {
                Ok(reservation) => self.start_restore(reservation),
                Err(full) => {
                    self.no_capacity = Some(full.what);
                    break;
                }
            }
        }
        self.stand_in_line(asker);
        let waiting = usize::try_from(self.stock.waiting()).unwrap_or(usize::MAX);
        self.shared.restores.hurry(&self.flow, waiting);
    }

    fn start_restore(&mut self, reservation: Reservation) {
        self.stock.restoring += 1;
        self.load.begins(Instant::now());
        let (shared, template) = (Arc::clone(&self.shared), Arc::clone(&self.template));
        let waiting = self.stock.waiting() >= self.stock.restoring;
        let urgency = if waiting { Urgency::Claim } else { Urgency::Background };
        // It stands in line from now on, so that the next claim finds it there.
        let turn = self.shared.restores.take(&self.flow, urgency);
        self.begin(async move {
            let begun = Instant::now();
            let _turn = turn.await;
            metrics::took_until_ready(&template.info().spec.name, Stage::Turn, begun.elapsed());
            Message::Restored(Box::new(shared.source.restore(template, reservation).await))
        });
    }

    /// Whether somebody who comes now and may wait so long can hope for a VM; else why not, and when to try again. Only the start that it
    /// would need can be too late: what is ready or on its way is its own, and where nothing more may be started it waits for what is used.
    fn can_serve_within(&mut self, limit: Duration) -> Result<(), Full> {
        self.stock.tidy();
        let in_line = self.shared.restores.waiting_of(&self.flow);
        let Some(nth) = self.stock.needs_start(in_line, self.target().most) else { return Ok(()) };
        if self.stock.claimed == 0 {
            // Nobody of its own will give it room.
            let running = Charge::running(self.template.info());
            self.shared.admission.foresee(&running, self.stock.unserved() + 1, self.place.as_ref())?;
        }
        let late = self.shared.restores.standing(&self.flow, nth).is_done_within(limit);
        // VMs that others have come back, at the rate at which this pool got some ready lately.
        let returns = self.stock.claimed > 0 && self.rate.serves_within(self.stock.waiting() + 1, limit);
        if returns || self.outgrown { Ok(()) } else { late }
    }

    fn status(&self) -> PoolStatus {
        let target = self.target();
        let bound_by = match target.bound_by {
            _ if self.no_capacity.is_some() => Some(BoundBy::NodeMemory),
            None if self.backoff.until().is_some() => Some(BoundBy::Failures),
            bound_by => bound_by,
        };
        PoolStatus {
            target: target.ready,
            ready: count(self.stock.paused().len()),
            hot: count(self.stock.hot().len()),
            restoring: self.stock.restoring,
            rewinding: self.stock.rewinding,
            warming: self.stock.warming,
            claimed: self.stock.claimed,
            waiting: self.stock.waiting(),
            ready_pids: self.stock.paused().iter().map(|vm| vm.slot.vmm.pid()).collect(),
            bound_by,
            refill_per_s: self.rate.per_second(),
            offered_load: self.load.vms(Instant::now()),
            next_change_at: target.holds_for.map(|so_long| Timestamp::now().plus(so_long)),
            last_failure: self.last_failure.clone(),
            no_capacity: self.no_capacity,
            ..PoolStatus::without_vms(self.tenancy.tenant.clone(), self.template.info(), self.settings.clone())
        }
    }
}

/// Ends then; never, if there is no such time.
async fn after(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then).await,
        None => std::future::pending().await,
    }
}

//! Claim against retire, model-checked: shuttle tries thousands of schedules of the same threads, and calls a thread that waits for ever a
//! deadlock. The stock and the target are the real ones; the mailbox ends as tokio's does: it takes nothing more, and what is in it is dropped.

use std::{collections::VecDeque, sync::atomic::AtomicUsize};

use shuttle::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread,
};
use stasis_pool_api::PoolSpec;

use super::super::{
    stock::{Ready, Stock, Vm, Waiter},
    target::{Moment, target},
};

/// Schedules of each kind.
const SCHEDULES: usize = 2_000;

#[derive(Debug)]
struct Machine {
    id: u64,
    owned: Arc<AtomicBool>,
}

impl Vm for Machine {
    fn lives(&self) -> bool {
        true
    }
}

impl Waiter for mpsc::Sender<Machine> {
    fn has_left(&self) -> bool {
        false
    }
}

enum Message {
    Claim(mpsc::Sender<Machine>),
    Used(Machine),
    Restored(Machine),
    /// So much time has passed that an idle pool ends.
    TimePasses,
}

/// Messages, and whether it takes more. (Shuttle's own channel keeps what is in it when its receiver goes.)
#[derive(Default)]
struct Mailbox {
    messages: Mutex<(VecDeque<Message>, bool)>,
    came: Condvar,
}

impl Mailbox {
    fn send(&self, message: Message) -> Result<(), Message> {
        let mut messages = self.messages.lock().unwrap();
        if messages.1 {
            return Err(message);
        }
        messages.0.push_back(message);
        self.came.notify_one();
        Ok(())
    }

    fn receive(&self) -> Message {
        let mut messages = self.messages.lock().unwrap();
        loop {
            match messages.0.pop_front() {
                Some(message) => return message,
                None => messages = self.came.wait(messages).unwrap(),
            }
        }
    }

    fn close(&self) {
        self.messages.lock().unwrap().1 = true;
        // Another may be sent to meanwhile, and hears of it; this is a point at which others may run.
        let left = std::mem::take(&mut self.messages.lock().unwrap().0);
        drop(left);
    }
}

/// The node: the address of the tenant's pool, if it has one, and how many were begun.
#[derive(Default)]
struct Registry {
    pool: Mutex<Option<Arc<Mailbox>>>,
    begun: AtomicU64,
    ended: AtomicU64,
    restored: AtomicU64,
    actors: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Registry {
    /// The pool; another than `ended`, which is known to have ended.
    fn pool(self: &Arc<Self>, ended: Option<u64>) -> (u64, Arc<Mailbox>) {
        let mut pool = self.pool.lock().unwrap();
        let begun = self.begun.load(SeqCst);
        if let Some(there) = pool.as_ref().filter(|_| ended != Some(begun)) {
            return (begun, Arc::clone(there));
        }
        let address: Arc<Mailbox> = Arc::default();
        let (registry, inbox) = (Arc::clone(self), Arc::clone(&address));
        let actor = thread::spawn(move || live(&registry, &inbox));
        self.actors.lock().unwrap().push(actor);
        *pool = Some(Arc::clone(&address));
        (self.begun.fetch_add(1, SeqCst) + 1, address)
    }
}

/// What the actor does, with nothing but claims, returns and time.
fn live(registry: &Arc<Registry>, inbox: &Mailbox) {
    let settings = PoolSpec { min: 1, max: 2, scale_to_zero_after: Some(PoolSpec::TENANT_IDLE), ..PoolSpec::default() };
    let mut stock: Stock<Machine, Machine, mpsc::Sender<Machine>> = Stock::default();
    let mut idle = std::time::Duration::ZERO;
    loop {
        let is_used = stock.claimed + stock.waiting() > 0;
        if is_used {
            idle = std::time::Duration::ZERO;
        }
        let moment = Moment { utc: 0, idle, in_use: stock.claimed, vm_mib: 72, is_begun_by_claim: true };
        let wanted = target(&settings, moment);
        while stock.beyond(wanted.ready).is_some() {}
        for _ in 0..stock.missing(wanted.ready, wanted.most) {
            stock.restoring += 1;
            let machine = Machine { id: registry.restored.fetch_add(1, SeqCst), owned: Arc::default() };
            assert!(inbox.send(Message::Restored(machine)).is_ok());
        }
        if stock.may_end(&wanted) {
            registry.ended.fetch_add(1, SeqCst);
            return inbox.close();
        }
        let granted = match inbox.receive() {
            Message::Claim(waiter) => {
                idle = std::time::Duration::ZERO;
                stock.claim(waiter)
            }
            Message::Used(machine) => {
                idle = std::time::Duration::ZERO;
                stock.claimed -= 1;
                assert!(machine.owned.swap(false, SeqCst), "VM {} came back twice", machine.id);
                if stock.wants_back(wanted.ready) { stock.arrived(Ready::Paused(machine)) } else { None }
            }
            Message::Restored(machine) => {
                stock.restoring -= 1;
                stock.arrived(Ready::Paused(machine))
            }
            Message::TimePasses => {
                idle += PoolSpec::TENANT_IDLE;
                None
            }
        };
        if let Some((waiter, Ready::Paused(machine))) = granted {
            waiter.send(machine).unwrap();
        }
    }
}

/// A claim from its beginning to its end; it must get a VM that nobody else has.
fn claim(registry: &Arc<Registry>) {
    let mut ended = None;
    loop {
        let (number, pool) = registry.pool(ended);
        let (reply, answer) = mpsc::channel();
        if pool.send(Message::Claim(reply)).is_ok()
            && let Ok(machine) = answer.recv()
        {
            assert!(!machine.owned.swap(true, SeqCst), "VM {} has two owners", machine.id);
            assert!(pool.send(Message::Used(machine)).is_ok(), "a pool ended although one of its VMs was claimed");
            return;
        }
        ended = Some(number);
    }
}

#[test]
fn a_claim_that_meets_the_end_of_its_pool_is_served_by_the_next_one() {
    // How many schedules had a pool that ended, and a claim that began another. Not part of the model, so they are std's.
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    static BEGUN_AGAIN: AtomicUsize = AtomicUsize::new(0);
    let model = || {
        let registry = Arc::new(Registry::default());
        let claims: Vec<_> = (0..3)
            .map(|_| {
                let registry = Arc::clone(&registry);
                thread::spawn(move || (0..2).for_each(|_| claim(&registry)))
            })
            .collect();
        let time = {
            let registry = Arc::clone(&registry);
            thread::spawn(move || {
                for _ in 0..4 {
                    let pool = registry.pool.lock().unwrap().clone();
                    // It may have ended, or never begun.
                    let _ = pool.map(|pool| pool.send(Message::TimePasses));
                    thread::yield_now();
                }
            })
        };
        for one in claims {
            one.join().unwrap();
        }
        time.join().unwrap();
        ENDED.fetch_add(usize::from(registry.ended.load(SeqCst) > 0), SeqCst);
        BEGUN_AGAIN.fetch_add(usize::from(registry.begun.load(SeqCst) > 1), SeqCst);
        // Those that live end with their time.
        if let Some(pool) = registry.pool.lock().unwrap().take() {
            let _ = pool.send(Message::TimePasses);
        }
        let actors = std::mem::take(&mut *registry.actors.lock().unwrap());
        actors.into_iter().for_each(|actor| actor.join().unwrap());
    };
    shuttle::check_random(model, SCHEDULES);
    shuttle::check_pct(model, SCHEDULES, 3);
    let tried = (ENDED.load(SeqCst), BEGUN_AGAIN.load(SeqCst));
    println!("schedules in which a pool ended, and in which a claim began another: {tried:?}");
    assert!(tried.0 > SCHEDULES / 20 && tried.1 > SCHEDULES / 20, "hardly tried: {tried:?}");
}

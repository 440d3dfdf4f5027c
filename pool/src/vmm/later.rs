//! What comes of a request after its answer, as an event: how a live snapshot ended, and what a guest says to its order.

use std::os::fd::OwnedFd;

use stasis_vmm_api::{LiveReport, Reply, Request, Secret};
use tokio::sync::oneshot;

use super::{Vmm, VmmError, told};

/// Who waits for an event that its request's answer announces.
pub(super) enum Awaits {
    Live(oneshot::Sender<Result<LiveReport, String>>),
    Answer(oneshot::Sender<String>),
    Rest(oneshot::Sender<()>),
}

/// Who waits now. An event that nobody waits for is nobody's: it belongs to an earlier life.
#[derive(Default)]
pub(super) struct Later {
    live: Option<oneshot::Sender<Result<LiveReport, String>>>,
    answer: Option<oneshot::Sender<String>>,
    rest: Option<oneshot::Sender<()>>,
}

impl Later {
    /// A request was answered.
    pub(super) fn replied(&mut self, reply: &Reply, awaits: Option<Awaits>) {
        match (reply, awaits) {
            (Reply::Done, Some(Awaits::Live(waiting))) => self.live = Some(waiting),
            (Reply::Done, Some(Awaits::Rest(waiting))) => self.rest = Some(waiting),
            (Reply::Ordered, Some(Awaits::Answer(waiting))) => self.answer = Some(waiting),
            _ => {}
        }
    }

    pub(super) fn live_ended(&mut self, outcome: Result<LiveReport, String>) {
        drop(self.live.take().map(|waiting| waiting.send(outcome)));
    }

    pub(super) fn rests(&mut self) {
        // Whoever waited may have gone on without.
        let _ = self.rest.take().map(|waiting| waiting.send(()));
    }

    pub(super) fn answered(&mut self, text: String) {
        drop(self.answer.take().map(|waiting| waiting.send(text)));
    }
}

/// An order that is on its way into a guest's wake page.
pub(crate) struct Ordered<'a> {
    vmm: &'a Vmm,
    reply: oneshot::Receiver<Reply>,
    answer: oneshot::Receiver<String>,
}

/// An order that a guest will find when it runs.
pub(crate) struct Found<'a> {
    vmm: &'a Vmm,
    answer: oneshot::Receiver<String>,
}

impl<'a> Ordered<'a> {
    /// Whether it is there. None: this guest waits at no page.
    pub(crate) async fn found(self) -> Result<Option<Found<'a>>, VmmError> {
        match told(self.reply.await.map_err(|_| self.vmm.gone())?)? {
            Reply::Ordered => Ok(Some(Found { vmm: self.vmm, answer: self.answer })),
            Reply::NoWakePage => Ok(None),
            other => Err(VmmError::Protocol(Box::new(other))),
        }
    }
}

impl Found<'_> {
    /// What the guest has answered, which may be anything.
    pub(crate) async fn answer(self) -> Result<String, VmmError> {
        self.answer.await.map_err(|_| self.vmm.gone())
    }
}

impl Vmm {
    /// Waits until the guest of a booted VM next says that it rests.
    pub(crate) async fn rests(&self) -> Result<(), VmmError> {
        let (rest, said) = oneshot::channel();
        self.begin(Request::AwaitRest, Vec::new(), Some(Awaits::Rest(rest))).await?.done().await?;
        said.await.map_err(|_| self.gone())
    }

    /// Puts an order into the wake page of a VM in which nothing has run since its restore or rewind, if its guest waits at one.
    pub(crate) async fn order_wake(&self, text: String) -> Result<Ordered<'_>, VmmError> {
        let (awaits, answer) = oneshot::channel();
        let request = Request::Order { text: Secret(text) };
        let pending = self.begin(request, Vec::new(), Some(Awaits::Answer(awaits))).await?;
        Ok(Ordered { vmm: self, reply: pending.answer, answer })
    }

    /// Has a live snapshot taken ([`Request::LiveSnapshot`], with its files), and waits until it is whole.
    pub(crate) async fn live_snapshot(&self, files: Vec<OwnedFd>) -> Result<LiveReport, VmmError> {
        let (live, ended) = oneshot::channel();
        self.begin(Request::LiveSnapshot, files, Some(Awaits::Live(live))).await?.done().await?;
        match ended.await {
            Ok(outcome) => outcome.map_err(VmmError::Failed),
            Err(_) => Err(self.gone()),
        }
    }
}

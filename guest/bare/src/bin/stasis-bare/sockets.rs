//! The vsock device: packets out and in.

use alloc::vec::Vec;

use stasis_bare::packet::{Flow, HEADER, Header, Op};
use virtio_drivers::{
    Error,
    device::common::Feature,
    transport::{Transport as _, mmio::MmioTransport},
};

use crate::ring::{Area, Ring};

/// Longest piece that is sent at once.
pub(crate) const PIECE: usize = 16 * 1024;
/// Of a packet that comes, with its head.
const INCOMING: usize = 4096;
const OUTGOING: usize = HEADER + PIECE;

/// The device's queues.
const RX: u16 = 0;
const TX: u16 = 1;

static RX_AREA: Area<INCOMING> = Area::new();
static TX_AREA: Area<OUTGOING> = Area::new();

pub(crate) struct Sockets {
    transport: MmioTransport<'static>,
    /// This guest's address.
    address: u64,
    incoming: Ring<INCOMING>,
    outgoing: Ring<OUTGOING>,
}

impl Sockets {
    /// Sets up the device, of which there is one.
    pub(crate) fn new(mut transport: MmioTransport<'static>) -> Result<Self, Error> {
        let features = Feature::VERSION_1 | Feature::RING_EVENT_IDX;
        if transport.begin_init(features) != features {
            return Err(Error::Unsupported);
        }
        // In halves, as the standard has drivers read it.
        let half = |at| transport.read_config_space::<u32>(at).map(u64::from);
        let address = transport.read_consistent(|| Ok(half(0)? | half(4)? << 32))?;
        let mut incoming = Ring::new(&RX_AREA, RX, &mut transport);
        let outgoing = Ring::new(&TX_AREA, TX, &mut transport);
        incoming.offer_all();
        transport.finish_init();
        let mut sockets = Self { transport, address, incoming, outgoing };
        sockets.tell();
        Ok(sockets)
    }

    /// The next packet that has come, and what it carries.
    pub(crate) fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        loop {
            let packet = self.incoming.receive(|bytes| {
                let header = Header::decode(bytes)?;
                let end = HEADER.checked_add(usize::try_from(header.length).ok()?)?;
                Some((header, bytes.get(HEADER..end)?.to_vec()))
            })?;
            // One that is no packet of a stream is nobody's.
            if packet.is_some() {
                return packet;
            }
        }
    }

    /// Sends a packet without bytes.
    pub(crate) fn say(&mut self, op: Op, flow: &mut Flow) {
        self.send(op, &[], flow);
    }

    /// Sends bytes, at most [`PIECE`] and at most what the peer has room for.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8], flow: &mut Flow) {
        self.send(Op::Data, bytes, flow);
    }

    /// The device hears of what was sent, and of what room there is, once for all of it.
    pub(crate) fn tell(&mut self) {
        self.outgoing.tell(&mut self.transport);
        self.incoming.tell(&mut self.transport);
    }

    /// The next packet brings an interrupt. False: there is one already.
    pub(crate) fn listen(&self) -> bool {
        self.incoming.listen()
    }

    fn send(&mut self, op: Op, bytes: &[u8], flow: &mut Flow) {
        let header = flow.header(self.address, op, u32::try_from(bytes.len()).unwrap_or_default()).encode();
        self.outgoing.send([&header, bytes], &mut self.transport);
    }
}

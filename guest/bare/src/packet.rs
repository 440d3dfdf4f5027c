//! Packets of virtio-vsock (virtio 1.2, section 5.10.6), and what a connection has counted of them.

/// Bytes of a header.
pub const HEADER: usize = 44;
/// The host's address.
pub const HOST: u64 = 2;
/// `VIRTIO_VSOCK_TYPE_STREAM`.
const STREAM: u16 = 1;
/// Neither sends nor receives any more: both hints of a shutdown.
const BOTH_WAYS: u32 = 3;

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// A connection is wanted.
    Request = 1,
    /// It is taken.
    Response = 2,
    /// It is no more, or never was.
    Reset = 3,
    /// One side says, by its flags, that it sends or receives no more.
    Shutdown = 4,
    /// Bytes.
    Data = 5,
    /// How much its sender has room for.
    CreditUpdate = 6,
    /// It would like to know.
    CreditRequest = 7,
}

/// A packet's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Address and port of who sent it.
    pub source: (u64, u32),
    /// Of who is to have it.
    pub destination: (u64, u32),
    /// Bytes behind the head.
    pub length: u32,
    /// None of what this guest knows.
    pub op: Option<Op>,
    /// Of a shutdown.
    pub flags: u32,
    /// Room that the sender has for this connection, in bytes.
    pub room: u32,
    /// Bytes that it has taken out of that so far, modulo 2³².
    pub taken: u32,
}

/// One connection, as it counts. Numbers are modulo 2³², as the device's are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The port at the host's end.
    pub peer: u32,
    /// Ours.
    pub own: u32,
    room: u32,
    sent: u32,
    taken: u32,
    peer_room: u32,
    peer_taken: u32,
}

impl Op {
    fn of(number: u16) -> Option<Self> {
        let all = [
            Self::Request,
            Self::Response,
            Self::Reset,
            Self::Shutdown,
            Self::Data,
            Self::CreditUpdate,
            Self::CreditRequest,
        ];
        all.into_iter().find(|op| *op as u16 == number)
    }
}

impl Header {
    /// As it stands in memory.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut rest = bytes.as_mut_slice();
        let mut put = |field: &[u8]| {
            let (place, behind) = core::mem::take(&mut rest).split_at_mut(field.len());
            place.copy_from_slice(field);
            rest = behind;
        };
        put(&self.source.0.to_le_bytes());
        put(&self.destination.0.to_le_bytes());
        put(&self.source.1.to_le_bytes());
        put(&self.destination.1.to_le_bytes());
        put(&self.length.to_le_bytes());
        put(&STREAM.to_le_bytes());
        put(&self.op.map_or(0, |op| op as u16).to_le_bytes());
        put(&self.flags.to_le_bytes());
        put(&self.room.to_le_bytes());
        put(&self.taken.to_le_bytes());
        bytes
    }

    /// The head of a packet; none if that is shorter, or of another kind than a stream's.
    #[must_use]
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER] = packet.first_chunk()?;
        let wide = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let word = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes);
        let half = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u16::from_le_bytes);
        let header = Self {
            source: (wide(0), word(16)),
            destination: (wide(8), word(20)),
            length: word(24),
            op: Op::of(half(30)),
            flags: word(32),
            room: word(36),
            taken: word(40),
        };
        (half(28) == STREAM).then_some(header)
    }
}

impl Flow {
    /// A connection between these ports, with so many bytes of room at this end.
    #[must_use]
    pub fn new(peer: u32, own: u32, room: u32) -> Self {
        Self { peer, own, room, sent: 0, taken: 0, peer_room: 0, peer_taken: 0 }
    }

    /// What the peer says of itself.
    pub fn heard(&mut self, header: &Header) {
        self.peer_room = header.room;
        self.peer_taken = header.taken;
    }

    /// So many bytes that came have been read.
    pub fn took(&mut self, length: u32) {
        self.taken = self.taken.wrapping_add(length);
    }

    /// How much the peer has room for.
    #[must_use]
    pub fn peer_has_room_for(&self) -> u32 {
        self.peer_room.saturating_sub(self.sent.wrapping_sub(self.peer_taken))
    }

    /// The head of a packet that this guest, at `address`, sends on it, with so many bytes behind it.
    pub fn header(&mut self, address: u64, op: Op, length: u32) -> Header {
        self.sent = self.sent.wrapping_add(length);
        Header {
            source: (address, self.own),
            destination: (HOST, self.peer),
            length,
            op: Some(op),
            flags: if op == Op::Shutdown { BOTH_WAYS } else { 0 },
            room: self.room,
            taken: self.taken,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_lies_in_memory_as_the_standard_has_it() {
        let header = Header {
            source: (3, 0x1111_2222),
            destination: (HOST, 0x3333_4444),
            length: 5,
            op: Some(Op::Data),
            flags: 7,
            room: 0x0102_0304,
            taken: 9,
        };
        let bytes = header.encode();
        let expected = [
            3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x22, 0x22, 0x11, 0x11, 0x44, 0x44, 0x33, 0x33, 5, 0, 0, 0,
            1, 0, 5, 0, 7, 0, 0, 0, 4, 3, 2, 1, 9, 0, 0, 0,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(Header::decode(&bytes), Some(header));
    }

    #[test]
    fn what_is_no_stream_s_packet_has_no_head() {
        let mut bytes = Flow::new(1, 2, 3).header(3, Op::Request, 0).encode();
        assert_eq!(Header::decode(&bytes[..HEADER - 1]), None);
        bytes[28] = 2;
        assert_eq!(Header::decode(&bytes), None);
        bytes[28] = 1;
        bytes[30] = 8;
        assert_eq!(Header::decode(&bytes).unwrap().op, None);
    }

    #[test]
    fn a_peer_s_room_is_what_it_said_less_what_is_under_way() {
        let mut flow = Flow::new(1, 2, 3);
        let peer = |taken| Header { room: 100, taken, ..Flow::new(2, 1, 0).header(HOST, Op::CreditUpdate, 0) };
        assert_eq!(flow.peer_has_room_for(), 0);
        flow.heard(&peer(0));
        flow.header(3, Op::Data, 60);
        assert_eq!(flow.peer_has_room_for(), 40);
        flow.heard(&peer(50));
        assert_eq!(flow.peer_has_room_for(), 90);
        // One that says less than it has taken so far is not believed to have any.
        flow.heard(&Header { room: 5, ..peer(50) });
        assert_eq!(flow.peer_has_room_for(), 0);
    }

    #[test]
    fn counts_go_round() {
        let mut flow = Flow::new(1, 2, 3);
        flow.sent = u32::MAX - 1;
        let says = flow.header(3, Op::Response, 0);
        flow.heard(&Header { room: 10, taken: u32::MAX - 1, ..says });
        flow.header(3, Op::Data, 4);
        assert_eq!((flow.sent, flow.peer_has_room_for()), (2, 6));
    }
}

//! Follows the frames that a client sends (RFC 9113, section 4.1), to count those that serve no request: hyper limits how much
//! memory each kind of frame can take, but not how many there are. Anything that is not valid is left to hyper.

const PREFACE_LEN: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
const HEADER_LEN: usize = 9;

const DATA: u8 = 0;
const END_STREAM: u8 = 1;

/// Data frames with less are counted, unless they are the end of a body: each takes more memory than it has bytes.
const DATA_BYTES_MIN: usize = 64;

pub(super) struct Frames {
    /// How many bytes have to be skipped before the next frame.
    skip: usize,
    header: [u8; HEADER_LEN],
    /// How much of the header has arrived.
    header_len: usize,
}

impl Frames {
    pub(super) fn new() -> Self {
        Self {
            skip: PREFACE_LEN,
            header: [0; HEADER_LEN],
            header_len: 0,
        }
    }

    /// The next bytes of the connection. Returns how many frames start in them that serve no request, headers included: a request
    /// is paid back when it has its response.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) -> u32 {
        let mut count = 0;
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let missing = &mut self.header[self.header_len..];
            let len = missing.len().min(bytes.len());
            missing[..len].copy_from_slice(&bytes[..len]);
            self.header_len += len;
            bytes = &bytes[len..];
            if self.header_len == HEADER_LEN {
                self.header_len = 0;
                let [high, middle, low, kind, flags, ..] = self.header;
                let len = u32::from_be_bytes([0, high, middle, low]) as usize;
                self.skip = len;
                let is_useful = kind == DATA && (len >= DATA_BYTES_MIN || flags & END_STREAM != 0);
                count += u32::from(!is_useful);
            }
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_counted_however_they_are_split() {
        let frame = |kind: u8, flags: u8, len: u8| {
            let header = [0, 0, len, kind, flags, 0, 0, 0, 1];
            [&header[..], &vec![0; usize::from(len)]].concat()
        };
        let bytes = [
            &vec![b'x'; PREFACE_LEN][..],
            &frame(4, 0, 6),          // settings
            &frame(1, 4, 40),         // headers
            &frame(0, 0, 200),        // data
            &frame(0, 0, 1),          // too little of it
            &frame(0, END_STREAM, 0), // its end
            &frame(3, 0, 4),          // reset
            &frame(9, 0, 0),          // an empty continuation
        ]
        .concat();
        for piece in 1..bytes.len() {
            let mut frames = Frames::new();
            let counts = bytes.chunks(piece).map(|piece| frames.follow(piece));
            assert_eq!(counts.sum::<u32>(), 5, "{piece}");
        }
    }
}

//! Bodies of requests: read within limits, unpacked within limits; and answers packed as the client likes.

use std::io::{Read, Write};
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http_body_util::BodyExt;

use crate::frontend::{Frontend, Reserved};
use crate::infer::shown;
use crate::refusal::Refusal;

/// What is read of a body that was refused, so that the client sees the answer instead of a reset.
const DRAIN_BYTES: usize = 8 << 20;
const DRAIN_TIME: std::time::Duration = std::time::Duration::from_secs(2);
/// Answers below this size are not worth packing.
const MIN_PACKED: usize = 512;

/// Pieces in which a body is unpacked.
const PIECE: usize = 64 << 10;

/// A body in memory that is accounted for.
pub(crate) struct Received {
    pub bytes: Bytes,
    _memory: Reserved,
}

/// Reads and unpacks a body.
///
/// # Errors
/// It is larger than the limit, comes too slowly, ends early, or is packed in a way that is unknown or damaged; memory is short.
pub(crate) async fn receive(frontend: &Arc<Frontend>, headers: &HeaderMap, body: Body) -> Result<Received, Refusal> {
    let mut body = body;
    match collect(frontend, headers, &mut body).await {
        Ok((bytes, memory)) => match Packing::of_body(headers)? {
            None => Ok(Received { bytes, _memory: memory }),
            Some(packing) => {
                let frontend = frontend.clone();
                let unpacking = tokio::task::spawn_blocking(move || unpack(&frontend, packing, &bytes, memory));
                unpacking.await.map_err(|_| Refusal::internal("the body could not be unpacked"))?
            }
        },
        Err(refusal) => {
            let _ = tokio::time::timeout(DRAIN_TIME, discard(&mut body)).await;
            Err(refusal)
        }
    }
}

async fn discard(body: &mut Body) {
    let mut seen = 0;
    while seen < DRAIN_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        seen += frame.data_ref().map_or(0, Bytes::len);
    }
}

async fn collect(frontend: &Frontend, headers: &HeaderMap, body: &mut Body) -> Result<(Bytes, Reserved), Refusal> {
    let limit = frontend.options.max_body;
    let too_large = || Refusal::too_large(format!("the body is larger than {limit} bytes"));
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let read = async {
        let mut memory = Reserved::default();
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Refusal::invalid("the body ends early or is malformed"))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(too_large());
            }
            frontend.reserve(&mut memory, bytes.len() + data.len())?;
            bytes.extend_from_slice(&data);
        }
        Ok((bytes.freeze(), memory))
    };
    let timeout = frontend.options.body_timeout;
    let slow = || Refusal::slow(format!("the body did not come within {:.1} s", timeout.as_secs_f64()));
    tokio::time::timeout(timeout, read).await.unwrap_or_else(|_| Err(slow()))
}

fn unpack(frontend: &Frontend, packing: Packing, bytes: &[u8], mut memory: Reserved) -> Result<Received, Refusal> {
    let limit = frontend.options.max_body;
    let mut reader: Box<dyn Read + '_> = match packing {
        Packing::Gzip => Box::new(GzDecoder::new(bytes)),
        Packing::Deflate => Box::new(ZlibDecoder::new(bytes)),
    };
    let (mut unpacked, mut piece) = (Vec::new(), vec![0; PIECE]);
    loop {
        let read = reader.read(&mut piece).map_err(|e| Refusal::invalid(format!("the body cannot be unpacked: {e}")))?;
        let size = unpacked.len() + read;
        if size > limit {
            return Err(Refusal::too_large(format!("the unpacked body is larger than {limit} bytes")));
        }
        frontend.reserve(&mut memory, bytes.len() + size)?;
        match piece.get(..read) {
            None | Some([]) => return Ok(Received { bytes: unpacked.into(), _memory: memory }),
            Some(read) => unpacked.extend_from_slice(read),
        }
    }
}

/// Bytes of an answer, and the memory that is set aside for them.
struct Held {
    bytes: Bytes,
    _memory: Arc<Reserved>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// `bytes`, which hold `memory` until the last of them is sent or dropped.
pub(crate) fn hold(bytes: Bytes, memory: &Arc<Reserved>) -> Bytes {
    Bytes::from_owner(Held { bytes, _memory: memory.clone() })
}

/// How bodies and answers may be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    Gzip,
    Deflate,
}

impl Packing {
    pub fn name(self) -> &'static str {
        match self {
            Packing::Gzip => "gzip",
            Packing::Deflate => "deflate",
        }
    }

    /// How a body is packed, if it is.
    ///
    /// # Errors
    /// Its coding is unknown.
    pub fn of_body(headers: &HeaderMap) -> Result<Option<Packing>, Refusal> {
        let coding = headers.get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?").trim().to_ascii_lowercase());
        match coding.as_deref() {
            None | Some("" | "identity") => Ok(None),
            Some("gzip" | "x-gzip") => Ok(Some(Packing::Gzip)),
            Some("deflate") => Ok(Some(Packing::Deflate)),
            Some(other) => {
                let coding = shown(other);
                Err(Refusal::encoding(format!("Content-Encoding {coding:?} is unknown; there are gzip and deflate")))
            }
        }
    }

    /// What the client accepts, if it names any.
    pub fn accepted(headers: &HeaderMap) -> Option<Packing> {
        let accepted = headers.get(header::ACCEPT_ENCODING)?.to_str().ok()?;
        let mut codings = accepted.split(',').filter_map(|coding| {
            let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
            let refused = weight.trim().strip_prefix("q=").is_some_and(|q| q.trim().parse() == Ok(0.0));
            (!refused).then(|| name.trim().to_ascii_lowercase())
        });
        codings.find_map(|name| match name.as_str() {
            "gzip" => Some(Packing::Gzip),
            "deflate" => Some(Packing::Deflate),
            _ => None,
        })
    }

    /// Packs an answer, if that is worth it.
    pub fn pack(self, bytes: &[u8]) -> Option<Vec<u8>> {
        if bytes.len() < MIN_PACKED {
            return None;
        }
        match self {
            Packing::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(bytes).and_then(|()| encoder.finish()).ok()
            }
            Packing::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(bytes).and_then(|()| encoder.finish()).ok()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_coding_that_is_known_and_accepted_counts() {
        let accepted = |text: &str| {
            let headers = [(header::ACCEPT_ENCODING, text.parse().unwrap())].into_iter().collect();
            Packing::accepted(&headers)
        };
        assert_eq!(accepted("br, gzip;q=0.5, deflate"), Some(Packing::Gzip));
        assert_eq!(accepted("gzip;q=0, deflate"), Some(Packing::Deflate));
        assert_eq!(accepted("identity"), None);
    }

    #[test]
    fn packed_answers_unpack() {
        let bytes = vec![7; 4096];
        let mut unpacked = Vec::new();
        GzDecoder::new(&Packing::Gzip.pack(&bytes).unwrap()[..]).read_to_end(&mut unpacked).unwrap();
        assert_eq!(unpacked, bytes);
        unpacked.clear();
        ZlibDecoder::new(&Packing::Deflate.pack(&bytes).unwrap()[..]).read_to_end(&mut unpacked).unwrap();
        assert_eq!(unpacked, bytes);
        assert_eq!(Packing::Gzip.pack(b"short"), None);
    }
}

//! What happens, as one JSON object per line of stderr.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Writes `event` with its time, in seconds since 1970. A log that nobody reads any more is no reason to stop.
pub(crate) fn log(event: &str, mut fields: Value) {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let mut line = json!({ "time": (time * 1e3).round() / 1e3, "event": event });
    if let (Some(line), Some(fields)) = (line.as_object_mut(), fields.as_object_mut()) {
        line.append(fields);
    }
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

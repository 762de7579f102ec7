//! Errors as clients see them: in the words of their requests, and without the operator's paths.

use meganeura::Error;
use meganeura::data::{DataError, TARGET_INPUT};
use meganeura::live::LiveError;
use meganeura::runtime::SessionError;
use meganeura_serve::Refusal;

/// An error that is the client's own, one of the moment, or one of the server.
pub fn refusal(error: Error) -> Refusal {
    let message = error.to_string();
    if error.device().is_some() {
        return Refusal::unavailable(message);
    }
    match error {
        Error::Compile(_) => Refusal::too_large(message),
        Error::Live(LiveError::Busy) => Refusal::busy(message),
        Error::Live(LiveError::NoTraining | LiveError::NoFolder) => Refusal::unimplemented(message),
        Error::Live(LiveError::ForeignCheckpoint { difference, .. }) => {
            Refusal::internal(format!("the newest checkpoint belongs to another model: {difference}")).with_detail(message)
        }
        Error::Write(error) => {
            Refusal::internal(format!("cannot {} a checkpoint: {}", error.action, error.source)).with_detail(message)
        }
        Error::Session(
            SessionError::InputType { .. }
            | SessionError::UnknownInput { .. }
            | SessionError::MissingInput(_)
            | SessionError::DuplicateInput(_)
            | SessionError::Word(_),
        ) => Refusal::invalid(message),
        Error::Session(_) | Error::Parameter(_) | Error::Verify(_) | Error::Graph(_) => Refusal::internal(message),
        _ => Refusal::invalid(in_request(&error).unwrap_or(message)),
    }
}

/// What is wrong with the fields of a request, where the error speaks of files and flags instead.
fn in_request(error: &Error) -> Option<String> {
    Some(match error {
        Error::Import { source, .. } => source.to_string(),
        Error::Data(error) => return of_data(error),
        Error::Target { source, .. } => format!("targets: {source}"),
        Error::Class { sample, value, classes, .. } => {
            format!("targets, sample {sample}: {value} is not one of the model's {classes} classes")
        }
        Error::UnknownOutput { .. } => format!("output: {error}"),
        Error::AmbiguousOutput { known } => format!("output is missing: the model has several, {}", known.join(", ")),
        Error::Loss(error) => format!("loss: {error}"),
        Error::Optimizer(error) => format!("optimizer: {error}"),
        _ => return None,
    })
}

fn of_data(error: &DataError) -> Option<String> {
    Some(match error {
        DataError::Missing { looked_for, .. } if looked_for.iter().any(|key| key == TARGET_INPUT) => {
            "targets is missing: every loss but \"output\" takes some".into()
        }
        DataError::Missing { role, .. } => format!("inputs: {role} is missing"),
        DataError::Array { array, reason, .. } => format!("{}: {reason}", field(array)),
        DataError::DType { array, found, expected, .. } => format!("{} has elements of {expected}, not {found}", field(array)),
        DataError::Shape { array, found, expected, .. } => format!("{} has shape {expected}, not {found}", field(array)),
        DataError::NoSampleAxis { array, .. } => format!("{} is a scalar: the first axis is that of the samples", field(array)),
        DataError::SampleCount { array, found, other, expected, .. } => {
            format!("{} holds {found} samples, {} holds {expected}", field(array), field(other))
        }
        DataError::Empty { .. } => "inputs: there is no sample".into(),
        _ => return None,
    })
}

/// Where an array of a training request stands.
fn field(array: &str) -> String {
    if array == TARGET_INPUT { "targets".into() } else { format!("inputs: {array:?}") }
}

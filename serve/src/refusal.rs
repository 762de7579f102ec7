//! [`Refusal`]: why a request gets no answer, in the words of both protocols.

use axum::http::StatusCode;
use tonic::Code;

/// What kind of thing is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// The request is malformed or does not fit the model.
    Invalid,
    Unauthorized,
    NotFound,
    Method,
    /// A page of another site sent it through somebody's browser.
    Forbidden,
    /// The client was too slow to send its request.
    Slow,
    TooLarge,
    /// The coding of the body is none that is known.
    Encoding,
    /// The server has as much to do as it takes on.
    Busy,
    /// A request like this one, but later, may succeed.
    Unavailable,
    /// The server is at fault.
    Internal,
    /// The operator did not enable it, or nobody wrote it.
    Unimplemented,
}

impl RefusalKind {
    /// Its HTTP status and its gRPC code.
    fn codes(self) -> (StatusCode, Code) {
        match self {
            RefusalKind::Invalid => (StatusCode::BAD_REQUEST, Code::InvalidArgument),
            RefusalKind::Unauthorized => (StatusCode::UNAUTHORIZED, Code::Unauthenticated),
            RefusalKind::NotFound => (StatusCode::NOT_FOUND, Code::NotFound),
            RefusalKind::Method => (StatusCode::METHOD_NOT_ALLOWED, Code::Unimplemented),
            RefusalKind::Forbidden => (StatusCode::FORBIDDEN, Code::PermissionDenied),
            RefusalKind::Slow => (StatusCode::REQUEST_TIMEOUT, Code::DeadlineExceeded),
            RefusalKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, Code::ResourceExhausted),
            RefusalKind::Encoding => (StatusCode::UNSUPPORTED_MEDIA_TYPE, Code::Unimplemented),
            RefusalKind::Busy => (StatusCode::TOO_MANY_REQUESTS, Code::ResourceExhausted),
            RefusalKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable),
            RefusalKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, Code::Internal),
            RefusalKind::Unimplemented => (StatusCode::NOT_IMPLEMENTED, Code::Unimplemented),
        }
    }

    pub(crate) fn status(self) -> StatusCode {
        self.codes().0
    }

    pub(crate) fn code(self) -> Code {
        self.codes().1
    }
}

/// Why a request gets no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub kind: RefusalKind,
    /// What is wrong, where, and what to do.
    pub message: String,
    /// What only the operator may know; it stands in the log.
    pub detail: Option<String>,
}

impl Refusal {
    #[must_use]
    pub fn with_detail(self, detail: impl Into<String>) -> Self {
        Refusal { detail: Some(detail.into()), ..self }
    }
}

macro_rules! constructors {
    ($($name:ident $kind:ident),* $(,)?) => {
        impl Refusal {
            $(pub fn $name(message: impl Into<String>) -> Self {
                Refusal { kind: RefusalKind::$kind, message: message.into(), detail: None }
            })*
        }
    };
}

constructors! {
    invalid Invalid,
    unauthorized Unauthorized,
    not_found NotFound,
    method Method,
    forbidden Forbidden,
    slow Slow,
    too_large TooLarge,
    encoding Encoding,
    busy Busy,
    unavailable Unavailable,
    internal Internal,
    unimplemented Unimplemented,
}

impl From<Refusal> for tonic::Status {
    fn from(refusal: Refusal) -> Self {
        tonic::Status::new(refusal.kind.code(), refusal.message)
    }
}

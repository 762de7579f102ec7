//! What handlers of both protocols share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::{HeaderMap, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::engine::EngineHandle;
use crate::infer::shown;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::refusal::Refusal;
use crate::served::ModelCard;

/// The one version of every model that clients can name. Versions of weights are told in answers.
pub(crate) const VERSION: &str = "1";
/// Memory is counted in units of so many bytes.
const MEMORY_UNIT: usize = 1 << 10;

pub(crate) struct Frontend {
    pub options: Options,
    pub cards: Vec<ModelCard>,
    pub engine: EngineHandle,
    pub metrics: Arc<Metrics>,
    memory: Arc<Semaphore>,
    draining: AtomicBool,
}

/// Memory for a body or an answer, until it is dropped.
#[derive(Default)]
pub(crate) struct Reserved(Option<OwnedSemaphorePermit>);

impl Frontend {
    pub fn new(options: Options, cards: Vec<ModelCard>, engine: EngineHandle, metrics: Arc<Metrics>) -> Self {
        let memory = (options.max_memory / MEMORY_UNIT).clamp(1, u32::MAX as usize);
        let memory = Arc::new(Semaphore::new(memory.min(Semaphore::MAX_PERMITS)));
        Frontend { options, cards, engine, metrics, memory, draining: AtomicBool::new(false) }
    }

    /// The number of a model by its name and version.
    pub fn find(&self, name: &str, version: &str) -> Result<usize, Refusal> {
        let found = self.cards.iter().position(|card| card.name == name);
        let found = found.ok_or_else(|| {
            let known: Vec<&str> = self.cards.iter().map(|card| card.name.as_str()).collect();
            Refusal::not_found(format!("there is no model {:?}; there are {}", shown(name), known.join(", ")))
        })?;
        match version {
            "" | VERSION => Ok(found),
            _ => Err(Refusal::not_found(format!("model {name:?} has the version {VERSION} only, not {:?}", shown(version)))),
        }
    }

    pub fn card(&self, model: usize) -> Result<&ModelCard, Refusal> {
        self.cards.get(model).ok_or_else(|| Refusal::internal("a model without number"))
    }

    /// Makes `reserved` hold `bytes` at least.
    ///
    /// # Errors
    /// All memory is in use.
    pub fn reserve(&self, reserved: &mut Reserved, bytes: usize) -> Result<(), Refusal> {
        let held = reserved.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.div_ceil(MEMORY_UNIT).saturating_sub(held);
        if more == 0 {
            return Ok(());
        }
        let units = u32::try_from(more).unwrap_or(u32::MAX);
        let Ok(permit) = self.memory.clone().try_acquire_many_owned(units) else {
            return Err(Refusal::busy("the memory for requests and answers is in use; try again later"));
        };
        match &mut reserved.0 {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }

    /// Whether a request may pass.
    ///
    /// # Errors
    /// The operator set a token and the request does not bear it.
    pub fn authorize(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(token) = &self.options.token else { return Ok(()) };
        let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let bearer = bearer.and_then(|value| value.strip_prefix(b"Bearer ").or(value.strip_prefix(b"bearer ")));
        match bearer {
            Some(given) if equal(given, token.as_bytes()) => Ok(()),
            Some(_) => Err(Refusal::unauthorized("the token is wrong")),
            None => Err(Refusal::unauthorized("a token is needed: Authorization: Bearer TOKEN")),
        }
    }

    pub fn is_ready(&self) -> bool {
        !self.draining.load(Ordering::Acquire)
    }

    /// From now on the server is not ready.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }
}

/// Whether two secrets are equal, in a time that depends on their lengths only.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let difference = a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b));
    a.len() == b.len() && difference == 0
}

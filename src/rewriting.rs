//! Whether this process lets the compiler's rules rewrite the graphs of models.

use std::sync::atomic::{AtomicBool, Ordering};

use meganeura_codegen::{CompileOptions, raise};
use meganeura_import::Specialized;

static REWRITES: AtomicBool = AtomicBool::new(true);

/// Makes the models of this process run and train as their files and the rules of differentiation say, or, as at first, rewritten by what the
/// compiler knows to be equal. Without rewriting they are slower, take more memory, and agree to rounding: where they do not, a rule is wrong.
pub fn rewrite_graphs(rewrite: bool) {
    REWRITES.store(rewrite, Ordering::Relaxed);
}

/// Options of the compiler as the process chose.
pub fn compile_options() -> CompileOptions {
    let options = CompileOptions::default();
    CompileOptions { saturate: options.saturate.filter(|_| REWRITES.load(Ordering::Relaxed)), ..options }
}

/// Finds composites in what an exporter wrote. Here alone: what is built later, a loss, gradients and updates, says what it is.
pub(crate) fn raised(specialized: Specialized) -> Specialized {
    match REWRITES.load(Ordering::Relaxed) {
        true => Specialized { graph: raise(&specialized.graph), ..specialized },
        false => specialized,
    }
}

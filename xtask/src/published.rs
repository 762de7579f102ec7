//! Published models that tests run: fetched from their packages, never part of the checkout.

use std::path::Path;

use crate::shell::{Invocation, XtaskError, step};

/// Which models, from which packages, with which digests.
const TABLE: &str = "fixtures/published/models.csv";
const FOLDER: &str = ".corpus/published";

/// Fetches what is missing. Models that cannot be fetched are named, and their tests say that they skip.
pub fn fetch(python: &Path) -> Result<(), XtaskError> {
    step("published models", Invocation::new(python).arguments(&["xtask/fetch_published.py", TABLE, FOLDER]))?;
    Ok(())
}

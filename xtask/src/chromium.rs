//! Finds Chromium, which looks at the server's page in a test, or installs it.

use std::path::PathBuf;

use crate::shell::{Invocation, XtaskError, find_program};
use crate::system;

/// Its names on various systems.
const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// Where Apple's systems have it.
const APPLICATIONS: [&str; 2] =
    ["/Applications/Chromium.app/Contents/MacOS/Chromium", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"];

/// The program of a Chromium that runs.
pub fn ensure() -> Result<PathBuf, XtaskError> {
    let usable = || {
        let found = PROGRAMS.into_iter().filter_map(find_program).chain(APPLICATIONS.map(PathBuf::from));
        // Where the package is another system's, the program only says so.
        found.into_iter().find(|program| Invocation::new(program).arguments(&["--version"]).succeeds())
    };
    if let Some(program) = usable() {
        return Ok(program);
    }
    let remedy = "install Chromium or Chrome, so that `chromium` or `google-chrome` runs";
    system::install("Chromium", "chromium", remedy)?;
    usable().ok_or_else(|| XtaskError::Missing { what: "Chromium".into(), remedy: remedy.into() })
}
